"""What does the simulator answer for every published run? (runs in, one answer a question out, kept between commands)

Runs that pose one question are played once, runs that differ in layout or batch share priced parts, and every answer is appended to
a file named by a hash of the code and data that produce it: a command that is stopped goes on where it was, and one whose inputs
did not change plays nothing.
"""

from __future__ import annotations

import ast
import hashlib
import json
import os
from collections import defaultdict
from concurrent.futures import as_completed
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Callable, Iterable, Iterator, Mapping, Sequence

import moesim
from calibration.coverage import slopes
from moesim.coverage import Coverage
from moesim.evaluate import Evaluator
from moesim.load import scenarios_dir
from moesim.model_error import ModelError
from moesim.parts import Parts
from moesim.predict import predict_row
from moesim.profile import load_profile
from moesim.runs import Run
from moesim.site import NEUTRAL, Site
from moesim.workers import worker_pool

DATA = ("profiles", "stacks", "clusters", "gpus", "models", "kernel_coverage.yaml", "kernel_errors.json", "model_error.yaml")
"""What predictions read of scenarios/."""
ENTRY = "moesim.predict", "moesim.evaluate", "moesim.runs", "moesim.anchored"
KEPT_FILES = 12
"""Answers of so many states of the code are kept."""

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Answer:
    """tokens/s/GPU with its 80% band and peak bytes, as Evaluator.quick gives them; far: share of the priced seconds that no
    measurement of this GPU stands behind; slope: d ln(step) / d ln(factor) by kind of kernel; spread: standard deviation of ln(step)
    over draws of prices. reason: why there is none of these."""

    tokens_per_s_per_gpu: float = 0.0
    low: float = 0.0
    high: float = 0.0
    peak_bytes: float = 0.0
    fits: bool = True
    far: float = 0.0
    slope: tuple[float, ...] = ()
    spread: float = 0.0
    reason: str = ""


def question(run: Run) -> str:
    """The same for runs that pose the same question."""
    text = repr((run.stack.name, run.proxy_dispatcher, str(run.layout), run.model, run.cluster, run.workload))
    return hashlib.sha256(text.encode()).hexdigest()[:24]


def shares_parts(run: Run) -> str:
    """The same for runs that differ in layout and batch only."""
    workload = run.workload.model_copy(update={"global_batch_tokens": run.workload.seq_len})
    return repr((run.stack.name, run.proxy_dispatcher, run.model, run.cluster, workload))


def play(runs: Sequence[Run], site: Site = NEUTRAL, coverage: Coverage | None = None) -> list[Answer]:
    """Answers of runs of one model, cluster, stack and workload but for the batch."""
    first, site = runs[0], replace(site, proxy_dispatcher=runs[0].proxy_dispatcher)
    try:
        profile = _profile(first.cluster.gpu.profile)
        parts = Parts(first.model, first.cluster, first.workload, first.stack, profile, site, coverage) if coverage else None
        base = Evaluator(first.scenario(), profile, first.stack, site=site, parts=parts)
    except ValueError as error:
        return [Answer(reason=_reason(error))] * len(runs)
    return [_answer(base.for_scenario(run.scenario()), run) for run in runs]


_profile = lru_cache(maxsize=None)(load_profile)


def _answer(evaluator: Evaluator, run: Run) -> Answer:
    try:
        layout = evaluator.legal(run.layout)
        quick = evaluator.quick(layout)
    except ValueError as error:
        return Answer(reason=_reason(error))
    weights, programs = evaluator.samples(layout)
    return Answer(quick.tokens_per_s_per_gpu, quick.low, quick.high, quick.peak_bytes, quick.fits,
                  ModelError.far(evaluator.provenance(programs[-1])), slopes(weights, programs), quick.price_sigma)


def _reason(error: ValueError) -> str:
    return str(error).splitlines()[0] if str(error) else "the simulator refused the run"


def answers(runs: Iterable[Run], *, workers: int = 0, progress: Progress | None = None, folder: Path | None = None) -> dict[str, Answer]:
    """Run id -> answer. workers: processes, 0 = one a CPU; folder: where answers are kept."""
    asked = {run.id: (question(run), run) for run in runs}
    kept = Kept(folder)
    groups: dict[str, dict[str, Run]] = defaultdict(dict)
    for key, run in asked.values():
        if key not in kept.answers:
            groups[shares_parts(run)].setdefault(key, run)
    total, done = sum(map(len, groups.values())), 0
    tasks = sorted(groups.values(), key=lambda group: -len(group))
    for number, found in each_done(play, [list(group.values()) for group in tasks], workers):
        kept.add(dict(zip(tasks[number], found)))
        done += len(found)
        if progress:
            progress("runs", done, total)
    return {name: kept.answers[key] for name, (key, _) in asked.items()}


