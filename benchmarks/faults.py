"""Does a run that is killed again and again, at any moment, end as if nobody had touched it?

    python benchmarks/faults.py [--kills 32] [--seed 0] [--json F]

A small model trains under torchrun. One of its ranks, or the whole job, or the launcher alone is killed with SIGKILL while it starts,
between steps, or while a checkpoint is being written; torchrun, or this script as whatever queues jobs, starts it again. Then, against a
run of the same steps that nobody touched: every loss and gradient norm bit for bit, every weight and moment by digest; no more steps
done again than a checkpoint interval holds (and, beside a background save, those made while it ran); no published checkpoint ever
incomplete; history and log verified. Last, a rank is stopped (SIGSTOP) and the watchdog has to say which, and the job to go on.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from moesim.files import write_atomically
from moesim.load import parse_scenario
from moetrain import checkpoint
from moetrain.distributed import Seat
from moetrain.observe.jsonl import read_records
from moetrain.observe.metrics import FILE, read_lines, read_steps
from moetrain.observe.provenance import code_identity, cpu_name
from moetrain.observe.verify import sound, verify
from moetrain.session import run_training
from moetrain.testing import run_ranks

ROOT = Path(__file__).resolve().parent.parent
EVERY = 4
SCENARIO = """
name: faults
seed: 3
model: {name: tiny, num_layers: 3, hidden_size: 96, vocab_size: 512, num_heads: 4, num_kv_heads: 2, head_dim: 24, intermediate_size: 192,
  num_experts: 8, top_k: 2, moe_intermediate_size: 96, num_shared_experts: 1, num_leading_dense_layers: 1, qk_norm: per_head}
cluster: cpu_gloo
workload: {seq_len: 32, global_batch_tokens: 256}
layout: dp2 ep2 mb2
train:
  steps: 1000000
  deterministic: true
  device: cpu
  optimizer: {lr: 0.003, schedule: constant}
  moe: {bias_rate: 0.001}
  checkpoint: {every: 4, keep: 3}
  log: {preflight: false, every: 50}
