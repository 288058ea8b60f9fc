"""Does the log say what happened, in one line and one object a step, and does it survive a writer that is killed?"""

import io
import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from moesim.load import load_model
from moetrain.observe import balance, metrics
from moetrain.observe.flops import step_flops, utilisation
from moetrain.observe.jsonl import JsonLines, read_records
from moetrain.observe.log import RunLog, Terminal, scalars, step_text
from moetrain.observe.metrics import FIELDS, StepRecord, problem, read_lines, read_steps, record_of, step_line
from moetrain.observe.peaks import peaks

SEED = load_model("olmo_core3_seed", ["num_experts=8"])


def record(step: int, **more) -> StepRecord:
    rows = np.array([[4, 2, 1, 1], [2, 2, 2, 2]])
    flops = step_flops(SEED, tokens=436_000, seq_len=8192)
    known = {
        "step": step, "seconds": 1.0, "tokens": 436_000, "num_gpus": 8, "loss": 3.4512, "losses": {"aux": 0.01}, "grad_norm": 0.81, "lr": 3e-4,
        "balance": balance.summarise(rows, np.minimum(rows, 3), ep=2, routing="learned", capacity_factor=1.5), "flops": flops,
        "use": utilisation(flops, 1.0, 8, peaks("NVIDIA B300 SXM6 AC", "bf16")), "memory": {"peak": 77.85 * 2**30}, "data_wait": 3e-4,
    }  # fmt: skip
    return StepRecord(**(known | more))


def plain_console() -> tuple[Console, io.StringIO]:
    text = io.StringIO()
    return Console(file=text, width=80), text


def test_the_line_of_a_step_says_everything():
    line = step_text(record(120), 1000)
    for part in ("step 120/1000", "loss 3.4512", "aux 0.01", "54.5K tok/s/GPU (436K tok/s)", "MFU 44.0% of 2250 TFLOP/s dense bf16 (b300)", "grad norm 0.81",
                 "lr 0.0003", "max/mean rows 1.", "dropped 6.25%", "peak 77.8 GiB", "data wait 300 us"):
        assert part in line, part
    odd = step_text(record(3, use=None, loss=math.nan, skipped="grad norm 12 above 6", also=("profile",), data_wait=None))
    assert "MFU UNKNOWN" in odd and "loss nan" in odd and "SKIPPED: grad norm 12 above 6" in odd and "with profile" in odd and "data wait UNKNOWN" in odd
    unknown = utilisation(record(1).flops, 1.0, 8, peaks("Some GPU", "bf16"))
    assert "MFU UNKNOWN peak" in step_text(record(1, use=unknown))


def test_piped_output_is_one_plain_line_a_step():
    console, text = plain_console()
    terminal = Terminal(total=4, every=2, console=console)
    for step in (1, 2, 3, 4):
        terminal.step(record(step))
    terminal.close()
    lines = text.getvalue().splitlines()
    assert [line.split(" | ")[0] for line in lines] == ["step 1/4", "step 2/4", "step 4/4"] and "\x1b" not in text.getvalue()


def test_a_terminal_has_a_bar_and_lines_above_it():
    text = io.StringIO()
    terminal = Terminal(total=2, console=Console(file=text, force_terminal=True, width=300))
    terminal.step(record(1))
    terminal.close()
    assert "training" in text.getvalue() and "1/2" in text.getvalue() and "loss 3.4512" in text.getvalue()


def test_names_are_shown_as_text(tmp_path):
    console, text = plain_console()
    with RunLog(tmp_path, console=console) as log:
        log.warn("shard \x1b[2J[red]evil[/red]\nname.bin")
        log.step(record(1, skipped="loss of [bold]\x07file"))
    assert "\x1b" not in text.getvalue() and "\x07" not in text.getvalue() and "[red]evil[/red] name.bin" in text.getvalue() and "[bold]" in text.getvalue()


