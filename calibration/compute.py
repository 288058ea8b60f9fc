"""What do the tensor-core kernels cost on each GPU? (which rows fit which parameters, and what is borrowed from another GPU)"""

from __future__ import annotations

from dataclasses import replace
from typing import Mapping, Sequence

import numpy as np

from calibration.clean import Row
from calibration.fit import Result, fit
from calibration.models import PEAK_OF, measured, predict
from moesim.costs import fused_ffn, gemm

KERNELS = {
    "bf16": ("torch.nn.functional.linear", "vllm_default"),
    "fp8": ("CutlassFP8ScaledMMLinearKernel",),
    "fp8_block": ("DeepGemmFp8BlockScaledMMKernel",),
    "nvfp4": ("FlashInferCuteDslNvFp4LinearKernel",),
}
"""The kernel whose table prices a dtype; other libraries' rows (torch_flow, DeepGEMM on H800) are other software."""
REFERENCE = "b300"
"""The GPU whose table is ten sizes deep: the others (two or three sizes) start from its tile
parameters, believed to BORROWED_SIGMA in log."""
BORROWED = ("ramp_k", "small_tile", "quantisation", "quant_row_s", "sm_bandwidth", "split_s")
BORROWED_SIGMA = 0.3
LEAST_ROWS = 20
"""Rows below which another library's kernel gets no parameters of its own."""
MEMORY_PRIOR = (0.73, 0.1)
"""Share of the HBM peak a copy reaches (GB200 0.73, H100 0.76-0.87, A100 0.81: measurements/memory.csv), for GPUs whose GEMM rows
are all compute bound."""
WIDE_PRIOR = {"droop": (0.2, 1.0), "droop_s": (5e-4, 1.0), "sm_bandwidth": (2e11, 0.7), "split_s": (1e-6, 1.0)}
"""Wide beliefs, so that a table which says nothing about one of them still has a fit: no long kernels (the clock), no small m (what
one SM loads alone). B300's ten sizes settle them by themselves."""
FFN_PRIOR = {"rate": 0.7, "bandwidth": 0.8, "row_bandwidth": 0.4, "fixed_s": 5e-5, "skew": 0.1}
FFN_SIGMA = (1.0, 0.3)
"""Width of the belief about a fused FFN's parameters: loose while the kernels' median is found, then this tight around it."""


def gemm_rows(rows: Sequence[Row], gpu: str, dtype: str) -> list[Row]:
    return [r for r in rows if r.kind == "gemm" and r.gpu == gpu and r.dtype == dtype and r.kernel in KERNELS[dtype]]


def gemm_fixed(dtype: str) -> dict[str, float]:
    """Parameters a dtype's kernel doesn't have: no quantisation in bf16; a host floor only in the kernel no graph holds."""
    fixed = {} if dtype == "fp8_block" else {"floor_s": 0.0}
    return {**fixed, "quant_row_s": 0.0, "quant_bandwidth": 5e12} if dtype == "bf16" else fixed


def fit_gemm(rows: Sequence[Row], lender: Mapping[str, float] | None, dtype: str, sheets: Mapping[str, dict]) -> Result:
    """Parameters of one GPU's dense kernel; ``lender``: parameters of REFERENCE, believed of the tiles (None for REFERENCE)."""
    fixed, borrowed = gemm_fixed(dtype), {}
    sheet = sheets[rows[0].gpu]
    if lender is not None:
        borrowed = {name: (lender[name], BORROWED_SIGMA) for name in BORROWED}
    peak = sheet[PEAK_OF[dtype]]
    parameters = [replace(p, high=1.1 * peak, start=0.85 * peak) if p.name == "rate" else p for p in gemm.PARAMETERS]
    prior = {"bandwidth": (MEMORY_PRIOR[0] * sheet["hbm"], MEMORY_PRIOR[1]), **WIDE_PRIOR, **borrowed}
    start = {"bandwidth": 0.7 * sheet["hbm"]}
    num_sms = int(sheet["num_sms"])
    return fit(lambda p: predict(p, num_sms, rows), measured(rows), parameters, fixed, start, prior)


def ffn_groups(rows: Sequence[Row]) -> dict[tuple[str, str, str], list[Row]]:
    """(GPU, dtype, kernel) -> fused FFN rows."""
    groups: dict[tuple[str, str, str], list[Row]] = {}
    for row in rows:
        if row.kind == "fused_ffn":
            groups.setdefault((row.gpu, row.dtype, row.kernel), []).append(row)
    return groups


def fit_ffn(groups, sheets) -> dict[tuple[str, str, str], Result]:
    """Parameters of every fused FFN kernel. Few rows each, so each is drawn to the median of all, taken relative to the datasheet."""
    loose = {key: _fit_one_ffn(key, rows, FFN_PRIOR, FFN_SIGMA[0], sheets) for key, rows in groups.items() if len(rows) >= 6}
    center = {
        name: float(np.median([result.parameters[name] / ffn_unit(name, key, sheets) for key, result in loose.items()]))
        for name in FFN_PRIOR
    }
    return {key: _fit_one_ffn(key, rows, center, FFN_SIGMA[1], sheets) for key, rows in groups.items()}


def ffn_unit(name: str, key, sheets) -> float:
    """The datasheet figure a parameter is relative to; 1 where there is none."""
    sheet = sheets[key[0]]
    return {"rate": sheet[PEAK_OF[key[1]]], "bandwidth": sheet["hbm"], "row_bandwidth": sheet["hbm"]}.get(name, 1.0)


def _fit_one_ffn(key, rows, center, sigma, sheets) -> Result:
    peak = ffn_unit("rate", key, sheets)
    parameters = [replace(p, high=peak, start=0.6 * peak) if p.name == "rate" else p for p in fused_ffn.PARAMETERS]
    prior = {name: (value * ffn_unit(name, key, sheets), sigma) for name, value in center.items()}
    num_sms = int(sheets[key[0]]["num_sms"])
    start = {name: value for name, (value, _) in prior.items()}
    return fit(lambda p: predict(p, num_sms, rows), measured(rows), parameters, start=start, prior=prior)
