"""Do folds, labels and scores mean what the protocol says?"""

import csv
import json
import math
import random

import numpy as np
import pytest

from calibration import baseline, metrics, score
from calibration.folds import MEASUREMENTS, NUM_FOLDS, fold_of, format_folds, group_key, label_of, read_excluded, read_folds, splits
from moesim.predict import predict, read_rows, write_predictions
from moesim.runs import Run, parse_run, parse_runs
from small_scenarios import Answer

ROWS = read_rows(MEASUREMENTS / "published_runs.csv")
BY_ID = {row["id"]: row for row in ROWS}
RUNS = [run for run in parse_runs(ROWS) if isinstance(run, Run)]


def exact(factor=1.0):
    """An oracle that knows the answers, off by a factor."""
    def simulate(run):
        point = factor * (parse_run(BY_ID[run.id]).measured.tokens_per_s_per_gpu or 1.0)
        return Answer(point, 0.8 * point, 1.25 * point)
    return simulate


def scored(tmp_path, simulate, **kwargs):
    write_predictions(tmp_path / "p.csv", predict(ROWS, simulate))
    return score.score(ROWS, score.read_predictions(tmp_path / "p.csv"), **kwargs)


def test_folds_file_follows_the_rule():
    assert (MEASUREMENTS / "folds.csv").read_text(encoding="utf-8") == format_folds(ROWS)


def test_a_group_lies_in_one_fold_and_folds_are_even():
    seen = {}
    for row in ROWS:
        assert seen.setdefault(group_key(row), fold_of(row)) == fold_of(row)
    sizes = [sum(f == fold for f in read_folds().values()) for fold in range(NUM_FOLDS)]
    assert min(sizes) > 0.7 * len(ROWS) / NUM_FOLDS


def test_releases_and_policies_of_one_configuration_stay_together():
    row = BY_ID["mb-26.02-dsv3-gb200-256-mxfp8-g4096"]
    twin = {**row, "id": "x", "notes": "container NeMo 99.1", "recompute": "full", "vpp": "", "mbs": "", "dispatcher": "alltoall"}
    assert fold_of(twin) == fold_of(row)
    assert group_key({**row, "gpu_type": "H100"}) != group_key(row)


def test_splits_hold_out_every_row_once_and_never_leak():
    held = {}
    for split in splits(ROWS):
        assert not set(split.fit) & set(split.held)
        held.setdefault(split.name.split()[0], []).extend(split.held)
        fit = [BY_ID[i] for i in split.fit]
        assert label_of(BY_ID[split.held[0]], fit) == split.label
    assert {kind: sorted(ids) for kind, ids in held.items()} == {kind: sorted(BY_ID) for kind in ("fold", "GPU", "stack")}


def test_labels():
    row = BY_ID["mb-26.02-dsv3-gb200-256-mxfp8-g4096"]
    same_stack = BY_ID["mb-26.02-dsv3-b300-256-mxfp8-g4096"]
    assert label_of(row, [row]) == "unseen layout"
    assert label_of(row, [same_stack]) == "unseen GPU"
    assert label_of(row, [{**row, "notes": "container NeMo 25.11"}]) == "unseen stack"


def test_excluded_rows_exist_and_say_why():
    assert all(i in BY_ID and len(why) > 20 for i, why in read_excluded().items())


def test_baseline_is_exact_on_its_own_model():
    runs = RUNS[::11]
    for run in runs:
        assert baseline.ideal_tokens(run) > 0
    assert baseline.fit([r for r in runs if r.measured.tokens_per_s_per_gpu]) > 0
    single = next(r for r in RUNS if r.layout.pp == 1 and r.measured.tokens_per_s_per_gpu)
    assert baseline.predict(single, baseline.fit([single])) == pytest.approx(single.measured.tokens_per_s_per_gpu)
    with pytest.raises(ValueError, match="no measured run"):
        baseline.fit([])


def test_baseline_bubble_is_the_textbook_one():
    run = next(r for r in RUNS if r.layout.pp == 8 and r.layout.vpp == 1 and r.layout.precision == "bf16")
    m = run.workload.global_batch_tokens // (run.layout.dp * run.layout.mb * run.workload.seq_len)
    no_bubble = run.cluster.gpu.peak_flops["bf16"] / run.model.flops_per_token(run.workload.seq_len)
    assert baseline.ideal_tokens(run) / no_bubble == pytest.approx(1 - 7 / (m + 7))


def test_errors_by_hand():
    found = metrics.errors([110, 80, 100], [100, 100, 100])
    assert found["median"] == pytest.approx(0.1) and found["mean"] == pytest.approx(0.1) and found["bias"] == pytest.approx(0.0)
    assert found["n"] == 3 and found["indicative"] and metrics.errors([], []) == {"n": 0}


