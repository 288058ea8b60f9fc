"""How fast do tasks go that run at the same time on one rank?

A task's rate is its speed over its solo speed, never above 1. Three things lower it, in this order:
* gamma: 1 / (1 + the largest gamma of its kind beside any kind that runs); co-runs of three kinds are not measured, so gammas
  are not added up;
* SMs: a compute task that reserves none (sms = 0) spreads over all SMs, so it keeps the unreserved share of them. On other
  streams sms = 0 means a copy engine or NIC at work, which holds no SM;
* shared resources: max-min fair in use of each resource. Resources belong to a rank, each with capacity 1; a link or memory
  shared by a node enters as the rank's part of it, since the ranks of a node run the same program at the same time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from moesim.program import COMPUTE, CoRun


class Load(NamedTuple):
    """What decides a running task's rate."""

    kind: str
    uses: tuple[tuple[str, float], ...] = ()
    sms: int = 0
    stream: int = COMPUTE


def rates(loads: Sequence[Load], gammas: Mapping[tuple[str, str], float], num_sms: int) -> tuple[float, ...]:
    """The rate of each of the running `loads`. gammas: (running kind, kind beside) -> gamma."""
    ceilings = [_ceiling(i, loads, gammas, num_sms) for i in range(len(loads))]
    return tuple(max_min(ceilings, [load.uses for load in loads]))


def gamma_table(gammas: Sequence[CoRun]) -> dict[tuple[str, str], float]:
    """The co-run table as `rates` wants it. ValueError for a negative gamma (an in-step rate may not beat solo)."""
    for row in gammas:
        if row.gamma < 0:
            raise ValueError(f"gamma of {row.running} beside {row.beside} is {row.gamma}: it must be at least 0")
    return {(row.running, row.beside): row.gamma for row in gammas}


def _ceiling(i: int, loads: Sequence[Load], gammas: Mapping[tuple[str, str], float], num_sms: int) -> float:
    load = loads[i]
    beside = [other for j, other in enumerate(loads) if j != i]
    slower = 1.0 + max((gammas.get((load.kind, other.kind), 0.0) for other in beside), default=0.0)
    if num_sms and load.stream == COMPUTE and not load.sms:
        return max(0, num_sms - sum(other.sms for other in beside)) / num_sms / slower
    return 1.0 / slower


def max_min(ceilings: Sequence[float], uses: Sequence[tuple[tuple[str, float], ...]]) -> list[float]:
    """Max-min fair rates below `ceilings`. uses[i] = (resource, share of its capacity of 1 that rate 1 takes).

    Water filling: a task whose ceiling asks for no more than an equal part of what is left of each of its resources gets
    its ceiling; when there is none, a resource that limits all who use it is divided equally among them.
    """
    rate = list(ceilings)
    active = {i for i, use in enumerate(uses) if any(share > 0 for _, share in use)}
    left = {name: 1.0 for use in uses for name, _ in use}
    while active:
        users = {name: [i for i in active if any(n == name for n, _ in uses[i])] for name in left}
        part = {name: left[name] / len(users[name]) for name in left if users[name]}
        limit = {i: min((part[name] / share, name) for name, share in uses[i] if share > 0) for i in active}
        done = [i for i in active if limit[i][0] >= ceilings[i]] or _limited(users, limit)
        for i in done:
            rate[i] = min(ceilings[i], limit[i][0])
            for name, share in uses[i]:
                left[name] = max(0.0, left[name] - rate[i] * share)
        active.difference_update(done)
    return rate


def _limited(users: Mapping[str, list[int]], limit: Mapping[int, tuple[float, str]]) -> list[int]:
    for name, members in users.items():
        if members and all(limit[i][1] == name for i in members):
            return members
    return [min(limit, key=lambda i: limit[i])]
