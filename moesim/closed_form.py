"""How many parameters does a model have and how many FLOP does a token cost, counted on paper?

Functions of a ModelSpec (taken by its attributes, so this file imports nothing). They are the ledger's oracle: the op program of the
same model must add up to the same integers.

FLOP convention: one multiply-add is 2 FLOP; training is 3 forward passes; every matrix a token passes through counts, router and LM
head included, the embedding lookup not; attention counts exactly the query-key pairs a causal (and windowed) mask keeps; norms,
activations and softmax are left out; recompute and dropped tokens never enter.
"""

from __future__ import annotations

from typing import Any

ROLES = (
    "embedding", "head", "attention", "dense_ffn", "router", "routed_experts", "shared_experts", "norms", "mtp",
)  # fmt: skip


def fill_model_defaults(data: dict[str, Any]) -> dict[str, Any]:
    """`data` with the fields that follow from others; leaves nonsense alone for the validator to name."""
    filled = dict(data)
    numbers = {k: v for k, v in data.items() if type(v) is int}
    if filled.get("num_kv_heads") is None and "num_heads" in numbers:
        filled["num_kv_heads"] = numbers["num_heads"]
    if filled.get("head_dim") is None:
        filled["head_dim"] = _default_head_dim(data, numbers)
    if filled.get("shared_intermediate_size") is None:
        filled["shared_intermediate_size"] = numbers.get("num_shared_experts", 0) * numbers.get("moe_intermediate_size", 0)
    return {k: v for k, v in filled.items() if k not in ("num_kv_heads", "head_dim") or v is not None}


def _default_head_dim(data: dict[str, Any], numbers: dict[str, int]) -> int | None:
    parts = [numbers.get("qk_nope_head_dim", 0), numbers.get("qk_rope_head_dim", 0)]
    if data.get("attention") == "mla" and all(parts):
        return sum(parts)
    heads, hidden = numbers.get("num_heads", 0), numbers.get("hidden_size", 0)
    return hidden // heads if heads > 0 and hidden > 0 and hidden % heads == 0 else None


def model_problem(m: Any) -> str | None:
    """The first inconsistency of a model in one line, or None."""
    return _attention_problem(m) or (_moe_problem(m) if m.num_experts else _dense_problem(m)) or _stack_problem(m)


