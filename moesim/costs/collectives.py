"""How long does one collective take, and how long does it hold NVLink and the NIC?

Inside a domain: whole measured curves, because one latency and one bandwidth miss the protocol switch near 16 MiB by half. Between
measured sizes time is linear in bytes (with half the sizes held out, that errs by 4% on average and log-log by 5%), between measured
member counts log-linear. Across domains: the NVLink leg of the same curve beside a NIC leg.
"""

from __future__ import annotations

from typing import Mapping, NamedTuple, Sequence

import numpy as np

from moesim.costs.base import Parameter, Reach

KINDS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "send_recv")
PARAMETERS = (
    Parameter("ring_efficiency", "share of NIC", 0.2, 1.0, 0.8),
    Parameter("all_to_all_efficiency", "share of NIC", 0.2, 1.0, 0.92),
    Parameter("decay", "1", 1e-3, 0.5, 0.05),
    Parameter("ring_step_s", "s", 1e-7, 1e-4, 4e-6),
    Parameter("tree_step_s", "s", 1e-6, 3e-4, 1.5e-5),
    Parameter("all_to_all_s", "s", 1e-6, 1e-3, 1e-4),
    Parameter("send_s", "s", 1e-6, 1e-4, 1e-5),
    Parameter("pair_efficiency", "share of NVLink", 0.2, 1.0, 0.83),
    Parameter("ring_nics", "NICs a domain", 1.0, 256.0, 16.0),
)
PROTOCOLS = ((0.15, 0.675, 0.25), (0.475, 1.0, 0.92), (0.85, 3.5, 1.0))
"""Of NCCL's LL, LL128 and Simple rings: a step over NVLink and one over the network, in those of LL128 over the network (4 us), and the
share of the bandwidth each leaves (https://github.com/NVIDIA/nccl/blob/5067397c26/src/graph/tuning.cc)."""


class Curve(NamedTuple):
    """Seconds of one kind over one number of members: bytes ascending, seconds non-decreasing."""

    bytes: np.ndarray
    seconds: np.ndarray


def monotone(seconds: Sequence[float]) -> np.ndarray:
    """The non-decreasing sequence nearest in absolute difference (pools of violators take their lower median), so that one slow
    repeat of a small message doesn't lift every larger one."""
    pools: list[list[float]] = []
    for value in seconds:
        pools.append([value])
        while len(pools) > 1 and _median(pools[-2]) > _median(pools[-1]):
            last = pools.pop()
            pools[-1] = pools[-1] + last
    return np.array([_median(pool) for pool in pools for _ in pool])


