"""When did what run on this rank in a few chosen steps? (The trainer's side of the simulator's timeline.)

A span file holds one JSON object a line, either of a step or of a span:

    {"line": "step", "schema": 1, "rank": 0, "step": 20, "clock": 1735689600.25, "makespan": 0.812}
    {"line": "span", "step": 20, "rank": 0, "stream": 0, "name": "dispatch layer 3", ..., "extra": {"bytes": 4194304}}

A span has exactly the fields of `moesim.timeline.Span`, plus ``line``, ``step`` and ``extra``. start and end are seconds since the step
began on this rank (``clock`` is that moment in Unix seconds, to lay ranks side by side); ``entry`` is the action it belongs to
("0F1", "prologue", "epilogue"); terms is [[kind, "measured", seconds]]; solo its seconds; cause is worked out from the lanes: the
stream whose last span ended most lately before this one began ("start" if none), or "host" if nothing had ended within GAP.
extra may hold what EXTRA names. Spans of one stream never overlap: where they did, the one that began last owns the time. The compute
stream has no span while the host (on a GPU: the stream) waits for a collective.

Off, a span costs one attribute test. On a GPU it records two CUDA events, read after the step has ended, so no step waits.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from moesim.files import write_atomically
from moesim.schedules import Action
from moesim.timeline import STREAMS, Span, Timeline, chrome_trace
from moetrain.observe.jsonl import JsonLines, read_records

SCHEMA = 1
GAP = 2e-6
"""Seconds between the end of one span and the start of the next below which the second is said to have waited for the first."""
EXTRA = {"bytes": "moved or sent", "flops": "done", "rows": "routed rows handled", "max_rows": "of the busiest local expert",
         "layer": "number, from 0", "phase": "F forward, B backward, R forward that runs again", "microbatch": "number, from 0", "stage": "virtual stage", "part": "n-th piece of a span that another one interrupted"}
_OFF = nullcontext()


ACTIONS = {"F": "forward", "B": "backward", "I": "backward_input", "W": "backward_weight"}
PHASES = {"F": "forward", "B": "backward", "R": "again"}
WAITING = ""
"""Kind of what stands on the compute stream while it waits; such spans are not written."""


@dataclass(slots=True)
class _Open:
    """A span under way, or ended: marks are CUDA events or host seconds."""

    stream: int
    name: str
    kind: str
    entry: str
    begin: Any
    extra: Mapping[str, Any]
    end: Any = None
    hole: _Open | None = None


class _Context:
    """`with` form of start and stop."""

    __slots__ = ("_open", "_recorder")

    def __init__(self, recorder: SpanRecorder, opened: _Open) -> None:
        self._recorder, self._open = recorder, opened

    def __enter__(self) -> None:
        return None

    def __exit__(self, *_: object) -> None:
        self._recorder.stop(self._open)


class _Action:
    """`with` form of one action of the schedule."""

    __slots__ = ("_open", "_recorder")

    def __init__(self, recorder: SpanRecorder, opened: _Open | None) -> None:
        self._recorder, self._open = recorder, opened

    def __enter__(self) -> None:
        return None

    def __exit__(self, *_: object) -> None:
        self._recorder.turn(None)
        self._recorder.stop(self._open)
        self._recorder.entry = ""


class SpanRecorder:
    """Spans of one rank in steps ``first`` to ``last`` (inclusive). ``on`` is true inside them only. ``entry``, ``layer`` and ``phase`` are
    what spans belong to that don't say it themselves."""

    def __init__(self, folder: str | Path, rank: int, first: int, last: int, device: torch.device | str = "cpu") -> None:
        if last < first:
            raise ValueError(f"spans: last step {last} is before the first, {first}")
        self.rank, self.first, self.last = rank, first, last
        self.path = Path(folder) / f"spans-rank{rank:05d}.jsonl"
        self.on = False
        self._cuda = torch.device(device).type == "cuda"
        self._lines: JsonLines | None = None
        self._step, self._clock, self._zero = 0, 0.0, None
        self._spans: list[_Open] = []
        self._role: _Open | None = None
        self._finish: Any = None
        self.entry, self.layer, self.phase, self.microbatch = "", -1, "F", -1

    def begin_step(self, step: int) -> None:
        """Switch on if ``step`` is inside the window."""
        self.on = self.first <= step <= self.last
        if self.on:
            self._step, self._spans, self._role, self._finish = step, [], None, None
            self.entry, self.layer, self.phase, self.microbatch = "prologue", -1, "F", -1
            self._zero, self._clock = self._mark(), time.time()

    def span(self, name: str, kind: str, stream: str = "compute", entry: str = "", **extra: float) -> Any:
        """A context that records what runs in it on one stream of moesim.timeline.STREAMS. kind: the role, in the simulator's
        words (dispatch, combine, expert_up, core_attn, grad_reduce, optimizer ...). extra: numbers named in EXTRA."""
        return _Context(self, self.start(name, kind, stream, entry, **extra)) if self.on else _OFF

    def start(self, name: str, kind: str, stream: str = "compute", entry: str = "", **extra: float) -> _Open | None:
        """Begin a span that `stop` will end, where no `with` fits (hooks, asynchronous collectives)."""
        if not self.on:
            return None
        if stream not in STREAMS:
            raise ValueError(f"spans: no stream {stream!r}; legal are {', '.join(STREAMS)}")
        unknown = sorted(set(extra) - set(EXTRA))
        if unknown:
            raise ValueError(f"spans: no extra field {', '.join(unknown)}; legal are {', '.join(EXTRA)}")
        opened = _Open(STREAMS.index(stream), name, kind, entry or self.entry, None, extra)
        self._spans.append(opened)
        opened.begin = self._mark()
        return opened

    def stop(self, opened: _Open | None) -> None:
        """End a span; None (started while off) does nothing."""
        if opened is not None:
            opened.end = self._mark()
            if opened.hole is not None:
                opened.hole.end = opened.end

    # --- roles: the compute stream turns from one to the next ---

    def turn(self, role: str | None, phase: str | None = None, layer: int | None = None) -> None:
        """The compute stream turns to ``role`` (None: to nothing that has one) of ``layer`` (-1: none, None: of the last one's). phase:
        a key of PHASES; None says forward, or what `interrupt` set."""
        if not self.on or (role is None and self._role is None):
            return
        now = self._mark()
        if self._role is not None:
            self._role.end = now
        if layer is not None:
            self.layer = layer
        self._role = None if role is None else _Open(0, "", role, self.entry, now, self._where(phase))
        if self._role is not None:
            self._spans.append(self._role)

    def _where(self, phase: str | None) -> dict[str, Any]:
        where: dict[str, Any] = {"phase": phase or self.phase}
        if self.layer >= 0:
            where["layer"] = self.layer
        if self.microbatch >= 0:
            where["microbatch"] = self.microbatch
        return where

    def interrupt(self, phase: str) -> tuple[str, _Open | None, int]:
        """Roles from now on are of ``phase``; `go_on` takes what this gives."""
        before, self.phase = (self.phase, self._role, self.layer), phase
        return before

    def go_on(self, before: tuple[str, _Open | None, int]) -> None:
        """The role that `interrupt` found has the stream again."""
        self.phase, role, layer = before
        self.turn(role and role.kind, role and role.extra["phase"], layer)

    def action(self, stage: int, letter: str, microbatch: int) -> _Action:
        """A context for one action of the schedule: what has no role in it is a span of its own."""
        self.microbatch, self.layer = microbatch, -1
        self.entry = str(Action(stage, letter, microbatch))
        return _Action(self, self.start(self.entry, ACTIONS[letter], stage=stage, microbatch=microbatch))

    # --- collectives ---

    def send(self, role: str, size: int, stream: str, waits: bool) -> _Open | None:
        """A collective begins. waits: the compute stream stands still until `stop`."""
        opened = self.start(role, role, stream, bytes=size)
        if opened is not None:
            opened.extra |= self._where(self._role.extra["phase"] if self._role is not None else None)
            if waits:
                opened.hole = _Open(0, "", WAITING, self.entry, opened.begin, {})
                self._spans.append(opened.hole)
        return opened

    def pause(self) -> _Open | None:
        """The compute stream stands still until `stop` of what this gives."""
        return self.start("", WAITING)

    # --- the end of a step ---

    def finish(self) -> None:
        """The step is over: what follows until `end_step` is not part of it."""
        if self.on:
            self.turn(None)
            self.on, self._finish = False, self._mark()

    def end_step(self) -> None:
        """Switch off and write what was recorded. On a GPU this waits for the step to end, outside the recorded time."""
        self.finish()
        finish, self._finish = self._finish, None
        if finish is None:
            return
        if self._cuda:
            torch.cuda.synchronize()
        times = [(s, self._since(s.begin), self._since(s.end)) for s in self._spans if s.end is not None]
        spans = flatten(self.rank, times)
        makespan = max([self._since(finish), *(s.end for s, _ in spans)])
        if self._lines is None:
            self._lines = JsonLines(self.path)
        self._lines.write({"line": "step", "schema": SCHEMA, "rank": self.rank, "step": self._step, "clock": self._clock, "makespan": makespan})
        for span, extra in spans:
            self._lines.write({"line": "span", "step": self._step, **span._asdict(), "extra": dict(extra)})
        self._spans = []

    def close(self) -> None:
        if self._lines is not None:
            self._lines.close()
            self._lines = None

    def _mark(self) -> Any:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _since(self, mark: Any) -> float:
        return self._zero.elapsed_time(mark) * 1e-3 if self._cuda else mark - self._zero


