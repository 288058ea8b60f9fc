"""How does a list of requests become a file of measurements? (In order of gain, within the budget, none twice, none silently dropped.)

The first rank leads: it decides what comes next, times what needs one device, and writes. The others take part in what needs all ranks.
"""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from moesim.measurement import Measurement, read_measurements, to_record
from moesim.ops import Collective, Dispatch, Gemm, MemoryBound
from moetrain.bench import build, machine as machines, suite
from moetrain.bench.requests import Pace, Request, ordered, small, words
from moetrain.bench.timing import Limits, Sample, TooLong, agree_to_start, sample
from moetrain.bench.work import Machine, Skip, Work
from moetrain.observe import host
from moetrain.observe.jsonl import JsonLines

NOISY_AA = 0.05
USED_UP = "the budget was used up"
DIGITS = 10
STOP = -1
PROBE_S = 0.1
CALLS_LEAST = 4
"""Calls that a measurement takes at the very least: a warm-up and a repeat in each of two windows."""


@dataclass(frozen=True)
class Options:
    """``budget_s``: no work is begun that would end after it. ``cap_s`` a work. ``quiet_s``: how long to wait for a quiet CPU before each."""

    budget_s: float = float("inf")
    cap_s: float = 10.0
    quiet_s: float = 10.0
    with_suite: bool = False


@dataclass
class Patience:
    """How long to wait for quiet before each work: ``most_s``, half as long each time that it didn't come."""

    most_s: float
    now_s: float | None = None

    def wait(self, at_most: float) -> None:
        wanted = min(self.most_s if self.now_s is None else self.now_s, at_most)
        if wanted <= 0:
            return
        share = machines.wait_until_quiet(wanted)
        self.now_s = self.most_s if share is None or share < machines.QUIET else max(wanted / 2, min(self.most_s, machines.LOOK_S))


@dataclass
class Summary:
    """How many were measured, skipped (by reason) and there already; ``noisy`` of those measured."""

    measured: int = 0
    noisy: int = 0
    present: int = 0
    skipped: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Task:
    """One line to be: who it is about, whether all ranks take part, how its work is made."""

    subject: dict[str, Any]
    text: str
    everyone: bool
    make: Callable[[], Work]
    request: Request | None = None


Note = Callable[[int, int, str, Measurement | None], None]
"""(number of the task, of how many, its words, its line once there is one)."""


def tasks_of(requests: Sequence[Request], machine: Machine, options: Options, folder: Path) -> list[Task]:
    """Requests by gain, then the suite."""
    tasks = [Task({"op": r.op}, words(r.op), isinstance(r.op, (Collective, Dispatch)), lambda op=r.op: build(op, machine), r) for r in ordered(requests)]
    if options.with_suite:
        tasks += [Task({"name": e.name, "parameters": e.parameters}, f"{e.name} {' '.join(map(str, e.parameters.values()))}", e.everyone,
                       lambda e=e: e.make(machine, folder)) for e in suite.entries(machine)]
    return tasks


def run(requests: Sequence[Request], output: str | Path, machine: Machine, options: Options, note: Note = lambda *_: None) -> Summary:
    """Measures what ``output`` doesn't hold yet and appends a line for each. Collective; the summary is the first rank's. ValueError for
    a damaged output file."""
    output = Path(output)
    with _folder(machine, output.parent, options.with_suite) as folder:
        tasks = tasks_of(requests, machine, options, folder)
        if machine.rank == 0:
            return _lead(tasks, output, machine, options, note)
        _follow(tasks, machine, options)
        return Summary()


@contextlib.contextmanager
def _folder(machine: Machine, parent: Path, wanted: bool) -> Iterator[Path]:
    """Where the suite writes its checkpoints: beside the output, removed afterwards."""
    if machine.rank or not wanted:
        yield parent
        return
    with tempfile.TemporaryDirectory(prefix=".bench-", dir=parent) as name:
        yield Path(name)


def _follow(tasks: list[Task], machine: Machine, options: Options) -> None:
    while (number := _next(None)) != STOP:
        with contextlib.suppress(Skip):
            _time(tasks[number], machine, options.cap_s)


def _next(number: int | None) -> int:
    """The number that the first rank says."""
    told = torch.tensor([number if number is not None else STOP])
    dist.broadcast(told, 0)
    return int(told)


def _lead(tasks: list[Task], output: Path, machine: Machine, options: Options, note: Note) -> Summary:
    begin, summary, mark = time.monotonic(), Summary(), machines.stamp(machine)
    pace, patience, sink = _pace(machine), Patience(options.quiet_s), JsonLines(output)
    try:
        known = list(read_measurements(output))
        done, refused = {m.key for m in known if m.reason is None}, {(m.key, m.reason) for m in known if m.reason is not None}
        for number, task in enumerate(tasks):
            base = Measurement(**task.subject, reason="?", device=mark.device, software=mark.software, topology=mark.topology)
            if base.key in done:
                summary.present += 1
                note(number, len(tasks), task.text, None)
                continue
            left = options.budget_s - (time.monotonic() - begin)
            line = _attempt(number, task, base, machine, min(options.cap_s, max(left, 0.0)), pace, left, patience)
            _count(line, summary)
            if line.reason is None or (line.key, line.reason) not in refused:
                sink.write(to_record(line))
            note(number, len(tasks), task.text, line)
        if machine.world > 1:
            _next(STOP)
    finally:
        sink.close()
    return summary


