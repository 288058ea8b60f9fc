"""Which ops does one microbatch cost in each part of an unsharded transformer? (ModelSpec -> forward Blocks.)

Parts: "embedding", "attention" (one for each window), "dense", "moe", "head", "mtp". A layer is an attention part followed
by a dense or a moe part. Sizes are those of one microbatch of ``tokens`` tokens; no rank holds it yet: axes cut it.

Traffic of memory-bound kernels is counted in passes over bf16 tensors, read plus written (eager, one kernel an operator);
a stack's ``pointwise_fusion`` scales it. Low-precision recipes quantise the input of each GEMM: 2 bytes read, 1 written, and
1 for the transposed copy that the weight gradient reads.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from moesim.block import Block, Node
from moesim.ops import BYTES_PER_ELEMENT, Attention, Gemm, GroupedGemm, MemoryBound
from moesim.saved_tensors import Saved, saved_tensors

QUANTISE_BYTES = 4.0
LOSS_BYTES_PER_LOGIT = 8.0
"""Cross entropy reads the bf16 logits, writes and reads FP32 ones (forward); its adjoint moves another 6."""


@dataclass(frozen=True, slots=True)
class Work:
    """What the blocks of one layout have in common: sequences a microbatch, sequence length, numeric recipe, activations
    that this software keeps."""

    batch: int
    seq_len: int
    precision: str = "bf16"
    fusion: float = 1.0
    permutes: float = 2.0
    """Passes over the routed rows in one forward (each reads and writes every row): permute and unpermute share them."""
    saves_expert_output: bool = False
    fuses_experts: bool = False
    """Experts' first product applies the activation and casts its result; their second product's backward undoes the activation."""
    load: float = 1.0
    """Received rows of the busiest rank over the mean."""
    max_expert: float = 1.0
    """Rows of the busiest expert over that rank's mean expert."""
    memory_load: float = 1.0
    """Received rows of the rank that holds most over all layers, over the mean: never above ``load``."""
    kept: float = 1.0
    """Routes kept after capacity (padding counts as kept)."""
    keeps: Saved = field(default_factory=lambda: saved_tensors("default"))
    """What the kernels keep for backward."""

    @property
    def tokens(self) -> int:
        return self.batch * self.seq_len

    @property
    def width(self) -> float:
        """Bytes of a saved GEMM input."""
        return BYTES_PER_ELEMENT[self.precision]

    @property
    def both_widths(self) -> float:
        """Bytes of a value that backward reads in bf16 and, as a GEMM input, in the recipe's format: one tensor if that is bf16."""
        return 2.0 if self.precision == "bf16" else 2.0 + self.width


class _Chain:
    """Nodes in program order, each reading the one before unless told otherwise."""

    def __init__(self, work: Work):
        self.work, self.nodes, self.last = work, [], ""

    def add(self, key, role, op, *, deps=None, **kw) -> str:
        self.nodes.append(Node(key=key, role=role, op=op, deps=(self.last,) if deps is None else deps, **kw))
        self.last = key
        return key

    def pointwise(self, key, role, values_per_token, kind="elementwise", backward_ratio=1.5, tokens=None, **kw) -> str:
        """A memory-bound kernel that reads and writes ``values_per_token`` bf16 values a token in all."""
        count = self.work.tokens if tokens is None else tokens
        moved = 2.0 * values_per_token * count * self.work.fusion
        return self.add(key, role, MemoryBound(kind, moved, backward_ratio), **kw)

    def quantise(self, key, width, shard, deps=None, tokens=None) -> None:
        """Cast of a GEMM's input to the recipe's format, when there is one."""
        if self.work.precision != "bf16":
            count = self.work.tokens if tokens is None else tokens
            moved = QUANTISE_BYTES * width * count
            self.add(key, "quantise", MemoryBound("quantise", moved, 1.0), deps=deps, shard=shard)

    def gemm(self, key, role, n, k, shard, *, precision=None, bias=False, **kw) -> str:
        op = Gemm(self.work.tokens, n, k, precision or self.work.precision)
        return self.add(key, role, op, shard=shard, params=float(n * k + (n if bias else 0)), **kw)

    def block(self) -> Block:
        return Block(tuple(self.nodes))


def attended_pairs(seq_len: int, window: int | None) -> float:
    """(query, key) pairs of one causal head over one sequence; ``window`` keys at most for each query, itself included."""
    if window is None or window >= seq_len:
        return seq_len * (seq_len + 1) / 2
    return window * (window + 1) / 2 + (seq_len - window) * float(window)


