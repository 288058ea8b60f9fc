"""What can go wrong with a checkpoint, in one line each? (And how do all ranks agree that it went wrong?)"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

T = TypeVar("T")
FAILURES = (Exception, CheckpointException)
"""DCP's own is no Exception but a BaseException."""


class CheckpointError(ValueError):
    """A checkpoint can't be written, or does not fit this run. One line: what, where, what would be legal."""


class Damaged(CheckpointError):
    """A checkpoint is not what was written: truncated, altered, incomplete or foreign. An older one may do."""


def one_line(error: BaseException) -> str:
    """The cause in one line: its type only where the words need it, no traceback."""
    if isinstance(error, CheckpointException):
        rank, (cause, _) = min(error.failures.items())
        return one_line(cause) if isinstance(cause, CheckpointError) else f"rank {rank}: {one_line(cause)}"
    text = " ".join(str(error).split())[:400]
    if isinstance(error, CheckpointError):
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def kind(error: BaseException) -> type[CheckpointError]:
    """The class under which every rank raises it."""
    if isinstance(error, CheckpointException):
        return kind(min(error.failures.items())[1][0])
    return Damaged if isinstance(error, Damaged) else CheckpointError


@dataclass(frozen=True)
class Ranks:
    """Those that write and read a checkpoint together, over a gloo group of their own; ``pg`` None: one process alone."""

    rank: int = 0
    world: int = 1
    pg: dist.ProcessGroup | None = None

    def gather(self, value: T) -> list[T]:
        """Everyone's ``value``, by rank. Collective."""
        if self.pg is None:
            return [value]
        values: list[Any] = [None] * self.world
        dist.all_gather_object(values, value, group=self.pg)
        return values

    def together(self, fn: Callable[[], T]) -> list[T]:
        """What ``fn`` returned on each rank; where it failed on any, the first failure is raised on all. Collective."""
        return self._together(fn, lambda value: value)[1]

    def each(self, fn: Callable[[], T]) -> T:
        """What ``fn`` returned on this rank, under the same rule; the values don't travel. Collective."""
        return self._together(fn, lambda value: None)[0]

    def _together(self, fn: Callable[[], T], sent: Callable[[T], Any]) -> tuple[T, list[T]]:
        value: Any = None
        try:
            value = fn()
            mine = (None, "", sent(value))
        except Exception as error:  # noqa: BLE001  (whatever it is, the other ranks wait for a word)
            mine = (kind(error), one_line(error), None)
        results = self.gather(mine)
        for rank, (failed, text, _) in enumerate(results):
            if failed is not None:
                raise failed(text if self.world == 1 or issubclass(failed, Damaged) else f"rank {rank}: {text}")
        return value, [theirs for _, _, theirs in results]

    def first(self, fn: Callable[[], T]) -> T:
        """What ``fn`` returned on rank 0, where alone it runs. Collective."""
        return self.together(lambda: fn() if self.rank == 0 else None)[0]


def ranks_of(group: dist.ProcessGroup | None = None, timeout_s: float = 1800.0) -> Ranks:
    """All ranks of this run, over ``group`` or a new gloo group. Collective where torch.distributed is initialised.

    Never the default group: a save in the background would mix its collectives with those of training.
    """
    if not dist.is_initialized():
        return Ranks()
    if group is None:
        group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
    return Ranks(dist.get_rank(group), dist.get_world_size(group), group)
