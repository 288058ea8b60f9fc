"""How were tokens routed in this step? (Counted once, whatever recompute, accumulation or a pipeline does.)

Counts stay on the device until the step ends, when one all-reduce sums them over the ranks that see different tokens, and a second,
for the report alone, finds the busiest rank.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from moetrain.collectives import Communicator, all_reduce_
from moetrain.router import Routing


@dataclass(frozen=True)
class LayerLoad:
    """One layer over one step: ``requested`` and ``kept`` routes of each expert [E], rows that the busiest rank received in its
    busiest microbatch (``busiest_rank``) and a rank on average (``mean_rank``), and the two losses (already weighted)."""

    requested: torch.Tensor
    kept: torch.Tensor
    busiest_rank: float
    mean_rank: float
    balance_loss: float
    z_loss: float

    @property
    def dropped(self) -> int:
        return int(self.requested.sum() - self.kept.sum())


class RoutingStatistics:
    """Sums of a step by layer. ``on`` is false outside training steps (validation, warm-up of shapes)."""

    def __init__(self, num_experts: int):
        self.on, self.num_experts = True, num_experts
        self._sums: dict[int, torch.Tensor] = {}
        self._rows: dict[int, list[torch.Tensor]] = {}

    def record(self, layer: int, routing: Routing, plans, replay: bool) -> None:
        """Counts of one microbatch; nothing when the forward is a replay."""
        if replay or not self.on:
            return
        sums = self._sum(layer, routing.counts.device)
        sums[: self.num_experts] += routing.counts
        for plan in plans:
            sums[self.num_experts: 2 * self.num_experts] += plan.kept
        self._rows.setdefault(layer, []).append(sum(plan.received.sum() for plan in plans).double())

    def losses(self, layer: int, balance: torch.Tensor, z: torch.Tensor, replay: bool) -> None:
        if not replay and self.on:
            self._sum(layer, balance.device)[-2:] += torch.stack([balance.detach(), z.detach()]).double()

    def _sum(self, layer: int, device: torch.device) -> torch.Tensor:
        if layer not in self._sums:
            self._sums[layer] = torch.zeros(2 * self.num_experts + 2, dtype=torch.float64, device=device)
        return self._sums[layer]

    def collect(self, data: Communicator) -> dict[int, LayerLoad]:
        """The step's loads of the layers of this stage, summed over ``data``, and a fresh start. A collective call."""
        layers = sorted(self._sums)
        if not layers:
            return {}
        sums = all_reduce_(torch.stack([self._sums[i] for i in layers]), data, "router_stats", phase="step").cpu()
        busiest = torch.stack([torch.stack(self._rows[i]).max() for i in layers])
        busiest = all_reduce_(busiest, data, "report", dist.ReduceOp.MAX, phase="step").tolist()
        visits = [data.size * len(self._rows[i]) for i in layers]
        self._sums, self._rows = {}, {}
        e = self.num_experts
        return {i: LayerLoad(s[:e].long(), s[e:2 * e].long(), most, float(s[e:2 * e].sum()) / n, float(s[-2]), float(s[-1]))
                for i, s, most, n in zip(layers, sums, busiest, visits)}
