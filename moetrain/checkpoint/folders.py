"""Where do checkpoints lie, which of them are whole, and how does one appear or vanish in a single rename?

    FOLDER/step-00000010/           published: data files, .metadata, index.json, state.json
    FOLDER/.step-00000010.tmp-ID/   being written, or left by a run that died
    FOLDER/.step-00000010.old-ID/   on its way out
    FOLDER/step-00000010.superseded-ID/  of steps that a run went back behind and did anew; nobody's to delete but the user's

A folder is a checkpoint only if its state.json is whole and every file it lists is there in its size. Which one is the latest is found
by looking, never written down.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moetrain.checkpoint.errors import CheckpointError, Damaged

FORMAT = 1
STATE, INDEX, METADATA = "state.json", "index.json", ".metadata"
PUBLISHED = re.compile(r"step-(\d{8,})")
HIDDEN = re.compile(r"\.(step-\d{8,})\.(tmp|old)-[0-9a-f]+")


def name_of(step: int) -> str:
    return f"step-{step:08d}"


def temporary(folder: Path, step: int, token: str) -> Path:
    return folder / f".{name_of(step)}.tmp-{token}"


@dataclass(frozen=True)
class Stored:
    """A checkpoint's state.json: ``tensors`` {name: {dtype, shape, digest}}, ``files`` {name: {bytes, sha256}}, the rest as saved."""

    path: Path
    step: int
    extra: dict[str, Any]
    tensors: dict[str, dict[str, Any]]
    files: dict[str, dict[str, Any]]
    about: dict[str, Any]


def dump_state(document: dict[str, Any]) -> str:
    """state.json's text, its own checksum in the first line."""
    body = json.dumps(document, indent=1)
    return json.dumps({"checksum": hashlib.sha256(body.encode()).hexdigest()}) + "\n" + body + "\n"


def read_state(path: Path) -> Stored:
    """The state of the checkpoint in folder ``path``. Damaged, in one line, when it is incomplete, altered or something else."""
    if not path.is_dir():
        raise Damaged(f"{path}: no such folder{_nearest(path)}")
    try:
        head, _, body = (path / STATE).read_text(encoding="utf-8").partition("\n")
    except FileNotFoundError:
        raise Damaged(f"{path} is not a complete checkpoint: no {STATE} (it holds {_holds(path)})") from None
    except (OSError, UnicodeDecodeError) as error:
        raise Damaged(f"{path}/{STATE} can't be read: {error}") from None
    try:
        whole = json.loads(head)["checksum"] == hashlib.sha256(body[:-1].encode()).hexdigest()
        document = json.loads(body) if whole else {}
    except (ValueError, KeyError, TypeError):
        whole = False
    if not whole:
        raise Damaged(f"{path}/{STATE} is damaged: its checksum does not fit")
    if document.get("format") != FORMAT:
        raise CheckpointError(f"{path} has format {document.get('format')}; this version reads format {FORMAT}")
    about = {key: document[key] for key in ("saved_at", "world_size", "torch")}
    stored = Stored(path, document["step"], document["extra"], document["tensors"], document["files"], about)
    for name, entry in stored.files.items():
        _check_size(path / name, entry["bytes"])
    return stored


def _check_size(file: Path, size: int) -> None:
    if not file.is_file():
        raise Damaged(f"{file} is missing")
    found = file.stat().st_size
    if found != size:
        raise Damaged(f"{file} is {'truncated' if found < size else 'too long'}: {found} bytes, {size} were written")


def check_content(stored: Stored, name: str) -> None:
    """Damaged unless a file of a checkpoint has the sha256 it was written with."""
    if sha256(stored.path / name) != stored.files[name]["sha256"]:
        raise Damaged(f"{stored.path / name} is damaged: its sha256 is not the one it was written with")


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _holds(path: Path) -> str:
    names = sorted(p.name for p in path.iterdir())
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "") if names else "nothing"


