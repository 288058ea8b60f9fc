"""How long does one grouped GEMM of a training step take? (the dense kernel of the same dtype, dealt over groups)"""

from __future__ import annotations

import numpy as np

from moesim.costs.base import Parameter
from moesim.costs.tiles import droop, tile_seconds

PARAMETERS = (
    Parameter("efficiency", "1", 0.2, 1.2, 0.85),
    Parameter("wgrad_efficiency", "1", 0.1, 1.2, 0.7),
    Parameter("group_s", "s", 1e-8, 2e-5, 1e-6),
    Parameter("grouped_fixed_s", "s", 1e-6, 1e-4, 1e-5),
)


def seconds(params, num_sms, groups, rows, n, k, width, weight_grad):
    """Seconds of ``groups`` products over ``rows`` rows in all; arrays broadcast.

    params holds the dense GEMM's parameters of the same dtype and this module's. weight_grad: True where each group yields an
    [n, k] FP32 gradient (read and written) from its rows. Below 2 bytes an element the rows are quantised first, as in a dense
    GEMM. Positive and monotone in rows, n, k.
    """
    per_group = np.maximum(rows / groups, 1.0)
    forward = tile_seconds(params, num_sms, per_group, n, k, width, groups) / params["efficiency"]
    wgrad = tile_seconds(params, num_sms, n, k, per_group, width, groups) / params["wgrad_efficiency"]
    compute = droop(np.where(weight_grad, wgrad, forward), params)
    operands = np.where(weight_grad, rows * (n + k), rows * k + groups * n * k) * width
    results = np.where(weight_grad, 8.0 * groups * n * k, 2.0 * rows * n)
    kernel = (compute**3 + ((operands + results) / params["bandwidth"]) ** 3) ** (1 / 3)
    quantise = (np.asarray(width) < 2.0) * (rows * params["quant_row_s"] + rows * k * (2.0 + width) / params["quant_bandwidth"])
    return params["grouped_fixed_s"] + groups * params["group_s"] + kernel + quantise
