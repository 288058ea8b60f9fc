"""How is one of our models built in OLMo-core 3 itself, and made to run where there is no GPU?

Its fused MoE block needs CUDA streams and TransformerEngine's permutation. `on_cpu` puts plain torch in their place: five names in two
modules, nothing that computes the model.
"""

from __future__ import annotations

import contextlib
import types

import olmo_core.nn.moe.v2.no_ep as no_ep
import olmo_core.nn.moe.v2.routed_experts as routed_experts
import torch
from olmo_core.config import DType
from olmo_core.nn.attention import AttentionBackendName, AttentionConfig, AttentionType, SlidingWindowAttentionConfig
from olmo_core.nn.ddp.block import OLMoDDPTransformerBlock, OLMoDDPTransformerBlockConfig
from olmo_core.nn.layer_norm import LayerNormConfig, LayerNormType
from olmo_core.nn.lm_head import LMHeadConfig
from olmo_core.nn.moe import MoERouterGatingFunction
from olmo_core.nn.moe.v2.routed_experts import RoutedExpertsConfig
from olmo_core.nn.moe.v2.router import MoERouterConfigV2
from olmo_core.nn.moe.v2.shared_experts import SharedExpertsConfig
from olmo_core.nn.rope import RoPEConfig
from olmo_core.nn.transformer.config import OLMoDDPModelConfig, TransformerBlockType, TransformerType
from torch import Tensor

from moesim.spec import ModelSpec
from moetrain.export import Constants


def model_config(spec: ModelSpec, constants: Constants, balance: float | None = None, z: float | None = None) -> OLMoDDPModelConfig:
    """Their configuration of our model; ``balance`` and ``z``: coefficients of the auxiliary losses, None for none."""
    norm = LayerNormConfig(name=LayerNormType.rms, eps=constants.norm_eps, bias=False, dtype=DType.float32)
    blocks = {kind: _block(spec, constants, kind, norm, balance, z) for kind in ("dense", "moe")}
    kinds = spec.layer_kinds()
    return OLMoDDPModelConfig(
        name=TransformerType.moe_fused_v2, d_model=spec.hidden_size, vocab_size=spec.vocab_size, n_layers=spec.num_layers, dtype=DType.float32,
        block=blocks["moe"], block_overrides={i: blocks["dense"] for i, kind in enumerate(kinds) if kind == "dense"},
        lm_head=LMHeadConfig(layer_norm=norm, bias=False, dtype=DType.float32), embedding_norm=norm if spec.embedding_norm else None,
        embed_scale=constants.embed_scale, tie_word_embeddings=spec.tie_embeddings,
    )  # fmt: skip


def _block(spec: ModelSpec, constants: Constants, kind: str, norm, balance: float | None, z: float | None) -> OLMoDDPTransformerBlockConfig:
    d, f, sizes = spec.hidden_size, spec.moe_intermediate_size, {"bias": False, "dtype": DType.float32}
    shared_width = spec.intermediate_size if kind == "dense" else spec.shared_intermediate_size
    routed = kind == "moe"
    return OLMoDDPTransformerBlockConfig(
        name=TransformerBlockType.moe_fused_v2, sequence_mixer=_attention(spec, constants, norm), layer_norm=norm,
        shared_experts=SharedExpertsConfig(d_model=d, hidden_size=shared_width, num_experts=1, **sizes) if shared_width else None,
        routed_experts=RoutedExpertsConfig(d_model=d, hidden_size=f, num_experts=spec.num_experts, **sizes) if routed else None,
        routed_experts_router=_router(spec, balance, z) if routed else None,
    )  # fmt: skip


def _router(spec: ModelSpec, balance: float | None, z: float | None) -> MoERouterConfigV2:
    return MoERouterConfigV2(
        d_model=spec.hidden_size, num_experts=spec.num_experts, top_k=spec.top_k, dtype=DType.float32, lb_loss_weight=balance, z_loss_weight=z,
        gating_function=MoERouterGatingFunction(spec.router), normalize_expert_weights=1.0 if spec.normalize_top_k else None,
        restore_weight_scale=spec.routed_scale != 1.0,
    )  # fmt: skip


def _attention(spec: ModelSpec, constants: Constants, norm) -> AttentionConfig:
    windows = [spec.window(i) or -1 for i in range(spec.num_layers)]
    pattern = SlidingWindowAttentionConfig(windows, force_full_attention_on_first_layer=False, force_full_attention_on_last_layer=False)
    return AttentionConfig(
        name=AttentionType.default, n_heads=spec.num_heads, n_kv_heads=spec.num_kv_heads, head_dim=spec.head_dim, bias=spec.qkv_bias,
        rope=RoPEConfig(theta=int(constants.rope_theta)), qk_norm=norm, use_head_qk_norm=spec.qk_norm == "per_head", dtype=DType.float32,
        backend=AttentionBackendName.torch, sliding_window=pattern if spec.sliding_window else None,
    )  # fmt: skip


# --- their parameters under our names ---------------------------------------------------------------------------------------


