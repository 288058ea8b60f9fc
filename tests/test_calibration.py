"""Do the shipped measurements read cleanly, do held-out rows meet the bars, and does the command line behave?

Bars are medians with whole (n, k) families held out, B300 only, one fold of six (the thin slice); `python -m calibration fit` prints
every split on every GPU.
"""

from __future__ import annotations

import csv
import json
import re
import subprocess
import sys

import numpy as np
import pytest

from calibration import build, clean, compute, judge, network, splits, training, validate
from calibration.models import measured, predict
from moesim.profile import load_profile


@pytest.fixture(scope="module")
def bench():
    return build.bench()


def test_almost_every_gemm_row_is_read_and_the_others_say_why():
    table, rows = clean.read_csv(clean.MEASUREMENTS / "gemm.csv")
    kept, dropped = clean.clean(table, rows)
    assert table == "gemm" and len(kept) + len(dropped) == len(rows) and len(kept) > 0.99 * len(rows)
    assert all(d.reason and "\n" not in d.reason for d in dropped)


def test_burst_in_training_and_fused_rows_are_different_kinds(bench):
    kinds = {(r.kind, "SimuMax" in r.source, "/moe/" in r.source) for r in bench.rows if r.kind in ("gemm", "gemm.in_training", "fused_ffn")}
    assert kinds == {("gemm", False, False), ("gemm.in_training", True, False), ("fused_ffn", False, True)}


def test_seconds_of_a_row_follow_from_its_published_rate():
    """[64, 2048] x [2048, 1536] in 0.0042 ms is 95 TFLOP/s, as the row prints both."""
    row = clean.gemm_row(2, dict(source="s", gpu="B300 SXM6", precision="bf16", m="64", n="1536", k="2048", groups="1", tflops="94.9", notes="kernel torch.nn.functional.linear; time 0.0042 ms"))
    assert row.seconds == pytest.approx(4.2e-6, rel=0.02)
    bus = clean.collective_row(2, dict(source="s", hardware="B300", nodes="1", gpus="8", collective="all_reduce", bytes="1000000", time_us="", algbw_gbps="", busbw_gbps="100", notes=""))
    assert bus.seconds == pytest.approx(1e6 * 2 * 7 / 8 / 100e9)


@pytest.mark.parametrize("change,reason", [({"m": "nan"}, "m is"), ({"tflops": "-3"}, "tflops"), ({"gpu": "TPU v5"}, "names no GPU"), ({"precision": "int3"}, "precision")])
def test_a_bad_row_is_dropped_with_its_reason(change, reason):
    good = dict(source="s", gpu="B300", precision="bf16", m="64", n="1536", k="2048", groups="1", tflops="94.9", notes="")
    kept, dropped = clean.clean("gemm", [good, good | change])
    assert len(kept) == 1 and reason in dropped[0].reason and dropped[0].line == 3


def test_no_row_is_in_two_folds_and_families_stay_together(bench):
    rows = [r for r in bench.rows if r.kind == "gemm"]
    numbers = splits.folds(rows, "families")
    by_family = {}
    for row, number in zip(rows, numbers):
        assert by_family.setdefault(splits.family(row), number) == number
    assert len(set(numbers)) == splits.NUM_FAMILY_FOLDS
    by_size = {}
    for row, number in zip(rows, splits.folds(rows, "sizes")):
        assert by_size.setdefault(splits.size(row), number) == number


@pytest.mark.parametrize("dtype,bar", [("bf16", 0.06), ("fp8", 0.12), ("fp8_block", 0.12), ("nvfp4", 0.14)])
def test_gemm_families_never_seen(bench, dtype, bar):
    rows = compute.gemm_rows(bench.rows, "b300", dtype)
    numbers = np.array(splits.folds(rows, "families"))
    fold = np.bincount(numbers).argmax()
    held = [r for r, number in zip(rows, numbers) if number == fold]
    found = validate.errors(predict(bench.lender(dtype, "families", int(fold)), 148, held), measured(held), "families")
    assert found.num_rows >= 30 and found.median <= bar, found


def test_fused_ffn_shapes_never_seen(bench):
    rows = [r for r in bench.rows if r.kind == "fused_ffn"]
    held = [r for r in rows if r.shape["hidden"] == 4096]
    fits = compute.fit_ffn(compute.ffn_groups([r for r in rows if r.shape["hidden"] != 4096]), bench.sheets)
    predicted = bench.predict_ffn(fits, held)
    known = np.isfinite(predicted)
    found = validate.errors(predicted[known], measured(held)[known], "families")
    assert found.num_rows >= 100 and found.median <= 0.10, found


@pytest.mark.parametrize("gpu", ["a100", "b200", "b300", "gb200", "gb300", "h100"])
def test_collective_curves_interpolate(bench, gpu):
    (found,) = network.interpolation_errors([c for c in network.curves(gpu, bench.rows, bench.sheets) if not c.lender])
    assert found.num_rows >= 150 and found.mean <= 0.06, found


def test_grouped_gemms_in_training(bench):
    _, rows, predicted = bench.grouped
    forward = np.array([r.shape["weight_grad"] == 0 for r in rows])
    assert validate.errors(predicted[forward], measured(rows)[forward], "in sample").median <= 0.10


