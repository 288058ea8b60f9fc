"""Why did a family of layouts lose, and what would turn that round? Why does a measurement differ from the prediction?

A family is one value of one axis ("ep32", "zero3", "rc:full"). Its best layout is compared with the winner cause by cause; the
flip is the smallest change of one cause, as a factor, that would make the family's best as fast as the winner, or of memory that
would make it fit. A factor on a collective is read as the share of today's cost it would have to come down to.
"""

from __future__ import annotations

from typing import Any, Callable, Iterator

import numpy as np

from moesim.evaluate import Evaluator, grouped
from moesim.ops import Dispatch
from moesim.plan import Candidate, Rejection
from moesim.routing import distinct_groups
from moesim.space import UNEVEN_BATCH

FAMILY_FIELDS = ("pp", "vpp", "tp", "cp", "ep", "etp", "zero", "reshard", "mb", "schedule", "recompute", "dispatcher", "overlap", "precision", "graphs")
GIB = 2.0**30
TIE = 0.01
"""Families within this share of the winner's step are not called slower."""


def not_legal(scenario, dropped: dict[str, int]) -> list[Rejection]:
    """Illegal combinations by reason, the most frequent first; a batch that does not divide says which near one always does."""
    unit = scenario.cluster.num_gpus * scenario.workload.seq_len
    batch = max(1, round(scenario.workload.global_batch_tokens / unit)) * unit
    flip = f"legal for mb1 with any dp at workload.global_batch_tokens={batch}"
    return [Rejection("not legal", count, reason, "", flip if reason == UNEVEN_BATCH and batch != scenario.workload.global_batch_tokens else "")
            for reason, count in sorted(dropped.items(), key=lambda item: -item[1])]


def explain(evaluator: Evaluator, space, screened, fits: np.ndarray, found, winner: Candidate | None, play: Callable[[list], list]) -> list[Rejection]:
    """One line for each family that the winner does not belong to; illegal combinations first. ``play`` plays layouts."""
    known = np.full(len(space), np.inf)  # a family is judged by a layout that was looked at, not by a bound
    for row, seconds in [*found.path.items(), *found.step.items()]:
        known[row] = seconds
    out = not_legal(evaluator.scenario, space.dropped)
    if not fits.any():
        out.append(_too_big(evaluator, space, screened, "every layout", np.arange(len(space))))
    losers = []
    for field, value, rows in _families(space):
        fitting = rows[fits[rows]]
        if not len(fitting):
            out.append(_too_big(evaluator, space, screened, family_name(field, value), rows))
        elif winner is not None:
            best = int(fitting[known[fitting].argmin()])
            if np.isfinite(known[best]) and known[best] / winner.step_s - 1.0 > TIE:
                losers.append((family_name(field, value), len(rows), best))
    examples = list(dict.fromkeys(row for _, _, row in losers))
    played = dict(zip(examples, play([space.layout(row) for row in examples])))
    return out + [_slower(evaluator, name, count, played[row], winner) for name, count, row in losers]


def _families(space) -> Iterator[tuple[str, Any, np.ndarray]]:
    """(axis, value, rows) of every value of every axis that has more than one."""
    for field in FAMILY_FIELDS:
        present = np.unique(space.codes[field])
        for code in present if len(present) > 1 else ():
            yield field, space.values[field][code], np.flatnonzero(space.codes[field] == code)


def _too_big(evaluator: Evaluator, space, screened, name: str, rows: np.ndarray) -> Rejection:
    row = int(rows[screened.peak_bytes[rows].argmin()])
    layout = space.layout(row)
    peak = evaluator.peak(layout)
    over = peak.total - evaluator.budget_bytes
    largest = max(peak.categories, key=peak.categories.get)
    return Rejection(name, len(rows), f"does not fit: at least {peak.total / GIB:.1f} GiB against {evaluator.budget_bytes / GIB:.1f} GiB; most of it {largest} ({peak.categories[largest] / GIB:.1f} GiB)",
                     str(layout), f"fits with {over / GIB:.1f} GiB more a GPU, or with its {largest} cut to {100 * max(0.0, 1 - over / peak.categories[largest]):.0f}%")


def _slower(evaluator: Evaluator, name: str, count: int, best, winner: Candidate) -> Rejection:
    """The family's best layout against the winner, cause by cause."""
    where, theirs = grouped(best.breakdown), grouped(winner.breakdown)
    excess = {cause: seconds - theirs.get(cause, 0.0) for cause, seconds in where.items()}
    worst = max(excess, key=excess.get)
    slower = best.step_s / winner.step_s - 1.0
    reason = f"{100 * slower:.1f}% slower; of a step, {100 * excess[worst] / winner.step_s:.1f}% more for {worst}"
    return Rejection(name, count, reason, str(best.layout), _flip(evaluator, best.layout, where, excess, best.step_s - winner.step_s))


def _flip(evaluator: Evaluator, layout, where: dict[str, float], excess: dict[str, float], lost: float) -> str:
    """The cause that is most in excess if it alone can make up for what is lost, else the one that needs to shrink least."""
    able = [cause for cause in where if where[cause] > lost and excess[cause] > 0]
    if not able:
        return "no single cause makes up for it"
    cause = max(able, key=lambda c: (excess[c] >= lost, excess[c]))
    left = 1.0 - lost / where[cause]
    return f"wins if its {cause} took {100 * left:.0f}% of today's time" + (_line_rate(evaluator, layout, left) if cause == "expert all-to-all" else "")


def _line_rate(evaluator: Evaluator, layout, left: float) -> str:
    """What that share of time means for the NICs, where tokens leave the NVLink domain: the share of line rate they hold now and
    would have to hold."""
    op = next((p.node.op for p in evaluator.parts.get("moe", layout).forward if isinstance(p.node.op, Dispatch)), None)
    cluster = evaluator.scenario.cluster
    domains = op.group.instances(cluster.domain) if op else 1
    if domains == 1 or len(cluster.tiers) < 2:
        return ""
    copies = float(distinct_groups(domains, op.num_experts, op.top_k, op.node_limit)) if op.dispatcher == "dedup" else op.top_k
    wire = op.tokens * op.hidden * op.bytes_per_element * op.kept * op.load * copies * (domains - 1) / domains
    now = wire / (cluster.tiers[1].bytes_per_s * evaluator.parts.price(op)[0])
    if now >= left:
        return "; its NICs can't: that is beyond their line rate"
    return f", its NICs holding {100 * now / left:.0f}% of line rate instead of {100 * now:.0f}%"


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
