"""What do roles cost inside training steps, over the price of their ops? (In-step lines of a few anchors -> ratios in a profile.)

A plan counts one kernel for a norm or an activation; an eager framework runs several, allocates their results, and finds caches cold. Nothing
timed alone shows that, the spans of a step do. Ratios are taken of one process at a time: what ranks do to each other is the simulator's
to say, through the cores and the memory that they share.

The rule. Seconds of a role in a step are a ratio times the price of its ops and a fixed time for each layer and microbatch that plays it; both
follow from anchors that cut the same tokens into few and many microbatches, by least squares of relative errors, neither below zero. A product's ratio
is believed to be one (RATIO_SIGMA). Where the anchors play a role equally often, all is ratio. A role that no anchor ran takes
what the one it resembles has (RESEMBLES). Bookkeeping that a plan has no op for counts with the role that it belongs to (PART_OF).

Gradients of a microbatch that is not the step's last are added up where FSDP2 would reduce them. The plan counts that with the
weight gradients, so their spans do, too; a step of one microbatch never adds, and says nothing of either.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from calibration.in_step import ADDED
from moesim.layout import parse_layout
from moesim.measurement import Measurement, op_of
from moesim.ops import Collective, Dispatch, Op
from moesim.profile import HardwareProfile, InStep

PHASES = {"F": "F", "R": "F", "B": "B", "": "S"}
PART_OF = {"balance": "router", "plan": "router"}
PRODUCTS = ("qkv", "attn_out", "mla_down", "mla_up", "mlp_up", "mlp_down", "shared_up", "shared_down", "head", "mtp", "expert_up", "expert_down", "core_attn")
RESEMBLES = {"mlp_act": "moe_act", "shared_act": "moe_act", "moe_act": "mlp_act", "mlp_up": "qkv", "mlp_down": "attn_out", "shared_up": "qkv",
             "shared_down": "attn_out", "mla_down": "qkv", "mla_up": "qkv", "mtp": "qkv"}
COPY_IN = "grad_copy_in"
NOISE, RATIO_SIGMA = 0.03, 0.05
"""Scatter of a role's seconds in one anchor, and what a product inside a step may differ from the same one timed alone: isolated sums missed
steps by 2 to 9% (both assumed from repeats on two cores)."""
LEAST_COPY = 0.05
"""Share of what FSDP2 does with a step's gradients that is copying at the very least, however long adding took before (assumed)."""
LEAST_SPREAD = 1.05
"""Factors nearer to one than that are taken for noise (assumed)."""
EACH_MICROBATCH = ("param_copy_out",)
"""Work outside the layers whose bookkeeping comes with every microbatch, though its bytes move once a step (`Assembler` plays it so)."""
OUTSIDE = ("param_gather", "grad_reduce")
OUTSIDE_SIGMA = 0.1
"""Of an exchange's ratio in another run (assumed; fits of the collectives' own curves leave 10 to 16%)."""
LEAST_SIGMA = 0.03
"""Steps of one launch spread by 1 to 4% (benchmarks/own_machine.py prints it beside each); two anchors can't show less."""


@dataclass(frozen=True)
class _Found:
    """Seconds of a role in an anchor's recorded steps, as measured and as priced, and how often it is played there."""

    seconds: float
    priced: float
    times: int


@dataclass(frozen=True)
class Adding:
    """Gradients added up in microbatches before the last: seconds of all such microbatches, and of one (0: the step has one)."""

    all_s: float = 0.0
    one_s: float = 0.0


