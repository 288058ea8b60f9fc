"""Which run does a row of published runs describe? (One row of text -> one Run a simulator can play, or one reason why not.)

A blank cell is unknown, never "none": the stack's default fills it and the Run lists the field in `assumed`, so that its interval
can widen. A text that is understood but not modelled is listed in `ignored`. Nothing is guessed in silence.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Callable, Iterable, Mapping

from . import run_fields
from .layout import DEFAULT_SMS, OVERLAP_RULES, Layout, LayoutError, format_layout, illegal, parse_layout
from .load import load_cluster
from .run_models import NotExpressible, model_of, whole
from .spec import ClusterSpec, ModelSpec, RoutingSpec, Scenario, Workload
from .stack import Stack, load_stack

REQUIRED = ("id", "model", "gpu_type", "gpus")
CLUSTERS = {"A100": "hgx_a100", "H100": "hgx_h100", "H200": "hgx_h200", "H800": "hgx_h800", "B200": "hgx_b200", "B300": "hgx_b300",
            "GB200": "gb200_nvl72", "GB300": "gb300_nvl72"}

POLICIES = ("recompute", "cuda_graphs", "overlap_flags", "dispatcher")
"""Columns that a named recipe leaves at their default by not setting them."""


@dataclass(frozen=True)
class Measured:
    """What the row reports. tokens_per_s_per_gpu: tokens/s; kind: "printed" | "step" (from batch and step time) | "derived" (from
    TFLOP/s or MFU and a FLOP count); memory_bytes: bytes a GPU as printed."""

    tokens_per_s_per_gpu: float | None
    kind: str
    memory_bytes: float | None


@dataclass(frozen=True)
class Run:
    """One published run, complete: what a simulator needs, what was measured, and what had to be assumed."""

    id: str
    kind: str
    model: ModelSpec
    cluster: ClusterSpec
    workload: Workload
    layout: Layout
    stack: Stack
    assumed: tuple[str, ...]
    pinned: tuple[str, ...]
    """The assumed policies that a recipe named by the row leaves at its default: less in doubt than an unnamed run's."""
    ignored: tuple[str, ...]
    proxy_dispatcher: bool
    measured: Measured
    release: str
    date: str
    series: str

    @property
    def site(self) -> str:
        """Cluster and software release: what anchors of one run may be used for another."""
        return f"{self.cluster.gpu.name} {self.stack.name} {self.release}"

    def scenario(self) -> Scenario:
        """The same question in the planner's terms."""
        return Scenario(name=self.id, model=self.model, cluster=self.cluster, workload=self.workload, layout=str(self.layout), stack=self.stack.name)


@dataclass(frozen=True)
class Unsupported:
    """A row no Run can be made of, with the one reason."""

    id: str
    kind: str
    reason: str


