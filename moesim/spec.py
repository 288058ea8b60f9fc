"""What does a person have to say about a model, a cluster and a run before anything can be predicted?

The nouns of a scenario: ModelSpec, GpuSpec, Tier, ClusterSpec, RoutingSpec, Workload, SearchSpec, MemorySpec, Scenario. All are
strict, frozen and complete at construction (defaults that follow from other fields are filled in before validation, so no consumer
meets a None it has to interpret). Values are SI: bytes, bytes/s, FLOP/s, seconds, watts as floats, counts as ints.
Strings with units ("800 Gb/s") exist only in YAML; load.py turns them into these.
"""

from __future__ import annotations

import hashlib
import json
from functools import cached_property
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from . import closed_form


def _quantity(dimension: str, **bounds: Any) -> Any:
    return Field(allow_inf_nan=False, json_schema_extra={"dimension": dimension}, **{"le": 1e30, **bounds})


Bytes = Annotated[float, _quantity("bytes", ge=0)]
BytesPerSecond = Annotated[float, _quantity("bytes/s", gt=0)]
FlopsPerSecond = Annotated[float, _quantity("FLOP/s", gt=0)]
Seconds = Annotated[float, _quantity("s", ge=0)]
Watts = Annotated[float, _quantity("W", gt=0)]
Capacity = Annotated[float, _quantity("any", gt=0)]
Tokens = Annotated[int, _quantity("tokens", ge=1, le=10**18)]
# Counts are bounded so that a slip of the keyboard ends in a message, not in a day of allocation.
Count = Annotated[int, Field(ge=0, le=10**9)]
Positive = Annotated[int, Field(ge=1, le=10**9)]
NumLayers = Annotated[int, Field(ge=1, le=10_000)]
NumExperts = Annotated[int, Field(ge=0, le=100_000)]
Fraction = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
NonNegative = Annotated[float, Field(ge=0, le=1e12, allow_inf_nan=False)]
Name = Annotated[str, Field(min_length=1, max_length=200)]
Text = Annotated[str, Field(min_length=1, max_length=600)]


