"""What lies in a folder of tokenised shards, is it whole, and which tokens stand at a position?

    index.json   what the folder holds and where it came from (`Index`)
    00000.bin    token ids back to back, little-endian uint16 (vocabulary up to 65,536) or uint32
    00000.idx    where each document starts and the last ends: a NumPy file of documents + 1 int64, from 0

Token positions run over all shards, 0 to the total; a document never straddles two shards. Files are mapped, not read.
"""

from __future__ import annotations

import difflib
import hashlib
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, NonNegativeInt, PositiveInt, StringConstraints, ValidationError

INDEX = "index.json"
SMALL_VOCABULARY = 1 << 16
ID_TYPES = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class SourceFile(_Record):
    """An input file as it was read."""

    path: str
    bytes: NonNegativeInt
    sha256: str


class ShardEntry(_Record):
    """One pair of files, NAME.bin and NAME.idx."""

    name: Annotated[str, StringConstraints(pattern=r"^\w[\w.-]*$", max_length=100)]
    tokens: PositiveInt
    documents: PositiveInt
    bin_sha256: str
    idx_sha256: str


class Index(_Record):
    """index.json. eos_id closes each document (None: nothing does); tokenizer_sha256 is of the bytes of tokenizer.json."""

    schema_version: Literal[1] = 1
    dtype: Literal["uint16", "uint32"]
    vocab_size: PositiveInt
    eos_id: NonNegativeInt | None
    tokenizer_sha256: str | None
    tokens: PositiveInt
    documents: PositiveInt
    shards: list[ShardEntry]
    sources: list[SourceFile] = []
    command: str = ""


def dtype_of(vocab_size: int) -> Literal["uint16", "uint32"]:
    """The name of the smallest id type that holds the vocabulary."""
    return "uint16" if vocab_size <= SMALL_VOCABULARY else "uint32"