def embedding(model, work: Work) -> Block:
    """Token lookup; the (optional) norm after it."""
    chain, d = _Chain(work), model.hidden_size
    chain.pointwise("embed", "embedding", 2 * d, kind="embedding", backward_ratio=2.0, shard="vocab", saved=2.0 * d * work.tokens,
                    params=float(d * (model.vocab_size + model.num_position_embeddings)))
    if model.embedding_norm:
        _norm(chain, model, "embed_norm", width=2.0)
    return chain.block()


def attention(model, work: Work, window: int | None) -> Block:
    """Norm, projections, softmax attention, output projection, residual add."""
    chain = _Chain(work)
    _norm(chain, model, "norm1")
    (_mla if model.attention == "mla" else _gqa)(chain, model, window)
    _residual(chain, model, "residual1")
    return chain.block()


def _norm(chain: _Chain, model, key: str, width: float | None = None) -> None:
    """A norm whose output feeds GEMMs (kept in the recipe's format) or, with ``width``, anything (that many bytes a value)."""
    d = model.hidden_size
    gains = float(d * (2 if model.norm_bias else 1))
    saved = ((chain.work.width if width is None else width) * d + _norm_extra(chain.work.keeps, d, 1)) * chain.work.tokens
    chain.pointwise(key, "norm", 2 * d, kind="norm", shard="seq", saved=saved, params=gains)


def _norm_extra(keeps: Saved, values: int, rows: int) -> float:
    """Bytes a token that a norm keeps beside its output and its bf16 input, which its producer counts."""
    return (keeps.norm.normalised + keeps.norm.input - 2.0) * values + keeps.norm.row_bytes * rows


def _qk_norm_extra(keeps: Saved, model) -> float:
    """The same of the norms of queries and keys. Where they keep copies, the projections stay beside those for the values among them, unless
    values were copied out (one norm over all heads)."""
    rows = model.num_heads + model.num_kv_heads
    values = rows * model.head_dim
    stays = 2.0 * values if keeps.norm.input > 2.0 and model.qk_norm == "per_head" else 0.0
    return _norm_extra(keeps, values, rows if model.qk_norm == "per_head" else 2) + stays


def _residual(chain: _Chain, model, key: str, extra: tuple[str, ...] = ()) -> None:
    d = model.hidden_size
    chain.pointwise(key, "residual", (3 + len(extra)) * d, backward_ratio=2 / 3, shard="seq", deps=(chain.last, *extra),
                    saved=2.0 * d * chain.work.tokens)


def _core(chain: _Chain, model, window, qk_dim: int, v_dim: int, kv_heads: int) -> None:
    work, heads = chain.work, model.num_heads
    op = Attention(work.batch, heads, kv_heads, work.seq_len, work.seq_len, qk_dim, v_dim, attended_pairs(work.seq_len, window))
    # Backward of the core reads its own bf16 output, that of the output projection its quantised input.
    core = work.keeps.core
    saved = ((work.both_widths + core.output - 2.0) * heads * v_dim + (core.head_bytes + core.pair_bytes * work.seq_len) * heads) * work.tokens
    chain.add("core_attn", "core_attn", op, shard="heads", saved=saved, params=float(heads if model.attention_sinks else 0))


def _gqa(chain: _Chain, model, window) -> None:
    d, hd, heads, kv = model.hidden_size, model.head_dim, model.num_heads, model.num_kv_heads
    out = (heads + 2 * kv) * hd
    chain.quantise("quant_qkv", d, "seq")
    chain.gemm("qkv", "qkv", out, d, "qkv", bias=model.qkv_bias, saved=2.0 * out * chain.work.tokens)
    if model.qk_norm != "none":
        gains = float(2 * hd if model.qk_norm == "per_head" else (heads + kv) * hd)
        # Backward of a norm needs its input: the projections are kept beside the normalised heads.
        chain.pointwise("qk_norm", "qk_norm", 2 * (heads + kv) * hd, kind="norm", shard="inner", params=gains,
                        saved=(2.0 * (heads + kv) * hd + _qk_norm_extra(chain.work.keeps, model)) * chain.work.tokens)
    chain.pointwise("rope", "rope", 2 * (heads + kv) * hd, backward_ratio=1.0, shard="inner")
    _core(chain, model, window, hd, hd, kv)
    chain.quantise("quant_out", heads * hd, "inner")
    chain.gemm("attn_out", "attn_out", d, heads * hd, "row", bias=model.out_bias)


