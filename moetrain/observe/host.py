"""What is this rank's machine doing right now? (Versions, processors and who uses them, memory, disk, the GPU's own counters.)

Everything is best effort and read-only: what can't be read is None. GPU counters come from `nvidia-smi`, which is there wherever
the driver is.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import resource
import shutil
import subprocess
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from moetrain.observe.provenance import cpu_name, memory_bytes

QUERY = ("name", "driver_version", "clocks.sm", "clocks.max.sm", "clocks.mem", "power.draw", "power.limit", "temperature.gpu", "pcie.link.gen.current",
         "pcie.link.width.current")


@dataclass(frozen=True)
class Busy:
    """Processor time of the machine and of this process since some moment, in seconds summed over cores, and the moment."""

    machine: float
    own: float
    clock: float


def busy() -> Busy | None:
    """Time counters of now; None where there is no /proc/stat."""
    try:
        fields = [int(v) for v in Path("/proc/stat").read_text().splitlines()[0].split()[1:]]
    except (OSError, ValueError, IndexError):
        return None
    own = sum(usage.ru_utime + usage.ru_stime for usage in map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)))
    return Busy((sum(fields[:3]) + fields[5] + fields[6]) / os.sysconf("SC_CLK_TCK"), own, time.monotonic())


def used_since(before: Busy | None) -> tuple[float, float, float] | None:
    """(machine, own, wall): seconds of processor time used by everybody and by this process, and seconds that passed."""
    now = busy()
    if before is None or now is None:
        return None
    return now.machine - before.machine, now.own - before.own, now.clock - before.clock


def versions() -> dict[str, str | None]:
    """Versions of what computes and communicates; None for what is absent."""
    cuda = torch.cuda.is_available()
    try:
        triton = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        triton = None
    return {
        "python": platform.python_version(), "torch": torch.__version__, "cuda": torch.version.cuda,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if cuda and torch.distributed.is_nccl_available() else None, "triton": triton,
    }  # fmt: skip


def processors() -> dict[str, Any]:
    """Cores of the machine and those this process may use, threads of torch, load average, memory."""
    allowed = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    return {"cpu": cpu_name(), "cores": os.cpu_count(), "allowed_cores": len(allowed) or None, "torch_threads": torch.get_num_threads(),
            "load_1min": os.getloadavg()[0], "memory_bytes": memory_bytes()}


def disk_free(folder: str | Path) -> dict[str, Any] | None:
    """Free and total bytes where ``folder`` is or will be."""
    path = Path(folder).absolute()
    place = next((p for p in (path, *path.parents) if p.is_dir()), None)
    if place is None:
        return None
    usage = shutil.disk_usage(place)
    return {"folder": str(path), "free": usage.free, "total": usage.total}


def device_name(device: torch.device | str) -> str:
    """The name by which peaks are looked up."""
    device = torch.device(device)
    return torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name()


def gpu_counters(device: torch.device | str) -> dict[str, Any] | None:
    """Clocks (MHz), power (W), temperature (C), PCIe link and NVLink links of one GPU; None without one or without nvidia-smi."""
    if torch.device(device).type != "cuda":
        return None
    identity = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
    found = parse_query(_nvidia_smi(f"--query-gpu={','.join(QUERY)}", "--format=csv,noheader,nounits", "-i", identity))
    return found and found | {"nvlinks": parse_nvlinks(_nvidia_smi("nvlink", "-s", "-i", identity))}


def _nvidia_smi(*words: str) -> str | None:
    try:
        return subprocess.run(["nvidia-smi", *words], capture_output=True, text=True, timeout=10, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None


def parse_query(text: str | None) -> dict[str, Any] | None:
    """The first line of nvidia-smi's CSV as {field: number or text}; what it prints as [N/A] is None."""
    cells = [cell.strip() for cell in text.strip().splitlines()[0].split(",")] if text and text.strip() else []
    if len(cells) != len(QUERY):
        return None
    return {name: cell if i < 2 else _number(cell) for i, (name, cell) in enumerate(zip(QUERY, cells, strict=True))}


def _number(cell: str) -> float | None:
    try:
        return float(cell)
    except ValueError:
        return None


def parse_nvlinks(text: str | None) -> int | None:
    """Links that run, from `nvidia-smi nvlink -s`: lines "Link 3: 53.125 GB/s"; one that is down says <inactive>."""
    if text is None:
        return None
    return sum(line.strip().startswith("Link ") and line.strip().endswith("GB/s") for line in text.splitlines())


@dataclass(frozen=True)
class RankFacts:
    """One rank's machine: what preflight gathers before it compares ranks."""

    rank: int
    host: str
    device: str
    versions: dict[str, str | None]
    processors: dict[str, Any]
    gpu: dict[str, Any] | None
    disk: dict[str, Any] | None
    cpu_seconds: tuple[float, float, float] | None

    def fields(self) -> dict[str, Any]:
        return asdict(self)


def facts(rank: int, device: torch.device | str, folder: str | Path | None, since: Busy | None) -> RankFacts:
    """Facts of this rank; ``since``: a moment some tenths of a second ago, to see who used the processors meanwhile."""
    return RankFacts(rank, platform.node(), device_name(device), versions(), processors(), gpu_counters(device),
                     disk_free(folder) if folder else None, used_since(since))
