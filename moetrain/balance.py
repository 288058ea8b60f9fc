"""What keeps experts evenly loaded: an auxiliary loss, a penalty on large logits, or a bias that needs no loss?

Losses reach the router through `attach`: the layer's output passes unchanged and the loss receives gradient 1, so they work under
pipelines, recompute and accumulation alike. Every loss is a sum over tokens divided by the tokens of the whole step, as the
cross entropy is. Balance loss (https://arxiv.org/abs/2101.03961): E/k * sum_e f_e P_e with f_e the share of routes, P_e the mean
normalised score; z-loss (https://arxiv.org/abs/2202.08906): mean of logsumexp(logits)^2.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.autograd import Function

from moesim.spec import ModelSpec
from moetrain.collectives import Communicator, all_reduce_
from moetrain.router import Routing, scores


class _Attach(Function):
    @staticmethod
    def forward(ctx, x, loss):
        ctx.shape, ctx.dtype = loss.shape, loss.dtype
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return grad, grad.new_ones(ctx.shape, dtype=ctx.dtype)


def attach(x: torch.Tensor, loss: torch.Tensor) -> torch.Tensor:
    """``x``; whatever backward does to it, ``loss`` gets gradient 1."""
    return _Attach.apply(x, loss)


@dataclass(frozen=True)
class Balance:
    """Weights of the two losses, and over what the routes of the balance loss are counted: ``scope`` micro (the tokens of one rank's
    microbatch) | sequence (of each, the tokens this rank has: under cp or tp a part of it) | global (the microbatch of every data rank
    together). The first two depend on the layout, as they do wherever they are defined."""

    aux_loss: float = 0.0
    scope: str = "global"
    z_loss: float = 0.0

    @torch.no_grad()
    def share(self, routing: Routing, sequences: int, data: Communicator) -> torch.Tensor:
        """Share of routes that each expert got, [1, E], or [sequences, E] where each sequence counts for itself: ``sequences`` of
        equal length make up the T tokens. A collective call in scope global."""
        num_experts, routes = routing.counts.numel(), routing.experts.numel()
        if self.scope == "sequence":
            own = torch.nn.functional.one_hot(routing.experts, num_experts).view(sequences, -1, num_experts).sum(1)
            return own / (routes // sequences)
        counts = routing.counts.float()
        if self.scope == "global" and self.aux_loss:
            counts, routes = all_reduce_(counts, data, "balance_counts"), routes * data.size
        return (counts / routes)[None]

    def loss(self, logits: torch.Tensor, share: torch.Tensor, spec: ModelSpec, tokens_per_step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(balance loss, z-loss) of ``logits`` [T, E], each already weighted and divided: add them to the step's loss."""
        num_experts = logits.shape[1]
        score = scores(logits, spec)
        score = score / score.sum(-1, keepdim=True)
        # The mean over T tokens, times T: what is divided by is the tokens of the whole step.
        balance = num_experts * (share * score.view(share.shape[0], -1, num_experts).sum(1)).sum() * (self.aux_loss / tokens_per_step)
        z = logits.logsumexp(-1).square().sum() * (self.z_loss / tokens_per_step)
        return balance, z


@torch.no_grad()
def update_bias(bias: torch.Tensor, counts: torch.Tensor, rate: float) -> None:
    """Loss-free balancing: an expert with less than the mean of the step's ``counts`` [E] (of all ranks) is raised by ``rate``, one
    with more lowered (https://arxiv.org/abs/2408.15664, sign form)."""
    counts = counts.float()
    bias.add_(torch.sign(counts.mean() - counts), alpha=rate)
