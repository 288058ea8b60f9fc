"""How fast are tensor-core kernels inside a training step, compared with the burst tables? (the sustained rule, grouped GEMM)

The rule, fixed before any scenario was run. Two classes of public evidence give measured / burst-model speed of large dense bf16
kernels (>= 100 GFLOP; in training >= 500 GFLOP), each the median of its rows:
  bench        - timed loops with random data on this GPU (best-shape searches, 10,000-iteration runs); 1 where it has none;
  in training  - GEMMs timed inside training steps. A GPU with such rows of its own uses them alone.
A GPU without in-training rows takes the geometric mean of its bench ratio and the pooled in-training ratio, and half the distance
between the two as its error. The clock droop of long kernels is, in training, the median over the GPUs of the generation: one
machine's burst table shows that machine's cooling. Low precisions take the bf16 factor: nothing public separates them.
"""

from __future__ import annotations

import numpy as np

from calibration.fit import fit
from calibration.models import measured, predict
from moesim.costs import grouped_gemm

GENERATION = {
    "b300": "blackwell", "b200": "blackwell", "gb300": "blackwell", "gb200": "blackwell",
    "h100": "hopper", "h200": "hopper", "h800": "hopper", "a100": "ampere",
}
BENCH = ("MAMF", "sustained", "ThunderKittens")
BENCH_FLOPS, TRAINING_FLOPS = 1e11, 5e11
FLOOR_SIGMA = 0.05
"""Two healthy GPUs of one type differ by about 5% (https://github.com/stas00/ml-engineering/blob/744d01e18b/compute/accelerator/README.md)."""


def training_droop(gpu: str, dense: dict[str, dict[str, float]]) -> dict[str, float]:
    """droop and droop_s of the generation: median over its GPUs (geometric for the time)."""
    peers = [dense[g] for g in dense if GENERATION[g] == GENERATION[gpu]]
    return {
        "droop": float(np.median([p["droop"] for p in peers])),
        "droop_s": float(np.exp(np.median([np.log(p["droop_s"]) for p in peers]))),
    }


def ratios(rows, params, num_sms, least_flops) -> np.ndarray:
    """Measured speed over modelled speed of the large rows."""
    large = [r for r in rows if 2 * r.shape["m"] * r.shape["n"] * r.shape["k"] >= least_flops]
    return predict(params, num_sms, large) / measured(large) if large else np.array([])


def sustained(gpu: str, rows, dense, sheets) -> dict:
    """factor, sigma_log, evidence and sources of one GPU. ``dense``: GPU -> burst parameters in bf16."""
    def of(g, kinds):
        params = {**dense[g], **training_droop(g, dense)}
        mine = [r for r in rows if r.gpu == g and r.dtype == "bf16"]
        if kinds == "training":
            chosen, least = [r for r in mine if r.kind == "gemm.in_training"], TRAINING_FLOPS
        else:
            chosen, least = [r for r in mine if r.kind == "gemm" and r.kernel in BENCH], BENCH_FLOPS
        return ratios(chosen, params, int(sheets[g]["num_sms"]), least), chosen

    bench, bench_rows = of(gpu, "bench")
    trained = {g: of(g, "training") for g in dense}
    pooled = np.exp(np.mean([np.log(np.median(r)) for r, _ in trained.values() if len(r)]))
    training_rows = [row for r, chosen in trained.values() if len(r) for row in chosen]
    bench_ratio = float(np.median(bench)) if len(bench) else 1.0
    own = trained[gpu][0]
    if len(own):
        factor, sigma, provenance = float(np.median(own)), float(np.std(np.log(own))), "measured"
    else:
        factor, sigma, provenance = float(np.sqrt(bench_ratio * pooled)), 0.5 * abs(np.log(bench_ratio / pooled)), "extrapolated"
    sources = sorted({r.source for r in bench_rows + training_rows})
    evidence = {"bench": bench_ratio, "in training": float(pooled)}
    error = float(np.hypot(sigma, FLOOR_SIGMA))
    return dict(
        factor=min(factor, 1.5), sigma_log=error, provenance=provenance, evidence=evidence, sources=tuple(sources), **training_droop(gpu, dense)
    )


def fit_grouped(rows, dense_in_training, num_sms: int):
    """Grouped-GEMM parameters relative to a dense GEMM of the same step, from rows timed in training."""
    return fit(lambda p: predict({**dense_in_training, **p}, num_sms, rows), measured(rows), grouped_gemm.PARAMETERS)
