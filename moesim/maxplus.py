"""What does a body do to its rank's clocks, and a level of entries to all ranks? (Max-plus algebra in numpy.)

A body is a max-plus linear map: each clock after it (host, streams, outputs, end) is the largest of the clocks before it (host,
streams, inputs) plus a constant. `reduce` works out that small matrix for many bodies of one shape at once; `Board` plays
entries with such matrices, and prologues and epilogues task by task, for N programs or draws side by side.
Baccelli et al., Synchronization and Linearity (1992): https://www.rocq.inria.fr/metalau/cohen/SED/book-online.html
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from moesim.program import NUM_LANES, SEND_NEXT, Body, Program, Task
from moesim.wiring import Wiring, barriers, closing

HOST, IN = 0, 1 + NUM_LANES  # columns: host, the streams of bodies, input 0, input 1
OUT, END = IN, IN + 2  # rows: host, the streams, output 0, output 1, end
NEVER = -np.inf


def shape(body: Body) -> tuple:
    """What reduce may not mix: all of a body except its seconds."""
    return tuple((task.stream, task.deps, task.input, task.output, task.blocks_host, task.after, task.barrier) for task in body)


@dataclass(frozen=True)
class Costs:
    """seconds, host, lag: [tasks, N] of N bodies of one shape."""

    seconds: np.ndarray
    host: np.ndarray
    lag: np.ndarray


def costs_of(bodies: Sequence[Body], draws: Mapping[str, np.ndarray] | None) -> Costs:
    seconds = np.array([[task.seconds for task in body] for body in bodies]).T
    host = np.array([[task.host_s for task in body] for body in bodies]).T
    lag = np.array([[task.lag_s for task in body] for body in bodies]).T
    if draws is None or not len(bodies[0]):
        return Costs(seconds, host, lag)
    (body,) = bodies
    drawn = seconds + _extra_seconds(body, draws)
    drawn_host = host * draws.get("host", 1.0)
    together = seconds + host
    scale = np.divide(drawn + drawn_host, together, out=np.ones_like(drawn), where=together > 0)
    return Costs(drawn, np.broadcast_to(drawn_host, drawn.shape), lag * scale)


def _extra_seconds(body: Body, draws: Mapping[str, np.ndarray]) -> np.ndarray:
    """[tasks, D] that the draws add to each task; seconds that no term covers keep factor 1."""
    at = {term: i for i, term in enumerate(draws)}
    shares = np.zeros((len(body), len(at)))
    for row, task in zip(shares, body):
        for _, term, share in task.terms:
            if (i := at.get(term)) is not None:
                row[i] += share
    return shares @ (np.stack(list(draws.values())) - 1.0)


def reduce(body: Body, costs: Costs) -> np.ndarray:
    """Max-plus matrices [END + 1, END, N] of N bodies that share the shape of `body`; -inf where nothing connects."""
    num = costs.seconds.shape[1] if len(body) else 1
    state = np.full((END, END, num), NEVER)
    state[range(END), range(END)] = 0.0
    host, streams = state[HOST], list(state[:IN])
    ends: list[np.ndarray] = []
    out: list[np.ndarray | None] = [None, None]
    for task, seconds, issue, lag in zip(body, costs.seconds, costs.host, costs.lag):
        ready = streams[task.stream + 1]
        for dep in task.deps:
            ready = np.maximum(ready, ends[dep])
        if task.input >= 0:
            ready = np.maximum(ready, state[IN + task.input])
        end = np.maximum(ready + seconds, host + lag)
        host = host + issue
        if task.blocks_host:
            host = np.maximum(host, end)
        if task.output >= 0:
            out[task.output] = end
        streams[task.stream + 1] = end
        ends.append(end)
    end = np.maximum.reduce(ends) if ends else host
    outputs = [end if row is None else row for row in out]
    return np.stack([host, *streams[1:], *outputs, end])


class Board:
    """The state of every rank while orders are played: `state` [ranks, IN, N], what each slot delivers, ends of entries."""

    def __init__(self, programs: Sequence[Program], wires: Wiring, num: int, draws) -> None:
        program = programs[0]
        self.programs, self.wires, self.draws, self.num = programs, wires, draws, num
        self.state = np.zeros((program.num_ranks, IN, num))
        self.delivered = np.full((2 * wires.num_entries + 1, num), NEVER)  # the last row is "waits for nothing"
        self.ends = np.zeros((wires.num_entries, num))
        self.sent = np.zeros((2, program.num_ranks, num))
        self.send_seconds = np.stack([self._transfer("transfer_forward"), self._transfer("transfer_backward")])
        self.rank = np.array(wires.rank, dtype=np.intp)
        self.first = np.array(wires.first, dtype=np.intp)
        self.source = np.array(wires.source, dtype=np.intp).reshape(-1, 2)
        self.stream = np.array(wires.stream, dtype=np.intp).reshape(-1, 2)
        self.run_ahead = program.run_ahead if program.run_ahead < max(map(len, program.orders)) else 0
        self.gates = self._prologue()

    def _transfer(self, which: str) -> np.ndarray:
        solo = np.array([transfer.seconds if (transfer := getattr(p, which)) else 0.0 for p in self.programs])
        return np.broadcast_to(solo * (self.draws or {}).get("send", 1.0), (self.num,))

    def _bodies(self, which: str, rank: int) -> tuple[Body, Costs]:
        bodies = [getattr(program, which)[rank] for program in self.programs]
        return bodies[0], costs_of(bodies, self.draws)

    def _prologue(self) -> dict[int, np.ndarray]:
        """Plays the prologues; the ends of gate tasks, by the entry that they hold."""
        gates: dict[int, np.ndarray] = {}
        program = self.programs[0]
        ends = [self._play_end(r, *self._bodies("prologue", r)) for r in range(len(program.prologue))]
        for entry, chunks in self.wires.opens.items():
            rank = self.wires.rank[entry]
            held = [ends[rank][k] for chunk in chunks if program.gates and (k := program.gates[rank][chunk]) >= 0]
            if held:
                gates[entry] = np.maximum.reduce(held)
        return gates

    def play_level(self, level: np.ndarray, matrices: np.ndarray, of_entry: np.ndarray) -> None:
        ranks = self.rank[level]
        before = np.empty((len(level), END, self.num))
        before[:, :IN] = self.state[ranks]
        before[:, IN] = self.delivered[self.source[level, 0]]
        before[:, IN + 1] = self.delivered[self.source[level, 1]]
        for i in range(len(level)) if self.gates else ():
            if level[i] in self.gates:
                np.maximum(before[i, 1:IN], self.gates[level[i]], out=before[i, 1:IN])
        if self.run_ahead:
            limited = np.flatnonzero(level - self.first[ranks] >= self.run_ahead)
            before[limited, HOST] = np.maximum(before[limited, HOST], self.ends[level[limited] - self.run_ahead])
        after = (matrices[of_entry[level]] + before[:, None]).max(axis=2)
        self.state[ranks] = after[:, :IN]
        self.ends[level] = after[:, END]
        for j in (0, 1):
            self._deliver(level, j, after[:, OUT + j])

    def _deliver(self, level: np.ndarray, j: int, output: np.ndarray) -> None:
        self.delivered[2 * level + j] = output
        sending = np.flatnonzero(self.stream[level, j] >= 0)
        if len(sending):
            entries = level[sending]
            which, ranks = self.stream[entries, j] - SEND_NEXT, self.rank[entries]
            arrival = np.maximum(self.sent[which, ranks], output[sending]) + self.send_seconds[which]
            self.sent[which, ranks] = self.delivered[2 * entries + j] = arrival

    def _play_end(self, rank: int, body: Body, costs: Costs, start: int = 0, ends: list[np.ndarray] | None = None) -> list[np.ndarray]:
        """Plays a prologue, or an epilogue from task `start` to the next barrier."""
        state = self.state[rank]
        ends = [] if ends is None else ends
        for k in range(start, len(body)):
            if body[k].barrier >= 0 and k > start:
                break
            ends.append(self._play_task(state, body[k], self._ready(rank, state, body[k], ends), costs, k))
        return ends

    def _ready(self, rank: int, state: np.ndarray, task: Task, ends: list[np.ndarray]) -> np.ndarray:
        ready = [state[task.stream + 1], *(ends[dep] for dep in task.deps)]
        if task.after >= 0:
            ready.append(self.ends[closing(self.wires, rank, task.after)])
        return np.maximum.reduce(ready)

    @staticmethod
    def _play_task(state: np.ndarray, task: Task, ready: np.ndarray, costs: Costs, k: int) -> np.ndarray:
        end = np.maximum(ready + costs.seconds[k], state[HOST] + costs.lag[k])
        state[HOST] = state[HOST] + costs.host[k]
        if task.blocks_host:
            state[HOST] = np.maximum(state[HOST], end)
        state[task.stream + 1] = end
        return end

    def finish(self) -> np.ndarray:
        """Plays the epilogues, barrier by barrier; seconds of the step [N]."""
        program = self.programs[0]
        self._limit_epilogue()
        bodies = [self._bodies("epilogue", r) for r in range(len(program.epilogue))]
        ends: list[list[np.ndarray]] = [self._play_end(r, *bodies[r]) if _opening(bodies[r][0]) else [] for r in range(len(bodies))]
        for _ in barriers(program):
            reached = [self._barrier_ready(r, *bodies[r], ends[r]) for r in range(len(bodies))]
            together = np.maximum.reduce(reached)
            for r, (body, costs) in enumerate(bodies):
                stream = body[len(ends[r])].stream + 1
                self.state[r, stream] = np.maximum(self.state[r, stream], together)
                self._play_end(r, body, costs, len(ends[r]), ends[r])
        return self.state[:, 1:].max(axis=(0, 1))

    def _limit_epilogue(self) -> None:
        for r, order in enumerate(self.programs[0].orders):
            if self.run_ahead and len(order) >= self.run_ahead:
                limit = self.ends[self.wires.first[r] + len(order) - self.run_ahead]
                self.state[r, HOST] = np.maximum(self.state[r, HOST], limit)

    def _barrier_ready(self, rank: int, body: Body, costs: Costs, ends: list[np.ndarray]) -> np.ndarray:
        k = len(ends)
        ready = self._ready(rank, self.state[rank], body[k], ends)
        return np.maximum(ready, self.state[rank, HOST] + costs.lag[k] - costs.seconds[k])


def _opening(body: Body) -> bool:
    return bool(body) and body[0].barrier < 0
