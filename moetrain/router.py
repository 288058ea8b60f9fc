"""Which experts does each token go to, and with which weights? (Learned top-k routing, and the modes that stand in for it.)

Scores are softmax or sigmoid of FP32 logits. The balance bias (loss-free balancing, https://arxiv.org/abs/2408.15664) enters the
choice only, never the weights. With groups, a group's score is the sum of its two best experts (https://arxiv.org/abs/2412.19437).
Ties go to the lower expert number.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd import Function

from moesim.spec import ModelSpec
from moetrain import forced
from moetrain.kernels import Backend
from moetrain.kernels.reference import TINY, wide
from moetrain.layers import local
from moetrain.params import Init, Traits, declare


class Routing(NamedTuple):
    """Where T tokens go: ``weights`` [T, k] float32 with gradient, ``experts`` [T, k] int64, ``counts`` [E] int64 routes an expert
    was asked to take. ``logits`` [T, E] are what the losses read."""

    weights: torch.Tensor
    experts: torch.Tensor
    counts: torch.Tensor
    logits: torch.Tensor

    def part(self, rows: slice) -> Routing:
        """The routing of some of the tokens."""
        experts = self.experts[rows]
        return Routing(self.weights[rows], experts, count(experts, self.counts.numel()), self.logits[rows])


def count(experts: torch.Tensor, num_experts: int) -> torch.Tensor:
    """Routes to each expert, [E] int64. Not torch.bincount, for which a GPU's host waits."""
    flat = experts.flatten()
    return torch.zeros(num_experts, dtype=torch.int64, device=flat.device).scatter_add_(0, flat, torch.ones_like(flat))


def scores(logits: torch.Tensor, spec: ModelSpec) -> torch.Tensor:
    """What a router chooses by and weighs with, [T, E]."""
    return logits.softmax(-1) if spec.router == "softmax" else logits.sigmoid()


class _WideLinear(Function):
    """x W^T in float32 of tensors of any precision, which alone are kept: a float32 copy of the tokens would be the largest
    activation of a router."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return F.linear(wide(x), wide(weight))

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        grad_x = (grad @ wide(weight)).to(x.dtype) if ctx.needs_input_grad[0] else None
        return grad_x, (grad.t() @ wide(x)).to(weight.dtype) if ctx.needs_input_grad[1] else None


class Router(nn.Module):
    """Logits, scores, choice and weights of one layer. ``mode`` learned | balanced | random | replay: the others keep the scores'
    gradient path but choose without them."""

    def __init__(self, spec: ModelSpec, layer: int, backend: Backend, mode: str = "learned", std: float = 0.02, record: forced.Record | None = None,
                 use_bias: bool = False):
        super().__init__()
        self.spec, self.layer, self.backend = spec, layer, backend
        self.mode, self.record, self.use_bias = mode, record, use_bias
        declare(self, "weight", (spec.num_experts, spec.hidden_size), Traits("router", Init(std=std)))
        self.bias = None
        if spec.router_bias:
            declare(self, "bias", (spec.num_experts,), Traits("router", Init("zeros")))
        self.register_buffer("balance_bias", torch.zeros(spec.num_experts, dtype=torch.float32))

    def forward(self, x: torch.Tensor, ids: torch.Tensor) -> Routing:
        """x [T, d], ids [T] token numbers in the run."""
        spec = self.spec
        logits = _WideLinear.apply(x, local(self.weight))
        if self.bias is not None:
            logits = logits + wide(local(self.bias))
        if self.mode == "learned":
            weights, experts, counts = self.backend.route(
                logits, spec.top_k, self.balance_bias if self.use_bias else None, score=spec.router, num_groups=spec.num_expert_groups,
                top_k_groups=spec.top_k_groups, normalize=spec.normalize_top_k, scale=spec.routed_scale)
            return Routing(weights, experts.long(), counts.long(), logits)
        experts = forced.choose(self.mode, ids, self.layer, spec.num_experts, spec.top_k, self.record)
        weights = scores(logits, spec).gather(-1, experts)
        if spec.normalize_top_k:
            weights = weights / (weights.sum(-1, keepdim=True) + TINY)
        return Routing(weights * spec.routed_scale, experts, count(experts, spec.num_experts), logits)
