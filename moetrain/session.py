"""What surrounds a training loop: a look at the machines before it, the record it leaves, the watchdog beside it?"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch.distributed as dist

from moesim.spec import Scenario
from moetrain.distributed import Seat
from moetrain.observe import provenance
from moetrain.observe.metrics import FILE, read_steps
from moetrain.observe.module_spans import watch
from moetrain.observe.preflight import preflight
from moetrain.observe.throughput import Contract, measure
from moetrain.prepare import prepare, seed_of
from moetrain.train import Run, train
from moetrain.watchdog import Watchdog


def run_training(scenario: Scenario, layout_text: str | None, seat: Seat, init_from: str | None = None) -> int:
    """A whole run of this rank; its exit code. ValueError in one line for what can't start; RuntimeError with this rank's number for
    what fails later."""
    run = prepare(scenario, layout_text, seat, init_from)
    try:
        with guard(run) or nullcontext():
            before(run)
            code = train(run)
            speed(run)
            return code
    except (OSError, ValueError) as error:  # input was good: this is a fault of the program or the machine
        raise RuntimeError(f"rank {seat.rank} failed with {run.done} steps done: {error}") from error
    finally:
        run.close()


def guard(run: Run) -> Watchdog | None:
    """Watches this rank's collectives and steps, if the run wants that."""
    limit = run.scenario.train.watchdog_s
    if not limit:
        return None
    comms = run.job.mesh.comms.values()
    members = {c.name: dist.get_process_group_ranks(c.pg) for c in comms if c.pg is not None}
    watchdog = Watchdog(run.folder / "hangs", limit, run.seat.rank, run.seat.world, members)
    run.job.mesh.log.note = watchdog.note
    run.watchdog = watchdog
    return watchdog


def before(run: Run) -> None:
    """Preflight and the manifest's first record; both are collective or rank 0's alone."""
    if run.scenario.train.log.spans:
        watch_spans(run)
    with run.paused("preflight"):
        environment = _preflight(run)
    if run.layout.dispatcher == "sync_free" and run.scenario.workload.routing.capacity_factor is not None:
        run.log.note("capacity: syncfree limits what each rank sends to each other one, whatever workload.routing.capacity_scope says")
    if run.manifest is None:
        return
    scenario = run.scenario
    run.manifest.begin(config=scenario.model_dump(mode="json"), code=provenance.code_identity(), data=_data(run), environment=environment,
                       seeds={"seed": seed_of(scenario)},
                       layout=str(run.layout), world=run.seat.world, from_step=run.done)


def watch_spans(run: Run) -> None:
    """Roles, collectives and actions are recorded in the steps that the run names."""
    watch(run.job.parts, run.spans)
    run.job.mesh.log.spans = run.spans


def speed(run: Run) -> None:
    """The run's throughput by the contract, where enough steps count for one."""
    if run.seat.rank:
        return
    warmup = max(1, run.scenario.train.log.warmup)
    try:
        found = measure(read_steps(run.folder / FILE), Contract(warmup, 10_000, 20), config=run.scenario.hash, layout=str(run.layout),
                        device=run.seat.device_name)
    except ValueError:
        return
    run.log.note(f"throughput: {found}")


def _preflight(run: Run) -> dict[str, Any]:
    if run.scenario.train.log.preflight:
        needed = 3.0 * sum(p.numel() * p.element_size() for _, p in run.named())
        found = preflight(run.folder, run.job.device, checkpoints=run.checkpoints.folder.parent, needed_bytes=needed)
        run.log.event("preflight", seconds=found.seconds, warnings=list(found.warnings))
        for warning in found.warnings:
            run.log.warn(warning)
    return provenance.environment([run.seat.device_name] * run.seat.world)


def _data(run: Run) -> dict[str, Any]:
    """Fingerprint of the stream, and every shard's hash, as the manifest's verification reads them."""
    data = run.scenario.train.data
    folders = [(source.path, source.weight) for source in data.sources]
    folders += [(data.validation.path, 0.0)] if data.validation.path else []
    return provenance.data_identity(folders, extra=run.loader.fingerprint())
