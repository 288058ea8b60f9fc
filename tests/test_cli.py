"""Does each command end with the right code, write what was asked, and write nothing when it was asked wrongly?"""

from __future__ import annotations

import csv
import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import types
from pathlib import Path

import pytest
import yaml
from test_report import plan_from_json
from typer.testing import CliRunner

import moesim
from moesim import cli, launch, terminal
from moesim.files import write_atomically
from moesim.layout import LayoutError
from moesim.fields import to_text
from moesim.load import load_cluster, load_scenario, parse_scenario, preset_names
from moesim.spec import SearchSpec

PUBLISHED = Path(__file__).parent.parent / "calibration" / "measurements" / "published_runs.csv"
SCENARIO = """\
name: tiny
model: olmo_core3_seed
cluster: {preset: hgx_b300, num_nodes: 2}
workload: {seq_len: 4096, global_batch_tokens: 4194304}
layout: dp16 ep8 zero1 mb2 1f1b
seed: 7
"""


@pytest.fixture
def scenario(tmp_path):
    path = tmp_path / "tiny.yaml"
    path.write_text(SCENARIO)
    return path


@pytest.fixture
def search(monkeypatch):
    """A search that answers at once with the golden plan and remembers how it was asked."""
    from moesim.timeline import Span, Timeline

    golden = plan_from_json()
    fake = types.ModuleType("moesim.search")
    fake.calls, fake.answer = [], golden

    def plan(scenario, **options):
        fake.calls.append((scenario, options))
        return fake.answer

    def simulate(scenario, layout_text=None, **options):
        fake.calls.append((scenario, {"layout_text": layout_text, **options}))
        span = Span(rank=0, stream=0, name="attention", kind="attention", start=0.0, end=0.5, entry="0F0")
        return golden.candidates[0], Timeline(0.5, 1, lambda rank=None: [span])

    def list_ops(scenario, layout_text=None, **options):
        fake.calls.append((scenario, {"layout_text": layout_text, **options}))
        yield {"kind": "gemm", "m": 4096}
        yield {"kind": "attention", "layout": layout_text}

    def run_simulator(anchors=None):
        fake.calls.append((anchors, {}))
        return _first_of_golden

    def what_to_measure(scenario, layout_text=None, **options):
        fake.calls.append((scenario, {"layout_text": layout_text, **options}))
        return golden.advice if fake.answer.candidates else None

    fake.what_to_measure = what_to_measure
    fake.plan, fake.simulate, fake.list_ops, fake.run_simulator = plan, simulate, list_ops, run_simulator
    monkeypatch.setitem(sys.modules, "moesim.search", fake)
    monkeypatch.setattr(moesim, "search", fake, raising=False)
    return fake


def _first_of_golden(run):
    """Picklable, as a simulator that worker processes call must be."""
    return plan_from_json().candidates[0]


def run(*arguments):
    return CliRunner().invoke(cli.app, [str(a) for a in arguments])


def assert_bad_input(result, *said):
    assert result.exit_code == terminal.BAD_INPUT, result.output
    assert result.stdout == ""
    assert result.stderr.startswith("moesim: ") and result.stderr.count("\n") == 1 and "Traceback" not in result.stderr
    for words in said:
        assert words in result.stderr


# ---- plan ---------------------------------------------------------------------------------------------------------------


def test_plan_prints_the_table_and_passes_every_option(scenario, search):
    result = run("plan", scenario, "--set", "model.num_experts=8", "--top", 3, "--profile", "b300", "--anchors", "a.csv",
                 "--pin", "dp16 ep8 zero1 mb1 1f1b", "--measured", 41000)
    assert result.exit_code == 0, result.output
    assert "Ranked layouts" in result.stdout and "Why not" in result.stdout and result.stderr == ""
    assert max(map(len, result.stdout.splitlines())) <= terminal.PIPED_WIDTH
    (spec, options), = search.calls
    assert spec.model.num_experts == 8
    assert (options["top"], options["profile"], str(options["anchors"]), options["pin"], options["measured"]) == (
        3, "b300", "a.csv", "dp16 ep8 zero1 mb1 1f1b", 41000.0)
    assert options["progress"] is None  # nobody watches a pipe


