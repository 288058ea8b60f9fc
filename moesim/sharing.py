"""How fast do tasks go that run at the same time on one rank, or on the ranks of one node?

A task's rate is its speed over its solo speed, never above 1. Three things lower it, in this order:
* gamma: 1 / (1 + the largest gamma of its kind beside any kind that runs); co-runs of three kinds are not measured, so gammas
  are not added up, and what a NIC does alone has none;
* SMs: a compute task that reserves none (sms = 0) spreads over all SMs, so it keeps the unreserved share of them. On other
  streams sms = 0 means a copy engine or NIC at work, which holds no SM;
* shared resources: max-min fair, see `max_min`. A resource belongs to a rank, with capacity 1 (a GPU's link or memory shared by a
  node enters as the rank's part of it, since the ranks of a node run the same program at the same time), or to a node
  (`Program.shared`: processor cores, their memory): then all tasks of the node's ranks take part, see `moesim.node`.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import NamedTuple

from moesim.program import COMPUTE, CoRun


class Load(NamedTuple):
    """What decides a running task's rate."""

    kind: str
    uses: tuple[tuple[str, float], ...] = ()
    sms: int = 0
    stream: int = COMPUTE
    receiver: int = -1
    """Of a transfer between ranks that share a node: who gets it."""


def rates(loads: Sequence[Load], gammas: Mapping[tuple[str, str], float], num_sms: int) -> tuple[float, ...]:
    """The rate of each of the running `loads`. gammas: (running kind, kind beside) -> gamma."""
    return tuple(max_min(ceilings(loads, gammas, num_sms), [load.uses for load in loads]))


def ceilings(loads: Sequence[Load], gammas: Mapping[tuple[str, str], float], num_sms: int) -> list[float]:
    """The rates that gammas and SMs of one rank leave to the `loads` running there."""
    return [_ceiling(i, loads, gammas, num_sms) for i in range(len(loads))]


def gamma_table(gammas: Sequence[CoRun]) -> dict[tuple[str, str], float]:
    """The co-run table as `rates` wants it. ValueError for a negative gamma (an in-step rate may not beat solo)."""
    for row in gammas:
        if row.gamma < 0:
            raise ValueError(f"gamma of {row.running} beside {row.beside} is {row.gamma}: it must be at least 0")
    return {(row.running, row.beside): row.gamma for row in gammas}


def _ceiling(i: int, loads: Sequence[Load], gammas: Mapping[tuple[str, str], float], num_sms: int) -> float:
    load = loads[i]
    beside = [other for j, other in enumerate(loads) if j != i]
    slower = _slower(load, max((gammas.get((load.kind, other.kind), 0.0) for other in beside), default=0.0))
    if num_sms and load.stream == COMPUTE and not load.sms:
        return max(0, num_sms - sum(other.sms for other in beside)) / num_sms / slower
    return 1.0 / slower


def _slower(load: Load, gamma: float) -> float:
    """Factor on the seconds of `load`. SMs copy what goes over NVLink and share memory with what runs beside; a NIC needs neither, so of
    a collective that crosses both, whose legs add up as third powers (`costs.collectives`), gamma slows the NVLink leg. The traces of
    https://github.com/deepseek-ai/profile-data bear it out: combine over 8 nodes takes 5.9 to 6.6 ms beside compute, 4.5 alone."""
    busy = dict(load.uses)
    nic = busy.get("nic", 0.0)
    if not nic or not gamma:
        return 1.0 + gamma
    local = busy.get("nvlink", 0.0) ** 3 / (busy.get("nvlink", 0.0) ** 3 + nic**3)
    return ((1.0 + gamma) ** 3 * local + 1.0 - local) ** (1 / 3)


def max_min(ceilings: Sequence[float], uses: Sequence[tuple[tuple[Hashable, float], ...]], tops: Sequence[float] | None = None) -> list[float]:
    """Max-min fair rates below `ceilings`. uses[i] = (resource, share of its capacity of 1 that rate 1 takes). tops[i] = the largest
    share that one of the identical tasks takes which flow i stands for (None: each stands for itself).

    All rise together, each by its use of the resource it needs most, until it reaches its ceiling or a resource of its own is
    full: on one link an equal part of the bandwidth each, on several dominant resource fairness (Ghodsi et al., NSDI 2011,
    https://www.usenix.org/conference/nsdi11/dominant-resource-fairness-fair-allocation-multiple-resource-types).
    """
    rate = list(ceilings)
    tops = [max((share for _, share in use), default=0.0) for use in uses] if tops is None else tops
    active = {i: 1.0 / top for i, top in enumerate(tops) if top > 0}
    left = {name: 1.0 for use in uses for name, _ in use}
    while active:
        rise = dict.fromkeys(left, 0.0)
        for i, weight in active.items():
            for name, share in uses[i]:
                rise[name] += weight * share
        full = {name: left[name] / rise[name] for name in left if rise[name] > 0}
        reach = {i: min(ceilings[i] / weight, *(full[name] for name, share in uses[i] if share > 0)) for i, weight in active.items()}
        level = min(reach.values())
        for i in [i for i in active if reach[i] <= level * (1 + 1e-12)]:
            rate[i] = min(ceilings[i], level * active.pop(i))
            for name, share in uses[i]:
                left[name] = max(0.0, left[name] - rate[i] * share)
    return rate
