"""Which kernels does a software release fuse and capture, and what does the planner make of it? (`python -m calibration coverage-table`)

Facts of scenarios/kernel_table.yaml, each with an address or marked assumed, beside the passes, launches and graph shares that the
stack's file gives the planner, and the fitted factors of kinds of kernel that have a physical meaning: above 1 where the software moves
more bytes or issues more kernels than the reference, below where it fuses.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from typing import Any

from moesim.coverage import load_coverage
from moesim.load import read_yaml, scenarios_dir
from moesim.stack import Stack, load_stack, stack_names

FUSED = ("yes", "part", "no")
GRAPHED = ("router", "layer", "full", "none")
PROVENANCE = ("documented", "assumed")
PRECISIONS = ("bf16", "fp8", "mxfp8", "nvfp4")
MEANING = {
    "gemm_bf16": "rate of dense GEMMs against the benchmark", "gemm_fp8": "the same in 8 bits, with what quantisation is not fused", "gemm_fp4": "the same in 4 bits",
    "grouped_bf16": "rate of expert GEMMs", "grouped_fp8": "the same in 8 bits", "attention": "rate of the attention kernel, sinks and head widths included",
    "memory": "bytes moved by kernels between GEMMs: fusion", "tensor_parallel": "share of tensor-parallel collectives that is not hidden", "dispatch": "time of an exchange against the fabric's",
    "host": "host time of a launch",
}
"""Kind of kernel -> what its fitted factor stands for."""


@dataclass(frozen=True)
class Kernel:
    """One row: is ``feature`` fused in these releases and precisions of a stack, which graph level holds it, and who says so."""

    stack: str
    releases: str
    feature: str
    precisions: tuple[str, ...]
    fused: str
    graphed: str
    provenance: str
    source: str


def load_kernels() -> tuple[dict[str, dict[str, str]], list[Kernel]]:
    """(feature -> what it is, rows). ValueError names the row and what is legal."""
    path = scenarios_dir() / "kernel_table.yaml"
    data = read_yaml(path).data
    return data["features"], [_kernel(number, row, data["features"]) for number, row in enumerate(data["rows"], start=1)]


def _kernel(number: int, row: dict[str, Any], features) -> Kernel:
    fields = set(Kernel.__dataclass_fields__)
    if set(row) != fields:
        raise ValueError(f"kernel_table.yaml: row {number} has {', '.join(sorted(set(row) ^ fields))} too many or too few; a row has {', '.join(sorted(fields))}")
    legal = {"stack": stack_names(), "feature": tuple(features), "fused": FUSED, "graphed": GRAPHED, "provenance": PROVENANCE}
    for name, choices in legal.items():
        if row[name] not in choices:
            near = difflib.get_close_matches(str(row[name]), choices, n=1, cutoff=0.0)
            raise ValueError(f"kernel_table.yaml: row {number}: {name} {row[name]!r} is not one of {', '.join(choices)}; nearest {near[0]!r}")
    if not row["precisions"] or set(row["precisions"]) - set(PRECISIONS):
        raise ValueError(f"kernel_table.yaml: row {number}: precisions are one or more of {', '.join(PRECISIONS)}")
    return Kernel(**{**row, "precisions": tuple(row["precisions"])})


def priced(kernel: Kernel) -> str:
    """What the planner makes of it, from the stack's file."""
    s = load_stack(kernel.stack)
    return {
        "quantise": f"launches x{s.fp8_launch_ratio:g} in 8 bits",
        "permute": f"passes {', '.join(f'{name} {value:g}' for name, value in s.permute_passes.items())}",
        "swiglu": f"traffic x{s.pointwise_fusion:g}" + ("; in the product under graph:full in MXFP8" if s.fuses_experts else ""),
        "sinks": f"attention x{load_coverage().features.get('expert_bias', {}).get('attention', 1.0):.2f} (trait expert_bias, fitted)",
        "mla_up": f"{s.launches_mla:g} more launches a layer",
        "grouped_wgrad": "one GEMM an expert" if s.grouped_gemm == "loop" else "one kernel for all experts",
        "router": f"{s.launches_moe:g} launches an MoE layer, {_captured(s, kernel)} of them captured",
    }[kernel.feature]


def differs(kernel: Kernel) -> bool:
    """Whether the planner prices it otherwise: a stack's file holds one answer for all its releases."""
    s = load_stack(kernel.stack)
    loops = {"grouped_wgrad": s.grouped_gemm == "loop", "swiglu": s.pointwise_fusion > 1.0}.get(kernel.feature)
    return loops is not None and kernel.fused in ("yes", "no") and loops != (kernel.fused == "no")


def _captured(s: Stack, kernel: Kernel) -> str:
    return f"{100 * s.graph_coverage_moe[kernel.graphed]:.0f}%"


def table() -> list[str]:
    """The rows, then the fitted factors by stack and GPU generation."""
    features, rows = load_kernels()
    lines = [f"{'stack':17s}{'feature':14s}{'precision':22s}{'fused':6s}{'graph':7s}{'known':11s}{'in the planner':58s}releases; source"]
    for k in rows:
        lines.append(f"{k.stack:17s}{k.feature:14s}{' '.join(k.precisions):22s}{k.fused:6s}{k.graphed:7s}{k.provenance:11s}{('! ' if differs(k) else '') + priced(k):58s}{k.releases}; {k.source}")
    lines += ["! = the planner prices it otherwise: a stack's file holds one answer for all its releases", "", *(f"{name:14s} {f['what']}" for name, f in features.items()), "", *_factors()]
    return lines


def _factors() -> list[str]:
    found = load_coverage()
    lines = [f"factors on seconds fitted to {found.num_runs} published runs (1 = the profile's kernel); stacks without runs have none"]
    lines += [f"  {kind:16s} {meaning}" for kind, meaning in MEANING.items()]
    lines.append(f"{'stack':20s}{'generation':18s}" + "".join(f"{kind:>16s}" for kind in MEANING))
    for stack, generations in found.stacks.items():
        for generation, kinds in generations.items():
            lines.append(f"{stack:20s}{generation:18s}" + "".join(f"{kinds.get(kind, 1.0):16.2f}" for kind in MEANING))
    return lines


def data() -> dict[str, Any]:
    """The same as plain data."""
    features, rows = load_kernels()
    return {"features": features, "rows": [{**vars(k), "precisions": list(k.precisions), "priced": priced(k), "differs": differs(k)} for k in rows],
            "factors": load_coverage().model_dump(), "meaning": MEANING}