def test_plan_writes_json_and_html(scenario, search, tmp_path):
    result = run("plan", scenario, "--json", tmp_path / "p.json", "--html", tmp_path / "p.html")
    assert result.exit_code == 0, result.output
    assert json.loads((tmp_path / "p.json").read_text()) == json.loads(json.dumps(search.answer.to_dict()))
    assert (tmp_path / "p.html").read_text().startswith("<!doctype html>")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["p.html", "p.json", "tiny.yaml"]


def test_json_to_stdout_is_json_alone(scenario, search):
    result = run("plan", scenario, "--json", "-")
    assert json.loads(result.stdout)["scenario"]["hash"] == search.answer.scenario["hash"]
    assert "Ranked layouts" in result.stderr


@pytest.mark.parametrize("candidates", [0, 1])
def test_nothing_fits(scenario, search, tmp_path, candidates):
    pinned = search.answer.candidates[-1]
    assert not pinned.fits
    search.answer = dataclasses.replace(search.answer, candidates=(pinned,) * candidates, timeline=())
    result = run("plan", scenario, "--launch", tmp_path / "job", "--json", tmp_path / "p.json", "--html", tmp_path / "p.html")
    assert result.exit_code == terminal.NOTHING_FITS
    assert "No layout of this search fits." in result.stdout and "optimizer state and" in result.stdout
    assert len(json.loads((tmp_path / "p.json").read_text())["candidates"]) == candidates
    assert not (tmp_path / "job").exists()


@pytest.mark.parametrize("arguments, said", [
    (("--set", "model.num_expert=8"), "num_expert"),
    (("--set", "workload.seq_len=-1"), "seq_len"),
    (("--set", "nonsense"), "nonsense"),
    (("--measured", "nan"), "1e9"),
    (("--measured", "1e308"), "1e9"),
    (("--json", "/no/such/folder/p.json"), "/no/such/folder"),
    (("--html", "/"), "folder"),
])
def test_bad_options_are_one_line(scenario, search, arguments, said):
    assert_bad_input(run("plan", scenario, *arguments), said)
    assert not search.calls


@pytest.mark.parametrize("text", ["", "- a list", "name: [unclosed", "name: x\nname: y", "\x00", "name: x\nmodle: y"])
def test_bad_files_are_one_line(tmp_path, search, text):
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    for command in ("plan", "simulate", "ops", "validate"):
        assert_bad_input(run(command, path))
    assert_bad_input(run("plan", tmp_path / "missing.yaml"), "missing.yaml")


def test_errors_found_late_leave_no_file(scenario, search, tmp_path):
    def refuse(*_, **__):
        raise LayoutError("layout token 'pp0' needs an integer\nfrom 1")

    search.plan = refuse
    result = run("plan", scenario, "--pin", "pp0", "--json", tmp_path / "p.json", "--html", tmp_path / "p.html")
    assert_bad_input(result, "layout token 'pp0' needs an integer from 1")
    assert [p.name for p in tmp_path.iterdir()] == ["tiny.yaml"]


def test_our_own_faults_keep_their_traceback(scenario, search):
    def broken(*_, **__):
        raise AssertionError("invariant")

    search.plan = broken
    result = run("plan", scenario)
    assert isinstance(result.exception, AssertionError)


def test_interrupt_is_130(scenario, search, tmp_path):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    search.plan = interrupted
    result = run("plan", scenario, "--json", tmp_path / "p.json")
    assert result.exit_code == terminal.INTERRUPTED and result.stderr == "interrupted\n"
    assert not (tmp_path / "p.json").exists()


def test_progress_shows_on_a_terminal_only(monkeypatch):
    with terminal.progress_bars(quiet=False) as update:
        assert update is None
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    with terminal.progress_bars(quiet=True) as update:
        assert update is None
    with terminal.progress_bars(quiet=False) as update:
        for done in range(3):
            update("bound", done, 2)
        update("play", 1, 40)


# ---- launch -------------------------------------------------------------------------------------------------------------


