"""Which command times a machine? (`moetrain bench OPS.jsonl -o M.jsonl`: what the planner asks for in, what it took out.)

Exit codes: 0 done; 2 bad input, one line on stderr; 130 interrupted: what was measured is in the file, the same command goes on.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Optional

import typer

from moetrain.cli import guarded

if TYPE_CHECKING:
    from moesim.measurement import Measurement
    from moetrain.bench.run import Note, Summary

INTERRUPTED = 130
DTYPES = {"float32": "fp32", "bfloat16": "bf16"}

Ops = Annotated[Optional[Path], typer.Argument(metavar="[OPS]", help="What `moesim ops SCENARIO -o OPS` wrote. May be left out with --suite.", show_default=False)]
Output = Annotated[Path, typer.Option("-o", "--output", metavar="M", help="JSONL file to write, or to go on with.", show_default=False)]
Only = Annotated[Optional[list[str]], typer.Option("--only", metavar="KIND", help="gemm | grouped_gemm | attention | memory_bound | collective | dispatch; "
                                                   "may be repeated.", show_default="all")]
Dtype = Annotated[str, typer.Option("--dtype", metavar="D", help="What 16-bit ops are stored in: auto (bfloat16 on a GPU, float32 on a CPU) | float32 | bfloat16.")]
Device = Annotated[str, typer.Option("--device", help="auto | cpu | cuda.")]
Budget = Annotated[Optional[str], typer.Option("--budget", metavar="TIME", help="Stop in time, such as 5m: most useful ops first.", show_default="no limit")]
Cap = Annotated[str, typer.Option("--cap", metavar="TIME", help="At most this long for one op.")]
Quiet = Annotated[str, typer.Option("--quiet-wait", metavar="TIME", help="On a CPU, wait so long for other processes to be quiet before each op.")]
Suite = Annotated[bool, typer.Option("--suite", help="Also launch cost, compute beside communication, gradient add, optimizer, checkpoint.")]


def add_commands(app: typer.Typer) -> None:
    """Mount `bench` on the trainer's command line."""
    app.command("bench")(bench_command)


@guarded
def bench_command(output: Output, ops: Ops = None, only: Only = None, dtype: Dtype = "auto", device: Device = "auto", budget: Budget = None,
                  cap: Cap = "10s", quiet_wait: Quiet = "10s", suite: Suite = False) -> int:
    """Time on this machine the ops that a plan depends on, for `python -m calibration` to fit.

    Examples:

      moesim ops olmo_core3_new -o ops.jsonl

      moetrain bench ops.jsonl -o m.jsonl --budget 5m

      torchrun --nproc-per-node 8 -m moetrain bench ops.jsonl -o m.jsonl --suite

    Collectives and dispatch need as many ranks as they have: start it with torchrun for those. Every repeat is kept. An op that can't be
    timed here has a line with the reason. Given again, the command measures what the file lacks.
    """
    from moetrain.bench.requests import only as chosen, read_requests
    from moetrain.bench.run import Options

    if ops is None and not suite:
        raise ValueError("OPS is missing: the file that `moesim ops SCENARIO -o OPS` wrote (or --suite)")
    for name, value, legal in (("--dtype", dtype, ("auto", *DTYPES)), ("--device", device, ("auto", "cpu", "cuda"))):
        if value not in legal:
            raise ValueError(f"{name} {value}: legal are {', '.join(legal)}")
    options = Options(seconds_of("--budget", budget) if budget is not None else float("inf"), seconds_of("--cap", cap),
                      seconds_of("--quiet-wait", quiet_wait), suite)
    requests = chosen(read_requests(ops), only or ()) if ops is not None else []
    _check_output(output, ops)
    try:
        summary = _run(requests, output, dtype, device, options)
    except KeyboardInterrupt:
        typer.echo(f"moetrain: stopped; the same command goes on with {output}", err=True)
        return INTERRUPTED
    if summary is not None:
        for line in closing(summary, output):
            typer.echo(line)
    return 0


