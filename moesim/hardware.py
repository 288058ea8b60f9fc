"""What is a cluster: its GPUs, how they are wired, what they share, what they cost?

Also the base of every spec and the number types all of them use. A figure nobody published is absent, never guessed.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator


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
NonNegative = Annotated[float, Field(ge=0, le=1e12, allow_inf_nan=False)]
Name = Annotated[str, Field(min_length=1, max_length=200)]
Text = Annotated[str, Field(min_length=1, max_length=600)]


class Spec(BaseModel):
    """Base of every noun: unknown keys refused, no coercion of types, no mutation."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")


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

    def __hash__(self) -> int:  # dicts have no hash of their own
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


NODE_RESOURCES = ("cores", "pinned_cores", "memory")
"""What ranks of one node can share: cores that any of them may use, or cores that they are dealt to in turn; bytes/s of memory."""


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
        if not isinstance(data, dict):
            return data
        whole = {k: tuple(v) if isinstance(v, list) else v for k, v in data.items()}  # as JSON has them
        return whole if "resources" in data else whole | {"resources": _gpu_resources(whole)}

    @model_validator(mode="after")
    def _check(self) -> ClusterSpec:
        problem = _tier_problem(self) or _resource_problem(self)
        if problem:
            raise ValueError(problem)
        return self

    def __hash__(self) -> int:
        return hash((self.name, self.gpu, self.num_nodes, self.tiers))

    @property
    def num_gpus(self) -> int:
        """GPUs of the whole cluster."""
        return self.num_nodes * self.gpus_per_node

    @property
    def domain(self) -> int:
        """GPUs of one innermost tier that a job uses together: 8 in an HGX node, all 72 of an NVL72 rack when the job fills whole
        racks, else 64 of each, so that power-of-two groups stay inside (how the published GB200 and GB300 runs are placed)."""
        span = self.tiers[0].span or self.num_gpus
        if self.num_gpus <= span:
            return self.num_gpus
        return span if self.num_gpus % span == 0 else 1 << span.bit_length() - 1

    @property
    def price(self) -> float | None:
        """US dollars a GPU-hour: the cluster's own price, else the GPU's list price, else unknown."""
        if self.usd_per_gpu_hour is not None:
            return self.usd_per_gpu_hour
        return self.gpu.usd_per_hour.list if self.gpu.usd_per_hour else None


def _gpu_resources(data: dict[str, Any]) -> tuple[Any, ...]:
    """The shared resources of a GPU cluster, from fields that may still be plain dicts; what is unknown is left out."""
    gpu = data.get("gpu")
    tiers = data["tiers"] if isinstance(data.get("tiers"), (tuple, list)) else ()
    found = {
        "sms": _get(gpu, "num_sms"),
        "hbm": _get(gpu, "hbm_bytes_per_s"),
        "nvlink": _first_rate(tiers, ("nvlink",)),
        "nic": _first_rate(tiers, ("ib", "roce", "efa")),
        "host": 1,  # one launching thread a rank
    }
    numbers = {name: float(c) for name, c in found.items() if isinstance(c, (int, float)) and 0 < c < 1e30}
    return tuple(Resource(name=name, capacity=c, scope="rank") for name, c in numbers.items())


def _get(thing: Any, key: str) -> Any:
    return thing.get(key) if isinstance(thing, dict) else getattr(thing, key, None)


def _first_rate(tiers: Any, transports: tuple[str, ...]) -> Any:
    """Bytes/s of the innermost tier over one of these transports."""
    return next((_get(t, "bytes_per_s") for t in tiers if _get(t, "transport") in transports), None)


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


def _resource_problem(cluster: ClusterSpec) -> str | None:
    shared = {r.name: r.capacity for r in cluster.resources if r.scope == "node"}
    other = [name for name in shared if name not in NODE_RESOURCES]
    if other:
        return f"resources: no {other[0]!r} of scope node, known are {', '.join(NODE_RESOURCES)}"
    if "cores" in shared and "pinned_cores" in shared:
        return "resources: ranks either share cores or are pinned to them: give cores or pinned_cores"
    if shared.get("pinned_cores", 1.0) % 1:
        return f"resources: pinned_cores must be a whole number, found {shared['pinned_cores']:g}"
    names = [r.name for r in cluster.resources]
    return f"resources: names must differ, found {names}" if len(set(names)) < len(names) else None
