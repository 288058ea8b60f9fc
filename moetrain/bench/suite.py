"""What must be measured that no op of a plan asks for? (Launch cost, compute beside communication, gradient add, optimizer, checkpoint.)

Each entry of SUITE gives (name, parameters, everyone, make): make() is a Work as an op has one. Sizes are for a GPU, or small ones for a CPU.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from moesim.ops import Gemm, Group, MemoryBound
from moetrain.bench import memory_bound, products
from moetrain.bench.work import Machine, Skip, Work
from moetrain.checkpoint import Checkpointer
from moetrain.optim import AdamW

MANY = 200
"""Launches in a row: few enough that no queue of a device fills up."""


class Entry(NamedTuple):
    """One measurement of the suite. ``make`` takes the folder for files that it writes."""

    name: str
    parameters: dict[str, Any]
    everyone: bool
    make: Callable[[Machine, Path], Work]


def entries(machine: Machine) -> Iterator[Entry]:
    """All of them, cheapest first."""
    for op in ("add", "mm", "linear_step"):
        yield Entry("launch", {"op": op}, False, lambda m, _, op=op: launch(op, m))
    elements = (1 << 28) if machine.cuda else (1 << 22)
    yield Entry("gradient_add", {"elements": elements}, False, lambda m, _: gradient_add(elements, m))
    yield Entry("optimizer", {"elements": elements, "kind": "adamw"}, False, lambda m, _: optimizer(elements, m))
    for compute in ("gemm", "copy"):
        yield Entry("beside", {"compute": compute, "communication": None, "ranks": machine.world}, True, lambda m, _, c=compute: beside(c, None, m))
        yield Entry("beside", {"compute": compute, "communication": "all_reduce", "ranks": machine.world}, True,
                    lambda m, _, c=compute: beside(c, "all_reduce", m))
    size = (1 << 30) if machine.cuda else (1 << 24)
    for what in ("save", "load"):
        yield Entry(f"checkpoint_{what}", {"bytes": 3 * size, "asynchronous": False, "ranks": machine.world}, True,
                    lambda m, folder, w=what: checkpoint(w, size, m, folder))


# --- launch cost -------------------------------------------------------------------------------------------------------------


def launch(op: str, machine: Machine) -> Work:
    """Seconds until the host has issued one small op: what a step's thousands of kernels cost before any of them runs."""
    x, w = machine.normal(16, 16), machine.normal(16, 16).requires_grad_()
    if op == "add":
        once = lambda: x.add_(1e-6)  # noqa: E731
    elif op == "mm":
        once = lambda: x @ x  # noqa: E731
    else:
        once = lambda: torch.autograd.grad((x @ w.t()).sum(), w)  # noqa: E731
    return Work([lambda: [once() for _ in range(MANY)]], 0.0, 0.0, "fp32", {"kernel": op, "calls": MANY}, timer="host", single=True)


# --- streams over memory -----------------------------------------------------------------------------------------------------


def gradient_add(elements: int, machine: Machine) -> Work:
    """An FP32 buffer += a gradient as backward leaves it: 8 bytes an element and the gradient's."""
    grad, buffer = machine.normal(elements, dtype=machine.dtype), machine.normal(elements)
    return Work([lambda: buffer.add_(grad)], 0.0, float(elements * (8 + grad.element_size())), machine.dtype, {"kernel": "add_ into FP32"})


def optimizer(elements: int, machine: Machine) -> Work:
    """One step of the trainer's AdamW over FP32 parameters and moments."""
    return memory_bound.build(MemoryBound("optimizer", float(memory_bound.ADAM_BYTES * elements)), machine)


# --- compute beside communication ----------------------------------------------------------------------------------------------


def beside(compute: str, communication: str | None, machine: Machine) -> Work:
    """A product or a copy on every rank at once, alone or while an all-reduce that was issued before it is under way."""
    if machine.world < 2:
        raise Skip("needs 2 ranks, this run has 1")
    comm = machine.communicator(Group(machine.world))
    side = 8192 if machine.cuda else 384
    op = Gemm(side, side, side) if compute == "gemm" else MemoryBound("copy", float(1 << 30 if machine.cuda else 1 << 24))
    work = products.gemm(op, machine) if isinstance(op, Gemm) else memory_bound.build(op, machine)
    if communication is None:
        return Work(work.calls, work.flops, work.bytes, work.dtype, work.method, everyone=True, single=True)
    x = machine.normal((1 << 28) if machine.cuda else (1 << 22))
    flying: list = []

    def start(_: int) -> None:
        flying.append(dist.all_reduce(x, dist.ReduceOp.MAX, group=comm.pg, async_op=True))

    method = work.method | {"beside": communication, "beside_bytes": x.numel() * 4}
    return Work(work.calls, work.flops, work.bytes, work.dtype, method, before=start, after=lambda: flying.pop().wait(), everyone=True, single=True)


# --- checkpoint --------------------------------------------------------------------------------------------------------------


def checkpoint(what: str, size: int, machine: Machine, folder: Path) -> Work:
    """Save or load of ``size`` bytes of FP32 parameters with two moments, through the trainer's checkpoints, in ``folder``."""
    part = nn.Module()
    part.weight = nn.Parameter(machine.normal(size // 4 // 1024, 1024, seed=0))  # replicas are the same on all ranks
    step = AdamW([{"params": [("weight", part.weight)]}], 1e-3)
    place = tempfile.mkdtemp(dir=folder) if machine.rank == 0 else None
    if machine.world > 1:
        shared = [place]
        dist.broadcast_object_list(shared, 0)
        place = shared[0]
    checkpointer = Checkpointer(place, keep=1, asynchronous=False)
    number = iter(range(1, 1 << 30))
    save = lambda: checkpointer.save(next(number), [part], step)  # noqa: E731
    if what == "load":
        save()
    call = save if what == "save" else lambda: checkpointer.load(place, [part], step)
    return Work([call], 0.0, 3.0 * size, "fp32", {"kernel": f"checkpoint {what}"}, everyone=True, single=True)
