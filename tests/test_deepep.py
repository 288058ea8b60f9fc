"""Does the DeepEP plug-in compute what the plain all-to-all does? (Against a stand-in for the library, over gloo.)

The stand-in has the four calls that the plug-in uses, with the shapes and meanings that DeepEP documents for its normal kernels
(https://github.com/deepseek-ai/DeepEP): one copy of a token a rank, -1 where another rank serves a route. The library itself needs
NVLink and was not run.
"""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from moesim.ops import Group
from moetrain.collectives import Communicator
from moetrain.dispatch import dispatcher
from moetrain.dispatch.plan import Capacity
from moetrain.kernels import backend
from moetrain.router import Routing, count
from moetrain.testing import run_ranks

TOKENS, WIDTH, EXPERTS, TOP_K = 12, 8, 6, 3


class Buffer:
    """The stand-in."""

    def __init__(self, group, nvl_bytes, rdma_bytes):
        self.group, self.ranks = group, dist.get_world_size(group)

    def get_dispatch_layout(self, topk_idx, num_experts):
        local = num_experts // self.ranks
        in_rank = torch.stack([((topk_idx // local) == r).any(1) for r in range(self.ranks)], 1)
        return in_rank.sum(0), None, torch.bincount(topk_idx.flatten(), minlength=num_experts), in_rank, None

    def _send(self, x, send, receive):
        out = x.new_empty((sum(receive), *x.shape[1:]))
        dist.all_to_all_single(out, x.contiguous(), receive, send, group=self.group)
        return out

    def dispatch(self, x, handle=None, topk_idx=None, topk_weights=None, num_tokens_per_rank=None, num_tokens_per_rdma_rank=None,
                 num_tokens_per_expert=None, is_token_in_rank=None):
        if handle is not None:
            return self._send(x[handle.rows], handle.send, handle.receive), None, None, None, handle, None
        rows = torch.cat([is_token_in_rank[:, r].nonzero().flatten() for r in range(self.ranks)])
        send = num_tokens_per_rank.tolist()
        receive = torch.empty_like(num_tokens_per_rank)
        dist.all_to_all_single(receive, num_tokens_per_rank, group=self.group)
        handle = SimpleNamespace(rows=rows, send=send, receive=receive.tolist(), tokens=x.shape[0])
        local, me = num_tokens_per_expert.numel() // self.ranks, dist.get_rank(self.group)
        experts = self._send(topk_idx[rows], handle.send, handle.receive)
        mine = experts // local == me
        weights = self._send(topk_weights[rows], handle.send, handle.receive) * mine
        return self._send(x[rows], handle.send, handle.receive), torch.where(mine, experts - me * local, -1), weights, None, handle, None

    def combine(self, x, handle, topk_weights=None):
        def back(values):
            arrived = self._send(values, handle.receive, handle.send)
            return values.new_zeros((handle.tokens, *values.shape[1:])).index_add(0, handle.rows, arrived)

        return back(x), None if topk_weights is None else back(topk_weights), None


def through(name: str, rank: int, world: int) -> list[torch.Tensor]:
    """Output and gradients of tokens and weights for a token-dependent expert, under one form of dispatch."""
    ep = Communicator("ep", world, rank, dist.group.WORLD, Group(world))
    generator = torch.Generator().manual_seed(rank)
    tokens = torch.randn(TOKENS, WIDTH, generator=generator, requires_grad=True)
    experts = torch.stack([torch.randperm(EXPERTS, generator=generator)[:TOP_K] for _ in range(TOKENS)])
    weights = torch.rand(TOKENS, TOP_K, generator=generator, requires_grad=True)
    form = dispatcher(name, EXPERTS, ep, Capacity(), backend("reference"))
    plan = form.plan(Routing(weights, experts, count(experts, EXPERTS), torch.zeros(TOKENS, EXPERTS)))
    rows, offsets = form.dispatch(tokens, plan)()
    expert = torch.searchsorted(offsets, torch.arange(rows.shape[0], dtype=offsets.dtype), right=True) + rank * (EXPERTS // world)
    out = form.combine(rows.square() * (expert + 1).unsqueeze(-1), plan, weights)()
    (out * torch.arange(1, WIDTH + 1)).sum().backward()
    return [out.detach(), tokens.grad, weights.grad, plan.received]


def both(rank: int, world: int):
    module = ModuleType("deep_ep")
    module.Buffer = Buffer
    sys.modules["deep_ep"] = module
    return through("alltoall", rank, world), through("dedup", rank, world)


@pytest.mark.parametrize("world", [2, 3])
def test_one_copy_a_rank_computes_what_one_copy_a_route_does(world):
    for plain, plug_in in run_ranks(both, world):
        for one, other in zip(plain, plug_in):
            assert other == pytest.approx(one, rel=1e-5, abs=1e-5)


def test_it_is_refused_where_the_library_is_missing():
    with pytest.raises(ValueError, match="deep_ep package"):
        dispatcher("dedup", 4, Communicator("ep", 2), Capacity(), backend("reference"))
