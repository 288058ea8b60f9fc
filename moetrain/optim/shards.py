"""Which numbers of a parameter, its gradient and its moments does this rank hold?

An optimizer that works element by element needs no more than these: a DTensor's local shard, whatever its mesh and placements, or
the whole of a plain tensor. FSDP2 parameters are such DTensors, and the fp32 masters at the same time.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

from torch import Tensor
from torch.distributed.tensor import DTensor


def local(tensor: Tensor) -> Tensor:
    """This rank's part, sharing memory with ``tensor``; call it under no_grad. Its size may be 0."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def local_grad(parameter: Tensor) -> Tensor:
    """This rank's part of the gradient, cut as the parameter is.

    A gradient with other placements (a partial sum over tensor-parallel ranks, say) is first brought to the parameter's, and kept so:
    a collective, so every rank of the mesh must call this for the same parameters in the same order. TypeError where only one of the
    two is a DTensor.
    """
    grad = parameter.grad
    if isinstance(parameter, DTensor) != isinstance(grad, DTensor):
        raise TypeError(f"parameter is a {type(parameter).__name__}, its gradient a {type(grad).__name__}: both must be cut alike")
    if isinstance(grad, DTensor) and grad.placements != parameter.placements:
        grad = parameter.grad = grad.redistribute(parameter.device_mesh, parameter.placements)
    return local(grad)


def sharded_ranks(parameter: Tensor) -> int:
    """Into how many different shards a parameter is cut: the product of the mesh sizes that shard it; 1 for a plain tensor."""
    ways = 1
    for size, cut in _dims(parameter):
        ways *= size if cut else 1
    return ways


def replicated_ranks(parameter: Tensor) -> int:
    """How many ranks of a parameter's own mesh hold the same shard as this one; 1 for a plain tensor."""
    ways = 1
    for size, cut in _dims(parameter):
        ways *= 1 if cut else size
    return ways


def _dims(parameter: Tensor) -> Iterator[tuple[int, bool]]:
    if isinstance(parameter, DTensor):
        for dim, placement in enumerate(parameter.placements):
            yield parameter.device_mesh.size(dim), not placement.is_replicate()


def shard_number(parameter: Tensor) -> tuple[int, ...]:
    """This rank's coordinate on the mesh dimensions that shard: equal on two ranks exactly when they hold the same shard."""
    if not isinstance(parameter, DTensor):
        return ()
    mesh = parameter.device_mesh
    return tuple(mesh.get_local_rank(dim) for dim, placement in enumerate(parameter.placements) if not placement.is_replicate())


def seed_of(*what: object) -> int:
    """63 bits from a key, the same in every process."""
    return int.from_bytes(hashlib.blake2b(repr(what).encode(), digest_size=8).digest(), "little") >> 1


def pieces(tensors: tuple[Tensor, ...], most: int) -> Iterator[tuple[Tensor, ...]]:
    """Equally shaped tensors as views of at most ``most`` elements each; whole where one of them isn't contiguous."""
    if tensors[0].numel() <= most or not all(tensor.is_contiguous() for tensor in tensors):
        yield tensors
    else:
        yield from zip(*(tensor.view(-1).split(most) for tensor in tensors), strict=True)
