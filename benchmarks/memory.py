"""Does a rank hold what the planner says, category by category, over layouts and worlds that no machine here could run?

    python benchmarks/memory.py [--only TEXT] [--json F] [--again]
    python benchmarks/memory.py --os [--ranks 2] [--json F]

Each point builds the real trainer's rank on fake tensors and follows a step under torch's FSDPMemTracker (moetrain/peak.py); beside it stand
the planner's categories. Points that the result file has are not run again. ``--os`` runs gloo ranks for real and holds the operating
system's high-water mark against both (malloc settings as in https://man7.org/linux/man-pages/man3/mallopt.3.html, so that what is freed
goes back).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "memory.json"
SMALL = """
name: small
model: {name: small, num_layers: 4, hidden_size: 256, vocab_size: 4096, num_heads: 8, num_kv_heads: 4, head_dim: 32, intermediate_size: 768,
  num_experts: 8, top_k: 2, moe_intermediate_size: 256, num_shared_experts: 1, num_leading_dense_layers: 1, qk_norm: per_head}
cluster: hgx_b300
stack: moetrain
workload: {seq_len: 1024, global_batch_tokens: 65536, routing: {kind: balanced}}
train: {dtype: bfloat16}
"""
SEED = "olmo_core3_new"
ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}


@dataclass(frozen=True)
class Point:
    """A layout of a model, and the pipeline rank that is looked at."""

    layout: str
    pipeline_rank: int = 0
    kernels: str = "gpu"
    model: str = "small"
    sets: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return " ".join([self.model, self.kernels, self.layout, f"stage {self.pipeline_rank}", *self.sets])


QUICK = [Point("dp8 ep4 zero1 mb1"), Point("dp8 ep8 zero3 mb1"), Point("pp2 dp2 ep2 zero1 mb1", 1), Point("dp4 tp2 ep4 zero1 mb1", kernels="cpu")]
SEED_SETS = ("model.num_experts=128",)
GRID = [
    *QUICK,
    Point("dp8 ep4 zero1 mb1", kernels="cpu"), Point("dp8 zero0 mb1"), Point("dp8 ep2 zero1 mb2"), Point("dp8 ep4 zero2 mb1"),
    Point("dp8 ep4 zero3 noreshard mb1"), Point("dp8 ep4 zero3 mb1 ov:fsdp2"), Point("dp8 rep2 ep2 zero1 mb1"), Point("dp8 rep4 ep2 zero3 mb1"),
    Point("dp4 tp2 ep4 zero1 mb1"), Point("dp2 tp4 ep8 zero3 mb2"), Point("dp2 cp2 ep4 zero1 mb1"), Point("dp2 cp2 tp2 ep2 zero2 mb1"),
    Point("pp2 dp2 ep2 zero1 mb1"), Point("pp2 dp2 ep2 zero1 mb1", kernels="cpu"), Point("pp2 vpp2 dp2 ep2 zero1 mb1 interleaved"),
    Point("pp2 vpp2 dp2 zero1 mb1 zbv"), Point("dp8 ep8 zero1 mb4"), Point("dp8 ep4 zero1 mb1 syncfree", sets=("workload.routing.capacity_factor=1.0",)),
    Point("dp8 ep4 zero1 mb1 rc:norm+moe_act"), Point("dp8 ep4 zero1 mb1 rc:experts"), Point("dp8 ep4 zero1 mb1 rc:full"),
    Point("dp8 ep4 zero1 mb1 rc:qkv+core_attn"), Point("dp64 ep8 zero1 mb1", sets=("workload.global_batch_tokens=65536",)),
    Point("dp8 ep8 zero1 mb1", sets=("model.num_experts=32", "model.top_k=4")), Point("dp8 ep4 zero1 mb1", sets=("model.num_shared_experts=0",)),
    Point("dp8 zero1 mb1 ep4", sets=("workload.global_batch_tokens=8192",)), Point("dp4 ep4 zero1 mb1 grad:bf16 opt:bf16"),
    Point("dp8 ep8 zero1 mb1", model="seed", sets=SEED_SETS), Point("dp64 ep8 zero1 mb1", model="seed", sets=SEED_SETS),
    Point("pp2 dp256 ep64 zero1 mb1", model="seed", sets=SEED_SETS), Point("dp8 ep8 zero3 mb1", model="seed", sets=SEED_SETS),
]


def scenario_of(point: Point) -> Any:
    """The scenario that both sides read."""
    from moesim.load import load_scenario, parse_scenario

    if point.model == "seed":
        return load_scenario(SEED, ["stack=moetrain", "train.dtype=bfloat16", *point.sets])
    return parse_scenario(SMALL, list(point.sets))


def run(point: Point) -> dict[str, Any]:
    """One point: bytes of both sides, and errors of what the planner says."""
    from moesim.layout import parse_layout
    from moetrain.build import layout_of
    from moetrain.peak import compared

    scenario = scenario_of(point)
    layout = layout_of(scenario, point.layout, parse_layout(point.layout).world)
    begin = time.perf_counter()
    found = compared(scenario, layout, point.pipeline_rank * (layout.world // layout.pp), point.kernels)
    return found | {"model": point.model, "sets": list(point.sets), "seconds": round(time.perf_counter() - begin, 1)}


def line(name: str, found: dict[str, Any]) -> str:
    mib = lambda side: " ".join(f"{found[side][n] / 2**20:10,.1f}" for n in ("optimizer", "gathered", "gradients", "moving units", "activations"))  # noqa: E731
    return (f"{name}\n  followed {mib('followed')} = {found['total']['followed'] / 2**20:10,.1f} MiB\n  planned {mib('planned')} = "
            f"{found['total']['planned'] / 2**20:10,.1f} MiB   activations {found['activations_error']:+.1%}, total {found['total']['error']:+.1%}")


def summary(points: dict[str, Any]) -> str:
    errors = [p["activations_error"] for p in points.values()]
    totals = [p["total"]["error"] for p in points.values()]
    inside = sum(abs(e) <= 0.05 for e in errors)
    return (f"{len(points)} points: activations median {statistics.median(map(abs, errors)):.1%}, {inside} within 5%, from {min(errors):+.1%} to "
            f"{max(errors):+.1%}; totals median {statistics.median(map(abs, totals)):.1%}, from {min(totals):+.1%} to {max(totals):+.1%}")


def stamp() -> dict[str, str]:
    import torch

    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout.strip()
    return {"commit": commit or "unknown", "torch": str(torch.__version__), "date": time.strftime("%Y-%m-%d")}


def keep(path: Path, found: dict[str, Any]) -> None:
    from moesim.files import write_atomically

    write_atomically(path, json.dumps(found, indent=1) + "\n")


def grid(options: argparse.Namespace) -> None:
    """Every point, one after the other, each kept as soon as it is there."""
    found = json.loads(options.json.read_text()) if options.json.exists() else {}
    points = found.setdefault("points", {})
    wanted = [p for p in GRID if options.only in p.name and (options.again or p.name not in points)]
    for i, point in enumerate(wanted):
        points[point.name] = run(point) | {"stamp": stamp()}
        print(f"[{i + 1}/{len(wanted)}] {line(point.name, points[point.name])}", flush=True)
        found["points"] = {p.name: points[p.name] for p in GRID if p.name in points}
        keep(options.json, found)
    if points:
        print(summary(points))


# --- once against the operating system ----------------------------------------------------------------------------------------------


def os_rank(rank: int, world: int, layout_text: str) -> dict[str, int]:
    """One rank of a real run: what is held before a step, and the most during it, beyond the process's base."""
    import gc

    import torch

    from moesim.layout import parse_layout
    from moetrain import step
    from moetrain.build import layout_of, make_job, make_optimizer
    from moetrain.data.synthetic import SyntheticLoader
    from moetrain.observe.memory import start_peak, static_bytes, status_bytes
    from moetrain.peak import _Tracker

    torch.set_num_threads(1)
    scenario = os_scenario()
    layout = layout_of(scenario, layout_text, parse_layout(layout_text).world)
    job = make_job(scenario, layout)
    optimizer = make_optimizer(job)
    rows = scenario.workload.global_batch_tokens // scenario.workload.seq_len // layout.dp
    loader = SyntheticLoader(scenario.model.vocab_size, scenario.workload.seq_len, rows, micro_batch=layout.mb, prefetch=0)
    most = []
    for i in range(3):
        microbatches = step.cut(loader.batch(i), job, i)
        gc.collect()
        held, base = static_bytes(job.parts, [optimizer]).total, start_peak("cpu")
        step.forward_backward(job, microbatches)
        most.append(status_bytes("VmHWM") - base.resident)
        job.statistics.collect(job.mesh["data"])
        optimizer.zero_grad(set_to_none=True)
    tracker = _Tracker(job.parts, optimizer, None)
    with tracker:
        step.forward_backward(job, step.cut(loader.batch(3), job, 3))
        resting = tracker.by_category()
    return {"held_before": held, "grown": max(most[1:]), "tracked_growth": tracker.most - resting["masters"] - resting["moments"]}


