"""What throughput and memory does the simulator expect of each published run? (`moesim predict`: rows in, predictions out.)

The input has the columns of calibration/measurements/published_runs.csv; measured columns are never read by a prediction. A row
that can't be expressed is answered `unsupported` with its reason, in place, so the output has one line an input line.
"""

from __future__ import annotations

import csv
import io
import math
from pathlib import Path
from typing import Any, Callable, Iterable, Iterator, Mapping, Protocol

from .coverage import load_coverage
from .files import write_atomically
from .model_error import load_model_error
from .runs import REQUIRED, Run, Unsupported, parse_run
from .workers import worker_pool

COLUMNS = ("id", "tokens_per_s_per_gpu", "low", "high", "mem_gb_per_gpu", "status", "reason")
MAX_BYTES = 100_000_000
Z80 = 1.2816  # half width of the central 80% of a normal distribution, in standard deviations

ASSUMPTION_SIGMA = {
    "recompute": 0.10,  # none to full is -21% (https://allenai.org/papers/olmocore3, per-block recompute)
    "overlap_flags": 0.06,  # the EP overlap flag alone is +18% (Megatron-Bridge, Qwen3-30B on 16 H100)
    "cuda_graphs": 0.06,  # a full graph is up to +26% (Megatron-Bridge, Qwen3-30B on GB200)
    "dispatcher": 0.08,  # exchanging the dispatcher moves 1% to 25% (Megatron-Bridge and AWS one-knob pairs)
    "routing": 0.05,  # natural over forced routing 0.80 to 0.99 (Megatron-MoE-ModelZoo, Qwen3 and Mixtral)
    "vpp": 0.08, "mbs": 0.10, "gbs": 0.08, "seq": 0.10, "precision": 0.10, "etp": 0.08, "ep": 0.10, "cp": 0.10,
    "dp_or_fsdp": 0.10, "dense_layers": 0.05, "model family": 0.05, "stack": 0.15,
    "gpu": 0.20,  # 500 W and HBM2e against 700 W and HBM3
}
"""Standard deviation of ln(throughput) that not knowing a cell adds: priors from published one-knob pairs, about half their range."""


class Predicted(Protocol):
    """What `simulate` returns: the part of a plan Candidate read here (tokens/s/GPU with its 80% band, bytes)."""

    tokens_per_s_per_gpu: float
    low: float
    high: float
    peak_bytes: float
    fits: bool


Simulate = Callable[[Run], Predicted]


def predict(rows: Iterable[Mapping[str, str]], simulate: Simulate, *, workers: int = 1,
            progress: Callable[[str, int, int], None] | None = None) -> Iterator[dict[str, Any]]:
    """One dict of COLUMNS a row, in order, as soon as it is known. tokens/s/GPU; low and high bound it with 80%; memory in GB (1e9).

    workers > 1 plays rows in that many processes; `simulate` must then be importable there (a module-level function).
    progress(stage, done, total) is called after each row.
    """
    rows = list(rows)
    results = _pooled(rows, simulate, workers) if workers > 1 and len(rows) > 1 else (predict_row(row, simulate) for row in rows)
    for done, result in enumerate(results, start=1):
        if progress:
            progress("predict", done, len(rows))
        yield result


