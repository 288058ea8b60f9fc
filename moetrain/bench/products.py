"""How are products timed: dense, grouped by expert, and attention? (The calls that the trainer makes, in its layouts.)

A dense product is x W^T, as every linear of the model is; its weight-gradient form adds into an FP32 buffer. Grouped products go
through the trainer's kernel backend, attention through the trainer's core.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from moesim.ops import Attention, Gemm, GroupedGemm
from moetrain.attention import core
from moetrain.bench.work import Machine, Skip, Work
from moetrain.place import place

WIDTH = {"fp32": 4, "bf16": 2}


def gemm(op: Gemm, machine: Machine) -> Work:
    """C[m,n] = A[m,k] B[k,n], B stored [n,k]; accumulating: C += A^T B of A [k,m], B [k,n]."""
    dtype = machine.storage(op.dtype)
    width = WIDTH[dtype]
    out = 8 if op.accumulate else width
    moved = float(width * (op.m * op.k + op.k * op.n) + out * op.m * op.n)
    held = width * (op.m * op.k + op.k * op.n + op.m * op.n) + 4 * op.m * op.n * op.accumulate
    if op.accumulate:
        sets = machine.sets(held, lambda: _gradient_operands(op, machine, dtype))
        calls = [lambda s=s: _accumulate(*s) for s in sets]
        kernel = "addmm into FP32" if dtype == "fp32" else "mm, then add into FP32"
    else:
        sets = machine.sets(held, lambda: (machine.normal(op.m, op.k, dtype=dtype), machine.normal(op.n, op.k, dtype=dtype)))
        calls = [lambda s=s: s[0] @ s[1].t() for s in sets]
        kernel = "mm, x W^T"
    return Work(calls, op.flops, moved, dtype, {"kernel": kernel, "sets": len(sets)})


def _gradient_operands(op: Gemm, machine: Machine, dtype: str):
    return machine.normal(op.m, op.n), machine.normal(op.k, op.m, dtype=dtype), machine.normal(op.k, op.n, dtype=dtype)


def _accumulate(c: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    if c.dtype == a.dtype:
        c.addmm_(a.t(), b)
    else:
        c.add_(a.t() @ b)


def rows_of(op: GroupedGemm) -> list[int]:
    """Rows of each expert: the busiest one's share first, the others even; together ``op.rows``, rounded."""
    total = round(op.rows)
    first = min(total, max(round(op.max_rows), -(-total // op.groups)))
    if op.groups == 1:
        return [total]
    rest, others = total - first, op.groups - 1
    return [first] + [rest // others + (i < rest % others) for i in range(others)]


def grouped_gemm(op: GroupedGemm, machine: Machine) -> Work:
    """rows_e [., k] times W_e, through the backend; grad weight: each expert's product of gradient and input, added into FP32."""
    if op.grad not in ("none", "input", "weight"):
        raise Skip(f"no grad {op.grad!r}: known are none, input, weight")
    dtype, rows = machine.storage(op.dtype), rows_of(op)
    if not sum(rows):
        raise Skip("no rows")
    width, total, weights = WIDTH[dtype], sum(rows), op.groups * op.n * op.k
    if op.grad == "weight":
        moved, held = width * total * (op.n + op.k) + 8 * weights, width * (total * (2 * op.n + op.k) + 2 * weights) + 4 * weights
    else:
        moved = held = width * (total * op.k + weights + total * op.n)
    offsets = torch.tensor(rows, device=machine.device).cumsum(0).int()
    make = _weight_gradient if op.grad == "weight" else _rows_product
    calls = machine.sets(held, lambda: make(op, machine, dtype, total, offsets))
    method = {"kernel": f"{machine.backend.name} grouped_gemm, grad {op.grad}", "sets": len(calls)}
    return Work(calls, 2.0 * total * op.n * op.k, float(moved), dtype, method, tuple(rows))


def _rows_product(op: GroupedGemm, machine: Machine, dtype: str, total: int, offsets: torch.Tensor):
    x = machine.normal(total, op.k, dtype=dtype)
    # The input gradient reads the forward's weights [E, its n, its k], transposed.
    w = machine.normal(op.groups, op.k, op.n, dtype=dtype).transpose(1, 2) if op.grad == "input" else machine.normal(op.groups, op.n, op.k, dtype=dtype)
    return lambda: machine.backend.grouped_gemm(x, w, offsets)


def _weight_gradient(op: GroupedGemm, machine: Machine, dtype: str, total: int, offsets: torch.Tensor):
    x, grad = machine.normal(total, op.k, dtype=dtype), machine.normal(total, op.n, dtype=dtype)
    w = machine.normal(op.groups, op.n, op.k, dtype=dtype).requires_grad_()
    buffer = machine.normal(op.groups, op.n, op.k)
    out = machine.backend.grouped_gemm(x, w, offsets)
    return lambda: buffer.add_(torch.autograd.grad(out, w, grad, retain_graph=True)[0])


def window_of(op: Attention) -> int | None:
    """The sliding window whose causal band has ``op.pairs`` pairs over all context ranks; None: plain causal. Skip: no band has."""
    cp = max(1, op.kv_len // op.q_len)
    pairs, s = op.pairs * cp, op.kv_len
    if abs(pairs - s * (s + 1) / 2) <= cp:
        return None
    # w (w+1) / 2 + (s - w) w = pairs
    root = (2 * s + 1) ** 2 - 8 * pairs
    window = round(((2 * s + 1) - root**0.5) / 2) if root >= 0 else 0
    if not 0 < window < s or abs(window * (window + 1) / 2 + (s - window) * window - pairs) > max(cp, 1e-3 * pairs):
        raise Skip(f"no causal band of {op.kv_len} keys has {op.pairs:.0f} pairs for {op.q_len} queries")
    return window


def attention(op: Attention, machine: Machine) -> Work:
    """softmax(QK^T)V forward, or its gradients by q, k and v."""
    if op.kv_len % op.q_len:
        raise Skip(f"{op.q_len} queries do not divide {op.kv_len} keys")
    dtype = machine.dtype
    window, cp = window_of(op), op.kv_len // op.q_len
    where = place(None, torch.arange(op.batch, device=machine.device), op.kv_len, cp, 0)
    mask = where.mask(window)
    moved = replace(op, backward=False).bytes / 2 * WIDTH[dtype] * (2 if op.backward else 1)
    scores = 0 if mask is None else mask.numel() * 4
    sets = machine.sets(2 * moved + scores, lambda: _heads(op, machine, dtype))
    make = _backward if op.backward else _forward
    calls = [make(s, mask) for s in sets]
    method = {"kernel": "scaled_dot_product_attention", "mask": "causal" if mask is None else "given", "window": window, "cp": cp, "sets": len(sets)}
    return Work(calls, op.flops, moved, dtype, method)


def _heads(op: Attention, machine: Machine, dtype: str):
    shapes = ((op.q_len, op.num_heads, op.qk_dim), (op.kv_len, op.num_kv_heads, op.qk_dim), (op.kv_len, op.num_kv_heads, op.v_dim))
    return [machine.normal(op.batch, *shape, dtype=dtype) for shape in shapes]


def _forward(qkv, mask):
    return lambda: core(*qkv, mask, None)


def _backward(qkv, mask):
    leaves = [t.requires_grad_() for t in qkv]
    out = core(*leaves, mask, None)
    grad = torch.randn_like(out)
    return lambda: torch.autograd.grad(out, leaves, grad, retain_graph=True)
