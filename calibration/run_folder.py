"""What did a run of the trainer do, and what did its ranks record? (Scenario, layout, seconds of steps and spans of a run's folder.)

A folder holds metrics.jsonl (a line a step), spans/spans-rank*.jsonl (the steps that were recorded) and, where the run was started by the
trainer's command, manifest.json with its whole configuration. A folder without one lies in a folder of timed cases, whose steps.jsonl
names it; or the caller says what ran.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from moesim.layout import Layout, num_microbatches, parse_layout, parse_token
from moesim.load import load_scenario, read_dump
from moesim.measurement import read_lines, read_measurements
from moesim.space import canonical
from moesim.spec import Scenario

WARM = 3
"""Steps at the beginning of a run that are not typical, at most a third of them."""

WHOLE = 0.4
"""Share of a step that its spans reach at least: the optimizer's is the last, and only the host's work between steps follows it. A file cut off
later than this goes unnoticed."""


class Piece(NamedTuple):
    """A span as a rank recorded it, or a piece of one that another one interrupted: seconds since the step began. layer, microbatch: -1 for
    none. roles: several where no clock told them apart. phase: F, B, R (a forward that ran again), or "" outside the model."""

    step: int
    rank: int
    stream: int
    roles: tuple[str, ...]
    start: float
    end: float
    entry: str
    layer: int
    phase: str
    microbatch: int
    bytes: float


@dataclass(frozen=True)
class RecordedRun:
    """seconds: of every step that counts, in order. spans: step -> its pieces by start; makespans: step -> the longest rank's seconds."""

    folder: Path
    scenario: Scenario
    layout: Layout
    seconds: tuple[float, ...]
    spans: Mapping[int, Sequence[Piece]]
    makespans: Mapping[int, float]

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    def stage_of(self, rank: int) -> int:
        """Pipeline rank of a rank."""
        return rank // (self.layout.world // self.layout.pp)


def read_run(folder: str | Path, scenario: str | None = None, sets: Sequence[str] = (), layout: str | None = None) -> RecordedRun:
    """A run's folder. ``scenario`` (a name or file, with ``sets``) and ``layout`` say what ran where the folder doesn't. ValueError in one
    line where something is missing."""
    place = Path(folder)
    if not place.is_dir():
        raise ValueError(f"{place}: no such folder of a run")
    known, text, world = _identity(place, scenario, sets, layout)
    spans, makespans = _spans(place)
    found = full_layout(known, text, world or 1 + max((p.rank for pieces in spans.values() for p in pieces), default=0))
    return RecordedRun(place, known, found, _seconds(place, makespans), spans, makespans)


def full_layout(scenario: Scenario, text: str, world: int) -> Layout:
    """The layout that ``text`` means on ``world`` ranks: dp is what the others leave."""
    try:
        degrees = {key: value for token in text.split() for key, value in parse_token(token).items() if key in ("pp", "dp", "cp", "tp")}
    except AttributeError:
        raise ValueError(f"layout {text!r} is no text") from None
    if "dp" not in degrees:
        others = 1
        for size in degrees.values():
            others *= size
        text = f"{text} dp{max(1, world // others)}"
    layout = parse_layout(text)
    if layout.world != world:
        raise ValueError(f"layout {str(layout)!r} is for {layout.world} ranks, {world} ran")
    return canonical(layout, num_microbatches(layout, scenario.workload))


def on_world(scenario: Scenario, world: int) -> Scenario:
    """The scenario on a cluster of ``world`` GPUs: the same one where it has them, else one node of so many."""
    cluster = scenario.cluster
    if cluster.num_gpus == world:
        return scenario
    return scenario.model_copy(update={"cluster": cluster.model_copy(update={"gpus_per_node": world, "num_nodes": 1})})


# --- what ran -----------------------------------------------------------------------------------------------------------------