def read_index(folder: Path) -> Index:
    """The checked index of a folder. Raises ValueError: one line."""
    path = folder / INDEX
    try:
        index = Index.model_validate_json(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(_no_index(folder)) from None
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"])) or "the file"
        raise ValueError(f"{path}: {place}: {first['msg']}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: {error}") from None
    for total in ("tokens", "documents"):
        if (counted := sum(getattr(entry, total) for entry in index.shards)) != getattr(index, total):
            raise ValueError(f"{path}: says {getattr(index, total)} {total}, but its shards add up to {counted}")
    return index


def _no_index(folder: Path) -> str:
    if not folder.is_dir():
        near = difflib.get_close_matches(folder.name, [p.name for p in folder.parent.glob("*")], n=1) if folder.parent.is_dir() else []
        return f"{folder}: no such folder" + (f"; did you mean {folder.parent / near[0]}?" if near else "")
    inner = sorted(p.parent for p in folder.glob(f"*/{INDEX}"))
    hint = f"; did you mean {' or '.join(map(str, inner))}?" if inner else ""
    return f"{folder}: not a folder of shards (no {INDEX}){hint}"


class ShardSet:
    """A folder of shards, opened and measured at construction. Final.

    Raises ValueError, one line, for a folder without an index, and for a shard that is missing, truncated or not as the index says.
    Hashes are not checked here: see `verify`.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.index = read_index(self.folder)
        self._ids = [self._open_ids(entry) for entry in self.index.shards]
        self._starts = [self._open_starts(entry) for entry in self.index.shards]
        self._first = np.cumsum([0, *(entry.tokens for entry in self.index.shards)])
        self._first_document = np.cumsum([0, *(entry.documents for entry in self.index.shards)])

    @property
    def num_tokens(self) -> int:
        return self.index.tokens

    @property
    def num_documents(self) -> int:
        return self.index.documents

    @property
    def vocab_size(self) -> int:
        return self.index.vocab_size

    @property
    def digest(self) -> str:
        """A hash of what the tokens are and where documents start; the same wherever the folder lies."""
        parts = [self.index.dtype, *(entry.bin_sha256 + entry.idx_sha256 for entry in self.index.shards)]
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()

    def tokens(self, start: int, stop: int) -> np.ndarray:
        """The ids at positions [start, stop) as int64. Raises ValueError for an id outside the vocabulary, with its place."""
        parts = [np.asarray(self._ids[shard][a:b], dtype=np.int64) for shard, a, b in self._pieces(start, stop)]
        ids = parts[0] if len(parts) == 1 else np.concatenate(parts or [np.empty(0, dtype=np.int64)])
        if ids.size and ids.max() >= self.vocab_size:
            self._refuse_id(start + int(np.argmax(ids >= self.vocab_size)))
        return ids

    def starts(self, start: int, stop: int) -> np.ndarray:
        """Positions in [start, stop) where a document starts ([n] int64, rising; documents of no token give no start of their own)."""
        found = []
        for shard, a, b in self._pieces(start, stop):
            low, high = np.searchsorted(self._starts[shard], (a, b))
            found.append(np.asarray(self._starts[shard][low:high]) + self._first[shard])
        return np.unique(np.concatenate(found)) if found else np.empty(0, dtype=np.int64)

    def document(self, number: int) -> np.ndarray:
        """The ids of one document, by its number in the set."""
        if not 0 <= number < self.num_documents:
            raise ValueError(f"{self.folder}: no document {number}; it holds {self.num_documents}")
        shard = int(np.searchsorted(self._first_document, number, side="right")) - 1
        inside = number - int(self._first_document[shard])
        start, stop = (int(x) + int(self._first[shard]) for x in self._starts[shard][inside : inside + 2])
        return self.tokens(start, stop)

    def _pieces(self, start: int, stop: int) -> list[tuple[int, int, int]]:
        """(shard, first, last + 1) of each shard that [start, stop) touches."""
        if not 0 <= start <= stop <= self.num_tokens:
            raise ValueError(f"{self.folder}: no positions {start} to {stop}; it holds {self.num_tokens} tokens")
        pieces, shard = [], int(np.searchsorted(self._first, start, side="right")) - 1
        while start < stop:
            first, end = int(self._first[shard]), min(stop, int(self._first[shard + 1]))
            pieces.append((shard, start - first, end - first))
            start, shard = end, shard + 1
        return pieces

    def _open_ids(self, entry: ShardEntry) -> np.ndarray:
        path, id_type = self.folder / f"{entry.name}.bin", ID_TYPES[self.index.dtype]
        _check_size(path, entry.tokens * id_type.itemsize)
        return np.memmap(path, dtype=id_type, mode="r")

    def _open_starts(self, entry: ShardEntry) -> np.ndarray:
        path = self.folder / f"{entry.name}.idx"
        try:
            starts = np.load(path, mmap_mode="r", allow_pickle=False)
        except FileNotFoundError:
            raise ValueError(f"{path}: missing") from None
        except (OSError, ValueError, EOFError) as error:
            raise ValueError(f"{path}: truncated or not document offsets ({' '.join(str(error).split())[:100]})") from None
        if starts.dtype != np.dtype("<i8") or starts.shape != (entry.documents + 1,):
            need = f"{entry.documents} documents need int64 [{entry.documents + 1}]"
            raise ValueError(f"{path}: holds {starts.dtype} {list(starts.shape)}; {need}")
        if starts[0] != 0 or starts[-1] != entry.tokens:
            raise ValueError(f"{path}: documents span {starts[0]} to {starts[-1]}; the shard holds 0 to {entry.tokens}")
        return starts

    def _refuse_id(self, position: int) -> None:
        shard, inside, _ = self._pieces(position, position + 1)[0]
        entry = self.index.shards[shard]
        raise ValueError(id_error(f"{self.folder / entry.name}.bin", inside, int(self._ids[shard][inside]), self.vocab_size))


def id_error(where: str, position: int, value: int, vocab_size: int) -> str:
    """The line that refuses an id, the same when one is written, read or verified."""
    return f"{where}: token {position} is id {value}; the vocabulary holds ids 0 to {vocab_size - 1}"


def _check_size(path: Path, expected: int) -> None:
    try:
        size = path.stat().st_size
    except OSError:
        raise ValueError(f"{path}: missing") from None
    if size != expected:
        raise ValueError(f"{path}: {'truncated' if size < expected else 'too long'}: {size} bytes; the index says {expected}")


def hash_file(path: Path) -> str:
    """SHA-256 of a file's bytes, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def verify(folder: str | Path) -> ShardSet:
    """The opened folder, its every byte hashed, every id and document start checked. Raises ValueError at the first fault."""
    shards = ShardSet(folder)
    for entry, starts in zip(shards.index.shards, shards._starts, strict=True):
        for suffix, expected in ((".bin", entry.bin_sha256), (".idx", entry.idx_sha256)):
            path = shards.folder / (entry.name + suffix)
            if (found := hash_file(path)) != expected:
                raise ValueError(f"{path}: changed since it was built: SHA-256 {found[:12]}..., the index says {expected[:12]}...")
        if (falls := np.flatnonzero(np.diff(starts) < 0)).size:
            raise ValueError(f"{shards.folder / entry.name}.idx: document {falls[0]} ends before it starts")
    step = 1 << 22
    for start in range(0, shards.num_tokens, step):
        shards.tokens(start, min(start + step, shards.num_tokens))
    return shards