def flatten(rank: int, times: Iterable[tuple[_Open, float, float]]) -> list[tuple[Span, Mapping[str, float]]]:
    """Spans of each stream cut so that none overlaps, ordered by (start, stream), with their causes; the second of each pair is
    its extra. The time each stream is busy is kept."""
    lanes: dict[int, list[tuple[_Open, float, float]]] = {}
    for item in times:
        lanes.setdefault(item[0].stream, []).append(item)
    pieces = [piece for lane in lanes.values() for piece in _pieces(lane) if piece[0].kind != WAITING]
    pieces.sort(key=lambda piece: (piece[1], piece[0].stream))
    return _with_causes(rank, pieces)


def _pieces(lane: Sequence[tuple[_Open, float, float]]) -> list[tuple[_Open, float, float, int]]:
    """(span, start, end, number of the piece): at any moment the span that began last owns the stream."""
    if len(lane) == 1 or all(a[2] <= b[1] for a, b in pairwise(lane)):
        return [(opened, start, end, 0) for opened, start, end in lane]
    order = sorted(lane, key=lambda item: (item[1], -item[2]))
    edges = sorted({t for _, start, end in lane for t in (start, end)})
    found: list[tuple[_Open, float, float, int]] = []
    counts: dict[int, int] = {}
    active: list[int] = []  # heap of -index: the latest to begin on top; ended ones are popped when they surface
    begun = 0
    for a, b in pairwise(edges):
        while begun < len(order) and order[begun][1] <= a:
            heappush(active, -begun)
            begun += 1
        while active and order[-active[0]][2] <= a:
            heappop(active)
        if not active:
            continue
        owner = -active[0]
        opened = order[owner][0]
        if found and found[-1][0] is opened and found[-1][2] == a:
            found[-1] = (opened, found[-1][1], b, found[-1][3])
        else:
            counts[owner] = counts.get(owner, -1) + 1
            found.append((opened, a, b, counts[owner]))
    return found


