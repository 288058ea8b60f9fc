"""Why did a family of layouts lose, and what would turn that round? Why does a measurement differ from the prediction?

A family is one value of one axis ("ep32", "zero3", "rc:full"). Its best layout is compared with the winner cause by cause; the
flip is the smallest change of one cause, as a factor, that would make the family's best as fast as the winner, or of memory that
would make it fit. A factor on a collective is read as the share of today's cost it would have to come down to.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from moesim import engine
from moesim.evaluate import Evaluator, critical_rank, grouped
from moesim.plan import Candidate, Rejection
from moesim.timeline import breakdown

FAMILY_FIELDS = ("pp", "vpp", "tp", "cp", "ep", "etp", "zero", "reshard", "mb", "schedule", "recompute", "dispatcher", "overlap", "precision", "graphs")
GIB = 2.0**30
TIE = 0.01
"""Families within this share of the winner's step are not called slower."""
MAX_FAMILIES = 24
CHEAPEST = {
    "exposed dispatch": "expert all-to-all", "exposed combine": "expert all-to-all", "exposed send": "pipeline sends", "exposed grad_reduce": "gradient reduction",
    "exposed param_gather": "weight gathers", "exposed tp_gather": "tensor-parallel gathers", "exposed tp_scatter": "tensor-parallel scatters",
    "exposed cp_gather": "context-parallel gathers", "pipeline bubble": "pipeline bubble", "recompute": "recompute", "host": "host launches", "end of step": "end of the step",
    "contention": "contention",
}


def explain(evaluator: Evaluator, space, screened, fits: np.ndarray, found, winner: Candidate | None) -> list[Rejection]:
    """One line for each family that the winner does not belong to, worst cases last; illegal combinations first."""
    out = [Rejection("not legal", count, reason, "", "") for reason, count in sorted(space.dropped.items(), key=lambda item: -item[1])]
    best_s = np.array([found.engine.get(i, found.path.get(i, np.nan)) for i in range(len(space))])
    known = np.where(np.isnan(best_s), screened.bound_s, best_s)
    families = []
    for field in FAMILY_FIELDS:
        if len(space.values[field]) < 2:
            continue
        for code, value in enumerate(space.values[field]):
            rows = np.flatnonzero(space.codes[field] == code)
            if len(rows):
                families.append((field, value, rows))
    played: dict[int, dict[str, float]] = {}
    for field, value, rows in families[:MAX_FAMILIES * 2]:
        rejection = _family(evaluator, space, screened, fits, known, winner, field, value, rows, played)
        if rejection:
            out.append(rejection)
    return out


def _family(evaluator, space, screened, fits, known, winner, field, value, rows, played) -> Rejection | None:
    name = family_name(field, value)
    fitting = rows[fits[rows]]
    if not len(fitting):
        return _too_big(evaluator, space, screened, name, rows)
    if winner is None:
        return None
    row = int(fitting[known[fitting].argmin()])
    slower = known[row] / winner.step_s - 1.0
    if slower <= TIE:
        return None
    example = space.layout(row)
    where = _causes(evaluator, example, row, played)
    return Rejection(name, len(rows), *_slower(where, grouped(winner.breakdown), sum(where.values()), winner.step_s, str(example)))


def _causes(evaluator: Evaluator, layout, row: int, played: dict[int, dict[str, float]]) -> dict[str, float]:
    if row not in played:
        program = evaluator.program(layout)
        played[row] = grouped(breakdown(engine.run(program), critical_rank(program)))
    return played[row]


def _too_big(evaluator: Evaluator, space, screened, name: str, rows: np.ndarray) -> Rejection:
    row = int(rows[screened.peak_bytes[rows].argmin()])
    layout = space.layout(row)
    peak = evaluator.peak(layout)
    over = peak.total - evaluator.budget_bytes
    largest = max(peak.categories, key=peak.categories.get)
    return Rejection(name, len(rows), f"does not fit: at least {peak.total / GIB:.1f} GiB against {evaluator.budget_bytes / GIB:.1f} GiB; most of it {largest} ({peak.categories[largest] / GIB:.1f} GiB)",
                     str(layout), f"fits with {over / GIB:.1f} GiB more a GPU, or with its {largest} cut to {100 * max(0.0, 1 - over / peak.categories[largest]):.0f}%")


def _slower(where: dict[str, float], winner: dict[str, float], step_s: float, best_s: float, example: str) -> tuple[str, str, str]:
    """(reason, example, flip)."""
    excess = {cause: seconds - winner.get(cause, 0.0) for cause, seconds in where.items()}
    worst = max(excess, key=excess.get)
    slower = step_s / best_s - 1.0
    reason = f"{100 * slower:.1f}% slower; {CHEAPEST.get(worst, worst)} costs {100 * excess[worst] / best_s:.1f}% of a step more"
    return reason, example, _flip(where, excess, step_s - best_s)


def _flip(where: dict[str, float], excess: dict[str, float], lost: float) -> str:
    """The one cause that needs to shrink least, if any single one can make up for what is lost."""
    able = {cause: lost / where[cause] for cause in where if where[cause] > lost and excess[cause] > 0}
    if not able:
        return "no single cause makes up for it"
    cause = min(able, key=able.get)
    return f"wins if its {CHEAPEST.get(cause, cause)} cost {100 * (1 - able[cause]):.0f}% of what they do now"


def family_name(field: str, value: Any) -> str:
    """A family in the tokens of the layout text."""
    if field == "overlap":
        rules, prefetch = value
        return "ov:" + ("+".join(f"fsdp{prefetch}" if r == "fsdp" else r for r in rules) or "none")
    if field == "recompute":
        return "rc:" + ("+".join(value) or "none")
    if field == "reshard":
        return "reshard" if value else "noreshard"
    if field == "graphs":
        return f"graph:{value}"
    return str(value) if isinstance(value, str) else f"{field}{value}"


def compare_measured(evaluator: Evaluator, candidates: list[Candidate], measured: float | None) -> dict[str, Any] | None:
    """Is a measured speed (tokens/s/GPU) inside the band of the pinned layout, or else of the winner? Which single cause, scaled by
    which factor, would explain the difference?"""
    if measured is None or not candidates:
        return None
    c = next((x for x in candidates if x.pinned), candidates[0])
    step = evaluator.scenario.workload.global_batch_tokens / measured / evaluator.num_gpus
    more = step - c.step_s
    causes = [{"cause": cause, "seconds": seconds, "factor": 1 + more / seconds} for cause, seconds in grouped(c.breakdown).items() if seconds > 0 and 1 + more / seconds > 0]
    causes.sort(key=lambda item: abs(np.log(item["factor"])))
    return {"tokens_per_s_per_gpu": measured, "layout": c.layout, "predicted": c.tokens_per_s_per_gpu, "low": c.low, "high": c.high, "inside": c.low <= measured <= c.high,
            "ratio": measured / c.tokens_per_s_per_gpu, "explanations": causes[:5]}
