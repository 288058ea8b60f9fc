"""What does the trained model compute, said as plainly as possible and as slowly as need be?

The definition of the model over its logical parameters: one sequence at a time, one head at a time, one token and one expert at a
time; nothing is fused, batched or sharded. Whatever is faster is compared with this. Gradients are autograd's.

Shapes: S tokens of one sequence, d = hidden_size, h query heads, E experts, V = vocab_size. A linear is y = x W^T (+ b).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import silu

Params = dict[str, Tensor]


class Constants(NamedTuple):
    """The numbers of a model that change no shape."""

    rope_theta: float = 10_000.0
    norm_eps: float = 1e-6
    embed_scale: float = 1.0  # what embedded tokens are multiplied by, before their norm if they have one


DEFAULT = Constants()


class Routing(NamedTuple):
    """What one MoE layer's router decided for T tokens."""

    logits: Tensor  # (T, E)
    scores: Tensor  # (T, E) softmax or sigmoid of the logits
    chosen: Tensor  # (T, k) experts, best first
    weights: Tensor  # (T, k) what each chosen expert's output is multiplied by


class Result(NamedTuple):
    logits: Tensor  # (B, S, V)
    routings: list[Routing]  # one a MoE layer, over all B * S tokens


# --- the parameters ---------------------------------------------------------------------------------------------------------


def shapes(spec) -> dict[str, tuple[int, ...]]:
    """Every logical parameter of a model and its shape; the loss-free balancing bias (a buffer) among them, used or not."""
    d, vocab = spec.hidden_size, spec.vocab_size
    found = {"embed.weight": (vocab, d)}
    if spec.embedding_norm:
        found |= _norm(spec, "embed_norm", d)
    for i, kind in enumerate(spec.layer_kinds()):
        layer = _norm(spec, "norm1", d) | _norm(spec, "norm2", d) | _attention_shapes(spec)
        if kind == "moe":
            layer |= _moe_shapes(spec)
            if spec.moe_branch_norm:
                layer |= _norm(spec, "norm_branch", d)
        else:
            layer |= _mlp_shapes("mlp", d, spec.intermediate_size, spec.mlp_bias)
        found |= {f"layers.{i}.{name}": shape for name, shape in layer.items()}
    found |= _norm(spec, "final_norm", d)
    return found if spec.tie_embeddings else found | {"head.weight": (vocab, d)}


def _norm(spec, name: str, size: int) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": (size,)} | ({f"{name}.bias": (size,)} if spec.norm_bias else {})


def _linear(name: str, rows: int, columns: int, bias: bool = False) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": (rows, columns)} | ({f"{name}.bias": (rows,)} if bias else {})


def _mlp_shapes(name: str, d: int, f: int, bias: bool) -> dict[str, tuple[int, ...]]:
    return _linear(f"{name}.gate", f, d, bias) | _linear(f"{name}.up", f, d, bias) | _linear(f"{name}.down", d, f, bias)


def _attention_shapes(spec) -> dict[str, tuple[int, ...]]:
    d, h, kv, hd = spec.hidden_size, spec.num_heads, spec.num_kv_heads, spec.head_dim
    sinks = {"attention.sinks": (h,)} if spec.attention_sinks else {}
    if spec.attention == "mla":
        return _mla_shapes(spec) | sinks
    found = _linear("attention.qkv", (h + 2 * kv) * hd, d, spec.qkv_bias) | _linear("attention.out", d, h * hd, spec.out_bias) | sinks
    widths = {"none": (), "per_head": (hd, hd), "full": (h * hd, kv * hd)}[spec.qk_norm]
    return found | {f"attention.{name}.weight": (width,) for name, width in zip(("q_norm", "k_norm"), widths, strict=False)}


def _mla_shapes(spec) -> dict[str, tuple[int, ...]]:
    d, h, q, kv = spec.hidden_size, spec.num_heads, spec.q_lora_rank, spec.kv_lora_rank
    nope, rope, value = spec.qk_nope_head_dim, spec.qk_rope_head_dim, spec.v_head_dim
    found = _linear("attention.down", (q or 0) + kv + rope, d, spec.qkv_bias) | {"attention.kv_latent_norm.weight": (kv,)}
    if q:
        found |= {"attention.q_latent_norm.weight": (q,)}
    found |= _linear("attention.up_q", h * (nope + rope), q or d) | _linear("attention.up_kv", h * (nope + value), kv)
    return found | _linear("attention.out", d, h * value, spec.out_bias)


