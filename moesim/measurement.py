"""What did a machine take for an op, and under which circumstances? (One JSON object a line: how trainer and calibration meet.)

    for m in read_measurements("m.jsonl"):
        if m.reason is None:
            print(m.op, m.median, m.spread)

A line holds every repeat in seconds; median, spread and A/A difference are the reader's to derive, and the properties below do it.
What was not measured has a line too, with the reason. `bench` of the trainer writes these files.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from moesim.ops import OP_KINDS, Group, Op

SCHEMA = "moesim.measurement/1"
STANDARD_ERROR_OF_MEDIAN = 1.2533
"""Of normal samples, in standard deviations over sqrt(n): sqrt(pi/2)."""
MAD_TO_SIGMA = 1.4826


@dataclass(frozen=True)
class Measurement:
    """One subject on one machine: an ``op``; or ``name`` with ``parameters`` (launch cost, checkpoint ...); or ``layout`` and ``step``.

    seconds: of every repeat in order, a collective's the largest over ranks; empty where ``reason`` says why nothing was measured.
    windows: how many repeats each window has; windows have operands of their own, so they differ as two equal runs do (A/A).
    dtype (of the operands), flops, bytes: as timed, of one repeat. rows: of each expert (grouped GEMM) or received by each rank (dispatch).
    method: kernel, operand sets, timer ... device, software, topology: what must be equal for two lines to be comparable;
    software.compute is what 16-bit ops were stored as in that run.
    clocks: MHz, watts and degrees right after the last repeat, where readable. foreign_cpu: share of the machine's cores that other
    processes used meanwhile; noisy: what speaks against trusting the line. date: ISO 8601, UTC.
    """

    op: Op | None = None
    name: str | None = None
    parameters: Mapping[str, Any] = field(default_factory=dict)
    layout: str | None = None
    step: int | None = None
    seconds: tuple[float, ...] = ()
    windows: tuple[int, ...] = ()
    reason: str | None = None
    dtype: str | None = None
    flops: float = 0.0
    bytes: float = 0.0
    rows: tuple[int, ...] = ()
    method: Mapping[str, Any] = field(default_factory=dict)
    device: Mapping[str, Any] = field(default_factory=dict)
    software: Mapping[str, Any] = field(default_factory=dict)
    topology: Mapping[str, Any] = field(default_factory=dict)
    clocks: Mapping[str, Any] | None = None
    foreign_cpu: float | None = None
    noisy: tuple[str, ...] = ()
    date: str = ""

    def __post_init__(self) -> None:
        if sum(subject is not None for subject in (self.op, self.name, self.layout)) != 1:
            raise ValueError("a measurement has exactly one subject: op, name or layout")
        if (self.layout is None) != (self.step is None):
            raise ValueError("layout and step belong together")
        if bool(self.seconds) == (self.reason is not None):
            raise ValueError("a measurement has seconds, or a reason why it has none")
        if any(not (math.isfinite(s) and s > 0) for s in self.seconds):
            raise ValueError("seconds must be positive and finite")
        if sum(self.windows) != len(self.seconds):
            raise ValueError(f"windows {list(self.windows)} do not add up to {len(self.seconds)} repeats")

    @property
    def median(self) -> float:
        """Seconds. statistics.StatisticsError where nothing was measured."""
        return statistics.median(self.seconds)

    @property
    def spread(self) -> float:
        """Half the interquartile range over the median."""
        if len(self.seconds) < 2:
            return math.nan
        low, _, high = statistics.quantiles(self.seconds, n=4, method="inclusive")
        return (high - low) / 2 / self.median

    @property
    def aa(self) -> float | None:
        """Largest difference between medians of neighbouring windows, over the median; None with one window."""
        starts = [sum(self.windows[:i]) for i in range(len(self.windows) + 1)]
        medians = [statistics.median(self.seconds[a:b]) for a, b in pairwise(starts) if b > a]
        return max(abs(b - a) for a, b in pairwise(medians)) / self.median if len(medians) > 1 else None

    @property
    def skew(self) -> float | None:
        """Largest of ``rows`` over their mean; None without rows."""
        return max(self.rows) * len(self.rows) / sum(self.rows) if sum(self.rows) else None

    @property
    def key(self) -> str:
        """What was measured, on what, with what: equal keys are repetitions. Topology counts by world, nodes and transport."""
        where = {k: self.topology.get(k) for k in ("world", "nodes", "transport")}
        subject = op_fields(self.op) if self.op is not None else {"name": self.name, "parameters": self.parameters, "layout": self.layout, "step": self.step}
        return json.dumps([subject, self.device, self.software, where], sort_keys=True)


def relative_error(seconds: list[float] | tuple[float, ...]) -> float:
    """Standard error of the median over the median, robust against outliers; infinite below 3 repeats."""
    if len(seconds) < 3:
        return math.inf
    middle = statistics.median(seconds)
    sigma = MAD_TO_SIGMA * statistics.median(abs(s - middle) for s in seconds)
    return STANDARD_ERROR_OF_MEDIAN * sigma / math.sqrt(len(seconds)) / middle


# --- ops as plain data -------------------------------------------------------------------------------------------------------


def op_fields(op: Op) -> dict[str, Any]:
    """An op as plain data: its class under "op", then its fields; a group is [size, stride]."""
    fields = {f.name: getattr(op, f.name) for f in dataclasses.fields(op)}
    if "group" in fields:
        fields["group"] = [fields["group"].size, fields["group"].stride]
    return {"op": type(op).__name__, **fields}


def op_of(fields: Mapping[str, Any]) -> Op:
    """The reverse. Keys that are no field of the op are left out; ValueError names what is missing or of the wrong type."""
    name = fields.get("op")
    if not isinstance(name, str) or name not in OP_KINDS:
        raise ValueError(f"op {name!r}: legal are {', '.join(OP_KINDS)}{nearest(str(name), OP_KINDS)}")
    values = {}
    for f in dataclasses.fields(OP_KINDS[name]):
        if f.name in fields:
            values[f.name] = _typed(f"{name}.{f.name}", f.type, fields[f.name])
        elif f.default is dataclasses.MISSING:
            raise ValueError(f"{name} lacks {f.name!r}{nearest(f.name, fields)}")
    return OP_KINDS[name](**values)


def _typed(where: str, kind: str, value: Any) -> Any:
    """``value`` as an op's field of type ``kind`` (an annotation as it is written in moesim.ops)."""
    if kind == "Group":
        if not isinstance(value, (list, tuple)) or len(value) != 2:
            raise ValueError(f"{where} is {value!r}; it must be [size, stride]")
        return Group(*(_typed(where, "int", part) for part in value))
    if kind == "int | None" and value is None:
        return None
    if kind in ("str", "bool"):
        if not isinstance(value, {"str": str, "bool": bool}[kind]):
            raise ValueError(f"{where} is {value!r}; it must be a {kind}")
        return value
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or value < 0:
        raise ValueError(f"{where} is {value!r}; it must be a number from 0 up")
    if kind == "float":
        return float(value)
    if value != int(value):
        raise ValueError(f"{where} is {value!r}; it must be a whole number")
    return int(value)


