"""How long does one grouped GEMM take on one CPU core? (one product after another, and what each group costs)"""

from __future__ import annotations

import numpy as np

from moesim.costs.base import Parameter
from moesim.costs.core import PRODUCT, product_seconds

PARAMETERS = (
    *PRODUCT,
    Parameter("group_s", "s", 1e-9, 1e-2, 5e-6),
    Parameter("fixed_s", "s", 1e-8, 1e-2, 1e-5),
    Parameter("transposed", "1", 0.2, 5.0, 1.0),
)


def seconds(params, groups, rows, n, k, weight_grad, input_grad):
    """Seconds of ``groups`` products over ``rows`` rows in all; arrays broadcast.

    weight_grad: each group yields an [n, k] gradient from its rows. input_grad: the weights are read transposed, which costs
    ``transposed`` times as much. Positive and monotone in rows, n, k.
    """
    per_group = rows / groups
    forward = product_seconds(params, per_group, n, k) * np.where(input_grad, params["transposed"], 1.0)
    product = np.where(weight_grad, product_seconds(params, n, k, per_group), forward)
    return params["fixed_s"] + groups * (params["group_s"] + product)
