"""How long does a step take when running things share links, memory and SMs? (The discrete-event simulation, on simpy.)

Each rank (`moesim.rank`) plays its own events for as long as nothing from outside can reach it; else it sleeps on a simpy
timeout per event. Between ranks everything (arrivals, barriers, rendezvous) is a simpy timeout. Rates are looked up by the
set of running tasks, and a task is re-timed only when its rate changes. Ranks of a node that could want more of what they share
than it has (`moesim.node`) never run ahead: a start or end at one of them re-times all.

Rules: ties are resolved by (time, rank, stream, issue order), a stream's order being fixed beforehand. A task takes its SMs
when it starts or begins to wait for its peers (a collective's kernel spins there); waiting tasks try again in stream order
whenever SMs get free. A rendezvous group starts when its last member is ready, takes the longest of its members' seconds and
goes at the lowest rate that any member's rank grants. Else the rules are those of `moesim.paths`; rates: `moesim.sharing`.
Rates never exceed 1 and orders are fixed, so no event comes earlier than in the longest path.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import simpy

from moesim.compiled import Compiled
from moesim.node import Node, is_contested, nodes, transfer_load
from moesim.play import Jitter
from moesim.program import SEND_NEXT, SEND_PREV, STREAMS, Program, Task
from moesim.rank import NEVER, Rank
from moesim.sharing import Load, gamma_table, rates
from moesim.timeline import Record, Timeline, record_spans
from moesim.wiring import check, rendezvous


def run(program: Program, *, jitter: Jitter | None = None, spans: bool = True) -> Timeline:
    """One step with contention. `spans=False` keeps the makespan only. ValueError (one line) for a deadlock."""
    world = _World(program, jitter, spans)
    for rank in world.ranks:
        rank.go()
    world.env.run()
    stuck = [rank for rank in world.ranks if not rank.ended()]
    if stuck:
        raise ValueError("deadlock: " + ", ".join(rank.where() for rank in stuck[:4]))
    makespan = max(rank.last_end for rank in world.ranks)
    return Timeline(makespan, program.num_ranks, (lambda rank=None: record_spans(program, world.records, rank)) if spans else (lambda rank=None: ()))


class _World:
    """What ranks share: the clock, deliveries by slot, meetings, and the table of rates by what runs."""

    def __init__(self, program: Program, jitter: Jitter | None, spans: bool) -> None:
        self.program, self.jitter = program, jitter
        self.env = simpy.Environment()
        self.wires = check(program)
        self.delivered = [NEVER] * (2 * self.wires.num_entries)
        self.records: list[Record] | None = [] if spans else None
        self.loads: dict[Load, int] = {}
        self.gammas = gamma_table(program.gammas)
        self.rates = lru_cache(maxsize=None)(self._rates)
        self.sends = [self._send(stream) for stream in (SEND_NEXT, SEND_PREV)]
        compiled = {id(body): Compiled(body, self._signature) for body in (*program.bodies, *program.prologue, *program.epilogue, ())}
        self.ranks = [Rank(self, r, compiled) for r in range(program.num_ranks)]
        for ranks in nodes(program).values() if program.shared else ():
            if is_contested(program, self.wires, ranks):
                Node(self, [self.ranks[r] for r in ranks])
        self.meetings = {key: _Meeting(self, len(ranks), key[0] == "barrier") for key, ranks in rendezvous(program).items()}

    def _send(self, stream: int) -> tuple[float, int] | None:
        transfer = self.program.transfer_forward if stream == SEND_NEXT else self.program.transfer_backward
        return transfer and (transfer.seconds, self._number(Load("send", transfer.uses, 0, stream)))

    def _signature(self, task: Task) -> int:
        if self.program.num_sms and task.sms > self.program.num_sms:
            raise ValueError(f"task {task.name} wants {task.sms} SMs of a GPU that has {self.program.num_sms}")
        return self._number(Load(task.kind, task.uses, task.sms, task.stream))

    def _number(self, load: Load) -> int:
        if any(use > self.program.shared.get(name, 1.0) * (1.0 + 1e-9) for name, use in load.uses):
            raise ValueError(f"{load.kind}: a task alone may use at most all of a resource, got {load.uses}")
        return self.loads.setdefault(load, len(self.loads) + 1)

    def number_of_send(self, stream: int, receiver: int) -> int:
        """Number of the load of a transfer to a rank that may share the sender's node."""
        return self._number(transfer_load(self.program, stream, receiver))

    def _rates(self, running: tuple[int, ...]) -> tuple[float, ...] | None:
        """Rate by lane where `running` holds the number of each lane's load (0: idle); None if all go at solo speed."""
        loads = self._own_loads()
        lanes = [lane for lane, number in enumerate(running) if number]
        found = dict(zip(lanes, rates([loads[running[lane] - 1] for lane in lanes], self.gammas, self.program.num_sms)))
        return tuple(found.get(lane, 1.0) for lane in range(len(STREAMS))) if any(rate != 1.0 for rate in found.values()) else None

    def _own_loads(self) -> list[Load]:
        """Loads by number, as the ranks of a node that has enough of what they share feel them."""
        shared = self.program.shared
        return [load._replace(uses=tuple(use for use in load.uses if use[0] not in shared)) for load in self.loads] if shared else list(self.loads)

    @property
    def now(self) -> float:
        return self.env.now

    def at(self, time: float, action: Callable[[], None]) -> None:
        """Calls `action` when the clock reaches `time`."""
        timeout = self.env.timeout(max(0.0, time - self.env.now))
        timeout.callbacks.append(lambda _: action())

    def deliver(self, slot: int, time: float) -> None:
        target = self.wires.target[slot]
        if target < 0:
            return
        rank = self.ranks[self.wires.rank[target >> 1]]
        if self.wires.stream[slot] < 0:
            self.delivered[slot] = time
        else:
            self.at(time, lambda: rank.receive(slot, time))


