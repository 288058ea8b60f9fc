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
    microbatch) | sequence | global (the microbatch of every data rank together)."""

    aux_loss: float = 0.0
    scope: str = "global"
    z_loss: float = 0.0

    def loss(self, routing: Routing, spec: ModelSpec, sequences: int, tokens_per_step: int, data: Communicator) -> tuple[torch.Tensor, torch.Tensor]:
        """(balance loss, z-loss), each already weighted and divided: add them to the step's loss. ``sequences`` of equal length
        make up the T tokens."""
        tokens, k = routing.experts.shape
        score = scores(routing.logits, spec)
        score = score / score.sum(-1, keepdim=True)
        balance = self._balance(routing, score, sequences, k, data) * (self.aux_loss / tokens_per_step)
        z = routing.logits.logsumexp(-1).square().sum() * (self.z_loss / tokens_per_step)
        return balance, z

    def _balance(self, routing: Routing, score: torch.Tensor, sequences: int, k: int, data: Communicator) -> torch.Tensor:
        """Balance loss times the T tokens that it is a mean over."""
        tokens, num_experts = score.shape
        if self.scope == "sequence":
            own = torch.nn.functional.one_hot(routing.experts, num_experts).view(sequences, -1, num_experts).sum(1)
            share = own / (tokens // sequences * k)
            return num_experts * (share * score.view(sequences, -1, num_experts).sum(1)).sum()
        counts, total = routing.counts.float(), tokens * k
        if self.scope == "global":
            counts, total = all_reduce_(counts.clone(), data, "balance_counts"), total * data.size
        return num_experts * (counts / total * score.sum(0)).sum()


@torch.no_grad()
def update_bias(bias: torch.Tensor, counts: torch.Tensor, rate: float) -> None:
    """Loss-free balancing: an expert with less than the mean of the step's ``counts`` [E] (of all ranks) is raised by ``rate``, one
    with more lowered (https://arxiv.org/abs/2408.15664, sign form)."""
    counts = counts.float()
    bias.add_(torch.sign(counts.mean() - counts), alpha=rate)
