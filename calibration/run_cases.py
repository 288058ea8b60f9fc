"""Which steps were measured, of what? (Run folders, or files of measured steps, as cases that can be predicted.)

One case is one scenario and layout on so many ranks, with the median of each launch. Files that say so:

* JSON lines, or a JSON list, of objects: scenario (a name, a file, or the scenario itself), layout, world, seconds: [medians of launches],
  and, where known, set: ["model.num_experts=16", ...], series, anchor, foreign_cpu, dtype, case;
* JSON lines of `moesim.measurement` with a layout and a step, whose parameters say scenario, set, world, series, anchor and launch;
* CSV with the columns of the first, lists separated by ";".
"""

from __future__ import annotations

import csv
import json
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from calibration.run_folder import RecordedRun, full_layout, on_world, read_run
from moesim.layout import Layout
from moesim.load import load_scenario, parse_scenario
from moesim.measurement import SCHEMA, from_record, nearest, read_lines
from moesim.spec import Scenario

FIELDS = {"scenario": (str, dict), "layout": (str,), "world": (int,), "seconds": (list,), "set": (list,), "series": (str,), "anchor": (bool,),
          "foreign_cpu": (int, float), "dtype": (str,), "case": (str,)}
NEEDED = ("scenario", "layout", "world", "seconds")


@dataclass(frozen=True)
class Case:
    """seconds: the median step of each launch. anchor: a fit has seen it. recorded: a run of it whose spans are known. foreign_cpu: the
    largest share of the cores that others used during a launch, None if nobody looked."""

    name: str
    scenario: Scenario
    layout: Layout
    seconds: tuple[float, ...]
    series: str = ""
    anchor: bool = False
    foreign_cpu: float | None = None
    recorded: RecordedRun | None = None

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def rate(self) -> float:
        """Measured tokens/s a rank."""
        return self.scenario.workload.global_batch_tokens / self.median / self.layout.world

    @property
    def key(self) -> tuple[str, str, int]:
        """Equal keys are one case."""
        return self.scenario.hash, str(self.layout), self.layout.world


def read_cases(paths: Iterable[Path]) -> list[Case]:
    """Cases of folders and files, in order; lines of one case become its launches, a folder gives a case its spans. ValueError names the
    line, or the folder, that can't be understood."""
    found: dict[tuple[str, str, int], Case] = {}
    paths = sorted(paths, key=lambda p: p.is_dir())  # files first: folders may be of their cases
    for path in paths:
        for case in [_of_folder(path)] if path.is_dir() else _of_file(path):
            known = found.get(case.key)
            found[case.key] = case if known is None else _merged(known, case)
    return list(found.values())


def _merged(known: Case, more: Case) -> Case:
    if more.recorded is not None:
        return replace(known, recorded=more.recorded)
    shares = [c.foreign_cpu for c in (known, more) if c.foreign_cpu is not None]
    return replace(known, seconds=known.seconds + more.seconds, foreign_cpu=max(shares, default=None))


def _of_folder(path: Path) -> Case:
    run = read_run(path)
    return Case(path.name, on_world(run.scenario, run.layout.world), run.layout, (run.median,), recorded=run if run.spans else None)


def _of_file(path: Path) -> Iterator[Case]:
    for where, record in _records(path):
        try:
            yield _case(record)
        except ValueError as error:
            raise ValueError(f"{where}: {' '.join(str(error).split())}") from None


def _records(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    if path.suffix == ".csv":
        with path.open(encoding="utf-8", newline="") as file:
            reader = csv.DictReader(file)
            for row in reader:
                yield f"{path}:{reader.line_num}", _of_csv({key: value for key, value in row.items() if key and value}, f"{path}:{reader.line_num}")
        return
    if path.suffix == ".json":
        try:
            whole = json.loads(path.read_text())
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path}: not JSON: {error}") from None
        whole = whole.get("cases") if isinstance(whole, dict) and "cases" in whole else whole
        for i, record in enumerate(whole if isinstance(whole, list) else [whole], 1):
            if not isinstance(record, dict):
                raise ValueError(f"{path}: item {i} is no object")
            yield f"{path}: item {i}", record
        return
    yield from read_lines(path)


def _of_csv(row: Mapping[str, str], where: str) -> Mapping[str, Any]:
    record: dict[str, Any] = dict(row)
    try:
        for key, convert in (("world", int), ("foreign_cpu", float), ("seconds", lambda t: [float(s) for s in t.split(";")]), ("set", lambda t: t.split(";")),
                             ("anchor", lambda t: {"true": True, "false": False}[t.lower()])):
            if key in record:
                record[key] = convert(record[key])
    except (ValueError, KeyError):
        raise ValueError(f"{where}: {key} is {row[key]!r}") from None
    return record


def _case(record: Mapping[str, Any]) -> Case:
    if record.get("schema") == SCHEMA:
        record = _of_measurement(record)
    unknown = [key for key in record if key not in FIELDS]
    if unknown:
        raise ValueError(f"unknown field {unknown[0]!r}{nearest(unknown[0], FIELDS)}")
    for key in NEEDED:
        if key not in record:
            raise ValueError(f"no {key!r}; a case has {', '.join(NEEDED)}")
    for key, value in record.items():
        if not isinstance(value, FIELDS[key]) or (isinstance(value, bool) and key != "anchor"):
            raise ValueError(f"{key} is {str(value)[:40]!r}, of the wrong type")
    seconds = tuple(record["seconds"])
    if not seconds or any(isinstance(s, bool) or not isinstance(s, (int, float)) or not 0 < s < float("inf") for s in seconds):
        raise ValueError(f"seconds are {str(record['seconds'])[:60]}; they must be positive numbers")
    scenario, sets = record["scenario"], [str(s) for s in record.get("set", ())]
    known = load_scenario(scenario, sets) if isinstance(scenario, str) else parse_scenario(json.dumps(scenario), sets)
    known = on_world(known, record["world"])
    layout = full_layout(known, record["layout"], record["world"])
    return Case(record.get("case") or f"{known.name} {layout}", known, layout, seconds, record.get("series", ""), record.get("anchor", False), record.get("foreign_cpu"))


def _of_measurement(record: Mapping[str, Any]) -> dict[str, Any]:
    m = from_record(record)
    if m.layout is None or m.reason is not None:
        raise ValueError("not a measured step: it has no layout, or no seconds")
    wanted = {key: value for key, value in m.parameters.items() if key in FIELDS}
    found = {**wanted, "layout": m.layout, "seconds": [m.median]}
    return found if m.foreign_cpu is None else {**found, "foreign_cpu": m.foreign_cpu}


def spread_of(cases: Sequence[Case]) -> list[Sequence[float]]:
    """Medians of the launches of each case that was launched more than once."""
    return [case.seconds for case in cases if len(case.seconds) > 1]
