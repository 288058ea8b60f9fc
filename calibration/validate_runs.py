"""How well are whole measured steps predicted that no fit has seen? (Cases of runs in, figures of the protocol out; nothing is fitted.)

Cases marked as anchors are apart: a fit may have seen them. Errors are of tokens/s a rank. The baseline is three lines long, constant
throughput per FLOP times the pipeline's bubble (and the share of a core that a rank has, where ranks share them), its constant the median
over the anchors; it is judged on the same rows. Where spans of a case were recorded, its step is cut into terms as `compare` does.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from calibration import metrics
from calibration.compare_runs import Term, compare
from calibration.planned import Planned
from calibration.run_cases import Case, spread_of
from moesim import engine
from moesim.evaluate import Evaluator
from moesim.layout import LayoutError, num_microbatches
from moesim.profile import load_profile
from moesim.program import CORES
from moesim.seats import PINNED

OVERHEADS = ("exposed ", "bubble", "host")
"""Beginnings of the terms that are no work of the compute stream."""


@dataclass(frozen=True)
class Judged:
    """A case with what was predicted: tokens/s a rank and its 80% interval; terms of its residual, where spans are known."""

    case: Case
    rate: float
    low: float
    high: float
    terms: tuple[Term, ...] = ()


@dataclass(frozen=True)
class Unpredicted:
    """A case that the planner refuses, and why."""

    case: Case
    reason: str


def judge(cases: Iterable[Case], profile: str | None = None) -> tuple[list[Judged], list[Unpredicted]]:
    """Every case predicted with its scenario's profile, or the one named."""
    loaded = load_profile(profile) if profile else None
    judged, refused, evaluators = [], [], {}  # one evaluator a scenario: its layouts share priced parts
    for case in cases:
        try:
            if case.scenario.hash not in evaluators:
                evaluators[case.scenario.hash] = Evaluator(case.scenario, loaded)
            judged.append(_judged(case, evaluators[case.scenario.hash]))
        except (LayoutError, ValueError) as error:
            refused.append(Unpredicted(case, " ".join(str(error).split())))
    return judged, refused


def _judged(case: Case, evaluator: Evaluator) -> Judged:
    layout = evaluator.legal(case.layout)
    program = evaluator.program(layout)
    step_s = engine.run(program, spans=False).makespan
    low, high = evaluator.interval(program, step_s, evaluator.provenance(program))
    terms = compare(case.recorded, Planned(evaluator, layout)).terms if case.recorded is not None else ()
    return Judged(case, evaluator.tokens_per_s(step_s), low, high, terms)


# --- figures ------------------------------------------------------------------------------------------------------------------


def report(judged: Sequence[Judged], refused: Sequence[Unpredicted]) -> dict[str, Any]:
    """All figures as one JSON-able dict; n beside each, `indicative` below ten."""
    anchors, held_out = ([j for j in judged if j.case.anchor is seen] for seen in (True, False))
    spread = max(metrics.REPEAT_SPREAD, metrics.repeat_spread(spread_of([j.case for j in judged])).get("median", 0.0))
    constant = fit_baseline([j.case for j in anchors or held_out])
    groups = {"held out": held_out, "anchors": anchors}
    groups |= {f"series {name}": [j for j in held_out if j.case.series == name] for name in _distinct(held_out, lambda j: j.case.series)}
    groups |= {f"{world} ranks": [j for j in held_out if j.case.layout.world == world] for world in _distinct(held_out, lambda j: j.case.layout.world)}
    return {
        "support": {"cases": len(judged) + len(refused), "predicted": len(judged), "refused": [{"case": r.case.name, "reason": r.reason} for r in refused]},
        "figures": {name: _figures(rows, constant) for name, rows in groups.items() if rows},
        "baseline_fitted_on": "anchors" if anchors else "the rows it is judged on",
        "ranking": ranking(judged, spread),
        "repeats": metrics.repeat_spread(spread_of([j.case for j in judged])),
        "tie": spread,
        "overheads": overheads([j for j in held_out if j.terms]),
        "residual": residual([j for j in judged if j.terms]),
        "rows": [_row(j, constant) for j in judged],
    }


def _distinct(rows: Sequence[Judged], key: Callable[[Judged], Any]) -> list[Any]:
    found = dict.fromkeys(map(key, rows))
    return sorted(x for x in found if x) if len(found) > 1 else []


def _figures(rows: Sequence[Judged], constant: float) -> dict[str, Any]:
    measured = [j.case.rate for j in rows]
    return {"error": metrics.errors([j.rate for j in rows], measured), "interval": metrics.intervals([j.low for j in rows], [j.high for j in rows], measured),
            "baseline": metrics.errors([constant * shape(j.case) for j in rows], measured)}


def ranking(judged: Sequence[Judged], spread: float) -> list[dict[str, Any]]:
    """Kendall's tau-b and regret inside each series of cases that differ in their layout only."""
    series: dict[tuple[str, str, int], list[Judged]] = defaultdict(list)
    for j in judged:
        series[j.case.series, j.case.scenario.hash, j.case.layout.world].append(j)
    out = []
    for (name, _, world), rows in series.items():
        if len(rows) > 1:
            rates = [j.rate for j in rows], [j.case.rate for j in rows]
            out.append({"series": name, "world": world, "n": len(rows), "tau_b": metrics.kendall_tau_b(*rates, spread), "regret": metrics.regret(*rates),
                        "indicative": len(rows) < metrics.MIN_POINTS})
    return out


