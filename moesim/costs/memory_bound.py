"""How long does a kernel that only moves bytes take? (bytes over a class's share of the HBM peak, plus a fixed latency)"""

from __future__ import annotations

import numpy as np

from moesim.costs.base import Parameter

KINDS = ("elementwise", "norm", "permute", "quantise", "loss", "optimizer", "embedding", "copy")
PARAMETERS = tuple(Parameter(kind, "share of HBM peak", 0.05, 1.0, 0.66) for kind in KINDS) + (
    Parameter("peak", "bytes/s", 1e11, 5e13, 8e12, "hbm"),
    Parameter("fixed_s", "s", 5e-7, 1e-4, 3e-6),
)


def seconds(params, kind_index, moved):
    """Seconds to read and write ``moved`` bytes; kind_index into KINDS. Positive and monotone in moved."""
    share = np.array([params[kind] for kind in KINDS])[kind_index]
    return params["fixed_s"] + moved / (share * params["peak"])
