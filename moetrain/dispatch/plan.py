"""Which row goes where? (Integer bookkeeping of dispatch: capacity, order of rows, splits. Exact, deterministic, no gradient.)

Rows travel sorted by expert, tokens of one expert in token order. Capacity keeps the first rows: of each expert over the group's
ranks in rank order (scope expert), or of each receiving rank in the order local expert, then source rank (scope rank).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Capacity:
    """``factor`` times the mean load is what one expert (or one receiving rank) takes; None: dropless."""

    factor: float | None = None
    scope: str = "expert"


def kept_routes(counts: torch.Tensor, capacity: Capacity, routes: int) -> torch.Tensor:
    """Routes that survive capacity, [ranks, E], of ``counts`` [ranks, E] asked for; ``routes`` = tokens * k of one rank."""
    if capacity.factor is None:
        return counts
    ranks, num_experts = counts.shape
    if capacity.scope == "expert":
        limit = math.ceil(capacity.factor * routes * ranks / num_experts)
        return _first(counts, limit)
    local = num_experts // ranks
    limit = math.ceil(capacity.factor * routes)
    # [source, receiver, local expert] -> for each receiver a queue ordered (local expert, source).
    queues = counts.view(ranks, ranks, local).permute(2, 0, 1).reshape(local * ranks, ranks)
    return _first(queues, limit).view(local, ranks, ranks).permute(1, 2, 0).reshape(ranks, num_experts)


def _first(queue: torch.Tensor, limit: int) -> torch.Tensor:
    """What is left of each column's entries when only the first ``limit`` units of the column are taken."""
    before = queue.cumsum(0) - queue
    return (limit - before).clamp(min=0).minimum(queue)


def sort_routes(experts: torch.Tensor) -> torch.Tensor:
    """Route numbers t*k + j of ``experts`` [T, k], sorted by expert, then token: [T*k]."""
    return experts.flatten().argsort(stable=True)


def rank_in_expert(experts: torch.Tensor, order: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """For each sorted route, how many routes of the same expert come before it: [T*k]."""
    starts = counts.cumsum(0) - counts
    return torch.arange(order.numel(), device=order.device) - starts[experts.flatten()[order]]


def expert_major(counts: torch.Tensor, rows: int) -> torch.Tensor:
    """Rows that arrived source by source, each source's sorted by local expert (``counts`` [sources, local experts]): the order
    that sorts them by local expert, then source. [rows = sum(counts), which the caller knows without asking the device]"""
    sources, local = counts.shape
    keys = torch.arange(local, device=counts.device).repeat(sources)
    return keys.repeat_interleave(counts.flatten(), output_size=rows).argsort(stable=True)


def inverse(order: torch.Tensor) -> torch.Tensor:
    """The permutation that undoes ``order``."""
    out = torch.empty_like(order)
    out[order] = torch.arange(order.numel(), device=order.device)
    return out