def test_every_line_follows_the_schema_and_reads_back(tmp_path):
    console, _ = plain_console()
    with RunLog(tmp_path, console=console) as log:
        log.event("preflight", seconds=0.5, warnings=[])
        for step in (1, 2, 3):
            log.step(record(step, loss=math.nan if step == 2 else 3.0, grad_norm=np.float32(0.5)))
        log.event("checkpoint", step=3, seconds=0.25, bytes=10**9)
        log.event("validation", step=3, loss=2.5, seconds=1.0)
    lines = list(read_lines(tmp_path / metrics.FILE))
    assert [line["kind"] for line in lines] == ["event"] * 2 + ["step"] * 3 + ["event"] * 2
    assert all(json.loads(raw) for raw in (tmp_path / metrics.FILE).read_text().splitlines()) and "NaN" not in json.dumps(lines[2])
    assert set(lines[2]) == set(FIELDS) and lines[2]["tokens_per_s_per_gpu"] == 54_500 and lines[2]["balance"]["routing"] == "learned"
    steps = read_steps(tmp_path / metrics.FILE)
    assert math.isnan(steps[1].loss) and steps[0].use.mfu == pytest.approx(0.44, abs=1e-3) and steps[0].balance.kept_rows == 15
    again = step_line(steps[0], 0, False)
    assert {k: v for k, v in again.items()} == {k: v for k, v in lines[2].items()}


def test_the_schema_refuses_what_is_not_in_it(tmp_path):
    good = step_line(record(1), 0, False)
    assert problem(good) is None
    assert "lacks lr" in problem({k: v for k, v in good.items() if k != "lr"})
    assert "step is '1'" in problem(good | {"step": "1"}) and "schema 9" in problem(good | {"schema": 9})
    with pytest.raises(ValueError, match="balance of step 1"):
        record_of(good | {"balance": {"nonsense": 1}})
    console, _ = plain_console()
    with RunLog(tmp_path, console=console) as log:
        with pytest.raises(ValueError, match="event checkpoint needs seconds, bytes"):
            log.event("checkpoint", step=1)
        with pytest.raises(ValueError, match="no event 'boom'"):
            log.event("boom")


KILLED = """
import os, sys
from moetrain.observe.jsonl import JsonLines, one_line
lines = JsonLines(sys.argv[1])
for step in range(1000):
    lines.write({"step": step, "text": "x" * 200})
half = one_line({"step": 1000, "text": "y" * 200})[:57]
os.write(lines._handle, half)
print("ready", flush=True)
import time; time.sleep(60)
"""


def test_a_killed_writer_costs_at_most_its_last_line(tmp_path):
    path = tmp_path / "log.jsonl"
    with subprocess.Popen([sys.executable, "-c", KILLED, str(path)], stdout=subprocess.PIPE, cwd=Path(__file__).parent.parent) as writer:
        assert writer.stdout.readline() == b"ready\n"
        writer.send_signal(signal.SIGKILL)
        writer.wait()
    assert len(list(read_records(path))) == 1000  # the reader passes over the half line
    lines = JsonLines(path)
    assert lines.cut == 57
    lines.write({"step": 1000})
    lines.close()
    assert [r["step"] for r in read_records(path)] == list(range(1001))


def test_a_full_disk_leaves_no_half_line(tmp_path, monkeypatch):
    """What was written of a line before the disk was full is taken back, so that a later line stands whole."""
    path = tmp_path / "log.jsonl"
    lines = JsonLines(path)
    lines.write({"step": 1})
    write = os.write

    def full(handle, data):
        if len(data) < 10:
            raise OSError(28, "No space left on device")
        return write(handle, data[: len(data) - 5])

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OSError, match="No space left"):
        lines.write({"step": 2})
    monkeypatch.undo()
    lines.write({"step": 3})
    assert [r["step"] for r in read_records(path)] == [1, 3]


PIPED = """
import sys
from moetrain.observe.log import RunLog
from moetrain.observe.metrics import StepRecord
with RunLog(sys.argv[1], total=2000) as log:
    for step in range(1, 2001):
        log.step(StepRecord(step, 1.0, 100, 1, loss=1.0))
"""


