"""What does one training step look like to a clock? (The one input of the bound, path and engine evaluators.)

A Program is a set of ranks; each rank plays its list of actions in order; each action is a Body of Tasks. A Task is one
kernel, or a run of kernels on one stream fused into one. Everything about order is fixed here, before any evaluator runs:

* host: a rank's host issues the tasks of a body in listed order, paying ``host_s`` for each; a task can't start before it is
  issued. ``blocks_host`` makes the host wait for the task's end (a device-to-host copy). The host may start issuing the
  action at position i of its rank only when the action at position i - ``run_ahead`` has ended on all its streams.
* streams: tasks on one stream of one rank run in listed order, one at a time. ``deps`` are earlier tasks of the same body.
* input: a task with ``input`` = j waits for the arrival of what the j-th action of the entry needs (0 for a plain action, 0
  or 1 in a pair); ``output`` = j marks the task whose end completes the j-th action for its consumers.
* F of virtual stage v > 0 needs F of v-1 (same microbatch); B or I of v < last needs B or I of v+1; B or I of the last stage
  needs its own F. When producer and consumer live on different ranks a Transfer of its own duration lies between, on the
  sender's "send" stream of that direction; on the same rank the edge is free.
* prologue: per rank, tasks on the data stream at the start of the step (parameter gathers); ``gates[rank][chunk]`` is the
  prologue task that the first action of that local chunk waits for (-1: none).
* epilogue: per rank, tasks after the last action. ``after`` = local chunk whose last backward (B or W) must have ended, -1 for
  none. A task with ``barrier`` = b starts only when every rank has reached its task with that barrier number (gradient-norm
  all-reduce): all of them start together. The step ends when every rank's epilogue has ended.
* shared: what the ranks of one node share (processor cores, memory bandwidth): name -> capacity of one node, in the unit of the
  tasks' ``uses``. A name in ``uses`` that is not there belongs to the rank and has capacity 1. ``seats`` says which ranks share.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from operator import attrgetter
from typing import Mapping, Union

from moesim.ops import Op
from moesim.schedules import Action, Pair

COMPUTE, COMM, DATA, REDUCE, SEND_NEXT, SEND_PREV = range(6)
STREAMS = ("compute", "comm", "data", "reduce", "send_next", "send_prev")
NUM_LANES = 4
"""Streams that tasks of a body may name; the two send streams carry transfers only."""
"""comm: collectives that activations wait for; data: parameter gathers; reduce: gradient reductions."""


@dataclass(frozen=True, slots=True)
class Task:
    """One run of kernels on one stream.

    seconds: solo duration of the run. host_s: host time to issue all of it. lag_s: least time from the moment the host starts
    issuing the run to its end on a free stream; for one kernel host_s + seconds, for a fused run the maximum over its kernels
    i of (host time up to and including i) + (device time from i on).
    uses: (resource name, what is taken of it at solo speed: a share of its capacity, or of ``Program.shared`` so many units).
    sms: SMs held while running (0 = takes what is left).
    """

    name: str
    kind: str
    stream: int
    seconds: float
    host_s: float = 0.0
    lag_s: float = -1.0
    deps: tuple[int, ...] = ()
    uses: tuple[tuple[str, float], ...] = ()
    sms: int = 0
    blocks_host: bool = False
    input: int = -1
    output: int = -1
    after: int = -1
    barrier: int = -1
    terms: tuple[tuple[str, str, float], ...] = ()
    """(role, profile term, seconds) of the kernels inside; the seconds sum to ``seconds``. Roles feed the breakdown, profile
    terms carry provenance and error: a Monte-Carlo draw multiplies each part by its term's factor."""
    group: int = -1
    """Rendezvous group in a program with every rank played: tasks of the same group (same position in their rank's order)
    start together and end together. -1: private to the rank (a representative rank stands for its peers)."""
    ops: tuple[Op, ...] = ()
    """What it does: the ops of the kernels inside. No evaluator reads them; `step_ops` counts them."""

    def __post_init__(self) -> None:
        if self.lag_s < 0:
            object.__setattr__(self, "lag_s", self.host_s + self.seconds)

    def with_deps(self, deps: tuple[int, ...]) -> "Task":
        """The same task with other ``deps``: what ``dataclasses.replace`` gives, three times faster (bodies are made of these)."""
        other = object.__new__(Task)
        for put, value in zip(_PUT, _GET(self)):
            put(other, value)
        _PUT_DEPS(other, deps)
        return other


