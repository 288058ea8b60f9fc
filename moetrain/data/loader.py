"""How does a run's data block become this rank's batches: rows of tokenised shards, mixed by weight, or made-up ids?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np

from moetrain.data.order import ORDER_VERSION, Order
from moetrain.data.packing import Row, num_rows, packed_row
from moetrain.data.shards import ShardSet
from moetrain.data.stream import AnyLoader, Slice
from moetrain.data.synthetic import SyntheticLoader

KINDS = ("synthetic", "shards")


@dataclass(frozen=True)
class Source:
    """A folder of shards and its share of the samples, on any scale."""

    path: str
    weight: float = 1.0


@dataclass(frozen=True)
class DataConfig:
    """What `Loader` reads of its config: any object with these attributes does.

    mask_documents: number the documents of a row, so that attention can stay inside one; else all positions are document 0.
    mask_boundary_labels: the first token of a document is no label.
    """

    sources: Sequence[Source]
    mask_documents: bool = False
    mask_boundary_labels: bool = False


@final
class Loader(AnyLoader):
    """Packed rows of tokenised shards, mixed by weight and shuffled by epoch.

    config: see `DataConfig`. validation: a folder of shards, read in its own order. vocab_size: the model's; None leaves it unchecked.
    prefetch: steps made ahead (0: in the calling thread). pin: page-locked batches, for a GPU.
    Raises ValueError, one line, for a source that can't be read, is shorter than a row, or has ids that the model lacks.
    """

    def __init__(
        self,
        config: DataConfig | Any,
        seq_len: int,
        global_batch_sequences: int,
        dp_rank: int = 0,
        dp_size: int = 1,
        micro_batch: int = 1,
        seed: int = 0,
        *,
        validation: str | None = None,
        vocab_size: int | None = None,
        prefetch: int = 2,
        pin: bool = False,
    ) -> None:
        super().__init__(seq_len, Slice(global_batch_sequences, dp_rank, dp_size, micro_batch), seed, prefetch, pin)
        if not config.sources:
            raise ValueError("data.sources is empty; name at least one folder of shards")
        self._mask_documents = config.mask_documents
        self._mask_boundary_labels = getattr(config, "mask_boundary_labels", False)
        self._weights = tuple(float(source.weight) for source in config.sources)
        self._sources = [_open(source.path, seq_len, vocab_size) for source in config.sources]
        self._validation = _open(validation, seq_len, vocab_size) if validation else None
        _check_tokenizers([*self._sources, *([self._validation] if self._validation else [])])
        self.order = Order(tuple(num_rows(s.num_tokens, seq_len) for s in self._sources), self._weights, seed)

    def fingerprint(self) -> dict[str, Any]:
        return {
            "kind": "shards",
            "order": ORDER_VERSION,
            "seed": self.seed,
            "seq_len": self.seq_len,
            "weights": list(self._weights),
            "sources": [source.digest for source in self._sources],
        }

    def rows(self, samples: np.ndarray) -> list[Row]:
        source, _, sequence = self.order.locate(samples)
        return [self._row(self._sources[s], i) for s, i in zip(source.tolist(), sequence.tolist(), strict=True)]

    def epochs(self, step: int) -> list[float]:
        """How often each source was read, in whole and part, when ``step`` begins."""
        at = self.first_sample(step)
        total = sum(self._weights)
        return [at * w / total / size for w, size in zip(self._weights, self.order.sizes, strict=True)]

    def num_validation(self) -> int:
        return num_rows(self._validation.num_tokens, self.seq_len) if self._validation else 0

    def validation_row(self, index: int) -> Row:
        if self._validation is None:
            raise ValueError("no validation folder was given")
        return self._row(self._validation, index)

    def _row(self, shards: ShardSet, index: int) -> Row:
        tokens, labels, documents = packed_row(shards, self.seq_len, index, self._mask_boundary_labels)
        return tokens, labels, documents if self._mask_documents else np.zeros_like(documents)


def open_loader(
    data: Any,
    *,
    vocab_size: int,
    seq_len: int,
    global_batch_sequences: int,
    dp_rank: int = 0,
    dp_size: int = 1,
    micro_batch: int = 1,
    seed: int = 0,
    prefetch: int = 2,
    pin: bool = False,
) -> AnyLoader:
    """The loader of a `train.data` block: its kind, sources, mask_documents, and validation.path if it has one. Raises ValueError."""
    place = (seq_len, global_batch_sequences, dp_rank, dp_size, micro_batch, seed)
    if data.kind == "synthetic":
        return SyntheticLoader(vocab_size, *place, prefetch=prefetch, pin=pin)
    if data.kind == "shards":
        validation = getattr(getattr(data, "validation", None), "path", None)
        return Loader(data, *place, validation=validation, vocab_size=vocab_size, prefetch=prefetch, pin=pin)
    raise ValueError(f"data.kind is {data.kind!r}; legal: {', '.join(KINDS)}")


def _open(path: str, seq_len: int, vocab_size: int | None) -> ShardSet:
    shards = ShardSet(path)
    if not num_rows(shards.num_tokens, seq_len):
        raise ValueError(f"{path}: holds {shards.num_tokens} tokens; one row of seq_len {seq_len} needs {seq_len + 1}")
    if vocab_size is not None and shards.vocab_size > vocab_size:
        raise ValueError(f"{path}: its tokenizer has {shards.vocab_size} ids; the model's vocabulary has {vocab_size}")
    return shards


def _check_tokenizers(sets: list[ShardSet]) -> None:
    known = {s.index.tokenizer_sha256: s.folder for s in sets if s.index.tokenizer_sha256}
    if len(known) > 1:
        (hash_a, a), (hash_b, b), *_ = known.items()
        raise ValueError(f"{a} and {b} hold ids of two tokenizers ({hash_a[:12]} and {hash_b[:12]}); build both with one")