def test_a_reader_that_goes_away_does_not_end_the_run(tmp_path):
    """As with `... | head -1`: the log in the folder is complete and the exit code is 0."""
    with subprocess.Popen([sys.executable, "-c", PIPED, str(tmp_path)], stdout=subprocess.PIPE, cwd=Path(__file__).parent.parent) as run:
        assert run.stdout.readline().startswith(b"start")
        run.stdout.close()
        assert run.wait(timeout=60) == 0
    assert len(read_steps(tmp_path / metrics.FILE)) == 2000


def test_damage_in_the_middle_is_refused(tmp_path):
    path = tmp_path / "log.jsonl"
    path.write_bytes(b'{"a":1}\n{"a":\n{"a":3}\n')
    with pytest.raises(ValueError, match=r"log.jsonl:2: not a JSON object"):
        list(read_records(path))
    with pytest.raises(ValueError, match="no such file"):
        list(read_records(tmp_path / "none"))
    (tmp_path / metrics.FILE).write_bytes(path.read_bytes())
    with pytest.raises(ValueError, match="metrics.jsonl:2: .*move the file away"):
        RunLog(tmp_path)


def test_steps_done_again_after_a_restart_are_marked_and_counted_once(tmp_path):
    console, text = plain_console()
    with RunLog(tmp_path, console=console) as log:
        for step in range(1, 8):
            log.step(record(step, loss=float(step)))
    with open(tmp_path / metrics.FILE, "ab") as file:
        file.write(b'{"kind":"step","schema":1,"rest')
    with RunLog(tmp_path, console=console, from_step=4) as log:
        assert (log.restart, log.last) == (1, 7)
        for step in (5, 6):
            log.step(record(step, loss=100.0 + step))
    assert [s.step for s in read_steps(tmp_path / metrics.FILE)] == [1, 2, 3, 4, 5, 6]  # step 7 led nowhere
    with RunLog(tmp_path, console=console, from_step=6) as log:
        log.step(record(7, loss=200.0))
        log.step(record(8, loss=300.0))
    lines = [line for line in read_lines(tmp_path / metrics.FILE) if line["kind"] == "step"]
    assert [(line["step"], line["restart"], line["rerun"]) for line in lines] == [
        *((s, 0, False) for s in range(1, 8)), (5, 1, True), (6, 1, True), (7, 2, True), (8, 2, False)]
    assert [s.loss for s in read_steps(tmp_path / metrics.FILE)] == [1, 2, 3, 4, 105, 106, 200, 300]
    restarts = [line for line in read_lines(tmp_path / metrics.FILE) if line.get("event") == "restart"]
    assert [(r["from_step"], r["last_logged_step"]) for r in restarts] == [(4, 7), (6, 7)] and restarts[0]["half_line_bytes"] == 31
    assert text.getvalue().count("restart: from_step") == 2


def test_other_ranks_write_nothing(tmp_path):
    with RunLog(tmp_path / "run", rank=1) as log:
        log.step(record(1))
        log.event("note", text="x")
    assert not (tmp_path / "run").exists()


def test_tensorboard_holds_the_scalars_and_histograms(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    console, _ = plain_console()
    with RunLog(tmp_path, console=console, tensorboard=True) as log:
        log.step(record(1), rows={"1": np.array([40_000, 20_000, 0, 4])})
        log.event("validation", step=1, loss=2.5, seconds=0.1)
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    tags = events.Tags()
    assert set(scalars(record(1))) | {"loss/validation"} == set(tags["scalars"]) and tags["histograms"] == ["rows_an_expert/layer_1"]
    assert events.Scalars("speed/mfu")[0].value == pytest.approx(0.44, abs=1e-3)


def test_without_tensorboard_one_note_and_on(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    console, text = plain_console()
    with RunLog(tmp_path, console=console, tensorboard=True) as log:
        log.step(record(1))
        log.step(record(2))
    assert text.getvalue().count("TensorBoard is off") == 1 and len(read_steps(tmp_path / metrics.FILE)) == 2
    assert os.listdir(tmp_path) == [metrics.FILE]
