"""What should be measured next, so that a plan is surer? (Value of information of an op, or of one run, over errors that layouts share.)

    advice(evaluator, candidates)["measure"][0]     the op, as a line for the trainer's bench, with what it would gain and why

To first order ln(step) of a candidate is its point plus its spread (Candidate.spread) times the causes of `moesim.uncertainty`, standard
normals that all candidates share. Timing an op tells its own loading on those causes, but for what shows only inside a step, and noise. So
what is known afterwards is a normal distribution too, and three figures follow without a draw: how much of the winner's variance goes,
how often another candidate would come out first, and by how much the step is then expected to be shorter (the expected value of sample
information: Raiffa & Schlaifer 1961; of one normal observation, Frazier, Powell & Dayanik 2009, https://doi.org/10.1287/ijoc.1080.0314).
Several measurements are chosen one after the other, each in view of those before, so that a term is not asked about twice.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from dataclasses import dataclass
from typing import Any, Sequence

import numpy as np

from moesim.evaluate import Z_80, Evaluator
from moesim.layout import parse_layout
from moesim.measurement import op_fields
from moesim.ops import Op
from moesim.part import kind_of
from moesim.plan import Candidate
from moesim.program import Program
from moesim.step_ops import step_ops
from moesim.site import MODEL_SIGMA
from moesim.site import NOISE as RUN_NOISE

NOISE = 0.025
"""Relative error of one measurement: repeats of published runs and kernels differ by 1 to 2.5% at the median."""
IN_STEP = ("sustained", "attention", "in step")
"""Causes that show inside a step only: timing an op alone tells nothing of them, a run does."""
OWN_SHARE = 0.5
"""Part of the model's variance that two layouts of one site do not share (assumed, as in the ties of a ranking)."""
NUM_RIVALS = 3
"""Candidates whose ops can be asked for: the winner and those next to it."""
CHANGES = 0.05
"""Probability that the winner changes from which a measurement is chosen for the ranking; below it, for the winner's interval."""
SETTLED = 1e-3
"""Share of the step below which nothing is left to win by choosing another layout."""
LEAST_SHARE = 0.005
"""Part of the winner's variance that an op must hold to be named."""
ALIKE = 0.02
"""Ops of one term tell nearly the same: of those within this of the best, that with most seconds in the winner is measured."""
NARROWER = 0.995
"""An interval's end that moves by less than half a percent has not moved."""
NUM_WORLDS = 4096
_Z = np.linspace(-6.0, 6.0, 1201)
_WEIGHTS = np.exp(-(_Z**2) / 2) / np.exp(-(_Z**2) / 2).sum()


@dataclass(frozen=True)
class Beliefs:
    """Rows of loadings on causes that are still unknown: ``steps`` [K, C] of candidates (the winner first) with the logarithms of their
    seconds ``points`` [K], and ``ops`` [N, C] as a measurement would show them, with a relative ``noise``."""

    steps: np.ndarray
    points: np.ndarray
    ops: np.ndarray
    noise: float = NOISE


def told(beliefs: Beliefs, loading: np.ndarray) -> Beliefs:
    """What is left once something with this loading was measured (Potter's square-root update: Bierman 1977, II.6)."""
    total = loading @ loading + beliefs.noise**2

    def left(rows: np.ndarray) -> np.ndarray:
        return rows - np.outer(rows @ loading, loading) / (total + beliefs.noise * math.sqrt(total))

    return dataclasses.replace(beliefs, steps=left(beliefs.steps), ops=left(beliefs.ops)) if total > 0 else beliefs


def explained(beliefs: Beliefs, loadings: np.ndarray) -> np.ndarray:
    """Variance of ln(step) that each measurement would remove, [N, K]."""
    return (loadings @ beliefs.steps.T) ** 2 / np.maximum((loadings**2).sum(axis=1) + beliefs.noise**2, 1e-300)[:, None]


