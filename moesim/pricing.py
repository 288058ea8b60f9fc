"""How do ops become arrays, and arrays become prices? (One vectorised cost call a kind and term.)"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Callable, Mapping

import numpy as np

from moesim.costs import attention, collectives, core_attention, core_gemm, core_grouped_gemm, core_memory, dispatch, gemm, grouped_gemm, memory_bound
from moesim.costs.base import Reach
from moesim.ops import BYTES_PER_ELEMENT, Attention, Collective, Dispatch, Gemm, GroupedGemm, MemoryBound
from moesim.routing import distinct_groups

PROVENANCE = ("measured", "interpolated", "extrapolated", "datasheet", "assumed")
MEASURED, INTERPOLATED, EXTRAPOLATED = range(3)
FARTHEST = 6.0
"""Octaves outside a measured range beyond which being farther off says nothing more: there a price is as unsure as an assumed one."""
SAME = 1e-5
"""Relative difference below which two sizes are one: files hold six digits."""


@dataclass(frozen=True)
class Prices:
    """One value an op. Busy seconds never exceed ``seconds``; sms 0 = the kernel takes what is left; ``term`` indexes the
    profile's terms and ``provenance`` PROVENANCE; ``beyond`` = octaves outside the range that its term was measured in."""

    seconds: np.ndarray
    nvlink_s: np.ndarray
    nic_s: np.ndarray
    hbm_s: np.ndarray
    sms: np.ndarray
    term: np.ndarray
    provenance: np.ndarray
    beyond: np.ndarray


class _Sheet:
    """The columns of a Prices while they are being filled."""

    def __init__(self, num_ops: int) -> None:
        self.seconds, self.nvlink_s, self.nic_s, self.hbm_s, self.beyond = (np.zeros(num_ops) for _ in range(5))
        self.sms, self.term, self.provenance = (np.zeros(num_ops, dtype=np.int64) for _ in range(3))

    def label(self, profile, rows, term_name: str, known=False, **axes) -> None:
        """Term and provenance of rows: at a measured point (``known``) measured, inside every measured range interpolated, outside
        extrapolated, else the term's own."""
        term = profile.term(term_name)
        self.term[rows] = profile.term_index[term_name]
        code = PROVENANCE.index(term.provenance)
        if code > EXTRAPOLATED or term.provenance == "extrapolated":
            self.provenance[rows] = code
            return
        ranges = [(low, axes[axis], high) for axis, (low, high) in term.valid.items() if axis in axes]
        beyond = np.zeros(len(rows))
        for low, value, high in ranges:
            beyond = np.maximum(beyond, np.log2(np.maximum(low / np.maximum(value, 1e-9), value / high)))
        self.beyond[rows] = np.minimum(beyond, FARTHEST)
        self.provenance[rows] = np.where(beyond > 0, EXTRAPOLATED, INTERPOLATED)
        self.provenance[rows[(beyond <= 0) & known]] = MEASURED


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


def term_name(op) -> str:
    """Name of the profile term that prices a kernel; collectives and dispatch have one a leg."""
    if isinstance(op, Gemm):
        return f"gemm.wgrad.{op.dtype}" if op.accumulate else f"gemm.{op.dtype}"
    if isinstance(op, GroupedGemm):
        return f"grouped_gemm.wgrad.{op.dtype}" if op.grad == "weight" else f"grouped_gemm.{op.dtype}"
    if isinstance(op, Attention):
        return "attention.backward" if op.backward else "attention.forward"
    return f"memory.{op.kind}"


def kernel(kind: str, num_sms: int, ops) -> Callable[[Mapping[str, float]], np.ndarray]:
    """Parameters -> seconds of ``ops``, all of one term whose cost model is ``kind``."""
    return _KERNELS[kind](num_sms, ops)


def _gemm_kernel(num_sms, ops):
    m, n, k = columns(ops, "m", "n", "k")
    width, out = BYTES_PER_ELEMENT[ops[0].dtype], 8.0 if ops[0].accumulate else 2.0
    return lambda params: gemm.seconds(params, num_sms, m, n, k, width, out)


def _core_gemm_kernel(num_sms, ops):
    m, n, k = columns(ops, "m", "n", "k")
    return lambda params: core_gemm.seconds(params, m, n, k, BYTES_PER_ELEMENT[ops[0].dtype])


def _grouped_kernel(num_sms, ops):
    groups, count, n, k = columns(ops, "groups", "rows", "n", "k")
    width, weight = BYTES_PER_ELEMENT[ops[0].dtype], ops[0].grad == "weight"
    return lambda params: grouped_gemm.seconds(params, num_sms, groups, count, n, k, width, weight)


def _core_grouped_kernel(num_sms, ops):
    groups, count, n, k = columns(ops, "groups", "rows", "n", "k")
    weight, backward = ops[0].grad == "weight", np.array([op.grad == "input" for op in ops])
    return lambda params: core_grouped_gemm.seconds(params, groups, count, n, k, weight, backward)


