"""What do the free-text cells of a row of published runs say? (One parser a column; a text nobody taught it is an error, never a guess.)

Every parser takes the cell's text and returns the Layout values it states, `{}` for a blank cell. NotExpressible carries the one
reason a text can't become a layout; `ignored` texts are understood but change nothing that is modelled.
"""

from __future__ import annotations

import re
from typing import Any, Callable

from .run_models import NotExpressible, whole

PRECISION = {"BF16": "bf16", "FP16": "bf16", "FP8": "fp8", "FP8-CS": "fp8", "FP8-DS": "fp8", "FP8-BLOCKWISE": "fp8", "FP8 TENSORWISE": "fp8",
             "FP8 ROWWISE": "fp8", "FP8 BLOCKWISE": "fp8", "MXFP8": "mxfp8", "NVFP4": "nvfp4"}
RECOMPUTE = {"layernorm": ("norm",), "norm": ("norm",), "rmsnorm": ("norm",), "moe_act": ("moe_act",), "act": ("moe_act", "mlp_act"),
             "mlp": ("mlp",), "moe": ("router", "moe_act", "shared", "experts"), "core_attn": ("core_attn",), "mla_up_proj": ("mla_up",),
             "mla up-projection": ("mla_up",), "shared_expert": ("shared",), "shared_experts": ("shared",), "attn": ("qkv", "core_attn", "attn_out")}
DISPATCHER = {"alltoall": "alltoall", "nccl": "alltoall", "hybridep": "dedup", "deepep": "dedup", "allgather": None,
              "rowwise_nvshmem": "sync_free", "syncfree": "sync_free", "sync_free": "sync_free", "sync_1d": "alltoall"}


def precision(text: str) -> dict[str, Any]:
    """FP16 runs at BF16's rates; FP8 recipes differ in scaling only, MXFP8 and NVFP4 are their own."""
    if not text:
        return {}
    if text.upper() not in PRECISION:
        raise NotExpressible(f"precision: {text!r} is not understood; known: {', '.join(sorted(PRECISION))}")
    return {"precision": PRECISION[text.upper()]}


def data_parallel(text: str) -> dict[str, Any]:
    """{"dp": degree as stated, "zero": stage, "shard": GPUs that share one copy, "reshard": bool}, only what the text states."""
    if not text:
        return {}
    low = text.lower()
    found: dict[str, Any] = {}
    for key, value in re.findall(r"(fsdp|hsdp|zero1|dp)\s*=\s*(\w+)", low):
        found[key] = value
    if "fsdp" in found:
        shard = whole(found["fsdp"], "dp_or_fsdp")
        out = {"zero": 3, "shard": shard, "dp": shard * whole(found.get("dp", "1"), "dp_or_fsdp")}
        return {**out, "reshard": False} if "grad_op" in low else out
    if "zero1" in found:
        return {"zero": 1} if found["zero1"] == "all" else {"zero": 1, "shard": whole(found["zero1"], "dp_or_fsdp")}
    if "dp" in found:
        return {"dp": whole(found["dp"], "dp_or_fsdp")}
    if "fsdp" in low:
        return {"zero": 3}
    if low in ("zero-1", "ddp + distributed optimizer", "distributed optimizer"):
        return {"zero": 1}
    if low in ("ddp", "zero-0"):
        return {"zero": 0}
    raise NotExpressible(f"dp_or_fsdp: {text!r} is not understood")


