"""What do collectives, whole steps and the suite of a bench say about a machine? (curves, in-step factors, co-runs, storage, launches)"""

from __future__ import annotations

from collections import defaultdict
from typing import Mapping, Sequence

import numpy as np

from calibration.lines import Row, Span
from calibration.network import interpolation_errors
from calibration.validate import errors
from moesim.costs.collectives import inside_seconds, monotone, wire_factor
from moesim.measurement import Measurement
from moesim.ops import Collective, Dispatch, Gemm, MemoryBound
from moesim.pricing import kernel, term_name
from moesim.profile import Beside, Gamma, HardwareProfile, MeasuredCurve, Storage, Sustained, Term

UNSEEN_STEP = 0.1
"""Log sigma of the in-step factor 1 where no step was timed op by op: sums of kernels timed alone missed whole steps on a CPU by -8% to
+2% (assumed to hold elsewhere)."""
IMPLAUSIBLE = 5.0
"""A span over five times as fast as the ops that it is said to be is of other work (assumed)."""
LONE_SPAN = 0.1
"""Log sigma of a factor that one span alone tells (assumed)."""
NEAR = 1.02
"""Sizes this close are one point of a curve."""
REACH, FULL_RATE = 16.0, 1e7
"""A curve that ends below a sixteenth of another's is continued as that; from these bytes on a collective runs at its full rate (assumed)."""


# --- collectives --------------------------------------------------------------------------------------------------------------


def curve(kind: str, members: int, rows: Sequence[Row], software: str) -> MeasuredCurve | None:
    """Seconds by size, sizes within 2% averaged by their weight, never falling; None with fewer than two sizes."""
    points: list[list[Row]] = []
    for row in sorted(rows, key=lambda r: r.op.bytes):
        if points and row.op.bytes <= NEAR * points[-1][0].op.bytes:
            points[-1].append(row)
        else:
            points.append([row])
    if len(points) < 2:
        return None
    sizes = tuple(float(np.mean([r.op.bytes for r in p])) for p in points)
    seconds = [float(np.exp(np.average([np.log(r.seconds) for r in p], weights=[r.noise**-2 for r in p]))) for p in points]
    return MeasuredCurve(kind=kind, members=members, software=software, bytes=sizes, seconds=tuple(float(s) for s in monotone(seconds)))


def extended(own: Mapping[tuple[str, int], MeasuredCurve]) -> dict[tuple[str, int], tuple[MeasuredCurve, str]]:
    """(kind, members) -> curve that reaches as far as any of them, and a note where it was short: what lies beyond its last size rises as the
    same kind's does over the nearest number of members, in proportion to the bytes that a rank sends, times the ratio by which other
    kinds' rates differ from that between these two numbers of members."""
    found, reach = {}, max(c.bytes[-1] for c in own.values())
    for (kind, members), short in own.items():
        others = [c for (k, m), c in own.items() if k == kind and m != members and c.bytes[-1] > REACH * short.bytes[-1]]
        if not others or short.bytes[-1] * REACH >= reach:
            found[kind, members] = (short, "")
            continue
        like = min(others, key=lambda c: abs(np.log(c.members / members)))
        factor = _wire(kind, members) / _wire(kind, like.members) * _crowding(own, members, like.members)
        last = short.bytes[-1]
        beyond = [(b, s) for b, s in zip(like.bytes, like.seconds) if b > NEAR * last]
        rise = [short.seconds[-1] + max(0.0, s - float(np.interp(last, like.bytes, like.seconds))) * factor for _, s in beyond]
        longer = short.model_copy(update={"measured_to": last, "bytes": (*short.bytes, *(b for b, _ in beyond)), "seconds": (*short.seconds, *rise)})
        found[kind, members] = (longer, f"over {members} measured up to {last:.3g} bytes, beyond as over {like.members}")
    return found


def _wire(kind: str, members: int) -> float:
    return float(wire_factor(kind, np.array(float(members))))


def _crowding(own: Mapping[tuple[str, int], MeasuredCurve], members: int, other: int) -> float:
    """How much slower a byte is over ``members`` than over ``other``, of kinds measured over both to the full; 1 where none is."""
    ratios = []
    for kind in {k for k, _ in own}:
        a, b = own.get((kind, members)), own.get((kind, other))
        if a and b and min(a.bytes[-1], b.bytes[-1]) >= FULL_RATE:
            ratios.append((a.seconds[-1] / a.bytes[-1] / _wire(kind, members)) / (b.seconds[-1] / b.bytes[-1] / _wire(kind, other)))
    return float(np.median(ratios)) if ratios else 1.0


