"""How fast are the three evaluators? Prints seconds of one engine play, of paths and draws, and of the screen.

    python benchmarks/engine.py

The programs have the shape of DeepSeek-V3 on 16 pipeline ranks with 64 microbatches: 4 layers a rank, about ten fused runs a layer
and direction, all-to-alls that share the NIC with pipeline sends, take SMs and slow the kernels beside them. Durations are
round numbers: what is measured here is this code, not a GPU.
"""

import time
from dataclasses import replace
from functools import lru_cache, partial

import numpy as np

from moesim.bounds import Durations, screen_structure
from moesim.critical import critical_paths
from moesim.engine import run
from moesim.fuse import fuse
from moesim.paths import step_draws, step_seconds
from moesim.play import play
from moesim.program import COMM, COMPUTE, CoRun, Program, Task, Transfer
from moesim.schedules import SCHEDULES, Pair

NIC = (("nic", 1.0),)
GAMMAS = (CoRun("gemm", "a2a", 0.25), CoRun("attention", "a2a", 0.165))
LAYER = (
    ("norm", "memory"), ("qkv", "gemm"), ("core", "attention"), ("out", "gemm"), ("router", "memory"), ("dispatch", "a2a"),
    ("expert up", "gemm"), ("activation", "memory"), ("expert down", "gemm"), ("combine", "a2a"),
)


def body(num_layers, scale):
    tasks = []
    for name, kind in LAYER * num_layers:
        comm = kind == "a2a"
        seconds = scale * (1e-3 if comm else 2.5e-4)
        deps = (len(tasks) - 1,) if tasks else ()
        tasks.append(Task(name, kind, COMM if comm else COMPUTE, seconds, 5e-6, deps=deps, uses=NIC if comm else (), sms=20 if comm else 0, terms=((name, kind, seconds),)))
    tasks.append(Task("add", "memory", COMPUTE, 1e-4, 5e-6, deps=(len(tasks) - 1,), output=0))
    return (replace(tasks[0], input=0), *tasks[1:])


def interleave(first, second):
    """Both bodies of a pair, task by task in turn."""
    tasks, at = [], ({}, {})
    for k in range(max(len(first), len(second))):
        for j, half in enumerate((first, second)):
            if k < len(half):
                at[j][k] = len(tasks)
                ends = {"input": j if half[k].input >= 0 else -1, "output": j if half[k].output >= 0 else -1}
                tasks.append(replace(half[k], deps=tuple(at[j][dep] for dep in half[k].deps), **ends))
    return tuple(tasks)


def program(name, pp=16, num_microbatches=64, num_chunks=1, num_layers=4):
    schedule = SCHEDULES[name]
    weights = tuple(Task("weights", "gemm", COMPUTE, 2.5e-4, 5e-6) for _ in range(4 * num_layers // num_chunks))
    parts = {letter: body(num_layers // num_chunks, scale) for letter, scale in (("F", 1.0), ("B", 2.0), ("I", 1.0))} | {"W": weights}
    orders, bodies, index = schedule.orders(pp, num_microbatches, num_chunks), {}, []
    for order in orders:
        letters = [tuple(a.letter for a in entry) if isinstance(entry, Pair) else entry.letter for entry in order]
        for key in letters:
            if key not in bodies:
                bodies[key] = fuse(interleave(*(parts[x] for x in key)) if isinstance(key, tuple) else parts[key], GAMMAS)
        index.append(tuple(list(bodies).index(key) for key in letters))
    send = Transfer(3e-4, NIC)
    return Program(orders, schedule.placement(pp, num_chunks), tuple(index), tuple(bodies.values()), send, send, gammas=GAMMAS, num_sms=148)


def varied(base, rng):
    draw = lambda t: replace(t, seconds=t.seconds * rng.uniform(0.9, 1.1), lag_s=-1.0)  # noqa: E731
    return replace(base, bodies=tuple(tuple(map(draw, b)) for b in base.bodies))


def timed(label, work, unit=1, per="s"):
    best = min(_seconds(work) for _ in range(3))
    print(f"{label:<66} {best:8.3f} s" + (f"   {unit / best:12,.0f} {per}" if unit > 1 else ""))


def _seconds(work):
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def engine_and_paths():
    for name, chunks in (("1f1b", 1), ("interleaved", 2), ("zbv", 2), ("dualpipev", 2)):
        base = program(name, num_chunks=chunks)
        num_tasks = sum(len(base.bodies[k]) for row in base.body_index for k in row)
        title = f"{name} 16 ranks x 64 microbatches, {num_tasks:,} tasks"
        timed(f"engine   {title}", lambda: run(base))  # noqa: B023
        timed(f"engine   {title}, spans read", lambda: run(base).spans)  # noqa: B023
        timed(f"path     {title}", lambda: step_seconds([base]))  # noqa: B023
    rng = np.random.default_rng(0)
    base = program("1f1b")
    batch = [varied(base, rng) for _ in range(50)]
    timed("path     50 programs of 1f1b 16 x 64 at once", lambda: step_seconds(batch), 50, "programs/s")
    factors = {kind: rng.lognormal(0.0, 0.1, 1000) for kind in ("gemm", "attention", "memory", "a2a", "host")}
    timed("path     1,000 draws of 1f1b 16 x 64", lambda: step_draws(base, factors), 1000, "draws/s")
    timed("play     1f1b 16 x 64, every task in plain Python", lambda: play(base))


def screen_all(per_structure=1000):
    """A space of about 100,000 layouts: every schedule on 2..16 ranks with 64..256 microbatches."""
    rng, jobs = np.random.default_rng(0), []
    for name, chunks in (("1f1b", 1), ("gpipe", 1), ("interleaved", 2), ("interleaved", 4), ("interleaved_zb", 2), ("zbv", 2), ("dualpipev", 2)):
        for pp in (2, 4, 8, 16):
            structure = lru_cache(partial(_structure, SCHEDULES[name], pp, chunks))
            for num_microbatches in (64, 96, 128, 256):
                path = {x: rng.uniform(0.9, 1.1, (per_structure, pp * chunks)) for x in "FBIW"}
                lanes = {x: np.stack([0.8 * t, 0.3 * t]) for x, t in path.items()}
                jobs.append((structure, num_microbatches, Durations(path, lanes, np.full(per_structure, 0.05))))
    ordered = _seconds(lambda: [structure(num_microbatches) for structure, num_microbatches, _ in jobs])
    traced = _seconds(lambda: [critical_paths(*job[:2]) for job in jobs])
    screened = _seconds(lambda: [screen_structure(*job) for job in jobs])
    total = len(jobs) * per_structure
    print(f"{f'screen   orders of {len(jobs)} structures':<66} {ordered:8.3f} s")
    print(f"{f'screen   critical paths of {len(jobs)} structures, once':<66} {traced:8.3f} s")
    print(f"{f'screen   {total:,} layouts':<66} {screened:8.3f} s   {total / screened:12,.0f} layouts/s")


def _structure(schedule, pp, num_chunks, num_microbatches):
    return schedule.orders(pp, num_microbatches, num_chunks), schedule.placement(pp, num_chunks)


if __name__ == "__main__":
    engine_and_paths()
    screen_all()
