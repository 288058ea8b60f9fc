"""What of a body can be worked out before a rank plays it in the engine?"""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate

from moesim.program import COMPUTE, NUM_LANES, Body, Task


class Compiled:
    """A body as a rank plays it. lanes[stream] = its task numbers in order; needs[k] = deps on other streams (its own keep
    order by themselves); segment[k] = host waits before task k, waits = the tasks that end a segment; issued[k] = host seconds
    of its segment before it, rest = those after the last wait; offset[k] = least seconds from the segment's start to k's start.
    From task `chain` on, nothing in the body overlaps: elapsed[k] = solo seconds before k, host_need[k] = how long before k
    starts the segment must have begun for the host not to hold up the rest."""

    def __init__(self, body: Body, signature: Callable[[Task], int]) -> None:
        self.body = body
        self.lanes = [[k for k, task in enumerate(body) if task.stream == lane] for lane in range(NUM_LANES)]
        self.needs = [tuple(d for d in task.deps if body[d].stream != task.stream) for task in body]
        self.signature = [signature(task) for task in body]
        self.meets = [task.group >= 0 or task.barrier >= 0 for task in body]
        self.outputs = frozenset(task.output for task in body)
        self.issued: list[float] = []
        self.segment: list[int] = []
        self.rest = 0.0
        for task in body:
            self.issued.append(self.rest)
            self.segment.append(self.segment[-1] + body[len(self.segment) - 1].blocks_host if self.segment else 0)
            self.rest = 0.0 if task.blocks_host else self.rest + task.host_s
        self.waits = [k for k, task in enumerate(body) if task.blocks_host]
        self.offset = [before + task.lag_s - task.seconds for before, task in zip(self.issued, body)]
        self.wakes = _wakes(body, self.needs)
        self.chain = _chain(body)
        self.elapsed = list(accumulate((task.seconds for task in body), initial=0.0))
        late = [offset - elapsed for offset, elapsed in zip(self.offset, self.elapsed)]
        self.host_need = [max(late[k:]) + self.elapsed[k] for k in range(len(body))]
        self.is_anchored = _anchored(body)


def _wakes(body: Body, needs: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """For each task, the other streams on which a task needs it."""
    streams: list[set[int]] = [set() for _ in body]
    for task, deps in zip(body, needs):
        for dep in deps:
            streams[dep].add(task.stream)
    return [tuple(sorted(found)) for found in streams]


def _chain(body: Body) -> int:
    """The first task from which on the body is one chain that ends on the compute stream, where nothing overlaps and nothing
    outside may look in: each task needs the one before, only the first has an input, only the last an output."""
    last = len(body) - 1
    if not body or body[last].stream != COMPUTE or any(task.blocks_host or task.group >= 0 or task.barrier >= 0 for task in body):
        return len(body)
    k = last
    while k > 0 and body[k].input < 0 and body[k - 1].output < 0 and (k - 1 in body[k].deps or body[k].stream == body[k - 1].stream):
        k -= 1
    return k


def _anchored(body: Body) -> bool:
    """Whether no task may start while the compute stream is busy with an earlier body."""
    held: list[bool] = []
    for task in body:
        held.append(task.stream == COMPUTE or any(held[dep] for dep in task.deps))
    return all(held) and bool(body)
