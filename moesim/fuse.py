"""Which consecutive kernels can be played as one? (`fuse` never changes when anything else may start.)"""

from __future__ import annotations

from dataclasses import replace
from typing import Iterable

from moesim.program import Body, CoRun, Task


def fuse(body: Body, gammas: Iterable[CoRun] = ()) -> Body:
    """Merges tasks that follow each other on one stream where nothing else touches the joint: no dependency from or to
    another stream, input, output, host wait, barrier or group between them, the same `uses` and SMs, and kinds that no row of
    `gammas` tells apart. Ends of the merged runs equal those of their last task when nothing contends."""
    told_apart = frozenset(kind for row in gammas for kind in (row.running, row.beside))
    needed = _needed_later(body)
    merged: list[Task] = []
    index: list[int] = []  # task of `body` -> run of `merged`
    for k, task in enumerate(body):
        if k and _joins(body, k, needed, told_apart):
            merged[-1] = _merge(merged[-1], task)
        else:
            merged.append(replace(task, deps=tuple(sorted({index[dep] for dep in task.deps}))))
        index.append(len(merged) - 1)
    return tuple(merged)


def _needed_later(body: Body) -> list[bool]:
    """For each task, whether another stream depends on it (on its own stream, order already says so)."""
    needed = [False] * len(body)
    for task in body:
        for dep in task.deps:
            needed[dep] |= body[dep].stream != task.stream
    return needed


def _joins(body: Body, k: int, needed: list[bool], told_apart: frozenset[str]) -> bool:
    before, task = body[k - 1], body[k]
    if before.stream != task.stream or needed[k - 1] or before.output >= 0 or before.blocks_host or task.input >= 0:
        return False
    if before.group >= 0 or task.group >= 0 or before.barrier >= 0 or task.barrier >= 0 or task.after >= 0:
        return False
    if before.uses != task.uses or before.sms != task.sms or any(body[dep].stream != task.stream for dep in task.deps):
        return False
    return before.kind == task.kind or not told_apart & {before.kind, task.kind}


def _merge(run: Task, task: Task) -> Task:
    """A kernel of the first run is followed by the whole second; a kernel of the second is issued after the whole first."""
    return replace(
        run,
        name=run.name if run.name == task.name else f"{run.name}+{task.name}",
        seconds=run.seconds + task.seconds,
        host_s=run.host_s + task.host_s,
        lag_s=max(run.lag_s + task.seconds, run.host_s + task.lag_s),
        blocks_host=task.blocks_host,
        output=task.output,
        terms=_merge_terms(run.terms + task.terms),
        ops=run.ops + task.ops,
    )


def _merge_terms(terms: tuple[tuple[str, str, float], ...]) -> tuple[tuple[str, str, float], ...]:
    total: dict[tuple[str, str], float] = {}
    for role, term, seconds in terms:
        total[role, term] = total.get((role, term), 0.0) + seconds
    return tuple((role, term, seconds) for (role, term), seconds in total.items())
