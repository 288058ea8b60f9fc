"""How do documents of token ids become a folder of shards that is either whole or not there?

Everything is written into a folder beside the target, under another name, and takes the target's name in one rename at the end; the index
comes last. A shard's files are on disk (fsync) before anything says that they exist.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from moetrain.data.shards import ID_TYPES, INDEX, Index, ShardEntry, SourceFile, dtype_of, hash_file, id_error

SHARD_TOKENS = 100_000_000
"""Default size of a shard: 200 MB of uint16."""


class ShardBuffer:
    """The documents of the next shard of ``folder``, in memory. Final. Ids are checked as they come."""

    def __init__(self, folder: Path, vocab_size: int) -> None:
        self._folder = folder
        self._vocab_size = vocab_size
        self._type = ID_TYPES[dtype_of(vocab_size)]
        self._documents: list[np.ndarray] = []
        self.num_tokens = 0

    def add(self, ids: np.ndarray, shard: str) -> None:
        """One document ([n] integers). Raises ValueError for an id outside the vocabulary, with shard, position and value."""
        ids = np.asarray(ids)
        if ids.size and not 0 <= ids.min() <= ids.max() < self._vocab_size:
            bad = int(np.argmax((ids < 0) | (ids >= self._vocab_size)))
            raise ValueError(id_error(f"{self._folder.name}/{shard}.bin", self.num_tokens + bad, int(ids[bad]), self._vocab_size))
        self._documents.append(ids.astype(self._type))
        self.num_tokens += ids.size

    def write(self, shard: str) -> ShardEntry | None:
        """The documents so far as one shard, and an empty buffer; None, and nothing written, if they hold no token."""
        documents, self._documents, num_tokens, self.num_tokens = self._documents, [], self.num_tokens, 0
        if not num_tokens:
            return None
        ids = np.concatenate(documents)
        starts = np.cumsum([0, *(d.size for d in documents)], dtype="<i8")
        _save(self._folder / f"{shard}.bin", ids)
        _save(self._folder / f"{shard}.idx", starts, as_numpy_file=True)
        hashes = [hash_file(self._folder / f"{shard}.{suffix}") for suffix in ("bin", "idx")]
        return ShardEntry(name=shard, tokens=num_tokens, documents=len(documents), bin_sha256=hashes[0], idx_sha256=hashes[1])


def _save(path: Path, array: np.ndarray, as_numpy_file: bool = False) -> None:
    temporary = path.with_name(f".{path.name}.tmp")
    with temporary.open("wb") as file:
        np.save(file, array, allow_pickle=False) if as_numpy_file else array.tofile(file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def shard_name(number: int) -> str:
    """The name of the shard of that number."""
    return f"{number:05d}"


def write_index(
    folder: Path,
    shards: list[ShardEntry],
    *,
    vocab_size: int,
    eos_id: int | None,
    tokenizer_sha256: str | None = None,
    sources: Iterable[SourceFile] = (),
    command: str = "",
) -> Index:
    """index.json of the shards, from which on the folder opens."""
    index = Index(
        dtype=dtype_of(vocab_size),
        vocab_size=vocab_size,
        eos_id=eos_id,
        tokenizer_sha256=tokenizer_sha256,
        tokens=sum(entry.tokens for entry in shards),
        documents=sum(entry.documents for entry in shards),
        shards=shards,
        sources=list(sources),
        command=command,
    )
    write_text(folder / INDEX, index.model_dump_json(indent=1) + "\n")
    return index


def write_text(path: Path, text: str) -> None:
    """UTF-8 text, whole or not at all, on disk when this returns."""
    temporary = path.with_name(f".{path.name}.tmp")
    with temporary.open("w", encoding="utf-8", newline="\n") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def building(target: Path) -> Path:
    """Where ``target`` is built: beside it, so that the last step is a rename within one file system."""
    return target.with_name(f"{target.name}.building")


def check_free(target: Path, overwrite: bool) -> None:
    """Raises ValueError if something stands where the build is to go."""
    if target.exists() and not target.is_dir():
        raise ValueError(f"{target}: is a file; name a folder")
    if target.is_dir() and any(target.iterdir()) and not overwrite:
        raise ValueError(f"{target}: exists and isn't empty; name another folder or pass --overwrite")
    if target.is_dir() and any(target.iterdir()) and not any((target / inner / INDEX).exists() for inner in (".", "train")):
        raise ValueError(f"{target}: holds something else than training data, which --overwrite doesn't replace")


def publish(temporary: Path, target: Path) -> None:
    """The built folder under its name; what stood there is moved aside first and removed after."""
    if not (target.is_dir() and any(target.iterdir())):
        os.replace(temporary, target)
        return
    aside = Path(tempfile.mkdtemp(prefix=f".{target.name}.", suffix=".old", dir=target.parent))
    os.replace(target, aside)
    os.replace(temporary, target)
    shutil.rmtree(aside, ignore_errors=True)


def write_shards(
    folder: str | Path,
    documents: Iterable[np.ndarray],
    *,
    vocab_size: int,
    eos_id: int | None = None,
    shard_tokens: int = SHARD_TOKENS,
    overwrite: bool = False,
) -> Index:
    """A folder of shards from documents that are ids already ([n] each, eos included). Raises ValueError, leaving no folder."""
    target = Path(folder)
    check_free(target, overwrite)
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{target.name}.", suffix=".building", dir=target.parent))
    try:
        os.chmod(temporary, 0o777 & ~_umask())
        buffer, entries = ShardBuffer(temporary, vocab_size), []
        for ids in documents:
            buffer.add(ids, shard_name(len(entries)))
            if buffer.num_tokens >= shard_tokens:
                entries.append(buffer.write(shard_name(len(entries))))
        entries.append(buffer.write(shard_name(len(entries))))
        kept = [entry for entry in entries if entry is not None]
        if not kept:
            raise ValueError(f"{target}: the documents hold no token; there is nothing to build")
        index = write_index(temporary, kept, vocab_size=vocab_size, eos_id=eos_id)
        publish(temporary, target)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    return index


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
