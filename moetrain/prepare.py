"""How does a scenario become a run that can start, and what can't, in one line and before anything is written?

What one rank alone may find wrong (its data, its folder) is told to all, so that none waits for a rank that has left.
"""

from __future__ import annotations

import fcntl
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, TypeVar

import torch

from moesim.layout import Layout
from moesim.spec import Scenario
from moetrain import forced, state
from moetrain.build import Job, compute_dtype, layout_of, make_job, make_optimizer, moe_options
from moetrain.checkpoint import Checkpointer, folders
from moetrain.checkpoint.errors import Ranks
from moetrain.checkpoint.load import compare
from moetrain.data.loader import open_loader
from moetrain.export.config import read_config
from moetrain.data.stream import AnyLoader
from moetrain.distributed import Seat, choose_device, make_deterministic
from moetrain.observe.log import RunLog
from moetrain.observe.manifest import Manifest
from moetrain.observe.peaks import peaks
from moetrain.observe.profiler import ProfileWindow
from moetrain.observe.routing_log import RoutingRecorder
from moetrain.observe.trace import SpanRecorder
from moetrain.optim import Schedule, SkipGuard
from moetrain.params import assign
from moetrain.train import Run

T = TypeVar("T")
LOCK = ".lock"
LOCK_S = 10.0
"""What ranks of a launcher that died have to keep their state and go."""


def check(scenario: Scenario, layout_text: str | None, world: int, init_from: str | None = None) -> None:
    """ValueError in one line for what can't run on ``world`` ranks of this machine, as far as one process can tell without the model:
    said once, before any of them starts."""
    device = choose_device(scenario.train.device)
    layout = layout_of(scenario, layout_text, world)
    moe_options(scenario, layout, device, compute_dtype(scenario, device))
    check_replay(scenario)
    if init_from:
        read_config(init_from)
    guard_of(scenario)
    windows(scenario, Seat(0, world, torch.device("cpu")))
    with loader_of(scenario, layout) as loader:
        check_resume(scenario, loader)
    take_folder(scenario).close()


def prepare(scenario: Scenario, layout_text: str | None, seat: Seat, init_from: str | None = None) -> Run:
    """Model, data, optimizer, log and checkpoints of this rank, resumed where there is something to resume. ValueError in one line
    for what can't run. Collective."""
    train = scenario.train
    layout = layout_of(scenario, layout_text, seat.world)
    make_deterministic(train.deterministic)
    schedule, guard = schedule_of(scenario), guard_of(scenario)
    check_replay(scenario)
    profile, spans = windows(scenario, seat)
    checkpoints = Checkpointer(checkpoint_folder(scenario), keep=train.checkpoint.keep, asynchronous=train.checkpoint.asynchronous)
    ranks = checkpoints.ranks
    job = make_job(scenario, layout, seat.device)
    if init_from:
        agreed(ranks, lambda: start_from(job, init_from))
    dp = job.mesh["dp"]
    loader = agreed(ranks, lambda: loader_of(scenario, layout, dp.rank, seat.device.type == "cuda"))
    agreed(ranks, lambda: check_resume(scenario, loader) if seat.rank == 0 else None)
    lock = agreed(ranks, lambda: take_folder(scenario) if seat.rank == 0 else None)
    optimizer = make_optimizer(job)
    restored = state.resume(checkpoints, train.checkpoint.resume, job, optimizer, loader, guard)
    done = restored.step if restored else 0
    folder = run_folder(scenario)
    manifest = agreed(ranks, lambda: Manifest(folder) if seat.rank == 0 else None)
    log = agreed(ranks, lambda: RunLog(folder, total=train.steps, every=train.log.every, tensorboard=train.log.tensorboard, from_step=done, rank=seat.rank))
    checkpoints.log = log.warn
    for note in restored.notes if restored else ():
        log.note(note)
    return Run(scenario, job, seat, folder, loader, optimizer, schedule, guard, log, checkpoints, peaks(seat.device_name, layout.precision), spans,
               profile, _recorder(scenario, job, seat), manifest, lock=lock, done=done, resumed=done)


def agreed(ranks: Ranks, fn: Callable[[], T]) -> T:
    """What ``fn`` returned on this rank; ValueError on all where it met bad input on any, in the words of the first. Collective."""
    value, said = None, ""
    try:
        value = fn()
    except OSError as error:
        said = f"{error.filename}: {error.strerror}" if error.filename and error.strerror else str(error)
    except ValueError as error:
        said = str(error)
    if first := next(filter(None, ranks.gather(said)), None):
        raise ValueError(first)
    return value


# --- where a run lies -----------------------------------------------------------------------------------------------------------


def run_folder(scenario: Scenario) -> Path:
    """Where the run's files go. ValueError for a name or folder that would lie elsewhere than it says."""
    folder, name = scenario.train.log.folder, scenario.name
    if "{name}" in folder and (not name.isprintable() or "/" in name or name.startswith(".")):
        raise ValueError(f"name {name[:60]!r}: it becomes part of the run's folder ({folder}); leave out slashes, leading dots and control characters")
    if not folder.isprintable() or Path(folder.replace("{name}", name)).resolve() == Path("/"):
        raise ValueError(f"train.log.folder {folder[:60]!r}: no folder for a run")
    return Path(folder.replace("{name}", name))


