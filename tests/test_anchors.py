"""Do a few runs recover a site's constants, and only those they touch?"""

import csv
import math
from pathlib import Path

import numpy as np
import pytest

from calibration import anchoring
from calibration.anchoring import MIN_RUNS, choose, tokens_per_microbatch
from calibration.folds import MEASUREMENTS
from moesim.anchored import fit_site
from moesim.anchors import PRIORS, fit_anchors, load_anchors
from moesim.predict import read_rows
from moesim.runs import Run, parse_run, parse_runs

ROWS = read_rows(MEASUREMENTS / "published_runs.csv")
RUNS = [run for run in parse_runs(ROWS) if isinstance(run, Run)]

# Seconds of five anchors by constant, and a part no constant scales: an MBS sweep, an EP sweep, one step of a single microbatch.
PARTS = {
    "host": np.array([0.9, 0.4, 0.1, 0.3, 0.2]),
    "proxy": np.array([0.0, 0.0, 0.0, 0.5, 0.0]),
    "nic": np.array([0.1, 0.2, 0.3, 0.8, 0.1]),
    "gemm": np.array([0.3, 0.6, 1.5, 0.6, 0.3]),
    "end_of_step": np.array([0.05, 0.05, 0.05, 0.05, 0.6]),
}
REST = np.full(5, 0.2)


def rates(multipliers):
    return 1.0 / (REST + sum(multipliers.get(name, 1.0) * seconds for name, seconds in PARTS.items()))


def test_a_site_like_the_profile_stays_at_one():
    found = fit_anchors(rates({}), rates)
    assert all(value == pytest.approx(1.0, abs=1e-6) for value in found.multipliers.values())
    assert found.before == pytest.approx([0.0] * 5)


@pytest.mark.parametrize("truth", [
    {"host": 1.8}, {"nic": 1.5}, {"gemm": 1.2, "host": 0.7}, {"end_of_step": 2.5}, {"proxy": 4.0, "host": 1.4},
])
def test_synthetic_truth_is_recovered(truth):
    found = fit_anchors(rates(truth), rates, noise=0.01)
    for name, value in found.multipliers.items():
        assert abs(math.log(value / truth.get(name, 1.0))) < 3 * found.stderr[name] + 0.03, name
    assert max(map(abs, found.after)) < 0.02 < max(map(abs, found.before))
    assert found.num_evaluations <= 40


def test_coverage_of_the_stated_errors_is_nominal():
    rng = np.random.default_rng(1)
    inside = []
    for _ in range(60):
        truth = {name: math.exp(rng.normal(0, sigma)) for name, sigma in PRIORS.items()}
        noisy = rates(truth) * np.exp(rng.normal(0, 0.03, 5))
        found = fit_anchors(noisy, rates, noise=0.03)
        inside += [abs(math.log(found.multipliers[n] / truth[n])) < 1.2816 * found.stderr[n] for n in truth]
    assert 0.72 < np.mean(inside) < 0.90  # 80% nominal, 300 draws, mildly non-linear


def test_what_the_anchors_do_not_touch_keeps_its_prior():
    without_proxy = [0, 1, 2, 4]
    found = fit_anchors(rates({"host": 2.0})[without_proxy], lambda m: rates(m)[without_proxy])
    assert found.multipliers["proxy"] == pytest.approx(1.0, abs=1e-9)
    assert found.stderr["proxy"] == pytest.approx(PRIORS["proxy"])
    assert found.stderr["host"] < 0.5 * PRIORS["host"]


def test_more_anchors_never_widen():
    few = fit_anchors(rates({})[:2], lambda m: rates(m)[:2])
    many = fit_anchors(rates({}), rates)
    assert all(many.stderr[name] <= few.stderr[name] + 1e-9 for name in PRIORS)


def test_a_broken_row_can_not_run_away():
    found = fit_anchors(rates({}) / 1000, rates)
    assert all(1 / 8.01 < value < 8.01 for value in found.multipliers.values())


@pytest.mark.parametrize("measured", [[], [1.0, math.nan], [0.0]])
def test_nothing_to_fit_is_one_line(measured):
    with pytest.raises(ValueError, match="^anchors:"):
        fit_anchors(measured, lambda m: np.ones(len(measured)))


def test_a_silent_simulator_is_refused():
    with pytest.raises(ValueError, match="no rate"):
        fit_anchors([1.0, 2.0], lambda m: [1.0, math.inf])


def test_anchor_rule_is_blind_and_ordered():
    chosen = choose(RUNS)
    by_id = {run.id: run for run in RUNS}
    assert len(chosen) > 10
    for site, ids in chosen.items():
        low, middle, high = (tokens_per_microbatch(by_id[i]) for i in ids)
        assert low <= middle <= high and len(set(ids)) == 3
        assert all(by_id[i].site == site for i in ids)
        assert sum(run.site == site and bool(run.measured.tokens_per_s_per_gpu) for run in RUNS) >= MIN_RUNS
    assert choose(reversed(RUNS)) == chosen


def test_the_command_writes_anchors_and_keeps_them_out_of_the_score(tmp_path):
    assert anchoring.main([str(tmp_path)]) == 0
    sites = load_anchors(tmp_path / "anchors.csv")
    anchors, rest = ((tmp_path / f"{name}.txt").read_text().split() for name in ("anchors", "anchored"))
    assert sorted(run.id for runs in sites.values() for run in runs) == anchors and not set(anchors) & set(rest)
    assert {run.site for run in RUNS if run.id in rest} == set(sites)


def write(path: Path, rows):
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return path


def test_anchor_files(tmp_path):
    good = [row for row in ROWS if row["id"].startswith("mpt-13b")][:3]
    sites = load_anchors(write(tmp_path / "a.csv", good))
    assert sum(map(len, sites.values())) == 3
    with pytest.raises(ValueError, match="holds no measured rate"):
        blank = {c: "" for c in ("tokens_per_s_per_gpu", "step_time_s", "model_tflops_per_gpu", "mfu")}
        load_anchors(write(tmp_path / "b.csv", [{**good[0], **blank}]))
    with pytest.raises(ValueError, match="can't be expressed"):
        load_anchors(write(tmp_path / "c.csv", [{**good[0], "gpus": "7"}]))


def test_one_odd_run_does_not_bend_what_the_others_say():
    """Four runs at twice the launch cost and one that is off by a factor of two for no reason: the constant is that of the four."""
    odd = rates({"host": 2.0})
    odd[-1] *= 0.5
    alone = {"host": PRIORS["host"]}
    found, clean = fit_anchors(odd, rates, alone), fit_anchors(rates({"host": 2.0}), rates, alone)
    assert found.multipliers["host"] == pytest.approx(clean.multipliers["host"], rel=0.15)
    assert found.weights[-1] < 0.2 < min(found.weights[:-1])


def test_an_anchor_in_another_unit_is_refused_in_one_line():
    row = next(r for r in ROWS if r["id"] == "mb-26.04.01-qwen3-30b-gb200-8-mxfp8-g512")
    run = parse_run({**row, "model_tflops_per_gpu": "", "tokens_per_s_per_gpu": "1e9"})
    with pytest.raises(ValueError, match=r"^anchor 'mb-26.04.01-qwen3-30b-gb200-8-mxfp8-g512': 1e\+09 tokens/s a GPU, .* are predicted"):
        fit_site([run])
