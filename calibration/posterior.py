"""What do a machine's measurements say about parameters of which something is believed beforehand, and how sure is that?

Seconds are log-normal about the model. A measurement's variance is that of its own repeats plus a misfit that all measurements of a term
share and that is estimated with the parameters (Huber's proposal 2: Huber 1964, "Robust estimation of a location parameter"). Outliers count
less than squared; the covariance is the sandwich that this needs, with beliefs as what they are, one observation a parameter.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Callable, Mapping, Sequence

import numpy as np

from moesim.costs.base import Parameter

DAMPED = 2.0
"""Standard deviations beyond which a residual counts linearly."""
CAP, CAPPED_MEAN = 2.0, 0.9205
"""Squared residuals count up to CAP^2 in the scale; the mean of min(z^2, CAP^2) of a standard normal."""
CALM = 3.0
PINNED = 0.1
"""Share of a belief's variance that measurements must remove: a parameter that keeps more of it stays where it was believed."""
STEP = 1e-4
MAX_MISFIT = 2.0
ROUNDS = 4

Belief = tuple[float, float]
"""(value, standard deviation of its logarithm)."""


@dataclass(frozen=True)
class Posterior:
    """Parameters (all of them), covariance of the logarithms of ``names``, the pinned among them at their belief's variance.

    learned: name -> share of its belief's variance that the measurements removed; pinned: those that they leave alone; together: pairs
    that only their beliefs tell apart. misfit: standard deviation of log seconds beyond the repeats' own. weights: of each measurement,
    between 0 and 1, after damping; spare: measurements beyond the parameters that they determine.
    """

    parameters: dict[str, float]
    names: tuple[str, ...]
    covariance: np.ndarray
    learned: dict[str, float]
    pinned: tuple[str, ...]
    together: tuple[tuple[str, str], ...]
    misfit: float
    weights: np.ndarray
    spare: float

    @property
    def stderr(self) -> dict[str, float]:
        """Of each parameter, in its unit."""
        return {name: self.parameters[name] * float(np.sqrt(self.covariance[i, i])) for i, name in enumerate(self.names)}

    def table(self) -> dict[str, dict[str, float]]:
        """Covariance in the parameters' units."""
        scale = np.array([self.parameters[name] for name in self.names])
        whole = self.covariance * np.outer(scale, scale)
        return {a: {b: float(whole[i, j]) for j, b in enumerate(self.names)} for i, a in enumerate(self.names)}


def learn(
    predict: Callable[[Mapping[str, float]], np.ndarray], seconds: np.ndarray, noise: np.ndarray, declared: Sequence[Parameter],
    beliefs: Mapping[str, Belief], fixed: Mapping[str, float] | None = None, *, robust: bool = True, misfit: float | None = None,
) -> Posterior:
    """Parameters of ``beliefs`` after these measurements; those in ``fixed`` stay.

    predict: all parameters to seconds; noise: standard deviation of the log of each measured figure; misfit: known, or None to estimate
    it. ValueError where the measurements say nothing about any parameter.
    """
    problem = _Problem(predict, np.log(seconds), np.asarray(noise, dtype=float), {p.name: p for p in declared}, dict(beliefs), dict(fixed or {}), robust)
    first = _solve(problem, tuple(beliefs), misfit)
    pinned = tuple(n for i, n in enumerate(first.names) if first.learned[i] < PINNED)
    if len(pinned) == len(beliefs):
        raise ValueError(f"{len(seconds)} measurement(s) say nothing about {', '.join(beliefs)}")
    free = tuple(name for name in beliefs if name not in pinned)
    return _posterior(problem, _solve(problem, free, misfit, first) if pinned else first, pinned)


@dataclass(frozen=True)
class _Problem:
    predict: Callable
    log_seconds: np.ndarray
    noise: np.ndarray
    declared: dict[str, Parameter]
    beliefs: dict[str, Belief]
    fixed: dict[str, float]
    robust: bool

    def residuals(self, names: tuple[str, ...], theta: np.ndarray) -> np.ndarray:
        values = {**self.fixed, **{n: v for n, (v, _) in self.beliefs.items()}, **dict(zip(names, np.exp(theta)))}
        return np.log(self.predict(values)) - self.log_seconds

    def jacobian(self, names: tuple[str, ...], theta: np.ndarray) -> np.ndarray:
        columns = [self.residuals(names, theta + STEP * unit) - self.residuals(names, theta - STEP * unit) for unit in np.eye(len(theta))]
        return np.stack(columns, axis=1) / (2 * STEP)


@dataclass(frozen=True)
class _Solution:
    names: tuple[str, ...]
    theta: np.ndarray
    covariance: np.ndarray
    learned: np.ndarray
    misfit: float
    weights: np.ndarray
    spare: float
    jacobian: np.ndarray


