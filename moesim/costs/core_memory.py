"""How long does a CPU core take to stream through an op's bytes? (fast while they fit a cache, slower beyond)"""

from __future__ import annotations

from moesim.costs.base import Parameter
from moesim.costs.core import beyond

PARAMETERS = (
    Parameter("bandwidth", "bytes/s", 1e7, 1e12, 1e10, "hbm"),
    Parameter("cached", "1", 1.0, 30.0, 2.0),
    Parameter("cache_bytes", "bytes", 1e4, 1e9, 2e6),
    Parameter("fixed_s", "s", 1e-8, 1e-2, 5e-6),
)


def seconds(params, moved):
    """Seconds to read and write ``moved`` bytes: at ``cached`` times the bandwidth while far below cache_bytes, at the bandwidth far
    beyond; in between, what one more byte costs grows smoothly from one to the other. Positive and monotone in moved."""
    fast = params["bandwidth"] * params["cached"]
    return params["fixed_s"] + moved / fast + beyond(moved, params["cache_bytes"]) * (1.0 / params["bandwidth"] - 1.0 / fast)
