"""How does a file of one JSON object a line survive a writer that is killed?

A line is handed to the operating system whole, in append mode, so what a kill leaves is at worst a half-written last line.
Opening to append cuts that half line off; reading leaves it out. A broken line anywhere else is damage, and is refused.
JSON has no NaN or infinities: they are written as the strings "NaN", "Infinity" and "-Infinity".
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

TAIL = 1 << 16
NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def plain(value: Any) -> Any:
    """``value`` as JSON can hold it: tuples and sets as lists, numpy and torch scalars as numbers, non-finite floats as text."""
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain(item) for item in value]
    if isinstance(value, float):  # numpy.float64 is one
        return float(value) if math.isfinite(value) else "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if value is None or isinstance(value, (str, int, bool)):
        return value
    if hasattr(value, "tolist"):
        return plain(value.tolist())
    return str(value)


def number(value: Any) -> Any:
    """The reverse for one field: "NaN" back to a float, anything else as it is."""
    return NON_FINITE.get(value, value) if isinstance(value, str) else value


def one_line(record: dict[str, Any]) -> bytes:
    """A record as the bytes of its line."""
    return (json.dumps(plain(record), separators=(",", ":"), ensure_ascii=False, allow_nan=False) + "\n").encode()


class JsonLines:
    """An append-only file of JSON lines. ``cut`` is how many bytes of a half-written line were removed when it was opened."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if self.path.exists() and not self.path.is_file():
            raise ValueError(f"{self.path}: not a file")
        self.cut = cut_half_line(self.path)
        self._handle = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)

    def write(self, record: dict[str, Any]) -> None:
        """Append one record, or nothing and OSError (a full disk): no later line may follow half a one."""
        line, whole = one_line(record), os.fstat(self._handle).st_size
        try:
            while line:
                line = line[os.write(self._handle, line) :]
        except OSError:
            os.ftruncate(self._handle, whole)
            raise

    def sync(self) -> None:
        """Ask the operating system to put what was written on disk."""
        os.fsync(self._handle)

    def close(self) -> None:
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1


def cut_half_line(path: Path) -> int:
    """Cut what follows the last newline; returns the number of bytes cut. A last line of zero bytes only (a crashed disk) goes too."""
    if not path.exists():
        return 0
    total = path.stat().st_size
    end = _end_of_last_line(path, total)
    if end < total:
        os.truncate(path, end)
    return total - end


def _end_of_last_line(path: Path, total: int) -> int:
    with path.open("rb") as file:
        position = total
        while position > 0:
            start = max(0, position - TAIL)
            file.seek(start)
            found = file.read(position - start).rfind(b"\n")
            if found >= 0:
                return start + found + 1
            position = start
    return 0


def last_record(path: str | os.PathLike[str]) -> dict[str, Any] | None:
    """The last whole record, read from the end of the file; None if there is none."""
    path = Path(path)
    if not path.is_file():
        return None
    end = _end_of_last_line(path, path.stat().st_size)
    if end == 0:
        return None
    start = _end_of_last_line(path, end - 1)
    with path.open("rb") as file:
        file.seek(start)
        return _parse(path, "last", file.read(end - start))


def read_records(path: str | os.PathLike[str]) -> Iterator[dict[str, Any]]:
    """Every whole record in order. A last line without its newline is left out; ValueError names any other broken line."""
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"{path}: no such file")
    with path.open("rb") as file:
        for i, line in enumerate(file, start=1):
            if line.endswith(b"\n"):
                yield _parse(path, str(i), line)


def _parse(path: Path, where: str, line: bytes) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        raise ValueError(f"{path}:{where}: not a JSON object: {line[:40]!r}") from None
    if not isinstance(record, dict):
        raise ValueError(f"{path}:{where}: not a JSON object: {line[:40]!r}")
    return record