def _count(line: Measurement, summary: Summary) -> None:
    if line.reason is not None:
        summary.skipped[line.reason] = summary.skipped.get(line.reason, 0) + 1
        return
    summary.measured += 1
    summary.noisy += bool(line.noisy)


def _pace(machine: Machine) -> Pace:
    """From a product and an add of a moment; links are taken for fast until one was measured."""
    side, values = (4096, 1 << 26) if machine.cuda else (384, 1 << 21)
    product, add = Gemm(side, side, side), MemoryBound("elementwise", 12.0 * values)
    best = {op: min(sample(lambda op=op: build(op, machine), machine, Limits(PROBE_S, 1, refuse=False)).seconds) for op in (product, add)}
    rates = product.flops / best[product], add.moved / best[add]
    return Pace(*rates, 9e11, "nccl") if machine.cuda else Pace(*rates, 5e9)


def _attempt(number: int, task: Task, base: Measurement, machine: Machine, cap_s: float, pace: Pace, left: float, patience: Patience) -> Measurement:
    """The line of one task: measured, or why not."""
    now = datetime.now(UTC).isoformat(timespec="seconds")
    try:
        _worth(task, cap_s, pace, left)
        if not machine.cuda:
            patience.wait(left / 4)
        _warm(task, machine)
        before = host.busy()
        if task.everyone and machine.world > 1:
            _next(number)
        found, share = _time(task, machine, cap_s, before)
    except Skip as skip:
        if isinstance(skip, TooLong) and task.request is not None:
            pace.learn(task.request, skip.seconds)
        return replace(base, reason=" ".join(str(skip).split()), date=now)
    if task.request is not None:
        pace.learn(task.request, min(found.seconds))
    return _line(base, found, share, machine, now)


def _warm(task: Task, machine: Machine) -> None:
    """One call of the task's kernel on next to nothing. What is wrong with it comes to light when it is timed."""
    op = small(task.request.op) if task.request is not None else None
    if op is not None:
        with contextlib.suppress(Exception):
            build(op, machine).calls[0]()


def _worth(task: Task, cap_s: float, pace: Pace, left: float) -> None:
    """Skip for what would not end in time."""
    if left <= 0:
        raise Skip(USED_UP)
    if task.request is None:
        return
    one = pace.seconds(task.request)
    if one * CALLS_LEAST > left:
        raise Skip("too long for what was left of the budget")
    if one > cap_s:
        raise Skip(f"one call would take about {one:.3g} s here, above the cap of {cap_s:g} s")


def _time(task: Task, machine: Machine, cap_s: float, before: host.Busy | None = None) -> tuple[Sample, float | None]:
    """Repeats of a task and the foreign share of the processor meanwhile. Collective for a task of everyone."""
    before, limits = before or host.busy(), Limits(cap_s, refuse=task.request is not None)
    if not task.everyone:
        try:
            found = sample(task.make, machine, limits)
        except Skip:
            raise
        except Exception as error:  # noqa: BLE001  (one kernel that fails must not cost the machine's time for the others)
            raise Skip(f"failed: {type(error).__name__}: {error}"[:300]) from None
    else:
        found = sample(lambda: agree_to_start(task.make, machine), machine, limits)
    return found, machines.foreign_share(before, task.everyone)


def _line(base: Measurement, found: Sample, share: float | None, machine: Machine, now: str) -> Measurement:
    work = found.work
    each = work.method.get("calls", 1)
    timer = "until issued" if work.timer == "host" else "CUDA events" if machine.cuda else "processor clock"
    seconds = tuple(round(s / each, DIGITS) or 10.0**-DIGITS for s in found.seconds)
    line = replace(base, reason=None, seconds=seconds, windows=found.windows, dtype=work.dtype, flops=work.flops, bytes=work.bytes, rows=work.rows,
                   method=work.method | {"inner": found.inner, "timer": timer}, clocks=machines.clocks(machine),
                   foreign_cpu=None if share is None else round(share, 4), date=now)
    return replace(line, noisy=tuple(_noise(line)))


def _noise(line: Measurement) -> Iterator[str]:
    if line.foreign_cpu is not None and line.foreign_cpu > machines.NOISY and line.device["kind"] == "cpu":
        yield f"others used {line.foreign_cpu:.0%} of the cores"
    if line.aa is not None and line.aa > NOISY_AA:
        yield f"A/A {line.aa:.0%}"
    if line.aa is None:
        yield "no A/A"
    if len(line.seconds) < 5:
        yield f"{len(line.seconds)} repeats"
