"""How do tests get the trainer's own model, whole, in one process, with given parameters?"""

from __future__ import annotations

import reference_model as reference
import torch
from torch import Tensor

from moesim.spec import ModelSpec
from moetrain import mesh as meshes
from moetrain.balance import Balance
from moetrain.kernels import backend
from moetrain.model import ModelOptions, Stage
from moetrain.moe import MoEOptions
from moetrain.params import materialise
from moetrain.place import Place, place
from moetrain.recompute import Recompute
from moetrain.statistics import RoutingStatistics


def stage_with(
    spec: ModelSpec, params: dict[str, Tensor], constants: reference.Constants, tokens: int, kernels: str = "reference",
    balance: Balance = Balance(), chunks: int = 1,
) -> Stage:  # fmt: skip
    """The whole model on the CPU in float32, every parameter and buffer taken from ``params`` and none left over. ``tokens`` of a step."""
    options = ModelOptions(constants.rope_theta, constants.norm_eps, embed_scale=constants.embed_scale, tokens_per_step=tokens, loss_chunk=7)
    moe = MoEOptions(backend(kernels, "cpu", torch.float32), balance, chunks=chunks, tokens_per_step=tokens)
    stage = Stage(spec, meshes.single(), options, moe, Recompute(), RoutingStatistics(max(1, spec.num_experts)))
    materialise(stage, torch.device("cpu"), seed=0)
    own = {stage.logical_name(name): t for name, t in [*stage.named_parameters(), *stage.named_buffers()]}
    assert own.keys() == params.keys(), sorted(own.keys() ^ params.keys())
    with torch.no_grad():
        for name, tensor in own.items():
            assert tensor.shape == params[name].shape, name
            tensor.copy_(params[name])
    return stage


def whole(ids: Tensor, documents: Tensor | None = None) -> Place:
    """The place of full sequences (B, S), one step, one rank."""
    return place(documents, torch.arange(len(ids)), ids.shape[1], 1, 0)


def gradients(stage: Stage) -> dict[str, Tensor]:
    """By logical name; zeros where nothing flowed."""
    return {stage.logical_name(name): torch.zeros_like(p) if p.grad is None else p.grad for name, p in stage.named_parameters()}
