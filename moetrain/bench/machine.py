"""What was this machine, and was it quiet? (What must be equal for two lines to be comparable; clocks; who else used the processor.)"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from moetrain.bench.work import Machine, cache_bytes
from moetrain.observe import host
from moetrain.observe.manifest import hash_file, hash_value
from moetrain.observe.provenance import memory_bytes, sources_hash

QUIET, NOISY = 0.04, 0.04
"""Share of the machine's cores used by others below which timing starts, and above which a line is marked."""
LOOK_S = 0.5
TIMED = ("moetrain/kernels", "moetrain/dispatch", "moetrain/optim", "moetrain/checkpoint")
TIMED_FILES = ("attention", "collectives", *(f"bench/{name}" for name in ("work", "products", "memory_bound", "exchange", "suite", "timing")))
"""Sources whose change makes a measurement another one: what is timed, and how."""


@dataclass(frozen=True)
class Stamp:
    """Device, software and topology, as a Measurement holds them."""

    device: dict[str, Any]
    software: dict[str, Any]
    topology: dict[str, Any]


def stamp(machine: Machine) -> Stamp:
    """Of this rank's device; every rank's is taken to be alike (preflight of a run compares them)."""
    local = int(os.environ.get("LOCAL_WORLD_SIZE", machine.world))
    topology = {"world": machine.world, "nodes": max(1, machine.world // max(1, local)), "transport": "nccl" if machine.cuda else "gloo"}
    return Stamp(_device(machine), _software(machine), topology)


def _device(machine: Machine) -> dict[str, Any]:
    found: dict[str, Any] = {"name": host.device_name(machine.device), "kind": machine.device.type, "cache_bytes": cache_bytes(machine.device)}
    if machine.cuda:
        properties = torch.cuda.get_device_properties(machine.device)
        return found | {"memory_bytes": properties.total_memory, "num_sms": properties.multi_processor_count,
                        "capability": list(torch.cuda.get_device_capability(machine.device))}
    return found | {"memory_bytes": memory_bytes(), "cores": os.cpu_count(), "threads": torch.get_num_threads()}


def _software(machine: Machine) -> dict[str, Any]:
    from moesim import __version__

    counters = host.gpu_counters(machine.device) or {}
    return {**host.versions(), "driver": counters.get("driver_version"), "moesim": __version__, "code": _code(),
            "backend": machine.backend.name, "compute": machine.dtype}


def _code() -> str:
    root = Path(__file__).resolve().parent.parent.parent
    return hash_value([sources_hash(root, TIMED), *(hash_file(root / "moetrain" / f"{name}.py") for name in TIMED_FILES)])[:16]


def clocks(machine: Machine) -> dict[str, Any] | None:
    """MHz, watts, degrees, of a GPU while it is still warm, or the mean MHz of the cores; None where nothing can be read."""
    if not machine.cuda:
        return _core_clocks()
    try:
        return {"sm_mhz": torch.cuda.clock_rate(machine.device), "watts": torch.cuda.power_draw(machine.device) / 1e3,
                "celsius": torch.cuda.temperature(machine.device)}
    except (ImportError, RuntimeError):
        counters = host.gpu_counters(machine.device)
        return counters and {"sm_mhz": counters["clocks.sm"], "watts": counters["power.draw"], "celsius": counters["temperature.gpu"]}


def _core_clocks() -> dict[str, Any] | None:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        mhz = [float(line.split(":")[1]) for line in lines if line.startswith("cpu MHz")]
    except (OSError, ValueError, IndexError):
        return None
    return {"core_mhz": round(sum(mhz) / len(mhz), 1)} if mhz else None


def foreign_share(before: host.Busy | None, everyone: bool = False) -> float | None:
    """Share of this node's cores that other processes used since ``before``; with ``everyone`` all ranks' own time counts as ours
    (collective). None where it can't be read, or when ranks lie on several nodes."""
    used = host.used_since(before)
    machine, own, wall = used if used is not None else (0.0, 0.0, 0.0)
    if everyone and dist.is_initialized() and dist.get_world_size() > 1:
        total = torch.tensor([own], dtype=torch.float64)
        dist.all_reduce(total)
        own = float(total)
        if int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size())) < dist.get_world_size():
            return None
    return None if used is None or wall <= 0 else min(1.0, max(0.0, (machine - own) / wall / (os.cpu_count() or 1)))


def wait_until_quiet(patience_s: float) -> float | None:
    """Returns once others use less than QUIET of the cores, or after ``patience_s``; the share it last saw. 0: doesn't look."""
    deadline, share = time.monotonic() + patience_s, None
    while time.monotonic() < deadline:
        before = host.busy()
        if before is None:
            return None
        time.sleep(min(LOOK_S, patience_s))
        share = foreign_share(before)
        if share is not None and share < QUIET:
            break
    return share