def in_step(profile: HardwareProfile, cluster, anchors: Sequence[Sequence[Measurement]], sources: Sequence[str],
            together: Sequence[Sequence[Measurement]] = ()) -> tuple[InStep, ...]:
    """Ratios for ``profile`` (whose own are not read) from the in-step lines of anchors, each of one process; from ``together``, of several
    processes with a core each, what spread experts add and what collectives outside the layers take."""
    found: dict[tuple[str, str], list[_Found]] = defaultdict(list)
    for lines in anchors:
        for key, seen in _with_adding(_of_anchor(profile, cluster, lines), adding(lines)).items():
            found[key].append(seen)
    fits = {key: _fit(seen, key[0] in PRODUCTS) for key, seen in found.items()}
    for role, like in RESEMBLES.items():
        for phase in "FB":
            if (role, phase) not in fits and (like, phase) in fits:
                fits[role, phase] = fits[like, phase]
    spread = _spread(profile, cluster, fits, [lines for lines in together if _ep(lines) > 1])
    outside = _outside(profile, cluster, together)
    made = [InStep(role=role, phase=phase, ratio=fit.ratio, extra_s=fit.extra_s, spread=spread.get((role, phase), 1.0), sigma_log=fit.sigma,
                   num_steps=fit.number, sources=tuple(sources)) for (role, phase), fit in sorted(fits.items())]
    made += [InStep(role=role, phase="X", ratio=ratio, sigma_log=OUTSIDE_SIGMA, num_steps=len(together), sources=tuple(sources))
             for role, ratio in sorted(outside.items())]
    return tuple(made)


def _ep(lines: Sequence[Measurement]) -> int:
    return parse_layout(lines[0].parameters["layout"]).ep if lines else 1


def _spread(profile: HardwareProfile, cluster, fits: Mapping[tuple[str, str], _Fit], anchors: Sequence[Sequence[Measurement]]) -> dict[tuple[str, str], float]:
    """Factor on the ratio of each role where experts lie on several ranks; what can't be told from one is left out."""
    found: dict[tuple[str, str], list[float]] = defaultdict(list)
    for lines in anchors:
        for key, seen in _of_anchor(profile, cluster, lines).items():
            if key in fits and key[1] in "FB" and not (key[0] in PRODUCTS and key[1] == "B"):
                fit = fits[key]
                found[key].append((seen.seconds - fit.extra_s * seen.times) / (fit.ratio * seen.priced))
    return {key: float(np.median(factors)) for key, factors in found.items() if np.median(factors) > LEAST_SPREAD}


def _outside(profile: HardwareProfile, cluster, anchors: Sequence[Sequence[Measurement]]) -> dict[str, float]:
    """Role -> ratio of collectives outside the layers that move weights or gradients."""
    measured, priced = defaultdict(float), defaultdict(float)
    for lines in anchors:
        for line in lines:
            role, ops = line.parameters.get("roles", ("",))[0], _ops(line)
            if role in OUTSIDE and "mean_over_ranks_s" in line.parameters and ops:
                measured[role] += line.parameters["mean_over_ranks_s"] * len(line.seconds)
                priced[role] += len(line.seconds) * _price(profile, cluster, ops)
    return {role: measured[role] / priced[role] for role in measured if priced[role] > 0}


def adding(lines: Iterable[Measurement]) -> Adding:
    """What the lines of one anchor say of it."""
    seconds = [s for line in lines if line.parameters.get("roles") == [ADDED] for s in line.seconds]
    return Adding(sum(seconds), sum(seconds) / len(seconds)) if seconds else Adding()


def _with_adding(found: dict[tuple[str, str], _Found], given: Adding) -> dict[tuple[str, str], _Found]:
    """What an anchor shows once gradients are added up where the plan counts it."""
    products = [(role, "B") for role in PRODUCTS if (role, "B") in found and role != "core_attn"]
    if not given.one_s:
        return {key: seen for key, seen in found.items() if key not in products and key[0] != COPY_IN}
    copied = found.get((COPY_IN, "S"))
    # The last microbatch adds, too, before it copies: as much as one of those before it.
    last = given.one_s * (copied.times if copied else 0)
    moved = given.all_s + last
    whole = sum(found[key].priced for key in products)
    out = dict(found)
    for key in products:
        share = moved * found[key].priced / whole
        out[key] = replace(found[key], seconds=found[key].seconds + share)
    if copied is not None:
        left = max(copied.seconds - last, LEAST_COPY * copied.seconds)
        out[COPY_IN, "S"] = replace(copied, seconds=left)
    return out


