"""Which experts did the router choose, step by step, so that both halves can play it again?

Two kinds of file a rank, both numpy archives (.npz, compressed, no pickles), written whole or not at all:

* rows-rank00000-steps00000001-00000100.npz: schema, steps [S], layers [L], requested [S, L, E] and kept [S, L, E] as int32: rows
  that this rank's tokens asked of each expert, and those not dropped; summed over the microbatches of a step.
* ids-rank00000-step00000020.npz: schema, step, layers [L], ids [L, T, k] as uint16: the experts of each of the rank's T tokens of
  the step, best first, microbatches in order. 2*T*k bytes a layer before compression.

`write_histogram` turns rows into the text file of the planner's routing kind "histogram"; `write_replay` turns rows or ids into the
safetensors file that the trainer's routing mode "replay" plays: layer.<i> [T, k] or layer.<i>.counts [E].
Letters of shapes: S steps, L MoE layers, E experts, T tokens, k choices.
"""

from __future__ import annotations

import json
import os
import tempfile
import zipfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np

from moesim.files import write_atomically
from moesim.routing import read_histogram

SCHEMA = 1
MAX_EXPERTS = 2**16


@dataclass(frozen=True)
class Rows:
    """Recorded rows: steps [S], layers [L], requested and kept [S, L, E] as int64, summed over the ranks that were read."""

    steps: np.ndarray
    layers: np.ndarray
    requested: np.ndarray
    kept: np.ndarray


class RoutingRecorder:
    """Rows (and now and then ids) of one rank's tokens. Counts may be torch tensors: they are fetched once, at the step's end."""

    def __init__(self, folder: str | Path, rank: int, layers: Sequence[int], num_experts: int, top_k: int, *, every: int = 1, ids_every: int = 0, chunk: int = 100) -> None:
        """every: record rows each so many steps (0: never); ids_every: ids likewise; chunk: recorded steps a file."""
        if not 1 <= top_k <= num_experts <= MAX_EXPERTS:
            raise ValueError(f"routing log: 1 <= top_k {top_k} <= num_experts {num_experts} <= {MAX_EXPERTS} is needed")
        self.folder, self.rank = Path(folder), rank
        self.layers, self.num_experts, self.top_k = tuple(layers), num_experts, top_k
        self.every, self.ids_every, self.chunk = every, ids_every, max(1, chunk)
        self._counts: dict[int, list[tuple[Any, Any]]] = {}
        self._ids: dict[int, list[Any]] = {}
        self._done: list[tuple[int, np.ndarray, np.ndarray]] = []

    def wants(self, step: int) -> bool:
        """Are rows of this step to be recorded?"""
        return self.every > 0 and step % self.every == 0

    def wants_ids(self, step: int) -> bool:
        """Are expert ids of this step to be recorded?"""
        return self.ids_every > 0 and step % self.ids_every == 0

    def add(self, layer: int, requested: Any, kept: Any = None, ids: Any = None) -> None:
        """What one layer did with one microbatch: requested and kept rows [E] (kept None: all), ids [T, k] if they are wanted."""
        if layer not in self.layers:
            raise ValueError(f"routing log: no MoE layer {layer}; there are {self.layers}")
        self._counts.setdefault(layer, []).append((requested, requested if kept is None else kept))
        if ids is not None:
            self._ids.setdefault(layer, []).append(ids)

    def end_step(self, step: int, tokens: int | None = None) -> tuple[np.ndarray, np.ndarray]:
        """(requested, kept), each [L, E] int64, of the step just done; recorded if wanted. tokens: of this rank, to hold every
        layer to tokens * top_k requested rows. ValueError where rows were lost or counted twice."""
        counts, ids = self._counts, self._ids
        self._counts, self._ids = {}, {}
        requested, kept = (self._table(counts, which) for which in (0, 1))
        check_rows(self.layers, requested, kept, None if tokens is None else tokens * self.top_k)
        if self.wants(step):
            self._done.append((step, requested, kept))
            if len(self._done) >= self.chunk:
                self.flush()
        if self.wants_ids(step) and ids:
            self._write_ids(step, ids)
        return requested, kept

    def _table(self, counts: dict[int, list[tuple[Any, Any]]], which: int) -> np.ndarray:
        """[L, E]: the sums over microbatches of requested (0) or kept (1) rows."""
        table = np.zeros((len(self.layers), self.num_experts), np.int64)
        for i, layer in enumerate(self.layers):
            parts = [pair[which] for pair in counts.get(layer, ())]
            total = np.asarray(_host(sum(parts[1:], parts[0]))) if parts else table[i]
            if total.shape != (self.num_experts,):
                raise ValueError(f"routing log: layer {layer} counts {total.shape}, expected ({self.num_experts},)")
            table[i] = total
        return table

    def _write_ids(self, step: int, ids: dict[int, list[Any]]) -> None:
        missing = [layer for layer in self.layers if layer not in ids]
        if missing:
            raise ValueError(f"routing log: step {step} has no ids of layers {missing}")
        table = np.stack([np.concatenate([np.asarray(_host(part)) for part in ids[layer]]) for layer in self.layers])
        if table.shape[-1] != self.top_k or table.min() < 0 or table.max() >= self.num_experts:
            raise ValueError(f"routing log: ids of step {step} are {table.shape}, {table.min()} to {table.max()}; expected k {self.top_k} of {self.num_experts} experts")
        name = f"ids-rank{self.rank:05d}-step{step:08d}.npz"
        _save(self.folder / name, schema=np.int64(SCHEMA), step=np.int64(step), layers=np.array(self.layers, np.int32), ids=table.astype(np.uint16))

    def flush(self) -> None:
        """Write the rows recorded so far as a file of their own."""
        if not self._done:
            return
        steps = np.array([step for step, _, _ in self._done], np.int64)
        tables = {name: np.stack([item[i] for item in self._done]) for i, name in ((1, "requested"), (2, "kept"))}
        if tables["requested"].size and tables["requested"].max() >= 2**31:
            raise ValueError(f"routing log: {tables['requested'].max()} rows an expert do not fit int32")
        name = f"rows-rank{self.rank:05d}-steps{steps[0]:08d}-{steps[-1]:08d}.npz"
        _save(self.folder / name, schema=np.int64(SCHEMA), steps=steps, layers=np.array(self.layers, np.int32), **{k: v.astype(np.int32) for k, v in tables.items()})
        self._done = []

    close = flush


