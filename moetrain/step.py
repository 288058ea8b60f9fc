"""What happens in one training step: which tokens this rank gets, forward, backward, and whose gradients are whole?

The loss that is returned is the step's mean over tokens, summed over microbatches and ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from moetrain import pipeline, sharding
from moetrain.build import Job
from moetrain.collectives import all_reduce_
from moetrain.data.batch import Batch
from moetrain.data.stream import AnyLoader
from moetrain.loss import IGNORED
from moetrain.place import Place, place
from moetrain.seams import action


@dataclass(frozen=True)
class Microbatch:
    """One microbatch as this rank sees it: ids and labels [B, S/cp], and where they stand."""

    tokens: torch.Tensor
    labels: torch.Tensor
    where: Place


def cut(batch: Batch, job: Job, step: int, first_sample: int | None = None,
        num_microbatches: int | None = None) -> list[Microbatch]:
    """This rank's microbatches of its data-parallel share of the step: [dp share] -> num_microbatches x [mb, S/cp]. ``first_sample``:
    number in the run of the step's first sequence (None: as if every step had been of this size)."""
    mesh, workload = job.mesh, job.scenario.workload
    dp, cp = mesh["dp"], mesh["cp"]
    rows = batch.num_sequences
    first = (step * dp.size * rows if first_sample is None else first_sample) + dp.rank * rows
    samples = torch.arange(first, first + rows, device=batch.tokens.device)
    masked = job.scenario.train.data.mask_documents
    count = num_microbatches or job.num_microbatches
    parts: list[Microbatch] = []
    for part, numbers in zip(batch.split(count), samples.split(rows // count)):
        where = place(part.documents if masked else None, numbers, workload.seq_len, cp.size, cp.rank)
        if parts:
            # All stand at the same positions: one table for the step, not one each; and one mask, where no documents make it another.
            where._ropes = parts[0].where._ropes
            where._masks = parts[0].where._masks if where.documents is None else where._masks
        parts.append(Microbatch(part.tokens[:, where.positions], part.labels[:, where.positions], where))
    return parts


def forward_backward(job: Job, microbatches: Sequence[Microbatch]) -> torch.Tensor:
    """Gradients of the step in the parameters; [cross entropy, z-loss] of this rank's tokens."""
    for copy in sharding.tied_copies(job.parts)[1:]:
        copy.grad = None  # no optimizer knows it
    if job.pipeline is not None:
        return pipeline.forward_backward(job, microbatches)
    (part,) = job.parts
    total = torch.zeros(2, dtype=torch.float64, device=job.device)
    for i, m in enumerate(microbatches):
        sharding.begin_microbatch(job.parts, job.layout, last=i + 1 == len(microbatches))
        with action(job.mesh.log, 0, "F", i):
            losses = part(m.tokens, m.where, m.labels)
        with action(job.mesh.log, 0, "B", i):
            losses.sum().backward()
        total += losses.detach().double()
    sharding.finish_gradients(job.parts, job.mesh, job.ends)
    return total


def reduce_loss(job: Job, losses: torch.Tensor) -> torch.Tensor:
    """[cross entropy, z-loss] of the whole step, on every rank. Ranks of one tp group saw the same tokens."""
    mesh = job.mesh
    return all_reduce_(losses / mesh["tp"].size, mesh["world"], "loss_reduce", phase="step")


@torch.no_grad()
def evaluate(job: Job, microbatches: Sequence[Microbatch]) -> torch.Tensor:
    """Sum of the cross entropy over this rank's labels (ranks of one tp group have the same tokens; in a pipeline the last stage's
    ranks alone have it); routing is not counted."""
    was, job.statistics.on = job.statistics.on, False
    try:
        if job.pipeline is not None:
            total = pipeline.evaluate(job, microbatches)[0]
        else:
            (part,) = job.parts
            total = sum(part(m.tokens, m.where, m.labels)[0].double() for m in microbatches)
            sharding.release(job.parts)
    finally:
        job.statistics.on = was
    return total * job.scenario.workload.global_batch_tokens


def validation_loss(job: Job, loader: AnyLoader, sequences: int | None) -> float:
    """Mean cross entropy a token of the first ``sequences`` validation sequences, the same on every rank. A collective call."""
    totals = torch.zeros(2, dtype=torch.float64, device=job.device)
    for batch in loader.validation(sequences):
        (m,) = cut(batch.to(job.device), job, 0, 0, num_microbatches=1)
        totals += torch.stack([evaluate(job, [m]), (m.labels != IGNORED).sum().double()])
    return _mean(job, totals)


def _mean(job: Job, totals: torch.Tensor) -> float:
    """[sum, count] over the ranks that saw different tokens."""
    # Under a pipeline only the last stage has a loss, and every stage the same labels.
    totals[1] /= job.mesh["pp"].size
    total, number = all_reduce_(totals, job.mesh["world"], "validation", phase="step").tolist()
    return total / max(1.0, number)
