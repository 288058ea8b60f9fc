"""How good are predictions of published runs? (`python -m calibration.score PREDICTIONS.csv`: a table, and JSON with --json)

Figures by label (without --fit: rows of the folds that the shipped factors were fitted on, and of the fold held out of them), anchored figures apart, the three-line baseline on the same rows, support beside every accuracy.
Excluded rows are predicted but not scored. `--fit IDS` names the rows a fit has seen (one id a line): they are left out of the
scores, and the labels of the others follow from them.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import re
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any, Iterable, Mapping, Sequence

from calibration import baseline, metrics
from calibration.folds import MEASUREMENTS, NUM_FOLDS, fold_of, label_from, read_excluded, read_folds, stack_release
from calibration.write import write_text
from moesim.predict import read_rows
from moesim.runs import Run, parse_runs

QUESTION_COLUMNS = ("model", "seq", "gpu_type", "gpus", "precision", "gbs", "mbs", "tp", "pp", "vpp", "cp", "ep", "etp", "dp_or_fsdp",
                    "recompute", "dispatcher", "overlap_flags", "cuda_graphs")
SCALING = ("weak-", "strong-", "scaling-")
"""First words of series that vary the number of GPUs."""


class Scored:
    """Runs that were measured and predicted, with their rows: parallel tuples."""

    def __init__(self, items: Iterable[tuple[Run, Mapping[str, str], Mapping[str, float]]]) -> None:
        self.items = tuple(items)
        self.measured = [run.measured.tokens_per_s_per_gpu for run, _, _ in self.items]
        self.predicted = [found["point"] for _, _, found in self.items]

    def where(self, keep) -> Scored:
        return Scored(item for item in self.items if keep(*item))


def read_predictions(path: str | Path) -> dict[str, dict[str, float]]:
    """id -> point, low, high (tokens/s/GPU) and memory (bytes, absent where blank) of the rows that were predicted."""
    found = {}
    with Path(path).open(encoding="utf-8") as file:
        reader = csv.DictReader(file)
        missing = [c for c in ("id", "tokens_per_s_per_gpu", "low", "high", "status") if c not in (reader.fieldnames or ())]
        if missing:
            raise ValueError(f"{path}: no column {missing[0]!r}; it is not what `moesim predict` writes")
        for row in reader:
            if row["status"] != "ok":
                continue
            if row["id"] in found:
                raise ValueError(f"{path}:{reader.line_num}: id {row['id']!r} appears twice")
            found[row["id"]] = {"point": _rate(row["tokens_per_s_per_gpu"], path, reader), "low": _rate(row["low"], path, reader),
                                "high": _rate(row["high"], path, reader)}
            if row.get("mem_gb_per_gpu"):
                found[row["id"]]["memory"] = float(row["mem_gb_per_gpu"]) * 1e9
    return found


def _rate(text: str, path, reader) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise ValueError(f"{path}:{reader.line_num}: {text!r} is not a positive number of tokens/s")
    return value


def score(rows: Sequence[Mapping[str, str]], predictions: Mapping[str, Mapping[str, float]], *, fit_ids: Iterable[str] = (),
          anchored: Iterable[str] = ()) -> dict[str, Any]:
    """All figures as one JSON-able dict. `anchored`: ids whose site was refitted on a few of its own rows; they are scored apart."""
    excluded, seen, refitted = read_excluded(), set(fit_ids), set(anchored)
    runs = {run.id: run for run in parse_runs(rows) if isinstance(run, Run)}
    by_id = {row["id"]: row for row in rows}
    scored = Scored(
        (runs[i], row, predictions[i]) for i, row in by_id.items()
        if i in runs and i in predictions and i not in excluded and i not in seen and runs[i].measured.tokens_per_s_per_gpu
    )
    zero_shot = scored.where(lambda run, *_: run.id not in refitted)
    labels = _labels(zero_shot, [by_id[i] for i in seen if i in by_id])
    return {
        "support": _support(rows, predictions),
        "zero_shot": {label: _block(zero_shot.where(lambda run, *_, label=label: labels[run.id] == label)) for label in sorted(set(labels.values()))},
        "zero_shot_by_kind": {kind: _block(zero_shot.where(lambda run, *_, kind=kind: run.kind == kind)) for kind in ("moe", "dense")},
        "anchored": _block(scored.where(lambda run, *_: run.id in refitted)),
        "baseline": _baseline(zero_shot),
        "by_stack": {s: _block(zero_shot.where(lambda run, *_, s=s: run.stack.name == s)) for s in sorted({r.stack.name for r, _, _ in zero_shot.items})},
        "by_gpu": {g: _block(zero_shot.where(lambda _, row, __, g=g: row["gpu_type"] == g)) for g in sorted({row["gpu_type"] for _, row, _ in zero_shot.items})},
        "ranking": ranking(zero_shot),
        "scaling": scaling(zero_shot),
        "memory": _memory(zero_shot),
        "repeats": _repeats(runs.values(), by_id),
        "excluded": {i: why for i, why in excluded.items() if i in runs},
    }


HELD_OUT = NUM_FOLDS - 1
"""The fold that no shipped factor was fitted on (scenarios/kernel_coverage.yaml)."""


def _labels(scored: Scored, fit_rows: Sequence[Mapping[str, str]]) -> dict[str, str]:
    if not fit_rows:
        return {run.id: "held-out fold" if fold_of(row) == HELD_OUT else "fitted folds" for run, row, _ in scored.items}
    stacks, gpus = {stack_release(row) for row in fit_rows}, {row["gpu_type"] for row in fit_rows}
    return {run.id: label_from(row, stacks, gpus) for run, row, _ in scored.items}


def _support(rows: Sequence[Mapping[str, str]], predictions: Mapping[str, Any]) -> dict[str, Any]:
    out = {}
    for kind in ("moe", "dense"):
        ids = [row["id"] for row in rows if row.get("kind") == kind]
        out[kind] = {"rows": len(ids), "predicted": sum(i in predictions for i in ids)}
    return out


def _block(scored: Scored) -> dict[str, Any]:
    low, high = ([found[side] for _, _, found in scored.items] for side in ("low", "high"))
    return {"error": metrics.errors(scored.predicted, scored.measured), "interval": metrics.intervals(low, high, scored.measured)}


def _baseline(scored: Scored) -> dict[str, Any]:
    """Out-of-fold errors of constant MFU x bubble, one MFU for MoE rows and one for dense rows."""
    committed = read_folds()
    guesses: dict[str, float] = {}
    for fold in range(NUM_FOLDS):
        for kind in ("moe", "dense"):
            picked = [run for run, _, _ in scored.items if run.kind == kind]
            inside = [run for run in picked if committed.get(run.id, 0) == fold]
            outside = [run for run in picked if committed.get(run.id, 0) != fold]
            if inside and outside:
                mfu = baseline.fit(outside)
                guesses |= {run.id: baseline.predict(run, mfu) for run in inside}
    out = {}
    for kind in ("all", "moe", "dense"):
        picked = [run for run, _, _ in scored.items if run.id in guesses and kind in ("all", run.kind)]
        out[kind] = metrics.errors([guesses[r.id] for r in picked], [r.measured.tokens_per_s_per_gpu for r in picked])
    return out


def _by_series(scored: Scored) -> dict[str, list[tuple[Run, float, float]]]:
    series = defaultdict(list)
    for (run, _, _), predicted, measured in zip(scored.items, scored.predicted, scored.measured):
        if run.series:
            series[run.series].append((run, predicted, measured))
    return series


def is_layout_series(runs: Sequence[Run]) -> bool:
    """One model, GPU, size and sequence length, more than one layout: a question of which layout is fastest."""
    same = {(r.model.name, r.cluster.gpu.name, r.cluster.num_gpus, r.workload.seq_len) for r in runs}
    return len(same) == 1 and len({str(r.layout) for r in runs}) > 1


def ranking(scored: Scored) -> dict[str, Any]:
    """Kendall tau-b and regret of every layout series of three rows or more, and their means."""
    found = {}
    for name, members in sorted(_by_series(scored).items()):
        runs, predicted, measured = zip(*members)
        if len(members) >= 3 and not name.startswith(SCALING) and is_layout_series(runs):
            found[name] = {"n": len(members), "tau": metrics.kendall_tau_b(predicted, measured), "regret": metrics.regret(predicted, measured)}
    taus = [f["tau"] for f in found.values() if f["tau"] is not None]
    regrets = [f["regret"] for f in found.values()]
    mean = lambda values: sum(values) / len(values) if values else None  # noqa: E731
    return {"series": found, "n": len(found), "mean_tau": mean(taus), "mean_regret": mean(regrets), "max_regret": max(regrets, default=None)}


def scaling(scored: Scored) -> dict[str, Any]:
    """Error in points of the share of throughput kept, along series of one model over numbers of GPUs."""
    found = {}
    for name, members in sorted(_by_series(scored).items()):
        runs, predicted, measured = zip(*members)
        sizes = [run.cluster.num_gpus for run in runs]
        if name.startswith(SCALING) and len({run.model.name for run in runs}) == 1 and len(set(sizes)) == len(sizes) > 1:
            gaps = metrics.kept_share_errors(sizes, predicted, measured)
            found[name] = {"n": len(gaps), "max_gpus": max(sizes), "errors": gaps}
    every = [abs(gap) for f in found.values() for gap in f["errors"]]
    return {"series": found, "n": len(every), "mean_abs": sum(every) / len(every) if every else None, "max_abs": max(every, default=None)}


def _memory(scored: Scored) -> dict[str, Any]:
    pairs = [(found["memory"], run.measured.memory_bytes) for run, _, found in scored.items if run.measured.memory_bytes and "memory" in found]
    out = metrics.errors([p for p, _ in pairs], [m for _, m in pairs])
    return out | {"under_by_5_percent": sum(p < 0.95 * m for p, m in pairs)}


def _repeats(runs: Iterable[Run], by_id: Mapping[str, Mapping[str, str]]) -> dict[str, Any]:
    """Spread of rows that state the same question, cell by cell, within one release and across releases."""
    within, across = defaultdict(list), defaultdict(list)
    for run in runs:
        if run.measured.tokens_per_s_per_gpu:
            cells = tuple(by_id[run.id].get(column, "") for column in QUESTION_COLUMNS)
            within[cells + (run.release, run.series)].append(run.measured.tokens_per_s_per_gpu)
            across[cells + (run.stack.name, run.series)].append(run.measured.tokens_per_s_per_gpu)
    return {"within_release": metrics.repeat_spread(list(within.values())), "across_releases": metrics.repeat_spread(list(across.values()))}


def table(found: Mapping[str, Any]) -> str:
    """The figures as aligned text."""
    lines = ["support: " + ", ".join(f"{kind} {s['predicted']}/{s['rows']}" for kind, s in found["support"].items()), "",
             f"{'':34s}{'n':>5s}{'median':>8s}{'mean':>8s}{'p90':>8s}{'bias':>8s}{'inside':>8s}{'width':>8s}{'score':>8s}"]
    blocks = [(label if "fold" in label else f"zero-shot, {label}", block) for label, block in found["zero_shot"].items()]
    blocks += [(f"all {kind} rows", block) for kind, block in found["zero_shot_by_kind"].items()]
    blocks += [("anchored", found["anchored"])]
    blocks += [(f"baseline (MFU x bubble), {kind}", {"error": error}) for kind, error in found["baseline"].items()]
    blocks += [(f"stack {name}", block) for name, block in found["by_stack"].items()]
    blocks += [(f"GPU {name}", block) for name, block in found["by_gpu"].items()]
    lines += [_line(name, block) for name, block in blocks]
    r, s, m = found["ranking"], found["scaling"], found["memory"]
    lines += ["", f"ranking: {r['n']} layout series, mean tau-b {_number(r['mean_tau'])}, mean regret {_percent(r['mean_regret'])}, worst {_percent(r['max_regret'])}",
              f"scaling: {s['n']} steps, mean |error| of the kept share {_percent(s['mean_abs'])}, worst {_percent(s['max_abs'])}",
              f"memory: n {m['n']}, median {_percent(m.get('median'))}, mean {_percent(m.get('mean'))}, under by more than 5%: {m['under_by_5_percent']}",
              *(f"repeats {scope.replace('_', ' ')}: {f['n']} groups, median spread {_percent(f.get('median'))}, p90 {_percent(f.get('p90'))}"
                for scope, f in found["repeats"].items()),
              f"excluded: {len(found['excluded'])} rows (calibration/measurements/excluded.csv); * = fewer than {metrics.MIN_POINTS} points, indicative"]
    return "\n".join(lines)


def _line(name: str, block: Mapping[str, Any]) -> str:
    error, band = block["error"], block.get("interval", {})
    if not error["n"]:
        return f"{name:34s}{0:5d}"
    cells = [error[k] for k in ("median", "mean", "p90", "bias")] + [band.get(k) for k in ("coverage", "width", "score")]
    return f"{name:34s}{error['n']:5d}" + "".join(f"{_percent(c):>8s}" for c in cells) + (" *" if error["indicative"] else "")


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f}%"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m calibration.score", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("predictions", help="output of `moesim predict`")
    parser.add_argument("--rows", default=str(MEASUREMENTS / "published_runs.csv"), help="the measured rows")
    parser.add_argument("--fit", help="file of ids a fit has seen")
    parser.add_argument("--anchored", help="file of ids whose site was anchored")
    parser.add_argument("--json", help="write every figure to this file")
    args = parser.parse_args(argv)
    ids = lambda path: re.split(r"\s+", Path(path).read_text().strip()) if path else ()  # noqa: E731
    try:
        found = score(read_rows(args.rows), read_predictions(args.predictions), fit_ids=ids(args.fit), anchored=ids(args.anchored))
        if args.json:
            write_text(Path(args.json), json.dumps(found, indent=1) + "\n")
    except (OSError, ValueError, KeyError) as error:
        print(f"error: {str(error).splitlines()[0]}", file=sys.stderr)
        return 2
    print(table(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