def _identity(place: Path, scenario: str | None, sets: Sequence[str], layout: str | None) -> tuple[Scenario, str, int]:
    """(scenario, layout as text, ranks or 0 where only the spans know)."""
    if scenario is not None:
        known = load_scenario(scenario, list(sets))
        return known, layout or known.layout or "mb1", 0
    manifest = place / "manifest.json"
    if manifest.is_file():
        body = _last_start(manifest)
        if sets:
            raise ValueError(f"{manifest} says what ran: --set goes with --scenario")
        known = read_dump(body["config"], str(manifest))
        return known, layout or body["layout"], 0 if layout else int(body["world"])
    for table in (place.parent.parent / "steps.jsonl", place.parent / "steps.jsonl"):
        for m in read_measurements(table) if table.is_file() else ():
            if str(m.parameters.get("case", "")).replace(" ", "_").replace("/", "_") == place.name:
                known = load_scenario(m.parameters["scenario"], [*m.parameters["set"], *sets])
                return known, layout or m.layout, int(m.parameters["world"])
    raise ValueError(f"{place}: no manifest.json, and no steps.jsonl beside it names this case; say what ran with --scenario and --layout")


def _last_start(path: Path) -> Mapping[str, Any]:
    try:
        records = json.loads(path.read_text())["records"]
        bodies = [record["body"] for record in records if record["kind"] == "start"]
        return {key: bodies[-1][key] for key in ("config", "layout", "world")}
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise ValueError(f"{path}: not the manifest of a run ({type(error).__name__}: {error})") from None


def _seconds(place: Path, makespans: Mapping[int, float]) -> tuple[float, ...]:
    """Of the steps that count, by the log; by the recorded steps where there is no log."""
    log = place / "metrics.jsonl"
    if not log.is_file():
        if not makespans:
            raise ValueError(f"{place}: neither metrics.jsonl nor spans")
        return tuple(makespans.values())
    found = {}
    for where, line in read_lines(log):
        if line.get("kind") == "step":
            if not isinstance(line.get("seconds"), (int, float)) or not line["seconds"] > 0:
                raise ValueError(f"{where}: seconds {line.get('seconds')!r} of a step")
            found[line.get("step")] = float(line["seconds"])
    if not found:
        raise ValueError(f"{log}: no step")
    seconds = list(found.values())
    return tuple(seconds[min(WARM, len(seconds) // 3):])


# --- spans --------------------------------------------------------------------------------------------------------------------


def _spans(place: Path) -> tuple[dict[int, list[Piece]], dict[int, float]]:
    """(step -> pieces of all ranks, shifted by their clocks; step -> makespan) of every span file."""
    steps: dict[tuple[int, int], tuple[Mapping[str, Any], list[Piece]]] = {}
    for path in sorted((place / "spans").glob("spans-rank*.jsonl")):
        for header, pieces in _file(path):
            covered = max((p.end for p in pieces), default=0.0)
            if covered < WHOLE * header["makespan"]:
                raise ValueError(f"{path}: the spans of step {header['step']} end at {covered:.4g} of {header['makespan']:.4g} s: the file was cut off; "
                                 "remove its last step, or record again")
            steps[header["step"], header["rank"]] = header, pieces
    spans: dict[int, list[Piece]] = {}
    makespans: dict[int, float] = {}
    for step in sorted({step for step, _ in steps}):
        ranks = [found for (s, _), found in steps.items() if s == step]
        first = min(header["clock"] for header, _ in ranks)
        shifted = [(header["clock"] - first, header, pieces) for header, pieces in ranks]
        spans[step] = sorted((p._replace(start=p.start + late, end=p.end + late) for late, _, pieces in shifted for p in pieces), key=lambda p: p.start)
        makespans[step] = max(header["makespan"] + late for late, header, _ in shifted)
    return spans, makespans


def _file(path: Path) -> Iterator[tuple[Mapping[str, Any], list[Piece]]]:
    header, pieces = None, []
    for where, line in read_lines(path):
        try:
            if line["line"] == "step":
                if header is not None:
                    yield header, pieces
                header, pieces = {key: line[key] for key in ("step", "rank", "clock", "makespan")}, []
            else:
                pieces.append(_piece(line))
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{where}: neither a step nor a span ({type(error).__name__}: {error})") from None
    if header is not None:
        yield header, pieces


def _piece(line: Mapping[str, Any]) -> Piece:
    extra = line["extra"]
    return Piece(int(line["step"]), int(line["rank"]), int(line["stream"]), tuple(line["kind"].split("+")), float(line["start"]), float(line["end"]), line["entry"],
                 int(extra.get("layer", -1)), str(extra.get("phase", "")), int(extra.get("microbatch", -1)), float(extra.get("bytes", 0.0)))
