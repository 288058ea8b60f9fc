"""Does `predict` answer every row once, in order, and refuse a bad file in one line?"""

import csv
import math
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from moesim.predict import ASSUMPTION_SIGMA, COLUMNS, Z80, assumption_sigma, format_csv, predict, predict_row, read_rows, widen, write_predictions
from moesim.runs import Run, parse_runs
from small_scenarios import Answer

FILE = Path(__file__).parent.parent / "calibration" / "measurements" / "published_runs.csv"
ROWS = read_rows(FILE)


def third_of_peak(run):
    """A dumb simulator: every GPU reaches a third of its BF16 peak."""
    point = run.cluster.gpu.peak_flops["bf16"] / 3 / run.model.flops_per_token(run.workload.seq_len)
    return Answer(point, 0.9 * point, 1.1 * point)


def test_one_answer_a_row_in_order():
    rows = ROWS[::29]
    answers = list(predict(rows, third_of_peak))
    assert [a["id"] for a in answers] == [r["id"] for r in rows]
    for answer in answers:
        assert set(answer) == set(COLUMNS)
        if answer["status"] == "ok":
            assert 0 < answer["low"] <= answer["tokens_per_s_per_gpu"] <= answer["high"]
        else:
            assert answer["status"] == "unsupported" and answer["reason"] and answer["tokens_per_s_per_gpu"] is None


def test_prediction_ignores_what_was_measured():
    blank = {c: "" for c in ("tokens_per_s_per_gpu", "step_time_s", "model_tflops_per_gpu", "mfu", "mem_gb_per_gpu")}
    for row in ROWS[5::97]:
        assert predict_row(row, third_of_peak) == predict_row({**row, **blank}, third_of_peak)


def test_pool_equals_serial_and_streams_progress():
    seen = []
    rows = ROWS[::60]
    pooled = list(predict(rows, third_of_peak, workers=2, progress=lambda *state: seen.append(state)))
    assert pooled == list(predict(rows, third_of_peak))
    assert seen == [("predict", i + 1, len(rows)) for i in range(len(rows))]


def test_serial_answers_arrive_one_by_one():
    played = []

    def simulate(run):
        played.append(run.id)
        return third_of_peak(run)

    stream = predict(ROWS[:5], simulate)
    assert played == []
    next(stream)
    assert len(played) == 1


def test_a_refusing_simulator_is_a_reason_and_a_broken_one_is_not_hidden():
    row = next(r for r in ROWS if r["id"] == "mpt-70b-h10080gb-512-mb8")

    def refuses(run):
        raise ValueError("profile has no term for this GPU")

    def broken(run):
        raise ZeroDivisionError

    assert predict_row(row, refuses)["reason"] == "profile has no term for this GPU"
    assert predict_row(row, lambda run: Answer(math.nan, 1, 2))["status"] == "unsupported"
    with pytest.raises(ZeroDivisionError):
        predict_row(row, broken)


def test_widening_adds_in_quadrature_and_never_narrows():
    assert widen(100.0, 90.0, 110.0, 0.0) == pytest.approx((90.0, 110.0))
    sigma = assumption_sigma(("vpp", "mbs"))
    assert sigma == pytest.approx(math.hypot(ASSUMPTION_SIGMA["vpp"], ASSUMPTION_SIGMA["mbs"]))
    low, high = widen(100.0, 100.0, 100.0, sigma)
    assert math.log(high / 100) == pytest.approx(Z80 * sigma) == pytest.approx(math.log(100 / low))
    assert 0 < assumption_sigma(("vpp",), ("vpp",)) < assumption_sigma(("vpp",))
    wide = widen(100.0, 90.0, 110.0, assumption_sigma(("recompute",)))
    assert wide[0] < 90.0 and wide[1] > 110.0


def test_every_assumption_of_the_file_has_a_width():
    assumed = {name for run in parse_runs(ROWS) if isinstance(run, Run) for name in run.assumed}
    assert assumed and assumed <= set(ASSUMPTION_SIGMA)


