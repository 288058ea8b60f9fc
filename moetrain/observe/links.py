"""How fast do the ranks reach each other, pair by pair and all together?

Pairs: every rank sends to the rank ``shift`` after it and receives from the one before, all at once, for as many shifts as the time
allows (1 first, then powers of two, then the rest). A pair's rate is what its receiver saw in the best of the repeats; both
directions of a link are busy meanwhile, as they are in an all-to-all. All together: the bus rate of an all-reduce,
2(n-1)/n * bytes / seconds, as NCCL's own tests count it.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

Pairs = dict[tuple[int, int], float]
"""(sender, receiver) -> bytes/s."""
SLOW = 0.7
"""A pair below this share of the median of its kind is named."""


@dataclass(frozen=True)
class Links:
    """What was measured: rates of pairs, bus rate of the all-reduce (None for one rank), and the size of the messages."""

    pairs: Pairs
    all_reduce: float | None
    message_bytes: int
    seconds: float


def measure_links(device: torch.device | str, *, message_bytes: int = 4 << 20, repeats: int = 3, budget_s: float = 2.0,
                  group: dist.ProcessGroup | None = None) -> Links:
    """A collective call over ``group`` (None: the default one). ``budget_s`` bounds the pairs; at least shift 1 is measured."""
    world, rank = dist.get_world_size(group), dist.get_rank(group)
    begin = time.monotonic()
    if world == 1:
        return Links({}, None, message_bytes, 0.0)
    payload = torch.full((message_bytes // 4,), float(rank), device=device)
    received = torch.empty_like(payload)
    _exchange(payload, received, 1, rank, world, group, device)  # opens the connections
    bus = _all_reduce(payload.clone(), world, repeats, group, device)
    mine: Pairs = {}
    for shift in _shifts(world):
        _wait(device, group)
        seconds = min(_exchange(payload, received, shift, rank, world, group, device) for _ in range(repeats))
        mine[(rank - shift) % world, rank] = message_bytes / seconds
        # every rank must stop at the same shift
        spent = torch.tensor([time.monotonic() - begin], device=device)
        dist.all_reduce(spent, dist.ReduceOp.MAX, group=group)
        if float(spent) > budget_s:
            break
    gathered: list[Pairs] = [{}] * world
    dist.all_gather_object(gathered, mine, group=group)
    return Links({pair: rate for found in gathered for pair, rate in found.items()}, bus, message_bytes, time.monotonic() - begin)


def _shifts(world: int) -> list[int]:
    powers = [1 << i for i in range(world.bit_length()) if 1 << i < world]
    return powers + [shift for shift in range(1, world) if shift not in powers]


def _wait(device: torch.device | str, group: dist.ProcessGroup | None) -> None:
    """All ranks start together."""
    flag = torch.zeros(1, device=device)
    dist.all_reduce(flag, group=group)
    _finish(device)


def _finish(device: torch.device | str) -> None:
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)


def _exchange(payload, received, shift: int, rank: int, world: int, group, device) -> float:
    """Seconds until this rank's message has come in."""
    peers = [_global(group, (rank + shift) % world), _global(group, (rank - shift) % world)]
    _finish(device)
    begin = time.perf_counter()
    ops = [dist.P2POp(dist.isend, payload, peers[0], group), dist.P2POp(dist.irecv, received, peers[1], group)]
    works = dist.batch_isend_irecv(ops)
    works[-1].wait()
    _finish(device)
    seconds = time.perf_counter() - begin
    for work in works[:-1]:
        work.wait()
    if float(received[0]) != (rank - shift) % world or float(received[-1]) != (rank - shift) % world:
        raise RuntimeError(f"links: rank {rank} received something else than rank {(rank - shift) % world} sent")
    return seconds


def _global(group: dist.ProcessGroup | None, rank: int) -> int:
    return rank if group is None else dist.get_global_rank(group, rank)


def _all_reduce(buffer: torch.Tensor, world: int, repeats: int, group, device) -> float:
    """Bus rate, bytes/s, of the best repeat."""
    best = float("inf")
    for _ in range(repeats):
        _wait(device, group)
        begin = time.perf_counter()
        dist.all_reduce(buffer, group=group)
        _finish(device)
        best = min(best, time.perf_counter() - begin)
        buffer.zero_()
    return 2 * (world - 1) / world * buffer.nbytes / best


def slow_pairs(pairs: Mapping[tuple[int, int], float], hosts: Sequence[str], threshold: float = SLOW) -> list[str]:
    """Words about pairs below ``threshold`` of the median of their kind (on one host, between hosts); hosts: by rank."""
    kinds: dict[str, Pairs] = {}
    for (a, b), rate in pairs.items():
        kinds.setdefault("inside a host" if hosts[a] == hosts[b] else "between hosts", {})[a, b] = rate
    found = []
    for kind, rates in kinds.items():
        median = statistics.median(rates.values())
        slow = {pair: rate for pair, rate in rates.items() if rate < threshold * median}
        found += [f"rank {a} ({hosts[a]}) to rank {b} ({hosts[b]}): {rate / 1e9:.3g} GB/s, {rate / median:.0%} of the median {kind}"
                  for (a, b), rate in sorted(slow.items())]
    return found
