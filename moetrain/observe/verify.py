"""Does everything that a run's manifest names still have the bytes it had?

`verify` walks the chain, hashes again the configuration, the log, the data shards and the checkpoints, and says what it found. A
finding of level "altered" means that history and bytes disagree; "missing" that something the history needs is not there; "note"
that something differs which is no damage (other code is installed now, a checkpoint was pruned).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moetrain.observe import manifest
from moetrain.observe.jsonl import read_records
from moetrain.observe.manifest import hash_file, hash_value
from moetrain.observe.metrics import FILE as LOG
from moetrain.observe.metrics import problem

PARTS = ("config", "code", "data", "environment", "seeds")


@dataclass(frozen=True)
class Finding:
    """One thing that is not as the history says: level altered | missing | note, where, what."""

    level: str
    where: str
    what: str

    def __str__(self) -> str:
        return f"{self.level}: {self.where}: {self.what}"


def verify(run: str | Path, *, data: bool = True, checkpoints: bool = True) -> list[Finding]:
    """Findings about a run's folder, in the order of the history; empty if all is as it was. data, checkpoints: hash their files
    too, which reads every byte of them. ValueError if there is no manifest to verify."""
    run = Path(run)
    records = manifest.read(run)
    if not records:
        raise ValueError(f"{run / manifest.FILE}: holds no records")
    found = [*_chain(records), *_parts(records), *_log(run, records), *_anchors(run, records), *_restarts(run, records)]
    found += _data(records) if data else []
    found += _checkpoints(run, records, checkpoints)
    return found + [*_code(records)]


def sound(findings: list[Finding]) -> bool:
    """True if nothing was altered and nothing is missing."""
    return all(finding.level == "note" for finding in findings)


def _chain(records) -> Iterator[Finding]:
    broken = manifest.chain_problem(records)
    if broken:
        yield Finding("altered", manifest.FILE, broken)
    if records[0]["kind"] != "start":
        yield Finding("altered", manifest.FILE, f"begins with a record of kind {records[0]['kind']}, not start")
    for record in records:
        if record["kind"] not in manifest.KINDS:
            yield Finding("altered", f"record {record['number']}", f"kind {record['kind']!r} is none of {', '.join(manifest.KINDS)}")


def _parts(records) -> Iterator[Finding]:
    """Configuration, data list and so on against the hashes beside them."""
    stated = {r["body"][f"{name}_sha256"] for r in records for name in PARTS if name in r["body"] and f"{name}_sha256" in r["body"]}
    for record in records:
        if record["kind"] not in ("start", "restart"):
            continue
        where, body = f"record {record['number']}", record["body"]
        for name in PARTS:
            digest = body.get(f"{name}_sha256")
            if name in body and hash_value(body[name]) != digest:
                yield Finding("altered", where, f"{name} is not what its hash says")
            elif name not in body and digest not in stated:
                yield Finding("missing", where, f"{name} with hash {str(digest)[:12]}... is stated in no record")


def _log(run: Path, records) -> Iterator[Finding]:
    """The log is as long, and reads the same, as each record said; its lines follow the schema."""
    path = run / LOG
    marks = [(r["number"], r["log"]) for r in records if r["log"]]
    if not path.is_file():
        if marks:
            yield Finding("missing", LOG, f"record {marks[-1][0]} saw {marks[-1][1]['bytes']} bytes of it")
        return
    content = hashlib.sha256()
    done = 0
    with path.open("rb") as file:
        for number, mark in marks:
            block = file.read(max(0, mark["bytes"] - done))
            content.update(block)
            done += len(block)
            if done != mark["bytes"] or content.hexdigest() != mark["sha256"]:
                yield Finding("altered", LOG, f"its first {mark['bytes']} bytes are not those that record {number} saw")
                break
    yield from _log_lines(path)


def _log_lines(path: Path) -> Iterator[Finding]:
    """Steps go up by one within a process, and each process goes on from its checkpoint."""
    expected: int | None = None
    restart = 0
    try:
        for i, line in enumerate(read_records(path), start=1):
            wrong = problem(line)
            if wrong:
                yield Finding("altered", f"{LOG}:{i}", wrong)
                return
            if line["restart"] != restart and line.get("event") != "restart":
                yield Finding("altered", f"{LOG}:{i}", f"restart {line['restart']} begins without its event")
            restart = line["restart"]
            if line.get("event") in ("start", "restart"):
                expected = line.get("from_step", 0) + 1
            elif line["kind"] == "step":
                if expected is not None and line["step"] != expected:
                    yield Finding("missing", f"{LOG}:{i}", f"step {line['step']} follows where step {expected} was due")
                expected = line["step"] + 1
    except ValueError as error:
        yield Finding("altered", LOG, str(error))


def _anchors(run: Path, records) -> Iterator[Finding]:
    """Heads of the chain that log lines hold are in the chain: what betrays dropped last records."""
    heads = {r["sha256"] for r in records}
    for i, line in _events(run):
        head = line.get("manifest")
        if isinstance(head, str) and head not in heads:
            yield Finding("altered", f"{LOG}:{i}", f"{line.get('event')} names a record {head[:12]}... that is not in {manifest.FILE}")


def _restarts(run: Path, records) -> Iterator[Finding]:
    """Every process that logged a step has its record. One that was killed between its first log line and its record has none."""
    logged: list[list[Any]] = []  # [kind, from_step, whether it logged a step]
    for line in _lines(run):
        if line.get("event") in ("start", "restart"):
            logged.append([line["event"], line.get("from_step"), False])
        elif line.get("kind") == "step" and logged:
            logged[-1][2] = True
    stated = [(r["kind"], r["body"].get("from_step")) for r in records if r["kind"] in ("start", "restart")]
    matched = {0}  # how many records the processes so far may account for
    for _, from_step, worked in logged:
        matched = {i + 1 for i in matched if i < len(stated) and stated[i][1] == from_step} | (set() if worked else matched)
    if logged and len(stated) not in matched:
        told, seen = ([step for kind, step, *_ in entries if kind == "restart"] for entries in (stated, logged))
        yield Finding("altered", manifest.FILE, f"restarts from steps {told}, the log has restarts from steps {seen}")


def _lines(run: Path) -> list[dict[str, Any]]:
    try:
        return list(read_records(run / LOG))
    except ValueError:  # reported by _log
        return []


def _events(run: Path) -> list[tuple[int, dict[str, Any]]]:
    return [(i, line) for i, line in enumerate(_lines(run), start=1) if line.get("kind") == "event"]


def _data(records) -> Iterator[Finding]:
    """Every shard, index and tokenizer against the hashes of every start and restart."""
    seen: set[tuple[str, str]] = set()
    for record in records:
        for source in (record["body"].get("data") or {}).get("sources", ()) if record["kind"] in ("start", "restart") else ():
            folder = Path(source["path"])
            yield from _file(folder / source["index_file"], source["index_sha256"], seen)
            for name, digest in source["files"].items():
                yield from _file(folder / name, digest, seen)
        tokenizer = (record["body"].get("data") or {}).get("tokenizer")
        if tokenizer:
            yield from _file(Path(tokenizer["path"]), tokenizer["sha256"], seen)


def _file(path: Path, digest: str, seen: set[tuple[str, str]], what: str = "the run read") -> Iterator[Finding]:
    if (str(path), digest) in seen:
        return
    seen.add((str(path), digest))
    if not path.is_file():
        yield Finding("missing", str(path), f"{what} it, and it is not there")
    elif (now := hash_file(path)) != digest:
        yield Finding("altered", str(path), f"SHA-256 {now[:12]}..., {what} {digest[:12]}...")


def _checkpoints(run: Path, records, contents: bool) -> Iterator[Finding]:
    removed = {r["body"]["step"] for r in records if r["kind"] == "removed"}
    latest = {r["body"]["step"]: r["body"] for r in records if r["kind"] == "checkpoint"}
    for step, body in sorted(latest.items()):
        folder = run / body["folder"]
        if not folder.is_dir():
            # The trainer itself sets aside what a run that went back behind it has left.
            aside = any(folder.parent.glob(f"{folder.name}.superseded-*"))
            gone = "note" if step in removed or step != max(latest) or aside else "missing"
            yield Finding(gone, str(folder), f"the checkpoint of step {step} is not there" + (" (pruned)" if gone == "note" else ""))
            continue
        before = list(_file(folder / body["file"], body["file_sha256"], set(), "the run wrote"))
        yield from before
        if contents and not before:
            yield from _contents(folder)
    yield from _unrecorded(run, {str(run / b["folder"]) for b in latest.values()})


def _contents(folder: Path) -> Iterator[Finding]:
    from moetrain.checkpoint.listing import inspect

    for entry in inspect(folder, verify=True):
        if not entry["ok"]:
            yield Finding("altered", str(folder), entry["problem"])


def _unrecorded(run: Path, known: set[str]) -> Iterator[Finding]:
    """Checkpoints beside the recorded ones that no record names: published just before a kill, or put there."""
    for parent in {Path(folder).parent for folder in known}:
        for folder in sorted(parent.glob("step-*")):
            if str(folder) not in known and (folder / "state.json").is_file():
                yield Finding("note", str(folder), "a checkpoint that no record names")


def _code(records) -> Iterator[Finding]:
    from moetrain.observe.provenance import code_identity

    then, now = manifest.part(records, "code") or {}, code_identity()
    if then.get("sources_sha256") != now["sources_sha256"]:
        yield Finding("note", "code", f"installed sources are {now['sources_sha256'][:12]}..., the run's were {str(then.get('sources_sha256'))[:12]}...")
