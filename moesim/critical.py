"""Which chains of work can decide how long a schedule takes? (Paths of its graph, as sums over stage times.)

A path through the order graph is a sum of stage times with whole-number weights, and the step is no shorter than any path. So a
structure (schedule, ranks, chunks) is examined once: it is played with a few dozen sets of stage times, the critical path of
each is traced back, and the distinct ones are kept as rows of weights. A bound for any number of layouts is then a matrix
product and a maximum; each row is a real path, so the bound holds whatever the times are, and is exact where the critical
path is among the rows.

Number of microbatches: orders of a schedule repeat in the steady state, so a path that crosses it on some rank stays a path when
m grows if it lingers there for one more period of that rank's work; `grow` holds those periods. Where an order doesn't repeat,
the structure is examined at the number of microbatches asked for.

Columns of a row: hold of (letter, stage), reach of (letter, stage), transfer forward, transfer backward, then PAIR_TIMES columns
for each kind of pair. "hold" is how long an action keeps the compute stream, "reach" how long until its output, both from its
input or a free stream, whichever is later. In a pair each way through has its own time: the halves get in each other's way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from moesim.program import SEND_NEXT
from moesim.schedules import LETTERS, Action, Pair
from moesim.wiring import Wiring, actions, wire

PairKind = tuple[tuple[str, int], tuple[str, int]]
Structure = Callable[[int], tuple[tuple, tuple[int, ...]]]
"""number of microbatches -> (orders, placement); ValueError where it is not legal."""
_REMEMBERED = 1024
PAIR_TIMES = 9
"""Stream to stream; inputs 0, 1 to stream; stream to outputs 0, 1; input i to output j at 5 + 2 i + j."""
_NEVER = -1e30
_SEED = 20_240_601  # of the stage times that are tried; any will do
_NUM_RANDOM = 20


@dataclass(frozen=True)
class Columns:
    """Where each stage time stands in a row: see the file's docstring. pairs[i] = ((letter, stage), (letter, stage))."""

    num_stages: int
    pairs: tuple[PairKind, ...]

    def hold(self, action: Action) -> int:
        return LETTERS.index(action.letter) * self.num_stages + action.stage

    def reach(self, action: Action) -> int:
        return self.hold(action) + len(LETTERS) * self.num_stages

    @property
    def transfer(self) -> int:
        return 2 * len(LETTERS) * self.num_stages

    def pair(self, pair: Pair) -> int:
        """The first of its columns."""
        return self.transfer + 2 + PAIR_TIMES * self.pairs.index(pair_kind(pair))

    def __len__(self) -> int:
        return self.transfer + 2 + PAIR_TIMES * len(self.pairs)


@dataclass(frozen=True)
class CriticalPaths:
    """letters = those of the orders; rows [P, columns] at num_microbatches; grow [G, columns]: what one more period (`period` microbatches) may add, a period
    of one rank's work each; lingers [P, G]: whether row p stays a path with it put in. period = 0: it can't grow, G = 0."""

    columns: Columns
    letters: frozenset[str]
    num_microbatches: int
    rows: np.ndarray
    period: int
    grow: np.ndarray
    lingers: np.ndarray


def pair_kind(pair: Pair) -> PairKind:
    return (pair.first.letter, pair.first.stage), (pair.second.letter, pair.second.stage)


def critical_paths(structure: Structure, num_microbatches: int) -> CriticalPaths:
    """Paths that bound a step with so many microbatches; where they can grow, those of fewer. ValueError where the orders are
    not legal."""
    orders, placement = structure(num_microbatches)
    pp = len(orders)
    for period in dict.fromkeys((1, 2, pp, 2 * pp)):
        fewer = 3 * pp + 2 + (num_microbatches - 3 * pp - 2) % period  # comes to the steady state and leaves it on every rank
        if fewer <= num_microbatches and (found := _growing(structure, fewer, period)):
            return found
    return paths_of(orders, placement)


