"""What do a few measured runs of a site say about its few constants? (Log errors with heavy tails, and priors.)

A site is a cluster and a software release. Its host launch cost, the latency of its dispatcher's proxy, the rate its NICs reach
under load, the sustained rate of its tensor cores and what its end of step costs differ from the profile's by factors nobody can
read off a data sheet; three to five runs and wide priors pin most of them. A factor the runs don't touch stays at one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Callable, Mapping, Sequence

import numpy as np

from .predict import read_rows
from .runs import Run, Unsupported, parse_runs
from .site import NOISE

PRIORS: dict[str, float] = {
    "host": 0.4,  # 11 to 18 us a small PyTorch kernel on one host (https://github.com/NVIDIA/dgxc-benchmarking), other hosts beyond
    "proxy": 1.0,  # CPU proxies of EFA dispatchers: 0.1 to 10 ms a call in published campaigns (https://github.com/uccl-project/uccl)
    "nic": 0.3,  # rate under load: 46 to 49 of 50 GB/s alone (https://github.com/NVIDIA/nccl-tests/issues/267), down to half beside others
    "gemm": 0.15,  # sustained over burst 0.64 to 0.84 on one GPU type (https://github.com/MooreThreads/SimuMax, https://allenai.org/papers/olmocore3)
    "end_of_step": 0.7,  # overlap of reduction and gather with compute is anything from none to all
}
"""Site constant -> standard deviation of ln(multiplier) before any run is seen. A multiplier scales seconds, not rates."""

LIMIT = math.log(8.0)  # a site constant beyond a factor of eight means the row is something else
STEP = 0.05  # finite difference in ln(multiplier): above the evaluators' rounding, below any curvature that matters
MAX_ITERATIONS = 6
TAILS = 4.0
"""Degrees of freedom of the errors' t distribution (Lange, Little and Taylor 1989): a run that nothing explains must not bend a
constant that every other run depends on."""


@dataclass(frozen=True)
class Anchored:
    """multipliers: site constant -> factor on its seconds; stderr: standard deviation of its log; before and after: ln(predicted /
    measured) of the anchors; weights: how far each was believed, 1 and a quarter at most; num_evaluations: calls of the simulator."""

    multipliers: dict[str, float]
    stderr: dict[str, float]
    before: tuple[float, ...]
    after: tuple[float, ...]
    weights: tuple[float, ...]
    num_evaluations: int


def fit_anchors(measured: Sequence[float], predict_with: Callable[[Mapping[str, float]], Sequence[float]],
                priors: Mapping[str, float] = PRIORS, *, noise: float = NOISE) -> Anchored:
    """Multipliers that agree best with the anchors and their priors.

    measured: tokens/s/GPU of each anchor; predict_with(multipliers) gives the same of the simulator, in the same order; priors:
    constant -> sigma of ln(multiplier) around 0. Gauss-Newton with halved steps: one evaluation a constant and iteration, about
    20 in all. Raises ValueError where there is nothing to fit or the simulator answers no rate.
    """
    problem = _Problem(measured, predict_with, priors, noise)
    theta = np.zeros(len(problem.names))
    residual = problem.residual(theta)
    before = residual
    for _ in range(MAX_ITERATIONS if problem.names else 0):
        jacobian, weights = problem.jacobian(theta, residual), problem.weights(residual)
        step = np.linalg.solve(problem.normal(jacobian, weights), -(jacobian.T @ (weights * residual) / noise**2 + theta / problem.sigma**2))
        theta, residual, moved = problem.descend(theta, residual, step)
        if moved < 1e-3:
            break
    jacobian = problem.jacobian(theta, residual) if problem.names else np.zeros((len(residual), 0))
    weights = problem.weights(residual)
    stderr = np.sqrt(np.diag(np.linalg.inv(problem.normal(jacobian, weights)))) if problem.names else np.zeros(0)
    return Anchored(
        dict(zip(problem.names, np.exp(theta).tolist())), dict(zip(problem.names, stderr.tolist())),
        tuple(before.tolist()), tuple(residual.tolist()), tuple(weights.tolist()), problem.num_evaluations,
    )


class _Problem:
    """Residuals and derivatives of one site's anchors in ln(multiplier)."""

    def __init__(self, measured, predict_with, priors, noise) -> None:
        self.measured = np.asarray(measured, dtype=float)
        if not len(self.measured):
            raise ValueError("anchors: no measured run")
        if not np.all(np.isfinite(self.measured) & (self.measured > 0)):
            raise ValueError("anchors: a measured rate is not a positive number")
        self.names = tuple(priors)
        self.sigma = np.array([priors[name] for name in self.names], dtype=float)
        assert np.all(self.sigma > 0) and noise > 0
        self.predict_with, self.noise, self.num_evaluations = predict_with, noise, 0

    def residual(self, theta: np.ndarray) -> np.ndarray:
        self.num_evaluations += 1
        rates = np.asarray(self.predict_with(dict(zip(self.names, np.exp(theta).tolist()))), dtype=float)
        if rates.shape != self.measured.shape or not np.all(np.isfinite(rates) & (rates > 0)):
            raise ValueError("anchors: the simulator gave no rate for an anchor")
        return np.log(rates / self.measured)

    def jacobian(self, theta: np.ndarray, residual: np.ndarray) -> np.ndarray:
        columns = [(self.residual(theta + STEP * unit) - residual) / STEP for unit in np.eye(len(theta))]
        return np.array(columns).T

    def weights(self, residual: np.ndarray) -> np.ndarray:
        return (TAILS + 1.0) / (TAILS + (residual / self.noise) ** 2)

    def normal(self, jacobian: np.ndarray, weights: np.ndarray) -> np.ndarray:
        return (jacobian.T * weights) @ jacobian / self.noise**2 + np.diag(1 / self.sigma**2)

    def objective(self, theta: np.ndarray, residual: np.ndarray) -> float:
        return float((TAILS + 1.0) * np.sum(np.log1p((residual / self.noise) ** 2 / TAILS)) + np.sum((theta / self.sigma) ** 2))

    def descend(self, theta: np.ndarray, residual: np.ndarray, step: np.ndarray) -> tuple[np.ndarray, np.ndarray, float]:
        """The first of step, step/2, step/4 that lowers the objective; else where it stands."""
        now = self.objective(theta, residual)
        for scale in (1.0, 0.5, 0.25):
            trial = np.clip(theta + scale * step, -LIMIT, LIMIT)
            found = self.residual(trial)
            if self.objective(trial, found) < now:
                return trial, found, float(np.max(np.abs(trial - theta)))
        return theta, residual, 0.0


def load_anchors(path: str | Path) -> dict[str, tuple[Run, ...]]:
    """Site -> its measured runs, from a CSV in the columns of published_runs.csv. Raises ValueError (one line) where a row can't be
    expressed or holds no measurement: an anchor that is silently dropped would be trusted for nothing."""
    sites: dict[str, list[Run]] = {}
    for run in parse_runs(read_rows(path)):
        if isinstance(run, Unsupported):
            raise ValueError(f"{path}: anchor {run.id!r} can't be expressed: {run.reason}")
        if not run.measured.tokens_per_s_per_gpu:
            raise ValueError(f"{path}: anchor {run.id!r} holds no measured rate (tokens_per_s_per_gpu, step_time_s, model_tflops_per_gpu or mfu)")
        sites.setdefault(run.site, []).append(run)
    return {site: tuple(runs) for site, runs in sites.items()}
