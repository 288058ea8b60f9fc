"""How well does the three-line model do? (constant MFU x pipeline bubble: what any prediction has to beat on the same rows)"""

from __future__ import annotations

from statistics import median
from typing import Callable, Iterable

from moesim.layout import num_microbatches
from moesim.runs import Run


def ideal_tokens(run: Run) -> float:
    """Tokens/s/GPU at the dense peak of the run's precision (BF16 where the GPU has no other), less the pipeline bubble."""
    peaks, layout = run.cluster.gpu.peak_flops, run.layout
    peak = peaks.get({"bf16": "bf16", "fp8": "fp8", "mxfp8": "fp8", "nvfp4": "fp4"}[layout.precision], peaks["bf16"])
    rounds = layout.vpp * num_microbatches(layout, run.workload)
    return peak / run.model.flops_per_token(run.workload.seq_len) * rounds / (rounds + layout.pp - 1)


def fit(runs: Iterable[Run], ideal: Callable[[Run], float] = ideal_tokens) -> float:
    """The constant MFU: median of measured over ideal. Raises ValueError without a measured run."""
    ratios = [run.measured.tokens_per_s_per_gpu / ideal(run) for run in runs if run.measured.tokens_per_s_per_gpu]
    if not ratios:
        raise ValueError("baseline: no measured run to fit the MFU on")
    return median(ratios)


def predict(run: Run, mfu: float, ideal: Callable[[Run], float] = ideal_tokens) -> float:
    """tokens/s/GPU."""
    return mfu * ideal(run)
