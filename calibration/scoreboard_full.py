"""What do a site's own runs bring, and how does the fold that nobody looks at come out? (`scoreboard --full`: the slow part, committed)

A site here is one source's cluster and software release. For each site of enough runs the kernel factors are fitted without it; then
its few constants are refitted to three of its runs, chosen by the fixed rule of calibration.anchoring, and the rest is judged: zero-shot
and anchored on the same rows, in columns of their own, beside constant MFU x bubble with its MFU from the same three runs.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Mapping, Sequence

import numpy as np

from calibration import baseline
from calibration.anchoring import choose
from calibration.coverage import TEST_FOLD, Factors, ln_factors
from calibration.folds import fold_of, group_hash, read_excluded
from calibration.out_of_fold import HeldOut, anchored_sigma, half_width
from calibration.score import Scored, ranking
from calibration.scoreboard_figures import SHIPPED, Judged, by_kind, measured_rows, point_of, rounded
from calibration.scoreboard_rows import Answer, Progress, answers, append_lines, cache_folder, each_done, inputs_hash, play, predictions, read_lines, shares_parts
from moesim.anchored import fit_site
from moesim.coverage import GENERATIONS, Coverage, load_coverage
from moesim.model_error import load_model_error
from moesim.predict import predict_row, read_rows
from moesim.runs import Run, parse_runs


DIFFERENCE = 0.6745 * math.sqrt(2.0)
"""Median of |difference| of two draws of a normal distribution, in its standard deviations."""


@dataclass(frozen=True)
class Site:
    """One source's cluster and release: its anchors, its other runs, and kernel factors fitted without any of them."""

    name: str
    anchors: tuple[Run, ...]
    rest: tuple[Run, ...]
    coverage: Coverage


def look_full(*, workers: int = 0, progress: Progress | None = None, folder: Path | None = None) -> dict[str, Any]:
    """Figures of the slow part, rounded."""
    rows = {row["id"]: row for row in read_rows(SHIPPED)}
    runs = {run.id: run for run in parse_runs(rows.values()) if isinstance(run, Run)}
    found = answers(runs.values(), workers=workers, progress=progress, folder=folder)
    every = measured_rows(list(rows.values()), runs, found, predictions(list(rows.values()), found))
    scored = [j for j in every if j.id not in read_excluded()]
    judged = [j for j in scored if fold_of(j.row) != TEST_FOLD]
    every, errors = sites(judged, found)
    pairs = _anchored(every, errors, judged, found, workers, progress, folder)
    held_back = _with_baseline([j for j in scored if fold_of(j.row) == TEST_FOLD], judged)
    return rounded({"test fold": by_kind(held_back), **_site_figures(pairs), "spread": site_spread(every, errors, {j.id: group_hash(j.row) for j in judged})})


def _with_baseline(judged: Sequence[Judged], known: Sequence[Judged]) -> list[Judged]:
    """The same with the three-line baseline, its MFU (one for MoE, one for dense) from the known rows."""
    mfu = {kind: baseline.fit(j.run for j in known if j.run.kind == kind) for kind in ("moe", "dense")}
    return [replace(j, naive=baseline.predict(j.run, mfu[j.run.kind])) for j in judged]


def sites(judged: Sequence[Judged], found: Mapping[str, Answer]) -> tuple[list[Site], dict[str, HeldOut]]:
    """(sites with anchors to choose, id -> what the zero-shot prediction of a run of theirs is off by)."""
    known = [j for j in judged if j.run.cluster.gpu.name in GENERATIONS]
    points = [point_of(j, found[j.id]) for j in known]
    bare = [replace(p, residual=p.residual + s) for p, s in zip(points, ln_factors(load_coverage(), points))]
    factors = Factors(points)
    matrix, at = factors.rows(bare), {p.id: i for i, p in enumerate(bare)}
    out, errors = [], {}
    for name, members in sorted(_by_site(known).items()):
        chosen = {i for ids in choose([j.run for j in members]).values() for i in ids}
        if not chosen:
            continue
        of_site = {j.id for j in members}
        theta, covariance = factors.solve([p for p in bare if p.id not in of_site], np.zeros(len(factors.names)))
        anchors, rest = ([j.run for j in members if (j.id in chosen) == anchor] for anchor in (True, False))
        out.append(Site(name, tuple(anchors), tuple(rest), factors.coverage(theta, covariance, bare)))
        errors |= {i: HeldOut(bare[at[i]].residual - float(matrix[at[i]] @ theta), float(matrix[at[i]] @ covariance @ matrix[at[i]])) for i in of_site}
    return out, errors


def _by_site(judged: Sequence[Judged]) -> dict[str, list[Judged]]:
    found = defaultdict(list)
    for j in judged:
        found[f"{j.source}: {j.run.site}"].append(j)
    return found


def judge_site(site: Site) -> dict[str, Any]:
    """Constants of the site and the answer to each of its other runs: JSON."""
    constants = fit_site(site.anchors, site.coverage)
    groups: dict[str, list[Run]] = defaultdict(list)
    for run in site.rest:
        groups[shares_parts(run)].append(run)
    played = [(run.id, asdict(answer)) for group in groups.values() for run, answer in zip(group, play(group, constants, site.coverage))]
    return {"multipliers": dict(constants.multipliers), "answers": dict(played)}


