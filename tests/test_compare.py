"""Do the terms of a comparison add up to the difference of the two steps, each with a source?"""

import json

import pytest
from typer.testing import CliRunner

from moesim.cli import app
from moesim.compare import compare
from moesim.evaluate import Evaluator
from moesim.load import load_scenario


@pytest.fixture(scope="module")
def pair():
    return [(Evaluator(s), s.layout) for s in (load_scenario("olmo_core3_old"), load_scenario("olmo_core3_new"))]


def test_terms_add_up_to_the_gap(pair):
    steps = [e.played(e.legal(layout)).step_s for e, layout in pair]
    found = compare(*pair, measured=(19_400.0, 52_000.0))
    assert found.predicted_gap_s == pytest.approx(steps[0] - steps[1], rel=1e-9)
    tokens = 4 * 2**20 / 8
    assert found.measured_gap_s == pytest.approx(tokens / 19_400 - tokens / 52_000)
    assert found.unexplained_s == pytest.approx(found.measured_gap_s - found.predicted_gap_s)
    assert all(d.source for d in found.differences)
    assert [abs(d.excess_s) for d in found.differences] == sorted((abs(d.excess_s) for d in found.differences), reverse=True)
    gathers = next(d for d in found.differences if d.role == "param_copy_out")
    assert gathers.second_s == 0.0 and gathers.source.startswith("memory.copy, ") and "https://" in gathers.source


def test_a_run_against_itself_has_no_gap(pair):
    found = compare(pair[0], pair[0])
    assert found.measured_gap_s is None and found.unexplained_s is None
    assert all(d.excess_s == 0.0 for d in found.differences)


def test_half_the_batch_is_put_on_the_same_tokens():
    whole, half = load_scenario("olmo_core3_new"), load_scenario("olmo_core3_new", ("workload.global_batch_tokens=2097152",))
    found = compare((Evaluator(whole), whole.layout), (Evaluator(half), half.layout))
    experts = next(d for d in found.differences if d.role == "expert_up")
    assert experts.excess_s == pytest.approx(0.0, abs=1e-9 * experts.first_s)


def test_command_line(tmp_path):
    out = tmp_path / "gap.json"
    result = CliRunner().invoke(app, ["simulate", "olmo_core3_old", "--against", "olmo_core3_new", "--measured", "19400,52000", "--json", str(out)])
    assert result.exit_code == 0 and "unexplained" in result.stdout, result.output
    data = json.loads(out.read_text())
    assert data["predicted_gap_s"] == pytest.approx(sum(d["first_s"] - d["second_s"] for d in data["differences"]))


@pytest.mark.parametrize("args, said", [
    (["--against", "olmo_core3_new", "--measured", "19400"], "two numbers"), (["--against", "olmo_core3_new", "--measured", "1,nan"], "1e9"),
    (["--measured", "1,2"], "--against"), (["--against", "no_such_scenario"], "no_such_scenario"), (["--against", "qwen3_235b_64_nodes"], "no layout"),
])
def test_bad_input_is_one_line(args, said):
    result = CliRunner().invoke(app, ["simulate", "olmo_core3_old", *args])
    assert result.exit_code == 2 and said in result.output and "Traceback" not in result.output
