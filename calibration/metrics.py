"""How far are predictions from measurements? (Errors, ranking, scaling, intervals: numbers in, numbers out.)"""

from __future__ import annotations

import math
from itertools import combinations
from typing import Any, Sequence

import numpy as np

MIN_POINTS = 10
"""Below this many points a figure is indicative and carries no bar."""
REPEAT_SPREAD = 0.025
"""Measured pairs closer than this are ties: repeats of one configuration differ by a median of 1 to 2.5% (`repeat_spread`)."""
ALPHA = 0.2  # one minus the stated coverage of an interval


def errors(predicted: Sequence[float], measured: Sequence[float]) -> dict[str, Any]:
    """|predicted/measured - 1|: median, mean, 90th percentile, and the signed median as bias; n beside them."""
    ratio = np.asarray(predicted, float) / np.asarray(measured, float) - 1
    if not len(ratio):
        return {"n": 0}
    size = np.abs(ratio)
    return {"n": len(ratio), "median": float(np.median(size)), "mean": float(size.mean()), "p90": float(np.quantile(size, 0.9)),
            "bias": float(np.median(ratio)), "indicative": len(ratio) < MIN_POINTS}


def kendall_tau_b(predicted: Sequence[float], measured: Sequence[float], spread: float = REPEAT_SPREAD) -> float | None:
    """Kendall's tau-b with measured pairs closer than `spread` as ties; None where everything ties."""
    agree = ties_predicted = ties_measured = 0
    pairs = list(combinations(range(len(measured)), 2))
    for i, j in pairs:
        gap = _sign(measured[i], measured[j], spread)
        guess = _sign(predicted[i], predicted[j], 1e-9)
        ties_measured += gap == 0
        ties_predicted += guess == 0
        agree += gap * guess
    scale = math.sqrt((len(pairs) - ties_measured) * (len(pairs) - ties_predicted))
    return agree / scale if scale else None


def _sign(a: float, b: float, spread: float) -> int:
    if abs(a - b) <= spread * max(a, b):
        return 0
    return 1 if a > b else -1


def regret(predicted: Sequence[float], measured: Sequence[float]) -> float:
    """Throughput lost by taking the predicted best: 1 - its measured value / the measured best. Predicted ties take their worst."""
    best = max(predicted)
    return 1 - min(m for p, m in zip(predicted, measured) if p >= best * (1 - 1e-9)) / max(measured)


def kept_share_errors(num_gpus: Sequence[int], predicted: Sequence[float], measured: Sequence[float]) -> list[float]:
    """Along a scaling series: predicted minus measured share of the smallest size's rate that is kept, one value a larger size."""
    order = sorted(range(len(num_gpus)), key=lambda i: num_gpus[i])
    first = order[0]
    return [predicted[i] / predicted[first] - measured[i] / measured[first] for i in order[1:]]


def intervals(low: Sequence[float], high: Sequence[float], measured: Sequence[float]) -> dict[str, Any]:
    """Share inside the band, median width and mean 80% interval score, both relative to the measured value
    (https://doi.org/10.1198/016214506000001437)."""
    l, h, y = (np.asarray(v, float) for v in (low, high, measured))
    if not len(y):
        return {"n": 0}
    outside = np.maximum(l - y, 0) + np.maximum(y - h, 0)
    return {"n": len(y), "coverage": float(np.mean(outside == 0)), "width": float(np.median((h - l) / y)),
            "score": float(np.mean((h - l + 2 / ALPHA * outside) / y)), "indicative": len(y) < MIN_POINTS}


def repeat_spread(groups: Sequence[Sequence[float]]) -> dict[str, Any]:
    """(max - min) / mean of groups of repeated measurements: n groups, median and 90th percentile."""
    spreads = [(max(g) - min(g)) / (sum(g) / len(g)) for g in groups if len(g) > 1]
    if not spreads:
        return {"n": 0}
    return {"n": len(spreads), "median": float(np.median(spreads)), "p90": float(np.quantile(spreads, 0.9))}
