"""Does the search find what there is to find, say how sure that is, and give reasons that are true?"""

import json
import re
from dataclasses import replace

import numpy as np
import pytest

from moesim import engine, paths, search
from moesim.evaluate import GROUPS, Evaluator, grouped
from moesim.layout import LayoutError, parse_layout
from moesim.search import _mark_ties, list_ops, plan, simulate
from moesim.space import enumerate_layouts
from moesim.whynot import compare_measured
from small_scenarios import scenario

SMALL = {"ep": [1, 2, 4, 8], "zero": [1, 3], "micro_batch": [1, 2], "overlap": ["none", "grad+param"]}
WIDE = {"pp": [1, 2], "num_chunks": [1, 2], "tp": [1, 2], "ep": [2, 8], "zero": [1, 3], "micro_batch": [1, 2], "schedule": ["1f1b", "interleaved"], "recompute": ["none", "full"], "overlap": ["grad+param"]}


def exhaust(s):
    """Every layout of the space that fits, played: [(seconds, layout)]."""
    evaluator = Evaluator(s)
    space = enumerate_layouts(s, evaluator.stack.default_layout)
    layouts = [space.layout(row) for row in range(len(space))]
    return sorted((engine.run(evaluator.program(x), spans=False).makespan, str(x)) for x in layouts if evaluator.peak(x).total <= evaluator.budget_bytes)


def check_found(s, found, at_least=1):
    played = exhaust(s)
    assert len(played) == found.num_fit >= at_least
    assert found.candidates[0].step_s == pytest.approx(played[0][0], rel=1e-9)
    assert found.candidates[0].layout in {text for seconds, text in played if seconds <= played[0][0] * (1 + 1e-9)}
    # the gap bounds how much better anything could be
    assert found.gap is None or found.candidates[0].step_s / played[0][0] - 1 <= max(found.gap, 0.0) + 1e-9
    by_text = dict((text, seconds) for seconds, text in played)
    for c in found.candidates:
        assert c.step_s == pytest.approx(by_text[c.layout], rel=1e-9)


def stable(found) -> str:
    data = found.to_dict()
    data.pop("elapsed_s")
    return json.dumps(data, sort_keys=True, default=float)


def test_a_small_space_played_entirely_has_the_same_winner():
    s = scenario("moe", search=SMALL)
    found = plan(s, workers=1)
    check_found(s, found, 20)
    assert found.num_layouts == len(enumerate_layouts(s, Evaluator(s).stack.default_layout))
    assert found.num_layouts >= found.num_fit >= found.num_bounded >= found.num_path >= found.num_played >= len(found.candidates)
    assert [c.step_s for c in found.candidates] == sorted(c.step_s for c in found.candidates) and len(found.candidates) == 10


@pytest.mark.full
@pytest.mark.parametrize(("model", "search_axes", "sets"), [
    ("moe", {**WIDE, "zero": [0, 1, 2, 3], "graphs": ["none", "full"]}, []),
    ("mla", {**WIDE, "dispatcher": ["alltoall", "dedup"], "recompute": ["none"], "graphs": ["none", "full"], "optimizer": ["fp32", "bf16"]}, ["cluster.gpu.hbm_bytes=80 GB"]),
    ("window", {"pp": [1, 2, 4], "num_chunks": [1, 2], "ep": [1, 4], "zero": [1, 2, 3], "schedule": ["1f1b", "zbv", "dualpipev", "interleaved"], "overlap": ["none", "grad+param+ep", "fsdp1"]}, []),
])  # fmt: skip
def test_full_small_spaces_have_the_same_winner(model, search_axes, sets):
    s = scenario(model, search=search_axes, sets=sets)
    space = enumerate_layouts(s, Evaluator(s).stack.default_layout)
    assert 60 <= len(space) <= 300
    found = plan(s, workers=2)
    print(f"{model}: {len(space)} layouts, {found.num_fit} fit, {found.num_path} paths, {found.num_played} played, gap {found.gap:.3f}")
    check_found(s, found, 50)


def test_two_runs_are_identical_and_so_are_one_and_two_workers():
    """The answer depends on the question, not on the machine that works it out."""
    s = scenario("moe", search=WIDE)
    one, again, two = (stable(plan(s, workers=n)) for n in (1, 1, 2))
    assert one == again
    assert one == two


