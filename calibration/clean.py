"""What does each row of a measurement table say, and which rows can't be used? (CSV text -> typed rows, or a reason)"""

from __future__ import annotations

import csv
import re
from dataclasses import dataclass
from pathlib import Path

MEASUREMENTS = Path(__file__).parent / "measurements"
GEMM_COLUMNS = ("source", "gpu", "precision", "m", "n", "k", "groups", "tflops", "notes")
COLLECTIVE_COLUMNS = ("source", "hardware", "nodes", "gpus", "collective", "bytes", "time_us", "algbw_gbps", "busbw_gbps", "notes")
MOST_EXPERTS = 100_000
PRECISIONS = ("bf16", "fp16", "fp8", "fp8_block", "mxfp8", "nvfp4", "fp4")
COLLECTIVES = {
    "all_gather": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "all_reduce": "all_reduce",
    "alltoall": "all_to_all",
    "all_to_all": "all_to_all",
}
GPU_WORDS = (
    ("gb300", "gb300"), ("gb200", "gb200"), ("b300", "b300"), ("b200", "b200"), ("h200", "h200"), ("h800", "h800"),
    ("h100", "h100"), ("a100", "a100"), ("h20", "h20"), ("mi355x", "mi355x"), ("mi325x", "mi325x"), ("mi300x", "mi300x"),
)


@dataclass(frozen=True)
class Row:
    """One usable measurement. ``kind``: gemm | gemm.in_training | grouped_gemm | fused_ffn | collective | dispatch; ``shape``:
    the numbers its cost model needs; ``kernel``: the software that ran it."""

    line: int
    kind: str
    gpu: str
    dtype: str
    kernel: str
    shape: dict[str, float]
    seconds: float
    source: str


@dataclass(frozen=True)
class Dropped:
    """A row that can't be used, and why."""

    line: int
    reason: str


def read_csv(path: Path) -> tuple[str, list[dict[str, str]]]:
    """("gemm" | "collectives", rows of text). ValueError in one line where the file is neither."""
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: can't be read as UTF-8 text: {error}") from None
    if "\0" in text:
        raise ValueError(f"{path}: holds NUL bytes: not a CSV")
    reader = csv.DictReader(text.splitlines())
    header = [name.strip() for name in (reader.fieldnames or [])]
    for name, needed in (("collectives", COLLECTIVE_COLUMNS[1:8]), ("gemm", GEMM_COLUMNS[1:8])):
        if set(needed) <= set(header):
            reader.fieldnames = header
            try:
                return name, list(reader)
            except csv.Error as error:
                raise ValueError(f"{path}: not a CSV: {error}") from None
    raise ValueError(f"{path}: columns are those of neither gemm.csv ({', '.join(GEMM_COLUMNS)}) nor collectives.csv ({', '.join(COLLECTIVE_COLUMNS)})")


def clean(table: str, rows: list[dict[str, str]]) -> tuple[list[Row], list[Dropped]]:
    """Typed rows and dropped ones, in file order; line numbers count the header as line 1."""
    parse = gemm_row if table == "gemm" else collective_row
    kept, dropped = [], []
    for line, row in enumerate(rows, start=2):
        try:
            kept.append(parse(line, {key: (value or "").strip() for key, value in row.items() if key and not isinstance(value, list)}))
        except ValueError as error:
            dropped.append(Dropped(line, str(error)))
    return kept, dropped


def gpu_of(text: str) -> str:
    """Name of the GPU in a hardware cell; the PCIe part of a GPU is another GPU. ValueError where there is none."""
    low = text.lower()
    found = [name for word, name in GPU_WORDS if re.search(rf"(?<![a-z]){word}(?![0-9])", low)]
    if not found:
        raise ValueError(f"hardware {text!r} names no GPU known here")
    return found[0] + ("_pcie" if "pcie" in low else "")


def number(row: dict[str, str], name: str) -> float:
    try:
        value = float(row[name])
    except (KeyError, ValueError):
        raise ValueError(f"{name} is {row.get(name)!r}, not a number") from None
    if not 0 < value < 1e18:
        raise ValueError(f"{name} is {row[name]}, not a positive finite number")
    return value


def gemm_row(line: int, row: dict[str, str]) -> Row:
    notes, source = row.get("notes", ""), row.get("source", "")
    gpu, dtype = gpu_of(row["gpu"]), row["precision"].lower()
    if dtype not in PRECISIONS:
        raise ValueError(f"precision {row['precision']!r} is not one of {', '.join(PRECISIONS)}")
    dtype = {"fp16": "bf16", "fp4": "nvfp4"}.get(dtype, dtype)  # the same tensor-core rate
    shape = {name: number(row, name) for name in ("m", "n", "k", "groups")}
    rate = number(row, "tflops") * 1e12
    flops = 2 * shape["m"] * shape["n"] * shape["k"] * shape["groups"]
    build = (line, gpu, dtype, shape, flops / rate, source)
    if shape["groups"] > MOST_EXPERTS:
        raise ValueError(f"groups is {row['groups']}: no model has so many experts")
    if "fused gated MoE" in notes:
        return _fused(build, notes)
    if "training GEMM layout" in notes:
        shape["accumulate"] = float("accumulate True" in notes)
        return _row("gemm.in_training", build, "training step")
    if "grouped GEMM stage" in notes:
        shape["weight_grad"] = float("bwd_grad_w" in notes)
        return _row("grouped_gemm", build, "training step")
    if "fwd+dgrad+wgrad" in notes:
        raise ValueError("forward, input and weight gradient timed together: not one kernel")
    if shape["groups"] > 1:
        shape["weight_grad"] = float("wgrad" in notes)
        if shape["weight_grad"]:
            shape.update(m=shape["k"], n=shape["m"], k=shape["n"])  # such rows list the gradient's shape: their k is the tokens a group
        return _row("grouped_gemm", build, "DeepGEMM" if "DeepGEMM" in notes else "unnamed")
    return _row("gemm", build, _kernel(notes))


