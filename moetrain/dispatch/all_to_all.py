"""How do tokens reach experts on other ranks when the host may look at the counts? (All-to-all with uneven splits.)

One exchange of counts a plan; the host reads its split sizes from it, which is the one device-to-host wait of a layer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from moetrain.collectives import Communicator, gather_forward, start_all_to_all
from moetrain.dispatch.local import kept_rows
from moetrain.dispatch.plan import Capacity, expert_major, inverse, kept_routes
from moetrain.kernels import Backend
from moetrain.router import Routing
from moetrain.seams import seam


@dataclass(frozen=True)
class ExchangePlan:
    """As LocalPlan, and ``send``/``receive`` rows to and from each rank, ``order``/``back`` between arrival and expert order."""

    source: torch.Tensor
    positions: torch.Tensor
    kept: torch.Tensor
    received: torch.Tensor
    send: list[int]
    receive: list[int]
    order: torch.Tensor
    back: torch.Tensor


class AllToAll:
    """NCCL's (or gloo's) all-to-all with split sizes."""

    def __init__(self, num_experts: int, ep: Communicator, capacity: Capacity, backend: Backend):
        self.ep, self.capacity, self.local, self.backend = ep, capacity, num_experts // ep.size, backend

    def plan(self, routing: Routing) -> ExchangePlan:
        ep, local = self.ep, self.local
        asked = gather_forward(routing.counts[None], 0, ep, "count_exchange", "forward")
        every = kept_routes(asked, self.capacity, routing.experts.numel())
        kept = routing.counts if every is asked else every[ep.rank]
        arriving = every[:, ep.rank * local:(ep.rank + 1) * local]
        send, receive = torch.stack([kept.view(ep.size, local).sum(1), arriving.sum(1)]).tolist()  # the host waits here, once
        source, positions = kept_rows(routing.experts, routing.counts, kept, sum(send))
        order = expert_major(arriving, sum(receive))
        return ExchangePlan(source, positions, kept, arriving.sum(0), send, receive, order, inverse(order))

    def dispatch(self, tokens: torch.Tensor, plan: ExchangePlan) -> Callable[[], tuple[torch.Tensor, torch.Tensor]]:
        wait = start_all_to_all(seam(self.ep.log, "permute", self.backend.permute, tokens, plan.source, plan.positions), plan.send, plan.receive, self.ep, "dispatch")
        return lambda: (seam(self.ep.log, "permute", self.backend.permute, wait(), plan.order, plan.back.unsqueeze(-1)), plan.received.cumsum(0).int())

    def combine(self, rows: torch.Tensor, plan: ExchangePlan, weights: torch.Tensor) -> Callable[[], torch.Tensor]:
        wait = start_all_to_all(seam(self.ep.log, "unpermute", self.backend.permute, rows, plan.back, plan.order.unsqueeze(-1)), plan.receive, plan.send, self.ep, "combine")
        return lambda: seam(self.ep.log, "unpermute", self.backend.unpermute, wait(), plan.positions, weights)
