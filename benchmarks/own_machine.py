"""How long do real steps take on the machine at hand, over layouts and models, and how near does the planner come?

    python benchmarks/own_machine.py ops --out FOLDER          # ops.jsonl of every case, for `moetrain bench`
    python benchmarks/own_machine.py run --out FOLDER [--launches 3] [--only TEXT] [--spans]
    python benchmarks/own_machine.py list

Cases stand in benchmarks/own_machine.yaml. A launch forks one process a rank, each bound to a core in turn, and trains the case for a
few steps through the trainer's own loop; the longest rank's seconds of a step count. Every launch is one line of FOLDER/steps.jsonl
(`moesim.measurement`), appended when it has ended, so a run that was stopped goes on where it was. A launch begins when the machine has been
quiet and is repeated, at most twice, when other processes took part of the cores meanwhile. `--spans` also records the spans of a few
steps of every case, apart from what is timed: an anchor's may be fitted, the others are only judged by.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import sys
import tempfile
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml

from moesim.load import load_scenario
from moesim.measurement import Measurement, read_measurements, to_record
from moetrain.bench.machine import stamp, wait_until_quiet
from moetrain.bench.work import Machine
from moetrain.distributed import Seat
from moetrain.kernels import backend
from moetrain.observe import host
from moetrain.observe.jsonl import JsonLines
from moetrain.testing import run_ranks

HERE = Path(__file__).resolve().parent
SCENARIO = "small_moe"
MALLOC = {"MALLOC_MMAP_THRESHOLD_": "1073741824", "MALLOC_TRIM_THRESHOLD_": "4294967296", "MALLOC_TOP_PAD_": "268435456"}
"""Freed memory stays with the process, as under a caching allocator: else each large result pays for its pages anew."""
WARM, STEPS = 3, 10
NOISY, ATTEMPTS = 0.02, 3
"""Share of the cores that others may take during a launch, and how often it is tried."""
SPAN_STEPS = 4


@dataclass(frozen=True)
class Case:
    """One (model, layout): ``sets`` change the scenario; ``skew`` is the exponent of its experts' popularity."""

    series: str
    world: int
    layout: str
    sets: tuple[str, ...]
    skew: float | None = None
    anchor: bool = False

    @property
    def name(self) -> str:
        changes = [s.split(".")[-1] for s in self.sets] + ([f"skew={self.skew:g}"] if self.skew else [])
        return " ".join([f"w{self.world}", self.layout.replace(" ", "-"), *changes])


def cases() -> list[Case]:
    """Those of own_machine.yaml, in its order."""
    found = []
    for series in yaml.safe_load((HERE / "own_machine.yaml").read_text())["series"]:
        for case in series["cases"]:
            sets = (*series.get("set", ()), *case.get("set", ()), f"cluster.gpus_per_node={series['world']}")
            found.append(Case(series["name"], series["world"], case["layout"], sets, case.get("skew"), case.get("anchor", False)))
    return found


# --- uneven routing -----------------------------------------------------------------------------------------------------------


def skewed(case: Case, folder: Path) -> tuple[str, ...]:
    """Changes that route by a popularity of experts that falls as rank^-skew, shuffled by layer: a record for the trainer and its counts for
    the planner, both in ``folder``."""
    from safetensors.numpy import save_file

    scenario = load_scenario(SCENARIO, case.sets)
    model, tokens = scenario.model, scenario.workload.global_batch_tokens
    stem = folder / f"skew-{case.skew:g}-e{model.num_experts}-k{model.top_k}-t{tokens}"
    record, counts = (Path(f"{stem}.{kind}") for kind in ("safetensors", "json"))
    rng, layers, drawn = np.random.default_rng(0), {}, []
    for layer in range(model.num_layers):
        weight = np.log(rng.permutation(np.arange(1, model.num_experts + 1) ** -case.skew))
        chosen = np.argsort(-(weight - np.log(-np.log(rng.random((tokens, model.num_experts))))), axis=1)[:, : model.top_k]
        layers[f"layer.{layer}"] = np.ascontiguousarray(chosen.astype(np.int64))
        drawn.append(np.bincount(chosen.ravel(), minlength=model.num_experts).tolist())
    folder.mkdir(parents=True, exist_ok=True)
    save_file(layers, str(record))
    counts.write_text(json.dumps({"layers": drawn}) + "\n")
    return (f"workload.routing={{kind: histogram, file: {counts}}}", "train.moe.routing=replay", f"train.moe.replay={record}")


