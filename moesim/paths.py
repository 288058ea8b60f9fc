"""How long does a step take if nothing contends? (Longest path over the fixed order, for many programs or draws at once.)

A body is a max-plus linear map of its rank's state: each thing after it (host, streams, outputs, end) is the largest of the
things before it (host, streams, inputs) plus a constant. `step_seconds` works out that small matrix once for a distinct
body and then plays orders level by level, vectorised over ranks and over programs (or draws) of one structure. `play` (its own file) walks
every task of one program in plain Python, with spans, and is the reference that tests hold the matrices to.

Rules beyond `moesim.program`: a gate holds every stream of the rank at the entry it opens; the run-ahead limit holds the
epilogue as if it were the entry after the last; transfers leave a rank in the order of its entries, activations on
"send_next", gradients on "send_prev"; a fused run starts at max(ready, issue + lag_s - seconds), so its end is exact.
Baccelli et al., Synchronization and Linearity (1992), is the textbook of this algebra: https://www.rocq.inria.fr/metalau/cohen/SED/book-online.html
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from moesim.play import play
from moesim.program import NUM_LANES, SEND_NEXT, Body, Program, Task
from moesim.wiring import Wiring, barriers, check, closing

HOST, IN = 0, 1 + NUM_LANES  # columns: host, one for each lane, input 0, input 1
OUT, END = IN, IN + 2  # rows: host, one for each lane, output 0, output 1, end
_BLOCK = 64  # programs or draws played together: keeps a level's matrices inside the L2 cache
_NEVER = -np.inf


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
    return seconds


def step_draws(program: Program, multipliers: Mapping[str, np.ndarray]) -> np.ndarray:
    """Seconds of one step for each of D draws, [D]. `multipliers`: profile term -> factor [D] on the seconds of that term; a
    missing term keeps factor 1, term "host" scales host costs; a transfer scales with term "send". The lag of a fused run,
    which mixes host and device time, scales with their sum (exact for a single kernel and for a common factor)."""
    num_draws = len(next(iter(multipliers.values())))
    seconds = np.empty(num_draws)
    for start in range(0, num_draws, _BLOCK):
        block = slice(start, start + _BLOCK)
        seconds[block] = _play_batch([program], {term: np.asarray(draws)[block] for term, draws in multipliers.items()})
    return seconds


def _structure_key(program: Program) -> tuple:
    ends = (program.prologue, program.epilogue)
    return (
        id(program.orders),
        id(program.placement),
        program.peers,
        program.run_ahead,
        program.gates,
        tuple(tuple(map(_shape, bodies)) for bodies in ends),
        any(task.group >= 0 for body in (*program.bodies, *program.epilogue) for task in body),
    )


def _shape(body: Body) -> tuple:
    """What reduce may not mix: all of a body except its seconds."""
    return tuple((task.stream, task.deps, task.input, task.output, task.blocks_host, task.after, task.barrier) for task in body)


@dataclass(frozen=True)
class _Costs:
    """seconds, host, lag: [tasks, N] of N bodies of one shape."""

    seconds: np.ndarray
    host: np.ndarray
    lag: np.ndarray


def _costs(bodies: Sequence[Body], draws: Mapping[str, np.ndarray] | None) -> _Costs:
    seconds = np.array([[task.seconds for task in body] for body in bodies]).T
    host = np.array([[task.host_s for task in body] for body in bodies]).T
    lag = np.array([[task.lag_s for task in body] for body in bodies]).T
    if draws is None or not len(bodies[0]):
        return _Costs(seconds, host, lag)
    (body,) = bodies
    drawn = np.stack([_drawn_seconds(task, draws) for task in body])
    drawn_host = host * draws.get("host", 1.0)
    together = seconds + host
    scale = np.divide(drawn + drawn_host, together, out=np.ones_like(drawn), where=together > 0)
    return _Costs(drawn, np.broadcast_to(drawn_host, drawn.shape), lag * scale)


def _drawn_seconds(task: Task, draws: Mapping[str, np.ndarray]) -> np.ndarray:
    """[D]; seconds that no term covers keep factor 1."""
    extra = sum(share * (draws[term] - 1.0) for _, term, share in task.terms if term in draws)
    return task.seconds + extra + np.zeros(len(next(iter(draws.values()))))


def reduce(body: Body, costs: _Costs) -> np.ndarray:
    """Max-plus matrices [END + 1, END, N] of N bodies that share the shape of `body`; -inf where nothing connects."""
    num = costs.seconds.shape[1] if len(body) else 1
    state = np.full((END, END, num), _NEVER)
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
            by_shape.setdefault(_shape(body), {})[id(body)] = body
    reduced: dict[int, np.ndarray] = {}
    for bodies in by_shape.values():
        reduced |= _reduce_all(list(bodies.values()), draws)
    matrices = [np.concatenate([reduced[id(p.bodies[k])] for p, k in zip(programs, ks)], axis=2) for ks in tables]
    return np.stack(matrices), index


def _reduce_all(bodies: list[Body], draws) -> dict[int, np.ndarray]:
    if draws is not None:
        return {id(body): reduce(body, _costs([body], draws)) for body in bodies}
    matrix = reduce(bodies[0], _costs(bodies, None))
    return {id(body): matrix[:, :, n : n + 1] for n, body in enumerate(bodies)}


def _play_batch(programs: Sequence[Program], draws: Mapping[str, np.ndarray] | None = None) -> np.ndarray:
    """[N] seconds of N programs of one structure, or of N draws of the only program."""
    wires = check(programs[0])
    for program in programs[1:]:
        check(program)
    if any(task.group >= 0 for body in (*programs[0].bodies, *programs[0].epilogue) for task in body):
        assert draws is None, "draws of a program with every rank played are not supported"
        return np.array([play(program).makespan for program in programs])
    matrices, index = _matrices(programs, draws)
    board = _Board(programs, wires, matrices.shape[-1], draws)
    of_entry = np.array([k for row in index for k in row], dtype=np.intp)
    for level in wires.levels:
        board.play_level(np.array(level, dtype=np.intp), matrices, of_entry)
    return board.finish()


class _Board:
    """The state of every rank while orders are played: `state` [ranks, IN, N], what each slot delivers, ends of entries."""

    def __init__(self, programs: Sequence[Program], wires: Wiring, num: int, draws) -> None:
        program = programs[0]
        self.programs, self.wires, self.draws, self.num = programs, wires, draws, num
        self.state = np.zeros((program.num_ranks, IN, num))
        self.delivered = np.full((2 * wires.num_entries + 1, num), _NEVER)  # the last row is "waits for nothing"
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

    def _bodies(self, which: str, rank: int) -> tuple[Body, _Costs]:
        bodies = [getattr(program, which)[rank] for program in self.programs]
        return bodies[0], _costs(bodies, self.draws)

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

    def _play_end(self, rank: int, body: Body, costs: _Costs, start: int = 0, ends: list[np.ndarray] | None = None) -> list[np.ndarray]:
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
    def _play_task(state: np.ndarray, task: Task, ready: np.ndarray, costs: _Costs, k: int) -> np.ndarray:
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

    def _barrier_ready(self, rank: int, body: Body, costs: _Costs, ends: list[np.ndarray]) -> np.ndarray:
        k = len(ends)
        ready = self._ready(rank, self.state[rank], body[k], ends)
        return np.maximum(ready, self.state[rank, HOST] + costs.lag[k] - costs.seconds[k])


def _opening(body: Body) -> bool:
    return bool(body) and body[0].barrier < 0
