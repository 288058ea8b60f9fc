"""Which sequences does this rank train on at step t, wherever they come from?

The global batch of step t is samples t G to t G + G - 1 of the run's order (G sequences a step). Rank r of R reads the r-th of R equal
blocks of it, and its microbatches are consecutive sequences of the block. So the union over ranks and microbatches is the global batch for
every R and microbatch size, and the next sample number resumes a run on another number of ranks.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Any, final

import numpy as np

from moetrain.data.batch import Batch, batch_from_rows
from moetrain.data.packing import IGNORED, Row
from moetrain.data.prefetch import Prefetcher


@dataclass(frozen=True)
class Slice:
    """Which part of the global batch is this rank's. Sizes in sequences."""

    global_batch: int
    dp_rank: int
    dp_size: int
    micro_batch: int

    def __post_init__(self) -> None:
        if min(self.global_batch, self.dp_size, self.micro_batch) < 1:
            sizes = f"global batch {self.global_batch}, {self.dp_size} ranks, micro-batch {self.micro_batch}"
            raise ValueError(f"{sizes}: each must be at least 1")
        if not 0 <= self.dp_rank < self.dp_size:
            raise ValueError(f"no rank {self.dp_rank} of {self.dp_size}")
        if self.global_batch % (self.dp_size * self.micro_batch):
            raise ValueError(
                f"a global batch of {self.global_batch} sequences doesn't divide over {self.dp_size} data-parallel ranks "
                f"in micro-batches of {self.micro_batch}; it must be a multiple of {self.dp_size * self.micro_batch}"
            )

    @property
    def num_sequences(self) -> int:
        return self.global_batch // self.dp_size

    @property
    def num_microbatches(self) -> int:
        return self.num_sequences // self.micro_batch

    def samples(self, first: int) -> np.ndarray:
        """Sample numbers of this rank ([global_batch / dp_size] int64) in the global batch that starts at sample ``first``."""
        return np.arange(self.num_sequences, dtype=np.int64) + (first + self.dp_rank * self.num_sequences)


class AnyLoader(ABC):
    """The batches of one rank. Abstract: a subclass says what a sample is.

    `batch(step)` works for any step in any order; consecutive steps are made ahead in the background. `data_wait_s` is how long the last
    call blocked, in seconds; `data_wait_total_s` the sum of all.
    """

    def __init__(self, seq_len: int, part: Slice, seed: int, prefetch: int, pin: bool) -> None:
        if seq_len < 1:
            raise ValueError(f"seq_len is {seq_len}; it must be at least 1")
        self.seq_len = seq_len
        self.part = part
        self.seed = seed
        self.data_wait_s = self.data_wait_total_s = 0.0
        self._pin = pin
        self._base = (0, 0)  # a step and the sample it starts at; later steps count from there
        self._next_step = 0
        self._prefetcher = Prefetcher(self._make, prefetch)

    @abstractmethod
    def fingerprint(self) -> dict[str, Any]:
        """Plain data that differs where the stream of samples would."""

    @abstractmethod
    def rows(self, samples: np.ndarray) -> list[Row]:
        """The sequence of each global sample number."""

    @abstractmethod
    def num_validation(self) -> int:
        """How many validation sequences there are."""

    @abstractmethod
    def validation_row(self, index: int) -> Row:
        """A validation sequence, by its number."""

    @final
    def batch(self, step: int) -> Batch:
        """This rank's sequences of a step: global_batch / dp_size rows on the CPU; `Batch.split` makes the microbatches."""
        made = self._prefetcher.get(step)
        self.data_wait_s = self._prefetcher.wait_s
        self.data_wait_total_s += self.data_wait_s
        self._next_step = step + 1
        return made

    @final
    def first_sample(self, step: int) -> int:
        """The global number of the first sample of a step."""
        step_0, sample_0 = self._base
        first = sample_0 + (step - step_0) * self.part.global_batch
        if step < 0 or first < 0:
            raise ValueError(f"step {step} lies before the first sample")
        return first

    @final
    def state(self) -> dict[str, Any]:
        """What resumes the stream after the last `batch`: plain data, the same on every rank."""
        return {"step": self._next_step, "sample": self.first_sample(self._next_step), "fingerprint": self.fingerprint()}

    @final
    def load_state(self, state: dict[str, Any]) -> None:
        """Go on where ``state`` was taken, whatever the ranks, micro-batch and global batch were. Raises ValueError if the data changed."""
        if changed := _differences(state["fingerprint"], self.fingerprint()):
            raise ValueError(f"the data isn't what the checkpoint was trained on: {'; '.join(changed)}")
        self._prefetcher.clear()
        self._base = (state["step"], state["sample"])
        self._next_step = state["step"]

    @final
    def validation(self, sequences: int | None = None) -> Iterator[Batch]:
        """Micro-batches of this rank of the first ``sequences`` validation sequences (None, or more than there are: all).

        Every rank yields the same number of batches; rows that fill up the last ones repeat a sequence and have every label ignored, so
        that over all ranks each sequence counts once.
        """
        wanted = self.num_validation() if sequences is None else min(sequences, self.num_validation())
        stride = self.part.dp_size * self.part.micro_batch
        for turn in range(math.ceil(wanted / stride)):
            first = turn * stride + self.part.dp_rank * self.part.micro_batch
            rows = [self._padded_row(index, wanted) for index in range(first, first + self.part.micro_batch)]
            yield self._finish(rows)

    def close(self) -> None:
        """End the background thread."""
        self._prefetcher.close()

    def __enter__(self) -> AnyLoader:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _make(self, step: int) -> Batch:
        return self._finish(self.rows(self.part.samples(self.first_sample(step))))

    def _finish(self, rows: list[Row]) -> Batch:
        batch = batch_from_rows(rows)
        return batch.pin() if self._pin else batch

    def _padded_row(self, index: int, wanted: int) -> Row:
        tokens, labels, documents = self.validation_row(min(index, wanted - 1))
        return (tokens, labels, documents) if index < wanted else (tokens, np.full_like(labels, IGNORED), documents)


def _differences(then: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """What changed, in words."""

    def short(value: Any) -> str:
        if isinstance(value, list):
            return "[" + ", ".join(short(v) for v in value) + "]"
        return value[:12] if isinstance(value, str) else str(value)

    names = [*then, *(name for name in now if name not in then)]
    return [f"{n} was {short(then.get(n))}, is now {short(now.get(n))}" for n in names if then.get(n) != now.get(n)]
