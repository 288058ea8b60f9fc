"""What has to be known of code, data and machine so that somebody else can tell whether theirs are the same?

Facts only, as plain JSON: commit and hashes of sources, hashes of every data shard with the mix, versions, devices.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from moetrain.observe.manifest import hash_file, hash_value

PACKAGES = ("moesim", "moetrain")
SOURCE_SUFFIXES = (".py", ".yaml", ".json", ".cu", ".toml")


def code_identity(root: str | Path | None = None) -> dict[str, Any]:
    """version, sources_sha256 (every source file of the packages, by name and content) and, in a git checkout, commit, dirty and
    diff_sha256 (of all uncommitted changes to tracked files; None if clean)."""
    root = Path(root) if root else Path(__file__).resolve().parent.parent.parent
    return {"version": _version(), "sources_sha256": sources_hash(root), **_git(root)}


def _version() -> str:
    from moesim import __version__

    return __version__


def sources_hash(root: Path, packages: Sequence[str] = PACKAGES) -> str:
    """SHA-256 over (name, content hash) of the packages' source files: the same wherever they are installed."""
    files = sorted(p for name in packages for p in (root / name).rglob("*") if p.suffix in SOURCE_SUFFIXES and "__pycache__" not in p.parts)
    return hash_value([[p.relative_to(root).as_posix(), hash_file(p)] for p in files if p.is_file()])


def _git(root: Path) -> dict[str, Any]:
    """Empty outside a checkout of its own (an installed package may lie inside somebody else's)."""
    if not (root / ".git").exists() or shutil.which("git") is None:
        return {}
    commit, status, diff = (_run_git(root, *words) for words in (("rev-parse", "HEAD"), ("status", "--porcelain"), ("diff", "HEAD", "--binary")))
    if commit is None or status is None or diff is None:
        return {}
    return {"commit": commit.decode().strip(), "dirty": bool(status.strip()), "diff_sha256": hashlib.sha256(diff).hexdigest() if diff else None}


def _run_git(root: Path, *words: str) -> bytes | None:
    try:
        done = subprocess.run(["git", "-C", str(root), "--no-optional-locks", *words], capture_output=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout


def data_identity(sources: Sequence[tuple[str | Path, float]], *, tokenizer: str | Path | None = None, extra: Any = None) -> dict[str, Any]:
    """Folders of shards with their weights in the mix: hash of each index, and the hashes it states of its shards (`verify`
    compares them with the bytes). tokenizer: the file whose hash belongs to the run. extra: a loader's fingerprint."""
    entries = [_source(Path(path), float(weight)) for path, weight in sources]
    return {"sources": entries, "tokenizer": _tokenizer(tokenizer), "fingerprint": extra}


def _source(folder: Path, weight: float) -> dict[str, Any]:
    from moetrain.data.shards import INDEX, read_index

    index = read_index(folder)
    files = {f"{s.name}{suffix}": digest for s in index.shards for suffix, digest in ((".bin", s.bin_sha256), (".idx", s.idx_sha256))}
    return {"path": str(folder.resolve()), "weight": weight, "index_file": INDEX, "index_sha256": hash_file(folder / INDEX),
            "tokens": index.tokens, "tokenizer_sha256": index.tokenizer_sha256, "files": files}


def _tokenizer(path: str | Path | None) -> dict[str, str] | None:
    if path is None:
        return None
    path = Path(path)
    file = path / "tokenizer.json" if path.is_dir() else path
    return {"path": str(file.resolve()), "sha256": hash_file(file)}


def environment(devices: Sequence[str] = ()) -> dict[str, Any]:
    """Python, operating system, every installed package with its version, processors, memory, and the devices of all ranks."""
    packages = {d.metadata["Name"]: d.version for d in importlib.metadata.distributions() if d.metadata["Name"]}
    return {
        "python": sys.version.split()[0], "platform": platform.platform(), "packages": dict(sorted(packages.items(), key=lambda p: p[0].lower())),
        "host": platform.node(), "cpu": cpu_name(), "cores": os.cpu_count(), "memory_bytes": memory_bytes(), "devices": list(devices),
    }  # fmt: skip


def cpu_name() -> str:
    """The processor's model as the system names it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def memory_bytes() -> int | None:
    """Main memory of the machine."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        return None
