"""Who am I among the processes of this run, and on which device? (torchrun's variables, NCCL on GPUs, gloo elsewhere.)"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

PARENT_DEATH = 1
"""PR_SET_PDEATHSIG of prctl(2)."""


@dataclass(frozen=True)
class Seat:
    """This process's rank among ``world``, and its device."""

    rank: int
    world: int
    device: torch.device

    @property
    def device_name(self) -> str:
        return torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "cpu"


def choose_device(name: str, local_rank: int = 0) -> torch.device:
    """The device that ``train.device`` means here. ValueError for CUDA where there is none."""
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError("train.device: cuda, but torch sees no CUDA device here; use auto or cpu")
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    return torch.device("cuda", local_rank)


def take_seat(device: str = "auto", timeout_s: float = 1800.0) -> Seat:
    """Joins the process group that torchrun describes, or makes one of a single process."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        follow_launcher()
    world, rank, local = (int(os.environ.get(name, default)) for name, default in (("WORLD_SIZE", 1), ("RANK", 0), ("LOCAL_RANK", 0)))
    chosen = choose_device(device, local)
    if chosen.type == "cuda":
        torch.cuda.set_device(chosen)
    if not dist.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if chosen.type == "cuda" else "gloo"
        here = {} if "MASTER_ADDR" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
        dist.init_process_group(backend, timeout=timedelta(seconds=timeout_s), **here)
    return Seat(rank, world, chosen)


def follow_launcher() -> None:
    """SIGTERM to this process when the one that started it dies: a launcher that is killed leaves no rank that trains on alone, holding
    the run's folder. Linux only."""
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).prctl(PARENT_DEATH, signal.SIGTERM)


def leave() -> None:
    """Ends the process group, where there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()


def make_deterministic(on: bool) -> None:
    """torch's deterministic algorithms, or an error where one has none; no effect on what is deterministic already."""
    torch.use_deterministic_algorithms(on)
    if torch.cuda.is_available():
        torch.backends.cudnn.benchmark = not on
