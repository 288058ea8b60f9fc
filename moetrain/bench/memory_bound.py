"""Which kernel stands for each class of memory-bound ops, and how many elements give it an op's bytes? (One builder a kind.)

Results are allocated anew in each repeat, as a step does: on a CPU the pages of a large one are, too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from moesim.measurement import nearest
from moesim.ops import MemoryBound
from moetrain.bench.work import TORCH, Machine, Skip, Work
from moetrain.kernels import reference
from moetrain.optim import AdamW

ROW = 4096
"""Values in a row of what is normed, permuted, looked up or quantised."""
VOCABULARY = 32768
CHUNK = 4096
"""Tokens whose logits exist at one time, as in the trainer's loss by default."""
ADAM_BYTES = 28
"""Of one FP32 parameter: it, its gradient and two moments are read, all but the gradient written."""
PARAMETER = 1 << 24


class Kernel(NamedTuple):
    """``make(count, machine, dtype)`` gives (one call, elements it really has); ``moved`` and ``held`` are bytes an element."""

    name: str
    make: Callable[[int, Machine, str], tuple[Callable[[], Any], int]]
    moved: float
    held: float
    dtype: str


def build(op: MemoryBound, machine: Machine) -> Work:
    """The kernel of ``op.kind`` on as many elements as move ``op.moved`` bytes."""
    if op.kind not in KINDS:
        raise Skip(f"no memory-bound kind {op.kind!r}: known are {', '.join(KINDS)}{nearest(op.kind, KINDS)}")
    kernel = KINDS[op.kind](machine)
    count = round(op.moved / kernel.moved)
    if count < 1:
        raise Skip(f"moves {op.moved:g} bytes: nothing to time")
    made = machine.sets(kernel.held * count, lambda: kernel.make(count, machine, kernel.dtype))
    method = {"kernel": kernel.name, "sets": len(made), "elements": made[0][1]}
    return Work([call for call, _ in made], 0.0, kernel.moved * made[0][1], kernel.dtype, method)


def _matrix(count: int, width: int) -> tuple[int, int]:
    """(rows, row length) of about ``count`` values; rows are about ``width`` long, a multiple of 8."""
    rows = max(1, round(count / width))
    return rows, max(1, round(count / rows / 8) * 8)


def _add(count: int, machine: Machine, dtype: str):
    a, b = machine.normal(count, dtype=dtype), machine.normal(count, dtype=dtype)
    return lambda: a + b, count


def _norm(count: int, machine: Machine, dtype: str):
    rows, width = _matrix(count, ROW)
    x, gain = machine.normal(rows, width, dtype=dtype), machine.normal(width, dtype=dtype)
    return lambda: F.rms_norm(x, (width,), gain, 1e-6), rows * width


def _permute(count: int, machine: Machine, dtype: str):
    rows, width = _matrix(count, ROW)
    x = machine.normal(rows, width, dtype=dtype)
    source = torch.randperm(rows, device=machine.device)
    positions = torch.argsort(source).unsqueeze(-1)
    return lambda: machine.backend.permute(x, source, positions), rows * width


def _quantise(count: int, machine: Machine, dtype: str):
    rows, width = _matrix(count, ROW)
    width += -width % 32
    x = machine.normal(rows, width, dtype=dtype)
    return lambda: _quantiser(machine)(x, "rowwise"), rows * width


def _quantiser(machine: Machine):
    if machine.cuda:
        from moetrain.kernels import scaled_gemm

        if scaled_gemm.supported("rowwise", machine.device):
            return scaled_gemm.quantise
    return reference.quantise


def _loss(count: int, machine: Machine, dtype: str):
    rows, width = _matrix(count, VOCABULARY)
    logits = machine.normal(rows, width, dtype=dtype)
    parts = logits.split(CHUNK)  # logits never exist for all tokens at once
    return lambda: [part.log_softmax(-1).numel() for part in parts], rows * width


def _optimizer(count: int, machine: Machine, dtype: str):
    parameters = []
    for start in range(0, count, PARAMETER):
        parameter = torch.nn.Parameter(machine.normal(min(PARAMETER, count - start)))
        parameter.grad = machine.normal(parameter.numel())
        parameters.append((f"p{start}", parameter))
    optimizer = AdamW([{"params": parameters}], 1e-3)
    return optimizer.step, count


def _embedding(count: int, machine: Machine, dtype: str):
    rows, width = _matrix(count, ROW)
    table = machine.normal(rows, width, dtype=dtype)
    ids = torch.randint(table.shape[0], (rows,), device=machine.device)
    return lambda: F.embedding(ids, table), rows * width


def _copy(count: int, machine: Machine, dtype: str):
    x, out = machine.normal(count, dtype=dtype), torch.empty(count, dtype=TORCH[dtype], device=machine.device)
    return lambda: out.copy_(x), count


def _of_width(name: str, make, reads: int, held: int):
    """A kernel that reads ``reads`` values an element and writes one, in the machine's dtype."""

    def kernel(machine: Machine) -> Kernel:
        width = 4 if machine.dtype == "fp32" else 2
        return Kernel(name, make, (reads + 1) * width, held * width, machine.dtype)

    return kernel


def _quantise_kernel(machine: Machine) -> Kernel:
    width = 4 if machine.dtype == "fp32" else 2
    own = _quantiser(machine) is not reference.quantise
    return Kernel(f"{'triton' if own else 'reference'} quantise, rowwise", _quantise, width + 1, width + (1 if own else 13), machine.dtype)


KINDS = {
    "elementwise": _of_width("add", _add, 2, 3),
    "norm": _of_width("rms_norm", _norm, 1, 2),
    "permute": _of_width("permute", _permute, 1, 2),
    "quantise": _quantise_kernel,
    "loss": lambda machine: Kernel("log_softmax", _loss, 8, 8, "fp32"),
    "optimizer": lambda machine: Kernel("AdamW", _optimizer, ADAM_BYTES, 16, "fp32"),
    "embedding": _of_width("embedding", _embedding, 1, 2),
    "copy": _of_width("copy_", _copy, 1, 2),
}
