"""What is each logical parameter: its role, how it is cut, how it starts - the same numbers whatever the layout?

A logical parameter is named as in an unsharded model (`layers.3.moe.experts.down`). Its initial values are drawn row block by row
block from generators keyed by (seed, name, block), so that a rank draws only the blocks that overlap its shard, and any layout
starts from the same model.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

BLOCK_ELEMENTS = 1 << 20
"""Values drawn from one generator: small enough that a shard draws little in vain, large enough that seeding is cheap."""


@dataclass(frozen=True)
class Init:
    """``kind`` normal (std) | ones | zeros; a normal one is cut at ``cut`` standard deviations."""

    kind: str = "normal"
    std: float = 0.02
    cut: float = 3.0


@dataclass(frozen=True)
class Traits:
    """How a parameter is treated: ``tp_dim`` the dimension that tensor parallelism cuts (None: every tp rank holds it whole),
    ``expert`` whether it lives on the expert mesh, ``init`` its start, ``role`` as in moesim."""

    role: str
    init: Init
    tp_dim: int | None = None
    expert: bool = False


def declare(module: nn.Module, name: str, shape: tuple[int, ...], traits: Traits, dtype: torch.dtype = torch.float32) -> None:
    """Gives ``module`` the parameter ``name``, on the meta device until ``materialise`` fills it."""
    parameter = nn.Parameter(torch.empty(shape, dtype=dtype, device="meta"))
    module.__dict__.pop(name, None)  # a None that stood for "absent"
    module.register_parameter(name, parameter)
    module.__dict__.setdefault("traits", {})[name] = traits


def logical(module: nn.Module) -> Iterator[tuple[str, nn.Parameter, Traits]]:
    """(name, parameter, traits) of every parameter of a model part, in module order; a tied one once, under its first name."""
    seen: set[int] = set()
    for prefix, child in module.named_modules():
        for name, traits in getattr(child, "traits", {}).items():
            parameter = child._parameters.get(name)
            if parameter is not None and id(parameter) not in seen:
                seen.add(id(parameter))
                yield f"{prefix}.{name}" if prefix else name, parameter, traits


def _seed(seed: int, name: str, block: int) -> int:
    digest = hashlib.sha256(f"{seed}/{name}/{block}".encode()).digest()
    return int.from_bytes(digest[:8], "little") & (2**63 - 1)


def rows_of(name: str, shape: tuple[int, ...], init: Init, seed: int, start: int, stop: int) -> torch.Tensor:
    """Rows start..stop (dimension 0) of a logical parameter's initial values, float32 on the CPU."""
    if init.kind != "normal":
        return torch.full((stop - start, *shape[1:]), 1.0 if init.kind == "ones" else 0.0)
    width = math.prod(shape[1:])
    step = max(1, BLOCK_ELEMENTS // width)
    out = torch.empty((stop - start, *shape[1:]))
    for block in range(start // step, -(-stop // step)):
        low, high = block * step, min(shape[0], (block + 1) * step)
        generator = torch.Generator().manual_seed(_seed(seed, name, block))
        values = torch.empty((high - low, *shape[1:]))
        nn.init.trunc_normal_(values, 0.0, init.std, -init.cut * init.std, init.cut * init.std, generator=generator)
        a, b = max(low, start), min(high, stop)
        out[a - start:b - start] = values[a - low:b - low]
    return out


@torch.no_grad()
def materialise(part: nn.Module, device: torch.device, seed: int) -> None:
    """Memory for a model part on the meta device, and the seed's initial values in it. Buffers start at zero."""
    part.to_empty(device=device)
    part.tie()  # to_empty gives each name memory of its own
    for name, parameter, traits in logical(part):
        _fill(part.logical_name(name), parameter, traits.init, seed)
    for buffer in part.buffers():
        buffer.zero_()
    for module in part.modules():
        if hasattr(module, "reset_buffers"):
            module.reset_buffers()


@torch.no_grad()
def assign(parameter: torch.Tensor, full: torch.Tensor) -> None:
    """The part of a whole logical tensor that this rank holds."""
    if not isinstance(parameter, DTensor):
        parameter.copy_(full)
        return
    for dim, cut in enumerate(local_index(parameter)):
        full = full[(slice(None),) * dim + (cut,)]
    parameter.to_local().copy_(full)


def _fill(name: str, parameter: nn.Parameter, init: Init, seed: int) -> None:
    shape = tuple(parameter.shape)
    if not isinstance(parameter, DTensor):
        parameter.copy_(rows_of(name, shape, init, seed, 0, shape[0]))
        return
    local = parameter.to_local()
    if not local.numel():
        return
    index = local_index(parameter)
    rows = index[0]
    start, stop = (rows.start, rows.stop) if isinstance(rows, slice) else (int(rows.min()), int(rows.max()) + 1)
    values = rows_of(name, shape, init, seed, start, stop)
    values = values if isinstance(rows, slice) else values[rows - start]
    for dim, cut in enumerate(index[1:], 1):
        values = values[(slice(None),) * dim + (cut,)]
    local.copy_(values)


def local_index(parameter: DTensor) -> list[slice | torch.Tensor]:
    """For each dimension, which logical indices this rank holds, in local order: a slice, or a tensor where they are not one run
    (two mesh dimensions that cut the same tensor dimension)."""
    sharded = {placement.dim for placement in parameter.placements if _cuts(placement)}
    index: list[slice | torch.Tensor] = []
    for dim, size in enumerate(parameter.shape):
        if dim not in sharded:
            index.append(slice(0, size))
            continue
        held = _held(parameter, dim, size)
        low, count = (int(held[0]), len(held)) if len(held) else (0, 0)
        index.append(slice(low, low + count) if torch.equal(held, torch.arange(low, low + count)) else held)
    return index


def _cuts(placement) -> bool:
    """A strided shard, which torch does not count among its shards, cuts as well."""
    return not placement.is_replicate() and not placement.is_partial()


def _held(parameter: DTensor, dim: int, size: int) -> torch.Tensor:
    mesh = parameter.device_mesh
    return held(parameter.placements, mesh.shape, [mesh.get_local_rank(i) for i in range(mesh.ndim)], dim, size)


def held(placements: Sequence[Placement], sizes: Sequence[int], coordinate: Sequence[int], dim: int, size: int) -> torch.Tensor:
    """Logical indices along tensor dimension ``dim`` of ``size`` that the rank at ``coordinate`` of a mesh of ``sizes`` holds: what is left
    after each mesh dimension takes its chunk. FSDP on top of a shard of the same dimension cuts what the inner one left, so the inner
    mesh dimension (the last) goes first then."""
    order = [i for i, p in enumerate(placements) if _cuts(p) and p.dim == dim]
    inner_first = any(getattr(placements[i], "split_factor", 1) > 1 for i in order)
    left = torch.arange(size)
    for i in reversed(order) if inner_first else order:
        parts = torch.chunk(left, sizes[i])
        left = parts[coordinate[i]] if coordinate[i] < len(parts) else left[:0]
    return left

