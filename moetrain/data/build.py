"""How does a folder of text become OUT/train, OUT/validation, OUT/tokenizer.json and OUT/statistics.json, and go on after a kill?

Everything happens in OUT.building. After each shard a record says how many documents are in; the same command goes on after the last
record, and gives the same bytes as a build that nobody stopped. At the end OUT.building becomes OUT in one rename.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from moetrain.data.inputs import Document, Format, find_inputs, read_documents
from moetrain.data.parts import PARTS, SPLITS, Parts
from moetrain.data.shards import ShardEntry, ShardSet, SourceFile, hash_file
from moetrain.data.statistics import STATISTICS, statistics
from moetrain.data.tokenizer import TextTokenizer, one_thread_a_call, tokenizer_of, train_tokenizer
from moetrain.data.writer import SHARD_TOKENS, building, check_free, publish, write_index, write_text

TOKENIZER, PLAN, LOCK = "tokenizer.json", "plan.json", "lock"
OWN = {TOKENIZER, PLAN, PARTS, LOCK, STATISTICS, *SPLITS}
TRAIN_CHARACTERS = 200_000_000
"""A tokenizer is trained on the first documents, up to this many characters: more would change few merges."""
BATCH_CHARACTERS = 1 << 18
BUILD_VERSION = 1
"""Rises when the same input gives other shards: an unfinished build of another version is not gone on with."""

Progress = Callable[[str, float, float, str], None]
"""(stage, done, of how much, a note)."""


def no_progress(stage: str, done: float, total: float, note: str) -> None:
    """Tell nobody."""


@dataclass(frozen=True)
class BuildOptions:
    """tokenizer: a trained one, or the vocabulary size of one to train on the training documents. validation: share of the documents.
    workers: threads that tokenise. overwrite: a folder that stands at ``out``. restart: drop an unfinished build."""

    out: Path
    tokenizer: TextTokenizer | int
    shard_tokens: int = SHARD_TOKENS
    validation: float = 0.01
    workers: int = 1
    overwrite: bool = False
    restart: bool = False
    command: str = ""

    def __post_init__(self) -> None:
        if not 0 <= self.validation < 1:
            raise ValueError(f"the validation share is {self.validation}; it must be at least 0 and below 1")
        if isinstance(self.tokenizer, int) and self.tokenizer > 1_000_000:
            raise ValueError(f"a trained tokenizer of {self.tokenizer} ids; at most 1000000")
        if self.shard_tokens < 1 or self.workers < 1:
            raise ValueError(f"shard tokens ({self.shard_tokens}) and workers ({self.workers}) must be at least 1")


@dataclass(frozen=True)
class Input:
    """What is built from: documents, readable from the start as often as wanted; how far `Document.done` goes; what they came from."""

    documents: Callable[[], Iterable[Document]]
    total: float
    sources: Sequence[SourceFile]
    form: dict[str, str]


def build(patterns: Sequence[str], form: Format, options: BuildOptions, progress: Progress = no_progress) -> dict[str, Any]:
    """Shards of the files that the patterns name; returns the statistics that were written. Raises ValueError: one line."""
    check_free(options.out, options.overwrite)
    files = find_inputs(patterns)
    total = sum(path.stat().st_size for path in files)
    sources = []
    for path in files:
        sources.append(SourceFile(path=str(path), bytes=path.stat().st_size, sha256=hash_file(path)))
        progress("hash", sum(s.bytes for s in sources), total, path.name)
    return build_from(Input(lambda: read_documents(files, form), total, sources, form._asdict()), options, progress)


def build_from(source: Input, options: BuildOptions, progress: Progress = no_progress) -> dict[str, Any]:
    """The same from any documents."""
    check_free(options.out, options.overwrite)
    folder = building(options.out)
    folder.mkdir(parents=True, exist_ok=True)
    with _alone(folder), one_thread_a_call():
        if options.restart or not (folder / PLAN).exists():
            _empty(folder)
        _check_plan(folder, _plan(source, options))
        for name in (*SPLITS, PARTS):
            (folder / name).mkdir(exist_ok=True)
        try:
            tokenizer = _tokenizer(folder, source, options, progress)
            parts = Parts(folder, tokenizer.vocab_size)
            _fill(parts, source, tokenizer, options, progress)
            return _finish(folder, parts, source, tokenizer, options)
        except ValueError:
            if (folder / PARTS).is_dir() and not any((folder / PARTS).iterdir()):
                (folder / PLAN).unlink(missing_ok=True)  # nothing to go on with: the mended input begins anew
            raise


# ---- the plan -----------------------------------------------------------------------------------------------------------------


def _plan(source: Input, options: BuildOptions) -> dict[str, Any]:
    """What an unfinished build must have in common with this one to be gone on with."""
    tokenizer = options.tokenizer
    return {
        "version": BUILD_VERSION,
        "input files": [[s.path, s.bytes, s.sha256] for s in source.sources],
        "format": source.form,
        "tokenizer": f"train {tokenizer}" if isinstance(tokenizer, int) else [tokenizer.sha256, tokenizer.eos_id],
        "shard tokens": options.shard_tokens,
        "validation share": options.validation,
    }


def _check_plan(folder: Path, plan: dict[str, Any]) -> None:
    path = folder / PLAN
    if not path.exists():
        write_text(path, json.dumps(plan))
        return
    before = json.loads(path.read_text(encoding="utf-8"))
    if changed := [name for name in plan if before.get(name) != plan[name]]:
        raise ValueError(f"{folder}: an unfinished build with another {', another '.join(changed)}; remove it or pass --restart")


def _empty(folder: Path) -> None:
    """What a build left, gone. Raises ValueError if there is anything else: it is somebody's."""
    paths = [path for path in folder.iterdir() if path.name != LOCK]
    if others := sorted(path.name for path in paths if path.name.removesuffix(".tmp").lstrip(".") not in OWN):
        raise ValueError(f"{folder}: holds {others[0]}, which no build made; move that folder away")
    for path in paths:
        shutil.rmtree(path) if path.is_dir() else path.unlink()


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    with (folder / LOCK).open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ValueError(f"{folder}: another build is writing here") from None
        yield


