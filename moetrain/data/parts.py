"""How far has a build come, so that the next one may go on from there?"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from moetrain.data.shards import ShardEntry
from moetrain.data.writer import ShardBuffer, shard_name, write_text

SPLITS = ("train", "validation")
PARTS = "parts"


class Parts:
    """The finished parts of a build: shard number i of each split, and how many documents of the input they take in. Final."""

    def __init__(self, folder: Path, vocab_size: int) -> None:
        self._folder = folder
        self._buffers = {name: ShardBuffer(folder / name, vocab_size) for name in SPLITS}
        self._bytes = dict.fromkeys(SPLITS, 0)
        self.records: list[dict[str, Any]] = []
        while (record := self._recorded(len(self.records))) is not None:
            self.records.append(record)
        self.documents = self.records[-1]["documents"] if self.records else 0

    def add(self, split: str, ids: np.ndarray, text: str) -> None:
        self._buffers[split].add(ids, shard_name(len(self.records)))
        self._bytes[split] += len(text.encode())

    @property
    def waiting_tokens(self) -> int:
        return max(buffer.num_tokens for buffer in self._buffers.values())

    @property
    def num_tokens(self) -> int:
        return sum(entry.tokens for name in SPLITS for entry in self.entries(name))

    def write(self) -> None:
        """What waits, as the next part; the record comes last, so that a part without one never was."""
        name = shard_name(len(self.records))
        entries = {split: buffer.write(name) for split, buffer in self._buffers.items()}
        record = {split: entry.model_dump() for split, entry in entries.items() if entry}
        record |= {"documents": self.documents, "bytes": self._bytes}
        write_text(self._folder / PARTS / f"{name}.json", json.dumps(record))
        self.records.append(record)
        self._bytes = dict.fromkeys(SPLITS, 0)

    def entries(self, split: str) -> list[ShardEntry]:
        return [ShardEntry(**record[split]) for record in self.records if split in record]

    def text_bytes(self) -> dict[str, int]:
        return {split: sum(record["bytes"][split] for record in self.records) for split in SPLITS}

    def _recorded(self, number: int) -> dict[str, Any] | None:
        path = self._folder / PARTS / f"{shard_name(number)}.json"
        return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None
