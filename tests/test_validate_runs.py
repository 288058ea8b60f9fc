"""Are the figures of measured steps those that arithmetic gives, whatever file the steps come from?"""

from __future__ import annotations

import json
import math

import pytest
import yaml
from recorded_runs import TEXT, plan_of, write_run
from typer.testing import CliRunner

from calibration.__main__ import app
from calibration.run_cases import Case, read_cases
from calibration.run_folder import full_layout, on_world
from calibration.validate_runs import Judged, fit_baseline, judge, ranking, report, shape
from moesim.load import parse_scenario

SCENARIO = yaml.safe_load(TEXT.format(name="cases", layout="mb4"))
LAYOUTS = ("mb1", "mb2", "mb4", "mb8", "mb4 rc:full", "mb8 rc:full", "dp2 ep2 mb2", "dp2 mb4 zero3", "pp2 mb2", "tp2 mb4", "cp2 mb4")


def cases_of(tmp_path, factors) -> list[Case]:
    """A case a layout whose measured step is the predicted one times a factor; the first two are anchors."""
    made = [{"scenario": SCENARIO, "layout": layout, "world": 2 if "2 " in layout and "mb2" != layout[:3] else 1, "seconds": [1.0], "anchor": i < 2,
             "series": "a"} for i, layout in enumerate(LAYOUTS)]
    path = tmp_path / "cases.jsonl"
    path.write_text("".join(json.dumps(case) + "\n" for case in made))
    judged, refused = judge(read_cases([path]))
    assert not refused
    for case, j, factor in zip(made, judged, factors, strict=True):
        case["seconds"] = [j.case.median * j.case.rate / j.rate * factor]
    path.write_text("".join(json.dumps(case) + "\n" for case in made))
    return read_cases([path])


def test_errors_are_the_ones_put_in(tmp_path):
    factors = (2.0, 0.5, *(1.0 + 0.1 * i for i in range(9)))
    found = report(*judge(cases_of(tmp_path, factors)))
    held = found["figures"]["held out"]["error"]
    assert held["n"] == 9 and held["indicative"] and found["figures"]["anchors"]["error"]["n"] == 2
    assert held["median"] == pytest.approx(0.4) and held["bias"] == pytest.approx(0.4) and held["mean"] == pytest.approx(0.4)  # too fast by the factor
    assert [row["error"] for row in found["rows"]] == pytest.approx([f - 1 for f in factors])
    inside = [row["low_s"] <= row["measured_s"] <= row["high_s"] for row in found["rows"]]
    assert inside == [row["inside"] for row in found["rows"]] and found["figures"]["held out"]["interval"]["coverage"] == sum(inside[2:]) / 9
    assert found["support"] == {"cases": 11, "predicted": 11, "refused": []}


def judged_of(rates, measured, case: Case) -> list[Judged]:
    tokens = case.scenario.workload.global_batch_tokens
    return [Judged(Case("c", case.scenario, case.layout, (tokens / m,), "s"), p, p * 0.9, p * 1.1) for p, m in zip(rates, measured)]


def test_order_and_regret_inside_a_series(tmp_path):
    case = cases_of(tmp_path, (1.0,) * 11)[0]
    (same,) = ranking(judged_of([1, 2, 3, 4], [10, 20, 30, 40], case), 0.025)
    assert same["tau_b"] == 1.0 and same["regret"] == 0.0 and same["n"] == 4
    (turned,) = ranking(judged_of([4, 3, 2, 1], [10, 20, 30, 40], case), 0.025)
    assert turned["tau_b"] == -1.0 and turned["regret"] == pytest.approx(0.75)
    (close,) = ranking(judged_of([1, 2], [100, 101], case), 0.025)
    assert close["tau_b"] is None  # closer than the spread: no order to predict


def test_the_baseline_is_exact_where_its_law_holds(tmp_path):
    cases = [Case(c.name, c.scenario, c.layout, (c.scenario.workload.global_batch_tokens / c.layout.world / (3e9 * shape(c)),), c.series, c.anchor)
             for c in cases_of(tmp_path, (1.0,) * 11)]
    assert fit_baseline(cases) == pytest.approx(3e9)
    found = report(*judge(cases))
    assert found["figures"]["held out"]["baseline"]["p90"] == pytest.approx(0.0, abs=1e-12) and found["baseline_fitted_on"] == "anchors"
    pipeline = next(c for c in cases if c.layout.pp == 2)
    one = next(c for c in cases if c.layout.world == 1)
    assert shape(pipeline) / shape(one) == pytest.approx(8 / 9)  # eight microbatches on two stages


@pytest.mark.parametrize("name", ["cores", "pinned_cores"])
def test_the_baseline_knows_that_ranks_share_cores(name):
    text = TEXT.format(name="cores", layout="mb4").replace("cluster: cpu_gloo", "cluster: {preset: cpu_gloo, resources: [{name: %s, capacity: 2, scope: node}]}" % name)
    shapes = {}
    for world in (1, 2, 4):
        scenario = on_world(parse_scenario(text), world)
        shapes[world] = shape(Case("c", scenario, full_layout(scenario, f"dp{world} mb2", world), (1.0,)))
    assert shapes[1] == shapes[2] == pytest.approx(2 * shapes[4])


