"""Did the answer to a shipped scenario change? (Winner, step, memory and counts of every plan, held in a file.)

A change of the model changes these on purpose. Then write them anew and let the diff be read:

    python tests/test_golden_plans.py
"""

import json
import os
from pathlib import Path

import pytest

from moesim.evaluate import Evaluator
from moesim.load import load_scenario, scenarios_dir
from moesim.search import plan

GOLDEN = Path(__file__).parent / "fixtures" / "golden_plans.json"
SMALL = ("olmo_core3_new", "olmo_core3_old", "template")
CLOSE = 1e-6


def shipped() -> list[str]:
    """Scenarios whose GPU has measured prices. (A CPU's peak is unknown: the shipped prices of one are data-sheet arithmetic.)"""
    names = sorted(p.stem for p in scenarios_dir().glob("*.yaml") if "\nworkload:" in p.read_text())
    profiles = {p.stem for p in (scenarios_dir() / "profiles").glob("*.yaml")}
    return [n for n in names if (gpu := load_scenario(n).cluster.gpu).peak_flops and gpu.profile in profiles]


def answer(name: str) -> dict:
    """What a plan says, in the few numbers that stand for all."""
    found = plan(load_scenario(name), top=3)
    top = [{"layout": c.layout, "step_s": float(c.step_s), "peak_bytes": float(c.peak_bytes)} for c in found.candidates]
    return {"hash": found.scenario["hash"], "num_layouts": found.num_layouts, "num_fit": found.num_fit, "top": top}


def golden() -> dict:
    return json.loads(GOLDEN.read_text())


def test_every_shipped_scenario_has_a_golden_plan():
    assert sorted(golden()) == shipped()


@pytest.mark.parametrize("name", shipped())
def test_golden_layouts_take_the_same_time_and_memory(name):
    """The winner alone, played: cheap for any scenario."""
    scenario, expected = load_scenario(name), golden()[name]
    assert scenario.hash == expected["hash"], "the scenario was edited: write the golden plans anew"
    evaluator, best = Evaluator(scenario), expected["top"][0]
    layout = evaluator.legal(best["layout"])
    assert str(layout) == best["layout"]
    assert evaluator.played(layout).step_s == pytest.approx(best["step_s"], rel=CLOSE)
    assert evaluator.peak(layout).total == pytest.approx(best["peak_bytes"], rel=CLOSE)


@pytest.mark.parametrize("name", [n if n in SMALL else pytest.param(n, marks=pytest.mark.full) for n in shipped()])
def test_plans_are_the_golden_plans(name):
    found, expected = answer(name), golden()[name]
    assert {k: v for k, v in found.items() if k != "top"} == {k: v for k, v in expected.items() if k != "top"}
    assert [t["layout"] for t in found["top"]] == [t["layout"] for t in expected["top"]]
    for one, other in zip(found["top"], expected["top"]):
        assert [one["step_s"], one["peak_bytes"]] == pytest.approx([other["step_s"], other["peak_bytes"]], rel=CLOSE)


def write() -> None:
    """Work every plan out and replace the file."""
    answers = {}
    for name in shipped():
        answers[name] = answer(name)
        print(f"{name}: {answers[name]['top'][0] if answers[name]['top'] else 'nothing fits'}", flush=True)
    partial = GOLDEN.with_suffix(".part")
    partial.write_text(json.dumps(answers, indent=1, sort_keys=True) + "\n")
    os.replace(partial, GOLDEN)


if __name__ == "__main__":
    write()
