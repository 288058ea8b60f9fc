"""What does a plan say? (Candidates, rejections and the plan itself: values only, computed by ``search``.)"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

SCHEMA_VERSION = 1
UNKNOWN = "UNKNOWN"


@dataclass(frozen=True)
class Skewed:
    """The same layout under the scenario's stated routing skew."""

    routing: str
    tokens_per_s_per_gpu: float
    step_s: float
    peak_bytes: float
    fits: bool
    drop_fraction: float


@dataclass(frozen=True)
class Candidate:
    """One layout with its prediction. Seconds, bytes, tokens/s; ``low``/``high`` bound tokens_per_s_per_gpu with 80%."""

    layout: str
    tokens_per_s_per_gpu: float
    low: float
    high: float
    step_s: float
    mfu: float | None
    """None where the peak is unknown."""
    mfu_denominator: str
    peak_bytes: float
    fits: bool
    memory: dict[str, float]
    """Heaviest stage: category -> bytes; the values sum to peak_bytes."""
    heaviest_stage: int
    breakdown: dict[str, float]
    """role -> seconds of the step on the critical rank; the values sum to step_s."""
    provenance: dict[str, float]
    """provenance class -> share of the priced seconds; the values sum to 1."""
    limited_by: str
    evaluator: str
    """"engine" | "path" | "bound"."""
    num_microbatches: int
    drop_fraction: float = 0.0
    skewed: Skewed | None = None
    days: float | None = None
    usd: float | None = None
    tied: bool = False
    """Within the interval of the best: the model can't tell it from the winner."""
    pinned: bool = False
    notes: tuple[str, ...] = ()
    sources: dict[str, dict[str, float]] = field(default_factory=dict)
    """role of the breakdown -> provenance class -> share of the seconds behind it; each role's values sum to 1."""
    spread: dict[str, float] = field(default_factory=dict)
    """cause of error -> change of ln(step) for one standard deviation of it, largest first: what the interval is made of, the model's
    own error apart."""
    saved_tensors: str = ""
    """Whose kernels' saved tensors the memory counts, and how each is known (scenarios/saved_tensors.yaml)."""


@dataclass(frozen=True)
class Rejection:
    """A family of layouts that did not make it, the constraint that binds it and the cheapest change that flips it."""

    family: str
    count: int
    reason: str
    example: str
    flip: str = ""


@dataclass(frozen=True)
class Cost:
    """days and dollars at list price, before failures."""

    usd_per_gpu_hour: float | None
    source: str
    tokens: float | None
    note: str = "list price, before failures"


@dataclass(frozen=True)
class Plan:
    scenario: dict[str, Any]
    """name, hash, model, cluster, num_gpus, gpu, seq_len, global_batch_tokens, routing, skew."""
    profile: dict[str, Any]
    """name, sources, and whether it was anchored."""
    num_layouts: int
    num_fit: int
    num_bounded: int
    num_path: int
    num_played: int
    gap: float | None
    """T(winner) / min over unplayed layouts of (path, else bound) - 1; negative = none of them can beat the winner."""
    elapsed_s: float
    candidates: tuple[Candidate, ...]
    rejections: tuple[Rejection, ...]
    cost: Cost
    memory_rule: str
    warnings: tuple[str, ...] = ()
    measured: dict[str, Any] | None = None
    advice: dict[str, Any] | None = None
    """What to measure next: see ``moesim.advise``."""
    timeline: tuple[dict[str, Any], ...] = field(default=(), repr=False)
    """Spans of the winner: rank, stream, name, kind, start, end."""

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready form (schema_version first)."""
        return {"schema_version": SCHEMA_VERSION, **asdict(self)}