def _of_anchor(profile: HardwareProfile, cluster, lines: Iterable[Measurement]) -> dict[tuple[str, str], _Found]:
    """(role, phase) -> what one anchor shows. Roles that one span covers share its ratio; bookkeeping is added to its role."""
    measured, priced, times = defaultdict(float), defaultdict(float), Counter()
    for line in lines:
        if line.method.get("where") != "step" or not line.seconds or line.parameters.get("roles") == [ADDED]:
            continue
        ops = _ops(line)
        if any(isinstance(op, (Collective, Dispatch)) for op, _ in ops):
            continue
        phase, roles = PHASES[line.parameters["phase"]], tuple(line.parameters["roles"])
        belongs = PART_OF.get(roles[0])
        key = (belongs or roles[0], phase) if len(roles) == 1 else (roles, phase)
        measured[key] += line.median * len(line.seconds)
        # Every layer and microbatch of the span pays for the ops that it lists.
        priced[key] += len(line.seconds) * _price(profile, cluster, ops)
        times[key] += 0 if belongs else len(line.seconds)
    count = max((n for (roles, phase), n in times.items() if phase == "S"), default=1)
    microbatches = times["head", "F"] / count
    out = {}
    for (roles, phase), seconds in measured.items():
        for role in roles if isinstance(roles, tuple) else (roles,):
            if priced[roles, phase] > 0:
                often = times[roles, phase] * (microbatches if role in EACH_MICROBATCH else 1)
                out[role, phase] = _Found(seconds, priced[roles, phase], often)
    return out


def _ops(line: Measurement) -> list[tuple[Op, int]]:
    if line.op is not None:
        return [(line.op, 1)]
    return [(op_of({k: v for k, v in fields.items() if k != "count"}), int(fields["count"])) for fields in line.parameters.get("ops", ())]


def _price(profile: HardwareProfile, cluster, ops: Sequence[tuple[Op, int]]) -> float:
    if not ops:
        return 0.0
    return float(profile.price([op for op, _ in ops], cluster).seconds @ np.array([n for _, n in ops], dtype=float))


@dataclass(frozen=True)
class _Fit:
    """Seconds = ratio * price + extra_s * times; ``sigma`` of the logarithm of what ``number`` anchors leave."""

    ratio: float
    extra_s: float
    sigma: float
    number: int


def _fit(seen: Sequence[_Found], is_product: bool) -> _Fit:
    """Non-negative least squares of relative errors."""
    seconds, priced, times = (np.array([getattr(f, name) for f in seen]) for name in ("seconds", "priced", "times"))
    rows, target = [np.stack([priced, times], axis=1) / seconds[:, None]], [np.ones(len(seen))]
    if is_product:
        rows.append(np.array([[NOISE / RATIO_SIGMA, 0.0]]))
        target.append(np.array([NOISE / RATIO_SIGMA]))
    matrix = np.concatenate(rows)
    if np.ptp(times / priced) < 0.2 * np.max(times / priced) and not is_product:
        matrix[:, 1] = 0.0
    ratio, extra = _not_negative(matrix, np.concatenate(target))
    left = np.log((ratio * priced + extra * times) / seconds)
    return _Fit(float(max(ratio, 1e-3)), float(extra), max(LEAST_SIGMA, float(np.sqrt(np.mean(left**2)))), len(seen))


def _not_negative(matrix: np.ndarray, target: np.ndarray) -> tuple[float, float]:
    """The two factors, neither below zero, whose combination of the columns is nearest to ``target``."""
    best = (np.inf, 0.0, 0.0)
    for used in ([0, 1], [0], [1]):
        part = np.linalg.lstsq(matrix[:, used], target, rcond=None)[0]
        if (part >= 0).all():
            both = np.zeros(2)
            both[used] = part
            best = min(best, (float(np.sum((matrix @ both - target) ** 2)), float(both[0]), float(both[1])))
    return best[1], best[2]