def _with_causes(rank: int, pieces: Sequence[tuple[_Open, float, float, int]]) -> list[tuple[Span, Mapping[str, float]]]:
    ended: dict[int, float] = {}
    done: list[tuple[Span, Mapping[str, float]]] = []
    waiting = sorted(pieces, key=lambda piece: piece[2])  # by end, to know what had ended before a start
    i = 0
    for opened, start, end, part in pieces:
        while i < len(waiting) and waiting[i][2] <= start + GAP:
            ended[waiting[i][0].stream] = waiting[i][2]
            i += 1
        before = {stream: t for stream, t in ended.items() if t >= start - GAP}
        cause = "start" if not ended else STREAMS[max(before, key=before.__getitem__)] if before else "host"
        extra = {**opened.extra, "part": part} if part else opened.extra
        terms = ((opened.kind, "measured", end - start),)
        done.append((Span(rank, opened.stream, opened.name or _name(opened), opened.kind, start, end, opened.entry, terms, end - start, cause, 0.0), extra))
    return done


def _name(opened: _Open) -> str:
    """Of a role's span: "qkv forward layer 3"."""
    layer = f" layer {opened.extra['layer']}" if "layer" in opened.extra else ""
    return f"{opened.kind} {PHASES[opened.extra['phase']]}{layer}"


