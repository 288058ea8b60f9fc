"""Which terms make one run slower than another, and who measured each? (Two breakdowns side by side, for the same tokens.)"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from moesim.evaluate import Evaluator
from moesim.program import Program

SCHEDULE = "order of the schedule; no measurement"


@dataclass(frozen=True)
class Difference:
    """One role: seconds of a step in either run (the second scaled to the first one's tokens a GPU), and the source that prices it."""

    role: str
    first_s: float
    second_s: float
    source: str

    @property
    def excess_s(self) -> float:
        return self.first_s - self.second_s


@dataclass(frozen=True)
class Comparison:
    """All roles, largest difference first; ``excess_s`` of all adds up to the predicted gap. measured_gap_s, unexplained_s: from
    measured tokens/s/GPU of both runs, None where they are not given."""

    first: str
    second: str
    differences: tuple[Difference, ...]
    measured_gap_s: float | None

    @property
    def predicted_gap_s(self) -> float:
        return sum(d.excess_s for d in self.differences)

    @property
    def unexplained_s(self) -> float | None:
        return None if self.measured_gap_s is None else self.measured_gap_s - self.predicted_gap_s


def compare(first: tuple[Evaluator, str], second: tuple[Evaluator, str], measured: tuple[float, float] | None = None) -> Comparison:
    """Two (evaluator, layout text) played and set against each other; ``measured``: tokens/s/GPU of both."""
    (one, a), (other, b) = ((evaluator, evaluator.played(evaluator.legal(text))) for evaluator, text in (first, second))
    tokens = [e.scenario.workload.global_batch_tokens / e.num_gpus for e in (one, other)]
    scale = tokens[0] / tokens[1]
    sources = _sources(other, other.program(b.layout)) | _sources(one, one.program(a.layout))
    rows = [Difference(role, a.breakdown.get(role, 0.0), b.breakdown.get(role, 0.0) * scale, sources.get(_bare(role), SCHEDULE))
            for role in dict.fromkeys([*a.breakdown, *b.breakdown])]
    gap = None if measured is None else tokens[0] / measured[0] - tokens[0] / measured[1]
    names = [f"{e.scenario.name} [{p.layout}]" for e, p in ((one, a), (other, b))]
    return Comparison(names[0], names[1], tuple(sorted(rows, key=lambda d: -abs(d.excess_s))), gap)


def _bare(role: str) -> str:
    """The role itself, without what the breakdown says of where it stands."""
    for prefix in ("end of step ", "exposed "):
        role = role.removeprefix(prefix)
    return role


def _sources(evaluator: Evaluator, program: Program) -> dict[str, str]:
    """role -> profile term that prices most of it, with its provenance and first source."""
    seconds: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for body in (*program.bodies, *program.epilogue):
        for task in body:
            for role, term, part in task.terms:
                seconds[role][term] += part
    profile = evaluator.profile
    out = {}
    for role, terms in seconds.items():
        term = profile.term(max(terms, key=terms.get))
        out[role] = f"{term.name}, {term.provenance}: {term.sources[0]}"
    stack = evaluator.stack
    out["host"] = f"{stack.name} launches: {stack.sources.get('launches_moe', stack.name)}; {profile.host.sources[0]}"
    out["between_steps"] = f"{stack.name}: {stack.sources.get('end_of_step_s', stack.name)}"
    out["contention"] = "co-run factors: " + ", ".join(dict.fromkeys(g.source for g in profile.gammas))
    return out
