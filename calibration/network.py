"""What do collectives and dispatchers cost on one GPU's links? (measured curves inside a domain, fitted legs across)"""

from __future__ import annotations

from collections import defaultdict
from typing import Sequence

import numpy as np

from calibration.clean import Row
from calibration.fit import Result, fit
from calibration.models import column, measured
from calibration.pointwise import table
from moesim.costs import collectives, dispatch
from moesim.costs.base import Reach
from moesim.costs.collectives import Curve
from moesim.pricing import expected_copies
from moesim.profile import MeasuredCurve

SIBLING = {"gb200": "b200", "gb300": "b300", "h200": "h100", "h800": "h100"}
"""Whose curves fill the member counts a GPU was never measured at: the same NVLink generation."""
NICS = {"a100": 6.25e9, "h100": 5e10, "h200": 5e10, "h800": 5e10, "b200": 5e10, "gb200": 5e10, "b300": 1e11, "gb300": 1e11}
"""NIC bytes/s a GPU of the clusters in the tables (https://github.com/stas00/ml-engineering/blob/744d01e18b/network/README.md)."""
DOMAIN = {"gb200": 72, "gb300": 72}


def transport(row: Row) -> str:
    return "efa" if "aws" in row.source or "uccl" in row.source or "ml-engineering" in row.source else "ib"


def single_domain(row: Row) -> bool:
    return row.shape["gpus"] <= DOMAIN.get(row.gpu, 8) and (row.shape["nodes"] == 1 or row.gpu in DOMAIN)


def curve_rows(gpu: str, rows: Sequence[Row]) -> list[Row]:
    """The rows of complete sweeps: one harness, several sizes of every kind and member count."""
    return [r for r in rows if r.kind == "collective" and r.gpu == gpu and r.shape["nodes"] == 1 and "aiconfigurator" in r.source]


def releases(gpu: str, rows: Sequence[Row]) -> list[str]:
    """NCCL releases with complete sweeps on this GPU, newest first."""
    def version(name):
        return [int(part) for part in name.split()[-1].split(".")]
    return sorted({r.kernel for r in curve_rows(gpu, rows)}, key=version, reverse=True)


def curves(gpu: str, rows: Sequence[Row], sheets, lend: bool = True) -> tuple[MeasuredCurve, ...]:
    """Every sweep of this GPU, and its sibling's newest where a member count is missing, what lies above the latency floor scaled by
    the ratio of NVLink rates."""
    points: dict[tuple, dict] = defaultdict(dict)
    for r in curve_rows(gpu, rows):
        points[r.kernel, r.dtype, int(r.shape["gpus"])][r.shape["bytes"]] = r.seconds
    own = [
        MeasuredCurve(kind=kind, members=members, software=release, bytes=tuple(sorted(p)), seconds=tuple(p[b] for b in sorted(p)))
        for (release, kind, members), p in sorted(points.items())
    ]
    if not (lend and gpu in SIBLING):
        return tuple(own)
    have = {(c.kind, c.members) for c in own}
    newest = releases(SIBLING[gpu], rows)[0]
    release = own[-1].software if own else newest
    lent = [c for c in curves(SIBLING[gpu], rows, sheets, lend=False) if c.software == newest and (c.kind, c.members) not in have]
    slower = sheets[SIBLING[gpu]]["nvlink"] / sheets[gpu]["nvlink"]
    return tuple(own) + tuple(carried(c, slower, release, SIBLING[gpu]) for c in lent)


def carried(curve: MeasuredCurve, slower: float, release: str, lender: str) -> MeasuredCurve:
    """A curve of another GPU: its latency floor kept, what lies above it ``slower`` times as long."""
    floor = curve.seconds[0]
    seconds = tuple(floor + (s - floor) * slower for s in curve.seconds)
    return curve.model_copy(update={"software": release, "lender": lender, "seconds": seconds})


def tables(found: Sequence[MeasuredCurve], release: str) -> dict[str, dict[int, Curve]]:
    """The form the cost model takes."""
    result: dict[str, dict[int, Curve]] = {}
    for c in found:
        if c.software == release:
            result.setdefault(c.kind, {})[c.members] = Curve(np.array(c.bytes), collectives.monotone(c.seconds))
    return result


def reach(rows: Sequence[Row], nvlink: float, nic_of=lambda row: NICS[row.gpu]) -> Reach:
    """Where the groups of these rows live: whole domains of their system."""
    inside = np.array([min(r.shape["gpus"], DOMAIN.get(r.gpu, 8)) / 1.0 for r in rows])
    outside = np.array([np.ceil(r.shape["gpus"] / i) for r, i in zip(rows, inside)])
    inside = column(rows, "gpus") / outside
    return Reach(inside, outside, np.full(len(rows), nvlink), np.array([nic_of(r) for r in rows]), np.zeros(len(rows)))


def predict_collectives(params, rows: Sequence[Row], curves_of, sheets) -> np.ndarray:
    """Seconds of multi-GPU rows of any kind; ``curves_of``: GPU -> kind -> members -> curve."""
    result = np.zeros(len(rows))
    keys = {(r.gpu, r.dtype) for r in rows}
    for gpu, kind in sorted(keys):
        at = [i for i, r in enumerate(rows) if (r.gpu, r.dtype) == (gpu, kind)]
        part = [rows[i] for i in at]
        where = reach(part, sheets[gpu]["nvlink"])
        result[at] = collectives.seconds(params, curves_of[gpu], kind, column(part, "bytes"), where)[0]
    return result


