"""Does every import point the way the design says: upwards only, one home for each dependency, nothing heavy before it is needed?

Sources are parsed, not imported, so a lazy import counts too; imports for type checkers only don't.
"""

from __future__ import annotations

import ast
import re
import statistics
import subprocess
import sys
import tomllib
import warnings
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parent.parent
PLUGINS = ("axes", "costs", "schedules")
PACKAGES = ("moesim", "moetrain", "calibration")

# A module imports only modules of rows above it. The numbers are the layers of the design; a letter splits a layer whose files
# build on one another. A package of plug-ins stands in one row; what its files import from each other is checked below.
ROWS = {
    "0 ": "closed_form document files hardware huggingface units workers",
    "1a": "fields ops schedules site training",
    "1b": "factor_errors measurement spec",
    "2a": "block layout load program routing schema",
    "2b": "compiled fuse run_models seats sharing stack wiring",
    "2c": "saved_tensors run_fields timeline",
    "3a": "axes costs maxplus memory play runs space transformer",
    "3b": "critical node pricing rank",
    "4a": "coverage model_error plan profile",
    "4b": "part",
    "4c": "parts",
    "4d": "assembly origins",
    "4e": "uncertainty",
    "5a": "bounds engine paths",
    "5b": "overlap",
    "6a": "predict screen",
    "6b": "anchors evaluate",
    "6c": "anchored compare full rank_memory step_ops whynot",
    "6d": "advise",
    "6e": "search",
    "7a": "launch report terminal",
    "7b": "charts",
    "7c": "page",
    "8a": "cli",
    "8b": "__main__",
}
ROW_OF = {module: i for i, names in enumerate(ROWS.values()) for module in names.split()}
LABELS = [label.strip() for label in ROWS]

HOMES = {
    "tokenizers": {"moetrain.data.tokenizer"},
    "pyarrow": {"moetrain.data.inputs"},
    "safetensors": {f"moetrain.{m}" for m in ("forced", "export.read", "export.write", "observe.routing_log")},
    "simpy": {"moesim.engine"},
    "yaml": {"moesim.document", "calibration.write"},
    "plotly": {"moesim.page", "calibration.plots", "calibration.compare_page", "calibration.scoreboard_page"},
    "scipy": {"calibration.fit", "calibration.posterior"},
    "typer": {"moesim.cli", "moesim.terminal", "calibration.__main__", "moetrain.cli", "moetrain.data.cli", "moetrain.observe.cli", "moetrain.bench.cli"},
    "rich": {"moesim.terminal", "moesim.report", "calibration.__main__", "calibration.scoreboard_command", "moetrain.observe.log", "moetrain.data.cli", "moetrain.bench.cli"},
    "pydantic": {f"moesim.{m}" for m in ("spec", "hardware", "training", "fields", "load", "profile", "stack", "model_error", "coverage", "saved_tensors")} | {"moetrain.data.shards", "moetrain.export.config"},
    "pint": {"moesim.units"},
}
LAZY = {"pint", "plotly", "scipy"}
"""Imported inside functions only: each costs more than a tenth of a second."""
NOT_IN_CLI = {"numpy", "pydantic", "pydantic_core", "simpy", "plotly", "scipy", "pint", "yaml"}

# What a plug-in may see of moesim, and the helpers that the plug-ins of a package share: vocabulary, picked by nobody by name.
VOCABULARY = {
    "axes": {"moesim.block", "moesim.layout", "moesim.ops"},
    "costs": {"moesim.ops"},
    "schedules": set(),
}
SHARED = {
    "axes": {"moesim.axes.scale"},
    "costs": {"moesim.costs.base", "moesim.costs.core", "moesim.costs.tiles"},
    "schedules": {"moesim.schedules"},
}
PLUGIN_LIBRARIES = {"axes": set(), "costs": {"numpy"}, "schedules": set()}


# What the trainer may see of the planner: words for models, layouts and ops, the readers of files, and which ops a step issues; nothing that
# says what they cost, or searches.
TRAINER_SEES = {"closed_form", "document", "files", "hardware", "huggingface", "layout", "load", "measurement", "ops", "program", "rank_memory", "routing", "schedules", "spec",
                "step_ops", "timeline", "training", "units", ""}


class Import(NamedTuple):
    module: str
    line: int
    lazy: bool


def sources(package: str) -> list[Path]:
    return sorted(p for p in (ROOT / package).rglob("*.py") if "__pycache__" not in p.parts)


def name_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@lru_cache(maxsize=None)
def modules() -> frozenset[str]:
    return frozenset(name_of(p) for package in PACKAGES for p in sources(package))


EVERYTHING = [p for package in PACKAGES for p in sources(package)]


@lru_cache(maxsize=None)
def imports(path: Path) -> tuple[Import, ...]:
    """Every import of a file outside `if TYPE_CHECKING:`."""
    name = name_of(path)
    return imports_of(path.read_text(), name if path.name == "__init__.py" else name.rpartition(".")[0])


