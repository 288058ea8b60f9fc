"""How long does one dense GEMM take on one CPU core? (the cost of the call, then a blocked product whose result may not fit a cache)"""

from __future__ import annotations

from moesim.costs.base import Parameter
from moesim.costs.core import PRODUCT, beyond, product_seconds

PARAMETERS = (
    *PRODUCT,
    Parameter("stream", "bytes/s", 1e8, 1e13, 2e10, "hbm"),
    Parameter("cache_bytes", "bytes", 1e5, 1e9, 4e6),
    Parameter("fixed_s", "s", 1e-8, 1e-2, 1e-5),
)


def seconds(params, m, n, k, width):
    """Seconds of C[m, n] = A[m, k] @ B[k, n] of ``width`` bytes an element, the dispatch of the call by the thread that computes included.

    What an element of C costs (rounded to bf16, or added into FP32) is in ramp_depth: each form is a term of its own. stream: bytes/s at
    which operands and result move, as far as they exceed cache_bytes. Positive and monotone in m, n, k.
    """
    spilled = beyond(width * m * n, params["cache_bytes"])
    return params["fixed_s"] + product_seconds(params, m, n, k) + spilled / params["stream"]
