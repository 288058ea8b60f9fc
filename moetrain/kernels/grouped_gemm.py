"""How do rows sorted by expert meet their experts' weights in one launch, whatever the loads, without the host knowing them?

A persistent grid walks the tiles of all experts. Which expert a tile belongs to is found on the device: one vector holds the running number of row
tiles, and a tile's expert is the count of entries at or below it. An extra segment after the last expert covers the rows past offsets[-1], whose
tiles skip the sum and store zero. Within an expert, tiles go in groups of GROUP_M row tiles, so that weights and rows are reused from L2.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from . import runtime
from .grouped_op import define


def _config(m: int, n: int, k: int, warps: int, stages: int, per_sm: int = 1) -> triton.Config:
    return triton.Config(dict(BLOCK_M=m, BLOCK_N=n, BLOCK_K=k, GROUP_M=8, PER_SM=per_sm), num_warps=warps, num_stages=stages)


CONFIGS = {
    "bulk": [
        _config(128, 128, 64, 4, 3, 2),
        _config(128, 256, 64, 8, 3),
        _config(128, 256, 64, 8, 4),
        _config(256, 128, 64, 8, 3),
        _config(128, 128, 128, 8, 3),
        _config(64, 128, 64, 4, 4, 2),
        _config(64, 256, 64, 8, 4),
        _config(64, 64, 128, 4, 4, 2),
    ],
    "pointers": [_config(128, 128, 64, 8, 3), _config(128, 256, 64, 8, 3), _config(64, 128, 64, 4, 4, 2)],
    "float32": [_config(64, 64, 32, 4, 3, 2), _config(128, 64, 32, 8, 3)],
}
"""By how tiles arrive: the bulk copy engine, or loads (older GPUs, odd sizes); float32 is for checking, by loads."""
INTERPRETED = _config(128, 128, 64, 4, 1)


@triton.jit
def _ends_of_tiles(offsets_ptr, num_rows, E: tl.constexpr, E_PAD: tl.constexpr, BLOCK_M: tl.constexpr):
    """Running number of row tiles after each segment: experts 0..E-1, then the rows past the last offset."""
    e = tl.arange(0, E_PAD)
    end = tl.load(offsets_ptr + e, mask=e < E, other=0)
    end = tl.where(e < E, end, num_rows)
    start = tl.load(offsets_ptr + e - 1, mask=(e > 0) & (e <= E), other=0)
    start = tl.where(e <= E, start, num_rows)
    return tl.cumsum((end - start + BLOCK_M - 1) // BLOCK_M, 0)


@triton.jit
def _grouped(tile, tiles_m, tiles_n, GROUP_M: tl.constexpr):
    """(row tile, column tile) of the tile-th one, GROUP_M row tiles at a time."""
    per_group = GROUP_M * tiles_n
    first_m = tile // per_group * GROUP_M
    height = min(tiles_m - first_m, GROUP_M)
    return first_m + tile % per_group % height, tile % per_group // height


@triton.jit(do_not_specialize=["num_rows", "rows_bucket"])
def rows_kernel(
    x_ptr, w_ptr, out_ptr, offsets_ptr, num_rows, N, K, stride_we, stride_wn, stride_wk, rows_bucket,
    E: tl.constexpr, E_PAD: tl.constexpr, W_DENSE_IN_N: tl.constexpr, TMA: tl.constexpr, UPCAST: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr, PER_SM: tl.constexpr,
):
    """out [R,N] = x [R,K] times w[e] [N,K] of each row's expert. w has any strides; with TMA, dense in K or (W_DENSE_IN_N) in N."""
    ends = _ends_of_tiles(offsets_ptr, num_rows, E, E_PAD, BLOCK_M)
    tiles_n = tl.cdiv(N, BLOCK_N)
    if TMA:
        x_desc = tl.make_tensor_descriptor(x_ptr, [num_rows, K], [K, 1], [BLOCK_M, BLOCK_K])
        if W_DENSE_IN_N:
            w_desc = tl.make_tensor_descriptor(w_ptr, [E, K, N], [stride_we, stride_wk, 1], [1, BLOCK_K, BLOCK_N])
        else:
            w_desc = tl.make_tensor_descriptor(w_ptr, [E, N, K], [stride_we, stride_wn, 1], [1, BLOCK_N, BLOCK_K])
    for tile in range(tl.program_id(0), tl.max(ends, 0) * tiles_n, tl.num_programs(0)):
        before = ends * tiles_n <= tile
        expert = tl.sum(before.to(tl.int32), 0)
        first = tl.max(tl.where(before, ends, 0), 0) * tiles_n
        start = tl.load(offsets_ptr + expert - 1, mask=expert > 0, other=0)
        end = tl.load(offsets_ptr + expert, mask=expert < E, other=0)
        end = tl.where(expert < E, end, num_rows)
        depth = tl.where(expert < E, K, 0)  # rows of no expert: an empty sum
        expert = min(expert, E - 1)
        tile_m, tile_n = _grouped(tile - first, tl.cdiv(end - start, BLOCK_M), tiles_n, GROUP_M)
        row = start + tile_m * BLOCK_M
        column = tile_n * BLOCK_N
        m, n, k = tl.arange(0, BLOCK_M), column + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
        x_ptrs = x_ptr + row.to(tl.int64) * K + m[:, None] * K + k[None, :]
        w_ptrs = w_ptr + expert.to(tl.int64) * stride_we + k[:, None] * stride_wk + n[None, :] * stride_wn
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for k0 in range(0, depth, BLOCK_K):
            if TMA:  # out of bounds reads as zero; rows of the next expert fill rows that aren't stored
                a = x_desc.load([row, k0])
                if W_DENSE_IN_N:
                    b = w_desc.load([expert, k0, column]).reshape(BLOCK_K, BLOCK_N)
                else:
                    b = w_desc.load([expert, column, k0]).reshape(BLOCK_N, BLOCK_K).T
            else:
                a = tl.load(x_ptrs + k0, mask=(row + m < end)[:, None] & (k0 + k < K)[None, :], other=0.0)
                b = tl.load(w_ptrs + k0 * stride_wk, mask=(k0 + k < K)[:, None] & (n < N)[None, :], other=0.0)
            if UPCAST:
                a, b = a.to(tl.float32), b.to(tl.float32)
            acc = tl.dot(a, b, acc, input_precision=PRECISION)
        out_ptrs = out_ptr + row.to(tl.int64) * N + m[:, None] * N + n[None, :]
        tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=(row + m < end)[:, None] & (n < N)[None, :])


