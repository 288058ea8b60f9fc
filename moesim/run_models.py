"""Which model does a row of published runs mean?

The shipped preset of that name, with the row's own sizes written over it (cut depth, another expert count). A name without a
preset falls back on its family for what a row does not carry (head width, biases, norms, gating), and that is reported as assumed.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any, Mapping

from .load import load_model, preset_names
from .spec import ModelSpec

ALIASES = {"deepseekv316b": "deepseek_v2_lite", "deepseekv3671b": "deepseek_v3", "llama318b": "llama3_8b", "llama3170b": "llama3_70b",
           "llama3405b": "llama3_1_405b", "qwen257b": "qwen2_57b_a14b", "qwen330b": "qwen3_30b_a3b", "qwen3235b": "qwen3_235b_a22b",
           "moonlight16b": "moonlight_16b_a3b", "olmoe": "olmoe_1b_7b"}
"""Names of published tables, letters and digits only -> shipped presets, where they are not the same."""

_GPT3 = {"gated_mlp": False, "mlp_bias": True, "qkv_bias": True, "out_bias": True, "norm_bias": True, "tie_embeddings": True,
         "num_position_embeddings": 2048, "vocab_size": 51200}
_NEMOTRON = {"gated_mlp": False, "norm_bias": True, "vocab_size": 256000}

FAMILIES: tuple[tuple[str, dict[str, Any]], ...] = (
    # NeMo recipes of these names; sizes agree with the published tokens/s x TFLOP/s (https://docs.nvidia.com/nemo-framework, 24.07)
    (r"^GPT3-5b", {**_GPT3, "num_layers": 24, "hidden_size": 4096, "num_heads": 32, "intermediate_size": 16384}),
    (r"^GPT3-20b", {**_GPT3, "num_layers": 44, "hidden_size": 6144, "num_heads": 48, "intermediate_size": 24576}),
    (r"^Nemotron-8b", {**_NEMOTRON, "num_layers": 32, "hidden_size": 4096, "num_heads": 32, "intermediate_size": 16384}),
    (r"^Nemotron-22b", {**_NEMOTRON, "num_layers": 40, "hidden_size": 6144, "num_heads": 48, "intermediate_size": 24576}),
    (r"^GPT", _GPT3),  # https://arxiv.org/abs/2104.04473
    (r"^Qwen3", {"head_dim": 128, "qk_norm": "per_head"}),  # https://arxiv.org/abs/2505.09388
    (r"^Qwen2", {"qkv_bias": True}),  # https://arxiv.org/abs/2407.10671
    (r"^(Llama|LLaMA|Mistral|Mixtral)", {}),
)
"""Name pattern -> what a row does not carry, for models without a preset."""

REFUSED: tuple[tuple[str, str], ...] = (
    (r"Nemotron-H|Nemotron-3|Jamba|Mamba|Zamba", "Mamba layers are not modelled"),
    (r"Qwen3-Next|Qwen3\.5|Kimi-Linear|MiniMax-Text|Ling-2\.5|Ring-2\.5", "linear-attention layers are not modelled"),
    (r"DeepSeek-V4", "compressed sparse attention and hyper-connections are not modelled"),
    (r"GLM-5|DeepSeek-V3\.2", "dynamic sparse attention is not modelled"),
)

COLUMNS = {"layers": "num_layers", "hidden": "hidden_size", "heads": "num_heads", "vocab": "vocab_size", "experts": "num_experts",
           "topk": "top_k", "expert_ffn": "moe_intermediate_size", "shared_experts": "num_shared_experts", "dense_ffn": "intermediate_size"}


class NotExpressible(ValueError):
    """A row that can't become a Run; the message is the one reason."""


def model_of(row: Mapping[str, str], seq_len: int) -> tuple[ModelSpec, tuple[str, ...]]:
    """(the model of a row, fields that were assumed). Raises NotExpressible with one reason."""
    name = row.get("model", "").strip()
    _refuse(name, row)
    preset = preset_of(name)
    values, assumed = _base(name, preset)
    _apply_columns(values, row, preset)
    _mtp(values, row, name, preset)
    if "cut)" in name and values.get("num_experts") and not row.get("dense_layers", "").strip():
        values["num_leading_dense_layers"] = 1
        assumed.append("dense_layers")
    if 0 < values.get("num_position_embeddings", 0) < seq_len:
        values["num_position_embeddings"] = seq_len
    missing = [field for field in ("num_layers", "hidden_size", "num_heads", "vocab_size") if not values.get(field)]
    if missing:
        raise NotExpressible(f"model {name!r}: {', '.join(missing)} not given and not known")
    try:
        return ModelSpec(**{**values, "name": name}), tuple(assumed)
    except ValueError as error:
        raise NotExpressible(f"model {name!r}: {_first_line(error)}") from None


