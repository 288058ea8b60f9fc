"""How far are one software's kernels from those the profile measured? (Stack x GPU generation x kind of kernel -> factor on seconds.)

A profile holds what a GPU's kernels cost in one benchmark; a framework brings its own attention, casts, fusions and overlap of
tensor-parallel collectives. The table is data (scenarios/kernel_coverage.yaml), written by ``python -m calibration.coverage`` from
published runs by a stated rule. A stack without runs has no entry: its kernels are the profile's.
"""

from __future__ import annotations

import json
from functools import lru_cache

from pydantic import BaseModel, ConfigDict, Field

from moesim.factor_errors import FactorErrors

from moesim.load import read_yaml, scenarios_dir

GENERATIONS = {"a100": "ampere", "h100": "hopper", "h200": "hopper", "h800": "hopper", "b200": "blackwell", "b300": "blackwell",
               "gb200": "grace_blackwell", "gb300": "grace_blackwell"}
KINDS = ("gemm_bf16", "gemm_fp8", "gemm_fp4", "grouped_bf16", "grouped_fp8", "attention", "memory", "tensor_parallel", "dispatch", "host")
FEATURES = ("expert_bias", "efa", "proxy")
"""Traits that change kernels or hosts whatever the stack: biased experts (with sinks and narrow heads: GPT-OSS), an EFA fabric and its
hosts, a dispatcher that goes through CPU proxies."""
PRICED_AS_THEY_ARE = ("optimizer", "grad_norm", "param_copy_out", "grad_copy_in", "param_gather", "grad_reduce")
"""Roles of the end of a step and of parameters on their way: no factor scales them."""
PRECISIONS = {"bf16": "bf16", "fp8": "fp8", "mxfp8": "fp8", "nvfp4": "fp4"}


class Coverage(BaseModel):
    """stacks: name -> generation -> kind -> factor on seconds; features: trait -> kind -> factor, on top. num_runs: behind them; errors:
    how sure the factors are, where that is known."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid", allow_inf_nan=False, arbitrary_types_allowed=True)
    source: str
    num_runs: int = Field(ge=0)
    stacks: dict[str, dict[str, dict[str, float]]] = {}
    features: dict[str, dict[str, float]] = {}
    errors: FactorErrors | None = None

    def has(self, stack: str, gpu: str) -> bool:
        """Whether runs say what this stack's kernels cost on such a GPU."""
        return GENERATIONS.get(gpu, "") in self.stacks.get(stack, {})

    def factors(self, stack: str, gpu: str, features: tuple[str, ...] = ()) -> dict[str, float]:
        """Kind -> factor on seconds; what is not there is 1."""
        if stack not in self.stacks:
            return {}
        found = dict(self.stacks[stack].get(GENERATIONS.get(gpu, ""), {}))
        for name in features:
            for kind, factor in self.features.get(name, {}).items():
                found[kind] = found.get(kind, 1.0) * factor
        return found


def scaled_kind(role: str, term: str, uses) -> str | None:
    """Kind whose factor a task's seconds carry; None at the rate of its wire, which no software beats, and where none applies."""
    at_wire = any(share >= 1.0 for name, share in uses if name in ("nvlink", "nic"))
    return None if at_wire or role in PRICED_AS_THEY_ARE else kind_of(role, term)


def features_of(model, cluster, proxy: bool = False) -> tuple[str, ...]:
    """The FEATURES of a model on a cluster; ``proxy``: its dispatcher goes through CPU proxies."""
    efa = any(tier.transport == "efa" for tier in cluster.tiers)
    return tuple(name for name, present in (("expert_bias", bool(model.expert_bias)), ("efa", efa), ("proxy", proxy)) if present)


def kind_of(role: str, term: str) -> str | None:
    """Kind of a kernel by its role and the profile term that prices it; None for what no software changes here (the data-parallel
    collectives and the end of the step)."""
    name, _, rest = term.partition(".")
    width = PRECISIONS.get(rest.rsplit(".", 1)[-1], "bf16")
    if role in ("expert_up", "expert_down") or name == "grouped_gemm":
        return "grouped_bf16" if width == "bf16" else "grouped_fp8"
    if role.startswith(("tp_", "etp_")):
        return "tensor_parallel"
    if role in ("dispatch", "combine", "count_exchange"):
        return "dispatch"
    return {"gemm": f"gemm_{width}", "attention": "attention", "memory": "memory"}.get(name)


@lru_cache(maxsize=1)
def load_coverage() -> Coverage:
    """The shipped table, with how sure it is."""
    path = scenarios_dir() / "kernel_errors.json"
    try:
        errors = FactorErrors.from_plain(json.loads(path.read_text(encoding="utf-8")))
    except ValueError as error:
        raise ValueError(f"{path.name}: {error}") from None
    return Coverage(**read_yaml(scenarios_dir() / "kernel_coverage.yaml").data, errors=errors)
