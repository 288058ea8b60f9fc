"""What does each kernel compute, in plain torch of any precision?

Every function has the name and the arguments of its kernel. Sums of half-precision inputs are kept in float32 and rounded once, as the kernels do.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from .grouped_op import check

SCORES = ("softmax", "sigmoid")
TINY = 1e-20
"""Added to the sum that selected scores are divided by, so that scores which all underflow give zero, not NaN (as in DeepSeek-V3's reference code)."""


def wide(x: Tensor) -> Tensor:
    """x in the precision sums are kept in: float32 for half precision, its own otherwise."""
    return x.float() if x.element_size() < 4 else x


def grouped_gemm(x: Tensor, w: Tensor, offsets: Tensor) -> Tensor:
    """x [R,K] rows sorted by expert, w [E,N,K], offsets int32 [E] row ends: [R,N], zero past offsets[-1]. Waits for the offsets."""
    check(x, w, offsets)
    ends = offsets.tolist()
    parts = [x[start:end] @ w[e].t() for e, (start, end) in enumerate(zip([0, *ends], ends, strict=False))]
    return torch.cat([*parts, x.new_zeros(x.shape[0] - ends[-1], w.shape[1])])


def weight_grad(grad: Tensor, x: Tensor, offsets: Tensor) -> Tensor:
    """grad [R,N], x [R,K] rows sorted by expert: [E,N,K], grad^T x over each expert's rows, zero for an expert without any."""
    ends = offsets.tolist()
    return torch.stack([grad[start:end].t() @ x[start:end] for start, end in zip([0, *ends], ends, strict=False)])


def permute(tokens: Tensor, source: Tensor, positions: Tensor | None = None) -> Tensor:
    """tokens [T,d], source int [R]: [R,d], row r a copy of token source[r], or zero where that is -1. ``positions`` isn't needed here."""
    tokens = _at_least_one(tokens)
    return tokens.index_select(0, source.clamp(min=0)).masked_fill((source < 0)[:, None], 0)


def unpermute(rows: Tensor, positions: Tensor, weights: Tensor) -> Tensor:
    """rows [R,d], positions int [T,k] (-1: no row), weights [T,k]: [T,d], each token's rows weighted and summed."""
    rows = _at_least_one(rows)
    total = wide(rows).new_zeros(positions.shape[0], rows.shape[1])
    for j in range(positions.shape[1]):
        at = positions[:, j]
        row = wide(rows.index_select(0, at.clamp(min=0))).masked_fill((at < 0)[:, None], 0)
        total = total + row * weights[:, j, None].to(total.dtype)
    return total.to(rows.dtype)


def _at_least_one(rows: Tensor) -> Tensor:
    """rows [R,d], one of zeros where there is none: an index needs something to point at, and autograd a path back (a rank without rows still
    takes part in the backward's collectives)."""
    return rows if rows.shape[0] else F.pad(rows, (0, 0, 0, 1))


def swiglu(x: Tensor, weight: Tensor | None = None) -> Tensor:
    """x [R,2f], gate before up; weight [R] or None: silu(gate) * up * weight, [R,f]. Shazeer, arXiv 2002.05202."""
    gate, up = wide(x).chunk(2, dim=-1)
    out = F.silu(gate) * up
    return (out if weight is None else out * weight[:, None].to(out.dtype)).to(x.dtype)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [...,d] over its root mean square, times weight [d]; rounded once. Zhang and Sennrich, arXiv 1910.07467."""
    value = wide(x)
    return (value * torch.rsqrt(value.square().mean(-1, keepdim=True) + eps) * wide(weight)).to(x.dtype)


def route(
    logits: Tensor, top_k: int, bias: Tensor | None = None, *, score: str = "softmax", num_groups: int = 1, top_k_groups: int = 1,
    normalize: bool = True, scale: float = 1.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """logits [T,E] to weights [T,k] (differentiable), experts int32 [T,k] best first, counts int32 [E].

    bias [E] shifts the choice, never the weight. Groups: a group's score is the sum of its two best biased scores (DeepSeek-V3, arXiv 2412.19437);
    only experts of the top_k_groups best groups are eligible. Equal scores: the lower number wins. A NaN score is the last choice.
    """
    check_route(logits, top_k, bias, score, num_groups, top_k_groups)
    scores = logits.softmax(-1) if score == "softmax" else logits.sigmoid()
    experts = _best(_eligible(scores.detach(), bias, num_groups, top_k_groups), top_k)
    weights = scores.gather(-1, experts)
    if normalize:
        weights = weights / (weights.sum(-1, keepdim=True) + TINY)
    flat = experts.flatten()
    counts = torch.zeros(logits.shape[-1], dtype=torch.int32, device=logits.device).scatter_add_(0, flat, torch.ones_like(flat, dtype=torch.int32))
    return weights * scale, experts.int(), counts


def _eligible(scores: Tensor, bias: Tensor | None, num_groups: int, top_k_groups: int) -> Tensor:
    """Scores [T,E] to choose by: biased, -inf outside the best groups, the lowest finite number for NaN."""
    biased = scores if bias is None else scores + bias.to(scores.dtype)
    biased = torch.where(biased.isnan(), torch.finfo(biased.dtype).min, biased)
    if num_groups == 1:
        return biased
    grouped = biased.unflatten(-1, (num_groups, -1))
    best_two = grouped.topk(min(2, grouped.shape[-1]), dim=-1).values.sum(-1)
    kept = torch.zeros_like(best_two, dtype=torch.bool).scatter_(-1, _best(best_two, top_k_groups), True)
    return grouped.masked_fill(~kept[..., None], float("-inf")).flatten(-2)


def _best(values: Tensor, count: int) -> Tensor:
    """Indices [T,count] of the largest values, equal ones by number; topk leaves that open."""
    return values.sort(dim=-1, descending=True, stable=True).indices[..., :count]


def check_route(logits: Tensor, top_k: int, bias: Tensor | None, score: str, num_groups: int, top_k_groups: int) -> None:
    """ValueError in one line for what no router can do."""
    if score not in SCORES:
        raise ValueError(f"route: score {score!r}; legal are {', '.join(SCORES)}")
    if logits.ndim != 2 or logits.dtype not in (torch.float32, torch.float64):
        raise ValueError(f"route: logits are {logits.dtype} {tuple(logits.shape)}; they must be float32 [T,E]")
    num_experts = logits.shape[1]
    if bias is not None and tuple(bias.shape) != (num_experts,):
        raise ValueError(f"route: bias is {tuple(bias.shape)}; it must be [{num_experts}], one value an expert")
    if num_groups < 1 or num_experts % num_groups or not 1 <= top_k_groups <= num_groups:
        raise ValueError(f"route: {top_k_groups} of {num_groups} groups of {num_experts} experts; groups must be equal and at least one kept")
    if not 1 <= top_k <= num_experts // num_groups * top_k_groups:
        raise ValueError(f"route: top_k {top_k}; {num_experts // num_groups * top_k_groups} of {num_experts} experts are eligible")
