"""Is what the README says true: the tree, the grammar, the ZeRO table, the words and every command it shows?"""

from __future__ import annotations

import importlib
import inspect
import os
import re
import shlex
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from moesim import layout as layouts
from moesim import memory
from moesim.assembly import Assembler, Build
from moesim.layout import Layout, parse_layout
from moesim.load import parse_scenario
from moesim.parts import Parts
from moesim.profile import load_profile
from moesim.stack import load_stack

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
SETUP = ("command-plan", "command-test", "command-peer", "command-train")
APART = ("quick", "gpu", "long", "accuracy")
"""Blocks that the tests below run otherwise, or can't run: a quick start of few steps, lines for eight GPUs, hours of checking, every published run."""


def fences(kind: str) -> list[tuple[str, str]]:
    """(marker, text) of each fenced block of a kind; the marker is an HTML comment on the line before, or ""."""
    return re.findall(rf"(?:<!-- ([^>\n]*) -->\n)?```{kind}\n(.*?)```", README, flags=re.S)


def rows_of(heading: str) -> list[list[str]]:
    """Cells of the first table after a heading, its head and rule left out."""
    table = re.search(r"((?:^\|.*\n)+)", README[README.index(heading):], flags=re.M).group(1)
    return [[cell.strip() for cell in line.strip("|\n").split(" | ")] for line in table.splitlines()][2:]


# --- the tree ---------------------------------------------------------------------------------------------------------------


def shown() -> dict[str, str]:
    """Path -> clause, as the README prints them."""
    found, folders = {}, []
    for line in fences("tree")[0][1].splitlines():
        name, _, clause = line.strip().partition(" ")
        depth = (len(line) - len(line.lstrip())) // 2
        folders = folders[:depth]
        found["/".join([*folders, name.rstrip("/")])] = clause.strip()
        if name.endswith("/"):
            folders.append(name.rstrip("/"))
    return found


def present() -> set[str]:
    """Every module of the packages, and the folders of what a person edits or measures."""
    paths = {p for package in ("moesim", "calibration", "moetrain", "benchmarks") for p in (ROOT / package).rglob("*.py")}
    paths |= {p for parent in (*paths,) for p in parent.parents if ROOT in p.parents}
    paths |= {p for top in ("scenarios", "tests", "calibration") for p in (ROOT / top, *(ROOT / top).iterdir()) if p.is_dir()}
    return {str(p.relative_to(ROOT)) for p in paths if "__pycache__" not in p.parts and not p.name.startswith(".")}


def test_the_tree_is_the_files():
    tree, here = set(shown()), present()
    assert tree == here, f"not in the README: {sorted(here - tree)}; not there: {sorted(tree - here)}"


def test_one_clause_a_file():
    assert all(clause and len(clause) <= 110 for clause in shown().values()), [p for p, c in shown().items() if not c or len(c) > 110]


def test_files_and_folders_that_are_named_exist():
    names = set(re.findall(r"`((?:scenarios|tests|calibration|moesim|benchmarks)/[\w./]+)`", README)) | set(re.findall(r"\]\(([\w./]+)\)", README))
    missing = {n for n in names if not (ROOT / n).exists() and not n.endswith("/x.py")}
    assert names and not missing


# --- the grammar and the table ----------------------------------------------------------------------------------------------


def test_the_grammar_is_the_one_in_the_source():
    source = re.search(r"::\n\n(.*?)\n\n``pp", layouts.__doc__, flags=re.S).group(1)
    assert inspect.cleandoc(fences("ebnf")[0][1]) == inspect.cleandoc("\n" + source)


def test_defaults_of_the_grammar():
    said = re.findall(r"\(default ([^)]+)\)", fences("ebnf")[0][1])
    text = " ".join(word for word in said if word not in ("1",))
    assert parse_layout(text) == Layout() and len(said) >= 9


def test_roles_of_the_grammar():
    assert f"`{' '.join(layouts.RECOMPUTE_ROLES)}`" in README


def zero_rows() -> list[list[str]]:
    return rows_of("### ZeRO")


@pytest.mark.parametrize("row", zero_rows(), ids=lambda row: row[0].strip("`"))
@pytest.mark.parametrize("dtype", [("fp32", "fp32"), ("bf16", "fp8")])
def test_zero_table_resident_bytes(row, dtype):
    """The memory model holds, a parameter, what the table says; dense and expert weights each over their own group."""
    layout = parse_layout(f"dp8 ep4 {row[0].strip('`')} grad:{dtype[0]} opt:{dtype[1]}")
    g, m = memory.GRAD_BYTES[dtype[0]], memory.MOMENT_BYTES[dtype[1]]
    for dense, expert, shards in ((1.0, 0.0, layout.groups["shard"].size), (0.0, 1.0, layout.edp)):
        found = memory._static(np.array([[dense]]), np.array([[expert]]), policy(layout))
        for name, cell in zip(("weights", "gradients", "optimizer"), row[1:4]):
            assert found[name][0, 0] == pytest.approx(eval(cell, {"g": g, "m": m, "N": shards})), (name, cell)  # noqa: S307


