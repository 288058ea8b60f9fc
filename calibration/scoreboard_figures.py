"""How good are the answers? (rows with their answers in, every figure of the accuracy protocol out, as plain data)

Three kinds of prediction never share a column: *held out* (kernel factors fitted without the row's fold, GPU or stack release, by
label), *shipped* (the factors as they are, for shapes along a series and for bands), *anchored* (calibration.scoreboard_full). The
test fold is in the support and nowhere else.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from dataclasses import dataclass, replace
from typing import Any, Callable, Mapping, Sequence

from calibration import baseline, metrics
from calibration.coverage import TEST_FOLD, Point
from calibration.folds import MEASUREMENTS, fold_of, group_hash, label_from, read_excluded, stack_release
from calibration.memory_check import check as check_memory
from calibration.out_of_fold import LABELS, baseline_errors, half_width, held_out
from calibration.scoreboard_pairs import kept_share, pair_figures
from calibration.scoreboard_rows import Answer
from calibration.score import Scored, ranking, scaling
from moesim.coverage import GENERATIONS, features_of, load_coverage
from moesim.model_error import load_model_error
from moesim.predict import assumption_sigma, read_rows
from moesim.runs import Run, parse_runs

FAR = 0.5
"""A run counts as priced from afar when most of its priced seconds are extrapolated, from a datasheet or assumed."""
DIGITS = 4
SHIPPED = MEASUREMENTS / "published_runs.csv"


@dataclass(frozen=True)
class Judged:
    """One measured row and one prediction of it, all rates in tokens/s/GPU. naive: the three-line baseline's, by the same split."""

    id: str
    run: Run
    row: Mapping[str, str]
    predicted: float
    low: float
    high: float
    far: float
    label: str = ""
    naive: float | None = None

    @property
    def measured(self) -> float:
        return self.run.measured.tokens_per_s_per_gpu

    @property
    def source(self) -> str:
        return self.id.partition("-")[0]


GROUPS: dict[str, Callable[[Judged], str]] = {
    "kind": lambda j: j.run.kind,
    "source": lambda j: j.source,
    "gpu": lambda j: j.row["gpu_type"],
    "model": lambda j: j.row["model"],
    "stack release": lambda j: stack_release(j.row),
}


def block(judged: Sequence[Judged]) -> dict[str, Any]:
    """Errors and bands of these, and the baseline's errors on those of them that it has a guess for."""
    measured = [j.measured for j in judged]
    found = metrics.errors([j.predicted for j in judged], measured) | metrics.intervals([j.low for j in judged], [j.high for j in judged], measured)
    guessed = [j for j in judged if j.naive is not None]
    naive = metrics.errors([j.naive for j in guessed], [j.measured for j in guessed])
    return found | {"baseline": {k: naive[k] for k in ("n", "median", "mean", "p90") if k in naive}}


def shipped(rows: Sequence[Mapping[str, str]], runs: Mapping[str, Run], found: Mapping[str, Answer], predicted: Mapping[str, Mapping]) -> list[Judged]:
    """Every measured row that was answered and is neither excluded nor of the test fold."""
    excluded = read_excluded()
    return [j for j in measured_rows(rows, runs, found, predicted) if j.id not in excluded and fold_of(j.row) != TEST_FOLD]


def by_label(judged: Sequence[Judged], found: Mapping[str, Answer]) -> dict[str, list[Judged]]:
    """Label -> the rows it holds, each predicted with kernel factors fitted without its fold, GPU or release, with the band that those
    factors leave."""
    known = [j for j in judged if j.run.cluster.gpu.name in GENERATIONS]
    points = [point_of(j, found[j.id]) for j in known]
    rows, of = [j.row for j in known], {j.id: j for j in known}
    residuals, naive = held_out(points, load_coverage(), rows), baseline_errors({j.id: j.run for j in known}, rows)
    by_id, error = {p.id: p for p in points}, load_model_error().model_dump()
    half = {label: {i: half_width(by_id[i], error, e.variance) for i, e in residuals[label].items()} for label in LABELS}
    return {label: [_moved(of[i], e.error, half[label][i], naive[label].get(i), label) for i, e in residuals[label].items()] for label in LABELS}


def point_of(j: Judged, answer: Answer) -> Point:
    """What a fit of kernel factors needs of it."""
    traits = features_of(j.run.model, j.run.cluster, j.run.proxy_dispatcher)
    doubt = assumption_sigma(j.run.assumed, j.run.pinned)
    return Point(j.id, group_hash(j.row), j.run.stack.name, GENERATIONS[j.run.cluster.gpu.name], traits, math.log(answer.tokens_per_s_per_gpu / j.measured), answer.slope,
                 answer.spread, doubt, answer.far)


def _moved(j: Judged, ln_error: float, half: float, ln_naive: float | None, label: str) -> Judged:
    predicted = j.measured * math.exp(ln_error)
    naive = None if ln_naive is None else j.measured * math.exp(ln_naive)
    return replace(j, predicted=predicted, low=predicted * math.exp(-half), high=predicted * math.exp(half), label=label, naive=naive)


