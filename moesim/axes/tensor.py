"""What does tensor parallelism (with sequence parallelism) do to a block? (Weights and heads are cut; sequences between.)

Column-cut GEMMs read gathered tokens, row-cut ones end in a reduce-scatter; everything between them works on 1/tp of the
tokens (https://arxiv.org/abs/2205.05198). The gathered input is not kept: backward gathers it again for the weight gradient.
"""

from __future__ import annotations

from dataclasses import replace

from moesim.axes.scale import divide_tokens
from moesim.block import COMM, Block, Node, insert_after, insert_before
from moesim.ops import Collective, Gemm, GroupedGemm

LOSS_VALUES_PER_TOKEN = {"tp_loss_peak": 1, "tp_loss": 2}
"""Vocabulary-parallel cross entropy reduces the maximum, then the sum of exponentials and the target logit: FP32 each, forward only
(the gradient of a rank's logits needs no others)."""


def shard(block: Block, layout, model) -> Block:
    """``block`` under tp ranks: sharded ops, gathers before column-cut regions, scatters after row-cut ones."""
    if layout.tp == 1:
        return block
    full_tokens = {n.key: n.op.m for n in block if isinstance(n.op, Gemm)}
    cut = Block(tuple(_CUTS[n.shard](n, layout.tp, model) for n in block))
    group = layout.groups["tp"]
    gathered: set[str] = set()
    for node in block:
        if node.shard in ("column", "qkv") and node.deps[0] not in gathered:
            # Readers of one tensor share one gather: the two up-projections of MLA read two halves of one latent.
            gathered.add(node.deps[0])
            size = 2.0 * full_tokens[node.key] * _gathered_width(node, block, model)
            cut = insert_before(cut, node.key, Node(f"tp_gather_{node.key}", "tp_gather", Collective("all_gather", size, group), node.deps, COMM))
        if node.shard == "row":
            size = 2.0 * full_tokens[node.key] * node.op.n
            cut = insert_after(cut, node.key, Node(f"tp_scatter_{node.key}", "tp_scatter", Collective("reduce_scatter", size, group), (node.key,), COMM))
        if node.key == "embed":
            size = node.saved
            cut = insert_after(cut, "embed", Node("tp_scatter_embed", "tp_scatter", Collective("reduce_scatter", size, group), ("embed",), COMM))
        if node.key == "loss":
            before = "loss"
            for key, values in LOSS_VALUES_PER_TOKEN.items():
                op = Collective("all_reduce", 4.0 * values * full_tokens["head"], group)
                cut = insert_after(cut, before, Node(key, "tp_loss", op, (before,), COMM, gradient=False))
                before = key
    return cut


def _gathered_width(node: Node, block: Block, model) -> int:
    """Values a token of what ``node`` reads. Readers of one latent (MLA) read parts of it, and its rotary key is read by no GEMM."""
    readers = [n for n in block if n.shard == node.shard and n.deps[:1] == node.deps[:1]]
    return sum(n.op.k for n in readers) + (model.qk_rope_head_dim if node.role == "mla_up" else 0)


def _column(node: Node, tp: int, model) -> Node:
    return node.but(op=replace(node.op, n=node.op.n // tp), params=node.params / tp, saved=node.saved / tp)


def _row(node: Node, tp: int, model) -> Node:
    return node.but(op=replace(node.op, k=node.op.k // tp), params=node.params / tp, saved=node.saved / tp)


def _qkv(node: Node, tp: int, model) -> Node:
    """Query, key and value projection; with fewer key-value heads than ranks every rank keeps a copy of one."""
    heads = model.num_heads // tp + 2 * max(1, model.num_kv_heads // tp)
    share = heads / (model.num_heads + 2 * model.num_kv_heads)
    return node.but(op=replace(node.op, n=heads * model.head_dim), params=node.params * share, saved=node.saved * share)


def _heads(node: Node, tp: int, model) -> Node:
    if isinstance(node.op, Collective):
        return node.but(op=replace(node.op, bytes=node.op.bytes / min(tp, model.num_kv_heads)))
    op = replace(node.op, num_heads=node.op.num_heads // tp, num_kv_heads=max(1, node.op.num_kv_heads // tp))
    return node.but(op=op, params=node.params / tp, saved=node.saved / tp)


def _tokens(node: Node, tp: int, model) -> Node:
    return divide_tokens(node, tp)


def _inner(node: Node, tp: int, model) -> Node:
    return node.but(op=replace(node.op, moved=node.op.moved / tp), saved=node.saved / tp)


def _vocab(node: Node, tp: int, model) -> Node:
    return _tokens(node, tp, model).but(params=node.params / tp)


def _expert(node: Node, tp: int, model) -> Node:
    assert isinstance(node.op, GroupedGemm)
    return _tokens(node, tp, model)


_CUTS = {
    "column": _column, "qkv": _qkv, "row": _row, "heads": _heads, "seq": _tokens, "rows": _tokens, "inner": _inner, "vocab": _vocab,
    "expert": _expert, "none": lambda node, tp, model: node,
}
