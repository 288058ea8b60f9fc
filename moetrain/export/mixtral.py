"""How is a model laid out as Mixtral? (https://huggingface.co/mistralai/Mixtral-8x7B-v0.1)"""

from __future__ import annotations

from typing import Any

from moesim.spec import ModelSpec
from moetrain.export.constants import Constants
from moetrain.export.families import ATTENTION, ENDS, PRE_NORMS, config_with_heads, experts
from moetrain.export.form import ANY, Form, Table, renamed

TABLE: Table = {
    **ENDS,
    **PRE_NORMS,
    **ATTENTION,
    **renamed("moe.router.weight", "block_sparse_moe.gate.weight"),
    **experts("block_sparse_moe", gate="w1", up="w3", down="w2"),
}


def _config(spec: ModelSpec, constants: Constants) -> dict[str, Any]:
    return config_with_heads(spec, constants) | {
        "intermediate_size": spec.moe_intermediate_size,
        "num_local_experts": spec.num_experts,
        "num_experts_per_tok": spec.top_k,
        "sliding_window": spec.sliding_window,
        "output_router_logits": False,
        "router_jitter_noise": 0.0,
    }


FORM = Form("mixtral", "MixtralForCausalLM", True, lambda spec: TABLE, _config, {"sliding_window": ANY})
