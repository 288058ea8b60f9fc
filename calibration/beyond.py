"""How much worse is a price outside the sizes that were measured? (The largest sizes held out, errors by octaves from the edge.)

Dense products: a table's rows above an eighth of its largest m, n or k are held out, the kernel is fitted to the rest. Collectives: the
largest sizes of each measured curve are held out, and priced as the curve goes on. The slope s of a kind is the least-squares answer to
outside^2 = inside^2 + (s octaves)^2, with the errors inside those of the rows kept (products) or of every other size held out (curves).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from calibration import compute, network
from calibration.build import GPUS, Bench
from calibration.models import column, measured, predict
from moesim.costs import collectives
from moesim.costs.collectives import Curve

HELD_OCTAVES = 3
LEAST_KEPT, LEAST_HELD = 30, 3
"""Rows that a fit must keep, and that an error is read from, at least."""
DTYPES = ("bf16", "fp8", "nvfp4")


class Held(NamedTuple):
    """Standard deviation of ln(predicted / measured) of the rows so many ``octaves`` outside, beside that of the rows inside."""

    kind: str
    octaves: float
    num_rows: int
    outside: float
    inside: float


def sigma(errors: np.ndarray) -> float:
    """From the 80% point, so that outliers count once."""
    return float(np.quantile(np.abs(errors), 0.8) / 1.2816)


def products(bench: Bench) -> Iterator[Held]:
    """Every table of dense products, each of its axes cut."""
    for dtype in DTYPES:
        for gpu in GPUS:
            rows = compute.gemm_rows(bench.rows, gpu, dtype)
            for axis in "mnk" if rows else "":
                yield from _cut(bench, gpu, dtype, axis, rows)


def _cut(bench: Bench, gpu: str, dtype: str, axis: str, rows: Sequence) -> Iterator[Held]:
    size = column(rows, axis)
    kept = size <= size.max() / 2**HELD_OCTAVES
    if kept.sum() < LEAST_KEPT or (~kept).sum() < LEAST_HELD:
        return
    lender = None if gpu == compute.REFERENCE else bench.gemm[compute.REFERENCE, dtype].parameters
    found = compute.fit_gemm([r for r, k in zip(rows, kept) if k], lender, dtype, bench.sheets)
    errors = np.log(predict(found.parameters, int(bench.sheets[gpu]["num_sms"]), rows) / measured(rows))
    octaves = np.ceil(np.log2(size / size[kept].max()) - 1e-9)
    for far in range(1, HELD_OCTAVES + 1):
        if (octaves == far).sum() >= LEAST_HELD:
            yield Held(f"gemm.{dtype}", far, int((octaves == far).sum()), sigma(errors[octaves == far]), sigma(errors[kept]))


def curves(bench: Bench) -> Iterator[Held]:
    """Every measured curve of a collective, its largest sizes cut; all curves of a kind pooled."""
    own = [c for gpu in GPUS for c in network.curves(gpu, bench.rows, bench.sheets) if not c.lender]
    for kind in sorted({c.kind for c in own}):
        of_kind = [c for c in own if c.kind == kind]
        inside = network.interpolation_errors(of_kind)[0].median * 1.4826
        for far in range(1, HELD_OCTAVES + 1):
            errors = np.concatenate([_beyond_curve(np.array(c.bytes), collectives.monotone(c.seconds), far) for c in of_kind])
            if len(errors) >= LEAST_HELD:
                yield Held(kind, far, len(errors), sigma(errors), inside)


def _beyond_curve(sizes: np.ndarray, seconds: np.ndarray, far: int) -> np.ndarray:
    """Errors at the sizes ``far`` octaves beyond a cut that leaves the HELD_OCTAVES largest out."""
    kept = sizes <= sizes[-1] / 2**HELD_OCTAVES * (1 + 1e-9)
    if kept.sum() < 4:
        return np.zeros(0)
    held = (np.ceil(np.log2(sizes / sizes[kept][-1]) - 1e-6) == far) & ~kept
    return np.log(collectives.curve_seconds(Curve(sizes[kept], seconds[kept]), sizes[held]) / seconds[held])


def slope(found: Sequence[Held]) -> float:
    """Standard deviation of ln(seconds) that an octave outside adds, in quadrature."""
    far, weight = np.array([h.octaves for h in found]), np.array([h.num_rows for h in found], dtype=float)
    excess = np.array([h.outside**2 - h.inside**2 for h in found])
    return float(np.sqrt(max(0.0, np.sum(weight * far**2 * excess) / np.sum(weight * far**4))))