def checkpoint_folder(scenario: Scenario) -> Path:
    """Where its checkpoints go."""
    folder = scenario.train.checkpoint.folder
    return Path(folder.replace("{name}", scenario.name)) if folder else run_folder(scenario) / "checkpoints"


def take_folder(scenario: Scenario) -> IO[str]:
    """The run's folder, made where it isn't there, for this process alone until what is returned is closed. ValueError where
    another run writes in it, and goes on doing so for LOCK_S; OSError where it can't be made or written."""
    folder = run_folder(scenario)
    record = [Path(scenario.train.moe.record)] if scenario.train.moe.record else []
    for there in (*record, checkpoint_folder(scenario), folder):
        there.mkdir(parents=True, exist_ok=True)
    lock, deadline = (folder / LOCK).open("w"), time.monotonic() + LOCK_S
    while not _locked(lock):
        if time.monotonic() > deadline:
            lock.close()
            raise ValueError(f"{folder}: another process trains in this folder; end it, or choose another with --set train.log.folder=...")
        time.sleep(0.1)
    return lock


def _locked(file: IO[str]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass  # a file system without locks
    return True


# --- what a run is made of ------------------------------------------------------------------------------------------------------


def start_from(job: Job, folder: str) -> None:
    """The weights of a Hugging Face folder in place of the seed's, each rank taking its shard."""
    from moetrain.export.cli import initial_tensors
    from moetrain.export.constants import Constants

    n = job.scenario.train.network
    held: dict[str, list[torch.Tensor]] = {}
    for part in job.parts:
        for name, tensor in (*part.named_parameters(), *part.named_buffers()):
            held.setdefault(part.logical_name(name), []).append(tensor)  # a rank may hold two copies of a tied embedding
    for name, tensor in initial_tensors(folder, job.scenario.model, Constants(n.rope_theta, n.norm_eps, n.embed_scale)):
        for mine in held.get(name, ()):
            assign(mine, tensor)


def schedule_of(scenario: Scenario) -> Schedule:
    """The learning rate's schedule; a run shorter than its warm-up and decay is cut from the warm-up on."""
    o, steps = scenario.train.optimizer, scenario.train.steps
    warmup = min(o.warmup_steps, steps)
    return Schedule(steps, o.schedule, warmup, min(o.decay_steps, steps - warmup), o.min_lr_ratio)


def guard_of(scenario: Scenario) -> SkipGuard:
    """What tells steps to skip. ValueError for settings out of range."""
    skip = scenario.train.optimizer.skip
    return SkipGuard(skip.window, skip.sigma if skip.enabled else None, skip.max_consecutive)


def seed_of(scenario: Scenario) -> int:
    """What weights and data are drawn from: the run's seed, or the scenario's."""
    return scenario.seed if scenario.train.seed is None else scenario.train.seed


def loader_of(scenario: Scenario, layout: Layout, dp_rank: int = 0, pin: bool = False) -> AnyLoader:
    """Batches of one data-parallel rank's share. ValueError for data that isn't there or doesn't fit."""
    w = scenario.workload
    return open_loader(scenario.train.data, vocab_size=scenario.model.vocab_size, seq_len=w.seq_len, dp_rank=dp_rank, dp_size=layout.dp,
                       global_batch_sequences=w.global_batch_tokens // w.seq_len, micro_batch=layout.mb, seed=seed_of(scenario), pin=pin)


def check_resume(scenario: Scenario, loader: AnyLoader) -> None:
    """ValueError unless the checkpoint to resume from, where there is one, is of this run's model and data, or where the one that is
    named isn't there. Reads its state.json only."""
    where = scenario.train.checkpoint.resume
    if where == "never":
        return
    root = checkpoint_folder(scenario) if where == "auto" else Path(where)
    found = next(filter(folders.whole, folders.newest_first(root)), None if where == "auto" else root)
    if found is not None:
        compare(folders.read_state(found), {"identity": state.identity(scenario, loader)})


def check_replay(scenario: Scenario) -> None:
    """ValueError unless the routing record, if one is replayed, fits the model."""
    model, replay = scenario.model, scenario.train.moe.replay
    if replay is None:
        return
    record = forced.Record.read(replay)
    for layer, kind in enumerate(model.layer_kinds()):
        if kind == "moe":
            forced.choose("replay", torch.zeros(1, dtype=torch.long), layer, model.num_experts, model.top_k, record)


def windows(scenario: Scenario, seat: Seat) -> tuple[ProfileWindow | None, SpanRecorder]:
    """The steps that are profiled, and those whose spans are recorded. ValueError for a window that is none."""
    folder, log = run_folder(scenario), scenario.train.log
    profile = ProfileWindow(folder / "profile", seat.rank, *log.profile) if log.profile else None
    return profile, SpanRecorder(folder / "spans", seat.rank, *(log.spans or (0, 0)), seat.device)


def _recorder(scenario: Scenario, job: Job, seat: Seat) -> RoutingRecorder | None:
    """Histograms of the layers that this rank's stage holds, written by the first rank of the stage (counts are summed over it)."""
    layers = [layer.index for part in job.parts for layer in part.layers.values() if layer.moe is not None]
    if scenario.train.moe.record is None or not layers or job.mesh["data"].rank:
        return None
    return RoutingRecorder(scenario.train.moe.record, seat.rank, layers, scenario.model.num_experts, scenario.model.top_k)