def _pooled(rows: list[Mapping[str, str]], simulate: Simulate, workers: int) -> Iterator[dict[str, Any]]:
    with worker_pool(workers) as pool:
        yield from pool.map(predict_row, rows, [simulate] * len(rows), chunksize=max(1, min(16, len(rows) // (4 * workers))))


def predict_row(row: Mapping[str, str], simulate: Simulate) -> dict[str, Any]:
    """The prediction of one row. A ValueError of the simulator (a layout it can't price, say) is that row's reason."""
    run = parse_run(row)
    if isinstance(run, Unsupported):
        return _unsupported(run.id, run.reason)
    try:
        found = simulate(run)
    except ValueError as error:
        return _unsupported(run.id, str(error).splitlines()[0] if str(error) else "the simulator refused the run")
    point = found.tokens_per_s_per_gpu
    if not (math.isfinite(point) and point > 0):
        return _unsupported(run.id, f"the simulator returned {point} tokens/s")
    low, high = widen(point, found.low, found.high, assumption_sigma(run.assumed, run.pinned) * _in_doubt(run))
    notes = [f"assumed {', '.join(run.assumed)}"] if run.assumed else []
    notes += [f"not modelled: {', '.join(run.ignored)}"] if run.ignored else []
    notes += [] if found.fits else ["predicted memory exceeds the GPU"]
    return {"id": run.id, "tokens_per_s_per_gpu": point, "low": low, "high": high, "mem_gb_per_gpu": found.peak_bytes / 1e9,
            "status": "ok", "reason": "; ".join(notes)}


def _unsupported(name: str, reason: str) -> dict[str, Any]:
    return {**dict.fromkeys(COLUMNS), "id": name, "status": "unsupported", "reason": reason}


def _in_doubt(run: Run) -> float:
    """How much of the prior doubt about assumptions is left: a stack whose factors were fitted had them fitted under the same ones."""
    fitted = run.stack.name in load_coverage().stacks and run.stack.name != "generic"
    return load_model_error().assumptions if fitted else 1.0


def widen(point: float, low: float, high: float, sigma: float) -> tuple[float, float]:
    """The 80% band with another standard deviation of ln(throughput) added in quadrature."""
    extra = Z80 * sigma
    down, up = math.log(point / min(low, point)), math.log(max(high, point) / point)
    return point * math.exp(-math.hypot(down, extra)), point * math.exp(math.hypot(up, extra))


def assumption_sigma(assumed: Iterable[str], pinned: Iterable[str] = ()) -> float:
    """Standard deviation of ln(throughput) from everything assumed; what a named recipe leaves at its default counts half."""
    half = set(pinned)
    return math.sqrt(sum((ASSUMPTION_SIGMA[name] / (2 if name in half else 1)) ** 2 for name in assumed))


def read_rows(path: str | Path) -> list[dict[str, str]]:
    """Rows of a CSV in the columns of published_runs.csv. Raises ValueError with one line naming the file and the line."""
    path = Path(path)
    try:
        if path.exists() and not path.is_file():
            raise ValueError(f"{path}: not a file")
        if path.stat().st_size > MAX_BYTES:
            raise ValueError(f"{path}: larger than {MAX_BYTES // 1_000_000} MB")
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise ValueError(f"{path}: not UTF-8 text") from None
    return _parse_csv(text, str(path))


def _parse_csv(text: str, where: str) -> list[dict[str, str]]:
    reader = csv.DictReader(io.StringIO(text, newline=""), restkey="\0extra", restval=None, strict=True)
    try:
        header = reader.fieldnames or []
        missing = [column for column in REQUIRED if column not in header]
        if missing:
            raise ValueError(f"{where}: no column {missing[0]!r}; the columns are those of published_runs.csv")
        if len(set(header)) < len(header):
            raise ValueError(f"{where}: column {next(c for c in header if header.count(c) > 1)!r} appears twice")
        rows = []
        for row in reader:
            if "\0extra" in row or None in row.values():
                cells = sum(v is not None for k, v in row.items() if k != "\0extra") + len(row.get("\0extra") or ())
                raise ValueError(f"{where}: line {reader.line_num} has {cells} cells, the header has {len(header)}")
            rows.append(row)
    except csv.Error as error:
        raise ValueError(f"{where}: line {reader.line_num + 1}: {error}") from None
    if not rows:
        raise ValueError(f"{where}: no rows")
    return rows


def format_csv(results: Iterable[Mapping[str, Any]]) -> str:
    """Predictions as CSV text: six significant digits, blank where unsupported."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(COLUMNS)
    for result in results:
        writer.writerow([_cell(result[column]) for column in COLUMNS])
    return out.getvalue()


def _cell(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def write_predictions(path: str | Path, results: Iterable[Mapping[str, Any]]) -> None:
    """Writes the CSV whole or not at all."""
    write_atomically(path, format_csv(results))