def recompute(text: str, bare_selective: tuple[str, ...]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """(layout values, understood texts that are not modelled). `bare_selective`: the roles a stack means by "selective"."""
    low = text.strip().lower()
    ignored = []
    if "cpu_offload" in low:
        low, ignored = low[: low.index("+cpu_offload")].strip(), [f"activation offload ({text.strip()})"]
    low = low.replace("+sequence parallel", "").split(" (")[0].strip()
    if not low:
        return {}, tuple(ignored)
    if low in ("none", "full"):
        return {"recompute": () if low == "none" else ("full",)}, tuple(ignored)
    if low == "selective":
        return {"recompute": bare_selective}, tuple(ignored)
    kind, _, modules = low.partition(":")
    if kind != "selective" or not modules:
        raise NotExpressible(f"recompute: {text!r} is not understood")
    return {"recompute": _roles(modules, text)}, tuple(ignored)


def _roles(modules: str, text: str) -> tuple[str, ...]:
    from .layout import RECOMPUTE_ROLES

    roles: set[str] = set()
    for module in modules.split("+"):
        if module.strip() not in RECOMPUTE:
            raise NotExpressible(f"recompute: module {module.strip()!r} of {text!r} is not understood")
        roles.update(RECOMPUTE[module.strip()])
    return tuple(role for role in RECOMPUTE_ROLES if role in roles)


def dispatcher(text: str) -> dict[str, Any]:
    """Dispatcher and, where stated, its SMs ("deepep (20 SMs)")."""
    if not text:
        return {}
    low = text.lower()
    name = re.split(r"[\s(]", low)[0]
    if DISPATCHER.get(name) is None:
        raise NotExpressible(f"dispatcher: {text!r} " + ("(all-gather of every token) is not modelled" if name == "allgather" else "is not understood"))
    sms = re.search(r"(\d+)\s*sms", low)
    return {"dispatcher": DISPATCHER[name]} | ({"sms": int(sms.group(1))} if sms and DISPATCHER[name] != "alltoall" else {})


def is_proxy(text: str) -> bool:
    """Whether a CPU proxy forwards this dispatcher's messages (DeepEP carried over EFA), instead of the GPU ringing the NIC."""
    return "efa" in text.lower()


def overlap(text: str) -> tuple[dict[str, Any], tuple[str, ...]]:
    """({"rules": rules the text turns on, "off": rules it turns off, "dualpipe": bool}, understood texts not modelled)."""
    low = text.strip().lower()
    if not low:
        return {}, ()
    out: dict[str, Any] = {"rules": set(), "off": set()}
    ignored = []
    for part in re.split(r"[+,]", low):
        part = part.strip()
        name = part.split(" (")[0].strip()
        if name == "none":
            out["off"] |= {"ep", "shared"}
        elif name in ("ep_a2a_1f1b", "ep_overlap", "ep a2a overlap"):
            out["rules"].add("ep")
        elif re.match(r"grad[-_ ]reduce", name):
            out["rules"] |= {"grad", "param"} if "param" in name else {"grad"}
        elif re.match(r"param[-_ ]gather", name):
            out["rules"].add("param")
        elif name in ("shared_expert", "shared expert overlap", "shared_expert_overlap"):
            out["rules"].add("shared")
        elif name == "dualpipe":
            out["rules"].add("ep")
            out["dualpipe"] = True
        elif name in ("async_tp", "tp_comm_overlap", "delay_wgrad", "delayed wgrad", "high-priority a2a stream"):
            ignored.append(name)
        else:
            raise NotExpressible(f"overlap_flags: {part!r} of {text!r} is not understood")
    return out, tuple(ignored)


def graphs(text: str) -> dict[str, Any]:
    """"full_iteration" -> full; Transformer Engine's partial scopes and per-layer graphs -> layer."""
    low = text.strip().lower()
    if not low:
        return {}
    if low == "none":
        return {"graphs": "none"}
    if low in ("full_iteration", "full iteration", "full"):
        return {"graphs": "full"}
    if low.startswith("te") or low in ("layer graphs", "layer", "on", "partial"):
        return {"graphs": "layer"}
    raise NotExpressible(f"cuda_graphs: {text!r} is not understood")


def stages(notes: str) -> tuple[int, ...] | None:
    """Layers of each virtual stage from a Megatron pipeline-layout string in the notes ("Et*4/(t*4/)*14tmL"), or None.

    E embedding, t layer, m MTP module, L loss; "/" or "|" ends a stage; (..)*n and x*n repeat.
    """
    found = re.search(r"\bE[tmL*/|()\d]+", notes)
    if not found or not re.search(r"[/|]", found.group(0)):
        return None
    text = found.group(0).rstrip("/|")
    while True:
        inner = re.search(r"\(([^()]*)\)\*(\d+)", text)
        if not inner or int(inner.group(2)) > 1000:
            break
        text = text[: inner.start()] + inner.group(1) * int(inner.group(2)) + text[inner.end():]
    text = re.sub(r"([EtmL])\*(\d{1,3})", lambda m: m.group(1) * int(m.group(2)), text)
    if re.search(r"[^EtmL/|]", text):
        return None
    return tuple(part.count("t") for part in re.split(r"[/|]", text))


def routing(notes: str) -> tuple[dict[str, Any], bool]:
    """(RoutingSpec values, whether the notes state them). Unstated routing is balanced."""
    low = notes.lower()
    capacity = re.search(r"rank capacity factor (\d+(?:\.\d+)?)", low)
    if capacity:
        return {"kind": "zipf", "zipf_s": 0.15, "capacity_factor": float(capacity.group(1)), "capacity_scope": "rank"}, True
    drop = re.search(r"capacity factor (\d+(?:\.\d+)?)", low)
    if drop or "token drop" in low or "token-drop" in low:
        return {"kind": "balanced", "capacity_factor": float(drop.group(1)) if drop else 1.0, "capacity_scope": "expert"}, True
    if "natural routing" in low or "real router" in low or "learned routing" in low:
        return {"kind": "zipf", "zipf_s": 0.15}, True
    stated = any(word in low for word in ("force-balanced", "forced routing", "forced balance", "balanced routing", "random routing"))
    return {"kind": "balanced"}, stated


PARSERS: dict[str, Callable[[str], Any]] = {
    "precision": precision,
    "dp_or_fsdp": data_parallel,
    "recompute": lambda text: recompute(text, ("core_attn",)),
    "dispatcher": dispatcher,
    "overlap_flags": overlap,
    "cuda_graphs": graphs,
}
"""Column -> parser, for the check that every text of a file is understood."""
