"""What is the right answer of each kernel, by loops nobody could get wrong, and how far may rounding take it?

Oracles work in float64, one row and one expert at a time. Bounds are those of rounding analysis: a sum of n products in a precision of unit roundoff u
is within n u / (1 - n u) of the sum of the products' magnitudes (Higham, Accuracy and Stability of Numerical Algorithms, section 3.1), and rounding
the result adds its own u.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

UNIT = {torch.float64: 2.0**-53, torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8}
"""Unit roundoff: half the distance from 1 to the next number."""

LOADS = {
    "even": [5, 5, 5, 5],
    "first empty": [0, 7, 6, 4],
    "last empty": [8, 3, 9, 0],
    "all but one empty": [0, 0, 19, 0],
    "all empty": [0, 0, 0, 0],
    "odd": [1, 17, 2, 33],
}
"""Rows of each expert; TAIL more rows follow that belong to none."""
TAIL = 3


def offsets_of(loads: list[int]) -> Tensor:
    return torch.tensor(loads).cumsum(0).int()


def owners(offsets: Tensor, num_rows: int) -> list[int | None]:
    """The expert of each row, None past the last offset."""
    ends = offsets.tolist()
    return [next((e for e, end in enumerate(ends) if r < end), None) for r in range(num_rows)]


def grouped_gemm(x: Tensor, w: Tensor, offsets: Tensor) -> Tensor:
    """Row by row, output by output."""
    out = torch.zeros(x.shape[0], w.shape[1], dtype=torch.float64)
    for r, e in enumerate(owners(offsets, x.shape[0])):
        if e is not None:
            for n in range(w.shape[1]):
                out[r, n] = torch.dot(x[r].double(), w[e, n].double())
    return out


def weight_grad(grad: Tensor, x: Tensor, offsets: Tensor) -> Tensor:
    """Row by row: the outer product goes to the row's expert."""
    out = torch.zeros(offsets.shape[0], grad.shape[1], x.shape[1], dtype=torch.float64)
    for r, e in enumerate(owners(offsets, x.shape[0])):
        if e is not None:
            out[e] += torch.outer(grad[r].double(), x[r].double())
    return out


def product_bound(product: Callable[..., Tensor], a: Tensor, b: Tensor, offsets: Tensor, terms: int, dtype: torch.dtype,
                  rounding: dict[torch.dtype, float] = UNIT) -> Tensor:
    """Elementwise bound of a product of ``terms`` terms summed in float32 (float64: its own) and rounded to ``dtype``."""
    u = UNIT[torch.float64 if dtype == torch.float64 else torch.float32]
    magnitude = product(a.abs(), b.abs(), offsets)
    return magnitude * (terms * u / (1 - terms * u)) + (magnitude * rounding[dtype] if dtype != torch.float64 else 0)


def unpermute(rows: Tensor, positions: Tensor, weights: Tensor) -> Tensor:
    out = torch.zeros(positions.shape[0], rows.shape[1], dtype=torch.float64)
    for t in range(positions.shape[0]):
        for j in range(positions.shape[1]):
            if positions[t, j] >= 0:
                out[t] += weights[t, j].double() * rows[positions[t, j]].double()
    return out


def swiglu(x: Tensor, weight: Tensor | None) -> Tensor:
    out = torch.zeros(x.shape[0], x.shape[1] // 2, dtype=torch.float64)
    for r in range(x.shape[0]):
        for c in range(out.shape[1]):
            gate, up = float(x[r, c]), float(x[r, c + out.shape[1]])
            out[r, c] = gate / (1 + math.exp(-gate)) * up * (1 if weight is None else float(weight[r]))
    return out


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    out = torch.zeros(x.shape, dtype=torch.float64)
    for r in range(x.shape[0]):
        mean_square = sum(float(v) ** 2 for v in x[r]) / x.shape[1]
        out[r] = x[r].double() / math.sqrt(mean_square + eps) * weight.double()
    return out


def route(logits: Tensor, top_k: int, bias: Tensor | None, score: str, num_groups: int, top_k_groups: int, normalize: bool, scale: float):
    """(weights, experts, counts) as nested lists, token by token, by sorting (-value, number)."""
    weights, experts, counts = [], [], [0] * logits.shape[1]
    for row in logits.double():
        scores = (row.softmax(0) if score == "softmax" else row.sigmoid()).tolist()
        biased = [s + (0 if bias is None else float(bias[e])) for e, s in enumerate(scores)]
        size = len(scores) // num_groups
        group_score = [sum(sorted(biased[g * size : (g + 1) * size])[-2:]) for g in range(num_groups)]
        kept = set(sorted(range(num_groups), key=lambda g: (-group_score[g], g))[:top_k_groups])
        chosen = sorted((e for e in range(len(scores)) if e // size in kept), key=lambda e: (-biased[e], e))[:top_k]
        total = sum(scores[e] for e in chosen) if normalize else 1
        experts.append(chosen)
        weights.append([scores[e] / total * scale for e in chosen])
        for e in chosen:
            counts[e] += 1
    return weights, experts, counts


def placement(num_tokens: int, top_k: int, num_dropped: int, num_padding: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """(source [R], positions [T,k]): a random order of the token copies, some dropped, some rows of no token."""
    generator = torch.Generator().manual_seed(seed)
    kept = torch.randperm(num_tokens * top_k, generator=generator)[num_dropped:]
    rows = torch.randperm(len(kept) + num_padding, generator=generator)[: len(kept)]
    source = torch.full((len(kept) + num_padding,), -1, dtype=torch.int32)
    positions = torch.full((num_tokens * top_k,), -1, dtype=torch.int32)
    source[rows] = (kept // top_k).int()
    positions[kept] = rows.int()
    return source, positions.view(num_tokens, top_k)


@contextlib.contextmanager
def poisoned() -> Iterator[None]:
    """Memory that torch allocates and nobody wrote reads as NaN (torch's deterministic mode does that)."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def gradients(function: Callable[..., Tensor], inputs: list[Tensor], seed: int = 0) -> tuple[Tensor, list[Tensor]]:
    """(output, gradients of the inputs) for a random upstream gradient, the same for every precision."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    out = function(*leaves)
    upstream = torch.randn(out.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return out.detach(), list(torch.autograd.grad(out, leaves, upstream.to(out.dtype)))
