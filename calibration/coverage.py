"""What do published runs say of each software's kernels? (`python -m calibration.coverage`: factors by stack, GPU generation, kind)

The rule. ln(measured step / predicted step) of every run is a sum over kinds of kernel: the step's sensitivity to that kind times
ln of its factor. A factor is that of the GPU generation, times the stack's own, times those of traits (biased experts, an EFA fabric, proxies).
All are fitted together by least squares with Huber weights; PRIORS hold each near one, so that what runs don't identify stays there.
Runs of one configuration weigh like one. The step is played again with the factors found and the fit repeated. The first four
folds are fitted; fold 4 is for judging. Stacks of OLMo-core and of this project's trainer have no run here and no factor.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from typing import Callable, Iterable, Sequence

import numpy as np

from calibration.folds import MEASUREMENTS, group_hash, read_excluded, read_folds
from calibration.write import table_yaml, write_text
from moesim import paths
from moesim.coverage import FEATURES, GENERATIONS, KINDS, Coverage, features_of, load_coverage, scaled_kind
from moesim.evaluate import Evaluator
from moesim.factor_errors import FactorErrors
from moesim.load import scenarios_dir
from moesim.parts import Parts
from moesim.model_error import ModelError
from moesim.predict import assumption_sigma, read_rows
from moesim.profile import load_profile
from moesim.program import Program
from moesim.runs import Run, parse_run
from moesim.site import NEUTRAL

TEST_FOLD = 4
FIRST_DIGITS = 4
NOISE = 0.06
"""Standard deviation of ln(step) that no factor explains: repeats spread by 2.4% across releases, the shape of the model by more."""
PRIORS = {"gemm_bf16": 0.12, "gemm_fp8": 0.15, "gemm_fp4": 0.2, "grouped_bf16": 0.2, "grouped_fp8": 0.2, "attention": 0.25, "memory": 0.3,
          "tensor_parallel": 0.4, "dispatch": 0.3, "host": 0.4}
"""Kind -> standard deviation of ln(factor) before any run: matrix products are measured alone and vary by power and shape; overlap
of tensor-parallel collectives hides up to 72% of them (https://arxiv.org/abs/2412.14335); launches cost 11 to 18 us
(https://github.com/NVIDIA/dgxc-benchmarking); fusion of pointwise kernels changes their traffic up to twofold."""
OWN = 0.7  # a stack's own factor over that of the GPU generation, as a share of the prior
INHERITS = {"torchtitan_eager": "torchtitan"}  # the same kernels, launched one by one: for a stack without runs in the fit
TRAITS = {"expert_bias": {"grouped_bf16": 0.4, "grouped_fp8": 0.4, "attention": 0.4, "memory": 0.4}, "efa": {"dispatch": 1.0, "host": 1.0},
          "proxy": {"dispatch": 1.0}}
KNOWN = {(stack, "attention"): float(np.log(1.7)) for stack in ("torchtitan", "torchtitan_eager")}
"""ln(factor) where a stack's kernel is known to be another: PyTorch's scaled_dot_product_attention runs FlashAttention-2 on Hopper,
which reaches 35% of the peak where the third version reaches 60 to 75% (https://arxiv.org/abs/2407.08608); all these runs are on H100."""
NO_ERROR = ModelError(base=0.0, extrapolated=0.0, anchored=0.0, num_runs=0, source="none")
STEP = 0.1  # of ln(factor), for sensitivities


@dataclass(frozen=True)
class Point:
    """One run: id, group, stack, generation, traits; ln(measured / predicted) seconds; d ln(step) / d ln(factor) by kind; what its
    interval is made of beside the model's own error: sigma of parameter draws and of assumptions, share of seconds from afar."""

    id: str
    group: str
    stack: str
    generation: str
    traits: tuple[str, ...]
    residual: float
    slope: tuple[float, ...]
    spread: float = 0.0
    doubt: float = 0.0
    far: float = 0.0


def point(run: Run, group: str, coverage: Coverage, bands: bool = False) -> Point | None:
    """The run as these factors predict it, with what its interval is made of if ``bands``; None where the simulator refuses it."""
    site = replace(NEUTRAL, proxy_dispatcher=run.proxy_dispatcher)
    profile = load_profile(run.cluster.gpu.profile)
    parts = Parts(run.model, run.cluster, run.workload, run.stack, profile, site, coverage)
    evaluator = Evaluator(run.scenario(), profile, run.stack, NO_ERROR, site, parts)
    try:
        layout = evaluator.legal(run.layout)
        weights, programs = evaluator.samples(layout)
        rate = evaluator.tokens_per_s(evaluator.step_seconds(weights, programs))
    except ValueError:
        return None
    return Point(run.id, group, run.stack.name, GENERATIONS[run.cluster.gpu.name], features_of(run.model, run.cluster, run.proxy_dispatcher),
                 float(np.log(rate / run.measured.tokens_per_s_per_gpu)), slopes(weights, programs), doubt=assumption_sigma(run.assumed, run.pinned),
                 spread=evaluator.price_sigma(evaluator.spread(programs, weights)) if bands else 0.0, far=ModelError.far(evaluator.provenance(programs[-1])))


def slopes(weights: np.ndarray, programs: Sequence[Program]) -> tuple[float, ...]:
    """d ln(step) / d ln(factor) of each of KINDS; the step is ``weights`` @ seconds of ``programs``."""
    factors = {kind: np.exp(STEP * np.eye(len(KINDS) + 1)[i + 1]) for i, kind in enumerate(KINDS)}
    seconds = sum(w * paths.step_draws(by_kind(p), factors) for w, p in zip(weights, programs))
    return tuple((np.log(seconds[1:] / seconds[0]) / STEP).tolist())


def by_kind(program: Program) -> Program:
    """The same program with each priced second under the name of its kind of kernel."""
    def renamed(task):
        return replace(task, terms=tuple((role, scaled_kind(role, term, task.uses) or "-", s) for role, term, s in task.terms))

    bodies = lambda many: tuple(tuple(map(renamed, body)) for body in many)  # noqa: E731
    return replace(program, bodies=bodies(program.bodies), epilogue=bodies(program.epilogue))


class Factors:
    """Columns of the fit: (owner, kind) -> position, where an owner is a generation, a stack, or a trait."""

    def __init__(self, points: Sequence[Point]) -> None:
        owners = [*sorted({p.generation for p in points}), *sorted({p.stack for p in points})]
        priors = {(owner, kind): PRIORS[kind] * (1.0 if owner in GENERATIONS.values() else OWN) for owner in owners for kind in KINDS}
        priors |= {(trait, kind): sigma for trait in FEATURES for kind, sigma in TRAITS[trait].items()}
        self.names, self.sigma = tuple(priors), np.array(list(priors.values()))
        self.centre = np.array([KNOWN.get(name, 0.0) for name in self.names])
        self.at = {name: i for i, name in enumerate(self.names)}

    def rows(self, points: Sequence[Point]) -> np.ndarray:
        """[points, columns]: slopes of each run's kinds under every owner it has."""
        out = np.zeros((len(points), len(self.names)))
        for i, p in enumerate(points):
            for owner in (p.generation, p.stack, *p.traits):
                for kind, slope in zip(KINDS, p.slope):
                    if (owner, kind) in self.at:
                        out[i, self.at[owner, kind]] = slope
        return out

    def solve(self, points: Sequence[Point], start: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(ln(factor) of every column, their covariance), from residuals of a prediction made with ``start``."""
        matrix, sizes = self.rows(points), Counter(p.group for p in points)
        target = np.array([p.residual for p in points]) + matrix @ start
        shared = np.array([1.0 / sizes[p.group] for p in points])
        theta, weight = start, shared
        for _ in range(20):
            normal = (matrix.T * (weight / NOISE**2)) @ matrix + np.diag(1 / self.sigma**2)
            theta = np.linalg.solve(normal, matrix.T @ (weight / NOISE**2 * target) + self.centre / self.sigma**2)
            size = np.abs(target - matrix @ theta) / NOISE
            weight = shared * np.minimum(1.0, 1.5 / np.maximum(size, 1e-9))
        return theta, np.linalg.inv(normal)

    def coverage(self, theta: np.ndarray, covariance: np.ndarray, points: Sequence[Point]) -> Coverage:
        """The table of these factors: every stack on every generation; "generic" is the mean of the stacks with runs there."""
        value = lambda owner, kind: float(theta[self.at[owner, kind]]) if (owner, kind) in self.at else 0.0  # noqa: E731
        pairs = sorted({(p.stack, p.generation) for p in points})
        names, generations = sorted({s for s, _ in pairs} - {"generic"}), sorted({g for _, g in pairs})
        factor = lambda stacks, g: {k: _rounded(np.exp(value(g, k) + np.mean([value(s, k) for s in stacks]))) for k in KINDS}  # noqa: E731
        stacks = {s: {g: factor([s], g) for g in generations} for s in names}
        stacks["generic"] = {g: factor([s for s, there in pairs if there == g and s != "generic"], g) for g in generations}
        stacks |= {child: stacks[parent] for child, parent in INHERITS.items() if parent in stacks and child not in stacks}
        traits = {t: {k: _rounded(np.exp(value(t, k))) for k in TRAITS[t]} for t in FEATURES}
        same = {child: parent for child, parent in INHERITS.items() if child not in names}
        errors = FactorErrors(self.names, covariance, {kind: OWN * sigma for kind, sigma in PRIORS.items()}, same, FEATURES)
        return Coverage(source="python -m calibration.coverage, from calibration/measurements/published_runs.csv", num_runs=len(points),
                        stacks=stacks, features=traits, errors=errors)


def _rounded(factor: float) -> float:
    return float(f"{factor:.{FIRST_DIGITS}g}")


def runs_to_fit(keep: Callable[[int], bool]) -> list[tuple[Run, str]]:
    """(run, group) of the measured, expressible runs whose fold is kept."""
    folds, excluded = read_folds(), read_excluded()
    found = []
    for row in read_rows(MEASUREMENTS / "published_runs.csv"):
        if keep(folds[row["id"]]) and row["id"] not in excluded:
            run = parse_run(row)
            if isinstance(run, Run) and run.measured.tokens_per_s_per_gpu and run.cluster.gpu.name in GENERATIONS:
                found.append((run, group_hash(row)))
    return found


def points(runs: Iterable[tuple[Run, str]], coverage: Coverage, bands: bool = False, workers: int = 2) -> list[Point]:
    """A point for every run; runs that pose one question are played once."""
    runs = list(runs)
    question = lambda run: (run.stack.name, run.proxy_dispatcher, str(run.layout), repr((run.model, run.cluster, run.workload)))  # noqa: E731
    first = {question(run): (run, group) for run, group in reversed(runs)}
    with ProcessPoolExecutor(workers) as pool:
        answers = pool.map(point, *zip(*first.values()), [coverage] * len(first), [bands] * len(first), chunksize=4)
        played = {key: (found, run) for (key, (run, _)), found in zip(first.items(), answers)}
    return [_as(run, group, *played[question(run)]) for run, group in runs if played[question(run)][0] is not None]


def _as(run: Run, group: str, found: Point, of: Run) -> Point:
    """What was found of one run, for another that poses the same question and measured something else."""
    residual = found.residual + float(np.log(of.measured.tokens_per_s_per_gpu / run.measured.tokens_per_s_per_gpu))
    return replace(found, id=run.id, group=group, residual=residual, doubt=assumption_sigma(run.assumed, run.pinned))


def fit(runs: Sequence[tuple[Run, str]], passes: int, progress=print) -> Coverage:
    """The table after so many passes."""
    coverage, theta = Coverage(source="none", num_runs=0), None
    for number in range(passes):
        found = points(runs, coverage)
        factors = Factors(found)
        theta, covariance = factors.solve(found, np.zeros(len(factors.names)) if theta is None else theta)
        coverage = factors.coverage(theta, covariance, found)
        size = np.abs(np.expm1([p.residual for p in found]))
        progress(f"pass {number + 1}: {len(found)} runs, before it median |error| of the step {np.median(size):.1%}, mean {size.mean():.1%}")
    return coverage


def ln_factors(coverage: Coverage, found: Sequence[Point]) -> np.ndarray:
    """[points] what the shipped table adds to ln(step) of each point, along its sensitivities."""
    out = []
    for p in found:
        kinds = dict(coverage.stacks.get(p.stack, {}).get(p.generation, {}))
        for trait in p.traits:
            for kind, factor in coverage.features.get(trait, {}).items():
                kinds[kind] = kinds.get(kind, 1.0) * factor
        out.append(sum(slope * np.log(kinds.get(kind, 1.0)) for slope, kind in zip(p.slope, KINDS)))
    return np.array(out)


def errors_of(table: Coverage, points: Sequence[Point]) -> FactorErrors:
    """How sure a table is whose factors gave these points."""
    factors = Factors(points)
    bare = [replace(p, residual=p.residual + s) for p, s in zip(points, ln_factors(table, points))]
    return factors.coverage(*factors.solve(bare, np.zeros(len(factors.names))), bare).errors


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m calibration.coverage", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--passes", type=int, default=2, help="times the runs are played and fitted")
    parser.add_argument("--errors", action="store_true", help="play the runs with the shipped factors and ask only how sure these are")
    parser.add_argument("--write", action="store_true", help="write scenarios/kernel_coverage.yaml and kernel_errors.json")
    args = parser.parse_args(argv)
    runs = runs_to_fit(lambda fold: fold != TEST_FOLD)
    if args.errors:
        shipped = load_coverage()
        coverage = shipped.model_copy(update={"errors": errors_of(shipped, points(runs, shipped))})
    else:
        coverage = fit(runs, args.passes)
    for stack, generations in coverage.stacks.items():
        for generation, kinds in generations.items():
            print(f"{stack:20s}{generation:17s}" + " ".join(f"{kind} {factor:.2f}" for kind, factor in kinds.items()))
    print(coverage.features)
    if args.write:
        head = "Written by `python -m calibration.coverage --write` from calibration/measurements; edit those, not this file."
        write_text(scenarios_dir() / "kernel_coverage.yaml", table_yaml(head, coverage.model_dump(exclude={"errors"})))
        write_text(scenarios_dir() / "kernel_errors.json", json.dumps({"source": coverage.source, **coverage.errors.plain()}) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
