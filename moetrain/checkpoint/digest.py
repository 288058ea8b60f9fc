"""Which 64 bits stand for the content of a logical tensor, however it is cut over ranks?

Every element's bits are mixed with its position in the logical tensor, and the results are summed modulo 2^64: a sum over pieces
is the sum over the whole, in any order. The mixer is splitmix64's (Steele, Lea and Flood, OOPSLA 2014; https://prng.di.unimi.it/splitmix64.c). It tells
damage and misplaced shards from the truth; it is no defence against somebody who forges a tensor on purpose.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

MODULUS = 1 << 64


def _signed(value: int) -> int:
    value %= MODULUS
    return value - MODULUS if value >= MODULUS >> 1 else value


GOLDEN = 0x9E3779B97F4A7C15
ROUNDS = ((30, _signed(0xBF58476D1CE4E5B9)), (27, _signed(0x94D049BB133111EB)), (31, 1))
CHUNK = {"cpu": 1 << 17, "cuda": 1 << 22}
"""Elements mixed at a time: two scratch buffers of 8 bytes each, in the cache of a core or large enough to fill a GPU."""

BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def digest(tensor: torch.Tensor, shape: Sequence[int] | None = None, offsets: Sequence[int] | None = None) -> int:
    """The digest of a box of a logical tensor of ``shape`` that begins at ``offsets``; of a whole tensor where both are left out.

    An int below 2^64. The digests of boxes that tile the logical tensor add up (modulo 2^64) to that of the whole.
    """
    shape = tuple(tensor.shape if shape is None else shape)
    offsets = tuple([0] * len(shape) if offsets is None else offsets)
    if not tensor.numel():
        return 0
    rows, run, strides = _runs(tuple(tensor.shape), shape)
    start = sum(offset * stride for offset, stride in zip(offsets, _strides(shape)))
    flat = tensor.detach().contiguous().view(-1).view(BITS[tensor.element_size()])
    return _sum(flat, start, rows, run, strides)


def total(digests: Sequence[int]) -> str:
    """The digest of the whole from those of its boxes, as 16 hexadecimal digits."""
    return f"{sum(digests) % MODULUS:016x}"


def _strides(shape: Sequence[int]) -> list[int]:
    return [math.prod(shape[dim + 1:]) for dim in range(len(shape))]


def _runs(sizes: tuple[int, ...], shape: tuple[int, ...]) -> tuple[tuple[int, ...], int, list[int]]:
    """(sizes of the outer dimensions, elements of a contiguous run, logical strides of the outer dimensions) of a box."""
    whole = len(shape)
    while whole and sizes[whole - 1] == shape[whole - 1]:
        whole -= 1
    cut = max(0, whole - 1)
    outer = [dim for dim in range(cut) if sizes[dim] > 1]
    strides = _strides(shape)
    return tuple(sizes[dim] for dim in outer), math.prod(sizes[cut:]), [strides[dim] for dim in outer]


def _sum(flat: torch.Tensor, start: int, rows: tuple[int, ...], run: int, strides: list[int]) -> int:
    size = min(flat.numel(), CHUNK.get(flat.device.type, CHUNK["cpu"]))
    steps = torch.arange(size, device=flat.device)
    sums = torch.zeros((), dtype=torch.int64, device=flat.device)
    mixed, scratch = torch.empty_like(steps), torch.empty_like(steps)
    for low in range(0, flat.numel(), size):
        bits = flat[low:low + size]
        x, y = mixed[:len(bits)], scratch[:len(bits)]
        _positions(x, y, steps[:len(bits)], low, start, rows, run, strides)
        x.mul_(_signed(GOLDEN)).bitwise_xor_(y.copy_(bits))
        for shift, factor in ROUNDS:
            torch.bitwise_right_shift(x, shift, out=y)
            x.bitwise_xor_(y.bitwise_and_((1 << (64 - shift)) - 1))
            if factor != 1:
                x.mul_(factor)
        sums += x.sum()
    return int(sums) % MODULUS


def _positions(out, scratch, steps, low: int, start: int, rows, run: int, strides) -> None:
    """Logical flat positions of the local elements low, low+1, ... into ``out``."""
    if not rows:
        torch.add(steps, low + start, out=out)
        return
    torch.add(steps, low, out=scratch)
    out.copy_(scratch).remainder_(run).add_(start)
    scratch.div_(run, rounding_mode="floor")
    for size, stride in zip(reversed(rows), reversed(strides)):
        out.add_(scratch.remainder(size), alpha=stride)
        scratch.div_(size, rounding_mode="floor")
