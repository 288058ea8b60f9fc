"""How fast are the triton kernels on this GPU beside torch's grouped product and a dense product of as many operations, and are they right?

Run: python benchmarks/gpu_kernels.py [--seconds 480] [--out calibration/measurements]        (by way of benchmarks/gpu.sh)
Not run on a GPU yet: its parts are tested without one. First every kernel against its float64 reference (gpu_parity.py), then timings: median of
repeats between CUDA events, L2 swept before each, operands random normal (zeros would run faster: less switching, higher clocks). Tuning comes
before timing. What the time left doesn't cover is left out and said. Writes kernels_GPU.jsonl (every repeat, clocks, device) and kernels_GPU.csv
(columns of calibration/measurements/gemm.csv).
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from moesim.files import write_atomically

REPEATS = 20
MOST_ROWS = 131_072
"""Rows in all experts together, so that operands stay within a few GB."""
ROWS_AN_EXPERT = (64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
SWEPT_BYTES = 1 << 30
"""Written before each repeat: empties L2, and keeps the GPU busy while the host issues the launch that is timed."""
GEMM_COLUMNS = ("source", "gpu", "precision", "m", "n", "k", "groups", "tflops", "notes")
CLOCKS = ("clocks.sm", "clocks.mem", "power.draw", "temperature.gpu")


@dataclass(frozen=True)
class Product:
    """A grouped product: E experts of mean ``rows`` rows, out N, in K; loads even, or one expert with half of all rows."""

    E: int
    rows: int
    N: int
    K: int
    hot: bool = False

    @property
    def loads(self) -> list[int]:
        if not self.hot:
            return [self.rows] * self.E
        others = self.rows * self.E // 2 // (self.E - 1)
        return [self.rows * self.E - others * (self.E - 1), *[others] * (self.E - 1)]

    @property
    def flops(self) -> int:
        return 2 * self.E * self.rows * self.N * self.K


def plan() -> list[Product]:
    """What is timed, most wanted first: gate and up of the seed benchmark (d 4096, f 4096), then its down, then skew."""
    shapes = [(E, rows, 8192, 4096) for E in (8, 128) for rows in ROWS_AN_EXPERT if E * rows <= MOST_ROWS]
    shapes += [(E, rows, 4096, 4096) for E, rows in ((8, 1024), (8, 16384), (128, 512))]
    return [Product(*shape) for shape in shapes] + [Product(8, 2048, 8192, 4096, hot=True), Product(128, 512, 8192, 4096, hot=True)]


Timer = Callable[[Callable[[], object]], list[float]]


def timer(repeats: int = REPEATS, warm: int = 3) -> Timer:
    """Seconds of each repeat on the GPU, by events."""
    sweep = torch.empty(SWEPT_BYTES, dtype=torch.int8, device="cuda")

    def timed(call: Callable[[], object]) -> list[float]:
        for _ in range(warm):
            call()
        pairs = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
        for start, end in pairs:
            sweep.zero_()
            start.record()
            call()
            end.record()
        torch.cuda.synchronize()
        return [start.elapsed_time(end) * 1e-3 for start, end in pairs]

    return timed


def record(op: str, kernel: str, seconds: list[float], precision: str, flops: int = 0, moved: int = 0, **shape: object) -> dict:
    """One measurement: every repeat, its median and tenth and ninetieth percentile, the rate at the median."""
    ordered = sorted(seconds)
    median = statistics.median(ordered)
    row: dict = dict(op=op, kernel=kernel, precision=precision, **shape, median=median, p10=ordered[len(ordered) // 10],
                     p90=ordered[len(ordered) * 9 // 10], seconds=seconds)
    if flops:
        row["tflops"] = flops / median * 1e-12
    if moved:
        row["gigabytes_per_second"] = moved / median * 1e-9
    return row


def operands(product: Product, device: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x [R,K], w [E,N,K] of variance 1/K, grad [R,N], offsets; bfloat16, random normal."""
    generator = torch.Generator(device).manual_seed(0)
    normal = lambda *shape: torch.randn(*shape, generator=generator, device=device, dtype=torch.bfloat16)  # noqa: E731
    R = product.E * product.rows
    w = normal(product.E, product.N, product.K).mul_(product.K**-0.5)
    return normal(R, product.K), w, normal(R, product.N), torch.tensor(product.loads, device=device).cumsum(0).int()


