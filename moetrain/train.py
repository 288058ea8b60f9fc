"""How does a run go from its first step to its last, through validation, checkpoints, skips, signals and restarts?

Every rank runs this. What a step decides (skip, stop) follows from numbers that were reduced over all ranks, so all decide alike.
"""

from __future__ import annotations

import signal
import time
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch

from moesim.layout import Layout
from moesim.spec import Scenario
from moesim.timeline import EPILOGUE
from moetrain import sharding, state, step
from moetrain.balance import update_bias
from moetrain.build import Job
from moetrain.checkpoint import Checkpointer, CheckpointError
from moetrain.collectives import all_reduce_
from moetrain.data.stream import AnyLoader
from moetrain.distributed import Seat
from moetrain.observe import balance as balances
from moetrain.observe.flops import step_flops, utilisation
from moetrain.observe.log import RunLog
from moetrain.observe.manifest import Manifest
from moetrain.observe.memory import ledger, start_peak, static_bytes
from moetrain.observe.metrics import StepRecord
from moetrain.observe.peaks import Peaks
from moetrain.observe.profiler import ProfileWindow
from moetrain.observe.routing_log import RoutingRecorder
from moetrain.observe.trace import SpanRecorder
from moetrain.optim import Schedule, SkipGuard, clip_, grad_norm, set_lr, stage_copies
from moetrain.statistics import LayerLoad
from moetrain.watchdog import Watchdog

SIGNALS = (signal.SIGTERM, signal.SIGINT)
NOT_KEPT = 1
"""Exit code of a run whose last checkpoint could not be written."""
LAST_SAVE_S = 60.0
"""What a save in flight is given when its run fails."""

@dataclass
class Run:
    """All that one rank's loop needs. ``done`` steps have been taken, ``resumed`` of them by an earlier process. ``told``: the signal
    that this rank was sent; ``stop``: the one that ends the run, known to all ranks after the same step."""

    scenario: Scenario
    job: Job
    seat: Seat
    folder: Path
    loader: AnyLoader
    optimizer: Any
    schedule: Schedule
    guard: SkipGuard
    log: RunLog
    checkpoints: Checkpointer
    peaks: Peaks
    spans: SpanRecorder
    profile: ProfileWindow | None
    recorder: RoutingRecorder | None
    manifest: Manifest | None = None
    watchdog: Watchdog | None = None
    lock: IO[str] | None = None
    recorded: dict[int, Path] = field(default_factory=dict)
    done: int = 0
    resumed: int = 0
    told: int = 0
    stop: int = 0
    losses: dict[str, float] = field(default_factory=dict)

    @property
    def layout(self) -> Layout:
        return self.job.layout

    def paused(self, reason: str):
        """Within it the watchdog lets this rank take its time."""
        return nullcontext() if self.watchdog is None else self.watchdog.paused(reason)

    def named(self):
        return sharding.named_parameters(self.job.parts)

    def close(self) -> None:
        """Everything this rank holds open; a checkpoint in the writing is given time to be one."""
        self.checkpoints.leave(LAST_SAVE_S)
        for part in (self.spans, self.profile, self.log, self.loader, self.lock):
            if part is not None:
                part.close()


# --- the loop -------------------------------------------------------------------------------------------------------------------


def train(run: Run) -> int:
    """Steps until the run is done or told to stop; the exit code, the same on every rank."""
    steps = run.scenario.train.steps

    def on_signal(number: int, frame: object) -> None:
        run.told = number

    before = {s: signal.signal(s, on_signal) for s in SIGNALS}
    try:
        if run.done >= steps:
            run.log.note(f"nothing to do: {run.done} of {steps} steps are done; --set train.steps=N with a larger N goes on")
        _loop(run)
        kept = finish(run)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return NOT_KEPT if not kept else 128 + run.stop if run.stop else 0


def _loop(run: Run) -> None:
    every, validation = run.scenario.train.checkpoint.every, run.scenario.train.data.validation
    while run.done < run.scenario.train.steps and not run.stop:
        also = []
        number = run.done + 1
        if every and number % every == 0 and number < run.scenario.train.steps:
            also.append("checkpoint")
        if validation.path and number % validation.every == 0:
            also.append("validation")
        one_step(run, also)
        if "validation" in also and not run.stop:
            validate(run)
        if "checkpoint" in also and not run.stop:
            save(run)
        note_published(run)


