"""What does each op cost on this GPU (or CPU core), how sure is that, and who measured it?

A HardwareProfile is one YAML in scenarios/profiles, written by ``python -m calibration fit``: parameters and measured curves with their
errors, validity ranges, provenance and sources. ``price`` turns ops into seconds, one vectorised call a kind.
"""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Literal, Sequence

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, model_validator

from moesim.costs import COSTS
from moesim.costs.collectives import Curve, monotone
from moesim.document import SpecError, read_yaml
from moesim.load import scenarios_dir
from moesim.ops import Op
from moesim.pricing import Prices, price_ops

PROFILES = scenarios_dir() / "profiles"


_PHASES = {"R": "F", "I": "B", "W": "B"}


class _Frozen(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True, extra="forbid", allow_inf_nan=False)


class Fit(_Frozen):
    """Errors of one fit, as |predicted / measured - 1|: in sample, or out of fold by one kind of split."""

    split: str
    num_rows: int
    median: float
    mean: float
    p90: float
    bias: float


class Term(_Frozen):
    """One priced term: what it costs, and how uncertain that is.

    sigma_log: its own error, as the standard deviation of log(seconds); shared: (name of a common cause -> its sigma), so that
    terms that share a cause move together in a draw. valid: axis -> (low, high) of the measurements behind it; points: size -> its
    value at each of them (``pricing.points``), where they are few enough to list.
    """

    name: str
    kind: str
    label: str = ""
    parameters: dict[str, float] = {}
    stderr: dict[str, float] = {}
    covariance: dict[str, dict[str, float]] = {}
    valid: dict[str, tuple[float, float]] = {}
    points: dict[str, tuple[float, ...]] = {}
    provenance: Literal["measured", "interpolated", "extrapolated", "datasheet", "assumed"]
    sigma_log: float = Field(ge=0)
    shared: dict[str, float] = {}
    sources: tuple[str, ...] = Field(min_length=1)
    fits: tuple[Fit, ...] = ()
    note: str = ""


class MeasuredCurve(_Frozen):
    """Seconds of one collective over ``members`` GPUs of one NVLink domain (or ranks of one machine), by nccl-tests size. ``lender``: the
    GPU it was measured on, where not this one. ``measured_to``: bytes beyond which the curve is continued as a sibling's (0: nowhere)."""

    kind: str
    members: int
    software: str = ""
    lender: str = ""
    measured_to: float = 0.0
    bytes: tuple[float, ...] = Field(min_length=2)
    seconds: tuple[float, ...] = Field(min_length=2)


class Gamma(_Frozen):
    """A running kernel of ``running`` slows to 1 / (1 + gamma) of its solo rate beside a kernel of ``beside``."""

    running: str
    beside: str
    gamma: float = Field(ge=0)
    stderr: float = Field(ge=0)
    source: str


class Sustained(_Frozen):
    """Speed inside a training step over the speed that timing alone shows, and the clock droop of long kernels in training."""

    factor: float = Field(gt=0, le=10)
    droop: float = Field(default=0.0, ge=0)
    droop_s: float = Field(default=1.0, gt=0)
    sigma_log: float = Field(ge=0)
    provenance: Literal["measured", "interpolated", "extrapolated", "datasheet", "assumed"]
    evidence: dict[str, float]
    sources: tuple[str, ...]


class Host(_Frozen):
    """CPU side: ``launch_s`` = seconds to issue one kernel from PyTorch, by host CPU; 0 where the thread that issues also computes."""

    launch_s: dict[str, float]
    sigma_log: float
    sources: tuple[str, ...]


class Stamp(_Frozen):
    """Which measurements made this profile: the machine and software that all of them name, and the files, by SHA-256."""

    device: dict[str, str]
    software: dict[str, str]
    topology: tuple[dict[str, str], ...]
    first_date: str
    last_date: str
    num_lines: int
    num_noisy: int
    files: dict[str, str]


class Beside(_Frozen):
    """Seconds of ``running`` on every rank of a machine at once, ``beside`` something or beside nothing ("") but the other ranks, over its
    seconds on one rank alone. ``ranks`` at once."""

    running: str
    beside: str
    ranks: int
    ratio: float = Field(gt=0)
    stderr: float = Field(ge=0)


class Storage(_Frozen):
    """Bytes/s of a whole checkpoint that ``ranks`` ranks ``save`` or ``load`` together; sigma_log of one such measurement."""

    what: Literal["save", "load"]
    ranks: int
    bytes_per_s: float = Field(gt=0)
    sigma_log: float = Field(ge=0)


