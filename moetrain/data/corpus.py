"""Where does real text come from on a machine without a network: enough to see a small model learn?

From files that every Python install holds: the language reference as pydoc shows it, the descriptions and licences of installed packages,
and docstrings or source of the standard library (each module gives one of the two, so that no text is there twice). A document longer than
MAX_CHARACTERS is left out; a paragraph of prose that an earlier document had is dropped, for licences repeat. Files are taken by hash of
their name and documents ordered by hash of their text: one Python with the same packages gives the same bytes, and every stretch holds the
same kinds of text.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.metadata
import platform
import re
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from moetrain.data.build import BuildOptions, Input, Progress, build_from, no_progress
from moetrain.data.inputs import Document
from moetrain.data.shards import SourceFile
from moetrain.data.writer import check_free

SIZE_MB, VOCABULARY, VALIDATION = 6.0, 4096, 0.05
MAX_CHARACTERS, MIN_CHARACTERS = 120_000, 200
LICENCE_WORDS = ("LICEN", "COPYING", "NOTICE", "README")
LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__", "encodings", "pydoc_data"}
"""Folders of the standard library that are others' packages, made by a program, or tables."""


def corpus(
    out: Path,
    size_mb: float = SIZE_MB,
    vocab_size: int = VOCABULARY,
    validation: float = VALIDATION,
    overwrite: bool = False,
    command: str = "",
    progress: Progress = no_progress,
) -> dict[str, Any]:
    """A built folder of about ``size_mb`` million bytes of text, less if the install holds less; returns its statistics.

    Raises ValueError: one line.
    """
    if not 0.05 <= size_mb <= 100:
        raise ValueError(f"the size is {size_mb} MB; it must be 0.05 to 100")
    options = BuildOptions(out, vocab_size, validation=validation, overwrite=overwrite, restart=True, command=command)
    check_free(out, overwrite)
    kinds = gather(int(size_mb * 1e6), progress)
    texts = sorted((text for found in kinds.values() for text in found), key=_hash)
    total = sum(map(len, texts))

    def documents() -> Iterator[Document]:
        done = 0
        for number, text in enumerate(texts):
            done += len(text)
            yield Document(text, f"document {number}", done)

    return build_from(Input(documents, total, [_source(*item) for item in kinds.items()], {}), options, progress)


def gather(size: int, progress: Progress = no_progress) -> dict[str, list[str]]:
    """The chosen documents of each kind, at most about ``size`` bytes in all."""
    chosen: dict[str, list[str]] = {}
    seen: set[bytes] = set()
    for turn, (kind, (find, share)) in enumerate(KINDS.items()):
        progress("gather", turn, len(KINDS), kind)
        texts = find() if kind == "source" else (fresh_paragraphs(text, seen) for text in find())
        taken = sum(len(text.encode()) for found in chosen.values() for text in found)
        chosen[kind] = _fitting(texts, share * size - taken)
    return chosen


def fresh_paragraphs(text: str, seen: set[bytes]) -> str:
    """The text without the paragraphs met before, however they were spaced; ``seen`` learns the others."""
    kept = []
    for paragraph in re.split(r"\n\s*\n", text):
        mark = hashlib.blake2b(" ".join(paragraph.split()).lower().encode(), digest_size=16).digest()
        if mark not in seen:
            seen.add(mark)
            kept.append(paragraph)
    return "\n\n".join(kept)


def _fitting(texts: Iterator[str], room: float) -> list[str]:
    """Documents of fit length, each once, until one finds no room."""
    found: dict[str, None] = {}
    for text in texts:
        if not MIN_CHARACTERS <= len(text) <= MAX_CHARACTERS or text in found:
            continue
        room -= len(text.encode())
        if room < 0:
            break
        found[text] = None
    return list(found)


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _source(kind: str, texts: list[str]) -> SourceFile:
    """One line of provenance for a kind, in place of thousands of files."""
    joined = "\0".join(texts).encode()
    return SourceFile(path=f"Python {platform.python_version()}: {kind}", bytes=len(joined), sha256=hashlib.sha256(joined).hexdigest())


# ---- where each kind is found -------------------------------------------------------------------------------------------------


def _topics() -> Iterator[str]:
    from pydoc_data.topics import topics

    yield from (topics[name] for name in sorted(topics, key=_hash))


def _distributions() -> list[importlib.metadata.Distribution]:
    found = {(d.metadata["Name"] or "").lower(): d for d in importlib.metadata.distributions() if d.metadata is not None}
    return [found[name] for name in sorted(found, key=_hash)]


def _descriptions() -> Iterator[str]:
    for distribution in _distributions():
        payload = distribution.metadata.get_payload()  # type: ignore[attr-defined]
        yield _clean(payload if isinstance(payload, str) else "")


def _licences() -> Iterator[str]:
    for distribution in _distributions():
        for file in sorted(distribution.files or [], key=str):
            if any(word in file.name.upper() for word in LICENCE_WORDS) and file.suffix.lower() in ("", ".txt", ".md", ".rst"):
                yield _read(Path(str(file.locate())))


def _modules(parity: int) -> Iterator[str]:
    """The source of half the standard library's modules."""
    root = Path(sysconfig.get_path("stdlib"))
    inside = {path.relative_to(root).as_posix(): path for path in root.rglob("*.py")}
    for name in sorted(inside, key=_hash):
        if not LEFT_OUT & set(name.split("/")) and int(_hash(name), 16) % 2 == parity:
            yield _read(inside[name])


def _docstrings() -> Iterator[str]:
    for source in _modules(0):
        try:
            tree = ast.parse(source)
        except (SyntaxError, ValueError):
            continue
        nodes = (n for n in ast.walk(tree) if isinstance(n, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)))
        yield "\n\n".join(text for node in nodes if (text := ast.get_docstring(node)))


def _read(path: Path) -> str:
    try:
        return _clean(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError):
        return ""


def _clean(text: str) -> str:
    return text.encode("utf-8", "ignore").decode().replace("\r\n", "\n").strip() + "\n"


KINDS: dict[str, tuple[Callable[[], Iterator[str]], float]] = {
    "topics": (_topics, 0.1),
    "descriptions": (_descriptions, 0.2),
    "docstrings": (_docstrings, 0.45),
    "licences": (_licences, 0.6),
    "source": (lambda: _modules(1), 1.0),
}
"""Where to find each kind, and how much of the size it and those before it may take. It loses the paragraphs that those before it hold."""
