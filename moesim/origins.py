"""Where does each second of a program come from? (Task by task: role, priced op, provenance.)"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Iterable, Iterator, Mapping

import numpy as np

from moesim.ops import Op
from moesim.parts import Parts
from moesim.pricing import PROVENANCE
from moesim.program import Program, Task


@dataclass(frozen=True)
class Subject:
    """What a share of a task's seconds is the price of: an op, or (where a task does not say) a profile term alone; ``role``: that inside
    a step, where a profile holds what roles cost there; ``kind``: whose factor of the software the seconds carry."""

    term: str
    op: Op | None = None
    role: str = ""
    kind: str = ""


def subjects(task: Task, parts: Parts) -> list[Subject]:
    """What each of a task's shares of seconds is the price of, in the order of its ``terms``."""
    ops = [op for op in (parts.kernel(op)[0] for op in task.ops) if parts.price(op)[0] > 0]
    if len(ops) == len(task.terms) and all(parts.prices[op][4] == term for op, (_, term, _) in zip(ops, task.terms)):
        return [Subject(term, op) for op, (_, term, _) in zip(ops, task.terms)]
    return [Subject(term) for _, term, _ in task.terms]


def transfer_op(program: Program) -> Op | None:
    """What a pipeline stage sends to the next."""
    transfer = program.transfer_forward or program.transfer_backward
    return transfer.op if transfer is not None else None


def issued(program: Program, parts: Parts) -> Iterator[tuple[str, Subject, float]]:
    """(role, subject, seconds of a step over all pipeline ranks) of every share of seconds; roles of the step's end read
    "end of step ROLE", as in a breakdown."""
    times = np.bincount([k for row in program.body_index for k in row], minlength=len(program.bodies))
    for body, count in [*zip(program.bodies, times), *((b, 1) for b in program.prologue)]:
        for task in body:
            for (role, _, seconds), subject in zip(task.terms, subjects(task, parts)):
                yield role, subject, seconds * float(count)
    for body in program.epilogue:
        for task in body:
            for (role, _, seconds), subject in zip(task.terms, subjects(task, parts)):
                yield f"end of step {role}", subject, seconds


def provenance(subject: Subject, parts: Parts) -> str:
    """Of an op its own: a term's measurements may be far from it. Of a term without an op the term's."""
    return parts.price(subject.op)[5] if subject.op is not None else parts.profile.term(subject.term).provenance


def shares(seconds: Mapping[str, float]) -> dict[str, float]:
    """Seconds by provenance class as shares that sum to 1, most trusted first."""
    total = sum(seconds.values())
    return {name: float(seconds[name] / total) for name in PROVENANCE if seconds.get(name, 0.0) > 0} if total else {}


# --- parts of a breakdown --------------------------------------------------------------------------------------------------------


def of_parts(program: Program, parts: Parts, where: Iterable[str]) -> dict[str, dict[str, float]]:
    """Part of a breakdown -> provenance class -> share of the seconds that the part is made of, over all pipeline ranks. What waits for
    everything that other ranks do (a bubble) is as sure as all of it."""
    roles: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    whole: dict[str, float] = defaultdict(float)
    for role, subject, seconds in issued(program, parts):
        name = provenance(subject, parts)
        roles[role][name] += seconds
        whole[name] += seconds
    return {part: shares(roles.get(bare(part)) or _without_ops(part, program, parts) or whole) for part in where}


def bare(part: str) -> str:
    """A role without what a breakdown says of where it stands."""
    return part.removeprefix("exposed ")


def _without_ops(part: str, program: Program, parts: Parts) -> dict[str, float]:
    """Seconds that no op of a body stands for; empty for those of other ranks."""
    if part == "exposed send" and (op := transfer_op(program)) is not None:
        return {provenance(Subject(parts.price(op)[4], op), parts): 1.0}
    if part in ("host", "end of step host"):
        return {"measured" if getattr(parts.profile, "stamp", None) else "extrapolated": 1.0}  # published launch costs are of other hosts
    if part == "contention":
        return {"extrapolated": 1.0}  # two pairs of kernels on one GPU stand for all
    if part.endswith("between_steps"):
        return {"extrapolated" if "end_of_step_s" in parts.stack.sources else "assumed": 1.0}
    return {}