def test_launch_holds_the_winner(scenario, search, tmp_path):
    target = tmp_path / "runs" / "first"
    assert run("plan", scenario, "--launch", target).exit_code == 0
    assert sorted(p.name for p in target.iterdir()) == ["launch.sh", "predicted.json", "submit.sbatch", "train.yaml"]
    spec, best = load_scenario(scenario), search.answer.candidates[0]
    job = load_scenario(target / "train.yaml")
    assert job.layout == best.layout and job == spec.model_copy(update={"layout": best.layout, "search": SearchSpec()})
    predicted = json.loads((target / "predicted.json").read_text())
    assert predicted["scenario"]["hash"] == spec.hash and predicted["tokens_per_s_per_gpu"] == best.tokens_per_s_per_gpu
    script = (target / "launch.sh").read_text()
    assert "--nnodes=2" in script and "--nproc-per-node=8" in script and "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in script and "-m moetrain train train.yaml" in script
    assert os.access(target / "launch.sh", os.X_OK)


@pytest.mark.parametrize("nodes, environment, expected", [
    (1, {}, "--standalone --nproc-per-node=8 --max-restarts=3 -m moetrain train train.yaml --steps 3"),
    (4, {"MASTER_ADDR": "n0"},
     "--nnodes=4 --rdzv-backend=c10d --rdzv-id=tiny --rdzv-endpoint=n0:29500 --nproc-per-node=8 --max-restarts=3 -m moetrain train train.yaml --steps 3"),
    (4, {"SLURM_NODEID": "3", "MASTER_ADDR": "n0", "MASTER_PORT": "1"},
     "--nnodes=4 --rdzv-backend=c10d --rdzv-id=tiny --rdzv-endpoint=n0:1 --nproc-per-node=8 --max-restarts=3 -m moetrain train train.yaml --steps 3"),
])
def test_script_runs_torchrun(scenario, tmp_path, nodes, environment, expected):
    spec = load_scenario(scenario, (f"cluster.num_nodes={nodes}",))
    launch.write_launch(tmp_path / "job", spec, plan_from_json().candidates[0])
    torchrun = tmp_path / "torchrun"
    torchrun.write_text('#!/bin/sh\necho "$@"\n')
    torchrun.chmod(0o755)
    done = subprocess.run([tmp_path / "job" / "launch.sh", "--steps", "3"], env={"PATH": f"{tmp_path}:/usr/bin:/bin", **environment},
                          capture_output=True, text=True)
    assert done.stdout.strip() == expected, done.stderr


@pytest.mark.parametrize("name", preset_names("cluster"))
def test_any_cluster_comes_back_from_its_text(name):
    """Quantities with their units, to the last bit."""
    cluster = load_cluster(name)
    text = launch.to_yaml({"name": "x", "model": "mixtral_8x7b", "cluster": to_text(cluster), "workload": {"seq_len": 8, "global_batch_tokens": 8}})
    assert parse_scenario(text).cluster == cluster


def test_script_says_what_it_lacks(scenario, tmp_path):
    launch.write_launch(tmp_path / "job", load_scenario(scenario), plan_from_json().candidates[0])
    done = subprocess.run([tmp_path / "job" / "launch.sh"], env={"PATH": "/usr/bin:/bin"}, capture_output=True, text=True)
    assert done.returncode != 0 and "set MASTER_ADDR" in done.stderr


def test_launch_never_mixes_with_other_files(scenario, search, tmp_path):
    target = tmp_path / "job"
    target.mkdir()
    assert run("plan", scenario, "--launch", target).exit_code == 0  # an empty folder will do
    (target / "log.txt").write_text("a run's own file")
    search.answer = dataclasses.replace(search.answer, candidates=search.answer.candidates[1:])
    assert run("plan", scenario, "--launch", target).exit_code == 0  # an earlier launch is replaced
    assert yaml.safe_load((target / "train.yaml").read_text())["layout"] == search.answer.candidates[0].layout
    assert (target / "log.txt").exists()
    search.calls.clear()
    other = tmp_path / "other"
    other.mkdir()
    (other / "train.yaml").write_text("theirs: 1")
    assert_bad_input(run("plan", scenario, "--launch", other), "not empty")
    assert_bad_input(run("plan", scenario, "--launch", scenario), "not a folder")
    assert not search.calls and (other / "train.yaml").read_text() == "theirs: 1"


