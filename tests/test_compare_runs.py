"""Does a comparison find the error that was put in, all of it and nothing else, and do lines from spans count the plan's ops?"""

from __future__ import annotations

import json
import re
from collections import Counter

import pytest
from recorded_runs import issued, plan_of, write_run
from typer.testing import CliRunner

from calibration import compare_page
from calibration.__main__ import app
from calibration.compare_runs import SPANS_APART, compare
from calibration.in_step import measurements
from calibration.run_folder import read_run
from moesim import engine
from moesim.measurement import from_record, op_of, to_record
from moesim.ops import Collective, Dispatch
from moesim.program import COMM, COMPUTE

LAYOUTS = [("mb4 zero0", 1), ("mb2 zero0 rc:full", 1), ("dp2 ep2 mb2", 2), ("dp2 mb4 zero3", 2), ("tp2 mb4", 2), ("cp2 mb4", 2), ("pp2 mb2", 2), ("pp2 dp2 ep2 mb1", 4)]


def terms_of(found) -> dict[str, float]:
    return {t.name: t.error for t in found.terms}


@pytest.mark.parametrize("layout, world", LAYOUTS)
def test_a_run_that_is_the_plan_has_no_residual(tmp_path, layout, world):
    planned = plan_of(layout, world)
    found = compare(read_run(write_run(tmp_path / "run", planned)), planned)
    errors = terms_of(found)
    idle = errors.pop("bubble", 0.0) + errors.pop("host", 0.0)  # spans of a file don't say what they waited for
    assert found.residual == pytest.approx(0.0, abs=1e-12) and idle == pytest.approx(0.0, abs=1e-9)
    assert all(abs(error) < 1e-9 for error in errors.values()), errors
    assert sum(t.predicted for t in found.terms) == pytest.approx(found.predicted_s)
    assert all(a.predicted == pytest.approx(a.measured, abs=1e-12) for a in found.aligned)
    assert all(o.measured == pytest.approx(o.predicted) for o in found.ops if world == 1)


@pytest.mark.parametrize("role, term", [("core_attn", "attention"), ("expert_up", "grouped_gemm"), ("qkv", "gemm"), ("rope", "elementwise"), ("loss", "loss"),
                                        ("optimizer", "end of step optimizer")])
def test_a_slower_role_is_the_residual_of_its_term(tmp_path, role, term):
    planned = plan_of("mb4 zero0")
    extra = sum(s.end - s.start for s in engine.run(planned.program).spans if planned.slot(s).role == role and s.stream == COMPUTE)
    found = compare(read_run(write_run(tmp_path / "run", planned, slower={role: 3.0})), planned)
    errors = terms_of(found)
    assert found.residual == pytest.approx(2 * extra) and errors.pop(term) == pytest.approx(2 * extra)
    assert all(abs(error) < 1e-9 for error in errors.values())
    assert {o.name for o in found.ops if abs(o.measured / o.predicted - 1) > 1e-6} == {o.name for o in found.ops if o.name.split()[0] == role}


def test_terms_add_up_to_the_median_steps_residual(tmp_path):
    planned = plan_of("mb4 zero0")
    found = compare(read_run(write_run(tmp_path / "run", planned, slower={"qkv": 1.5}, seconds=(9.0, 9.0, 9.0, 1.0, 1.25, 1.5, 1.0, 2.0, 2.0))), planned)
    assert found.measured_s == 1.375 and found.num_steps == 6  # the first steps are left out
    assert sum(terms_of(found).values()) == pytest.approx(found.residual, rel=1e-12)
    assert terms_of(found)[SPANS_APART] == pytest.approx(1.375 - found.predicted_s - terms_of(found)["gemm"])


@pytest.mark.parametrize("layout, world", LAYOUTS)
def test_lines_count_every_op_of_the_plan_as_often_as_it_is_issued(tmp_path, layout, world):
    """Conservation: occurrences of all lines, times their ops, are the step's ops (a rank's, and a collective once a stage). Copies of
    shards, which the plan has beside the collectives' stream and the trainer on its own, apart."""
    planned = plan_of(layout, world)
    lines = measurements(read_run(write_run(tmp_path / "run", planned, steps=2)), planned)
    counted: Counter = Counter()
    for m in lines:
        assert from_record(json.loads(json.dumps(to_record(m)))) == m and m.method["where"] == "step"
        ops = [(m.op, m.method["calls"])] if m.op is not None else [(op_of(o), o["count"]) for o in m.parameters["ops"]]
        for op, times in ops:
            ranks = 1 if isinstance(op, (Collective, Dispatch)) else world // planned.layout.pp
            counted[op] += times * len(m.seconds) / 2 / ranks
    expected: Counter = Counter()
    for counts in issued(planned):
        for one, times in counts.items():
            if one.role != "pp_send" and planned.parts.price(one.op)[0] > 0:
                expected[one.op] += times
    assert {op: round(n, 9) for op, n in counted.items() if _is_counted(op, planned)} == {op: n for op, n in expected.items() if _is_counted(op, planned)}


