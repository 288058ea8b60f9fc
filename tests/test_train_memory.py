"""Does a run that fits while it steps also fit while it saves and while it resumes?

Measured from outside: the kernel's high-water mark of a process (VmHWM, reset before each part), with an allocator that gives memory
back (https://man7.org/linux/man-pages/man3/mallopt.3.html), so in a process of its own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
MIB = 2**20
SETS = ["model.hidden_size=192", "model.head_dim=48", "model.num_experts=32", "model.moe_intermediate_size=192", "model.vocab_size=2048", "train.steps=3"]


def status(name: str) -> int:
    """A line of /proc/self/status, bytes."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) * 1024


def watched(fn, name: str, found: dict[str, list[int]]):
    """``fn``, whose peak is appended to found[name]."""
    def call(*args, **kwargs):
        Path("/proc/self/clear_refs").write_text("5")
        try:
            return fn(*args, **kwargs)
        finally:
            found.setdefault(name, []).append(status("VmHWM"))

    return call


def peaks(rank: int, world: int, layout: str, folder: str, sets: list[str]) -> dict:
    """High-water marks of the parts of a run on this rank, bytes."""
    from small_runs import run

    from moetrain import session, train

    found: dict[str, list[int]] = {"before": [status("VmRSS")]}
    session.prepare = watched(session.prepare, "load", found)
    for name in ("one_step", "save", "finish"):
        setattr(train, name, watched(getattr(train, name), name, found))
    assert run(rank, world, layout, Path(folder), [*SETS, *sets]) == 0
    return found


def measured(layout: str, world: int, *runs: tuple[Path, str]) -> list[list[dict]]:
    """`peaks` of each run (folder, settings) and rank, from a process of its own."""
    allocator = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    environment = os.environ | allocator | {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
    done = subprocess.run([sys.executable, __file__, layout, str(world), *(f"{folder} {sets}" for folder, sets in runs)], env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("layout, world", [("mb1", 1), pytest.param("dp2 ep2 mb1", 2, marks=pytest.mark.full), pytest.param("dp2 zero3 mb1", 2, marks=pytest.mark.full)])
def test_neither_saving_nor_resuming_needs_more_than_a_step(tmp_path, layout, world):
    """Few tokens, so that a step needs little beyond weights, moments and gradients: 16 B a parameter. A save in the background needs
    a copy of the state (12 B a parameter) on top, which is what it says it does."""
    waiting = "train.checkpoint.every=2 train.checkpoint.asynchronous=false"
    first, again, behind = measured(layout, world, (tmp_path / "run", waiting), (tmp_path / "run", f"{waiting} train.steps=5"),
                                    (tmp_path / "other", "train.checkpoint.every=2"))
    state = stored(tmp_path / "run") / world
    for rank in range(world):
        step, slack = max(first[rank]["one_step"][1:]), 8 * MIB + state / 20
        assert step - first[rank]["before"][0] > state, "the step is measured"
        assert max(first[rank]["save"]) < step + slack and max(first[rank]["finish"]) < step + slack
        assert again[rank]["load"][0] < step + slack
        assert max(again[rank]["one_step"]) < step + slack
        assert max(behind[rank]["save"] + behind[rank]["one_step"] + behind[rank]["finish"]) < step + state + slack


def stored(folder: Path) -> int:
    """Bytes of the state in the last checkpoint, all ranks."""
    last = max((folder / "checkpoints").glob("step-*"))
    return sum(path.stat().st_size for path in last.glob("*.distcp"))


if __name__ == "__main__":
    from moetrain.testing import run_ranks

    layout, world, *runs = sys.argv[1:]
    torch.set_num_threads(1)
    print(json.dumps([run_ranks(peaks, int(world), layout, text.split()[0], text.split()[1:]) for text in runs]))