def decided(beliefs: Beliefs, loadings: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(probability that another candidate than the first comes out best, by which share of the step that is expected to be shorter), [N]
    each. After a measurement the expected ln(step) of candidate k is points[k] + slope[k] z, with one standard normal z."""
    slopes = (loadings @ beliefs.steps.T) / np.sqrt(np.maximum((loadings**2).sum(axis=1) + beliefs.noise**2, 1e-300))[:, None]
    lines = beliefs.points[:, None] + slopes[:, :, None] * _Z
    best = lines.min(axis=1)
    return ((best < lines[:, 0] - 1e-12) @ _WEIGHTS, (lines[:, 0] - best) @ _WEIGHTS)


def in_turn(beliefs: Beliefs, weights: np.ndarray, seconds: np.ndarray, count: int, ranking: bool = False) -> list[tuple[int, Beliefs]]:
    """(op, what is believed before it is measured) of the ``count`` best, each in view of those before. Best: removing most of the variance
    of the steps, weighed; or, for the ``ranking``, shortening the step most while that can be. ``seconds`` [N] decide between ops that tell the same."""
    chosen: list[tuple[int, Beliefs]] = []
    free = np.ones(len(seconds), dtype=bool)
    while free.any() and len(chosen) < count:
        score = decided(beliefs, beliefs.ops)[1] if ranking else np.zeros(len(seconds))
        if score[free].max() < SETTLED:
            score = explained(beliefs, beliefs.ops) @ weights
        near = free & (score >= (1 - ALIKE) * score[free].max())
        pick = int(np.flatnonzero(near)[seconds[near].argmax()])
        chosen.append((pick, beliefs))
        free[pick] = False
        beliefs = told(beliefs, beliefs.ops[pick])
    return chosen


# --- ops of programs -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Asked:
    """An op that can be measured: its count is of launches a step on the pipeline rank with most of them."""

    op: Op
    count: int
    seconds: float
    term: str
    provenance: str
    sms: int

    @property
    def line(self) -> dict[str, Any]:
        """As `moesim ops` writes it."""
        return {**op_fields(self.op), "class": kind_of(self.op), "predicted_s": self.seconds, "term": self.term, "provenance": self.provenance,
                "sms": self.sms, "count": self.count}


def launches(evaluator: Evaluator, program: Program) -> Counter[Op]:
    """Priced op -> launches a step on the pipeline rank that launches it most."""
    most: Counter = Counter()
    for rank in step_ops(program):
        found: Counter = Counter()
        for issued, times in rank.items():
            op, each = evaluator.parts.kernel(issued.op)
            found[op] += times * each
        most |= found
    return most


def asked(evaluator: Evaluator, programs: Sequence[Program]) -> list[Asked]:
    """Every op of some programs, with the largest of its counts; those that take no time are left out."""
    most: Counter = Counter()
    for program in programs:
        most |= launches(evaluator, program)
    found = []
    for op, count in most.items():
        seconds, _, _, sms, term, provenance = evaluator.parts.price(op)
        if seconds > 0:
            found.append(Asked(op, count, seconds, term, provenance, sms))
    return found


def seen_alone(evaluator: Evaluator, ops: Sequence[Asked]) -> np.ndarray:
    """[N, C] what timing each op would tell: nothing of what shows inside a step only, and nothing new where it was measured already."""
    rows = np.array([evaluator.uncertainty.alone(a.op, IN_STEP) for a in ops]).reshape(len(ops), len(evaluator.uncertainty.causes))
    rows[[a.provenance == "measured" for a in ops]] = 0.0
    return rows


def step_rows(evaluator: Evaluator, spreads: Sequence[dict[str, float]]) -> np.ndarray:
    """Spreads as rows [K, C] over the causes of a profile."""
    rows = np.zeros((len(spreads), len(evaluator.uncertainty.causes)))
    for row, spread in zip(rows, spreads):
        for cause, change in spread.items():
            row[evaluator.uncertainty.at[cause]] = change
    return rows


def gains(evaluator: Evaluator, programs: Sequence[Program], steps_s: Sequence[float], ops: Sequence[Asked]) -> list[float]:
    """Seconds by which measuring each op, in the best order, would narrow one standard deviation of the steps (root mean square over the
    programs). They add up to all that measuring could remove."""
    steps = np.array(steps_s)[:, None] * step_rows(evaluator, [evaluator.spread([p]) for p in programs])
    beliefs = Beliefs(steps, np.zeros(len(steps)), seen_alone(evaluator, ops))
    weights, carried = np.full(len(steps), 1.0 / len(steps)), np.array([a.count * a.seconds for a in ops])
    left = math.sqrt(float(((steps**2).sum(axis=1)) @ weights))
    out = [0.0] * len(ops)
    for pick, before in in_turn(beliefs, weights, carried, len(ops)):
        removed = float(explained(before, before.ops[[pick]])[0] @ weights)
        after = math.sqrt(max(left**2 - removed, 0.0))
        out[pick], left = left - after, after
    return out


# --- advice ----------------------------------------------------------------------------------------------------------------------


def advice(evaluator: Evaluator, candidates: Sequence[Candidate], count: int = 1, noise: float = NOISE) -> dict[str, Any] | None:
    """What to measure next for the first of ``candidates``, JSON-ready: ``measure`` holds up to ``count`` lines for the trainer's bench,
    ``anchor`` what one run would do instead; ``noise``: relative error of one measurement. None where nothing fits."""
    fitting = [c for c in candidates if c.fits]
    if not fitting:
        return None
    winner, rows = fitting[0], step_rows(evaluator, [c.spread for c in fitting])
    ops = asked(evaluator, [evaluator.program(parse_layout(c.layout)) for c in fitting[:NUM_RIVALS]])
    beliefs = Beliefs(rows, np.log([c.step_s for c in fitting]), seen_alone(evaluator, ops), noise)
    for_ranking = len(fitting) > 1 and bool(ops) and decided(beliefs, beliefs.ops)[0].max() >= CHANGES
    band = Band(winner, float(rows[0] @ rows[0]), evaluator.sigma_model(winner.provenance))
    carried = np.array([a.count * a.seconds for a in ops])
    chosen = in_turn(beliefs, np.eye(len(fitting))[0], carried, count, for_ranking)
    lines = [_line(ops[pick], before, before.ops[pick], band) for pick, before in chosen]
    lines = [line for line in lines if line["variance_share"] >= LEAST_SHARE or line["regret_removed"] >= (1 - ALIKE) * SETTLED]
    anchor, host = _anchor(evaluator, band), _host(evaluator, beliefs, band)
    wrong, regret = chances(fitting, rows, [evaluator.sigma_model(c.provenance) for c in fitting])
    return {"winner": winner.layout, "goal": "ranking" if for_ranking else "interval", "sigma_prices": band.prices, "sigma_model": band.model,
            "another_is_best": wrong, "expected_regret": regret, "measure": lines, "anchor": anchor, "host": host,
            "text": _text(lines, anchor, host, band)}


@dataclass(frozen=True)
class Band:
    """Interval of the winner as its two parts: ``variance`` of ln(step) from prices, and the model's own sigma."""

    winner: Candidate
    variance: float
    model: float

    @property
    def prices(self) -> float:
        """Standard deviation from prices, as the winner's interval has it (its draws, not the first order)."""
        whole = math.log(self.winner.high / self.winner.low) / (2 * Z_80)
        return math.sqrt(max(whole**2 - self.model**2, 0.0))

    def after(self, removed: float, model: float | None = None) -> tuple[float, float]:
        """Interval in tokens/s/GPU once ``removed`` of the variance is gone."""
        left = self.prices * math.sqrt(max(1.0 - removed / self.variance, 0.0)) if self.variance > 0 else 0.0
        wide = math.exp(Z_80 * math.hypot(left, self.model if model is None else model))
        return self.winner.tokens_per_s_per_gpu / wide, self.winner.tokens_per_s_per_gpu * wide


def _line(a: Asked, beliefs: Beliefs, loading: np.ndarray, band: Band) -> dict[str, Any]:
    """One line of advice, given ``beliefs`` before it: gain in seconds of one standard deviation of the winner's step."""
    removed = float(explained(beliefs, loading[None])[0, 0])
    changes, shorter = (float(x[0]) for x in decided(beliefs, loading[None]))
    now = float(beliefs.steps[0] @ beliefs.steps[0])
    low, high = band.after(band.variance - now + removed)
    gain = band.winner.step_s * (math.sqrt(now) - math.sqrt(max(now - removed, 0.0)))
    share = removed / band.variance if band.variance > 0 else 0.0
    why = (f"{a.term} ({a.provenance}) holds {100 * share:.0f}% of the variance that prices leave in the winner's step; "
           f"then {low:,.0f} to {high:,.0f} tokens/s a GPU; another layout comes first with {100 * changes:.0f}%")
    return {**a.line, "words": words(a.op), "gain": gain, "variance_share": share, "low": low, "high": high, "winner_changes": changes, "regret_removed": shorter, "why": why}


def _anchor(evaluator: Evaluator, band: Band) -> dict[str, Any]:
    """What one run of the winner at this site would do: it shows its step, with all that only a step shows, through the noise of a run;
    what is left of the model's own error is what anchored predictions of published runs are off by."""
    whole = band.prices**2 + (0.0 if evaluator.site.seen else MODEL_SIGMA**2)
    left = whole * RUN_NOISE**2 / (whole + RUN_NOISE**2)
    wide = math.exp(Z_80 * math.hypot(math.sqrt(left), min(band.model, evaluator.model_error.anchored)))
    return {"layout": band.winner.layout, "low": band.winner.tokens_per_s_per_gpu / wide, "high": band.winner.tokens_per_s_per_gpu * wide}


def _host(evaluator: Evaluator, beliefs: Beliefs, band: Band) -> dict[str, float]:
    """What timing launches (the suite of the trainer's bench) would do."""
    low, high = band.after(float(explained(beliefs, evaluator.uncertainty.host_alone()[None])[0, 0]))
    return {"low": low, "high": high}


def chances(fitting: Sequence[Candidate], rows: np.ndarray, sigmas: Sequence[float], seed: int = 0) -> tuple[float, float]:
    """(probability that another candidate is really the best, share of the step that choosing the first is expected to lose), the
    part of the model's error that each layout has of its own included."""
    rng = np.random.default_rng(seed)
    own = math.sqrt(OWN_SHARE) * np.array(sigmas)
    steps = np.log([c.step_s for c in fitting]) + rng.standard_normal((NUM_WORLDS, rows.shape[1])) @ rows.T + own * rng.standard_normal((NUM_WORLDS, len(own)))
    best = steps.min(axis=1)
    return float(np.mean(best < steps[:, 0])), float(np.mean(steps[:, 0] - best))


def words(op: Op) -> str:
    """An op in a few words: its class and the fields that are not at their default."""
    shown = [f"{f.name}={getattr(op, f.name)}" for f in dataclasses.fields(op) if f.default is dataclasses.MISSING and f.name != "group"]
    group = getattr(op, "group", None)
    over = [] if group is None else [f"over {group.size}" + (f" every {group.stride}" if group.stride > 1 else "")]
    rest = [str(getattr(op, name)) for name in ("dtype", "grad", "backward") if name in op.__slots__ and getattr(op, name) not in ("none", False)]
    return " ".join([type(op).__name__, *shown, *over, *("backward" if r == "True" else r for r in rest)])


def _text(lines: Sequence[dict[str, Any]], anchor: dict[str, Any], host: dict[str, float], band: Band) -> str:
    """The first measurement and an anchor run, the better one first, and which error outweighs the other."""
    c = band.winner
    run = (f"an anchor run of {anchor['layout']} at this site would narrow {c.low:,.0f}-{c.high:,.0f} to {anchor['low']:,.0f}-{anchor['high']:,.0f} "
           "tokens/s a GPU")
    run = run if anchor["high"] < NARROWER * c.high else "no anchor run would narrow the interval"
    first = f"measure {lines[0]['words']}: {lines[0]['why']}" if lines else "none is worth measuring"
    if host["high"] < NARROWER * min([c.high, *(line["high"] for line in lines[:1])]):
        launches = f"time launches (the suite of the trainer's bench): {host['low']:,.0f} to {host['high']:,.0f} tokens/s a GPU are left"
        first = f"{launches}; then {first}" if lines else launches
    if band.model > band.prices:
        return f"the model's own error ({100 * band.model:.0f}%) outweighs that of all prices ({100 * band.prices:.0f}%): {run}; of ops, {first}"
    return f"{first}; {run}"