def _growing(structure: Structure, num_microbatches: int, period: int) -> CriticalPaths | None:
    """Paths that can take on further periods; None where the orders are not legal or don't repeat so."""
    try:
        (orders, placement), (longer, _) = structure(num_microbatches), structure(num_microbatches + period)
    except ValueError:
        return None
    return _find_growing(orders, placement, longer, num_microbatches, period)


@lru_cache(maxsize=_REMEMBERED)
def _find_growing(orders, placement: tuple[int, ...], longer, num_microbatches: int, period: int) -> CriticalPaths | None:
    pp = len(orders)
    if placement == tuple(range(pp)) and orders == _phases(pp, num_microbatches):
        return _phase_paths(pp)
    grown = _repeats(orders, longer, period)
    if not grown:
        return None
    graph = _Graph(orders, placement)
    found = [(trace.row, may) for trace in graph.critical() if (may := trace.lingers(graph.wires, grown)).any()]
    if not found:
        return None
    grow = [graph.work(longer[r], at, size) for r, (at, size) in enumerate(zip(grown.shared, grown.added))]
    rows, lingers = map(np.array, zip(*found))
    return CriticalPaths(graph.columns, graph.letters, num_microbatches, rows, period, np.array(grow), lingers)


@lru_cache(maxsize=_REMEMBERED)
def paths_of(orders, placement: tuple[int, ...]) -> CriticalPaths:
    """Paths of given orders, at their own number of microbatches."""
    graph = _Graph(orders, placement)
    rows = np.array([trace.row for trace in graph.critical()])
    num_microbatches = 1 + max(action.microbatch for acts in graph.flat for action in acts)
    none = np.zeros((0, len(graph.columns)))
    return CriticalPaths(graph.columns, graph.letters, num_microbatches, rows, 0, none, np.zeros((len(rows), 0), bool))


def _phases(pp: int, num_microbatches: int) -> tuple:
    """Orders that run all forwards, then all backwards (GPipe): no steady state in which both alternate."""
    return tuple(tuple(Action(r, letter, m) for letter in "FB" for m in range(num_microbatches)) for r in range(pp))