class InStep(_Frozen):
    """Seconds of a role inside training steps over the price of its ops: what software adds to them there, such as several kernels where
    the plan counts one, allocation, cold caches. phase: F forward (again, too), B backward, S once a step. Seconds are ``ratio`` times the
    price and ``extra_s`` each time, in a layer and microbatch, that the role is played; ``spread`` multiplies the ratio where experts lie
    on several ranks (buffers of uneven sizes are allocated anew, and rows re-ordered); sigma_log of what the anchors leave. phase X: a
    collective outside the layers."""

    role: str
    phase: Literal["F", "B", "S", "X"]
    ratio: float = Field(gt=0)
    extra_s: float = Field(default=0.0, ge=0)
    spread: float = Field(default=1.0, gt=0)
    sigma_log: float = Field(ge=0)
    num_steps: int = Field(ge=1)
    sources: tuple[str, ...] = Field(min_length=1)


class Meeting(_Frozen):
    """Seconds that a collective which everybody waits for takes inside a step beyond its price, with so many ranks on a core: ranks arrive
    unevenly, and one that shares its core has to be scheduled first."""

    ranks_per_core: float = Field(gt=0)
    extra_s: float = Field(ge=0)
    stderr: float = Field(ge=0)
    sources: tuple[str, ...] = Field(min_length=1)


class HardwareProfile(_Frozen):
    """Everything measured or assumed about one GPU type and the software its numbers were taken with.

    sustained: in-step level by term name, by dtype of products, or "attention"; the first that exists counts. num_sms and collective_sms
    are 0 on a CPU."""

    name: str
    gpu: str
    parent: str | None = None
    num_sms: int
    peak_flops: dict[str, float]
    hbm_bytes_per_s: float
    nvlink_bytes_per_s: float
    collective_sms: int
    datasheet_sources: tuple[str, ...]
    terms: tuple[Term, ...]
    nccl: str
    curves: tuple[MeasuredCurve, ...]
    sustained_rule: str
    sustained: dict[str, Sustained]
    host: Host
    gammas: tuple[Gamma, ...]
    stamp: Stamp | None = None
    beside: tuple[Beside, ...] = ()
    storage: tuple[Storage, ...] = ()
    in_step: tuple[InStep, ...] = ()
    meetings: tuple[Meeting, ...] = ()

    def but(self, **changes) -> HardwareProfile:
        """The profile with these fields, validated, nothing cached carried over (as ``model_copy`` would)."""
        return HardwareProfile.model_validate({name: getattr(self, name) for name in HardwareProfile.model_fields} | changes)

    @model_validator(mode="after")
    def _complete(self) -> HardwareProfile:
        for term in self.terms:
            if term.kind not in COSTS:
                raise ValueError(f"term {term.name!r} is of kind {term.kind!r}; known are {', '.join(COSTS)}")
            needed = set() if term.kind in ("collectives", "dispatch", "fused_ffn") else {p.name for p in COSTS[term.kind].PARAMETERS}
            missing = sorted(needed - set(term.parameters))
            if missing:
                raise ValueError(f"term {term.name!r} lacks the parameter {missing[0]!r}")
        return self

    @cached_property
    def term_index(self) -> dict[str, int]:
        return {term.name: index for index, term in enumerate(self.terms)}

    @cached_property
    def curve_tables(self) -> dict[str, dict[int, Curve]]:
        """kind -> members -> curve of the release that prices (``nccl``), with seconds made non-decreasing in bytes."""
        tables: dict[str, dict[int, Curve]] = {}
        for curve in self.curves:
            if curve.software != self.nccl:
                continue
            tables.setdefault(curve.kind, {})[curve.members] = Curve(np.array(curve.bytes), monotone(curve.seconds))
        return tables

    @cached_property
    def _steps(self) -> dict[tuple[str, str], InStep]:
        return {(found.role, found.phase): found for found in self.in_step}

    def in_step_seconds(self, role: str, phase: str, seconds: float, times: float = 1.0, is_spread: bool = False) -> float:
        """Seconds of a role inside a step whose price is ``seconds``, played ``times``; as they are where nobody measured it. phase as in
        `block.Node`, or S or X."""
        found = self._steps.get((role, _PHASES.get(phase, phase)))
        if found is None:
            return seconds
        return seconds * found.ratio * (found.spread if is_spread else 1.0) + found.extra_s * times

    @cached_property
    def knows_spread(self) -> bool:
        """Does any role cost more where experts lie on several ranks?"""
        return any(found.spread != 1.0 for found in self.in_step)

    def meeting_s(self, ranks_per_core: float) -> float:
        """Seconds beyond its price of a collective that all wait for. Linear between what was measured and beyond it, never below zero;
        with one entry, in proportion."""
        known = sorted((m.ranks_per_core, m.extra_s) for m in self.meetings)
        if not known:
            return 0.0
        if len(known) == 1:
            return known[0][1] * ranks_per_core / known[0][0]
        (a, low), (b, high) = next(((p, q) for p, q in zip(known, known[1:]) if ranks_per_core <= q[0]), (known[-2], known[-1]))
        return max(0.0, low + (high - low) * (ranks_per_core - a) / (b - a))

    def term(self, name: str) -> Term:
        if name not in self.term_index:
            raise ValueError(f"profile {self.name!r} has no term {name!r}: this GPU can't run or has never been measured at it")
        return self.terms[self.term_index[name]]

    def parameters(self, name: str, in_training: bool = True) -> dict[str, float]:
        """Parameters of a term as a training step runs it: tensor-core rates at the sustained level, a low-precision GEMM without the
        quantisation of its activations (a program holds that as ops of its own). ``in_training`` False: as the tables time it."""
        term = self.term(name)
        if not in_training:
            return term.parameters
        if name in self.sustained:
            return paced(term, self.sustained[name].factor)
        if term.kind.startswith("core_"):
            level = self.sustained.get("attention" if term.kind == "core_attention" else name.rsplit(".", 1)[-1])
            return term.parameters if level is None else paced(term, level.factor)
        if term.kind == "attention":
            return {**term.parameters, "rate": term.parameters["rate"] * self.sustained["attention"].factor}
        cause = self.sustained.get(name.rsplit(".", 1)[-1])
        if cause is None or term.kind not in ("gemm", "grouped_gemm"):
            return term.parameters
        alone = self.multiply_alone(term.parameters)
        return {**alone, "rate": alone["rate"] * cause.factor, "droop": cause.droop, "droop_s": cause.droop_s}

    def multiply_alone(self, parameters: dict[str, float]) -> dict[str, float]:
        """GEMM parameters without activation quantisation, host floor, or more fixed latency than any dense kernel has."""
        fixed = min(parameters["fixed_s"], self.term("gemm.bf16").parameters["fixed_s"])
        return {**parameters, "quant_row_s": 0.0, "quant_bandwidth": np.inf, "floor_s": 0.0, "fixed_s": fixed}

    def price(self, ops: Sequence[Op], cluster, in_training: bool = True) -> Prices:
        """Seconds and busy seconds of every op on ``cluster`` (its tiers place groups and give link rates).

        in_training: tensor-core kernels run at the sustained rate; False prices them as the burst tables do. ValueError where the
        profile lacks the term an op needs.
        """
        return price_ops(self, ops, cluster, in_training)

    def sample(self, rng: np.random.Generator, num_draws: int) -> dict[str, np.ndarray]:
        """Log-normal multipliers of each term's seconds, [num_draws] each, median 1; terms with a common cause move together."""
        causes = sorted({cause for term in self.terms for cause in term.shared})
        common = {cause: rng.standard_normal(num_draws) for cause in causes}
        draws = {}
        for term in self.terms:
            log = term.sigma_log * rng.standard_normal(num_draws)
            for cause, sigma in sorted(term.shared.items()):
                log = log + sigma * common[cause]
            draws[term.name] = np.exp(log)
        draws["host"] = np.exp(self.host.sigma_log * rng.standard_normal(num_draws))
        return draws