def nearest(word: str, legal: Any) -> str:
    """ "; did you mean X?", or nothing."""
    near = difflib.get_close_matches(word, list(legal), n=1)
    return f"; did you mean {near[0]}?" if near else ""


# --- lines -------------------------------------------------------------------------------------------------------------------


def to_record(m: Measurement) -> dict[str, Any]:
    """A measurement as a JSON object; fields that say nothing are left out."""
    record: dict[str, Any] = {"schema": SCHEMA}
    for f in dataclasses.fields(m):
        value = getattr(m, f.name)
        if value is None or value == () or value == {} or value == "":
            continue
        record[f.name] = op_fields(value) if f.name == "op" else list(value) if isinstance(value, tuple) else value
    return record


def from_record(record: Mapping[str, Any]) -> Measurement:
    """The reverse. ValueError in one line for another schema, an unknown field, or one of the wrong type."""
    if record.get("schema") != SCHEMA:
        raise ValueError(f"schema {record.get('schema')!r}; a measurement has {SCHEMA!r}")
    legal = {f.name: f for f in dataclasses.fields(Measurement)}
    values = {key: value for key, value in record.items() if key != "schema"}
    for key, value in values.items():
        if key not in legal:
            raise ValueError(f"unknown field {key!r}{nearest(key, legal)}")
        values[key] = _field(key, value)
    return Measurement(**values)


_LISTS = {"seconds": (int, float), "windows": (int,), "rows": (int,), "noisy": (str,)}
_PLAIN = {"name": str, "layout": str, "reason": str, "dtype": str, "date": str, "step": int, "flops": (int, float), "bytes": (int, float),
          "foreign_cpu": (int, float)}


def _field(key: str, value: Any) -> Any:
    if key == "op":
        if not isinstance(value, Mapping):
            raise ValueError(f"op is {value!r}; it must be an object")
        return op_of(value)
    if key in _LISTS:
        if not isinstance(value, list) or any(isinstance(v, bool) or not isinstance(v, _LISTS[key]) for v in value):
            raise ValueError(f"{key} must be a list of {_LISTS[key][-1].__name__}")
        return tuple(value)
    wanted = _PLAIN.get(key, dict)
    if isinstance(value, bool) or not isinstance(value, wanted):
        raise ValueError(f"{key} is {str(value)[:40]!r}, of the wrong type")
    return value


def read_lines(path: str | Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """("FILE:LINE", object) of every whole line that is not blank. A last line without its newline that is no JSON was cut by a
    kill and is left out; ValueError names any other line that isn't a JSON object."""
    text = Path(path).read_bytes()
    lines = text.split(b"\n")
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            if number == len(lines):
                return
            raise ValueError(f"{where}: not JSON: {line[:40].decode(errors='replace')!r}") from None
        if not isinstance(record, dict):
            raise ValueError(f"{where}: not a JSON object: {line[:40].decode(errors='replace')!r}")
        yield where, record


def read_measurements(path: str | Path) -> Iterator[Measurement]:
    """Every measurement of a file. ValueError "FILE:LINE: what" for the first bad line."""
    for where, record in read_lines(path):
        try:
            yield from_record(record)
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None
