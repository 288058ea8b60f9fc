"""How far is predicted memory from what published runs report? (Rows in, one line a source out; `python -m calibration memory`.)

Three figures go by the name of memory: what tensors hold (allocated), what the allocator has taken from the GPU for them (reserved),
and what the driver says is in use. They differ by gigabytes, so each is compared with its own prediction: allocated without the
allocator's slack, the others with it. Nothing here is fitted.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Iterable, Mapping, Sequence

import numpy as np

from calibration.metrics import errors
from moesim.evaluate import Evaluator
from moesim.runs import Run, parse_run

GIB = 2.0**30
MOVING = ("activations", "logits", "gathered weights", "working set")
"""Categories that come and go within a step: what fragments the allocator."""
RESERVED_STACKS = ("torchtitan", "torchtitan_eager")
"""Their logs print the allocator's peak reserved bytes (https://github.com/pytorch/torchtitan/blob/main/torchtitan/components/metrics.py)."""

MEGATRON_DEFAULTS = ("megatron_core", "simumax")
"""Run by pretrain_gpt.py, whose arguments default to FP32 gradients and moments
(https://github.com/NVIDIA/Megatron-LM/blob/main/megatron/training/arguments.py)."""


@dataclass(frozen=True)
class Checked:
    """One row: bytes measured and predicted. figure: "allocated" | "reserved" | "unstated". dtypes: where gradient and optimizer
    dtypes come from, "documented" by the software or "assumed". reserved_bytes: where a row prints both figures."""

    id: str
    source: str
    stack: str
    figure: str
    dtypes: str
    measured: float
    predicted: float
    moving: float
    reserved_bytes: float | None
    assumed: tuple[str, ...]

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1.0


def check(rows: Iterable[Mapping[str, str]]) -> list[Checked]:
    """Every row with a memory figure that a Run can be made of, in order; the others are left out."""
    found = []
    for row in rows:
        run = parse_run(row) if (row.get("mem_gb_per_gpu") or "").strip() else None
        if isinstance(run, Run) and run.measured.memory_bytes:
            found.append(_checked(row, run))
    return found


def _checked(row: Mapping[str, str], run: Run) -> Checked:
    evaluator = Evaluator(run.scenario(), stack=run.stack)
    parts = evaluator.peak(evaluator.legal(run.layout)).categories
    both = re.search(r"peak allocated ([\d.]+) GiB, reserved ([\d.]+) GiB", row.get("notes") or "")
    figure = "allocated" if both or "peak allocated" in (row.get("notes") or "") else "reserved" if run.stack.name in RESERVED_STACKS else "unstated"
    predicted = sum(parts.values()) - (parts["allocator slack"] if figure == "allocated" else 0.0)
    return Checked(
        row["id"], row["id"].partition("-")[0], run.stack.name, figure, _dtypes(run), run.measured.memory_bytes, predicted,
        sum(parts[name] for name in MOVING), float(both.group(2)) * GIB if both else None, run.assumed,
    )


def _dtypes(run: Run) -> str:
    """A row that states them in words counts as documented, too."""
    return "documented" if run.stack.provenance.get("defaults") in ("measured", "documented") or run.stack.name in MEGATRON_DEFAULTS else "assumed"


def table(checked: Sequence[Checked]) -> list[str]:
    """One line a (source, stack, figure), then what the allocator adds where rows print allocated and reserved bytes."""
    groups: dict[tuple[str, str, str, str], list[Checked]] = {}
    for c in checked:
        groups.setdefault((c.source, c.stack, c.figure, c.dtypes), []).append(c)
    lines = [_line(" ".join(f"{part:{width}}" for part, width in zip(key, (9, 17, 10, 11))), members) for key, members in sorted(groups.items())]
    return [*lines, *_slack(checked)]


def _line(name: str, members: Sequence[Checked]) -> str:
    e = errors([c.predicted for c in members], [c.measured for c in members])
    each = [c.error for c in members]
    return (f"{name} n {e['n']:3d}  median {e['median']:6.1%}  mean {e['mean']:6.1%}  bias {e['bias']:+6.1%}  "
            f"lowest {min(each):+6.1%}  highest {max(each):+6.1%}{'  indicative' if e['indicative'] else ''}")


def _slack(checked: Sequence[Checked]) -> list[str]:
    found = [c for c in checked if c.reserved_bytes]
    if not found:
        return []
    extra = np.array([c.reserved_bytes - c.measured for c in found])
    of_moving, of_all = extra / [c.moving for c in found], extra / [c.measured for c in found]
    return [f"reserved beyond allocated, n {len(found)}: median {np.median(of_moving):.1%} of the bytes that move (10-90%: {np.quantile(of_moving, 0.1):.1%} to "
            f"{np.quantile(of_moving, 0.9):.1%}), {np.median(of_all):.1%} of all ({np.quantile(of_all, 0.1):.1%} to {np.quantile(of_all, 0.9):.1%})"]
