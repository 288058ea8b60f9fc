"""Which rows are held out together? (fixed before any fit: whole (n, k) families, whole sizes, alternate points)"""

from __future__ import annotations

import zlib
from collections import defaultdict

from calibration.clean import Row

NUM_FAMILY_FOLDS = 6
SPLITS = ("families", "sizes", "alternate")


def family(row: Row) -> str:
    """The weight shape: rows of one family differ in the number of tokens only."""
    if row.kind == "fused_ffn":
        return f"{row.shape['hidden']:.0f}x{row.shape['inter']:.0f}x{row.shape['experts']:.0f}"
    return f"{row.shape['n']:.0f}x{row.shape['k']:.0f}"


def size(row: Row) -> float:
    """Tokens of the row: m of a GEMM, tokens of a fused FFN."""
    return row.shape["tokens"] if row.kind == "fused_ffn" else row.shape["m"]


def fold(row: Row, split: str, order: int) -> int:
    """Fold of a row. Families: by a checksum of the weight shape, the same on every GPU and dtype. Sizes: by the octave of the
    size. Alternate: every other point along a curve, ``order`` = the row's place on its curve."""
    if split == "families":
        return zlib.crc32(family(row).encode()) % NUM_FAMILY_FOLDS
    if split == "sizes":
        return int(size(row)).bit_length()
    return order % 2


def folds(rows: list[Row], split: str) -> list[int]:
    """One fold number a row."""
    curves: dict[tuple, list[int]] = defaultdict(list)
    for index, row in enumerate(rows):
        curves[row.gpu, row.dtype, row.kernel, family(row), row.shape.get("exponent")].append(index)
    place = {}
    for members in curves.values():
        for order, index in enumerate(sorted(members, key=lambda i: size(rows[i]))):
            place[index] = order
    return [fold(row, split, place[index]) for index, row in enumerate(rows)]
