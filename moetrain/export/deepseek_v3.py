"""How is a model laid out as DeepSeek-V3? (https://huggingface.co/deepseek-ai/DeepSeek-V3)

Its rotary rows are interleaved: pair i of the rotation is rows (2i, 2i + 1) instead of (i, i + n/2).
"""

from __future__ import annotations

from typing import Any

from moesim.spec import ModelSpec
from moetrain.export.constants import Constants
from moetrain.export.families import DENSE, ENDS, PRE_NORMS, common_config, experts, same_biases
from moetrain.export.form import ANY, PREFIX, Form, Row, Table, linear, mlp, renamed
from moetrain.export.names import BALANCE_BIAS
from moetrain.export.transforms import LATENT_QUERIES, LATENTS

LATENT_NORM_EPS = 1e-6
"""Fixed in the class for the norms on the latents, whatever rms_norm_eps says."""

TABLE: Table = {
    **ENDS,
    **PRE_NORMS,
    **DENSE,
    **renamed("attention.q_latent_norm.weight", "self_attn.q_a_layernorm.weight"),
    **renamed("attention.kv_latent_norm.weight", "self_attn.kv_a_layernorm.weight"),
    **renamed("attention.up_kv.weight", "self_attn.kv_b_proj.weight"),
    **linear("attention.out", "self_attn.o_proj"),
    **renamed("moe.router.weight", "mlp.gate.weight"),
    **renamed(BALANCE_BIAS, "mlp.gate.e_score_correction_bias"),
    **experts("mlp"),
    **mlp("moe.shared", "mlp.shared_experts"),
}


def _down(*names: str) -> Table:
    rows = {kind: tuple(f"{PREFIX}self_attn.{name}.{kind}" for name in names) for kind in ("weight", "bias")}
    return {f"layers.{{i}}.attention.down.{kind}": Row(found, LATENTS) for kind, found in rows.items()}


WITH_QUERY_LATENT: Table = {
    **TABLE,
    **_down("q_a_proj", "kv_a_proj_with_mqa"),
    **renamed("attention.up_q.weight", "self_attn.q_b_proj.weight", LATENT_QUERIES),
}
WITHOUT_QUERY_LATENT: Table = {
    **TABLE,
    **_down("kv_a_proj_with_mqa"),
    **renamed("attention.up_q.weight", "self_attn.q_proj.weight", LATENT_QUERIES),
}


def _table(spec: ModelSpec) -> Table:
    return WITH_QUERY_LATENT if spec.q_lora_rank else WITHOUT_QUERY_LATENT


def _config(spec: ModelSpec, constants: Constants) -> dict[str, Any]:
    latents = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    return common_config(spec, constants) | {name: getattr(spec, name) for name in latents} | {
        "rope_interleave": True,
        "attention_bias": spec.qkv_bias,
        "intermediate_size": spec.intermediate_size,
        "moe_intermediate_size": spec.moe_intermediate_size,
        "first_k_dense_replace": spec.num_leading_dense_layers,
        "moe_layer_freq": 1,
        "n_routed_experts": spec.num_experts,
        "n_shared_experts": spec.num_shared_experts,
        "num_experts_per_tok": spec.top_k,
        "norm_topk_prob": spec.normalize_top_k,
        "routed_scaling_factor": spec.routed_scale,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "n_group": spec.num_expert_groups,
        "topk_group": spec.top_k_groups,
    }  # fmt: skip


def _limit(spec: ModelSpec, constants: Constants) -> str | None:
    if not spec.num_shared_experts:
        return "num_shared_experts 0: at least one is needed"
    if spec.shared_intermediate_size != spec.num_shared_experts * spec.moe_intermediate_size:
        return f"shared_intermediate_size {spec.shared_intermediate_size} must be num_shared_experts * moe_intermediate_size"
    if constants.norm_eps != LATENT_NORM_EPS:
        return f"norm_eps {constants.norm_eps:g} must be {LATENT_NORM_EPS:g}, which is fixed for the norms on latents"
    if spec.num_experts == spec.num_expert_groups:
        return f"num_expert_groups {spec.num_expert_groups}: a group needs two experts or more"
    return same_biases(spec, constants)


FORM = Form(
    "deepseek_v3", "DeepseekV3ForCausalLM", True, _table, _config,
    {"attention": ("mla",), "qkv_bias": ANY, "out_bias": ANY, "num_shared_experts": ANY, "router": ("sigmoid",), "score_correction_bias": (True,),
     "num_expert_groups": ANY, "top_k_groups": ANY, "routed_scale": ANY, "normalize_top_k": ANY, "num_leading_dense_layers": ANY},
    _limit,
)  # fmt: skip
