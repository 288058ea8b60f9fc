"""Which documents do text, JSONL and Parquet files hold, in what order, and where does a bad one stand?"""

from __future__ import annotations

import difflib
import glob
import gzip
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

TEXT_UNITS = ("file", "line")


class Document(NamedTuple):
    """A text, the place it came from, and how far into all input bytes it ends."""

    text: str
    where: str
    done: float


class Format(NamedTuple):
    """How files are cut into documents. field: the JSONL key or Parquet column; unit: what one document of a text file is."""

    field: str = "text"
    unit: str = "file"


def find_inputs(patterns: Sequence[str]) -> list[Path]:
    """The files that paths, globs (** too) and folders (searched whole) name, each once, by name. Raises ValueError."""
    found: dict[Path, None] = {}
    for pattern in patterns:
        path = Path(pattern)
        here = sorted(p for p in path.rglob("*") if p.is_file() and reader_of(p)) if path.is_dir() else _match(pattern)
        if not here:
            raise ValueError(f"{pattern}: {_nothing(path)}")
        found |= dict.fromkeys(here)
    for path in found:
        if reader_of(path) is None:
            raise ValueError(f"{path}: unknown kind of file; legal: {', '.join(READERS)}, and each of them but .parquet with .gz")
    return list(found)


def _match(pattern: str) -> list[Path]:
    if Path(pattern).is_file():
        return [Path(pattern)]
    return sorted(p for name in glob.glob(pattern, recursive=True) if (p := Path(name)).is_file())


def _nothing(path: Path) -> str:
    if path.is_dir():
        return f"no file of a known kind in it ({', '.join(READERS)})"
    near = difflib.get_close_matches(path.name, [p.name for p in path.parent.glob("*")], n=1) if path.parent.is_dir() else []
    return "no such file" + (f"; did you mean {path.parent / near[0]}?" if near else "")


def read_documents(files: Sequence[Path], form: Format) -> Iterator[Document]:
    """The documents of all files, in order. Raises ValueError at the first bad row: file:line and what is wrong."""
    before = 0
    for path in files:
        size = path.stat().st_size
        for text, where, share in reader_of(path)(path, form):
            _check_text(text, where)
            yield Document(text, where, before + size * share)
        before += size


Rows = Iterator[tuple[Any, str, float]]
"""(text, place, share of the file read)."""


def reader_of(path: Path) -> Callable[[Path, Format], Rows] | None:
    """What reads files of that name; None for an unknown kind."""
    suffixes = [s.lower() for s in path.suffixes[-2:]]
    if suffixes[-1:] == [".gz"]:
        suffixes = [s for s in suffixes[:-1] if s != ".parquet"]
    return READERS.get(suffixes[-1]) if suffixes else None


def _check_text(text: Any, where: str) -> None:
    if not isinstance(text, str):
        kind = {"NoneType": "null", "int": "a number", "float": "a number", "list": "a list", "dict": "an object", "bool": "a truth value"}
        raise ValueError(f"{where}: is {kind.get(type(text).__name__, type(text).__name__)}, not text")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{where}: character {error.start} is half of a surrogate pair, which no text may hold alone") from None


def _opened(path: Path) -> BinaryIO:
    return gzip.open(path, "rb") if path.suffix.lower() == ".gz" else path.open("rb")  # type: ignore[return-value]


def _lines(path: Path) -> Iterator[tuple[str, str, float]]:
    """(line, file:line, share read) of a file in UTF-8; a byte order mark is dropped."""
    read, size = 0, max(path.stat().st_size, 1)
    try:
        with _opened(path) as file:
            for number, raw in enumerate(file, start=1):
                read += len(raw)
                where = f"{path}:{number}"
                text = _decoded(raw.removeprefix(b"\xef\xbb\xbf") if number == 1 else raw, where)
                yield text, where, min(read / size, 1)
    except (OSError, EOFError) as error:
        raise ValueError(f"{path}: {' '.join(str(error).split())}") from None


def _decoded(raw: bytes, where: str) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"{where}: byte {error.start} of the line is not UTF-8 ({raw[error.start]:#04x})") from None


def _read_text(path: Path, form: Format) -> Rows:
    if form.unit == "line":
        yield from ((line.rstrip("\r\n"), where, share) for line, where, share in _lines(path))
        return
    yield "".join(line for line, _, _ in _lines(path)), str(path), 1.0


def _read_jsonl(path: Path, form: Format) -> Rows:
    for line, where, share in _lines(path):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{where}: not JSON: {getattr(error, 'msg', None) or error}") from None
        if not isinstance(row, dict):
            raise ValueError(f"{where}: a {type(row).__name__}, not an object with a field {form.field!r}")
        if form.field not in row:
            raise ValueError(f"{where}: {_missing('field', form.field, list(row))}")
        yield row[form.field], f"{where}: field {form.field!r}" if not isinstance(row[form.field], str) else where, share


def _read_parquet(path: Path, form: Format) -> Rows:
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError:
        raise ValueError(f"{path}: reading Parquet needs the package pyarrow") from None
    try:
        with pq.ParquetFile(path) as file:
            _check_column(pa, path, file.schema_arrow, form.field)
            row, rows = 0, max(file.metadata.num_rows, 1)
            for batch in file.iter_batches(batch_size=1024, columns=[form.field]):
                for text in batch.column(0).to_pylist():
                    row += 1
                    yield text, f"{path}: row {row}", row / rows
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"{path}: not a readable Parquet file ({' '.join(str(error).split())[:120]})") from None


def _check_column(pa: Any, path: Path, schema: Any, column: str) -> None:
    if column not in schema.names:
        raise ValueError(f"{path}: {_missing('column', column, schema.names)}")
    kind = schema.field(column).type
    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    if not (pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)):
        raise ValueError(f"{path}: column {column!r} holds {kind}, not text")


def _missing(what: str, wanted: str, there: Sequence[str]) -> str:
    near = difflib.get_close_matches(wanted, there, n=1)
    return f"no {what} {wanted!r}{f'; did you mean {near[0]!r}?' if near else ''} (there: {', '.join(there[:12]) or 'none'}); pass --field"


READERS: dict[str, Callable[[Path, Format], Rows]] = {
    ".txt": _read_text,
    ".md": _read_text,
    ".jsonl": _read_jsonl,
    ".ndjson": _read_jsonl,
    ".parquet": _read_parquet,
}
