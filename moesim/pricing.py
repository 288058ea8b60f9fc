"""How do ops become arrays, and arrays become prices? (One vectorised cost call a kind and term.)"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import numpy as np

from moesim.costs import attention, collectives, dispatch, gemm, grouped_gemm, memory_bound
from moesim.costs.base import Reach
from moesim.ops import BYTES_PER_ELEMENT, Attention, Collective, Dispatch, Gemm, GroupedGemm, MemoryBound
from moesim.routing import distinct_groups

PROVENANCE = ("measured", "interpolated", "extrapolated", "datasheet", "assumed")
INTERPOLATED, EXTRAPOLATED = PROVENANCE.index("interpolated"), PROVENANCE.index("extrapolated")


@dataclass(frozen=True)
class Prices:
    """One value an op. Busy seconds never exceed ``seconds``; sms 0 = the kernel takes what is left; ``term`` indexes the
    profile's terms and ``provenance`` PROVENANCE."""

    seconds: np.ndarray
    nvlink_s: np.ndarray
    nic_s: np.ndarray
    hbm_s: np.ndarray
    sms: np.ndarray
    term: np.ndarray
    provenance: np.ndarray


class _Sheet:
    """The columns of a Prices while they are being filled."""

    def __init__(self, num_ops: int) -> None:
        self.seconds, self.nvlink_s, self.nic_s, self.hbm_s = (np.zeros(num_ops) for _ in range(4))
        self.sms, self.term, self.provenance = (np.zeros(num_ops, dtype=np.int64) for _ in range(3))

    def label(self, profile, rows, term_name: str, **axes) -> None:
        """Term and provenance of rows: inside every measured range interpolated, outside extrapolated, else the term's own."""
        term = profile.term(term_name)
        self.term[rows] = profile.term_index[term_name]
        code = PROVENANCE.index(term.provenance)
        if code > EXTRAPOLATED or term.provenance == "extrapolated":
            self.provenance[rows] = code
            return
        inside = np.ones(len(rows), dtype=bool)
        for axis, (low, high) in term.valid.items():
            if axis in axes:
                inside &= (axes[axis] >= low) & (axes[axis] <= high)
        self.provenance[rows] = np.where(inside, INTERPOLATED, EXTRAPOLATED)


def price_ops(profile, ops, cluster, in_training: bool) -> Prices:
    sheet = _Sheet(len(ops))
    by_kind = defaultdict(list)
    for row, op in enumerate(ops):
        by_kind[type(op)].append(row)
    for kind, rows in by_kind.items():
        if kind not in _PRICERS:
            raise ValueError(f"no price for {kind.__name__}: known are {', '.join(k.__name__ for k in _PRICERS)}")
        _PRICERS[kind](profile, [ops[row] for row in rows], np.array(rows), cluster, in_training, sheet)
    for busy in (sheet.nvlink_s, sheet.nic_s, sheet.hbm_s):
        np.minimum(busy, sheet.seconds, out=busy)
    return Prices(**vars(sheet))


def columns(ops, *names):
    return [np.array([getattr(op, name) for op in ops], dtype=float) for name in names]


def _split(ops, rows, key):
    """(key value, ops, rows) of each distinct key."""
    parts = defaultdict(list)
    for position, op in enumerate(ops):
        parts[key(op)].append(position)
    return [(value, [ops[i] for i in positions], rows[positions]) for value, positions in sorted(parts.items(), key=str)]


def _gemm(profile, ops, rows, cluster, in_training, sheet):
    for (dtype, accumulate), part, at in _split(ops, rows, lambda op: (op.dtype, op.accumulate)):
        name = f"gemm.wgrad.{dtype}" if accumulate else f"gemm.{dtype}"
        m, n, k = columns(part, "m", "n", "k")
        params = profile.parameters(name, in_training)
        sheet.seconds[at] = gemm.seconds(params, profile.num_sms, m, n, k, BYTES_PER_ELEMENT[dtype], 8.0 if accumulate else 2.0)
        sheet.hbm_s[at] = columns(part, "bytes")[0] / profile.hbm_bytes_per_s
        sheet.label(profile, at, name, m=m, n=n, k=k)


