"""Does a fit find parameters that are known, and as often within its own errors as it says? (Truth drawn, measurements made of it, fitted.)

Simulation-based calibration (Talts et al. 2018, https://arxiv.org/abs/1804.06788): a truth drawn from the beliefs, measurements of it with
the noise they state and a misfit they don't, a fit that starts from the beliefs. Over many draws an interval that claims 68% has to hold
68% of the truths.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Callable, Iterator, Sequence

import numpy as np

from calibration.measured_terms import beliefs
from calibration.posterior import learn
from moesim.costs import COSTS
from moesim.ops import Attention, Gemm, GroupedGemm, MemoryBound, Op
from moesim.pricing import kernel, term_name
from moesim.profile import HardwareProfile, load_profile

CLAIMS = {0.68: 0.9945, 0.95: 1.96}
"""Share of a normal distribution -> standard deviations on either side that hold it."""
TOLERANCE, TOLD = 0.03, 0.02
"""How far a share may be from its claim; share of a belief's variance below which measurements say nothing of a parameter."""
NOISE, MISFIT, OUTLIERS = (0.005, 0.03), 0.02, 0.02
"""Range of a line's own log noise, misfit beside it, and share of lines that a disturbance lengthened by half."""
BELIEF = 0.3
"""Log sigma of the truths about the known profile, and of the belief that the fit starts from."""


@dataclass(frozen=True)
class Recovered:
    """One cost model: claimed share -> share of ``trials`` (draw, parameter) held, over parameters of which measurements say something
    (which draws pin one depends on the draw, so pinned ones count as well). ``learned``: parameter -> mean share of its belief's
    variance that measurements removed."""

    kind: str
    draws: int
    lines: int
    trials: int
    held: dict[float, float]
    by_parameter: dict[str, dict[float, float]]
    learned: dict[str, float]

    @property
    def is_nominal(self) -> bool:
        """Within TOLERANCE, or two standard deviations of a share of so few trials."""
        return all(abs(self.held[claim] - claim) <= max(TOLERANCE, 2 * (claim * (1 - claim) / self.trials) ** 0.5) for claim in CLAIMS)


def recover(kind: str, draws: int = 200, seed: int = 0, *, outliers: float = OUTLIERS) -> Recovered:
    """``draws`` truths of one cost model, each measured and fitted. Deterministic. ValueError for a kind without a design."""
    if kind not in DESIGNS:
        raise ValueError(f"no cost model {kind!r} to recover: known are {', '.join(DESIGNS)}")
    profile, ops = DESIGNS[kind]()
    name = term_name(ops[0])
    term, declared = profile.term(name), COSTS[kind].PARAMETERS
    bounds = {p.name: (p.low, p.high) for p in declared}
    # A belief that a bound cuts off is no log-normal one; that parameter stays where it is.
    believed = {n: (v, BELIEF) for n, (v, _) in beliefs(term).items() if bounds[n][0] < v * np.exp(-4 * BELIEF) and v * np.exp(4 * BELIEF) < bounds[n][1]}
    fixed = {n: v for n, v in term.parameters.items() if n not in believed}
    predict, rng = kernel(kind, profile.num_sms, ops), np.random.default_rng(seed)
    inside: dict[str, list[float]] = {n: [] for n in believed}
    learned: dict[str, list[float]] = {n: [] for n in believed}
    for _ in range(draws):
        truth = {n: value * float(np.exp(sigma * rng.standard_normal())) for n, (value, sigma) in believed.items()}
        noise = rng.uniform(*NOISE, len(ops))
        seconds = predict({**fixed, **truth}) * np.exp(np.hypot(noise, MISFIT) * rng.standard_normal(len(ops)))
        seconds *= np.where(rng.random(len(ops)) < outliers, 1.5, 1.0)
        found = learn(predict, seconds, noise, declared, believed, fixed)
        for i, n in enumerate(found.names):
            learned[n].append(found.learned[n])
            inside[n].append(abs(np.log(found.parameters[n] / truth[n])) / float(np.sqrt(found.covariance[i, i])))
    share = {n: float(np.mean(v)) for n, v in learned.items()}
    told = {n: np.array(row) for n, row in inside.items() if share[n] > TOLD}
    whole = np.concatenate(list(told.values()))
    by = {n: {claim: float(np.mean(row <= z)) for claim, z in CLAIMS.items()} for n, row in told.items()}
    return Recovered(kind, draws, len(ops), len(whole), {claim: float(np.mean(whole <= z)) for claim, z in CLAIMS.items()}, by, share)


# --- what is measured of each model -------------------------------------------------------------------------------------------

SIDES = ((256, 256), (512, 256), (256, 1024), (4096, 256), (128, 4096), (8, 256))


def _cpu(ops: Sequence[Op]) -> tuple[HardwareProfile, list[Op]]:
    return load_profile("cpu_gloo"), list(ops)


def _gpu(ops: Sequence[Op]) -> tuple[HardwareProfile, list[Op]]:
    return load_profile("h200"), list(ops)


def _gemms(rows: Sequence[int], scale: int) -> Iterator[Gemm]:
    return (Gemm(m, n * scale, k * scale) for m in rows for n, k in SIDES[:-1] if k * scale > 8)


DESIGNS: dict[str, Callable[[], tuple[HardwareProfile, list[Op]]]] = {
    "core_gemm": lambda: _cpu([Gemm(m, n, k) for m in (64, 128, 256, 512, 1024, 2048) for n, k in SIDES]),
    "core_grouped_gemm": lambda: _cpu([GroupedGemm(g, float(r), n, k, grad=grad) for g in (8, 16, 64) for r in (512, 2048, 4096)
                                       for n, k in ((1024, 256), (256, 512)) for grad in ("none", "input")]),
    "core_attention": lambda: _cpu([Attention(b, h, h, s, s, d, d, s * (s + 1) / 2) for b in (1, 4, 8) for h in (2, 4, 8) for s in (128, 256, 1024) for d in (32, 64)]),
    "core_memory": lambda: _cpu([MemoryBound("norm", 2.0**p) for p in np.arange(14, 27, 0.5)]),
    "gemm": lambda: _gpu(list(_gemms((16, 64, 256, 1024, 4096, 16384, 65536), 8))),
    "grouped_gemm": lambda: _gpu([GroupedGemm(g, float(r), n, k) for g in (4, 16, 64) for r in (4096, 16384, 65536) for n, k in ((4096, 2048), (2048, 2048), (8192, 4096))]),
    "attention": lambda: _gpu([Attention(b, 32, 8, s, s, 128, 128, s * (s + 1) / 2) for b in (1, 4, 8) for s in (512, 1024, 2048, 4096, 8192, 16384)]),
    "memory_bound": lambda: _gpu([MemoryBound("norm", 2.0**p) for p in np.arange(16, 33, 0.5)]),
}


def line(found: Recovered) -> str:
    """One model in a line."""
    parts = "  ".join(f"{claim:.0%} holds {found.held[claim]:.1%}" for claim in CLAIMS)
    worst = min(found.by_parameter, key=lambda n: found.by_parameter[n][0.68])
    known = ", ".join(f"{n} {share:.0%}" for n, share in found.learned.items())
    return (f"{found.kind:20} {found.draws} draws of {found.lines} lines: {parts}  {'as claimed' if found.is_nominal else 'NOT as claimed'}; "
            f"least {worst} {found.by_parameter[worst][0.68]:.0%}; learned {known}")
