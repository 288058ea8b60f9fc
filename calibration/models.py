"""How is a measured row handed to its cost model? (Row -> arrays -> predicted seconds, the same way for fits and for judging)"""

from __future__ import annotations

from typing import Mapping, Sequence

import numpy as np

from calibration.clean import Row
from moesim.costs import fused_ffn, gemm, grouped_gemm
from moesim.ops import BYTES_PER_ELEMENT

WIDTH = {**BYTES_PER_ELEMENT, "fp8_block": 1.0, "fp16": 2.0, "fp4": BYTES_PER_ELEMENT["nvfp4"]}
PEAK_OF = {"bf16": "bf16", "fp16": "bf16", "fp32": "bf16", "fp8": "fp8", "fp8_block": "fp8", "mxfp8": "fp8", "nvfp4": "fp4", "fp4": "fp4"}


def column(rows: Sequence[Row], name: str) -> np.ndarray:
    return np.array([row.shape[name] for row in rows])


def measured(rows: Sequence[Row]) -> np.ndarray:
    return np.array([row.seconds for row in rows])


def _gemm(params, num_sms, rows):
    accumulate = np.array([row.shape.get("accumulate", 0.0) for row in rows])
    m, n, k = (column(rows, axis) for axis in "mnk")
    return gemm.seconds(params, num_sms, m, n, k, WIDTH[rows[0].dtype], np.where(accumulate > 0, 8.0, 2.0))


def _grouped(params, num_sms, rows):
    groups, m, n, k = (column(rows, axis) for axis in ("groups", "m", "n", "k"))
    return grouped_gemm.seconds(params, num_sms, groups, groups * m, n, k, WIDTH[rows[0].dtype], column(rows, "weight_grad") > 0)


def _fused(params, num_sms, rows):
    tokens, top_k, hidden, inter, experts, exponent = (column(rows, a) for a in ("tokens", "top_k", "hidden", "inter", "experts", "exponent"))
    return fused_ffn.seconds(params, num_sms, tokens, top_k, hidden, inter, experts, WIDTH[rows[0].dtype], exponent)


_PREDICT = {"gemm": _gemm, "gemm.in_training": _gemm, "grouped_gemm": _grouped, "fused_ffn": _fused}


def predict(params: Mapping[str, float], num_sms: int, rows: Sequence[Row]) -> np.ndarray:
    """Seconds of rows of one kind and dtype."""
    return _PREDICT[rows[0].kind](params, num_sms, rows)