"""
LAYOUTS = {2: "dp2 ep2 mb2", 4: "dp4 ep2 mb2"}


@dataclass(frozen=True)
class Kill:
    """``what`` is killed (rank | job | launcher) and ``when`` (start | step | save)."""

    what: str
    when: str


@dataclass
class Blow:
    """One kill as it happened: steps done at that time, what lay in the folder, and what became of it."""

    what: str
    when: str
    at_step: int
    saving: bool
    resumed_from: int | None = None
    lost_steps: int | None = None
    recovery_s: float | None = None
    time: float = 0.0


@dataclass
class Result:
    """A run that was killed, compared with one that was not."""

    ranks: int
    asynchronous: bool
    steps: int
    blows: list[Blow]
    seconds: float
    problems: list[str] = field(default_factory=list)


# --- a job under torchrun -------------------------------------------------------------------------------------------------------


class Job:
    """`moetrain train --nproc N` in ``folder``, which its launcher starts again when a rank dies."""

    def __init__(self, folder: Path, ranks: int, sets: list[str]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.run, self.ranks = folder, folder / "run", ranks
        (folder / "faults.yaml").write_text(SCENARIO)
        words = [word for text in [f"train.log.folder={self.run}", *sets] for word in ("--set", text)]
        self.command = [sys.executable, "-m", "moetrain", "train", "faults.yaml", "--nproc", str(ranks), "--max-restarts", "1000", "--layout", LAYOUTS[ranks], *words]
        self.said = (folder / "said.txt").open("ab")
        self.begun = 0  # starts that the log knew at the last kill
        self.dead: set[int] = set()
        self.launch()

    def launch(self) -> None:
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        self.process = subprocess.Popen(self.command, cwd=self.folder, env=environment, stdout=self.said, stderr=self.said, start_new_session=True)

    def pids(self) -> list[int]:
        """Ranks that the launcher has started, in its order."""
        try:
            text = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text()
        except OSError:
            return []
        return sorted(int(word) for word in text.split())

    def lines(self) -> list[dict]:
        path = self.run / FILE
        return list(read_records(path)) if path.exists() else []

    def last_step(self) -> int:
        return max((line["step"] for line in self.lines() if line["kind"] == "step"), default=0)

    def saving(self) -> bool:
        """A checkpoint is being written (or was, by a process that is dead)."""
        return any((self.run / "checkpoints").glob(".step-*.tmp-*"))

    def wait(self, for_what: str, ready: Callable[[], bool], seconds: float = 180.0, pause: float = 0.02) -> None:
        """TimeoutError, with what the job said last, when ``ready`` doesn't come true."""
        deadline = time.monotonic() + seconds
        while not ready():
            if self.process.poll() is not None:
                raise RuntimeError(f"the job ended (code {self.process.returncode}) while it should have come to {for_what}:\n{self.tail()}")
            if time.monotonic() > deadline:
                raise TimeoutError(f"no {for_what} in {seconds:g} s:\n{self.tail()}")
            time.sleep(pause)

    def wait_steps(self, number: int) -> None:
        """Until the process that runs now has logged ``number`` steps of its own."""
        def ready() -> bool:
            lines = self.lines()
            begun = [i for i, line in enumerate(lines) if line.get("event") in ("start", "restart")]
            return len(begun) > self.begun and sum(line["kind"] == "step" for line in lines[begun[-1]:]) >= number

        self.wait(f"step {number} after a start", ready)

    def seen(self, dead: list[int]) -> None:
        """Those ranks are dead: what the log holds now is theirs."""
        self.dead = set(dead)
        self.begun = sum(line.get("event") in ("start", "restart") for line in self.lines())

    def tail(self) -> str:
        return (self.folder / "said.txt").read_text(errors="replace")[-3000:]

    def stop(self) -> int:
        """SIGTERM to the launcher; its exit code when all have saved and gone."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(120)

    def destroy(self) -> None:
        """Whatever is left of it."""
        for pid in [self.process.pid, *self.pids()] if self.process.poll() is None else []:
            kill(pid)
        self.process.wait()
        self.said.close()


def kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass


def gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


# --- kills ----------------------------------------------------------------------------------------------------------------------


def strike(job: Job, plan: Kill, rng: random.Random) -> Blow:
    """Waits for the moment and kills; the blow, and the job on its way again."""
    job.wait("ranks of its own", lambda: len(job.pids()) == job.ranks and not set(job.pids()) & job.dead, pause=0.05)
    if plan.when == "start":
        time.sleep(rng.uniform(0.5, 8.0))
    elif plan.when == "step":
        job.wait_steps(rng.randint(1, 2 * EVERY))
        time.sleep(rng.uniform(0, 0.1))
    else:
        job.wait_steps(rng.randint(1, EVERY))
        job.wait("a checkpoint in the writing", job.saving, pause=0.0005)
        time.sleep(rng.choice((0.0, rng.uniform(0, 0.1), rng.uniform(0, 0.5))))
    ranks, saving, moment = job.pids(), job.saving(), time.time()
    for pid in {"rank": [rng.choice(ranks)], "job": [job.process.pid, *ranks], "launcher": [job.process.pid]}[plan.what]:
        kill(pid)
    deadline = time.monotonic() + 60
    while not all(map(gone, ranks)) and time.monotonic() < deadline:
        time.sleep(0.01)
    blow = Blow(plan.what, plan.when, job.last_step(), saving, time=moment)
    job.seen(ranks)
    if plan.what != "rank":
        job.process.wait()
        job.launch()
    return blow


def incomplete(folder: Path) -> list[str]:
    """Published checkpoints that are not what was written, every file hashed."""
    if not any(folder.glob("step-*")):
        return []
    try:
        return [f"{entry['path']}: {entry['problem']}" for entry in checkpoint.inspect(folder, verify=True) if not entry["ok"] and Path(entry["path"]).exists()]
    except (OSError, ValueError):
        return []  # deleted as the oldest while it was read


def disturbed(folder: Path, ranks: int, plans: list[Kill], asynchronous: bool, seed: int, tell: Callable[[Blow], None] = lambda blow: None) -> Result:
    """A run that suffers ``plans`` and then goes on for two intervals, and what it came to."""
    rng, began = random.Random(seed), time.monotonic()
    job = Job(folder, ranks, [f"train.checkpoint.asynchronous={str(asynchronous).lower()}"])
    blows, problems = [], []
    try:
        for plan in plans:
            blows.append(strike(job, plan, rng))
            problems += incomplete(job.run / "checkpoints")
            tell(blows[-1])
        job.wait_steps(2 * EVERY + 1)
        code = job.stop()
        if code == 0:
            problems.append("a job that was told to stop ended with code 0")
    finally:
        job.destroy()
    told(job.run, blows)
    steps = job.last_step()
    problems += compared(job, undisturbed(folder / "undisturbed", ranks, steps), asynchronous)
    return Result(ranks, asynchronous, steps, blows, time.monotonic() - began, problems)


# --- what came of it ------------------------------------------------------------------------------------------------------------


def told(run: Path, blows: list[Blow]) -> None:
    """What the log says of each blow: where the next process that came to a log went on, which steps were lost, after how long."""
    lines, counted = list(read_lines(run / FILE)), -1
    for blow in blows:
        past = [line for line in lines if line["time"] <= blow.time]
        later = [line for line in lines if line["time"] > blow.time]
        again = next((line for line in later if line.get("event") in ("start", "restart")), None)
        if again is None:
            continue
        blow.resumed_from = again["from_step"]
        process, before = past[-1]["restart"] if past else -1, counted
        counted = process  # one that is killed before it comes to a log has no steps to lose
        own = [line["step"] for line in lines if line["kind"] == "step" and line["restart"] == process != before]
        blow.lost_steps = max(0, max(own, default=blow.resumed_from) - blow.resumed_from)
        first = next((line for line in later if line["kind"] == "step" and line["restart"] >= again["restart"]), None)
        blow.recovery_s = round(first["time"] - blow.time, 2) if first else None


def _trains(rank: int, world: int, folder: Path, steps: int) -> int:
    scenario = parse_scenario(SCENARIO, [f"train.log.folder={folder}", f"train.steps={steps}"])
    return run_training(scenario, LAYOUTS[world], Seat(rank, world, torch.device("cpu")))


def undisturbed(folder: Path, ranks: int, steps: int) -> Path:
    """The run of that many steps that nobody touches."""
    assert run_ranks(_trains, ranks, folder, steps, timeout_s=600) == [0] * ranks
    return folder


def compared(job: Job, other: Path, asynchronous: bool) -> list[str]:
    """What is not as it must be; empty when all is well."""
    problems = []
    mine, theirs = read_steps(job.run / FILE), read_steps(other / FILE)
    for name in ("step", "loss", "grad_norm", "lr"):
        if [getattr(s, name) for s in mine] != [getattr(s, name) for s in theirs]:
            problems.append(f"{name} differs from that of the undisturbed run")
    ends = [checkpoint.inspect(folder / "checkpoints", verify=True)[-1] for folder in (job.run, other)]
    if not all(end["ok"] for end in ends) or ends[0]["step"] != ends[1]["step"] or ends[0]["tensors"] != ends[1]["tensors"]:
        problems.append("the last checkpoint differs from that of the undisturbed run")
    lines = list(read_lines(job.run / FILE))
    problems += [line["text"] for line in lines if line.get("event") == "note" and line["text"].startswith("skipped")]
    found = verify(job.run)
    if not sound(found):
        problems += [str(finding) for finding in found if finding.level != "note"]
    return problems + lost_too_much(lines, asynchronous)


def lost_too_much(lines: list[dict], asynchronous: bool) -> list[str]:
    """Processes that left more undone than one interval, or than one and the steps that a save in the background takes."""
    limit, problems = 2 * EVERY - 1 if asynchronous else EVERY, []
    last = 0
    for line in lines:
        if line["kind"] == "step":
            last = line["step"]
        elif line["event"] == "restart":
            if last - line["from_step"] > limit:
                problems.append(f"{last - line['from_step']} steps were lost at step {last}; at most {limit} may be")
            last = line["from_step"]
    return problems


# --- a rank that hangs ----------------------------------------------------------------------------------------------------------


def hang(folder: Path, ranks: int = 2, limit_s: int = 10) -> dict:
    """Stops the last rank: what the watchdog said, and after how long there was a report and then training again."""
    job = Job(folder, ranks, [f"train.watchdog_s={limit_s}"])
    try:
        job.wait("ranks of its own", lambda: len(job.pids()) == ranks)
        job.wait_steps(EVERY + 2)
        ranks_then, moment = job.pids(), time.monotonic()
        os.kill(ranks_then[-1], signal.SIGSTOP)
        report = job.run / "hangs"
        job.wait("report", lambda: any(report.glob("*/hang-rank-*.txt")))
        report_s, text = time.monotonic() - moment, next(report.glob("*/hang-rank-*.txt")).read_text()
        job.seen(ranks_then)
        job.wait_steps(EVERY + 1)
        again_s = time.monotonic() - moment
        job.stop()
    finally:
        job.destroy()
    problems = compared(job, undisturbed(folder / "undisturbed", ranks, job.last_step()), True)
    verdict = text.splitlines()[2]
    if f"rank {ranks - 1} is behind: " not in verdict or "its last collective was" not in verdict:
        problems.append(f"the report does not name rank {ranks - 1} and its last collective: {verdict}")
    return {"ranks": ranks, "limit_s": limit_s, "report_s": round(report_s, 2), "training_again_s": round(again_s, 2), "verdict": verdict, "problems": problems}


# --- the benchmark --------------------------------------------------------------------------------------------------------------

MIX = [Kill("rank", "step"), Kill("rank", "save"), Kill("job", "save"), Kill("rank", "start"), Kill("job", "step"), Kill("rank", "save"), Kill("launcher", "step"),
       Kill("rank", "save")]


def groups(kills: int) -> list[tuple[int, bool, list[Kill]]]:
    """(ranks, saves in the background, kills): a quarter on four ranks."""
    plans = [MIX[i % len(MIX)] for i in range(kills)]
    first, second = kills * 3 // 8, kills * 3 // 4
    return [(2, False, plans[:first]), (2, True, plans[first:second]), (4, True, plans[second:])]


def row(blow: Blow) -> str:
    return f"{blow.what:9}{blow.when:7}step {blow.at_step:4}{'  saving' if blow.saving else '':8}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=32)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", default=str(ROOT / "benchmarks" / "results" / "faults.json"))
    options = parser.parse_args()
    results = []
    with TemporaryDirectory() as folder:
        for number, (ranks, asynchronous, plans) in enumerate(groups(options.kills)):
            print(f"{ranks} ranks, saves {'in the background' if asynchronous else 'that training waits for'}:", flush=True)
            result = disturbed(Path(folder) / str(number), ranks, plans, asynchronous, options.seed + number, lambda blow: print(f"  {row(blow)}", flush=True))
            results.append(result)
            for blow in result.blows:
                print(f"  {row(blow)} -> resumed from {blow.resumed_from}, {blow.lost_steps} steps lost, training again after {blow.recovery_s} s")
            print(f"  {result.steps} steps in {result.seconds:.0f} s: {'; '.join(result.problems) or 'as the undisturbed run, bit for bit'}", flush=True)
        stopped = hang(Path(folder) / "hang")
        print(f"a stopped rank: report after {stopped['report_s']} s, training again after {stopped['training_again_s']} s: {stopped['verdict']}")
    print("; ".join(stopped["problems"]) or "  as the undisturbed run, bit for bit")
    report = summary(results, stopped, options)
    Path(options.json).resolve().parent.mkdir(parents=True, exist_ok=True)
    write_atomically(options.json, json.dumps(report, indent=1) + "\n")
    print(json.dumps(report["totals"]))
    return 1 if report["totals"]["problems"] else 0


def summary(results: list[Result], stopped: dict, options: argparse.Namespace) -> dict:
    """What is written down: stamp, totals, every blow."""
    blows = [blow for result in results for blow in result.blows]
    waits = sorted(blow.recovery_s for blow in blows if blow.recovery_s is not None)
    code = code_identity(ROOT)
    stamp = {"date": time.strftime("%Y-%m-%d"), "commit": code.get("commit"), "dirty": code.get("dirty"), "sources_sha256": code["sources_sha256"],
             "cores": os.cpu_count(), "cpu": cpu_name(), "torch": str(torch.__version__), "python": sys.version.split()[0]}
    totals = {"kills": len(blows), "saving": sum(blow.saving for blow in blows), "starting": sum(blow.when == "start" for blow in blows),
              "most_lost_steps": max((blow.lost_steps or 0 for blow in blows), default=0), "interval": EVERY, "steps": sum(r.steps for r in results),
              "recovery_s": {"median": waits[len(waits) // 2] if waits else None, "most": waits[-1] if waits else None},
              "seconds": round(sum(r.seconds for r in results)), "problems": sum(len(r.problems) for r in results) + len(stopped["problems"])}
    runs = [asdict(result) | {"seconds": round(result.seconds, 1)} for result in results]
    return {"stamp": stamp, "command": f"python benchmarks/faults.py --kills {options.kills} --seed {options.seed}", "totals": totals, "runs": runs, "hang": stopped}


if __name__ == "__main__":
    sys.exit(main())
