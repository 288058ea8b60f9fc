"""Does every kernel compile for every GPU it is meant for, with which registers, spills and shared memory? (no GPU needed)

Run: python -m moetrain.kernels.compile [--json FILE] [--all]
One config of each kernel, or with --all every config its tuner may choose, for sm_90, sm_100 and sm_103. The exit status is 1 if a kernel spills to
the stack, wants more shared memory than there is, or a product misses the tensor cores' own instructions.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from moesim.files import write_atomically

from . import grouped_gemm, permute, rms_norm, scaled_gemm, swiglu, topk
from .reference import LARGEST

TARGETS = (90, 100, 103)
SHARED_LIMIT = 227 * 1024
"""Bytes of shared memory a block may use on sm_90 and sm_100 (CUDA C++ Programming Guide, technical specifications)."""
PRODUCT = {90: "wgmma.mma_async", 100: "tcgen05.mma", 103: "tcgen05.mma"}
BULK_COPY = "cp.async.bulk.tensor"

E, N, K, WIDTH = 128, 8192, 4096, 4096
"""Experts and sizes compiled for: a kernel's code depends on E only, and on whether sizes are multiples of 16."""


@dataclass(frozen=True)
class Case:
    """A kernel with the types of its run-time arguments, its constants, and what its PTX must hold."""

    name: str
    kernel: object
    types: dict[str, str]
    constants: dict[str, object]
    config: triton.Config
    product: bool = False
    bulk: bool = False
    block_scaled: bool = False
    targets: tuple[int, ...] = TARGETS


@dataclass(frozen=True)
class Compiled:
    """What came out for one target. registers a thread; stack and shared in bytes (stack: spills too); problems: empty if all is well."""

    name: str
    config: str
    target: str
    registers: int
    stack: int
    shared: int
    instructions: list[str]
    problems: list[str] = field(default_factory=list)


def cases(every: bool = False) -> Iterator[Case]:
    """All kernels: one config each, or every config."""
    yield from _products(every)
    yield from _scaled(every)
    yield from _passes()


GEMM_CONSTANTS = dict(E=E, UPCAST=False, PRECISION="ieee")


def _products(every: bool) -> Iterator[Case]:
    for kind, configs in grouped_gemm.CONFIGS.items():
        element = "*fp32" if kind == "float32" else "*bf16"
        pointers = {name: element for name in ("x_ptr", "w_ptr", "out_ptr", "grad_ptr")} | {"offsets_ptr": "*i32"}
        bulk, product = kind == "bulk", kind != "float32"
        for config in configs if every else configs[1:2]:
            for name, dense_in_n in (("rows", False), ("input gradient", True)):
                constants = GEMM_CONSTANTS | dict(E_PAD=triton.next_power_of_2(E + 1), W_DENSE_IN_N=dense_in_n, TMA=bulk)
                strides = {"stride_wn": 1} if dense_in_n else {"stride_wk": 1}
                yield Case(f"{name} {kind}", grouped_gemm.rows_kernel, pointers | strides, constants, config, product, bulk)
            constants = GEMM_CONSTANTS | dict(TMA=bulk)
            yield Case(f"weight gradient {kind}", grouped_gemm.weight_grad_kernel, pointers, constants, config, product, bulk)


