"""How is the work divided over the GPUs? (Degrees and policies of one training run, their text form, and where each group of
ranks lies on the cluster.)

Text form, the same everywhere (scenario files, ``--layout``, ``--pin``, tables, JSON, launch configs). Omitted = default;
tokens may come in any order and are printed in the order below::

    layout     = token { " " token } ;
    token      = degree | zero | reshard | batch | schedule | recompute | dispatcher | overlap | precision | gradient
               | optimizer | graphs | stages ;
    degree     = ( "pp" | "vpp" | "dp" | "rep" | "cp" | "tp" | "ep" | "etp" ) integer ;   (default 1)
    zero       = "zero" ( "0" | "1" | "2" | "3" ) ;                                       (default zero1)
    reshard    = "noreshard" ;          keep gathered ZeRO-3 weights inside the accumulation window (default: reshard)
    batch      = "mb" integer ;                                                           (default mb1)
    schedule   = "gpipe" | "1f1b" | "interleaved" | "interleaved_zb" | "zbv" | "dualpipev" ;   (default 1f1b)
    recompute  = "rc:" ( "none" | "full" | role { "+" role } ) ;                          (default rc:none)
    dispatcher = "a2a" | "syncfree" | "dedup" [ ":" sms ] ;                               (default a2a)
    overlap    = "ov:" ( "none" | rule { "+" rule } ) ;                                   (default ov:none)
    rule       = "ep" | "shared" | "grad" | "param" | "fsdp" integer ;
    precision  = "bf16" | "fp8" | "mxfp8" | "nvfp4" ;                                     (default bf16)
    gradient   = "grad:" ( "fp32" | "bf16" ) ;                                            (default grad:fp32)
    optimizer  = "opt:" ( "fp32" | "bf16" | "fp8" ) ;      state of AdamW's moments       (default opt:fp32)
    graphs     = "graph:" ( "none" | "router" | "layer" | "full" ) ;                      (default graph:none)
    stages     = "st:" count { "/" count } ;      layers of each virtual stage            (default: even, ends lighter)

``pp*dp*cp*tp`` is the world; expert weights fold over the same ranks: ``ep*etp*edp*pp`` is the world too. Ranks are numbered
tp fastest, then cp, dp, pp (Megatron-Core's order); for experts etp fastest, then ep, edp, pp.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass, fields
from functools import cached_property

from moesim.ops import Group

SCHEDULES = ("gpipe", "1f1b", "interleaved", "interleaved_zb", "zbv", "dualpipev")
PRECISIONS = ("bf16", "fp8", "mxfp8", "nvfp4")
DISPATCHERS = {"a2a": "alltoall", "syncfree": "sync_free", "dedup": "dedup"}
DEFAULT_SMS = {"alltoall": 0, "sync_free": 24, "dedup": 24}
"""SMs a dispatcher reserves: DeepEP's normal kernels use 20-24 of them (https://github.com/deepseek-ai/DeepEP); NCCL's own
all-to-all channels are priced in its measured curves."""
OVERLAP_RULES = ("ep", "shared", "grad", "param", "fsdp")
RECOMPUTE_ROLES = ("norm", "qkv", "core_attn", "mla_up", "attn_out", "router", "moe_act", "mlp_act", "shared", "experts", "mlp")
"""Roles whose activations can be rebuilt in backward: the union of Megatron-Core's --recompute-modules names."""


class LayoutError(ValueError):
    """A layout text or combination that can't be used; the message is one line."""