def policy(layout: Layout) -> memory.Policy:
    values = (layout.zero, layout.reshard, memory.GRAD_BYTES[layout.grad], memory.MOMENT_BYTES[layout.optimizer], layout.groups["shard"].size, layout.edp, 0, 0)
    return memory.Policy(*(np.array([v]) for v in values))


KINDS = {"AG": "param_gather", "RS": "grad_reduce", "AR": "grad_reduce"}


@pytest.mark.parametrize("row", zero_rows(), ids=lambda row: row[0].strip("`"))
def test_zero_table_collectives(row):
    """A program of four microbatches holds the collectives of the table, layer by layer, and no others."""
    program, num_units = small_maker().program(parse_layout(f"dp8 {row[0].strip('`')} mb1")), 4  # embedding, two layers, head
    during = Counter(task.name for k in program.body_index[0] for task in program.bodies[k] if task.kind == "collective")
    after = Counter(task.name for task in program.epilogue[0] if task.kind == "collective")
    each, step = (Counter(KINDS[code] for code in cell.replace("-", "").split()) for cell in row[4:6])
    for role in set(KINDS.values()):
        assert during[role] == 4 * num_units * each[role] and after[role] == step[role], role


def small_maker() -> Assembler:
    """Programs of a small dense model on one node, with four microbatches at dp8 mb1."""
    scenario = parse_scenario("name: small\nmodel: {preset: llama3_8b, num_layers: 2}\ncluster: hgx_b300\n"
                              "workload: {seq_len: 4096, global_batch_tokens: 131072}")
    return Assembler(Parts(scenario.model, scenario.cluster, scenario.workload, load_stack(scenario.stack), load_profile("b300")))


@pytest.mark.parametrize("row", zero_rows(), ids=lambda row: row[0].strip("`"))
def test_zero_table_names_the_reduction(row):
    """All-reduce under ZeRO-0, reduce-scatter else."""
    ops = Build(small_maker(), parse_layout(f"dp8 {row[0].strip('`')}")).reduce_ops(("attention", "dense"))
    assert {op.kind for op in ops} == ({"all_reduce"} if "AR" in row[5] else {"reduce_scatter"})


def test_fsdp2_calls_exist():
    """Every call of the table is a public name of the torch that is installed."""
    fsdp = pytest.importorskip("torch.distributed.fsdp")
    names = set(re.findall(r"`((?:set_\w+|unshard))", README))
    assert {"set_requires_gradient_sync", "set_reshard_after_backward", "unshard"} <= names
    assert not {n for n in names if not callable(getattr(fsdp.FSDPModule, n, None))}
    assert "reshard_after_forward" in inspect.signature(fsdp.fully_shard).parameters


# --- commands ---------------------------------------------------------------------------------------------------------------


def commands_together(slow: bool) -> list[list[str]]:
    """Lines of each block of commands, the two that set up left out."""
    return [text.strip().splitlines() for marker, text in fences("bash") if marker not in (*SETUP, *APART) and (marker == "full") == slow]


def commands(slow: bool) -> list[str]:
    return [line for block in commands_together(slow) for line in block]


