"""Does each triton kernel give, on this GPU and with every tile size its tuner may choose, what its reference gives in float64?

Not run on a GPU yet: the same code runs in triton's interpreter, on small shapes, in tests/interpreted_kernels.py. Fresh memory and rows of no
expert hold NaN. A sum of n products in float32 is within n u / (1 - n u) of the sum of magnitudes, and its rounding adds one unit of the output's type.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from moetrain.kernels import Backend, backend, grouped_gemm, reference, scaled_gemm

UNIT = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8}


@dataclass(frozen=True)
class Sizes:
    """What to check on: rows of each expert (zeros among them), K and N of the product, tokens, choices, width of a token."""

    loads: tuple[int, ...] = (0, 300, 17, 0, 1500, 1, 129, 0)
    K: int = 1024
    N: int = 1536
    tokens: int = 3000
    top_k: int = 4
    width: int = 2048
    experts: int = 128
    tail: int = 37


@dataclass(frozen=True)
class Verdict:
    """One comparison: worst error over its bound (at most 1 is right), and what went wrong if anything."""

    name: str
    error_over_bound: float
    ok: bool


def verdict(name: str, found: Tensor, expected: Tensor, bound: Tensor | float) -> Verdict:
    """``bound`` is elementwise or one number; where it is zero the values must be equal."""
    error = (found.double() - expected).abs()
    bound = torch.as_tensor(bound, dtype=torch.float64, device=error.device).expand_as(error)
    ratio = torch.where(bound > 0, error / bound.clamp(min=1e-300), torch.where(error > 0, float("inf"), 0.0))
    worst = float(ratio.max()) if ratio.numel() else 0.0
    return Verdict(name, worst, bool(found.isfinite().all()) and worst <= 1)


def unwritten_is_nan(call: Callable[[], Tensor]) -> Tensor:
    """Run ``call`` while memory that torch hands out reads as NaN."""
    torch.use_deterministic_algorithms(True)
    try:
        return call()
    finally:
        torch.use_deterministic_algorithms(False)


def product_bound(product: Callable, a: Tensor, b: Tensor, offsets: Tensor, terms: int, rounding: float) -> Tensor:
    magnitude = product(a.abs(), b.abs(), offsets)
    return magnitude * (terms * UNIT[torch.float32] / (1 - terms * UNIT[torch.float32]) + rounding)


def products(device: str, sizes: Sizes, rounding: dict[torch.dtype, float] = UNIT) -> Iterator[Verdict]:
    """Forward, input gradient, weight gradient: every config, by loads and by bulk copies."""
    for dtype, kinds in ((torch.bfloat16, ("bulk", "pointers")), (torch.float32, ("float32",))):
        x, w, grad, offsets = operands(device, sizes, dtype)
        wide_x, wide_w, wide_grad = (t.double() for t in (x, w, grad))
        wt, wide_wt = w.transpose(1, 2), wide_w.transpose(1, 2)
        rows, weights = reference.grouped_gemm, reference.weight_grad
        answers = [
            (rows(wide_x, wide_w, offsets), product_bound(rows, wide_x, wide_w, offsets, sizes.K, rounding[dtype])),
            (rows(wide_grad, wide_wt, offsets), product_bound(rows, wide_grad, wide_wt, offsets, sizes.N, rounding[dtype])),
            (weights(wide_grad, wide_x, offsets), product_bound(weights, wide_grad, wide_x, offsets, max(sizes.loads), rounding[dtype])),
        ]
        for kind in kinds:
            for config in grouped_gemm.CONFIGS[kind]:
                how = dict(config=config, tma=kind == "bulk")
                calls = (
                    lambda how=how, x=x, w=w, o=offsets: grouped_gemm.rows_product(x, w, o, **how),
                    lambda how=how, grad=grad, wt=wt, o=offsets: grouped_gemm.rows_product(grad, wt, o, **how),
                    lambda how=how, grad=grad, x=x, o=offsets: grouped_gemm.weight_grad(grad, x, o, **how),
                )
                for name, call, (expected, bound) in zip(("forward", "input gradient", "weight gradient"), calls, answers, strict=True):
                    yield verdict(f"grouped_gemm {name} {dtype} {kind} {config}", unwritten_is_nan(call), expected, bound)


def operands(device: str, sizes: Sizes, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x [R,K], w [E,N,K], grad [R,N], offsets; rows past the last offset are NaN."""
    generator = torch.Generator(device).manual_seed(0)
    normal = lambda *shape: torch.randn(*shape, generator=generator, device=device).to(dtype)  # noqa: E731
    used = sum(sizes.loads)
    x, w, grad = normal(used + sizes.tail, sizes.K), normal(len(sizes.loads), sizes.N, sizes.K), normal(used + sizes.tail, sizes.N)
    x[used:], grad[used:] = float("nan"), float("nan")
    return x, w, grad, torch.tensor(sizes.loads, device=device).cumsum(0).int()


def with_gradients(function: Callable, inputs: list[Tensor], double: bool) -> list[Tensor]:
    """Output, then the gradients of ``inputs`` for a random upstream gradient, the same for both precisions."""
    leaves = [(t.double() if double else t).detach().requires_grad_() for t in inputs]
    out = function(*leaves)
    upstream = torch.randn(out.shape, generator=torch.Generator(out.device).manual_seed(1), device=out.device).bfloat16()
    return [out.detach(), *torch.autograd.grad(out, leaves, upstream.to(out.dtype))]