def from_logical(params: dict[str, Tensor], spec: ModelSpec) -> dict[str, Tensor]:
    """Our tensors as their state dict. Their up matrix stands before the gate, and down matrices are transposed."""
    named = {"embeddings.weight": params["embed.weight"], "lm_head.norm.weight": params["final_norm.weight"]}
    if not spec.tie_embeddings:
        named["lm_head.w_out.weight"] = params["head.weight"]
    if spec.embedding_norm:
        named["embedding_norm.weight"] = params["embed_norm.weight"]
    for i, kind in enumerate(spec.layer_kinds()):
        own = {name.removeprefix(f"layers.{i}."): p for name, p in params.items() if name.startswith(f"layers.{i}.")}
        layer = _attention_from(own, spec) | (_dense_from(own, "mlp") if kind == "dense" else _moe_from(own, spec))
        named |= {f"blocks.{i}.{name}": p for name, p in layer.items()}
    return named


def _attention_from(own: dict[str, Tensor], spec: ModelSpec) -> dict[str, Tensor]:
    share = spec.num_heads // spec.num_kv_heads
    heads = own["attention.qkv.weight"].view(spec.num_kv_heads, share + 2, spec.head_dim, spec.hidden_size)
    return {
        "attention.w_q.weight": heads[:, :share].reshape(-1, spec.hidden_size),
        "attention.w_k.weight": heads[:, share].reshape(-1, spec.hidden_size),
        "attention.w_v.weight": heads[:, share + 1].reshape(-1, spec.hidden_size),
        "attention.w_out.weight": own["attention.out.weight"],
        "attention.q_norm.weight": own["attention.q_norm.weight"],
        "attention.k_norm.weight": own["attention.k_norm.weight"],
        "attention_norm.weight": own["norm1.weight"],
        "feed_forward_norm.weight": own["norm2.weight"],
    }


def _dense_from(own: dict[str, Tensor], name: str) -> dict[str, Tensor]:
    up_gate = torch.cat([own[f"{name}.up.weight"], own[f"{name}.gate.weight"]]).T
    return {"shared_experts.w_up_gate": up_gate, "shared_experts.w_down": own[f"{name}.down.weight"].T[None]}


def _moe_from(own: dict[str, Tensor], spec: ModelSpec) -> dict[str, Tensor]:
    found = {
        "routed_experts_router.weight": own["moe.router.weight"].flatten(),
        "routed_experts.w_up_gate": own["moe.experts.gate_up"].flip(1).flatten(1, 2),
        "routed_experts.w_down": own["moe.experts.down"].transpose(1, 2),
    }
    return found | (_dense_from(own, "moe.shared") if spec.shared_intermediate_size else {})


# --- plain torch where theirs needs a GPU -----------------------------------------------------------------------------------


def _permute(inp: Tensor, routing_map: Tensor, num_out_tokens: int, map_type: str) -> tuple[Tensor, Tensor]:
    """Rows (T, d) and expert of each route (T, k) -> a row a route, sorted by expert, and where each came from."""
    order = routing_map.flatten().long().argsort(stable=True)
    return inp[order // routing_map.shape[1]], order


def _unpermute(inp: Tensor, row_id_map: Tensor, restore_shape: torch.Size, map_type: str, merging_probs: Tensor) -> Tensor:
    routes = torch.empty_like(inp).index_copy(0, row_id_map, inp)
    return (routes.view(*merging_probs.shape, -1) * merging_probs.unsqueeze(-1)).sum(1).view(restore_shape)


def on_cpu(monkeypatch) -> None:
    """The five substitutions."""
    cuda = types.SimpleNamespace(stream=lambda stream: contextlib.nullcontext(), current_stream=lambda: None)
    shim = types.SimpleNamespace(**{name: getattr(torch, name) for name in ("Tensor", "nn", "int32")}, cuda=cuda)
    monkeypatch.setattr(no_ep, "torch", shim)
    monkeypatch.setattr(no_ep, "moe_permute_no_compile", _permute)
    monkeypatch.setattr(no_ep, "moe_unpermute_no_compile", _unpermute)
    monkeypatch.setattr(no_ep, "wait_stream_no_compile", lambda *args, **kwargs: None)
    monkeypatch.setattr(OLMoDDPTransformerBlock, "get_dense_stream", lambda self, for_x1=False: None)
    monkeypatch.setattr(routed_experts, "requires_host_side_split_sizes", lambda: True)


def build(spec: ModelSpec, constants: Constants, params: dict[str, Tensor], balance: float | None = None, z: float | None = None):
    """Their model with our parameters in it; every one of theirs is filled. (Their init_weights would make them bfloat16.)"""
    model = model_config(spec, constants, balance, z).build(init_device="cpu")
    named = from_logical(params, spec)
    own = dict(model.named_parameters())
    assert own.keys() == named.keys(), sorted(own.keys() ^ named.keys())
    with torch.no_grad():
        for name, p in own.items():
            assert p.dtype == torch.float32 and p.shape == named[name].shape, (name, p.dtype, p.shape, named[name].shape)
            p.copy_(named[name])
    return model
