"""How long does one attention kernel take on one CPU core? (two products for each block of scores, and a softmax between them)"""

from __future__ import annotations

import numpy as np

from moesim.costs.base import Parameter

PARAMETERS = (
    Parameter("rate", "FLOP/s", 1e8, 2e13, 5e10, "flops"),
    Parameter("score_s", "s a score", 1e-13, 1e-7, 1e-9, "1/flops"),
    Parameter("query_s", "s a query", 1e-10, 1e-4, 1e-7, "1/flops"),
    Parameter("head_s", "s a head", 1e-9, 1e-2, 5e-6),
    Parameter("fixed_s", "s", 1e-8, 1e-2, 3e-5),
)


def seconds(params, batch, heads, q_len, pairs, qk_dim, v_dim, backward):
    """Seconds of softmax(QK^T)V forward, or of its backward (five products where the forward has two); arrays broadcast.

    pairs: attended (query, key) pairs of one head of one sequence. score_s: exponential and scaling of one score, whatever the head's
    width; query_s: what a row of queries costs beside its scores (the part of a diagonal block that the mask throws away, the rescaling);
    head_s: of one head of one sequence. Positive and monotone in batch, heads, q_len, pairs and widths.
    """
    products = 2.0 * pairs * (qk_dim + v_dim) * np.where(backward, 2.5, 1.0) / params["rate"]
    return params["fixed_s"] + batch * heads * (params["head_s"] + q_len * params["query_s"] + pairs * params["score_s"] + products)