def finish(run: Run) -> bool:
    """The last checkpoint, and everything on disk; whether the steps taken are kept in a checkpoint."""
    moved = run.done > run.resumed
    with run.paused("the last checkpoint"):
        if moved:
            save(run)
        try:
            run.checkpoints.wait()
        except CheckpointError as error:
            run.log.warn(str(error))
    note_published(run)
    if run.recorder is not None:
        run.recorder.flush()
    run.log.event("end", step=run.done, **run.losses)
    if run.manifest is not None and moved and run.done == run.scenario.train.steps:
        run.manifest.result(run.done, run.losses)
    return not moved or (run.checkpoints.last is not None and run.checkpoints.last.step == run.done)


def one_step(run: Run, also: list[str]) -> None:
    """One step of the optimizer, or its skip."""
    number = run.done + 1
    begin = time.perf_counter()
    run.spans.begin_step(number)
    if run.watchdog is not None:
        run.watchdog.step(number)
    base = start_peak(run.job.device)
    held = static_bytes(run.job.parts, [run.optimizer]).total
    if run.profile is not None:
        run.profile.begin_step(number)
    batch = run.loader.batch(run.done).to(run.job.device)
    microbatches = step.cut(batch, run.job, run.done, run.loader.first_sample(run.done))
    losses = step.forward_backward(run.job, microbatches)
    run.spans.entry = EPILOGUE
    # Signals travel with the loss: whoever was sent one, all ranks stop after the same step.
    told = torch.tensor([float(run.told == s) for s in SIGNALS], dtype=losses.dtype, device=losses.device)
    cross, z, *told = step.reduce_loss(run.job, torch.cat([losses, told])).tolist()
    run.stop = next((s for s, ranks in zip(SIGNALS, told) if ranks), 0)
    loads = run.job.statistics.collect(run.job.mesh["data"])
    norm, lr, skipped = update(run, number, cross)
    balance_biases(run, loads, skipped)
    record = measure(run, number, loads, base, held, {"cross": cross, "z": z, "norm": norm, "lr": lr}, skipped, also, begin)
    run.spans.end_step()
    if run.profile is not None and (file := run.profile.end_step(number)):
        run.log.event("profile", step=number, file=str(file))
    run.done = number
    run.log.step(record, {i: load.requested.numpy() for i, load in loads.items()})


def update(run: Run, number: int, loss: float) -> tuple[float, float, str | None]:
    """(gradient norm, learning rate, why the step was skipped or None). The update itself, unless it is skipped."""
    mesh, train = run.job.mesh, run.scenario.train.optimizer
    data = run.layout.world // run.layout.pp
    with run.spans.span("grad_norm", "grad_norm"):
        total = grad_norm([sharding.once(run.job.parts)], lambda t: all_reduce_(t, mesh["world"], "grad_norm", phase="step"), stage_copies(data),
                          run.job.device)
    norm = float(total)
    lr = train.lr * run.schedule.factor(number - 1)
    verdict = run.guard.judge(number, loss, norm)
    with run.spans.span("optimizer", "optimizer"):
        if not verdict.skip:
            if train.clip:
                clip_([run.named()], total, train.clip)
            set_lr(run.optimizer, lr)
            run.optimizer.step()
        run.optimizer.zero_grad(set_to_none=True)
    sharding.gather_early(run.job.parts, run.layout)
    if verdict.skip:
        run.log.event("skip", step=number, reason=verdict.reason)
    return norm, lr, verdict.reason or None


def balance_biases(run: Run, loads: dict[int, LayerLoad], skipped: str | None) -> None:
    """Loss-free balancing: the selection biases move by the step's counts; not in a step that is skipped."""
    rate = run.scenario.train.moe.bias_rate
    if not rate or skipped:
        return
    for part in run.job.parts:
        for layer in part.layers.values():
            if layer.moe is not None and layer.index in loads:
                bias = layer.moe.router.balance_bias
                update_bias(bias, loads[layer.index].requested.to(bias.device), rate)