def products(product: Product, timed: Timer, device: str) -> Iterator[dict]:
    """Forward, dgrad, wgrad: ours, torch's grouped product, a dense product of as many operations; and fp8 forward where there is one."""
    from moetrain.kernels import grouped_gemm, scaled_gemm

    x, w, grad, offsets = operands(product, device)
    dense = w[0]
    shape = dict(E=product.E, rows=product.rows, N=product.N, K=product.K, hot=product.hot)
    calls = {
        ("forward", "triton"): lambda: grouped_gemm.rows_product(x, w, offsets),
        ("forward", "torch.grouped_mm"): lambda: F.grouped_mm(x, w.transpose(1, 2), offs=offsets),
        ("forward", "dense"): lambda: x @ dense.t(),
        ("dgrad", "triton"): lambda: grouped_gemm.rows_product(grad, w.transpose(1, 2), offsets),
        ("dgrad", "torch.grouped_mm"): lambda: F.grouped_mm(grad, w, offs=offsets),
        ("dgrad", "dense"): lambda: grad @ dense,
        ("wgrad", "triton"): lambda: grouped_gemm.weight_grad(grad, x, offsets),
        ("wgrad", "torch.grouped_mm"): lambda: F.grouped_mm(grad.t(), x, offs=offsets),
        ("wgrad", "dense"): lambda: grad.t() @ x,
    }
    for (op, kernel), call in calls.items():
        yield record(op, kernel, timed(call), "bf16", product.flops, **shape)
    for recipe, precision in (("rowwise", "fp8"), ("block128", "fp8_block"), ("mxfp8", "mxfp8")):
        if scaled_gemm.supported(recipe, device):
            quantised = [scaled_gemm.quantise(t, recipe) for t in (x, w)]
            call = lambda q=quantised: scaled_gemm.scaled_product(*q, offsets, torch.bfloat16)  # noqa: E731
            yield record("forward", f"triton {recipe}", timed(call), precision, product.flops, **shape)
            yield record("quantise", f"triton {recipe}", timed(lambda r=recipe: scaled_gemm.quantise(x, r)), precision, moved=3 * x.numel(), **shape)


def passes(timed: Timer, device: str, T: int = 16384, k: int = 4, d: int = 4096, f: int = 4096, E: int = 128) -> Iterator[dict]:
    """Kernels bound by memory, beside their plain forms: bytes that must move over the time taken."""
    from gpu_parity import Sizes, placement

    from moetrain.kernels import backend

    tokens = torch.randn(T, d, device=device, dtype=torch.bfloat16)
    source, positions = placement(device, Sizes(tokens=T, top_k=k, tail=0))
    rows, weights = torch.randn(len(source), d, device=device, dtype=torch.bfloat16), torch.rand(T, k, device=device)
    x, weight = torch.randn(len(source), 2 * f, device=device, dtype=torch.bfloat16), torch.rand(len(source), device=device)
    logits, scale = torch.randn(T, E, device=device), torch.ones(d, device=device, dtype=torch.bfloat16)
    for name in ("triton", "reference"):
        kernels = backend(name, device)
        cases = {
            "permute": (kernels.permute, (tokens, source, positions), 2 * rows.nbytes),
            "unpermute": (kernels.unpermute, (rows, positions, weights), rows.nbytes + tokens.nbytes),
            "swiglu": (kernels.swiglu, (x, weight), 3 * x.nbytes // 2),
            "rms_norm": (kernels.rms_norm, (tokens, scale, 1e-6), 2 * tokens.nbytes),
            "route": (lambda logits, kernels=kernels: kernels.route(logits, k)[0], (logits,), logits.nbytes),
        }
        for op, (call, inputs, moved) in cases.items():
            shape = dict(tokens=T, top_k=k, d=d, f=f, E=E)
            yield record(op, name, timed(lambda c=call, i=inputs: c(*i)), "bf16", moved=moved, **shape)
            leaves = [t.detach().requires_grad_() if isinstance(t, Tensor) and t.is_floating_point() else t for t in inputs]
            out = call(*leaves)
            upstream, wanted = torch.randn_like(out), [t for t in leaves if isinstance(t, Tensor) and t.requires_grad]
            backward = lambda o=out, w=wanted, u=upstream: torch.autograd.grad(o, w, u, retain_graph=True)  # noqa: E731
            yield record(f"{op} backward", name, timed(backward), "bf16", moved=moved + out.nbytes, **shape)


def csv_row(row: dict, gpu: str, source: str) -> dict | None:
    """The columns of gemm.csv, None for what isn't a product with even loads. A weight gradient lists the gradient's shape, so its k is the rows."""
    if "tflops" not in row or row["hot"]:
        return None
    m, n, k = (row["N"], row["K"], row["rows"]) if row["op"] == "wgrad" else (row["rows"], row["N"], row["K"]) if row["op"] == "forward" else (
        row["rows"], row["K"], row["N"])
    groups = row["E"]
    if row["kernel"] == "dense":
        groups, m, k = 1, (m if row["op"] == "wgrad" else m * row["E"]), (k * row["E"] if row["op"] == "wgrad" else k)
    spread = (row["p90"] - row["p10"]) / row["median"]
    notes = f"{row['op']}; kernel {row['kernel']}; median of {len(row['seconds'])} repeats, p10-p90 spread {spread:.1%}; L2 swept; random normal"
    return dict(source=source, gpu=gpu, precision=row["precision"], m=m, n=n, k=k, groups=groups, tflops=round(row["tflops"], 1), notes=notes)


def device_stamp() -> dict:
    """What was measured on: device, driver, software, commit."""
    properties = torch.cuda.get_device_properties(0)
    import triton

    return dict(gpu=properties.name, sms=properties.multi_processor_count, memory_bytes=properties.total_memory, driver=_smi("driver_version"),
                torch=torch.__version__, cuda=torch.version.cuda, triton=triton.__version__, commit=_told("git", "rev-parse", "HEAD"),
                time=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()))