def _scaled(every: bool) -> Iterator[Case]:
    for recipe, configs in scaled_gemm.CONFIGS.items():
        mx, blocked = recipe == "mxfp8", recipe == "block128"
        scales = "*u8" if mx else "*fp32"
        types = dict(x_ptr="*fp8e4nv", w_ptr="*fp8e4nv", x_scales_ptr=scales, w_scales_ptr=scales, out_ptr="*bf16", offsets_ptr="*i32")
        targets = tuple(t for t in TARGETS if t >= scaled_gemm.CAPABILITY[recipe])
        for config in configs[: None if every else 1]:
            constants = dict(E=E, E_PAD=triton.next_power_of_2(E + 1), BLOCKED=blocked, MX=mx, UPCAST=False)
            yield Case(f"rows {recipe}", scaled_gemm.scaled_rows_kernel, types, constants, config, True, True, mx, targets)
        quantised = dict(x_ptr="*bf16", values_ptr="*fp8e4nv", scales_ptr=scales)
        group = scaled_gemm.GROUPS[recipe] or K
        block = dict(LARGEST_VALUE=LARGEST, MX=mx, GROUP=group, BLOCK_R=1 if group == K else 2, BLOCK_G=max(1, 2048 // group))
        yield Case(f"quantise {recipe}", scaled_gemm.quantise_kernel, quantised, block, triton.Config({}, num_warps=4))
    tiles = dict(w_ptr="*bf16", values_ptr="*fp8e4nv", scales_ptr="*fp32")
    yield Case("quantise block128 weights", scaled_gemm.quantise_tiles_kernel, tiles, dict(LARGEST_VALUE=LARGEST, BLOCK=128), triton.Config({}, num_warps=8))


def _passes() -> Iterator[Case]:
    rows = {name: "*bf16" for name in ("tokens_ptr", "rows_ptr", "grad_ptr", "grad_rows_ptr", "out_ptr", "x_ptr", "grad_x_ptr")}
    index = {"source_ptr": "*i32", "positions_ptr": "*i32"}
    wide = {name: "*fp32" for name in ("weights_ptr", "grad_weights_ptr", "weight_ptr", "grad_weight_ptr", "partial_ptr", "logits_ptr", "bias_ptr")}
    eight, four = triton.Config({}, num_warps=8), triton.Config({}, num_warps=4)
    block = permute.blocks(WIDTH)
    yield Case("permute", permute.gather_kernel, rows | index, block, eight)
    yield Case("unpermute", permute.combine_kernel, rows | index | wide, block | dict(TOP_K=8, WEIGHTED=True), eight)
    yield Case("unpermute backward", permute.combine_backward_kernel, rows | index | wide, block | dict(TOP_K=8), eight)
    weighted = swiglu.blocks(WIDTH) | dict(WEIGHTED=True)
    yield Case("swiglu", swiglu.swiglu_kernel, rows | wide, weighted, eight)
    yield Case("swiglu backward", swiglu.swiglu_backward_kernel, rows | wide, weighted, eight)
    for width in (128, WIDTH):
        norm = rows | {"weight_ptr": "*bf16", "partial_ptr": "*fp32", "eps": "fp32"}
        config = triton.Config({}, num_warps=rms_norm.warps(width))
        yield Case(f"rms_norm {width}", rms_norm.rms_norm_kernel, norm, rms_norm.blocks(width), config)
        yield Case(f"rms_norm backward {width}", rms_norm.rms_norm_backward_kernel, norm, rms_norm.blocks(width), config)
    router = wide | {"experts_ptr": "*i32", "counts_ptr": "*i32", "scale": "fp32", "grad_ptr": "*fp32", "out_ptr": "*fp32"}
    for experts, groups, kept in ((128, 1, 1), (256, 8, 4)):
        both = dict(E=experts, E_PAD=experts, TOP_K=8, SIGMOID=groups > 1, NORMALIZE=True, BLOCK_T=topk.block_tokens(experts))
        yield Case(f"route {experts}", topk.route_kernel, router, both | dict(K_PAD=8, BIASED=True, GROUPS=groups, KEPT=kept), four)
        yield Case(f"route backward {experts}", topk.route_backward_kernel, router, both, four)


def source_of(case: Case) -> ASTSource:
    """The case as triton's compiler takes it. Integers are int32 multiples of 16, pointers aligned; an integer in ``types`` is a constant."""
    signature, constants, attributes = {}, {}, {}
    fixed = case.constants | case.config.kwargs
    for i, name in enumerate(case.kernel.arg_names):
        kind = fixed[name] if name in fixed else case.types.get(name, "i32")
        if name in fixed or isinstance(kind, int):
            signature[name], constants[name] = "constexpr", kind
            continue
        signature[name] = kind
        if kind.startswith("*") or (kind == "i32" and name not in ("num_rows", "num_tokens", "rows_bucket")):
            attributes[(i,)] = [["tt.divisibility", 16]]
    return ASTSource(fn=case.kernel, signature=signature, constexprs=constants, attrs=attributes)


def compile_case(case: Case, target: int) -> Compiled:
    """Compile for sm_``target`` and read the result back."""
    options = dict(num_warps=case.config.num_warps, num_stages=case.config.num_stages)
    kernel = triton.compile(source_of(case), target=GPUTarget("cuda", target, 32), options=options)
    registers, stack = _resources(kernel.asm["cubin"])
    ptx = kernel.asm["ptx"]
    wanted = ([PRODUCT[target]] if case.product else []) + ([BULK_COPY] if case.bulk else []) + (["block_scale"] if case.block_scaled else [])
    problems = [f"no {word}" for word in wanted if word not in ptx]
    problems += [f"stack {stack} B"] if stack else []
    problems += [f"shared memory {kernel.metadata.shared} B"] if kernel.metadata.shared > SHARED_LIMIT else []
    shape = " ".join(f"{key}={value}" for key, value in case.config.kwargs.items())
    config = f"{shape} warps={case.config.num_warps} stages={case.config.num_stages}".strip()
    return Compiled(case.name, config, f"sm_{target}", registers, stack, kernel.metadata.shared, [w for w in wanted if w in ptx], problems)


def _resources(cubin: bytes) -> tuple[int, int]:
    """(registers a thread, stack bytes a thread) as cuobjdump tells them."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        told = subprocess.run([triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", told)
    if found is None:
        raise RuntimeError(f"cuobjdump: no resource usage in {told[:200]!r}")
    return int(found[1]), int(found[2])


def _row(c: Compiled) -> str:
    verdict = "; ".join(c.problems) or "ok"
    return f"{c.name:26} {c.target:7} {c.registers:4d} {c.stack:6d} {c.shared:8d}  {verdict:10} {' '.join(c.instructions):40} {c.config}"


def main(arguments: list[str] | None = None) -> int:
    """Print the table; write JSON if asked; 1 if anything is wrong."""
    parser = argparse.ArgumentParser(prog="python -m moetrain.kernels.compile", description="Compile every kernel for sm_90, sm_100, sm_103.")
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    parser.add_argument("--all", action="store_true", help="every config of every kernel, in minutes instead of seconds")
    options = parser.parse_args(arguments)
    print(f"{'kernel':26} {'target':7} {'regs':>4} {'stack':>6} {'shared':>8}  {'verdict':10} instructions")
    rows = []
    for case in cases(options.all):
        for target in case.targets:
            rows.append(compile_case(case, target))
            print(_row(rows[-1]), flush=True)
    if options.json:
        write_atomically(options.json, json.dumps({"triton": triton.__version__, "kernels": [asdict(row) for row in rows]}, indent=1) + "\n")
    bad = sum(bool(row.problems) for row in rows)
    print(f"{len(rows)} compiled, {bad} with problems")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