# ---- the tokenizer ------------------------------------------------------------------------------------------------------------


def _tokenizer(folder: Path, source: Input, options: BuildOptions, progress: Progress) -> TextTokenizer:
    path, wanted = folder / TOKENIZER, options.tokenizer
    if isinstance(wanted, int):
        if path.exists():
            return tokenizer_of(path.read_bytes())
        wanted = train_tokenizer(_training_texts(source, options.validation, progress), wanted)
    write_text(path, wanted.json.decode())
    return wanted


def _training_texts(source: Input, validation: float, progress: Progress) -> Iterator[str]:
    characters = 0
    for document in source.documents():
        if split_of(document.text, validation) == "train":
            yield document.text
            characters += len(document.text)
        progress("train tokenizer", document.done, source.total, f"{characters:,} characters")
        if characters >= TRAIN_CHARACTERS:
            return


def split_of(text: str, validation: float) -> str:
    """The split of a text, by its hash: a document goes the same way wherever it stands, and so do its copies."""
    hashed = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")
    return SPLITS[hashed < validation * 2**64]


# ---- the shards ---------------------------------------------------------------------------------------------------------------


def _fill(parts: Parts, source: Input, tokenizer: TextTokenizer, options: BuildOptions, progress: Progress) -> None:
    """Every document after those already in, tokenised into parts."""
    tokens = parts.num_tokens
    for number, document, ids in _encoded(source.documents(), parts.documents, tokenizer, options.workers):
        parts.add(split_of(document.text, options.validation), ids, document.text)
        parts.documents = number + 1
        tokens += ids.size
        progress("tokenise", document.done, source.total, f"{tokens:,} tokens")
        if parts.waiting_tokens >= options.shard_tokens:
            parts.write()
    if parts.waiting_tokens:
        parts.write()


Encoded = Iterator[tuple[int, Document, np.ndarray]]


def _encoded(documents: Iterable[Document], skip: int, tokenizer: TextTokenizer, workers: int) -> Encoded:
    """(number, document, ids) of each document but the first ``skip`` and the blank ones, in order, made by ``workers`` threads.

    The tokenizer lets go of Python's lock, so threads do run side by side.
    """
    with ThreadPoolExecutor(workers) as pool:
        window: deque[tuple[list[tuple[int, Document]], Future[list[np.ndarray]]]] = deque()

        def oldest() -> Encoded:
            batch, future = window.popleft()
            for (number, document), ids in zip(batch, future.result(), strict=True):
                yield number, document, ids

        for batch in _batches(documents, skip):
            window.append((batch, pool.submit(tokenizer.encode, [document.text for _, document in batch])))
            if len(window) > 2 * workers:
                yield from oldest()
        while window:
            yield from oldest()


def _batches(documents: Iterable[Document], skip: int) -> Iterator[list[tuple[int, Document]]]:
    batch, characters = [], 0
    for number, document in enumerate(documents):
        if number < skip or not document.text.strip():
            continue
        batch.append((number, document))
        characters += len(document.text)
        if characters >= BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


# ---- the end ------------------------------------------------------------------------------------------------------------------


def _finish(folder: Path, parts: Parts, source: Input, tokenizer: TextTokenizer, options: BuildOptions) -> dict[str, Any]:
    """Indexes and statistics, the traces of the build gone, and the folder under its name."""
    entries = {split: parts.entries(split) for split in SPLITS}
    if lacking := _lacking(entries, options.validation):
        _empty(folder)
        raise ValueError(lacking)
    about = {"vocab_size": tokenizer.vocab_size, "eos_id": tokenizer.eos_id, "tokenizer_sha256": tokenizer.sha256}
    for split in SPLITS:
        if entries[split]:
            write_index(folder / split, entries[split], **about, sources=source.sources, command=options.command)
        else:
            shutil.rmtree(folder / split)
    opened = [ShardSet(folder / split) if entries[split] else None for split in SPLITS]
    report = statistics(opened[0], opened[1], parts.text_bytes())
    write_text(folder / STATISTICS, json.dumps(report, indent=1) + "\n")
    shutil.rmtree(folder / PARTS)
    for name in (PLAN, LOCK):
        os.unlink(folder / name)
    publish(folder, options.out)
    return report


def _lacking(entries: dict[str, list[ShardEntry]], validation: float) -> str:
    """Which split has nothing, in words; "" if none."""
    if not entries["train"] and not entries["validation"]:
        return "no training document: the input holds no text"
    if not entries["train"]:
        return f"no training document: all went to validation; lower its share of {validation:g}"
    if validation and not entries["validation"]:
        return f"no document fell into the validation share of {validation:g}: raise it, or make it 0 to have none"
    return ""
