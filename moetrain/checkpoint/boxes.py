"""Which boxes of which logical tensors does this rank hold?

The state of a run is a set of logical tensors, named the same whatever the layout: `model.NAME` for parameters and persistent buffers,
`optim.NAME.KEY` for what the optimizer keeps about parameter NAME. A rank holds boxes of them: one of a whole tensor where it is
replicated, one of a shard, several where two mesh dimensions cut one tensor dimension in strides, none where it lies elsewhere.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from moetrain.checkpoint.errors import CheckpointError

WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")
"""What torch.compile and activation checkpointing put into names."""

TYPES = {str(getattr(torch, name)).removeprefix("torch."): getattr(torch, name)
         for name in ("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int64", "int32", "int16", "int8", "uint8", "bool")}
"""The element types a checkpoint may hold, by the name it gives them."""


@dataclass(frozen=True)
class Box:
    """The part of logical tensor ``name`` (of ``shape``) that begins at ``offsets`` and has ``local``'s shape. ``local`` is the memory
    that training uses, or a copy of it."""

    name: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    local: torch.Tensor

    @property
    def key(self) -> tuple[str, tuple[int, ...], tuple[int, ...]]:
        return self.name, self.offsets, tuple(self.local.shape)


def boxes_of(name: str, tensor: torch.Tensor) -> list[Box]:
    """The boxes of one tensor on this rank; empty ones are left out, and a tensor of a mesh this rank isn't in has none."""
    tensor = tensor.detach()
    if type_name(tensor.dtype) not in TYPES:
        raise CheckpointError(f"{name} has type {tensor.dtype}; a checkpoint holds {', '.join(TYPES)}")
    if not isinstance(tensor, DTensor):
        return [Box(name, tuple(tensor.shape), (0,) * tensor.ndim, tensor)] if tensor.numel() else []
    if any(placement.is_partial() for placement in tensor.placements):
        raise CheckpointError(f"{name} is a sum not yet reduced ({tensor.placements}): reduce it before saving or loading")
    if tensor.device_mesh.get_coordinate() is None:
        return []
    return _cut(name, tensor)


def _cut(name: str, tensor: DTensor) -> list[Box]:
    local, shape = tensor.to_local(), tuple(tensor.shape)
    held = [_held(tensor, dim) for dim in range(tensor.ndim)]
    if tuple(map(len, held)) != tuple(local.shape):
        raise CheckpointError(f"{name}: the local shard has shape {tuple(local.shape)}, its placement says {tuple(map(len, held))}")
    boxes = []
    for corner in itertools.product(*map(_runs, held)):
        view = local
        for dim, (low, _, count) in enumerate(corner):
            view = view.narrow(dim, low, count)
        boxes.append(Box(name, shape, tuple(first for _, first, _ in corner), view))
    return boxes


def _held(tensor: DTensor, dim: int) -> torch.Tensor:
    """The logical indices along ``dim`` that this rank holds, in local order.

    Mesh dimensions cut one after the other, each what the one before it left, in torch.chunk's sizes. FSDP cuts what tensor or expert
    parallelism left though its mesh dimension comes first, and marks that by a strided shard: the later ones then go first. (Reading the
    strides literally, as torch does, tells the same for even cuts and otherwise for uneven ones.)
    """
    mesh, placements = tensor.device_mesh, tensor.placements
    order = [i for i, p in enumerate(placements) if isinstance(p, (Shard, _StridedShard)) and p.dim == dim]
    held = torch.arange(tensor.shape[dim])
    strides = [placements[i].split_factor if isinstance(placements[i], _StridedShard) else 1 for i in order]
    if strides and strides[0] > 1 and strides[0] == math.prod(mesh.size(i) for i in order[1:]):
        order, strides = order[::-1], [1] * len(order)
    for i, stride in zip(order, strides):
        held = torch.cat([_chunk(piece, mesh.size(i), mesh.get_local_rank(i)) for piece in held.chunk(stride)])
    return held


def _chunk(held: torch.Tensor, count: int, rank: int) -> torch.Tensor:
    pieces = held.chunk(count) if len(held) else ()
    return pieces[rank] if rank < len(pieces) else held[:0]


