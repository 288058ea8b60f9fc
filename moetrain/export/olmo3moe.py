"""How is a model laid out as OLMo-core 3 lays out its own (model_type olmo3moe)? (https://pypi.org/project/ai2-olmo-core/3.0.0/)

Norms stand after each branch, embedded tokens may be scaled and normed, and routed weights are multiplied by 1 or by top_k.
"""

from __future__ import annotations

from typing import Any

from moesim.huggingface import ConfigError
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
    try:
        return _sizes(c) | _features(c) | _layers(c)
    except KeyError as error:
        raise ConfigError(f"model_type 'olmo3moe' needs {error}") from None


def _sizes(c: dict[str, Any]) -> dict[str, Any]:
    shared = c["shared_expert_intermediate_size"]
    return {
        "name": str(c.get("_name_or_path") or "olmo3moe")[:200],
        "num_layers": c["num_hidden_layers"],
        "hidden_size": c["hidden_size"],
        "vocab_size": c["vocab_size"],
        "num_heads": c["num_attention_heads"],
        "num_kv_heads": c.get("num_key_value_heads") or c["num_attention_heads"],
        "head_dim": c.get("head_dim") or c["attention_hidden_size"] // c["num_attention_heads"],
        "num_experts": c["n_routed_experts"],
        "top_k": c["num_experts_per_tok"],
        "moe_intermediate_size": c["moe_intermediate_size"],
        "num_shared_experts": 0 if shared is None else 1,
        "shared_intermediate_size": shared or 0,
    }


def _features(c: dict[str, Any]) -> dict[str, Any]:
    power, trained_k = c["normalize_expert_weights"], c.get("original_num_experts_per_tok")
    if power not in (None, 1, 1.0):
        raise ConfigError(f"'normalize_expert_weights' {power!r:.20} cannot be expressed; 1 and null can")
    scale = float(c["num_experts_per_tok"]) if c["restore_weight_scale"] else 1.0
    if trained_k is not None:
        scale *= (trained_k / c["num_experts_per_tok"]) ** 0.5
    return {
        "tie_embeddings": bool(c.get("tie_word_embeddings", False)),
        "qk_norm": "per_head" if c["use_head_qk_norm"] else "full",
        "qkv_bias": bool(c.get("attention_bias", False)),
        "out_bias": bool(c.get("attention_bias", False)),
        "norm_placement": "post",
        "embedding_norm": bool(c["embed_norm"]),
        "router": c["gating_function"],
        "normalize_top_k": power is not None,
        "routed_scale": scale,
    }


def _layers(c: dict[str, Any]) -> dict[str, Any]:
    """Which layers are dense, and which look through a window."""
    size, dense, kinds = c["num_hidden_layers"], set(c["dense_layers_indices"]), c["layer_types"]
    found = {"intermediate_size": c["dense_mlp_intermediate_size"] if dense else 0}
    pattern = next(((lead, every) for every in range(1, size + 1) for lead in range(size) if _dense_layers(size, lead, every) == dense), None)
    if pattern is None:
        raise ConfigError("'dense_layers_indices' cannot be expressed: dense layers must lead or alternate")
    found |= {"num_leading_dense_layers": pattern[0], "moe_layer_interval": pattern[1]}
    full = [i for i, kind in enumerate(kinds) if kind == "full_attention"]
    if set(kinds) - {"full_attention", "sliding_attention"} or len(kinds) != size:
        raise ConfigError("'layer_types' must name every layer once, full_attention or sliding_attention")
    if len(full) == size:
        return found
    every = full[0] + 1 if full else 1
    if full and full != list(range(every - 1, size, every)):
        raise ConfigError("'layer_types' is not regular: every n-th layer must attend fully")
    return found | {"sliding_window": c["sliding_window"], "full_attention_every": every}


def _dense_layers(size: int, lead: int, every: int) -> set[int]:
    return {i for i in range(size) if i < lead or (i - lead + 1) % every}