def by_fold(labelled: Mapping[str, Sequence[Judged]]) -> list[Judged]:
    """Each row once: as held out with its fold, under the label it then has."""
    chosen: dict[str, Judged] = {}
    for label in reversed(LABELS):
        chosen |= {j.id: j for j in labelled[label]}
    return list(chosen.values())


def labels_of_new(judged: Sequence[Judged]) -> dict[str, list[Judged]]:
    """Rows of another file by what they are to the shipped fit: a configuration that was in it, or one of LABELS. The baseline's MFU
    comes from the rows of the fit."""
    fit = [row for row in read_rows(SHIPPED) if fold_of(row) != TEST_FOLD and row["id"] not in read_excluded()]
    stacks, gpus, seen = {stack_release(r) for r in fit}, {r["gpu_type"] for r in fit}, {group_hash(r) for r in fit}
    runs = [run for run in parse_runs(fit) if isinstance(run, Run)]
    mfu = {kind: baseline.fit(run for run in runs if run.kind == kind) for kind in ("moe", "dense")}
    found: dict[str, list[Judged]] = defaultdict(list)
    for j in judged:
        label = label_from(j.row, stacks, gpus)
        label = "seen configuration" if label == LABELS[0] and group_hash(j.row) in seen else label
        found[label].append(replace(j, label=label, naive=baseline.predict(j.run, mfu[j.run.kind])))
    return dict(found)


def support(rows: Sequence[Mapping[str, str]], predicted: Mapping[str, Mapping]) -> dict[str, Any]:
    """Rows and answered rows by kind, and the unanswered ones counted by reason."""
    out: dict[str, Any] = {}
    for kind in ("moe", "dense"):
        ids = [row["id"] for row in rows if row.get("kind") == kind]
        out[kind] = {"rows": len(ids), "predicted": sum(predicted[i]["status"] == "ok" for i in ids)}
    reasons = Counter(_reason(p["reason"]) for p in predicted.values() if p["status"] != "ok")
    return out | {"unsupported": dict(sorted(reasons.items(), key=lambda item: (-item[1], item[0])))}


def _reason(text: str) -> str:
    """The reason with what differs between rows left out."""
    return re.sub(r"\d+", "N", re.sub(r"'[^']*'", "...", text))[:100]


def bands(judged: Sequence[Judged]) -> dict[str, Any]:
    """Width and coverage of the shipped bands by where the seconds come from."""
    near, far = ([j for j in judged if bool(j.far > FAR) == from_afar] for from_afar in (False, True))
    return {name: {k: block(part).get(k) for k in ("n", "width", "coverage", "score")} for name, part in (("measured or interpolated", near), ("from afar", far))}


def memory(rows: Sequence[Mapping[str, str]]) -> dict[str, Any]:
    """Errors of predicted memory, each figure against its own kind; under: rows predicted more than 5% too low."""
    checked = [c for c in check_memory(row for row in rows if row.get("mem_gb_per_gpu")) if c.id not in read_excluded()]
    return metrics.errors([c.predicted for c in checked], [c.measured for c in checked]) | {"under_by_5_percent": sum(c.error < -0.05 for c in checked)}


def figures(rows: Sequence[Mapping[str, str]], runs: Mapping[str, Run], found: Mapping[str, Answer], predicted: Mapping[str, Mapping],
            known: bool = True) -> tuple[dict[str, Any], dict[str, list[Judged]]]:
    """(every figure, rounded; the judged rows by label). known: the rows are the shipped ones, which the factors were fitted on."""
    judged = shipped(rows, runs, found, predicted) if known else measured_rows(rows, runs, found, predicted)
    labelled = by_label(judged, found) if known else labels_of_new(judged)
    each = by_fold(labelled) if known else [j for members in labelled.values() for j in members]
    scored = Scored((j.run, j.row, {"point": j.predicted, "low": j.low, "high": j.high}) for j in judged)
    data = {
        "support": support(rows, predicted),
        "labels": {label: by_kind(members) for label, members in labelled.items()},
        "by": {name: {value: block([j for j in each if key(j) == value]) for value in sorted({key(j) for j in each})} for name, key in GROUPS.items()},
        "ranking": ranking(scored), "scaling": scaling(scored), "bands": bands(judged), "memory": memory(rows),
    }
    if known:
        data |= {"fitted": by_kind(judged), "pairs": pair_figures(found, runs), "kept_share": kept_share(found, runs)}
    return rounded(data), {**labelled, "shipped": judged}


def measured_rows(rows, runs, found, predicted) -> list[Judged]:
    """Every measured row that was answered."""
    return [Judged(r["id"], runs[r["id"]], r, p["tokens_per_s_per_gpu"], p["low"], p["high"], found[r["id"]].far) for r in rows
            if (p := predicted[r["id"]])["status"] == "ok" and runs[r["id"]].measured.tokens_per_s_per_gpu]


def by_kind(judged: Sequence[Judged]) -> dict[str, Any]:
    """``block`` of all, of MoE and of dense rows."""
    return {kind: block([j for j in judged if kind in ("all", j.run.kind)]) for kind in ("all", "moe", "dense")}


def rounded(value: Any) -> Any:
    """Floats to DIGITS decimals: a hundredth of a percent."""
    if isinstance(value, float):
        return round(value, DIGITS)
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    return [rounded(item) for item in value] if isinstance(value, (list, tuple)) else value
