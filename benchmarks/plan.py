"""How long and how much memory does planning take here? (Every shipped scenario, start-up, and one engine play of DeepSeek-V3.)

    python benchmarks/plan.py [SCENARIO ...] [--repeats N] [--json FILE]

Each plan is `moesim plan NAME --json ...` in a fresh process. Memory is that of the largest process, and the most that the process and
its workers held together (proportional set size, sampled). Bars: 15 s and 1 GiB for 512 nodes, 4 s for 8 GPUs, 0.5 s for a play
and for `moesim --help`.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from datetime import datetime, timezone
from pathlib import Path

import moesim

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("numpy", "simpy", "pydantic")
PLAY = ("deepseek_v3_512_nodes", "pp16 dp256 ep64 zero1 mb1 1f1b dedup ov:grad+param")
GIB = 2**30
SAMPLE_S = 0.1


def main() -> None:
    options = _options()
    result = {"stamp": stamp(), "plans": [], "play": None, "help_s": None}
    print(", ".join(f"{k} {v}" for k, v in result["stamp"].items()))
    print(f"{'scenario':<26}{'wall s':>8}{'plan s':>8}{'largest GiB':>13}{'together GiB':>14}{'layouts':>10}{'fit':>9}{'paths':>7}{'played':>8}{'gap':>9}")
    for name in options.scenarios or shipped():
        row = min((planned(name) for _ in range(options.repeats)), key=lambda r: r["wall_s"])
        result["plans"].append(row)
        gap = "-" if row["gap"] is None else f"{100 * row['gap']:+.1f}%"
        print(f"{name:<26}{row['wall_s']:8.2f}{row['plan_s']:8.2f}{row['peak_rss_bytes'] / GIB:13.3f}{row['peak_total_bytes'] / GIB:14.3f}"
              f"{row['num_layouts']:>10,}{row['num_fit']:>9,}{row['num_path']:>7}{row['num_played']:>8}{gap:>9}", flush=True)  # fmt: skip
    result["help_s"] = min(watched(["-m", "moesim", "--help"])[0] for _ in range(5))
    print(f"moesim --help, best of 5 fresh processes: {result['help_s']:.3f} s")
    result["play"] = played()
    print(f"engine, {result['play']['layout']}, {result['play']['num_microbatches']} microbatches, {result['play']['num_tasks']:,} tasks: "
          f"best of {result['play']['repeats']} {result['play']['seconds']:.3f} s, spans read {result['play']['seconds_with_spans']:.3f} s")  # fmt: skip
    if options.json:
        _write(Path(options.json), json.dumps(result, indent=1) + "\n")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("scenarios", nargs="*", help="names; all shipped ones by default")
    parser.add_argument("--repeats", type=int, default=1, help="fresh processes a scenario; the fastest is shown")
    parser.add_argument("--json", help="write the figures here")
    return parser.parse_args()


def shipped() -> list[str]:
    """Names of the scenarios that a plan can be made of."""
    return sorted(p.stem for p in (ROOT / "scenarios").glob("*.yaml") if "\nworkload:" in p.read_text())


def stamp() -> dict[str, str]:
    """Machine and software that the figures belong to."""
    versions = {name: importlib.metadata.version(name) for name in PACKAGES}
    return {"cpu": cpu_model(), "cores": str(os.cpu_count()), "python": platform.python_version(), "moesim": moesim.__version__, **versions,
            "time": datetime.now(timezone.utc).isoformat(timespec="seconds")}  # fmt: skip


def cpu_model() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.processor() or "unknown")


def planned(name: str) -> dict:
    """Wall seconds, memory and counts of one plan."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "plan.json"
        wall, rss, total, code = watched(["-m", "moesim", "plan", name, "--json", str(out)])
        if code not in (0, 3):
            raise SystemExit(f"moesim plan {name} ended with exit status {code}")
        plan = json.loads(out.read_text())
    best = plan["candidates"][0] if plan["candidates"] else {}
    counts = {key: plan[key] for key in ("num_layouts", "num_fit", "num_path", "num_played", "gap")}
    return {"scenario": name, "wall_s": wall, "plan_s": plan["elapsed_s"], "peak_rss_bytes": rss, "peak_total_bytes": total, **counts,
            "winner": best.get("layout"), "step_s": best.get("step_s")}  # fmt: skip


def watched(arguments: list[str]) -> tuple[float, int, int, int]:
    """(wall seconds, resident bytes of its largest process, most bytes of all its processes together, exit status) of one fresh
    Python process."""
    start = time.perf_counter()
    process = subprocess.Popen([sys.executable, *arguments], cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    total, next_sample = 0, start + SAMPLE_S
    while True:
        ended, status, usage = os.wait4(process.pid, os.WNOHANG)
        if ended:
            process.returncode = os.waitstatus_to_exitcode(status)
            largest = usage.ru_maxrss * 1024
            return time.perf_counter() - start, largest, total or largest, process.returncode
        if time.perf_counter() >= next_sample:
            total = max(total, sum(map(_proportional_bytes, _family(process.pid))))
            next_sample = time.perf_counter() + SAMPLE_S
        time.sleep(0.005)


def _family(pid: int) -> list[int]:
    """The process and all that came from it."""
    try:
        children = [int(p) for task in Path(f"/proc/{pid}/task").iterdir() for p in (task / "children").read_text().split()]
    except OSError:
        return [pid]
    return [pid, *(member for child in children for member in _family(child))]


def _proportional_bytes(pid: int) -> int:
    """A process's share of the memory it touches: what n processes share counts 1/n each."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:")), 0)


def played(repeats: int = 3) -> dict:
    """One engine play of DeepSeek-V3 on 16 pipeline ranks with 64 microbatches."""
    from moesim import engine
    from moesim.evaluate import Evaluator
    from moesim.layout import num_microbatches
    from moesim.load import load_scenario

    name, text = PLAY
    scenario = load_scenario(name)
    evaluator = Evaluator(scenario)
    layout = evaluator.legal(text)
    program = evaluator.program(layout)
    plain = min(_seconds(lambda: engine.run(program, spans=False)) for _ in range(repeats))
    spans = min(_seconds(lambda: engine.run(program).spans) for _ in range(repeats))
    tasks = sum(len(program.bodies[k]) for row in program.body_index for k in row)
    return {"scenario": name, "layout": str(layout), "num_microbatches": num_microbatches(layout, scenario.workload), "num_tasks": tasks, "repeats": repeats, "seconds": plain,
            "seconds_with_spans": spans}  # fmt: skip


def _seconds(work) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def _write(path: Path, text: str) -> None:
    partial = path.with_name(path.name + ".part")
    partial.write_text(text)
    os.replace(partial, path)


if __name__ == "__main__":
    main()