class _Meeting:
    """Ranks that wait for each other: a barrier (start together) or a rendezvous group (start and end together)."""

    def __init__(self, world: _World, num_members: int, is_barrier: bool) -> None:
        self.world, self.num_members, self.is_barrier = world, num_members, is_barrier
        self.members: list[tuple[Rank, int, float]] = []
        self.start = 0.0
        self.granted: dict[int, float] = {}
        self.rate, self.left, self.since, self.due = 0.0, 0.0, 0.0, NEVER

    def reach(self, rank: Rank, lane: int, time: float, seconds: float) -> None:
        self.members.append((rank, lane, seconds))
        self.start = max(self.start, time)
        if len(self.members) == self.num_members:
            self.world.at(self.start, self.begin)

    def begin(self) -> None:
        self.members.sort(key=lambda member: member[0].number)
        if not self.is_barrier:
            self.left, self.since = max(seconds for _, _, seconds in self.members), self.start
            self.granted = {rank.number: 0.0 for rank, _, _ in self.members}
        for rank, lane, seconds in self.members:
            rank.begin(lane, self.start, seconds, None if self.is_barrier else self)
            rank.num_coupled -= self.is_barrier
        for rank, _, _ in self.members:
            rank.go()

    def grant(self, number: int, rate: float, time: float) -> None:
        """Rank `number` now lets the group go at `rate`."""
        self.granted[number] = rate
        slowest = min(self.granted.values())
        if slowest != self.rate:
            self.left, self.since, self.rate = self.left - (time - self.since) * self.rate, time, slowest
            self.due = due = time + self.left / slowest if slowest else NEVER
            if slowest:
                self.world.at(due, lambda: self.end(due))

    def end(self, due: float) -> None:
        if due != self.due:
            return  # the rate changed since this end was foreseen
        self.due = NEVER
        for rank, lane, _ in self.members:
            rank.num_coupled -= 1
            rank.finish(lane, due)
        for rank, _, _ in self.members:
            rank.go()