def test_workers_do_not_change_how_much_is_looked_at(monkeypatch):
    """Also where budgets end the walk: batches are the same whatever the number of workers."""
    monkeypatch.setattr(search, "PATH_BATCH", 4)
    monkeypatch.setattr(search, "PATHS_A_FAMILY", 1)
    monkeypatch.setattr(search, "PATH_LEAST", 8, raising=False)
    s = scenario("moe", search=WIDE)
    counts = {(p.num_path, p.num_played, p.gap) for p in (plan(s, workers=n, top=2) for n in (1, 2, 3))}
    assert len(counts) == 1


def test_the_gap_is_against_the_best_that_was_not_played(monkeypatch):
    monkeypatch.setattr(search, "ENGINE_BUDGET", 3)
    s = scenario("moe", search=SMALL)
    found = plan(s, workers=1, top=3)
    assert found.num_played == 3
    evaluator = Evaluator(s)
    space = enumerate_layouts(s, evaluator.stack.default_layout)
    played = {c.layout for c in found.candidates}
    rest = [space.layout(r) for r in range(len(space)) if str(space.layout(r)) not in played]
    path = paths.step_seconds([evaluator.program(x) for x in rest])
    assert found.gap == pytest.approx(found.candidates[0].step_s / min(path) - 1, rel=1e-9)


def test_the_gap_of_a_space_played_entirely_is_nothing():
    found = plan(scenario("moe", search={"ep": [1, 8]}), workers=1)
    assert found.num_played == found.num_fit == 2 and found.gap == 0.0


# --- ties -----------------------------------------------------------------------------------------------------------------------


def test_ties_are_what_the_band_can_not_tell_apart():
    base = plan(scenario("moe", search={"ep": [8]}), workers=1).candidates[0]
    band = lambda c, width: replace(c, low=c.tokens_per_s_per_gpu / width, high=c.tokens_per_s_per_gpu * width)  # noqa: E731
    best = band(base, 1.1)
    near, far, heavy = (band(replace(base, step_s=base.step_s * f, tokens_per_s_per_gpu=base.tokens_per_s_per_gpu / f), 1.1) for f in (1.02, 1.5, 1.01))
    marked = _mark_ties([best, near, far, replace(heavy, fits=False)])
    assert [c.tied for c in marked] == [False, True, False, False]
    exact = [band(replace(base, step_s=base.step_s * f), 1.0) for f in (1.0, 1.0001)]
    assert [c.tied for c in _mark_ties(exact)] == [False, False]
    assert _mark_ties([]) == []


# --- the user's own layout ------------------------------------------------------------------------------------------------------


def test_a_pinned_layout_is_ranked_and_flagged():
    s = scenario("moe", search={"ep": [4, 8], "overlap": ["grad+param"]})
    slow = plan(s, pin="dp8 ep2 zero0 rc:full", workers=1)
    assert [c.pinned for c in slow.candidates] == [False, False, True]
    assert slow.candidates[2].layout == str(Evaluator(s).legal("dp8 ep2 zero0 rc:full"))
    assert slow.num_layouts == 2
    known = plan(s, pin=slow.candidates[0].layout, workers=1)
    assert [c.pinned for c in known.candidates] == [True, False]
    fast = plan(scenario("moe", search={"recompute": ["full"], "overlap": ["none"]}), pin="dp8 ep8 zero1 graph:full ov:grad+param", workers=1)
    assert fast.candidates[0].pinned and fast.candidates[0].step_s < fast.candidates[1].step_s


def test_the_timeline_is_of_the_first_in_the_table():
    s = scenario("moe", search={"recompute": ["full"], "overlap": ["none"]})
    found = plan(s, pin="pp2 dp4 ep4 zero1 graph:full ov:grad+param", workers=1)
    assert found.candidates[0].pinned
    assert max(span["end"] for span in found.timeline) == pytest.approx(found.candidates[0].step_s, rel=1e-9)
    assert {span["rank"] for span in found.timeline} == {0, 1}


@pytest.mark.parametrize("pin", ["dp4", "dp8 ep3", "what", "dp8 zero9", "pp2 dp4 zbv"])
def test_an_illegal_pin_is_one_line(pin):
    with pytest.raises(LayoutError) as error:
        plan(scenario("moe", search={"ep": [8]}), pin=pin, workers=1)
    assert "\n" not in str(error.value)