@dataclass(frozen=True)
class Layout:
    """One way to run a model on a cluster. All degrees are counts; see the module docstring for the text form."""

    pp: int = 1
    vpp: int = 1
    dp: int = 1
    rep: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1
    etp: int = 1
    zero: int = 1
    reshard: bool = True
    mb: int = 1
    schedule: str = "1f1b"
    recompute: tuple[str, ...] = ()
    dispatcher: str = "alltoall"
    sms: int = 0
    overlap: tuple[str, ...] = ()
    prefetch: int = 0
    precision: str = "bf16"
    grad: str = "fp32"
    optimizer: str = "fp32"
    graphs: str = "none"
    stages: tuple[int, ...] = ()

    @property
    def world(self) -> int:
        return self.pp * self.dp * self.cp * self.tp

    @property
    def edp(self) -> int:
        """Expert data parallel degree: replicas of each expert shard."""
        return self.dp * self.cp * self.tp // (self.ep * self.etp)

    @property
    def num_virtual_stages(self) -> int:
        return self.pp * self.vpp

    def overlaps(self, rule: str) -> bool:
        return rule in self.overlap

    @cached_property
    def groups(self) -> dict[str, Group]:
        """Axis -> the ranks that communicate. "dense" and "expert" are the replicas over which gradients are reduced;
        "shard"/"replica" split "dense" under HSDP."""
        dense = self.dp * self.cp
        shard = dense // self.rep
        return {
            "tp": Group(self.tp, 1),
            "cp": Group(self.cp, self.tp),
            "dp": Group(self.dp, self.tp * self.cp),
            "dense": Group(dense, self.tp),
            "shard": Group(shard, self.tp),
            "replica": Group(self.rep, self.tp * shard),
            "etp": Group(self.etp, 1),
            "ep": Group(self.ep, self.etp),
            "expert": Group(self.edp, self.ep * self.etp),
            "pp": Group(self.pp, self.tp * self.cp * self.dp),
            "world": Group(self.world, 1),
        }

    def __str__(self) -> str:
        return format_layout(self)


_DEGREES = ("pp", "vpp", "dp", "rep", "cp", "tp", "ep", "etp")
_DEFAULT = Layout()


def format_layout(layout: Layout) -> str:
    """Canonical text: degrees first, defaults omitted except ZeRO, micro-batch and schedule, which are always shown."""
    out = [f"{name}{getattr(layout, name)}" for name in _DEGREES if getattr(layout, name) != 1]
    out.append(f"zero{layout.zero}")
    if not layout.reshard:
        out.append("noreshard")
    out += [f"mb{layout.mb}", layout.schedule]
    if layout.recompute:
        out.append("rc:" + "+".join(layout.recompute))
    out += _format_dispatcher(layout)
    if layout.overlap:
        out.append("ov:" + "+".join(f"fsdp{layout.prefetch}" if r == "fsdp" else r for r in layout.overlap))
    for prefix, name in (("", "precision"), ("grad:", "grad"), ("opt:", "optimizer"), ("graph:", "graphs")):
        if getattr(layout, name) != getattr(_DEFAULT, name):
            out.append(prefix + getattr(layout, name))
    if layout.stages:
        out.append("st:" + "/".join(map(str, layout.stages)))
    return " ".join(out)


def _format_dispatcher(layout: Layout) -> list[str]:
    short = next(k for k, v in DISPATCHERS.items() if v == layout.dispatcher)
    if layout.sms != DEFAULT_SMS[layout.dispatcher]:
        return [f"{short}:{layout.sms}"]
    return [] if layout.dispatcher == "alltoall" else [short]


def parse_layout(text: str) -> Layout:
    """Layout of ``text``. Raises LayoutError naming the bad token, what is legal, and the nearest match."""
    values: dict[str, object] = {}
    for token in text.split():
        for name, value in parse_token(token).items():
            if name in values and name != "schedule":
                raise LayoutError(f"layout {text!r}: {token!r} sets {name} twice")
            if name in values:
                raise LayoutError(f"layout {text!r}: two schedules, {values[name]!r} and {token!r}")
            values[name] = value
    if not text.strip():
        raise LayoutError("layout is empty: write at least one token, such as 'dp8 ep8 zero1 mb1 1f1b'")
    if "dispatcher" in values and "sms" not in values:
        values["sms"] = DEFAULT_SMS[values["dispatcher"]]
    layout = Layout(**values)
    _check_shape(layout, text)
    return layout


def parse_token(token: str) -> dict[str, object]:
    """Layout fields that one token of the text form sets. Raises LayoutError."""
    if token in SCHEDULES:
        return {"schedule": token}
    if token in PRECISIONS:
        return {"precision": token}
    if token == "noreshard":
        return {"reshard": False}
    head, _, tail = token.partition(":")
    if head in _PREFIXED and tail:
        return _PREFIXED[head](tail, token)
    if head in DISPATCHERS:
        return {"dispatcher": DISPATCHERS[head]} | ({"sms": _integer(tail, token, 0, 1024)} if tail else {})
    name = token.rstrip("0123456789")
    digits = token[len(name):]
    if name == "zero" and digits in ("0", "1", "2", "3"):
        return {"zero": int(digits)}
    if name in _DEGREES or name == "mb":
        return {name: _integer(digits, token, 1, 1_000_000)}
    raise LayoutError(_unknown(token))


