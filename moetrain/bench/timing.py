"""How often is a work repeated, and how is one repeat timed? (Until the median is known to 1%, or the time is up.)

Two windows with operands of their own; their difference is what two equal measurements differ by (A/A). Device time comes from CUDA
events, with the L2 cache overwritten before each repeat, or from the processor's clock. When all ranks take part, a barrier
aligns them before each repeat, the largest of their times counts, and all stop together.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from moesim.measurement import relative_error
from moetrain.bench.work import Machine, Skip, Work, cache_bytes

LEAST, MOST = 3, 100
"""Repeats of a window; two windows make at least six."""
GOOD = 0.01
"""Standard error of the median, over the median, at which a window ends."""
SHORT_S = 2e-4
"""Calls shorter than this are timed several at once on a CPU."""
MAX_INNER = 1000
SHARED_WARM_UP = 3
COLD_S = 1.0
"""A first call shorter than this isn't trusted to tell how long one takes."""


@dataclass(frozen=True)
class Limits:
    """``cap_s`` for both windows of a work together; ``refuse`` a work of which one call exceeds it."""

    cap_s: float = 10.0
    windows: int = 2
    refuse: bool = True


class TooLong(Skip):
    """One call exceeded the cap; it took ``seconds``."""

    def __init__(self, seconds: float, cap_s: float) -> None:
        super().__init__(f"one call took {seconds:.3g} s, above the cap of {cap_s:.3g} s")
        self.seconds = seconds


@dataclass(frozen=True)
class Sample:
    """What repeating gave: seconds of every repeat, how many belong to each window, calls in a repeat; the work that was timed last."""

    seconds: tuple[float, ...]
    windows: tuple[int, ...]
    inner: int
    work: Work


def sample(make: Callable[[], Work], machine: Machine, limits: Limits) -> Sample:
    """Times ``make()`` twice, or once where one call takes a third of the cap. TooLong when one call exceeds it; Skip from ``make``, on any
    rank of a work for everyone, is raised on all of them."""
    work = make()
    first = _Window(work, machine, limits)
    seconds, inner = first.repeats(limits.cap_s / limits.windows)
    windows = [len(seconds)]
    while len(windows) < limits.windows and first.one < limits.cap_s / 3:
        work = first = None  # frees the operands of the window before
        work = make()
        first = _Window(work, machine, limits)
        found, inner = first.repeats(limits.cap_s / limits.windows, inner)
        seconds += found
        windows.append(len(found))
    return Sample(tuple(seconds), tuple(windows), inner, work)


def agree_to_start(make: Callable[[], Work], machine: Machine) -> Work:
    """The work, once every rank has made its own; a Skip or a lack of memory of one is everyone's. Collective."""
    work, why = None, None
    try:
        work = make()
    except (Skip, torch.OutOfMemoryError, RuntimeError) as error:
        why = str(error) if isinstance(error, Skip) else out_of_memory(error)
    reasons: list[str | None] = [None] * machine.world
    if machine.world > 1:
        dist.all_gather_object(reasons, why)
    reason = next((r for r in [why, *reasons] if r is not None), None)
    if reason is not None:
        raise Skip(reason)
    return work


def out_of_memory(error: Exception) -> str:
    """A reason, if that is what the error says; raises it otherwise."""
    text = " ".join(str(error).split())
    if isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in text or "not enough memory" in text:
        return f"out of memory: {text[:120]}"
    raise error


class _Window:
    """One set of operands under the clock. ``one``: seconds of the first call, the same on all ranks of a work for everyone."""

    def __init__(self, work: Work, machine: Machine, limits: Limits) -> None:
        self.work, self.shared = work, work.everyone and machine.world > 1
        events = machine.cuda and work.timer == "device"
        self.clock = _cuda_clock(machine, self.shared) if events else _host_clock(machine)
        self.several = not (work.single or events)
        self.one, _ = self._repeat(0, 1, math.inf)
        if self.one > limits.cap_s and (events or self.one < COLD_S):
            self.one = min(self.one, self._repeat(0, 1, math.inf)[0])  # a first call may compile, load, connect
        if self.one > limits.cap_s and limits.refuse:
            raise TooLong(self.one, limits.cap_s)

    def repeats(self, cap_s: float, inner: int = 0) -> tuple[list[float], int]:
        """Seconds of each repeat, and how many calls one has (``inner``, or if that is 0 what the warm-up says)."""
        deadline, best = time.perf_counter() + cap_s, self.one
        for i in range(1, 1 + (SHARED_WARM_UP if self.shared else len(self.work.calls))):  # every set of operands; as often on all ranks
            if best > cap_s / 8:
                break
            again, _ = self._repeat(i, 1, deadline)
            best = min(best, again)
        inner = inner or (max(1, min(MAX_INNER, round(SHORT_S / best))) if self.several else 1)
        found: list[float] = []
        while True:
            seconds, left = self._repeat(len(found), inner, deadline)
            found.append(seconds)
            if left < 0 or len(found) >= MOST or (len(found) >= LEAST and relative_error(found) < GOOD):
                return found, inner

    def _repeat(self, number: int, inner: int, deadline: float) -> tuple[float, float]:
        """(seconds of one call, seconds left): the largest and the least of all ranks'."""
        seconds = _repeat(self.work, number * inner, inner, self.clock, self.shared)
        left = deadline - time.perf_counter()
        return _together(seconds, left) if self.shared else (seconds, left)


def _together(seconds: float, left: float) -> tuple[float, float]:
    """The largest of the ranks' seconds, the least of what they have left."""
    both = torch.tensor([seconds, -left], dtype=torch.float64)
    dist.all_reduce(both, dist.ReduceOp.MAX)
    return float(both[0]), -float(both[1])


def _repeat(work: Work, start: int, inner: int, clock, shared: bool) -> float:
    """Seconds of one call, the mean of ``inner`` of them in a row."""
    calls = work.calls
    if work.before is not None:
        work.before(start % len(calls))
    if shared:
        dist.all_reduce(torch.zeros(1))  # a barrier that is gloo's also where GPUs talk over NCCL
    seconds = clock([calls[(start + i) % len(calls)] for i in range(inner)], work.timer)
    if work.after is not None:
        work.after()
    return max(seconds / inner, 1e-9)


def _host_clock(machine: Machine):
    def clock(calls, timer: str) -> float:
        if machine.cuda:
            torch.cuda.synchronize(machine.device)
        begin = time.perf_counter()
        for call in calls:
            call()
        end = time.perf_counter()
        if machine.cuda:
            torch.cuda.synchronize(machine.device)
            end = end if timer == "host" else time.perf_counter()
        return end - begin

    return clock


def _cuda_clock(machine: Machine, shared: bool):
    flush = torch.empty(2 * cache_bytes(machine.device), dtype=torch.uint8, device=machine.device)
    token = torch.zeros(1, device=machine.device)

    def clock(calls, timer: str) -> float:
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        flush.zero_()
        if shared:
            dist.all_reduce(token)  # ranks start together on the device, too
        begin.record()
        for call in calls:
            call()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3

    return clock
