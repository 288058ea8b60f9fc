"""How are gate and up projections joined, and the routing weight applied, in one pass over memory?"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import runtime

WARPS = 8

@triton.jit(do_not_specialize=["num_rows"])
def swiglu_kernel(x_ptr, weight_ptr, out_ptr, num_rows, F, WEIGHTED: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_F: tl.constexpr):
    """out [R,F] = silu(x[:, :F]) * x[:, F:] (times weight [R])."""
    r = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    c = tl.program_id(1) * BLOCK_F + tl.arange(0, BLOCK_F)
    mask = (r < num_rows)[:, None] & (c < F)[None, :]
    at = x_ptr + r.to(tl.int64)[:, None] * (2 * F) + c[None, :]
    gate = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(at + F, mask=mask, other=0.0).to(tl.float32)
    out = gate * tl.sigmoid(gate) * up
    if WEIGHTED:
        out *= tl.load(weight_ptr + r, mask=r < num_rows, other=0.0).to(tl.float32)[:, None]
    tl.store(out_ptr + r.to(tl.int64)[:, None] * F + c[None, :], out.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_rows"])
def swiglu_backward_kernel(
    grad_ptr, x_ptr, weight_ptr, grad_x_ptr, grad_weight_ptr, num_rows, F,
    WEIGHTED: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_F: tl.constexpr,
):
    """Gradients of x [R,2F] and weight [R]; whole rows a program, so that the weight's sum is its own."""
    r = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    weight_grad = tl.zeros((BLOCK_R,), tl.float32)
    if WEIGHTED:
        weight = tl.load(weight_ptr + r, mask=r < num_rows, other=0.0).to(tl.float32)[:, None]
    row = r.to(tl.int64)[:, None]
    for f0 in range(0, F, BLOCK_F):
        c = f0 + tl.arange(0, BLOCK_F)
        mask = (r < num_rows)[:, None] & (c < F)[None, :]
        gate = tl.load(x_ptr + row * (2 * F) + c[None, :], mask=mask, other=0.0).to(tl.float32)
        up = tl.load(x_ptr + row * (2 * F) + F + c[None, :], mask=mask, other=0.0).to(tl.float32)
        grad = tl.load(grad_ptr + row * F + c[None, :], mask=mask, other=0.0).to(tl.float32)
        sigmoid = tl.sigmoid(gate)
        silu = gate * sigmoid
        if WEIGHTED:
            weight_grad += tl.sum(grad * silu * up, 1)
            grad *= weight
        grad_gate = grad * up * sigmoid * (1 + gate * (1 - sigmoid))
        tl.store(grad_x_ptr + row * (2 * F) + c[None, :], grad_gate.to(grad_x_ptr.dtype.element_ty), mask=mask)
        tl.store(grad_x_ptr + row * (2 * F) + F + c[None, :], (grad * silu).to(grad_x_ptr.dtype.element_ty), mask=mask)
    if WEIGHTED:
        tl.store(grad_weight_ptr + r, weight_grad.to(grad_weight_ptr.dtype.element_ty), mask=r < num_rows)


def blocks(width: int) -> dict[str, int]:
    """Rows and columns a program: 4,096 elements of each half."""
    block_f = min(triton.next_power_of_2(width), 1024)
    return dict(BLOCK_R=64 if runtime.INTERPRET else max(1, 4096 // block_f), BLOCK_F=block_f)


@torch.library.custom_op("moetrain::swiglu", mutates_args=(), schema="(Tensor x, Tensor? weight) -> Tensor")
def _forward(x, weight):
    x = runtime.on_device("swiglu", x)
    num_rows, width = x.shape[0], x.shape[1] // 2
    out = x.new_empty(num_rows, width)
    if out.numel():
        block = blocks(width)
        grid = triton.cdiv(num_rows, block["BLOCK_R"]), triton.cdiv(width, block["BLOCK_F"])
        given = x if weight is None else weight.contiguous()  # any pointer where there is none
        swiglu_kernel[grid](x, given, out, num_rows, width, weight is not None, **block, num_warps=WARPS)
    return out


@torch.library.custom_op("moetrain::swiglu_backward", mutates_args=(), schema="(Tensor grad, Tensor x, Tensor? weight) -> (Tensor, Tensor)")
def _backward(grad, x, weight):
    grad, x = runtime.on_device("swiglu", grad), runtime.on_device("swiglu", x)
    num_rows, width = x.shape[0], x.shape[1] // 2
    grad_x = torch.empty_like(x)
    grad_weight = x.new_empty(0) if weight is None else torch.empty_like(weight, memory_format=torch.contiguous_format)
    if width == 0:
        grad_weight.zero_()
    elif num_rows:
        block = blocks(width)
        given = x if weight is None else weight.contiguous()
        swiglu_backward_kernel[(triton.cdiv(num_rows, block["BLOCK_R"]),)](
            grad, x, given, grad_x, grad_weight, num_rows, width, weight is not None, **block, num_warps=WARPS)
    return grad_x, grad_weight


def _fake_backward(grad, x, weight):
    grad_weight = x.new_empty(0) if weight is None else torch.empty_like(weight, memory_format=torch.contiguous_format)
    return torch.empty_like(x, memory_format=torch.contiguous_format), grad_weight


def _save(ctx, inputs, output) -> None:
    ctx.save_for_backward(*inputs)


def _differentiate(ctx, grad: Tensor):
    x, weight = ctx.saved_tensors
    grad_x, grad_weight = _backward(grad.contiguous(), x, weight)
    return grad_x, None if weight is None else grad_weight


_forward.register_fake(lambda x, weight: x.new_empty(x.shape[0], x.shape[1] // 2))
_backward.register_fake(_fake_backward)
_forward.register_autograd(_differentiate, setup_context=_save)


def swiglu(x: Tensor, weight: Tensor | None = None) -> Tensor:
    """x [R,2f], gate before up; weight [R] or None: silu(gate) * up * weight, [R,f], in float32, rounded once."""
    if x.ndim != 2 or x.shape[1] % 2 or (weight is not None and weight.shape != x.shape[:1]):
        raise ValueError(f"swiglu: x {tuple(x.shape)}" + ("" if weight is None else f", weight {tuple(weight.shape)}") + "; they must be [R,2f] and [R]")
    return _forward(x, weight)
