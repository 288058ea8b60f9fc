"""What do the experts of one rank compute on rows sorted by expert? (Two grouped products and a gated activation.)

Weights are stacks (experts, ...): `gate_up` (E, 2, f, d), `down` (E, d, f). On the expert mesh dimension 0 is cut over ep.
"""

from __future__ import annotations

import torch
from torch import nn

from moesim.spec import ModelSpec
from moetrain.kernels import Backend
from moetrain.layers import local
from moetrain.params import Init, Traits, declare
from moetrain.recompute import Recompute
from moetrain.seams import seam


class Experts(nn.Module):
    """All routed experts of a layer (or, under expert parallelism, this rank's). FSDP2 wraps it by itself."""

    def __init__(self, spec: ModelSpec, backend: Backend, stds: tuple[float, float], recompute: Recompute):
        super().__init__()
        self.backend, self.rc = backend, recompute
        e, d, f = spec.num_experts, spec.hidden_size, spec.moe_intermediate_size
        declare(self, "gate_up", (e, 2, f, d), Traits("expert_up", Init(std=stds[0]), expert=True))
        declare(self, "down", (e, d, f), Traits("expert_down", Init(std=stds[1]), expert=True))
        self.gate_up_bias = self.down_bias = None
        if spec.expert_bias:
            declare(self, "gate_up_bias", (e, 2, f), Traits("expert_up", Init("zeros"), expert=True))
            declare(self, "down_bias", (e, d), Traits("expert_down", Init("zeros"), expert=True))

    def forward(self, rows: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        """rows [R, d] sorted by local expert, offsets [local experts] int32 of where each one's rows end -> [R, d]. Rows beyond the
        last offset give zeros."""
        return self.rc("experts", lambda x: self._run(x, offsets), rows, module=self)

    def _run(self, rows: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        log = self.rc.log
        up = seam(log, "expert_up", self._product, rows, local(self.gate_up).flatten(1, 2), self.gate_up_bias, offsets)
        act = self.rc("moe_act", lambda up: seam(log, "moe_act", self.backend.swiglu, up), up)
        return seam(log, "expert_down", self._product, act, local(self.down), self.down_bias, offsets)

    def _product(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, offsets: torch.Tensor) -> torch.Tensor:
        out = self.backend.grouped_gemm(x, weight, offsets)
        if bias is None:
            return out
        row = torch.arange(x.shape[0], device=x.device, dtype=offsets.dtype)
        expert = torch.searchsorted(offsets, row, right=True)
        table = torch.cat([local(bias).flatten(1), out.new_zeros((1, out.shape[1]))])
        return out + table[expert]
