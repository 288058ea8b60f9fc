"""Which rewrites turn an unsharded block into one rank's block? (One file an axis; applied in this order.)

Each axis takes a forward Block and returns the Block of one rank with its collectives inserted; degree 1 is the identity, and
FLOPs and parameters summed over the ranks of the axis are conserved. ``data`` and ``pipeline`` act on whole stages.
"""

from moesim.axes import context, expert, tensor

BLOCK_AXES = {"context": context.shard, "expert": expert.shard, "tensor": tensor.shard}


def shard(block, layout, model):
    """One rank's forward block under ``layout``."""
    for axis in BLOCK_AXES.values():
        block = axis(block, layout, model)
    return block
