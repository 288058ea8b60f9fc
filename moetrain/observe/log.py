"""Where does what happens in a run go? (Terminal, `metrics.jsonl`, TensorBoard: one call a step, one call an event.)

Rank 0 opens a RunLog; other ranks open a silent one with the same methods, so that callers need no "if". On a terminal a bar
shows how far the run is and lines scroll above it; piped, there are lines only. TensorBoard is optional: without the package
the log says so once and goes on.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.text import Text

from moetrain.observe.jsonl import JsonLines
from moetrain.observe.metrics import FILE, StepRecord, event_line, last_step, next_restart, step_line
from moetrain.observe.words import UNKNOWN, clean, compact, duration, percent, size


def step_text(record: StepRecord, total: int | None = None) -> str:
    """One line about a step for a person: what it learned, how fast, how even, how full, and what was odd about it."""
    parts = [f"step {record.step}" + (f"/{total}" if total else ""), f"loss {_number(record.loss, '.4f')}"]
    parts += [f"{name} {_number(value, '.3g')}" for name, value in record.losses.items()]
    parts.append(f"{compact(record.tokens_per_s_per_gpu)} tok/s/GPU ({compact(record.tokens_per_s)} tok/s)")
    parts.append(str(record.use) if record.use else f"MFU {UNKNOWN}")
    parts += [f"grad norm {_number(record.grad_norm, '.3g')}", f"lr {_number(record.lr, '.3g')}"]
    if record.balance:
        b = record.balance
        parts.append(f"max/mean rows {b.max_over_mean_rank:.2f} rank {b.max_over_mean_expert:.2f} expert")
        parts.append(f"dropped {percent(b.drop_fraction, 2)}")
    peak = record.memory.get("peak")
    parts.append(f"peak {size(peak)}")
    parts.append(f"data wait {duration(record.data_wait)}")
    if record.also:
        parts.append("with " + "+".join(record.also))
    if record.skipped:
        parts.append(f"SKIPPED: {record.skipped}")
    return clean(" | ".join(parts), 600)


def _number(value: Any, form: str) -> str:
    return UNKNOWN if value is None else format(float(value), form)


def event_text(event: str, fields: Mapping[str, Any]) -> str:
    """One line about an event for a person."""
    if event in ("note", "warning"):
        return clean(f"{event}: {fields['text']}", 600)
    if event == "checkpoint":
        rest = {k: v for k, v in fields.items() if k not in ("step", "seconds", "bytes")}
        took = f"{size(fields['bytes'])} in {duration(fields['seconds'])}"
        return clean(f"checkpoint of step {fields['step']}: {took}{_rest(rest)}", 600)
    return clean(f"{event}:{_rest(fields)}", 600)


def _rest(fields: Mapping[str, Any]) -> str:
    """Names and short values: a list or table stays in the JSON line, its length is shown."""
    found = [f"{k} {len(v) if isinstance(v, (list, tuple, dict)) else f'{v:.6g}' if isinstance(v, float) else v}" for k, v in fields.items()]
    return " " + ", ".join(found) if found else ""


class _Console(Console):
    """A console whose reader may go away (`... | head`) without ending the run: from then on it is quiet."""

    def on_broken_pipe(self) -> None:
        self.quiet = True
        # what Python flushes at exit must find no closed pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class Terminal:
    """Lines, and on a real terminal a bar below them."""

    def __init__(self, total: int | None = None, every: int = 1, console: Console | None = None) -> None:
        self.total, self.every = total, max(1, every)
        self.console = console or _Console()
        self._bar = _bar(self.console) if self.console.is_terminal else None
        if self._bar:
            self._task = self._bar.add_task("training", total=total)
            self._bar.start()

    def step(self, record: StepRecord) -> None:
        if self._bar:
            self._bar.update(self._task, completed=record.step)
        if record.step % self.every == 0 or record.step in (1, self.total) or record.skipped:
            self.line(step_text(record, self.total), "bold red" if record.skipped else "")

    def event(self, event: str, fields: Mapping[str, Any]) -> None:
        self.line(event_text(event, fields), "yellow" if event in ("warning", "skip", "restart") else "cyan")

    def line(self, text: str, style: str = "") -> None:
        """One line, as it is: no markup, no wrapping."""
        self.console.print(Text(text, style=style if self._bar else ""), soft_wrap=True, highlight=False)

    def close(self) -> None:
        if self._bar:
            self._bar.stop()
            self._bar = None


def _bar(console: Console) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn())
    return Progress(*columns, console=console, transient=True)


class TensorBoard:
    """Scalars of each step and histograms of rows an expert. Raises ImportError where the package is absent."""

    def __init__(self, folder: str | Path, purge_step: int | None = None) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(log_dir=str(folder), purge_step=purge_step)

    def step(self, record: StepRecord, rows: Mapping[str, np.ndarray] | None = None) -> None:
        for name, value in scalars(record).items():
            self._writer.add_scalar(name, float(value), record.step)
        for layer, counts in (rows or {}).items():
            counts = np.asarray(counts)
            if not counts.sum():
                continue
            # a bin an expert: the "histogram" is the rows of each, not how often a number of rows occurs
            self._writer.add_histogram(f"rows_an_expert/layer_{layer}", np.repeat(np.arange(len(counts)), _thinned(counts)), record.step, bins=len(counts))

    def event(self, event: str, fields: Mapping[str, Any]) -> None:
        if event == "validation":
            self._writer.add_scalar("loss/validation", float(fields["loss"]), int(fields["step"]))
        else:
            self._writer.add_text(event, clean(event_text(event, fields)), int(fields.get("step", 0)))

    def close(self) -> None:
        self._writer.close()


def _thinned(counts: np.ndarray, limit: int = 10_000) -> np.ndarray:
    """Counts scaled down to about ``limit`` in all, as a histogram needs shares only."""
    total = counts.sum()
    return counts if total <= limit else np.round(counts * (limit / total)).astype(np.int64)


def scalars(record: StepRecord) -> dict[str, float]:
    """TensorBoard name -> value of everything a step knows."""
    found: dict[str, Any] = {"loss/train": record.loss, "optimizer/grad_norm": record.grad_norm, "optimizer/lr": record.lr,
                             "optimizer/skipped": float(record.skipped is not None), "speed/step_s": record.seconds,
                             "speed/tokens_per_s_per_gpu": record.tokens_per_s_per_gpu, "speed/data_wait_s": record.data_wait}
    found |= {f"loss/{name}": value for name, value in record.losses.items()}
    found |= {f"memory/{name}_GiB": value / 2**30 for name, value in record.memory.items()}
    if record.use:
        found |= {"speed/mfu": record.use.mfu, "speed/own_mfu": record.use.own_mfu, "speed/hfu": record.use.hfu}
    if record.balance:
        names = ("max_over_mean_rank", "max_over_mean_expert", "entropy_index", "drop_fraction")
        found |= {f"balance/{name}": getattr(record.balance, name) for name in names}
    found |= {f"{name}/layer_{layer}": value for layer, figures in record.layers.items() for name, value in figures.items()}
    return {name: value for name, value in found.items() if value is not None}


class RunLog:
    """Everything a run says, to every place it is wanted. Use as a context manager. A reader of the terminal that goes away is
    no error; OSError of a full disk comes through: a run that can't log is not a run."""

    def __init__(self, folder: str | Path, *, total: int | None = None, every: int = 1, tensorboard: bool = False,
                 from_step: int = 0, rank: int = 0, console: Console | None = None) -> None:
        """folder: of the run. total: steps planned. from_step: step of the checkpoint this process continues from (0: none).
        Ranks above 0 get a log that writes nothing."""
        self.silent = rank != 0
        self.restart, self.last = 0, 0
        self._sinks: list[Any] = []
        if self.silent:
            return
        path = Path(folder) / FILE
        self._lines = JsonLines(path)
        try:
            self.restart, self.last = next_restart(path), last_step(path)
        except ValueError as error:
            raise ValueError(f"{error}; move the file away to go on without it") from None
        self._sinks.append(Terminal(total, every, console))
        missing = self._add_tensorboard(Path(folder) / "tensorboard", from_step) if tensorboard else None
        if self.restart:
            self.event("restart", from_step=from_step, last_logged_step=self.last, half_line_bytes=self._lines.cut)
        else:
            self.event("start", from_step=from_step)
        if missing:
            self.event("note", text=missing)

    def _add_tensorboard(self, folder: Path, from_step: int) -> str | None:
        try:
            self._sinks.append(TensorBoard(folder, purge_step=from_step + 1 if self.restart else None))
        except ImportError:
            return "TensorBoard is off: the package tensorboard is not installed"
        return None

    def step(self, record: StepRecord, rows: Mapping[str, np.ndarray] | None = None) -> None:
        """Log one step; ``rows``: layer -> rows an expert [E], for the histograms."""
        if self.silent:
            return
        self._lines.write(step_line(record, self.restart, record.step <= self.last))
        for sink in self._sinks:
            sink.step(record, rows) if isinstance(sink, TensorBoard) else sink.step(record)

    def event(self, event: str, **fields: Any) -> None:
        """Log an event of metrics.EVENTS. ValueError for an unknown one or a missing field."""
        if self.silent:
            return
        self._lines.write(event_line(event, self.restart, fields))
        for sink in self._sinks:
            sink.event(event, fields)

    def warn(self, text: str) -> None:
        self.event("warning", text=text)

    def note(self, text: str) -> None:
        self.event("note", text=text)

    def close(self) -> None:
        """Put everything on disk. May be called twice."""
        if not self.silent:
            self._lines.sync()
            self._lines.close()
            self.silent = True
        for sink in self._sinks:
            sink.close()
        self._sinks = []

    def __enter__(self) -> RunLog:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
