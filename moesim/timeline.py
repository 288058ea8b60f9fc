"""When did what run on each rank, and where did the seconds of a step go?

A Timeline holds one Span per task (and per pipeline transfer) that an evaluator played. Streams are numbered as in
`moesim.program.STREAMS`. Seconds everywhere; the Chrome / Perfetto export is in microseconds, as that format wants.

Attribution rule of `breakdown` (one rank; the parts sum to the makespan):
* while a compute span runs, its solo seconds go to its roles in proportion to its terms, any excess to "contention";
* while the compute stream idles, the compute span that ends the idle time says why it started when it did (`cause`):
  "input" -> "exposed send" for the last moments, as long as the transfer itself took, and "bubble" for the rest;
  "host" -> "host"; anything else -> "exposed <role>" of the communication span that runs (the stream the cause names first,
  then comm, data, reduce), and where none runs, the cause of the next span to start on any stream of the rank;
* waiting for other ranks (a barrier, or after the rank's last span) is "bubble";
* spans of the epilogue, on any stream, read "end of step <role>" in place of "<role>" or "exposed <role>".
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, TypeVar

from moesim.program import COMM, COMPUTE, DATA, REDUCE, SEND_NEXT, SEND_PREV, STREAMS, Program
from moesim.wiring import AT_EPILOGUE, AT_PROLOGUE, actions

Terms = tuple[tuple[str, str, float], ...]
Lasting = TypeVar("Lasting")
"""What has a start and an end."""
EPILOGUE = "epilogue"

Record = tuple[int, int, int, float, float, str, float]
"""What an evaluator notes for each span: rank, position (or AT_PROLOGUE, AT_EPILOGUE), task number (-1 - j: the transfer of
output j), start, end, cause, seconds that the input spent between ranks."""


class Span(NamedTuple):
    """One task or transfer as it ran. `entry` is the text of its action or pair, "prologue" or "epilogue"; `solo` its seconds
    alone on the rank; `cause` what it waited for last: a stream's name (an earlier task there), "start", "host", "input",
    "gate", "barrier" or "sms"; `transfer` the seconds its input spent between ranks."""

    rank: int
    stream: int
    name: str
    kind: str
    start: float
    end: float
    entry: str
    terms: Terms = ()
    solo: float = 0.0
    cause: str = "start"
    transfer: float = 0.0


@dataclass(frozen=True, eq=False)
class Timeline:
    """One played step. `makespan` is when the last rank ended; spans are made from the evaluator's records when first read."""

    makespan: float
    num_ranks: int
    records: Callable[[int | None], Iterable[Span]] = lambda rank=None: ()

    def of_rank(self, rank: int) -> Timeline:
        """The same step with the spans of one rank only: what a breakdown of that rank needs, without making the others."""
        return Timeline(self.makespan, self.num_ranks, lambda _=None: self.records(rank))

    @cached_property
    def spans(self) -> tuple[Span, ...]:
        """Every span, ordered by (start, rank, stream)."""
        return tuple(sorted(self.records(None), key=lambda span: (span.start, span.rank, span.stream)))

    @cached_property
    def _lanes(self) -> Mapping[tuple[int, int], list[Span]]:
        lanes = defaultdict(list)
        for span in self.spans:
            lanes[span.rank, span.stream].append(span)
        return lanes

    def lane(self, rank: int, stream: int) -> list[Span]:
        """Spans of one stream of one rank, in order."""
        return self._lanes.get((rank, stream), [])

    def busy(self, rank: int, stream: int = COMPUTE) -> float:
        """Seconds in which the stream runs something."""
        return sum(span.end - span.start for span in self.lane(rank, stream))

    def bubble(self, rank: int) -> float:
        """Seconds spent waiting for other ranks, by the rule of `breakdown`."""
        return breakdown(self, rank).get("bubble", 0.0)

    def communication(self, rank: int, first: str = "comm") -> list[list[Span]]:
        """Spans of each stream of the rank that communicates for its bodies, the one named `first` before the others."""
        return [self.lane(rank, stream) for stream in sorted((COMM, DATA, REDUCE), key=lambda stream: STREAMS[stream] != first)]


def record_spans(program: Program, records: Iterable[Record], only: int | None = None) -> Iterator[Span]:
    """Spans of a program from an evaluator's records, of all ranks or of one."""
    texts = [[str(entry) for entry in order] + [EPILOGUE, "prologue"] for order in program.orders]  # -2 and -1 index the ends
    ends = {AT_PROLOGUE: program.prologue, AT_EPILOGUE: program.epilogue}
    for rank, position, k, start, end, cause, transfer in records:
        if only is not None and rank != only:
            continue
        entry = texts[rank][position]
        if k >= 0:
            body = ends[position][rank] if position < 0 else program.bodies[program.body_index[rank][position]]
            task = body[k]
            yield Span(rank, task.stream, task.name, task.kind, start, end, entry, task.terms, task.seconds, cause, transfer)
        else:
            action = actions(program.orders[rank][position])[-1 - k]
            stream = SEND_NEXT if action.letter == "F" else SEND_PREV
            yield Span(rank, stream, f"send {action}", "send", start, end, entry, (), end - start, cause, transfer)


