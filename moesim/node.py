"""What do the ranks of one node share, how fast does each of their tasks go, and how long is the node busy at least?

A node has so many units of each resource in `Program.shared`; what a task takes there at solo speed stands in its `uses`. A played
rank that stands for n identical ranks of its node takes n times as much, yet is fair as one of them: max-min fairness is between
ranks, not between what is played. A rank pinned to a core shares that core with the others pinned to it, and no other. A transfer
takes its share at both ends.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from functools import lru_cache

import numpy as np

from moesim.maxplus import costs_of
from moesim.program import CORES, SEND_NEXT, SEND_PREV, Body, Program, Seat
from moesim.sharing import Load, ceilings, max_min
from moesim.wiring import Wiring

Takes = tuple[tuple[tuple, float], ...]
"""(resource of a node or rank, share of its capacity) at solo speed, of all ranks that a played rank stands for."""
SLACK = 1.0 + 1e-9


def nodes(program: Program) -> dict[int, list[int]]:
    """node -> the played ranks on it."""
    found: dict[int, list[int]] = defaultdict(list)
    for rank in range(program.num_ranks):
        found[program.seat(rank).node].append(rank)
    return found


def takes(program: Program, rank: int, load: Load) -> tuple[Takes, float]:
    """What a load of one rank takes at solo speed, and the largest share that one of its identical ranks takes."""
    seat, found, top = program.seat(rank), [], 0.0
    ends = [seat] if load.receiver < 0 or program.seat(load.receiver).node != seat.node else [seat, program.seat(load.receiver)]
    for name, use in load.uses:
        if name not in program.shared:
            found.append(((name, rank), use))
            top = max(top, use)
            continue
        for end in ends:
            for key, share, count in _shares(name, use, program.shared[name], end):
                found.append((key, share * count))
                top = max(top, share)
    return tuple(found), top


def _shares(name: str, use: float, capacity: float, seat: Seat) -> Iterator[tuple[tuple, float, int]]:
    """(resource, share that one rank takes, ranks that take it)."""
    if seat.pins and name == CORES:
        yield from (((name, "core", core), use * len(seat.pins) / capacity, count) for core, count in enumerate(seat.pins) if count)
    else:
        yield (name,), use / capacity, seat.peers


def receivers(program: Program, wires: Wiring, rank: int) -> dict[int, dict[int, int]]:
    """send stream -> receiving rank -> how many transfers `rank` sends there."""
    found: dict[int, dict[int, int]] = {SEND_NEXT: defaultdict(int), SEND_PREV: defaultdict(int)}
    for slot in range(2 * wires.first[rank], 2 * (wires.first[rank] + len(program.orders[rank]))):
        if wires.stream[slot] >= 0:
            found[wires.stream[slot]][wires.rank[wires.target[slot] >> 1]] += 1
    return found


def transfer_load(program: Program, stream: int, receiver: int) -> Load:
    transfer = program.transfer_forward if stream == SEND_NEXT else program.transfer_backward
    return Load("send", transfer.uses if transfer else (), 0, stream, receiver)


def is_contested(program: Program, wires: Wiring, ranks: list[int]) -> bool:
    """Could tasks of these ranks of one node ever want more than the node has? (One task a stream, whatever they wait for.)"""
    wanted: dict[tuple, float] = defaultdict(float)
    for rank in ranks:
        most: dict[tuple[int, tuple], float] = defaultdict(float)
        for stream, load in _loads(program, wires, rank):
            total: dict[tuple, float] = defaultdict(float)
            for key, share in takes(program, rank, load)[0]:
                total[key] += share
            for key, share in total.items():
                most[stream, key] = max(most[stream, key], share)
        for (_, key), share in most.items():
            wanted[key] += share
    return any(share > SLACK for key, share in wanted.items() if key[0] in program.shared)


def _loads(program: Program, wires: Wiring, rank: int) -> set[tuple[int, Load]]:
    """Every (stream, load) of one rank."""
    bodies = [program.bodies[k] for k in set(program.body_index[rank])] + [ends[rank] for ends in (program.prologue, program.epilogue) if ends]
    found = {(task.stream, Load(task.kind, task.uses, task.sms, task.stream)) for body in bodies for task in body}
    return found | {(stream, transfer_load(program, stream, to)) for stream, many in receivers(program, wires, rank).items() for to in many}


# --- the engine's view ------------------------------------------------------------------------------------------------------------


class Node:
    """Ranks whose rates depend on each other: all are given new rates when a task of any of them has started or ended. Times in
    seconds; `world` and its ranks are those of `moesim.engine`."""

    def __init__(self, world, ranks: list) -> None:
        self.world, self.ranks = world, ranks
        self.time, self.is_due = 0.0, False
        self.rates = lru_cache(maxsize=None)(self._rates)
        for rank in ranks:
            rank.share(self)

    def refresh(self, time: float) -> None:
        """New rates from `time` on, once all that happens at that moment has happened."""
        self.time = max(self.time, time)
        if not self.is_due:
            self.is_due = True
            self.world.at(time, self._retime)

    def _retime(self) -> None:
        self.is_due = False
        found = self.rates(tuple(tuple(rank.running) for rank in self.ranks))
        changed = [rank for i, rank in enumerate(self.ranks) if rank.take(found[i] if found else None, self.time)]
        for rank in changed:
            rank.go()

    def _rates(self, running: tuple[tuple[int, ...], ...]) -> list[tuple[float, ...]] | None:
        """Rates [rank][lane] where `running` holds the number of each lane's load (0: idle); None if all go at solo speed."""
        world, loads = self.world, list(self.world.loads)
        limits: list[float] = []
        wanted: list[tuple[Takes, float]] = []
        for rank, numbers in zip(self.ranks, running):
            here = [loads[number - 1] for number in numbers if number]
            limits += ceilings(here, world.gammas, world.program.num_sms)
            wanted += [takes(world.program, rank.number, load) for load in here]
        found = iter(max_min(limits, [use for use, _ in wanted], [top for _, top in wanted]))
        rates = [tuple(next(found) if number else 1.0 for number in numbers) for numbers in running]
        return rates if any(rate != 1.0 for row in rates for rate in row) else None


