"""Where do a step's predicted and measured seconds part? (A run's recorded spans beside the same layout played by the engine.)

Both steps are cut up by one rule, rank by rank: what the compute stream does goes to the kind of the ops that its roles have in the plan;
where it stands still, to the collective that runs ("exposed ROLE", whichever stream), else to the bubble (the next span waits for another
stage) or to the host. Parts of a rank add up to the step, so the differences of the terms add up to the residual exactly; what steps with
spans took beyond the median of all steps is a term of its own, and so is work that no op of the plan stands for ("unplanned").
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from calibration.in_step import Subject, by_subject
from calibration.planned import ENTRY, Planned, Slot, kind_name
from calibration.run_folder import RecordedRun
from moesim import engine
from moesim.evaluate import Z_80
from moesim.ops import GroupedGemm, Op
from moesim.program import COMM, COMPUTE, DATA, REDUCE, SEND_NEXT
from moesim.timeline import EPILOGUE, gaps

GLUE = ("forward", "backward", "backward_input", "backward_weight")
"""Spans of whole actions: what is left of them has no role."""
ENDS = ("grad_norm", "optimizer", "between_steps", "drain", "grads_reduced")
COPIES = ("param_gather", "grad_copy_in", "param_copy_out", "grad_reduce")
"""Roles of the compute stream's work for sharding: casts and copies to and from what travels."""
SPANS_APART = "steps with spans, beyond the median"


@dataclass(frozen=True)
class Bar:
    """A span of either step: seconds since the step began; ``stage`` numbers pipeline ranks; waits: what it stood still for, if that is
    known ("host", "input", ...)."""

    rank: int
    stage: int
    stream: int
    roles: tuple[str, ...]
    start: float
    end: float
    entry: str
    layer: int
    phase: str
    waits: str = ""
    microbatch: int = -1


@dataclass(frozen=True)
class Term:
    """One row of the residual: seconds of a step, and what the prediction rests on."""

    name: str
    predicted: float
    measured: float
    provenance: str = ""
    sigma: float = 0.0

    @property
    def error(self) -> float:
        return self.measured - self.predicted

    @property
    def interval(self) -> tuple[float, float]:
        """80%, of the predicted seconds."""
        return self.predicted * math.exp(-Z_80 * self.sigma), self.predicted * math.exp(Z_80 * self.sigma)


@dataclass(frozen=True)
class OpError:
    """One op (or several under one span): seconds of one time that it ran, predicted and measured, with the 80% interval."""

    name: str
    kind: str
    predicted: float
    measured: float
    low: float
    high: float
    count: int
    flops: float
    bytes: float
    provenance: str


@dataclass(frozen=True)
class Aligned:
    """The same work in both steps: rank and action where it ran, layer (-1: none), roles and phase; seconds of one step."""

    rank: int
    entry: str
    layer: int
    role: str
    phase: str
    predicted: float
    measured: float


@dataclass(frozen=True)
class Comparison:
    """A step predicted and measured. predicted_s and interval: of the evaluator; measured_s: the median step."""

    name: str
    layout: str
    predicted_s: float
    interval: tuple[float, float]
    measured_s: float
    num_steps: int
    terms: tuple[Term, ...]
    ops: tuple[OpError, ...]
    aligned: tuple[Aligned, ...]
    bars: Mapping[str, Sequence[Bar]] = field(repr=False, default_factory=dict)

    @property
    def residual(self) -> float:
        """Measured less predicted seconds: the sum of the terms' errors."""
        return self.measured_s - self.predicted_s


def compare(run: RecordedRun, planned: Planned) -> Comparison:
    """The run against the engine. ValueError without spans."""
    if not run.spans:
        raise ValueError(f"{run.folder}: no spans; record some steps with --set train.log.spans=[FIRST,LAST]")
    evaluator, program = planned.evaluator, planned.evaluator.program(planned.layout)
    timeline = engine.run(planned.program)
    played = [_played(span, planned) for span in timeline.spans]
    recorded = {step: [_recorded(p, run) for p in pieces] for step, pieces in run.spans.items()}
    low, high = evaluator.interval(program, timeline.makespan, evaluator.provenance(program))
    tokens = evaluator.scenario.workload.global_batch_tokens / evaluator.num_gpus
    subjects = by_subject(run, planned)
    found = Comparison(
        evaluator.scenario.name, str(planned.layout), timeline.makespan, (tokens / high, tokens / low), run.median, len(run.seconds),
        tuple(_terms(run, planned, played, timeline.makespan, recorded)), tuple(op_errors(subjects, planned)),
        tuple(align(played, recorded, run)), {"predicted": played, "measured": recorded[_typical(run)]})
    return found


