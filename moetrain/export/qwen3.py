"""How is a model laid out as Qwen3, sparse or dense? (https://huggingface.co/Qwen/Qwen3-30B-A3B, https://huggingface.co/Qwen/Qwen3-8B)"""

from __future__ import annotations

from typing import Any

from moesim.spec import ModelSpec
from moetrain.export.constants import Constants
from moetrain.export.families import ATTENTION, DENSE, ENDS, PRE_NORMS, config_with_heads, experts, same_biases
from moetrain.export.form import ANY, Form, Table, renamed

DENSE_TABLE: Table = {**ENDS, **PRE_NORMS, **ATTENTION, **DENSE}
MOE_TABLE: Table = {**DENSE_TABLE, **renamed("moe.router.weight", "mlp.gate.weight"), **experts("mlp")}


def _dense_config(spec: ModelSpec, constants: Constants) -> dict[str, Any]:
    return config_with_heads(spec, constants) | {
        "intermediate_size": spec.intermediate_size,
        "attention_bias": spec.qkv_bias,
        "use_sliding_window": False,
        "sliding_window": None,
    }


def _moe_config(spec: ModelSpec, constants: Constants) -> dict[str, Any]:
    return _dense_config(spec, constants) | {
        "moe_intermediate_size": spec.moe_intermediate_size,
        "num_experts": spec.num_experts,
        "num_experts_per_tok": spec.top_k,
        "norm_topk_prob": spec.normalize_top_k,
        "decoder_sparse_step": spec.moe_layer_interval,
        "mlp_only_layers": [],
        "output_router_logits": False,
        "use_sliding_window": spec.sliding_window is not None,
        "sliding_window": spec.sliding_window,
    }


BOTH = {"qk_norm": ("per_head",), "qkv_bias": ANY, "out_bias": ANY}
MOE = Form("qwen3_moe", "Qwen3MoeForCausalLM", True, lambda spec: MOE_TABLE, _moe_config,
           BOTH | {"normalize_top_k": ANY, "moe_layer_interval": ANY, "sliding_window": ANY}, same_biases)  # fmt: skip
DENSE_FORM = Form("qwen3", "Qwen3ForCausalLM", False, lambda spec: DENSE_TABLE, _dense_config, BOTH, same_biases)
