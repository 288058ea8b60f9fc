"""What does a training step get to eat? (Token ids, the ids to predict, and which document each position belongs to.)"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from moetrain.data.packing import IGNORED


@dataclass(frozen=True)
class Batch:
    """B rows of S positions.

    tokens     [B, S] int64, ids
    labels     [B, S] int64, the id that follows each token; IGNORED where none is to be predicted
    documents  [B, S] int32, number of the document inside its row, from 0 and rising: a change of number is a boundary
    """

    tokens: Tensor
    labels: Tensor
    documents: Tensor

    def __post_init__(self) -> None:
        shapes = {name: tuple(getattr(self, name).shape) for name in ("tokens", "labels", "documents")}
        if len(set(shapes.values())) != 1 or self.tokens.dim() != 2:
            raise ValueError(f"a batch needs three tensors of one shape [B, S]; got {shapes}")

    @property
    def num_sequences(self) -> int:
        return self.tokens.shape[0]

    @property
    def seq_len(self) -> int:
        return self.tokens.shape[1]

    @property
    def num_labels(self) -> int:
        """Labels that count in the loss. Waits for the device if the batch lies on one."""
        return int((self.labels != IGNORED).sum())

    def to(self, device: torch.device | str, non_blocking: bool = True) -> Batch:
        """The batch on ``device``. Overlaps with compute only if the batch was pinned."""
        return Batch(*(t.to(device, non_blocking=non_blocking) for t in (self.tokens, self.labels, self.documents)))

    def pin(self) -> Batch:
        """The batch in page-locked memory, from which a GPU copies without the host waiting."""
        return Batch(*(t.pin_memory() for t in (self.tokens, self.labels, self.documents)))

    def split(self, num_microbatches: int) -> list[Batch]:
        """Equal microbatches of consecutive rows (views, no copy). Raises ValueError if the rows don't divide."""
        rows = self.num_sequences
        if num_microbatches < 1 or rows % num_microbatches:
            raise ValueError(f"{rows} sequences don't split into {num_microbatches} equal microbatches")
        size = rows // num_microbatches
        parts = zip(*(t.split(size) for t in (self.tokens, self.labels, self.documents)), strict=True)
        return [Batch(*part) for part in parts]


def batch_from_rows(rows: Sequence[tuple[np.ndarray, np.ndarray, np.ndarray]]) -> Batch:
    """Rows of (tokens, labels, documents), each [S], stacked to a Batch."""
    tokens, labels, documents = (np.stack(column) for column in zip(*rows, strict=True))
    return Batch(
        torch.from_numpy(tokens.astype(np.int64, copy=False)),
        torch.from_numpy(labels.astype(np.int64, copy=False)),
        torch.from_numpy(documents.astype(np.int32, copy=False)),
    )