def os_scenario() -> Any:
    from moesim.load import parse_scenario

    return parse_scenario(SMALL, ["train.moe.routing=balanced", "train.moe.backend=grouped_mm", "model.hidden_size=512",
                                                                   "model.head_dim=64", "workload.global_batch_tokens=8192"])


def os_check(options: argparse.Namespace) -> None:
    """Tracker, operating system and planner side by side, in a process whose allocator gives back."""
    if any(os.environ.get(name) != value for name, value in ALLOCATOR.items()):
        raise SystemExit(subprocess.run([sys.executable, __file__, *sys.argv[1:]], env=os.environ | ALLOCATOR | {"OMP_NUM_THREADS": "1"}).returncode)
    from moesim.layout import parse_layout
    from moetrain.build import layout_of
    from moesim.rank_memory import planned
    from moetrain.peak import measure
    from moetrain.testing import run_ranks

    text = options.layout or f"dp{options.ranks} ep2 zero1 mb1"
    scenario = os_scenario()
    layout = layout_of(scenario, text, parse_layout(text).world)
    ranks = run_ranks(os_rank, layout.world, text)
    peak = measure(scenario, layout, 0, "cpu")
    ours = planned(scenario, layout, 0, "cpu")
    at_rest = peak.categories["masters"] + peak.categories["moments"]
    row = {"layout": str(layout), "ranks": ranks, "tracked_growth": peak.total - at_rest, "tracked": peak.categories,
           "planned_growth": sum(ours.values()) - ours["optimizer"], "planned": ours, "stamp": stamp()}
    seen = [r["grown"] for r in ranks]
    print(f"{layout}: growth of a step beyond masters and moments\n  operating system {min(seen) / 2**20:8.1f} to {max(seen) / 2**20:8.1f} MiB over {len(seen)} ranks\n"
          f"  tracker, here    {ranks[0]['tracked_growth'] / 2**20:8.1f} MiB (torch's tracker in the same real run)\n"
          f"  tracker, fake    {row['tracked_growth'] / 2**20:8.1f} MiB ({row['tracked_growth'] / max(seen) - 1:+.1%})\n"
          f"  planner          {row['planned_growth'] / 2**20:8.1f} MiB ({row['planned_growth'] / max(seen) - 1:+.1%})")
    found = json.loads(options.json.read_text()) if options.json.exists() else {}
    found.setdefault("operating_system", {})[str(layout)] = row
    keep(options.json, found)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--only", default="", help="points whose name contains this")
    arguments.add_argument("--again", action="store_true", help="also those that the file has")
    arguments.add_argument("--json", type=Path, default=RESULTS)
    arguments.add_argument("--os", action="store_true", help="against the operating system's high-water mark")
    arguments.add_argument("--ranks", type=int, default=2)
    arguments.add_argument("--layout", default=None)
    options = arguments.parse_args()
    os_check(options) if options.os else grid(options)


if __name__ == "__main__":
    main()