def imports_of(text: str, package: str) -> tuple[Import, ...]:
    """The same of a text in ``package``; relative names made absolute, submodules told from the names they hold."""
    found: list[Import] = []

    def visit(node: ast.AST, lazy: bool) -> None:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            return
        if isinstance(node, ast.Import):
            found.extend(Import(alias.name, node.lineno, lazy) for alias in node.names)
        if isinstance(node, ast.ImportFrom):
            parents = package.split(".")
            base = ".".join([*(parents[: len(parents) - node.level + 1] if node.level else []), *([node.module] if node.module else [])])
            inner = [f"{base}.{alias.name}" for alias in node.names]
            found.extend(Import(name if name in modules() else base, node.lineno, lazy) for name in inner)
        for child in ast.iter_child_nodes(node):
            visit(child, lazy or isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)))

    visit(ast.parse(text), False)
    return tuple(found)


def unit(module: str) -> str:
    """The name a module has in ROWS: plug-in packages count as one."""
    return module.split(".")[1] if "." in module else ""


def test_the_reader_of_imports_sees_what_is_there():
    """Relative, lazy and type-checking imports, told apart."""
    text = """
from . import fields, __version__
from .costs import gemm
import numpy as np, os.path
if TYPE_CHECKING:
    import torch
def f():
    from moesim.costs import gemm
"""
    assert [(i.module, i.lazy) for i in imports_of(text, "moesim")] == [
        ("moesim.fields", False), ("moesim", False), ("moesim.costs.gemm", False), ("numpy", False), ("os.path", False), ("moesim.costs.gemm", True)]
    assert imports_of("from ..ops import Op", "moesim.axes")[0].module == "moesim.ops"


def test_every_module_has_a_row_and_every_row_a_file():
    here = {unit(name) for name in modules() if name.startswith("moesim.")}
    assert here == set(ROW_OF), f"no row: {sorted(here - set(ROW_OF))}; no file: {sorted(set(ROW_OF) - here)}"


@pytest.mark.parametrize("path", sources("moesim"), ids=name_of)
def test_a_row_imports_only_rows_above(path):
    mine = unit(name_of(path))
    for found in imports(path):
        if not found.module.startswith("moesim.") or unit(found.module) == mine:
            continue
        assert found.module in modules(), f"{path.name}:{found.line} imports {found.module}, which does not exist"
        other = unit(found.module)
        assert ROW_OF[other] < ROW_OF[mine], f"{path.name}:{found.line}: row {LABELS[ROW_OF[mine]]} imports {other} of row {LABELS[ROW_OF[other]]}"


FORBIDDEN = {"moesim": {"torch", "triton", "moetrain", "calibration", "tests"}, "calibration": {"torch", "triton", "moetrain", "tests"},
             "moetrain": {"calibration", "tests", "simpy", "scipy", "plotly", "yaml"}}


@pytest.mark.parametrize("path", EVERYTHING, ids=name_of)
def test_each_package_stays_on_its_side(path):
    package = name_of(path).split(".")[0]
    seen = {found.module.split(".")[0] for found in imports(path)}
    assert not seen & FORBIDDEN[package], f"{name_of(path)} imports {sorted(seen & FORBIDDEN[package])}"


@pytest.mark.parametrize("path", EVERYTHING, ids=name_of)
def test_one_home_a_dependency(path):
    for found in imports(path):
        library = found.module.split(".")[0]
        if library in HOMES:
            assert name_of(path) in HOMES[library], f"{name_of(path)}:{found.line}: {library} lives in {', '.join(sorted(HOMES[library]))}"
        assert found.lazy or library not in LAZY, f"{name_of(path)}:{found.line}: {library} is imported inside the function that needs it"


@pytest.mark.parametrize("path", sources("moetrain"), ids=name_of)
def test_the_trainer_sees_the_planners_words_only(path):
    for found in imports(path):
        if found.module.split(".")[0] == "moesim":
            assert unit(found.module) in TRAINER_SEES, f"{name_of(path)}:{found.line} imports {found.module}"
        if found.module.split(".")[0] == "triton":
            assert name_of(path).startswith("moetrain.kernels."), f"{name_of(path)}:{found.line}: triton lives in moetrain/kernels"