def overheads(rows: Sequence[Judged]) -> dict[str, Any]:
    """Predicted against measured seconds of exposed communication, bubble and host alone; and what that error is of the step."""
    pairs = [tuple(sum(getattr(t, side) for t in j.terms if t.name.startswith(OVERHEADS)) for side in ("predicted", "measured")) for j in rows]
    rows, pairs = ([x for x, (_, measured) in zip(xs, pairs) if measured > 0] for xs in (rows, pairs))
    errors = metrics.errors([p for p, _ in pairs], [m for _, m in pairs])
    return errors | {"of_the_step": statistics.median(abs(p - m) / j.case.median for j, (p, m) in zip(rows, pairs))} if pairs else errors


def residual(rows: Sequence[Judged]) -> list[dict[str, Any]]:
    """Each term's error as a share of the measured step: mean over cases, signed and absolute, the largest first."""
    shares: dict[str, list[float]] = defaultdict(list)
    for j in rows:
        for term in j.terms:
            shares[term.name].append(term.error / j.case.median)
    found = [{"term": name, "n": len(rows), "bias": sum(s) / len(rows), "size": sum(map(abs, s)) / len(rows), "indicative": len(rows) < metrics.MIN_POINTS}
             for name, s in shares.items()]
    return sorted(found, key=lambda f: -f["size"])


def _row(j: Judged, constant: float) -> dict[str, Any]:
    c = j.case
    return {"case": c.name, "series": c.series, "layout": str(c.layout), "world": c.layout.world, "anchor": c.anchor, "launches": len(c.seconds),
            "measured_s": c.median, "predicted_s": c.median * c.rate / j.rate, "error": j.rate / c.rate - 1, "inside": j.low <= c.rate <= j.high,
            "low_s": c.median * c.rate / j.high, "high_s": c.median * c.rate / j.low, "baseline_error": constant * shape(c) / c.rate - 1, "foreign_cpu": c.foreign_cpu}


# --- the three-line baseline ----------------------------------------------------------------------------------------------------


def shape(case: Case) -> float:
    """Tokens/s a rank at one FLOP/s: FLOP a token, the pipeline's bubble, and the part of a core that each rank has."""
    layout, cluster = case.layout, case.scenario.cluster
    rounds = layout.vpp * num_microbatches(layout, case.scenario.workload)
    cores = next((r.capacity for r in cluster.resources if r.name in (CORES, PINNED) and r.scope == "node"), None)
    share = 1.0 if cores is None else min(1.0, cores / cluster.gpus_per_node)
    return share / case.scenario.model.flops_per_token(case.scenario.workload.seq_len) * rounds / (rounds + layout.pp - 1)


def fit_baseline(cases: Sequence[Case]) -> float:
    """FLOP/s of a rank: the median over ``cases``. ValueError without any."""
    if not cases:
        raise ValueError("no case could be predicted")
    return statistics.median(case.rate / shape(case) for case in cases)


# --- text ---------------------------------------------------------------------------------------------------------------------


def lines(found: dict[str, Any], each: bool = False) -> list[str]:
    """The report as text; a line a case with ``each``."""
    support = found["support"]
    out = [f"predicted {support['predicted']} of {support['cases']} cases"]
    out += [f"  not {r['case']}: {r['reason']}" for r in support["refused"]]
    for row in found["rows"] if each else ():
        out.append(f"  {row['case'][:64]:64} measured {row['measured_s'] * 1e3:9.1f} ms  predicted {row['predicted_s'] * 1e3:9.1f} ms  {row['error']:+7.1%}"
                   f"{' ' if row['inside'] else ' outside'}{' anchor' if row['anchor'] else ''}")
    out.append("errors of tokens/s a rank; the baseline is fitted on " + found["baseline_fitted_on"])
    for name, f in found["figures"].items():
        e, i, b = f["error"], f["interval"], f["baseline"]
        out.append(f"  {name:34} n {e['n']:3d}  median {e['median']:6.1%}  mean {e['mean']:6.1%}  p90 {e['p90']:6.1%}  bias {e['bias']:+6.1%}  80% interval holds "
                   f"{i['coverage']:4.0%} width {i['width']:5.0%} score {i['score']:5.2f}  baseline median {b['median']:6.1%}{_mark(e)}")
    for r in found["ranking"]:
        tau = "all ties" if r["tau_b"] is None else f"{r['tau_b']:+.2f}"
        out.append(f"  ranking {r['series'] or 'of one model'} ({r['world']} ranks): n {r['n']:3d}  tau-b {tau}  regret {r['regret']:.1%}{_mark(r)}")
    if found["repeats"]["n"]:
        out.append(f"  launches of one case differ by {found['repeats']['median']:.1%} (median of n {found['repeats']['n']}); pairs closer than {found['tie']:.1%} are ties")
    if found["overheads"]["n"]:
        o = found["overheads"]
        out.append(f"  exposed communication, bubble and host alone: n {o['n']}  median {o['median']:.1%}  p90 {o['p90']:.1%}  bias {o['bias']:+.1%}; "
                   f"{o['of_the_step']:.1%} of the step{_mark(o)}")
    for r in found["residual"][:12]:
        out.append(f"  residual {r['term']:36} {r['bias']:+6.1%} of the step (size {r['size']:5.1%}, n {r['n']}){_mark(r)}")
    return out


def _mark(figure: dict[str, Any]) -> str:
    return "  indicative" if figure.get("indicative") else ""