def test_a_pin_that_does_not_fit_is_last_and_never_the_winner():
    s = scenario("moe", search={"zero": [3], "ep": [8]}, sets=["cluster.gpu.hbm_bytes=26 GB"])
    found = plan(s, pin="dp8 zero0", workers=1)
    assert [(c.fits, c.pinned) for c in found.candidates] == [(True, False), (False, True)]


# --- nothing to choose from -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("axes", [SMALL, {"ep": [8]}, {"zero": [1, 3]}])
def test_where_nothing_fits_there_is_no_winner_and_there_are_reasons(axes):
    found = plan(scenario("moe", search=axes, sets=["cluster.gpu.hbm_bytes=8 GB"]), workers=1)
    assert found.num_fit == found.num_played == 0 and found.candidates == () and found.gap is None and found.timeline == ()
    reasons = [r for r in found.rejections if r.reason.startswith("does not fit")]
    assert reasons and all("GiB" in r.reason and "GiB" in r.flip and r.count > 0 and parse_layout(r.example) for r in reasons)
    assert json.loads(json.dumps(found.to_dict(), default=float))


def test_what_would_make_it_fit_does():
    """The stated gigabytes, given to the GPU, are enough for the example, and a tenth less is not."""
    axes = {"zero": [1, 3], "ep": [1, 8]}
    found = plan(scenario("moe", search=axes, sets=["cluster.gpu.hbm_bytes=8 GB"]), workers=1)
    for rejection in found.rejections:
        more = float(re.search(r"fits with ([\d.]+) GiB more", rejection.flip)[1]) * 2**30
        for extra, fits in ((more * 1.01 + 0.06 * 2**30, True), (more * 0.9 - 0.06 * 2**30, False)):
            # The budget is what margin and reserve leave of the HBM.
            s = scenario("moe", search=axes)
            hbm = 8e9 + extra * (1 + s.memory.margin)
            evaluator = Evaluator(scenario("moe", search=axes, sets=[f"cluster.gpu.hbm_bytes={hbm / 1e9:.6f} GB"]))
            assert (evaluator.peak(evaluator.legal(rejection.example)).total <= evaluator.budget_bytes) == fits, rejection


def test_where_nothing_is_legal_the_reasons_are_counted():
    found = plan(scenario("moe", search={"ep": [3], "pp": [1, 3]}), workers=1)
    assert found.num_layouts == 0 and found.candidates == () and found.gap is None
    assert found.rejections and all(r.family == "not legal" and r.count > 0 and r.reason for r in found.rejections)


# --- reasons --------------------------------------------------------------------------------------------------------------------


def scaled(program, cause: str, factor: float):
    """The program with every kernel of one cause taking ``factor`` of its time."""
    roles = {role.removeprefix("exposed ") for role in GROUPS[cause]}

    def task(t):
        terms = tuple((role, term, s * factor if role in roles else s) for role, term, s in t.terms)
        seconds = sum(s for *_, s in terms) if t.terms else t.seconds
        return replace(t, terms=terms, seconds=seconds, lag_s=max(t.host_s, t.lag_s - (t.seconds - seconds)))

    return replace(program, bodies=tuple(tuple(map(task, body)) for body in program.bodies))


def test_flips_are_true():
    """Played with the named cause at the stated share of its time, the family's best is as fast as the winner."""
    s = scenario("moe", num_nodes=2, seq_len=4096, batch=64, search={"ep": [1, 4, 16], "recompute": ["none", "full"], "tp": [1, 2], "zero": [1], "overlap": ["grad+param"], "graphs": ["full"]})
    found, evaluator = plan(s, workers=1), Evaluator(s)
    checked = set()
    for rejection in found.rejections:
        flip = re.match(r"wins if its (.+?) took (\d+)% of today's time", rejection.flip)
        if not flip or flip[1] not in GROUPS or flip[1] in ("host launches", "pipeline bubble", "contention", "pipeline sends"):
            continue
        step = engine.run(scaled(evaluator.program(evaluator.legal(rejection.example)), flip[1], int(flip[2]) / 100), spans=False).makespan
        assert step == pytest.approx(found.candidates[0].step_s, rel=0.04), rejection
        checked.add(flip[1])
    assert {"expert all-to-all", "recompute"} <= checked


