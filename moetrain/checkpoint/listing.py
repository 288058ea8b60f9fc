"""What does a checkpoint hold, and is it sound, without building a model?"""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

from moetrain.checkpoint import folders
from moetrain.checkpoint.boxes import TYPES
from moetrain.checkpoint.errors import CheckpointError


def inspect(path: str | os.PathLike[str], verify: bool = False) -> list[dict[str, Any]]:
    """One plain dict a checkpoint, oldest first: ``path`` is one, or a folder of them.

    {name, path, ok, problem, step, bytes, world_size, torch, saved_at, extra, tensors {name: {dtype, shape, digest}}, elements,
    element_bytes}; a broken one has name, path, ok, problem only. ``verify`` reads every file and compares sha256.
    """
    root = Path(path)
    paths = [root] if (root / folders.STATE).is_file() else folders.published(root) or [root]
    return [_look(each, verify) for each in paths]


def _look(path: Path, verify: bool) -> dict[str, Any]:
    entry: dict[str, Any] = {"name": path.name, "path": str(path), "ok": True, "problem": ""}
    try:
        stored = folders.read_state(path)
        for name in stored.files if verify else ():
            folders.check_content(stored, name)
    except CheckpointError as error:
        return {**entry, "ok": False, "problem": str(error)}
    elements = {name: math.prod(tensor["shape"]) for name, tensor in stored.tensors.items()}
    return {**entry, "step": stored.step, "bytes": sum(file["bytes"] for file in stored.files.values()), **stored.about, "extra": stored.extra,
            "tensors": stored.tensors, "elements": sum(elements.values()),
            "element_bytes": sum(count * TYPES[stored.tensors[name]["dtype"]].itemsize for name, count in elements.items())}


def describe(path: str | os.PathLike[str], verify: bool = False) -> str:
    """The same as lines to print: one a checkpoint, and each tensor's type, shape and digest where ``path`` is a single one."""
    found = inspect(path, verify)
    if not any(entry["ok"] for entry in found):
        raise CheckpointError("; ".join(f"{entry['name']}: {entry['problem']}" for entry in found))
    lines = [_line(entry) for entry in found]
    if len(found) == 1 and found[0]["ok"]:
        width = max(map(len, found[0]["tensors"]), default=0)
        lines += [f"  {name:{width}}  {t['dtype']:8}  {t['shape']!s:22}  {t['digest']}" for name, t in found[0]["tensors"].items()]
    return "\n".join(lines)


def _line(entry: dict[str, Any]) -> str:
    if not entry["ok"]:
        return f"{entry['name']}  unusable: {entry['problem']}"
    return (f"{entry['name']}  step {entry['step']}  {entry['bytes'] / 1e6:.1f} MB  {len(entry['tensors'])} tensors  "
            f"{entry['elements']} elements  {entry['world_size']} ranks  torch {entry['torch']}  {entry['saved_at']}")
