"""Which ops does one step of a layout issue on each pipeline rank, and how often? (A fold over the program that is played.)"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from moesim.evaluate import Evaluator
from moesim.layout import Layout, LayoutError, illegal, num_microbatches
from moesim.load import load_cluster
from moesim.ops import Collective, Dispatch, Op
from moesim.program import COMPUTE, Program, Task
from moesim.schedules import flatten
from moesim.space import canonical


@dataclass(frozen=True, slots=True)
class Issued:
    """An op and what it is for: the role of a task on a communication stream, "" for a kernel of a fused run of compute."""

    role: str
    op: Op


def step_ops(program: Program) -> tuple[Counter[Issued], ...]:
    """Issued -> times a step, for each pipeline rank of a program with one representative a rank. Recomputed forwards count as often
    as they run."""
    assert program.peers == 1, "one representative a pipeline rank"
    counts: list[Counter[Issued]] = [Counter(_transfers(program, rank)) for rank in range(program.num_ranks)]
    for rank, found in enumerate(counts):
        for index, times in Counter(program.body_index[rank]).items():
            _add(found, program.bodies[index], times)
        for body in (*program.prologue[rank:rank + 1], *program.epilogue[rank:rank + 1]):
            _add(found, body, 1)
    return tuple(counts)


def _add(found: Counter[Issued], body: tuple[Task, ...], times: int) -> None:
    for task in body:
        for op in task.ops:
            found[Issued("" if task.stream == COMPUTE else task.name, op)] += times


def _transfers(program: Program, rank: int) -> dict[Issued, int]:
    """What a pipeline rank sends to others: activations to the stage behind, gradients to the one before."""
    held, last = program.placement, len(program.placement) - 1
    if program.transfer_forward is None:
        return {}
    forward = backward = 0
    for action in flatten(program.orders[rank]):
        forward += action.letter == "F" and action.stage < last and held[action.stage + 1] != rank
        backward += action.letter in "BI" and action.stage > 0 and held[action.stage - 1] != rank
    sent: Counter[Issued] = Counter()
    for times, transfer in ((forward, program.transfer_forward), (backward, program.transfer_backward)):
        if times and transfer is not None and transfer.op is not None:
            sent[Issued("pp_send", transfer.op)] += times
    return sent


ANY_CLUSTER = "gb300_nvl72"
"""Which ops a step issues does not depend on what they cost, so a machine that nobody priced is no obstacle."""


def collectives(scenario, layout: Layout) -> tuple[Counter[Issued], ...]:
    """The collectives among the `step_ops` of ``layout`` on as many ranks as it has, whatever the scenario's cluster. LayoutError where
    it can't run the model and batch."""
    reason = illegal(layout, scenario.model, scenario.workload, layout.world)
    if reason:
        raise LayoutError(f"layout {str(layout)!r}: {reason}")
    known = scenario.model_copy(update={"cluster": load_cluster(ANY_CLUSTER), "profile": None})
    program = Evaluator(known).program(canonical(layout, num_microbatches(layout, scenario.workload)))
    return tuple(Counter({issued: n for issued, n in found.items() if isinstance(issued.op, (Collective, Dispatch))}) for found in step_ops(program))
