"""Which collectives does a step run, on which ranks, with how many bytes? (Autograd collectives, each written to a log.)

A Communicator is one axis of the layout as this rank sees it. Its backward is the adjoint: all-gather <-> reduce-scatter, and an
all-to-all with the splits swapped. Sizes in the log follow moesim.ops: the gathered buffer for all-gather and reduce-scatter, the
buffer for all-reduce, a rank's send buffer for all-to-all, the message for send_recv. Reductions are sums.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd import Function

from moesim.ops import Group

# Renamed in torch 2.13; 2.11 has the old names only.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclass(frozen=True, slots=True)
class Entry:
    """One collective that was issued: bytes by the convention above, ``phase`` forward | backward | step."""

    kind: str
    role: str
    bytes: int
    group: Group
    phase: str


@dataclass
class CollectiveLog:
    """What this rank issued. ``entries`` is kept only while ``recording``; ``note`` hears of every one (the watchdog's register).
    ``replaying``: a forward runs again in backward, so what it issues is backward's. ``spans``: a recorder (observe/trace.py) or None."""

    recording: bool = False
    replaying: bool = False
    entries: list[Entry] = field(default_factory=list)
    note: Callable[[str, str, str], None] | None = None
    spans: Any = None

    def begin(self, role: str, size: int, stream: str = "comm", waits: bool = True) -> Any:
        """Starts a span on a communication stream, where a recorder of spans is on; `end` takes what this gives. waits: nothing computes
        until then."""
        spans = self.spans
        return spans.send(role, size, stream, waits) if spans is not None and spans.on else None

    def pause(self) -> Any:
        """Nothing computes until `end` of what this gives: somebody waits for a collective that began before."""
        spans = self.spans
        return spans.pause() if spans is not None and spans.on else None

    def end(self, opened: Any) -> None:
        if opened is not None:
            self.spans.stop(opened)

    def add(self, kind: str, role: str, size: int, comm: Communicator, phase: str) -> None:
        if self.note is not None:
            self.note(kind, role, comm.name)
        if self.recording:
            phase = "backward" if self.replaying and phase == "forward" else phase
            self.entries.append(Entry(kind, role, size, comm.group, phase))


@dataclass(frozen=True)
class Communicator:
    """The ranks of one axis: ``size`` of them, this one is number ``rank``. Size 1 needs no process group."""

    name: str
    size: int = 1
    rank: int = 0
    pg: dist.ProcessGroup | None = None
    group: Group = Group(1)
    log: CollectiveLog = field(default_factory=CollectiveLog)


def _bytes(x: torch.Tensor) -> int:
    return x.numel() * x.element_size()


def gather_forward(x: torch.Tensor, dim: int, comm: Communicator, role: str, phase: str) -> torch.Tensor:
    """Every rank's ``x`` side by side along ``dim``; no gradient."""
    front = x.movedim(dim, 0).contiguous()
    out = front.new_empty((comm.size * front.shape[0], *front.shape[1:]))
    comm.log.add("all_gather", role, _bytes(out), comm, phase)
    opened = comm.log.begin(role, _bytes(out))
    _all_gather(out, front, group=comm.pg)
    comm.log.end(opened)
    return out.movedim(0, dim)


def scatter_forward(x: torch.Tensor, dim: int, comm: Communicator, role: str, phase: str) -> torch.Tensor:
    """The sum of every rank's ``x``, this rank's part along ``dim``; no gradient."""
    front = x.movedim(dim, 0).contiguous()
    out = front.new_empty((front.shape[0] // comm.size, *front.shape[1:]))
    comm.log.add("reduce_scatter", role, _bytes(front), comm, phase)
    opened = comm.log.begin(role, _bytes(front))
    _reduce_scatter(out, front, group=comm.pg)
    comm.log.end(opened)
    return out.movedim(0, dim)


class _AllGather(Function):
    @staticmethod
    def forward(ctx, x, dim, comm, role):
        ctx.args = dim, comm, role
        return gather_forward(x, dim, comm, role, "forward")

    @staticmethod
    def backward(ctx, grad):
        return scatter_forward(grad, *ctx.args, "backward"), None, None, None


class _ReduceScatter(Function):
    @staticmethod
    def forward(ctx, x, dim, comm, role):
        ctx.args = dim, comm, role
        return scatter_forward(x, dim, comm, role, "forward")

    @staticmethod
    def backward(ctx, grad):
        return gather_forward(grad, *ctx.args, "backward"), None, None, None


def all_gather(x: torch.Tensor, dim: int, comm: Communicator, role: str) -> torch.Tensor:
    """[..., n, ...] -> [..., size*n, ...]; its gradient is a reduce-scatter."""
    return x if comm.size == 1 else _AllGather.apply(x, dim, comm, role)


def reduce_scatter(x: torch.Tensor, dim: int, comm: Communicator, role: str) -> torch.Tensor:
    """[..., size*n, ...] -> [..., n, ...], summed over the ranks; its gradient is an all-gather."""
    return x if comm.size == 1 else _ReduceScatter.apply(x, dim, comm, role)


def all_reduce_(x: torch.Tensor, comm: Communicator, role: str, op=dist.ReduceOp.SUM, phase: str = "forward") -> torch.Tensor:
    """``x`` replaced by its reduction over the ranks; no gradient."""
    if comm.size > 1:
        comm.log.add("all_reduce", role, _bytes(x), comm, phase)
        opened = comm.log.begin(role, _bytes(x))
        dist.all_reduce(x, op=op, group=comm.pg)
        comm.log.end(opened)
    return x


# --- all-to-all, in one piece or as start and wait ----------------------------------------------------------------------------


def _exchange(x: torch.Tensor, send: Sequence[int] | None, receive: Sequence[int] | None, comm: Communicator, role: str, phase: str, wait: bool):
    """Rows of ``x`` to each rank; None for both = equal parts. Returns (received rows, pending work or None)."""
    rows = x.shape[0] if receive is None else sum(receive)
    out = x.new_empty((rows, *x.shape[1:]))
    comm.log.add("all_to_all", role, _bytes(x), comm, phase)
    opened = comm.log.begin(role, _bytes(x), waits=wait)
    arguments = {} if send is None else {"output_split_sizes": list(receive), "input_split_sizes": list(send)}
    work = dist.all_to_all_single(out, x.contiguous(), group=comm.pg, async_op=not wait, **arguments)
    if wait:
        comm.log.end(opened)
        return out, None
    return out, _Work(work, comm.log, opened)


class _Work:
    """Pending work whose span ends when somebody has waited for it."""

    def __init__(self, work: dist.Work, log: CollectiveLog, opened: Any):
        self.work, self.log, self.opened = work, log, opened

    def wait(self) -> None:
        paused = self.log.pause()
        self.work.wait()
        self.log.end(paused)
        self.log.end(self.opened)


class Pending:
    """A receive buffer that may still be filling; ``wait`` must come before it is read."""

    def __init__(self) -> None:
        self.forward = self.backward = None
        self.hold: tuple[torch.Tensor, ...] = ()
        self.back: torch.Tensor | None = None


class _Start(Function):
    """Issues the exchange; its backward waits for the one that ``_Wait.backward`` issued."""

    @staticmethod
    def forward(ctx, x, send, receive, comm, role, pending):
        ctx.pending = pending
        x = x.contiguous()
        out, pending.forward = _exchange(x, send, receive, comm, role, "forward", wait=False)
        pending.hold = (x,)
        return out

    @staticmethod
    def backward(ctx, grad):
        # The gradient that came is a stand-in of the right shape; the one that travelled is in `pending`.
        pending = ctx.pending
        pending.backward.wait()
        back, pending.back, pending.hold, pending.backward = pending.back, None, (), None
        return back, None, None, None, None, None


class _Wait(Function):
    @staticmethod
    def forward(ctx, out, send, receive, comm, role, pending):
        ctx.args, ctx.pending = (send, receive, comm, role), pending
        pending.forward.wait()
        # Done work holds its buffers, and through the buffer's gradient function itself: nobody would ever free that ring.
        pending.hold, pending.forward = (), None
        return out.view_as(out)

    @staticmethod
    def backward(ctx, grad):
        send, receive, comm, role = ctx.args
        grad = grad.contiguous()
        ctx.pending.back, ctx.pending.backward = _exchange(grad, receive, send, comm, role, "backward", wait=False)
        ctx.pending.hold = (grad,)
        return grad, None, None, None, None, None


class _AllToAll(Function):
    @staticmethod
    def forward(ctx, x, send, receive, comm, role):
        ctx.args = send, receive, comm, role
        return _exchange(x, send, receive, comm, role, "forward", wait=True)[0]

    @staticmethod
    def backward(ctx, grad):
        send, receive, comm, role = ctx.args
        return _exchange(grad, receive, send, comm, role, "backward", wait=True)[0], None, None, None, None


def all_to_all(x: torch.Tensor, send: Sequence[int] | None, receive: Sequence[int] | None, comm: Communicator, role: str) -> torch.Tensor:
    """Rows [sum(send), ...] -> [sum(receive), ...], rank by rank; its gradient travels back."""
    return x if comm.size == 1 else _AllToAll.apply(x, send, receive, comm, role)


def start_all_to_all(x, send, receive, comm: Communicator, role: str):
    """The same without waiting: a function that waits and gives the received rows. Work issued in between runs beside it, in
    backward as well."""
    if comm.size == 1:
        return lambda: x
    pending = Pending()
    out = _Start.apply(x, send, receive, comm, role, pending)
    return lambda: _Wait.apply(out, send, receive, comm, role, pending)
