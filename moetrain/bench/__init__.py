"""What do the planner's ops take on this machine? (`moetrain bench`: each op becomes a Work, a Work is repeated, repeats become a line.)

WORKS finds the builder of an op's kind: build(op, machine) -> Work, or Skip with the reason why not here.
"""

from __future__ import annotations

from moesim.ops import Attention, Collective, Dispatch, Gemm, GroupedGemm, MemoryBound, Op
from moetrain.bench import exchange, memory_bound, products
from moetrain.bench.work import Machine, Skip, Work

WORKS = {
    Gemm: products.gemm,
    GroupedGemm: products.grouped_gemm,
    Attention: products.attention,
    MemoryBound: memory_bound.build,
    Collective: exchange.collective,
    Dispatch: exchange.dispatch,
}


def build(op: Op, machine: Machine) -> Work:
    """The work of one op, its operands in memory."""
    return WORKS[type(op)](op, machine)


__all__ = ["WORKS", "Machine", "Skip", "Work", "build"]
