"""What do GEMM, attention and memory-bound kernels cost on one GPU? (fits and, where none exist, the parent's scaled)"""

from __future__ import annotations

import numpy as np

from calibration import constants
from calibration.fit import fit
from moesim.costs import attention, gemm, grouped_gemm, memory_bound
from moesim.ops import BYTES_PER_ELEMENT
from moesim.profile import Sustained, Term

KERNELS = {
    "bf16": ("torch.nn.functional.linear", "vllm_default"),
    "fp8": ("CutlassFP8ScaledMMLinearKernel",),
    "fp8_block": ("DeepGemmFp8BlockScaledMMKernel",),
    "nvfp4": ("FlashInferCuteDslNvFp4LinearKernel",),
}
PEAK_OF = {"bf16": "bf16", "fp8": "fp8", "fp8_block": "fp8", "mxfp8": "fp8", "nvfp4": "fp4"}
WIDTH = {**BYTES_PER_ELEMENT, "fp8_block": 1.0}


def gemm_columns(rows):
    m, n, k = (np.array([row.shape[axis] for row in rows]) for axis in ("m", "n", "k"))
    return m, n, k, np.array([row.seconds for row in rows])


def gemm_fixed(dtype: str) -> dict[str, float]:
    """Parameters that a dtype's kernel doesn't have: no quantisation in bf16; a host floor only in the kernel no graph holds."""
    fixed = {} if dtype == "fp8_block" else {"floor_s": 0.0}
    return {**fixed, "quant_row_s": 0.0, "quant_bandwidth": 5e12} if dtype == "bf16" else fixed


def fit_gemm(rows, dtype: str, sheet):
    m, n, k, seconds = gemm_columns(rows)
    start = {"rate": 0.85 * sheet[PEAK_OF[dtype]], "bandwidth": 0.7 * sheet["hbm"]}
    return fit(lambda p: gemm.seconds(p, sheet["num_sms"], m, n, k, WIDTH[dtype], 2.0), seconds, gemm.PARAMETERS, gemm_fixed(dtype), start)


def terms(gpu: str, rows, sheet):
    for dtype, kernels in KERNELS.items():
        chosen = [r for r in rows if r.kind == "gemm" and r.gpu == gpu and r.dtype == dtype and r.kernel in kernels]
        if not chosen:
            continue
        result = fit_gemm(chosen, dtype, sheet)
        common = dict(stderr=result.stderr, covariance=result.covariance, shared={"sustained": 0.1}, sources=tuple(sorted({r.source for r in chosen})))
        valid = {axis: (min(r.shape[axis] for r in chosen), max(r.shape[axis] for r in chosen)) for axis in ("m", "n", "k")}
        yield Term(name=f"gemm.{dtype}", kind="gemm", label=kernels[0], parameters=result.parameters, valid=valid, provenance="measured", sigma_log=result.sigma_log, **common)
        for name in {"fp8": ("mxfp8",), "bf16": ("fp32",)}.get(dtype, ()):
            changed = dict(result.parameters, rate=result.parameters["rate"] / (2 if name == "fp32" else 1))
            yield Term(name=f"gemm.{name}", kind="gemm", parameters=changed, provenance="assumed", sigma_log=0.2, **common)
            yield Term(name=f"gemm.wgrad.{name}", kind="gemm", parameters=changed, provenance="assumed", sigma_log=0.2, **common)
            yield from _grouped(name, changed, common, "assumed")
        yield Term(name=f"gemm.wgrad.{dtype}", kind="gemm", parameters=result.parameters, provenance="extrapolated", sigma_log=0.15, **common)
        yield from _grouped(dtype, result.parameters, common, "extrapolated")
    yield from _attention(gpu, sheet)
    yield from _memory(sheet)


def _grouped(dtype, dense, common, provenance):
    own = {p.name: p.start for p in grouped_gemm.PARAMETERS}
    for name in (f"grouped_gemm.{dtype}", f"grouped_gemm.wgrad.{dtype}"):
        yield Term(name=name, kind="grouped_gemm", parameters={**dense, **own}, provenance=provenance, sigma_log=0.2, **common)


def _attention(gpu, sheet):
    params = {p.name: p.start for p in attention.PARAMETERS}
    params["rate"] = {"b300": 1.7e15, "b200": 1.4e15, "gb200": 1.4e15, "gb300": 1.9e15, "a100": 1.9e14}.get(gpu, 6.7e14)
    source = (constants.AIC + f"data/{gpu}_sxm/attention/vllm/0.24.0/context_attention_perf.parquet",)
    yield Term(name="attention.forward", kind="attention", parameters=params, provenance="measured", sigma_log=0.05, sources=source)
    yield Term(name="attention.backward", kind="attention", parameters=params, provenance="extrapolated", sigma_log=0.15, sources=source)


def _memory(sheet):
    params = {p.name: p.start for p in memory_bound.PARAMETERS}
    params.update(peak=sheet["hbm"], permute=0.5, loss=0.32, quantise=0.75)
    for kind in memory_bound.KINDS:
        yield Term(name=f"memory.{kind}", kind="memory_bound", parameters=params, provenance="extrapolated", sigma_log=0.2,
                   sources=("https://github.com/MooreThreads/SimuMax/blob/4dcaae513b/configs/system/b200_bf16_ceperm.json",))


def sustained(gpu):
    one = Sustained(factor=0.9, sigma_log=0.15, provenance="assumed", evidence={}, sources=("https://github.com/stas00/ml-engineering/blob/744d01e18b/compute/accelerator/README.md",))
    return "first skeleton", {dtype: one for dtype in ("bf16", "fp32", "fp8", "fp8_block", "mxfp8", "nvfp4")}
