"""How short can a step be at best? (A lower bound, as matrix products over stage times for any number of layouts at once.)

`screen` takes the critical paths of a structure (`moesim.critical`) and the stage times of L layouts. Each path is a sum of
stage times, so T >= max over paths; between its first and last visit to a rank a path lingers there for whatever further
microbatches there are, which makes it T >= head + microbatches x work + tail with heads and tails that a schedule really has.
`step_bound` reads stage times from the bodies of one program and adds what prologue, epilogue and each clock alone demand.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

import numpy as np

from moesim.critical import Columns, CriticalPaths, paths_of
from moesim.maxplus import HOST, IN, NEVER, OUT, Board, costs_of, reduce, shape
from moesim.program import COMPUTE, Program
from moesim.schedules import LETTERS
from moesim.wiring import Wiring, actions, check

_STREAM = COMPUTE + 1  # row and column of the compute stream in a body's matrix
_NO_PATH = -1e30  # stands for -inf where it is multiplied by a weight of 0
_BLOCK = 8192


def stage_times(
    columns: Columns,
    seconds: Mapping[str, np.ndarray],
    *,
    reach: Mapping[str, np.ndarray] | None = None,
    transfer_forward: np.ndarray | float = 0.0,
    transfer_backward: np.ndarray | float = 0.0,
    pair_seconds: np.ndarray | None = None,
) -> np.ndarray:
    """Stage times as `screen` wants them, [columns, L]. seconds[letter] [V, L]: critical path of one microbatch's action on each
    virtual stage; reach[letter] [V, L]: the part of it until its output, where that is less; transfers [L]; pair_seconds
    [len(columns.pairs), L]: least time of each pair together, by default the longer of the two."""
    num = next(iter(seconds.values())).shape[1]
    times = np.zeros((len(columns), num))
    for letter, values in seconds.items():
        at = LETTERS.index(letter) * columns.num_stages
        times[at : at + columns.num_stages] = values
        at += len(LETTERS) * columns.num_stages
        times[at : at + columns.num_stages] = (reach or {}).get(letter, values)
    times[columns.transfer] = transfer_forward
    times[columns.transfer + 1] = transfer_backward
    for p, pair in enumerate(columns.pairs):
        longer = np.maximum(*(seconds[letter][stage] for letter, stage in pair))
        times[columns.transfer + 2 + p] = longer if pair_seconds is None else pair_seconds[p]
    return times


def screen(paths: CriticalPaths, times: np.ndarray, num_microbatches: np.ndarray | int, extra: np.ndarray | float = 0.0) -> np.ndarray:
    """Lower bound of the step [L] for stage times [columns, L] (`stage_times`) and microbatches [L] of one structure; `extra`
    [L] = what comes before the first action and after the last. ValueError where `paths` don't cover the microbatches."""
    periods = _periods(paths, np.broadcast_to(np.asarray(num_microbatches), times.shape[1:]))
    bound = np.empty(times.shape[1])
    for start in range(0, len(bound), _BLOCK):
        block = slice(start, start + _BLOCK)
        bound[block] = _longest(paths, times[:, block], periods[block])
    return bound + extra


def _periods(paths: CriticalPaths, num_microbatches: np.ndarray) -> np.ndarray:
    more = num_microbatches - paths.num_microbatches
    if (more < 0).any() or (more % paths.period if paths.period else more).any():
        raise ValueError(f"these paths cover {paths.num_microbatches} microbatches and periods of {paths.period} more; look up others for {num_microbatches.tolist()[:4]}")
    return more / max(1, paths.period)


def _longest(paths: CriticalPaths, times: np.ndarray, periods: np.ndarray) -> np.ndarray:
    used = np.flatnonzero(paths.rows.any(axis=0) | paths.grow.any(axis=0))
    base = paths.rows[:, used] @ times[used]
    if not periods.any():
        return base.max(axis=0)
    work = paths.grow[:, used] @ times[used]
    longest = np.full(times.shape[1], NEVER)
    for lingers in np.unique(paths.lingers, axis=0):
        rows = (paths.lingers == lingers).all(axis=1)
        np.maximum(longest, base[rows].max(axis=0) + periods * work[lingers].max(axis=0), out=longest)
    return longest


def step_bound(program: Program) -> float:
    """Lower bound of one step of a program, in seconds; never above its longest path."""
    wires = check(program)
    paths = _paths_of(program.orders, program.placement, program.peers)
    matrices = [reduce(body, costs_of([body], None))[:, :, 0] for body in program.bodies]
    through = float(screen(paths, _times_of(program, paths.columns, wires, matrices), paths.num_microbatches)[0])
    alone = max(sum(np.diag(matrices[k])[:IN] for k in indices).max() if indices else 0.0 for indices in program.body_index)
    return max(_before(program, wires) + through + _after(program, wires), float(alone), 0.0)


@lru_cache(maxsize=64)
def _paths_of(orders, placement: tuple[int, ...], peers: int) -> CriticalPaths:
    return paths_of(orders[::peers], tuple(rank // peers for rank in placement))


def _times_of(program: Program, columns: Columns, wires: Wiring, matrices: list[np.ndarray]) -> np.ndarray:
    """Least stage times over the bodies that play each action, [columns, 1]; with every rank played, of peer 0."""
    times = np.full((len(columns), 1), np.inf)
    for r in range(0, program.num_ranks, program.peers):
        for entry, k, waits in dict.fromkeys(zip(map(_anonymous, program.orders[r]), program.body_index[r], wires.waits[r])):
            for j, action in enumerate(acts := actions(entry)):
                into = [IN + j] if j in waits else []
                hold = min(matrices[k][_STREAM, c] for c in (into if len(acts) == 2 else [_STREAM, *into]) or [_STREAM])
                reach = min(matrices[k][OUT + j, c] for c in [_STREAM, *into])
                for column, value in ((columns.hold(action), hold), (columns.reach(action), reach)):
                    times[column] = min(times[column, 0], value)
            if len(acts) == 2:
                times[columns.pair(entry)] = min(times[columns.pair(entry), 0], matrices[k][_STREAM, _STREAM])
    for i, transfer in enumerate((program.transfer_forward, program.transfer_backward)):
        times[columns.transfer + i] = transfer.seconds if transfer else 0.0
    times[np.isposinf(times)] = 0.0  # columns that no entry has
    return np.maximum(times, _NO_PATH)


def _anonymous(entry):
    """The entry without its microbatches."""
    return type(entry)(*(a._replace(microbatch=0) for a in entry)) if len(actions(entry)) == 2 else entry._replace(microbatch=0)


def _before(program: Program, wires: Wiring) -> float:
    """When the prologue opens the first entry of the rank where every path begins."""
    board = Board([program], wires, 1, None)
    return float(board.gates.get(wires.first[program.placement[0]], np.zeros(1))[0])


def _after(program: Program, wires: Wiring) -> float:
    """The least that follows the end of a rank's last entry, whichever rank ends last."""
    num_ranks = program.num_ranks
    board = Board([program], wires, num_ranks, None)
    board.run_ahead = 0
    board.state[:], board.ends[:] = NEVER, NEVER
    for r, last in enumerate((*wires.first[1:], wires.num_entries)):
        board.state[r, _STREAM, r] = board.ends[last - 1, r] = 0.0
    return float(board.finish().min())
