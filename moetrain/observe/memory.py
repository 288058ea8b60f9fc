"""Where does a rank's memory go, in bytes by category?

Parameters, gradients, optimizer state and buffers are counted from the tensors themselves: the local shard of each, each storage
once however many tensors share it. Activations are what the peak holds beyond them: saved activations and temporaries of the
busiest moment together. On CUDA the peak is the allocator's, and "allocator" is what it reserved beyond; on a CPU the peak is
the process's (VmHWM), counted from a base measured before training, so Python and libraries stay out of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from moetrain.observe.words import UNKNOWN, size

CATEGORIES = ("parameters", "gathered", "gradients", "optimizer", "buffers", "activations", "allocator")


@dataclass(frozen=True)
class Static:
    """Bytes of one rank that outlive a step. ``gathered``: full copies of sharded parameters that exist right now; they outlive a
    step only where they are not resharded."""

    parameters: int
    gathered: int
    gradients: int
    optimizer: int
    buffers: int

    @property
    def total(self) -> int:
        return self.parameters + self.gathered + self.gradients + self.optimizer + self.buffers


@dataclass(frozen=True)
class MemoryLedger:
    """Bytes of one rank by category; None where nothing could be measured. They add up to ``peak``, as ``source`` measured it."""

    rank: int
    parameters: int
    gathered: int
    gradients: int
    optimizer: int
    buffers: int
    activations: int | None
    allocator: int | None
    peak: int | None
    source: str

    def line(self) -> str:
        """One table line: rank, categories, peak."""
        cells = [f"{name} {size(getattr(self, name))}" for name in CATEGORIES if getattr(self, name) != 0]
        return f"rank {self.rank}: " + ", ".join(cells) + f"; peak {size(self.peak)} ({self.source})"

    def fields(self) -> dict[str, float]:
        """Category -> bytes, as StepRecord.memory holds it: what is known, with "peak"."""
        return {name: value for name, value in asdict(self).items() if name in (*CATEGORIES, "peak") and value is not None}


def static_bytes(parts: Iterable[nn.Module], optimizers: Iterable[torch.optim.Optimizer] = ()) -> Static:
    """Bytes of the tensors of model parts (several under pipeline parallelism) and optimizers on this rank."""
    parts, seen = list(parts), set()
    parameters = [p for part in parts for p in part.parameters()]
    gathered = _bytes(_gathered(parts), seen)  # first: while a parameter is gathered, the module holds the copy and FSDP the shard
    return Static(
        parameters=_bytes([*_shards(parts), *parameters], seen),
        gathered=gathered,
        gradients=_bytes((p.grad for p in parameters if p.grad is not None), seen) + _bytes(_unsharded_gradients(parts), seen),
        optimizer=_bytes(_state_tensors(optimizers), seen),
        buffers=_bytes((b for part in parts for b in part.buffers()), seen),
    )


def _bytes(tensors: Iterable[Tensor], seen: set[tuple[str, int]]) -> int:
    total = 0
    for tensor in tensors:
        local = _local(tensor)
        if local.device.type == "meta":
            continue
        storage = local.untyped_storage()
        key = (str(local.device), storage.data_ptr())
        if key not in seen and storage.nbytes():
            seen.add(key)
            total += storage.nbytes()
    return total


def _local(tensor: Tensor) -> Tensor:
    """The shard a rank holds of a DTensor; other tensors as they are."""
    local = getattr(tensor, "_local_tensor", tensor)
    return local.detach()


def _state_tensors(optimizers: Iterable[torch.optim.Optimizer]) -> Iterable[Tensor]:
    def walk(value: Any) -> Iterable[Tensor]:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, dict):
            for item in value.values():
                yield from walk(item)
        elif isinstance(value, (list, tuple)):
            for item in value:
                yield from walk(item)

    for optimizer in optimizers:
        yield from walk(dict(optimizer.state))


def _fsdp_parameters(parts: Iterable[nn.Module]) -> Iterable[Any]:
    """FSDP2's own record of each parameter. Its attributes are not public: where a release lacks one, nothing is found."""
    for module in (m for part in parts for m in part.modules()):
        state = module._get_fsdp_state() if hasattr(module, "_get_fsdp_state") else None
        group = getattr(state, "_fsdp_param_group", None)
        yield from getattr(group, "fsdp_params", ())


def _shards(parts: Iterable[nn.Module]) -> Iterable[Tensor]:
    for found in _fsdp_parameters(parts):
        shard = getattr(found, "_sharded_param_data", None)
        if isinstance(shard, Tensor):
            yield shard


def _gathered(parts: Iterable[nn.Module]) -> Iterable[Tensor]:
    for found in _fsdp_parameters(parts):
        yield from getattr(found, "all_gather_outputs", ())  # freed storages have no bytes, so a resharded one counts nothing


def _unsharded_gradients(parts: Iterable[nn.Module]) -> Iterable[Tensor]:
    for found in _fsdp_parameters(parts):
        gradient = getattr(found, "unsharded_accumulated_grad", None)
        if isinstance(gradient, Tensor):
            yield gradient


# --- peaks --------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Base:
    """Bytes of the process before training, and whether the high-water mark could be set back."""

    resident: int | None
    reset: bool


def start_peak(device: torch.device | str) -> Base:
    """Start measuring a peak from now on this device. On a CPU, Linux sets VmHWM back to the present resident size if
    /proc/self/clear_refs may be written; otherwise the peak includes everything since the process began."""
    if torch.device(device).type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return Base(None, True)
    try:
        Path("/proc/self/clear_refs").write_text("5")
        reset = True
    except OSError:
        reset = False
    return Base(status_bytes("VmRSS"), reset)


def status_bytes(name: str) -> int | None:
    """A line of /proc/self/status (VmRSS, VmHWM) in bytes; None where there is no such file."""
    try:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith(name + ":"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError):
        pass
    return None


def ledger(static: Static, device: torch.device | str, base: Base, rank: int = 0, base_holds: int = 0) -> MemoryLedger:
    """The ledger of one rank since `start_peak`. ``base_holds``: bytes of ``static`` that existed when the base was taken (a CPU
    only: they are part of the resident size then, so the growth since does not show them)."""
    own = asdict(static)
    if torch.device(device).type == "cuda":
        stats = torch.cuda.memory_stats(device)
        used, reserved = stats["allocated_bytes.all.peak"], stats["reserved_bytes.all.peak"]
        return MemoryLedger(rank, **own, activations=max(0, used - static.total), allocator=max(0, reserved - used), peak=reserved,
                            source="CUDA allocator, reserved")
    high = status_bytes("VmHWM")
    if high is None or base.resident is None:
        return MemoryLedger(rank, **own, activations=None, allocator=None, peak=None, source=f"{UNKNOWN}: no /proc/self/status")
    peak = max(0, high - base.resident) + base_holds
    source = "VmHWM over the process's base" if base.reset else "VmHWM since the process began, over its base"
    return MemoryLedger(rank, **own, activations=max(0, peak - static.total), allocator=0, peak=max(peak, static.total), source=source)


def fullest(ledgers: Sequence[MemoryLedger]) -> MemoryLedger:
    """The ledger of the rank with the highest peak (or, where no peak is known, the most static bytes)."""
    return max(ledgers, key=lambda found: (found.peak or 0, sum(getattr(found, name) or 0 for name in CATEGORIES)))