def _base(name: str, preset: str | None) -> tuple[dict[str, Any], list[str]]:
    """Fields of the preset or family a name belongs to, and what that choice assumes."""
    if preset:
        return load_model_once(preset).model_dump(), []
    family = next((values for pattern, values in FAMILIES if re.search(pattern, name)), None)
    return dict(family or {}), ["model family"]


def preset_of(name: str) -> str | None:
    """The shipped preset a published name stands for: "Llama3-70B (12-layer cut)" -> llama3_70b. None where there is none."""
    presets = {_compact(preset): preset for preset in preset_names("model")}
    for text in (_compact(name), _compact(re.sub(r"\(.*\)", "", name))):
        if text in presets or text in ALIASES:
            return presets.get(text) or ALIASES[text]
    return None


def _compact(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "", text.lower())


@lru_cache(maxsize=None)
def load_model_once(preset: str) -> ModelSpec:
    return load_model(preset)


def _refuse(name: str, row: Mapping[str, str]) -> None:
    if not name:
        raise NotExpressible("model: blank")
    for pattern, why in REFUSED:
        if re.search(pattern, name):
            raise NotExpressible(f"model {name!r}: {why}")
    text = f"{row.get('notes', '')} {row.get('kv_heads_or_mla', '')}"
    for word, why in (("Mamba", "Mamba layers"), ("DeltaNet", "linear-attention layers"), ("linear attention", "linear-attention layers"),
                      ("sparse attention", "sparse attention"), ("+DSA", "sparse attention"), ("CSA", "sparse attention")):
        if word in text:
            raise NotExpressible(f"model {name!r}: {why} are not modelled")


def _apply_columns(values: dict[str, Any], row: Mapping[str, str], preset: str | None) -> None:
    """Writes the row's own sizes over the base's."""
    width, shared = values.get("moe_intermediate_size"), values.get("num_shared_experts", 0)
    for column, field in COLUMNS.items():
        text = row.get(column, "").strip()
        if text:
            values[field] = whole(text, column)
    # tables count one wide shared expert as one or as many: the preset knows its width, the row only whether there is any
    if preset and bool(shared) == bool(values["num_shared_experts"]):
        values["num_shared_experts"] = shared
    if values.get("moe_intermediate_size") != width or values.get("num_shared_experts", 0) != shared:
        values.pop("shared_intermediate_size", None)
    _attention(values, row)
    dense = row.get("dense_layers", "").strip()
    # an interleaved model's count follows from its interval; a model of dense layers only has no leading ones
    if dense and values.get("num_experts") and values.get("moe_layer_interval", 1) == 1:
        values["num_leading_dense_layers"] = whole(dense, "dense_layers")


def _attention(values: dict[str, Any], row: Mapping[str, str]) -> None:
    text = row.get("kv_heads_or_mla", "").strip()
    if not text:
        return
    if text.isdigit():
        values["num_kv_heads"] = int(text)
        return
    found = dict(re.findall(r"(q_lora|kv_lora|nope|rope|v)\s*(\d+)", text))
    if not text.startswith("MLA(") or "kv_lora" not in found:
        raise NotExpressible(f"kv_heads_or_mla: {text!r} is neither a number of heads nor MLA(q_lora.., kv_lora.., nope.., rope.., v..)")
    names = {"q_lora": "q_lora_rank", "kv_lora": "kv_lora_rank", "nope": "qk_nope_head_dim", "rope": "qk_rope_head_dim", "v": "v_head_dim"}
    values["attention"] = "mla"
    values["q_lora_rank"] = None
    values.update({names[key]: int(value) for key, value in found.items()})
    values.pop("head_dim", None)


def _mtp(values: dict[str, Any], row: Mapping[str, str], name: str, preset: str | None) -> None:
    notes = row.get("notes", "")
    if re.search(r"\b(without|no) MTP\b", notes) or "cut)" in name:
        values["num_mtp_layers"] = 0
    elif re.search(r"\bwith MTP\b|\bMTP 1\b", notes) or preset == "deepseek_v3":
        values["num_mtp_layers"] = 1  # Megatron and NeMo recipes train DeepSeek-V3 with its one MTP module unless they say not


def whole(text: str, column: str) -> int:
    """The integer of a cell; "8.0" counts. Raises NotExpressible naming the column."""
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not (value == value and abs(value) < 1e9 and value == int(value) and value >= 0):
        raise NotExpressible(f"{column}: {text[:40]!r} is not a whole number")
    return int(value)


def _first_line(error: ValueError) -> str:
    errors = getattr(error, "errors", None)
    if errors:
        one = errors()[0]
        return f"{'.'.join(map(str, one['loc']))} {one['msg']}".strip()
    return str(error).splitlines()[0]
