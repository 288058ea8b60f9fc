"""Which tokens, labels and documents make row i of a token stream that is cut every S tokens?

Documents stand back to back, each closed by its end-of-text id, and the stream is cut into rows: row i reads positions i S to
i S + S, both included, of which the first S are inputs and the last S labels. Neighbours share one token, so every token but the
first is a label once.
A document longer than a row goes on in the next. The last tokens, fewer than a row, are left out.
"""

from __future__ import annotations

import numpy as np

from moetrain.data.shards import ShardSet

IGNORED = -100
"""The label that the cross entropy leaves out, as `torch.nn.functional.cross_entropy` has it by default."""

Row = tuple[np.ndarray, np.ndarray, np.ndarray]
"""tokens [S] int64, labels [S] int64, documents [S] int32."""


def num_rows(num_tokens: int, seq_len: int) -> int:
    """How many rows of ``seq_len`` inputs, and a label for each, a stream of tokens holds."""
    return max(0, (num_tokens - 1) // seq_len)


def packed_row(shards: ShardSet, seq_len: int, index: int, mask_boundary_labels: bool = False) -> Row:
    """Row ``index`` of the stream, read from its place: no earlier row is touched.

    documents counts from 0 inside the row. With mask_boundary_labels the first token of a document is no label: nothing in the document
    before tells of it. Raises ValueError for a row past the end.
    """
    if not 0 <= index < num_rows(shards.num_tokens, seq_len):
        raise ValueError(f"{shards.folder}: no row {index}; it holds {num_rows(shards.num_tokens, seq_len)} rows of {seq_len} tokens")
    start = index * seq_len
    window = shards.tokens(start, start + seq_len + 1)
    starts = shards.starts(start + 1, start + seq_len + 1) - start
    labels = window[1:].copy()
    if mask_boundary_labels:
        labels[starts - 1] = IGNORED
    return window[:-1], labels, document_numbers(starts, seq_len)


def document_numbers(starts: np.ndarray, seq_len: int) -> np.ndarray:
    """Of each of S positions, how many documents started after position 0 and up to it ([S] int32). starts: rising, each in 1..S."""
    numbers = np.zeros(seq_len + 1, dtype=np.int32)
    numbers[starts] = 1
    return np.cumsum(numbers[:-1], dtype=np.int32)