def _solve(problem: _Problem, names: tuple[str, ...], known: float | None, before: _Solution | None = None) -> _Solution:
    """Parameters and misfit in turns."""
    center = np.log([problem.beliefs[n][0] for n in names])
    sigma = np.array([problem.beliefs[n][1] for n in names])
    theta = center if before is None else np.array([before.theta[before.names.index(n)] for n in names])
    misfit = known if known is not None else before.misfit if before else 0.1
    for _ in range(ROUNDS if known is None else 1):
        scale = np.hypot(problem.noise, misfit)
        theta = _minimum(problem, names, theta, scale, center, sigma)
        rest, slope = problem.residuals(names, theta), problem.jacobian(names, theta)
        spare = _spare(slope / scale[:, None], sigma)
        if known is None:
            misfit = _misfit(rest, problem.noise, spare)
    scale = np.hypot(problem.noise, misfit)
    covariance, damping = _sandwich(rest / scale, slope / scale[:, None], sigma, spare, problem.robust)
    return _Solution(names, theta, covariance, 1.0 - np.diag(covariance) / sigma**2, misfit, damping, spare, slope / scale[:, None])


def _minimum(problem, names, theta, scale, center, sigma) -> np.ndarray:
    from scipy.optimize import least_squares

    count = len(scale)

    def residuals(t):
        return np.concatenate([problem.residuals(names, t) / scale, (t - center) / sigma])

    def loss(squared):
        rho = np.stack([squared, np.ones_like(squared), np.zeros_like(squared)])
        if problem.robust:
            far = 1.0 + squared[:count] / DAMPED**2
            rho[:, :count] = 2 * DAMPED**2 * (np.sqrt(far) - 1), far**-0.5, -0.5 / DAMPED**2 * far**-1.5
        return rho

    bounds = np.log([[problem.declared[n].low, problem.declared[n].high] for n in names]).T
    start = np.clip(theta, bounds[0] + 1e-6, bounds[1] - 1e-6)
    return least_squares(residuals, start, bounds=tuple(bounds), loss=loss, x_scale=sigma, diff_step=STEP, max_nfev=100).x


def _spare(slope: np.ndarray, sigma: np.ndarray) -> float:
    """Measurements less the parameters that they (and not the beliefs) determine."""
    gram = slope.T @ slope
    used = np.trace(np.linalg.solve(gram + np.diag(sigma**-2), gram))
    return max(1.0, len(slope) - float(used))


def _misfit(rest: np.ndarray, noise: np.ndarray, spare: float) -> float:
    """What must be added to the measurements' own noise for residuals to be as large as they are; measurements far noisier than most say
    nothing about it."""
    calm = noise <= CALM * np.median(noise)
    wanted = CAPPED_MEAN * spare * float(np.mean(calm))

    def excess(misfit: float) -> float:
        return float(np.sum(np.minimum((rest[calm] / np.hypot(noise[calm], misfit)) ** 2, CAP**2))) - wanted

    low, high = 1e-4, MAX_MISFIT
    if excess(low) <= 0:
        return low
    for _ in range(40):
        middle = float(np.sqrt(low * high))
        low, high = (middle, high) if excess(middle) > 0 else (low, middle)
    return high


def _sandwich(z: np.ndarray, slope: np.ndarray, sigma: np.ndarray, spare: float, robust: bool) -> tuple[np.ndarray, np.ndarray]:
    """(covariance of the parameters' logs, weight of each measurement)."""
    far = 1.0 + (z / DAMPED) ** 2 if robust else np.ones_like(z)
    gram, belief = slope.T @ slope, np.diag(sigma**-2)
    bread = np.linalg.inv(float(np.mean(far**-1.5)) * gram + belief)
    # The scale is itself estimated, so errors follow Student's t: spare / (spare - 2) is its variance.
    meat = float(np.sum(z**2 / far)) / max(spare - 2.0, 1.0) * gram + belief
    return bread @ meat @ bread, far**-0.5


def _posterior(problem: _Problem, found: _Solution, pinned: tuple[str, ...]) -> Posterior:
    names = (*found.names, *pinned)
    whole = np.zeros((len(names), len(names)))
    size = len(found.names)
    whole[:size, :size] = found.covariance
    for i, name in enumerate(pinned, size):
        whole[i, i] = problem.beliefs[name][1] ** 2
    values = {**problem.fixed, **{n: problem.beliefs[n][0] for n in pinned}, **dict(zip(found.names, np.exp(found.theta).tolist()))}
    learned = dict(zip(found.names, found.learned.tolist())) | {n: 0.0 for n in pinned}
    return Posterior(values, names, whole, learned, pinned, _together(found, problem), found.misfit, found.weights, found.spare)


def _together(found: _Solution, problem: _Problem) -> tuple[tuple[str, str], ...]:
    """Pairs whose two columns are, to the measurements, nearly one."""
    norms = np.linalg.norm(found.jacobian, axis=0)
    cosine = (found.jacobian / norms).T @ (found.jacobian / norms)
    pairs = [(i, j) for i in range(len(found.names)) for j in range(i) if abs(cosine[i, j]) > 0.995]
    return tuple((found.names[j], found.names[i]) for i, j in pairs)
