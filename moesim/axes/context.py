"""What does context parallelism do to a block? (Tokens are cut over the ranks; keys and values are gathered.)

Each rank holds two chunks of every sequence, one from either end, so that causal work is even. Keys and values of the whole
sequence are all-gathered before attention; their gradients are reduce-scattered (the adjoint).
"""

from __future__ import annotations

from moesim.axes.scale import divide_tokens
from moesim.block import COMM, Block, Node, insert_before
from moesim.ops import Attention, Collective


def shard(block: Block, layout, model) -> Block:
    """``block`` on 1/cp of the tokens, with the key-value gather in front of attention."""
    if layout.cp == 1:
        return block
    cut = Block(tuple(divide_tokens(n, layout.cp) for n in block))
    for node in cut:
        if isinstance(node.op, Attention):
            cut = insert_before(cut, node.key, _gather(node, layout))
    return cut


def _gather(node: Node, layout) -> Node:
    op = node.op
    size = 2.0 * op.batch * op.kv_len * op.num_kv_heads * (op.qk_dim + op.v_dim)
    return Node(key="cp_gather", role="cp_gather", op=Collective("all_gather", size, layout.groups["cp"]), deps=node.deps, stream=COMM, shard="heads")