def _typical(run: RecordedRun) -> int:
    """The recorded step whose length is nearest to their median."""
    middle = statistics.median(run.makespans.values())
    return min(run.makespans, key=lambda step: abs(run.makespans[step] - middle))


# --- both steps as bars ---------------------------------------------------------------------------------------------------------


def _played(span, planned: Planned) -> Bar:
    slot = planned.slot(span)
    where = ENTRY.search(span.entry)
    return Bar(span.rank, span.rank, span.stream, (slot.role,), span.start, span.end, span.entry, slot.layer, slot.phase, span.cause,
               int(where[3]) if where and slot.phase else -1)


def _recorded(p, run: RecordedRun) -> Bar:
    return Bar(p.rank, run.stage_of(p.rank), p.stream, p.roles, p.start, p.end, p.entry, p.layer, p.phase, "", p.microbatch)


def _lanes(bars: Iterable[Bar]) -> dict[int, list[list[Bar]]]:
    """rank -> its compute bars, then those of each communication stream, in order."""
    lanes: dict[int, list[list[Bar]]] = defaultdict(lambda: [[], [], [], []])
    for bar in sorted(bars, key=lambda bar: bar.start):
        if bar.stream in (COMPUTE, COMM, DATA, REDUCE):
            lanes[bar.rank][(COMPUTE, COMM, DATA, REDUCE).index(bar.stream)].append(bar)
    return lanes


# --- the residual ---------------------------------------------------------------------------------------------------------------


def _terms(run: RecordedRun, planned: Planned, played: list[Bar], makespan: float, recorded: Mapping[int, list[Bar]]) -> list[Term]:
    predicted = parts(played, makespan, planned)
    steps = [parts(bars, run.makespans[step], planned) for step, bars in recorded.items()]
    measured = {name: statistics.fmean(step.get(name, 0.0) for step in steps) for step in steps for name in step}
    sure = _sure(planned)
    rows = [Term(name, predicted.get(name, 0.0), measured.get(name, 0.0), *sure.get(name, ("", 0.0))) for name in {**predicted, **measured}]
    beyond = run.median - statistics.fmean(run.makespans.values())
    rows.sort(key=lambda term: -abs(term.error))
    return [*rows, Term(SPANS_APART, 0.0, beyond)]


def parts(bars: Iterable[Bar], makespan: float, planned: Planned) -> dict[str, float]:
    """Term -> seconds of a step, the mean over ranks; they sum to ``makespan``."""
    lanes, total = _lanes(bars), defaultdict(float)
    for compute, *comms in lanes.values():
        for bar in compute:
            total[term_of(bar, planned)] += bar.end - bar.start
        for start, end, waiting in gaps(compute, makespan):
            for a, b, bar in _cover(start, end, comms):
                total[f"exposed {_collective(bar, planned)}" if bar else _idle(waiting, compute, planned)] += b - a
    return {name: seconds / len(lanes) for name, seconds in total.items() if seconds > 0}


def term_of(bar: Bar, planned: Planned) -> str:
    """The kind of a compute bar's ops: in the plan its roles' longest is of that kind."""
    if bar.roles[0] in GLUE:
        return "host"
    if bar.roles[0] in ENDS:
        return f"end of step {bar.roles[0]}"
    if bar.roles[0] in COPIES:
        return "copies for sharding"
    nodes = [priced for role in bar.roles for priced in planned.of(bar.layer, role, bar.phase)]
    if not nodes:
        return "unplanned " + "+".join(bar.roles)
    name = kind_name(max(nodes, key=lambda priced: priced.seconds).node.op)
    return f"recompute {name}" if bar.phase == "R" else name


def _collective(bar: Bar, planned: Planned) -> str:
    """Role of a collective in the plan, by whatever name it was recorded."""
    nodes = planned.of(bar.layer, bar.roles[0], bar.phase)
    return nodes[0].node.role if nodes else bar.roles[0]


def _idle(waiting: Bar | None, lane: Sequence[Bar], planned: Planned) -> str:
    """What a compute stream waits for while nothing travels that it asked for. A recorded bar doesn't say: in a pipeline the beginning of an
    action waits for another stage, and what follows the last bar of a rank is its host's."""
    if waiting is None:
        return "bubble" if lane and lane[-1].waits else "host"
    if waiting.waits:
        return {"host": "host", "start": "host"}.get(waiting.waits, "bubble")
    begins = waiting.roles[0] in GLUE or waiting.phase in ("F", "B")
    return "bubble" if planned.layout.pp > 1 and begins and waiting.entry != EPILOGUE else "host"


