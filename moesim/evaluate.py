"""What does one layout do? (Program, step time, memory, breakdown, provenance and interval of a single layout.)"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass
from functools import cached_property
from typing import Iterable

import numpy as np

from moesim import engine, memory, origins, paths
from moesim.assembly import GRAD_BYTES, Assembler
from moesim.layout import Layout, LayoutError, illegal, num_microbatches, parse_layout
from moesim.model_error import ModelError, load_model_error
from moesim.parts import HEADS, Parts, layer_parts
from moesim.plan import Candidate, Skewed
from moesim.profile import load_profile
from moesim.program import COMM, COMPUTE, Body, Program
from moesim.schedules import SCHEDULES
from moesim.screen import item_names, structure_of
from moesim.space import canonical
from moesim.site import NEUTRAL, NOISE, Site
from moesim.stack import load_stack
from moesim.timeline import breakdown
from moesim.uncertainty import Uncertainty

NUM_DRAWS = 64
ONE = np.ones(1)
Z_80 = 1.2816
"""90% quantile of the standard normal distribution."""
LEAST_SPREAD = 1e-5
"""Part of ln(step) below which a cause is left out of what a candidate says."""


@dataclass(frozen=True)
class Peak:
    """Memory of one layout: bytes by category on the heaviest pipeline rank, and that rank."""

    categories: dict[str, float]
    rank: int

    @property
    def total(self) -> float:
        return sum(self.categories.values())


@dataclass(frozen=True)
class Played:
    """What the engine said of one layout: step_s seconds, breakdown role -> seconds on the critical rank."""

    layout: Layout
    step_s: float
    breakdown: dict[str, float]


@dataclass(frozen=True)
class Quick:
    """tokens/s/GPU with its 80% interval, peak bytes of the heaviest rank, and whether they fit; price_sigma: standard deviation of
    ln(step) from whole errors of prices alone."""

    tokens_per_s_per_gpu: float
    low: float
    high: float
    peak_bytes: float
    fits: bool
    price_sigma: float


class Evaluator:
    """Predictions for one scenario. ``profile`` and ``stack`` are loaded objects; all layouts share the priced parts."""

    def __init__(self, scenario, profile=None, stack=None, model_error: ModelError | None = None, site: Site = NEUTRAL,
                 parts: Parts | None = None):
        self.scenario, self.site = scenario, site
        self.profile = profile if profile is not None and not isinstance(profile, str) else load_profile(profile or scenario.profile or scenario.cluster.gpu.profile)
        self.stack = stack or load_stack(scenario.stack)
        self.model_error = model_error or load_model_error()
        self.parts = parts or Parts(scenario.model, scenario.cluster, scenario.workload, self.stack, self.profile, site)
        self.assembler = Assembler(self.parts)

    @cached_property
    def skewed(self) -> "Evaluator":
        """The same under the scenario's stated routing skew."""
        workload = self.scenario.workload.model_copy(update={"routing": self.scenario.workload.skew})
        return Evaluator(self.scenario.model_copy(update={"workload": workload}), self.profile, self.stack, self.model_error, self.site)

    @property
    def is_anchored(self) -> bool:
        """Did steps of this very place refit its constants: a site's runs, or the anchors of a machine's own profile?"""
        return bool(self.site.anchors or self.profile.in_step)

    @property
    def num_gpus(self) -> int:
        return self.scenario.cluster.num_gpus

    @property
    def budget_bytes(self) -> float:
        """Peak bytes a layout may have: HBM less the runtime's reserve, over one plus the margin."""
        s = self.scenario
        return (s.cluster.gpu.hbm_bytes - s.runtime_reserve_bytes) / (1.0 + s.memory.margin)

    def legal(self, text_or_layout) -> Layout:
        """A layout that this scenario can run. LayoutError says in one line why it can't."""
        layout = parse_layout(text_or_layout) if isinstance(text_or_layout, str) else text_or_layout
        reason = illegal(layout, self.scenario.model, self.scenario.workload, self.num_gpus)
        if reason:
            raise LayoutError(f"layout {str(text_or_layout)!r}: {reason}")
        return canonical(layout, num_microbatches(layout, self.scenario.workload))

    def program(self, layout: Layout) -> Program:
        return self.assembler.program(layout)

    def tokens_per_s(self, step_s: float) -> float:
        """Tokens a second a GPU."""
        return self.scenario.workload.global_batch_tokens / step_s / self.num_gpus

    def peak(self, layout: Layout) -> Peak:
        """Memory at the worst moment of the heaviest pipeline rank."""
        categories = self.categories(layout)
        rank = int(memory.total(categories)[0].argmax())
        return Peak({name: float(values[0, rank]) for name, values in categories.items()}, rank)

    def categories(self, layout: Layout) -> dict[str, np.ndarray]:
        """Category -> bytes [1, pp] at each pipeline rank's worst moment."""
        items = item_names(self.scenario.model)
        structure = structure_of(self.scenario.model, layout, num_microbatches(layout, self.scenario.workload), items)
        return memory.peak(self._items(layout, items), self._policy(layout), structure, self.scenario.memory.allocator_slack)

    def _items(self, layout: Layout, items) -> memory.Items:
        columns: dict[str, list[float]] = defaultdict(list)
        for item in items:
            found = [self.parts.get(name, layout) for name in layer_parts(item, self.scenario.model)]
            columns["dense"].append(sum(p.dense_params for p in found))
            columns["expert"].append(sum(p.expert_params for p in found))
            columns["saved"].append(sum(p.saved for p in found))
            columns["logits"].append(sum(p.saved for p in found if p.key.name in HEADS))
            columns["transient"].append(max(p.transient for p in found))
            columns["buffer"].append(max(p.buffer for p in found))
        return memory.Items(**{name: np.array([values], dtype=float) for name, values in columns.items()})

    def _policy(self, layout: Layout) -> memory.Policy:
        one = lambda value: np.array([value])  # noqa: E731
        return memory.Policy(
            one(layout.zero), one(layout.reshard), one(GRAD_BYTES[layout.grad]), one(memory.MOMENT_BYTES[layout.optimizer]), one(layout.groups["shard"].size),
            one(layout.edp), one(layout.prefetch), one(memory.persistent_buffers(layout)), one(float(layout.overlaps("ep"))),
            self.stack.fsdp_every_stage, one(num_microbatches(layout, self.scenario.workload)),
        )

    @cached_property
    def uncertainty(self) -> Uncertainty:
        """Errors of op prices and of the stack's factors, and what they have in common."""
        return Uncertainty(self.parts, self.model_error.prices if self.parts.is_fitted else 1.0, self.model_error.factors)

    def sigma_model(self, shares: dict[str, float]) -> float:
        """Standard deviation of ln(step) that the model itself adds, for these provenance shares."""
        if self.profile.in_step and not self.site.anchors:
            return max(NOISE, self.model_error.anchored)  # its draws are of prices fitted here: what is left is what one run is off by
        return self.model_error.sigma(shares, self.is_anchored, self.parts.is_fitted)

    def interval(self, program: Program, step_s: float, shares: dict[str, float]) -> tuple[float, float]:
        """80% interval of tokens/s/GPU: draws of all causes of error through the longest path, widened by the model's own error (log-normal)."""
        return self._band(self.sigma_step([program], self.spread([program])), step_s, shares)

    def sigma_step(self, programs: list[Program], spread: dict[str, float], weights: np.ndarray = ONE) -> float:
        """Standard deviation of ln(step) from all causes of error, of the step that ``programs`` stand for. To first order that is the
        length of its ``spread``; draws through the longest path say by how much it is more or less, each beside its own first order, so
        that few are needed (NUM_DRAWS are known to 1% where kernels bind, to 7% where launches do). Draws are the same for every layout."""
        if not spread:
            return 0.0
        causes = [self.uncertainty.at[cause] for cause in spread]
        normals = self.uncertainty.draws(self.scenario.seed, NUM_DRAWS)
        first_order = normals[:, causes] @ np.array(list(spread.values()))
        return math.hypot(*spread.values()) * float(np.std(self._logs(programs, weights, normals)) / np.std(first_order))

    def price_sigma(self, spread: dict[str, float]) -> float:
        """Of a step's ``spread``: what prices alone leave, with their errors whole."""
        unsure = self.uncertainty
        return math.hypot(*(x for cause, x in spread.items() if unsure.of_prices[unsure.at[cause]])) / (unsure.share or 1.0)

    def spread(self, programs: list[Program], weights: np.ndarray = ONE) -> dict[str, float]:
        """Cause of error -> change of ln(step) for one standard deviation of it (half of the way from -1 to +1), largest first, of the
        step that ``programs`` stand for."""
        causes = self.uncertainty.causes
        loads = [row for p in programs for row in self.uncertainty.loads(self.uncertainty.named(p)).values()]
        used = np.flatnonzero(np.any([np.abs(row) > LEAST_SPREAD for row in loads], axis=0))
        unit = np.eye(len(causes))[used]
        up, down = np.split(self._logs(programs, weights, np.concatenate([unit, -unit])), 2)
        found = {causes[i]: float(change) for i, change in zip(used, (up - down) / 2) if abs(change) > LEAST_SPREAD}
        return dict(sorted(found.items(), key=lambda item: -abs(item[1])))

    def _logs(self, programs: list[Program], weights: np.ndarray, normals: np.ndarray) -> np.ndarray:
        """ln(step) [D] under each row of ``normals``."""
        return np.log(sum(w * self._drawn(p, normals) for w, p in zip(weights, programs)))

    def _drawn(self, program: Program, normals: np.ndarray) -> np.ndarray:
        named = self.uncertainty.named(program)
        return paths.step_draws(named, self.uncertainty.factors(named, normals))

    def _band(self, sigma_step: float, step_s: float, shares: dict[str, float]) -> tuple[float, float]:
        sigma = math.hypot(sigma_step, self.sigma_model(shares))
        centre = self.tokens_per_s(step_s)
        return centre * math.exp(-Z_80 * sigma), centre * math.exp(Z_80 * sigma)

    def provenance(self, program: Program) -> dict[str, float]:
        """Share of the priced seconds (all pipeline ranks, all streams) by provenance class of the ops."""
        seconds: dict[str, float] = defaultdict(float)
        for _, subject, part in origins.issued(program, self.parts):
            seconds[origins.provenance(subject, self.parts)] += part
        return origins.shares(seconds)

    def sources(self, program: Program, where: Iterable[str]) -> dict[str, dict[str, float]]:
        """Part of a breakdown -> provenance class -> share of the seconds behind it."""
        return origins.of_parts(program, self.parts, where)

    def quick(self, layout: Layout) -> Quick:
        """Speed, interval and memory of one layout, without spans, breakdown or skew. A long schedule repeats itself: its step
        is extended along the line through two runs of fewer microbatches."""
        weights, programs = self.samples(layout)
        step_s = self.step_seconds(weights, programs)
        spread = self.spread(programs, weights)
        low, high = self._band(self.sigma_step(programs, spread, weights), step_s, self.provenance(programs[-1]))
        peak = self.peak(layout).total
        return Quick(self.tokens_per_s(step_s), low, high, peak, peak <= self.budget_bytes, self.price_sigma(spread))

    @staticmethod
    def step_seconds(weights: np.ndarray, programs: list[Program]) -> float:
        """Seconds of the step that ``samples`` stand for, in the engine."""
        return float(weights @ [engine.run(p, spans=False).makespan for p in programs])

    def samples(self, layout: Layout) -> tuple[np.ndarray, list[Program]]:
        """Programs of few microbatches and what the seconds of each weigh in the seconds of the step."""
        counts = self._few(layout)
        return self._weights(layout, counts), [self._with_microbatches(layout, count).program(layout) for count in counts]

    def _few(self, layout: Layout) -> tuple[int, ...]:
        """Counts of microbatches to play: the layout's own where that is few, else two that fill its pipeline and its launch queue."""
        own, legal = num_microbatches(layout, self.scenario.workload), SCHEDULES[layout.schedule].legal
        counts = [m for m in range(max(4, layout.pp), own) if layout.pp == 1 or legal(layout.pp, m, layout.vpp) is None]
        later = [m for m in counts if m >= counts[0] + max(2, layout.pp)]
        return (counts[0], later[0]) if later else (own,)

    def _weights(self, layout: Layout, counts: tuple[int, ...]) -> np.ndarray:
        """What seconds of runs of ``counts`` microbatches weigh in those of all: the line through two."""
        if len(counts) == 1:
            return np.ones(1)
        further = (num_microbatches(layout, self.scenario.workload) - counts[0]) / (counts[1] - counts[0])
        return np.array([1.0 - further, further])

    def _with_microbatches(self, layout: Layout, count: int) -> "Evaluator":
        """The same with so many microbatches of ``layout`` a step."""
        tokens = count * layout.dp * layout.mb * self.scenario.workload.seq_len
        if tokens == self.scenario.workload.global_batch_tokens:
            return self
        workload = self.scenario.workload.model_copy(update={"global_batch_tokens": tokens})
        return self.for_scenario(self.scenario.model_copy(update={"workload": workload}))

    def for_scenario(self, scenario) -> "Evaluator":
        """An evaluator of a scenario that differs in its global batch only: both use the same priced parts."""
        other = Evaluator(scenario, self.profile, self.stack, self.model_error, self.site, self.parts.for_batch(scenario.workload))
        other.uncertainty = self.uncertainty
        return other

    def played(self, layout: Layout) -> Played:
        """One layout in the engine: seconds of the step and where they go on the critical rank."""
        program = self.program(layout)
        timeline, rank = engine.run(program), critical_rank(program)
        return Played(layout, timeline.makespan, breakdown(timeline.of_rank(rank), rank))

    def candidate(self, played: Played, program: Program | None = None, *, with_skew: bool = True) -> Candidate:
        """Everything a plan says about one layout that was played."""
        layout, step_s, where = played.layout, played.step_s, played.breakdown
        program = program or self.program(layout)
        peak = self.peak(layout)
        shares = self.provenance(program)
        spread = self.spread([program])
        low, high = self._band(self.sigma_step([program], spread), step_s, shares)
        peak_flops = self.scenario.cluster.gpu.peak_flops.get("bf16")
        load = self.parts.load(layout)
        drop = load.drop_fraction if load else 0.0
        roles = self.scenario.model.flops_by_role(self.scenario.workload.seq_len)
        model_flops = sum(roles.values()) - drop * roles["routed_experts"]  # a dropped row is no work done
        rate = self.tokens_per_s(step_s)
        days, usd = self.cost(rate)
        return Candidate(
            layout=str(layout), tokens_per_s_per_gpu=rate, low=low, high=high, step_s=step_s, mfu=rate * model_flops / peak_flops if peak_flops else None,
            mfu_denominator=f"bf16 dense {peak_flops / 1e12:g} TFLOP/s" if peak_flops else "unknown peak", peak_bytes=peak.total, fits=peak.total <= self.budget_bytes, memory=peak.categories,
            heaviest_stage=peak.rank, breakdown=where, provenance=shares, sources=self.sources(program, where), spread=spread, limited_by=limit(where), evaluator="engine",
            num_microbatches=num_microbatches(layout, self.scenario.workload), drop_fraction=drop,
            skewed=self._skewed(layout, program, step_s) if with_skew else None, days=days, usd=usd, saved_tensors=self.parts.keeps.said(),
        )

    def _skewed(self, layout: Layout, program: Program, step_s: float) -> Skewed | None:
        if not self.scenario.model.num_experts:
            return None
        other = self.skewed
        ratio = paths.step_seconds([other.program(layout)])[0] / paths.step_seconds([program])[0]
        peak, load = other.peak(layout), other.parts.load(layout)
        return Skewed(routing_name(self.scenario.workload.skew), self.tokens_per_s(step_s * ratio), step_s * ratio, peak.total, peak.total <= self.budget_bytes,
                      load.drop_fraction)

    def cost(self, rate: float) -> tuple[float | None, float | None]:
        """(days, dollars) for the workload's tokens at ``rate`` tokens/s/GPU; None where a figure is unknown."""
        tokens, price = self.scenario.workload.tokens, self.scenario.cluster.price
        if tokens is None:
            return None, None
        seconds = tokens / (rate * self.num_gpus)
        return seconds / 86400.0, None if price is None else seconds / 3600.0 * self.num_gpus * price


