"""How long does expert-parallel dispatch or combine take? (k copies, or one copy a node fanned out by a few SMs)"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from moesim.costs.base import Parameter, Reach

DISPATCHERS = ("alltoall", "sync_free", "dedup", "dedup_v1")
PARAMETERS = (
    Parameter("dispatch_sm_rate", "bytes/s an SM", 1e9, 1e12, 2e10, "nvlink"),
    Parameter("combine_sm_rate", "bytes/s an SM", 1e9, 1e12, 2e10, "nvlink"),
    Parameter("link_efficiency", "share of NVLink", 0.2, 1.0, 0.87),
    Parameter("relay", "share", 0.1, 1.0, 0.6),
    Parameter("copy_bytes", "bytes a copy", 1.0, 5e4, 4e3),
    Parameter("fixed_s", "s", 1e-6, 5e-4, 3e-5),
    Parameter("nic_efficiency", "share of NIC", 0.1, 1.0, 0.9),
    Parameter("network_s", "s", 1e-6, 1e-3, 6e-5),
)


class Routes(NamedTuple):
    """What one rank sends, one value an op. ``tokens`` of ``token_bytes`` each; ``copies_rank`` and ``copies_node``: copies of
    a token over distinct ranks and over distinct domains; ``load``: busiest receiver over mean."""

    tokens: np.ndarray
    token_bytes: np.ndarray
    copies_rank: np.ndarray
    copies_node: np.ndarray
    load: np.ndarray
    sms: np.ndarray
    combine: np.ndarray


def seconds(params, routes: Routes, reach: Reach):
    """(seconds, NVLink busy seconds, NIC busy seconds) of a device-side dispatcher; arrays, one value an op.

    The NVLink leg is limited by what ``sms`` SMs copy and by the link, in series; the NIC leg by the rank's own NIC; the
    two are pipelined, as well as those of a collective.
    ``relay``: share of the SMs' rate left for the NVLink leg while some of them feed the NIC.
    ``copy_bytes``: what handling one copy costs beside its bytes (metadata, signals).
    Positive, monotone in tokens and token_bytes, never faster than either wire.
    """
    inside, outside = reach.inside.astype(float), reach.outside.astype(float)
    per_sm = np.where(routes.combine, params["combine_sm_rate"], params["dispatch_sm_rate"])
    link = reach.nvlink * params["link_efficiency"]
    per_sm = np.where(outside > 1, per_sm * params["relay"], per_sm)
    copy_rate = 1.0 / (1.0 / (routes.sms * per_sm) + 1.0 / link)
    copies = routes.tokens * routes.copies_rank * routes.load * (inside - 1) / inside
    nv_bytes = copies * routes.token_bytes
    nic_bytes = routes.tokens * routes.token_bytes * routes.copies_node * routes.load * (outside - 1) / outside
    nv = copies * (routes.token_bytes + params["copy_bytes"]) / copy_rate
    nic = nic_bytes / (reach.nic * params["nic_efficiency"])
    far = np.where(outside > 1, params["network_s"] + reach.latency, 0.0)
    total = params["fixed_s"] + far + (nv**3 + nic**3) ** (1 / 3)
    alone = inside * outside <= 1
    return np.where(alone, 0.0, total), nv_bytes / reach.nvlink, nic_bytes / reach.nic
