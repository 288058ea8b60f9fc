"""Do the parts of the GPU script that need no GPU hold: its plan, its statistics, its files, its refusals?"""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from calibration.clean import gemm_row

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))
import gpu_kernels as bench  # noqa: E402

STAMP = dict(gpu="NVIDIA H200", commit="0" * 40, time="2026-01-01T00:00:00Z")


def test_the_plan_spans_64_to_16384_rows_an_expert_and_fits():
    plan = bench.plan()
    assert {product.rows for product in plan} >= set(bench.ROWS_AN_EXPERT) and max(bench.ROWS_AN_EXPERT) == 16384
    for product in plan:
        assert sum(product.loads) == product.E * product.rows <= bench.MOST_ROWS and len(product.loads) == product.E and min(product.loads) > 0
        assert product.flops == 2 * sum(product.loads) * product.N * product.K
    hot = [product for product in plan if product.hot]
    assert hot and all(product.loads[0] * 2 >= sum(product.loads) for product in hot)


def test_a_record_keeps_every_repeat_and_takes_the_median():
    seconds = [5.0, 1.0, 2.0, 4.0, 3.0]
    row = bench.record("forward", "triton", seconds, "bf16", flops=6 * 10**12, E=2)
    assert (row["median"], row["p10"], row["p90"], row["tflops"], row["seconds"]) == (3.0, 1.0, 5.0, 2.0, seconds)
    assert bench.record("permute", "triton", [2.0], "bf16", moved=4 * 10**9)["gigabytes_per_second"] == 2.0


@pytest.mark.parametrize("kernel", ("triton", "torch.grouped_mm", "dense"))
@pytest.mark.parametrize("op", ("forward", "dgrad", "wgrad"))
def test_csv_rows_are_what_calibration_reads(op, kernel):
    """The time comes back from the rate and the shape; a grouped weight gradient's rows are rows again."""
    product = bench.Product(8, 512, 8192, 4096)
    row = bench.record(op, kernel, [2e-3], "bf16", product.flops, E=8, rows=512, N=8192, K=4096, hot=False)
    written = {key: str(value) for key, value in bench.csv_row(row, STAMP["gpu"], "own").items()}
    read = gemm_row(2, written)
    assert read.gpu == "h200" and read.kind == ("gemm" if kernel == "dense" else "grouped_gemm")
    assert read.seconds == pytest.approx(2e-3, rel=1e-3)
    if kernel != "dense":
        assert (read.shape["m"], read.shape["groups"]) == (512, 8) and read.shape["weight_grad"] == (op == "wgrad")
        assert {read.shape["n"], read.shape["k"]} == {8192, 4096}


def test_files_hold_all_records_whole(tmp_path):
    rows = [bench.record("forward", "triton", [1e-3], "bf16", 10**12, E=8, rows=64, N=128, K=128, hot=hot) for hot in (False, True)]
    rows.append(bench.record("permute", "triton", [1e-3], "bf16", moved=10**9, tokens=5))
    lines, table = bench.write(tmp_path, STAMP, rows)
    assert lines.name == "kernels_nvidia_h200.jsonl"
    assert [json.loads(line)["device"] for line in lines.read_text().splitlines()] == [STAMP] * 3
    with table.open() as file:
        assert len(list(csv.DictReader(file))) == 1, "uneven loads and passes over memory are not rows of gemm.csv"


def test_clocks_that_are_not_told_are_left_out():
    assert bench.parse_clocks("1980, 3201, 412.50, 44") == {"clocks.sm": 1980.0, "clocks.mem": 3201.0, "power.draw": 412.5, "temperature.gpu": 44.0}
    assert bench.parse_clocks("1980, [N/A], 412.50") == {"clocks.sm": 1980.0, "power.draw": 412.5}
    assert bench.parse_clocks("") == {}


def test_what_time_does_not_cover_is_left_out_and_said(monkeypatch, capsys):
    monkeypatch.setattr(bench, "timer", lambda: None)
    bench.measure(deadline=float("-inf"), each=pytest.fail)
    assert f"{len(bench.plan()) + 1} of {len(bench.plan()) + 1} blocks were left out" in capsys.readouterr().out


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_refuses_in_one_line(capsys):
    assert bench.main([]) == 2
    told = capsys.readouterr()
    assert told.err.count("\n") == 1 and "no CUDA device" in told.err and not told.out


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_the_shell_script_stops_with_it(tmp_path):
    script = BENCHMARKS / "gpu.sh"
    done = subprocess.run(["bash", str(script), str(tmp_path)], env={"PATH": "/usr/bin:/bin", "PYTHON": sys.executable}, capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and not list(tmp_path.iterdir())
    missing = subprocess.run(["bash", str(script)], env={"PATH": "/usr/bin:/bin", "PYTHON": "/usr/bin/env"}, capture_output=True, text=True)
    assert missing.returncode == 2
