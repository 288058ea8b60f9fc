"""How far off are predictions of runs whose fold, GPU or release no factor has seen? (`python -m calibration.out_of_fold`: by label)

Each split of calibration.folds is fitted without its held rows; their residuals are corrected to those factors along the step's
sensitivities. Beside each label stands the three-line baseline with its MFU fitted on the same rows. `--write` turns the residuals
into scenarios/model_error.yaml by the rule of ``model_error``.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Mapping, Sequence

import numpy as np

from calibration import baseline
from calibration.coverage import TEST_FOLD, Factors, Point, ln_factors, points, runs_to_fit
from calibration.folds import MEASUREMENTS, splits
from calibration.metrics import ALPHA, MIN_POINTS, errors
from calibration.write import table_yaml, write_text
from moesim.coverage import Coverage, load_coverage
from moesim.load import scenarios_dir
from moesim.model_error import load_model_error
from moesim.predict import Z80, read_rows
from moesim.runs import Run

LABELS = ("unseen layout", "unseen GPU", "unseen stack")
COVERED = 0.8
AWAY = 0.75  # a single sigma serves known and unknown software: what is far away may be held a little less often
BASES = tuple(round(0.01 * i, 2) for i in range(2, 31))  # repeats of one configuration spread by 2.4% at the median, 8 to 11% at p90
EXTRAPOLATED = tuple(round(0.02 * i, 2) for i in range(1, 21))  # never none: what nobody measured is less certain
FACTOR_SCALES = (1.0, 1.25, 1.5, 1.75, 2.0)  # runs of one release share what the fit takes for independent
PRICE_SHARES = (0.25, 0.5, 0.75, 1.0)  # never none: factors of a stack don't tell its kernels apart
ASSUMED_SHARES = (0.25, 0.5, 0.75, 1.0)  # never none: what a run does not state widens its band


@dataclass(frozen=True)
class HeldOut:
    """One run by factors fitted without its split: ln(predicted / measured tokens/s), and the variance of ln that those factors leave."""

    error: float
    variance: float


def held_out(found: Sequence[Point], coverage: Coverage, rows) -> dict[str, dict[str, HeldOut]]:
    """label -> id -> what its prediction is off by."""
    factors = Factors(found)
    shipped = ln_factors(coverage, found)
    # Residuals as a neutral table would give them: what solve() takes apart, whatever the shipped factors are.
    bare = [replace(p, residual=p.residual + s) for p, s in zip(found, shipped)]
    known = {p.id: i for i, p in enumerate(bare)}
    matrix = factors.rows(bare)
    out: dict[str, dict[str, HeldOut]] = defaultdict(dict)
    for split in splits(rows):
        fit = [bare[known[i]] for i in split.fit if i in known]
        held = [i for i in split.held if i in known]
        if not held or not fit:
            continue
        theta, covariance = factors.solve(fit, np.zeros(len(factors.names)))
        for name in held:
            row = matrix[known[name]]
            out[split.label][name] = HeldOut(bare[known[name]].residual - float(row @ theta), float(row @ covariance @ row))
    return out


def half_width(p: Point, sigmas: Mapping[str, float], variance: float) -> float:
    """Half width of one run's 80% band in ln(tokens/s); variance: what the factors leave."""
    return Z80 * np.sqrt(sigmas["base"] ** 2 + (sigmas["extrapolated"] * p.far) ** 2 + (sigmas["assumptions"] * p.doubt) ** 2
                         + (sigmas["prices"] * p.spread) ** 2 + sigmas["factors"] ** 2 * variance)


def model_error(residuals: Mapping[str, Mapping[str, HeldOut]], found: Sequence[Point]) -> dict[str, float]:
    """Of the tables on a grid whose bands hold 80% of the runs held out by fold, and no less than AWAY of those held out by GPU and of
    those by release, that with the best interval score, labels alike (https://doi.org/10.1198/016214506000001437). "unfitted" is
    the least sigma that holds 80% where no factor is used: what a stack without runs is off by."""
    by_id = {p.id: p for p in found}
    rows = [(abs(e.error), e.variance, by_id[i], LABELS.index(label)) for label in LABELS for i, e in residuals[label].items()]
    size, variance, far, doubt, spread, label = (np.array(c) for c in zip(*((e, v, p.far, p.doubt, p.spread, at) for e, v, p, at in rows)))
    known, away = label == 0, [label == at for at in (1, 2) if (label == at).any()]
    best = (np.inf, {})
    for factors, share, prices, further, base in product(FACTOR_SCALES, ASSUMED_SHARES, PRICE_SHARES, EXTRAPOLATED, BASES):
        widths = Z80 * np.sqrt(base**2 + (further * far) ** 2 + (share * doubt) ** 2 + (prices * spread) ** 2 + factors**2 * variance)
        inside_band = size <= widths
        if inside_band[known].mean() < COVERED or any(inside_band[apart].mean() < AWAY for apart in away):
            continue
        scores = 2 * widths + 2 / ALPHA * np.maximum(size - widths, 0)
        score = float(np.mean([scores[of].mean() for of in (known, *away)]))
        if score < best[0]:
            best = (score, {"base": base, "extrapolated": further, "assumptions": share, "prices": prices, "factors": factors})
    if not best[1]:
        raise ValueError("no sigma on the grid holds enough of the runs held out")
    return best[1] | {"unfitted": unfitted_sigma(found, best[1]["extrapolated"])}


