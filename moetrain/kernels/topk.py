"""How does a token choose its experts in one kernel: scores, bias, groups, the k best, their weights, and the experts' loads?

A program holds whole rows of scores. The k best come by k passes of arg-max, lower number first among equals, so the choice is the same everywhere.
Loads are integers, added atomically: exact in any order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import runtime
from .reference import TINY as _TINY
from .reference import check_route, lowest

LOWEST: tl.constexpr = tl.constexpr(lowest(torch.float32))
TINY: tl.constexpr = tl.constexpr(_TINY)


@triton.jit
def _scores(logits_ptr, t, num_tokens, E: tl.constexpr, E_PAD: tl.constexpr, SIGMOID: tl.constexpr):
    """Scores [BLOCK_T,E_PAD] of tokens t; columns past E are zero."""
    e = tl.arange(0, E_PAD)
    mask = (t < num_tokens)[:, None] & (e < E)[None, :]
    if SIGMOID:
        logits = tl.load(logits_ptr + t.to(tl.int64)[:, None] * E + e[None, :], mask=mask, other=0.0)
        return tl.where(mask, tl.sigmoid(logits), 0.0)
    logits = tl.load(logits_ptr + t.to(tl.int64)[:, None] * E + e[None, :], mask=mask, other=float("-inf"))
    logits = tl.where((t < num_tokens)[:, None], logits, 0.0)
    power = tl.where((e < E)[None, :], tl.exp(logits - tl.max(logits, 1)[:, None]), 0.0)
    return power / tl.sum(power, 1)[:, None]


@triton.jit
def _in_best_groups(value, E: tl.constexpr, E_PAD: tl.constexpr, GROUPS: tl.constexpr, KEPT: tl.constexpr):
    """``value`` [BLOCK_T,E_PAD] with -inf outside the KEPT groups whose two best values have the largest sum."""
    e = tl.arange(0, E_PAD)
    SIZE: tl.constexpr = E // GROUPS
    G_PAD: tl.constexpr = triton.next_power_of_2(GROUPS)
    g = tl.arange(0, G_PAD)
    totals = tl.full((value.shape[0], G_PAD), float("-inf"), tl.float32)
    for group in tl.static_range(GROUPS):
        inside = tl.where((e // SIZE == group)[None, :], value, float("-inf"))
        total, at = tl.max(inside, 1, return_indices=True, return_indices_tie_break_left=True)
        if SIZE > 1:
            total += tl.max(tl.where(e[None, :] == at[:, None], float("-inf"), inside), 1)
        totals = tl.where(g[None, :] == group, total[:, None], totals)
    kept = tl.zeros(value.shape, tl.int1)
    for _ in tl.static_range(KEPT):
        best = tl.argmax(totals, 1, tie_break_left=True)
        totals = tl.where(g[None, :] == best[:, None], float("-inf"), totals)
        kept = kept | (e[None, :] // SIZE == best[:, None])
    return tl.where(kept, value, float("-inf"))


@triton.jit(do_not_specialize=["num_tokens"])
def route_kernel(
    logits_ptr, bias_ptr, weights_ptr, experts_ptr, counts_ptr, num_tokens, scale,
    E: tl.constexpr, E_PAD: tl.constexpr, TOP_K: tl.constexpr, K_PAD: tl.constexpr, SIGMOID: tl.constexpr, BIASED: tl.constexpr,
    GROUPS: tl.constexpr, KEPT: tl.constexpr, NORMALIZE: tl.constexpr, BLOCK_T: tl.constexpr,
):
    """weights and experts [T,k], counts [E] added to."""
    t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    e, j = tl.arange(0, E_PAD), tl.arange(0, K_PAD)
    scores = _scores(logits_ptr, t, num_tokens, E, E_PAD, SIGMOID)
    value = scores
    if BIASED:
        value += tl.load(bias_ptr + e, mask=e < E, other=0.0).to(tl.float32)[None, :]
    value = tl.where(value == value, value, LOWEST)
    value = tl.where((e < E)[None, :], value, float("-inf"))
    if GROUPS > 1:
        value = _in_best_groups(value, E, E_PAD, GROUPS, KEPT)
    weights = tl.zeros((BLOCK_T, K_PAD), tl.float32)
    experts = tl.zeros((BLOCK_T, K_PAD), tl.int32)
    taken = tl.zeros((BLOCK_T, E_PAD), tl.int32)
    for i in tl.static_range(TOP_K):
        best = tl.argmax(value, 1, tie_break_left=True)
        hit = e[None, :] == best[:, None]
        score = tl.sum(tl.where(hit, scores, 0.0), 1)
        weights = tl.where(j[None, :] == i, score[:, None], weights)
        experts = tl.where(j[None, :] == i, best[:, None].to(tl.int32), experts)
        value = tl.where(hit, float("-inf"), value)
        taken += hit.to(tl.int32)
    if NORMALIZE:
        weights /= tl.sum(weights, 1)[:, None] + TINY
    at = t.to(tl.int64)[:, None] * TOP_K + j[None, :]
    mask = (t < num_tokens)[:, None] & (j < TOP_K)[None, :]
    tl.store(weights_ptr + at, weights * scale, mask=mask)
    tl.store(experts_ptr + at, experts, mask=mask)
    counts = tl.sum(tl.where((t < num_tokens)[:, None], taken, 0), 0)
    tl.atomic_add(counts_ptr + e, counts, mask=(e < E) & (counts > 0), sem="relaxed")


@triton.jit(do_not_specialize=["num_tokens"])
def route_backward_kernel(
    grad_ptr, logits_ptr, experts_ptr, out_ptr, num_tokens, scale,
    E: tl.constexpr, E_PAD: tl.constexpr, TOP_K: tl.constexpr, SIGMOID: tl.constexpr, NORMALIZE: tl.constexpr, BLOCK_T: tl.constexpr,
):
    """Gradient of the logits [T,E] from that of the weights [T,k]; scores are computed again."""
    t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    e = tl.arange(0, E_PAD)
    there = t < num_tokens
    scores = _scores(logits_ptr, t, num_tokens, E, E_PAD, SIGMOID)
    grad_scores = tl.zeros((BLOCK_T, E_PAD), tl.float32)
    chosen = tl.zeros((BLOCK_T, E_PAD), tl.int1)
    for i in tl.static_range(TOP_K):
        expert = tl.load(experts_ptr + t.to(tl.int64) * TOP_K + i, mask=there, other=-1)
        grad = tl.load(grad_ptr + t.to(tl.int64) * TOP_K + i, mask=there, other=0.0) * scale
        hit = e[None, :] == expert[:, None]
        grad_scores = tl.where(hit, grad[:, None], grad_scores)
        chosen = chosen | hit
    if NORMALIZE:  # w = s / total: dw/ds loses its part along s
        total = tl.sum(tl.where(chosen, scores, 0.0), 1)[:, None] + TINY
        along = tl.sum(grad_scores * scores, 1)[:, None] / total
        grad_scores = tl.where(chosen, (grad_scores - along) / total, 0.0)
    if SIGMOID:
        out = grad_scores * scores * (1 - scores)
    else:
        out = scores * (grad_scores - tl.sum(grad_scores * scores, 1)[:, None])
    tl.store(out_ptr + t.to(tl.int64)[:, None] * E + e[None, :], out, mask=there[:, None] & (e < E)[None, :])


def block_tokens(num_experts: int) -> int:
    """Tokens a program: 2,048 scores in all."""
    return 64 if runtime.INTERPRET else max(1, 2048 // triton.next_power_of_2(num_experts))


@torch.library.custom_op(
    "moetrain::route", mutates_args=(),
    schema="(Tensor logits, Tensor? bias, int top_k, bool sigmoid, int groups, int kept, bool normalize, float scale) -> (Tensor, Tensor, Tensor)",
)
def _forward(logits, bias, top_k, sigmoid, groups, kept, normalize, scale):
    logits = runtime.on_device("route", logits)
    num_tokens, num_experts = logits.shape
    weights = logits.new_empty(num_tokens, top_k)
    experts = torch.empty(num_tokens, top_k, dtype=torch.int32, device=logits.device)
    counts = torch.zeros(num_experts, dtype=torch.int32, device=logits.device)
    if num_tokens:
        block = block_tokens(num_experts)
        given = logits if bias is None else bias.contiguous()  # any pointer where there is none
        route_kernel[(triton.cdiv(num_tokens, block),)](
            logits, given, weights, experts, counts, num_tokens, scale, num_experts, triton.next_power_of_2(num_experts), top_k,
            triton.next_power_of_2(top_k), sigmoid, bias is not None, groups, kept, normalize, block, num_warps=4)
    return weights, experts, counts


@torch.library.custom_op(
    "moetrain::route_backward", mutates_args=(),
    schema="(Tensor grad, Tensor logits, Tensor experts, bool sigmoid, bool normalize, float scale) -> Tensor",
)
def _backward(grad, logits, experts, sigmoid, normalize, scale):
    grad, logits = runtime.on_device("route", grad), runtime.on_device("route", logits)
    (num_tokens, num_experts), top_k = logits.shape, experts.shape[1]
    out = torch.empty_like(logits)
    if num_tokens:
        block = block_tokens(num_experts)
        route_backward_kernel[(triton.cdiv(num_tokens, block),)](
            grad, logits, experts, out, num_tokens, scale, num_experts, triton.next_power_of_2(num_experts), top_k, sigmoid, normalize, block,
            num_warps=4)
    return out


def _fake(logits, bias, top_k, sigmoid, groups, kept, normalize, scale):
    shape = (logits.shape[0], top_k)
    return logits.new_empty(shape), logits.new_empty(shape, dtype=torch.int32), logits.new_empty(logits.shape[1], dtype=torch.int32)


def _save(ctx, inputs, output) -> None:
    logits, _, _, ctx.sigmoid, _, _, ctx.normalize, ctx.scale = inputs
    ctx.save_for_backward(logits, output[1])
    ctx.mark_non_differentiable(output[1], output[2])


def _differentiate(ctx, grad: Tensor, *_):
    logits, experts = ctx.saved_tensors
    return _backward(grad.contiguous(), logits, experts, ctx.sigmoid, ctx.normalize, ctx.scale), *[None] * 7


_forward.register_fake(_fake)
_backward.register_fake(lambda grad, logits, experts, sigmoid, normalize, scale: torch.empty_like(logits, memory_format=torch.contiguous_format))
_forward.register_autograd(_differentiate, setup_context=_save)


def route(
    logits: Tensor, top_k: int, bias: Tensor | None = None, *, score: str = "softmax", num_groups: int = 1, top_k_groups: int = 1,
    normalize: bool = True, scale: float = 1.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """logits float32 [T,E] to weights [T,k] (differentiable), experts int32 [T,k] best first, counts int32 [E]. See reference.route for the rules."""
    check_route(logits, top_k, bias, score, num_groups, top_k_groups)
    return _forward(logits, bias, top_k, score == "sigmoid", num_groups, top_k_groups, normalize, scale)