def _attention_kernel(num_sms, ops):
    shape = columns(ops, "batch", "num_heads", "q_len", "pairs", "qk_dim", "v_dim", "bytes")
    return lambda params: attention.seconds(params, num_sms, *shape, ops[0].backward)


def _core_attention_kernel(num_sms, ops):
    shape = columns(ops, "batch", "num_heads", "q_len", "pairs", "qk_dim", "v_dim")
    return lambda params: core_attention.seconds(params, *shape, ops[0].backward)


def _memory_kernel(num_sms, ops):
    (moved,) = columns(ops, "moved")
    index = np.full(len(ops), memory_bound.KINDS.index(ops[0].kind))
    return lambda params: memory_bound.seconds(params, index, moved)


def _core_memory_kernel(num_sms, ops):
    (moved,) = columns(ops, "moved")
    return lambda params: core_memory.seconds(params, moved)


_KERNELS = {
    "gemm": _gemm_kernel, "grouped_gemm": _grouped_kernel, "attention": _attention_kernel, "memory_bound": _memory_kernel,
    "core_gemm": _core_gemm_kernel, "core_grouped_gemm": _core_grouped_kernel, "core_attention": _core_attention_kernel, "core_memory": _core_memory_kernel,
}
AXES = {
    Gemm: lambda ops: dict(zip("mnk", columns(ops, "m", "n", "k"))),
    GroupedGemm: lambda ops: dict(zip(("rows_per_group", "n", "k"), (columns(ops, "rows")[0] / columns(ops, "groups")[0], *columns(ops, "n", "k")))),
    Attention: lambda ops: {"keys": 2 * columns(ops, "pairs")[0] / columns(ops, "q_len")[0], "qk_dim": columns(ops, "qk_dim")[0]},
    MemoryBound: lambda ops: {"bytes": columns(ops, "moved")[0]},
}
"""Op class -> the axes on which a term states the range of its measurements, one array each."""


def _kernels(profile, ops, rows, cluster, in_training, sheet):
    """Ops that run on one rank alone."""
    for name, part, at in _split(ops, rows, term_name):
        if isinstance(part[0], MemoryBound) and part[0].kind not in memory_bound.KINDS:
            raise ValueError(f"no memory-bound kind {part[0].kind!r}: known are {', '.join(memory_bound.KINDS)}")
        sheet.seconds[at] = kernel(profile.term(name).kind, profile.num_sms, part)(profile.parameters(name, in_training))
        (moved,) = columns(part, "bytes")
        if isinstance(part[0], MemoryBound):
            sheet.seconds[at] = np.where(moved > 0, sheet.seconds[at], 0.0)
        sheet.hbm_s[at] = moved / profile.hbm_bytes_per_s
        sheet.label(profile, at, name, _at_points(profile.term(name).points, part), **AXES[type(part[0])](part))


def points(ops) -> dict[str, np.ndarray]:
    """The sizes that tell ops of one term apart, one array each: as a term lists what it was measured at."""
    names = {Gemm: "m n k", GroupedGemm: "groups rows n k", Attention: "batch num_heads q_len pairs qk_dim v_dim", MemoryBound: "moved"}[type(ops[0])].split()
    return dict(zip(names, columns(ops, *names)))


def _at_points(known, ops):
    """Which ops have the sizes of a measured one?"""
    if not known:
        return False
    asked, there = points(ops), np.array(list(known.values()))
    return np.isclose(np.stack([asked[name] for name in known])[:, :, None], there[:, None], rtol=SAME).all(axis=0).any(axis=1)


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
        sheet.seconds[at] /= _in_step(profile, f"{kind}.nvlink", where, in_training)
        sheet.sms[at] = np.where(where.inside * where.outside > 1, profile.collective_sms, 0)
        far = where.outside > 1
        for leg, chosen in (("nvlink", ~far), ("nic", far)):
            if chosen.any():
                known = leg == "nvlink" and _on_curve(profile, kind, size[chosen], where.inside[chosen])
                sheet.label(profile, at[chosen], f"{kind}.{leg}", known, bytes=size[chosen], members=where.inside[chosen], domains=where.outside[chosen])


def _on_curve(profile, kind, size, members):
    """Which sizes and member counts are points of curves that this machine was measured at?"""
    own = {c.members: np.array([b for b in c.bytes if not 0 < c.measured_to < b]) for c in profile.curves if (c.kind, c.software, c.lender) == (kind, profile.nccl, "")}
    return np.array([m in own and bool(np.isclose(own[m], b, rtol=SAME).any()) for b, m in zip(size, members)])


def _in_step(profile, name: str, where: Reach, in_training: bool):
    """Speed of a collective inside a step over its speed alone, where that was measured inside one domain."""
    level = profile.sustained.get(name) if in_training else None
    return 1.0 if level is None else np.where(where.outside > 1, 1.0, level.factor)


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
        if kind == "alltoall":
            sheet.seconds[at] /= _in_step(profile, "all_to_all.nvlink", where, in_training)
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
    Gemm: _kernels,
    GroupedGemm: _kernels,
    Attention: _kernels,
    MemoryBound: _kernels,
    Collective: _collective,
    Dispatch: _dispatch,
}