def _median(values: Sequence[float]) -> float:
    return sorted(values)[(len(values) - 1) // 2]


def curve_seconds(curve: Curve, num_bytes):
    """Linear between points; below the first the latency floor, beyond the last the marginal rate of the last octave."""
    inner = np.interp(num_bytes, curve.bytes, curve.seconds)
    slope = (curve.seconds[-1] - curve.seconds[-2]) / (curve.bytes[-1] - curve.bytes[-2])
    slope = max(slope, 0.5 * curve.seconds[-1] / curve.bytes[-1])
    return np.where(num_bytes > curve.bytes[-1], curve.seconds[-1] + (num_bytes - curve.bytes[-1]) * slope, inner)


def wire_factor(kind: str, members):
    """Bytes each link carries over the nccl-tests size (https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md)."""
    if kind == "send_recv":
        return np.ones_like(members, dtype=float)
    return (2.0 if kind == "all_reduce" else 1.0) * (members - 1) / members


def inside_seconds(curves: Mapping[int, Curve], kind: str, num_bytes, members):
    """Seconds inside one domain. Between measured member counts: log-linear in members; beyond the largest: its curve times
    the ratio of wire bytes, its latency floor growing by one doubling's worth a doubling."""
    known = np.array(sorted(curves))
    table = np.stack([curve_seconds(curves[c], num_bytes) for c in known])
    position = np.interp(np.log2(members), np.log2(known), np.arange(len(known)))
    low = np.clip(position.astype(int), 0, len(known) - 1)
    high = np.minimum(low + 1, len(known) - 1)
    share = position - low
    column = np.arange(table.shape[1])
    inner = np.exp((1 - share) * np.log(table[low, column]) + share * np.log(table[high, column]))
    last = known[-1]
    beyond = np.maximum(members, last)
    floor = min(curves[c].seconds[0] for c in known[-1:])
    step = max(0.0, floor - curves[known[-2]].seconds[0]) if len(known) > 1 else 0.0
    grown = wire_factor(kind, beyond.astype(float)) / wire_factor(kind, np.array(float(last)))
    return inner * grown + step * np.log2(beyond / last)


def seconds(params, curves: Mapping[str, Mapping[int, Curve]], kind: str, num_bytes, reach: Reach):
    """(seconds, NVLink busy seconds, NIC busy seconds), one an op; busy = wire bytes over the link's line rate.

    A ring crosses each domain boundary once a byte and shares it among the domain's NICs; an all-to-all can't pool NICs: each rank
    sends its own outside part through its own (https://github.com/NVIDIA/nccl-tests/issues/267). Groups of one cost nothing.
    """
    inside, outside = reach.inside.astype(float), reach.outside.astype(float)
    members = inside * outside
    if kind == "send_recv":
        return _send(params, curves.get(kind, {}), num_bytes, reach)
    nv_bytes, nic_bytes = leg_bytes(params, kind, num_bytes, inside, outside)
    nv = np.zeros_like(members)
    local = inside > 1
    if local.any():
        share = nv_bytes[local] / wire_factor(kind, inside[local])
        nv[local] = inside_seconds(curves[kind], kind, np.maximum(share, 1.0), inside[local])
    ring = params["ring_efficiency"] * np.maximum(outside / 2, 1.0) ** -params["decay"]
    efficiency = params["all_to_all_efficiency"] if kind == "all_to_all" else ring
    nic = nic_bytes / (reach.nic * efficiency)
    latency = np.where(outside > 1, reach.latency * np.log2(np.maximum(outside, 1.0)), 0.0)
    total = latency + _with_hops(params, kind, (nv**3 + nic**3) ** (1 / 3), inside, outside)
    total = np.where(members > 1, np.maximum(total, np.maximum(nv_bytes / reach.nvlink, nic_bytes / reach.nic)), 0.0)
    return total, nv_bytes / reach.nvlink, nic_bytes / reach.nic


def leg_bytes(params, kind: str, num_bytes, inside, outside):
    """(bytes a GPU sends over NVLink, bytes its NIC sends). In a ring every member sends the same to the next one, so what crosses a
    domain's border is what each sends, over the domain's NICs; two domains reduce over a tree, which the border sees once
    (https://github.com/NVIDIA/nccl-tests/issues/196)."""
    members = inside * outside
    if kind == "all_to_all":
        return num_bytes * (inside - 1) / members, num_bytes * (members - inside) / members
    factor = 2.0 if kind == "all_reduce" else 1.0
    ring = factor * num_bytes * (members - 1) / members
    # Over a tree of two domains each half is sent once, up or down.
    crossing = np.where((outside == 2) & (factor == 2.0), num_bytes, np.where(outside > 1, ring, 0.0))
    return np.where(inside > 1, ring, 0.0), crossing / np.minimum(inside, params["ring_nics"])


def _with_hops(params, kind: str, moving, inside, outside):
    """Seconds of the bytes and of the hops they take. A ring's are those of the fastest protocol: low latency costs bandwidth."""
    if kind == "all_reduce":
        hops = 2 * params["tree_step_s"] * np.log2(outside)
    elif kind == "all_to_all":
        hops = params["all_to_all_s"] * np.ones_like(outside)
    else:
        ways = [moving / share + params["ring_step_s"] * (far * (outside - 1) + near * outside * (inside - 1)) for near, far, share in PROTOCOLS]
        return np.where(outside > 1, np.minimum.reduce(ways), moving)
    return moving + np.where(outside > 1, hops, 0.0)


def _send(params, curves: Mapping[int, Curve], num_bytes, reach: Reach):
    """One rank to another: as measured between two where that was, else at a share of the link's rate."""
    far = reach.outside > 1
    rate = np.where(far, reach.nic * params["all_to_all_efficiency"], reach.nvlink * params["pair_efficiency"])
    total = params["send_s"] + np.where(far, reach.latency, 0.0) + num_bytes / rate
    if curves:
        total = np.where(far, total, curve_seconds(curves[min(curves)], num_bytes))
    return total, np.where(far, 0.0, num_bytes / reach.nvlink), np.where(far, num_bytes / reach.nic, 0.0)