def run_line(line: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """A command line as typed, with this interpreter and this checkout, in a folder of its own; shipped files keep their names."""
    words = shlex.split(line)
    assert words[0] in ("moesim", "moetrain", "python"), line
    target = words[words.index(">") + 1] if ">" in words else None
    words = words[: words.index(">")] if target else words
    start = [sys.executable, *(["-m", words[0]] if words[0] != "python" else [])]
    words = [str(ROOT / word) if word.startswith("calibration/") else word for word in words[1:]]
    done = subprocess.run([*start, *words], cwd=folder, capture_output=True, text=True, timeout=600, env={**os.environ, "PYTHONPATH": str(ROOT)})
    if target:
        (folder / target).write_text(done.stdout)
    return done


def check(line: str, folder: Path) -> None:
    done = run_line(line, folder)
    assert done.returncode == 0, f"{line}\n{done.stderr[-1500:]}"
    wanted = re.findall(r"(?:--json|--html|--trace|--launch|-o|>) (\S+)", line)
    assert all((folder / name).exists() for name in wanted), line
    assert done.stdout.strip() or wanted, line


@pytest.mark.parametrize("line", commands(slow=False))
def test_a_shown_command_runs(line, tmp_path):
    check(line, tmp_path)


@pytest.mark.full
@pytest.mark.parametrize("block", commands_together(slow=True), ids=lambda block: block[0])
def test_shown_slow_commands_run_one_after_another(block, tmp_path):
    for line in block:
        check(line, tmp_path)


def test_the_quick_start_runs(tmp_path):
    """Its lines one after another, with fewer steps."""
    (text,) = [text for marker, text in fences("bash") if marker == "quick"]
    for line in text.strip().splitlines():
        line = line.replace("train.steps=20", "train.steps=3").replace("train.steps=40", "train.steps=5")
        check(line, tmp_path)
    assert "validation" in str(list(tmp_path.rglob("*"))) and (tmp_path / "runs" / "quickstart" / "metrics.jsonl").exists()


def test_lines_for_other_machines_name_what_exists():
    for marker, text in fences("bash"):
        for word in re.findall(r"(?:benchmarks|tests)/[\w./]+", text) if marker in ("long", "gpu") else ():
            assert (ROOT / word).exists(), word
        for scenario in re.findall(r"moetrain train (\w+)", text) if marker == "gpu" else ():
            assert (ROOT / "scenarios" / f"{scenario}.yaml").exists(), scenario


@pytest.mark.parametrize("block, command", [
    ("output:begin", ["moesim", "plan", "olmo_core3_new", "--quiet"]), ("seeds:begin", ["calibration.seeds"]),
])
def test_shown_output_is_what_the_command_prints(block, command):
    """Every line shown is a line printed; only the seconds a plan took may differ."""
    shown = next(text for marker, text in fences("text") if marker.startswith(block))
    run = subprocess.run([sys.executable, "-m", *command], cwd=ROOT, env={**os.environ, "COLUMNS": "100"}, capture_output=True, text=True, check=True)
    plain = lambda line: re.sub(r"; [\d.]+ s$", "", line.strip())  # noqa: E731
    printed = {plain(line) for line in run.stdout.splitlines()}
    lines = [plain(line) for line in shown.splitlines() if line.strip() not in ("", "...")]
    assert len(lines) > 10 and not [line for line in lines if line not in printed]


@pytest.mark.parametrize("program", ["moesim", "moetrain"])
def test_every_command_is_shown(program):
    app = importlib.import_module(f"{program}.cli").app
    names = {(command.name or command.callback.__name__) for command in app.registered_commands}
    text = " ".join(text for _, text in fences("bash"))
    assert names and not {n for n in names if f"{program} {n}" not in text}


def test_options_that_are_named_exist():
    shown_lines = " ".join(line for slow in (False, True) for line in commands(slow) if line.startswith("moesim"))
    options = set(re.findall(r"`(--[a-z]+)", README)) | set(re.findall(r" (--[a-z]+)", shown_lines))
    source = (ROOT / "moesim" / "cli.py").read_text()
    assert options and not {o for o in options if f'"{o}"' not in source}


def test_exit_codes_are_the_ones_of_the_command_line():
    from moesim import terminal

    said = {int(code) for code in re.findall(r"\*\*(\d+)\*\*", README[README.index("Exit codes"):][:400])}
    assert said == {0, terminal.BAD_INPUT, terminal.NOTHING_FITS, terminal.INTERRUPTED}


@pytest.mark.parametrize("marker", SETUP)
def test_setup_is_one_line(marker):
    """What CI reads out of the README and runs in fresh environments."""
    texts = [text for found, text in fences("bash") if found == marker]
    assert len(texts) == 1 and len(texts[0].strip().splitlines()) == 1 and texts[0].startswith("python3 -m venv .venv")
    shown_by = subprocess.run(["bash", ".ci/run", "--show", marker], cwd=ROOT, capture_output=True, text=True)
    assert shown_by.stdout.strip() == texts[0].strip()


def test_the_notice_names_every_repository_that_was_measured():
    """Rows of calibration/measurements: repository of each source, named in NOTICE."""
    pattern = re.compile(r"https://github\.com/[\w.-]+/[\w.-]+")
    rows = {url for path in (ROOT / "calibration" / "measurements").glob("*.csv") for url in pattern.findall(path.read_text())}
    named = set(pattern.findall((ROOT / "NOTICE").read_text()))
    assert len(rows) > 20 and not {r.removesuffix(".git") for r in rows} - named


def test_commands_that_files_tell_you_to_run_exist():
    """A documented flag was never parsed (https://github.com/aliyun/SimAI/pull/294): what docstrings and data files name can be run."""
    from calibration.__main__ import app

    commands_there = {command.name or command.callback.__name__ for command in app.registered_commands}
    files = [p for folder in ("moesim", "calibration", "scenarios") for p in (ROOT / folder).rglob("*") if p.suffix in (".py", ".yaml")]
    for path in [*files, ROOT / "README.md"]:
        for module, command in re.findall(r"python -m calibration(\.\w+)?(?: ([a-z-]+))?", path.read_text()):
            if module:
                assert '__name__ == "__main__"' in (ROOT / "calibration" / f"{module[1:]}.py").read_text(), f"{path.name}: {module}"
            else:
                assert not command or command in commands_there, f"{path.name}: python -m calibration {command}"
