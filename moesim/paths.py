"""How long does a step take if nothing contends? (Longest path over the fixed order, for many programs or draws at once.)

Bodies are reduced to max-plus matrices (`moesim.maxplus`), and orders are then played level by level, vectorised over ranks
and over programs (or draws) of one structure. `moesim.play` walks every task of one program in plain Python, with spans, and
is the reference that tests hold this file to.

Rules beyond `moesim.program`: a gate holds every stream of the rank at the entry it opens; the run-ahead limit holds the
epilogue as if it were the entry after the last; transfers leave a rank in the order of its entries, activations on
"send_next", gradients on "send_prev"; a fused run starts at max(ready, issue + lag_s - seconds), so its end is exact; a gate
opens when its prologue task has ended; an entry is played when both its inputs are known. A step is never shorter than what the
ranks of a node take of its cores and memory, over what it has (`moesim.node`): that counts where ranks outnumber cores.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from moesim.maxplus import Board, costs_of, reduce, shape
from moesim.node import busy_seconds
from moesim.play import play
from moesim.program import Body, Program
from moesim.wiring import check

_BLOCK = 64  # programs or draws played together: keeps a level's matrices inside the L2 cache


def step_seconds(programs: Sequence[Program]) -> np.ndarray:
    """Seconds of one step, [len(programs)]. Programs that share orders and task shapes are played together, so hand over
    as many as there are. ValueError (one line) for a deadlock or orders that don't fit."""
    seconds = np.empty(len(programs))
    groups: dict[tuple, list[int]] = {}
    for i, program in enumerate(programs):
        groups.setdefault(_structure_key(program), []).append(i)
    for members in groups.values():
        for start in range(0, len(members), _BLOCK):
            block = members[start : start + _BLOCK]
            seconds[block] = _play_batch([programs[i] for i in block])
    return np.maximum(seconds, [busy_seconds(program, check(program))[0] for program in programs]) if any(p.shared for p in programs) else seconds


def step_draws(program: Program, multipliers: Mapping[str, np.ndarray]) -> np.ndarray:
    """Seconds of one step for each of D draws, [D]. `multipliers`: profile term -> factor [D] on the seconds of that term; a
    missing term keeps factor 1, term "host" scales host costs; a transfer scales with term "send". The lag of a fused run,
    which mixes host and device time, scales with their sum (exact for a single kernel and for a common factor)."""
    num_draws = len(next(iter(multipliers.values())))
    seconds = np.empty(num_draws)
    for start in range(0, num_draws, _BLOCK):
        block = slice(start, start + _BLOCK)
        draws = {term: np.asarray(factors)[block] for term, factors in multipliers.items()}
        seconds[block] = np.maximum(_play_batch([program], draws), busy_seconds(program, check(program), draws))
    return seconds


def _structure_key(program: Program) -> tuple:
    ends = (program.prologue, program.epilogue)
    return (
        id(program.orders),
        id(program.placement),
        program.peers,
        program.run_ahead,
        program.gates,
        tuple(tuple(map(shape, bodies)) for bodies in ends),
        any(task.group >= 0 for body in (*program.bodies, *program.epilogue) for task in body),
    )


def _matrices(programs: Sequence[Program], draws) -> tuple[np.ndarray, list[list[int]]]:
    """Matrices [K, END + 1, END, N] over the K combinations of bodies that occur at one entry, and for each rank the K of its
    entries."""
    tables: dict[tuple[int, ...], int] = {}
    index = [
        [tables.setdefault(bodies, len(tables)) for bodies in zip(*(program.body_index[r] for program in programs))]
        for r in range(programs[0].num_ranks)
    ]
    by_shape: dict[tuple, dict[int, Body]] = {}
    for combination in tables:
        for program, k in zip(programs, combination):
            body = program.bodies[k]
            by_shape.setdefault(shape(body), {})[id(body)] = body
    reduced: dict[int, np.ndarray] = {}
    for bodies in by_shape.values():
        reduced |= _reduce_all(list(bodies.values()), draws)
    matrices = [np.concatenate([reduced[id(p.bodies[k])] for p, k in zip(programs, ks)], axis=2) for ks in tables]
    return np.stack(matrices), index


def _reduce_all(bodies: list[Body], draws) -> dict[int, np.ndarray]:
    if draws is not None:
        return {id(body): reduce(body, costs_of([body], draws)) for body in bodies}
    matrix = reduce(bodies[0], costs_of(bodies, None))
    return {id(body): matrix[:, :, n : n + 1] for n, body in enumerate(bodies)}


def _play_batch(programs: Sequence[Program], draws: Mapping[str, np.ndarray] | None = None) -> np.ndarray:
    """[N] seconds of N programs of one structure, or of N draws of the only program."""
    wires = check(programs[0])
    for program in programs[1:]:
        check(program)
    if any(task.group >= 0 for body in (*programs[0].bodies, *programs[0].epilogue) for task in body):
        if draws is not None:
            raise ValueError("draws need a program of representative ranks, not one whose ranks meet in groups")
        return np.array([play(program).makespan for program in programs])
    matrices, index = _matrices(programs, draws)
    board = Board(programs, wires, matrices.shape[-1], draws)
    of_entry = np.array([k for row in index for k in row], dtype=np.intp)
    for level in wires.levels:
        board.play_level(np.array(level, dtype=np.intp), matrices, of_entry)
    return board.finish()
