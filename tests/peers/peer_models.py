"""Which small models are compared with other implementations, and what is asked of each pair?"""

from __future__ import annotations

import reference_model as reference
import torch
from torch import Tensor

from moesim.spec import ModelSpec
from moetrain.export import Constants

VOCAB, ROWS, SIZE = 97, 2, 24
SIZES = {"name": "peer", "num_layers": 3, "hidden_size": 32, "vocab_size": VOCAB, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "intermediate_size": 40}
EXPERTS = {"num_experts": 8, "top_k": 2, "moe_intermediate_size": 24}
LATENT = {"attention": "mla", "num_kv_heads": 4, "head_dim": 12, "q_lora_rank": 20, "kv_lora_rank": 14, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6}
DEEPSEEK = EXPERTS | LATENT | {"router": "sigmoid", "score_correction_bias": True, "num_expert_groups": 4, "top_k_groups": 2, "routed_scale": 2.5,
                               "num_shared_experts": 2, "num_leading_dense_layers": 1}  # fmt: skip
OLMO3 = EXPERTS | {"norm_placement": "post", "qk_norm": "per_head", "embedding_norm": True, "num_shared_experts": 1, "routed_scale": 2.0,
                   "num_leading_dense_layers": 1}  # fmt: skip

# What transformers itself implements.
TRANSFORMERS = {
    "mixtral": ("mixtral", EXPERTS | {"intermediate_size": 0}),
    "mixtral_window": ("mixtral", EXPERTS | {"intermediate_size": 0, "sliding_window": 5, "tie_embeddings": True}),
    "qwen3_moe": ("qwen3_moe", EXPERTS | {"qk_norm": "per_head"}),
    "qwen3_moe_other": ("qwen3_moe", EXPERTS | {"qk_norm": "per_head", "moe_layer_interval": 2, "normalize_top_k": False, "qkv_bias": True, "out_bias": True,
                                                "sliding_window": 6}),
    "olmoe": ("olmoe", EXPERTS | {"intermediate_size": 0, "qk_norm": "full", "normalize_top_k": False}),
    "olmoe_other": ("olmoe", EXPERTS | {"intermediate_size": 0, "qk_norm": "full", "qkv_bias": True, "out_bias": True}),
    "deepseek_v3": ("deepseek_v3", DEEPSEEK),
    "deepseek_v3_other": ("deepseek_v3", DEEPSEEK | {"q_lora_rank": None, "qkv_bias": True, "out_bias": True, "num_expert_groups": 1, "top_k_groups": 1,
                                                     "normalize_top_k": False}),
    "llama": ("llama", {"qkv_bias": True, "out_bias": True, "mlp_bias": True}),
    "qwen3": ("qwen3", {"qk_norm": "per_head", "tie_embeddings": True}),
}  # fmt: skip

# What OLMo-core 3 implements.
OLMO_CORE = {
    "seed": OLMO3,
    "full_qk_norm": OLMO3 | {"qk_norm": "full", "embedding_norm": False, "num_shared_experts": 0},
    "sigmoid": OLMO3 | {"router": "sigmoid", "normalize_top_k": False, "routed_scale": 1.0},
    "windows": OLMO3 | {"sliding_window": 5, "full_attention_every": 2, "num_leading_dense_layers": 0, "moe_layer_interval": 2},
}


def spec_of(fields: dict) -> ModelSpec:
    return ModelSpec(**(SIZES | fields))


def constants_of(form: str) -> Constants:
    return Constants(rope_theta=5_000.0, norm_eps=1e-6, embed_scale=3.0 if form == "olmo3moe" else 1.0, max_positions=64)


def params_of(spec: ModelSpec, seed: int = 0) -> dict[str, Tensor]:
    """Random parameters; the balancing bias is zero where it is not used, and everywhere small beside the scores."""
    params = reference.random_params(spec, seed, std=0.15)
    for name, p in params.items():
        if name.endswith("balance_bias"):
            p.mul_(0.3 if spec.score_correction_bias else 0.0)
    return params


def numbers_of(constants: Constants) -> reference.Constants:
    return reference.Constants(constants.rope_theta, constants.norm_eps, constants.embed_scale)


def tokens(seed: int = 1) -> Tensor:
    return torch.randint(0, VOCAB, (ROWS, SIZE), generator=torch.Generator().manual_seed(seed))


def cross_entropy(logits: Tensor, ids: Tensor) -> Tensor:
    """Mean over all but the last token of a row of the loss of the next one."""
    return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def logits_of(params: dict[str, Tensor], spec: ModelSpec, constants: Constants, ids: Tensor) -> Tensor:
    """The definition's logits, computed in float64."""
    with torch.no_grad():
        return reference.forward({name: p.double() for name, p in params.items()}, spec, ids, constants=numbers_of(constants))


def gradients(params: dict[str, Tensor], spec: ModelSpec, constants: Constants, ids: Tensor) -> dict[str, Tensor]:
    """The definition's gradients of the cross entropy, by logical name, computed in float64."""
    leaves = {name: p.double().requires_grad_() for name, p in params.items()}
    cross_entropy(reference.forward(leaves, spec, ids, constants=numbers_of(constants)), ids).backward()
    return {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in leaves.items()}


def difference(ours: Tensor, theirs: Tensor) -> float:
    """Largest difference, relative to the largest value."""
    return float((ours - theirs).abs().max() / theirs.abs().max().clamp_min(1e-30))