# --- the least a node needs -------------------------------------------------------------------------------------------------------


def busy_seconds(program: Program, wires: Wiring, draws: Mapping[str, np.ndarray] | None = None) -> np.ndarray:
    """Seconds [draws, or 1] in which the busiest node can't have done its work sooner, whatever the order: what its ranks take of a
    resource, times how long, over its capacity. 0 where nothing is shared."""
    worked: dict[tuple, np.ndarray] = {}
    bodies: dict[int, dict] = {}
    for rank in range(program.num_ranks) if program.shared else ():
        for load, seconds in _work(program, wires, rank, draws, bodies):
            for key, share in takes(program, rank, load)[0]:
                if key[0] in program.shared:
                    at = (program.seat(rank).node, *key)
                    worked[at] = worked.get(at, 0.0) + share * seconds
    return np.maximum.reduce(list(worked.values())) if worked else np.zeros(1)


def _work(program: Program, wires: Wiring, rank: int, draws, known: dict[int, dict]) -> Iterator[tuple[Load, np.ndarray]]:
    """(load, seconds of the tasks with it) of one rank, body by body."""
    played = [(program.bodies[k], count) for k, count in Counter(program.body_index[rank]).items()]
    for body, count in played + [(ends[rank], 1) for ends in (program.prologue, program.epilogue) if ends]:
        if id(body) not in known:
            known[id(body)] = _body_work(body, draws)
        yield from ((Load("", uses), count * seconds) for uses, seconds in known[id(body)].items())
    for stream, many in receivers(program, wires, rank).items():
        transfer = program.transfer_forward if stream == SEND_NEXT else program.transfer_backward
        for to, count in many.items() if transfer else ():
            yield transfer_load(program, stream, to), count * transfer.seconds * np.atleast_1d((draws or {}).get("send", 1.0))


def _body_work(body: Body, draws) -> dict[tuple, np.ndarray]:
    """What tasks use -> their seconds [draws, or 1]."""
    total: dict[tuple, np.ndarray] = {}
    for task, seconds in zip(body, costs_of([body], draws).seconds) if body else ():
        if task.uses:
            total[task.uses] = total.get(task.uses, 0.0) + seconds
    return total