def test_yaml_of_any_scalar_reads_back():
    content = {"a": 1e-05, "b": 1e16, "c": 0.1, "d": [1, 2.5e-9, "x: y", None], "yes": True, "e": {"f": "no", "g": {}, "h": "two\nlines"},
               "i": "1e5", "j": "é # no comment", "k": -3, "l": "~", "m": "", "n": "Null"}
    assert yaml.safe_load(launch.to_yaml(content)) == content
    with pytest.raises(ValueError, match="inf"):
        launch.to_yaml({"a": float("inf")})


# ---- simulate, ops, validate, schema --------------------------------------------------------------------------------------


def test_simulate(scenario, search, tmp_path):
    result = run("simulate", scenario, "--json", tmp_path / "c.json", "--trace", tmp_path / "t.json")
    assert result.exit_code == 0, result.output
    assert "Where the step goes" in result.stdout and "Where the memory goes" in result.stdout
    written = json.loads((tmp_path / "c.json").read_text())
    best = json.loads(json.dumps(dataclasses.asdict(search.answer.candidates[0])))
    assert best.items() <= written.items() and written["scenario"]["hash"] == load_scenario(scenario).hash
    event = next(e for e in json.loads((tmp_path / "t.json").read_text())["traceEvents"] if e["ph"] == "X")
    assert (event["name"], event["dur"]) == ("attention", 0.5e6)
    assert search.calls[0][1] == {"layout_text": None, "profile": None, "anchors": None, "want_timeline": True}
    run("simulate", scenario, "--layout", "dp16 ep4 zero1 mb1 1f1b")
    assert search.calls[1][1]["layout_text"] == "dp16 ep4 zero1 mb1 1f1b" and not search.calls[1][1]["want_timeline"]


def test_simulate_needs_a_layout(tmp_path, search):
    path = tmp_path / "s.yaml"
    path.write_text(SCENARIO.replace("layout: dp16 ep8 zero1 mb2 1f1b\n", ""))
    assert_bad_input(run("simulate", path), "--layout")


def test_ops_is_one_object_a_line(scenario, search, tmp_path):
    result = run("ops", scenario)
    assert [json.loads(line)["kind"] for line in result.stdout.splitlines()] == ["gemm", "attention"]
    assert run("ops", scenario, "-o", tmp_path / "ops.jsonl", "--layout", "dp16").exit_code == 0
    assert json.loads((tmp_path / "ops.jsonl").read_text().splitlines()[1])["layout"] == "dp16"


def test_advise_names_measurements_as_lines_for_the_bench(scenario, search, tmp_path):
    result = run("advise", scenario, "--top", 3, "-o", tmp_path / "ops.jsonl", "--json", tmp_path / "a.json", "--profile", "b300")
    assert result.exit_code == 0, result.output
    (_, options), = search.calls
    assert (options["layout_text"], options["lines"], options["profile"]) == (None, 3, "b300")
    lines = [json.loads(line) for line in (tmp_path / "ops.jsonl").read_text().splitlines()]
    assert lines == search.answer.advice["measure"] == json.loads((tmp_path / "a.json").read_text())["measure"]
    for said in ("Gemm m=4096 n=7168 k=2048 bf16", "extrapolated", "an anchor run", "another is best", "ranking"):
        assert said in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= terminal.PIPED_WIDTH
    assert json.loads(run("advise", scenario, "-o", "-").stdout) == lines[0]
    assert run("advise", scenario, "--layout", "dp16").exit_code == 0 and search.calls[-1][1]["layout_text"] == "dp16"


def test_advise_refuses_and_says_where_nothing_fits(scenario, search, tmp_path):
    assert_bad_input(run("advise", scenario, "-o", "-", "--json", "-"), "stdout")
    assert_bad_input(run("advise", scenario, "-o", "/no/such/folder/f"), "/no/such/folder")
    search.answer = dataclasses.replace(search.answer, candidates=())
    result = run("advise", scenario, "-o", tmp_path / "ops.jsonl")
    assert result.exit_code == terminal.NOTHING_FITS and result.stderr.count("\n") == 1 and not (tmp_path / "ops.jsonl").exists()


