"""How do tokens reach experts on other ranks when the host must not wait? (Buffers of fixed size, offsets that stay on the device.)

Each pair of ranks has a buffer of ``capacity factor * T * k / ranks`` rows (T*k when dropless): rows beyond it are dropped, empty
places travel as zeros. Row counts follow in an equal-split exchange of their own, and every shape is known before routing.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from moetrain.collectives import Communicator, all_to_all, start_all_to_all
from moetrain.dispatch.plan import Capacity, inverse, rank_in_expert, sort_routes
from moetrain.kernels import Backend
from moetrain.router import Routing
from moetrain.seams import seam


@dataclass(frozen=True)
class FixedPlan:
    """As ExchangePlan without splits: ``source`` has -1 at empty places of the send buffer [ranks * places]."""

    source: torch.Tensor
    positions: torch.Tensor
    kept: torch.Tensor
    received: torch.Tensor
    order: torch.Tensor
    back: torch.Tensor


class SyncFree:
    """Equal-split all-to-all over padded buffers."""

    def __init__(self, num_experts: int, ep: Communicator, capacity: Capacity, backend: Backend):
        self.ep, self.capacity, self.local, self.backend = ep, capacity, num_experts // ep.size, backend

    def places(self, routes: int) -> int:
        """Rows of one pair's buffer."""
        factor = self.capacity.factor
        return routes if factor is None else min(routes, math.ceil(factor * routes / self.ep.size))

    def plan(self, routing: Routing) -> FixedPlan:
        ep, local, experts = self.ep, self.local, routing.experts
        places = self.places(experts.numel())
        order = sort_routes(experts)
        receiver = experts.flatten()[order] // local
        per_rank = routing.counts.view(ep.size, local).sum(1)
        place = rank_in_expert(receiver, torch.arange(order.numel(), device=order.device), per_rank)
        slot = torch.where(place < places, receiver * places + place, -1)
        source = torch.full((ep.size * places + 1,), -1, device=order.device)
        source[slot] = order // experts.shape[1]  # dropped routes all write the spare last place
        positions = torch.empty_like(order)
        positions[order] = slot
        kept = self._kept(routing.counts, places)
        arriving = all_to_all(kept.view(ep.size, local), None, None, ep, "count_exchange")
        arrival = self._arrival_order(arriving, places)
        return FixedPlan(source[:-1], positions.view_as(experts), kept, arriving.sum(0), arrival, inverse(arrival))

    def _kept(self, counts: torch.Tensor, places: int) -> torch.Tensor:
        queues = counts.view(self.ep.size, self.local)
        before = queues.cumsum(1) - queues
        return (places - before).clamp(min=0).minimum(queues).flatten()

    def _arrival_order(self, arriving: torch.Tensor, places: int) -> torch.Tensor:
        """Arrived places sorted by local expert, then source; empty places last. [ranks * places]"""
        ends = arriving.cumsum(1)
        place = torch.arange(places, device=arriving.device).expand(self.ep.size, -1).contiguous()
        expert = torch.searchsorted(ends, place, right=True)
        return expert.flatten().argsort(stable=True)

    def dispatch(self, tokens: torch.Tensor, plan: FixedPlan) -> Callable[[], tuple[torch.Tensor, torch.Tensor]]:
        wait = start_all_to_all(seam(self.ep.log, "permute", self.backend.permute, tokens, plan.source, plan.positions), None, None, self.ep, "dispatch")
        return lambda: (seam(self.ep.log, "permute", self.backend.permute, wait(), plan.order, plan.back.unsqueeze(-1)), plan.received.cumsum(0).int())

    def combine(self, rows: torch.Tensor, plan: FixedPlan, weights: torch.Tensor) -> Callable[[], torch.Tensor]:
        wait = start_all_to_all(seam(self.ep.log, "unpermute", self.backend.permute, rows, plan.back, plan.order.unsqueeze(-1)), None, None, self.ep, "combine")
        return lambda: seam(self.ep.log, "unpermute", self.backend.unpermute, wait(), plan.positions, weights)