def _runs(held: torch.Tensor) -> list[tuple[int, int, int]]:
    """(local start, logical start, length) of every run of consecutive logical indices."""
    breaks = [0, *(torch.nonzero(held[1:] != held[:-1] + 1).view(-1) + 1).tolist(), len(held)]
    return [(low, int(held[low]), high - low) for low, high in itertools.pairwise(breaks) if high > low]


def model_tensors(parts: Sequence[nn.Module]) -> list[tuple[str, torch.Tensor]]:
    """(logical name, tensor) of every parameter and persistent buffer of the parts. A part whose own names are not the logical ones
    has a method ``logical_name``. A name may come twice: two parts of a rank may each hold a copy of a tied weight."""
    found: dict[tuple[str, int], torch.Tensor] = {}
    for part in parts:
        logical = getattr(part, "logical_name", str)
        # keep_vars: the parameters themselves, and FSDP's hook brings them back to their sharded form.
        for name, tensor in part.state_dict(keep_vars=True).items():
            for wrapper in WRAPPERS:
                name = name.replace(wrapper, "")
            if not isinstance(tensor, torch.Tensor):
                raise CheckpointError(f"model state {name} is a {type(tensor).__name__}, not a tensor")
            found.setdefault((logical(name), id(tensor)), tensor)
    return [(name, tensor) for (name, _), tensor in found.items()]


def type_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True)
class Number:
    """A plain number among an optimizer's state: it travels as a tensor of no dimension."""

    state: dict[str, Any]
    key: str
    tensor: torch.Tensor

    def write_back(self) -> None:
        self.state[self.key] = type(self.state[self.key])(self.tensor.item())


class State:
    """Everything of a run that is saved as tensors: names, boxes, and the numbers to write back after loading."""

    def __init__(self, parts: Sequence[nn.Module], optimizer: Any = None) -> None:
        self.tensors: list[tuple[str, torch.Tensor]] = []
        self.numbers: list[Number] = []
        named = model_tensors(parts)
        self.tensors += [(f"model.{name}", tensor) for name, tensor in named]
        self.parameters = {id(tensor): (name, tensor) for name, tensor in reversed(named)}
        for other in optimizers(optimizer):
            self._add_optimizer(other)
        self.boxes = [box for name, tensor in self.tensors for box in boxes_of(name, tensor)]

    def _add_optimizer(self, optimizer: Any) -> None:
        for name, parameter, _ in owned(optimizer, self.parameters):
            for key, value in optimizer.state.get(parameter, {}).items():
                full = f"optim.{name}.{key}"
                if "." in str(key):
                    raise CheckpointError(f"optimizer state {full}: a key may hold no dot")
                self.tensors.append((full, self._tensor(full, value, optimizer.state[parameter], key, parameter)))

    def _tensor(self, full: str, value: Any, state: dict[str, Any], key: str, parameter: torch.Tensor) -> torch.Tensor:
        if isinstance(value, torch.Tensor):
            local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            if not isinstance(value, DTensor) and value.ndim and value.shape == local.shape != parameter.shape:
                raise CheckpointError(f"{full} is a plain tensor of the local shape {tuple(local.shape)} of a sharded parameter: keep it as a DTensor")
            return value
        if not isinstance(value, (bool, int, float)):
            raise CheckpointError(f"{full} is a {type(value).__name__}: optimizer state is tensors and numbers")
        tensor = torch.tensor(value, dtype=torch.float64 if isinstance(value, float) else torch.int64)
        self.numbers.append(Number(state, key, tensor))
        return tensor


def optimizers(optimizer: Any) -> Iterable[Any]:
    """None, one torch.optim.Optimizer, or several, as a sequence."""
    if optimizer is None:
        return ()
    return optimizer if isinstance(optimizer, (list, tuple)) else (optimizer,)


def owned(optimizer: Any, parameters: dict[int, tuple[str, torch.Tensor]]) -> Iterable[tuple[str, torch.Tensor, dict[str, Any]]]:
    """(logical name, parameter, its group) of everything an optimizer steps."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if id(parameter) not in parameters:
                raise CheckpointError(f"the optimizer steps a parameter of shape {tuple(parameter.shape)} that no model part holds")
            yield parameters[id(parameter)][0], parameter, group