def _unknown(token: str) -> str:
    known = [*SCHEDULES, *PRECISIONS, *DISPATCHERS, "noreshard", *(d + "2" for d in _DEGREES), "mb1", "zero1", "rc:full",
             "ov:ep", "grad:fp32", "opt:fp32", "graph:layer", "st:4/4"]
    near = difflib.get_close_matches(token, known, n=1, cutoff=0.4)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return f"layout token {token!r} is not one of degrees ppN vppN dpN repN cpN tpN epN etpN, zero0-3, mbN, a schedule, rc:, ov:, grad:, opt:, graph:, st:{hint}"


def _integer(digits: str, token: str, low: int, high: int) -> int:
    if not digits.isascii() or not digits.isdigit() or len(digits) > 9 or not low <= int(digits) <= high:
        raise LayoutError(f"layout token {token!r} needs an integer from {low} to {high}")
    return int(digits)


def _choice(name: str, legal: tuple[str, ...]):
    def parse(tail: str, token: str) -> dict[str, object]:
        if tail not in legal:
            near = difflib.get_close_matches(tail, legal, n=1, cutoff=0.0)
            raise LayoutError(f"layout token {token!r}: {tail!r} is not one of {', '.join(legal)}; nearest {near[0] if near else legal[0]!r}")
        return {name: tail}
    return parse


def _recompute(tail: str, token: str) -> dict[str, object]:
    if tail == "none":
        return {"recompute": ()}
    roles = tail.split("+")
    for role in roles:
        _choice("recompute", ("full", "none", *RECOMPUTE_ROLES))(role, token)
    if ("full" in roles or "none" in roles) and len(roles) > 1:
        raise LayoutError(f"layout token {token!r}: 'full' and 'none' stand alone")
    return {"recompute": ("full",) if roles == ["full"] else tuple(r for r in RECOMPUTE_ROLES if r in roles)}


def _overlap(tail: str, token: str) -> dict[str, object]:
    if tail == "none":
        return {"overlap": (), "prefetch": 0}
    rules, prefetch = set(), 0
    for rule in tail.split("+"):
        name = rule.rstrip("0123456789")
        _choice("overlap", OVERLAP_RULES)(name, token)
        if name == "fsdp":
            prefetch = _integer(rule[4:], token, 1, 64)
        elif name != rule:
            raise LayoutError(f"layout token {token!r}: only fsdp takes a number (the prefetch window)")
        rules.add(name)
    return {"overlap": tuple(r for r in OVERLAP_RULES if r in rules), "prefetch": prefetch}


def _stages(tail: str, token: str) -> dict[str, object]:
    return {"stages": tuple(_integer(part, token, 0, 10_000) for part in tail.split("/"))}


_PREFIXED = {
    "rc": _recompute,
    "ov": _overlap,
    "grad": _choice("grad", ("fp32", "bf16")),
    "opt": _choice("optimizer", ("fp32", "bf16", "fp8")),
    "graph": _choice("graphs", ("none", "router", "layer", "full")),
    "st": _stages,
}


def _check_shape(layout: Layout, text: str) -> None:
    """Conditions that need no model or cluster."""
    folded = layout.dp * layout.cp * layout.tp
    if folded % (layout.ep * layout.etp):
        raise LayoutError(f"layout {text!r}: ep*etp = {layout.ep * layout.etp} does not divide dp*cp*tp = {folded}")
    if layout.dp * layout.cp % layout.rep:
        raise LayoutError(f"layout {text!r}: rep{layout.rep} does not divide dp*cp = {layout.dp * layout.cp}")
    if layout.stages and len(layout.stages) != layout.num_virtual_stages:
        raise LayoutError(f"layout {text!r}: st: names {len(layout.stages)} stages, pp*vpp has {layout.num_virtual_stages}")
    if not layout.reshard and layout.zero != 3:
        raise LayoutError(f"layout {text!r}: noreshard belongs to zero3")
    if layout.overlaps("fsdp") and layout.zero != 3:
        raise LayoutError(f"layout {text!r}: ov:fsdpN (gather prefetch) belongs to zero3")
    if layout.dispatcher == "alltoall" and layout.sms:
        raise LayoutError(f"layout {text!r}: a2a takes no SM count (NCCL chooses); use dedup:N or syncfree:N")


