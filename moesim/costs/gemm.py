"""How long does one dense GEMM take? (tiles in waves, memory roofline, fixed latency, activation quantisation)"""

from __future__ import annotations

import numpy as np

from moesim.costs.base import Parameter
from moesim.costs.tiles import droop, tile_seconds

PARAMETERS = (
    Parameter("rate", "FLOP/s", 1e13, 2e16, 1.8e15, "flops"),
    Parameter("ramp_k", "elements", 10.0, 3000.0, 250.0),
    Parameter("small_tile", "1", 1e-3, 0.6, 0.08),
    Parameter("quantisation", "1", 1e-2, 1.0, 0.5),
    Parameter("sm_bandwidth", "bytes/s an SM", 2e10, 2e12, 2e11, "hbm"),
    Parameter("split_s", "s", 1e-8, 1e-5, 1e-6),
    Parameter("bandwidth", "bytes/s", 5e11, 2e13, 5e12, "hbm"),
    Parameter("fixed_s", "s", 5e-7, 3e-5, 3e-6),
    Parameter("droop", "1", 1e-3, 1.5, 0.2),
    Parameter("droop_s", "s", 3e-5, 5e-3, 5e-4),
    Parameter("quant_row_s", "s", 1e-11, 2e-8, 1e-9),
    Parameter("quant_bandwidth", "bytes/s", 5e11, 2e13, 5e12, "hbm"),
    Parameter("floor_s", "s", 1e-7, 1e-3, 1e-4),
)


def seconds(params, num_sms, m, n, k, width, out_bytes):
    """Seconds of C[m, n] = A[m, k] @ B[k, n]; arrays broadcast.

    width: bytes an element of A and B in the multiply; below 2 the activations A are quantised from bf16 first (read 2 bytes,
    write ``width``, a row at a time) and that kernel is part of the price, as it is in the measured tables (quant_row_s 0 and
    quant_bandwidth infinite leave it out). out_bytes: bytes an
    element of C moved (2 stored in bf16, 8 read and written in FP32). ``floor_s``: host time of a kernel that a
    CUDA graph can't hold. Positive and monotone in m, n, k.
    """
    compute = droop(tile_seconds(params, num_sms, m, n, k, width), params)
    memory = (width * (m * k + n * k) + out_bytes * m * n) / params["bandwidth"]
    kernel = (compute**3 + memory**3) ** (1 / 3)
    quantise = (np.asarray(width) < 2.0) * (m * params["quant_row_s"] + m * k * (2.0 + width) / params["quant_bandwidth"])
    busy = params["fixed_s"] + kernel + quantise
    return (busy**8 + params["floor_s"] ** 8) ** (1 / 8)
