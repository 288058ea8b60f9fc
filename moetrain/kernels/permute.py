"""How do token copies get into expert order and back, forwards and backwards, in the same order of summing every time?

Every output row is written by one program that reads what it needs: no atomics, so two runs are equal to the bit. A token's copies are found through
positions [T,k], the inverse of the permutation; entries of it that aren't -1 must be distinct.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import runtime


@triton.jit(do_not_specialize=["num_rows"])
def gather_kernel(tokens_ptr, source_ptr, out_ptr, num_rows, D, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr):
    """out [R,D] = tokens[source], zero where source is negative."""
    r = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    c = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    source = tl.load(source_ptr + r, mask=r < num_rows, other=-1).to(tl.int64)
    value = tl.load(tokens_ptr + source[:, None] * D + c[None, :], mask=(source >= 0)[:, None] & (c < D)[None, :], other=0.0)
    tl.store(out_ptr + r.to(tl.int64)[:, None] * D + c[None, :], value, mask=(r < num_rows)[:, None] & (c < D)[None, :])


@triton.jit(do_not_specialize=["num_tokens"])
def combine_kernel(
    rows_ptr, positions_ptr, weights_ptr, out_ptr, num_tokens, D, TOP_K: tl.constexpr, WEIGHTED: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr,
):
    """out [T,D] = sum over j of rows[positions[:, j]] (times weights[:, j]), in the order of j, in float32."""
    t = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    c = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    acc = tl.zeros((BLOCK_R, BLOCK_D), tl.float32)
    for j in tl.static_range(TOP_K):
        at = tl.load(positions_ptr + t * TOP_K + j, mask=t < num_tokens, other=-1).to(tl.int64)
        value = tl.load(rows_ptr + at[:, None] * D + c[None, :], mask=(at >= 0)[:, None] & (c < D)[None, :], other=0.0).to(tl.float32)
        if WEIGHTED:
            value *= tl.load(weights_ptr + t * TOP_K + j, mask=at >= 0, other=0.0).to(tl.float32)[:, None]
        acc += value
    tl.store(out_ptr + t.to(tl.int64)[:, None] * D + c[None, :], acc.to(out_ptr.dtype.element_ty), mask=(t < num_tokens)[:, None] & (c < D)[None, :])


@triton.jit(do_not_specialize=["num_tokens"])
def combine_backward_kernel(
    grad_ptr, rows_ptr, positions_ptr, weights_ptr, grad_rows_ptr, grad_weights_ptr, num_tokens, D,
    TOP_K: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr,
):
    """grad_rows[positions[t, j]] = weights[t, j] * grad[t]; grad_weights[t, j] = rows[positions[t, j]] . grad[t]. A program owns its tokens' rows."""
    t = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    grad_ptrs = grad_ptr + t.to(tl.int64)[:, None] * D
    for j in tl.static_range(TOP_K):
        at = tl.load(positions_ptr + t * TOP_K + j, mask=t < num_tokens, other=-1).to(tl.int64)
        weight = tl.load(weights_ptr + t * TOP_K + j, mask=at >= 0, other=0.0).to(tl.float32)
        dot = tl.zeros((BLOCK_R,), tl.float32)
        for d0 in range(0, D, BLOCK_D):
            c = d0 + tl.arange(0, BLOCK_D)
            mask = (at >= 0)[:, None] & (c < D)[None, :]
            grad = tl.load(grad_ptrs + c[None, :], mask=mask, other=0.0).to(tl.float32)  # read anew for each j: it stays in L1
            row = tl.load(rows_ptr + at[:, None] * D + c[None, :], mask=mask, other=0.0).to(tl.float32)
            dot += tl.sum(grad * row, 1)
            tl.store(grad_rows_ptr + at[:, None] * D + c[None, :], (grad * weight[:, None]).to(grad_rows_ptr.dtype.element_ty), mask=mask)
        tl.store(grad_weights_ptr + t * TOP_K + j, dot.to(grad_weights_ptr.dtype.element_ty), mask=t < num_tokens)