def paced(term: Term, factor: float) -> dict[str, float]:
    """Parameters of a kernel ``factor`` times as fast: rates times it, durations over it, sizes and shares as they are."""
    units = {p.name: p.unit for module in (COSTS[term.kind], COSTS["gemm"]) for p in module.PARAMETERS}

    def scale(unit: str) -> float:
        return factor if "/s" in unit else 1.0 / factor if unit == "s" or unit.startswith("s ") else 1.0

    return {name: value * scale(units.get(name, "")) for name, value in term.parameters.items()}


def load_profile(name_or_path: str | Path) -> HardwareProfile:
    """The profile of that name in scenarios/profiles, or of that YAML file. ValueError in one line where it is wrong."""
    path = Path(name_or_path)
    if path.suffix not in (".yaml", ".yml"):
        path = PROFILES / f"{name_or_path}.yaml"
    if not path.is_file():
        known = ", ".join(sorted(p.stem for p in PROFILES.glob("*.yaml")))
        raise ValueError(f"no hardware profile {str(name_or_path)!r}: known are {known}; or give the path of a YAML file")
    try:
        return HardwareProfile.model_validate(_tuples(read_yaml(path).data))
    except SpecError:
        raise
    except ValueError as error:
        raise SpecError(f"{path}: not a hardware profile: {' '.join(str(error).split())[:200]}") from None


def _tuples(value):
    """YAML lists as tuples, so that strict validation takes them."""
    if isinstance(value, list):
        return tuple(_tuples(item) for item in value)
    if isinstance(value, dict):
        return {key: _tuples(item) for key, item in value.items()}
    return value