_NAMES = tuple(f.name for f in fields(Task))
_GET = attrgetter(*_NAMES)
_PUT = tuple(getattr(Task, name).__set__ for name in _NAMES)
_PUT_DEPS = Task.deps.__set__


Body = tuple[Task, ...]
Entry = Union[Action, Pair]


@dataclass(frozen=True, slots=True)
class Transfer:
    """Pipeline send between two neighbouring virtual stages on different ranks."""

    seconds: float
    uses: tuple[tuple[str, float], ...] = ()
    op: Op | None = None


@dataclass(frozen=True, slots=True)
class CoRun:
    """gamma: a running task of kind ``running`` slows to 1 / (1 + gamma) of its solo rate while one of kind ``beside`` runs."""

    running: str
    beside: str
    gamma: float


CORES = "cores"
"""The shared resource that ranks may be pinned to units of."""


@dataclass(frozen=True, slots=True)
class Seat:
    """Where a played rank sits: its node, how many identical ranks of that node it stands for (itself included), and how many of
    them are pinned to each core there; () = the scheduler of the node moves them as it likes."""

    node: int = 0
    peers: int = 1
    pins: tuple[int, ...] = ()


@dataclass(frozen=True)
class Program:
    orders: tuple[tuple[Entry, ...], ...]
    placement: tuple[int, ...]
    """virtual stage -> rank (or, with every rank played, virtual stage -> first rank; see ``peers``)."""
    body_index: tuple[tuple[int, ...], ...]
    """body_index[rank][i] = index in ``bodies`` of the i-th entry of that rank's order."""
    bodies: tuple[Body, ...]
    transfer_forward: Transfer | None = None
    transfer_backward: Transfer | None = None
    prologue: tuple[Body, ...] = ()
    gates: tuple[tuple[int, ...], ...] = ()
    epilogue: tuple[Body, ...] = ()
    run_ahead: int = 1_000_000_000
    gammas: tuple[CoRun, ...] = ()
    num_sms: int = 0
    """SMs of the GPU; 0 = not counted."""
    peers: int = 1
    """Ranks played per pipeline rank: rank r*peers + j holds the same virtual stages as pipeline rank r. 1 = representative."""
    labels: Mapping[str, str] = field(default_factory=dict)
    shared: Mapping[str, float] = field(default_factory=dict)
    """What the ranks of a node share: name -> capacity of one node."""
    seats: tuple[Seat, ...] = ()
    """One for each rank; () = all on one node, each for itself. Matters only where something is shared."""

    @property
    def num_ranks(self) -> int:
        return len(self.orders)

    def seat(self, rank: int) -> Seat:
        return self.seats[rank] if self.seats else Seat()


def interleave(a: Body, b: Body) -> Body:
    """Two bodies as one overlapped pair: their pieces alternate, so that one's collectives stand under the other's compute.

    Each body keeps its own order and waits; pieces of the longer one are spread evenly over the shorter.
    """
    pieces = [_pieces(a), _pieces(b)]
    order = sorted([(i / max(1, len(p)), side, i) for side, p in enumerate(pieces) for i in range(len(p))])
    where: list[dict[int, int]] = [{}, {}]
    out: list[Task] = []
    for _, side, i in order:
        for old in pieces[side][i]:
            where[side][old] = len(out)
            task = (a, b)[side][old]
            out.append(task.with_deps(tuple([where[side][d] for d in task.deps])))
    return tuple(out)


def _pieces(body: Body) -> list[list[int]]:
    """Task indices in pieces of a run of compute and the collectives behind it: what computes next waits for those."""
    cuts: list[list[int]] = []
    for i, task in enumerate(body):
        if not cuts or (task.stream == COMPUTE and any(body[k].stream == COMM for k in cuts[-1])):
            cuts.append([])
        cuts[-1].append(i)
    return cuts