def all_sets(case: Case, folder: Path) -> tuple[str, ...]:
    return (*case.sets, *(skewed(case, folder) if case.skew else ()))


# --- one launch ---------------------------------------------------------------------------------------------------------------


def _rank(rank: int, world: int, sets: tuple[str, ...], layout: str, steps: int) -> tuple[list[float], float]:
    """(seconds of each step, processor seconds of this rank) of one process, bound to a core."""
    from moetrain.prepare import prepare
    from moetrain.session import watch_spans
    from moetrain.train import one_step

    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    scenario = load_scenario(SCENARIO, sets)
    run = prepare(scenario, layout, Seat(rank, world, torch.device("cpu")))
    if scenario.train.log.spans:
        watch_spans(run)
    seconds = []
    for _ in range(steps):
        if world > 1:
            torch.distributed.barrier()
        begin = time.perf_counter()
        one_step(run, [])
        seconds.append(time.perf_counter() - begin)
    run.close()
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return seconds, usage.ru_utime + usage.ru_stime


def launch(case: Case, folder: Path, spans: Path | None = None) -> tuple[list[float], float]:
    """(the longest rank's seconds of each counted step, share of the cores that others used)."""
    with tempfile.TemporaryDirectory(dir=folder) as place:
        where = spans or Path(place) / "run"
        steps = WARM + (SPAN_STEPS if spans else STEPS)
        sets = (*all_sets(case, folder), f"train.log.folder={where}", "train.log.every=1000", f"train.steps={steps + 1}")
        sets += (f"train.log.spans=[{WARM + 1}, {steps}]",) if spans else ()
        before = host.busy()
        found = run_ranks(_rank, case.world, sets, case.layout, steps, timeout_s=600.0)
        used = host.used_since(before)
    per_step = np.array([seconds for seconds, _ in found]).max(axis=0)[WARM:]
    machine, own, wall = used or (0.0, 0.0, 1.0)
    return per_step.tolist(), max(0.0, (machine - own) / wall / (os.cpu_count() or 1))


def measured(case: Case, number: int, folder: Path, mark: Any) -> Measurement:
    """One launch, repeated while others disturb it; the quietest counts."""
    tries = []
    for _ in range(ATTEMPTS):
        wait_until_quiet(30.0)
        tries.append(launch(case, folder))
        if tries[-1][1] <= NOISY:
            break
    seconds, foreign = min(tries, key=lambda t: t[1])
    about = {"case": case.name, "series": case.series, "scenario": SCENARIO, "set": list(all_sets(case, folder)), "world": case.world, "anchor": case.anchor,
             "launch": number}
    noisy = (f"others used {foreign:.0%} of the cores",) if foreign > NOISY else ()
    return Measurement(layout=case.layout, step=WARM + 1, parameters=about, seconds=tuple(seconds), windows=(len(seconds),), dtype="bf16",
                       method={"where": "step", "timer": "processor clock", "allocator": dict(MALLOC)}, device=mark.device, software=mark.software,
                       topology={**mark.topology, "world": case.world}, foreign_cpu=round(foreign, 4), noisy=noisy,
                       date=datetime.now(UTC).isoformat(timespec="seconds"))


