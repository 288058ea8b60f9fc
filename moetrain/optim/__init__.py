"""How does a step change the parameters? (Optimizers, learning-rate schedules, gradient clipping, the guard that skips a step.)

Each optimizer is a function from named parameters and a spec to a torch Optimizer, found in OPTIMIZERS by its name.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from moetrain.optim.adamw import AdamW
from moetrain.optim.base import ShardedOptimizer, Storage, set_lr
from moetrain.optim.clip import clip_, grad_norm, mesh_copies, stage_copies
from moetrain.optim.groups import make_groups
from moetrain.optim.guard import SkipGuard, Verdict, guarded_step
from moetrain.optim.muon import Muon
from moetrain.optim.schedule import Schedule, lr_factor

__all__ = [
    "OPTIMIZERS", "AdamW", "Muon", "OptimizerSpec", "Schedule", "ShardedOptimizer", "SkipGuard", "Storage", "Verdict", "build_optimizer",
    "clip_", "grad_norm", "guarded_step", "lr_factor", "mesh_copies", "set_lr", "stage_copies",
]  # fmt: skip

Named = Sequence[tuple[str, torch.nn.Parameter]]


@dataclass(frozen=True)
class OptimizerSpec:
    """All that an optimizer's name and numbers are. ``moments`` fp32 | bf16, ``rounding`` nearest | stochastic of bf16 ones, from ``seed``.

    Of muon only: ``momentum``, ``nesterov``, ``scale`` match_rms | spectral, ``matrix_lr_scale`` the matrices' learning rate over that
    of the parameters that AdamW steps.
    """

    kind: str = "adamw"
    lr: float = 3e-4
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1
    decay_embedding: bool = False
    moments: str = "fp32"
    rounding: str = "nearest"
    seed: int = 0
    momentum: float = 0.95
    nesterov: bool = True
    scale: str = "match_rms"
    matrix_lr_scale: float = 1.0


def _adamw(named: Named, spec: OptimizerSpec, storage: Storage) -> ShardedOptimizer:
    groups = make_groups(named, spec.weight_decay, decay_embedding=spec.decay_embedding)
    return AdamW(groups, spec.lr, betas=spec.betas, eps=spec.eps, weight_decay=spec.weight_decay, storage=storage)


def _muon(named: Named, spec: OptimizerSpec, storage: Storage) -> ShardedOptimizer:
    groups = make_groups(named, spec.weight_decay, decay_embedding=spec.decay_embedding, matrices=True, matrix_lr_scale=spec.matrix_lr_scale)
    return Muon(groups, spec.lr, momentum=spec.momentum, nesterov=spec.nesterov, scale=spec.scale, betas=spec.betas, eps=spec.eps,
                weight_decay=spec.weight_decay, storage=storage)


OPTIMIZERS: dict[str, Callable[[Named, OptimizerSpec, Storage], ShardedOptimizer]] = {"adamw": _adamw, "muon": _muon}


def build_optimizer(named: Named, spec: OptimizerSpec) -> ShardedOptimizer:
    """The optimizer of ``spec`` over (logical name, parameter) pairs, of all model parts of this rank. Parameters must have memory, and be
    cut as they will stay. ValueError for what is out of range, and for an unknown kind."""
    if spec.kind not in OPTIMIZERS:
        raise ValueError(f"optimizer {spec.kind!r}: legal are {', '.join(OPTIMIZERS)}")
    optimizer = OPTIMIZERS[spec.kind](named, spec, Storage(spec.moments, spec.rounding, spec.seed))
    set_lr(optimizer, spec.lr)
    return optimizer
