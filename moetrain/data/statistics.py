"""How well does one predict the validation text from word counts alone: the loss that a model must beat to have learned anything?"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np

from moetrain.data.shards import ShardSet

STATISTICS = "statistics.json"
CHUNK = 1 << 22


def count_ids(shards: ShardSet) -> np.ndarray:
    """How often each id occurs ([vocab_size] int64)."""
    counts = np.zeros(shards.vocab_size, dtype=np.int64)
    for start in range(0, shards.num_tokens, CHUNK):
        counts += np.bincount(shards.tokens(start, min(start + CHUNK, shards.num_tokens)), minlength=shards.vocab_size)
    return counts


def unigram_entropy(train_counts: np.ndarray, counts: np.ndarray) -> float:
    """Mean of -log q over the tokens counted, in nats a token, with q the train frequencies after adding one to each count (Laplace).

    With the counts of the validation set it is the cross entropy of a model that knows frequencies and no context.
    """
    q = (train_counts + 1) / (train_counts.sum() + train_counts.size)
    return float(-(counts * np.log(q)).sum() / counts.sum())


def statistics(train: ShardSet, validation: ShardSet | None, text_bytes: dict[str, int] | None = None) -> dict[str, Any]:
    """Plain data on a train and a validation set. Entropies in nats a token; bytes are of the text in UTF-8."""
    sets = {"train": train} | ({"validation": validation} if validation else {})
    counts = {name: count_ids(shards) for name, shards in sets.items()}
    report: dict[str, Any] = {"schema_version": 1, "vocab_size": train.vocab_size, "uniform_nats": math.log(train.vocab_size)}
    for name, shards in sets.items():
        report[name] = {
            "tokens": shards.num_tokens,
            "documents": shards.num_documents,
            "distinct_ids": int((counts[name] > 0).sum()),
            "unigram_nats": unigram_entropy(counts["train"], counts[name]),
        }
        if text_bytes:
            report[name] |= {"text_bytes": text_bytes[name], "bytes_per_token": text_bytes[name] / shards.num_tokens}
    return report


def read_statistics(folder: str | Path) -> dict[str, Any]:
    """The statistics of a built folder. Raises ValueError."""
    path = Path(folder) / STATISTICS
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: {' '.join(str(error).split())[:120]}") from None
