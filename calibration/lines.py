"""Which measurements belong together, whose are they, and how far is each to be trusted? (Files of `moetrain bench` to rows by term.)"""

from __future__ import annotations

import hashlib
import json
from collections import Counter, defaultdict
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Sequence

import numpy as np

from moesim.measurement import Measurement, op_of, read_measurements, relative_error
from moesim.ops import Collective, Dispatch, MemoryBound, Op
from moesim.pricing import term_name
from moesim.profile import Stamp

LEAST_NOISE = 0.005
"""No clock of a shared machine is trusted beyond half a percent (assumed)."""
NOISY = 0.1
"""What a line marked as noisy may be off beside its repeats: foreign load of a few percent moved medians by about so much on two cores (assumed)."""
STEP = "step"
CODE = "code"
"""The one software key that may differ between lines: a hash of the trainer's timed sources. It is stamped, and said."""


@dataclass(frozen=True)
class Row:
    """One figure measured alone: ``noise`` is the standard deviation of its logarithm."""

    op: Op
    seconds: float
    noise: float
    noisy: bool
    source: Measurement


@dataclass(frozen=True)
class Span:
    """Work that was timed inside training steps: ops with how often each, seconds of one such piece of work, and of all of them."""

    ops: tuple[tuple[Op, int], ...]
    seconds: float
    noise: float
    total: float


@dataclass(frozen=True)
class Lines:
    """All usable lines of some files. ``terms``: name -> rows timed alone; ``steps``: work timed inside steps. ``curves``: (kind, members) ->
    rows of collectives, one group at a time. ``named``: lines of the suite. ``unused``: reason -> how many."""

    stamp: Stamp
    is_cpu: bool
    terms: dict[str, list[Row]]
    steps: list[Span]
    curves: dict[tuple[str, int], list[Row]]
    named: list[Measurement]
    unused: dict[str, int] = field(default_factory=dict)


def read(files: Sequence[Path]) -> Lines:
    """Lines of ``files``, all of one machine and one software. ValueError names what two of them differ in, or that there is nothing."""
    found = [m for path in files for m in read_measurements(path)]
    measured = [m for m in found if m.reason is None]
    unused: Counter[str] = Counter({"never measured (the line says why)": len(found) - len(measured)})
    if not measured:
        raise ValueError(f"{', '.join(map(str, files))}: no measured line")
    _one_machine(measured)
    terms, steps, curves, named = defaultdict(list), [], defaultdict(list), []
    for m in measured:
        if m.layout is not None:
            unused["of whole steps"] += 1
        elif m.method.get("where") == STEP:
            steps += [span] if (span := _span(m)) else []
            unused["of work in steps that no op of a plan stands for"] += span is None
        elif m.op is None:
            named.append(m)
        elif isinstance(m.op, Dispatch):
            unused["dispatch and combine: permutes and exchange together, priced by their parts"] += 1
        elif isinstance(m.op, Collective):
            _collective(m, curves, unused)
        else:
            row = _row(m)
            terms[term_name(row.op)].append(row)
    pooled = {name: _pool(rows) for name, rows in terms.items()}
    return Lines(_stamp(files, measured), measured[0].device.get("kind") == "cpu", pooled, steps, _alone(curves, unused), named, +unused)


def _collective(m: Measurement, curves, unused) -> None:
    size, world, nodes = m.op.group.size, int(m.topology.get("world", 1)), int(m.topology.get("nodes", 1))
    if nodes > 1 and size * m.op.group.stride > world // nodes:
        unused["collectives that leave a node"] += 1
    else:
        curves[m.op.kind, size, world > size].append(_row(m))


def _alone(curves, unused) -> dict[tuple[str, int], list[Row]]:
    """Curves of one group at a time; of several at once only where nothing else was measured."""
    found = {}
    for (kind, size, several), rows in sorted(curves.items()):
        if several and (kind, size, False) in curves:
            unused["collectives of several groups at once (one group alone was measured)"] += len(rows)
        else:
            found[kind, size] = rows
    return found


def _row(m: Measurement) -> Row:
    op = replace(m.op, moved=float(m.bytes)) if isinstance(m.op, MemoryBound) and m.bytes else m.op
    own = relative_error(m.seconds)
    noise = np.hypot(LEAST_NOISE, own if np.isfinite(own) else max(m.spread, NOISY) if len(m.seconds) > 1 else NOISY)
    return Row(op, m.median, float(np.hypot(noise, NOISY if m.noisy else 0.0)), bool(m.noisy), m)


def _span(m: Measurement) -> Span | None:
    """One line of work in steps; None where it names no op."""
    ops = ((m.op, 1),) if m.op is not None else tuple((op_of(o), int(o.get("count", 1))) for o in m.parameters.get("ops", ()))
    own = relative_error(m.seconds)
    noise = float(np.hypot(LEAST_NOISE, own if np.isfinite(own) else NOISY))
    return Span(ops, m.median, noise, sum(m.seconds) * float(m.method.get("calls", 1))) if ops else None


def _pool(rows: list[Row]) -> list[Row]:
    """Rows whose noise has, beside the repeats' own, what two equal measurements of this term differ by: two windows differ by sqrt(2)
    of a window's deviation, and a median over both has 1 / sqrt(2) of it."""
    differences = [r.source.aa for r in rows if r.source.aa is not None]
    if not differences:
        return rows
    typical = float(np.median(differences)) / 0.6745 / 2
    return [replace(r, noise=float(np.hypot(r.noise, typical))) for r in rows]


def _one_machine(measured: Sequence[Measurement]) -> None:
    first = measured[0]
    for m in measured[1:]:
        for what in ("device", "software"):
            one, other = ({k: v for k, v in getattr(line, what).items() if k != CODE} for line in (first, m))
            if one != other:
                keys = [k for k in {**one, **other} if one.get(k) != other.get(k)]
                said = "; ".join(f"{k} {one.get(k)!r} and {other.get(k)!r}" for k in keys[:3])
                raise ValueError(f"measurements of two {what}s can't make one profile: {said}. Fit each in a call of its own")


def _stamp(files: Sequence[Path], measured: Sequence[Measurement]) -> Stamp:
    dates = sorted(m.date for m in measured if m.date)
    tops = sorted({json.dumps(m.topology, sort_keys=True) for m in measured})
    codes = sorted({str(m.software[CODE]) for m in measured if m.software.get(CODE)})
    text = lambda table: {k: v if isinstance(v, str) else json.dumps(v) for k, v in table.items() if v is not None}  # noqa: E731
    return Stamp(
        device=text(measured[0].device), software=text({**measured[0].software, CODE: " ".join(codes)}), topology=tuple(text(json.loads(t)) for t in tops),
        first_date=dates[0] if dates else "", last_date=dates[-1] if dates else "", num_lines=len(measured), num_noisy=sum(bool(m.noisy) for m in measured),
        files={Path(f).name: hashlib.sha256(Path(f).read_bytes()).hexdigest() for f in files},
    )
