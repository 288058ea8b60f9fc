"""What do the free-text cells of a row of published runs say? (One parser a column; a text nobody taught it is an error, never a guess.)

Every parser takes the cell's text and returns the Layout values it states, `{}` for a blank cell. NotExpressible carries the one
reason a text can't become a layout; `ignored` texts are understood but change nothing that is modelled.
"""

from __future__ import annotations

import re
from typing import Any, Callable, Mapping

from .run_models import NotExpressible, whole

PRECISION = {"BF16": "bf16", "FP16": "bf16", "FP8": "fp8", "FP8-CS": "fp8", "FP8-DS": "fp8", "FP8-BLOCKWISE": "fp8", "FP8 TENSORWISE": "fp8",
             "FP8 ROWWISE": "fp8", "FP8 BLOCKWISE": "fp8", "MXFP8": "mxfp8", "NVFP4": "nvfp4"}
RECOMPUTE = {"layernorm": ("norm",), "norm": ("norm",), "rmsnorm": ("norm",), "moe_act": ("moe_act",), "act": ("moe_act", "mlp_act"),
             "mlp": ("mlp",), "moe": ("router", "moe_act", "shared", "experts"), "core_attn": ("core_attn",), "mla_up_proj": ("mla_up",),
             "mla up-projection": ("mla_up",), "shared_expert": ("shared",), "shared_experts": ("shared",), "attn": ("qkv", "core_attn", "attn_out")}
DISPATCHER = {"alltoall": "alltoall", "nccl": "alltoall", "hybridep": "dedup", "deepep": "dedup", "allgather": None,
              "rowwise_nvshmem": "sync_free", "syncfree": "sync_free", "sync_free": "sync_free", "sync_1d": "alltoall"}
DISPATCHER_SMS = {"hybridep": 16, "deepep": 20}
"""SMs that Megatron gives a dispatcher that a run names without them (moe_hybridep_num_sms, moe_deepep_num_sms:
https://github.com/NVIDIA/Megatron-LM/blob/main/megatron/core/transformer/transformer_config.py)."""


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
    found = {key.replace("fsdp2", "fsdp").replace("ddp", "dp"): value for key, value in re.findall(r"\b(fsdp2?|zero[0-3]|d?dp)\s*=\s*(\w+)", low)}
    number = lambda value: whole(value, "dp_or_fsdp")  # noqa: E731
    hybrid = re.search(r"\bhsdp\s*=\s*(\d+)\s*x\s*(\d+)", low)
    if hybrid:
        return {"zero": 3, "shard": number(hybrid[2]), "dp": number(hybrid[1]) * number(hybrid[2])}
    if "fsdp" in found:
        out = {"zero": 3, "shard": number(found["fsdp"]), "dp": number(found["fsdp"]) * number(found.get("dp", "1"))}
        return {**out, "reshard": False} if "grad_op" in low else out
    stage = next((key for key in found if key.startswith("zero")), None)
    if stage:
        own = {"zero": int(stage[4])} | ({"dp": number(found["dp"])} if "dp" in found else {})
        return own if found[stage] == "all" else {**own, "shard": number(found[stage])}
    if "dp" in found:
        return {"dp": number(found["dp"])}
    if "fsdp" in low:
        return {"zero": 3}
    named = {"zero-0": 0, "ddp": 0, "zero-1": 1, "ddp + distributed optimizer": 1, "distributed optimizer": 1, "zero-2": 2, "zero-3": 3}
    if low in named:
        return {"zero": named[low]}
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
    held = int(sms.group(1)) if sms else DISPATCHER_SMS.get(name)
    return {"dispatcher": DISPATCHER[name]} | ({"sms": held} if held and DISPATCHER[name] != "alltoall" else {})


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
    """"full_iteration" -> full; Transformer Engine's partial scopes -> layer where they hold attention, else router."""
    low = text.strip().lower()
    if not low:
        return {}
    if low == "none":
        return {"graphs": "none"}
    if low in ("full_iteration", "full iteration", "full"):
        return {"graphs": "full"}
    if low.startswith("te:") and "attn" not in low:
        return {"graphs": "router"}
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


