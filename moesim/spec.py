"""What does a person have to say about a model, a cluster and a run before anything can be predicted?

The nouns of a scenario: ModelSpec, ClusterSpec (with GpuSpec, Tier; defined in hardware.py), RoutingSpec, Workload, SearchSpec,
MemorySpec, Scenario. All are strict, frozen and complete at construction: defaults that follow from other fields are filled in before
validation. Values are SI: bytes, bytes/s, FLOP/s, seconds, watts as floats, counts as ints. Text with units ("800 Gb/s") exists only
in YAML; load.py turns it into these.
"""

from __future__ import annotations

import hashlib
import json
from functools import cached_property
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from . import closed_form
from .hardware import Bytes, ClusterSpec, Count, GpuSpec, Name, NumExperts, NumLayers, Positive, Price, Resource, Spec, Text, Tier, Tokens
from .training import TrainSpec

__all__ = [
    "ClusterSpec", "GpuSpec", "MemorySpec", "ModelSpec", "Price", "Resource", "RoutingSpec", "Scenario", "SearchSpec", "Spec", "Tier",
    "Workload",
]  # fmt: skip


class ModelSpec(Spec):
    """One decoder-only transformer, flat, so that `--set model.num_experts=8` names any part of it.

    Sizes are element counts. The layer stack is `num_leading_dense_layers` dense layers, then every `moe_layer_interval`-th layer MoE
    (interval 2: dense, MoE, dense, MoE, ...). `num_experts: 0` means every layer is dense.
    """

    name: Name
    num_layers: NumLayers
    hidden_size: Positive
    vocab_size: Positive
    tie_embeddings: bool = False
    num_position_embeddings: Count = 0  # learned positions (GPT-2 style); 0 = rotary or none

    attention: Literal["gqa", "mla"] = "gqa"
    num_heads: Positive
    num_kv_heads: Positive  # filled in: num_heads
    head_dim: Positive  # filled in: hidden_size / num_heads, or the query width of MLA
    q_lora_rank: Positive | None = None  # None: queries projected directly
    kv_lora_rank: Positive | None = None
    qk_nope_head_dim: Positive | None = None
    qk_rope_head_dim: Positive | None = None
    v_head_dim: Positive | None = None
    qk_norm: Literal["none", "per_head", "full"] = "none"  # gain of head_dim shared by heads | gain over the whole projection
    qkv_bias: bool = False
    out_bias: bool = False
    sliding_window: Positive | None = None  # keys each query sees, itself included
    full_attention_every: Positive = 1  # 2: layers 1, 3, 5, ... (from 0) attend fully, the others through the window
    attention_sinks: bool = False  # one learned logit a head

    norm_placement: Literal["pre", "post"] = "pre"
    norm_bias: bool = False  # LayerNorm with a bias beside each gain
    embedding_norm: bool = False
    moe_branch_norm: bool = False  # one more norm in each MoE layer: routed and shared branch normed apart

    intermediate_size: Count = 0  # FFN width of dense layers
    gated_mlp: bool = True  # three matrices (SwiGLU) instead of two
    mlp_bias: bool = False
    num_experts: NumExperts = 0
    top_k: Count = 0
    moe_intermediate_size: Count = 0
    num_shared_experts: Count = 0
    shared_intermediate_size: Count  # total width; filled in: num_shared_experts * moe_intermediate_size
    shared_expert_gate: bool = False  # a learned scalar gate on the shared branch
    router: Literal["softmax", "sigmoid"] = "softmax"
    router_bias: bool = False
    expert_bias: bool = False
    score_correction_bias: bool = False  # loss-free balancing bias; counted, because published checkpoint totals count it
    num_expert_groups: Positive = 1
    top_k_groups: Positive = 1
    routed_scale: Annotated[float, Field(gt=0, le=1e6, allow_inf_nan=False)] = 1.0
    normalize_top_k: bool = True
    num_leading_dense_layers: Count = 0
    moe_layer_interval: Positive = 1
    num_mtp_layers: Annotated[int, Field(ge=0, le=16)] = 0  # extra next-token modules: one layer, a 2d -> d projection, the shared head

    @model_validator(mode="before")
    @classmethod
    def _fill(cls, data: Any) -> Any:
        return closed_form.fill_model_defaults(data) if isinstance(data, dict) else data

    @model_validator(mode="after")
    def _check(self) -> ModelSpec:
        problem = closed_form.model_problem(self)
        if problem:
            raise ValueError(problem)
        return self

    def layer_kinds(self) -> tuple[str, ...]:
        """"dense" or "moe" for each of the num_layers layers, MTP modules apart."""
        return closed_form.layer_kinds(self)

    def window(self, layer: int) -> int | None:
        """Keys a query of this layer (from 0) may see, itself included; None = all before it."""
        return closed_form.window(self, layer)

    @cached_property
    def num_params(self) -> int:
        """Every trained parameter, MTP modules included: the sum of params_by_role()."""
        return sum(self.params_by_role().values())

    @cached_property
    def num_active_params(self) -> int:
        """Parameters one token touches: top_k of the routed experts, everything else, the input embedding included."""
        return closed_form.num_active_params(self)

    def params_by_role(self) -> dict[str, int]:
        """Parameters of each role of the whole model; roles a model lacks are 0."""
        return closed_form.params_by_role(self)

    def flops_per_token(self, seq_len: int) -> float:
        """Model FLOP a token of one training step (forward + backward, no recompute) at this sequence length."""
        return sum(self.flops_by_role(seq_len).values())

    def flops_by_role(self, seq_len: int) -> dict[str, float]:
        """flops_per_token split by role."""
        return closed_form.flops_by_role(self, seq_len)