class Spec(BaseModel):
    """Base of every noun: unknown keys refused, no coercion of types, no mutation."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")


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


class Price(Spec):
    """US dollars for one GPU for one hour: the spread of published offers, and one list price where a vendor prints one."""

    low: NonNegative
    high: NonNegative
    list: NonNegative | None = None
    source: Text

    @model_validator(mode="after")
    def _check(self) -> Price:
        if self.low > self.high:
            raise ValueError(f"price low {self.low:g} is above high {self.high:g}")
        return self


class GpuSpec(Spec):
    """One accelerator. Peaks are dense (no sparsity). A figure nobody published is absent, never guessed."""

    name: Name
    arch: Name
    num_sms: Positive | None = None
    peak_flops: dict[Literal["bf16", "fp8", "fp4"], FlopsPerSecond]
    hbm_bytes: Bytes
    hbm_bytes_per_s: BytesPerSecond
    hbm_measured_bytes_per_s: BytesPerSecond | None = None
    llc_bytes: Bytes | None = None
    tdp_w: Watts | None = None
    usd_per_hour: Price | None = None
    host_cpu: Literal["x86", "grace"]
    host_link_bytes_per_s: BytesPerSecond | None = None
    profile: Name  # the HardwareProfile that prices this GPU by default
    parent: Name | None = None  # nearest GPU with measurements, where this one has none
    sources: dict[str, Text] = {}  # field -> URL

    def __hash__(self) -> int:
        return hash((self.name, self.num_sms, self.hbm_bytes, self.hbm_bytes_per_s))


class Tier(Spec):
    """One level of the network: `span` GPUs reach each other through it; None = all of them."""

    name: Name
    span: Positive | None
    bytes_per_s: BytesPerSecond  # a GPU, each direction
    latency_s: Seconds | None = None
    oversubscription: Annotated[float, Field(ge=1, le=1000, allow_inf_nan=False)] = 1.0
    transport: Literal["nvlink", "ib", "roce", "efa", "shm", "tcp"]
    source: Text


class Resource(Spec):
    """Something running work shares: `capacity` of it exists in each rank, node or NVLink domain."""

    name: Name
    capacity: Capacity  # bytes/s, or a count (SMs, cores, launching threads)
    scope: Literal["rank", "node", "domain"]


class ClusterSpec(Spec):
    """GPUs, how they are wired, what they cost, how often they fail."""

    name: Name
    gpu: GpuSpec
    gpus_per_node: Positive
    num_nodes: Annotated[int, Field(ge=1, le=1_000_000)]
    tiers: Annotated[tuple[Tier, ...], Field(min_length=1)]  # inner to outer
    nics_per_node: Count
    num_rails: Count
    runtime_reserve_bytes: Bytes
    usd_per_gpu_hour: NonNegative | None = None  # None: the GPU's list price
    failures_per_node_day: NonNegative | None = None
    resources: tuple[Resource, ...]  # filled in from gpu and tiers: sms, hbm, nvlink, nic, host
    sources: dict[str, Text] = {}  # field -> URL

    @model_validator(mode="before")
    @classmethod
    def _fill(cls, data: Any) -> Any:
        if isinstance(data, dict) and "resources" not in data:
            return {**data, "resources": _gpu_resources(data)}
        return data

    @model_validator(mode="after")
    def _check(self) -> ClusterSpec:
        problem = _tier_problem(self)
        if problem:
            raise ValueError(problem)
        return self

    @property
    def num_gpus(self) -> int:
        return self.num_nodes * self.gpus_per_node

    @property
    def domain(self) -> int:
        """GPUs that reach each other without leaving the innermost tier (8 in an HGX node, 72 in an NVL72 rack)."""
        return min(self.tiers[0].span or self.num_gpus, self.num_gpus)

    @property
    def price(self) -> float | None:
        """US dollars a GPU-hour: the cluster's own price, else the GPU's list price, else unknown."""
        if self.usd_per_gpu_hour is not None:
            return self.usd_per_gpu_hour
        return self.gpu.usd_per_hour.list if self.gpu.usd_per_hour else None


def _gpu_resources(data: dict[str, Any]) -> tuple[Any, ...]:
    """The shared resources of a GPU cluster, from fields that may still be plain dicts; what is unknown is left out."""
    get = lambda thing, key: thing.get(key) if isinstance(thing, dict) else getattr(thing, key, None)  # noqa: E731
    gpu, tiers = data.get("gpu"), data.get("tiers") or ()
    network = [t for t in tiers if get(t, "transport") in ("ib", "roce", "efa")] if isinstance(tiers, (tuple, list)) else []
    inner = tiers[0] if isinstance(tiers, (tuple, list)) and tiers else None
    found = [
        ("sms", get(gpu, "num_sms")),
        ("hbm", get(gpu, "hbm_bytes_per_s")),
        ("nvlink", get(inner, "bytes_per_s")),
        ("nic", get(network[0], "bytes_per_s") if network else None),
        ("host", 1),  # one launching thread a rank
    ]
    return tuple(Resource(name=n, capacity=float(c), scope="rank") for n, c in found if isinstance(c, (int, float)) and c > 0)


def _tier_problem(cluster: ClusterSpec) -> str | None:
    spans = [t.span for t in cluster.tiers]
    if None in spans[:-1]:
        return f"tiers: only the outermost tier may span everything (null), found spans {spans}"
    known = [s for s in spans if s is not None]
    if any(a >= b for a, b in zip(known, known[1:])):
        return f"tiers must be listed inner to outer with growing spans, found {spans}"
    last = spans[-1]
    if last is not None and last < cluster.num_gpus:
        return f"tiers: the outermost tier spans {last} GPUs, fewer than the {cluster.num_gpus} of the cluster; use span: null"
    names = [t.name for t in cluster.tiers]
    if len(set(names)) < len(names):
        return f"tiers: names must differ, found {names}"
    return None


class RoutingSpec(Spec):
    """How tokens spread over experts, and what happens to those above an expert's or a rank's capacity."""

    kind: Literal["balanced", "zipf", "dirichlet", "histogram"] = "balanced"
    zipf_s: Annotated[float, Field(ge=0, le=10, allow_inf_nan=False)] | None = None
    dirichlet_alpha: Annotated[float, Field(gt=0, le=1e6, allow_inf_nan=False)] | None = None
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


class MemorySpec(Spec):
    """What stands between the bytes a layout needs and "it fits"."""

    margin: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] = 0.05
    allocator_slack: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] = 0.03
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

    @cached_property
    def hash(self) -> str:
        """First 16 hex digits of the SHA-256 of the scenario as canonical JSON: same question, same hash, on any machine."""
        text = json.dumps(self.model_dump(mode="json"), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @property
    def runtime_reserve_bytes(self) -> float:
        """Bytes a GPU loses to the driver, CUDA context and communicators before the first tensor."""
        own = self.memory.runtime_reserve_bytes
        return self.cluster.runtime_reserve_bytes if own is None else own