def _mla(chain: _Chain, model, window) -> None:
    d, heads = model.hidden_size, model.num_heads
    qk, v = model.qk_nope_head_dim + model.qk_rope_head_dim, model.v_head_dim
    q_rank, kv_rank, rope = model.q_lora_rank, model.kv_lora_rank, model.qk_rope_head_dim
    tokens, width = chain.work.tokens, chain.work.width
    chain.quantise("quant_down", d, "seq")
    down = (q_rank or 0) + kv_rank + rope
    chain.gemm("mla_down", "mla_down", down, d, "seq", bias=model.qkv_bias, saved=2.0 * down * tokens)
    ranks = (q_rank or 0) + kv_rank
    chain.pointwise("mla_norm", "qk_norm", 2 * ranks, kind="norm", shard="seq", saved=(width * ranks + _norm_extra(chain.work.keeps, ranks, 2)) * tokens,
                    params=float(ranks))
    chain.quantise("quant_up", ranks, "seq")
    up = heads * (qk + model.qk_nope_head_dim + v)
    source = chain.last
    q_op = chain.gemm("mla_up_q", "mla_up", heads * qk, q_rank or d, "column", saved=2.0 * heads * qk * tokens)
    chain.gemm("mla_up_kv", "mla_up", heads * (model.qk_nope_head_dim + v), kv_rank, "column", deps=(source,),
               saved=2.0 * heads * (qk + v) * tokens)
    chain.pointwise("rope", "rope", up, backward_ratio=1.0, shard="inner", deps=(q_op, "mla_up_kv"))
    _core(chain, model, window, qk, v, heads)
    chain.quantise("quant_out", heads * v, "inner")
    chain.gemm("attn_out", "attn_out", d, heads * v, "row", bias=model.out_bias)


def _ffn(chain: _Chain, model, prefix: str, f: int, source: str, bias: bool = False) -> None:
    """Dense FFN of width f reading ``source``; roles <prefix>_up, <prefix>_act, <prefix>_down."""
    d, gate, tokens = model.hidden_size, 2 if model.gated_mlp else 1, chain.work.tokens
    chain.gemm(prefix + "_up", prefix + "_up", gate * f, d, "column", deps=(source,), bias=bias, saved=2.0 * gate * f * tokens)
    chain.pointwise(prefix + "_act", prefix + "_act", (gate + 1) * f, backward_ratio=5 / 3, shard="inner", saved=chain.work.width * f * tokens)
    chain.quantise("quant_" + prefix, f, "inner")
    chain.gemm(prefix + "_down", prefix + "_down", d, f, "row", bias=bias)


def dense(model, work: Work) -> Block:
    """Norm, dense FFN, residual add."""
    chain = _Chain(work)
    _norm(chain, model, "norm2")
    chain.quantise("quant_mlp_in", model.hidden_size, "seq")
    _ffn(chain, model, "mlp", model.intermediate_size, chain.last, bias=model.mlp_bias)
    _residual(chain, model, "residual2")
    return chain.block()


def moe(model, work: Work) -> Block:
    """Norm, router, permute, shared experts, routed experts, unpermute, residual add. ``permute`` and ``unpermute`` are where
    the expert axis puts dispatch and combine; the shared branch stands between them, so that it can run beside dispatch."""
    chain, d, k, f = _Chain(work), model.hidden_size, model.top_k, model.moe_intermediate_size
    gate, rows = 2 if model.gated_mlp else 1, work.tokens * k * work.kept
    # The router's GEMM is bf16; shared experts read the same values in the recipe's format.
    _norm(chain, model, "norm2", width=work.both_widths if model.shared_intermediate_size else 2.0)
    if model.moe_branch_norm:
        _norm(chain, model, "norm_branch")
    bias = model.num_experts * (int(model.router_bias) + int(model.score_correction_bias))
    chain.add("router_gemm", "router", Gemm(work.tokens, model.num_experts, d, "bf16"), shard="seq",
              params=float(model.num_experts * d + bias))
    chain.pointwise("router", "router", 6 * model.num_experts, shard="seq",
                    saved=(work.keeps.experts.expert_bytes * model.num_experts + work.keeps.experts.route_bytes * k) * work.tokens)
    # What is kept is the rows received, so it follows the busiest rank, not the rows sent.
    chain.pointwise("permute", "permute", d * k * work.kept * work.permutes, kind="permute", backward_ratio=1.0, shard="seq", deps=("router",),
                    saved=work.width * d * rows * work.memory_load)
    branch = _shared(chain, model) if model.shared_intermediate_size else ()
    busiest = rows * work.load
    chain.quantise("quant_experts", d, "rows", deps=("permute",), tokens=busiest)
    source = chain.last if work.precision != "bf16" else "permute"
    _experts(chain, model, busiest, source, gate, f)
    chain.pointwise("unpermute", "unpermute", d * k * work.kept * work.permutes, kind="permute", backward_ratio=1.0, shard="seq", deps=(chain.last, "router"))
    _residual(chain, model, "residual2", extra=branch)
    return chain.block()