def _phase_paths(pp: int) -> CriticalPaths:
    """One microbatch goes down and up; each further one adds the forward of one rank and the backward of one rank."""
    columns = Columns(pp, ())
    row = np.zeros((1, len(columns)))
    for r in range(pp):
        row[0, columns.hold(Action(r, "B", 0)) if r == 0 else columns.reach(Action(r, "B", 0))] = 1.0
        row[0, columns.reach(Action(r, "F", 0))] = 1.0
    row[0, columns.transfer : columns.transfer + 2] = pp - 1
    grow = np.zeros((pp * pp, len(columns)))
    for i in range(pp * pp):
        grow[i, columns.hold(Action(i // pp, "F", 0))] = grow[i, columns.hold(Action(i % pp, "B", 0))] = 1.0
    return CriticalPaths(columns, frozenset("FB"), 1, row, 1, grow, np.ones((1, pp * pp), bool))


def _tries(columns: Columns, placement: tuple[int, ...]) -> np.ndarray:
    """Stage times to play with, [columns, tries]: even stages, one rank heavier than the others, ends heavier, and random ones;
    backward / forward and transfers as they come in training (B about 2 F, I and W about F each, transfers small)."""
    rng = np.random.default_rng(_SEED)
    num_ranks, rank_of = max(placement) + 1, np.array(placement)
    scale = [np.ones(len(placement))] * 2
    scale += [1.0 + amount * (rank_of == rank) for rank in range(num_ranks) for amount in (0.15, 1.0)]
    scale += [np.where(np.arange(len(placement)) == stage, 1.6, 1.0) for stage in (0, len(placement) - 1)]
    scale += list(np.exp(rng.normal(0.0, 0.12, (_NUM_RANDOM, len(placement)))))
    num = len(scale)
    scale *= 3 if columns.pairs else 1
    times = np.empty((len(columns), len(scale)))
    for i, stages in enumerate(scale):
        by_letter = np.array([1.0, rng.uniform(1.8, 2.2), rng.uniform(0.9, 1.2), rng.uniform(0.7, 1.1)])
        times[: columns.transfer, i] = np.tile((by_letter[:, None] * stages).ravel(), 2)
        times[columns.transfer : columns.transfer + 2, i] = 0.0 if i == 0 else rng.uniform(0.0, 0.2)
        overlap = rng.uniform(0.6, 1.0)
        for p, pair in enumerate(columns.pairs):
            first, second = (by_letter[LETTERS.index(letter)] * stages[stage] for letter, stage in pair)
            at = columns.transfer + 2 + PAIR_TIMES * p
            times[at : at + PAIR_TIMES, i] = _pair_times(first, second, overlap, i // num)
    return times


def _pair_times(first: float, second: float, overlap: float, way: int) -> list[float]:
    """Times of a pair whose halves 0: run evenly mixed, 1: don't meet but on the stream, 2: follow each other."""
    if way == 2:
        whole = first + second
        return [whole, whole, second, first, whole, first, whole, _NEVER, second]
    whole = max(first, second, overlap * (first + second))
    return [whole] * PAIR_TIMES if way == 0 else [whole, first, second, first, second, first, _NEVER, _NEVER, second]


@dataclass(frozen=True)
class _Trace:
    """A path: its row of weights and the entries it visits, first to last."""

    row: np.ndarray
    entries: tuple[int, ...]

    def lingers(self, wires: Wiring, grown: _Grown) -> np.ndarray:
        """[ranks] Whether the path may stay one more period on a rank: it visits an entry there that both orders share from
        the start and (shifted by the period) to the end, after entries shared from the start, before entries shared to the end."""
        places = [(wires.rank[e], e - wires.first[wires.rank[e]]) for e in self.entries]
        from_start = [at < grown.shared[r] for r, at in places]
        to_end = [at >= grown.kept_from[r] for r, at in places]
        first = next(i for i in range(len(to_end)) if all(to_end[i:])) if to_end[-1] else len(to_end)
        may = np.zeros(len(grown.shared), bool)
        for (r, _), shared, i in zip(places, from_start, range(len(places))):
            if not shared:
                break
            may[r] |= i >= first
        return may


class _Graph:
    """The order graph of a structure, to be played with many sets of stage times at once."""

    def __init__(self, orders, placement: tuple[int, ...]) -> None:
        self.wires, self.placement = wire(orders, placement), placement
        self.flat = [actions(entry) for order in orders for entry in order]
        self.letters = frozenset(action.letter for acts in self.flat for action in acts)
        pairs = dict.fromkeys(pair_kind(entry) for order in orders for entry in order if isinstance(entry, Pair))
        self.columns = Columns(len(placement), tuple(pairs))
        self.opening = frozenset(self.wires.first)
        self.ways = [self._ways(acts) for acts in self.flat]

    def _ways(self, acts: tuple[Action, ...]) -> tuple[int, ...]:
        """The column of each way through an entry, in the order of PAIR_TIMES."""
        if len(acts) == 2:
            return tuple(range(at := self.columns.pair(Pair(*acts)), at + PAIR_TIMES))
        hold, reach = self.columns.hold(acts[0]), self.columns.reach(acts[0])
        return (hold, hold, hold, reach, reach, reach, reach, reach, reach)

    def critical(self) -> list[_Trace]:
        """The distinct critical paths of the stage times that are tried."""
        return list({trace.row.tobytes(): trace for trace in self._critical(_tries(self.columns, self.placement))}.values())

    def _critical(self, times: np.ndarray) -> Iterator[_Trace]:
        freed, delivered = self._play(times)
        ends = [end - 1 for end in (*self.wires.first[1:], self.wires.num_entries)]
        for i, last in enumerate(np.argmax(freed[ends], axis=0)):
            yield self._trace(ends[last], freed[:, i].tolist(), delivered[:, i].tolist(), times[:, i].tolist())

    def _play(self, times: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """When each entry frees the compute stream [entries + 1, tries] and each slot is delivered [slots + 1, tries]."""
        wires = self.wires
        freed = np.zeros((wires.num_entries + 1, times.shape[1]))
        delivered = np.zeros((2 * wires.num_entries + 1, times.shape[1]))
        delivered[-1] = _NEVER  # what an entry without input waits for
        before = np.array([-1 if e in self.opening else e - 1 for e in range(wires.num_entries)])
        source, stream = np.array(wires.source), np.array(wires.stream).reshape(-1, 2)
        ways, padded = np.array(self.ways), np.vstack([times, np.zeros(times.shape[1])])
        travel = np.where(stream >= 0, self.columns.transfer + stream - SEND_NEXT, len(times))
        for level in map(list, wires.levels):
            start, arrival = freed[before[level]], delivered[source[level].T]
            way = times[ways[level].T]
            freed[level] = np.maximum(start + way[0], np.maximum(arrival[0] + way[1], arrival[1] + way[2]))
            for j in (0, 1):
                out = np.maximum(start + way[3 + j], np.maximum(arrival[0] + way[5 + j], arrival[1] + way[7 + j]))
                delivered[2 * np.array(level) + j] = out + padded[travel[level, j]]
        return freed, delivered

    def _trace(self, e: int, freed: list[float], delivered: list[float], times: list[float]) -> _Trace:
        """Walks back from the end of entry e. `slot` = the delivery to explain, or -1: the stream getting free."""
        row, visited, slot = [0] * len(self.columns), [], -1
        sources, streams = self.wires.source, self.wires.stream
        while e >= 0:
            visited.append(e)
            ways = self.ways[e]
            before = -1 if e in self.opening else e - 1
            if slot < 0:
                stream_way, input_ways = ways[0], ways[1:3]
            else:
                stream_way, input_ways = ways[3 + (slot & 1)], (ways[5 + (slot & 1)], ways[7 + (slot & 1)])
                if streams[slot] >= 0:
                    row[self.columns.transfer + streams[slot] - SEND_NEXT] += 1
            latest, came_from, way = (freed[before] if before >= 0 else 0.0) + times[stream_way], -1, stream_way
            for source, input_way in zip(sources[e], input_ways):
                if source >= 0 and delivered[source] + times[input_way] > latest:
                    latest, came_from, way = delivered[source] + times[input_way], source, input_way
            row[way] += 1
            e, slot = (came_from >> 1, came_from) if came_from >= 0 else (before, -1)
        return _Trace(np.array(row, dtype=float), tuple(reversed(visited)))

    def work(self, order, at: int, size: int) -> np.ndarray:
        """Weights of `size` entries of an order from position `at` on."""
        row = np.zeros(len(self.columns))
        for entry in order[at : at + size]:
            row[self.columns.pair(entry) if isinstance(entry, Pair) else self.columns.hold(entry)] += 1.0
        return row


@dataclass(frozen=True)
class _Grown:
    """How orders differ from those with one more period: by rank, the first `shared` entries are the same, and those from
    `kept_from` on are the same with later microbatches; `added` = entries of one period, put in between."""

    shared: list[int]
    kept_from: list[int]
    added: list[int]


def _repeats(orders, longer, period: int) -> _Grown | None:
    """None where the longer orders are not the shorter ones with a period put in, on some rank."""
    shared = [_num_equal(a, b) for a, b in zip(orders, longer)]
    kept = [_num_equal(_shift(reversed(a), period), reversed(b)) for a, b in zip(orders, longer)]
    kept_from = [len(order) - num for order, num in zip(orders, kept)]
    if any(at <= start for at, start in zip(shared, kept_from)):
        return None
    return _Grown(shared, kept_from, [len(b) - len(a) for a, b in zip(orders, longer)])


def _num_equal(a, b) -> int:
    num = 0
    for x, y in zip(a, b):
        if x != y:
            break
        num += 1
    return num


def _shift(order, period: int) -> Iterator:
    for entry in order:
        if isinstance(entry, Pair):
            yield Pair(*(action._replace(microbatch=action.microbatch + period) for action in entry))
        else:
            yield entry._replace(microbatch=entry.microbatch + period)
