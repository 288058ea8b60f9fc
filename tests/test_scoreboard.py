"""Does the scoreboard count what it says, notice what got worse, and print what is committed?"""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import asdict, replace

import pytest

from calibration import scoreboard, scoreboard_command, scoreboard_figures, scoreboard_full, scoreboard_page, scoreboard_readme, scoreboard_rows
from calibration.coverage import TEST_FOLD
from calibration.coverage_table import Kernel, _kernel, load_kernels, table
from calibration.folds import MEASUREMENTS, fold_of, read_excluded
from calibration.out_of_fold import LABELS
from calibration.scoreboard_pairs import PAIRS, changed_id, changed_rows, kept_share, pair_figures
from calibration.scoreboard_rows import Answer, answers, play, predictions, question
from moesim.anchored import RunSimulator
from moesim.coverage import KINDS
from moesim.predict import predict_row, read_rows
from moesim.runs import Run, parse_run, parse_runs

ROWS = read_rows(MEASUREMENTS / "published_runs.csv")
BY_ID = {row["id"]: row for row in ROWS}
RUNS = {run.id: run for run in parse_runs([*ROWS, *changed_rows(BY_ID)]) if isinstance(run, Run)}
NONE = (0.0,) * len(KINDS)


def oracle(factor=1.0, slope=NONE):
    """Answers that know what was measured, off by a factor."""
    rate = lambda run: factor * (run.measured.tokens_per_s_per_gpu or 1.0)  # noqa: E731
    return {i: Answer(rate(run), 0.9 * rate(run), 1.1 * rate(run), 1e9, True, 0.25 * (len(i) % 4), slope) for i, run in RUNS.items()}


def scored(found):
    return scoreboard_figures.figures(ROWS, RUNS, found, predictions(ROWS, found))


@pytest.fixture(scope="module")
def exact(module_without_memory):
    return scored(oracle())


