"""How is a model laid out as OLMoE? (https://huggingface.co/allenai/OLMoE-1B-7B-0924)"""

from __future__ import annotations

from typing import Any

from moesim.spec import ModelSpec
from moetrain.export.constants import Constants
from moetrain.export.families import ATTENTION, ENDS, PRE_NORMS, config_with_heads, experts, same_biases
from moetrain.export.form import ANY, Form, Table, renamed

TABLE: Table = {**ENDS, **PRE_NORMS, **ATTENTION, **renamed("moe.router.weight", "mlp.gate.weight"), **experts("mlp")}


def _config(spec: ModelSpec, constants: Constants) -> dict[str, Any]:
    return config_with_heads(spec, constants) | {
        "intermediate_size": spec.moe_intermediate_size,
        "num_experts": spec.num_experts,
        "num_experts_per_tok": spec.top_k,
        "norm_topk_prob": spec.normalize_top_k,
        "attention_bias": spec.qkv_bias,
        "clip_qkv": None,
        "output_router_logits": False,
    }


FORM = Form("olmoe", "OlmoeForCausalLM", True, lambda spec: TABLE, _config,
            {"qk_norm": ("full",), "normalize_top_k": ANY, "qkv_bias": ANY, "out_bias": ANY}, same_biases)  # fmt: skip
