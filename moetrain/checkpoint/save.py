"""How is a checkpoint written so that it is whole or not there?

Every rank copies or borrows its boxes, writes its file and syncs it; rank 0 counts what all wrote, adds state.json and renames the folder
to its final name. Until that rename the last good checkpoint is the last good one.
"""

from __future__ import annotations

import json
import shutil
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from moetrain.checkpoint import dcp, folders
from moetrain.checkpoint.boxes import Box, type_name
from moetrain.checkpoint.digest import digest, total
from moetrain.checkpoint.errors import FAILURES, CheckpointError, Ranks, kind, one_line


@dataclass(frozen=True)
class Saved:
    """A finished save: where, how much this rank wrote, how long it took, and what the user should hear about."""

    path: Path
    step: int
    bytes: int
    seconds: float
    warnings: tuple[str, ...] = ()


@dataclass
class Staging:
    """Copies of boxes in host memory, page-locked where they come from a GPU; the memory serves the next save again."""

    buffers: dict[tuple, torch.Tensor]

    def copy(self, boxes: Sequence[Box]) -> tuple[list[Box], dict[tuple, int]]:
        """The boxes' copies, and the digests of those on a GPU, where mixing bits costs least."""
        digests = {box.key: digest(box.local, box.shape, box.offsets) for box in boxes if box.local.is_cuda}
        staged = []
        for box in boxes:
            buffer = self._buffer((*box.key, box.local.dtype), box.local)
            buffer.copy_(box.local, non_blocking=True)
            staged.append(replace(box, local=buffer))
        if any(box.local.is_cuda for box in boxes):
            torch.cuda.synchronize()
        return staged, digests

    def _buffer(self, key: tuple, like: torch.Tensor) -> torch.Tensor:
        if key not in self.buffers:
            self.buffers[key] = torch.empty(like.shape, dtype=like.dtype, pin_memory=like.is_cuda)
        return self.buffers[key]


@dataclass(frozen=True)
class Keeping:
    """``keep`` newest checkpoints stay (None: all), and every one whose step is a multiple of ``keep_every``."""

    keep: int | None = None
    keep_every: int | None = None


def write(root: Path, step: int, boxes: Sequence[Box], digests: dict[tuple, int], extra: dict[str, Any], ranks: Ranks, keeping: Keeping) -> Saved:
    """Writes and publishes one checkpoint. CheckpointError, the same on every rank, if any rank failed; nothing is left then. Collective."""
    began = time.monotonic()
    token = ranks.first(lambda: uuid.uuid4().hex)
    temp = folders.temporary(root, step, token)
    try:
        ranks.first(lambda: temp.mkdir(parents=True))
        files = dcp.save(boxes, temp, ranks)
        reports = ranks.together(lambda: _report(boxes, digests, files, extra))
        warnings = ranks.first(lambda: _finish(temp, step, extra, reports))
        path, more = ranks.first(lambda: _publish(temp, token, keeping))
    except FAILURES as error:  # (every failure of a save is one line, on every rank)
        if ranks.rank == 0:
            shutil.rmtree(temp, ignore_errors=True)
        raise kind(error)(f"checkpoint of step {step} in {root} was not written: {one_line(error)}") from error
    return Saved(path, step, sum(entry["bytes"] for entry in files.values()), time.monotonic() - began, (*warnings, *more))


@dataclass(frozen=True)
class Report:
    """What one rank tells rank 0: its files, and for each of its boxes (type, logical shape, digest)."""

    files: dict[str, dict[str, Any]]
    boxes: dict[tuple, tuple[str, tuple[int, ...], int]]
    extra: str


def _report(boxes: Sequence[Box], digests: dict[tuple, int], files, extra: dict[str, Any]) -> Report:
    entries = {}
    for box in boxes:
        value = digests[box.key] if box.key in digests else digest(box.local, box.shape, box.offsets)
        entries.setdefault(box.key, (type_name(box.local.dtype), box.shape, value))
    return Report(files, entries, json.dumps(extra, sort_keys=True))


