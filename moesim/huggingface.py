"""Which model does a Hugging Face config.json describe?

The result counts what the transformers class built from the same file counts. Multi-token-prediction modules
(`num_nextn_predict_layers`) are not part of that class, so they are left out here as well: set `num_mtp_layers` to train them.
A checkpoint whose layers this project cannot express is refused by name.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Config = dict[str, Any]
MAX_SIZE, MAX_LAYERS = 10**9, 10_000  # beyond these a number is a slip, and lists built from it would not end

# model_type (or the start of it) -> what it has that a stack of attention and FFN layers cannot express
REFUSED = {
    "mamba": "Mamba layers",
    "falcon_mamba": "Mamba layers",
    "jamba": "Mamba layers",
    "bamba": "Mamba layers",
    "zamba": "Mamba layers",
    "falcon_h1": "Mamba layers",
    "granitemoehybrid": "Mamba layers",
    "nemotron_h": "Mamba layers",
    "nemotron_3": "Mamba layers",
    "nemotron3": "Mamba layers",
    "qwen3_next": "linear attention (gated delta net)",
    "qwen3_5": "linear attention (gated delta net)",
    "kimi_linear": "linear attention (Kimi delta attention)",
    "minimax": "linear attention (lightning attention)",
    "bailing_moe_linear": "linear attention",
    "rwkv": "linear attention (RWKV)",
    "recurrent_gemma": "recurrent layers (RG-LRU)",
    "lfm2": "short convolutions",
    "olmo_hybrid": "linear attention (gated delta net)",
    "deepseek_v32": "sparse attention (lightning indexer)",
    "deepseek_v4": "compressed sparse attention",
    "glm_moe_dsa": "sparse attention (lightning indexer)",
    "glm_5": "sparse attention (lightning indexer)",
}


class ConfigError(ValueError):
    """A config.json that can't be used; the message is one line."""


def refusal(name: str) -> str | None:
    """Why a model of this type or name cannot be expressed, or None."""
    key = name.lower().replace("-", "_").replace(".", "_").rsplit("/", 1)[-1]
    for start, reason in REFUSED.items():
        if key.startswith(start):
            return f"'{name}' has {reason}, which cannot be expressed"
    return None


def _get(config: Config, key: str, *others: str) -> Any:
    for name in (key, *others):
        if config.get(name) is not None:
            return config[name]
    raise ConfigError(f"model_type '{config.get('model_type')}' needs '{key}'")


def _number(config: Config, key: str, *others: str) -> int:
    value = _get(config, key, *others)
    if type(value) is not int or not 0 <= value < MAX_SIZE:
        raise ConfigError(f"'{key}' must be an integer from 0 to {MAX_SIZE}, not {value!r:.60}")
    return value


def _float(config: Config, key: str, default: float) -> float:
    value = config.get(key, default)
    if type(value) not in (int, float) or not abs(value) < 1e9:
        raise ConfigError(f"'{key}' must be a number, not {value!r:.60}")
    return float(value)


def _common(c: Config) -> Config:
    if _number(c, "num_hidden_layers") > MAX_LAYERS:
        raise ConfigError(f"'num_hidden_layers' must be at most {MAX_LAYERS}")
    found = {
        "name": str(c.get("_name_or_path") or c.get("model_type"))[:200],
        "num_layers": _number(c, "num_hidden_layers"),
        "hidden_size": _number(c, "hidden_size"),
        "vocab_size": _number(c, "vocab_size"),
        "tie_embeddings": bool(c.get("tie_word_embeddings", False)),
        "num_heads": _number(c, "num_attention_heads"),
        "qkv_bias": bool(c.get("attention_bias", False)),
        "out_bias": bool(c.get("attention_bias", False)),
    }
    if "kv_lora_rank" in c:
        return found | _mla(c)
    found["num_kv_heads"] = c.get("num_key_value_heads") or found["num_heads"]
    if c.get("head_dim"):
        found["head_dim"] = _number(c, "head_dim")
    return found | _windows(c)


