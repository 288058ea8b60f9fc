"""How wrong are the cost models on rows they were not fitted to? (errors, out-of-fold residuals)"""

from __future__ import annotations

from typing import Callable, Sequence

import numpy as np

from moesim.profile import Fit


def errors(predicted: np.ndarray, measured: np.ndarray, split: str) -> Fit:
    """|predicted / measured - 1| as median, mean and 90th percentile; bias = median of the signed error."""
    signed = predicted / measured - 1.0
    size = np.abs(signed)
    return Fit(
        split=split, num_rows=len(signed), median=float(np.median(size)), mean=float(np.mean(size)),
        p90=float(np.quantile(size, 0.9)), bias=float(np.median(signed)),
    )


def out_of_fold(rows: Sequence, folds: Sequence[int], train: Callable, predict: Callable) -> np.ndarray:
    """Prediction of every row by a model that never saw its fold. train(rows kept, fold) -> model; predict(model, rows). NaN where a
    fold leaves nothing to train on."""
    result = np.full(len(rows), np.nan)
    folds = np.asarray(folds)
    for fold in sorted(set(folds.tolist())):
        inside = np.flatnonzero(folds == fold)
        kept = [rows[i] for i in np.flatnonzero(folds != fold)]
        if kept:
            result[inside] = predict(train(kept, fold), [rows[i] for i in inside])
    return result


def sigma_of(predicted: np.ndarray, measured: np.ndarray) -> float:
    """Standard deviation of log residuals, from their 80% point, so that an 80% interval holds 80% of them."""
    known = np.isfinite(predicted)
    return float(np.quantile(np.abs(np.log(predicted[known] / measured[known])), 0.8) / 1.2816)
