"""What does the training software do that neither the model nor the hardware decides?

A Stack counts what one framework submits, waits for and re-reads: kernel launches of the forward of one layer part, device-to-host
waits, passes over memory, what it overlaps, and what it does where a run does not say. Values are data (scenarios/stacks/*.yaml)
and each one carries a source and a provenance class; the seconds a launch costs belong to the hardware profile.
"""

from __future__ import annotations

import difflib
from functools import cached_property, lru_cache
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, model_validator

from .layout import DEFAULT_SMS, LAYOUT_FIELDS, Layout
from .load import read_yaml, scenarios_dir

Launches = Annotated[float, Field(ge=0, le=1e5, allow_inf_nan=False)]
Factor = Annotated[float, Field(gt=0, le=100, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
Dispatcher = Literal["alltoall", "sync_free", "dedup"]
Graphs = Literal["none", "router", "layer", "full"]
Provenance = Literal["measured", "documented"]

DEGREES = ("pp", "dp", "rep", "cp", "tp", "ep", "etp", "mb", "stages")
"""Layout fields no stack can know."""


class Stack(BaseModel):
    """One framework at one release family. Launches are host submissions of the forward of one layer part, in units of the
    profile's launch time; a field named in neither `sources` nor `provenance` keeps the neutral default shown here."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")

    name: Annotated[str, Field(min_length=1, max_length=60)]
    description: str

    launches_attention: Launches  # norms, QKV, rotary, core, output projection, residual
    launches_mla: Launches = 0.0  # added by latent attention
    launches_tp: Launches = 0.0  # added to a layer by tensor parallelism with sequence parallelism
    launches_cp: Launches = 0.0  # added to attention by context parallelism
    launches_dense_ffn: Launches
    launches_moe: Launches  # router, losses, permute, grouped GEMMs, unpermute, shared expert
    launches_alltoall_extra: Launches = 0.0  # added by a dispatcher with host-side split sizes
    launches_per_local_expert: Launches = 0.0
    launches_head: Launches  # final norm, LM head, loss
    backward_launch_ratio: Factor = 1.7  # backward launches over forward launches
    fp8_launch_ratio: Factor = 1.4  # launches of a layer in an 8- or 4-bit recipe over BF16

    host_waits: dict[Dispatcher, Annotated[int, Field(ge=0, le=100)]]  # device-to-host waits of one MoE layer's forward
    local_host_waits: Annotated[int, Field(ge=0, le=100)] = 0  # the same without expert parallelism

    pointwise_fusion: Factor = 1.0  # factor on the traffic of memory-bound ops: 1 = each fused op reads and writes once
    score_passes: Annotated[float, Field(ge=0, le=100)] = 0.0  # passes over heads x seq x seq BF16 scores, forward; 0 = flash attention
    permute_passes: dict[Dispatcher, Annotated[float, Field(ge=0, le=20)]]  # passes over the k*T routed rows, a layer forward
    local_permute_passes: Annotated[float, Field(ge=0, le=20)] = 2.0
    quantised_dispatch: bool = False  # device-side dispatchers send 8-bit rows forward in an 8- or 4-bit recipe, not BF16
    grouped_gemm: Literal["grouped", "loop"] = "grouped"  # one kernel for all local experts | one GEMM each
    fuses_experts: bool = False  # graphs over the whole step run MXFP8 experts whose products apply the activation and cast in place
    grad_accumulate_bytes: Annotated[float, Field(ge=0, le=64)] = 8.0  # bytes a parameter a microbatch, beyond the GEMM's operands
    weight_grad_placeholders: bool = False  # one unused bf16 gradient a distinct weight shape is kept for autograd, beside the fused accumulation
    saves_expert_output: bool = False  # expert outputs kept for the router's gradient (weights applied after the down-projection)
    # Parameters that fill a bucket of the step's collectives: at least so many, and so many for each rank that shares them; 0 = a layer each.
    bucket_params: Annotated[float, Field(ge=0, le=1e12, allow_inf_nan=False)] = 0.0
    bucket_params_per_rank: Annotated[float, Field(ge=0, le=1e9, allow_inf_nan=False)] = 0.0
    saved_tensors: Annotated[str, Field(min_length=1, max_length=60)] = "default"  # whose kernels keep what for backward: a set of scenarios/saved_tensors.yaml
    end_of_step_s: Annotated[float, Field(ge=0, le=60, allow_inf_nan=False)] = 0.0  # host work between steps nothing hides
    # Share of launches captured by graphs over the router ("router"), attention and the router ("layer"), or the step ("full").
    graph_coverage: dict[Graphs, Share] = {"none": 0.0, "router": 0.0, "layer": 1.0, "full": 1.0}  # of attention and of a dense FFN
    graph_coverage_moe: dict[Graphs, Share] = {"none": 0.0, "router": 0.4, "layer": 0.4, "full": 1.0}  # of launches_moe

    # FSDP2 gathers into one buffer and copies it out to the parameters, and copies gradients into one buffer before it reduces
    # them; it waits until fewer than this many reductions are in flight before it copies the next ones in
    # (https://github.com/pytorch/pytorch/blob/v2.11.0/torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py).
    fsdp_copy_out_bytes: Annotated[float, Field(ge=0, le=64)] = 4.0  # a gathered parameter: bf16 read and written
    fsdp_copy_in_bytes: Annotated[float, Field(ge=0, le=64)] = 6.0  # a gradient: bf16 read, FP32 written
    fsdp_cast_bytes: Annotated[float, Field(ge=0, le=64)] = 6.0  # a shard's parameter before its gather: FP32 read, bf16 written
    fsdp_accumulate_bytes: Annotated[float, Field(ge=0, le=64)] = 12.0  # a shard's gradient after its reduction: FP32 added to FP32
    counts_globally: bool = False  # a balancing loss adds expert counts up over the ranks of a stage in every MoE layer's forward
    fsdp_every_stage: bool = False  # weights and gradients pass through those buffers at every ZeRO stage, once a step where nothing is resharded
    fsdp_reduces_in_flight: Annotated[int, Field(ge=1, le=64)] = 1
    fsdp_prefetch: Annotated[int, Field(ge=0, le=64)] = 1  # layers gathered ahead under ZeRO-3
    selective_recompute: tuple[str, ...] = ("core_attn",)  # roles meant by a bare "selective"
    unstated_vpp: Literal["none", "full"] = "none"  # chunks of a pipeline a run does not interleave in words | one layer a chunk
    unstated_stages: Literal["light_ends", "short_last"] = "light_ends"  # layers that don't divide: to the middle | missing from the last
    unstated_etp: Literal["one", "tp"] = "one"  # expert tensor parallel degree of a run that states none
    defaults: dict[str, int | bool | str | tuple[str, ...]] = {}  # Layout fields to assume where a run is silent
    sources: dict[str, str]  # field -> public address, or the reasoning behind an assumed value
    provenance: dict[str, Provenance] = {}  # field -> measured | documented by the authors; a field not named is assumed

    @model_validator(mode="before")
    @classmethod
    def _tuples(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        tuples = {k: tuple(data[k]) for k in ("selective_recompute",) if isinstance(data.get(k), list)}
        if isinstance(data.get("defaults"), dict):
            tuples["defaults"] = {k: tuple(v) if isinstance(v, list) else v for k, v in data["defaults"].items()}
        return {**data, **tuples}

    @model_validator(mode="after")
    def _check(self) -> Stack:
        problem = _problem(self)
        if problem:
            raise ValueError(f"stack {self.name!r}: {problem}")
        return self

    @cached_property
    def default_layout(self) -> Layout:
        """The Layout of a run that says nothing but its degrees."""
        values = dict(self.defaults)
        if "dispatcher" in values and "sms" not in values:
            values["sms"] = DEFAULT_SMS[values["dispatcher"]]
        return Layout(**values)

    def waits(self, dispatcher: str, ep: int) -> int:
        """Device-to-host waits of one MoE layer's forward."""
        return self.host_waits[dispatcher] if ep > 1 else self.local_host_waits

    def permutes(self, dispatcher: str, ep: int) -> float:
        """Passes over the routed rows in one MoE layer's forward (each reads and writes k*T rows of the hidden size)."""
        return self.permute_passes[dispatcher] if ep > 1 else self.local_permute_passes


def _problem(stack: Stack) -> str | None:
    unknown = [key for key in stack.defaults if key not in LAYOUT_FIELDS or key in DEGREES]
    if unknown:
        return f"defaults.{unknown[0]} is not a policy of a layout; legal: {', '.join(f for f in LAYOUT_FIELDS if f not in DEGREES)}"
    for table in ("host_waits", "permute_passes"):
        missing = {"alltoall", "sync_free", "dedup"} - set(getattr(stack, table))
        if missing:
            return f"{table} lacks {', '.join(sorted(missing))}"
    for table in ("graph_coverage", "graph_coverage_moe"):
        if set(getattr(stack, table)) != set(get_args(Graphs)):
            return f"{table} needs {', '.join(get_args(Graphs))}"
    given = stack.model_fields_set - {"name", "description", "sources", "provenance"}
    lacking, extra = sorted(given - set(stack.sources)), sorted((set(stack.sources) | set(stack.provenance)) - given)
    if lacking or extra:
        return f"sources lacks {', '.join(lacking)}" if lacking else f"sources or provenance names {extra[0]}, which is not given"
    return None


def stack_names() -> tuple[str, ...]:
    """Names of the shipped stacks."""
    return tuple(sorted(p.stem for p in (scenarios_dir() / "stacks").glob("*.yaml")))


@lru_cache(maxsize=None)
def load_stack(name: str) -> Stack:
    """A shipped stack by name. Raises ValueError naming the nearest match."""
    if name not in stack_names():
        near = difflib.get_close_matches(name, stack_names(), n=1, cutoff=0.0)
        raise ValueError(f"stack {name!r} is not one of {', '.join(stack_names())}" + (f"; nearest {near[0]!r}" if near else ""))
    return Stack(**_read(name))


def _read(name: str) -> dict[str, Any]:
    """The fields of a stack's file over those of the stack it `extends`; tables of labels are merged, other values replaced."""
    data = dict(read_yaml(scenarios_dir() / "stacks" / f"{name}.yaml").data)
    parent = data.pop("extends", None)
    if parent is None:
        return data
    base = _read(parent)
    changed = {key for key in data if key not in ("sources", "provenance")}
    tables = {t: {k: v for k, v in base.get(t, {}).items() if k not in changed} | data.pop(t, {}) for t in ("sources", "provenance")}
    return {**base, **data, **tables}