def test_csv_round_trip(tmp_path):
    out = tmp_path / "out.csv"
    write_predictions(out, predict(ROWS[:40], third_of_peak))
    back = list(csv.DictReader(out.open(encoding="utf-8")))
    assert list(back[0]) == list(COLUMNS) and len(back) == 40
    assert [p.name for p in tmp_path.iterdir()] == ["out.csv"]


def test_a_failed_write_leaves_the_old_file(tmp_path):
    out = tmp_path / "out.csv"
    out.write_text("old")

    def dies():
        yield from predict(ROWS[:3], third_of_peak)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_predictions(out, dies())
    assert out.read_text() == "old" and [p.name for p in tmp_path.iterdir()] == ["out.csv"]


def test_a_reason_with_commas_stays_one_cell():
    text = format_csv([{**dict.fromkeys(COLUMNS), "id": "a", "status": "unsupported", "reason": 'x, "y"'}])
    assert list(csv.reader(text.splitlines()))[1][-1] == 'x, "y"'


@pytest.mark.parametrize("content, words", [
    (b"", "no column 'id'"),
    (b"id,model\n", "no column 'gpu_type'"),
    (b"id,model,gpu_type,gpus\n", "no rows"),
    (b"id,model,gpu_type,gpus\na,b\n", "line 2 has 2 cells"),
    (b"id,model,gpu_type,gpus\na,b,c,d,e\n", "line 2 has 5 cells"),
    (b"id,id,model,gpu_type,gpus\n1,2,3,4,5\n", "'id' appears twice"),
    (b"id,model,gpu_type,gpus\n\xff\xfe,b,c,d\n", "UTF-8"),
    (b'id,model,gpu_type,gpus\n"a"x,b,c,d\n', "line 2"),
])
def test_bad_files_are_one_line(tmp_path, content, words):
    path = tmp_path / "runs.csv"
    path.write_bytes(content)
    with pytest.raises(ValueError) as caught:
        read_rows(path)
    assert words in str(caught.value) and "\n" not in str(caught.value)


def test_a_missing_file_is_one_line(tmp_path):
    with pytest.raises(ValueError, match="No such file"):
        read_rows(tmp_path / "absent.csv")


def test_predictions_follow_a_link_and_write_into_a_pipe(tmp_path):
    """Neither is replaced: a reader at the other end gets the table."""
    (tmp_path / "link.csv").symlink_to(tmp_path / "real.csv")
    write_predictions(tmp_path / "link.csv", [])
    assert (tmp_path / "link.csv").is_symlink() and (tmp_path / "real.csv").read_text().startswith("id,")
    os.mkfifo(tmp_path / "pipe")
    got = []
    reader = threading.Thread(target=lambda: got.append((tmp_path / "pipe").read_text()))
    reader.start()
    write_predictions(tmp_path / "pipe", [])
    reader.join(10)
    assert got and got[0].startswith("id,") and (tmp_path / "pipe").is_fifo()


def test_workers_end_with_a_killed_parent(tmp_path):
    """A pool's workers wait on a queue that nobody will fill again."""
    script = ("import os, time\nfrom moesim.workers import worker_pool\npool = worker_pool(2)\n"
              "print(*{p for p in pool.map(_pid, range(8))}, flush=True)\ntime.sleep(60)\n")
    module = tmp_path / "killed.py"
    module.write_text("import os, time\ndef _pid(_):\n    time.sleep(0.2)\n    return os.getpid()\n" + script)
    parent = subprocess.Popen([sys.executable, str(module)], stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[1],
                              env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])})
    pids = [int(p) for p in parent.stdout.readline().split()]
    assert pids
    parent.kill()
    parent.wait()
    deadline = time.monotonic() + 20
    while any(_alive(p) for p in pids) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not any(_alive(p) for p in pids)


def _alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def test_a_pipe_is_no_table_of_runs(tmp_path):
    """It could block for ever or never end."""
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match="not a file"):
        read_rows(tmp_path / "pipe")
