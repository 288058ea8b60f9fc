"""What do all commands do alike at a terminal? (Errors in one line, a console and its progress bars, files written whole or to stdout.)"""

from __future__ import annotations

import functools
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import typer

if TYPE_CHECKING:
    from rich.console import Console

BAD_INPUT, NOTHING_FITS, INTERRUPTED = 2, 3, 130
STDOUT = "-"
PIPED_WIDTH = 100


def guarded(command: Callable[..., None]) -> Callable[..., None]:
    """What a person did wrong becomes one line and an exit code; a fault of ours keeps its traceback."""

    @functools.wraps(command)
    def run(*args: Any, **kwargs: Any) -> None:
        try:
            command(*args, **kwargs)
        except BrokenPipeError:
            # The reader went away (`moesim ops ... | head`); what Python flushes at exit must find no closed pipe.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(0) from None
        except OSError as error:
            fail(f"{error.filename}: {error.strerror}" if error.filename and error.strerror else str(error))
        except ValueError as error:
            fail(str(error))
        except KeyboardInterrupt:
            typer.echo("interrupted", err=True)
            raise typer.Exit(INTERRUPTED) from None

    return run


def fail(message: str) -> NoReturn:
    line = " ".join("".join(c if c.isprintable() else " " for c in message).split())
    typer.echo(f"moesim: {line}", err=True)
    raise typer.Exit(BAD_INPUT) from None


def check_outputs(*paths: str | Path | None) -> None:
    """Refuse, before any work, a place that can't be written to."""
    for path in paths:
        if path is None or str(path) == STDOUT:
            continue
        target = Path(path)
        if target.is_dir():
            raise ValueError(f"{target}: is a folder, a file name is needed")
        if not target.parent.is_dir():
            raise ValueError(f"{target}: there is no folder {target.parent}")
        if not os.access(target.parent, os.W_OK):
            raise ValueError(f"{target}: no permission to write into {target.parent}")


def console(err: bool = False) -> Console:
    from rich.console import Console

    stream = sys.stderr if err else sys.stdout
    fixed = not stream.isatty() and "COLUMNS" not in os.environ
    return Console(stderr=err, highlight=False, width=PIPED_WIDTH if fixed else None)


@contextmanager
def progress_bars(quiet: bool) -> Iterator[Callable[[str, int, int], None] | None]:
    """A callable (stage, done, total) that keeps one bar a stage on stderr; None where nobody watches."""
    if quiet or not sys.stderr.isatty():
        yield None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console(err=True), transient=True) as bars:
        stages: dict[str, Any] = {}

        def update(stage: str, done: int, total: int) -> None:
            if stage not in stages:
                stages[stage] = bars.add_task(stage, total=total)
            bars.update(stages[stage], completed=done, total=total)

        yield update


def write_json(path: str | Path, content: Any, indent: int | None = 1) -> None:
    from moesim.files import write_atomically

    text = json.dumps(content, indent=indent, allow_nan=False) + "\n"
    if str(path) == STDOUT:
        sys.stdout.write(text)
    else:
        write_atomically(path, text)


def wrote(*paths: str | Path | None) -> None:
    for path in paths:
        if path is not None and str(path) != STDOUT:
            typer.echo(f"wrote {path}", err=True)


def write_lines(output: Path | None, objects: Iterable[dict[str, Any]]) -> None:
    """One JSON object a line, into a file or to stdout."""
    from moesim.files import write_atomically

    lines = (json.dumps(line, allow_nan=False) + "\n" for line in objects)
    if output is None or str(output) == STDOUT:
        sys.stdout.writelines(lines)
        sys.stdout.flush()
    else:
        write_atomically(output, "".join(lines))
        wrote(output)
