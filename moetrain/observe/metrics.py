"""What does a run write down about each step? (StepRecord and events, as lines of `metrics.jsonl`.)

One JSON object a line. Lines of kind "step" hold the fields of FIELDS, lines of kind "event" those of EVENTS plus whatever else
belongs to them. Every line has ``restart``: 0 for the first process of a run, one more for each that resumed it. A step that was
done again after a restart is there twice, with different restart numbers and ``rerun`` true on the later one: `read_steps` keeps
what led to the present state, `read_lines` shows all of it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from moetrain.observe import balance as balances
from moetrain.observe import flops as ledgers
from moetrain.observe.balance import Balance
from moetrain.observe.flops import StepFlops, Utilisation
from moetrain.observe.jsonl import last_record, number, read_records

SCHEMA = 1
FILE = "metrics.jsonl"
NUMBER, OPTIONAL = (int, float), (int, float, type(None))

FIELDS: dict[str, tuple[tuple[type, ...], str]] = {
    "kind": ((str,), '"step"'),
    "schema": ((int,), "version of this table"),
    "restart": ((int,), "which process of the run wrote the line, from 0"),
    "rerun": ((bool,), "an earlier process had logged this step already"),
    "time": (NUMBER, "Unix seconds when the step ended"),
    "step": ((int,), "optimizer steps done, the first is 1"),
    "seconds": (NUMBER, "wall time of the step on rank 0"),
    "tokens": ((int,), "tokens trained on in the step, all ranks"),
    "num_gpus": ((int,), "ranks that share the step"),
    "tokens_per_s": (NUMBER, "tokens / seconds"),
    "tokens_per_s_per_gpu": (NUMBER, "tokens / seconds / num_gpus"),
    "loss": (OPTIONAL, "cross entropy a token of the step, nats, auxiliary losses apart"),
    "losses": ((dict,), "auxiliary losses by name, as added to the loss"),
    "grad_norm": (OPTIONAL, "global L2 norm of the gradient before clipping"),
    "lr": (OPTIONAL, "learning rate the step used"),
    "skipped": ((str, type(None)), "why the optimizer did not move, else null"),
    "balance": ((dict, type(None)), "fields of moetrain.observe.balance.Balance, rows of the whole step"),
    "layers": ((dict,), "by layer: max_over_mean_rank, max_over_mean_expert, entropy_index, drop_fraction"),
    "flops": ((dict, type(None)), "FLOP of the step, all ranks: fields of moetrain.observe.flops.StepFlops"),
    "use": ((dict, type(None)), "mfu, own_mfu, hfu with their denominators, or null and the refusal"),
    "memory": ((dict,), "bytes by category of rank 0"),
    "data_wait": (OPTIONAL, "seconds that the step waited for data on rank 0"),
    "also": ((list,), "what else happened in the step (profile, validation, checkpoint, compile ...): not a throughput step"),
}
"""Field -> (types of its JSON value, meaning). Numbers that are not finite are the strings NaN, Infinity, -Infinity."""

EVENTS: dict[str, tuple[str, ...]] = {
    "start": (), "restart": ("from_step",), "checkpoint": ("step", "seconds", "bytes"), "skip": ("step", "reason"),
    "validation": ("step", "loss", "seconds"), "preflight": ("seconds", "warnings"), "profile": ("step", "file"),
    "note": ("text",), "warning": ("text",), "end": ("step",),
}  # fmt: skip
"""Event -> the fields it must have, beside kind, schema, restart, time and event."""


@dataclass(frozen=True)
class StepRecord:
    """One step as rank 0 saw it; fields as in FIELDS. Rates follow from the others. Scalars of torch or numpy are welcome: they
    are turned into numbers when the line is written."""

    step: int
    seconds: float
    tokens: int
    num_gpus: int
    loss: float | None = None
    losses: Mapping[str, float] = field(default_factory=dict)
    grad_norm: float | None = None
    lr: float | None = None
    skipped: str | None = None
    balance: Balance | None = None
    layers: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    flops: StepFlops | None = None
    use: Utilisation | None = None
    memory: Mapping[str, float] = field(default_factory=dict)
    data_wait: float | None = None
    also: tuple[str, ...] = ()
    restart: int = 0
    rerun: bool = False
    time: float = 0.0

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds if self.seconds > 0 else 0.0

    @property
    def tokens_per_s_per_gpu(self) -> float:
        return self.tokens_per_s / self.num_gpus


def step_line(record: StepRecord, restart: int, rerun: bool) -> dict[str, Any]:
    """The line of a step."""
    own = {name: getattr(record, name) for name in FIELDS if name not in ("kind", "schema")}
    own |= {"kind": "step", "schema": SCHEMA, "restart": restart, "rerun": rerun, "time": record.time or time.time(), "also": list(record.also)}
    own["balance"] = balances.as_fields(record.balance) if record.balance else None
    own["flops"] = ledgers.as_fields(record.flops) if record.flops else None
    own["use"] = dict(vars(record.use)) if record.use else None
    return {name: own[name] for name in FIELDS}


def event_line(event: str, restart: int, fields: Mapping[str, Any]) -> dict[str, Any]:
    """The line of an event. ValueError for an unknown one or a missing field."""
    if event not in EVENTS:
        raise ValueError(f"log: no event {event!r}; legal are {', '.join(EVENTS)}")
    missing = [name for name in EVENTS[event] if name not in fields]
    if missing:
        raise ValueError(f"log: event {event} needs {', '.join(missing)}")
    return {**fields, "kind": "event", "schema": SCHEMA, "restart": restart, "time": time.time(), "event": event}


def problem(line: Mapping[str, Any]) -> str | None:
    """What is wrong with a line of the log, in words; None if nothing is."""
    if line.get("schema") != SCHEMA:
        return f"schema {line.get('schema')!r}, expected {SCHEMA}"
    if line.get("kind") == "event":
        event = line.get("event")
        missing = [name for name in ("restart", "time", *EVENTS.get(event, ())) if name not in line]
        return f"unknown event {event!r}" if event not in EVENTS else f"event {event} lacks {', '.join(missing)}" if missing else None
    if line.get("kind") != "step":
        return f"kind {line.get('kind')!r}, expected step or event"
    for name, (types, _) in FIELDS.items():
        if name not in line:
            return f"step line lacks {name}"
        value = number(line[name]) if types in (NUMBER, OPTIONAL) else line[name]
        if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
            return f"{name} is {value!r}, expected {' or '.join(t.__name__ for t in types)}"
    return None


def record_of(line: Mapping[str, Any]) -> StepRecord:
    """The StepRecord of a step line. ValueError if the line breaks the schema."""
    wrong = problem(line)
    if wrong or line["kind"] != "step":
        raise ValueError(f"log: {wrong or 'an event is no step'}")
    own = {name: number(line[name]) for name in StepRecord.__dataclass_fields__}
    own |= {"also": tuple(line["also"]), "losses": _numbers(line["losses"]), "memory": _numbers(line["memory"])}
    try:
        for name, noun in (("balance", Balance), ("flops", StepFlops), ("use", Utilisation)):
            own[name] = noun(**_numbers(line[name])) if line[name] else None
    except TypeError as error:
        raise ValueError(f"log: {name} of step {line['step']}: {error}") from None
    return StepRecord(**own)


def _numbers(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {name: number(value) for name, value in fields.items() if name != "hardware"}


def read_lines(path: str | Path) -> Iterator[dict[str, Any]]:
    """Every line of a log in order, repeated steps and events included. ValueError names the line that breaks the schema."""
    for i, line in enumerate(read_records(path), start=1):
        wrong = problem(line)
        if wrong:
            raise ValueError(f"{path}:{i}: {wrong}")
        yield line


def read_steps(path: str | Path) -> list[StepRecord]:
    """The steps that led to the run's present state, in order: what a process did after the checkpoint that the next one
    resumed from is left out, whether or not it was done again."""
    kept: dict[int, dict[str, Any]] = {}
    for line in read_lines(path):
        if line["kind"] == "step":
            kept[line["step"]] = line
        elif line["event"] == "restart":
            kept = {step: found for step, found in kept.items() if step <= line["from_step"]}
    return [record_of(kept[step]) for step in sorted(kept)]


def next_restart(path: str | Path) -> int:
    """The restart number of a process that opens this log now: 0 for a new one."""
    last = last_record(path)
    return 0 if last is None else int(last.get("restart", 0)) + 1


def last_step(path: str | Path) -> int:
    """The highest step any process has logged; 0 for a new log."""
    return max((line["step"] for line in read_records(path) if line.get("kind") == "step"), default=0) if Path(path).is_file() else 0
