"""What is one part of a layer on one rank, once it is priced, and which runs of kernels is it made of?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from moesim.block import COMM, COMPUTE, Node
from moesim.ops import Attention, Collective, Dispatch, Gemm, Group, GroupedGemm, MemoryBound, Op
from moesim.program import COMM as COMM_STREAM
from moesim.program import COMPUTE as COMPUTE_STREAM
from moesim.program import Task
from moesim.seats import mean_uses


class PartKey(NamedTuple):
    """Everything a part's cost depends on."""

    name: str
    window: int | None
    tp: int
    cp: int
    mb: int
    precision: str
    recompute: tuple[str, ...]
    graphs: str
    grad: str
    ep: int = 1
    etp: int = 1
    dispatcher: str = "alltoall"
    sms: int = 0
    hidden_dispatch: bool = False
    stage: int = 1
    """Ranks over which this software adds up expert counts in every forward; 1 where it does not."""
    layers: int = 0
    """Layers of one pipeline rank over which uneven rows are summed; 0 where routing is even."""


@dataclass(frozen=True, slots=True)
class Priced:
    """One node with its price."""

    node: Node
    seconds: float
    sms: int
    term: str
    provenance: str
    host_s: float
    uses: tuple[tuple[str, float], ...] = ()
    is_apart: bool = False
    """Its speed may depend on what other ranks of the node draw from memory: no run with kernels that draw less or more."""

    @property
    def kind(self) -> str:
        return kind_of(self.node.op)


_KIND_NAMES = {Gemm: "gemm", GroupedGemm: "grouped_gemm", Attention: "attention", MemoryBound: "memory_bound", Collective: "collective", Dispatch: "dispatch"}


def kind_of(op: Op) -> str:
    """Kernel kind, as co-run factors name it."""
    return _KIND_NAMES[type(op)]


@dataclass(frozen=True, slots=True)
class Part:
    """Priced part of one layer on one rank. ``runs`` = letter -> fused tasks; a task's dep -1 means "the last compute run before
    this part". Seconds of ``path`` assume a host that is never late."""

    key: PartKey
    forward: tuple[Priced, ...]
    backward: tuple[Priced, ...]
    dense_params: float
    replicated_params: float
    """Those of the dense ones that every tensor-parallel rank holds whole."""
    expert_params: float
    saved: float
    transient: float
    """Bytes that live only while this part runs backward: what recompute rebuilds, and the largest gradient of an output."""
    buffer: float
    """Bytes of dispatcher buffers (receive side) while the part runs."""
    path: dict[str, float]
    compute: dict[str, float]
    comm: dict[str, float]
    host: dict[str, float]
    routed: float
    """The part of ``saved`` that follows the rows received."""
    cores: dict[str, float]
    """Core-seconds of a node that the ranks' own cores do: the compute, and a collective's share of a core. 0 elsewhere."""


def nodes_of(part: Part, letter: str) -> list[Priced]:
    """Nodes of one action in program order: F forward; B whole backward, I and W its halves, recompute before the input gradient."""
    if letter == "F":
        return list(part.forward)
    phases = {"B": "RIW", "I": "RI", "W": "W"}[letter]
    return [p for p in part.backward if p.node.phase in phases]


def make_runs(part: Part, letter: str, fuse: bool = True) -> tuple[Task, ...]:
    """Tasks of one part for one letter, made anew; see ``Part``."""
    return _runs(nodes_of(part, letter), part.key.hidden_dispatch, fuse)


def work_of(part: Part, letter: str) -> list[tuple[bool, float]]:
    """(does it compute, seconds) of every node of a part for one letter, in program order."""
    return [(p.node.stream == COMPUTE, p.seconds) for p in nodes_of(part, letter)]


def comm_groups(part: Part, letter: str) -> list[Group]:
    """The group of each collective of a part for one letter, in the order of its tasks."""
    return [p.node.op.group for p in nodes_of(part, letter) if p.node.stream == COMM]


