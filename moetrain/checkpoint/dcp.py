"""How do boxes reach disk and come back through torch.distributed.checkpoint, without a pickle ever being read?

Planner, writer and reader for DCP. The writer hashes what it writes, file by file, and holds one tensor at a time. What DCP keeps in
its pickled `.metadata` is also written as index.json, and that alone is read; `.metadata` is there for torch's own tools.
Tensors are read with torch.load(weights_only=True). https://docs.pytorch.org/docs/stable/distributed.checkpoint.html
"""

from __future__ import annotations

import hashlib
import json
import os
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, StorageMeta, TensorProperties, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from moetrain.checkpoint.boxes import TYPES, Box, type_name
from moetrain.checkpoint.errors import Damaged, Ranks, one_line
from moetrain.checkpoint.folders import INDEX, write_synced

warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")


def save(boxes: Sequence[Box], path: Path, ranks: Ranks) -> dict[str, dict[str, Any]]:
    """Writes every rank's boxes to folder ``path``; this rank's files {name: {bytes, sha256}}. Collective."""
    writer = _Writer(path)
    dcp.save({}, storage_writer=writer, planner=_SavePlanner(boxes), process_group=ranks.pg, no_dist=ranks.pg is None)
    return writer.files


def load(boxes: Sequence[Box], path: Path, ranks: Ranks) -> None:
    """Fills this rank's boxes in place from folder ``path``, which may have been cut otherwise. Collective."""
    # Before dcp.load, which takes a failure to read this for a checkpoint of another kind.
    metadata = ranks.each(lambda: _whole_index(path / INDEX, boxes))
    dcp.load({}, storage_reader=_Reader(path, metadata), planner=_LoadPlanner(boxes), process_group=ranks.pg, no_dist=ranks.pg is None)


