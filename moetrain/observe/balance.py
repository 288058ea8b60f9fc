"""How unevenly did routed rows fall on experts and ranks? (Pure functions of arrays of counts.)

Three figures that an auxiliary loss can't make look better than they are: rows of the busiest over the mean, for ranks and for
experts; 1 - H / log N, where H is the entropy of the shares of N experts (0: even, 1: all rows on one); and the share of
requested rows that were dropped. Experts lie contiguously on ranks, as in `moesim.routing`: rank r of ep holds experts
r*E/ep ... (r+1)*E/ep - 1. Counts are rows: tokens times top_k, of one layer and step, over all sources.

Letters of shapes: L layers, E experts, R ranks; "..." any leading axes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np


def max_over_mean(counts: np.ndarray) -> np.ndarray:
    """[..., N] counts -> [...]: the largest over the mean; 1 where there are no rows at all."""
    counts = np.asarray(counts, dtype=np.float64)
    mean = counts.mean(-1)
    return np.where(mean > 0, counts.max(-1) / np.where(mean > 0, mean, 1.0), 1.0)


def rank_rows(counts: np.ndarray, ep: int) -> np.ndarray:
    """[..., E] rows an expert -> [..., ep] rows a rank. ValueError if ep does not divide E."""
    counts = np.asarray(counts)
    if ep < 1 or counts.shape[-1] % ep:
        raise ValueError(f"balance: ep {ep} must divide {counts.shape[-1]} experts")
    return counts.reshape(*counts.shape[:-1], ep, -1).sum(-1)


def entropy_index(counts: np.ndarray) -> np.ndarray:
    """[..., N] counts -> [...]: 1 - H / log N with natural logarithms, 0 log 0 = 0; 0 for a single expert or no rows."""
    counts = np.asarray(counts, dtype=np.float64)
    total = counts.sum(-1, keepdims=True)
    if counts.shape[-1] == 1:
        return np.zeros(counts.shape[:-1])
    shares = np.where(total > 0, counts / np.where(total > 0, total, 1.0), 1.0 / counts.shape[-1])
    entropy = -(shares * np.log(np.where(shares > 0, shares, 1.0))).sum(-1)
    return np.clip(1.0 - entropy / np.log(counts.shape[-1]), 0.0, 1.0)


def drop_fraction(requested: np.ndarray, kept: np.ndarray) -> np.ndarray:
    """[..., E] requested and kept rows -> [...]: the share dropped. ValueError where more was kept than requested."""
    requested, kept = np.asarray(requested, dtype=np.float64), np.asarray(kept, dtype=np.float64)
    if requested.shape != kept.shape or (kept > requested).any():
        raise ValueError(f"balance: kept rows {kept.shape} must not exceed requested rows {requested.shape} of any expert")
    total = requested.sum(-1)
    return np.where(total > 0, 1.0 - kept.sum(-1) / np.where(total > 0, total, 1.0), 0.0)


@dataclass(frozen=True)
class Balance:
    """The figures of one step: each is the mean over layers, with the worst layer beside it; rows are sums over layers.

    routing: learned | balanced | random | replay, how experts were chosen. capacity_factor None: dropless."""

    max_over_mean_rank: float
    max_over_mean_expert: float
    entropy_index: float
    drop_fraction: float
    worst_rank: float
    worst_expert: float
    worst_entropy: float
    worst_drop: float
    requested_rows: int
    kept_rows: int
    routing: str = "learned"
    capacity_factor: float | None = None
    capacity_scope: str = "expert"


def layer_figures(requested: np.ndarray, kept: np.ndarray | None, ep: int) -> dict[str, np.ndarray]:
    """Four arrays [L] from rows [L, E]: max_over_mean_rank and max_over_mean_expert of what was kept (what was computed),
    entropy_index of what was requested (what the router wants), drop_fraction."""
    requested = np.atleast_2d(requested)
    kept = requested if kept is None else np.atleast_2d(kept)
    return {
        "max_over_mean_rank": max_over_mean(rank_rows(kept, ep)), "max_over_mean_expert": max_over_mean(kept),
        "entropy_index": entropy_index(requested), "drop_fraction": drop_fraction(requested, kept),
    }  # fmt: skip


def summarise(requested: np.ndarray, kept: np.ndarray | None = None, ep: int = 1, rank_ratio: np.ndarray | None = None, **mode: Any) -> Balance:
    """The Balance of one step from rows [L, E]. rank_ratio [L]: max/mean rows of ranks where they were measured by microbatch,
    which is what time follows (rows summed over a step look more even). ``mode``: routing, capacity_factor, capacity_scope."""
    figures = layer_figures(requested, kept, ep)
    if rank_ratio is not None:
        figures["max_over_mean_rank"] = np.asarray(rank_ratio, dtype=np.float64)
    means = {name: float(values.mean()) for name, values in figures.items()}
    worst = {f"worst_{short}": float(values.max()) for short, values in zip(("rank", "expert", "entropy", "drop"), figures.values(), strict=True)}
    rows = {"requested_rows": int(np.sum(requested)), "kept_rows": int(np.sum(requested if kept is None else kept))}
    return Balance(**means, **worst, **rows, **mode)


def of_loads(loads: Mapping[int, Any], ep: int, **mode: Any) -> tuple[Balance, dict[str, dict[str, float]], dict[str, np.ndarray]]:
    """(Balance, StepRecord.layers, rows for `RunLog.step`) from what the trainer collects by layer: objects with requested and
    kept [E] (tensors or arrays) and, where measured, busiest_rank and mean_rank (rows of a microbatch). ValueError without layers."""
    if not loads:
        raise ValueError("balance: no MoE layers")
    layers = sorted(loads)
    requested, kept = (np.stack([np.asarray(getattr(loads[i], name)) for i in layers]) for name in ("requested", "kept"))
    measured = all(getattr(loads[i], "mean_rank", 0) > 0 for i in layers)
    ratio = np.array([loads[i].busiest_rank / loads[i].mean_rank for i in layers]) if measured else None
    figures = layer_figures(requested, kept, ep) | ({} if ratio is None else {"max_over_mean_rank": ratio})
    by_layer = {str(layer): {name: float(values[i]) for name, values in figures.items()} for i, layer in enumerate(layers)}
    return summarise(requested, kept, ep, ratio, **mode), by_layer, {str(layer): requested[i] for i, layer in enumerate(layers)}


def as_fields(balance: Balance) -> dict[str, Any]:
    """The figures as a log line holds them."""
    return asdict(balance)