def _grouped(profile, ops, rows, cluster, in_training, sheet):
    for (dtype, weight), part, at in _split(ops, rows, lambda op: (op.dtype, op.grad == "weight")):
        name = f"grouped_gemm.wgrad.{dtype}" if weight else f"grouped_gemm.{dtype}"
        groups, count, n, k = columns(part, "groups", "rows", "n", "k")
        params = profile.parameters(name, in_training)
        sheet.seconds[at] = grouped_gemm.seconds(params, profile.num_sms, groups, count, n, k, BYTES_PER_ELEMENT[dtype], weight)
        sheet.hbm_s[at] = columns(part, "bytes")[0] / profile.hbm_bytes_per_s
        sheet.label(profile, at, name, rows_per_group=count / groups, n=n, k=k)


def _attention(profile, ops, rows, cluster, in_training, sheet):
    for backward, part, at in _split(ops, rows, lambda op: op.backward):
        name = "attention.backward" if backward else "attention.forward"
        names = ("batch", "num_heads", "q_len", "pairs", "qk_dim", "v_dim", "bytes")
        batch, heads, q_len, pairs, qk_dim, v_dim, moved = columns(part, *names)
        params = profile.parameters(name, in_training)
        sheet.seconds[at] = attention.seconds(params, profile.num_sms, batch, heads, q_len, pairs, qk_dim, v_dim, moved, backward)
        sheet.hbm_s[at] = moved / profile.hbm_bytes_per_s
        sheet.label(profile, at, name, keys=2 * pairs / q_len, qk_dim=qk_dim)


def _memory(profile, ops, rows, cluster, in_training, sheet):
    for kind, part, at in _split(ops, rows, lambda op: op.kind):
        if kind not in memory_bound.KINDS:
            raise ValueError(f"no memory-bound kind {kind!r}: known are {', '.join(memory_bound.KINDS)}")
        (moved,) = columns(part, "moved")
        name = f"memory.{kind}"
        index = np.full(len(part), memory_bound.KINDS.index(kind))
        sheet.seconds[at] = np.where(moved > 0, memory_bound.seconds(profile.parameters(name), index, moved), 0.0)
        sheet.hbm_s[at] = moved / profile.hbm_bytes_per_s
        sheet.label(profile, at, name)


def reach(profile, cluster, groups) -> Reach:
    """Where each group lives in the cluster's tiers. The outermost tier a group needs sets its NIC rate and latency."""
    found = {}
    for group in groups:
        if group not in found:
            found[group] = _reach_one(profile, cluster, group)
    table = np.array([found[group] for group in groups], dtype=float)
    return Reach(*table.T)


