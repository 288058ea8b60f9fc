"""What do most Hugging Face decoders have in common: names outside the FFN, and the first keys of config.json?"""

from __future__ import annotations

from typing import Any

from moesim.spec import ModelSpec
from moetrain.export.constants import Constants
from moetrain.export.form import PREFIX, Row, Table, linear, mlp, renamed
from moetrain.export.transforms import EXPERT_PAIRS, EXPERTS, QKV

QKV_NAMES = ("q_proj", "k_proj", "v_proj")

ENDS: Table = {
    "embed.weight": Row(("model.embed_tokens.weight",)),
    "final_norm.weight": Row(("model.norm.weight",)),
    "head.weight": Row(("lm_head.weight",)),
}
PRE_NORMS: Table = renamed("norm1.weight", "input_layernorm.weight") | renamed("norm2.weight", "post_attention_layernorm.weight")
ATTENTION: Table = {
    **{f"layers.{{i}}.attention.qkv.{kind}": Row(tuple(f"{PREFIX}self_attn.{name}.{kind}" for name in QKV_NAMES), QKV) for kind in ("weight", "bias")},
    **linear("attention.out", "self_attn.o_proj"),
    **renamed("attention.q_norm.weight", "self_attn.q_norm.weight"),
    **renamed("attention.k_norm.weight", "self_attn.k_norm.weight"),
}
DENSE: Table = mlp("mlp", "mlp")


def experts(folder: str, gate: str = "gate_proj", up: str = "up_proj", down: str = "down_proj") -> Table:
    """One gate, up and down matrix an expert, under `folder`.experts.{e}."""
    where = f"{PREFIX}{folder}.experts.{{e}}"
    return {
        "layers.{i}.moe.experts.gate_up": Row((f"{where}.{gate}.weight", f"{where}.{up}.weight"), EXPERT_PAIRS),
        "layers.{i}.moe.experts.down": Row((f"{where}.{down}.weight",), EXPERTS),
    }


def same_biases(spec: ModelSpec, constants: Constants) -> str | None:
    """The limit of layouts whose one `attention_bias` stands for all projections of attention."""
    if spec.qkv_bias != spec.out_bias:
        return f"qkv_bias {spec.qkv_bias} and out_bias {spec.out_bias} differ: one attention_bias stands for both"
    return None


def common_config(spec: ModelSpec, constants: Constants) -> dict[str, Any]:
    """Sizes every decoder has. Rotary embedding is said twice: as transformers 5 reads it and as others do."""
    return {
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.hidden_size,
        "num_hidden_layers": spec.num_layers,
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "hidden_act": "silu",
        "max_position_embeddings": constants.max_positions,
        "rms_norm_eps": constants.norm_eps,
        "rope_theta": constants.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": constants.rope_theta},
        "tie_word_embeddings": spec.tie_embeddings,
        "attention_dropout": 0.0,
        "bos_token_id": None,
        "eos_token_id": constants.eos_token,
        "pad_token_id": None,
    }


def config_with_heads(spec: ModelSpec, constants: Constants) -> dict[str, Any]:
    """The same with the width of a head, which need not be hidden_size / num_heads."""
    return common_config(spec, constants) | {"head_dim": spec.head_dim}