def site_spread(every: Sequence[Site], errors: Mapping[str, HeldOut], group: Mapping[str, str]) -> dict[str, float]:
    """What zero-shot errors at one site have in common: "run", the standard deviation between configurations of one model, and "model",
    what configurations of two models add to it. Means over sites, from medians, as a few runs are far off."""
    apart: dict[bool, list[float]] = {True: [], False: []}
    for site in every:
        by_case: dict[tuple[str, str], list[float]] = defaultdict(list)
        for run in (*site.anchors, *site.rest):
            by_case[run.model.name, group[run.id]].append(errors[run.id].error)
        means = [(model, float(np.mean(e))) for (model, _), e in by_case.items()]
        for same in apart:
            differ = [abs(a - b) for i, (m, a) in enumerate(means) for n, b in means[:i] if (m == n) is same]
            apart[same] += [float(np.median(differ)) / DIFFERENCE] if differ else []
    run, other = (float(np.mean(apart[same] or [0.0])) for same in (True, False))
    return {"run": run, "model": math.sqrt(max(other**2 - run**2, 0.0))}


def _anchored(every, errors, judged, found, workers, progress, folder) -> list[tuple[str, dict[str, float], list[Judged], list[Judged]]]:
    """(site, its constants, its other rows zero-shot, the same anchored)."""
    path = (folder or cache_folder()) / f"{inputs_hash()}-sites.jsonl"
    known = {name: value for name, value in read_lines(path) if isinstance(value, dict) and "multipliers" in value}
    left = [site for site in every if site.name not in known]
    for number, result in each_done(judge_site, sorted(left, key=lambda s: -len(s.rest)), workers):
        name = sorted(left, key=lambda s: -len(s.rest))[number].name
        known[name] = result
        append_lines(path, [(name, result)])
        if progress:
            progress("sites", len(known), len(every))
    of = {j.id: j for j in judged}
    return [(s.name, known[s.name]["multipliers"], *_both(s, known[s.name]["answers"], of, errors, found)) for s in every]


def _both(site: Site, played: Mapping[str, Any], of: Mapping[str, Judged], errors: Mapping[str, HeldOut], found: Mapping[str, Answer]
          ) -> tuple[list[Judged], list[Judged]]:
    mfu, sigmas = baseline.fit(site.anchors), load_model_error().model_dump()
    zero, anchored = [], []
    for run in site.rest:
        j, answer = of[run.id], Answer(**{**played[run.id], "slope": ()})
        row = predict_row(j.row, lambda _, answer=answer: answer)
        if answer.reason or row["status"] != "ok":
            continue
        held, naive = errors[run.id], baseline.predict(run, mfu)
        point, wide = j.measured * math.exp(held.error), math.exp(half_width(point_of(j, found[run.id]), sigmas, held.variance))
        zero.append(replace(j, predicted=point, low=point / wide, high=point * wide, naive=naive))
        anchored.append(replace(j, predicted=row["tokens_per_s_per_gpu"], low=row["low"], high=row["high"], naive=naive))
    return zero, anchored


def _site_figures(pairs) -> dict[str, Any]:
    zero, anchored = ([j for pair in pairs for j in pair[at]] for at in (2, 3))
    scored = Scored((j.run, j.row, {"point": j.predicted, "low": j.low, "high": j.high}) for j in anchored)
    each = {name: {"multipliers": constants, "zero-shot": by_kind(z)["all"], "anchored": by_kind(a)["all"]} for name, constants, z, a in pairs}
    off, half = ([f(j) for j in anchored] for f in (lambda j: math.log(j.predicted / j.measured), lambda j: math.log(j.high / j.low) / 2))
    return {"anchored_sigma": anchored_sigma(off, half, load_model_error().anchored), "zero-shot, rest of anchored sites": by_kind(zero), "anchored": by_kind(anchored), "ranking, anchored": ranking(scored), "sites": each}


def table(data: Mapping[str, Any]) -> list[str]:
    """The figures as lines, under where they come from."""
    from calibration.scoreboard import head, line, percent, report

    lines = [f"Slow part, as committed ({report(data)})" if "stamp" in data else "Slow part", head()]
    for name in ("zero-shot, rest of anchored sites", "anchored", "test fold"):
        lines += [line(f"{name}, {kind}", b) for kind, b in data[name].items() if b["n"]]
    lines += ["", f"Zero-shot at one site: runs of one model differ by {percent(data['spread']['run'])}, of two by {percent(data['spread']['model'])} more; "
                  f"beside draws, a sigma of {data['anchored_sigma']:.3f} holds the anchored"] if "spread" in data else []
    lines += ["", f"{'site: its runs beside three anchors':52s}{'n':>9s}{'zero-shot':>11s}{'anchored':>10s}{'baseline':>10s}{'inside':>9s}  constants"]
    for name, s in data["sites"].items():
        a = s["anchored"]
        constants = ", ".join(f"{key} x{value:.2f}" for key, value in s["multipliers"].items())
        lines.append(f"{name[:52]:52s}{a['n']:9d}{percent(s['zero-shot'].get('median')):>11s}{percent(a.get('median')):>10s}{percent(a['baseline'].get('median')):>10s}"
                     f"{percent(a.get('coverage')):>9s}  {constants}")
    return lines