class RoutingSpec(Spec):
    """How tokens spread over experts, and what happens to those above an expert's or a rank's capacity."""

    kind: Literal["balanced", "zipf", "dirichlet", "histogram"] = "balanced"
    zipf_s: Annotated[float, Field(ge=0, le=10, allow_inf_nan=False)] | None = None
    dirichlet_alpha: Annotated[float, Field(ge=0.001, le=1e6, allow_inf_nan=False)] | None = None
    file: Text | None = None
    seed: Count = 0
    capacity_factor: Annotated[float, Field(gt=0, le=1e6, allow_inf_nan=False)] | None = None  # None: dropless
    capacity_scope: Literal["expert", "rank"] = "expert"

    @model_validator(mode="after")
    def _check(self) -> RoutingSpec:
        needs = {"zipf": "zipf_s", "dirichlet": "dirichlet_alpha", "histogram": "file"}
        for kind, field in needs.items():
            given = getattr(self, field) is not None
            if given != (self.kind == kind):
                raise ValueError(f"routing kind '{self.kind}' " + (f"does not use {field}" if given else f"needs {field}"))
        return self


# Mean load violation (busiest expert over mean, minus 1) of models trained with an auxiliary loss is 0.5 to 0.7
# (64 routed experts; https://arxiv.org/abs/2408.15664). Zipf with s = 0.15 over 64 experts has 0.60.
STATED_SKEW = RoutingSpec(kind="zipf", zipf_s=0.15)


class Workload(Spec):
    """What is trained: sequence length, tokens a step, tokens in all (None: unknown), and where tokens are routed."""

    seq_len: Positive
    global_batch_tokens: Tokens
    tokens: Tokens | None = None
    routing: RoutingSpec = RoutingSpec()
    skew: RoutingSpec = STATED_SKEW  # shown beside `routing`

    @model_validator(mode="after")
    def _check(self) -> Workload:
        if self.global_batch_tokens % self.seq_len:
            raise ValueError(f"global_batch_tokens {self.global_batch_tokens} is not a whole number of sequences of {self.seq_len}")
        return self


def _as_tuple(value: Any) -> Any:
    if value in ([], ()):
        raise ValueError("needs at least one value; leave the axis out to keep the layout's own")
    return value if isinstance(value, tuple) or value is None else tuple(value) if isinstance(value, list) else (value,)


Axis = Annotated[tuple[int | str, ...] | None, BeforeValidator(_as_tuple)]


class SearchSpec(Spec):
    """Which values each axis of the layout may take; an axis left out keeps the layout's own default (dp: what is left of the world)."""

    pp: Axis = None
    num_chunks: Axis = None
    dp: Axis = None
    cp: Axis = None
    tp: Axis = None
    ep: Axis = None
    etp: Axis = None
    zero: Axis = None
    reshard: Axis = None
    micro_batch: Axis = None
    schedule: Axis = None
    recompute: Axis = None
    dispatcher: Axis = None
    dispatcher_sms: Axis = None
    overlap: Axis = None
    precision: Axis = None
    grad_dtype: Axis = None
    optimizer: Axis = None
    graphs: Axis = None
    dp_replicate: Axis = None
    stages: Axis = None


Share = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]


class MemorySpec(Spec):
    """What stands between the bytes a layout needs and "it fits"."""

    margin: Share = 0.05  # assumed: room for what the memory model gets wrong
    # Reserved over allocated, 14,766 / 14,341 MB in https://github.com/pytorch/pytorch/pull/44742 (a split-friendly allocator);
    # without expandable segments it can be tens of per cent.
    allocator_slack: Share = 0.03
    runtime_reserve_bytes: Bytes | None = None  # None: the cluster's


class Scenario(Spec):
    """One question to the planner: this model, on this cluster, with this workload."""

    name: Name
    description: str = ""
    model: ModelSpec
    cluster: ClusterSpec
    workload: Workload
    layout: Text | None = None
    search: SearchSpec = SearchSpec()
    stack: Name = "megatron_bridge"  # training software, one of scenarios/stacks
    profile: Name | None = None  # None: the profile of the GPU
    memory: MemorySpec = MemorySpec()
    seed: Count = 0
    train: TrainSpec = TrainSpec()  # read by the trainer alone

    @cached_property
    def hash(self) -> str:
        """First 16 hex digits of the SHA-256 of the scenario as canonical JSON: same question, same hash, on any machine.

        What only explains (descriptions, sources) and what only the trainer reads is left out.
        """
        text = json.dumps(_without_prose(self.model_dump(mode="json", exclude={"train"})), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @property
    def runtime_reserve_bytes(self) -> float:
        """Bytes a GPU loses to the driver, CUDA context and communicators before the first tensor."""
        own = self.memory.runtime_reserve_bytes
        return self.cluster.runtime_reserve_bytes if own is None else own


def _without_prose(data: Any) -> Any:
    if isinstance(data, dict):
        return {k: _without_prose(v) for k, v in data.items() if k not in ("description", "source", "sources")}
    return [_without_prose(v) for v in data] if isinstance(data, list) else data