def _reach_one(profile, cluster, group):
    nvlink = cluster.tiers[0].bytes_per_s
    inside = group.members_within(cluster.domain)
    outside = -(-group.size // inside)
    if outside == 1:
        return inside, outside, nvlink, nvlink, 0.0
    if len(cluster.tiers) < 2:
        raise ValueError(f"group of {group.size} ranks leaves the NVLink domain of {cluster.domain}, and cluster {cluster.name!r} has no tier outside it")
    nic, latency = np.inf, 0.0
    for tier in cluster.tiers[1:]:
        nic = min(nic, tier.bytes_per_s / tier.oversubscription)
        latency = max(latency, tier.latency_s or 0.0)
        if tier.span is None or tier.span >= group.size * group.stride:
            break
    return inside, outside, nvlink, nic, latency


def _collective(profile, ops, rows, cluster, in_training, sheet):
    for kind, part, at in _split(ops, rows, lambda op: op.kind):
        if kind not in collectives.KINDS:
            raise ValueError(f"no collective kind {kind!r}: known are {', '.join(collectives.KINDS)}")
        where = reach(profile, cluster, [op.group for op in part])
        (size,) = columns(part, "bytes")
        params = profile.parameters("network." + _transport(cluster))
        columns_s = collectives.seconds(params, profile.curve_tables, kind, np.maximum(size, 1.0), where)
        sheet.seconds[at], sheet.nvlink_s[at], sheet.nic_s[at] = columns_s
        sheet.sms[at] = np.where(where.inside * where.outside > 1, profile.collective_sms, 0)
        far = where.outside > 1
        for leg, chosen in (("nvlink", ~far), ("nic", far)):
            if chosen.any():
                sheet.label(profile, at[chosen], f"{kind}.{leg}", bytes=size[chosen], members=where.inside[chosen], domains=where.outside[chosen])


def _transport(cluster) -> str:
    """Network parameters to use: the transport of the first tier outside the domain (InfiniBand's where it has its own none)."""
    outer = cluster.tiers[1].transport if len(cluster.tiers) > 1 else "ib"
    return outer if outer in ("ib", "efa") else "ib"


def _dispatch(profile, ops, rows, cluster, in_training, sheet):
    for kind, part, at in _split(ops, rows, lambda op: op.dispatcher):
        if kind not in dispatch.DISPATCHERS:
            raise ValueError(f"no dispatcher {kind!r}: known are {', '.join(dispatch.DISPATCHERS)}")
        where = reach(profile, cluster, [op.group for op in part])
        if kind == "alltoall":
            size, load = columns(part, "bytes", "load")
            params = profile.parameters("network." + _transport(cluster))
            priced = collectives.seconds(params, profile.curve_tables, "all_to_all", np.maximum(size * load, 1.0), where)
            held = np.full(len(part), float(profile.collective_sms))
        else:
            routes = _routes(part, where, kind)
            params = dispatch_parameters(profile, kind, _transport(cluster))
            priced = dispatch.seconds(params, routes, where)
            held = routes.sms
        sheet.seconds[at], sheet.nvlink_s[at], sheet.nic_s[at] = priced
        sheet.sms[at] = np.where(where.inside * where.outside > 1, held, 0)
        far = where.outside > 1
        names = ("all_to_all.nvlink", "all_to_all.nic") if kind == "alltoall" else (f"dispatch.{kind}", f"dispatch.nic.{_transport(cluster)}")
        for name, chosen in zip(names, (~far, far)):
            if chosen.any():
                sheet.label(profile, at[chosen], name, members=where.inside[chosen], domains=where.outside[chosen])


def dispatch_parameters(profile, kind: str, transport: str) -> dict[str, float]:
    """Parameters of a dispatcher, its NIC leg at what the transport reaches."""
    return {**profile.parameters(f"dispatch.{kind}"), **profile.parameters(f"dispatch.nic.{transport}")}


def _routes(ops, where, kind) -> dispatch.Routes:
    tokens, hidden, width, kept, load, sms, combine, top_k = columns(
        ops, "tokens", "hidden", "bytes_per_element", "kept", "load", "sms", "combine", "top_k")
    if kind == "sync_free":
        rank, node = top_k, top_k
    else:
        keys = [(int(i), int(o), op.num_experts, op.top_k, op.node_limit) for op, i, o in zip(ops, where.inside, where.outside)]
        known = {key: expected_copies(*key) for key in set(keys)}
        rank, node = np.array([known[key] for key in keys], dtype=float).T
    return dispatch.Routes(tokens * kept, hidden * width, rank, node, load, np.maximum(sms, 1.0), combine > 0)


def expected_copies(inside: int, outside: int, num_experts: int, top_k: int, limit: int | None) -> tuple[float, float]:
    """Expected copies of a token over distinct ranks and distinct domains (never more than its routes). Experts that don't divide
    are padded up to the next multiple."""
    def reached(groups, most=None):
        padded = -(-num_experts // groups) * groups
        return distinct_groups(groups, padded, min(top_k, padded), most)
    node = reached(outside, limit)
    return max(reached(inside * outside), node), node


_PRICERS = {
    Gemm: _gemm,
    GroupedGemm: _grouped,
    Attention: _attention,
    MemoryBound: _memory,
    Collective: _collective,
    Dispatch: _dispatch,
}
