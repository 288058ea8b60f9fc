"""How do tokens travel once a node and fan out inside it? (A plug-in: DeepEP, https://github.com/deepseek-ai/DeepEP, where installed.)

The same three calls. Not part of this package's dependencies and never run without NVLink and RDMA: what is here maps a Routing to
DeepEP's buffer calls and refuses in one line where the library is missing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd import Function

from moetrain.collectives import Communicator
from moetrain.dispatch.local import kept_rows
from moetrain.dispatch.plan import Capacity
from moetrain.kernels import Backend
from moetrain.router import Routing, count
from moetrain.seams import seam

BUFFER_BYTES = 1 << 30


@dataclass(frozen=True)
class DeepPlan:
    routing: Routing
    kept: torch.Tensor
    received: torch.Tensor
    state: dict[str, Any]


class _Send(Function):
    """Buffer.dispatch of tokens and their weights; its gradient is Buffer.combine of both along the same handle."""

    @staticmethod
    def forward(ctx, tokens, weights, experts, num_experts, buffer, state):
        per_rank, per_node, per_expert, in_rank, _ = buffer.get_dispatch_layout(experts, num_experts)
        rows, received, received_weights, _, handle, _ = buffer.dispatch(
            tokens, topk_idx=experts, topk_weights=weights, num_tokens_per_rank=per_rank, num_tokens_per_rdma_rank=per_node,
            num_tokens_per_expert=per_expert, is_token_in_rank=in_rank)
        state.update(handle=handle, experts=received)
        ctx.buffer, ctx.handle = buffer, handle
        return rows, received_weights

    @staticmethod
    def backward(ctx, grad, grad_weights):
        tokens, weights, _ = ctx.buffer.combine(grad.contiguous(), ctx.handle, topk_weights=grad_weights.contiguous())
        return tokens, weights, None, None, None, None


class _Return(Function):
    """Buffer.combine (a sum over the copies of a token); its gradient is a dispatch along the same handle."""

    @staticmethod
    def forward(ctx, rows, buffer, handle):
        ctx.buffer, ctx.handle = buffer, handle
        return buffer.combine(rows.contiguous(), handle)[0]

    @staticmethod
    def backward(ctx, grad):
        return ctx.buffer.dispatch(grad.contiguous(), handle=ctx.handle)[0], None, None


class DeepEP:
    """One copy of a token a reached rank; local experts are sorted out where it arrives, and weights are applied there."""

    def __init__(self, num_experts: int, ep: Communicator, capacity: Capacity, backend: Backend):
        try:
            import deep_ep
        except ImportError:
            raise ValueError("layout dispatcher dedup needs the deep_ep package, which is not installed; use a2a or syncfree") from None
        if capacity.factor is not None:
            raise ValueError("layout dispatcher dedup is dropless: leave out capacity_factor")
        self.ep, self.num_experts, self.local, self.kernels = ep, num_experts, num_experts // ep.size, backend
        self.buffer = deep_ep.Buffer(ep.pg, BUFFER_BYTES, BUFFER_BYTES)

    def plan(self, routing: Routing) -> DeepPlan:
        return DeepPlan(routing, routing.counts, routing.counts.new_zeros(self.local), {})

    def dispatch(self, tokens: torch.Tensor, plan: DeepPlan) -> Callable[[], tuple[torch.Tensor, torch.Tensor]]:
        state = plan.state
        routing = plan.routing
        arrived, state["weights"] = _Send.apply(tokens, routing.weights, routing.experts, self.num_experts, self.buffer, state)
        # Routes that other ranks serve are -1 here: an extra expert takes them and is then cut off.
        experts = torch.where(state["experts"] < 0, self.local, state["experts"])
        counts = count(experts, self.local + 1)
        kept = counts.clone()
        kept[-1] = 0
        state["source"], state["positions"] = kept_rows(experts, counts, kept)
        plan.received.copy_(kept[:-1])
        rows = seam(self.ep.log, "permute", self.kernels.permute, arrived, state["source"], state["positions"])
        return lambda: (rows, kept[:-1].cumsum(0).int())

    def combine(self, rows: torch.Tensor, plan: DeepPlan, weights: torch.Tensor) -> Callable[[], torch.Tensor]:
        state = plan.state
        summed = seam(self.ep.log, "unpermute", self.kernels.unpermute, rows, state["positions"], state["weights"])
        out = _Return.apply(summed, self.buffer, state["handle"])
        return lambda: out
