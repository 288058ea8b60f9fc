"""How do the measurements become one profile a GPU? (every fit once, then the terms of each GPU, its own rows first)"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from calibration import compute, network, pointwise, splits, training, validate
from calibration.clean import MEASUREMENTS, Row, clean, read_csv
from calibration.models import predict

GPUS = ("a100", "b200", "b300", "gb200", "gb300", "h100", "h200", "h800")
PARENTS = {"h200": "h100", "h800": "h100"}
"""GPUs without a GEMM table: the parent's, scaled by datasheet ratios, and labelled so."""


@dataclass(frozen=True)
class Bench:
    """All shipped measurements, and the fits that several profiles share (each made once)."""

    rows: tuple[Row, ...]
    sheets: dict[str, dict]

    @cached_property
    def gemm(self) -> dict:
        """(GPU, dtype) -> Result of the burst table."""
        found = {}
        for dtype in compute.KERNELS:
            first = compute.fit_gemm(compute.gemm_rows(self.rows, compute.REFERENCE, dtype), None, dtype, self.sheets)
            for gpu in GPUS:
                rows = compute.gemm_rows(self.rows, gpu, dtype)
                if rows:
                    own = gpu == compute.REFERENCE
                    found[gpu, dtype] = first if own else compute.fit_gemm(rows, first.parameters, dtype, self.sheets)
        return found

    @cached_property
    def _lenders(self) -> dict:
        return {}

    def lender(self, dtype: str, split: str, fold: int) -> dict[str, float]:
        """Parameters of the reference GPU, fitted without one fold."""
        key = (dtype, split, fold)
        if key not in self._lenders:
            rows = compute.gemm_rows(self.rows, compute.REFERENCE, dtype)
            kept = [r for r, number in zip(rows, splits.folds(rows, split)) if number != fold]
            self._lenders[key] = compute.fit_gemm(kept, None, dtype, self.sheets).parameters
        return self._lenders[key]

    @cached_property
    def other_kernels(self) -> dict:
        """(GPU, dtype, kernel) -> Result of dense kernels of other libraries with a table of their own, believed near the main one."""
        groups: dict = {}
        for row in self.rows:
            if row.kind == "gemm" and (row.gpu, row.dtype) in self.gemm and row.kernel not in compute.KERNELS[row.dtype]:
                groups.setdefault((row.gpu, row.dtype, row.kernel), []).append(row)
        return {
            key: compute.fit_gemm(rows, self.gemm[key[:2]].parameters, key[1], self.sheets)
            for key, rows in groups.items() if len(rows) >= compute.LEAST_ROWS
        }

    @cached_property
    def dense(self) -> dict[str, dict[str, float]]:
        """GPU -> burst parameters of its bf16 kernel (GPUs with a table)."""
        return {gpu: result.parameters for (gpu, dtype), result in self.gemm.items() if dtype == "bf16"}

    @cached_property
    def ffn(self) -> dict:
        return compute.fit_ffn(compute.ffn_groups(self.rows), self.sheets)

    def out_of_fold_gemm(self, gpu: str, dtype: str, split: str) -> np.ndarray:
        """Predictions (kept once made) of the GPU's rows, the lender's rows of the same fold held out as well."""
        key = (gpu, dtype, split)
        if key not in self._held_out:
            self._held_out[key] = self._hold_out_gemm(gpu, dtype, split)
        return self._held_out[key]

    @cached_property
    def _held_out(self) -> dict:
        return {}

    def _hold_out_gemm(self, gpu: str, dtype: str, split: str) -> np.ndarray:
        rows = compute.gemm_rows(self.rows, gpu, dtype)

        def train(kept, fold):
            lender = self.lender(dtype, split, fold)
            return lender if gpu == compute.REFERENCE else compute.fit_gemm(kept, lender, dtype, self.sheets).parameters

        return validate.out_of_fold(rows, splits.folds(rows, split), train, lambda p, held: predict(p, int(self.sheets[gpu]["num_sms"]), held))

    @cached_property
    def ffn_out_of_fold(self) -> dict[str, tuple[list[Row], np.ndarray]]:
        """split -> every fused FFN row and its prediction by fits (and their common centre) that never saw its fold."""
        return {split: self._out_of_fold_ffn(split) for split in splits.SPLITS}

    def _out_of_fold_ffn(self, split: str) -> tuple[list[Row], np.ndarray]:
        groups = compute.ffn_groups(self.rows)
        rows = [row for members in groups.values() for row in members]

        def train(kept, fold):
            return compute.fit_ffn(compute.ffn_groups(kept), self.sheets)

        return rows, validate.out_of_fold(rows, splits.folds(rows, split), train, self.predict_ffn)

    def unseen_gpu_gemm(self, gpu: str, dtype: str) -> np.ndarray:
        """Predictions of a GPU's rows from the reference GPU's parameters, scaled by datasheet ratios: none of its rows seen."""
        from calibration.terms import scaled

        parameters = scaled(self.gemm[compute.REFERENCE, dtype].parameters, "gemm", self.sheets[compute.REFERENCE], self.sheets[gpu], dtype)
        return predict(parameters, int(self.sheets[gpu]["num_sms"]), compute.gemm_rows(self.rows, gpu, dtype))

    def predict_ffn(self, fits, rows) -> np.ndarray:
        result = np.full(len(rows), np.nan)
        for key, members in compute.ffn_groups(rows).items():
            if key in fits:
                at = [i for i, r in enumerate(rows) if (r.gpu, r.dtype, r.kernel) == key]
                result[at] = predict(fits[key].parameters, int(self.sheets[key[0]]["num_sms"]), members)
        return result

    @cached_property
    def attention(self) -> dict:
        """GPU -> Result of its forward table, the longer sweep of one kernel."""
        gpus = {r["gpu"] for r in pointwise.table("attention") if r["direction"] == "forward" and r["num_heads"] == "64"}
        return {
            gpu: pointwise.fit_attention([r for r in pointwise.attention_rows(gpu, "forward") if r["num_heads"] == "64"], self.sheets[gpu])
            for gpu in sorted(gpus)
        }

    def attention_parameters(self, gpu: str) -> dict[str, float]:
        owner = pointwise.ATTENTION_LENDER.get(gpu, gpu)
        latent, backward = pointwise.latent_and_backward()
        params = {**self.attention[owner].parameters, "latent": latent, "backward": backward, "bandwidth": 0.73 * self.sheets[gpu]["hbm"]}
        return {**params, "rate": params["rate"] * self.sheets[gpu]["bf16"] / self.sheets[owner]["bf16"]}

    @cached_property
    def grouped(self):
        """Grouped GEMM relative to a dense one of the same step: the one GPU with rows timed in training."""
        rows = [r for r in self.rows if r.kind == "grouped_gemm" and r.gpu == "b200" and r.kernel == "training step"]
        level = training.sustained("b200", self.rows, self.dense, self.sheets)
        dense = {**self.dense["b200"], "rate": self.dense["b200"]["rate"] * level["factor"], "droop": level["droop"], "droop_s": level["droop_s"]}
        result = training.fit_grouped(rows, dense, int(self.sheets["b200"]["num_sms"]))
        return result, rows, predict({**dense, **result.parameters}, int(self.sheets["b200"]["num_sms"]), rows)

    @cached_property
    def curve_tables(self) -> dict:
        """GPU -> kind -> members -> curve of its newest complete release."""
        result = {}
        for gpu in GPUS:
            found = network.curves(gpu, self.rows, self.sheets)
            result[gpu] = network.tables(found, found[0].software if gpu in PARENTS else network.releases(gpu, self.rows)[0])
        return result

    @cached_property
    def span(self) -> dict:
        """transport -> (Result, rows, predicted)."""
        found = {}
        for transport in ("ib", "efa"):
            rows = [r for r in self.rows if r.kind == "collective" and r.gpu in GPUS and not network.single_domain(r) and network.transport(r) == transport]
            result = network.fit_span(rows, self.curve_tables, self.sheets)
            found[transport] = (result, rows, network.predict_collectives(result.parameters, rows, self.curve_tables, self.sheets))
        return found

    @cached_property
    def dispatch(self) -> dict:
        """GPU -> Result of the SM curve of DeepEP V1, GPUs with rows."""
        chosen = {gpu: network.dispatch_rows(gpu, self.rows) for gpu in GPUS}
        return {gpu: network.fit_dispatch(rows, self.sheets[gpu]) for gpu, rows in chosen.items() if rows}


def datasheet() -> dict[str, dict]:
    """GPU -> num_sms, peaks (FLOP/s), hbm and nvlink (bytes/s), source."""
    numbers = ("num_sms", "bf16", "fp8", "fp4", "hbm", "nvlink")
    rows = pointwise.table("datasheet")
    return {row["gpu"]: {"source": row["source"], **{n: float(row[n]) for n in numbers if row[n]}} for row in rows}


def bench() -> Bench:
    """Every usable shipped row and the datasheet."""
    rows: list[Row] = []
    for name in ("gemm", "collectives"):
        rows += clean(*read_csv(MEASUREMENTS / f"{name}.csv"))[0]
    return Bench(tuple(rows), datasheet())
