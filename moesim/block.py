"""Which work, in which order, on which data? (Node and Block: a DAG of ops; backward is its adjoint.)

A Block holds the forward nodes of one part of a layer in program order. Axes rewrite it; ``backward`` turns it round: the input
gradient and weight gradient of every op, behind the recomputed nodes. Time, memory, FLOPs and bytes are folds over the nodes.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from operator import attrgetter
from typing import Iterable, Iterator

from moesim.ops import Op

COMPUTE, COMM, DATA = "compute", "comm", "data"


@dataclass(frozen=True, slots=True)
class Node:
    """One op in its place.

    key: unique in the block. role: what it is for (breakdown, recompute). deps: keys of the forward nodes whose outputs it
    reads ("" = the block's input). shard: how tensor parallelism cuts it: column | row | heads | seq | inner | expert | none.
    saved: bytes of its OUTPUT that backward needs. params: weights it reads on this rank; ``expert`` says that they are
    replicated over the expert-data-parallel group instead of the dense one. tokens_exchanged marks a wait of the host for
    device-side token counts. launches: kernels the host issues for it. gradient: something flows back through it; counts and the
    sums inside a loss have no adjoint.
    """

    key: str
    role: str
    op: Op
    deps: tuple[str, ...]
    stream: str = COMPUTE
    shard: str = "none"
    saved: float = 0.0
    params: float = 0.0
    expert: bool = False
    launches: float = 1.0
    host_wait: bool = False
    phase: str = "F"
    """F forward, R recomputed forward, I input gradient, W weight gradient."""
    gradient: bool = True

    def but(self, **changes) -> "Node":
        """The same node with some fields changed: ``dataclasses.replace``, three times faster (a search makes 10^5 of these)."""
        other = object.__new__(Node)
        for put, value in zip(_PUT.values(), _GET(self)):
            put(other, value)
        for name, value in changes.items():
            _PUT[name](other, value)
        return other


_PUT = {f.name: getattr(Node, f.name).__set__ for f in fields(Node)}
_GET = attrgetter(*_PUT)


@dataclass(frozen=True, slots=True)
class Block:
    nodes: tuple[Node, ...]

    def __iter__(self) -> Iterator[Node]:
        return iter(self.nodes)

    def __len__(self) -> int:
        return len(self.nodes)

    @property
    def params(self) -> tuple[float, float]:
        """(dense, expert) parameters this rank holds."""
        dense = sum(n.params for n in self.nodes if not n.expert)
        return dense, sum(n.params for n in self.nodes if n.expert)

    def flops(self) -> float:
        return sum(n.op.flops for n in self.nodes)

    def saved_bytes(self, recompute: frozenset[str] = frozenset()) -> float:
        """Activation bytes kept from forward to backward; "full" keeps nothing but the block's input, counted by its producer."""
        if "full" in recompute:
            return 0.0
        return sum(n.saved for n in self.nodes if not recomputed(n, recompute))


RECOMPUTE_MEMBERS = {
    "norm": {"norm"},
    "qkv": {"qkv", "qk_norm", "rope"},
    "core_attn": {"core_attn"},
    "mla_up": {"mla_up", "rope"},
    "attn_out": {"attn_out"},
    "router": {"router"},
    "moe_act": {"moe_act"},
    "mlp_act": {"mlp_act", "shared_act"},
    "shared": {"shared_up", "shared_act", "shared_down"},
    "experts": {"expert_up", "moe_act", "expert_down"},
    "mlp": {"mlp_up", "mlp_act", "mlp_down"},
}


def recomputed(node: Node, recompute: Iterable[str]) -> bool:
    """Is this forward node run again in backward instead of saving its output?"""
    return any(r == "full" or node.role in RECOMPUTE_MEMBERS[r] for r in recompute)


def backward(block: Block, recompute: frozenset[str] = frozenset(), ratio: float = 1.0) -> Block:
    """The adjoint block: recomputed nodes first, then for each forward node, last to first, its input-gradient (phase I) and
    weight-gradient (phase W) ops. ``ratio`` = kernel launches of all adjoint ops over those of the forward nodes.

    The gradient of a node's output is complete when the input gradients of all its consumers are.
    """
    out = [n.but(key=n.key + ".R", phase="R", host_wait=False, deps=_recompute_deps(n, block, recompute))
           for n in block if recomputed(n, recompute)]
    again = {n.key for n in out}
    consumers: dict[str, list[str]] = {}
    for node in block:
        for dep in node.deps:
            consumers.setdefault(dep, []).append(node.key)
    carried: dict[str, tuple[str, ...]] = {}
    adjoints = {n.key: n.op.adjoint() if n.gradient else ((), ()) for n in block}
    ratio *= sum(n.launches for n in block) / max(1e-300, sum(n.launches for n in block if any(adjoints[n.key])))
    gathers = {n.key: n for n in block if n.role == "tp_gather"}
    for node in reversed(block.nodes):
        ready = tuple(d for c in consumers.get(node.key, ()) for d in carried[c])
        needs = ready + ((node.key + ".R",) if node.key + ".R" in again else ())
        inputs, weights = adjoints[node.key]
        out += _regather(node, gathers, needs)
        each = ratio / max(1, len(inputs) + len(weights))
        made = [_adjoint(node, f"{node.key}.I{i}", op, needs, "I", each) for i, op in enumerate(inputs)]
        out += made
        out += [_adjoint(node, f"{node.key}.W{i}", op, needs, "W", each) for i, op in enumerate(weights)]
        carried[node.key] = (made[-1].key,) if made else ready
    return Block(tuple(out))


def _regather(node: Node, gathers: dict[str, Node], needs: tuple[str, ...]) -> list[Node]:
    """A tensor-parallel gather whose result was not kept: the weight gradients that read it need it once more, the first of them gathers."""
    found = [gathers.pop(key) for key in node.deps if key in gathers] if node.params else []
    return [g.but(key=f"{g.key}.G.{node.key}", phase="W", deps=needs) for g in found]


def _recompute_deps(node: Node, block: Block, recompute: frozenset[str]) -> tuple[str, ...]:
    by_key = {n.key: n for n in block}
    return tuple(d + ".R" for d in node.deps if d in by_key and recomputed(by_key[d], recompute))


def _adjoint(node: Node, key: str, op: Op, deps: tuple[str, ...], phase: str, ratio: float) -> Node:
    return Node(key=key, role=node.role, op=op, deps=deps, stream=node.stream, shard=node.shard, phase=phase,
                launches=node.launches * ratio, expert=node.expert)


def insert_before(block: Block, key: str, node: Node) -> Block:
    """``node`` placed just before ``key``, which then reads it instead of what ``node`` reads."""
    def rewired(n: Node) -> Node:
        return n.but(deps=tuple(dict.fromkeys(node.key if d in node.deps else d for d in n.deps))) if n.key == key else n

    out: list[Node] = []
    for n in block:
        out += [node, rewired(n)] if n.key == key else [n]
    return Block(tuple(out))


def insert_after(block: Block, key: str, node: Node) -> Block:
    """``node`` placed just after ``key``; every reader of ``key`` reads ``node`` instead."""
    out: list[Node] = []
    for n in block:
        if n.key == key:
            out += [n, node]
        else:
            out.append(n.but(deps=tuple(node.key if d == key else d for d in n.deps)) if key in n.deps else n)
    return Block(tuple(out))
