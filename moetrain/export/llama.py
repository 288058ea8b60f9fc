"""How is a dense model laid out as Llama? (https://huggingface.co/meta-llama/Llama-3.1-8B)"""

from __future__ import annotations

from typing import Any

from moesim.spec import ModelSpec
from moetrain.export.constants import Constants
from moetrain.export.families import ATTENTION, DENSE, ENDS, PRE_NORMS, config_with_heads, same_biases
from moetrain.export.form import ANY, Form, Table

TABLE: Table = {**ENDS, **PRE_NORMS, **ATTENTION, **DENSE}


def _config(spec: ModelSpec, constants: Constants) -> dict[str, Any]:
    own = {"intermediate_size": spec.intermediate_size, "attention_bias": spec.qkv_bias, "mlp_bias": spec.mlp_bias}
    return config_with_heads(spec, constants) | own


FORM = Form("llama", "LlamaForCausalLM", False, lambda spec: TABLE, _config, {"qkv_bias": ANY, "out_bias": ANY, "mlp_bias": ANY}, same_biases)
