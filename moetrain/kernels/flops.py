"""How many floating-point operations does a training step dispatch, counted by torch itself, grouped products and CPU attention included?

torch's FlopCounterMode has no formula for grouped products nor for attention on the CPU and counts them as zero (torch 2.11 and 2.13). A multiply-add
is two operations; a causal product is counted whole, as torch counts it on the GPU; rows past the last offset count, since shapes are all it sees.
"""

from __future__ import annotations

import torch
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count


def _rows(x, w, *_, out_shape=None, **__) -> int:
    """x [R,K], w [E,N,K], in any precision."""
    return 2 * x[0] * x[1] * w[1]


def _weight_grad(grad, x, offsets, out_shape=None, **_) -> int:
    """grad [R,N], x [R,K]."""
    return 2 * grad[0] * grad[1] * x[1]


def _aten_grouped_mm(a, b, *_, out_shape=None, **__) -> int:
    """a [R,K] with b [E,K,N], or a [N,R] with b [R,K]: every element of a meets every column of b once."""
    return 2 * a[0] * a[1] * b[-1]


def _addmm_in_place(total, a, b, *_, out_shape=None, **__) -> int:
    """total += a [M,K] b [K,N]: torch counts the other form alone."""
    return 2 * a[0] * a[1] * b[1]


def _attention(query, key, value, *_, out_shape=None, **__) -> int:
    return sdpa_flop_count(query, key, value)


def _attention_backward(grad, query, key, value, *_, out_shape=None, **__) -> int:
    return sdpa_backward_flop_count(grad, query, key, value)


def formulas() -> dict:
    """Operator to formula of shapes, for those torch lacks and those of the backends imported so far."""
    aten, own = torch.ops.aten, torch.ops.moetrain
    found = {
        aten._grouped_mm: _aten_grouped_mm,
        aten.addmm_: _addmm_in_place,
        aten._scaled_dot_product_flash_attention_for_cpu: _attention,
        aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
    }
    for name in ("grouped_mm", "grouped_gemm"):
        if hasattr(own, name):
            found |= {getattr(own, name): _rows, getattr(own, f"{name}_weight_grad"): _weight_grad}
    if hasattr(own, "scaled_grouped_gemm"):
        found[own.scaled_grouped_gemm] = _rows
    return found


def flop_counter(**options) -> FlopCounterMode:
    """torch's FlopCounterMode with the formulas above: `with flop_counter(display=False) as c: step()`, then c.get_total_flops()."""
    return FlopCounterMode(custom_mapping=formulas(), **options)
