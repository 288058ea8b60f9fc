"""What do collectives and dispatchers cost on one GPU's links? (measured curves inside a domain, fitted legs across)"""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from calibration import constants
from moesim.costs import collectives, dispatch
from moesim.profile import MeasuredCurve, Term


def curves(gpu: str, rows, newest_only: bool = True):
    """Single-node nccl-tests curves of one NCCL release: kind and members -> bytes and seconds."""
    own = [r for r in rows if r.kind == "collective" and r.gpu == gpu and r.shape["nodes"] == 1 and "aiconfigurator" in r.source]
    release = max(r.kernel for r in own)
    points = defaultdict(dict)
    for r in own:
        if r.kernel == release:
            points[r.dtype, int(r.shape["gpus"])][r.shape["bytes"]] = r.seconds
    return tuple(
        MeasuredCurve(kind=kind, members=members, bytes=tuple(sorted(point)), seconds=tuple(point[b] for b in sorted(point)))
        for (kind, members), point in sorted(points.items())
    )


def terms(gpu: str, rows, sheet):
    source = (constants.NCCL_TUNING,)
    params = {p.name: p.start for p in collectives.PARAMETERS}
    for transport in ("ib", "efa"):
        yield Term(name=f"network.{transport}", kind="collectives", parameters=params, provenance="assumed", sigma_log=0.2, sources=source)
    for kind in collectives.KINDS:
        yield Term(name=f"{kind}.nvlink", kind="collectives", provenance="measured", sigma_log=0.06, sources=source)
        yield Term(name=f"{kind}.nic", kind="collectives", provenance="extrapolated", sigma_log=0.25, sources=source)
    params = {p.name: p.start for p in dispatch.PARAMETERS}
    for name in dispatch.DISPATCHERS[1:]:
        for leg in ("", ".nic"):
            yield Term(name=f"dispatch.{name}{leg}", kind="dispatch", parameters=params, provenance="extrapolated", sigma_log=0.25, sources=source)