def breakdown(timeline: Timeline, rank: int) -> dict[str, float]:
    """Seconds of the step by role for one rank, summing to the makespan; rule in the file's docstring."""
    parts: dict[str, float] = defaultdict(float)
    compute = timeline.lane(rank, COMPUTE)
    for span in compute:
        _add_compute(parts, span)
    for start, end, waiting in gaps(compute, timeline.makespan):
        _add_gap(parts, timeline, rank, start, end, waiting)
    return {role: seconds for role, seconds in parts.items() if seconds > 0.0}


def _add_compute(parts: dict[str, float], span: Span) -> None:
    seconds = span.end - span.start
    solo = span.solo if 0.0 < span.solo < seconds - 1e-12 * span.end else seconds  # end - start carries rounding
    _add_roles(parts, span, solo, "")
    parts["contention"] += seconds - solo


def _add_roles(parts: dict[str, float], span: Span, seconds: float, prefix: str) -> None:
    prefix = "end of step " if span.entry == EPILOGUE else prefix
    total = sum(term[2] for term in span.terms)
    if total <= 0.0:
        parts[prefix + span.kind] += seconds
        return
    for role, _, share in span.terms:
        parts[prefix + role] += seconds * share / total


def _add_gap(parts, timeline: Timeline, rank: int, start: float, end: float, waiting: Span | None) -> None:
    cause = waiting.cause if waiting else "barrier"
    if cause == "input":
        sending = min(end - start, waiting.transfer)
        parts["exposed send"] += sending
        parts["bubble"] += end - start - sending
    elif cause == "host":
        parts["host"] += end - start
    else:
        lanes = timeline.communication(rank, "data" if cause == "gate" else cause)
        for a, b, span in _cover(start, end, lanes):
            if span:
                _add_roles(parts, span, b - a, "exposed ")
            else:
                parts["host" if _next_cause(lanes, a) == "host" else "bubble"] += b - a


def _next_cause(lanes: list[list[Span]], time: float) -> str:
    """What the next communication span to start at or after `time` waited for; "" if there is none."""
    coming = [lane[i] for lane in lanes if (i := bisect_right(lane, time, key=lambda span: span.start)) < len(lane)]
    return min(coming, key=lambda span: span.start).cause if coming else ""


def gaps(lane: Sequence[Lasting], makespan: float) -> Iterator[tuple[float, float, Lasting | None]]:
    """(start, end, what ends it) of every time in which nothing of a lane, ordered by start, runs; None at the end of the step."""
    time = 0.0
    for span in lane:
        if span.start > time:
            yield time, span.start, span
        time = max(time, span.end)
    if makespan > time:
        yield time, makespan, None


def _cover(start: float, end: float, lanes: list[list[Span]]) -> Iterator[tuple[float, float, Span | None]]:
    """Cuts [start, end) into pieces, each with the span that runs in it (earlier lanes first) or None."""
    pieces: list[tuple[float, float, Span | None]] = [(start, end, None)]
    for lane in lanes:
        pieces = [cut for piece in pieces for cut in ([piece] if piece[2] else _cut(piece[0], piece[1], lane))]
    yield from pieces


def _cut(start: float, end: float, lane: list[Span]) -> Iterator[tuple[float, float, Span | None]]:
    i = bisect_right(lane, start, key=lambda span: span.end)
    while start < end:
        span = lane[i] if i < len(lane) else None
        if span is None or span.start >= end:
            yield start, end, None
            return
        if span.start > start:
            yield start, span.start, None
        stop = min(end, span.end)
        yield max(start, span.start), stop, span
        start, i = stop, i + 1


def chrome_trace(timeline: Timeline) -> dict[str, list[dict]]:
    """Trace Event Format (ph "X", microseconds; pid = rank, tid = stream) as Perfetto and chrome://tracing read it; the caller
    writes it as JSON. Format: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU"""
    events = [_name_event(rank, stream, name) for rank in range(timeline.num_ranks) for stream, name in enumerate(STREAMS)]
    events += [
        {
            "name": span.name,
            "cat": span.kind,
            "ph": "X",
            "ts": span.start * 1e6,
            "dur": (span.end - span.start) * 1e6,
            "pid": span.rank,
            "tid": span.stream,
            "args": {"entry": span.entry, "cause": span.cause, "terms": [list(term) for term in span.terms]},
        }
        for span in timeline.spans
    ]
    return {"traceEvents": events}


def _name_event(rank: int, stream: int, name: str) -> dict:
    return {"name": "thread_name", "ph": "M", "pid": rank, "tid": stream, "args": {"name": name}}
