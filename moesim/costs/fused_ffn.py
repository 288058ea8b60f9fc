"""How long does a fused gated expert FFN forward burst take? (routing, permute, two grouped GEMMs, activation, combine)

The public B300, B200 and H100 MoE tables time this whole, all experts on one GPU: it is not a grouped GEMM of a training step.
"""

from __future__ import annotations

import numpy as np

from moesim.costs.base import Parameter
from moesim.costs.tiles import tile_seconds

PARAMETERS = (
    Parameter("rate", "FLOP/s", 1e13, 2e16, 1.5e15, "flops"),
    Parameter("bandwidth", "bytes/s", 5e11, 2e13, 5e12, "hbm"),
    Parameter("row_bandwidth", "bytes/s", 2e11, 2e13, 3e12, "hbm"),
    Parameter("fixed_s", "s", 1e-6, 1e-3, 5e-5),
    Parameter("skew", "1", 1e-3, 1.0, 0.1),
    Parameter("ramp_k", "elements", 0.0, 3000.0, 300.0, fitted=False),
    Parameter("small_tile", "1", 0.0, 0.6, 0.09, fitted=False),
    Parameter("quantisation", "1", 0.0, 1.0, 1.0, fitted=False),
    Parameter("sm_bandwidth", "bytes/s an SM", 1e9, 1e15, 1e14, fitted=False),
    Parameter("split_s", "s", 0.0, 1e-5, 1e-6, fitted=False),
)


def experts_reached(rows, experts, exponent):
    """Expected experts with at least one row when expert i draws a share proportional to i ** -exponent (0: every expert is
    reached as soon as there are rows enough, as balanced routing deals them)."""
    rows, experts, exponent = np.broadcast_arrays(*(np.atleast_1d(np.asarray(a, dtype=float)) for a in (rows, experts, exponent)))
    ranks = np.arange(1.0, experts.max() + 1)
    shares = np.where(ranks <= experts[:, None], ranks ** -exponent[:, None], 0.0)
    shares /= shares.sum(axis=1, keepdims=True)
    skewed = -np.expm1(-rows[:, None] * shares).sum(axis=1)
    return np.where(exponent > 0, skewed, np.minimum(rows, experts))


def seconds(params, num_sms, tokens, top_k, hidden, inter, experts, width, exponent):
    """Seconds of one forward; arrays broadcast.

    tokens: on the GPU; exponent: 0 balanced, else the power law of the synthetic routing (1.01, 1.2). Weights of the experts that
    are reached are read once. row_bandwidth: quantise, permute, activation and combine traffic of every routed row.
    Positive and monotone in tokens, hidden, inter, experts.
    """
    rows = tokens * top_k
    reached = experts_reached(rows, experts, exponent)
    per_group = np.maximum(rows / experts, 1.0)
    compute = tile_seconds(params, num_sms, per_group, 2 * inter, hidden, width, experts)
    compute = compute + tile_seconds(params, num_sms, per_group, hidden, inter, width, experts)
    memory = 3.0 * reached * hidden * inter * width / params["bandwidth"]
    traffic = rows * (hidden * (4.0 + width) + inter * (6.0 + width)) / params["row_bandwidth"]
    kernel = (compute**3 + memory**3) ** (1 / 3)
    return params["fixed_s"] + (kernel + traffic) * (1.0 + params["skew"] * exponent)
