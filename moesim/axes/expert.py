"""What do expert parallelism and expert tensor parallelism do to a block? (Experts are spread; tokens travel.)

Every rank of an expert-parallel group brings its own microbatch, so the rows of the local experts stay T*k on average while
their number falls to E/ep. With etp > 1 each expert's width is cut and its rows are gathered from the etp peers.
"""

from __future__ import annotations

from dataclasses import replace

from moesim.block import COMM, Block, Node, insert_after, insert_before
from moesim.ops import BYTES_PER_ELEMENT, Collective, Dispatch, Group, GroupedGemm

LOW_PRECISION_DISPATCHERS = ("dedup", "sync_free")
"""Dispatchers that can send quantised tokens forward (DeepEP: FP8 dispatch, BF16 combine; https://github.com/deepseek-ai/DeepEP)."""


def shard(block: Block, layout, model) -> Block:
    """``block`` with E/ep local experts, dispatch and combine around them, and the expert-tensor gather and scatter."""
    if layout.ep * layout.etp == 1 or not any(n.expert for n in block):
        return block
    cut = Block(tuple(_experts(n, layout) for n in block))
    if layout.etp > 1:
        cut = _expert_tensor(cut, layout)
    if layout.ep > 1:
        cut = _dispatch(cut, layout, model)
    return cut


def _experts(node: Node, layout) -> Node:
    if node.shard == "rows":
        # Activations of a cut expert: etp times the rows, 1/etp of the width, unless they hold whole hidden vectors.
        wide = node.role == "quantise" and node.key == "quant_experts"
        return node.but(op=replace(node.op, moved=node.op.moved * layout.etp)) if wide else node
    if not isinstance(node.op, GroupedGemm):
        return node
    op = node.op
    cut = {"n": op.n // layout.etp} if node.role == "expert_up" else {"k": op.k // layout.etp}
    # An expert's rows come from every rank of the group: ep*etp microbatches over 1/ep of the experts.
    op = replace(op, groups=op.groups // layout.ep, rows=op.rows * layout.etp, max_rows=op.max_rows * layout.ep * layout.etp, **cut)
    return node.but(op=op, params=node.params / (layout.ep * layout.etp))


def _expert_tensor(block: Block, layout) -> Block:
    up = next(n for n in block if n.role == "expert_up")
    size = 2.0 * up.op.rows * up.op.k
    group = layout.groups["etp"]
    first = next(n.key for n in block if n.key in ("quant_experts", "expert_up"))
    kept = next(n.saved for n in block if n.key == "permute")
    # The gathered rows are what the experts' backward reads: they are kept instead of the rows received.
    block = Block(tuple(n.but(saved=0.0) if n.key == "permute" else n for n in block))
    gather = Node("etp_gather", "etp_gather", Collective("all_gather", size, group), (_source(block, first),), COMM, shard="rows",
                  saved=kept * layout.etp)
    scatter = Node("etp_scatter", "etp_scatter", Collective("reduce_scatter", size, group), ("expert_down",), COMM, shard="rows")
    return insert_after(insert_before(block, first, gather), "expert_down", scatter)


def _source(block: Block, key: str) -> str:
    return next(n.deps[0] for n in block if n.key == key)


def _dispatch(block: Block, layout, model) -> Block:
    router = next(n for n in block if n.key == "router_gemm").op
    rows = next(n for n in block if n.role == "expert_up").op
    mean = router.m * model.top_k * layout.etp
    low = layout.precision != "bf16" and layout.dispatcher in LOW_PRECISION_DISPATCHERS
    send = Dispatch(
        tokens=router.m, hidden=model.hidden_size, bytes_per_element=BYTES_PER_ELEMENT[layout.precision if low else "bf16"],
        top_k=model.top_k, num_experts=model.num_experts, group=layout.groups["ep"], dispatcher=layout.dispatcher, sms=layout.sms,
        node_limit=model.top_k_groups if model.num_expert_groups > 1 else None, load=max(1.0, rows.rows / mean), kept=min(1.0, rows.rows / mean),
    )
    block = insert_after(block, "permute", Node("dispatch", "dispatch", send, ("permute",), COMM, shard="seq"))
    if layout.dispatcher == "alltoall":
        block = insert_after(block, "permute", _count_exchange(layout, model))
    back = replace(send, combine=True, bytes_per_element=2.0)
    before = next(n for n in block if n.key == "unpermute").deps[0]
    # What the routing weights' gradient reads are the rows that came back, whatever the experts' ranks do with theirs.
    kept = next(n.saved for n in block if n.key == "expert_down")
    block = Block(tuple(n.but(saved=0.0) if n.key == "expert_down" else n for n in block))
    return insert_before(block, "unpermute", Node("combine", "combine", back, (before,), COMM, shard="seq", saved=kept))


def _count_exchange(layout, model) -> Node:
    """Every rank tells every other how many tokens it sends to each expert; the host needs the answer for its split sizes."""
    group: Group = layout.groups["ep"]
    counts = Collective("all_gather", 8.0 * model.num_experts * group.size, group)
    return Node("count_exchange", "count_exchange", counts, ("permute",), COMM, host_wait=True, gradient=False)