@triton.jit(do_not_specialize=["num_rows", "rows_bucket"])
def weight_grad_kernel(
    grad_ptr, x_ptr, out_ptr, offsets_ptr, num_rows, N, K, rows_bucket,
    E: tl.constexpr, TMA: tl.constexpr, UPCAST: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr, PER_SM: tl.constexpr,
):
    """out [E,N,K] = grad [R,N]^T x [R,K] over each expert's rows. BLOCK_M x BLOCK_N tiles of (N, K), BLOCK_K rows at a time."""
    tiles_m, tiles_n = tl.cdiv(N, BLOCK_M), tl.cdiv(K, BLOCK_N)
    if TMA:
        grad_desc = tl.make_tensor_descriptor(grad_ptr, [num_rows, N], [N, 1], [BLOCK_K, BLOCK_M])
        x_desc = tl.make_tensor_descriptor(x_ptr, [num_rows, K], [K, 1], [BLOCK_K, BLOCK_N])
    for tile in range(tl.program_id(0), E * tiles_m * tiles_n, tl.num_programs(0)):
        expert = tile // (tiles_m * tiles_n)
        start = tl.load(offsets_ptr + expert - 1, mask=expert > 0, other=0)
        end = tl.load(offsets_ptr + expert)
        tile_m, tile_n = _grouped(tile % (tiles_m * tiles_n), tiles_m, tiles_n, GROUP_M)
        n, k = tile_m * BLOCK_M + tl.arange(0, BLOCK_M), tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
        r = tl.arange(0, BLOCK_K)
        grad_ptrs = grad_ptr + start.to(tl.int64) * N + r[:, None] * N + n[None, :]
        x_ptrs = x_ptr + start.to(tl.int64) * K + r[:, None] * K + k[None, :]
        whole = start + (end - start) // BLOCK_K * BLOCK_K
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for row in range(start, whole, BLOCK_K):
            if TMA:
                a = grad_desc.load([row, tile_m * BLOCK_M])
                b = x_desc.load([row, tile_n * BLOCK_N])
            else:
                a = tl.load(grad_ptrs, mask=(n < N)[None, :], other=0.0)
                b = tl.load(x_ptrs, mask=(k < K)[None, :], other=0.0)
            if UPCAST:
                a, b = a.to(tl.float32), b.to(tl.float32)
            acc = tl.dot(a.T, b, acc, input_precision=PRECISION)
            if not TMA:
                grad_ptrs += BLOCK_K * N
                x_ptrs += BLOCK_K * K
        if whole < end:  # the rows of the next expert must not be summed, nor garbage past the last offset
            last = whole.to(tl.int64) + r
            mine = (last < end)[:, None]
            a = tl.load(grad_ptr + last[:, None] * N + n[None, :], mask=mine & (n < N)[None, :], other=0.0)
            b = tl.load(x_ptr + last[:, None] * K + k[None, :], mask=mine & (k < K)[None, :], other=0.0)
            if UPCAST:
                a, b = a.to(tl.float32), b.to(tl.float32)
            acc = tl.dot(a.T, b, acc, input_precision=PRECISION)
        out_ptrs = out_ptr + expert.to(tl.int64) * N * K + n[:, None] * K + k[None, :]
        tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=(n < N)[:, None] & (k < K)[None, :])