def _mla(c: Config) -> Config:
    keys = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    return {"attention": "mla", "q_lora_rank": c.get("q_lora_rank"), **{k: _number(c, k) for k in keys}}


def _windows(c: Config) -> Config:
    """Sliding windows, from the list of layer types where there is one."""
    kinds = c.get("layer_types")
    if kinds is None:
        uses = c.get("sliding_window") is not None and c.get("use_sliding_window", True)
        if not uses or c["model_type"] in ("qwen2", "qwen3", "qwen2_moe", "qwen3_moe") and not c.get("use_sliding_window"):
            return {}
        return {"sliding_window": _number(c, "sliding_window")}
    if not isinstance(kinds, list) or len(kinds) != _number(c, "num_hidden_layers"):
        raise ConfigError("'layer_types' must name every layer once")
    strange = sorted({str(k) for k in kinds} - {"full_attention", "sliding_attention", "chunked_attention"})
    if strange:
        raise ConfigError(f"layers of type '{strange[0]}' cannot be expressed")
    if "sliding_attention" not in kinds:
        return {}
    full = [i for i, k in enumerate(kinds) if k != "sliding_attention"]
    every = full[0] + 1 if full else 1
    if full != list(range(every - 1, len(kinds), every)) and full:
        raise ConfigError("'layer_types' is not regular: every n-th layer must attend fully")
    return {"sliding_window": _number(c, "sliding_window"), "full_attention_every": every}


def _dense(c: Config) -> Config:
    return {"intermediate_size": _number(c, "intermediate_size"), "mlp_bias": bool(c.get("mlp_bias", False))}


def _llama(c: Config) -> Config:
    return _dense(c)


def _qwen2(c: Config) -> Config:
    return _dense(c) | {"qkv_bias": True, "out_bias": False}


def _qwen3(c: Config) -> Config:
    return _dense(c) | {"qk_norm": "per_head"}


def _mixtral(c: Config) -> Config:
    return {
        "num_experts": _number(c, "num_local_experts"),
        "top_k": _number(c, "num_experts_per_tok"),
        "moe_intermediate_size": _number(c, "intermediate_size"),
    }


def _olmoe(c: Config) -> Config:
    return {
        "qk_norm": "full",
        "num_experts": _number(c, "num_experts"),
        "top_k": _number(c, "num_experts_per_tok"),
        "moe_intermediate_size": _number(c, "intermediate_size"),
        "normalize_top_k": bool(c.get("norm_topk_prob", False)),
    }


def _qwen_moe(c: Config) -> Config:
    if c.get("mlp_only_layers"):
        raise ConfigError("'mlp_only_layers' cannot be expressed: dense layers must lead or alternate")
    return {
        "intermediate_size": _number(c, "intermediate_size"),
        "num_experts": _number(c, "num_experts"),
        "top_k": _number(c, "num_experts_per_tok"),
        "moe_intermediate_size": _number(c, "moe_intermediate_size"),
        "moe_layer_interval": c.get("decoder_sparse_step", 1),
        "normalize_top_k": bool(c.get("norm_topk_prob", False)),
    }


def _qwen2_moe(c: Config) -> Config:
    shared = {"num_shared_experts": 1, "shared_intermediate_size": _number(c, "shared_expert_intermediate_size")}
    return _qwen_moe(c) | shared | {"shared_expert_gate": True, "qkv_bias": True, "out_bias": False}


def _qwen3_moe(c: Config) -> Config:
    return _qwen_moe(c) | {"qk_norm": "per_head"}


def _routed(c: Config) -> Config:
    """The routed part that DeepSeek, Kimi and GLM share."""
    return {
        "intermediate_size": _number(c, "intermediate_size"),
        "num_experts": _number(c, "n_routed_experts"),
        "top_k": _number(c, "num_experts_per_tok"),
        "moe_intermediate_size": _number(c, "moe_intermediate_size"),
        "num_shared_experts": c.get("n_shared_experts") or 0,
        "num_leading_dense_layers": c.get("first_k_dense_replace", 0),
        "routed_scale": _float(c, "routed_scaling_factor", 1.0),
        "normalize_top_k": bool(c.get("norm_topk_prob", False)),
    }