def test_predict(search, tmp_path):
    lines = PUBLISHED.read_text().splitlines()[:6]
    (tmp_path / "runs.csv").write_text("\n".join(lines) + "\n")
    result = run("predict", tmp_path / "runs.csv", "-o", tmp_path / "out.csv", "--anchors", "three.csv")
    assert result.exit_code == 0, result.output
    assert str(search.calls[0][0]) == "three.csv" and result.stdout == ""
    assert re.search(r"predicted [1-5] of 5 runs", result.stderr)
    out = list(csv.DictReader((tmp_path / "out.csv").open()))
    assert [row["id"] for row in out] == [line.split(",")[0] for line in lines[1:]]
    assert list(out[0]) == ["id", "tokens_per_s_per_gpu", "low", "high", "mem_gb_per_gpu", "status", "reason"]
    assert run("predict", tmp_path / "runs.csv").stdout == (tmp_path / "out.csv").read_text()


def test_predict_refuses_in_one_line(search, tmp_path):
    (tmp_path / "runs.csv").write_text("id,colour\n1,red\n")
    assert_bad_input(run("predict", tmp_path / "runs.csv", "-o", tmp_path / "out.csv"), "runs.csv")
    assert_bad_input(run("predict", tmp_path / "none.csv", "-o", tmp_path / "out.csv"), "none.csv")
    assert not (tmp_path / "out.csv").exists()


def test_validate(scenario):
    result = run("validate", scenario)
    assert result.exit_code == 0 and load_scenario(scenario).hash in result.stdout
    assert_bad_input(run("validate", scenario, "--set", "cluster.num_nodes=1"), "can't run", "8 GPUs")
    assert_bad_input(run("validate", scenario, "--set", "layout=dp16 zero9"), "zero9")
    assert_bad_input(run("validate", scenario, "--set", "search.recompute=[sleep]"), "search.recompute", "sleep")
    assert_bad_input(run("validate", scenario, "--set", "profile=b3000"), "b3000")


def test_schema_is_json():
    properties = json.loads(run("schema").stdout)["properties"]
    assert {"model", "cluster", "workload", "layout"} <= properties.keys()


# ---- the process --------------------------------------------------------------------------------------------------------


def process(*arguments, **options):
    return subprocess.run([sys.executable, "-m", "moesim", *map(str, arguments)], capture_output=True, text=True, timeout=120, **options)


def test_real_process_refuses_in_one_line(tmp_path):
    path = tmp_path / "bad.yaml"
    path.write_text(SCENARIO.replace("seed: 7", "sede: 7"))
    done = process("validate", path)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1) and "sede" in done.stderr


def test_version():
    assert process("--version").stdout == f"moesim {moesim.__version__}\n"


def test_help_imports_nothing_heavy():
    code = ("import sys; from moesim import cli\ntry: cli.main()\nexcept SystemExit: pass\n"
            "print(sorted({'numpy', 'pydantic', 'simpy', 'plotly', 'scipy', 'pint', 'yaml'} & set(sys.modules)))")
    done = subprocess.run([sys.executable, "-c", code, "--help"], capture_output=True, text=True)
    assert "Start here" in done.stdout and done.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize("command", ["plan", "simulate", "ops", "predict", "validate", "schema"])
def test_every_command_teaches_by_example(command):
    text = re.sub(r"\s+", " ", run(command, "--help").stdout)
    assert f"moesim {command}" in text.split("Example", 1)[1]


def test_ctrl_c_ends_the_process_with_130(scenario, tmp_path):
    code = ("import sys, time, types; import moesim; fake = types.ModuleType('search')\n"
            "def plan(*a, **k):\n    print('started', flush=True); time.sleep(60)\n"
            "fake.plan = plan; moesim.search = sys.modules['moesim.search'] = fake\n"
            "from moesim.cli import main; main()")
    with subprocess.Popen([sys.executable, "-c", code, "plan", str(scenario), "--json", str(tmp_path / "p.json")],
                          stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
        assert child.stdout.readline() == "started\n"
        child.send_signal(signal.SIGINT)
        _, errors = child.communicate(timeout=30)
    assert (child.returncode, errors) == (130, "interrupted\n") and not (tmp_path / "p.json").exists()


def test_a_pipe_is_written_to_never_replaced(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDWR)
    write_atomically(tmp_path / "pipe", "through")
    assert os.read(reader, 100) == b"through"
    os.close(reader)


def test_a_link_is_followed(tmp_path):
    (tmp_path / "real").write_text("old")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    write_atomically(tmp_path / "link", "new")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "real").read_text() == "new"