def _shared(chain: _Chain, model) -> tuple[str, ...]:
    chain.quantise("quant_shared_in", model.hidden_size, "seq", deps=("norm2",))
    source = chain.last if chain.work.precision != "bf16" else "norm2"
    _ffn(chain, model, "shared", model.shared_intermediate_size, source)
    if model.shared_expert_gate:
        chain.add("shared_gate", "shared_down", Gemm(chain.work.tokens, 1, model.hidden_size, "bf16"), shard="seq", params=float(model.hidden_size))
    return (chain.last,)


def _experts(chain: _Chain, model, rows: float, source: str, gate: int, f: int) -> None:
    d, work, experts = model.hidden_size, chain.work, model.num_experts
    peak = rows / experts * work.max_expert
    biases = (gate * f, d) if model.expert_bias else (0, 0)
    kept = rows * work.memory_load / work.load
    keeps = work.keeps.experts
    output = (2.0 if work.saves_expert_output else 0.0) if keeps.output is None else keeps.output
    up = GroupedGemm(experts, rows, gate * f, d, work.precision, max_rows=peak)
    chain.add("expert_up", "expert_up", up, deps=(source,), shard="expert", expert=True, params=float(experts * (gate * f * d + biases[0])),
              saved=2.0 * gate * f * kept)
    # In the product itself: the cast values are written, and backward reads what went into the activation.
    act = (MemoryBound("elementwise", work.width * f * rows, 2.0 * gate / work.width) if work.fuses_experts
           else MemoryBound("elementwise", 2.0 * (gate + 1) * f * rows * work.fusion, 5 / 3))
    chain.add("moe_act", "moe_act", act, shard="rows", saved=(work.width + keeps.activation + (keeps.up - 2.0) * gate) * f * kept)
    if not work.fuses_experts:
        chain.quantise("quant_moe", f, "rows", tokens=rows)
    down = GroupedGemm(experts, rows, d, f, work.precision, max_rows=peak)
    chain.add("expert_down", "expert_down", down, shard="expert", expert=True, params=float(experts * (d * f + biases[1])),
              saved=output * d * kept)


def head(model, work: Work, own: bool | None = None) -> Block:
    """Final norm, vocabulary projection, cross entropy. Logits stay bf16 until the loss, which keeps its FP32 gradient. ``own``: the
    projection's weights are held here: None says as the model does, which is not where it is tied to an embedding on the same rank; the head of a
    multi-token-prediction module reads the main one."""
    chain, d, vocab = _Chain(work), model.hidden_size, model.vocab_size
    _norm(chain, model, "final_norm")
    weights = float(d * vocab) if (not model.tie_embeddings if own is None else own) else 0.0
    loss = work.keeps.loss
    # In chunks, no logits are left for backward but the weight gradient that they gave.
    logits, gradient = (2.0 * vocab * d, 0.0) if loss.chunk else (loss.logit_bytes * vocab * work.tokens, loss.gradient_bytes * vocab * work.tokens)
    chain.add("head", "head", Gemm(work.tokens, vocab, d, "bf16"), shard="column", params=weights, saved=logits)
    chain.add("loss", "loss", MemoryBound("loss", LOSS_BYTES_PER_LOGIT * vocab * work.tokens, 0.75), shard="inner", saved=gradient)
    return chain.block()


def loss_room(model, work: Work, tp: int, cp: int) -> float:
    """Bytes that a loss in chunks needs while it runs, beyond what it leaves: logits of one chunk with their gradient, an FP32 sum of the
    weight's, and the gradient of the hidden states."""
    loss, d, vocab, tokens = work.keeps.loss, model.hidden_size, model.vocab_size / tp, work.tokens / cp
    chunk = (loss.logit_bytes + loss.gradient_bytes) * min(loss.chunk, tokens) * vocab
    gathered = 2.0 * d * tokens * (1.0 - 1.0 / tp)
    return max(chunk + 4.0 * vocab * d, 6.0 * vocab * d) - 2.0 * vocab * d + 2.0 * d * tokens + gathered


def mtp_projection(model, work: Work) -> Block:
    """What one multi-token-prediction module adds to a layer and a head: norms of both inputs and the 2d -> d projection."""
    chain, d = _Chain(work), model.hidden_size
    _norm(chain, model, "mtp_norm_hidden")
    _norm(chain, model, "mtp_norm_embedding")
    chain.gemm("mtp_proj", "mtp", d, 2 * d, "seq", saved=2.0 * d * work.tokens)
    return chain.block()