def _row(kind: str, build, kernel: str) -> Row:
    line, gpu, dtype, shape, seconds, source = build
    return Row(line, kind, gpu, dtype, kernel, shape, seconds, source)


def _kernel(notes: str) -> str:
    found = re.search(r"kernel ([\w.]+)", notes)
    if found:
        return found.group(1) + (" table maximum" if "maximum over" in notes else "")
    for word in ("MAMF", "DeepGEMM", "ThunderKittens", "sustained", "educational"):
        if word in notes:
            return word
    return "unnamed"


def _fused(build, notes: str) -> Row:
    line, gpu, dtype, shape, seconds, source = build
    tokens, top_k = re.search(r"\((\d+) tokens top-(\d+)\)", notes), re.search(r"top-(\d+)", notes)
    pair = re.search(r"\[m x (\d+) x (\d+)\] and \[m x (\d+) x (\d+)\]", notes)
    if not (tokens and top_k and pair):
        raise ValueError("fused MoE row whose notes name no tokens, top-k or shapes")
    m, n, k, groups = shape["m"], shape["n"], shape["k"], shape["groups"]
    power = re.search(r"power_law_([\d.]+)", notes)
    inter = float(pair.group(4))
    shape = {
        "tokens": float(tokens.group(1)), "top_k": float(tokens.group(2)), "hidden": float(pair.group(2)), "inter": inter,
        "experts": shape["groups"], "exponent": float(power.group(1).rstrip(".")) if power else 0.0,
    }
    timed = re.search(r"time ([\d.]+) ms", notes)
    useful = 6 * shape["tokens"] * shape["top_k"] * shape["hidden"] * inter
    flops = 2 * m * n * k * groups
    useful = 6 * shape["tokens"] * shape["top_k"] * shape["hidden"] * inter
    seconds = float(timed.group(1)) * 1e-3 if timed else seconds * useful / flops
    return Row(line, "fused_ffn", gpu, dtype, _kernel(notes), shape, seconds, source)


def collective_row(line: int, row: dict[str, str]) -> Row:
    notes, kind = row.get("notes", ""), row["collective"].lower()
    gpu = gpu_of(row["hardware"])
    if kind.startswith("ep_"):
        return _dispatch_row(line, row, gpu, kind)
    if kind not in COLLECTIVES:
        raise ValueError(f"{kind!r} is not a collective priced here ({', '.join(COLLECTIVES)})")
    gpus, size = number(row, "gpus"), _size(row, notes)
    nodes = number(row, "nodes") if row.get("nodes") else 1.0
    name = COLLECTIVES[kind]
    seconds = _seconds(row, name, gpus, size)
    return Row(line, "collective", gpu, name, _software(notes), {"gpus": gpus, "nodes": nodes, "bytes": size}, seconds, row.get("source", ""))


def _size(row: dict[str, str], notes: str) -> float:
    """Bytes of the row, or what its notes say the payload was."""
    stated = re.search(r"~(\d+) MiB", notes)
    if not row.get("bytes") and stated:
        return float(stated.group(1)) * 2**20
    return number(row, "bytes")


def _seconds(row: dict[str, str], kind: str, gpus: float, size: float) -> float:
    if row.get("time_us"):
        return number(row, "time_us") * 1e-6
    if row.get("algbw_gbps"):
        return size / (number(row, "algbw_gbps") * 1e9)
    factor = (2.0 if kind == "all_reduce" else 1.0) * (gpus - 1) / gpus
    return size * factor / (number(row, "busbw_gbps") * 1e9)


def _software(notes: str) -> str:
    found = re.search(r"NCCL [\d.]+\d", notes)
    return found.group(0) if found else "NCCL"


def _dispatch_row(line: int, row: dict[str, str], gpu: str, kind: str) -> Row:
    notes = row.get("notes", "")
    if not kind.endswith(("dispatch", "combine")):
        raise ValueError(f"{kind!r}: low-latency and preparation kernels are not priced")
    if not row.get("time_us"):
        raise ValueError("no time; a bandwidth whose definition differs by tool")
    found = {name: re.search(pattern, notes) for name, pattern in _DISPATCH_NOTES.items()}
    tray = "tray" in row["hardware"] and not row.get("gpus")
    missing = [name for name, match in found.items() if match is None and name not in ("sms", "experts")]
    if missing:
        raise ValueError(f"notes name no {', '.join(missing)}")
    gpus = 4.0 if tray else number(row, "gpus")
    shape = {name: float(match.group(1).replace(",", "")) for name, match in found.items() if match}
    shape.update(gpus=gpus, nodes=number(row, "nodes") if row.get("nodes") else 1.0, combine=float(kind == "ep_combine"))
    shape["width"] = 1.0 if kind == "ep_dispatch" and "FP8" in notes.upper() else 2.0
    kernel = "DeepEP V1" if "DeepEP normal" in notes else "HybridEP" if "HybridEP" in notes else "other"
    return Row(line, "dispatch", gpu, kind, kernel, shape, number(row, "time_us") * 1e-6, row.get("source", ""))


_DISPATCH_NOTES = {
    "tokens": r"(\d+) tokens?",
    "hidden": r"hidden (\d+)",
    "top_k": r"top-(\d+)",
    "experts": r"top-\d+ of (\d+)",
    "sms": r"(\d+) SMs",
}
