"""How far apart are two profiles, term by term, and is that more than their own errors? (Seconds of a fixed list of ops, B over A.)"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Iterator, Sequence

import numpy as np

from moesim.costs.collectives import inside_seconds
from moesim.ops import Attention, Gemm, GroupedGemm, MemoryBound, Op
from moesim.pricing import kernel, term_name
from moesim.profile import HardwareProfile

FAR = 2.0
"""Combined standard deviations beyond which a difference is marked."""
SCALE = {True: 1, False: 16}
"""Edges of the representative products, CPU and GPU, in units of 256."""
KINDS = ("elementwise", "norm", "permute", "quantise", "loss", "optimizer", "embedding", "copy")


@dataclass(frozen=True)
class Drift:
    """One term: seconds of B over A, geometric mean over the listed ops; ``sigma`` of its logarithm, both profiles' together.
    ``what`` alone | in step | curve; ratios: of each op."""

    term: str
    what: str
    ratio: float
    sigma: float
    provenance: tuple[str, str]
    ratios: dict[str, float]

    @property
    def is_far(self) -> bool:
        return bool(abs(np.log(self.ratio)) > FAR * self.sigma)


def representative(is_cpu: bool) -> Iterator[Op]:
    """Ops of every kind, of the sizes that a step of a small model has on that kind of device."""
    s = 256 * SCALE[is_cpu]
    for dtype in ("bf16", "fp32", "fp8", "mxfp8", "nvfp4"):
        for m, n, k in ((s, s, s), (4 * s, s, s), (4 * s, 4 * s, s), (4 * s, s, 4 * s)):
            yield Gemm(m, n, k, dtype)
            yield Gemm(m, n, k, dtype, accumulate=True)
        for rows in (2 * s, 8 * s):
            yield from (GroupedGemm(8, float(rows), 4 * s, s, dtype, grad) for grad in ("none", "input", "weight"))
    length = 256 if is_cpu else 4096
    for batch in (1, 4):
        yield from (Attention(batch, 8, 2, length, length, 64, 64, length * (length + 1) / 2, backward) for backward in (False, True))
    for kind in KINDS:
        yield from (MemoryBound(kind, 2.0**p * SCALE[is_cpu] ** 2) for p in (16, 20, 24))


def drift(a: HardwareProfile, b: HardwareProfile) -> list[Drift]:
    """Every term both have. ValueError where one is of a CPU and one of a GPU."""
    if (a.num_sms == 0) != (b.num_sms == 0):
        raise ValueError(f"{a.name!r} and {b.name!r} are not of one kind of device: one is of a CPU, one of a GPU")
    by_term: dict[str, list[Op]] = {}
    for op in representative(a.num_sms == 0):
        by_term.setdefault(term_name(op), []).append(op)
    found = [_kernel(a, b, name, ops) for name, ops in by_term.items() if name in a.term_index and name in b.term_index]
    return [*found, *_curves(a, b), *_steps(a, b)]


def _kernel(a: HardwareProfile, b: HardwareProfile, name: str, ops: Sequence[Op]) -> Drift:
    one, two = (kernel(p.term(name).kind, p.num_sms, ops)(p.parameters(name, in_training=False)) for p in (a, b))
    return _drift(a, b, name, "alone", {_words(op): float(y / x) for op, x, y in zip(ops, one, two)})


def _drift(a, b, name: str, what: str, ratios: dict[str, float]) -> Drift:
    sigma = float(np.hypot(_sigma(a, name), _sigma(b, name)))
    middle = float(np.exp(np.mean(np.log(list(ratios.values())))))
    return Drift(name, what, middle, sigma, (a.term(name).provenance, b.term(name).provenance), ratios)


def _sigma(profile: HardwareProfile, name: str) -> float:
    term = profile.term(name)
    return float(np.sqrt(term.sigma_log**2 + sum(s**2 for cause, s in term.shared.items() if cause != "in step")))


def _curves(a: HardwareProfile, b: HardwareProfile) -> Iterator[Drift]:
    for kind in sorted(set(a.curve_tables) & set(b.curve_tables)):
        name = f"{kind}.nvlink"
        members = sorted(set(a.curve_tables[kind]) & set(b.curve_tables[kind]))
        if members and name in a.term_index and name in b.term_index:
            sizes = np.array([2.0**p for p in (12, 16, 20, 24)])
            one, two = (np.array([inside_seconds(p.curve_tables[kind], kind, sizes, np.full(4, float(m))) for m in members]) for p in (a, b))
            labels = [f"{size:.3g} bytes over {m}" for m in members for size in sizes]
            yield _drift(a, b, name, "curve", dict(zip(labels, (two / one).ravel().tolist())))


def _steps(a: HardwareProfile, b: HardwareProfile) -> Iterator[Drift]:
    """What a step does to a term, as a factor on its seconds."""
    for key in sorted(set(a.sustained) & set(b.sustained)):
        one, two = a.sustained[key], b.sustained[key]
        yield Drift(key, "in step", one.factor / two.factor, float(np.hypot(one.sigma_log, two.sigma_log)), (one.provenance, two.provenance), {})


def _words(op: Op) -> str:
    if isinstance(op, Gemm):
        return f"{op.m} x {op.n} x {op.k}"
    if isinstance(op, GroupedGemm):
        return f"{op.groups} groups, {op.rows:g} rows, {op.n} x {op.k}, grad {op.grad}"
    return f"{op.batch} x {op.num_heads} heads x {op.q_len}" if isinstance(op, Attention) else f"{op.moved:.3g} bytes"


def as_data(found: Sequence[Drift]) -> list[dict]:
    return [{"term": d.term, "what": d.what, "ratio": d.ratio, "sigma": d.sigma, "beyond_2_sigma": d.is_far, "provenance": list(d.provenance), "ratios": d.ratios}
            for d in found]


def lines(a: HardwareProfile, b: HardwareProfile, found: Sequence[Drift]) -> list[str]:
    """A line a term, those beyond two standard deviations marked; what neither profile measured last."""
    far = sum(d.is_far for d in found)
    out = [f"seconds of {b.name} over {a.name}, {len(found)} comparisons, {far} beyond {FAR:g} sigma"]
    for d in sorted(found, key=lambda d: (d.what, "measured" not in d.provenance, d.term)):
        mark = " <-- beyond 2 sigma" if d.is_far else ""
        out.append(f"  {d.term:26} {d.what:8} x{d.ratio:6.3f}  sigma {d.sigma:6.1%}  {'/'.join(d.provenance)}{mark}")
    return out
