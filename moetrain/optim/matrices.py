"""How do ranks that each hold strips of many matrices get whole matrices to work on, and the strips of the results back?

Each of n ranks holds a strip of each of B matrices; an all-to-all later each holds B/n whole ones, and the same backwards returns
the strips. Nothing is computed twice and nothing is held twice. A matrix cut along several mesh dimensions takes one all-to-all a
dimension, the innermost cut first.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor


class Cut(NamedTuple):
    """One mesh dimension across which matrices are cut: ``dim`` 1 rows, 2 columns of [B, rows, columns]; ``size`` of that dimension
    before the cut, which goes by torch.chunk; ``rank`` of ``ways`` is this one, in ``group``."""

    group: dist.ProcessGroup
    ways: int
    rank: int
    dim: int
    size: int


def cuts_of(parameter: Tensor) -> tuple[Cut, ...]:
    """The cuts through the matrices (the last two dimensions) of a parameter, innermost first. Cuts between matrices, of the
    dimensions before, are none: a rank's matrices are whole as far as they go."""
    if not isinstance(parameter, DTensor):
        return ()
    mesh, placements = parameter.device_mesh, parameter.placements
    sizes = {parameter.ndim - 2: parameter.shape[-2], parameter.ndim - 1: parameter.shape[-1]}
    inwards: list[Cut] = []
    for i in _outermost_first(parameter):
        dim = placements[i].dim % parameter.ndim
        if dim in sizes and mesh.size(i) > 1:
            rank, ways = mesh.get_local_rank(i), mesh.size(i)
            inwards.append(Cut(mesh.get_group(i), ways, rank, dim - parameter.ndim + 3, sizes[dim]))
            sizes[dim] = chunk_sizes(sizes[dim], ways)[rank]
    return tuple(reversed(inwards))


def _outermost_first(parameter: DTensor) -> list[int]:
    """Mesh dimensions that shard, in the order in which they were cut: left to right, but strided ones last, for they cut what the
    dimensions to their right had left (FSDP over tensor or expert parallelism)."""
    sharded = [i for i, placement in enumerate(parameter.placements) if not placement.is_replicate()]
    return sorted(sharded, key=lambda i: getattr(parameter.placements[i], "split_factor", 1) > 1)


def chunk_sizes(size: int, ways: int) -> list[int]:
    """The lengths of torch.chunk's ``ways`` pieces, with zeros for those that it leaves out."""
    step = -(-size // ways)
    return [max(0, min(size, (i + 1) * step) - i * step) for i in range(ways)]


def on_whole(strips: Tensor, cuts: tuple[Cut, ...], function: Callable[[Tensor], Tensor]) -> Tensor:
    """``function`` of whole matrices [some, R, C], for this rank's strips [B, r, c] of them; returns [B, r, c]. A collective."""
    if not cuts:
        return function(strips)
    inner = cuts[0]
    whole = on_whole(_merge(strips, inner), cuts[1:], function)
    return _cut(whole, inner, strips.shape[0])


def _merge(strips: Tensor, cut: Cut) -> Tensor:
    """[B, ...] strips of B matrices -> [B / ways, ...] matrices without the cut."""
    count = chunk_sizes(strips.shape[0], cut.ways)
    mine, lengths = count[cut.rank], chunk_sizes(cut.size, cut.ways)
    shapes = [_with(strips.shape, mine, cut.dim, length) for length in lengths]
    return torch.cat(_exchange(list(strips.split(count)), shapes, cut, strips), dim=cut.dim)


def _cut(whole: Tensor, cut: Cut, batch: int) -> Tensor:
    """The way back: [B / ways, ...] matrices -> this rank's strips of all B."""
    count, lengths = chunk_sizes(batch, cut.ways), chunk_sizes(cut.size, cut.ways)
    shapes = [_with(whole.shape, some, cut.dim, lengths[cut.rank]) for some in count]
    return torch.cat(_exchange(list(whole.split(lengths, dim=cut.dim)), shapes, cut, whole), dim=0)


def _exchange(blocks: list[Tensor], shapes: list[torch.Size], cut: Cut, like: Tensor) -> list[Tensor]:
    """Block j to rank j; from rank j a block of shape j."""
    sent = torch.cat([block.reshape(-1) for block in blocks])
    lengths = [shape.numel() for shape in shapes]
    received = like.new_empty(sum(lengths))
    dist.all_to_all_single(received, sent, lengths, [block.numel() for block in blocks], group=cut.group)
    return [flat.view(shape) for flat, shape in zip(received.split(lengths), shapes, strict=True)]


def _with(shape: torch.Size, batch: int, dim: int, length: int) -> torch.Size:
    return torch.Size((batch, *(length if i == dim else size for i, size in enumerate(shape[1:], 1))))
