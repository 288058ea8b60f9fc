"""What happens in one training step without a pipeline: which tokens this rank gets, forward, backward, and whose gradients are whole?

The loss that is returned is the step's mean over tokens, summed over microbatches and ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from moetrain import sharding
from moetrain.build import Job
from moetrain.collectives import all_reduce_
from moetrain.data.batch import Batch
from moetrain.place import Place, place


@dataclass(frozen=True)
class Microbatch:
    """One microbatch as this rank sees it: ids and labels [B, S/cp], and where they stand."""

    tokens: torch.Tensor
    labels: torch.Tensor
    where: Place


def cut(batch: Batch, job: Job, step: int) -> list[Microbatch]:
    """This rank's microbatches of its data-parallel share of the step: [dp share] -> num_microbatches x [mb, S/cp]."""
    mesh, workload = job.mesh, job.scenario.workload
    dp, cp = mesh["dp"], mesh["cp"]
    rows = batch.num_sequences
    first = (step * dp.size + dp.rank) * rows
    samples = torch.arange(first, first + rows, device=batch.tokens.device)
    masked = job.scenario.train.data.mask_documents
    parts = []
    for part, numbers in zip(batch.split(job.num_microbatches), samples.split(rows // job.num_microbatches)):
        where = place(part.documents if masked else None, numbers, workload.seq_len, cp.size, cp.rank, step)
        parts.append(Microbatch(part.tokens[:, where.positions], part.labels[:, where.positions], where))
    return parts


def forward_backward(job: Job, microbatches: Sequence[Microbatch]) -> torch.Tensor:
    """Gradients of the step in the parameters; [cross entropy, z-loss] of this rank's tokens."""
    (part,) = job.parts
    total = torch.zeros(2, dtype=torch.float64, device=job.device)
    for i, m in enumerate(microbatches):
        sharding.begin_microbatch(job.parts, job.layout, last=i + 1 == len(microbatches))
        losses = part(m.tokens, m.where, m.labels)
        losses.sum().backward()
        total += losses.detach().double()
    sharding.finish_gradients(job.parts, job.mesh, job.ends)
    return total


def reduce_loss(job: Job, losses: torch.Tensor) -> torch.Tensor:
    """[cross entropy, z-loss] of the whole step, on every rank. Ranks of one tp group saw the same tokens."""
    mesh = job.mesh
    return all_reduce_(losses / mesh["tp"].size, mesh["world"], "loss_reduce", phase="step")