# --- reading ------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RecordedStep:
    """One step as one or more ranks recorded it: a Timeline as the simulator plays it, and each span's extra numbers."""

    step: int
    timeline: Timeline
    extras: tuple[Mapping[str, float], ...] = field(repr=False, default=())


def read_spans(paths: Iterable[str | Path], align: bool = True) -> dict[int, RecordedStep]:
    """Steps from span files of several ranks. align: shift each rank by its clock, so that the earliest starts at 0. A step that
    was recorded again after a restart is the later one. ValueError names the line that breaks the schema."""
    steps: dict[tuple[int, int], dict[str, Any]] = {}
    for path in paths:
        key = None
        for i, line in enumerate(read_records(path), start=1):
            key = _take(line, key, steps, f"{path}:{i}")
    return {step: _recorded(step, [h for (s, _), h in steps.items() if s == step], align) for step in sorted({s for s, _ in steps})}


def _take(line: Mapping[str, Any], key: tuple[int, int] | None, steps: dict, where: str) -> tuple[int, int] | None:
    if line.get("line") == "step" and line.get("schema") == SCHEMA:
        key = (line["step"], line["rank"])
        steps[key] = {"header": line, "spans": []}
        return key
    if line.get("line") != "span" or set(line) != {*Span._fields, "line", "step", "extra"} or key != (line["step"], line["rank"]):
        raise ValueError(f"{where}: not a step or a span of the step before it")
    if line["stream"] not in range(len(STREAMS)) or not line["start"] <= line["end"]:
        raise ValueError(f"{where}: stream {line['stream']}, start {line['start']}, end {line['end']}")
    values = {name: line[name] for name in Span._fields} | {"terms": tuple(tuple(term) for term in line["terms"])}
    steps[key]["spans"].append((Span(**values), line["extra"]))
    return key


def _recorded(step: int, ranks: Sequence[Mapping[str, Any]], align: bool) -> RecordedStep:
    first = min(h["header"]["clock"] for h in ranks)
    shifts = {h["header"]["rank"]: h["header"]["clock"] - first if align else 0.0 for h in ranks}
    spans = [(s._replace(start=s.start + shifts[s.rank], end=s.end + shifts[s.rank]), extra) for h in ranks for s, extra in h["spans"]]
    spans.sort(key=lambda item: (item[0].start, item[0].rank, item[0].stream))
    makespan = max(h["header"]["makespan"] + shifts[h["header"]["rank"]] for h in ranks)
    played = tuple(span for span, _ in spans)
    timeline = Timeline(makespan, max(shifts) + 1, lambda rank=None: [s for s in played if rank is None or s.rank == rank])
    return RecordedStep(step, timeline, tuple(extra for _, extra in spans))


def write_chrome(recorded: RecordedStep, path: str | Path) -> None:
    """The step as a trace that Perfetto and chrome://tracing open, each span's extra numbers among its arguments."""
    trace = chrome_trace(recorded.timeline)
    spans = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    for event, extra in zip(spans, recorded.extras, strict=True):
        event["args"] |= extra
    write_atomically(path, json.dumps(trace))