def _is_counted(op, planned) -> bool:
    return planned.parts.price(op)[0] > 0 and getattr(op, "kind", "") != "copy"


def test_seconds_of_a_line_are_those_of_the_span(tmp_path):
    planned = plan_of("mb4 zero0")
    lines = measurements(read_run(write_run(tmp_path / "run", planned)), planned)
    (core,) = [m for m in lines if m.parameters["roles"] == ["core_attn"] and m.parameters["phase"] == "F"]
    assert core.median == pytest.approx(planned.seconds(0, ["core_attn"], "F")) and len(core.seconds) == 2 * 4 * 3 and core.windows == (12, 12)
    (norm,) = [m for m in lines if m.parameters["roles"] == ["norm"] and m.parameters["phase"] == "F" and m.method["calls"] == 2]
    assert norm.median == pytest.approx(planned.seconds(0, ["norm"], "F") / 2)


def test_a_collective_counts_for_the_last_rank_to_arrive(tmp_path):
    """Rank 1 waits 1 s for rank 0 in a dispatch: what the exchange took is what rank 0 saw."""
    planned = plan_of("dp2 ep2 mb2", 2)
    folder = write_run(tmp_path / "run", planned)
    path = folder / "spans" / "spans-rank00001.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines:
        if line["line"] == "span" and line["stream"] == COMM:
            line["start"] -= 1.0
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    sent = [m for m in measurements(read_run(folder), planned) if isinstance(m.op, Dispatch)]
    assert sent and all(max(m.seconds) < 0.5 for m in sent)


def test_the_page_is_one_file_and_escapes_what_it_shows(tmp_path):
    evil = "</script><img src=x onerror=alert(1)>"
    planned = plan_of("mb4 zero0", name=evil)
    page = compare_page.render(compare(read_run(write_run(tmp_path / "run", planned)), planned))
    own = page[page.rindex("const FIGURES"):]
    assert evil not in page and "&lt;img" in page and "http" not in own
    figures = json.loads(re.search(r"const FIGURES = (.*);\n", own)[1])
    assert set(figures) == set(compare_page.CHARTS)
    lanes = {y for trace in figures["timeline"]["data"] for y in trace["y"]}
    assert {"0 pred compute", "0 meas compute"} <= lanes


def test_the_commands_print_and_write(tmp_path):
    folder = str(write_run(tmp_path / "run", plan_of("mb4 zero0"), slower={"qkv": 2.0}))
    shown = CliRunner().invoke(app, ["compare", folder, "--json", str(tmp_path / "c.json")])
    assert shown.exit_code == 0 and "gemm" in shown.output and "of residual" in shown.output
    written = json.loads((tmp_path / "c.json").read_text())
    assert sum(t["error"] for t in written["terms"]) == pytest.approx(written["residual_s"])
    shown = CliRunner().invoke(app, ["ops", folder, "-o", str(tmp_path / "m.jsonl")])
    assert shown.exit_code == 0 and len((tmp_path / "m.jsonl").read_text().splitlines()) > 20


@pytest.mark.parametrize("break_it, what", [
    (lambda f: None, "no such folder"),
    (lambda f: (f.mkdir(), (f / "metrics.jsonl").write_text("")), "say what ran with --scenario"),
    (lambda f: (f.mkdir(), (f / "manifest.json").write_text("{}")), "not the manifest of a run"),
    (lambda f: [p.unlink() for p in write_run(f, plan_of("mb4 zero0")).glob("spans/*")], "no spans"),
    (lambda f: (write_run(f, plan_of("mb4 zero0")) / "spans" / "spans-rank00001.jsonl").write_text('{"line": "span"}\n'), "neither a step nor a span"),
    (lambda f: (write_run(f, plan_of("mb4 zero0")) / "metrics.jsonl").write_text('{"kind": "step", "step": 1, "seconds": -1}\n'), "seconds -1"),
])
def test_bad_folders_are_one_line(tmp_path, break_it, what):
    break_it(tmp_path / "run")
    with pytest.raises(ValueError, match=re.escape(what)) as refused:
        compare(read_run(tmp_path / "run"), plan_of("mb4 zero0"))
    assert "\n" not in str(refused.value)


def test_a_span_file_that_was_cut_off_is_refused(tmp_path):
    """What a killed recorder leaves would stand for a whole step, and terms would no longer add up to it."""
    import json

    from calibration.run_folder import _spans
    from moesim.timeline import Span

    folder = tmp_path / "spans"
    folder.mkdir()
    header = {"line": "step", "schema": 1, "rank": 0, "step": 4, "clock": 0.0, "makespan": 1.0}
    span = {"line": "span", "step": 4, "extra": {}, **Span(0, 0, "norm forward", "norm", 0.0, 0.1, "0F0")._asdict()}
    (folder / "spans-rank00000.jsonl").write_text(json.dumps(header) + "\n" + json.dumps(span) + "\n")
    with pytest.raises(ValueError, match="cut off"):
        _spans(tmp_path)