def _finish(temp: Path, step: int, extra: dict[str, Any], reports: Sequence[Report]) -> list[str]:
    """Counts what the ranks wrote and writes state.json; words of warning."""
    files = {name: entry for report in reports for name, entry in report.files.items()}
    files[folders.METADATA] = {"bytes": (temp / folders.METADATA).stat().st_size, "sha256": folders.sha256(temp / folders.METADATA)}
    for name, entry in files.items():
        if not (temp / name).is_file() or (temp / name).stat().st_size != entry["bytes"]:
            raise CheckpointError(f"rank 0 does not see {name} as it was written in {temp.parent}: that folder must be on a file system all ranks share")
    tensors, drifted = _tensors(reports)
    document = {"format": folders.FORMAT, "step": step, "saved_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
                "world_size": len(reports), "torch": torch.__version__, "extra": extra, "tensors": tensors, "files": files}
    folders.write_synced(temp / folders.STATE, folders.dump_state(document))
    return [*drifted, *_differing_extra(reports)]


def _tensors(reports: Sequence[Report]) -> tuple[dict[str, dict[str, Any]], list[str]]:
    """Each logical tensor's type, shape and digest; and which of them are not the same on two ranks that both hold them."""
    first: dict[tuple, tuple[int, tuple]] = {}
    drifted: list[str] = []
    for rank, report in enumerate(reports):
        for key, entry in report.boxes.items():
            other, seen = first.setdefault(key, (rank, entry))
            if seen != entry:
                drifted.append(f"{key[0]} is not the same on ranks {other} and {rank}, which both hold it")
    pieces: dict[str, list[tuple]] = {}
    for (name, _, _), (_, entry) in first.items():
        pieces.setdefault(name, []).append(entry)
    tensors = {name: {"dtype": found[0][0], "shape": [*found[0][1]], "digest": total([value for _, _, value in found])}
               for name, found in sorted(pieces.items())}
    more = [f"{len(drifted) - 3} more tensors differ between ranks"] if len(drifted) > 3 else []
    return tensors, drifted[:3] + more


def _differing_extra(reports: Sequence[Report]) -> list[str]:
    odd = [rank for rank, report in enumerate(reports) if report.extra != reports[0].extra]
    return [f"the run's state on rank {odd[0]} is not that of rank 0, which is what was saved"] if odd else []


def _publish(temp: Path, token: str, keeping: Keeping) -> tuple[Path, list[str]]:
    old = folders.supersede(temp, token)
    words = [f"{p.name}, of a step this run went back behind, is kept as {p.name}.superseded-{token[:8]}" for p in old]
    path = folders.publish(temp, token)
    try:
        folders.prune(path.parent, keeping.keep, keeping.keep_every, token)
    except OSError as error:
        words.append(f"older ones could not be deleted: {one_line(error)}")
    return path, words


def check_extra(value: Any, where: str = "extra") -> None:
    """CheckpointError unless ``value`` comes back from JSON as it went in (tuples come back as lists)."""
    if isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                raise CheckpointError(f"{where} has the key {key!r}: JSON keeps keys that are strings only")
            check_extra(item, f"{where}.{key}")
    elif isinstance(value, (list, tuple)):
        for number, item in enumerate(value):
            check_extra(item, f"{where}[{number}]")
    elif type(value) not in (str, int, float, bool, type(None)):
        raise CheckpointError(f"{where} is a {type(value).__name__}: a checkpoint keeps strings, numbers, true, false, null, lists and dicts beside its tensors")


def announce(saved: Saved, log: Callable[[str], None]) -> None:
    for text in _lines(saved):
        log(text)


def _lines(saved: Saved) -> Iterable[str]:
    return (f"checkpoint of step {saved.step}: {text}" for text in saved.warnings)
