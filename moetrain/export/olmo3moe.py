"""How is a model laid out as OLMo-core 3 lays out its own (model_type olmo3moe)? (https://pypi.org/project/ai2-olmo-core/3.0.0/)

Norms stand after each branch, embedded tokens may be scaled and normed, and routed weights are multiplied by 1 or by top_k.
"""

from __future__ import annotations

from typing import Any

from moesim.huggingface import MAX_LAYERS, MAX_SIZE, ConfigError
from moesim.spec import ModelSpec
from moetrain.export.constants import Constants
from moetrain.export.families import ATTENTION, DENSE, ENDS, config_with_heads, experts, same_biases
from moetrain.export.form import ANY, Form, Row, Table, mlp, renamed

TABLE: Table = {
    **ENDS,
    "embed_norm.weight": Row(("model.embed_norm.weight",)),
    **renamed("norm1.weight", "post_attention_layernorm.weight"),
    **renamed("norm2.weight", "post_feedforward_layernorm.weight"),
    **ATTENTION,
    **DENSE,
    **renamed("moe.router.weight", "mlp.router.gate.weight"),
    **experts("mlp"),
    **mlp("moe.shared", "mlp.shared_expert"),
}


def _config(spec: ModelSpec, constants: Constants) -> dict[str, Any]:
    kinds = spec.layer_kinds()
    return config_with_heads(spec, constants) | {
        "attention_hidden_size": spec.num_heads * spec.head_dim,
        "attention_bias": spec.qkv_bias,
        "use_head_qk_norm": spec.qk_norm == "per_head",
        "qk_norm_per_head_gains": False,
        "layer_types": ["full_attention" if spec.window(i) is None else "sliding_attention" for i in range(spec.num_layers)],
        "sliding_window": spec.sliding_window,
        "embed_scale": constants.embed_scale,
        "embed_norm": spec.embedding_norm,
        "use_peri_ln": False,
        "dense_layers_indices": [i for i, kind in enumerate(kinds) if kind == "dense"],
        "dense_mlp_intermediate_size": spec.intermediate_size or None,
        "moe_intermediate_size": spec.moe_intermediate_size,
        "shared_expert_intermediate_size": spec.shared_intermediate_size or None,
        "n_routed_experts": spec.num_experts,
        "num_experts_per_tok": spec.top_k,
        "original_num_experts_per_tok": None,
        "gating_function": spec.router,
        "normalize_expert_weights": 1.0 if spec.normalize_top_k else None,
        "restore_weight_scale": spec.routed_scale != 1.0,
    }


def _limit(spec: ModelSpec, constants: Constants) -> str | None:
    if spec.routed_scale not in (1.0, float(spec.top_k)):
        return f"routed_scale {spec.routed_scale:g} must be 1 or top_k = {spec.top_k}"
    return same_biases(spec, constants)


FORM = Form(
    "olmo3moe", "Olmo3MoeForCausalLM", True, lambda spec: TABLE, _config,
    {"qk_norm": ("per_head", "full"), "qkv_bias": ANY, "out_bias": ANY, "sliding_window": ANY, "full_attention_every": ANY,
     "norm_placement": ("post",), "embedding_norm": ANY, "num_shared_experts": (0, 1), "router": ANY, "routed_scale": ANY,
     "normalize_top_k": ANY, "num_leading_dense_layers": ANY, "moe_layer_interval": ANY},
    _limit,
)  # fmt: skip

# Features of the class that no spec describes, and the values at which they do nothing.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "qk_norm_per_head_gains": (False,),
    "scalable_softmax": (False,),
    "use_rope": (True,),
    "attention_gate_type": (None,),
    "latent_moe_dim": (None,),
    "emo_eval_document_expert_pool": (None,),
    "dense_layers_use_shared_expert": (False,),
    "use_peri_ln": (False,),
}


def model_fields(c: dict[str, Any]) -> dict[str, Any]:
    """The fields of a ModelSpec for a parsed config.json of this form. Raises ConfigError."""
    for key, legal in NEUTRAL.items():
        if c.get(key, legal[0]) not in legal:
            raise ConfigError(f"'{key}' {c[key]!r:.40} cannot be expressed")
    return _sizes(c) | _features(c) | _dense_layers(c) | _windows(c)


def _get(c: dict[str, Any], key: str) -> Any:
    if key not in c:
        raise ConfigError(f"model_type 'olmo3moe' needs '{key}'")
    return c[key]