def routing_name(routing) -> str:
    """Short name of a routing: "balanced", "zipf(0.15)", ..."""
    detail = {"zipf": routing.zipf_s, "dirichlet": routing.dirichlet_alpha, "histogram": routing.file}.get(routing.kind)
    return routing.kind if detail is None else f"{routing.kind}({detail})"


def critical_rank(program: Program) -> int:
    """The rank with most work, exposed communication included: the one that the others wait for."""
    busy = [_busy(body) for body in program.bodies]
    return max(range(program.num_ranks), key=lambda r: (sum(busy[k] for k in program.body_index[r]), -r))


def _busy(body: Body) -> float:
    """Seconds one entry keeps its rank: compute and the collectives between, which in a pair run beside each other."""
    compute, comm = (sum(t.seconds for t in body if t.stream == stream) for stream in (COMPUTE, COMM))
    return max(compute, comm) if any(t.input == 1 for t in body) else compute + comm


GROUPS = {
    "matrix products": ("qkv", "attn_out", "mla_down", "mla_up", "mlp_up", "mlp_down", "shared_up", "shared_down", "head", "mtp"),
    "expert products": ("expert_up", "expert_down"),
    "attention": ("core_attn",),
    "recompute": ("recompute", "exposed recompute"),
    "pipeline bubble": ("bubble",),
    "host launches": ("host",),
    "contention": ("contention",),
    "expert all-to-all": ("exposed dispatch", "exposed combine", "exposed count_exchange"),
    "expert-tensor collectives": ("exposed etp_gather", "exposed etp_scatter"),
    "tensor-parallel collectives": ("exposed tp_gather", "exposed tp_scatter", "exposed tp_loss"),
    "context-parallel gathers": ("exposed cp_gather",),
    "pipeline sends": ("exposed send",),
    "weight gathers": ("exposed param_gather", "param_copy_out"),
    "gradient reduction": ("exposed grad_reduce", "grad_copy_in"),
}


def grouped(where: dict[str, float]) -> dict[str, float]:
    """A breakdown summed into the few causes a planner can act on; what is in no group is memory-bound kernels."""
    home = {role: name for name, roles in GROUPS.items() for role in roles}
    out: dict[str, float] = defaultdict(float)
    for role, seconds in where.items():
        rest = "end of the step" if role.startswith("end of step") else "memory-bound kernels"
        out[home.get(role, rest)] += seconds
    return dict(out)


def limit(where: dict[str, float]) -> str:
    """The two largest causes with their shares, largest first."""
    total = sum(where.values()) or 1.0
    top = sorted(grouped(where).items(), key=lambda item: -item[1])[:2]
    return ", ".join(f"{name} {100 * seconds / total:.0f}%" for name, seconds in top)


