"""How is a row scaled by its root mean square, and its weight's gradient summed in a fixed order?

The backward's grid is persistent: each program sums the weight gradient over its rows in registers and writes one partial row; the partial rows are
added by torch. The number of programs is fixed by the device, so the order never changes on one.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import runtime

MOST = 16384
"""Widest row: it is held in registers whole."""


@triton.jit(do_not_specialize=["num_rows"])
def rms_norm_kernel(x_ptr, weight_ptr, out_ptr, num_rows, D, eps, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr):
    """out [R,D] = x / rms(x) * weight."""
    r = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    c = tl.arange(0, BLOCK_D)
    mask = (r < num_rows)[:, None] & (c < D)[None, :]
    at = r.to(tl.int64)[:, None] * D + c[None, :]
    x = tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + c, mask=c < D, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, 1) / D + eps)
    tl.store(out_ptr + at, (x * scale[:, None] * weight[None, :]).to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_rows"])
def rms_norm_backward_kernel(
    grad_ptr, x_ptr, weight_ptr, grad_x_ptr, partial_ptr, num_rows, D, eps, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr
):
    """grad_x [R,D], and partial [programs,D]: this program's part of the weight gradient."""
    c = tl.arange(0, BLOCK_D)
    weight = tl.load(weight_ptr + c, mask=c < D, other=0.0).to(tl.float32)
    partial = tl.zeros((BLOCK_D,), tl.float32)
    for block in range(tl.program_id(0), tl.cdiv(num_rows, BLOCK_R), tl.num_programs(0)):
        r = block * BLOCK_R + tl.arange(0, BLOCK_R)
        mask = (r < num_rows)[:, None] & (c < D)[None, :]
        at = r.to(tl.int64)[:, None] * D + c[None, :]
        x = tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32)
        grad = tl.load(grad_ptr + at, mask=mask, other=0.0).to(tl.float32)
        scale = tl.rsqrt(tl.sum(x * x, 1) / D + eps)[:, None]
        unit = x * scale
        inner = grad * weight[None, :]
        along = tl.sum(inner * unit, 1)[:, None] / D
        tl.store(grad_x_ptr + at, ((inner - unit * along) * scale).to(grad_x_ptr.dtype.element_ty), mask=mask)
        partial += tl.sum(grad * unit, 0)
    tl.store(partial_ptr + tl.program_id(0) * D + c, partial, mask=c < D)


def blocks(width: int) -> dict[str, int]:
    """Whole rows a program, 4,096 elements or one row."""
    block_d = triton.next_power_of_2(width)
    return dict(BLOCK_R=64 if runtime.INTERPRET else max(1, 4096 // block_d), BLOCK_D=block_d)


def warps(width: int) -> int:
    return 8 if width > 2048 else 4


@torch.library.custom_op("moetrain::rms_norm", mutates_args=(), schema="(Tensor x, Tensor weight, float eps) -> Tensor")
def _forward(x, weight, eps):
    x = runtime.on_device("rms_norm", x)
    out = torch.empty_like(x)
    if x.numel():
        width, block = x.shape[-1], blocks(x.shape[-1])
        num_rows = x.numel() // width
        rms_norm_kernel[(triton.cdiv(num_rows, block["BLOCK_R"]),)](
            x, weight.contiguous(), out, num_rows, width, eps, **block, num_warps=warps(width))
    return out


@torch.library.custom_op("moetrain::rms_norm_backward", mutates_args=(), schema="(Tensor grad, Tensor x, Tensor weight, float eps) -> (Tensor, Tensor)")
def _backward(grad, x, weight, eps):
    grad, x = runtime.on_device("rms_norm", grad), runtime.on_device("rms_norm", x)
    grad_x = torch.empty_like(x)
    if not x.numel():
        return grad_x, torch.zeros_like(weight)
    width, block = x.shape[-1], blocks(x.shape[-1])
    num_rows = x.numel() // width
    programs = min(triton.cdiv(num_rows, block["BLOCK_R"]), 4 * runtime.num_processors(x.device))
    partial = torch.empty(programs, width, dtype=torch.float32, device=x.device)
    rms_norm_backward_kernel[(programs,)](
        grad, x, weight.contiguous(), grad_x, partial, num_rows, width, eps, **block, num_warps=warps(width))
    return grad_x, partial.sum(0).to(weight.dtype)


def _save(ctx, inputs, output) -> None:
    x, weight, ctx.eps = inputs
    ctx.save_for_backward(x, weight)


def _differentiate(ctx, grad: Tensor):
    return *_backward(grad.contiguous(), *ctx.saved_tensors, ctx.eps), None


def _dense(x: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


_forward.register_fake(lambda x, weight, eps: _dense(x))
_backward.register_fake(lambda grad, x, weight, eps: (_dense(x), _dense(weight)))
_forward.register_autograd(_differentiate, setup_context=_save)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [...,d] over its root mean square, times weight [d], in float32, rounded once. d at most 16,384."""
    if weight.shape != x.shape[-1:] or x.shape[-1] > MOST:
        raise ValueError(f"rms_norm: x {tuple(x.shape)}, weight {tuple(weight.shape)}; weight must be [d], the last dim of x, d at most {MOST}")
    return _forward(x, weight, eps)