def _run(requests, output: Path, dtype: str, device: str, options) -> Summary | None:
    """The summary, on the first rank."""
    from moetrain import distributed
    from moetrain.bench.run import run
    from moetrain.bench.work import TORCH, Machine
    from moetrain.kernels import backend

    seat = distributed.take_seat(device, timeout_s=24 * 3600.0)
    try:
        stored = DTYPES.get(dtype) or ("bf16" if seat.device.type == "cuda" else "fp32")
        machine = Machine(seat.device, stored, backend("auto", seat.device, TORCH[stored]), seat.rank, seat.world)
        with _progress(seat.rank == 0) as note:
            summary = run(requests, output, machine, options, note)
        return summary if seat.rank == 0 else None
    finally:
        distributed.leave()


def seconds_of(option: str, text: str) -> float:
    """"5m", "90 s", "1.5h", "0s": seconds. ValueError names the option."""
    from moesim.units import parse

    text = re.sub(r"(?<=[\d\s.])m$", "min", text.strip())
    try:
        value = parse(text, "s")
    except ValueError as error:
        raise ValueError(f"{option}: {error}") from None
    if value < 0:
        raise ValueError(f"{option} {text}: must not be negative")
    return value


def _check_output(output: Path, ops: Path | None) -> None:
    """Refuse, before any work, a place that can't be written to, and a file that is no list of measurements."""
    from moesim.measurement import read_measurements

    if output.is_dir():
        raise ValueError(f"{output}: is a folder, a file name is needed")
    if not output.parent.is_dir():
        raise ValueError(f"{output}: there is no folder {output.parent}")
    if not os.access(output if output.exists() else output.parent, os.W_OK):
        raise ValueError(f"{output}: no permission to write")
    if ops is not None and output.exists() and output.samefile(ops):
        raise ValueError(f"{output}: is the list of ops itself; name another file")
    if output.exists():
        for _ in read_measurements(output):
            pass


# --- what a person sees --------------------------------------------------------------------------------------------------------


def result(m: Measurement) -> str:
    """A line's figures in a few words."""
    from moetrain.observe.words import duration

    if m.reason is not None:
        return f"skipped: {m.reason}"
    parts = [f"{duration(m.median)} +-{m.spread:.1%}" if len(m.seconds) > 1 else duration(m.median), f"{len(m.seconds)} repeats"]
    if m.flops:
        parts.append(f"{m.flops / m.median / 1e9:.3g} GFLOP/s")
    elif m.bytes:
        parts.append(f"{m.bytes / m.median / 1e9:.3g} GB/s")
    if m.noisy:
        parts.append(f"noisy ({'; '.join(m.noisy)})")
    return ", ".join(parts)


def closing(summary: Summary, output: Path) -> list[str]:
    """What is said at the end."""
    words = [f"{summary.measured} measured" + (f" ({summary.noisy} noisy)" if summary.noisy else "")]
    if summary.present:
        words.append(f"{summary.present} there already")
    if summary.skipped:
        words.append(f"{sum(summary.skipped.values())} skipped")
    reasons = sorted(summary.skipped.items(), key=lambda item: -item[1])
    shown = [f"  skipped {count}: {reason}" for reason, count in reasons[:8]]
    more = [f"  skipped {sum(count for _, count in reasons[8:])} for other reasons: see the file"] if len(reasons) > 8 else []
    return [f"{output}: {', '.join(words)}", *shown, *more]


@contextmanager
def _progress(first: bool) -> Iterator[Note]:
    """A bar on a terminal's stderr; a line for each op where stderr is no terminal; nothing on other ranks."""
    if not first:
        yield lambda *_: None
        return
    if not sys.stderr.isatty():
        yield _plain_line
        return
    from rich.console import Console
    from rich.markup import escape
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (MofNCompleteColumn(), BarColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=Console(stderr=True)) as bar:
        job = bar.add_task("", total=None)

        def note(number: int, total: int, text: str, line: Measurement | None) -> None:
            shown = f"{text}: {result(line) if line is not None else 'there already'}"
            bar.update(job, completed=number + 1, total=total, description=escape(shown))

        yield note


def _plain_line(number: int, total: int, text: str, line: Measurement | None) -> None:
    from moetrain.bench.run import USED_UP

    if line is not None and line.reason != USED_UP:
        print(f"[{number + 1}/{total}] {text}: {result(line)}", file=sys.stderr, flush=True)
