"""What is repeated when an op is timed, and on what kind of machine? (Work, Machine, operands.)

Operands are random normal: the time of a product depends on their values (power), so zeros would flatter it. Several sets take turns,
enough to exceed the cache twice, as operands in a step come from memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from moesim.ops import Group
from moetrain.collectives import Communicator
from moetrain.kernels import Backend
from moetrain.observe.words import size

TORCH = {"fp32": torch.float32, "bf16": torch.bfloat16}
POOL = (1 << 22) - 3
"""Normal values drawn; larger operands repeat them. Odd, so that rows of usual lengths differ."""
MAX_SETS = 16
MEMORY_SHARE = 0.8
DEFAULT_CACHE = 32 << 20
Made = TypeVar("Made")


class Skip(Exception):
    """Why an op can't be timed here, in one line."""


@dataclass(frozen=True)
class Work:
    """``calls``: one repeat each, the same computation on operand sets that take turns. ``before`` and ``after`` run around each repeat,
    untimed. ``timer`` device: until the result is there; host: until the call returns. ``everyone``: all ranks take part, and the
    largest of their times counts; ``barrier`` is then what aligns them. ``single``: never several calls in one repeat."""

    calls: Sequence[Callable[[], Any]]
    flops: float
    bytes: float
    dtype: str
    method: dict[str, Any]
    rows: tuple[int, ...] = ()
    before: Callable[[int], Any] | None = None
    after: Callable[[], Any] | None = None
    timer: str = "device"
    everyone: bool = False
    single: bool = False


@dataclass(frozen=True)
class Machine:
    """What ops run on: this rank's device, what 16-bit ops are stored in (``dtype`` fp32 | bf16), the kernels of the trainer."""

    device: torch.device
    dtype: str
    backend: Backend
    rank: int = 0
    world: int = 1
    _groups: dict[Group, Any] = field(default_factory=dict)
    _draws: list[int] = field(default_factory=lambda: [0])

    @property
    def cuda(self) -> bool:
        return self.device.type == "cuda"

    def storage(self, asked: str) -> str:
        """What an op of dtype ``asked`` is timed in. Skip for formats that the trainer's dense kernels lack."""
        if asked == "fp32":
            return "fp32"
        if asked != "bf16":
            raise Skip(f"the trainer has no {asked} kernel of this kind")
        return self.dtype

    def normal(self, *shape: int, dtype: str = "fp32", seed: int | None = None) -> torch.Tensor:
        """Standard normal values; each call without a ``seed`` draws others."""
        self._draws[0] += 1
        generator = torch.Generator(self.device).manual_seed(self._draws[0] if seed is None else seed)
        count = math.prod(shape)
        pool = torch.randn(min(count, POOL), generator=generator, device=self.device).to(TORCH[dtype])
        if count <= POOL:
            return pool.view(shape)
        out = torch.empty(count, dtype=TORCH[dtype], device=self.device)
        whole = count // POOL
        out[: whole * POOL].view(whole, POOL).copy_(pool)
        out[whole * POOL :] = pool[: count - whole * POOL]
        return out.view(shape)

    def sets(self, one: float, make: Callable[[], Made], comm: Communicator | None = None) -> list[Made]:
        """Enough sets of operands of ``one`` byte count each (results included) to exceed the cache twice; equally many on all ranks of
        ``comm``. Skip when one doesn't fit."""
        room = MEMORY_SHARE * free_memory(self.device) / (1 if self.cuda or comm is None else self.world)
        count = min(math.ceil(2 * cache_bytes(self.device) / max(one, 1)), MAX_SETS, int(min(room, 1e18) // max(one, 1)))
        if comm is not None:
            least = torch.tensor([count], device=self.device)
            dist.all_reduce(least, dist.ReduceOp.MIN, group=comm.pg)
            count = int(least)
        if count < 1:
            raise Skip(f"needs {size(one)} of memory, {size(room)} can be used")
        return [make() for _ in range(count)]

    def communicator(self, group: Group) -> Communicator | None:
        """Ranks that communicate as ``group`` says, as many groups at once as the world holds; None on a rank left over. Collective. Skip
        where the world is too small."""
        extent = group.size * group.stride
        if group.size < 2:
            raise Skip("one rank exchanges nothing")
        if extent > self.world and (group.size - 1) * group.stride + 1 > self.world:
            raise Skip(f"needs {group.size} ranks, {group.stride} apart, this run has {self.world}" if group.stride > 1 else
                       f"needs {group.size} ranks, this run has {self.world}")
        if group not in self._groups:
            self._groups[group] = _make_groups(group, self.world, self.rank)
        return self._groups[group]


def members(group: Group, world: int) -> list[list[int]]:
    """Rank numbers of every group of this size and stride, aligned, that fits into the world."""
    extent = group.size * group.stride
    starts = [block + i for block in range(0, world, extent) for i in range(group.stride)]
    last = (group.size - 1) * group.stride
    return [[start + i * group.stride for i in range(group.size)] for start in starts if start + last < world]


def _make_groups(group: Group, world: int, rank: int) -> Communicator | None:
    mine = None
    for ranks in members(group, world):
        pg = dist.new_group(ranks)
        if rank in ranks:
            mine = Communicator("bench", group.size, ranks.index(rank), pg, group)
    return mine


def nbytes(tensors: Iterable[torch.Tensor]) -> float:
    """Bytes of all of them."""
    return float(sum(t.numel() * t.element_size() for t in tensors))


def free_memory(device: torch.device) -> float:
    """Bytes that operands may take."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return math.inf
    return next((1024.0 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")), math.inf)


def cache_bytes(device: torch.device) -> int:
    """The last-level cache: L2 of a GPU, L3 of a processor (its share of a node isn't known: the whole)."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).L2_cache_size
    try:
        text = Path("/sys/devices/system/cpu/cpu0/cache/index3/size").read_text().strip()
    except OSError:
        return DEFAULT_CACHE
    return int(text[:-1]) * {"K": 1 << 10, "M": 1 << 20}.get(text[-1:], 1) if text[:-1].isdigit() else DEFAULT_CACHE