@pytest.fixture(scope="module")
def module_without_memory():
    """Memory has tests of its own and takes seconds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scoreboard_figures, "memory", lambda rows: {"n": 71, "median": 0.02, "mean": 0.1, "p90": 0.2, "bias": 0.0, "under_by_5_percent": 3})
        yield


# --- figures ----------------------------------------------------------------------------------------------------------------


def test_an_oracle_is_right_everywhere(exact):
    data, _ = exact
    for label in LABELS:
        assert data["labels"][label]["all"]["p90"] < 1e-3 and data["labels"][label]["all"]["coverage"] == 1
    assert data["ranking"]["mean_regret"] < 1e-6 and data["scaling"]["max_abs"] < 1e-4 and data["fitted"]["all"]["n"] > 600
    assert all(b["median"] < 1e-3 for groups in data["by"].values() for b in groups.values())


def test_a_factor_that_no_kernel_explains_is_bias(module_without_memory):
    data, _ = scored(oracle(1.3))
    for label in LABELS:
        assert data["labels"][label]["all"]["bias"] == pytest.approx(0.3, abs=2e-3)
    assert data["ranking"]["mean_regret"] < 1e-6


def test_a_factor_that_kernels_explain_is_learned_from_the_other_runs(module_without_memory):
    slope = tuple(1.0 if kind == "memory" else 0.0 for kind in KINDS)
    data, _ = scored(oracle(1.3, slope))
    assert data["fitted"]["all"]["bias"] == pytest.approx(0.3, abs=2e-3) and abs(data["labels"][LABELS[0]]["all"]["bias"]) < 0.03


def test_the_test_fold_and_excluded_rows_are_in_the_support_only(exact):
    data, judged = exact
    assert data["support"]["moe"]["rows"] + data["support"]["dense"]["rows"] == len(ROWS)
    for members in judged.values():
        assert members and not any(fold_of(j.row) == TEST_FOLD or j.id in read_excluded() for j in members)
    assert sum(data["support"]["unsupported"].values()) == sum(data["support"][k]["rows"] - data["support"][k]["predicted"] for k in ("moe", "dense"))


def test_each_row_counts_once_in_every_grouping(exact):
    data, judged = exact
    for groups in data["by"].values():
        assert sum(b["n"] for b in groups.values()) == len(judged["shipped"])


def test_the_baseline_is_scored_on_the_same_rows(exact):
    data, _ = exact
    for found in data["labels"].values():
        for b in found.values():
            assert b["baseline"]["n"] <= b["n"] and b["baseline"]["n"] >= 0.9 * b["n"] and b["baseline"]["median"] > 0.01


def test_bands_are_told_apart_by_provenance(module_without_memory):
    found = {i: replace(a, far=0.9 if "h100" in i else 0.1, low=a.low * (0.8 if "h100" in i else 1)) for i, a in oracle().items()}
    bands = scored(found)[0]["bands"]
    assert bands["from afar"]["width"] > bands["measured or interpolated"]["width"] and bands["from afar"]["n"] > 50


def test_pairs_and_the_kept_share_are_ratios(exact):
    data, _ = exact
    for pair in data["pairs"]:
        if pair["name"] != "full CUDA graph, Qwen3-30B on 8 GB200":
            assert pair["predicted"] == pytest.approx(pair["measured"], abs=1e-3)
    assert [round(p["measured"], 2) for p in data["pairs"]] == [1.18, 1.26, 1.80]
    assert {n: round(share, 2) for n, share in data["kept_share"]["measured"].items()} == {"512": 0.96, "2048": 0.81, "4096": 0.73, "8192": 0.56}
    assert data["kept_share"]["predicted"] == pytest.approx(data["kept_share"]["measured"], abs=2e-4)


def test_a_pair_whose_side_is_not_answered_says_so():
    found = oracle()
    found[PAIRS[0].base] = Answer(reason="no")
    assert pair_figures(found, RUNS)[0]["predicted"] is None and kept_share({}, RUNS) == {}


def test_the_turned_knob_reaches_the_run():
    (pair,) = (p for p in PAIRS if p.change)
    assert RUNS[changed_id(pair)].layout.graphs == "full" != RUNS[pair.base].layout.graphs


def test_rows_of_somebody_else_are_labelled_by_the_shipped_fit(module_without_memory):
    rows = [{**BY_ID["mb-26.02-dsv3-gb200-256-mxfp8-g4096"], "id": "seen"}, {**BY_ID["mb-26.02-dsv3-gb200-256-mxfp8-g4096"], "id": "new", "notes": "container NeMo 99.1"}]
    runs = {r["id"]: parse_run(r) for r in rows}
    found = {i: Answer(run.measured.tokens_per_s_per_gpu, 1.0, 1e6) for i, run in runs.items()}
    data, _ = scoreboard_figures.figures(rows, runs, found, predictions(rows, found), known=False)
    assert set(data["labels"]) >= {"unseen stack"} and sum(b["all"]["n"] for b in data["labels"].values()) == 2 and "pairs" not in data
    assert data["by"]["kind"]["moe"]["baseline"]["n"] == 2


# --- answers ----------------------------------------------------------------------------------------------------------------

FEW = ("simumax-", "mpt-7b")


def few() -> list[Run]:
    """Quick runs: the first of each source."""
    return [next(run for i, run in RUNS.items() if i.startswith(prefix)) for prefix in FEW]


def test_answers_are_what_predict_writes():
    """Sharing parts and keeping answers changes nothing."""
    runs = few()
    found = {run.id: play([run])[0] for run in runs}
    for run in runs:
        assert predictions([BY_ID[run.id]], found)[run.id] == predict_row(BY_ID[run.id], RunSimulator())
        assert len(found[run.id].slope) == len(KINDS) and 0 <= sum(found[run.id].slope) < 1.2


def test_a_question_is_played_once_and_kept(tmp_path, monkeypatch):
    calls = []

    def fake(runs):
        calls.extend(run.id for run in runs)
        return [Answer(1.0 + len(run.id), 1.0, 99.0, slope=NONE) for run in runs]

    monkeypatch.setattr(scoreboard_rows, "play", fake)
    run = few()[0]
    twin, other = replace(run, id="twin"), replace(few()[1], id="other")
    first = answers([run, twin, other], workers=1, folder=tmp_path)
    assert sorted(calls) == sorted([run.id, "other"]) and first["twin"] == first[run.id] != first["other"]
    with next(tmp_path.glob("*.jsonl")).open("a") as file:
        file.write('["cut short by a k')
    assert answers([run, twin, other], workers=1, folder=tmp_path) == first and len(calls) == 2


def test_a_question_is_the_work_and_never_what_was_measured():
    run = few()[0]
    assert question(run) == question(replace(run, id="x", measured=replace(run.measured, tokens_per_s_per_gpu=1.0), series="y"))
    assert question(run) != question(replace(run, proxy_dispatcher=not run.proxy_dispatcher))


def test_the_hash_covers_what_predicts_and_leaves_out_what_prints():
    root = scoreboard_rows.Path(scoreboard_rows.moesim.__file__).parent
    reached = {str(p.relative_to(root)) for p in scoreboard_rows._reached(root)}
    assert {"engine.py", "rank.py", "costs/gemm.py", "schedules/__init__.py", "run_fields.py", "coverage.py", "anchored.py", "memory.py"} <= reached
    assert not {"cli.py", "page.py", "report.py", "charts.py", "launch.py", "search.py"} & reached


def test_old_states_of_the_code_are_forgotten(tmp_path, monkeypatch):
    monkeypatch.setattr(scoreboard_rows, "KEPT_FILES", 3)
    for i in range(5):
        scoreboard_rows.append_lines(tmp_path / f"{i}.jsonl", [("key", i)])
    assert len(list(tmp_path.glob("*.jsonl"))) == 3


# --- better and worse -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name, was, now, worse", [
    ("a > median", 0.06, 0.08, True), ("a > median", 0.06, 0.064, False), ("a > median", 0.06, 0.03, False), ("a > bias", -0.02, 0.05, True), ("a > bias", 0.05, -0.01, False),
    ("a > coverage", 0.85, 0.7, True), ("a > coverage", 0.95, 0.82, False), ("a > mean_tau", 0.8, 0.7, True), ("a > predicted", 341, 300, True), ("a > score", 0.5, 0.6, True),
])
def test_worse_by_the_rule_of_the_figure(name, was, now, worse):
    assert (scoreboard.loss(name, was, now) > scoreboard.ABSOLUTE + scoreboard.RELATIVE * abs(was)) is worse


def figures_of(median=0.05, n=50, pair=1.1):
    b = {"n": n, "median": median, "mean": 0.1, "p90": 0.2, "bias": 0.0, "coverage": 0.9, "width": 0.4, "score": 0.5, "baseline": {"n": n, "median": 9.0}}
    few_rows = {**b, "n": 3, "median": 20 * median}
    return {
        "support": {"moe": {"rows": 9, "predicted": 8}, "dense": {"rows": 9, "predicted": 9}, "unsupported": {"<b>why</b>": 1}},
        "labels": {label: {"all": b, "moe": b, "dense": few_rows} for label in LABELS}, "fitted": {"all": b}, "by": {"gpu": {"H100": b, "<script>": few_rows}},
        "ranking": {"series": {"<i>s": {"n": 12, "tau": 0.5, "regret": 0.1}}, "n": 12, "mean_tau": 0.8, "mean_regret": 0.03, "max_regret": 0.4},
        "scaling": {"series": {}, "n": 20, "mean_abs": 0.03, "max_abs": 0.2}, "bands": {"from afar": {"n": 20, "width": 0.5, "coverage": 0.9, "score": 0.6}},
        "memory": {"n": 70, "median": 0.02, "mean": 0.1, "p90": 0.3, "bias": 0.0, "under_by_5_percent": 3},
        "pairs": [{"name": "overlap", "knob": "ov", "predicted": pair, "measured": 1.2}], "kept_share": {"series": "s", "predicted": {"512": 0.9}, "measured": {"512": 0.95}},
    }


def test_what_moved_is_one_line_a_figure():
    worse, better = scoreboard.moved(figures_of(), figures_of(median=0.07))
    assert len(worse) == 8 and not better and "labels > unseen layout > all > median: was 0.05, is 0.07" in worse
    assert not any("<script>" in line or "dense" in line for line in worse)  # three rows carry no bar
    assert scoreboard.moved(figures_of(), figures_of(median=0.03))[0] == [] and scoreboard.moved(figures_of(), figures_of()) == ([], [])
    assert scoreboard.moved(figures_of(), figures_of(pair=0.9))[0] == ["pair > overlap > off: was -0.0833, is -0.25"]


def test_a_figure_that_vanishes_is_worse():
    now = figures_of()
    del now["labels"]["unseen GPU"]
    assert any("is no more" in line for line in scoreboard.moved(figures_of(), now)[0])


def test_rows_that_vanish_are_worse():
    assert any(line.endswith("> n: was 50, is 45") for line in scoreboard.moved(figures_of(), figures_of(n=45))[0])


@pytest.fixture
def apart(tmp_path, monkeypatch):
    """Committed figures, log and README of this test alone; a look that answers at once."""
    shutil.copy(scoreboard.LOG, tmp_path / "log.md")
    (tmp_path / "README.md").write_text(f"before\n{scoreboard_readme.BEGIN}\nold\n{scoreboard_readme.END}\nafter\n")
    monkeypatch.setattr(scoreboard, "COMMITTED", tmp_path / "scoreboard.json")
    monkeypatch.setattr(scoreboard, "LOG", tmp_path / "log.md")
    monkeypatch.setattr(scoreboard_readme, "README", tmp_path / "README.md")
    state = {"figures": figures_of()}
    monkeypatch.setattr(scoreboard, "look", lambda rows=None, **_: (state["figures"], {}))
    return tmp_path, state


def run(**options):
    values = dict(rows=None, json_file=None, html=None, check=False, update=False, full=False, because=None, workers=1, quiet=True)
    return scoreboard_command.run(**{**values, **options})


def test_check_fails_until_it_is_said(apart, capsys):
    folder, state = apart
    assert run(update=True, because="first") == 0
    assert run(check=True) == 0
    state["figures"] = figures_of(median=0.09)
    assert run(check=True) == scoreboard_command.WORSE
    out = capsys.readouterr().out
    assert "worse: labels > unseen GPU > moe > median: was 0.05, is 0.09" in out and "--because" in out
    assert run(update=True, because="a | meant\nchange") == 0 and "\nworse: labels > unseen layout > all > median: was 0.05, is 0.09" in capsys.readouterr().out
    assert run(check=True) == 0
    assert "after" in (folder / "README.md").read_text() and "9.0%" in (folder / "README.md").read_text() and "old" not in (folder / "README.md").read_text()
    last = (folder / "log.md").read_text().splitlines()[-1]
    assert last.count("|") == 5 and "a / meant change" in last and "9.0%" in last


def test_a_look_is_logged_or_owed(apart, capsys):
    folder, _ = apart
    before = (folder / "log.md").read_text()
    run(json_file=folder / "f.json")
    assert (folder / "log.md").read_text() == before and "--because" in capsys.readouterr().err
    run(because="looked for the worst release")
    assert (folder / "log.md").read_text().startswith(before.rstrip("\n")) and "worst release" in (folder / "log.md").read_text()
    assert json.loads((folder / "f.json").read_text())["quick"]["labels"]


@pytest.mark.parametrize("options, said", [
    ({"update": True}, "--because"), ({"update": True, "because": " "}, "--because"), ({"check": True, "update": True, "because": "x"}, "one of the two"),
    ({"rows": "a.csv", "check": True}, "leave out --rows"), ({"check": True}, "scoreboard.json: not there"),
])
def test_bad_options_are_one_line(apart, options, said):
    with pytest.raises(ValueError, match=said) as caught:
        run(**options)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["", "{", "[]", "{}"])
def test_damaged_figures_are_one_line(apart, text):
    (apart[0] / "scoreboard.json").write_text(text)
    with pytest.raises(ValueError, match="scoreboard.json"):
        run(check=True)
    assert run(update=True, because="repaired") == 0 and run(check=True) == 0


# --- what is committed ------------------------------------------------------------------------------------------------------


def test_the_readme_prints_what_is_committed():
    text = scoreboard_readme.README.read_text()
    assert scoreboard_readme.replaced(text, scoreboard.committed()) == text, "python -m calibration scoreboard --update writes it"


def test_committed_figures_say_where_they_come_from():
    data = scoreboard.committed()
    for part in ("quick", "full"):
        assert set(data[part]["stamp"]) == {"date", "commit", "inputs"} and len(data[part]["stamp"]["inputs"]) == 16
    assert len(scoreboard.checked(data["quick"])) > 200 and data["quick"]["stamp"]["date"] in scoreboard.LOG.read_text()


def test_ci_asks_for_the_check():
    script = (scoreboard.ROOT / ".ci" / "run").read_text()
    assert "line accuracy" in script and "python -m calibration scoreboard --check" in scoreboard_readme.README.read_text()


@pytest.mark.full
def test_the_committed_figures_still_hold(tmp_path):
    """What CI runs as a command of its own: two minutes on two cores."""
    quick, _ = scoreboard.look(folder=tmp_path)
    assert scoreboard.moved(scoreboard.committed()["quick"], quick)[0] == []


# --- anchored sites ---------------------------------------------------------------------------------------------------------


def test_a_sites_own_rows_never_reach_its_factors(exact):
    _, judged = exact
    slope = tuple(1.0 if kind == "memory" else 0.0 for kind in KINDS)
    found = oracle(1.0, slope)
    name = next(s.name for s in scoreboard_full.sites(judged["shipped"], found)[0] if s.name.startswith("aws: b300"))
    wild = {i: replace(a, tokens_per_s_per_gpu=3 * a.tokens_per_s_per_gpu) if i.startswith("aws-q235-b300") else a for i, a in found.items()}
    (before, zero), (after, off) = (scoreboard_full.sites(judged["shipped"], f) for f in (found, wild))
    site = next(s for s in after if s.name == name)
    assert next(s for s in before if s.name == name).coverage == site.coverage
    assert all(off[run.id].error == pytest.approx(zero[run.id].error + math.log(3), abs=1e-9) for run in site.rest)
    assert len(site.anchors) == 3 and not {r.id for r in site.anchors} & {r.id for r in site.rest}


def test_anchors_move_a_site_towards_its_runs(exact):
    """A real site of quick runs whose measurements are all 20% lower: its other runs follow."""
    _, judged = exact
    site = next(s for s in scoreboard_full.sites(judged["shipped"], oracle())[0] if s.name.startswith("simumax"))
    rate = lambda run: play([run], coverage=site.coverage)[0].tokens_per_s_per_gpu  # noqa: E731
    slower = lambda run: replace(run, measured=replace(run.measured, tokens_per_s_per_gpu=0.8 * rate(run)))  # noqa: E731
    anchors, rest = tuple(slower(run) for run in site.anchors), site.rest[:2]
    result = scoreboard_full.judge_site(replace(site, anchors=anchors, rest=rest))
    for run in rest:
        assert 0.72 < result["answers"][run.id]["tokens_per_s_per_gpu"] / rate(run) < 0.9
    assert json.dumps(result)


# --- page and kernels -------------------------------------------------------------------------------------------------------


def test_the_page_is_whole_and_escapes_names(exact):
    _, judged = exact
    evil = replace(judged["shipped"][0], id="<img src=x onerror=alert(1)>", row={**judged["shipped"][0].row, "model": "</script><b>", "gpu_type": "<u>"})
    full = {"test fold": {"all": figures_of()["labels"][LABELS[0]]["all"]}, "zero-shot, rest of anchored sites": {}, "anchored": {}, "sites": {}}
    text = scoreboard_page.render(figures_of(), {LABELS[0]: [evil, *judged[LABELS[0]][:20]], "shipped": []}, full)
    assert "<img src=x" not in text and "<script>" == text[text.index("<script>"):][:8] and "&lt;script&gt;" in text and "<u>" not in text
    own = text.split("<script>")[0]
    assert "Content-Security-Policy" in own and not any(f"{word}={quote}http" in own for word in ("src", "href") for quote in "'\"") and "Plotly.newPlot" in text
    assert text.count("</script>") == 2


def test_kernel_rows_are_legal_sourced_or_assumed():
    features, rows = load_kernels()
    assert len(rows) > 25 and {k.feature for k in rows} == set(features)
    for k in rows:
        assert k.source and (k.provenance == "assumed" or "http" in k.source or k.source.startswith("moetrain/")), k
    lines = table()
    assert any("megatron_core" in line and "grouped_wgrad" in line for line in lines) and any("dispatch" in line for line in lines)


@pytest.mark.parametrize("change, said", [({"stack": "megatron"}, "nearest"), ({"fused": "maybe"}, "yes, part, no"), ({"precisions": []}, "precisions"), ({"extra": 1}, "extra")])
def test_a_bad_kernel_row_is_one_line(change, said):
    _, rows = load_kernels()
    row = {**asdict(rows[0]), "precisions": ["bf16"], **change}
    with pytest.raises(ValueError, match=said):
        _kernel(1, row, {rows[0].feature: {}})
    assert isinstance(_kernel(1, {**asdict(rows[0]), "precisions": ["bf16"]}, {rows[0].feature: {}}), Kernel)
