"""Which parameters of a cost model agree best with the measurements, and how well are they known?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Callable, Mapping, Sequence

import numpy as np

from moesim.costs.base import Parameter

CONDITION_LIMIT = 1e6
"""Ratio of the largest to the smallest singular value of the scaled Jacobian beyond which parameters can't be told apart: double
precision and a finite-difference step of 1e-4 leave about six digits."""

NOISE = 0.1
"""Scatter of one public kernel timing in log units (repeats and neighbours in the burst tables): residuals beyond it count linearly."""


@dataclass(frozen=True)
class Result:
    """Best parameters, with standard errors and covariance of those inside their bounds; sigma_log = spread of log residuals."""

    parameters: dict[str, float]
    stderr: dict[str, float]
    covariance: dict[str, dict[str, float]]
    at_bound: tuple[str, ...]
    sigma_log: float


def fit(
    predict: Callable[[Mapping[str, float]], np.ndarray],
    measured: np.ndarray,
    parameters: Sequence[Parameter],
    fixed: Mapping[str, float] | None = None,
    start: Mapping[str, float] | None = None,
    prior: Mapping[str, tuple[float, float]] | None = None,
    robust: bool = True,
) -> Result:
    """Least squares of log(predicted / measured), outliers damped beyond NOISE unless ``robust`` is False.

    prior: name -> (value, sigma of its logarithm): what is believed before these measurements, weighed as one measurement whose
    noise is NOISE. Parameters that declare ``fitted=False`` stay at their start.

    predict maps all parameters to seconds, one a measurement. Parameters in ``fixed`` stay. ValueError where the data can't
    identify the free ones (a direction in parameter space that changes no prediction), naming them.
    """
    from scipy.optimize import least_squares

    fixed = {**{p.name: p.start for p in parameters if not p.fitted}, **(fixed or {})}
    free = [p for p in parameters if p.name not in fixed]
    prior = {name: belief for name, belief in (prior or {}).items() if name not in fixed}
    if len(measured) + len(prior) <= len(free):
        raise ValueError(f"{len(measured)} measurements can't identify {len(free)} parameters")

    def unpack(theta):
        return {**fixed, **{p.name: _from_theta(p, value) for p, value in zip(free, theta)}}

    def residuals(theta):
        values = unpack(theta)
        beliefs = [NOISE * np.log(values[name] / value) / sigma for name, (value, sigma) in prior.items()]
        return np.concatenate([np.log(predict(values) / measured), beliefs])

    first = np.array([_to_theta(p, (start or {}).get(p.name, p.start)) for p in free])
    bounds = np.array([(_to_theta(p, p.low, inside=False), _to_theta(p, p.high, inside=False)) for p in free]).T
    loss = {"loss": "soft_l1", "f_scale": NOISE} if robust else {}
    solution = least_squares(residuals, first, bounds=tuple(bounds), diff_step=1e-4, max_nfev=200, **loss)
    return _errors(solution.x, residuals, free, bounds, unpack, len(measured))


def _to_theta(p: Parameter, value: float, inside: bool = True) -> float:
    """Positive parameters vary in log, those that may be zero linearly, scaled by their upper bound."""
    if inside:
        margin = 1e-3
        value = min(max(value, p.low * (1 + margin) if p.low > 0 else margin * p.high), p.high * (1 - margin))
    return float(np.log(value)) if p.low > 0 else value / p.high


def _from_theta(p: Parameter, theta: float) -> float:
    return float(np.exp(theta)) if p.low > 0 else float(theta * p.high)


def _errors(theta, residuals, free, bounds, unpack, num_rows) -> Result:
    width = bounds[1] - bounds[0]
    inner = (theta > bounds[0] + 2e-3 * width) & (theta < bounds[1] - 2e-3 * width)
    at_bound = tuple(p.name for p, ok in zip(free, inner) if not ok)
    rest = residuals(theta)
    jacobian = np.stack([_slope(residuals, theta, i) for i in np.flatnonzero(inner)], axis=1) if inner.any() else np.zeros((len(rest), 0))
    names = [p for p, ok in zip(free, inner) if ok]
    _refuse_unidentified(jacobian, names)
    rest = rest[:num_rows]
    spread = float(1.4826 * np.median(np.abs(rest)))
    variance = float(np.sum(np.minimum(np.abs(rest), 3 * spread) ** 2) / max(1, len(rest) - len(names)))
    covariance = variance * np.linalg.inv(jacobian.T @ jacobian) if names else np.zeros((0, 0))
    values = unpack(theta)
    scale = np.array([values[p.name] if p.low > 0 else p.high for p in names])
    covariance = covariance * np.outer(scale, scale)
    table = {a.name: {b.name: float(covariance[i, j]) for j, b in enumerate(names)} for i, a in enumerate(names)}
    stderr = {p.name: float(np.sqrt(covariance[i, i])) for i, p in enumerate(names)}
    return Result(values, stderr, table, at_bound, float(np.sqrt(variance)))


def _slope(residuals, theta, index):
    step = 1e-4
    up, down = theta.copy(), theta.copy()
    up[index] += step
    down[index] -= step
    return (residuals(up) - residuals(down)) / (2 * step)


def _refuse_unidentified(jacobian, names) -> None:
    norms = np.linalg.norm(jacobian, axis=0)
    if (norms < 1e-9).any():
        lost = ", ".join(p.name for p, norm in zip(names, norms) if norm < 1e-9)
        raise ValueError(f"not identified by these measurements: {lost} changes no prediction")
    if len(names) < 2:
        return
    _, singular, right = np.linalg.svd(jacobian / norms, full_matrices=False)
    if singular[0] > CONDITION_LIMIT * singular[-1]:
        mixed = ", ".join(p.name for p, weight in zip(names, right[-1]) if abs(weight) > 0.1)
        raise ValueError(f"not identified by these measurements: {mixed} can't be told apart")