def run(args: argparse.Namespace) -> None:
    folder = Path(args.out)
    folder.mkdir(parents=True, exist_ok=True)
    cpu = torch.device("cpu")
    mark = stamp(Machine(cpu, "bf16", backend("auto", cpu, torch.bfloat16)))
    steps = folder / "steps.jsonl"
    known = list(read_measurements(steps)) if steps.exists() else []
    done = {(m.parameters["case"], m.parameters["launch"]) for m in known}
    chosen = [c for c in cases() if args.only in c.name or args.only in c.series]
    todo = [(c, n) for n in range(1, args.launches + 1) for c in chosen if (c.name, n) not in done]
    sink, begin = JsonLines(steps), time.monotonic()
    for i, (case, number) in enumerate(todo):
        if time.monotonic() - begin > args.seconds:
            break
        line = measured(case, number, folder, mark)
        sink.write(to_record(line))
        print(f"{i + 1:3d}/{len(todo)}  launch {number}  {case.name:70s} {line.median * 1e3:9.1f} ms  +-{line.spread:5.1%}  others {line.foreign_cpu:.1%}", flush=True)
    sink.close()
    for case in chosen if args.spans else ():
        target = folder / "spans" / case.name.replace(" ", "_").replace("/", "_")
        if not target.exists() and time.monotonic() - begin < args.seconds:
            wait_until_quiet(30.0)
            launch(case, folder, target)
            print(f"spans of {case.name}: {target}", flush=True)


# --- the ops of all cases ----------------------------------------------------------------------------------------------------------


def write_ops(args: argparse.Namespace) -> None:
    """Distinct ops of all cases, a file for each number of ranks that has to measure them."""
    from moesim.load import load_cluster
    from moesim.evaluate import Evaluator
    from moesim.layout import num_microbatches
    from moesim.measurement import op_fields
    from moesim.ops import Collective, Dispatch
    from moesim.space import canonical
    from moesim.step_ops import ANY_CLUSTER, step_ops
    from moetrain.build import layout_of

    folder, found = Path(args.out), {}
    folder.mkdir(parents=True, exist_ok=True)
    for case in cases():
        scenario = load_scenario(SCENARIO, all_sets(case, folder))
        layout = layout_of(scenario, case.layout, case.world)
        known = scenario.model_copy(update={"cluster": load_cluster(ANY_CLUSTER), "profile": None})
        for counts in step_ops(Evaluator(known).program(canonical(layout, num_microbatches(layout, scenario.workload)))):
            for issued, count in counts.items():
                world = case.world if isinstance(issued.op, (Collective, Dispatch)) else 1
                found.setdefault(world, {}).setdefault(issued.op, 0)
                found[world][issued.op] += count
                if isinstance(issued.op, Dispatch):
                    # Priced as the exchange that carries it; the bench times a dispatch with its permutes.
                    moved = Collective("all_to_all", round(issued.op.bytes * issued.op.load), issued.op.group)
                    found[world][moved] = found[world].get(moved, 0) + count
    for world, ops in sorted(found.items()):
        path = folder / f"ops-{world}.jsonl"
        path.write_text("".join(json.dumps(op_fields(op) | {"count": n}) + "\n" for op, n in sorted(ops.items(), key=lambda item: -item[1])))
        print(f"{path}: {len(ops)} ops for {world} processes")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(required=True)
    for name, action in (("run", run), ("ops", write_ops), ("list", lambda _: print("\n".join(c.name for c in cases())))):
        sub = commands.add_parser(name)
        sub.set_defaults(action=action)
        sub.add_argument("--out", default="own_machine", help="folder of what is measured")
    sub = commands.choices["run"]
    sub.add_argument("--launches", type=int, default=3)
    sub.add_argument("--only", default="", help="cases whose name or series contains this")
    sub.add_argument("--seconds", type=float, default=float("inf"), help="begin no launch after so many")
    sub.add_argument("--spans", action="store_true", help="record the spans of a few steps, too")
    args = parser.parse_args()
    if any(os.environ.get(k) != v for k, v in MALLOC.items()) or os.environ.get("OMP_NUM_THREADS") != "1":
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **MALLOC, "OMP_NUM_THREADS": "1"})
    args.action(args)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
