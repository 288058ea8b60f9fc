"""How long is the gradient of the whole model, counted once whatever holds it, and how is it shortened?

Parameters lie on different meshes (dense on data x tensor parallel, experts on their own) and some ranks hold the same numbers as
others. Each rank sums the squares of its shards, each divided by the number of ranks that hold the same one, and one all-reduce over
all ranks adds up to the squared norm of the logical gradient: no collective a mesh, none a parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
from torch import Tensor

from moetrain.optim.shards import local_grad, replicated_ranks, sharded_ranks

Named = Iterable[tuple[str, Tensor]]
Copies = Callable[[str, Tensor], int]


def mesh_copies(name: str, parameter: Tensor) -> int:
    """Ranks of a parameter's own mesh that hold the same shard. Right where no rank outside the mesh holds one; 1 for a plain tensor."""
    return replicated_ranks(parameter)


def stage_copies(ranks: int) -> Copies:
    """The copies where each of the ``ranks`` of a pipeline stage holds a shard of each of its parameters, as in every layout here:
    ranks / shards, whatever mesh the parameter is on, and all of them for a plain tensor.

    The function raises ValueError where a parameter's shards don't divide the ranks.
    """

    def copies(name: str, parameter: Tensor) -> int:
        shards = sharded_ranks(parameter)
        if ranks % shards:
            raise ValueError(f"{name} is cut into {shards} shards, which don't divide the {ranks} ranks of its stage")
        return ranks // shards

    return copies


@torch.no_grad()
def grad_norm(parts: Iterable[Named], world: dist.ProcessGroup | Callable[[Tensor], Tensor] | None = None,
              copies: Copies = mesh_copies, device: torch.device | str | None = None) -> Tensor:
    """The 2-norm of the gradient of all ``parts`` (of each: (logical name, parameter)), a 0-dim float64 tensor, equal on all ranks.

    ``world``: the group of all ranks, pipeline stages included, or a function that returns the sum over it (0-dim float64 in and out),
    or None for one process. ``copies``: how many ranks of ``world`` hold what this one holds of a parameter. ``device``: where the
    sum is made; a rank without gradients needs it if that isn't the CPU. Norms of single tensors are taken in float32 (float64 on
    the CPU), their squares added in float64. Issues one all-reduce, and none else unless a gradient is a partial sum.
    """
    named = [(name, parameter) for part in parts for name, parameter in part if parameter.grad is not None]
    shards = [(local_grad(parameter), copies(name, parameter)) for name, parameter in named]
    if device is None:
        device = shards[0][0].device if shards else "cpu"
    total = _sum_of_squares([(grad, count) for grad, count in shards if grad.numel()], torch.device(device))
    if callable(world):
        total = world(total)
    elif world is not None:
        dist.all_reduce(total, group=world)
    return total.sqrt()


def _sum_of_squares(shards: list[tuple[Tensor, int]], device: torch.device) -> Tensor:
    if not shards:
        return torch.zeros((), dtype=torch.float64, device=device)
    grads = [grad for grad, _ in shards]
    norms = torch._foreach_norm(grads, 2, dtype=torch.float64 if device.type == "cpu" else torch.float32)
    # Made on the host and copied without waiting for the device.
    weights = torch.tensor([1 / count for _, count in shards], dtype=torch.float64)
    weights = weights.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else weights
    return torch.stack(norms).double().square().mul_(weights).sum()


@torch.no_grad()
def clip_(parts: Iterable[Named], norm: Tensor, most: float) -> Tensor:
    """Multiplies every gradient by min(1, most / norm), in place and without waiting for the device; returns that factor.

    At a norm of at most ``most`` not a bit changes. A norm that isn't finite leaves NaN or zeros: skip that step (see guard).
    """
    factor = (most / norm).clamp(max=1.0)
    grads = [local_grad(parameter) for part in parts for _, parameter in part if parameter.grad is not None]
    by_kind: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for grad in grads:
        if grad.numel():
            by_kind.setdefault((grad.device, grad.dtype), []).append(grad)
    for (device, dtype), some in by_kind.items():
        # Of a narrow dtype the factor stays float32: rounding it would turn 1 - 1e-3 into 1.
        torch._foreach_mul_(some, factor.to(device, torch.promote_types(dtype, torch.float32)))
    return factor
