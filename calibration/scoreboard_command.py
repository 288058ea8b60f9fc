"""What does `python -m calibration scoreboard` do with its options? (Options in; lines on the terminal, files and an exit code out.)"""

from __future__ import annotations

import json
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Iterator

from calibration import scoreboard
from calibration.scoreboard_rows import Progress
from calibration.write import write_text

WORSE = 1
"""Exit code of a check that failed."""


def run(rows: Path | None, json_file: Path | None, html: Path | None, check: bool, update: bool, full: bool, because: str | None, workers: int, quiet: bool) -> int:
    """The exit code: 0, or WORSE. Bad options are a ValueError of one line."""
    _legal(rows, check, update, full, because, [json_file, html])
    was = scoreboard.committed() if check else scoreboard.committed_if_any()
    with _bar(quiet) as progress:
        quick, judged = scoreboard.look(rows, workers=workers, progress=progress)
        slow = _full(workers, progress) if full else None
    if check:
        return _checked(was, quick)
    for line in scoreboard.table(quick):
        print(line)
    slow_shown = slow or (None if rows else was.get("full"))
    _print_full(slow_shown)
    if json_file:
        write_text(json_file, json.dumps({"quick": quick, **({"full": slow_shown} if slow_shown else {}), "rows": _each(judged)}, indent=1) + "\n")
    if html:
        from calibration.scoreboard_page import write_page

        write_page(html, quick, judged, slow_shown)
    if update:
        from calibration import scoreboard_readme

        for line in scoreboard.update(because or "", quick, slow):
            print(line)
        scoreboard_readme.write(scoreboard.committed())
    elif not rows:
        _owed(because, quick)
    return 0


def _owed(because: str | None, quick: dict[str, Any]) -> None:
    """Log the look, or remind of it."""
    if because:
        scoreboard.log(because, scoreboard.seen(quick))
    else:
        print("\nThis was a look at residuals: if it led to anything, log it with --because \"...\" (measurements/residual_log.md)", file=sys.stderr)


def _each(judged: dict[str, Any]) -> list[dict[str, Any]]:
    """Every prediction behind the figures: one dict a row and label, tokens/s/GPU."""
    return [{"id": j.id, "label": label, "measured": j.measured, "predicted": j.predicted, "low": j.low, "high": j.high} for label, members in judged.items() for j in members]


def _legal(rows: Path | None, check: bool, update: bool, full: bool, because: str | None, outputs: list[Path | None]) -> None:
    if update and not (because or "").strip():
        raise ValueError("--update needs --because \"what changed and why\": it goes into the log of looks")
    if rows and (check or update or full):
        raise ValueError("--check, --update and --full are about the shipped rows: leave out --rows")
    if check and update:
        raise ValueError("--check compares with the committed figures and --update replaces them: give one of the two")
    for path in outputs:
        if path and path.is_dir():
            raise ValueError(f"{path}: a folder, not a file to write")


def _checked(was: dict[str, Any], quick: dict[str, Any]) -> int:
    worse, better = scoreboard.moved(was["quick"], quick)
    for line in worse:
        print(f"worse: {line}")
    for line in better:
        print(f"better: {line}")
    print(f"{len(scoreboard.checked(was['quick']))} figures compared with those {scoreboard.report(was['quick'])}: {len(worse)} worse, {len(better)} better")
    if worse:
        print("If this is meant, say so: python -m calibration scoreboard --update --because \"...\"")
    return WORSE if worse else 0


def _full(workers: int, progress: Progress | None) -> dict[str, Any]:
    from calibration.scoreboard_full import look_full

    return look_full(workers=workers, progress=progress)


def _print_full(found: dict[str, Any] | None) -> None:
    if found:
        from calibration.scoreboard_full import table

        print("\n".join(["", *table(found)]))


@contextmanager
def _bar(quiet: bool) -> Iterator[Progress | None]:
    """A callable (stage, done, total) that keeps one bar a stage on stderr; None where nobody watches."""
    if quiet or not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress as Bars, TextColumn, TimeElapsedColumn

    with Bars(TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), console=Console(stderr=True), transient=True) as bars:
        stages: dict[str, Any] = {}

        def step(stage: str, done: int, total: int) -> None:
            if stage not in stages:
                stages[stage] = bars.add_task(stage, total=total)
            bars.update(stages[stage], completed=done, total=total)

        yield step
