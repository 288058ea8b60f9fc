"""Which code, data, configuration and machines made this run, and can its history have been altered since?

`manifest.json` in the run's folder is a chain of records, oldest first: start, restart, checkpoint, removed, note, result. Each holds
the SHA-256 of the record before it and its own, so a record that was edited, dropped or inserted shows at that place; `verify`
(verify.py) also hashes again what the records name. Each also holds how long `metrics.jsonl` was, and its hash up to there.

What a chain can't show: it is not signed. Whoever rewrites every record from the altered one on, and the log, leaves no trace here.
Dropping the last records shows only through what they anchored (log lines with a ``manifest`` field, checkpoints on disk).
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moesim.files import write_atomically
from moetrain.observe.jsonl import plain
from moetrain.observe.metrics import FILE as LOG

SCHEMA = 1
FILE = "manifest.json"
KINDS = ("start", "restart", "checkpoint", "removed", "note", "result")
FIRST = "0" * 64
CHUNK = 1 << 20


def canonical(value: Any) -> bytes:
    """The one JSON text of a value: keys sorted, no spaces, non-finite numbers as text."""
    return json.dumps(plain(value), sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()


def hash_value(value: Any) -> str:
    """SHA-256 of a value's canonical JSON, in hex."""
    return hashlib.sha256(canonical(value)).hexdigest()


def hash_file(path: str | Path) -> str:
    """SHA-256 of a file's bytes, in hex."""
    with Path(path).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def record_hash(record: Mapping[str, Any]) -> str:
    """What a record's own ``sha256`` must be."""
    return hash_value({key: value for key, value in record.items() if key != "sha256"})


class Manifest:
    """The chain of one run, opened to append. Rank 0 only; every method writes the whole file atomically.

    Raises ValueError if a manifest is there that can't be read or whose chain is broken: nothing is built on an altered past."""

    def __init__(self, run: str | Path) -> None:
        self.run = Path(run)
        self.path = self.run / FILE
        self.records: list[dict[str, Any]] = read(self.run) if self.path.exists() else []
        broken = chain_problem(self.records)
        if broken:
            raise ValueError(f"{self.path}: {broken}")
        self._log_hash, self._log_bytes = hashlib.sha256(), 0

    @property
    def head(self) -> str:
        """SHA-256 of the last record: put it into log lines and checkpoints, and they anchor the chain."""
        return self.records[-1]["sha256"] if self.records else FIRST

    def begin(self, *, config: Mapping[str, Any], code: Mapping[str, Any], data: Mapping[str, Any], environment: Mapping[str, Any],
              seeds: Mapping[str, int], layout: str, world: int, from_step: int = 0) -> str:
        """The record of a process that starts the run, or of one that resumes it from the checkpoint of ``from_step``; returns
        the new head. config: scenario and train block as JSON; code, data, environment: as provenance.py gives them. What did not
        change since the last begin is held as its hash only."""
        parts = {"config": config, "code": code, "data": data, "environment": environment, "seeds": seeds}
        body: dict[str, Any] = {"layout": layout, "world": world, "from_step": from_step}
        known = self._known_hashes()
        for name, part in parts.items():
            body[f"{name}_sha256"] = hash_value(part)
            if body[f"{name}_sha256"] not in known:
                body[name] = plain(part)
        return self._append("restart" if self.records else "start", body)

    def _known_hashes(self) -> set[str]:
        return {value for record in self.records for key, value in record["body"].items() if key.endswith("_sha256")}

    def checkpoint(self, step: int, folder: str | Path, file: str = "state.json") -> str:
        """A checkpoint was published: its folder, and the hash of the file in it that lists the digests of all others."""
        folder = Path(folder)
        name = str(folder.relative_to(self.run)) if folder.is_relative_to(self.run) else str(folder)
        return self._append("checkpoint", {"step": step, "folder": name, "file": file, "file_sha256": hash_file(folder / file)})

    def removed(self, step: int) -> str:
        """The checkpoint of a step was deleted on purpose."""
        return self._append("removed", {"step": step})

    def note(self, text: str) -> str:
        return self._append("note", {"text": text})

    def result(self, step: int, losses: Mapping[str, float]) -> str:
        """The run reached its end: last step, losses by name."""
        return self._append("result", {"step": step, "losses": plain(losses)})

    def _append(self, kind: str, body: Mapping[str, Any]) -> str:
        record = {"number": len(self.records), "kind": kind, "time": round(time.time(), 3), "body": plain(body), "log": self._log(), "previous": self.head}
        record["sha256"] = record_hash(record)
        self.records.append(record)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(self.path, json.dumps({"schema": SCHEMA, "records": self.records}, indent=1) + "\n")
        return record["sha256"]

    def _log(self) -> dict[str, Any] | None:
        """Length and hash of the log so far, read on from where the last record left off."""
        path = self.run / LOG
        if not path.is_file():
            return None
        with path.open("rb") as file:
            file.seek(self._log_bytes)
            while chunk := file.read(CHUNK):
                self._log_hash.update(chunk)
                self._log_bytes += len(chunk)
        return {"bytes": self._log_bytes, "sha256": self._log_hash.hexdigest()}


def read(run: str | Path) -> list[dict[str, Any]]:
    """The records in a run's folder, their shape checked and nothing else. ValueError in one line."""
    path = Path(run) / FILE
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{path}: no such file; is {run} the folder of a run?") from None
    except (OSError, UnicodeDecodeError, ValueError, RecursionError) as error:
        raise ValueError(f"{path}: can't be read as JSON ({type(error).__name__})") from None
    records = document.get("records") if isinstance(document, dict) else None
    if not isinstance(records, list) or document.get("schema") != SCHEMA:
        raise ValueError(f"{path}: not a manifest of schema {SCHEMA}")
    for i, record in enumerate(records):
        if not _well_formed(record):
            raise ValueError(f"{path}: record {i} has not the fields of a record")
    return records


def _well_formed(record: Any) -> bool:
    fields = {"number": int, "kind": str, "time": (int, float), "body": dict, "log": (dict, type(None)), "previous": str, "sha256": str}
    return isinstance(record, dict) and set(record) == set(fields) and all(isinstance(record[k], t) for k, t in fields.items()) and math.isfinite(record["time"])


def chain_problem(records: list[dict[str, Any]]) -> str | None:
    """The first break of the chain in words; None if it is whole."""
    previous = FIRST
    for i, record in enumerate(records):
        if record["number"] != i:
            return f"record {i} says it is number {record['number']}: a record was removed or inserted before it"
        if record["previous"] != previous:
            return f"record {i} ({record['kind']}) does not follow record {i - 1}: one of them was replaced, removed or inserted"
        if record_hash(record) != record["sha256"]:
            return f"record {i} ({record['kind']}) was altered: its hash is not its own"
        previous = record["sha256"]
    return None


def part(records: list[dict[str, Any]], name: str, upto: int | None = None) -> Any:
    """The config, code, data, environment or seeds in force at the end (or at record ``upto``): the last one stated, by hash."""
    begun = [r for r in records[: None if upto is None else upto + 1] if r["kind"] in ("start", "restart")]
    if not begun:
        return None
    wanted = begun[-1]["body"][f"{name}_sha256"]
    return next((r["body"][name] for r in records if name in r["body"] and r["body"].get(f"{name}_sha256") == wanted), None)
