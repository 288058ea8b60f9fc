"""Whole runs of a tiny model in forked ranks: for tests of what surrounds the steps."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from moesim.load import parse_scenario
from moetrain import checkpoint, cli, distributed, train
from moetrain.data.writer import write_shards
from moetrain.distributed import Seat
from moetrain.observe.metrics import FILE, StepRecord, read_lines, read_steps
from moetrain.session import run_training
from moetrain.testing import run_ranks

VOCAB = 64
# aux_scope: the scope whose balance loss is the same under any layout. eps: so large that the first steps of Adam don't blow rounding
# up (g / |g| of a gradient that is all rounding).
TEXT = """
name: small
seed: 3
model: {name: tiny, num_layers: 3, hidden_size: 32, vocab_size: 64, num_heads: 4, num_kv_heads: 2, head_dim: 8, intermediate_size: 48,
  num_experts: 8, top_k: 2, moe_intermediate_size: 24, num_shared_experts: 1, num_leading_dense_layers: 1, qk_norm: per_head}
cluster: cpu_gloo
workload: {seq_len: 16, global_batch_tokens: 128}
layout: mb2
train:
  steps: 6
  deterministic: true
  device: cpu
  optimizer: {lr: 0.003, eps: 1.0e-3, schedule: constant}
  moe: {bias_rate: 0.001, aux_scope: sequence}
  checkpoint: {every: 3}
  log: {preflight: false, every: 1000}
"""
Hook = Callable[[train.Run], None]


def scenario_file(folder: Path, *extra: tuple[str, str]) -> Path:
    """The scenario as a file, some of its text replaced."""
    text = TEXT
    for old, new in extra:
        assert old in text
        text = text.replace(old, new)
    path = folder / "small.yaml"
    path.write_text(text)
    return path


def run(rank: int, world: int, layout: str, folder: Path, sets: Sequence[str] = (), hooks: Sequence[tuple[str, int, Hook]] = ()) -> int:
    """A run of this rank, its exit code. ``hooks``: (function of moetrain.train, n, hook): the hook is called before the function, in
    step n of the run."""
    original = {name: getattr(train, name) for name, _, _ in hooks}
    for name, fn in original.items():
        setattr(train, name, _hooked(fn, [(n, hook) for where, n, hook in hooks if where == name]))
    try:
        scenario = parse_scenario(TEXT, [f"train.log.folder={folder}", *sets])
        return run_training(scenario, layout, Seat(rank, world, torch.device("cpu")))
    finally:
        for name, fn in original.items():
            setattr(train, name, fn)


def _hooked(fn, hooks):
    def wrapped(run, *args, **kwargs):
        for number, hook in hooks:
            if run.done + (fn.__name__ in ("one_step", "update", "measure")) == number:
                hook(run)
        return fn(run, *args, **kwargs)

    return wrapped


def runs(layout: str, world: int, folder: Path, sets: Sequence[str] = (), hooks: Sequence[tuple[str, int, Hook]] = ()) -> list[int]:
    """A run in ``world`` forked ranks: exit codes by rank."""
    return run_ranks(run, world, layout, folder, sets, hooks)


def losses(folder: Path) -> list[float]:
    """By step, as they led to the present state."""
    return [step.loss for step in steps(folder)]


def steps(folder: Path) -> list[StepRecord]:
    return read_steps(folder / FILE)


def events(folder: Path, *names: str) -> list[dict]:
    """Events of the log, of some names only."""
    return [line for line in read_lines(folder / FILE) if line["kind"] == "event" and (not names or line["event"] in names)]


def texts(folder: Path, *names: str) -> str:
    """Words of warnings and notes, a line each."""
    return "\n".join(line["text"] for line in events(folder, *(names or ("warning", "note"))))


def kept(folder: Path) -> dict[int, dict]:
    """Checkpoints of a run by step: tensors {name: {dtype, shape, digest}} and extra, every file hashed again."""
    found = {}
    for entry in checkpoint.inspect(folder / "checkpoints", verify=True):
        assert entry["ok"], entry
        found[entry["step"]] = entry
    return found


def extra_of(folder: Path, step: int) -> dict:
    """The plain part of a checkpoint."""
    path = folder / "checkpoints" / f"step-{step:08d}" / "state.json"
    return json.loads(path.read_text().partition("\n")[2])["extra"]


def shards(folder: Path, num: int = 40, seed: int = 0, vocab: int = VOCAB) -> Path:
    """A folder of shards of random documents of up to 60 ids."""
    rng = np.random.default_rng(seed)
    write_shards(folder, [rng.integers(0, vocab, rng.integers(5, 60)) for _ in range(num)], vocab_size=vocab, shard_tokens=500)
    return folder


@contextmanager
def mounted(folder: Path, options: str) -> Iterator[Path]:
    """A file system in memory of its own at ``folder``; skips the test where there is none to be had."""
    folder.mkdir()
    if os.geteuid() or subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)], capture_output=True, check=False).returncode:
        pytest.skip("no file system can be mounted here")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def command(*arguments: str) -> tuple[int, str]:
    """`moetrain ...` in a forked process: exit code, and what it said on stderr."""
    return run_ranks(_command, 1, arguments)[0]


def _command(rank: int, world: int, arguments: Sequence[str]) -> tuple[int, str]:
    cli._mount()
    distributed.leave = lambda: None  # the group is the test's
    result = CliRunner().invoke(cli.app, list(arguments))
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stderr