def collective_term(kind: str, found: Mapping[int, tuple[MeasuredCurve, Sequence[Row]]], parent: Term, origin: str) -> Term:
    """The term of one kind inside a machine: ranges measured; error of every other point of its curves from the rest."""
    rows = [r for _, group in found.values() for r in group]
    fits = interpolation_errors([c for c, _ in found.values() if len(c.bytes) >= 4])
    fits = tuple(f for f in fits if f.num_rows)
    noise = float(np.median([r.noise for r in rows]))
    kept = np.array([np.interp(r.op.bytes, c.bytes, c.seconds) for c, group in found.values() for r in group])
    inside = errors(kept, np.array([r.seconds for r in rows]), "in sample")
    sigma = max([noise, 1.4826 * inside.median, *(1.4826 * f.median for f in fits)])
    sizes = [r.op.bytes for r in rows]
    noisy = sum(r.noisy for r in rows)
    return parent.model_copy(update={
        "valid": {"bytes": (min(sizes), max(sizes)), "members": (float(min(found)), float(max(found)))}, "provenance": "measured",
        "sigma_log": sigma, "shared": {}, "sources": (origin,), "fits": (inside, *fits), "note": f"{noisy} of {len(rows)} lines noisy, weighed less" if noisy else "",
    })


def shifted(curve_: MeasuredCurve, log_ratio: float, software: str) -> MeasuredCurve:
    """A parent's curve, every point by the same factor."""
    return curve_.model_copy(update={"software": software, "seconds": tuple(s * float(np.exp(log_ratio)) for s in curve_.seconds)})


# --- inside steps -------------------------------------------------------------------------------------------------------------


def in_step(profile: HardwareProfile, spans: Sequence[Span], origin: str) -> dict[str, Sustained]:
    """Term -> its speed inside steps over its speed alone: seconds of all its work alone over those in the steps, so that the steps that
    were timed come out as long as they were.

    A span of several ops is the sum of their terms; its seconds are dealt to them in proportion, until that changes nothing (Richardson
    1972, Lucy 1974). The error is what single spans differ by, over the root of how many count.
    """
    prices = [(s, by) for s in spans if (by := alone(profile, s)) and s.seconds > sum(by.values()) / IMPLAUSIBLE]
    names = sorted({name for _, by in prices for name in by})
    if not names:
        return {}
    times = np.array([s.total / s.seconds for s, _ in prices])
    table = np.array([[by.get(name, 0.0) for name in names] for _, by in prices]) * times[:, None]
    total = np.array([s.total for s, _ in prices])
    slower = np.ones(len(names))
    for _ in range(200):
        slower = slower * ((total / (table @ slower)) @ table) / table.sum(axis=0)
    rest = np.log(total / (table @ slower))
    return {name: _level(rest, table[:, i] * slower[i] * total / (table @ slower), 1.0 / slower[i], [s for s, _ in prices], origin) for i, name in enumerate(names)}


def _level(rest: np.ndarray, seconds: np.ndarray, factor: float, spans: Sequence[Span], origin: str) -> Sustained:
    """A term's factor with its error; ``seconds``: of this term in each span."""
    share = seconds / seconds.sum()
    spread, count = float(np.sqrt(share @ rest**2)), 1.0 / float(share @ share)
    own = float(share @ np.array([s.noise for s in spans]))
    evidence = {"alone over in step": factor, "spans": float(np.sum(share > 0.01)), "seconds": float(seconds.sum()), "spread of spans": spread}
    sigma = float(np.hypot(max(spread, 0.02), own) / np.sqrt(count) if count > 1.5 else np.hypot(LONE_SPAN, own))
    return Sustained(factor=float(np.clip(factor, 0.01, 10.0)), sigma_log=sigma, provenance="measured", evidence=evidence, sources=(origin,))


def alone(profile: HardwareProfile, span: Span) -> dict[str, float]:
    """Seconds of a span's ops by term, each timed alone; {} where one of them has no price of one rank or one node."""
    found: dict[str, float] = defaultdict(float)
    for op, count in span.ops:
        name, seconds = _price(profile, op)
        if seconds is None:
            return {}
        found[name] += count * seconds
    return dict(found) if sum(found.values()) > 0 else {}