def passes(device: str, sizes: Sizes, rounding: dict[torch.dtype, float] = UNIT) -> Iterator[Verdict]:
    """Permutation, SwiGLU, norm and router with their gradients: within 16 roundings (float32: 512) of the largest value."""
    kernels = backend("triton", device)
    for dtype in (torch.bfloat16, torch.float32):
        for name, call, inputs in _calls(device, sizes, dtype):
            found = with_gradients(call(kernels), inputs, double=False)
            expected = with_gradients(call(_plain()), inputs, double=True)
            for part, a, b in zip(("output", "first gradient", "second gradient"), found, expected, strict=False):
                factor = 16 if dtype == torch.bfloat16 else 512
                yield verdict(f"{name} {part} {dtype}", a, b, factor * rounding[dtype] * max(1.0, float(b.abs().max())))


def _plain() -> Backend:
    return backend("reference")


def _calls(device: str, sizes: Sizes, dtype: torch.dtype) -> Iterator[tuple[str, Callable, list[Tensor]]]:
    """(name, backend -> function of the inputs, inputs)."""
    normal = lambda *shape: torch.randn(*shape, device=device).to(dtype)  # noqa: E731
    source, positions = placement(device, sizes)
    T, d = sizes.tokens, sizes.width
    yield "permute", lambda b: lambda x: b.permute(x, source, positions), [normal(T, d)]
    yield "permute without positions", lambda b: lambda x: b.permute(x, source), [normal(T, d)]
    weights = torch.rand(T, sizes.top_k, device=device)
    yield "unpermute", lambda b: lambda x, w: b.unpermute(x, positions, w), [normal(len(source), d), weights]
    yield "swiglu", lambda b: b.swiglu, [normal(T, 2 * d), torch.rand(T, device=device)]
    yield "rms_norm", lambda b: lambda x, w: b.rms_norm(x, w, 1e-5), [normal(T, d), normal(d)]
    if dtype == torch.float32:
        logits = torch.randn(T, sizes.experts, device=device)
        yield "route softmax", lambda b: lambda x: b.route(x, sizes.top_k)[0], [logits]
        grouped = dict(score="sigmoid", num_groups=8, top_k_groups=4, scale=2.5)
        yield "route sigmoid groups", lambda b: lambda x: b.route(x, sizes.top_k, **grouped)[0], [logits]


def placement(device: str, sizes: Sizes) -> tuple[Tensor, Tensor]:
    """(source [R], positions [T,k]) of a random order; a tenth of the copies dropped, ``tail`` rows of no token."""
    copies = sizes.tokens * sizes.top_k
    kept = torch.randperm(copies, device=device)[copies // 10 :]
    source = torch.full((len(kept) + sizes.tail,), -1, dtype=torch.int32, device=device)
    positions = torch.full((copies,), -1, dtype=torch.int32, device=device)
    source[: len(kept)] = (kept // sizes.top_k).int()
    positions[kept] = torch.arange(len(kept), dtype=torch.int32, device=device)
    return source, positions.view(sizes.tokens, sizes.top_k)


def fp8(device: str, sizes: Sizes, rounding: dict[torch.dtype, float] = UNIT) -> Iterator[Verdict]:
    """Each recipe the device has: the product of what its own quantiser made, and that values times scales give the input back to 2^-3."""
    x, w, _, offsets = operands(device, sizes, torch.bfloat16)
    used = sum(sizes.loads)
    for recipe in filter(lambda recipe: scaled_gemm.supported(recipe, device), scaled_gemm.RECIPES):
        quantised = [scaled_gemm.quantise(t, recipe) for t in (x, w)]
        a, b = (reference.dequantise(*q).double() for q in quantised)
        yield verdict(f"quantise {recipe} rows", a[:used], x[:used].double(), x[:used].double().abs() * 2.0**-3 + float(x[:used].abs().max()) * 2.0**-9)
        # Hopper adds fp8 products in about 14 bits between promotions; allow for it
        bound = product_bound(reference.grouped_gemm, a, b, offsets, sizes.K, rounding[torch.bfloat16] + 2.0**-10)
        for config in scaled_gemm.CONFIGS[recipe]:
            call = lambda q=quantised, c=config: scaled_gemm.scaled_product(*q, offsets, torch.bfloat16, config=c)  # noqa: E731
            yield verdict(f"grouped_gemm {recipe} {config}", unwritten_is_nan(call), reference.grouped_gemm(a, b, offsets), bound)


def torch_grouped_mm(device: str, sizes: Sizes) -> Iterator[Verdict]:
    """The fallback backend on the same operands, its zeroed tails included."""
    x, w, grad, offsets = operands(device, sizes, torch.bfloat16)
    kernels = backend("grouped_mm")
    leaves = [t.detach().requires_grad_() for t in (x, w)]
    out = unwritten_is_nan(lambda: kernels.grouped_gemm(*leaves, offsets))
    unwritten = unwritten_is_nan(lambda: torch.cat([g.flatten() for g in torch.autograd.grad(out, leaves, grad)]))
    yield Verdict("torch grouped_mm finite", 0.0, bool(out.isfinite().all() and unwritten.isfinite().all()))
    wide = [t.double() for t in (x, w)]
    yield verdict("torch grouped_mm forward", out.detach(), reference.grouped_gemm(*wide, offsets),
                  product_bound(reference.grouped_gemm, *wide, offsets, sizes.K, UNIT[torch.bfloat16]))


def every(device: str, sizes: Sizes, rounding: dict[torch.dtype, float] = UNIT) -> Iterator[Verdict]:
    """All checks, cheapest first."""
    yield from passes(device, sizes, rounding)
    yield from torch_grouped_mm(device, sizes)
    yield from products(device, sizes, rounding)
    yield from fp8(device, sizes, rounding)
