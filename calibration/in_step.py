"""What did each op of a plan take inside real steps? (Recorded spans -> measurements, one line an op.)

A span that stands for one op of the plan gives a line of that op; one that stands for several (both gradients of a product, a router)
gives a line named "span" that lists its roles and ops, for a fit of sums. Seconds are one a microbatch and layer that does the work, all
pieces of an interrupted span together; a window is a step. Of a collective the last rank to arrive counts, the others only waited:
its seconds are the least over the ranks of a stage.
"""

from __future__ import annotations

import json
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from calibration.planned import Planned
from calibration.run_folder import Piece, RecordedRun, on_world, read_run
from calibration.write import write_text
from moesim.evaluate import Evaluator
from moesim.measurement import Measurement, op_fields, read_measurements, to_record
from moesim.ops import Op
from moesim.program import COMPUTE

DTYPES = {"bfloat16": "bf16", "float32": "fp32"}
METHOD = {"where": "step", "timer": "span", "kernel": "as in the step"}


class Occurrence(NamedTuple):
    """One time that a role's work was done: by one rank, in one layer, for one microbatch (-1: once a step)."""

    step: int
    rank: int
    microbatch: int
    layer: int
    roles: tuple[str, ...]
    phase: str
    communicates: bool


@dataclass(frozen=True)
class Subject:
    """What occurrences that belong together time: ops with how often each, none where the plan has no such work."""

    roles: tuple[str, ...]
    phase: str
    communicates: bool
    ops: tuple[tuple[Op, int], ...]

    @property
    def single(self) -> Op | None:
        """The one op that is timed alone (or several equal ones, of which each took its part)."""
        return self.ops[0][0] if len(self.ops) == 1 else None


def measurements(run: RecordedRun, planned: Planned, like: Measurement | None = None) -> list[Measurement]:
    """Lines of every recorded step, largest share of the step first. ``like``: a line measured on this machine, whose device, software and
    topology are this run's too."""
    found, mean = by_subject(run, planned), by_subject(run, planned, statistics.mean)
    order = sorted(found, key=lambda subject: -sum(s for _, s in found[subject]))
    return [_line(run, subject, found[subject], statistics.mean(s for _, s in mean[subject]), like) for subject in order]


def by_subject(run: RecordedRun, planned: Planned, over_ranks=min) -> dict[Subject, list[tuple[Occurrence, float]]]:
    """Every occurrence with its seconds, by what it times; in the order of step, rank, layer, microbatch. ``over_ranks``: of a collective's
    seconds on the ranks of a stage."""
    totals = occurrences((piece for pieces in run.spans.values() for piece in pieces), last_reducing(run))
    stages = defaultdict(dict)
    for o, seconds in totals.items():
        stage = run.stage_of(o.rank)
        stages[o._replace(rank=stage) if o.communicates else o][o.rank] = seconds
    found = defaultdict(list)
    for o, by_rank in sorted(stages.items(), key=lambda item: item[0][:4]):
        seconds = over_ranks(by_rank.values())
        if seconds > 0:
            stage = o.rank if o.communicates else run.stage_of(o.rank)
            found[subject_of(o, stage, planned)].append((o, seconds))
    return dict(found)


def last_reducing(run: RecordedRun) -> int:
    """The microbatch before which gradients are only added up where FSDP2 would reduce them; 0 where every microbatch reduces."""
    l = run.layout
    if l.zero == 2 or (l.zero == 3 and l.reshard):
        return 0
    return max((p.microbatch for pieces in run.spans.values() for p in pieces), default=0)


def occurrences(pieces: Iterable[Piece], last: int = 0) -> dict[Occurrence, float]:
    """Seconds of every occurrence, summed over its pieces. Work that shards do a unit at a time counts once a step; gradients that are
    added up before microbatch ``last`` have a role of their own, ADDED, and count once a microbatch."""
    totals: dict[Occurrence, float] = defaultdict(float)
    for p in pieces:
        if p.roles[0] == "grad_copy_in" and 0 <= p.microbatch < last:
            totals[Occurrence(p.step, p.rank, p.microbatch, -1, (ADDED,), "", p.stream != COMPUTE)] += p.end - p.start
            continue
        once = not p.phase or p.roles[0] in SHARDING
        microbatch, layer, phase = (-1, -1, "") if once else (p.microbatch, p.layer, p.phase)
        totals[Occurrence(p.step, p.rank, microbatch, layer, p.roles, phase, p.stream != COMPUTE)] += p.end - p.start
    return totals