def _moe_shapes(spec) -> dict[str, tuple[int, ...]]:
    d, e, f, shared = spec.hidden_size, spec.num_experts, spec.moe_intermediate_size, spec.shared_intermediate_size
    found = _linear("moe.router", e, d, spec.router_bias) | {"moe.router.balance_bias": (e,)}
    found |= {"moe.experts.gate_up": (e, 2, f, d), "moe.experts.down": (e, d, f)}
    if spec.expert_bias:
        found |= {"moe.experts.gate_up_bias": (e, 2, f), "moe.experts.down_bias": (e, d)}
    if shared:
        found |= _mlp_shapes("moe.shared", d, shared, bias=False)
    return found | (_linear("moe.shared_gate", 1, d) if spec.shared_expert_gate else {})


def random_params(spec, seed: int = 0, dtype: torch.dtype = torch.float32, std: float = 0.3) -> Params:
    """Normal values: norm gains around 1, everything else around 0; large enough that every part shows in the output."""
    generator = torch.Generator().manual_seed(seed)
    drawn = {name: torch.randn(shape, generator=generator, dtype=torch.float64) * std for name, shape in shapes(spec).items()}
    return {name: (1 + x if _is_gain(name) else x).to(dtype) for name, x in drawn.items()}


def _is_gain(name: str) -> bool:
    return "norm" in name.split(".")[-2] and name.endswith(".weight")


# --- the model --------------------------------------------------------------------------------------------------------------


def forward(params: Params, spec, tokens: Tensor, documents: Tensor | None = None, constants: Constants = DEFAULT) -> Tensor:
    """Logits (B, S, V) of tokens (B, S). `documents` (B, S): a token sees only tokens of its own document."""
    return run(params, spec, tokens, documents, constants).logits


def run(params: Params, spec, tokens: Tensor, documents: Tensor | None = None, constants: Constants = DEFAULT) -> Result:
    """The same with every router's decision."""
    documents = torch.zeros_like(tokens) if documents is None else documents
    rows = [_sequence(params, spec, t, doc, constants) for t, doc in zip(tokens, documents, strict=True)]
    routings = [Routing(*(torch.cat(part) for part in zip(*layer, strict=True))) for layer in zip(*(r for _, r in rows), strict=True)]
    return Result(torch.stack([logits for logits, _ in rows]), routings)


def losses(params: Params, spec, tokens: Tensor, documents: Tensor | None = None, constants: Constants = DEFAULT) -> dict[str, Tensor]:
    """Auxiliary losses of every MoE layer over all tokens, without their coefficients: {"balance": (layers,), "z": (layers,)}."""
    routings = run(params, spec, tokens, documents, constants).routings
    balance = [balance_loss(r, spec.router) for r in routings]
    return {"balance": torch.stack(balance), "z": torch.stack([z_loss(r.logits) for r in routings])}


def balance_loss(routing: Routing, router: str) -> Tensor:
    """E / k * sum over experts of (routes to e / tokens) * (mean probability of e): 1 where routes and probabilities are even.

    Sigmoid scores are first divided by their sum over experts. Only the probabilities carry a gradient.
    """
    num_tokens, num_experts = routing.scores.shape
    shares = routing.scores / routing.scores.sum(-1, keepdim=True) if router == "sigmoid" else routing.scores
    total = shares.new_zeros(())
    for e in range(num_experts):
        routes = (routing.chosen == e).sum()
        total = total + routes / num_tokens * shares[:, e].mean()
    return total * num_experts / routing.chosen.shape[1]


def z_loss(logits: Tensor) -> Tensor:
    """Mean over tokens of the squared log of the sum of exp(logits); logits (T, E)."""
    return logits.logsumexp(-1).square().mean()


def _sequence(params: Params, spec, tokens: Tensor, documents: Tensor, constants: Constants) -> tuple[Tensor, list[Routing]]:
    x = params["embed.weight"][tokens] * constants.embed_scale
    if spec.embedding_norm:
        x = _normed(params, "embed_norm", x, spec, constants)
    routings = []
    for i, kind in enumerate(spec.layer_kinds()):
        prefix = f"layers.{i}."
        own = {name.removeprefix(prefix): p for name, p in params.items() if name.startswith(prefix)}
        x, routing = _layer(own, kind, x, _mask(documents, spec.window(i)), spec, constants)
        routings += [routing] if routing else []
    x = _normed(params, "final_norm", x, spec, constants)
    return x @ params["embed.weight" if spec.tie_embeddings else "head.weight"].T, routings


def _layer(layer: Params, kind: str, x: Tensor, visible: Tensor, spec, constants: Constants) -> tuple[Tensor, Routing | None]:
    x = x + _branch(layer, "norm1", x, spec, constants, lambda y: _attention(layer, y, visible, spec, constants))
    if kind == "dense":
        return x + _branch(layer, "norm2", x, spec, constants, lambda y: _mlp(layer, "mlp", y)), None
    change, routing = _moe(layer, x, spec, constants)
    return x + change, routing