KEY = ("N", "K", "rows_bucket", "E", "TMA")
_tuned = {(kernel, kind): runtime.tuned(kernel, configs, KEY) for kernel in (rows_kernel, weight_grad_kernel) for kind, configs in CONFIGS.items()}


def default_config(rows_bucket: int, kind: str) -> triton.Config:
    """The config used untuned: rows an expert decide the height of a tile."""
    if runtime.INTERPRET:
        return INTERPRETED
    if kind == "bulk":
        return CONFIGS[kind][5] if rows_bucket <= 64 else CONFIGS[kind][0] if rows_bucket <= 256 else CONFIGS[kind][1]
    return CONFIGS[kind][0]


def _launch(kernel, x: Tensor, tma: bool, tiles, rows_bucket: int, args: tuple, config: triton.Config | None) -> None:
    if tma:
        runtime.provide_scratch()
    kind = "bulk" if tma else "float32" if x.element_size() == 4 else "pointers"
    most = runtime.num_processors(x.device)
    runtime.launch(kernel, _tuned[kernel, kind], default_config(rows_bucket, kind), lambda meta: (min(tiles(meta), most * meta["PER_SM"]),), *args,
                   config=config)


def rows_product(x: Tensor, w: Tensor, offsets: Tensor, config: triton.Config | None = None, tma: bool | None = None) -> Tensor:
    """x [R,K] times w [E,N,K] (any strides, one of the last two dims dense) by expert: [R,N]. ``tma`` None: where it can be used."""
    x = runtime.on_device("grouped_gemm", x)
    w = w if 1 in w.stride()[1:] else w.contiguous()
    (num_rows, K), (E, N, _) = x.shape, w.shape
    out = x.new_empty(num_rows, N)
    if out.numel() == 0:
        return out
    dense_in_n = w.stride(2) != 1
    if tma is None:
        tma = x.element_size() == 2 and runtime.bulk_copies(x, w.transpose(1, 2) if dense_in_n else w)
    rows_bucket = runtime.bucket(num_rows, E)
    args = (x, w, out, offsets, num_rows, N, K, *w.stride(), rows_bucket, E, triton.next_power_of_2(E + 1), dense_in_n, tma,
            runtime.INTERPRET, runtime.precision())
    most_tiles = lambda meta: (num_rows // meta["BLOCK_M"] + E + 1) * triton.cdiv(N, meta["BLOCK_N"])  # noqa: E731
    _launch(rows_kernel, x, tma, most_tiles, rows_bucket, args, config)
    return out


def weight_grad(grad: Tensor, x: Tensor, offsets: Tensor, config: triton.Config | None = None, tma: bool | None = None) -> Tensor:
    """grad [R,N]^T x [R,K] over each expert's rows: [E,N,K]; an expert without rows gets zero."""
    grad, x = runtime.on_device("grouped_gemm", grad), runtime.on_device("grouped_gemm", x)
    (num_rows, N), K, E = grad.shape, x.shape[1], offsets.shape[0]
    out = x.new_empty(E, N, K)
    if out.numel() == 0:
        return out
    if tma is None:
        tma = x.element_size() == 2 and runtime.bulk_copies(grad, x)
    rows_bucket = runtime.bucket(num_rows, E)
    args = (grad, x, out, offsets, num_rows, N, K, rows_bucket, E, tma, runtime.INTERPRET, runtime.precision())
    tiles = lambda meta: E * triton.cdiv(N, meta["BLOCK_M"]) * triton.cdiv(K, meta["BLOCK_N"])  # noqa: E731
    _launch(weight_grad_kernel, x, tma, tiles, rows_bucket, args, config)
    return out


grouped_gemm = define(
    "grouped_gemm",
    lambda x, w, offsets: rows_product(x, w, offsets),
    lambda grad, x, offsets: weight_grad(grad, x, offsets),
)
