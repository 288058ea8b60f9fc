"""Which ops shall be timed, in which order, and which can't be? (What `moesim ops` wrote, by what the plan's error would gain.)

Each op's line says by how many seconds knowing it would narrow the step, after those that would narrow it more: that orders the work.
Where it doesn't, predicted seconds times how unsure they are do: an extrapolated op before an interpolated one of the same length.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from moesim.measurement import nearest, op_of, read_lines
from moesim.ops import BYTES_PER_ELEMENT, COLLECTIVE_ADJOINT, Attention, Collective, Dispatch, Gemm, GroupedGemm, MemoryBound, Op

KIND_NAMES = {Gemm: "gemm", GroupedGemm: "grouped_gemm", Attention: "attention", MemoryBound: "memory_bound", Collective: "collective",
              Dispatch: "dispatch"}
UNSURE = {"assumed": 1.0, "datasheet": 0.7, "extrapolated": 0.4, "interpolated": 0.1, "measured": 0.03}
"""Relative error that each provenance stands for, roughly; a term without one counts as assumed."""
FIXED_S = {"gloo": 2e-4, "nccl": 2e-5}


@dataclass(frozen=True)
class Request:
    """One op that the planner asks about, with what it thinks now (None: it says nothing). ``told``: the gain that the planner worked out."""

    op: Op
    predicted_s: float | None = None
    provenance: str | None = None
    where: str = ""
    told: float | None = None

    @property
    def kind(self) -> str:
        return KIND_NAMES[type(self.op)]

    @property
    def gain(self) -> float:
        """Seconds of the prediction that this measurement would make sure; infinite where nothing is predicted."""
        if self.told is not None:
            return self.told
        return float("inf") if self.predicted_s is None else self.predicted_s * UNSURE.get(self.provenance or "", 1.0)


def read_requests(path: str | Path) -> list[Request]:
    """Every distinct op of a file of `moesim ops`, in its order. ValueError "FILE:LINE: what" for the first bad line, and for none."""
    found: dict[Op, Request] = {}
    for where, line in read_lines(path):
        try:
            request = _request(line, where)
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None
        found.setdefault(request.op, request)
    if not found:
        raise ValueError(f"{path}: no ops in it; `moesim ops SCENARIO -o {path}` writes them")
    return list(found.values())


def _request(line: dict[str, Any], where: str) -> Request:
    predicted, provenance, gain = line.get("predicted_s"), line.get("provenance"), line.get("gain")
    for name, value in (("predicted_s", predicted), ("gain", gain)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < 1e12):
            raise ValueError(f"{name} is {value!r}; it must be seconds from 0 up")
    if provenance is not None and not (isinstance(provenance, str) and provenance in UNSURE):
        raise ValueError(f"provenance {provenance!r}: legal are {', '.join(UNSURE)}{nearest(str(provenance), UNSURE)}")
    if "schema" in line:
        raise ValueError("a measurement, not an op: give the file that `moesim ops` wrote")
    op = op_of(line)
    if isinstance(op, Collective) and op.kind not in COLLECTIVE_ADJOINT:
        raise ValueError(f"collective kind {op.kind!r}: legal are {', '.join(COLLECTIVE_ADJOINT)}{nearest(op.kind, COLLECTIVE_ADJOINT)}")
    if getattr(op, "dtype", "bf16") not in BYTES_PER_ELEMENT:
        raise ValueError(f"dtype {op.dtype!r}: legal are {', '.join(BYTES_PER_ELEMENT)}{nearest(op.dtype, BYTES_PER_ELEMENT)}")
    empty = [name for name in ("m", "n", "k", "groups", "rows", "batch", "tokens") if name in op.__slots__ and getattr(op, name) <= 0]
    if empty:
        raise ValueError(f"{type(op).__name__}.{empty[0]} is 0: nothing to time")
    return Request(op, None if predicted is None else float(predicted), provenance, where, None if gain is None else float(gain))


def ordered(requests: Iterable[Request]) -> list[Request]:
    """Largest gain first: the planner's own of all where each line has one, else by the rule for all, so that two kinds of gain are never
    compared; equal ones as they stood."""
    listed = list(requests)
    if any(r.told is None for r in listed):
        listed = [replace(r, told=None) for r in listed]
    return sorted(listed, key=lambda r: -r.gain)


def only(requests: Iterable[Request], kinds: Collection[str]) -> list[Request]:
    """Those of some kinds (all, for none). ValueError for a kind that doesn't exist."""
    for kind in kinds:
        if kind not in KIND_NAMES.values():
            raise ValueError(f"--only {kind}: legal are {', '.join(KIND_NAMES.values())}{nearest(kind, KIND_NAMES.values())}")
    return [r for r in requests if not kinds or r.kind in kinds]


@dataclass
class Pace:
    """How long would one call take here? A guess from ``flops_per_s`` and ``bytes_per_s``, times the least factor by which calls of its
    kind have been slower so far."""

    flops_per_s: float
    bytes_per_s: float
    link_bytes_per_s: float
    transport: str = "gloo"
    slower: dict[str, float] = field(default_factory=dict)

    def guess(self, op: Op) -> float:
        if isinstance(op, (Collective, Dispatch)):
            return FIXED_S[self.transport] + op.bytes / self.link_bytes_per_s
        return 1e-6 + op.flops / self.flops_per_s + op.bytes / self.bytes_per_s

    def seconds(self, request: Request) -> float:
        return self.guess(request.op) * self.slower.get(request.kind, 1.0)

    def learn(self, request: Request, seconds: float) -> None:
        factor = seconds / self.guess(request.op)
        self.slower[request.kind] = min(factor, self.slower.get(request.kind, factor))


def small(op: Op) -> Op | None:
    """The same kernel on next to nothing: what it imports and compiles at its first call is not to be timed. None where there is none."""
    match op:
        case Gemm():
            return replace(op, m=32, n=32, k=32)
        case GroupedGemm():
            return replace(op, groups=2, rows=32.0, n=32, k=32, max_rows=0.0)
        case MemoryBound():
            return replace(op, moved=1e5)
    return None


def words(op: Op) -> str:
    """An op in a few words, for a person."""
    match op:
        case Gemm():
            return f"gemm {op.m} x {op.n} x {op.k} {op.dtype}{' +=' if op.accumulate else ''}"
        case GroupedGemm():
            grad = "" if op.grad == "none" else f" d{op.grad}"
            return f"grouped {op.groups} x {op.rows / op.groups:.0f} x {op.n} x {op.k} {op.dtype}{grad}"
        case Attention():
            return f"attention {op.batch} x {op.num_heads} x {op.q_len} x {op.qk_dim}{' backward' if op.backward else ''}"
        case MemoryBound():
            return f"{op.kind} {op.moved / 1e6:.4g} MB"
        case Collective():
            return f"{op.kind} {op.bytes / 1e6:.4g} MB over {op.group.size}" + (f" every {op.group.stride}" if op.group.stride > 1 else "")
        case Dispatch():
            return f"{'combine' if op.combine else 'dispatch'} {op.dispatcher} {op.tokens} x {op.top_k} over {op.group.size}"