def _deepseek(c: Config) -> Config:
    if c.get("moe_layer_freq", 1) != 1:
        raise ConfigError(f"'moe_layer_freq' {c['moe_layer_freq']!r:.20} cannot be expressed; 1 can")
    loss_free = c.get("topk_method", "noaux_tc" if c["model_type"] == "deepseek_v3" else "greedy") == "noaux_tc"
    limited = loss_free or c.get("topk_method") == "group_limited_greedy"
    return _routed(c) | {
        "router": c.get("scoring_func", "sigmoid" if c["model_type"] == "deepseek_v3" else "softmax"),
        "score_correction_bias": loss_free,
        "num_expert_groups": (c.get("n_group") or 1) if limited else 1,
        "top_k_groups": (c.get("topk_group") or 1) if limited else 1,
    }


def _glm4_moe(c: Config) -> Config:
    return _routed(c) | {
        "router": "sigmoid",
        "score_correction_bias": True,
        "num_expert_groups": c.get("n_group") or 1,
        "top_k_groups": c.get("topk_group") or 1,
        "qk_norm": "per_head" if c.get("use_qk_norm") else "none",
        "out_bias": False,
    }


def _gpt_oss(c: Config) -> Config:
    return {
        "attention_sinks": True,
        "num_experts": _number(c, "num_local_experts"),
        "top_k": _number(c, "num_experts_per_tok", "experts_per_token"),
        "moe_intermediate_size": _number(c, "intermediate_size"),
        "router_bias": True,
        "expert_bias": True,
    }


def _llama4(c: Config) -> Config:
    step = c.get("interleave_moe_layer_step", 1)
    listed = c.get("moe_layers")
    regular = list(range(step - 1, _number(c, "num_hidden_layers"), step)) if type(step) is int and step > 0 else None
    if regular is None or listed is not None and listed != regular:
        raise ConfigError("'moe_layers' must be every interleave_moe_layer_step-th layer")
    return {
        "intermediate_size": _number(c, "intermediate_size_mlp"),
        "num_experts": _number(c, "num_local_experts"),
        "top_k": _number(c, "num_experts_per_tok"),
        "moe_intermediate_size": _number(c, "intermediate_size"),
        "num_shared_experts": 1,
        "moe_layer_interval": step,
        "router": "sigmoid",
        "normalize_top_k": False,
    }


FAMILIES: dict[str, Callable[[Config], Config]] = {
    "llama": _llama,
    "mistral": _llama,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "mixtral": _mixtral,
    "olmoe": _olmoe,
    "qwen2_moe": _qwen2_moe,
    "qwen3_moe": _qwen3_moe,
    "deepseek_v2": _deepseek,
    "deepseek_v3": _deepseek,
    "kimi_k2": _deepseek,
    "glm4_moe": _glm4_moe,
    "gpt_oss": _gpt_oss,
    "llama4_text": _llama4,
}


def model_fields(config: Any) -> Config:
    """The fields of a ModelSpec for a parsed config.json; its text part where it is multimodal. Raises ConfigError."""
    if not isinstance(config, dict):
        raise ConfigError("a config.json must hold one object")
    if isinstance(config.get("text_config"), dict):
        outer = {k: config[k] for k in ("_name_or_path", "tie_word_embeddings") if k in config}
        config = outer | config["text_config"]
    kind = str(config.get("model_type"))[:100]
    refused = refusal(kind)
    if refused:
        raise ConfigError(refused)
    if kind not in FAMILIES:
        raise ConfigError(f"model_type '{kind}' is not known; known: {', '.join(sorted(FAMILIES))}")
    if kind == "kimi_k2":
        config = {"scoring_func": "sigmoid", "topk_method": "noaux_tc", **config}
    return _common(config) | FAMILIES[kind](config)
