"""Does a machine's own profile predict steps that no fit has seen? (The committed measurements of two cores, fitted and judged anew.)

The bars are for medians of two or more launches of one step, which differ among themselves by several percent.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from calibration.inside import MOST_ANCHORS, anchors
from calibration.measured import make
from moesim.evaluate import Evaluator
from moesim.load import load_scenario
from moesim.measurement import read_measurements
from moesim.profile import load_profile

HOME = Path("calibration/measurements/two_cores")
PROFILE = "two_cores"


@pytest.fixture(scope="module", autouse=True)
def _at_the_root():
    import os

    before = os.getcwd()
    os.chdir(Path(__file__).resolve().parent.parent)  # recorded histograms are named from here
    yield
    os.chdir(before)


@pytest.fixture(scope="module")
def made():
    return make(sorted(HOME.glob("*.jsonl")), PROFILE).profile


def test_the_shipped_profile_is_what_the_measurements_make(made):
    shipped = load_profile(PROFILE)
    assert shipped.stamp.files == made.stamp.files
    for one, other in zip(shipped.terms, made.terms, strict=True):
        assert one.name == other.name
        assert one.parameters == pytest.approx(other.parameters, rel=1e-4)
    for one, other in zip((*shipped.in_step, *shipped.meetings), (*made.in_step, *made.meetings), strict=True):
        assert one.extra_s == pytest.approx(other.extra_s, rel=1e-3, abs=1e-9)


def test_few_steps_were_seen_by_the_fit():
    given = anchors(sorted(HOME.glob("*.jsonl")))
    assert 3 <= given.num_cases <= MOST_ANCHORS
    assert all(m.parameters["anchor"] for m in given.steps)


def cases():
    """case -> (line, median of the launches' medians), of those that no fit has seen."""
    launches = {}
    for m in read_measurements(HOME / "steps.jsonl"):
        if not m.parameters["anchor"]:
            launches.setdefault(m.parameters["case"], []).append(m)
    return {name: (lines[0], float(np.median([m.median for m in lines]))) for name, lines in launches.items()}


def errors(world: int) -> np.ndarray:
    found = []
    for line, seconds in cases().values():
        if line.parameters["world"] == world:
            evaluator = Evaluator(load_scenario(line.parameters["scenario"], line.parameters["set"]), PROFILE)
            found.append(evaluator.played(evaluator.legal(line.layout)).step_s / seconds - 1.0)
    return np.array(found)


@pytest.mark.parametrize("world, least, median, p90", [(1, 12, 0.03, 0.06), (2, 12, 0.055, 0.15), (4, 8, 0.07, 0.14)])
def test_unseen_steps_are_predicted(world, least, median, p90):
    found = errors(world)
    assert len(found) >= least
    assert np.median(np.abs(found)) <= median
    assert np.quantile(np.abs(found), 0.9) <= p90


def test_two_ranks_a_core_take_twice_as_long_as_one():
    """Each rank does the same: what they compute takes twice as long, what they wait for does not, and exchanges of four take longer than of two."""
    both = []
    for world, tokens in ((2, 4096), (4, 8192)):
        scenario = load_scenario("small_moe", [f"cluster.gpus_per_node={world}", f"workload.global_batch_tokens={tokens}"])
        evaluator = Evaluator(scenario, PROFILE)
        both.append(evaluator.played(evaluator.legal(f"dp{world} zero1 mb4")).step_s)
    assert 1.8 < both[1] / both[0] < 2.1


def test_the_readme_prints_what_the_command_says():
    """The block under "A machine of your own" is made of lines of the command that it names."""
    from calibration.run_cases import read_cases
    from calibration.validate_runs import judge, lines, report

    text = Path("README.md").read_text()
    shown = text.split("<!-- own:begin")[1].split("```text\n")[1].split("```")[0].splitlines()
    printed = {line.rstrip() for line in lines(report(*judge(read_cases([HOME / "steps.jsonl"]))))}
    assert len(shown) > 8
    assert [line for line in shown if line not in printed and not line.startswith("predicted")] == []