STACKS: tuple[tuple[str, str], ...] = (
    (r"olmo.core.*fsdp|fsdp.*olmo.core", "olmo_core_fsdp"),
    (r"olmo.core|olmocore", "olmo_core3_ddp"),
    (r"moetrain", "moetrain"),
    (r"maxtext", "maxtext"),
    (r"torchtitan.*; eager$|torchtitan.*; eager;", "torchtitan_eager"),
    (r"torchtitan", "torchtitan"),
    (r"automodel", "nemo_automodel"),
    (r"llm-foundry", "llm_foundry"),
    (r"internevo", "internevo"),
    (r"vtrain|deepspeed|2201.11990", "megatron_deepspeed"),
    (r"simumax", "simumax"),
    (r"2104.04473|2205.05198", "megatron_lm_2021"),
    (r"megatron-bridge", "megatron_bridge"),
    (r"dgxc-benchmarking|nemo|training_results", "nemo"),
    (r"megatron-lm|megatron-moe-modelzoo|2504.14960|flagperf", "megatron_core"),
)
"""Pattern over "source_address; notes" in lower case, first hit wins."""

_CONFIGS = "https://github.com/NVIDIA-NeMo/Megatron-Bridge/tree/main/scripts/performance/configs"
RECIPE_DEFAULTS: tuple[tuple[str, str, str, str, str, str], ...] = (
    (r"NeMo 25\.09", r"^DeepSeek-V3", r"^G?B[23]00$", "cuda_graphs", "full_iteration", _CONFIGS),
    (r"NeMo 25\.(09|11)", r"^Qwen3-30B", r"^G?B[23]00$", "cuda_graphs", "full_iteration", _CONFIGS),
    (r"NeMo 25\.(09|11)", r"^Qwen3-235B", r"^GB[23]00$", "cuda_graphs", "full_iteration", _CONFIGS),
    (r"NeMo 25\.(09|11)", r"^Llama3-8B", r"^G?B[23]00$", "cuda_graphs", "full_iteration", _CONFIGS),
)
"""What the recipes of a release set where its page is silent: release, model, GPU, column, text, source. Padded token drop has fixed
shapes, so the MoE recipes of 25.09, and those of Qwen3 on the first 25.11 page, capture whole iterations; the dense 8B recipes do so on
every Blackwell part."""


def recipe_defaults(row: Mapping[str, str]) -> tuple[dict[str, str], list[str]]:
    """The row with blanks filled from RECIPE_DEFAULTS, and the columns filled."""
    out, filled = dict(row), []
    for release, model, gpu, column, text, _ in RECIPE_DEFAULTS:
        if not out.get(column) and re.search(release, release_of(row)) and re.search(model, row["model"]) and re.search(gpu, row["gpu_type"]):
            out[column] = text
            filled.append(column)
    return out, filled


def stack_of(row: Mapping[str, str]) -> str:
    """Name of the stack a row ran on: its `stack` column where there is one, else by source and notes."""
    if row.get("stack"):
        return row["stack"]
    text = f"{row.get('source_address', '')}; {row.get('notes', '')}".lower()
    return next((name for pattern, name in STACKS if re.search(pattern, text)), "generic")


def series_of(row: Mapping[str, str]) -> str:
    found = re.search(r"\bseries=([^;\s]+)", row.get("notes", ""))
    return found.group(1) if found else ""


def release_of(row: Mapping[str, str]) -> str:
    """Software release: a container or tag where one is named, else year and month."""
    text = f"{row.get('notes', '')}; {row.get('source_address', '')}"
    found = re.search(r"container (NeMo [\d.]+)|(NeMo [\d.]+\d)|/blob/(v[\d.]+\d)|(MLPerf (?:Training )?v[\d.]+\d)", text)
    return next((g for g in found.groups() if g), "") if found else row.get("date", "")[:7]


PARSERS: dict[str, Callable[[str], Any]] = {
    "precision": precision,
    "dp_or_fsdp": data_parallel,
    "recompute": lambda text: recompute(text, ("core_attn",)),
    "dispatcher": dispatcher,
    "overlap_flags": overlap,
    "cuda_graphs": graphs,
}
"""Column -> parser, for the check that every text of a file is understood."""
