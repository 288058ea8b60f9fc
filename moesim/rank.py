"""What does one rank do next, and when, as the engine plays it?

A rank keeps its own small event loop: `due` holds the next event of each of its lanes (the streams of tasks and the two send
streams), a start for an idle lane, an end for a busy one. It runs ahead of the global clock for as long as nothing from
outside can reach it, and asks the world to be woken at its next event while a lane waits for an arrival or meets other ranks.
Where nothing overlaps, the rest of an entry is played as one event. Rules: see `moesim.engine`.
"""

from __future__ import annotations

from moesim.compiled import Compiled
from moesim.play import scaled_lag
from moesim.program import COMPUTE, NUM_LANES, SEND_NEXT, SEND_PREV, STREAMS, Program, Task
from moesim.wiring import AT_EPILOGUE, AT_PROLOGUE, closing

NEVER = float("inf")
_IDLE, _BUSY, _HELD = range(3)


class Rank:
    """One rank's clocks and event loop. Entries are counted with the prologue as 0 and the epilogue last. By lane: `due` the
    time of its next event, `state` idle (its head may start), busy, or held (waits for SMs or a meeting), `entry` and `index`
    its head."""

    def __init__(self, world, number: int, compiled: dict[int, Compiled]) -> None:
        program, wires = world.program, world.wires
        self.world, self.number = world, number
        self.wires, self.delivered, self.records, self.sends, self.rates = wires, world.delivered, world.records, world.sends, world.rates
        self.num_sms = program.num_sms
        bodies = [program.bodies[k] for k in program.body_index[number]]
        ends = [which[number] if which else () for which in (program.prologue, program.epilogue)]
        self.entries = [compiled[id(body)] for body in (ends[0], *bodies, ends[1])]
        self.first = wires.first[number] - 1  # entry of the wiring = first + entry here
        self.scale = [1.0, *world.jitter[number][: len(bodies)], 1.0] if world.jitter is not None else None
        self.ends: list[list[float]] = [[NEVER] * len(entry.body) for entry in self.entries]
        self.num_left = [len(entry.body) for entry in self.entries]
        self.closed = [NEVER] * len(self.entries)
        self.gates = self._gates(program)
        self.gate_seen = [0] * NUM_LANES
        self.host = 0.0
        self.host_entry = 0
        self.bases: list[list[float]] = [[] for _ in self.entries]
        self.entry, self.index = [0] * NUM_LANES, [-1] * NUM_LANES
        self.free = [0.0] * len(STREAMS)
        self.freed_by = ["start"] * len(STREAMS)
        self.state = [_IDLE] * len(STREAMS)
        self.due = [NEVER] * len(STREAMS)
        self.running = [0] * len(STREAMS)
        self.rate = [1.0] * len(STREAMS)
        self.left = [0.0] * len(STREAMS)
        self.begun = [0.0] * len(STREAMS)
        self.why: list[tuple[str, float]] = [("start", 0.0)] * len(STREAMS)
        self.group: list = [None] * len(STREAMS)
        self.is_slowed = False
        self.node = None
        self.is_stale = False  # what runs has changed since rates were last looked up
        self.time = 0.0
        self.run_from = -1  # first task of a chain that is being played as one event
        self.may_chain = self.scale is None and all(entry.is_anchored for entry in self.entries[1:-1])
        self.free_sms = program.num_sms
        self.short_of_sms: set[int] = set()
        self.produced: dict[int, float] = {}
        slots = range(2 * wires.first[number], 2 * (wires.first[number] + len(bodies)))
        self.outbox = [[slot for slot in slots if wires.stream[slot] == lane and self.sends[lane - SEND_NEXT]] for lane in (SEND_NEXT, SEND_PREV)]
        self.num_sent = [0, 0]
        self.num_coupled = 0
        self.num_awaited = 0
        self.woken_at = 0.0
        self.wakes_next = NEVER
        self.last_end = 0.0
        for lane in range(NUM_LANES):
            self._advance(lane)
        self._issue()
        self._look_all()

    def share(self, node) -> None:
        """What runs here depends on other ranks of the node at any time: no running ahead of the clock."""
        self.node, self.may_chain = node, False
        self.num_coupled += 1

    def _gates(self, program: Program) -> list[tuple[int, ...]]:
        """By entry, the prologue tasks that hold the streams there."""
        gates: list[tuple[int, ...]] = [()] * len(self.entries)
        for e in range(1, len(self.entries) - 1) if program.gates else ():
            held = [program.gates[self.number][chunk] for chunk in self.wires.opens.get(self.first + e, ())]
            gates[e] = tuple(k for k in held if k >= 0)
        return gates

    # --- what the host does

    def _issue(self) -> None:
        """Moves the host on as far as the ends known so far allow."""
        while self.host_entry < len(self.entries):
            e = self.host_entry
            entry, bases = self.entries[e], self.bases[e]
            if not bases:
                limit = e - self.world.program.run_ahead
                if limit > 0:
                    if self.closed[limit] == NEVER:
                        return
                    self.host = max(self.host, self.closed[limit])
                bases.append(self.host)
                if not entry.body:
                    self._close(e, self.host)
            while len(bases) <= len(entry.waits):
                k = entry.waits[len(bases) - 1]
                if self.ends[e][k] == NEVER:
                    return
                bases.append(max(bases[-1] + entry.issued[k] + entry.body[k].host_s, self.ends[e][k]))
            self.host = bases[-1] + entry.rest
            self.host_entry += 1

    # --- what waits for what

    def _advance(self, lane: int) -> None:
        e, i = self.entry[lane], self.index[lane] + 1
        while e < len(self.entries) and i >= len(self.entries[e].lanes[lane]):
            e, i = e + 1, 0
        self.entry[lane], self.index[lane] = e, i

    def _look_all(self) -> None:
        for lane in range(NUM_LANES):
            if self.due[lane] == NEVER and self.state[lane] == _IDLE and self.entry[lane] < len(self.entries):
                self._look(lane)
        for lane in (SEND_NEXT, SEND_PREV):
            if self.due[lane] == NEVER and self.state[lane] == _IDLE:
                self._look_send(lane)

    def _look(self, lane: int) -> None:
        """Sets when the head of an idle lane starts, if all it waits for is known."""
        e = self.entry[lane]
        entry, ends = self.entries[e], self.ends[e]
        k = entry.lanes[lane][self.index[lane]]
        ready, cause, transfer = self.free[lane], self.freed_by[lane], 0.0
        for dep in entry.needs[k]:
            end = ends[dep]
            if end > ready:
                if end == NEVER:
                    return
                ready, cause = end, STREAMS[entry.body[dep].stream]
        bases = self.bases[e]
        segment = entry.segment[k]
        if segment >= len(bases):
            return
        task = entry.body[k]
        if self.gate_seen[lane] < e:
            opened = self._opened(lane, e)
            if opened == NEVER:
                return
            if opened > ready:
                ready, cause = self.free[lane], self.freed_by[lane] = opened, "gate"
        if task.after >= 0:
            ended = self.closed[closing(self.wires, self.number, task.after) - self.first]
            if ended == NEVER:
                return
            ready, cause = (ended, "compute") if ended > ready else (ready, cause)
        if task.input >= 0 and (slot := self.wires.source[self.first + e][task.input]) >= 0:
            arrival = self.delivered[slot]
            if arrival == NEVER:
                self.num_awaited += self.wires.stream[slot] >= 0
                return
            if arrival > ready:
                ready, cause, transfer = arrival, "input", self._travel(slot)
        issued = bases[segment] + (entry.offset[k] if self.scale is None else self._offset(e, k))
        if issued > ready:
            ready, cause, transfer = issued, "host", 0.0
        self.due[lane] = ready
        self.why[lane] = (cause, transfer)

    def _offset(self, e: int, k: int) -> float:
        task = self.entries[e].body[k]
        seconds = task.seconds * self.scale[e]
        return self.entries[e].issued[k] + scaled_lag(task, seconds) - seconds

    def _travel(self, slot: int) -> float:
        stream = self.wires.stream[slot]
        sending = self.sends[stream - SEND_NEXT] if stream >= 0 else None
        return sending[0] if sending else 0.0

    def _opened(self, lane: int, e: int) -> float:
        """When the gates up to entry e have opened, as far as this lane hasn't passed them."""
        time = max((self.ends[0][k] for held in self.gates[self.gate_seen[lane] + 1 : e + 1] for k in held), default=0.0)
        if time < NEVER:
            self.gate_seen[lane] = e
        return time

    def _look_send(self, lane: int) -> None:
        outbox, sent = self.outbox[lane - SEND_NEXT], self.num_sent[lane - SEND_NEXT]
        if sent < len(outbox) and outbox[sent] in self.produced:
            self.due[lane] = max(self.free[lane], self.produced[outbox[sent]])
            self.why[lane] = ("compute", 0.0)

    def receive(self, slot: int, time: float) -> None:
        """An arrival from another rank."""
        self.delivered[slot] = time
        if self.num_awaited:
            self.num_awaited = 0
            self._look_all()
            self.go()

    # --- the event loop

    def go(self) -> None:
        """Plays events until the rank has to wait for the global clock, or for others."""
        due, state = self.due, self.state
        while True:
            time = min(due)
            if self.is_stale and time > self.time:
                self._retime(self.time)
                continue
            if time == NEVER:
                return
            if (self.num_awaited or self.num_coupled) and time > self.woken_at and time > self.world.now:
                self._sleep(time)
                return
            lane = due.index(time)
            if state[lane] != _BUSY:
                self._start(lane, time)
            elif self.run_from >= 0:
                self._finish_chain(lane, time)
            else:
                self.finish(lane, time)

    def _sleep(self, time: float) -> None:
        """Goes on when the clock reaches `time`, unless it is to go on earlier anyway."""
        if time < self.wakes_next:
            self.wakes_next = time
            self.world.at(time, lambda: self._wake(time))

    def _wake(self, time: float) -> None:
        if time == self.wakes_next:
            self.wakes_next = NEVER
        self.woken_at = max(self.woken_at, time)
        self.go()

    def _start(self, lane: int, time: float) -> None:
        if lane >= SEND_NEXT:
            self.begin(lane, time, self.sends[lane - SEND_NEXT][0], None)
            return
        e = self.entry[lane]
        entry = self.entries[e]
        k = entry.lanes[lane][self.index[lane]]
        if k >= entry.chain and self.may_chain and self._is_quiet(e, k, time):
            self.run_from, self.state[lane], self.begun[lane] = k, _BUSY, time
            self.rate[lane] = 1.0  # not that of the task before, which something may have slowed
            self.due[lane] = time + (entry.elapsed[-1] - entry.elapsed[k])
            return
        task = entry.body[k]
        seconds = task.seconds if self.scale is None else task.seconds * self.scale[e]
        if task.sms and self.num_sms:
            if task.sms > self.free_sms:
                self._hold(lane)
                self.why[lane] = ("sms", 0.0)
                self.short_of_sms.add(lane)
                return
            self.free_sms -= task.sms
        if entry.meets[k]:
            self._hold(lane)
            self._meet(e, task, lane, time, seconds)
        else:
            self.begin(lane, time, seconds, None)

    def _is_quiet(self, e: int, k: int, time: float) -> bool:
        """Whether task k of entry e is the only thing the rank has to do until that entry's end."""
        entry, last = self.entries[e], len(self.entries) - 1
        if not 0 < e < last - 1 or self.num_left[e] != len(entry.body) - k or self.num_left[0] or self.gates[e]:
            return False
        if self.num_coupled or self.num_awaited or self.short_of_sms or self.bases[e][0] + entry.host_need[k] > time:
            return False
        return sum(due < NEVER for due in self.due) == 1

    def _hold(self, lane: int) -> None:
        self.state[lane], self.due[lane] = _HELD, NEVER

    def _meet(self, e: int, task: Task, lane: int, time: float, seconds: float) -> None:
        self.num_coupled += 1
        position = AT_PROLOGUE if e == 0 else AT_EPILOGUE if e == len(self.entries) - 1 else e - 1
        key = (position, task.group) if task.group >= 0 else ("barrier", task.barrier)
        self.begun[lane] = time
        self.world.meetings[key].reach(self, lane, time, seconds)

    def begin(self, lane: int, time: float, seconds: float, group) -> None:
        """Starts to run the head of a lane."""
        if self.state[lane] == _HELD and time > self.begun[lane]:
            self.why[lane] = ("barrier", 0.0)
        self.state[lane], self.begun[lane], self.group[lane] = _BUSY, time, group
        self.rate[lane] = 1.0
        self.due[lane] = NEVER if group else time + seconds
        if lane >= SEND_NEXT:
            self.running[lane] = self.sends[lane - SEND_NEXT][1] if self.node is None else self._number_of_send(lane)
        else:
            entry = self.entries[self.entry[lane]]
            self.running[lane] = entry.signature[entry.lanes[lane][self.index[lane]]]
        self.is_stale, self.time = True, time
        if group:
            self.rate[lane], self.is_slowed = 0.0, True  # so that _retime tells the group its rate

    def _number_of_send(self, lane: int) -> int:
        slot = self.outbox[lane - SEND_NEXT][self.num_sent[lane - SEND_NEXT]]
        return self.world.number_of_send(lane, self.wires.rank[self.wires.target[slot] >> 1])

    def _retime(self, time: float) -> None:
        """Gives every running task the rate that belongs to what runs now."""
        self.is_stale = False
        if self.node is not None:
            self.node.refresh(time)
        else:
            self.take(self.rates(tuple(self.running)), time)

    def take(self, found: tuple[float, ...] | None, time: float) -> bool:
        """Goes on at the rates `found`, by lane (None: all at solo speed). Whether that changed anything."""
        if found is None and not self.is_slowed:
            return False
        self.is_slowed, changed = found is not None, False
        for lane in range(len(STREAMS)):
            new, old = found[lane] if found else 1.0, self.rate[lane]
            if self.state[lane] != _BUSY or new == old:
                continue
            self.rate[lane], changed = new, True
            if group := self.group[lane]:
                group.grant(self.number, new, time)
                continue
            if old:
                self.left[lane] = (self.due[lane] - time) * old
            self.due[lane] = time + self.left[lane] / new if new else NEVER
        return changed

    def finish(self, lane: int, time: float) -> None:
        """Ends what runs on a lane and looks at what may start now."""
        self.state[lane], self.due[lane], self.running[lane], self.group[lane] = _IDLE, NEVER, 0, None
        self.free[lane], self.freed_by[lane] = time, STREAMS[lane]
        self.is_stale, self.time = True, time
        if self.short_of_sms:
            for held in self.short_of_sms:
                self.state[held], self.due[held] = _IDLE, time
            self.short_of_sms.clear()
        if lane >= SEND_NEXT:
            self._finish_send(lane, time)
            self._look_send(lane)
            return
        e = self.entry[lane]
        k = self.entries[e].lanes[lane][self.index[lane]]
        if self.records is not None:
            position = AT_EPILOGUE if e == len(self.entries) - 1 else e - 1  # the prologue's 0 - 1 is AT_PROLOGUE
            self.records.append((self.number, position, k, self.begun[lane], time, *self.why[lane]))
        self._finish_task(lane, e, k, time)

    def _finish_send(self, lane: int, time: float) -> None:
        sent = self.num_sent[lane - SEND_NEXT]
        slot = self.outbox[lane - SEND_NEXT][sent]
        self.num_sent[lane - SEND_NEXT] = sent + 1
        if self.records is not None:
            self.records.append((self.number, (slot >> 1) - self.first - 1, -1 - (slot & 1), self.begun[lane], time, *self.why[lane]))
        self.world.deliver(slot, time)

    def _finish_task(self, lane: int, e: int, k: int, time: float) -> None:
        entry = self.entries[e]
        task = entry.body[k]
        self.ends[e][k] = self.last_end = time
        if task.sms and self.num_sms:
            self.free_sms += task.sms
        if task.output >= 0:
            self._produce(e, task.output, time)
        self.num_left[e] -= 1
        self._advance(lane)
        if self.num_left[e] and not task.blocks_host and task.output < 0 and e:
            self._look_after(lane, entry.wakes[k])
            return
        if not self.num_left[e]:
            self._close(e, time)
        self._issue()
        self._look_all()

    def _look_after(self, lane: int, woken: tuple[int, ...]) -> None:
        """Looks at a lane that got free and those that a task of it held up."""
        due, state, entry, end = self.due, self.state, self.entry, len(self.entries)
        for other in (lane, *woken):
            if due[other] == NEVER and state[other] == _IDLE and entry[other] < end:
                self._look(other)

    def _finish_chain(self, lane: int, time: float) -> None:
        """Ends a chain that was played as one event, task by task as if each had been."""
        first, e, begun = self.run_from, self.entry[lane], self.begun[lane]
        entry, ends = self.entries[e], self.ends[e]
        self.run_from, self.state[lane], self.due[lane] = -1, _IDLE, NEVER
        self.time = self.last_end = time
        start, why = begun, self.why[lane]
        position, records = e - 1, self.records
        for k in range(first, len(entry.body)):
            stream = entry.body[k].stream
            ends[k] = end = begun + (entry.elapsed[k + 1] - entry.elapsed[first])
            if records is not None:
                records.append((self.number, position, k, start, end, *why))
            self.free[stream], self.freed_by[stream] = end, STREAMS[stream]
            start, why = end, (STREAMS[stream], 0.0)
        ends[-1] = self.free[COMPUTE] = time
        for stream in range(NUM_LANES):
            if self.entry[stream] == e:
                self.index[stream] = len(entry.lanes[stream])
                self._advance(stream)
        self.num_left[e] = 0
        if entry.body[-1].output >= 0:
            self._produce(e, entry.body[-1].output, time)
        self._close(e, time)
        self._issue()
        self._look_all()

    def _close(self, e: int, time: float) -> None:
        """All tasks of an entry have ended; actions without an output task deliver now."""
        self.closed[e] = time
        for j in (0, 1) if 0 < e < len(self.entries) - 1 else ():
            if j not in self.entries[e].outputs:
                self._produce(e, j, time)

    def _produce(self, e: int, j: int, time: float) -> None:
        slot = 2 * (self.first + e) + j
        stream = self.wires.stream[slot]
        if stream >= 0 and self.sends[stream - SEND_NEXT]:
            self.produced[slot] = time
        else:
            self.world.deliver(slot, time)

    # --- for messages

    def ended(self) -> bool:
        return all(e == len(self.entries) for e in self.entry) and self.num_sent == [len(outbox) for outbox in self.outbox]

    def where(self) -> str:
        order = self.world.program.orders[self.number]
        e = min(self.entry)
        return f"rank {self.number} waits at {'the prologue' if e == 0 else order[e - 1] if e <= len(order) else 'its end'}"