def parse_run(row: Mapping[str, str]) -> Run | Unsupported:
    """The Run of a row (column -> text, the columns of published_runs.csv), or why there is none. Never raises on bad text."""
    clean = {key: (value or "").strip() for key, value in row.items() if isinstance(key, str) and not isinstance(value, list)}
    try:
        return _parse(clean)
    except (NotExpressible, ValueError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        return Unsupported(clean.get("id", ""), clean.get("kind", ""), reason)


def parse_runs(rows: Iterable[Mapping[str, str]]) -> list[Run | Unsupported]:
    return [parse_run(row) for row in rows]


class _Draft:
    """A Run being filled: the row, the stack, and the lists of what was assumed or left unmodelled."""

    def __init__(self, row: Mapping[str, str]) -> None:
        self.row = row
        self.notes = row.get("notes", "")
        self.assumed: list[str] = []
        self.ignored: list[str] = []
        self.stack = load_stack(run_fields.stack_of(row))
        if self.stack.name == "generic":
            self.assumed.append("stack")

    def understand(self, column: str, parse: Callable[[str], Any], blank: Any) -> Any:
        """What a policy's text says. A text nobody taught the parser leaves the policy unknown, like a blank, and is listed."""
        text = self.row.get(column, "")
        try:
            return parse(text)
        except NotExpressible:
            self.ignored.append(f"{column} not understood: {text[:60]!r}")
            return blank

    def number(self, column: str, default: int | None = None) -> int:
        """The integer of a column; where it is blank the default, reported as assumed. No default: a reason."""
        text = self.row.get(column, "")
        if text:
            value = whole(text, column)
            if value < 1:
                raise NotExpressible(f"{column}: must be at least 1, got {text}")
            return value
        if default is None:
            raise NotExpressible(f"{column}: not stated")
        self.assumed.append(column)
        return default


def _parse(row: Mapping[str, str]) -> Run:
    for column in REQUIRED:
        if not row.get(column):
            raise NotExpressible(f"{column}: not stated")
    if re.search(r"\bLoRA\b|\bPEFT\b", row.get("notes", "")):
        raise NotExpressible("LoRA trains a fraction of the weights; not modelled")
    row, filled = run_fields.recipe_defaults(row)
    draft = _Draft(row)
    draft.assumed += filled
    num_gpus = draft.number("gpus")
    seq_len = _seq_len(draft)
    model, model_assumed = model_of(row, seq_len)
    draft.assumed += model_assumed
    cluster = _cluster(draft, num_gpus)
    layout = _layout(draft, model, num_gpus)
    workload = _workload(draft, model, layout, seq_len)
    layout = _legal(draft, layout, model, workload, num_gpus)
    if re.search(r"\bHBM2e\b|\bat \d+ W\b", draft.notes) and row["gpu_type"].upper() == "H100":
        draft.assumed.append("gpu")  # a variant with less bandwidth and power than the H100 SXM that is priced
    if re.search(r"\bSFT\b", draft.notes):
        draft.ignored.append("fine-tuning data")
    assumed = tuple(dict.fromkeys(draft.assumed))
    named = bool(filled) or ("recipe " in draft.notes and "no recipe found" not in draft.notes)
    return Run(
        id=row["id"], kind="moe" if model.num_experts else "dense", model=model, cluster=cluster, workload=workload, layout=layout,
        stack=draft.stack, assumed=assumed, pinned=tuple(a for a in assumed if named and a in POLICIES), ignored=tuple(draft.ignored),
        proxy_dispatcher=layout.ep > 1 and run_fields.is_proxy(row.get("dispatcher", "")),
        measured=_measured(row, model, cluster, workload), release=run_fields.release_of(row), date=row.get("date", ""), series=run_fields.series_of(row),
    )


def _seq_len(draft: _Draft) -> int:
    # SimuMax's cases run 4,096 tokens unless their name says otherwise; elsewhere a missing length leaves the work unknown
    return draft.number("seq", 4096 if draft.stack.name == "simumax" else None)


def _cluster(draft: _Draft, num_gpus: int) -> ClusterSpec:
    found = re.match(r"(?:NVIDIA )?(GB[23]00|B[23]00|[HA]\d00)(?![0-9A-Z])", draft.row["gpu_type"].upper())
    gpu = found.group(1) if found else ""
    if gpu not in CLUSTERS:
        raise NotExpressible(f"gpu_type: {draft.row['gpu_type']!r} has no shipped cluster; known: {', '.join(CLUSTERS)}")
    domain = draft.row.get("nvlink_domain", "")
    gbps = _positive(draft.row, "net_gbps_per_gpu")
    transport = "efa" if re.search(r"\bEFA\b", draft.notes + draft.row.get("dispatcher", "")) else "roce" if "RoCE" in draft.notes else ""
    return _sized_cluster(CLUSTERS[gpu], num_gpus, whole(domain, "nvlink_domain") if domain else 0, gbps or 0.0, transport)


@lru_cache(maxsize=1024)
def _sized_cluster(preset: str, num_gpus: int, domain: int, gbps: float, transport: str) -> ClusterSpec:
    """The preset with as many nodes as hold the GPUs, and the row's own NVLink domain, NIC rate and fabric."""
    base = load_cluster(preset)
    per_node = min(base.gpus_per_node, num_gpus)
    if num_gpus % per_node:
        raise NotExpressible(f"gpus: {num_gpus} is not a whole number of nodes of {per_node}")
    tiers = []
    for index, tier in enumerate(base.tiers):
        change: dict[str, Any] = {}
        if index == 0 and domain and tier.span != domain:
            change["span"] = domain
        if tier.transport in ("ib", "roce", "efa"):
            change |= {"bytes_per_s": gbps * 1e9 / 8} if gbps else {}
            change |= {"transport": transport} if transport else {}
        tiers.append(tier.model_copy(update=change))
    fields = {name: getattr(base, name) for name in ClusterSpec.model_fields if name != "resources"}
    return ClusterSpec(**{**fields, "gpus_per_node": per_node, "num_nodes": num_gpus // per_node, "tiers": tuple(tiers)})


def _layout(draft: _Draft, model: ModelSpec, num_gpus: int) -> Layout:
    stack = draft.stack
    values = dict(stack.defaults)
    degrees = {name: draft.number(name) for name in ("tp", "pp")}
    cp = draft.number("cp", 1)
    rest = degrees["tp"] * degrees["pp"] * cp
    if num_gpus % rest:
        raise NotExpressible(f"world mismatch: tp*pp*cp = {rest} does not divide {num_gpus} GPUs")
    values |= degrees | {"cp": cp, "dp": num_gpus // rest}
    _experts(draft, model, values)
    _sharding(draft, values)
    _policies(draft, model, values)
    _pipeline(draft, model, values)
    return parse_layout(format_layout(Layout(**values)))


def _experts(draft: _Draft, model: ModelSpec, values: dict[str, Any]) -> None:
    if not model.num_experts:
        return
    values["ep"] = draft.number("ep", 1)
    follows = draft.stack.unstated_etp == "tp" or "ETP follows TP" in draft.notes
    values["etp"] = draft.number("etp", values["tp"] if follows else 1) if values["tp"] > 1 or draft.row.get("etp") else 1


def _sharding(draft: _Draft, values: dict[str, Any]) -> None:
    stated = run_fields.data_parallel(draft.row.get("dp_or_fsdp", ""))
    if not stated:
        draft.assumed.append("dp_or_fsdp")
    if stated.get("dp", values["dp"]) != values["dp"]:
        raise NotExpressible(f"world mismatch: dp_or_fsdp says {stated['dp']}, tp*pp*cp leaves {values['dp']}")
    values["zero"] = stated.get("zero", 1 if values.get("zero", 1) == 3 and "dp" in stated else values.get("zero", 1))
    values["reshard"] = stated.get("reshard", values["pp"] == 1) if values["zero"] == 3 else True
    shard = stated.get("shard")
    # a sharding group smaller than the replicas: the rest of them hold whole copies; CP ranks shard too under FSDP
    if shard and shard < values["dp"]:
        if values["dp"] % shard:
            raise NotExpressible(f"dp_or_fsdp: a group of {shard} does not divide dp = {values['dp']}")
        values["rep"] = values["dp"] // shard
    rules = set(values.get("overlap", ())) - ({"param"} if values["zero"] == 3 else set())
    if values["zero"] == 3 and draft.stack.fsdp_prefetch:
        rules.add("fsdp")
        values["prefetch"] = draft.stack.fsdp_prefetch
    values["overlap"] = rules


def _policies(draft: _Draft, model: ModelSpec, values: dict[str, Any]) -> None:
    row, stack = draft.row, draft.stack
    recompute, offload = draft.understand("recompute", lambda text: run_fields.recompute(text, stack.selective_recompute), ({}, ()))
    overlap, unmodelled = draft.understand("overlap_flags", run_fields.overlap, ({}, ()))
    graphs = draft.understand("cuda_graphs", run_fields.graphs, {})
    draft.ignored += [*offload, *unmodelled]
    for column, stated in (("precision", run_fields.precision(row.get("precision", ""))), ("recompute", recompute), ("cuda_graphs", graphs)):
        values |= stated
        if not stated:
            draft.assumed.append(column)
    if not overlap:
        draft.assumed.append("overlap_flags")
    rules = (values["overlap"] | overlap.get("rules", set())) - overlap.get("off", set())
    values["overlap"] = tuple(r for r in OVERLAP_RULES if r in rules)
    if overlap.get("dualpipe"):
        values |= {"schedule": "dualpipev", "vpp": 2}
    _dispatcher(draft, model, values)
    if "BF16 Adam moments" in draft.notes:
        values["optimizer"] = "bf16"


def _dispatcher(draft: _Draft, model: ModelSpec, values: dict[str, Any]) -> None:
    stated = draft.understand("dispatcher", run_fields.dispatcher, {})
    if model.num_experts and values.get("ep", 1) > 1 and not stated:
        draft.assumed.append("dispatcher")
    values |= stated
    values.setdefault("dispatcher", "alltoall")
    values.setdefault("sms", DEFAULT_SMS[values["dispatcher"]])


def _pipeline(draft: _Draft, model: ModelSpec, values: dict[str, Any]) -> None:
    values["mb"] = _micro_batch(draft, values)
    if values["pp"] == 1 or values.get("schedule") == "dualpipev":
        return
    stages = run_fields.stages(draft.notes)
    # One layer a chunk; where layers don't divide, the embedding and the loss may each stand for one.
    counts = [n // values["pp"] for n in (model.num_layers, model.num_layers + 2) if n % values["pp"] == 0]
    deepest = counts[0] if draft.stack.unstated_vpp == "full" and counts else 1
    # Forwards are paired with backwards of other microbatches in the interleaved schedule only
    # (https://docs.nvidia.com/megatron-core/developer-guide/latest/apidocs/core/core.pipeline_parallel.combined_1f1b.html).
    if "ep" in values["overlap"] and counts and counts[0] > 1:
        deepest = max(deepest, next(v for v in range(2, counts[0] + 1) if counts[0] % v == 0))
    vpp = draft.number("vpp", len(stages) // values["pp"] if stages and len(stages) % values["pp"] == 0 else deepest)
    if "interleaved schedule" in draft.notes and vpp == 1:
        vpp = 2
    values["vpp"], values["schedule"] = vpp, "interleaved" if vpp > 1 else "1f1b"
    if stages and len(stages) == values["pp"] * vpp and sum(stages) == model.num_layers:
        values["stages"] = stages
    elif values["pp"] * vpp == model.num_layers + 2:  # embedding and loss each count as a layer: the end stages hold only them
        values["stages"] = (0,) + (1,) * model.num_layers + (0,)
    elif draft.stack.unstated_stages == "short_last":
        values["stages"] = _short_last(model.num_layers, values["pp"] * vpp)


def _short_last(num_layers: int, num_stages: int) -> tuple[int, ...]:
    """Equal stages but the last, which also holds MTP modules and the loss; () where layers divide, or would with the embedding and
    the loss counted as one each."""
    each = -(-num_layers // num_stages)
    rest = num_layers - each * (num_stages - 1)
    return () if num_layers % num_stages == 0 or (num_layers + 2) % num_stages == 0 or rest < 1 else (each,) * (num_stages - 1) + (rest,)


def _micro_batch(draft: _Draft, values: dict[str, Any]) -> int:
    if "split into micro-batches by the schedule" in draft.notes or (draft.stack.name == "torchtitan" and values["pp"] > 1):
        draft.assumed.append("mbs")
        return 1
    return draft.number("mbs", 1)


def _workload(draft: _Draft, model: ModelSpec, layout: Layout, seq_len: int) -> Workload:
    values, stated = run_fields.routing(draft.notes)
    if model.num_experts and not stated:
        draft.assumed.append("routing")
    routing = RoutingSpec(**values) if model.num_experts else RoutingSpec()
    return Workload(seq_len=seq_len, global_batch_tokens=_sequences(draft, layout) * seq_len, routing=routing)


def _sequences(draft: _Draft, layout: Layout) -> int:
    """Sequences a step: the gbs column, a guess or a count of micro-batches in the notes (both assumed)."""
    if draft.row.get("gbs"):
        return draft.number("gbs")
    guess = re.search(r"GBS [^;]*\(guess (\d+)\)", draft.notes)
    micro_batches = re.search(r"(\d+) micro-?batch(?:es)? per step", draft.notes)
    if guess:
        return draft.number("gbs", int(guess.group(1)))
    if micro_batches:
        return draft.number("gbs", int(micro_batches.group(1)) * layout.mb * layout.dp)
    return draft.number("gbs")


def _legal(draft: _Draft, layout: Layout, model: ModelSpec, workload: Workload, num_gpus: int) -> Layout:
    """The layout if it can run; an interleave that was only assumed gives way to plain 1F1B before the row is refused."""
    reason = illegal(layout, model, workload, num_gpus)
    if reason and "vpp" in draft.assumed and layout.vpp > 1:
        plain = replace(layout, vpp=1, schedule="1f1b", stages=())
        if not illegal(plain, model, workload, num_gpus):
            return plain
    if reason:
        raise LayoutError(reason)
    return layout


def _measured(row: Mapping[str, str], model: ModelSpec, cluster: ClusterSpec, workload: Workload) -> Measured:
    memory = _positive(row, "mem_gb_per_gpu")
    memory_bytes = None if memory is None else memory * 1e9
    tokens, step = _positive(row, "tokens_per_s_per_gpu"), _positive(row, "step_time_s")
    if tokens is not None:
        return Measured(tokens, "step" if "computed here from GBS" in row.get("notes", "") else "printed", memory_bytes)
    if step is not None:
        return Measured(workload.global_batch_tokens / step / cluster.num_gpus, "step", memory_bytes)
    tflops, mfu = _positive(row, "model_tflops_per_gpu"), _positive(row, "mfu")
    rate = tflops * 1e12 if tflops is not None else mfu * cluster.gpu.peak_flops["bf16"] if mfu is not None else None
    if rate is None:
        return Measured(None, "none", memory_bytes)
    return Measured(rate / _counted_flops(row, model, workload.seq_len), "derived", memory_bytes)


def _counted_flops(row: Mapping[str, str], model: ModelSpec, seq_len: int) -> float:
    """FLOP a token as the source counts them: stated in the notes, else the ledger; NVIDIA's dense tables before 25.09 count the
    whole attention square (51.5 against 57.9 GFLOP for Llama 3 8B)."""
    stated = re.search(r"at ([\d.]+) GFLOP/token", row.get("notes", ""))
    if stated:
        return float(stated.group(1)) * 1e9
    source, date = row.get("source_address", ""), row.get("date", "9999")
    whole_square = not model.num_experts and date < "2025-09" and re.search(r"NVIDIA|nvidia", source)
    parts = model.flops_by_role(seq_len)
    return sum(parts.values()) + (parts["attention_core"] if whole_square else 0.0)


def _positive(row: Mapping[str, str], column: str) -> float | None:
    text = row.get(column, "")
    if not text:
        return None
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 < value < 1e15:
        raise NotExpressible(f"{column}: {text[:40]!r} is not a positive number")
    return value
