"""How does an op shrink when its tokens are divided? (Shared by the axes that cut the token dimension.)"""

from __future__ import annotations

from dataclasses import replace

from moesim.block import Node
from moesim.ops import Attention, Collective, Dispatch, Gemm, GroupedGemm, MemoryBound


def divide_tokens(node: Node, parts: int) -> Node:
    """``node`` on 1/parts of its tokens: same weights, less of everything else."""
    op = node.op
    if isinstance(op, Gemm):
        op = replace(op, m=_exact(op.m, parts))
    elif isinstance(op, GroupedGemm):
        op = replace(op, rows=op.rows / parts, max_rows=op.max_rows / parts)
    elif isinstance(op, MemoryBound):
        op = replace(op, moved=op.moved / parts)
    elif isinstance(op, Dispatch):
        op = replace(op, tokens=_exact(op.tokens, parts))
    elif isinstance(op, Attention):
        op = replace(op, q_len=_exact(op.q_len, parts), pairs=op.pairs / parts)
    elif isinstance(op, Collective):
        op = replace(op, bytes=op.bytes / parts)
    return node.but(op=op, saved=node.saved / parts)


def _exact(count: int, parts: int) -> int:
    assert count % parts == 0, (count, parts)
    return count // parts