def _branch(layer: Params, norm: str, x: Tensor, spec, constants: Constants, f) -> Tensor:
    """What a residual branch adds to x: f(norm(x)) with the norm before, norm(f(x)) with the norm after."""
    if spec.norm_placement == "pre":
        return f(_normed(layer, norm, x, spec, constants))
    return _normed(layer, norm, f(x), spec, constants)


def _normed(params: Params, name: str, x: Tensor, spec, constants: Constants) -> Tensor:
    return layer_norm(params, name, x, constants) if spec.norm_bias else rms_norm(x, params[f"{name}.weight"], constants)


def rms_norm(x: Tensor, gain: Tensor, constants: Constants) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + constants.norm_eps).sqrt() * gain


def layer_norm(params: Params, name: str, x: Tensor, constants: Constants) -> Tensor:
    return rms_norm(x - x.mean(-1, keepdim=True), params[f"{name}.weight"], constants) + params[f"{name}.bias"]


def linear(params: Params, name: str, x: Tensor) -> Tensor:
    y = x @ params[f"{name}.weight"].T
    return y + params[f"{name}.bias"] if f"{name}.bias" in params else y


# --- attention --------------------------------------------------------------------------------------------------------------


def _mask(documents: Tensor, window: int | None) -> Tensor:
    """(S, S) true where query i sees key j: not later, same document, at most `window` keys, itself included."""
    size = len(documents)
    visible = torch.zeros(size, size, dtype=torch.bool)
    for i in range(size):
        for j in range(i + 1):
            visible[i, j] = bool(documents[i] == documents[j]) and (window is None or i - j < window)
    return visible


def _attention(layer: Params, x: Tensor, visible: Tensor, spec, constants: Constants) -> Tensor:
    heads = _mla_heads(layer, x, spec, constants) if spec.attention == "mla" else _gqa_heads(layer, x, spec, constants)
    outputs = []
    for head, (q, k, v) in enumerate(heads):
        scores = (q @ k.T / spec.head_dim**0.5).masked_fill(~visible, float("-inf"))
        if spec.attention_sinks:  # a key without a value: it takes its share of the softmax and adds nothing
            sink = layer["attention.sinks"][head].expand(len(x), 1)
            scores = torch.cat([scores, sink], dim=-1)
        outputs.append(scores.softmax(-1)[:, : len(x)] @ v)
    return linear(layer, "attention.out", torch.cat(outputs, dim=-1))