def test_the_sustained_rule_uses_own_training_rows_alone_and_meets_in_the_middle_elsewhere(bench):
    own = training.sustained("b200", bench.rows, bench.dense, bench.sheets)
    assert own["provenance"] == "measured" and own["factor"] == pytest.approx(own["evidence"]["in training"])
    other = training.sustained("b300", bench.rows, bench.dense, bench.sheets)
    low, high = sorted(other["evidence"].values())
    assert low < other["factor"] < high and other["factor"] == pytest.approx(np.sqrt(low * high))
    assert other["sigma_log"] > 0.5 * np.log(high / low) * 0.999


def test_published_training_gemms_of_a_gpu_never_fitted(bench):
    """183 GEMMs timed in training on a PCIe A100 (https://github.com/MooreThreads/SimuMax) against the A100 SXM profile and the rule."""
    rows = [r for r in bench.rows if r.kind == "gemm.in_training" and r.gpu == "a100_pcie"]
    found = validate.errors(np.array([judge.price(r).seconds for r in rows]), measured(rows), "given")
    assert found.num_rows == 183 and found.median <= 0.10, found


def test_intervals_hold_what_they_claim(bench):
    """80% intervals from the B300 family residuals hold 80% of another split's residuals, within 10 points."""
    for dtype in ("bf16", "nvfp4"):
        rows = compute.gemm_rows(bench.rows, "b300", dtype)
        numbers, sigma = splits.folds(rows, "families"), load_profile("b300").term(f"gemm.{dtype}").sigma_log
        held = [r for r, number in zip(rows, numbers) if number in (0, 1)]
        away = np.concatenate([predict(bench.lender(dtype, "families", f), 148, [r for r, n in zip(rows, numbers) if n == f]) for f in (0, 1)])
        truth = np.concatenate([measured([r for r, n in zip(rows, numbers) if n == f]) for f in (0, 1)])
        inside = np.mean(np.abs(np.log(away / truth)) <= 1.2816 * sigma)
        assert len(held) == len(away) and 0.65 <= inside <= 0.95, (dtype, inside)


def run(*args):
    return subprocess.run([sys.executable, "-m", "calibration", *map(str, args)], capture_output=True, text=True)


def write_rows(path, columns, rows):
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        writer.writerows(rows)


def test_validate_kernels_prices_a_file_it_never_saw(tmp_path):
    base = dict(source="s", gpu="B300 SXM6", precision="bf16", n="7168", k="2048", groups="1", notes="kernel torch.nn.functional.linear")
    rows = [base | {"m": str(m), "tflops": str(t)} for m, t in ((512, 1131), (4096, 1919))] + [base | {"m": "x", "tflops": "1"}]
    rows.append(base | {"gpu": "H20", "m": "4096", "tflops": "140"})
    write_rows(tmp_path / "new.csv", clean.GEMM_COLUMNS, rows)
    done = run("validate-kernels", tmp_path / "new.csv", "--json", tmp_path / "out.json")
    assert done.returncode == 0 and "3 rows priced, 1 not understood" in done.stdout and "median_abs_error" in done.stdout
    report = json.loads((tmp_path / "out.json").read_text())
    assert report["n"] == 3 and report["not_understood"][0]["line"] == 4
    assert {r["hardware"]: r["provenance"] for r in report["rows"]} == {"b300": "interpolated", "h20": "extrapolated"}
    assert all(g["median_abs_error"] < 0.25 for g in report["groups"] if g["hardware"] == "b300")


@pytest.mark.parametrize("text", ["", "a,b\n1,2\n", "\x00\x01"])
def test_a_file_of_another_kind_is_one_line_and_exit_2(tmp_path, text):
    (tmp_path / "x.csv").write_text(text)
    done = run("validate-kernels", tmp_path / "x.csv")
    assert done.returncode == 2 and done.stderr.startswith("error: ") and done.stderr.count("\n") == 1


def test_a_missing_file_is_one_line_and_exit_2(tmp_path):
    done = run("validate-kernels", tmp_path / "none.csv")
    assert done.returncode == 2 and done.stderr.count("\n") == 1


def test_shipped_profiles_are_what_the_fit_writes(bench):
    """Parameters only: the held-out errors take a minute (`test_fit_is_reproducible`)."""
    shipped = load_profile("b300")
    for (gpu, dtype), result in bench.gemm.items():
        if gpu == "b300":
            for name, value in result.parameters.items():
                assert shipped.term(f"gemm.{dtype}").parameters[name] == pytest.approx(value, rel=1e-4, abs=1e-12), (dtype, name)


@pytest.mark.full
def test_fit_is_reproducible(tmp_path):
    done = run("fit", "--out", tmp_path)
    assert done.returncode == 0 and "all gemm.bf16" in done.stdout
    for path in tmp_path.glob("*.yaml"):
        assert path.read_bytes() == (load_profile.__globals__["PROFILES"] / path.name).read_bytes(), path.name


def test_shipped_measurements_stay_small_and_keep_their_sources():
    assert sum(p.stat().st_size for p in clean.MEASUREMENTS.iterdir()) < 4e6
    for name in ("gemm", "collectives", "attention", "memory", "dispatchers", "datasheet"):
        with open(clean.MEASUREMENTS / f"{name}.csv", newline="") as file:
            for row in csv.DictReader(file):
                assert row["source"].startswith("http"), (name, row)


def test_plots_are_one_page_that_needs_no_network(bench, tmp_path):
    from calibration.plots import write_plots

    page = write_plots(bench, "a100", tmp_path).read_text()
    assert "all_gather over 8" in page and "gemm bf16" in page and "Fits of a100" in page
    assert not re.search(r"<script[^>]+src=", page)