def each_done(work: Callable, tasks: Sequence[Any], workers: int) -> Iterator[tuple[int, Any]]:
    """(number of a task, what ``work`` says of it), as they are done; work is a module-level function."""
    workers = workers or os.cpu_count() or 1
    if workers == 1 or len(tasks) < 2:
        yield from ((number, work(task)) for number, task in enumerate(tasks))
        return
    with worker_pool(workers) as pool:
        futures = {pool.submit(work, task): number for number, task in enumerate(tasks)}
        for future in as_completed(futures):
            yield futures[future], future.result()


def predictions(rows: Sequence[Mapping[str, str]], found: Mapping[str, Answer]) -> dict[str, dict[str, Any]]:
    """Id -> what `moesim predict` writes of each row, from answers that are there."""
    def recall(run: Run) -> Answer:
        if found[run.id].reason:
            raise ValueError(found[run.id].reason)
        return found[run.id]

    return {row["id"]: predict_row(row, recall) for row in rows}


class Kept:
    """Answers by question, on disk one JSON line each; a line cut short by a kill is left out."""

    def __init__(self, folder: Path | None = None) -> None:
        self.path = (folder or cache_folder()) / f"{inputs_hash()}.jsonl"
        self.answers = {key: _from_json(values) for key, values in read_lines(self.path) if isinstance(values, dict) and "spread" in values}

    def add(self, found: Mapping[str, Answer]) -> None:
        self.answers |= found
        append_lines(self.path, [(key, asdict(answer)) for key, answer in found.items()])


def _from_json(values: dict[str, Any]) -> Answer:
    return Answer(**{**values, "slope": tuple(values["slope"])})


def read_lines(path: Path) -> list[tuple[str, Any]]:
    """(key, value) of every whole line of a file that ``append_lines`` wrote, [] where there is none."""
    found = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else ():
        try:
            key, value = json.loads(line)
            found.append((str(key), value))
        except (ValueError, TypeError):
            continue
    return found


def append_lines(path: Path, pairs: Sequence[tuple[str, Any]]) -> None:
    """Add JSON lines to a file of the cache; the oldest files beyond KEPT_FILES go when a new one is begun."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = not path.exists()
    with path.open("a", encoding="utf-8") as file:
        file.write("".join(json.dumps(pair) + "\n" for pair in pairs))
    if fresh:
        _prune(path.parent)


def _prune(folder: Path) -> None:
    for old in sorted(folder.glob("*.jsonl"), key=lambda p: p.stat().st_mtime)[:-KEPT_FILES]:
        old.unlink(missing_ok=True)


def cache_folder() -> Path:
    """Where answers are kept between commands."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "moesim" / "scoreboard"


@lru_cache(maxsize=1)
def inputs_hash() -> str:
    """Of every source file that a prediction can reach, the plug-ins it picks by name, and the data it reads."""
    digest = hashlib.sha256()
    root = Path(moesim.__file__).parent
    for path in sorted(_reached(root)):
        digest.update(f"{path.relative_to(root)}\n".encode() + path.read_bytes())
    for path in sorted(p for name in DATA for p in _files(scenarios_dir() / name)):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def _files(path: Path) -> list[Path]:
    return [p for p in path.rglob("*") if p.is_file()] if path.is_dir() else [path]


def _reached(root: Path) -> set[Path]:
    """Files of moesim that ENTRY imports, lazily or not; a package counts with everything in it."""
    todo, seen = list(ENTRY), set()
    while todo:
        name = todo.pop()
        path = root.joinpath(*name.split(".")[1:])
        files = set(path.glob("*.py")) if path.is_dir() and path != root else {path.with_suffix(".py")} if path.with_suffix(".py").exists() else set()
        for file in files - seen:
            seen.add(file)
            todo += _imports(file)
    return seen


def _imports(file: Path) -> list[str]:
    """Names a file may import from moesim, in full."""
    found, package = [], "moesim" if file.parent.name == "moesim" else f"moesim.{file.parent.name}"
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            parent = package.rsplit(".", node.level - 1)[0] if node.level else ""
            base = ".".join(part for part in (parent, node.module) if part)
            found += [base, *(f"{base}.{alias.name}" for alias in node.names)]
    return [name for name in found if name.startswith("moesim.")]