ADDED = "grad_accumulate"
SHARDING = ("param_gather", "grad_reduce", "grad_copy_in")
"""First roles of what FSDP2 does around a unit, in whatever microbatch it is."""


def subject_of(o: Occurrence, stage: int, planned: Planned) -> Subject:
    """What the plan has for an occurrence on pipeline rank ``stage``."""
    if o.microbatch < 0:
        ops = Counter()
        for role in o.roles:
            ops.update(planned.once(stage).get((role, o.communicates), {}))
        return Subject(o.roles, "", o.communicates, tuple(ops.items()))
    nodes = [priced for role in o.roles for priced in planned.of(o.layer, role, o.phase)]
    return Subject(o.roles, o.phase, o.communicates, tuple(Counter(priced.node.op for priced in nodes).items()))


def _line(run: RecordedRun, subject: Subject, found: list[tuple[Occurrence, float]], mean_s: float, like: Measurement | None) -> Measurement:
    windows = Counter(o.step for o, _ in found)
    op = subject.single
    each = subject.ops[0][1] if op is not None else 1
    about: dict[str, Any] = {"roles": list(subject.roles), "phase": subject.phase, "layout": str(run.layout)}
    if subject.communicates:
        about["mean_over_ranks_s"] = mean_s  # the waiting for each other included
    if op is None:
        about["ops"] = [op_fields(o) | {"count": n} for o, n in subject.ops]
    stamp: Mapping[str, Any] = {} if like is None else {"device": like.device, "software": like.software, "topology": like.topology}
    return Measurement(
        op=op, name="span" if op is None else None, parameters=about, seconds=tuple(s / each for _, s in found), windows=tuple(windows.values()),
        dtype=DTYPES.get(run.scenario.train.dtype), flops=sum(o.flops * n for o, n in subject.ops) / each, bytes=sum(o.bytes * n for o, n in subject.ops) / each,
        method=METHOD | {"calls": each, "over_ranks": "least" if subject.communicates else "each"}, date=datetime.now(UTC).isoformat(timespec="seconds"), **stamp)


def table(lines: list[Measurement], run: RecordedRun) -> list[str]:
    """One line a measurement, and what share of the recorded steps all of them are."""
    steps = max(1, len(run.spans))
    whole = sum(run.makespans.values()) * run.layout.world or 1.0
    out = []
    for m in lines:
        ops = [m.op] if m.op is not None else [o["op"] for o in m.parameters["ops"]]
        what = type(m.op).__name__ if m.op is not None else "+".join(ops) or "no op of the plan"
        name = "+".join(m.parameters["roles"]) + (f" {m.parameters['phase']}" if m.parameters["phase"] else "")
        out.append(f"{name:36} {what[:40]:40} n {len(m.seconds):5d}  median {m.median * 1e3:9.3f} ms  +-{m.spread:6.1%}  of the step {_total(m) / whole:6.2%}")
    alone = sum(_total(m) for m in lines if m.op is not None)
    planned = sum(_total(m) for m in lines if m.op is not None or m.parameters["ops"])
    out.append(f"{len(lines)} lines of {steps} steps of {run.layout.world} ranks: {alone / whole:.1%} of the time in ops that are timed alone, {planned / whole:.1%} in work of the plan")
    return out


def _total(m: Measurement) -> float:
    return sum(m.seconds) * m.method["calls"]


def write(run_folder: Path, output: Path, *, scenario: str | None = None, sets: Iterable[str] = (), layout: str | None = None, like: Path | None = None) -> list[str]:
    """Measurements of a run's folder into ``output``; the table of them. ValueError where nothing was recorded."""
    run = read_run(run_folder, scenario, tuple(sets), layout)
    if not run.spans:
        raise ValueError(f"{run_folder}: no spans; record some steps with --set train.log.spans=[FIRST,LAST]")
    planned = Planned(Evaluator(on_world(run.scenario, run.layout.world)), run.layout)
    lines = measurements(run, planned, next(read_measurements(like), None) if like else None)
    write_text(output, "".join(json.dumps(to_record(m)) + "\n" for m in lines))
    return table(lines, run)
