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
    return cleared(tokens.index_select(0, source.clamp(min=0)), source < 0)


def unpermute(rows: Tensor, positions: Tensor, weights: Tensor) -> Tensor:
    """rows [R,d], positions int [T,k] (-1: no row), weights [T,k]: [T,d], each token's rows weighted and summed."""
    rows = _at_least_one(rows)
    total = wide(rows).new_zeros(positions.shape[0], rows.shape[1])
    for j in range(positions.shape[1]):
        at = positions[:, j]
        row = cleared(wide(rows.index_select(0, at.clamp(min=0))), at < 0)
        total = total + row * weights[:, j, None].to(total.dtype)
    return total.to(rows.dtype)


def cleared(x: Tensor, rows: Tensor) -> Tensor:
    """x [R,d] with zeros where ``rows`` [R] is true. On a CPU, where looking costs nothing, x itself if nowhere."""
    if type(rows) is Tensor and rows.device.type == "cpu" and not rows.any():
        return x
    return x.masked_fill(rows[:, None], 0)


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
    """Scores [T,E] to choose by: biased, -inf outside the best groups, lowest() for NaN."""
    biased = scores if bias is None else scores + bias.to(scores.dtype)
    biased = torch.where(biased.isnan(), lowest(biased.dtype), biased)
    if num_groups == 1:
        return biased
    grouped = biased.unflatten(-1, (num_groups, -1))
    best_two = grouped.topk(min(2, grouped.shape[-1]), dim=-1).values.sum(-1)
    kept = torch.zeros_like(best_two, dtype=torch.bool).scatter_(-1, _best(best_two, top_k_groups), True)
    return grouped.masked_fill(~kept[..., None], float("-inf")).flatten(-2)


def lowest(dtype: torch.dtype) -> float:
    """What a NaN score counts as: below all others, above what may not be chosen, also when two are added."""
    return torch.finfo(dtype).min / 4


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


LARGEST = 448.0
"""Of e4m3 without infinities (float8_e4m3fn)."""
GROUPS: dict[str, int | None] = {"rowwise": None, "block128": 128, "mxfp8": 32}
"""Elements along K that share a scale; None: the whole row."""
WHOLE = 16
"""K in bytes is whole units of this for the bulk copy engine."""


def check_recipe(x: Tensor, recipe: str) -> None:
    """ValueError in one line for an unknown recipe or a K that isn't whole groups."""
    if recipe not in GROUPS:
        raise ValueError(f"fp8 recipe {recipe!r}; legal are {', '.join(GROUPS)}")
    unit = GROUPS[recipe] or WHOLE
    if x.shape[-1] % unit:
        raise ValueError(f"fp8 recipe {recipe}: K is {x.shape[-1]}; it must be a multiple of {unit}")


def quantise(x: Tensor, recipe: str) -> tuple[Tensor, Tensor]:
    """x [R,K] or weights [E,N,K]: (values float8_e4m3fn, scales) so that dequantise() gives about x.

    rowwise: scales float32 [..., 1]; block128: [..., K/128] of rows, [E, ceil(N/128), K/128] of weights; mxfp8: uint8 e [..., K/32] meaning 2^(e-127),
    the least power of two under which nothing exceeds 448.
    """
    check_recipe(x, recipe)
    groups = _groups(x.float(), recipe)
    scale = groups.abs().amax((-3, -1) if groups.ndim == 5 else -1) / LARGEST
    if recipe == "mxfp8":
        mantissa, exponent = torch.frexp(scale)  # scale = mantissa 2^exponent, mantissa in [0.5, 1)
        byte = torch.where(scale == 0, 127, (exponent - (mantissa == 0.5).int() + 127).clamp(0, 254))
        return _scaled(x, groups, torch.exp2(byte.float() - 127)), byte.to(torch.uint8)
    scale = torch.where(scale > 0, scale, 1.0)
    return _scaled(x, groups, scale), scale


def dequantise(values: Tensor, scales: Tensor, recipe: str) -> Tensor:
    """values times their scales, float32, of the shape of values."""
    groups = _groups(values.float(), recipe)
    factor = torch.exp2(scales.float() - 127) if recipe == "mxfp8" else scales
    return _ungroup(groups * _spread(factor, groups), values)


def scaled_grouped_gemm(x: Tensor, w: Tensor, offsets: Tensor, recipe: str) -> Tensor:
    """Both operands to fp8 and back, then grouped_gemm in float32; rounded to the type of x."""
    return grouped_gemm(*(dequantise(*quantise(t, recipe), recipe) for t in (x, w)), offsets).to(x.dtype)


def _groups(x: Tensor, recipe: str) -> Tensor:
    """[..., groups, width]; weights in block128 [E, tiles of N, 128, tiles of K, 128], N padded by zeros."""
    if recipe == "block128" and x.ndim == 3:
        return F.pad(x, (0, 0, 0, -x.shape[1] % 128)).unflatten(1, (-1, 128)).unflatten(3, (-1, 128))
    return x.unflatten(-1, (-1, GROUPS[recipe] or x.shape[-1]))


def _spread(scales: Tensor, groups: Tensor) -> Tensor:
    return scales[:, :, None, :, None] if groups.ndim == 5 else scales[..., None]


def _scaled(x: Tensor, groups: Tensor, scale: Tensor) -> Tensor:
    return _ungroup(groups * (1 / _spread(scale, groups)), x).to(torch.float8_e4m3fn)


def _ungroup(groups: Tensor, like: Tensor) -> Tensor:
    return groups.flatten(3).flatten(1, 2)[:, : like.shape[1]] if groups.ndim == 5 else groups.flatten(-2)