SPAN_ROWS_PRIOR = {
    "ring_efficiency": (0.8, 0.2), "all_to_all_efficiency": (0.92, 0.1), "ring_step_s": (4e-6, 0.7), "tree_step_s": (1.5e-5, 1.0),
    "all_to_all_s": (1e-4, 1.0), "decay": (0.05, 0.2),
}
"""Before any row: NCCL's own tuning constants for steps (https://github.com/NVIDIA/nccl/blob/5067397c26/src/graph/tuning.cc), NIC
shares of ib_write_bw and nccl-tests."""


def fit_span(rows: Sequence[Row], curves_of, sheets) -> Result:
    """Parameters of groups that leave the domain, over one transport."""
    fixed = {"send_s": 1e-5, "pair_efficiency": 0.83, "ring_nics": 16.0}
    return fit(lambda p: predict_collectives(p, rows, curves_of, sheets), measured(rows), collectives.PARAMETERS, fixed, prior=SPAN_ROWS_PRIOR)


def routes(rows: Sequence[Row], where: Reach) -> dispatch.Routes:
    pairs = [
        expected_copies(int(i), int(o), int(r.shape.get("experts", 256)), int(r.shape["top_k"]), None)
        for r, i, o in zip(rows, where.inside, where.outside)
    ]
    rank, node = np.array(pairs, dtype=float).T
    sms = np.array([r.shape.get("sms", 24.0) for r in rows])
    return dispatch.Routes(column(rows, "tokens"), column(rows, "hidden") * column(rows, "width"), rank, node, np.ones(len(rows)), sms, column(rows, "combine") > 0)


def predict_dispatch(params, rows: Sequence[Row], nvlink: float) -> np.ndarray:
    where = reach(rows, nvlink)
    return dispatch.seconds(params, routes(rows, where), where)[0]


def dispatch_rows(gpu: str, rows: Sequence[Row], kernel: str = "DeepEP V1") -> list[Row]:
    return [r for r in rows if r.kind == "dispatch" and r.gpu == gpu and r.kernel == kernel]


def fit_dispatch(rows: Sequence[Row], sheet, prior=None) -> Result:
    """The SM curve of a dispatcher from rows in one domain, and its NIC leg where rows leave it."""
    far = any(not single_domain(r) for r in rows)
    fixed = {} if far else {"nic_efficiency": 0.9, "network_s": 6e-5, "relay": 0.6}
    beliefs = prior or {"link_efficiency": (0.87, 0.3), "copy_bytes": (3e3, 0.5)}
    return fit(lambda p: predict_dispatch(p, rows, sheet["nvlink"]), measured(rows), dispatch.PARAMETERS, fixed, prior=beliefs)


def modern_dispatcher() -> tuple[dict[str, float], tuple[str, ...]]:
    """(parameters on B200, sources) of the current de-duplicating dispatchers. DeepEP V2 with 24 and with 64 SMs gives, for each
    direction, a rate an SM in series with a link: 1/rate = 1/(sms * per_sm) + 1/link. The link is the mean of the two directions."""
    rows = [r for r in table("dispatchers") if r["software"] == "DeepEP V2" and r["gpu"] == "b200"]
    per_sm, links = {}, []
    for direction in ("dispatch", "combine"):
        (few, low), (many, high) = sorted((float(r["sms"]), float(r["gbytes_per_s"]) * 1e9) for r in rows if r["direction"] == direction)
        per_sm[direction] = (1 / few - 1 / many) / (1 / low - 1 / high)
        links.append(1 / (1 / high - 1 / (many * per_sm[direction])))
    parameters = {"dispatch_sm_rate": per_sm["dispatch"], "combine_sm_rate": per_sm["combine"], "link_efficiency": float(np.mean(links)) / 9e11}
    return parameters, tuple(sorted({r["source"] for r in rows}))


def nic_share(transport: str) -> tuple[float, float, tuple[str, ...]]:
    """(share of NIC line rate a dispatcher's network leg reaches, spread of its log, sources): geometric mean of the remote rates of
    the published rows on that transport, four nodes or more where there are any (two nodes are bound inside the node)."""
    rows = [r for r in table("dispatchers") if r["transport"] == transport]
    wide = [r for r in rows if int(r["nodes"]) >= 4]
    logs = [np.log(float(r["gbytes_per_s"]) * 1e9 * (1 - 1 / int(r["nodes"])) / NICS[r["gpu"]]) for r in wide or rows]
    return float(np.exp(np.mean(logs))), float(np.std(logs)), tuple(sorted({r["source"] for r in rows}))


def interpolation_errors(found: Sequence[MeasuredCurve]) -> tuple:
    """Interpolation of every other point of these curves from the rest, as one Fit ("alternate"); none without curves."""
    from calibration.validate import errors

    predicted, truth = [], []
    for curve in found:
        b, s = np.array(curve.bytes), np.array(curve.seconds)
        for held in (0, 1):
            inner = np.arange(len(b)) % 2 == held
            inner[[0, -1]] = False
            predicted.append(collectives.curve_seconds(Curve(b[~inner], collectives.monotone(s[~inner])), b[inner]))
            truth.append(s[inner])
    return (errors(np.concatenate(predicted), np.concatenate(truth), "alternate"),) if found else ()