def unfitted_sigma(found: Sequence[Point], extrapolated: float) -> float:
    """The least sigma that, beside whole draws and doubts, holds 80% of the runs as the profiles alone predict them."""
    bare = [(abs(p.residual + s), (extrapolated * p.far) ** 2 + p.doubt**2 + p.spread**2) for p, s in zip(found, ln_factors(load_coverage(), found))]
    return _least(lambda x: [e <= Z80 * np.sqrt(x**2 + other) for e, other in bare])


def anchored_sigma(errors: Sequence[float], halves: Sequence[float], made_with: float) -> float:
    """The least sigma that holds 80% of anchored predictions beside the draws and doubts in their bands: errors and half widths in
    ln(tokens/s), of bands that hold a sigma of ``made_with``."""
    rest = [max((h / Z80) ** 2 - made_with**2, 0.0) for h in halves]
    return _least(lambda x: [abs(e) <= Z80 * np.sqrt(x**2 + other) for e, other in zip(errors, rest)]) if rest else made_with


def _least(inside) -> float:
    """The smallest of 0, 0.005, ... 1 whose share inside reaches COVERED."""
    return next((round(float(x), 3) for x in np.arange(0.0, 1.0, 0.005) if np.mean(inside(x)) >= COVERED), 1.0)


def baseline_errors(runs: dict[str, Run], rows) -> dict[str, dict[str, float]]:
    """label -> id -> ln(three-line baseline / measured), its MFU (one for MoE, one for dense) fitted outside the row's split."""
    out: dict[str, dict[str, float]] = defaultdict(dict)
    ideals = {i: baseline.ideal_tokens(run) for i, run in runs.items()}
    ideal = lambda run: ideals[run.id]  # noqa: E731
    for split in splits(rows):
        for moe in (True, False):
            fit, held = ([runs[i] for i in ids if i in runs and (runs[i].model.num_experts > 0) is moe] for ids in (split.fit, split.held))
            if fit and held:
                mfu = baseline.fit(fit, ideal)
                out[split.label] |= {r.id: float(np.log(baseline.predict(r, mfu, ideal) / r.measured.tokens_per_s_per_gpu)) for r in held}
    return out


def figures(ln_errors: Sequence[float]) -> dict:
    return errors(np.exp(np.array(ln_errors, dtype=float)), np.ones(len(ln_errors)))


def line(name: str, block: dict) -> str:
    cells = "".join(f"{100 * block[k]:8.1f}%" for k in ("median", "mean", "p90", "bias")) if block["n"] else ""
    return f"{name:44s}{block['n']:5d}{cells}" + (" *" if block["n"] < MIN_POINTS else "")


def inside(found: Mapping[str, HeldOut], by_id: Mapping[str, Point], sigmas: Mapping[str, float]) -> str:
    """Share of held-out runs inside their 80% band and the band's median relative width."""
    rows = [(abs(e.error), half_width(by_id[i], sigmas, e.variance)) for i, e in found.items()]
    widths = [w for _, w in rows]
    return f"{100 * np.mean([e <= w for e, w in rows]):.0f}% inside, width {100 * np.median(2 * np.sinh(widths)):.0f}%" if rows else "-"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m calibration.out_of_fold", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--points", type=Path, help="file to keep the played runs in, or to read them from")
    parser.add_argument("--write", action="store_true", help="write scenarios/model_error.yaml")
    args = parser.parse_args(argv)
    pairs = runs_to_fit(lambda fold: fold != TEST_FOLD)
    runs = {run.id: run for run, _ in pairs}
    if args.points and args.points.exists():
        found = [Point(**{**p, "traits": tuple(p["traits"]), "slope": tuple(p["slope"])}) for p in json.loads(args.points.read_text())]
    else:
        found = points(pairs, load_coverage(), bands=True)
        if args.points:
            write_text(args.points, json.dumps([asdict(p) for p in found]))
    by_id = {p.id: p for p in found}
    rows = [row for row in read_rows(MEASUREMENTS / "published_runs.csv") if row["id"] in by_id]
    residuals, naive = held_out(found, load_coverage(), rows), baseline_errors({i: runs[i] for i in by_id}, rows)
    sigmas = model_error(residuals, found)
    print(f"{'':44s}{'n':>5s}{'median':>9s}{'mean':>9s}{'p90':>9s}{'bias':>9s}")
    for label in LABELS:
        for kind in ("moe", "dense"):
            ids = [i for i in residuals[label] if runs[i].kind == kind]
            print(line(f"{label}, {kind}", figures([residuals[label][i].error for i in ids])) + f"  {inside({i: residuals[label][i] for i in ids}, by_id, sigmas)}")
            print(line("  baseline (MFU x bubble) on the same rows", figures([naive[label][i] for i in ids if i in naive[label]])))
    print(line("in sample, all", figures([p.residual for p in found])))
    print(f"model error: {sigmas}")
    if args.write:
        write_text(scenarios_dir() / "model_error.yaml", model_error_yaml(sigmas, residuals))
    return 0


def anchored_on_record() -> float:
    """What the slow part of the committed scoreboard found ``anchored_sigma`` to be; the shipped one where it says nothing."""
    path = Path(__file__).resolve().parent / "scoreboard.json"
    full = json.loads(path.read_text(encoding="utf-8")).get("full", {}) if path.exists() else {}
    return float(full.get("anchored_sigma", load_model_error().anchored))


def model_error_yaml(sigmas: dict[str, float], residuals) -> str:
    num_runs = len({i for found in residuals.values() for i in found})
    data = {"anchored": anchored_on_record(), **sigmas, "num_runs": num_runs, "source": "python -m calibration.out_of_fold"}
    return table_yaml("Written by `python -m calibration.out_of_fold --write` from published runs held out by fold, GPU and release.", data)


if __name__ == "__main__":
    raise SystemExit(main())