def _attention_problem(m: Any) -> str | None:
    mla = {f: getattr(m, f) for f in ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")}
    if m.attention == "mla":
        missing = [f for f, v in mla.items() if v is None]
        if missing:
            return f"attention 'mla' needs {', '.join(missing)}"
        if m.num_kv_heads != m.num_heads:
            return f"attention 'mla' has one key and value a head: num_kv_heads must be {m.num_heads}, not {m.num_kv_heads}"
        if m.head_dim != m.qk_nope_head_dim + m.qk_rope_head_dim:
            return f"head_dim {m.head_dim} must be qk_nope_head_dim + qk_rope_head_dim = {m.qk_nope_head_dim + m.qk_rope_head_dim}"
        return "qk_norm does not apply to attention 'mla' (its latents are normed)" if m.qk_norm != "none" else None
    given = [f for f, v in {**mla, "q_lora_rank": m.q_lora_rank}.items() if v is not None]
    if given:
        return f"{', '.join(given)} given, but attention is 'gqa'"
    if m.num_heads % m.num_kv_heads:
        return f"num_heads {m.num_heads} is not a multiple of num_kv_heads {m.num_kv_heads}"
    if m.sliding_window is None and m.full_attention_every != 1:
        return "full_attention_every is set, but there is no sliding_window"
    return None


def _moe_problem(m: Any) -> str | None:
    if not 1 <= m.top_k <= m.num_experts:
        return f"top_k {m.top_k} must be between 1 and num_experts {m.num_experts}"
    if not m.moe_intermediate_size:
        return "a MoE model needs moe_intermediate_size"
    if m.num_experts % m.num_expert_groups:
        return f"num_experts {m.num_experts} is not a multiple of num_expert_groups {m.num_expert_groups}"
    if m.top_k_groups > m.num_expert_groups:
        return f"top_k_groups {m.top_k_groups} is above num_expert_groups {m.num_expert_groups}"
    reachable = m.top_k_groups * m.num_experts // m.num_expert_groups
    if m.top_k > reachable:
        return f"top_k {m.top_k} is above the {reachable} experts of {m.top_k_groups} groups"
    if bool(m.num_shared_experts) != bool(m.shared_intermediate_size):
        return f"num_shared_experts {m.num_shared_experts} and shared_intermediate_size {m.shared_intermediate_size} contradict each other"
    if m.shared_expert_gate and not m.num_shared_experts:
        return "shared_expert_gate is set, but num_shared_experts is 0"
    return None


def _dense_problem(m: Any) -> str | None:
    fields = ("top_k", "moe_intermediate_size", "num_shared_experts", "shared_intermediate_size", "num_leading_dense_layers")
    flags = ("shared_expert_gate", "router_bias", "expert_bias", "score_correction_bias", "moe_branch_norm")
    given = [f for f in fields + flags if getattr(m, f)]
    given += [f for f in ("num_expert_groups", "top_k_groups", "moe_layer_interval") if getattr(m, f) != 1]
    if given:
        return f"{', '.join(given)} given, but num_experts is 0 (a dense model)"
    return None


def _stack_problem(m: Any) -> str | None:
    if m.num_experts and m.num_leading_dense_layers >= m.num_layers:
        return f"num_leading_dense_layers {m.num_leading_dense_layers} leaves no MoE layer among {m.num_layers} layers"
    kinds = layer_kinds(m)
    if m.num_experts and "moe" not in kinds:
        return f"moe_layer_interval {m.moe_layer_interval} leaves no MoE layer among {m.num_layers} layers"
    if "dense" in kinds and not m.intermediate_size:
        return "intermediate_size is needed: the model has dense layers"
    return None


def layer_kinds(m: Any) -> tuple[str, ...]:
    """("dense" | "moe", ...) of the main stack."""
    if not m.num_experts:
        return ("dense",) * m.num_layers
    lead, every = m.num_leading_dense_layers, m.moe_layer_interval
    return tuple("moe" if i >= lead and (i - lead + 1) % every == 0 else "dense" for i in range(m.num_layers))


def window(m: Any, layer: int) -> int | None:
    """Window of a layer (from 0); MTP layers (layer >= num_layers) follow the same pattern."""
    full = m.sliding_window is None or (m.full_attention_every > 1 and (layer + 1) % m.full_attention_every == 0)
    return None if full else m.sliding_window


def attention_matrices(m: Any) -> int:
    """Elements of the projection matrices of one attention layer."""
    d, h = m.hidden_size, m.num_heads
    if m.attention == "gqa":
        return d * (h + 2 * m.num_kv_heads) * m.head_dim + h * m.head_dim * d
    query = d * h * m.head_dim if m.q_lora_rank is None else m.q_lora_rank * (d + h * m.head_dim)
    key_value = d * (m.kv_lora_rank + m.qk_rope_head_dim) + m.kv_lora_rank * h * (m.qk_nope_head_dim + m.v_head_dim)
    return query + key_value + h * m.v_head_dim * d


def attention_vectors(m: Any) -> int:
    """Biases and sinks of one attention layer."""
    if m.attention == "mla":  # as transformers' attention_bias: on the two down-projections and the output
        qkv = (m.q_lora_rank or 0) + m.kv_lora_rank + m.qk_rope_head_dim
    else:
        qkv = (m.num_heads + 2 * m.num_kv_heads) * m.head_dim
    return qkv * m.qkv_bias + m.hidden_size * m.out_bias + m.num_heads * m.attention_sinks


def attention_norms(m: Any) -> int:
    """Elements of the norms inside one attention layer: QK norm, or the norms on the latents of MLA."""
    if m.attention == "mla":
        return (m.q_lora_rank or 0) + m.kv_lora_rank
    sizes = {"none": 0, "per_head": 2 * m.head_dim, "full": (m.num_heads + m.num_kv_heads) * m.head_dim}
    return sizes[m.qk_norm]


def ffn_matrices(m: Any, width: int) -> int:
    """Elements of the matrices of one FFN of this width."""
    return (3 if m.gated_mlp else 2) * m.hidden_size * width


def ffn_biases(m: Any, width: int) -> int:
    """Elements of the biases of one FFN of this width, where it has them."""
    return (2 if m.gated_mlp else 1) * width + m.hidden_size


def layer_params(m: Any, kind: str) -> dict[str, int]:
    """Parameters of one layer of this kind, by role."""
    d, norm = m.hidden_size, m.hidden_size * (2 if m.norm_bias else 1)
    found = {"attention": attention_matrices(m) + attention_vectors(m), "norms": 2 * norm + attention_norms(m)}
    if kind == "dense":
        found["dense_ffn"] = ffn_matrices(m, m.intermediate_size) + m.mlp_bias * ffn_biases(m, m.intermediate_size)
        return found
    per_expert = ffn_matrices(m, m.moe_intermediate_size) + m.expert_bias * ffn_biases(m, m.moe_intermediate_size)
    found["routed_experts"] = m.num_experts * per_expert
    found["router"] = m.num_experts * (d + m.router_bias + m.score_correction_bias)
    found["shared_experts"] = ffn_matrices(m, m.shared_intermediate_size) + d * m.shared_expert_gate
    found["norms"] += norm * m.moe_branch_norm
    return found


def mtp_params(m: Any) -> dict[str, int]:
    """Parameters of one MTP module: two input norms, the 2d -> d projection, one layer of the last kind, the output norm.

    Embedding and head are shared with the main model (https://arxiv.org/abs/2412.19437, section 2.2).
    """
    norm = m.hidden_size * (2 if m.norm_bias else 1)
    layer = layer_params(m, layer_kinds(m)[-1])
    return {**layer, "projection": 2 * m.hidden_size**2, "norms": layer["norms"] + 3 * norm}


def params_by_role(m: Any) -> dict[str, int]:
    """Parameters of the whole model for every role of ROLES."""
    total = dict.fromkeys(ROLES, 0)
    kinds = layer_kinds(m)
    for kind in set(kinds):
        for role, count in layer_params(m, kind).items():
            total[role] += kinds.count(kind) * count
    norm = m.hidden_size * (2 if m.norm_bias else 1)
    total["norms"] += norm * (1 + m.embedding_norm)
    total["embedding"] = (m.vocab_size + m.num_position_embeddings) * m.hidden_size
    total["head"] = 0 if m.tie_embeddings else m.vocab_size * m.hidden_size
    total["mtp"] = m.num_mtp_layers * sum(mtp_params(m).values())
    return total


def num_active_params(m: Any) -> int:
    """Parameters a token touches: everything but the num_experts - top_k experts of each MoE layer it does not visit."""
    total = sum(params_by_role(m).values())
    if not m.num_experts:
        return total
    kinds = layer_kinds(m)
    num_moe = kinds.count("moe") + m.num_mtp_layers * (kinds[-1] == "moe")
    per_expert = layer_params(m, "moe")["routed_experts"] // m.num_experts
    return total - num_moe * (m.num_experts - m.top_k) * per_expert


def attended_pairs(seq_len: int, window: int | None) -> int:
    """Query-key pairs a causal mask keeps in one sequence, each query seeing at most `window` keys, itself included."""
    w = min(window or seq_len, seq_len)
    return w * (w + 1) // 2 + (seq_len - w) * w


def attention_core_flops(m: Any, seq_len: int, window: int | None) -> float:
    """Training FLOP a token of scores and weighted sum: 3 passes * 2 FLOP * heads * (score + value width) * pairs a query."""
    value_dim = m.v_head_dim if m.attention == "mla" else m.head_dim
    return 6 * m.num_heads * (m.head_dim + value_dim) * attended_pairs(seq_len, window) / seq_len


def layer_flops(m: Any, kind: str, seq_len: int, window: int | None) -> dict[str, float]:
    """Training FLOP a token of one layer, by role."""
    found = {"attention": 6 * attention_matrices(m), "attention_core": attention_core_flops(m, seq_len, window)}
    if kind == "dense":
        return {**found, "dense_ffn": 6 * ffn_matrices(m, m.intermediate_size)}
    gate = m.hidden_size * m.shared_expert_gate
    return {
        **found,
        "router": 6 * m.hidden_size * m.num_experts,
        "routed_experts": 6 * m.top_k * ffn_matrices(m, m.moe_intermediate_size),
        "shared_experts": 6 * (ffn_matrices(m, m.shared_intermediate_size) + gate),
    }


def flops_by_role(m: Any, seq_len: int) -> dict[str, float]:
    """Training FLOP a token for the roles of ROLES that have any, with "attention_core" apart from the projections."""
    head = 6.0 * m.vocab_size * m.hidden_size
    total = {"head": head, "attention": 0.0, "attention_core": 0.0, "dense_ffn": 0.0}
    total |= {"router": 0.0, "routed_experts": 0.0, "shared_experts": 0.0, "mtp": 0.0}
    kinds = layer_kinds(m)
    for layer, kind in enumerate(kinds):
        for role, flops in layer_flops(m, kind, seq_len, window(m, layer)).items():
            total[role] += flops
    for i in range(m.num_mtp_layers):
        layer = layer_flops(m, kinds[-1], seq_len, window(m, m.num_layers + i))
        total["mtp"] += sum(layer.values()) + 12.0 * m.hidden_size**2 + head
    return total
