"""How does a run take up a checkpoint that another layout wrote, and when does it refuse?

Files are verified, names and shapes compared over all ranks, tensors read in place shard by shard, and the digests of the logical
tensors compared with those of the day they were saved.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from moetrain.checkpoint import dcp, folders
from moetrain.checkpoint.boxes import TYPES, Box, State, optimizers, owned, type_name
from moetrain.checkpoint.digest import digest, total
from moetrain.checkpoint.errors import FAILURES, CheckpointError, Damaged, Ranks, kind, one_line
from moetrain.checkpoint.folders import Stored


@dataclass(frozen=True)
class Restored:
    """What a run resumes from: ``extra`` as it was saved, and what the user should know (skipped checkpoints, changed settings)."""

    path: Path
    step: int
    extra: dict[str, Any]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Checks:
    """What loading verifies: ``files`` by size and sha256 (reads everything once more), ``digests`` of what came out."""

    files: bool = True
    digests: bool = True


BOTH = Checks()


def restore(path: Path, parts: Sequence[nn.Module], optimizer: Any, present: dict[str, Any] | None, ranks: Ranks, checks: Checks) -> Restored:
    """Fills parts and optimizer in place. Damaged, CheckpointError: in one line, the same on every rank. Collective."""
    stored = ranks.first(lambda: folders.read_state(path))
    if checks.files:
        _verify_files(stored, ranks)
    notes = ranks.first(lambda: compare(stored, present or {}))
    state = ranks.each(lambda: _state(stored, parts, optimizer))
    notes = [*notes, *_compare_names(stored, state, optimizer is not None, ranks)]
    try:
        dcp.load(state.boxes, path, ranks)
    except FAILURES as error:
        raise kind(error)(f"{path} can't be loaded: {one_line(error)}") from error
    for number in state.numbers:
        number.write_back()
    if checks.digests:
        _verify_digests(stored, state.boxes, ranks)
    return Restored(path, stored.step, stored.extra, tuple(notes))


def _state(stored: Stored, parts: Sequence[nn.Module], optimizer: Any) -> State:
    """The tensors to fill. What an optimizer makes at its first step only is made now."""
    state = State(parts, None)
    for other in optimizers(optimizer):
        for name, parameter, group in owned(other, state.parameters):
            _make_missing(stored, name, parameter, other.state[parameter], bool(group.get("fused") or group.get("capturable")))
    return State(parts, optimizer)


def _make_missing(stored: Stored, name: str, parameter: torch.Tensor, kept: dict[str, Any], on_device: bool) -> None:
    if kept:
        return
    for full, entry in stored.tensors.items():
        owner, _, key = full.removeprefix("optim.").rpartition(".")
        if full.startswith("optim.") and owner == name:
            dtype = TYPES[entry["dtype"]]
            if tuple(entry["shape"]) == tuple(parameter.shape):
                kept[key] = torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
            else:
                scalar_home = parameter.device if on_device or entry["shape"] else "cpu"
                kept[key] = torch.zeros(entry["shape"], dtype=dtype, device=scalar_home)


def _verify_files(stored: Stored, ranks: Ranks) -> None:
    mine = sorted(stored.files)[ranks.rank::ranks.world]
    ranks.each(lambda: [folders.check_content(stored, name) for name in mine])


def _compare_names(stored: Stored, state: State, with_optimizer: bool, ranks: Ranks) -> list[str]:
    """CheckpointError unless the run's tensors and the checkpoint's are the same; notes on types that differ. Collective."""
    mine = {name: (tuple(tensor.shape), type_name(tensor.dtype)) for name, tensor in state.tensors}
    wanted = {name: entry for entries in ranks.gather(mine) for name, entry in entries.items()}
    held = {name: entry for name, entry in stored.tensors.items() if with_optimizer or not name.startswith("optim.")}
    missing, unexpected = sorted(wanted.keys() - held.keys()), sorted(held.keys() - wanted.keys())
    if missing:
        raise CheckpointError(f"{stored.path} lacks {_some(missing)}{_like(missing[0], unexpected or held)}")
    if unexpected:
        raise CheckpointError(f"{stored.path} holds {_some(unexpected)}, which this run has no place for{_like(unexpected[0], wanted)}")
    for name, (shape, _) in sorted(wanted.items()):
        if list(shape) != held[name]["shape"]:
            raise CheckpointError(f"{name} has shape {list(shape)} in this run and {held[name]['shape']} in {stored.path}")
    cast = [f"{name} was {held[name]['dtype']} and is {dtype}" for name, (_, dtype) in sorted(wanted.items()) if dtype != held[name]["dtype"]]
    notes = [f"{len(cast)} tensors change type, first {cast[0]}"] if cast else []
    if with_optimizer and not any(name.startswith("optim.") for name in held):
        notes.append("the checkpoint holds no optimizer state: the optimizer starts afresh")
    return notes


def _some(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{len(names)} tensors, first {names[0]}"


def _like(name: str, names: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, list(names), 1, 0.8)
    return f" (nearest: {near[0]})" if near else ""


def _verify_digests(stored: Stored, boxes: Sequence[Box], ranks: Ranks) -> None:
    """Damaged unless every logical tensor is what was saved, bit for bit; those that changed type can't be compared."""
    same = [box for box in boxes if type_name(box.local.dtype) == stored.tensors[box.name]["dtype"]]
    pieces = [{box.key: digest(box.local, box.shape, box.offsets) for box in same}]
    merged: dict[tuple, int] = {}
    for rank, theirs in enumerate(ranks.gather(pieces[0])):
        for key, value in theirs.items():
            if merged.setdefault(key, value) != value:
                raise Damaged(f"{stored.path}: {key[0]} came out otherwise on rank {rank} than on another that holds the same part")
    sums: dict[str, list[int]] = {}
    for (name, _, _), value in merged.items():
        sums.setdefault(name, []).append(value)
    for name, values in sorted(sums.items()):
        if total(values) != stored.tensors[name]["digest"]:
            raise Damaged(f"{stored.path}: {name} came out with digest {total(values)}, {stored.tensors[name]['digest']} was saved")


FIXED = "identity"
"""The key of ``extra`` that must be the same: what the model, its data and its tokenizer are."""
NOTED = ("config", "layout", "world_size", "torch")
"""Keys of ``extra`` that may change between runs; changes are noted."""


def compare(stored: Stored, present: dict[str, Any]) -> list[str]:
    """CheckpointError naming the first difference in what must be the same; notes on what may change. ``present`` is the extra of
    the run that loads."""
    if FIXED in present and FIXED in stored.extra:
        for where, old, new in differences(stored.extra[FIXED], present[FIXED]):
            raise CheckpointError(f"{where} is {_short(new)} in this run and was {_short(old)} in {stored.path}: a run resumes only its own model and data")
    notes = []
    for key in NOTED:
        if key in present and key in stored.extra:
            notes += [f"{where} was {_short(old)} and is {_short(new)}" for where, old, new in differences(stored.extra[key], present[key], key)]
    return notes


def differences(old: Any, new: Any, where: str = "") -> Iterable[tuple[str, Any, Any]]:
    """(dotted path, old value, new value) of every leaf that differs; what only one side has is None on the other."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in sorted(old.keys() | new.keys()):
            yield from differences(old.get(key), new.get(key), f"{where}.{key}" if where else key)
    elif isinstance(old, (list, tuple)) and isinstance(new, (list, tuple)) and len(old) == len(new):
        for number, (a, b) in enumerate(zip(old, new)):
            yield from differences(a, b, f"{where}[{number}]")
    elif old != new:
        yield where, old, new


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
