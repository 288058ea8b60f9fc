"""How long does one CPU core work at one product? (A rate for large sizes; overheads that a longer edge amortises.)

A product packs both operands into blocks that fit a cache and writes its result once: work in proportion to each face of the
[m, n, k] cuboid, beside its volume. Overheads are therefore lengths added to the edges: depth (n k is packed once whatever m is: a small m
is slow), and so on. The blocked algorithm: Goto and van de Geijn, "Anatomy of high-performance matrix multiplication" (ACM TOMS 34, 2008).
"""

from __future__ import annotations

from moesim.costs.base import Parameter

PRODUCT = (
    Parameter("rate", "FLOP/s", 1e8, 2e13, 8e10, "flops"),
    Parameter("ramp_rows", "elements", 1e-2, 1e3, 8.0),
    Parameter("ramp_columns", "elements", 1e-2, 1e3, 8.0),
    Parameter("ramp_depth", "elements", 1e-2, 1e4, 30.0),
)


def product_seconds(params, m, n, k):
    """Seconds of [m, k] @ [k, n] without what a call costs; arrays broadcast.

    ramp_rows: rows of work that packing the [k, n] operand costs; ramp_columns: the same of the [m, k] one; ramp_depth: of writing the
    [m, n] result. Positive and monotone in m, n, k.
    """
    return 2.0 * (m * n * k + params["ramp_rows"] * n * k + params["ramp_columns"] * m * k + params["ramp_depth"] * m * n) / params["rate"]


def beyond(moved, cache_bytes):
    """Bytes of ``moved`` that a cache doesn't hold: none while far below its size, all but its size far above, smoothly between."""
    return moved**2 / (moved + cache_bytes)
