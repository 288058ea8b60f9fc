"""What does a step look like task by task if nothing contends? (The longest path in plain Python, with a span for each task.)

Each rank is a generator that walks its tasks in the order of the host and yields where it needs what another rank hasn't
produced; ranks are resumed in turn until all end, or none moves (a deadlock). Times never depend on that turn: each is a
maximum over things that are final.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from moesim.program import NUM_LANES, SEND_NEXT, SEND_PREV, STREAMS, Body, Program, Task
from moesim.timeline import Record, Timeline, record_spans
from moesim.wiring import AT_EPILOGUE, AT_PROLOGUE, barriers, check, closing, rendezvous

Jitter = Sequence[Sequence[float]]
"""jitter[rank][position] multiplies the device seconds of that entry's tasks; host costs and transfers keep theirs."""


def play(program: Program, *, jitter: Jitter | None = None) -> Timeline:
    """The longest path of one program with all spans. ValueError (one line) for a deadlock."""
    player = _Player(program, jitter)
    ranks = [player.walk(r) for r in range(program.num_ranks)]
    while ranks:
        before = player.num_moves
        ranks = [rank for rank in ranks if next(rank, "ended") != "ended"]
        if ranks and player.num_moves == before:
            raise ValueError("deadlock: " + ", ".join(f"rank {r} waits at {where}" for r, where in sorted(player.where.items())[:4]))
    return Timeline(player.makespan, program.num_ranks, lambda rank=None: record_spans(program, player.records, rank))


def scaled_lag(task: Task, seconds: float) -> float:
    """lag_s of a task whose device time became `seconds`: scales with host + device time, exact for a single kernel."""
    together = task.host_s + task.seconds
    return task.lag_s * (task.host_s + seconds) / together if together > 0 else 0.0


class _Player:
    """What ranks share: deliveries by slot, ends by entry, meetings (groups and barriers), and the records made."""

    def __init__(self, program: Program, jitter: Jitter | None) -> None:
        self.program, self.jitter = program, jitter
        self.wires = check(program)
        barriers(program)
        self.delivered: list[float | None] = [None] * (2 * self.wires.num_entries)
        self.ends = [0.0] * self.wires.num_entries
        self.num_members = {key: len(ranks) for key, ranks in rendezvous(program).items()}
        self.num_arrived: Counter = Counter()
        self.meeting: dict[tuple, tuple[float, float]] = {}
        self.records: list[Record] = []
        self.where: dict[int, str] = {}
        self.num_moves = 0
        self.makespan = 0.0

    def walk(self, r: int) -> Iterator[None]:
        rank, program = _Rank(self, r), self.program
        if program.prologue:
            yield from rank.body(AT_PROLOGUE, program.prologue[r])
        gate_ends = rank.ends
        for i, k in enumerate(program.body_index[r]):
            entry = self.wires.first[r] + i
            while any(slot >= 0 and self.delivered[slot] is None for slot in self.wires.source[entry]):
                self.where[r] = f"{program.orders[r][i]}, position {i}"
                yield
            rank.open(i, entry, gate_ends)
            yield from rank.body(i, program.bodies[k], entry, self.jitter[r][i] if self.jitter is not None else 1.0)
        rank.limit(len(program.orders[r]))
        if program.epilogue:
            yield from rank.body(AT_EPILOGUE, program.epilogue[r])
        self.makespan = max(self.makespan, *rank.streams)
        self.where.pop(r, None)
        self.num_moves += 1

    def meet(self, key: tuple, rank: int, ready: float, seconds: float) -> Iterator[None]:
        """Waits until every member has come; afterwards `meeting[key]` is (start, longest seconds)."""
        start, longest = self.meeting.get(key, (0.0, 0.0))
        self.meeting[key] = (max(start, ready), max(longest, seconds))
        self.num_arrived[key] += 1
        self.num_moves += 1
        while self.num_arrived[key] < self.num_members[key]:
            self.where[rank] = f"{key[0]} {key[1]}"
            yield