def _host(counts: Any) -> Any:
    return counts.detach().cpu().numpy() if hasattr(counts, "detach") else counts


def check_rows(layers: Sequence[int], requested: np.ndarray, kept: np.ndarray, expected: int | None) -> None:
    """Rows are conserved: kept <= requested for every expert, and every layer requested ``expected`` rows. ValueError if not."""
    for layer, asked, done in zip(layers, requested, kept, strict=True):
        if (done > asked).any():
            expert = int((done - asked).argmax())
            raise ValueError(f"routing log: layer {layer}, expert {expert} kept {done[expert]} rows of {asked[expert]} requested")
        if expected is not None and asked.sum() != expected:
            raise ValueError(f"routing log: layer {layer} requested {asked.sum()} rows, tokens * top_k is {expected}")


def _save(path: Path, **arrays: np.ndarray) -> None:
    _publish(path, lambda file: np.savez_compressed(file, **arrays))


def _publish(path: Path, write: Callable[[IO[bytes]], Any]) -> None:
    """A binary file, whole or not there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as file:
            write(file)
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


# --- reading ------------------------------------------------------------------------------------------------------------------


def _load(path: str | Path, names: Sequence[str]) -> dict[str, np.ndarray]:
    try:
        with np.load(path, allow_pickle=False) as archive:
            found = {name: archive[name] for name in archive.files}
    except (OSError, ValueError, zipfile.BadZipFile, EOFError) as error:
        raise ValueError(f"{path}: not a routing file ({type(error).__name__})") from None
    if set(found) != {"schema", *names} or found["schema"] != SCHEMA:
        raise ValueError(f"{path}: holds {', '.join(sorted(found))}; a routing file of schema {SCHEMA} holds schema, {', '.join(names)}")
    return found


def read_rows(paths: Iterable[str | Path]) -> Rows:
    """Rows of all ranks' files together, steps in order; a step that was recorded again after a restart counts as in the file
    that was written later. ValueError if the files disagree on layers or experts, or a rank lacks a step that others have."""
    by_rank: dict[str, dict[int, tuple[np.ndarray, np.ndarray]]] = {}
    layers = None
    for path in sorted(map(Path, paths), key=lambda p: (p.stat().st_mtime_ns, p.name)):
        found = _load(path, ("steps", "layers", "requested", "kept"))
        shape = (len(found["steps"]), len(found["layers"]))
        if found["requested"].shape[:2] != shape or found["kept"].shape != found["requested"].shape:
            raise ValueError(f"{path}: rows {found['requested'].shape} and {found['kept'].shape} of {shape[0]} steps and {shape[1]} layers")
        if layers is not None and not np.array_equal(layers, found["layers"]):
            raise ValueError(f"{path}: layers {found['layers'].tolist()}, other files have {layers.tolist()}")
        layers = found["layers"]
        rank = path.name.split("-steps")[0]
        table = zip(found["steps"].tolist(), found["requested"].astype(np.int64), found["kept"].astype(np.int64), strict=True)
        by_rank.setdefault(rank, {}).update({step: (asked, done) for step, asked, done in table})
    if layers is None:
        raise ValueError("routing log: no files of rows")
    return _together(by_rank, layers)


def _together(by_rank: dict[str, dict[int, tuple[np.ndarray, np.ndarray]]], layers: np.ndarray) -> Rows:
    steps = sorted(set().union(*by_rank.values()))
    lacking = {rank: [s for s in steps if s not in found] for rank, found in by_rank.items()}
    for rank, missing in lacking.items():
        if missing:
            raise ValueError(f"routing log: {rank} has no rows of step {missing[0]}, other ranks have")
    requested, kept = (np.stack([sum(found[step][i] for found in by_rank.values()) for step in steps]) for i in (0, 1))
    return Rows(np.array(steps), layers, requested, kept)


def read_ids(path: str | Path) -> tuple[int, np.ndarray, np.ndarray]:
    """(step, layers [L], ids [L, T, k] as int64) of an ids file. ValueError with one line if it is none."""
    found = _load(path, ("step", "layers", "ids"))
    if found["ids"].ndim != 3 or len(found["ids"]) != len(found["layers"]):
        raise ValueError(f"{path}: ids {found['ids'].shape} of {len(found['layers'])} layers")
    return int(found["step"]), found["layers"], found["ids"].astype(np.int64)


def counts_of_ids(ids: np.ndarray, num_experts: int) -> np.ndarray:
    """Requested rows [L, E] of ids [L, T, k]."""
    return np.stack([np.bincount(layer.ravel(), minlength=num_experts) for layer in ids])


def write_histogram(requested: np.ndarray, path: str | Path) -> None:
    """Rows [L, E] (or [S, L, E], summed over steps) as the file of the planner's routing kind "histogram", read back to be sure.
    ValueError, and no file, if layers hold different totals."""
    counts = np.asarray(requested)
    counts = counts.sum(0) if counts.ndim == 3 else counts
    totals = counts.sum(1)
    if len(set(totals.tolist())) != 1 or totals[0] == 0:
        raise ValueError(f"histogram: layers hold {sorted(set(totals.tolist()))} rows; every layer must route the same tokens, at least one")
    write_atomically(path, json.dumps({"layers": counts.tolist()}))
    if not np.array_equal(read_histogram(str(path)), counts):
        raise AssertionError(f"{path}: does not read back")


def write_replay(path: str | Path, layers: Sequence[int], *, ids: np.ndarray | None = None, requested: np.ndarray | None = None) -> None:
    """A record for `train.moe.replay`: ids [L, T, k], played token by token, or requested rows [L, E], played in proportion."""
    from safetensors.numpy import save

    if (ids is None) == (requested is None):
        raise ValueError("replay: give either ids or requested rows")
    table = np.asarray(requested if ids is None else ids, np.int64)
    if table.ndim != (2 if ids is None else 3) or len(table) != len(layers):
        raise ValueError(f"replay: a table of {table.shape} for {len(layers)} layers")
    suffix = ".counts" if ids is None else ""
    content = save({f"layer.{layer}{suffix}": np.ascontiguousarray(rows) for layer, rows in zip(layers, table, strict=True)})
    _publish(Path(path), lambda file: file.write(content))