def illegal(layout: Layout, model, workload, num_gpus: int) -> str | None:
    """Why ``layout`` can't run ``model`` with ``workload`` on ``num_gpus`` (one line), or None when it can."""
    for check in (_world, _batch, _attention_shards, _expert_shards, _layer_split, _schedule):
        reason = check(layout, model, workload, num_gpus)
        if reason:
            return reason
    return None


def _world(layout, model, workload, num_gpus):
    if layout.world != num_gpus:
        return f"pp*dp*cp*tp = {layout.world} is not the {num_gpus} GPUs of the cluster"


MAX_MICROBATCHES = 16_384
"""A play walks every microbatch; published runs have hundreds at most."""


def num_microbatches(layout: Layout, workload) -> int:
    """Microbatches a rank runs each step (0 when the batch does not divide)."""
    per_microbatch = layout.dp * layout.mb * workload.seq_len
    return workload.global_batch_tokens // per_microbatch if workload.global_batch_tokens % per_microbatch == 0 else 0


def _batch(layout, model, workload, num_gpus):
    if not num_microbatches(layout, workload):
        return (f"global batch of {workload.global_batch_tokens} tokens is not a multiple of dp*mb*seq_len = "
                f"{layout.dp * layout.mb * workload.seq_len}")
    if num_microbatches(layout, workload) > MAX_MICROBATCHES:
        return f"{num_microbatches(layout, workload)} microbatches a step are more than {MAX_MICROBATCHES}"


def _attention_shards(layout, model, workload, num_gpus):
    kv_heads = model.num_kv_heads if model.attention == "gqa" else model.num_heads
    if model.num_heads % layout.tp:
        return f"tp{layout.tp} does not divide {model.num_heads} attention heads"
    if kv_heads % layout.tp and layout.tp % kv_heads:
        return f"tp{layout.tp} does not divide {kv_heads} key-value heads"
    chunk = 2 * layout.cp if layout.cp > 1 else 1
    if workload.seq_len % (chunk * layout.tp):
        return f"sequence {workload.seq_len} does not split over cp{layout.cp} (two causal chunks a rank) and tp{layout.tp}"
    if model.intermediate_size and "dense" in model.layer_kinds() and model.intermediate_size % layout.tp:
        return f"tp{layout.tp} does not divide the dense FFN width {model.intermediate_size}"
    shared = model.shared_intermediate_size if model.num_experts else 0
    if shared % layout.tp:
        return f"tp{layout.tp} does not divide the shared-expert width {shared}"


def _expert_shards(layout, model, workload, num_gpus):
    if not model.num_experts:
        return "ep and etp belong to MoE models" if layout.ep * layout.etp > 1 else None
    if model.num_experts % layout.ep:
        return f"ep{layout.ep} does not divide {model.num_experts} experts"
    if model.moe_intermediate_size % layout.etp:
        return f"etp{layout.etp} does not divide the expert width {model.moe_intermediate_size}"


def _layer_split(layout, model, workload, num_gpus):
    if layout.stages and sum(layout.stages) != model.num_layers:
        return f"st: places {sum(layout.stages)} layers, the model has {model.num_layers}"
    if not layout.stages and layout.num_virtual_stages > max(1, model.num_layers):
        return f"pp*vpp = {layout.num_virtual_stages} virtual stages exceed {model.num_layers} layers"


def _schedule(layout, model, workload, num_gpus):
    from moesim.schedules import SCHEDULES as registry

    if layout.pp == 1 and layout.vpp == 1 and layout.schedule in ("1f1b", "gpipe"):
        return None
    return registry[layout.schedule].legal(layout.pp, num_microbatches(layout, workload), layout.vpp)


def stage_layers(layout: Layout, num_layers: int) -> tuple[int, ...]:
    """Layers of each virtual stage: the explicit ``st:`` list, else an even split with the remainder given to the middle
    stages first, so that the ends, which also hold the embedding and the head, stay lighter."""
    if layout.stages:
        return layout.stages
    count = layout.num_virtual_stages
    base, extra = divmod(num_layers, count)
    middle = sorted(range(count), key=lambda s: (-min(s, count - 1 - s), s))
    heavier = set(middle[:extra])
    return tuple(base + (s in heavier) for s in range(count))


LAYOUT_FIELDS = tuple(f.name for f in fields(Layout))