def test_spans_of_a_case_add_its_terms(tmp_path):
    """A folder of the same scenario and layout joins its case: the step is the file's, the terms the spans'."""
    planned = plan_of("mb4 zero0", name="cases")
    folder = write_run(tmp_path / "run", planned, slower={"qkv": 2.0})
    extra = json.loads((folder / "metrics.jsonl").read_text().splitlines()[0])["seconds"]
    scenario = yaml.safe_load(TEXT.format(name="cases", layout="mb4 zero0"))
    (tmp_path / "m.json").write_text(json.dumps([{"scenario": scenario, "layout": "mb4 zero0", "world": 1, "seconds": [extra]}]))
    cases = read_cases([folder, tmp_path / "m.json"])
    assert len(cases) == 1 and cases[0].seconds == (extra,) and cases[0].recorded is not None
    found = report(*judge(cases))
    terms = {r["term"]: r for r in found["residual"]}
    assert terms["gemm"]["bias"] == pytest.approx(terms["gemm"]["size"]) == pytest.approx(1 - found["rows"][0]["predicted_s"] / extra)
    assert sum(r["bias"] for r in found["residual"]) == pytest.approx(1 - found["rows"][0]["predicted_s"] / extra)


def test_the_files_say_the_same(tmp_path):
    """CSV, JSON and measurements of one step are one case with three launches."""
    (tmp_path / "s.yaml").write_text(TEXT.format(name="cases", layout="mb4"))
    name = str(tmp_path / "s.yaml")
    (tmp_path / "a.csv").write_text(f"scenario,set,layout,world,seconds,anchor\n{name},model.num_experts=8;model.top_k=1,mb4,1,0.5,true\n")
    (tmp_path / "b.json").write_text(json.dumps({"cases": [{"scenario": name, "set": ["model.num_experts=8", "model.top_k=1"], "layout": "mb4", "world": 1, "seconds": [0.6]}]}))
    line = {"schema": "moesim.measurement/1", "layout": "mb4", "step": 4, "seconds": [0.7, 0.7, 0.9], "windows": [3], "foreign_cpu": 0.01,
            "parameters": {"scenario": name, "set": ["model.num_experts=8", "model.top_k=1"], "world": 1, "launch": 1}}
    (tmp_path / "c.jsonl").write_text(json.dumps(line) + "\n")
    (case,) = read_cases([tmp_path / "a.csv", tmp_path / "b.json", tmp_path / "c.jsonl"])
    assert case.seconds == (0.5, 0.6, 0.7) and case.anchor and case.foreign_cpu == 0.01 and case.scenario.model.num_experts == 8


@pytest.mark.parametrize("line, what", [
    ({}, "no 'scenario'"),
    ({"scenario": "small_moe", "layout": "mb4", "world": 1, "seconds": []}, "must be positive numbers"),
    ({"scenario": "small_moe", "layout": "mb4", "world": 1, "seconds": [math.pi, -1]}, "must be positive numbers"),
    ({"scenario": "small_moe", "layout": "mb4", "world": True, "seconds": [1.0]}, "world is 'True'"),
    ({"scenario": "small_moe", "layout": "mb4", "world": 1, "seconds": [1.0], "serie": "a"}, "did you mean series?"),
    ({"scenario": "smal_moe", "layout": "mb4", "world": 1, "seconds": [1.0]}, "no such file or scenario"),
    ({"scenario": "small_moe", "layout": "mb4 xx3", "world": 1, "seconds": [1.0]}, "xx3"),
    ({"scenario": "small_moe", "layout": "dp2 mb4", "world": 3, "seconds": [1.0]}, "is for 2 ranks, 3 ran"),
])
def test_bad_cases_are_one_line(tmp_path, line, what):
    path = tmp_path / "c.jsonl"
    path.write_text(json.dumps(line) + "\n")
    shown = CliRunner().invoke(app, ["validate", str(path)])
    assert isinstance(shown.exception, ValueError) and what in str(shown.exception) and str(shown.exception).startswith(f"{path}:1: ") and "\n" not in str(shown.exception)


def test_a_layout_that_cannot_run_is_listed(tmp_path):
    path = tmp_path / "c.jsonl"
    rows = [{"scenario": SCENARIO, "layout": layout, "world": 1, "seconds": [1.0]} for layout in ("mb4", "mb3")]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    shown = CliRunner().invoke(app, ["validate", str(path), "--each", "--json", str(tmp_path / "v.json")])
    assert shown.exit_code == 0 and "not a multiple of dp*mb*seq_len" in shown.output
    assert "predicted 1 of 2 cases" in shown.output and json.loads((tmp_path / "v.json").read_text())["support"]["cases"] == 2
