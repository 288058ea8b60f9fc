"""Which ranks share the cores and memory of a node, and what of them does each op take at its solo speed?

Only where a cluster's resources have scope `node`: ranks that compute on the cores of one machine. `cores` lets every rank run on any
core, `pinned_cores` holds rank i of a node to core i modulo their number; `memory` is the bytes/s that all cores can draw together.

What computes takes one core, and what it reads and writes of the memory. A collective is copies made by threads of the same cores, and
was measured with all its members at work: with more members than cores each had a part of one, and takes that part here. A blocking
wait takes nothing. What fits in a cache is counted as if it came from memory: an upper bound, felt only where memory is short.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from moesim.ops import Collective, Dispatch
from moesim.program import CORES, Seat

PINNED, MEMORY = "pinned_cores", "memory"
Uses = tuple[tuple[str, float], ...]
COPIES = 4.0
"""Bytes through memory for one sent byte, on each side: into a socket and out of it (https://man7.org/linux/man-pages/man7/tcp.7.html:
no zero copy unless asked for), each a read and a write; a rank sends about as much as it receives."""


@dataclass(frozen=True)
class CpuNode:
    """num_cores = 0 or memory = 0 (bytes/s): not shared. num_ranks = ranks of one node."""

    num_cores: float
    memory: float
    num_ranks: int
    is_pinned: bool

    @property
    def ranks_per_core(self) -> float:
        """How many ranks a core has to run; 1 where cores are not shared."""
        return self.num_ranks / self.num_cores if self.num_cores else 1.0

    @property
    def shared(self) -> dict[str, float]:
        """Capacities of one node, as `Program.shared` wants them."""
        return {name: capacity for name, capacity in ((CORES, self.num_cores), (MEMORY, float(self.memory > 0))) if capacity}

    def compute(self, moved: float, seconds: float) -> Uses:
        """Of one rank's kernel that moves so many bytes in so many seconds."""
        return self._uses(1.0, moved, seconds)

    def may_starve(self, uses: Uses) -> bool:
        """Could ranks that all do this, a core each, draw more than the memory gives?"""
        return dict(uses).get(MEMORY, 0.0) * min(self.num_cores or self.num_ranks, self.num_ranks) > 1.0

    def collective(self, op: Collective | Dispatch, sent: float, seconds: float) -> Uses:
        """Of one rank of a collective that sends so many bytes; a transfer takes as much at its other end."""
        members = max(2, op.group.members_within(self.num_ranks))
        turns = -(-members // int(self.num_cores)) if self.is_pinned else max(1.0, members / (self.num_cores or members))
        return self._uses(1.0 / turns, min(COPIES * sent, self.memory * seconds / members), seconds)

    def _uses(self, cores: float, moved: float, seconds: float) -> Uses:
        if seconds <= 0.0:
            return ()
        found = ((CORES, min(cores, self.num_cores)),) if self.num_cores else ()
        return (*found, (MEMORY, min(1.0, moved / seconds / self.memory))) if self.memory and moved > 0 else found

    def seats(self, num_played: int, peers: int) -> tuple[Seat, ...]:
        """Seats of played ranks that stand for `peers` ranks each (1: every rank is played). A rank whose peers lie on several nodes
        is played where most of them are."""
        return tuple(self._seat(range(r * peers, (r + 1) * peers)) for r in range(num_played))

    def _seat(self, ranks: range) -> Seat:
        ((node, count),) = Counter(rank // self.num_ranks for rank in ranks).most_common(1)
        if not self.is_pinned:
            return Seat(node, count)
        cores = Counter(rank % self.num_ranks % int(self.num_cores) for rank in ranks if rank // self.num_ranks == node)
        return Seat(node, count, tuple(cores[core] for core in range(int(self.num_cores))))


def cpu_node(cluster) -> CpuNode | None:
    """What the ranks of a node of this ClusterSpec share; None where each rank has its own."""
    found = {r.name: r.capacity for r in cluster.resources if r.scope == "node"}
    if not found:
        return None
    return CpuNode(found.get(PINNED, found.get(CORES, 0.0)), found.get(MEMORY, 0.0), cluster.gpus_per_node, PINNED in found)


def mean_uses(parts: Iterable[tuple[Uses, float]]) -> Uses:
    """What a run of kernels takes, from (uses, seconds) of each: the mean over its time, so that its bytes are exact. Kernels that may find
    memory short are never in one run with others (`CpuNode.may_starve`), and beside the others nothing is, so that no speed is lost."""
    parts = [(uses, seconds) for uses, seconds in parts if seconds > 0.0]
    if len({uses for uses, _ in parts}) <= 1:
        return parts[0][0] if parts else ()
    total = sum(seconds for _, seconds in parts)
    mean: dict[str, float] = {}
    for uses, seconds in parts:
        for name, use in uses:
            mean[name] = mean.get(name, 0.0) + use * seconds / total
    return tuple(mean.items())