def _price(profile: HardwareProfile, op) -> tuple[str, float | None]:
    if isinstance(op, (Collective, Dispatch)):
        plain = isinstance(op, Collective) or op.dispatcher == "alltoall"
        kind = op.kind if isinstance(op, Collective) else "all_to_all"
        curves = profile.curve_tables.get(kind, {})
        if not plain or not curves or op.group.size < 2:
            return f"{kind}.nvlink", None
        size = op.bytes * (1.0 if isinstance(op, Collective) else op.load)
        return f"{kind}.nvlink", float(inside_seconds(curves, kind, np.array([max(size, 1.0)]), np.array([float(op.group.size)]))[0])
    name = term_name(op)
    if name not in profile.term_index or op.bytes <= 0:
        return name, None if op.bytes > 0 else 0.0
    return name, float(kernel(profile.term(name).kind, profile.num_sms, [op])(profile.parameters(name, in_training=False))[0])


# --- the suite ----------------------------------------------------------------------------------------------------------------


def launch_seconds(named: Sequence[Measurement]) -> tuple[float, float] | None:
    """(seconds to issue one kernel, spread of its log): the least of the ops timed, as constants.py takes the published figure."""
    found = [m for m in named if m.name == "launch" and m.parameters.get("op") in ("add", "mm")]
    return (min(m.median for m in found), float(np.std(np.log([m.median for m in found]))) if len(found) > 1 else 0.1) if found else None


def storage(named: Sequence[Measurement]) -> tuple[Storage, ...]:
    """Rate of saving and loading a checkpoint, by how many ranks did it together."""
    found = []
    for m in named:
        if m.name in ("checkpoint_save", "checkpoint_load") and m.bytes:
            ranks = int(m.parameters.get("ranks", 1))
            found.append(Storage(what=m.name.removeprefix("checkpoint_"), ranks=ranks, bytes_per_s=m.bytes / m.median, sigma_log=_spread(m)))
    return tuple(sorted(found, key=lambda s: (s.what, s.ranks)))


def _spread(m: Measurement) -> float:
    own = m.spread if np.isfinite(m.spread) else 0.1
    return float(np.hypot(max(own / 0.6745, 0.01), m.aa or 0.0))


RUNNING = {"gemm": "gemm", "copy": "memory_bound"}
"""What the suite calls its compute -> kind of task."""


def beside(named: Sequence[Measurement], profile: HardwareProfile) -> tuple[Beside, ...]:
    """Slowdown of a kernel on all ranks at once over its price alone, and beside an all-reduce over all ranks at once."""
    lines: dict[tuple, dict[str, Measurement]] = defaultdict(dict)
    for m in named:
        if m.name == "beside" and m.parameters.get("compute") in RUNNING:
            lines[m.parameters["compute"], int(m.parameters.get("ranks", 1))][m.parameters.get("communication") or ""] = m
    found = []
    for (compute, ranks), by in sorted(lines.items()):
        single = _compute_alone(compute, by, profile)
        for other, m in sorted(by.items()):
            base = (by.get("") and by[""].median) if other else single
            if base:
                error = _spread(m) / np.sqrt(max(1, len(m.seconds) / 4))
                found.append(Beside(running=RUNNING[compute], beside=other, ranks=ranks, ratio=m.median / base, stderr=float(m.median / base * error)))
    return tuple(found)


def _compute_alone(compute: str, by: Mapping[str, Measurement], profile: HardwareProfile) -> float | None:
    m = by.get("")
    if m is None:
        return None
    side = round((m.flops / 2) ** (1 / 3))
    op = Gemm(side, side, side) if compute == "gemm" else MemoryBound("copy", float(m.bytes))
    name = term_name(op)
    if name not in profile.term_index or profile.term(name).provenance != "measured":
        return None
    return float(kernel(profile.term(name).kind, profile.num_sms, [op])(profile.parameters(name, in_training=False))[0])


def gammas(found: Sequence[Beside], parent: Sequence[Gamma], origin: str) -> tuple[Gamma, ...]:
    """Co-run factors: what was measured of compute beside a collective, else the parent's."""
    own = {}
    for b in found:
        if b.beside:
            own[b.running, "collective"] = Gamma(running=b.running, beside="collective", gamma=max(0.0, b.ratio - 1.0), stderr=b.stderr, source=origin)
    return (*own.values(), *(g for g in parent if (g.running, g.beside) not in own))