def serial_path(nodes: list[Priced], hidden_dispatch: bool) -> float:
    """Longest path through a part when the host is never late: one compute and one communication stream in program order."""
    ends: dict[str, float] = {}
    compute = comm = 0.0
    for p in nodes:
        moved = _moved_wait(p, hidden_dispatch)
        read = [ends[d] for d in p.node.deps if d in ends]
        if p.node.stream == COMPUTE:
            compute = ends[p.node.key] = max([compute, *read]) + p.seconds
        else:
            comm = ends[p.node.key] = max(comm, *(read if moved and read else [compute])) + p.seconds
            compute = compute if moved else max(compute, comm)
    return max(compute, comm)


def _moved_wait(priced: Priced, hidden_dispatch: bool) -> bool:
    """Does an overlap rule let the compute stream go on beside this collective? ("shared" moves the wait of a dispatch, or of
    the combine that is its adjoint, from the shared experts to the node that reads it.)"""
    return hidden_dispatch and priced.node.role in ("dispatch",)


def _runs(nodes: list[Priced], hidden_dispatch: bool, fuse: bool) -> tuple[Task, ...]:
    """Fuse program order into runs. A collective waits for all computed before it and the next computation for the collective,
    unless a rule moves that wait: then only data decides. A run ends where a collective or the host waits for its result."""
    names = {p.node.key for p in nodes}
    cut_after = {d for p in nodes if _moved_wait(p, hidden_dispatch) for d in p.node.deps if d in names}
    tasks: list[Task] = []
    index: dict[str, int] = {}
    run: list[Priced] = []
    waits: tuple[int, ...] = ()
    pending: list[int] = []
    last_compute = -1

    def flush() -> None:
        nonlocal run, waits, last_compute
        if run:
            last_compute = len(tasks)
            for p in run:
                index[p.node.key] = last_compute
            tasks.append(_task(run, COMPUTE_STREAM, waits))
            run, waits = [], ()

    comm_index = {}
    for p in nodes:
        if p.node.stream == COMPUTE:
            needs = tuple(dict.fromkeys([*pending, *(comm_index[d] for d in p.node.deps if d in comm_index)]))
            pending = []
            if needs or not fuse or (run and (p.is_apart or run[-1].is_apart) and p.uses != run[-1].uses):
                flush()
                waits = needs
            run.append(p)
            if p.node.key in cut_after or p.node.host_wait:
                flush()
            continue
        flush()
        moved = _moved_wait(p, hidden_dispatch)
        deps = tuple(dict.fromkeys(index[d] for d in p.node.deps if d in index)) if moved else (last_compute,)
        deps = deps or (last_compute,)
        at = len(tasks)
        index[p.node.key] = comm_index[p.node.key] = at
        tasks.append(_task([p], COMM_STREAM, deps))
        if not moved:
            pending.append(at)
    flush()
    if pending:
        # A part that ends in a collective: whatever computes next waits for it.
        tasks.append(Task("wait", "memory_bound", COMPUTE_STREAM, 0.0, deps=tuple(pending)))
    return tuple(tasks)


def _task(run: list[Priced], stream: int, deps: tuple[int, ...]) -> Task:
    seconds = np.array([p.seconds for p in run])
    host = np.array([p.host_s for p in run])
    total = float(seconds.sum())
    # Least time from the first issue to the last end: some kernel starts the moment it is issued.
    lag = float((np.cumsum(host) + np.cumsum(seconds[::-1])[::-1]).max())
    uses, sms = mean_uses((p.uses, p.seconds) for p in run), run[0].sms if stream == COMM_STREAM else 0
    kind = max(run, key=lambda p: p.seconds).kind
    terms = tuple((role_of(p.node), p.term, p.seconds) for p in run if p.seconds)
    return Task(run[0].node.role if len(run) == 1 else f"{run[0].node.role}..{run[-1].node.role}", kind, stream, total, float(host.sum()), lag,
                deps, uses, sms, any(p.node.host_wait for p in run), terms=terms, ops=tuple(p.node.op for p in run))


def role_of(node: Node) -> str:
    """Role in the breakdown: recomputed work is shown apart."""
    return "recompute" if node.phase == "R" else node.role
