"""What beside tensors makes a run the same run after a restart, and what do stages tell each other?"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from moesim import __version__
from moesim.spec import Scenario
from moetrain.build import Job
from moetrain.checkpoint import Checkpointer
from moetrain.checkpoint.load import Restored
from moetrain.data.stream import AnyLoader
from moetrain.optim import SkipGuard
from moetrain.statistics import LayerLoad


def identity(scenario: Scenario, loader: AnyLoader) -> dict[str, Any]:
    """What a run must have in common with the checkpoint it resumes: the model and the data."""
    return {"model": scenario.model.model_dump(mode="json"), "network": scenario.train.network.model_dump(mode="json", exclude={"loss_chunk"}),
            "data": loader.fingerprint()}


def extra(job: Job, loader: AnyLoader, guard: SkipGuard, step: int) -> dict[str, Any]:
    """The plain part of a checkpoint. Nothing here draws random numbers during training, so seeds are all the randomness there is."""
    return {
        "step": step, "identity": identity(job.scenario, loader), "config": job.scenario.model_dump(mode="json"), "layout": str(job.layout),
        "world_size": job.layout.world, "torch": str(torch.__version__), "version": __version__, "loader": loader.state(), "guard": guard.state(),
    }


def resume(checkpoints: Checkpointer, where: str, job: Job, optimizer: Any, loader: AnyLoader, guard: SkipGuard) -> Restored | None:
    """Fills everything from a checkpoint; None where there is none, or none is wanted. CheckpointError, ValueError in one line."""
    if where == "never":
        return None
    present = extra(job, loader, guard, 0)
    restored = checkpoints.load(where, job.parts, optimizer, {k: present[k] for k in ("identity", "config", "layout", "world_size", "torch")})
    if restored is None:
        return None
    loader.load_state(restored.extra["loader"])
    guard.load_state(restored.extra["guard"])
    return restored


def all_layers(job: Job, loads: dict[int, LayerLoad]) -> dict[int, LayerLoad]:
    """Loads of the layers of every pipeline stage, in model order, on every rank."""
    if job.mesh["pp"].size > 1:
        every: list[dict[int, LayerLoad]] = [{}] * job.mesh["pp"].size
        dist.all_gather_object(every, loads, group=job.mesh["pp"].pg)
        loads = {layer: load for found in every for layer, load in found.items()}
    return dict(sorted(loads.items()))
