"""How do tests run several ranks on one machine, cheaply? (Forked processes that talk over gloo.)

Forking from a parent that already imported torch starts eight ranks in a quarter of a second; fresh interpreters take sixteen.
"""

from __future__ import annotations

import os
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import get_context
from typing import Any

import torch
import torch.distributed as dist

import torch.distributed.checkpoint  # noqa: F401  (imported before the fork, so that no rank imports them again)
import torch.distributed.fsdp  # noqa: F401
import torch.distributed.pipelining  # noqa: F401
import torch.distributed.tensor  # noqa: F401


def run_ranks(fn: Callable[..., Any], world: int, *args: Any, timeout_s: float = 120.0) -> list[Any]:
    """What ``fn(rank, world, *args)`` returned on each of ``world`` gloo ranks, by rank (results must pickle; tensors go by
    value). Raises AssertionError with the traceback of the first rank that failed, or TimeoutError."""
    context = get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        pipes = [context.Pipe(duplex=False) for _ in range(world)]
        ranks = [context.Process(target=_rank, args=(fn, rank, world, f"{folder}/store", pipes[rank][1], timeout_s, args), daemon=True)
                 for rank in range(world)]
        for process in ranks:
            process.start()
        for _, write in pipes:
            write.close()
        try:
            return _collect(ranks, [read for read, _ in pipes], time.monotonic() + timeout_s)
        finally:
            for process in ranks:
                if process.is_alive():
                    process.kill()
                process.join()


def _collect(ranks, reads, deadline: float) -> list[Any]:
    results: dict[int, Any] = {}
    while len(results) < len(ranks):
        for rank, read in enumerate(reads):
            if rank in results or not read.poll(0.005):
                continue
            try:
                ok, value = read.recv()
            except EOFError:
                raise AssertionError(f"rank {rank} died without a word (exit code {ranks[rank].exitcode})") from None
            if not ok:
                raise AssertionError(f"rank {rank} failed:\n{value}")
            results[rank] = value
        if time.monotonic() > deadline:
            raise TimeoutError(f"ranks {sorted(set(range(len(ranks))) - set(results))} did not finish")
    return [results[rank] for rank in range(len(ranks))]


def _rank(fn, rank: int, world: int, store: str, pipe, timeout_s: float, args) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank))
    torch.set_num_threads(1)
    try:
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world, timeout=timedelta(seconds=timeout_s))
        value = (True, _plain(fn(rank, world, *args)))
        dist.destroy_process_group()
    except BaseException:
        value = (False, traceback.format_exc())
    pipe.send(value)
    pipe.close()
    # No clean-up of what the parent holds: this process is a copy of it.
    os._exit(0)


def _plain(value: Any) -> Any:
    """Tensors as numpy arrays, so that no shared-memory handle crosses the fork."""
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu()
        return value.float().numpy() if value.dtype == torch.bfloat16 else value.numpy()
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(map(_plain, value)) if not hasattr(value, "_fields") else type(value)(*map(_plain, value))
    return value