def _nearest(path: Path) -> str:
    there = [p.name for p in published(path.parent)]
    return f"; {path.parent} holds {', '.join(there[-3:])}" if there else ""


def published(folder: Path) -> list[Path]:
    """Folders named as checkpoints, oldest step first, whole or not."""
    if not folder.is_dir():
        return []
    found = [(int(match[1]), p) for p in folder.iterdir() if (match := PUBLISHED.fullmatch(p.name)) and p.is_dir()]
    return [p for _, p in sorted(found)]


def whole(path: Path) -> bool:
    try:
        read_state(path)
    except CheckpointError:
        return False
    return True


def write_synced(path: Path, text: str) -> dict[str, Any]:
    """``text`` to a new file, on the disk when it returns; its entry for ``files``."""
    data = text.encode()
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}


def sync_folder(path: Path) -> None:
    """The names in a folder to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def supersede(temp: Path, token: str) -> list[Path]:
    """Renames the checkpoints of steps that lie ahead of the one in ``temp``, or of the same step with other content, out of auto's sight:
    the run went back behind them. What it renamed, under the old names."""
    step = int(HIDDEN.fullmatch(temp.name)[1].removeprefix("step-"))
    ahead = [p for p in published(temp.parent) if int(p.name.removeprefix("step-")) >= step]
    if ahead and ahead[0].name == name_of(step) and whole(ahead[0]) and read_state(ahead[0]).tensors == read_state(temp).tensors:
        ahead = ahead[1:]
    for path in ahead:
        os.rename(path, path.with_name(f"{path.name}.superseded-{token[:8]}"))
    return ahead


def publish(temp: Path, token: str) -> Path:
    """Renames a finished temporary folder to its final name; a checkpoint of the same step gives way to it."""
    final = temp.parent / HIDDEN.fullmatch(temp.name)[1]
    sync_folder(temp)
    gone = _away(final, token) if final.exists() else None
    try:
        os.rename(temp, final)
    except OSError:
        if gone:
            os.rename(gone, final)
        raise
    sync_folder(final.parent)
    if gone:
        shutil.rmtree(gone, ignore_errors=True)
    return final


def _away(path: Path, token: str) -> Path:
    """Out of sight first, by one rename: a deletion that is interrupted leaves nothing that looks complete."""
    gone = path.parent / f".{path.name}.old-{token}"
    os.rename(path, gone)
    return gone


def prune(folder: Path, keep: int | None, keep_every: int | None, token: str) -> list[Path]:
    """Deletes all but the ``keep`` newest whole checkpoints and those whose step is a multiple of ``keep_every``; what it deleted."""
    if keep is None:
        return []
    complete = [p for p in published(folder) if whole(p)]
    doomed = [p for p in complete[:-keep] if not keep_every or int(p.name.removeprefix("step-")) % keep_every]
    for path in doomed:
        shutil.rmtree(_away(path, token), ignore_errors=True)
    return doomed


def clean(folder: Path, log: Callable[[str], None]) -> None:
    """Makes good what a run that died left behind: a finished temporary folder is published, the others go."""
    if not folder.is_dir():
        return
    for path in sorted(folder.iterdir(), key=_youngest_last):
        match = HIDDEN.fullmatch(path.name)
        if not match or not path.is_dir():
            continue
        if match[2] == "tmp" and whole(path) and not (folder / match[1]).exists():
            os.rename(path, folder / match[1])
            log(f"{match[1]} was written in full but not yet published when its run ended: it is now")
        else:
            shutil.rmtree(path, ignore_errors=True)
            log(f"{path.name}, left by a run that ended, is removed")


def _youngest_last(path: Path) -> tuple[bool, float]:
    # What was on its way out goes last: until a finished folder has its name, it is all there is.
    return ".old-" in path.name, path.lstat().st_mtime


def newest_first(folder: Path) -> Iterable[Path]:
    return reversed(published(folder))
