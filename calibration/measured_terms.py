"""What does one term of a profile become once some of its ops were measured? (prior from the parent, fit, held-out errors, pins named)"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Callable, Iterator, Mapping, Sequence

import numpy as np

from calibration.lines import Row
from calibration.posterior import Belief, Posterior, learn
from calibration.validate import errors, sigma_of
from moesim.costs import COSTS
from moesim.costs.base import Parameter
from moesim.ops import Attention, Gemm, GroupedGemm, MemoryBound
from moesim.pricing import AXES, kernel, points
from moesim.profile import Fit, HardwareProfile, Term, paced

SAME_KIND = 0.3
"""Belief about a parameter that was measured on another machine of the kind: log sigma beside its own error. Kernels scaled between GPUs of
neighbouring generations miss by 8-14% in the median (SCALED_SIGMA in terms.py); single parameters trade off and are known worse (assumed)."""
GUESSED = 1.5
"""Belief about a parameter that nobody measured (assumed): within a factor of 4.5."""
LEAST_FOLDS, MOST_FOLDS = 3, 6
OTHER_SITE = 0.05
"""Two healthy GPUs of one type differ by about 5% (https://github.com/stas00/ml-engineering/blob/744d01e18b/compute/accelerator/README.md)."""
FLOOR = 0.01
"""No term is claimed to be better known than this (assumed): repeats of a whole bench differ by a percent or two."""
OWN = {"grouped_gemm": {p.name for p in COSTS["grouped_gemm"].PARAMETERS}, "attention": {"rate", "half_keys", "bandwidth", "fixed_s"}}
"""Cost models some of whose parameters are not theirs to fit: those of the dense kernel, and ratios between terms."""

Predictor = Callable[[Mapping[str, float]], np.ndarray]


@dataclass(frozen=True)
class Fitted:
    """A measured term, how it was found, and what a person should know of it. ``shift``: mean log of measured over the parent's price."""

    term: Term
    posterior: Posterior
    shift: float
    notes: tuple[str, ...]


def beliefs(term: Term) -> dict[str, Belief]:
    """Parameter of a parent's term -> what is believed of it before any measurement. Zeros and infinities (a part of the kernel that does
    not exist) are no matter of belief."""
    guessed = term.provenance in ("assumed", "datasheet")
    allowed = OWN.get(term.kind) or ({term.name.split(".")[1], "fixed_s"} if term.kind == "memory_bound" else None)
    found = {}
    for p in COSTS[term.kind].PARAMETERS:
        value = term.parameters[p.name]
        if not (np.isfinite(value) and value > 0) or (allowed is not None and p.name not in allowed):
            continue
        own = term.stderr.get(p.name, 0.0) / value
        found[p.name] = (float(np.clip(value, p.low * 1.0001, p.high * 0.9999)), GUESSED if guessed else float(min(GUESSED, np.hypot(own, SAME_KIND))))
    return found


def fit_term(parent: HardwareProfile, name: str, rows: Sequence[Row], base: Term | None = None, origin: str = "") -> Fitted:
    """The term ``name`` of ``parent`` after ``rows``; ``base``: it with parameters of another measured term put in. ValueError where the
    rows say nothing."""
    term = base or parent.term(name)
    believed, declared = beliefs(term), COSTS[term.kind].PARAMETERS
    fixed = {k: v for k, v in term.parameters.items() if k not in believed}
    ops, seconds, noise = [r.op for r in rows], np.array([r.seconds for r in rows]), np.array([r.noise for r in rows])
    predict = kernel(term.kind, parent.num_sms, ops)
    found = learn(predict, seconds, noise, declared, believed, fixed)
    fits, sigma = _errors(term, parent.num_sms, rows, found, declared, believed, fixed)
    axes = AXES[type(ops[0])](ops)
    notes = tuple(_notes(name, found, axes, rows))
    shift = float(np.mean(np.log(seconds / predict(parent.parameters(name, in_training=False)))))
    sound = term.provenance not in ("assumed", "datasheet")
    made = term.model_copy(update={
        "parameters": found.parameters, "stderr": {n: s for n, s in found.stderr.items() if np.isfinite(s)}, "covariance": found.table(),
        "valid": {axis: (float(v.min()), float(v.max())) for axis, v in axes.items()}, "provenance": "measured", "shared": {},
        "points": {axis: tuple(v.tolist()) for axis, v in points(ops).items()},
        "sigma_log": float(np.hypot(sigma, FLOOR)), "sources": (origin, *(term.sources if found.pinned and sound else ())),
        "fits": fits, "note": "; ".join(notes), "label": "",
    })
    return Fitted(made, found, shift, notes)


def _errors(term, num_sms, rows, found: Posterior, declared: Sequence[Parameter], believed, fixed) -> tuple[tuple[Fit, ...], float]:
    """In sample and held out, and the sigma that the widest split leaves (in sample, spread by what the parameters leave open, where no
    split is possible)."""
    seconds = np.array([r.seconds for r in rows])
    price = kernel(term.kind, num_sms, [r.op for r in rows])(found.parameters)
    fits, sigma = [errors(price, seconds, "in sample")], sigma_of(price, seconds)
    for split, folds in _splits(rows):
        held = np.full(len(rows), np.nan)
        for number in range(max(folds) + 1):
            inside = np.array([f == number for f in folds])
            kept = [r for r, out in zip(rows, inside) if not out]
            try:
                one = learn(kernel(term.kind, num_sms, [r.op for r in kept]), np.array([r.seconds for r in kept]), np.array([r.noise for r in kept]),
                            declared, believed, fixed, misfit=found.misfit)
            except ValueError:
                continue
            held[inside] = kernel(term.kind, num_sms, [r.op for r, out in zip(rows, inside) if out])(one.parameters)
        known = np.isfinite(held)
        if known.any():
            fits.append(errors(held[known], seconds[known], split))
            sigma = max(sigma, sigma_of(held, seconds))
    if len(fits) == 1:
        sigma = max(sigma, float(np.sqrt(np.max(np.diag(found.covariance)))))
    return tuple(fits), sigma


def _splits(rows: Sequence[Row]) -> Iterator[tuple[str, list[int]]]:
    """(name, fold of each row): whole families of shapes, whole sizes; single rows where neither has enough members."""
    made = 0
    for split, key in (("families", family), ("sizes", size)):
        keys = sorted({key(r.op) for r in rows})
        if len(keys) >= LEAST_FOLDS:
            number = {k: i % MOST_FOLDS for i, k in enumerate(keys)}
            made += 1
            yield split, [number[key(r.op)] for r in rows]
    if not made and len(rows) >= LEAST_FOLDS:
        yield "lines", [i % MOST_FOLDS for i in range(len(rows))]


def family(op) -> tuple:
    """Shapes that differ in the size of the batch alone."""
    if isinstance(op, Gemm):
        return (op.m, op.n) if op.accumulate else (op.n, op.k)
    if isinstance(op, GroupedGemm):
        return op.groups, op.n, op.k
    return (op.num_heads, op.qk_dim, op.v_dim) if isinstance(op, Attention) else ()


def size(op) -> float:
    """What grows with the batch."""
    if isinstance(op, Gemm):
        return op.k if op.accumulate else op.m
    if isinstance(op, GroupedGemm):
        return op.rows
    return op.batch * op.pairs if isinstance(op, Attention) else op.moved if isinstance(op, MemoryBound) else 0.0


def _notes(name: str, found: Posterior, axes: Mapping[str, np.ndarray], rows: Sequence[Row]) -> Iterator[str]:
    same = [f"{axis} {values[0]:g}" for axis, values in axes.items() if len(set(values.tolist())) == 1]
    if found.pinned:
        why = f" (all {len(rows)} lines have {', '.join(same)})" if same else f" ({len(rows)} lines say less than was believed)"
        yield f"pinned to what was believed: {', '.join(found.pinned)}{why}"
    for one, other in found.together:
        yield f"{one} and {other} told apart by belief alone"
    noisy = sum(r.noisy for r in rows)
    if noisy:
        yield f"{noisy} of {len(rows)} lines noisy, weighed less"


def borrowed(term: Term, shift: float, spread: float, note: str) -> Term:
    """A guessed term that was not measured, as much slower as its measured siblings are."""
    parameters = paced(term, float(np.exp(-shift))) if term.parameters else {}
    return term.model_copy(update={"parameters": parameters, "provenance": "extrapolated", "note": note,
                                   "sigma_log": float(np.hypot(min(term.sigma_log, 0.3), spread))})


def kept(term: Term, parent: str) -> Term:
    """A parent's term that nothing here was measured of."""
    provenance = "extrapolated" if term.provenance in ("measured", "interpolated") else term.provenance
    return term.model_copy(update={"provenance": provenance, "sigma_log": float(np.hypot(term.sigma_log, OTHER_SITE)),
                                   "note": f"as {parent} has it" + (f": {term.note}" if term.note else "")})
