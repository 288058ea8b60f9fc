"""What does a mixture-of-experts layer do? (route -> plan -> dispatch -> experts -> combine, shared experts beside it.)

The same forward whatever moves the rows. With ``chunks`` > 1 the tokens are cut and one chunk travels while another computes; with
``overlap_shared`` the shared experts compute while the first chunk travels.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from moesim.spec import ModelSpec
from moetrain.balance import Balance, attach
from moetrain.dispatch import dispatcher
from moetrain.dispatch.plan import Capacity
from moetrain.experts import Experts
from moetrain.forced import Record
from moetrain.kernels import Backend
from moetrain.layers import GatedMLP, Linear, gathered, scattered
from moetrain.mesh import Mesh
from moetrain.place import Place
from moetrain.recompute import Recompute
from moetrain.router import Router, Routing
from moetrain.seams import begin, seam
from moetrain.statistics import RoutingStatistics


@dataclass(frozen=True)
class MoEOptions:
    """How the layer runs, beside what it computes."""

    backend: Backend
    balance: Balance = Balance()
    capacity: Capacity = Capacity()
    mode: str = "learned"
    record: Record | None = None
    bias_rate: float = 0.0
    chunks: int = 1
    overlap_shared: bool = False
    tokens_per_step: int = 1


class MoE(nn.Module):
    """One layer's router, experts and shared branch."""

    def __init__(self, spec: ModelSpec, layer: int, mesh: Mesh, options: MoEOptions, stds: tuple[float, float],
                 recompute: Recompute, statistics: RoutingStatistics):
        super().__init__()
        self.layer, self.mesh, self.options, self.rc, self.statistics = layer, mesh, options, recompute, statistics
        use_bias = spec.score_correction_bias or options.bias_rate > 0
        self.router = Router(spec, layer, options.backend, options.mode, stds[0], options.record, use_bias)
        self.experts = Experts(spec, options.backend, stds, recompute)
        d, shared = spec.hidden_size, spec.shared_intermediate_size
        self.shared = GatedMLP(d, shared, "shared", *stds, recompute) if shared else None
        self.shared_gate = Linear(d, 1, "shared_gate", std=stds[0]) if shared and spec.shared_expert_gate else None
        self.dispatcher = dispatcher(mesh.layout.dispatcher, spec.num_experts, mesh["ep"], options.capacity, options.backend)

    def forward(self, x: torch.Tensor, where: Place) -> tuple[torch.Tensor, torch.Tensor | None]:
        """x [B, S, d] -> (routed branch, shared branch or None), each [B, S, d]."""
        tokens = x.flatten(0, 1)
        tp = self.mesh["tp"]
        ids = where.token_ids(tp.rank, tp.size)
        routing = self.rc("router", lambda x: self.router(x, ids), tokens)
        size = -(-tokens.shape[0] // self.options.chunks)  # whole numbers, not tensors: of a fake one nobody knows the value
        begin(self.rc.log, "plan")
        parts = [slice(start, min(start + size, tokens.shape[0])) for start in range(0, tokens.shape[0], size)]
        plans = [self.dispatcher.plan(routing if len(parts) == 1 else routing.part(part)) for part in parts]
        self.statistics.record(self.layer, routing, plans, replay=self.rc.replaying)
        travelling = self.dispatcher.dispatch(tokens[parts[0]], plans[0])
        shared = self._shared(x) if self.options.overlap_shared else None
        routed = self._run(tokens, routing, parts, plans, travelling).view_as(x)
        if self.shared is not None and shared is None:
            shared = self._shared(x)
        return self._with_losses(routed, routing, x.shape[0]), shared

    def _run(self, tokens: torch.Tensor, routing: Routing, parts, plans, travelling) -> torch.Tensor:
        """Experts on each part; the next part's dispatch and the last one's combine are under way meanwhile."""
        returning = []
        for i, part in enumerate(parts):
            rows, offsets = travelling()
            if i + 1 < len(parts):
                travelling = self.dispatcher.dispatch(tokens[parts[i + 1]], plans[i + 1])
            out = self.rc.run(self.experts, rows, offsets)
            returning.append(self.dispatcher.combine(out, plans[i], routing.weights[part]))
        return torch.cat([wait() for wait in returning]) if len(returning) > 1 else returning[0]()

    def _shared(self, x: torch.Tensor) -> torch.Tensor | None:
        if self.shared is None:
            return None
        tp = self.mesh["tp"]
        out = scattered(self.rc("shared", self.shared, gathered(x, tp, "tp_gather_shared_up", self.rc)), tp, "tp_scatter_shared_down")
        return out if self.shared_gate is None else out * self.shared_gate(x).sigmoid()

    def _with_losses(self, routed: torch.Tensor, routing: Routing, sequences: int) -> torch.Tensor:
        balance = self.options.balance
        if not (balance.aux_loss or balance.z_loss) or not torch.is_grad_enabled():
            return routed
        share = balance.share(routing, sequences, self.mesh["data"])
        losses = self.rc("router", lambda x: seam(self.rc.log, "balance", balance.loss, x, share, self.router.spec, self.options.tokens_per_step), routing.logits)
        self.statistics.losses(self.layer, *losses, replay=self.rc.replaying)
        return attach(routed, sum(losses))