def test_tau_b_equals_scipys_and_ties_close_pairs():
    stats = pytest.importorskip("scipy.stats")
    rng = random.Random(3)
    for _ in range(30):
        a = [rng.choice((1.0, 2.0, 3.0, 5.0)) for _ in range(8)]
        b = [rng.choice((1.0, 2.0, 4.0)) for _ in range(8)]
        expected = stats.kendalltau(a, b).statistic
        got = metrics.kendall_tau_b(a, b, spread=1e-9)
        assert got is None and math.isnan(expected) or got == pytest.approx(expected)
    assert metrics.kendall_tau_b([1, 2, 3], [100, 101, 200]) == pytest.approx(2 / math.sqrt(2 * 3))
    assert metrics.kendall_tau_b([1, 2], [100, 101]) is None


def test_regret_by_hand():
    assert metrics.regret([5, 3], [100, 80]) == 0
    assert metrics.regret([3, 5], [100, 80]) == pytest.approx(0.2)
    assert metrics.regret([5, 5, 1], [100, 70, 10]) == pytest.approx(0.3)  # a tie may turn out badly


def test_interval_figures_by_hand():
    found = metrics.intervals([90, 90], [110, 110], [100, 120])
    assert found["coverage"] == 0.5
    assert found["score"] == pytest.approx((20 / 100 + (20 + 10 * 10) / 120) / 2)


def test_interval_score_is_best_for_the_true_quantiles():
    rng = np.random.default_rng(0)
    measured = np.exp(rng.normal(0, 0.1, 20_000))
    by_width = {z: metrics.intervals([math.exp(-z * 0.1)] * 20_000, [math.exp(z * 0.1)] * 20_000, measured)["score"] for z in (0.6, 1.2816, 2.5)}
    assert min(by_width, key=by_width.get) == 1.2816


def test_kept_share():
    assert metrics.kept_share_errors([8, 4], [90, 100], [80, 100]) == pytest.approx([0.1])


def test_repeat_spread():
    assert metrics.repeat_spread([[100, 102], [5.0]])["median"] == pytest.approx(2 / 101)


def test_a_perfect_oracle_scores_perfectly(tmp_path):
    found = scored(tmp_path, exact())
    fitted, held = (found["zero_shot"][name] for name in ("fitted folds", "held-out fold"))
    assert fitted["error"]["n"] > 550 and held["error"]["n"] > 100
    for block in (fitted, held):
        assert block["error"]["p90"] < 1e-4 and block["interval"]["coverage"] == 1
    assert found["ranking"]["n"] >= 10 and found["ranking"]["mean_regret"] < 1e-9
    assert found["scaling"]["max_abs"] < 1e-4
    assert found["baseline"]["all"]["n"] == fitted["error"]["n"] + held["error"]["n"]
    assert json.dumps(found) and "ranking" in score.table(found)


def test_a_uniform_factor_is_bias_and_leaves_ranking_alone(tmp_path):
    found = scored(tmp_path, exact(1.3))
    error = found["zero_shot"]["held-out fold"]["error"]
    assert error["bias"] == pytest.approx(0.3, abs=1e-4) and error["median"] == pytest.approx(0.3, abs=1e-4)
    assert found["ranking"]["mean_regret"] < 1e-9 and found["scaling"]["max_abs"] < 1e-4


def test_anchored_and_fitted_rows_never_mix_with_zero_shot(tmp_path):
    ids = [run.id for run in RUNS if run.measured.tokens_per_s_per_gpu and run.id not in read_excluded()]
    anchored, seen = ids[:20], ids[20:50]
    found = scored(tmp_path, exact(), anchored=anchored, fit_ids=seen)
    zero_shot = sum(block["error"]["n"] for block in found["zero_shot"].values())
    assert found["anchored"]["error"]["n"] == 20 and zero_shot == len(ids) - 50
    assert set(found["zero_shot"]) <= {"unseen stack", "unseen GPU", "unseen layout"}


def test_command_line(tmp_path, capsys):
    write_predictions(tmp_path / "p.csv", predict(ROWS[::7], exact()))
    assert score.main([str(tmp_path / "p.csv"), "--json", str(tmp_path / "s.json")]) == 0
    assert "support" in capsys.readouterr().out
    assert json.loads((tmp_path / "s.json").read_text())["support"]["moe"]["rows"] == 424
    assert score.main([str(tmp_path / "absent.csv")]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_committed_files_are_plain_csv():
    for name in ("folds.csv", "excluded.csv"):
        with (MEASUREMENTS / name).open(encoding="utf-8") as file:
            assert all(None not in row and None not in row.values() for row in csv.DictReader(file))


@pytest.mark.parametrize("text, said", [
    ("", "no column"), ("id,low\n", "no column"),
    ("id,tokens_per_s_per_gpu,low,high,status\na,nan,1,2,ok\n", ":2: 'nan'"), ("id,tokens_per_s_per_gpu,low,high,status\na,5,-1,2,ok\n", ":2: '-1'"),
    ("id,tokens_per_s_per_gpu,low,high,status\na,5,1,9,ok\na,5,1,9,ok\n", ":3: id 'a' appears twice"),
])
def test_what_predict_did_not_write_is_not_scored(tmp_path, text, said):
    (tmp_path / "p.csv").write_text(text)
    with pytest.raises(ValueError, match=said):
        score.read_predictions(tmp_path / "p.csv")