def clocks() -> dict[str, float]:
    """SM and memory clock (MHz), power (W), temperature (C) now; what nvidia-smi doesn't tell is left out."""
    return parse_clocks(_smi(",".join(CLOCKS)))


def parse_clocks(text: str) -> dict[str, float]:
    values = [field.strip() for field in text.split(",")]
    return {name: float(value) for name, value in zip(CLOCKS, values, strict=False) if re.fullmatch(r"[\d.]+", value)}


def _smi(query: str) -> str:
    return _told("nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader,nounits", "--id=0")


def _told(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def write(folder: Path, stamp: dict, rows: list[dict]) -> tuple[Path, Path]:
    """Both files, whole: JSONL with the stamp on every line, CSV of the products."""
    name = re.sub(r"[^a-z0-9]+", "_", stamp["gpu"].lower()).strip("_")
    lines, table = folder / f"kernels_{name}.jsonl", folder / f"kernels_{name}.csv"
    write_atomically(lines, "".join(json.dumps({**row, "device": stamp}) + "\n" for row in rows))
    text = io.StringIO()
    writer = csv.DictWriter(text, GEMM_COLUMNS, lineterminator="\n")
    writer.writeheader()
    source = f"own run of benchmarks/gpu_kernels.py at {stamp['commit'][:10]}, {stamp['time']}"
    writer.writerows(row for row in (csv_row(row, stamp["gpu"], source) for row in rows) if row)
    write_atomically(table, text.getvalue())
    return lines, table


def check(deadline: float) -> int:
    """Print what is wrong; how many comparisons failed."""
    from gpu_parity import Sizes, every

    verdicts = []
    for found in every("cuda", Sizes()):
        verdicts.append(found)
        if not found.ok:
            print(f"WRONG {found.name}: {found.error_over_bound:.3g} times its bound", flush=True)
        if time.monotonic() > deadline:
            print("time is up: the comparisons after this one were left out")
            break
    bad = sum(not v.ok for v in verdicts)
    worst = max((v.error_over_bound for v in verdicts if v.ok), default=0)
    print(f"{len(verdicts)} comparisons with float64, {bad} wrong, worst right one at {worst:.2f} of its bound")
    return bad


def measure(deadline: float, each: Callable[[dict], None]) -> None:
    """Time all there is time for; ``each`` gets every record as it comes."""
    timed = timer()
    blocks = [passes(timed, "cuda"), *(products(product, timed, "cuda") for product in plan())]
    for i, block in enumerate(blocks):
        if time.monotonic() > deadline:
            print(f"time is up: {len(blocks) - i} of {len(blocks)} blocks were left out")
            return
        for row in block:
            row["clocks"] = clocks()
            each(row)


def main(arguments: list[str] | None = None) -> int:
    """0 if every comparison held, 1 if not, 2 without a GPU."""
    parser = argparse.ArgumentParser(prog="python benchmarks/gpu_kernels.py", description="Check and time the triton kernels on this GPU.")
    parser.add_argument("--seconds", type=float, default=480, help="stop timing after so many seconds (checking gets a third at most)")
    parser.add_argument("--out", type=Path, default=Path("calibration/measurements"), help="folder for kernels_GPU.jsonl and .csv")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("gpu_kernels: no CUDA device here; run it on a GPU machine", file=sys.stderr)
        return 2
    if not options.out.is_dir():
        print(f"gpu_kernels: --out {options.out}: no such folder", file=sys.stderr)
        return 2
    start, stamp, rows = time.monotonic(), device_stamp(), []
    print(json.dumps(stamp))
    bad = check(start + options.seconds / 3)

    def each(row: dict) -> None:
        rows.append(row)
        rate = f"{row['tflops']:7.1f} TFLOP/s" if "tflops" in row else f"{row['gigabytes_per_second']:7.0f} GB/s"
        shape = " ".join(f"{key}={row[key]}" for key in ("E", "rows", "N", "K", "hot", "tokens") if key in row)
        print(f"{row['op']:18} {row['kernel']:18} {shape:45} {row['median'] * 1e3:9.4f} ms {rate}", flush=True)
        write(options.out, stamp, rows)

    measure(start + options.seconds, each)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