class _Rank:
    """One rank's clocks: the host, and when each stream is free."""

    def __init__(self, player: _Player, rank: int) -> None:
        self.player, self.rank = player, rank
        self.host = 0.0
        self.streams = [0.0] * NUM_LANES
        self.freed_by = ["start"] * NUM_LANES
        self.sent = {SEND_NEXT: 0.0, SEND_PREV: 0.0}
        self.ends: list[float] = []

    def open(self, position: int, entry: int, gate_ends: list[float]) -> None:
        """Run-ahead limit and gates, before the first task of an entry."""
        self.limit(position)
        gates = self.player.program.gates
        for chunk in self.player.wires.opens.get(entry, ()) if gates else ():
            task = gates[self.rank][chunk]
            for stream, free in enumerate(self.streams) if task >= 0 else ():
                if gate_ends[task] > free:
                    self.streams[stream], self.freed_by[stream] = gate_ends[task], "gate"

    def limit(self, position: int) -> None:
        """The host goes on at `position` only when the entry run_ahead before it has ended."""
        ended = position - self.player.program.run_ahead
        if ended >= 0:
            self.host = max(self.host, self.player.ends[self.player.wires.first[self.rank] + ended])

    def body(self, position: int, body: Body, entry: int = -1, scale: float = 1.0) -> Iterator[None]:
        self.ends = []
        outputs: dict[int, float] = {}
        opened = self.host
        for k, task in enumerate(body):
            seconds = task.seconds * scale
            start, cause, transfer = self._ready(body, task, seconds, entry)
            key = (position, task.group) if task.group >= 0 else ("barrier", task.barrier) if task.barrier >= 0 else None
            if key:
                yield from self.player.meet(key, self.rank, start, seconds)
                together, longest = self.player.meeting[key]
                start, cause = (together, "barrier") if together > start else (start, cause)
                seconds = longest if task.group >= 0 else seconds
            end = start + seconds
            self.streams[task.stream], self.freed_by[task.stream] = end, STREAMS[task.stream]
            self.ends.append(end)
            self.host += task.host_s
            if task.blocks_host:
                self.host = max(self.host, end)
            if task.output >= 0:
                outputs[task.output] = end
                self._deliver(position, entry, task.output, end)
            self.player.records.append((self.rank, position, k, start, end, cause, transfer))
        if entry >= 0:
            self._close(position, entry, max(self.ends, default=opened), outputs)
        self.player.num_moves += 1

    def _ready(self, body: Body, task: Task, seconds: float, entry: int) -> tuple[float, str, float]:
        """Earliest start, what it waited for last, and seconds that its input spent between ranks."""
        ready, cause, transfer = self.streams[task.stream], self.freed_by[task.stream], 0.0
        for dep in task.deps:
            if self.ends[dep] > ready:
                ready, cause = self.ends[dep], STREAMS[body[dep].stream]
        wires = self.player.wires
        if task.after >= 0 and (ended := self.player.ends[closing(wires, self.rank, task.after)]) > ready:
            ready, cause = ended, "compute"
        if task.input >= 0 and (slot := wires.source[entry][task.input]) >= 0 and self.player.delivered[slot] > ready:
            ready, cause, transfer = self.player.delivered[slot], "input", self._travel(slot)
        issued = self.host + scaled_lag(task, seconds) - seconds
        return (issued, "host", 0.0) if issued > ready else (ready, cause, transfer)

    def _travel(self, slot: int) -> float:
        transfer = self._transfer(slot)
        return transfer.seconds if transfer else 0.0

    def _transfer(self, slot: int):
        stream = self.player.wires.stream[slot]
        return {SEND_NEXT: self.player.program.transfer_forward, SEND_PREV: self.player.program.transfer_backward}.get(stream)

    def _deliver(self, position: int, entry: int, j: int, end: float) -> None:
        slot = 2 * entry + j
        if transfer := self._transfer(slot):
            stream = self.player.wires.stream[slot]
            start = max(self.sent[stream], end)
            end = self.sent[stream] = start + transfer.seconds
            self.player.records.append((self.rank, position, -1 - j, start, end, "compute", 0.0))
        self.player.delivered[slot] = end

    def _close(self, position: int, entry: int, end: float, outputs: dict[int, float]) -> None:
        self.player.ends[entry] = end
        for j in (0, 1):
            if j not in outputs:
                self._deliver(position, entry, j, end)
