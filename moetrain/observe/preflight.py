"""Is every machine of the run as it should be, before hours are spent on it? (Result: `preflight.json` and warnings.)

A degraded link or a GPU with another power limit slows every rank without an error. So ranks state their facts, the links between
them are measured, and what differs from the other ranks, or from what a checkpoint needs, is said in words with rank numbers.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from moesim.files import write_atomically
from moetrain.observe.host import RankFacts, busy, facts
from moetrain.observe.jsonl import plain
from moetrain.observe.links import Links, measure_links, slow_pairs
from moetrain.observe.words import clean, size

FILE = "preflight.json"
SCHEMA = 1
FOREIGN = 0.05
"""Share of a machine's processors used by others above which timings are not to be trusted: with 10-20% the median step of a
two-rank CPU run rose by 20-60%."""
HOT = 85.0
"""Degrees C of a GPU before any work."""


@dataclass(frozen=True)
class Preflight:
    """Facts by rank, links, and warnings in words; the same on every rank."""

    time: float
    seconds: float
    ranks: tuple[RankFacts, ...]
    links: Links
    foreign_cpu: dict[str, float | None]
    warnings: tuple[str, ...]

    def fields(self) -> dict[str, Any]:
        """As preflight.json holds it: rates in bytes/s, pairs as "sender>receiver"."""
        links = {"pairs": {f"{a}>{b}": rate for (a, b), rate in sorted(self.links.pairs.items())}, "all_reduce_bus": self.links.all_reduce,
                 "message_bytes": self.links.message_bytes, "seconds": self.links.seconds}
        return {"schema": SCHEMA, "time": self.time, "seconds": self.seconds, "ranks": [r.fields() for r in self.ranks], "links": links,
                "foreign_cpu": self.foreign_cpu, "warnings": list(self.warnings)}

    @property
    def devices(self) -> list[str]:
        """Device names by rank: what `peaks` and the manifest want."""
        return [r.device for r in self.ranks]


def preflight(run: str | Path | None, device: torch.device | str = "cpu", *, checkpoints: str | Path | None = None, needed_bytes: float = 0.0,
              message_bytes: int = 4 << 20, budget_s: float = 2.0, watch_s: float = 0.3) -> Preflight:
    """Look at all ranks of the default process group (one rank if there is none); rank 0 writes RUN/preflight.json.

    checkpoints, needed_bytes: where checkpoints will go and how much room they need. watch_s: how long ranks stand still to see who
    else uses the processors. A collective call of about watch_s + budget_s seconds."""
    begin = time.monotonic()
    together = dist.is_available() and dist.is_initialized()
    rank = dist.get_rank() if together else 0
    if together:
        dist.barrier()
    before = busy()
    time.sleep(watch_s)
    mine = facts(rank, device, checkpoints, before)
    everyone: list[RankFacts] = [mine]
    if together:
        everyone = [mine] * dist.get_world_size()
        dist.all_gather_object(everyone, mine)
    links = measure_links(device, message_bytes=message_bytes, budget_s=budget_s) if together else Links({}, None, message_bytes, 0.0)
    if together:
        shared = [links.all_reduce]
        dist.broadcast_object_list(shared, 0)
        links = Links(links.pairs, shared[0], links.message_bytes, links.seconds)
    foreign = foreign_cpu(everyone)
    found = Preflight(time.time(), time.monotonic() - begin, tuple(everyone), links, foreign, tuple(warnings(everyone, links, foreign, needed_bytes)))
    if rank == 0 and run is not None:
        Path(run).mkdir(parents=True, exist_ok=True)
        write_atomically(Path(run) / FILE, json.dumps(plain(found.fields()), indent=1) + "\n")
    return found


def foreign_cpu(ranks: Sequence[RankFacts]) -> dict[str, float | None]:
    """Host -> share of its cores that processes outside the run used while the ranks stood still; None where unknown."""
    shares: dict[str, float | None] = {}
    for host in {r.host for r in ranks}:
        here = [r for r in ranks if r.host == host]
        seen = [r.cpu_seconds for r in here]
        if any(s is None for s in seen):
            shares[host] = None
            continue
        machine, wall = max(s[0] for s in seen), max(s[2] for s in seen)
        own = sum(s[1] for s in seen)
        shares[host] = max(0.0, machine - own) / max(wall, 1e-9) / (here[0].processors["cores"] or 1)
    return shares


def warnings(ranks: Sequence[RankFacts], links: Links, foreign: dict[str, float | None], needed_bytes: float = 0.0) -> list[str]:
    """What is odd, in words with rank numbers."""
    found = [f"slow link: {text}" for text in slow_pairs(links.pairs, [r.host for r in ranks])]
    found += [text for name in ranks[0].versions for text in _differing(f"{name} version", [r.versions.get(name) for r in ranks])]
    found += _differing("device", [r.device for r in ranks])
    found += _differing("torch threads", [r.processors["torch_threads"] for r in ranks])
    found += _gpu_warnings(ranks)
    found += [f"processors of {host} are {share:.0%} busy with other work: timings will not repeat" for host, share in foreign.items() if share and share > FOREIGN]
    found += [f"rank {r.rank}: {r.processors['torch_threads']} torch threads on {r.processors['allowed_cores']} cores it may use" for r in ranks
              if r.processors["allowed_cores"] and r.processors["torch_threads"] > r.processors["allowed_cores"]]
    short = [r for r in ranks if r.disk and r.disk["free"] < needed_bytes]
    found += [f"rank {r.rank} ({r.host}): {size(r.disk['free'])} free in {r.disk['folder']}, checkpoints need {size(needed_bytes)}" for r in short]
    return [clean(text) for text in found]


def _gpu_warnings(ranks: Sequence[RankFacts]) -> list[str]:
    found = []
    for field, words in (("power.limit", "power limit (W)"), ("clocks.max.sm", "highest SM clock (MHz)"), ("nvlinks", "NVLink links"), ("driver_version", "driver"),
                         ("pcie.link.width.current", "PCIe width")):
        found += _differing(words, [r.gpu.get(field) if r.gpu else None for r in ranks])
    hot = [r for r in ranks if r.gpu and (r.gpu.get("temperature.gpu") or 0) > HOT]
    return found + [f"rank {r.rank} ({r.host}): GPU at {r.gpu['temperature.gpu']:g} C before any work" for r in hot]


def _differing(what: str, values: Sequence[Any]) -> list[str]:
    """One line a value that is not the most common one, with the ranks that have it."""
    counts = Counter(values)
    if len(counts) < 2:
        return []
    usual = counts.most_common(1)[0][0]
    odd = {value: [rank for rank, v in enumerate(values) if v == value] for value in counts if value != usual}
    return [f"{what} {value} on ranks {', '.join(map(str, ranks[:8]))}{' ...' if len(ranks) > 8 else ''}; others have {usual}" for value, ranks in odd.items()]
