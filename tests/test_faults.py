"""Does a run that is killed at any moment end as if nobody had touched it, and one that hangs go on by itself?

A slice of benchmarks/faults.py, which holds what is checked and writes down what a longer siege came to.
"""

from __future__ import annotations

import importlib.util
import json
import random
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def benchmark():
    spec = importlib.util.spec_from_file_location("faults", ROOT / "benchmarks" / "faults.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["faults"] = module
    spec.loader.exec_module(module)
    return module


faults = benchmark()
SLICE = [("rank", "step"), ("rank", "save"), ("job", "save")]
MORE = [("launcher", "step"), ("rank", "start"), ("launcher", "save"), ("job", "start")]


def survives(folder, ranks, plans, asynchronous, seed):
    result = faults.disturbed(folder, ranks, [faults.Kill(*plan) for plan in plans], asynchronous, seed)
    assert not result.problems, (result.problems, result.blows)
    assert len(result.blows) == len(plans) and result.steps > 2 * faults.EVERY
    return result


def test_three_kills_leave_no_trace(tmp_path):
    """A rank between steps, a rank and the whole job while a checkpoint is written: losses and the last checkpoint bit for bit."""
    result = survives(tmp_path, 2, SLICE, False, 5)
    assert all(blow.lost_steps <= faults.EVERY for blow in result.blows) and any(blow.saving for blow in result.blows)


@pytest.mark.full
@pytest.mark.parametrize("ranks, asynchronous", [(2, True), (4, True), (4, False)])
def test_more_kills_leave_no_trace(tmp_path, ranks, asynchronous):
    plans = [*SLICE, *MORE]
    random.Random(ranks).shuffle(plans)
    survives(tmp_path, ranks, plans, asynchronous, 7)


@pytest.mark.full
@pytest.mark.parametrize("ranks", [2, 4])
def test_a_stopped_rank_is_named_and_the_job_goes_on(tmp_path, ranks):
    found = faults.hang(tmp_path, ranks)
    assert not found["problems"], found
    assert found["report_s"] < found["limit_s"] + 15


def test_the_longer_siege_is_on_record():
    """What benchmarks/faults.py wrote down when it was last run as a whole."""
    report = json.loads((ROOT / "benchmarks" / "results" / "faults.json").read_text())
    totals = report["totals"]
    assert totals["kills"] >= 30 and totals["problems"] == 0 and totals["saving"] >= 8 and {r["ranks"] for r in report["runs"]} == {2, 4}
    assert totals["most_lost_steps"] < 2 * report["totals"]["interval"]
    assert "behind" in report["hang"]["verdict"] and report["stamp"]["commit"]
