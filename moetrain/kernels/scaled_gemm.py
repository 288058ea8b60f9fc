"""How do rows meet their experts' weights in 8-bit floating point, scaled by row, by blocks of 128, or by 32 with powers of two (MXFP8)?

Values are e4m3 (largest 448); each group of them has a scale that its largest magnitude sets, so that value * scale approximates the input.
Forward only: both gradients are those of the 16-bit product of the unquantised operands. Scales of MXFP8 are rounded up to a power of two, so
nothing saturates (OCP Microscaling Formats v1.0, with the exponent's ceiling in place of its floor).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import runtime
from .grouped_gemm import _ends_of_tiles, _grouped
from .grouped_op import check
from .reference import GROUPS, LARGEST, check_recipe

CAPABILITY = {"rowwise": 90, "block128": 90, "mxfp8": 100}
"""Compute capability that multiplies each form in hardware and has the bulk copy engine: elsewhere the recipe is refused."""
RECIPES = tuple(CAPABILITY)


class Scaled(NamedTuple):
    """values e4m3 [..., rows, K]; scales, float32 or (MXFP8) uint8 powers of two: [..., rows, groups of K], weights in block128 [E, ceil(N/128), K/128]."""

    values: Tensor
    scales: Tensor
    recipe: str


def _config(m: int, n: int, k: int, warps: int, stages: int) -> triton.Config:
    return triton.Config(dict(BLOCK_M=m, BLOCK_N=n, BLOCK_K=k, GROUP_M=8, PER_SM=1), num_warps=warps, num_stages=stages)


CONFIGS = {
    "rowwise": [_config(128, 128, 128, 8, 4), _config(128, 128, 128, 4, 4), _config(64, 128, 128, 4, 4)],
    "block128": [_config(128, 128, 128, 8, 4), _config(128, 128, 128, 8, 3), _config(64, 128, 128, 4, 4)],
    "mxfp8": [_config(128, 128, 128, 8, 3), _config(128, 256, 128, 8, 3), _config(128, 128, 256, 8, 2)],
}


@triton.jit
def _power_of_two_above(scale):
    """(exponent byte of the least power of two >= scale, 1 / that power); scale 0 gives 1."""
    bits = scale.to(tl.int32, bitcast=True)
    exponent = (bits >> 23) + ((bits & 0x7FFFFF) != 0).to(tl.int32)
    exponent = tl.where(bits == 0, 127, exponent)
    inverse = (tl.maximum(254 - exponent, 1) << 23).to(tl.float32, bitcast=True)
    return exponent.to(tl.uint8), inverse


@triton.jit(do_not_specialize=["num_rows"])
def quantise_kernel(
    x_ptr, values_ptr, scales_ptr, num_rows, K, groups, LARGEST_VALUE: tl.constexpr, MX: tl.constexpr,
    GROUP: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_G: tl.constexpr,
):
    """values [R,K], scales [R,groups]: groups of GROUP along a row, BLOCK_G of them a program."""
    r = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    g = tl.program_id(1) * BLOCK_G + tl.arange(0, BLOCK_G)
    c = tl.program_id(1) * BLOCK_G * GROUP + tl.arange(0, BLOCK_G * GROUP)
    mask = (r < num_rows)[:, None] & (c < K)[None, :]
    at = r.to(tl.int64)[:, None] * K + c[None, :]
    x = tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32).reshape(BLOCK_R, BLOCK_G, GROUP)
    scale = tl.max(tl.abs(x), 2) / LARGEST_VALUE
    scales_at = r.to(tl.int64)[:, None] * groups + g[None, :]
    if MX:
        stored, inverse = _power_of_two_above(scale)
    else:
        stored = tl.where(scale > 0, scale, 1.0)
        inverse = 1.0 / stored
    tl.store(scales_ptr + scales_at, stored, mask=(r < num_rows)[:, None] & (g < groups)[None, :])
    x = (x * inverse[:, :, None]).reshape(BLOCK_R, BLOCK_G * GROUP)
    tl.store(values_ptr + at, x.to(values_ptr.dtype.element_ty), mask=mask)


@triton.jit
def quantise_tiles_kernel(w_ptr, values_ptr, scales_ptr, N, K, LARGEST_VALUE: tl.constexpr, BLOCK: tl.constexpr):
    """values [E,N,K], scales [E,N/BLOCK,K/BLOCK]: one square tile a program."""
    e, i, j = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    n, k = i * BLOCK + tl.arange(0, BLOCK), j * BLOCK + tl.arange(0, BLOCK)
    mask = (n < N)[:, None] & (k < K)[None, :]
    at = e * N * K + n.to(tl.int64)[:, None] * K + k[None, :]
    w = tl.load(w_ptr + at, mask=mask, other=0.0).to(tl.float32)
    scale = tl.max(tl.max(tl.abs(w), 1), 0) / LARGEST_VALUE
    scale = tl.where(scale > 0, scale, 1.0)
    tl.store(scales_ptr + (e * tl.num_programs(1) + i) * tl.num_programs(2) + j, scale)
    tl.store(values_ptr + at, (w * (1.0 / scale)).to(values_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _times_powers(values, exponents, ROWS: tl.constexpr, K: tl.constexpr):
    """float32 values [ROWS,K] times 2^(exponents - 127) [ROWS,K/32]: what the hardware does, for the interpreter."""
    powers = (exponents.to(tl.int32) << 23).to(tl.float32, bitcast=True)
    return (values.reshape(ROWS, K // 32, 32) * powers[:, :, None]).reshape(ROWS, K)


@triton.jit(do_not_specialize=["num_rows", "rows_bucket"])
def scaled_rows_kernel(
    x_ptr, x_scales_ptr, w_ptr, w_scales_ptr, out_ptr, offsets_ptr, num_rows, N, K, rows_bucket,
    E: tl.constexpr, E_PAD: tl.constexpr, BLOCKED: tl.constexpr, MX: tl.constexpr, UPCAST: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr, PER_SM: tl.constexpr,
):
    """out [R,N] = scaled x [R,K] times scaled w[e] [N,K] of each row's expert; tiles as in grouped_gemm."""
    ends = _ends_of_tiles(offsets_ptr, num_rows, E, E_PAD, BLOCK_M)
    tiles_n = tl.cdiv(N, BLOCK_N)
    x_desc = tl.make_tensor_descriptor(x_ptr, [num_rows, K], [K, 1], [BLOCK_M, BLOCK_K])
    w_desc = tl.make_tensor_descriptor(w_ptr, [E, N, K], [N * K, K, 1], [1, BLOCK_N, BLOCK_K])
    for tile in range(tl.program_id(0), tl.max(ends, 0) * tiles_n, tl.num_programs(0)):
        before = ends * tiles_n <= tile
        expert = tl.sum(before.to(tl.int32), 0)
        first = tl.max(tl.where(before, ends, 0), 0) * tiles_n
        start = tl.load(offsets_ptr + expert - 1, mask=expert > 0, other=0)
        end = tl.load(offsets_ptr + expert, mask=expert < E, other=0)
        end = tl.where(expert < E, end, num_rows)
        depth = tl.where(expert < E, K, 0)
        expert = min(expert, E - 1)
        tile_m, tile_n = _grouped(tile - first, tl.cdiv(end - start, BLOCK_M), tiles_n, GROUP_M)
        row, column = start + tile_m * BLOCK_M, tile_n * BLOCK_N
        m, n = tl.arange(0, BLOCK_M), column + tl.arange(0, BLOCK_N)
        mine, inside = row + m < end, n < N
        x_row, w_row = row.to(tl.int64) + m, expert.to(tl.int64) * N + n
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for k0 in range(0, depth, BLOCK_K):
            a, b = x_desc.load([row, k0]), w_desc.load([expert, column, k0]).reshape(BLOCK_N, BLOCK_K)
            if MX:
                s = k0 // 32 + tl.arange(0, BLOCK_K // 32)
                in_s = (s < K // 32)[None, :]
                a_scale = tl.load(x_scales_ptr + x_row[:, None] * (K // 32) + s[None, :], mask=mine[:, None] & in_s, other=0)
                b_scale = tl.load(w_scales_ptr + w_row[:, None] * (K // 32) + s[None, :], mask=inside[:, None] & in_s, other=0)
                if UPCAST:
                    acc = tl.dot(_times_powers(a, a_scale, BLOCK_M, BLOCK_K), _times_powers(b, b_scale, BLOCK_N, BLOCK_K).T, acc)
                else:
                    acc = tl.dot_scaled(a, a_scale, "e4m3", b.T, b_scale, "e4m3", acc)
            elif BLOCKED:  # BLOCK_K and BLOCK_N are 128: one scale of the weights a step
                a_scale = tl.load(x_scales_ptr + x_row * (K // 128) + k0 // 128, mask=mine, other=0.0)
                w_tiles = expert.to(tl.int64) * tl.cdiv(N, 128) + column // 128
                acc += tl.dot(a, b.T) * (a_scale * tl.load(w_scales_ptr + w_tiles * (K // 128) + k0 // 128))[:, None]
            else:
                acc = tl.dot(a, b.T, acc, max_num_imprecise_acc=128)  # Hopper sums fp8 in fewer bits: move to float32 every 128
        if not (MX or BLOCKED):
            acc *= tl.load(x_scales_ptr + x_row, mask=mine, other=0.0)[:, None] * tl.load(w_scales_ptr + w_row, mask=inside, other=0.0)[None, :]
        out_ptrs = out_ptr + row.to(tl.int64) * N + m[:, None] * N + n[None, :]
        tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=mine[:, None] & inside[None, :])


KEY = ("N", "K", "rows_bucket", "E")
_tuned = {recipe: runtime.tuned(scaled_rows_kernel, configs, KEY) for recipe, configs in CONFIGS.items()}


def quantise(x: Tensor, recipe: str) -> Scaled:
    """x [R,K] or weights [E,N,K] in e4m3 with the scales of ``recipe``. ValueError: K isn't whole groups of it."""
    check_recipe(x, recipe)
    x = runtime.on_device("quantise", x)
    K = x.shape[-1]
    values = torch.empty(x.shape, dtype=torch.float32 if runtime.INTERPRET else torch.float8_e4m3fn, device=x.device)
    if recipe == "block128" and x.ndim == 3:
        E, N, _ = x.shape
        scales = torch.empty(E, triton.cdiv(N, 128), K // 128, dtype=torch.float32, device=x.device)
        quantise_tiles_kernel[(E, triton.cdiv(N, 128), K // 128)](x, values, scales, N, K, LARGEST, 128, num_warps=8)
        return Scaled(values.to(torch.float8_e4m3fn), scales, recipe)
    group = GROUPS[recipe] or triton.next_power_of_2(K)
    groups, num_rows = triton.cdiv(K, group), x.numel() // K
    scales = torch.empty(*x.shape[:-1], groups, dtype=torch.uint8 if recipe == "mxfp8" else torch.float32, device=x.device)
    if num_rows:
        block_g = min(triton.next_power_of_2(groups), max(1, 2048 // group))
        block_r = 64 if runtime.INTERPRET else max(1, 4096 // (block_g * group))
        quantise_kernel[(triton.cdiv(num_rows, block_r), triton.cdiv(groups, block_g))](
            x, values, scales, num_rows, K, groups, LARGEST, recipe == "mxfp8", group, block_r, block_g, num_warps=4)
    return Scaled(values.to(torch.float8_e4m3fn), scales, recipe)  # the interpreter rounds to fp8 wrongly, so torch rounds there


def scaled_product(x: Scaled, w: Scaled, offsets: Tensor, dtype: torch.dtype, config: triton.Config | None = None) -> Tensor:
    """Quantised x [R,K] times w [E,N,K] by expert: [R,N] of ``dtype``, zero past offsets[-1]."""
    (num_rows, K), (E, N, _) = x.values.shape, w.values.shape
    out = torch.empty(num_rows, N, dtype=dtype, device=x.values.device)
    if out.numel() == 0:
        return out
    runtime.provide_scratch()
    given = [t.float() if runtime.INTERPRET else t for t in (x.values, w.values)]
    rows_bucket, mx = runtime.bucket(num_rows, E), x.recipe == "mxfp8"
    args = (given[0], x.scales, given[1], w.scales, out, offsets, num_rows, N, K, rows_bucket, E, triton.next_power_of_2(E + 1),
            x.recipe == "block128", mx, runtime.INTERPRET)
    most = runtime.num_processors(out.device)
    grid = lambda meta: (min((num_rows // meta["BLOCK_M"] + E + 1) * triton.cdiv(N, meta["BLOCK_N"]), most * meta["PER_SM"]),)  # noqa: E731
    runtime.launch(scaled_rows_kernel, _tuned[x.recipe], CONFIGS[x.recipe][0], grid, *args, config=config)
    return out


def supported(recipe: str, device: torch.device | str) -> bool:
    """Whether ``device`` multiplies this form in hardware (the interpreter counts as one that does)."""
    return runtime.INTERPRET or runtime.capability(torch.device(device)) >= CAPABILITY[recipe]


@torch.library.custom_op("moetrain::scaled_grouped_gemm", mutates_args=(), schema="(Tensor x, Tensor w, Tensor offsets, str recipe) -> Tensor")
def _forward(x, w, offsets, recipe):
    return scaled_product(quantise(x, recipe), quantise(w, recipe), offsets, x.dtype)


def _save(ctx, inputs, output) -> None:
    ctx.save_for_backward(*inputs[:3])


def _differentiate(ctx, grad: Tensor):
    x, w, offsets = ctx.saved_tensors
    grad = grad.contiguous()
    grad_x = torch.ops.moetrain.grouped_gemm(grad, w.transpose(1, 2), offsets) if ctx.needs_input_grad[0] else None
    grad_w = torch.ops.moetrain.grouped_gemm_weight_grad(grad, x, offsets) if ctx.needs_input_grad[1] else None
    return grad_x, grad_w, None, None


_forward.register_fake(lambda x, w, offsets, recipe: x.new_empty(x.shape[0], w.shape[1]))
_forward.register_autograd(_differentiate, setup_context=_save)


def scaled_grouped_gemm(x: Tensor, w: Tensor, offsets: Tensor, recipe: str) -> Tensor:
    """grouped_gemm with both operands quantised by ``recipe`` on the way in; gradients as of the unquantised product."""
    check(x, w, offsets)
    check_recipe(x, recipe)
    if not supported(recipe, x.device):
        raise ValueError(f"scaled_grouped_gemm: {recipe} needs compute capability {CAPABILITY[recipe] / 10}, {x.device} hasn't it; use grouped_gemm")
    return _forward(x, w, offsets, recipe)