def measure(run: Run, number: int, loads: dict[int, LayerLoad], base, held: int, values: dict[str, float], skipped: str | None, also: list[str],
            begin: float) -> StepRecord:
    """The step's record: the same numbers on every rank but for what only rank 0 writes."""
    job, scenario, workload = run.job, run.scenario, run.scenario.workload
    if job.device.type == "cuda":
        torch.cuda.synchronize()
    seconds = time.perf_counter() - begin
    run.spans.finish()
    memory = ledger(static_bytes(job.parts, [run.optimizer]), job.device, base, run.seat.rank, held)
    if run.recorder is not None:
        for i, load in loads.items():
            run.recorder.add(i, load.requested.numpy(), load.kept.numpy())
        run.recorder.end_step(number)
    loads = state.all_layers(job, loads)
    losses = {"balance": sum(load.balance_loss for load in loads.values()), "router_z": sum(load.z_loss for load in loads.values()), "z": values["z"]}
    run.losses = {"loss": values["cross"]}
    dropped = sum(load.dropped for load in loads.values())
    flops = step_flops(scenario.model, tokens=workload.global_batch_tokens, seq_len=workload.seq_len, recompute=run.layout.recompute, dropped_rows=dropped)
    if run.profile is not None and run.profile.profiled(number):
        also = [*also, "profile"]
    return StepRecord(
        number, seconds, workload.global_batch_tokens, run.seat.world, values["cross"], {k: v for k, v in losses.items() if v}, values["norm"], values["lr"],
        skipped, *_balance(run, loads), flops, utilisation(flops, seconds, run.seat.world, run.peaks), memory.fields(), run.loader.data_wait_s,
        tuple(also), time=time.time())


def _balance(run: Run, loads: dict[int, LayerLoad]) -> tuple[Any, dict[str, dict[str, float]]]:
    """(balance of the step, figures by layer)."""
    if not loads:
        return None, {}
    routing = run.scenario.workload.routing
    requested, kept = (np.stack([getattr(load, name).numpy() for load in loads.values()]) for name in ("requested", "kept"))
    ratio = np.array([load.busiest_rank / max(load.mean_rank, 1e-9) for load in loads.values()])
    mode = {"routing": run.scenario.train.moe.routing, "capacity_factor": routing.capacity_factor, "capacity_scope": routing.capacity_scope}
    figures = balances.layer_figures(requested, kept, run.layout.ep)
    by_layer = {str(i): {name: float(values[row]) for name, values in figures.items()} for row, i in enumerate(loads)}
    return balances.summarise(requested, kept, run.layout.ep, ratio, **mode), by_layer


# --- between steps --------------------------------------------------------------------------------------------------------------


def save(run: Run) -> None:
    """A checkpoint of the steps done. Its failure is a warning: training goes on, and the last good one stays."""
    try:
        with run.paused("checkpoint"):
            held = run.checkpoints.save(run.done, run.job.parts, run.optimizer, state.extra(run.job, run.loader, run.guard, run.done))
    except CheckpointError as error:
        run.log.warn(str(error))
        return
    run.log.note(f"checkpoint of step {run.done} held training up for {held:.3f} s")


def note_published(run: Run) -> None:
    """What the background has finished, in the log and the manifest; a failure is a warning."""
    failure = run.checkpoints.poll()
    if failure:
        run.log.warn(failure)
    last = run.checkpoints.last
    if last is None or last.step in run.recorded:
        return
    run.recorded[last.step] = last.path
    run.log.event("checkpoint", step=last.step, seconds=last.seconds, bytes=last.bytes)
    if run.manifest is not None:
        try:
            run.manifest.checkpoint(last.step, last.path)
        except OSError as error:
            run.log.warn(f"no record in the manifest of the checkpoint of step {last.step}: {error}")
        for gone in [number for number, path in run.recorded.items() if not path.exists()]:
            run.manifest.removed(gone)
            del run.recorded[gone]


def validate(run: Run) -> float:
    """Mean cross entropy of the validation set, logged."""
    begin = time.perf_counter()
    with run.paused("validation"):
        loss = step.validation_loss(run.job, run.loader, run.scenario.train.data.validation.sequences)
    run.losses["validation"] = loss
    run.log.event("validation", step=run.done, loss=loss, seconds=time.perf_counter() - begin)
    return loss