def _gqa_heads(layer: Params, x: Tensor, spec, constants: Constants) -> list[tuple[Tensor, Tensor, Tensor]]:
    """(q, k, v), each (S, head_dim), for every query head. Rows of qkv: for each kv head its query heads, its key, its value."""
    hd, share = spec.head_dim, spec.num_heads // spec.num_kv_heads
    columns = list(linear(layer, "attention.qkv", x).split(hd, dim=-1))
    groups = [columns[g * (share + 2) : (g + 1) * (share + 2)] for g in range(spec.num_kv_heads)]
    queries, keys = [q for g in groups for q in g[:share]], [g[share] for g in groups]
    values = [g[share + 1] for g in groups]
    if spec.qk_norm != "none":
        queries = _normed_heads(queries, layer["attention.q_norm.weight"], spec, constants)
        keys = _normed_heads(keys, layer["attention.k_norm.weight"], spec, constants)
    queries, keys = [rotate(q, constants) for q in queries], [rotate(k, constants) for k in keys]
    return [(queries[head], keys[head // share], values[head // share]) for head in range(spec.num_heads)]


def _normed_heads(heads: list[Tensor], gain: Tensor, spec, constants: Constants) -> list[Tensor]:
    if spec.qk_norm == "per_head":
        return [rms_norm(head, gain, constants) for head in heads]
    return list(rms_norm(torch.cat(heads, dim=-1), gain, constants).split(spec.head_dim, dim=-1))


def rotate(x: Tensor, constants: Constants) -> Tensor:
    """Rotary position: the pair (x[p, i], x[p, i + n/2]) of position p turned by the angle p * theta^(-2i/n); x (S, n)."""
    n = x.shape[-1]
    angles = torch.outer(torch.arange(len(x), dtype=torch.float64), constants.rope_theta ** (-torch.arange(0, n, 2, dtype=torch.float64) / n))
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    first, second = x[:, : n // 2], x[:, n // 2 :]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def _mla_heads(layer: Params, x: Tensor, spec, constants: Constants) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Latent attention: keys and values of all heads come from one latent; one rotary key serves all heads."""
    nope, rope, value = spec.qk_nope_head_dim, spec.qk_rope_head_dim, spec.v_head_dim
    q_latent, kv_latent, k_rope = linear(layer, "attention.down", x).split([spec.q_lora_rank or 0, spec.kv_lora_rank, rope], dim=-1)
    q_input = rms_norm(q_latent, layer["attention.q_latent_norm.weight"], constants) if spec.q_lora_rank else x
    kv_latent = rms_norm(kv_latent, layer["attention.kv_latent_norm.weight"], constants)
    queries = linear(layer, "attention.up_q", q_input).split(nope + rope, dim=-1)
    keys_values = linear(layer, "attention.up_kv", kv_latent).split(nope + value, dim=-1)
    k_rope = rotate(k_rope, constants)
    heads = []
    for q, kv in zip(queries, keys_values, strict=True):
        q = torch.cat([q[:, :nope], rotate(q[:, nope:], constants)], dim=-1)
        heads.append((q, torch.cat([kv[:, :nope], k_rope], dim=-1), kv[:, nope:]))
    return heads


# --- feed-forward and experts -----------------------------------------------------------------------------------------------


def _mlp(layer: Params, name: str, x: Tensor) -> Tensor:
    return linear(layer, f"{name}.down", silu(linear(layer, f"{name}.gate", x)) * linear(layer, f"{name}.up", x))


def _moe(layer: Params, x: Tensor, spec, constants: Constants) -> tuple[Tensor, Routing]:
    """What the MoE half of a layer adds to x. With `moe_branch_norm` the shared branch has a norm of its own."""
    pre = spec.norm_placement == "pre"
    y = _normed(layer, "norm2", x, spec, constants) if pre else x
    routing = route(layer, y, spec)
    routed = _routed(layer, y, routing, spec)
    if spec.shared_intermediate_size and spec.moe_branch_norm:
        shared = _branch(layer, "norm_branch", x, spec, constants, lambda z: _shared(layer, z, spec))
        return (routed if pre else _normed(layer, "norm2", routed, spec, constants)) + shared, routing
    both = routed + _shared(layer, y, spec) if spec.shared_intermediate_size else routed
    return both if pre else _normed(layer, "norm2", both, spec, constants), routing


def _shared(layer: Params, x: Tensor, spec) -> Tensor:
    y = _mlp(layer, "moe.shared", x)
    return y * linear(layer, "moe.shared_gate", x).sigmoid() if spec.shared_expert_gate else y


def _routed(layer: Params, x: Tensor, routing: Routing, spec) -> Tensor:
    rows = []
    for token, experts, weights in zip(x, routing.chosen.tolist(), routing.weights, strict=True):
        rows.append(sum(weight * _expert(layer, e, token, spec) for e, weight in zip(experts, weights, strict=True)))
    return torch.stack(rows)


def _expert(layer: Params, e: int, x: Tensor, spec) -> Tensor:
    """One expert on one token (d,)."""
    gate, up = layer["moe.experts.gate_up"][e]
    gated, lifted = gate @ x, up @ x
    if spec.expert_bias:
        gated, lifted = gated + layer["moe.experts.gate_up_bias"][e, 0], lifted + layer["moe.experts.gate_up_bias"][e, 1]
    y = layer["moe.experts.down"][e] @ (silu(gated) * lifted)
    return y + layer["moe.experts.down_bias"][e] if spec.expert_bias else y


def route(layer: Params, x: Tensor, spec) -> Routing:
    """Which experts each token visits. The balancing bias moves the choice, never the weights."""
    logits = linear(layer, "moe.router", x)
    scores = logits.softmax(-1) if spec.router == "softmax" else logits.sigmoid()
    biased = scores + layer["moe.router.balance_bias"] if spec.score_correction_bias else scores
    chosen = torch.tensor([_choose(row, spec) for row in biased.tolist()])
    weights = scores.gather(1, chosen)
    if spec.normalize_top_k:
        weights = weights / weights.sum(-1, keepdim=True)
    return Routing(logits, scores, chosen, weights * spec.routed_scale)


def _choose(scores: list[float], spec) -> list[int]:
    """The top_k experts of the top_k_groups groups whose two best scores have the largest sums; ties go to the lower number."""
    size = spec.num_experts // spec.num_expert_groups
    groups = [range(g * size, (g + 1) * size) for g in range(spec.num_expert_groups)]
    groups.sort(key=lambda group: -sum(sorted((scores[e] for e in group), reverse=True)[:2]))
    open_experts = sorted(e for group in groups[: spec.top_k_groups] for e in group)
    return sorted(open_experts, key=lambda e: -scores[e])[: spec.top_k]
