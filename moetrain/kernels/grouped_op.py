"""What does a grouped GEMM look like to autograd, the compiler and checkpointing, whatever computes it?

Two custom operators a backend: rows (forward and the gradient of its input) and weight gradient. Both have fixed output shapes, so a graph with
them never depends on the routing.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def check(x: Tensor, w: Tensor, offsets: Tensor) -> None:
    """ValueError in one line unless x [R,K], w [E,N,K] and offsets int32 [E] fit each other."""
    if x.ndim != 2 or w.ndim != 3 or x.shape[1] != w.shape[2]:
        raise ValueError(f"grouped_gemm: x {tuple(x.shape)} and w {tuple(w.shape)} don't fit; x is [R,K] and w [E,N,K]")
    if offsets.dtype != torch.int32 or tuple(offsets.shape) != (w.shape[0],):
        raise ValueError(f"grouped_gemm: offsets are {offsets.dtype} {tuple(offsets.shape)}; they must be int32 [{w.shape[0]}], one row end an expert")
    if x.dtype != w.dtype:
        raise ValueError(f"grouped_gemm: x is {x.dtype} and w {w.dtype}; they must be of one type")


def wanted(ctx, i: int) -> bool:
    """Whether this backward is after the gradient of input ``i``. `needs_input_grad` says only that some backward might be: where the two
    gradients are taken apart, as zero-bubble schedules do, it would have both products done twice."""
    if not ctx.needs_input_grad[i]:
        return False
    try:
        return torch._C._will_engine_execute_node(ctx.next_functions[i][0])
    except RuntimeError:
        return True  # the input is a leaf, and its gradient what was asked for


def define(name: str, rows: Callable[[Tensor, Tensor, Tensor], Tensor], weight_grad: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Callable[..., Tensor]:
    """Operators `moetrain::NAME` and `moetrain::NAME_weight_grad`; returns the differentiable grouped_gemm(x, w, offsets).

    rows(x [R,K], w [E,N,K] of any strides, offsets) -> [R,N]; weight_grad(grad [R,N], x [R,K], offsets) -> [E,N,K].
    """
    forward = torch.library.custom_op(f"moetrain::{name}", rows, mutates_args=(), schema="(Tensor x, Tensor w, Tensor offsets) -> Tensor")
    backward = torch.library.custom_op(
        f"moetrain::{name}_weight_grad", weight_grad, mutates_args=(), schema="(Tensor grad, Tensor x, Tensor offsets) -> Tensor"
    )
    forward.register_fake(lambda x, w, offsets: x.new_empty(x.shape[0], w.shape[1]))
    backward.register_fake(lambda grad, x, offsets: x.new_empty(offsets.shape[0], grad.shape[1], x.shape[1]))

    def save(ctx, inputs, output) -> None:
        ctx.save_for_backward(*inputs)

    def differentiate(ctx, grad: Tensor):
        x, w, offsets = ctx.saved_tensors
        grad = grad.contiguous()  # an expanded gradient, as of .sum(), has strides no kernel takes
        grad_x = forward(grad, w.transpose(1, 2), offsets) if wanted(ctx, 0) else None
        grad_w = backward(grad, x, offsets) if wanted(ctx, 1) else None
        return grad_x, grad_w, None

    forward.register_autograd(differentiate, setup_context=save)

    def grouped_gemm(x: Tensor, w: Tensor, offsets: Tensor) -> Tensor:
        check(x, w, offsets)
        return forward(x, w, offsets)

    return grouped_gemm
