"""How short can a step be at best? (A lower bound, as matrix products over stage times for any number of layouts at once.)

`screen_structure` takes the critical paths of a structure (`moesim.critical`) and the stage times of L layouts. Each path is a
sum of stage times, so T >= max over paths; between its first and last visit to a rank a path lingers there for whatever
further microbatches there are, which makes it T >= head + microbatches x work + tail with heads and tails that the schedule
really has. `step_bound` reads stage times from the bodies of one program and adds what prologue and epilogue demand.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from moesim.critical import PAIR_TIMES, Columns, CriticalPaths, PairKind, Structure, critical_paths, paths_of
from moesim.maxplus import END, HOST, IN, NEVER, OUT, Board, costs_of, reduce
from moesim.node import busy_seconds
from moesim.program import COMPUTE, Program
from moesim.schedules import LETTERS
from moesim.wiring import Wiring, actions, check

_STREAM = COMPUTE + 1  # row and column of the compute stream in a body's matrix
_NO_PATH = -1e30  # stands for -inf where it is multiplied by a weight of 0
_BLOCK = 8192


@dataclass(frozen=True)
class Runs:
    """How a half of a pair is cut for interleaving, by letter [L, V]: number of its compute runs, seconds of the longest."""

    num: Mapping[str, np.ndarray]
    longest: Mapping[str, np.ndarray]


@dataclass(frozen=True)
class Durations:
    """What L layouts of one structure with V virtual stages can't beat, by letter of the action.

    path[letter] [L, V]: critical path of one action, from its input and a free compute stream to its output. lanes[letter]
    [lanes, L, V]: busy seconds by lane: 0 compute, 1 the communication that stands between compute tasks, then any others
    that are serial on a rank (gathers, reductions, host). hop [L]: a transfer between ranks, each way.

    A lane other than compute adds up over a rank's actions but not along a path: host and prefetches run ahead while the
    rank waits, so max(path, host) is not a time that an action always takes.

    runs: where pairs interleave compute runs by their fraction (run i of n at i / n, first half first on ties), an output comes
    only after all compute issued before it; without `runs` a half counts as if it met nothing of the other.
    """

    path: Mapping[str, np.ndarray]
    lanes: Mapping[str, np.ndarray]
    hop: np.ndarray
    runs: Runs | None = None

    def pair(self, kind: PairKind) -> np.ndarray:
        """[PAIR_TIMES, L] Least times of a pair: both paths, and what both need of the compute and the communication lane."""
        path = [self.path[letter][:, stage] for letter, stage in kind]
        lanes = sum(self.lanes[letter][:2, :, stage] for letter, stage in kind)
        whole = np.maximum.reduce([*lanes, *path])
        ways = np.full((PAIR_TIMES, len(whole)), _NO_PATH)
        ways[:5], ways[5], ways[8] = (whole, path[0], path[1], path[0], path[1]), path[0], path[1]
        return ways if self.runs is None else np.maximum(ways, self._interleaved(kind, lanes[0]))

    def _interleaved(self, kind: PairKind, compute: np.ndarray) -> np.ndarray:
        """[PAIR_TIMES, L] All compute of the pair less the runs issued before an input's first or after an output's last."""
        (n_0, n_1), (longest_0, longest_1) = ([of[letter][:, stage] for letter, stage in kind] for of in (self.runs.num, self.runs.longest))
        after = (np.floor(n_1 / n_0) * longest_1, (np.ceil(n_0 / n_1) - 1) * longest_0)
        before = (0.0, longest_0)
        crossing = [compute - before[i] - after[j] for i in (0, 1) for j in (0, 1)]
        ways = np.array([compute, compute, compute - longest_0, compute - after[0], compute - after[1], *crossing])
        return np.where(ways > 1e-9 * compute, ways, _NO_PATH)  # nothing left: the input may come after the output


def screen_structure(structure: Structure, num_microbatches: int, durations: Durations) -> np.ndarray:
    """Lower bound of the pipelined part of the step, [L], for L layouts of one structure (number of microbatches -> orders and
    placement; it is asked for fewer microbatches than `num_microbatches` too). ValueError where that many are not legal."""
    paths = critical_paths(structure, num_microbatches)
    times = np.zeros((len(paths.columns), len(durations.hop)))
    num_stages = paths.columns.num_stages
    for letter, seconds in durations.path.items():
        for at in (LETTERS.index(letter), LETTERS.index(letter) + len(LETTERS)):  # hold, reach
            times[at * num_stages : (at + 1) * num_stages] = seconds.T
    times[paths.columns.transfer : paths.columns.transfer + 2] = durations.hop
    for p, kind in enumerate(paths.columns.pairs):
        at = paths.columns.transfer + 2 + PAIR_TIMES * p
        times[at : at + PAIR_TIMES] = durations.pair(kind)
    _, placement = structure(num_microbatches)
    return np.maximum(screen(paths, times, num_microbatches), num_microbatches * _busiest(durations, placement, paths.letters))


def _busiest(durations: Durations, placement: tuple[int, ...], letters: frozenset[str]) -> np.ndarray:
    """[L] Seconds of one microbatch on the busiest lane of the busiest rank. Where a schedule runs some backwards whole and
    splits others, the lesser of the two."""
    split, lanes = "W" in letters, durations.lanes
    backward = lanes["I"] + lanes["W"] if split else lanes["B"]
    if split and "B" in letters:
        backward = np.minimum(backward, lanes["B"])
    held = np.equal.outer(np.array(placement), np.arange(max(placement) + 1)).astype(float)
    return ((lanes["F"] + backward) @ held).max(axis=(0, 2))


def screen(paths: CriticalPaths, times: np.ndarray, num_microbatches: int) -> np.ndarray:
    """Lower bound [L] for stage times [columns, L]. ValueError where `paths` don't cover the microbatches."""
    more = num_microbatches - paths.num_microbatches
    if more < 0 or (more % paths.period if paths.period else more):
        raise ValueError(f"paths of {paths.num_microbatches} microbatches that grow by {paths.period} don't cover {num_microbatches}")
    blocks = [times[:, start : start + _BLOCK] for start in range(0, times.shape[1], _BLOCK)]
    return np.concatenate([_longest(paths, block, more // max(1, paths.period)) for block in blocks])


def _longest(paths: CriticalPaths, times: np.ndarray, num_periods: int) -> np.ndarray:
    used = np.flatnonzero(paths.rows.any(axis=0) | paths.grow.any(axis=0))
    base = paths.rows[:, used] @ times[used]
    if not num_periods:
        return base.max(axis=0)
    work = paths.grow[:, used] @ times[used]
    longest = np.full(times.shape[1], NEVER)
    for lingers in np.unique(paths.lingers, axis=0):
        rows = (paths.lingers == lingers).all(axis=1)
        np.maximum(longest, base[rows].max(axis=0) + num_periods * work[lingers].max(axis=0), out=longest)
    return longest


def step_bound(program: Program) -> float:
    """Lower bound of one step of a program, in seconds; never above its longest path."""
    wires = check(program)
    orders, placement = program.orders[:: program.peers], tuple(rank // program.peers for rank in program.placement)
    paths = paths_of(orders, placement)
    matrices = [reduce(body, costs_of([body], None))[:, :, 0] for body in program.bodies]
    through = float(screen(paths, _times_of(program, paths.columns, wires, matrices), paths.num_microbatches)[0])
    alone = max(sum((np.diag(matrices[k])[:IN] for k in indices), np.zeros(IN)).max() for indices in program.body_index)
    return max(_before(program, wires) + through + _after(program, wires), float(alone), float(busy_seconds(program, wires)[0]))


def _times_of(program: Program, columns: Columns, wires: Wiring, matrices: list[np.ndarray]) -> np.ndarray:
    """Least stage times over the bodies that play each action, [columns, 1]; with every rank played, of peer 0."""
    times = np.full((len(columns), 1), np.inf)
    for r in range(0, program.num_ranks, program.peers):
        for entry, k, waits in dict.fromkeys(zip(map(_anonymous, program.orders[r]), program.body_index[r], wires.waits[r])):
            for column, value in _ways(columns, entry, matrices[k], waits, program.run_ahead == 1):
                times[column] = min(times[column, 0], value)
    for i, transfer in enumerate((program.transfer_forward, program.transfer_backward)):
        times[columns.transfer + i] = transfer.seconds if transfer else 0.0
    times[np.isposinf(times)] = 0.0  # columns that no entry has
    return np.maximum(times, _NO_PATH)


def _ways(columns: Columns, entry, matrix: np.ndarray, waits: frozenset[int], is_serial: bool) -> list[tuple[int, float]]:
    """(column, seconds) of each way through a body; a half without input gives no way in. An entry is held up by the compute
    stream, or, where the host doesn't run ahead (`is_serial`), by the end of the entry before, when its host starts."""
    rows = (END if is_serial else _STREAM, OUT, OUT + 1)
    sources = [HOST if is_serial else _STREAM, *(IN + j if j in waits else -1 for j in (0, 1))]
    if len(actions(entry)) == 1:
        hold, reach = (min(matrix[row, c] for c in sources[:2] if c >= 0) for row in rows[:2])
        return [(columns.hold(entry), hold), (columns.reach(entry), reach)]
    into_stream = [(rows[0], c) for c in sources]
    to_outputs = [(row, c) for c in sources for row in rows[1:]]
    ways = [matrix[row, c] if c >= 0 else 0.0 for row, c in into_stream + to_outputs]
    return list(enumerate(ways, columns.pair(entry)))


def _anonymous(entry):
    """The entry without its microbatches."""
    return type(entry)(*(a._replace(microbatch=0) for a in entry)) if len(actions(entry)) == 2 else entry._replace(microbatch=0)


def _before(program: Program, wires: Wiring) -> float:
    """When the prologue lets the first entry of the rank where every path begins go on, by its gate or (see _ways) its host."""
    board, first = Board([program], wires, 1, None), program.placement[0]
    if program.run_ahead == 1:
        return float(board.state[first, HOST, 0])
    return float(board.gates.get(wires.first[first], np.zeros(1))[0])


def _after(program: Program, wires: Wiring) -> float:
    """The least that follows the end of a rank's last entry, whichever rank ends last."""
    num_ranks = program.num_ranks
    board = Board([program], wires, num_ranks, None)
    board.run_ahead = 0
    board.state[:], board.ends[:] = NEVER, NEVER
    ended = HOST if program.run_ahead == 1 else _STREAM  # what a way through the last entry ends in, see _ways
    for r, last in enumerate((*wires.first[1:], wires.num_entries)):
        board.state[r, ended, r] = board.ends[last - 1, r] = 0.0
    return float(board.finish().min())