def _cover(start: float, end: float, lanes: Sequence[list[Bar]]) -> list[tuple[float, float, Bar | None]]:
    """[start, end) in pieces, each with the bar that runs in it (earlier lanes first) or None."""
    inside = [[bar for bar in lane if bar.end > start and bar.start < end] for lane in lanes]
    edges = sorted({start, end, *(t for lane in inside for bar in lane for t in (bar.start, bar.end) if start < t < end)})
    middle = lambda a, b: next((bar for lane in inside for bar in lane if bar.start <= a and bar.end >= b), None)  # noqa: E731
    return [(a, b, middle(a, b)) for a, b in zip(edges, edges[1:])]


def _sure(planned: Planned) -> dict[str, tuple[str, float]]:
    """Term -> (provenance classes with their shares of the seconds, largest first; sigma) of its predicted ops, priced alone. Errors of one
    term's ops are taken to go together."""
    by_term: dict[str, dict[Op, float]] = defaultdict(lambda: defaultdict(float))
    program = planned.program
    for rank in range(program.num_ranks):
        for task in [*(t for k in program.body_index[rank] for t in program.bodies[k]), *(t for body in program.epilogue[rank:rank + 1] for t in body)]:
            bar = _task_bar(task, planned)
            name = term_of(bar, planned) if task.stream == COMPUTE else f"exposed {bar.roles[0]}"
            for op in task.ops:
                by_term[name][op] += task.seconds
    return {name: _surety(seconds, planned) for name, seconds in by_term.items()}


def _task_bar(task, planned: Planned) -> Bar:
    slot = Slot.of(task.name)
    layers = [layer for layer, role, phase in planned.nodes if role == slot.role and phase == slot.phase]
    return Bar(0, 0, task.stream, (slot.role,), 0.0, 0.0, "", layers[0] if layers else -1, slot.phase)


def _surety(seconds: Mapping[Op, float], planned: Planned) -> tuple[str, float]:
    total = sum(seconds.values())
    if not total:
        return "", 0.0
    classes: dict[str, float] = defaultdict(float)
    for op, s in seconds.items():
        classes[planned.provenance(op)] += s / total
    text = " ".join(f"{name} {share:.0%}" for name, share in sorted(classes.items(), key=lambda item: -item[1]))
    return text, sum(s / total * planned.sigma(op) for op, s in seconds.items())


# --- op by op, and place by place -------------------------------------------------------------------------------------------------


def op_errors(subjects: Mapping[Subject, list], planned: Planned) -> Iterable[OpError]:
    """Every subject of the plan that was timed, the longest first."""
    timed = [(s, found) for s, found in subjects.items() if s.ops]
    for s, found in sorted(timed, key=lambda item: -sum(seconds for _, seconds in item[1])):
        o = found[0][0]
        stage = o.rank if o.communicates else o.rank // (planned.layout.world // planned.layout.pp)
        predicted = planned.seconds(o.layer, o.roles, o.phase) if o.microbatch >= 0 else planned.seconds_once(stage, o.roles, o.communicates)
        if predicted <= 0:
            continue
        prices = {op: n * planned.parts.price(planned.parts.kernel(op)[0])[0] for op, n in s.ops}
        provenance, sigma = _surety(prices, planned)
        biggest = max(prices, key=prices.get)
        kind = "grouped_gemm" if isinstance(biggest, GroupedGemm) else kind_name(biggest)
        flops, moved = (sum(getattr(op, name) * n for op, n in s.ops) for name in ("flops", "bytes"))
        yield OpError(f"{'+'.join(s.roles)} {s.phase}".strip(), kind, predicted, statistics.median(seconds for _, seconds in found),
                      predicted * math.exp(-Z_80 * sigma), predicted * math.exp(Z_80 * sigma), len(found), flops, moved, provenance)


def align(played: list[Bar], recorded: Mapping[int, list[Bar]], run: RecordedRun) -> Iterable[Aligned]:
    """Work of both steps by rank, action, layer, role and phase. Where a measured bar has several roles the predicted ones are summed under
    it. A prediction of a pipeline rank is that of all ranks of its stage."""
    joined = {role: "+".join(bar.roles) for bars in recorded.values() for bar in bars if len(bar.roles) > 1 for role in bar.roles}
    predicted, measured = defaultdict(float), defaultdict(float)
    for bar in played:
        for rank in range(run.layout.world):
            if run.stage_of(rank) == bar.rank and bar.end > bar.start and bar.stream < SEND_NEXT:
                predicted[rank, bar.entry, bar.layer, joined.get(bar.roles[0], bar.roles[0]), bar.phase] += bar.end - bar.start
    for bars in recorded.values():
        for bar in bars:
            measured[bar.rank, bar.entry, bar.layer, "+".join(bar.roles), bar.phase] += (bar.end - bar.start) / len(recorded)
    for key in sorted({**predicted, **measured}):
        yield Aligned(*key, predicted.get(key, 0.0), measured.get(key, 0.0))
