"""What are the small parts of a transformer: linear map, norm, gated MLP, embedding?

Every weight keeps its logical shape. Under tensor parallelism a module sees its shard of the weight; whoever calls it gathers the
tokens before a column-cut map and scatters them after a row-cut one.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd import Function
from torch.distributed.tensor import DTensor

from moetrain.collectives import Communicator, all_gather, reduce_scatter
from moetrain.params import Init, Traits, declare
from moetrain.recompute import GATHER, Recompute
from moetrain.seams import seam


def local(parameter: torch.Tensor) -> torch.Tensor:
    """This rank's shard as a plain tensor; gradients flow back with the same placement."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


class Linear(nn.Module):
    """y = x W^T (+ b), weight (out, in). ``cut``: "column" cuts the outputs over tp, "row" the inputs, None neither."""

    def __init__(self, width_in: int, width_out: int, role: str, cut: str | None = None, bias: bool = False, std: float = 0.02):
        super().__init__()
        dim = {"column": 0, "row": 1, None: None}[cut]
        declare(self, "weight", (width_out, width_in), Traits(role, Init(std=std), dim))
        self.bias = None
        if bias:
            declare(self, "bias", (width_out,), Traits(role, Init("zeros"), 0 if cut == "column" else None))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, local(self.weight), None if self.bias is None else local(self.bias))


class RMSNorm(nn.Module):
    """x / rms(x) * gain over the last dimension (https://arxiv.org/abs/1910.07467)."""

    def __init__(self, width: int, role: str = "norm", eps: float = 1e-6):
        super().__init__()
        self.eps = eps
        declare(self, "weight", (width,), Traits(role, Init("ones")))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = local(self.weight)
        return F.rms_norm(x, (x.shape[-1],), weight.to(x.dtype), self.eps)


class _SwiGLU(Function):
    """silu(gate) * up that keeps its inputs alone; silu(gate) is made again."""

    @staticmethod
    def forward(ctx, gate, up):
        ctx.save_for_backward(gate, up)
        return F.silu(gate) * up

    @staticmethod
    def backward(ctx, grad):
        gate, up = ctx.saved_tensors
        return torch.ops.aten.silu_backward(grad * up, gate), grad * F.silu(gate)


class GatedMLP(nn.Module):
    """down(silu(gate x) * up x) (SwiGLU, https://arxiv.org/abs/2002.05202)."""

    def __init__(self, width: int, inner: int, role: str, std: float, out_std: float, recompute: Recompute):
        super().__init__()
        self.rc, self.act = recompute, f"{role}_act"
        self.gate = Linear(width, inner, f"{role}_up", "column", std=std)
        self.up = Linear(width, inner, f"{role}_up", "column", std=std)
        self.down = Linear(inner, width, f"{role}_down", "row", std=out_std)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Tokens gathered over tp in, this rank's part of the sum out."""
        return self.down(self.rc("mlp_act", lambda gate, up: seam(self.rc.log, self.act, _SwiGLU.apply, gate, up), self.gate(x), self.up(x)))


class Embedding(nn.Module):
    """Token lookup, vocabulary cut over tp: each rank looks up the ids it holds; the sum is scattered along the sequence."""

    def __init__(self, vocab: int, width: int, std: float, scale: float = 1.0):
        super().__init__()
        self.scale = scale
        declare(self, "weight", (vocab, width), Traits("embedding", Init(std=std), 0))

    def forward(self, tokens: torch.Tensor, tp: Communicator) -> torch.Tensor:
        """tokens [B, S] -> [B, S/tp, d]."""
        weight = local(self.weight)
        if tp.size == 1:
            return F.embedding(tokens, weight) * self.scale
        ids = tokens - tp.rank * weight.shape[0]
        held = (ids >= 0) & (ids < weight.shape[0])
        rows = F.embedding(ids.where(held, torch.zeros_like(ids)), weight) * held.unsqueeze(-1)
        return reduce_scatter(rows * self.scale, 1, tp, "tp_scatter_embed")


def gathered(x: torch.Tensor, tp: Communicator, role: str, recompute: Recompute | None = None) -> torch.Tensor:
    """[B, S/tp, d] -> [B, S, d]. With ``recompute`` the result is not kept: backward gathers again."""
    if recompute is None or tp.size == 1:
        return all_gather(x, 1, tp, role)
    # Contiguous, or each product would keep a copy of its own.
    return recompute(GATHER, lambda x: all_gather(x, 1, tp, role).contiguous(), x)


def scattered(x: torch.Tensor, tp: Communicator, role: str) -> torch.Tensor:
    """Partial sums [B, S, d] -> [B, S/tp, d]."""
    return reduce_scatter(x, 1, tp, role)


def out_std(std: float, num_layers: int) -> float:
    """Standard deviation of projections that end in the residual stream: std / sqrt(2 L) (GPT-2)."""
    return std / math.sqrt(2 * max(1, num_layers))