def test_rejections_say_how_much_slower_and_why():
    s = scenario("moe", search={"ep": [8], "recompute": ["none", "full"], "overlap": ["grad+param"], "graphs": ["full"]})
    found = plan(s, workers=1)
    (rejection,) = [r for r in found.rejections if r.family == "rc:full"]
    full = next(c for c in found.candidates if "rc:full" in c.layout)
    slower = full.step_s / found.candidates[0].step_s - 1
    assert rejection.reason.startswith(f"{100 * slower:.1f}% slower") and "recompute" in rejection.reason
    assert rejection.count == 1 and rejection.example == full.layout


def test_a_family_within_a_percent_is_not_called_slower():
    found = plan(scenario("moe", search=SMALL), workers=1)
    for r in found.rejections:
        percent = re.match(r"([\d.]+)% slower", r.reason)
        assert percent is None or float(percent[1]) >= 1.0


# --- measurements ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ratio", [0.4, 0.9, 1.0, 1.1, 3.0])
def test_a_measurement_is_inside_or_outside_and_explained(ratio):
    s = scenario("moe", search={"ep": [8], "overlap": ["none"]})
    c = plan(s, workers=1).candidates[0]
    measured = plan(s, workers=1, measured=c.tokens_per_s_per_gpu * ratio).measured
    assert measured["inside"] == (c.low <= c.tokens_per_s_per_gpu * ratio <= c.high)
    assert measured["ratio"] == pytest.approx(ratio, rel=1e-12) and measured["layout"] == c.layout
    assert measured["inside"] == (0.8 < ratio < 1.2)
    distance = [abs(np.log(e["factor"])) for e in measured["explanations"]]
    assert distance == sorted(distance) and len(distance) <= 5
    causes = grouped(c.breakdown)
    for e in measured["explanations"]:
        # that factor on that cause alone gives the measured step
        assert c.step_s + (e["factor"] - 1) * causes[e["cause"]] == pytest.approx(c.step_s / ratio, rel=1e-9)
        assert e["factor"] > 0


def test_a_measurement_is_held_against_the_pinned_layout():
    s = scenario("moe", search={"ep": [8], "overlap": ["grad+param"]})
    found = plan(s, workers=1, pin="dp8 ep2 zero0 rc:full", measured=1000.0)
    assert found.measured["layout"] == next(c for c in found.candidates if c.pinned).layout != found.candidates[0].layout
    assert compare_measured(Evaluator(s), [], 1000.0) is None and compare_measured(Evaluator(s), list(found.candidates), None) is None


# --- one layout, its ops --------------------------------------------------------------------------------------------------------


def test_simulate_is_the_row_of_the_table():
    s = scenario("moe", search={"ep": [8]}, layout="dp8 ep4 zero1")
    c = plan(s, workers=1).candidates[0]
    alone, timeline = simulate(s, c.layout)
    assert alone == c and timeline.makespan == c.step_s
    assert simulate(s)[0].layout == str(Evaluator(s).legal("dp8 ep4 zero1"))
    with pytest.raises(ValueError, match="has no layout of its own"):
        simulate(scenario("moe"))


def test_ops_of_a_layout_are_what_its_program_is_priced_from():
    s = scenario("moe", layout="dp8 ep8 zero1")
    evaluator = Evaluator(s)
    evaluator.program(evaluator.legal("dp8 ep8 zero1"))
    ops = list(list_ops(s))
    assert len(ops) == len(evaluator.parts.prices)
    assert [o["predicted_s"] for o in ops] == sorted((o["predicted_s"] for o in ops), reverse=True)
    assert json.loads(json.dumps(ops)) == ops
    assert {"Gemm", "Attention", "MemoryBound", "Collective", "Dispatch"} <= {o["op"] for o in ops}


def test_progress_goes_forward_and_never_past_its_end():
    told = []
    plan(scenario("moe", search=SMALL), workers=1, progress=lambda stage, done, total: told.append((stage, done, total)))
    assert list(dict.fromkeys(stage for stage, *_ in told)) == ["screening", "longest paths", "playing", "describing"]
    for stage in {stage for stage, *_ in told}:
        counts = [(done, total) for s, done, total in told if s == stage]
        assert all(done <= total for done, total in counts) and [d for d, _ in counts] == sorted(d for d, _ in counts)