def _count(c: dict[str, Any], key: str, low: int = 1, high: int = MAX_SIZE) -> int:
    value = _get(c, key)
    if type(value) is not int or not low <= value <= high:
        raise ConfigError(f"'{key}' must be an integer from {low} to {high}, not {value!r:.40}")
    return value


def _flag(c: dict[str, Any], key: str) -> bool:
    if type(_get(c, key)) is not bool:
        raise ConfigError(f"'{key}' must be true or false, not {c[key]!r:.40}")
    return c[key]


def _sizes(c: dict[str, Any]) -> dict[str, Any]:
    heads, shared = _count(c, "num_attention_heads"), c.get("shared_expert_intermediate_size")
    return {
        "name": str(c.get("_name_or_path") or "olmo3moe")[:200],
        "num_layers": _count(c, "num_hidden_layers", 1, MAX_LAYERS),
        "hidden_size": _count(c, "hidden_size"),
        "vocab_size": _count(c, "vocab_size"),
        "num_heads": heads,
        "num_kv_heads": heads if c.get("num_key_value_heads") is None else _count(c, "num_key_value_heads"),
        "head_dim": _count(c, "attention_hidden_size") // heads if c.get("head_dim") is None else _count(c, "head_dim"),
        "num_experts": _count(c, "n_routed_experts"),
        "top_k": _count(c, "num_experts_per_tok"),
        "moe_intermediate_size": _count(c, "moe_intermediate_size"),
        "num_shared_experts": 0 if shared is None else 1,
        "shared_intermediate_size": 0 if shared is None else _count(c, "shared_expert_intermediate_size"),
    }


def _features(c: dict[str, Any]) -> dict[str, Any]:
    power = _get(c, "normalize_expert_weights")
    if power is not None and (type(power) not in (int, float) or power != 1):
        raise ConfigError(f"'normalize_expert_weights' {power!r:.20} cannot be expressed; 1 and null can")
    top_k = _count(c, "num_experts_per_tok")
    scale = float(top_k) if _flag(c, "restore_weight_scale") else 1.0
    if c.get("original_num_experts_per_tok") is not None:
        scale *= (_count(c, "original_num_experts_per_tok") / top_k) ** 0.5
    return {
        "tie_embeddings": bool(c.get("tie_word_embeddings", False)),
        "qk_norm": "per_head" if _flag(c, "use_head_qk_norm") else "full",
        "qkv_bias": bool(c.get("attention_bias", False)),
        "out_bias": bool(c.get("attention_bias", False)),
        "norm_placement": "post",
        "embedding_norm": _flag(c, "embed_norm"),
        "router": _get(c, "gating_function"),
        "normalize_top_k": power is not None,
        "routed_scale": scale,
    }


def _dense_layers(c: dict[str, Any]) -> dict[str, Any]:
    """The listed dense layers as "so many first, then all but every n-th"."""
    size, listed = _count(c, "num_hidden_layers", 1, MAX_LAYERS), _get(c, "dense_layers_indices")
    if not isinstance(listed, list) or any(type(i) is not int or not 0 <= i < size for i in listed):
        raise ConfigError(f"'dense_layers_indices' must list layers from 0 to {size - 1}, not {listed!r:.40}")
    listed = set(listed)
    sparse = [i for i in range(size) if i not in listed]
    if not sparse:
        raise ConfigError("'dense_layers_indices' leaves no MoE layer")
    every = sparse[1] - sparse[0] if len(sparse) > 1 else size - sparse[0]
    lead = sparse[0] - every + 1
    if lead < 0 or sparse != list(range(sparse[0], size, every)):
        raise ConfigError("'dense_layers_indices' cannot be expressed: dense layers must lead or alternate")
    return {
        "intermediate_size": _count(c, "dense_mlp_intermediate_size") if listed else 0,
        "num_leading_dense_layers": lead,
        "moe_layer_interval": every,
    }


def _windows(c: dict[str, Any]) -> dict[str, Any]:
    """Which layers look through a window."""
    size, kinds = _count(c, "num_hidden_layers", 1, MAX_LAYERS), _get(c, "layer_types")
    if not isinstance(kinds, list) or len(kinds) != size or any(kind not in ("full_attention", "sliding_attention") for kind in kinds):
        raise ConfigError("'layer_types' must name every layer once, full_attention or sliding_attention")
    full = [i for i, kind in enumerate(kinds) if kind == "full_attention"]
    if len(full) == size:
        return {}
    every = full[0] + 1 if full else 1
    if full and full != list(range(every - 1, size, every)):
        raise ConfigError("'layer_types' is not regular: every n-th layer must attend fully")
    return {"sliding_window": _count(c, "sliding_window"), "full_attention_every": every}