def blocks(width: int) -> dict[str, int]:
    """Rows and columns a program: 4,096 elements, up to 2,048 of them side by side; larger when interpreting, where a program costs most."""
    block_d = min(triton.next_power_of_2(width), 2048)
    return dict(BLOCK_R=64 if runtime.INTERPRET else max(1, 4096 // block_d), BLOCK_D=block_d)


def _grid(num_rows: int, width: int, block: dict[str, int]) -> tuple[int, int]:
    return triton.cdiv(num_rows, block["BLOCK_R"]), triton.cdiv(width, block["BLOCK_D"])


@torch.library.custom_op("moetrain::gather_rows", mutates_args=(), schema="(Tensor tokens, Tensor source, Tensor? positions) -> Tensor")
def gather_rows(tokens, source, positions):
    """tokens [T,d], source int [R]: [R,d]. ``positions`` is for the backward."""
    tokens, source = runtime.on_device("permute", tokens), source.contiguous()
    num_rows, width = source.shape[0], tokens.shape[1]
    out = tokens.new_empty(num_rows, width)
    if out.numel():
        block = blocks(width)
        gather_kernel[_grid(num_rows, width, block)](tokens, source, out, num_rows, width, **block, num_warps=8)
    return out


@torch.library.custom_op("moetrain::combine_rows", mutates_args=(), schema="(Tensor rows, Tensor positions, Tensor? weights) -> Tensor")
def combine_rows(rows, positions, weights):
    """rows [R,d], positions int [T,k], weights [T,k] or None for ones: [T,d]."""
    rows, positions = runtime.on_device("unpermute", rows), positions.contiguous()
    (num_tokens, top_k), width = positions.shape, rows.shape[1]
    out = rows.new_empty(num_tokens, width)
    if out.numel():
        block = blocks(width)
        given = positions if weights is None else weights.contiguous()  # any pointer where there are none
        combine_kernel[_grid(num_tokens, width, block)](
            rows, positions, given, out, num_tokens, width, top_k, weights is not None, **block, num_warps=8)
    return out


@torch.library.custom_op(
    "moetrain::combine_rows_backward", mutates_args=(), schema="(Tensor grad, Tensor rows, Tensor positions, Tensor weights) -> (Tensor, Tensor)"
)
def combine_rows_backward(grad, rows, positions, weights):
    """Gradients of rows [R,d] and weights [T,k]. Rows that no token points at get zero."""
    grad, rows = runtime.on_device("unpermute", grad), runtime.on_device("unpermute", rows)
    positions, weights = positions.contiguous(), weights.contiguous()
    (num_tokens, top_k), width = positions.shape, rows.shape[1]
    grad_rows, grad_weights = torch.zeros_like(rows), torch.zeros_like(weights)
    if grad.numel():
        block = blocks(width)
        combine_backward_kernel[(triton.cdiv(num_tokens, block["BLOCK_R"]),)](
            grad, rows, positions, weights, grad_rows, grad_weights, num_tokens, width, top_k, **block, num_warps=8)
    return grad_rows, grad_weights


gather_rows.register_fake(lambda tokens, source, positions: tokens.new_empty(source.shape[0], tokens.shape[1]))
combine_rows.register_fake(lambda rows, positions, weights: rows.new_empty(positions.shape[0], rows.shape[1]))
combine_rows_backward.register_fake(lambda grad, rows, positions, weights: (torch.empty_like(rows), torch.empty_like(weights)))


def _save_gather(ctx, inputs, output) -> None:
    tokens, source, positions = inputs
    ctx.num_tokens = tokens.shape[0]
    ctx.save_for_backward(source, positions)


def _differentiate_gather(ctx, grad: Tensor):
    source, positions = ctx.saved_tensors
    if positions is not None:
        return combine_rows(grad.contiguous(), positions, None), None, None
    kept = grad.float() * (source >= 0)[:, None]  # sorted by index inside index_put: exact order, but slow
    total = kept.new_zeros(ctx.num_tokens + 1, grad.shape[1])  # the last row takes the copies of no token
    at = torch.where(source < 0, ctx.num_tokens, source).long()
    return total.index_put((at,), kept, accumulate=True)[:-1].to(grad.dtype), None, None


def _save_combine(ctx, inputs, output) -> None:
    ctx.save_for_backward(*inputs)


def _differentiate_combine(ctx, grad: Tensor):
    rows, positions, weights = ctx.saved_tensors
    if weights is None:
        weights = torch.ones(positions.shape, dtype=torch.float32, device=grad.device)
        return combine_rows_backward(grad.contiguous(), rows, positions, weights)[0], None, None
    grad_rows, grad_weights = combine_rows_backward(grad.contiguous(), rows, positions, weights)
    return grad_rows, None, grad_weights


gather_rows.register_autograd(_differentiate_gather, setup_context=_save_gather)
combine_rows.register_autograd(_differentiate_combine, setup_context=_save_combine)


def permute(tokens: Tensor, source: Tensor, positions: Tensor | None = None) -> Tensor:
    """tokens [T,d], source int [R]: [R,d], row r a copy of token source[r], or zero where that is -1.

    positions int [T,k], the rows of each token (-1: none), makes the backward a gather; without it the backward sorts.
    """
    return gather_rows(tokens, source, positions)


def unpermute(rows: Tensor, positions: Tensor, weights: Tensor) -> Tensor:
    """rows [R,d], positions int [T,k] (-1: no row), weights [T,k]: [T,d], each token's rows weighted and summed in float32."""
    return combine_rows(rows, positions, weights)