class _SavePlanner(DefaultSavePlanner):
    """DCP's planner (each box is written once, replicas dealt out by size) over boxes instead of a state dict."""

    def __init__(self, boxes: Sequence[Box]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.boxes = {(box.name, box.offsets): box for box in boxes}

    def set_up_planner(self, state_dict, storage_meta=None, is_coordinator=False) -> None:
        self.is_coordinator = is_coordinator

    def create_local_plan(self) -> SavePlan:
        self.plan = SavePlan([_write_item(box) for box in self.boxes.values()])
        return self.plan

    def create_global_plan(self, all_plans):
        plans, metadata = super().create_global_plan(all_plans)
        for name, tensor in metadata.state_dict_metadata.items():
            held = sum(chunk.sizes.numel() for chunk in tensor.chunks)
            if held != tensor.size.numel():
                raise ValueError(f"{name}: the ranks together hold {held} of its {tensor.size.numel()} elements")
        return plans, metadata

    def lookup_object(self, index: MetadataIndex) -> torch.Tensor:
        return self.boxes[index.fqn, tuple(index.offset)].local


def _write_item(box: Box) -> WriteItem:
    offsets, properties = torch.Size(box.offsets), TensorProperties(dtype=box.local.dtype)
    chunk = ChunkStorageMetadata(offsets, box.local.shape)
    return WriteItem(MetadataIndex(box.name, offsets), WriteItemType.SHARD, tensor_data=TensorWriteData(chunk, properties, torch.Size(box.shape)))


class _Hashed:
    """A file that hashes what is written to it and remembers, rather than raises, a failure: torch's archive writer calls it from C++
    code that an exception would leave in ruins."""

    def __init__(self, file) -> None:
        self.file, self.sha256, self.bytes, self.error = file, hashlib.sha256(), 0, None

    def write(self, data) -> int:
        size = memoryview(data).nbytes
        if self.error is None:
            try:
                self.file.write(data)
                self.sha256.update(data)
                self.bytes += size
            except OSError as error:
                self.error = error
        return size

    def flush(self) -> None:
        pass


class _Writer(dcp.FileSystemWriter):
    """One file a rank, its tensors one after the other, on the disk when it returns."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.files: dict[str, dict[str, Any]] = {}

    def write_data(self, plan: SavePlan, planner) -> Future[list[WriteResult]]:
        results: list[WriteResult] = []
        if plan.items:
            name = f"{plan.storage_data.prefix}0.distcp"
            with open(Path(self.path) / name, "wb") as file:
                results = self._write_items(_Hashed(file), name, plan.items, planner)
                file.flush()
                os.fsync(file.fileno())
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def _write_items(self, stream: _Hashed, name: str, items: Iterable[WriteItem], planner) -> list[WriteResult]:
        results = []
        for item in items:
            start = stream.bytes
            tensor = planner.resolve_data(item).detach().cpu()
            # A view would drag the whole storage it looks into along.
            torch.save(tensor if tensor.untyped_storage().nbytes() == tensor.nbytes and tensor.is_contiguous() else tensor.clone(
                memory_format=torch.contiguous_format), stream)
            if stream.error is not None:
                raise stream.error
            results.append(WriteResult(item.index, stream.bytes - start, _StorageInfo(name, start, stream.bytes - start)))
        self.files[name] = {"bytes": stream.bytes, "sha256": stream.sha256.hexdigest()}
        return results

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        super().finish(metadata, results)
        self.files[INDEX] = write_synced(Path(self.path) / INDEX, _dump_index(metadata))

    def storage_meta(self) -> StorageMeta:
        return StorageMeta(save_id=self.save_id)


class _LoadPlanner(LoadPlanner):
    """Which saved chunks overlap which of this rank's boxes."""

    def __init__(self, boxes: Sequence[Box]) -> None:
        self.boxes = boxes

    def set_up_planner(self, state_dict, metadata=None, is_coordinator=False) -> None:
        self.metadata = metadata

    def create_local_plan(self) -> LoadPlan:
        self.targets: list[Box] = []
        items = []
        for box in self.boxes:
            chunk = ChunkStorageMetadata(torch.Size(box.offsets), box.local.shape)
            for item in create_read_items_for_chunk_list(box.name, self.metadata.state_dict_metadata[box.name], [chunk]):
                # Two boxes of one rank may be the same part of a tensor (a tied weight's copies): tell them apart by number.
                items.append(_numbered(item, len(self.targets)))
            self.targets.append(box)
        return LoadPlan(items)

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        return central_plan

    def resolve_tensor(self, read_item) -> torch.Tensor:
        target = self.targets[read_item.dest_index.index].local
        for dim, (low, count) in enumerate(zip(read_item.dest_offsets, read_item.lengths)):
            target = target.narrow(dim, low, count)
        return target

    def commit_tensor(self, read_item, tensor) -> None:
        pass

    def load_bytes(self, read_item, value) -> None:
        raise Damaged(f"{read_item.dest_index.fqn} is stored as bytes, not as a tensor")


def _numbered(item, number: int):
    index = MetadataIndex(item.dest_index.fqn, item.dest_index.offset, number)
    return type(item)(item.type, index, item.dest_offsets, item.storage_index, item.storage_offsets, item.lengths)


class _Reader(dcp.FileSystemReader):
    """Reads no pickle, and each saved chunk once, one at a time."""

    def __init__(self, path: Path, metadata: Metadata) -> None:
        super().__init__(path)
        self.metadata = metadata

    def read_metadata(self) -> Metadata:
        return self.metadata

    @torch.no_grad()
    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        wanted: dict[tuple[str, int, int], list] = {}
        for item in plan.items:
            info = self.storage_data[item.storage_index]
            wanted.setdefault((info.relative_path, info.offset, info.length), []).append(item)
        for place in sorted(wanted):
            saved = self._tensor(*place)
            for item in wanted[place]:
                source = saved
                for dim, (low, count) in enumerate(zip(item.storage_offsets, item.lengths)):
                    source = source.narrow(dim, low, count)
                planner.resolve_tensor(item).copy_(source)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _tensor(self, name: str, offset: int, length: int) -> torch.Tensor:
        path = Path(self.path) / name
        try:
            with path.open("rb") as file:
                loaded = torch.load(self._slice_file(file, _StorageInfo(name, offset, length)), map_location="cpu", weights_only=True)
        except Exception as error:  # noqa: BLE001  (torch raises many kinds for bytes that are no tensor)
            raise Damaged(f"{path} holds no readable tensor at byte {offset}: {one_line(error)[:160]}") from None
        if not isinstance(loaded, torch.Tensor):
            raise Damaged(f"{path} holds a {type(loaded).__name__}, not a tensor, at byte {offset}")
        return loaded


def _dump_index(metadata: Metadata) -> str:
    """{tensor: {dtype, shape, chunks: [[offsets, sizes, file, byte offset, byte length], ...]}} of DCP's metadata, as JSON."""
    tensors = {}
    for name, tensor in metadata.state_dict_metadata.items():
        places = [metadata.storage_data[MetadataIndex(name, chunk.offsets)] for chunk in tensor.chunks]
        chunks = [[[*chunk.offsets], [*chunk.sizes], p.relative_path, p.offset, p.length] for chunk, p in zip(tensor.chunks, places)]
        tensors[name] = {"dtype": type_name(tensor.properties.dtype), "shape": [*tensor.size], "chunks": chunks}
    return json.dumps(tensors)


def _whole_index(path: Path, boxes: Sequence[Box]) -> Metadata:
    metadata = _load_index(path)
    for box in boxes:
        entry = metadata.state_dict_metadata.get(box.name)
        if entry is None or tuple(entry.size) != box.shape:
            raise Damaged(f"{path} has no {box.name} of shape {list(box.shape)}")
    return metadata


def _load_index(path: Path) -> Metadata:
    try:
        tensors, places = {}, {}
        for name, entry in json.loads(path.read_text()).items():
            chunks = []
            for offsets, sizes, file, start, length in entry["chunks"]:
                if os.path.basename(file) != file:
                    raise ValueError(f"file name {file!r}")
                chunks.append(ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)))
                places[MetadataIndex(name, offsets)] = _StorageInfo(file, int(start), int(length))
            tensors[name] = TensorStorageMetadata(TensorProperties(dtype=TYPES[entry["dtype"]]), torch.Size(entry["shape"]), chunks)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise Damaged(f"{path} is no index of a checkpoint: {one_line(error)[:160]}") from None
    return Metadata(tensors, storage_data=places, storage_meta=StorageMeta())
