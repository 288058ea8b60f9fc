"""Which activations are thrown away in forward and made again in backward?

Roles are those of moesim.layout (`rc:` in a layout). Nothing that a role's work saved is kept, nor its output, whoever saved that:
the first operation of backward that needs any of it has the work done again from the role's inputs, once, and each piece goes when
its last reader is gone. An input that is itself such an output is not kept either, so roles chain. `full` does the same to whole
layers, but keeps their outputs: those are the inputs of the next.

In place of a tensor, autograd keeps a Handle (https://docs.pytorch.org/docs/stable/autograd.html#saved-tensors-hooks-default-hooks).
Work that runs again builds the graph of the first time only to see what it would save, in the same order; that graph never runs, so
no gradient, auxiliary loss or reduction counts twice. No random number is drawn in a model, so none needs to be remembered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import ref

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.fsdp import FSDPModule
from torch.multiprocessing.reductions import StorageWeakRef

from moetrain import seams
from moetrain.collectives import CollectiveLog

FULL, GATHER = "full", "tp_gather"
"""The second is no role of a layout: tokens gathered over tp are never kept."""


class Handle:
    """What autograd keeps instead of a tensor: which work makes it, and, from then on, the tensor."""

    __slots__ = ("__weakref__", "region", "value")

    def __init__(self, region: _Region):
        self.region, self.value = region, None

    def tensor(self) -> torch.Tensor:
        if self.value is None:
            self.region.replay()
        if self.value is None:
            raise RuntimeError(f"recompute: the work of rc:{self.region.role} saved other tensors the second time than the first")
        return self.value


@dataclass(frozen=True)
class _View:
    """Where in the storage of output ``index`` a saved tensor lies; ``handle`` is a weak reference."""

    handle: Callable[[], Handle | None]
    index: int
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    def fill(self, outputs: tuple[torch.Tensor, ...]) -> None:
        handle = self.handle()
        if handle is not None:
            handle.value = outputs[self.index].detach().as_strided(self.size, self.stride, self.offset)


class _Region:
    """One piece of work that can be done again. It lives as long as something that it must bring back."""

    def __init__(self, owner: Recompute, role: str, fn: Callable[..., Any], inputs: tuple[torch.Tensor, ...], module: nn.Module | None):
        self.owner, self.role, self.fn, self.module = owner, role, fn, module
        self.inputs = tuple(owner.pack(x.detach()) for x in inputs)
        self.needs_grad = tuple(x.requires_grad for x in inputs)
        self.saved: list[Callable[[], Handle | None]] = []
        self.views: list[_View] = []

    def pack(self, tensor: torch.Tensor) -> Handle:
        """For a tensor that the work itself saves."""
        handle = Handle(self)
        self.saved.append(ref(handle))
        return handle

    def view(self, tensor: torch.Tensor, index: int) -> Handle:
        """For a tensor in the storage of an output, saved by later work."""
        handle = Handle(self)
        self.views.append(_View(ref(handle), index, tensor.size(), tensor.stride(), tensor.storage_offset()))
        return handle

    def replay(self) -> None:
        """Does the work again and gives every handle its tensor."""
        inputs = [unpack(x).detach().requires_grad_(needs) for x, needs in zip(self.inputs, self.needs_grad)]
        if isinstance(self.module, FSDPModule):
            # Backward may want an output before it reaches the module, whose weights are then still shards.
            self.module.unshard()
        # Nothing here may hold a tensor with its graph: the graph holds this function.
        found = 0

        def capture(tensor: torch.Tensor) -> None:
            nonlocal found
            handle = self.saved[found]() if found < len(self.saved) else None
            found += 1
            if handle is not None:
                handle.value = tensor.detach()

        with self.owner.again(), torch.enable_grad(), saved_tensors_hooks(capture, _never):
            outputs = _as_tuple(self.fn(*inputs))
        if found != len(self.saved):
            raise RuntimeError(f"recompute: the work of rc:{self.role} saved {found} tensors, the first time {len(self.saved)}")
        for view in self.views:
            view.fill(outputs)
        self.inputs, self.fn = (), None


def unpack(kept: torch.Tensor | Handle) -> torch.Tensor:
    return kept.tensor() if isinstance(kept, Handle) else kept


def _never(_) -> torch.Tensor:
    raise RuntimeError("recompute: work that runs again has no backward of its own")


def _as_tuple(output: Any) -> tuple[torch.Tensor, ...]:
    return output if isinstance(output, tuple) else (output,)


class Recompute:
    """Called as ``rc(role, fn, *inputs)`` wherever a role's work is done. ``replaying`` is true while a forward runs again; the
    collectives of such a forward are logged as backward's."""

    def __init__(self, roles: tuple[str, ...] = (), log: CollectiveLog | None = None, tp: int = 1):
        self.roles, self.log = frozenset(roles) | ({GATHER} if tp > 1 else set()), log or CollectiveLog()
        self.replaying = False
        self._inside = False
        self._discarded: dict[int, tuple[StorageWeakRef, _Region, int, torch.dtype]] = {}

    def __call__(self, role: str, fn: Callable[..., Any], *inputs: torch.Tensor, module: nn.Module | None = None) -> Any:
        """``fn(*inputs)``, a tensor or a tuple of tensors. All tensors that ``fn`` reads beside parameters and tables must be among
        ``inputs``. ``module``: whose parameters ``fn`` reads, where backward may want the output before it comes to that module."""
        if role not in self.roles or self._inside or not torch.is_grad_enabled():
            return fn(*inputs)
        return self._forget(role, fn, inputs, module, keep_output=False)

    def layer(self, fn: Callable[..., torch.Tensor], x: torch.Tensor, where: Any) -> torch.Tensor:
        """A whole layer ``fn(x, where)``: only its input is kept under `rc:full`."""
        if FULL not in self.roles or not torch.is_grad_enabled():
            return fn(x, where)
        return self._forget(FULL, lambda x: fn(x, where), (x,), None, keep_output=True)

    def run(self, module: nn.Module, *inputs: torch.Tensor) -> Any:
        """``module(*inputs)`` of an FSDP module inside a layer. When the layer runs again its weights are gathered and stay until
        the module's own backward, which would gather them anyhow."""
        if not self.replaying:
            return module(*inputs)
        if isinstance(module, FSDPModule):
            module.unshard()
        return module.forward(*inputs)

    def _forget(self, role: str, fn: Callable[..., Any], inputs: tuple[torch.Tensor, ...], module: nn.Module | None, keep_output: bool) -> Any:
        region = _Region(self, role, fn, inputs, module)
        self._inside = True
        try:
            with saved_tensors_hooks(region.pack, unpack):
                output = fn(*inputs)
        finally:
            self._inside = False
        for index, tensor in enumerate(() if keep_output else _as_tuple(output)):
            if tensor.requires_grad:
                storage = tensor.untyped_storage()
                self._discarded[storage._cdata] = StorageWeakRef(storage), region, index, tensor.dtype
        return output

    def pack(self, tensor: torch.Tensor) -> torch.Tensor | Handle:
        """What to keep for a saved tensor: a handle where it lies in an output that is thrown away."""
        found = self._discarded.get(tensor.untyped_storage()._cdata)
        if found is None or found[-1] != tensor.dtype:
            # A tensor that its own node saves must not keep that node alive.
            return tensor.detach()
        _, region, index, _ = found
        return region.view(tensor, index)

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Around a forward: outputs that are thrown away are recognised wherever they are saved."""
        if FULL in self.roles or not self.roles or not torch.is_grad_enabled():
            yield
            return
        try:
            with saved_tensors_hooks(self.pack, unpack):
                yield
        finally:
            self._discarded.clear()

    @contextmanager
    def again(self) -> Iterator[None]:
        """Around work that runs again."""
        before = self.replaying, self._inside, self.log.replaying
        self.replaying = self._inside = self.log.replaying = True
        try:
            with seams.again(self.log):
                yield
        finally:
            self.replaying, self._inside, self.log.replaying = before
