"""How do tokens reach experts that all live on this rank? (A sort and a gather.)"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from moetrain.collectives import Communicator
from moetrain.dispatch.plan import Capacity, inverse, kept_routes, rank_in_expert, sort_routes
from moetrain.kernels import Backend
from moetrain.router import Routing
from moetrain.seams import seam


@dataclass(frozen=True)
class LocalPlan:
    """``source`` [R] token of each row, ``positions`` [T, k] row of each route (-1: dropped), ``kept`` [E] rows each expert takes,
    ``received`` [local experts] rows of this rank's experts."""

    source: torch.Tensor
    positions: torch.Tensor
    kept: torch.Tensor
    received: torch.Tensor


def kept_rows(experts: torch.Tensor, counts: torch.Tensor, kept: torch.Tensor, total: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """(source [R], positions [T, k]) of the rows that are kept, sorted by expert. ``total`` = R where the caller knows it: then the host
    need not wait for the device to say."""
    order = sort_routes(experts)
    k = experts.shape[1]
    if kept is counts:
        return order // k, inverse(order).view_as(experts)
    dropped = rank_in_expert(experts, order, counts) >= kept[experts.flatten()[order]]
    total = int(kept.sum()) if total is None else total
    chosen = order[dropped.argsort(stable=True)[:total]]
    positions = torch.full((experts.numel(),), -1, device=experts.device)
    positions[chosen] = torch.arange(total, device=experts.device)
    return chosen // k, positions.view_as(experts)


class Local:
    """Every expert is here."""

    def __init__(self, num_experts: int, ep: Communicator, capacity: Capacity, backend: Backend):
        self.ep, self.capacity, self.backend = ep, capacity, backend

    def plan(self, routing: Routing) -> LocalPlan:
        counts = routing.counts
        kept = counts if self.capacity.factor is None else kept_routes(counts[None], self.capacity, routing.experts.numel())[0]
        source, positions = kept_rows(routing.experts, counts, kept)
        return LocalPlan(source, positions, kept, kept)

    def dispatch(self, tokens: torch.Tensor, plan: LocalPlan) -> Callable[[], tuple[torch.Tensor, torch.Tensor]]:
        rows = seam(self.ep.log, "permute", self.backend.permute, tokens, plan.source, plan.positions)
        return lambda: (rows, plan.kept.cumsum(0).int())

    def combine(self, rows: torch.Tensor, plan: LocalPlan, weights: torch.Tensor) -> Callable[[], torch.Tensor]:
        out = seam(self.ep.log, "unpermute", self.backend.unpermute, rows, plan.positions, weights)
        return lambda: out