ENVIRONMENT = {
    "moetrain.distributed": {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR"},
    "moetrain.cli": {"RANK", "WORLD_SIZE", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "OMP_NUM_THREADS"},
    "moetrain.testing": {"RANK", "WORLD_SIZE", "LOCAL_RANK"},
    "moetrain.bench.machine": {"LOCAL_WORLD_SIZE"},
    "moetrain.data.tokenizer": {"TOKENIZERS_PARALLELISM"},
}
"""Who reads or sets which variables: torchrun's, and what libraries are told. No behaviour of a run hides there."""


def test_no_behaviour_hides_in_the_environment():
    for path in sources("moetrain"):
        text = path.read_text()
        if re.search(r"\b(environ|getenv)\b", text):
            assert name_of(path) in ENVIRONMENT, name_of(path)
            used = set(re.findall(r"environ(?:\.get\(|\[)[\"']?(\w+)", text)) - {"name"}
            assert used <= ENVIRONMENT[name_of(path)], (name_of(path), used)


def test_the_trainers_modules_form_no_ring():
    """Imports at module level, so that any file can be read after those it imports."""
    above = {name_of(p): {i.module for i in imports(p) if i.module.startswith("moetrain.") and not i.lazy} for p in sources("moetrain")}
    done: set[str] = set()
    while ready := {m for m, needs in above.items() if m not in done and needs <= done | {m}}:
        done |= ready
    assert len(done) == len(above), f"rings among {sorted(set(above) - done)}"


def third_party(package: str) -> set[str]:
    names = {found.module.split(".")[0] for path in sources(package) for found in imports(path)}
    return names - set(sys.stdlib_module_names) - {"moesim", "calibration"}


def test_what_is_imported_is_what_is_declared():
    """The planner's dependencies, no more and no fewer, and no torch among them."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    declared = {re.match(r"[\w-]+", line).group().lower() for line in project["dependencies"]}
    imported = {{"yaml": "pyyaml"}.get(name, name) for name in third_party("moesim") | third_party("calibration")}
    assert imported == declared
    assert not declared & {"torch", "triton"} and any(line.startswith("torch") for line in project["optional-dependencies"]["train"])


@pytest.mark.parametrize("kind", PLUGINS)
def test_plugins_see_vocabulary_only_and_no_sibling(kind):
    """An axis sees blocks and layouts, never seconds; a cost sees ops, never layouts; a schedule sees integers."""
    for path in sources(f"moesim/{kind}"):
        mine = name_of(path)
        for found in imports(path):
            library = found.module.split(".")[0]
            if library == "moesim":
                registry = mine == f"moesim.{kind}" and found.module.startswith(mine)
                legal = registry or found.module in VOCABULARY[kind] | SHARED[kind]
                assert legal, f"{mine}:{found.line} imports {found.module}: a plug-in of {kind} sees {sorted(VOCABULARY[kind] | SHARED[kind])}"
            else:
                assert library in PLUGIN_LIBRARIES[kind] | set(sys.stdlib_module_names), f"{mine}:{found.line} imports {library}"


def test_the_command_line_imports_nothing_heavy():
    script = "import sys, moesim.cli; print(*sorted({m.split('.')[0] for m in sys.modules}))"
    loaded = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=ROOT).stdout.split()
    assert "typer" in loaded and not NOT_IN_CLI & set(loaded), sorted(NOT_IN_CLI & set(loaded))


def test_planning_imports_no_chart_unit_or_fit_library():
    script = "import sys, moesim.search, moesim.report; print(*sorted({m.split('.')[0] for m in sys.modules}))"
    loaded = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=ROOT).stdout.split()
    assert "numpy" in loaded and not LAZY & set(loaded), sorted(LAZY & set(loaded))


# --- the house's habits -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", [p for p in EVERYTHING if p.name != "__init__.py"], ids=name_of)
def test_a_file_begins_with_the_question_it_answers(path):
    first = (ast.get_docstring(ast.parse(path.read_text())) or "").split("\n\n")[0]
    assert "?" in first, f"{name_of(path)}: the docstring's first paragraph asks no question: {first[:80]!r}"


LONG, TOO_LONG = 450, 650


def test_files_and_functions_stay_small():
    lengths = {name_of(p): len(p.read_text().splitlines()) for package in (*PACKAGES, "tests") for p in sources(package)}
    long = {name: n for name, n in lengths.items() if n > LONG}
    if long:
        warnings.warn(f"longer than {LONG} lines: {long}", stacklevel=1)
    assert max(lengths.values()) <= TOO_LONG, {name: n for name, n in lengths.items() if n > TOO_LONG}
    functions = [node.end_lineno - node.lineno + 1 for package in PACKAGES for p in sources(package)
                 for node in ast.walk(ast.parse(p.read_text())) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]
    assert statistics.median(functions) <= 14


MACHINE = ("/wo" + "rk/", "/ro" + "ot/", "/ho" + "me/", "sha" + "red/", ".library" + "/")
TEXT = {".py", ".md", ".yaml", ".toml", ".csv", ".json", ".txt", ".html", ""}
SKIPPED = {".git", ".venv", ".venv-test", ".venv-peer", ".pytest_cache", ".hypothesis", "__pycache__", "dist", "build", "node_modules"}


def test_no_sentence_names_the_machine_it_was_written_on():
    for path in ROOT.rglob("*"):
        inside = path.relative_to(ROOT)
        if SKIPPED & set(inside.parts) or not path.is_file() or path.suffix not in TEXT or path.stat().st_size > 20_000_000:
            continue
        text = path.read_text(errors="replace")
        hits = [word for word in MACHINE if re.search(rf"(?<![\w./]){re.escape(word)}", text)]
        assert not hits, f"{inside} mentions {hits}"
