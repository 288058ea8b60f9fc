"""Which ids does a run eat that needs no data: for a benchmark, a test, a first try?"""

from __future__ import annotations

import math
from typing import Any, final

import numpy as np

from moetrain.data.order import ORDER_VERSION, key_of, mix64
from moetrain.data.packing import Row
from moetrain.data.stream import AnyLoader, Slice


@final
class SyntheticLoader(AnyLoader):
    """Sequences of independent random ids, each made from (seed, sample number, position) alone: no files, any layout the same.

    zipf: None for uniform ids, else the exponent s of P(id = i) proportional to 1 / (i + 1)^s. Nothing in it can be learned but that.
    num_validation_sequences: how many the validation has; they are no training sample.
    """

    def __init__(
        self,
        vocab_size: int,
        seq_len: int,
        global_batch_sequences: int,
        dp_rank: int = 0,
        dp_size: int = 1,
        micro_batch: int = 1,
        seed: int = 0,
        *,
        zipf: float | None = None,
        num_validation_sequences: int = 64,
        prefetch: int = 2,
        pin: bool = False,
    ) -> None:
        super().__init__(seq_len, Slice(global_batch_sequences, dp_rank, dp_size, micro_batch), seed, prefetch, pin)
        if not 1 <= vocab_size < 1 << 32:
            raise ValueError(f"vocab_size is {vocab_size}; it must be at least 1 and below 2**32")
        if zipf is not None and not (math.isfinite(zipf) and zipf >= 0):
            raise ValueError(f"the zipf exponent is {zipf}; it must be 0 or more")
        self.vocab_size = vocab_size
        self.zipf = zipf
        self._num_validation = num_validation_sequences
        self._cumulative = None if zipf is None else _zipf_cumulative(vocab_size, zipf)

    def fingerprint(self) -> dict[str, Any]:
        return {
            "kind": "synthetic",
            "order": ORDER_VERSION,
            "seed": self.seed,
            "seq_len": self.seq_len,
            "vocab_size": self.vocab_size,
            "zipf": self.zipf,
        }

    def rows(self, samples: np.ndarray) -> list[Row]:
        return self._random_rows(samples, key_of(self.seed, 0))

    def num_validation(self) -> int:
        return self._num_validation

    def validation_row(self, index: int) -> Row:
        return self._random_rows(np.array([index]), key_of(self.seed, 1))[0]

    def _random_rows(self, samples: np.ndarray, key: int) -> list[Row]:
        words = random_words(samples, self.seq_len + 1, key)
        if self._cumulative is None:
            ids = ((words >> np.uint64(32)) * np.uint64(self.vocab_size)) >> np.uint64(32)
        else:
            uniform = (words >> np.uint64(11)) * 2.0**-53
            ids = np.searchsorted(self._cumulative, uniform, side="right")
        ids = ids.astype(np.int64)
        return [(row[:-1], row[1:], np.zeros(self.seq_len, dtype=np.int32)) for row in ids]


def random_words(samples: np.ndarray, num: int, key: int) -> np.ndarray:
    """``num`` random 64-bit words of each sample ([n] -> [n, num] uint64), from the key, the sample number and the place alone."""
    start = mix64(mix64(samples.astype(np.uint64)) ^ np.uint64(key))
    places = np.arange(1, num + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    return mix64(start[:, None] + places)


def _zipf_cumulative(vocab_size: int, exponent: float) -> np.ndarray:
    share = 1.0 / np.arange(1, vocab_size + 1, dtype=np.float64) ** exponent
    cumulative = np.cumsum(share) / share.sum()
    cumulative[-1] = 1.0
    return cumulative
