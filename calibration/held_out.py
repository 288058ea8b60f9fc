"""How well is each kind predicted on rows held out, all GPUs pooled? (the figures the targets are about, and indicative ones)"""

from __future__ import annotations

from typing import Iterator

import numpy as np

from calibration import compute, network, pointwise, splits
from calibration.build import GPUS, Bench
from calibration.models import measured
from calibration.validate import errors, out_of_fold
from moesim.profile import Fit


def pooled(bench: Bench) -> list[tuple[str, Fit]]:
    """(kind, errors) in a fixed order; the split is in the errors."""
    found = [item for split in splits.SPLITS for item in _split(bench, split)]
    found += list(_unseen_gpu(bench))
    own = [c for gpu in GPUS for c in network.curves(gpu, bench.rows, bench.sheets) if not c.lender]
    found.append(("NCCL curves", network.interpolation_errors(own)[0]))
    return found + list(_indicative(bench))


def _split(bench: Bench, split: str) -> Iterator[tuple[str, Fit]]:
    for dtype in compute.KERNELS:
        keys = [key for key in bench.gemm if key[1] == dtype]
        held = np.concatenate([bench.out_of_fold_gemm(*key, split) for key in keys])
        truth = np.concatenate([measured(compute.gemm_rows(bench.rows, *key)) for key in keys])
        yield f"gemm.{dtype}", errors(held, truth, split)
    rows, held = bench.ffn_out_of_fold[split]
    known = np.isfinite(held)
    yield "fused_ffn", errors(held[known], measured(rows)[known], split)


def _unseen_gpu(bench: Bench) -> Iterator[tuple[str, Fit]]:
    for dtype in compute.KERNELS:
        keys = [key for key in bench.gemm if key[1] == dtype and key[0] != compute.REFERENCE]
        away = np.concatenate([bench.unseen_gpu_gemm(*key) for key in keys])
        truth = np.concatenate([measured(compute.gemm_rows(bench.rows, *key)) for key in keys])
        yield f"gemm.{dtype}", errors(away, truth, "unseen GPU")


def _indicative(bench: Bench) -> Iterator[tuple[str, Fit]]:
    """Attention by length, dispatch by hidden size, multi-node collectives in sample, grouped GEMM in sample."""
    away, truth = [], []
    for gpu in bench.attention:
        rows = [r for r in pointwise.attention_rows(gpu, "forward") if r["num_heads"] == "64"]
        sheet = bench.sheets[gpu]
        away.append(out_of_fold(rows, list(range(len(rows))), lambda kept, _, s=sheet: pointwise.fit_attention(kept, s).parameters,
                                lambda p, held, s=sheet: 1 / pointwise.predict_attention(p, int(s["num_sms"]), held)))
        truth.append(1 / np.array([float(r["tflops"]) for r in rows]))
    yield "attention.forward", errors(np.concatenate(away), np.concatenate(truth), "sizes")
    rows, sheet = network.dispatch_rows("b300", bench.rows), bench.sheets["b300"]
    held = out_of_fold(rows, [int(r.shape["hidden"]) for r in rows], lambda kept, _: network.fit_dispatch(kept, sheet).parameters,
                       lambda p, part: network.predict_dispatch(p, part, sheet["nvlink"]))
    yield "dispatch.dedup_v1 B300", errors(held, measured(rows), "families")
    for transport, (_, chosen, predicted) in bench.span.items():
        for kind in sorted({r.dtype for r in chosen}):
            at = np.array([r.dtype == kind for r in chosen])
            yield f"{kind} {transport}", errors(predicted[at], measured(chosen)[at], "in sample")
    _, rows, predicted = bench.grouped
    yield "grouped_gemm B200 in training", errors(predicted, measured(rows), "in sample")
