"""How do a site's own runs change its predictions? (Published-run rows -> site constants -> evaluators that use them.)"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Mapping, Sequence

from moesim import paths
from moesim.anchors import LIMIT, PRIORS, fit_anchors, load_anchors
from moesim.coverage import Coverage
from moesim.evaluate import Evaluator, Quick
from moesim.parts import Parts
from moesim.profile import load_profile
from moesim.runs import Run
from moesim.site import MODEL_SIGMA, NEUTRAL, Site, same_model


@dataclass(frozen=True)
class RunSimulator:
    """Run -> Quick; ``sites`` holds refitted constants by site name, ``coverage`` kernel factors in place of the shipped ones.
    Picklable, so that processes can share it. Runs that pose one question are simulated once, and those that differ in layout or
    batch share priced parts."""

    sites: Mapping[str, Site] = field(default_factory=dict)
    coverage: Coverage | None = None

    def __call__(self, run: Run) -> Quick:
        key, evaluator = self._evaluator(run)
        question = (key, run.workload.global_batch_tokens, str(run.layout))
        if question not in _ANSWERS:
            _ANSWERS[question] = evaluator.quick(evaluator.legal(run.layout))
        return _ANSWERS[question]

    def rate(self, run: Run, contention: dict[str, float]) -> float:
        """tokens/s/GPU alone: the longest path, times engine over longest path as ``contention`` holds it by run (added where it does
        not). A site's factors move it by little, and a fit asks a hundred times."""
        _, evaluator = self._evaluator(run)
        weights, programs = evaluator.samples(evaluator.legal(run.layout))
        path_s = float(weights @ paths.step_seconds(programs))
        if run.id not in contention:
            contention[run.id] = evaluator.step_seconds(weights, programs) / path_s
        return evaluator.tokens_per_s(path_s * contention[run.id])

    def spread(self, run: Run) -> dict[str, float]:
        """Cause of error -> change of ln(step) for one standard deviation of it."""
        _, evaluator = self._evaluator(run)
        weights, programs = evaluator.samples(evaluator.legal(run.layout))
        return evaluator.spread(programs, weights)

    def _evaluator(self, run: Run) -> tuple[str, Evaluator]:
        """What its priced parts depend on, and an evaluator that has them."""
        site, scenario = replace(self.sites.get(run.site, NEUTRAL), proxy_dispatcher=run.proxy_dispatcher), run.scenario()
        workload = run.workload.model_copy(update={"global_batch_tokens": run.workload.seq_len})
        key = repr((run.model, run.cluster, workload, run.stack.name, site, self.coverage))
        if key not in _EVALUATORS:
            while len(_EVALUATORS) >= NUM_KEPT:
                _EVALUATORS.pop(next(iter(_EVALUATORS)))
            profile = load_profile(run.cluster.gpu.profile)
            parts = Parts(run.model, run.cluster, run.workload, run.stack, profile, site, self.coverage)
            _EVALUATORS[key] = Evaluator(scenario, profile, run.stack, site=site, parts=parts)
        return key, _EVALUATORS[key].for_scenario(scenario)


NUM_KEPT = 16
"""Evaluators kept in one process: each holds the priced parts of one model, cluster, stack and site."""
_EVALUATORS: dict[str, Evaluator] = {}
_ANSWERS: dict[tuple[str, int, str], Quick] = {}


def fit_site(runs: Sequence[Run], coverage: Coverage | None = None) -> Site:
    """Constants of one site from its measured runs, over kernel factors that may be others than the shipped ones. Constants that none
    of the runs exercises stay at 1."""
    contention: dict[str, float] = {}
    played: dict[tuple[float, ...], list[float]] = {}
    models = {same_model(run.model): f"model {run.model.name}" for run in runs}

    def rates(multipliers: Mapping[str, float]) -> list[float]:
        # A model's factor scales its whole step: nothing has to be played for it.
        others = {name: value for name, value in multipliers.items() if name in PRIORS}
        key = tuple(others.values())
        if key not in played:
            played[key] = [RunSimulator({run.site: Site(others)}, coverage).rate(run, contention) for run in runs]
        return [rate / multipliers[models[same_model(run.model)]] for rate, run in zip(played[key], runs)]

    touched = {name: sigma for name, sigma in PRIORS.items() if name != "proxy" or any(run.proxy_dispatcher for run in runs)}
    touched |= dict.fromkeys(models.values(), MODEL_SIGMA)
    found = fit_anchors([run.measured.tokens_per_s_per_gpu for run in runs], rates, touched)
    for run, off in zip(runs, found.before):
        if abs(off) > LIMIT:
            raise ValueError(f"anchor {run.id!r}: {run.measured.tokens_per_s_per_gpu:g} tokens/s a GPU, {math.exp(off):.3g} times as many are predicted: another run, or another unit?")
    site = Site(found.multipliers, models=models)
    shown = [RunSimulator({run.site: site}, coverage).spread(run) | {models[same_model(run.model)]: MODEL_SIGMA} for run in runs]
    # A run half believed is one seen through as much more noise.
    seen = tuple({cause: x * weight**0.5 for cause, x in spread.items()} for spread, weight in zip(shown, found.weights))
    return replace(site, anchors=tuple(run.id for run in runs), residual=found.after, seen=seen)


def sites_from_file(path: str | Path) -> dict[str, Site]:
    """Site name -> constants, from a CSV in the columns of published_runs.csv. ValueError (one line) on a bad row."""
    return {name: fit_site(runs) for name, runs in load_anchors(path).items()}


def site_from_file(path: str | Path, scenario) -> Site:
    """The site that a scenario's anchors describe: all rows of the file must be one site, on the scenario's GPU."""
    sites = load_anchors(path)
    if len(sites) > 1:
        raise ValueError(f"{path}: anchors of {len(sites)} sites ({', '.join(sorted(sites)[:3])}); a plan takes the runs of one")
    (runs,) = sites.values()
    if runs[0].cluster.gpu.name != scenario.cluster.gpu.name:
        raise ValueError(f"{path}: anchors ran on {runs[0].cluster.gpu.name}, the scenario plans for {scenario.cluster.gpu.name}")
    return fit_site(runs)
