"""Which tensors does a model consist of, by logical name, and what shape has each?

Only the spec decides, so a checkpoint can be checked before a model exists. d = hidden_size, f = an FFN's width, E = experts.
"""

from __future__ import annotations

from moesim.spec import ModelSpec

Shape = tuple[int, ...]
Shapes = dict[str, Shape]

BALANCE_BIAS = "moe.router.balance_bias"
"""The loss-free balancing bias: a buffer, float32, zero unless it is used."""


def logical_shapes(spec: ModelSpec) -> Shapes:
    """Every parameter of a model and its router's bias buffers, in model order."""
    d = spec.hidden_size
    found = {"embed.weight": (spec.vocab_size, d)} | (_norm("embed_norm", d) if spec.embedding_norm else {})
    for i, kind in enumerate(spec.layer_kinds()):
        found |= {f"layers.{i}.{name}": shape for name, shape in layer_shapes(spec, kind).items()}
    found |= _norm("final_norm", d)
    return found if spec.tie_embeddings else found | {"head.weight": (spec.vocab_size, d)}


def layer_shapes(spec: ModelSpec, kind: str) -> Shapes:
    """The same of one layer ("dense" or "moe"), without its number."""
    d = spec.hidden_size
    attention = _latent_attention(spec) if spec.attention == "mla" else _grouped_attention(spec)
    if spec.attention_sinks:
        attention["attention.sinks"] = (spec.num_heads,)
    norms = _norm("norm1", d) | _norm("norm2", d)
    if kind == "dense":
        return norms | attention | _mlp("mlp", d, spec.intermediate_size, spec.mlp_bias)
    return norms | (_norm("norm_branch", d) if spec.moe_branch_norm else {}) | attention | _moe(spec)


def _norm(name: str, size: int) -> Shapes:
    return {f"{name}.weight": (size,)}


def _linear(name: str, rows: int, columns: int, bias: bool = False) -> Shapes:
    return {f"{name}.weight": (rows, columns)} | ({f"{name}.bias": (rows,)} if bias else {})


def _mlp(name: str, d: int, f: int, bias: bool) -> Shapes:
    return _linear(f"{name}.gate", f, d, bias) | _linear(f"{name}.up", f, d, bias) | _linear(f"{name}.down", d, f, bias)


def _grouped_attention(spec: ModelSpec) -> Shapes:
    d, h, kv, hd = spec.hidden_size, spec.num_heads, spec.num_kv_heads, spec.head_dim
    found = _linear("attention.qkv", (h + 2 * kv) * hd, d, spec.qkv_bias) | _linear("attention.out", d, h * hd, spec.out_bias)
    if spec.qk_norm == "none":
        return found
    q, k = (hd, hd) if spec.qk_norm == "per_head" else (h * hd, kv * hd)
    return found | _norm("attention.q_norm", q) | _norm("attention.k_norm", k)


def _latent_attention(spec: ModelSpec) -> Shapes:
    d, h, q, kv = spec.hidden_size, spec.num_heads, spec.q_lora_rank or 0, spec.kv_lora_rank
    nope, rope, value = spec.qk_nope_head_dim, spec.qk_rope_head_dim, spec.v_head_dim
    found = _linear("attention.down", q + kv + rope, d, spec.qkv_bias) | (_norm("attention.q_latent_norm", q) if q else {})
    found |= _norm("attention.kv_latent_norm", kv) | _linear("attention.up_q", h * (nope + rope), q or d)
    return found | _linear("attention.up_kv", h * (nope + value), kv) | _linear("attention.out", d, h * value, spec.out_bias)


def _moe(spec: ModelSpec) -> Shapes:
    d, e, f = spec.hidden_size, spec.num_experts, spec.moe_intermediate_size
    found = _linear("moe.router", e, d, spec.router_bias) | {BALANCE_BIAS: (e,)}
    found |= {"moe.experts.gate_up": (e, 2, f, d), "moe.experts.down": (e, d, f)}
    if spec.expert_bias:
        found |= {"moe.experts.gate_up_bias": (e, 2, f), "moe.experts.down_bias": (e, d)}
    if spec.shared_intermediate_size:
        found |= _mlp("moe.shared", d, spec.shared_intermediate_size, bias=False)
    return found | (_linear("moe.shared_gate", 1, d) if spec.shared_expert_gate else {})
