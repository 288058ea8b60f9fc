"""Which layouts are there to choose from? (Every legal canonical layout of a scenario's axis values, as columns of codes.)

Layouts stay arrays until one is looked at: a hundred thousand of them cost a few megabytes. A layout is canonical when no
inapplicable choice is set (a dispatcher without expert parallelism, a resharding policy without ZeRO-3, ...), so that no two
rows mean the same run. An axis that the scenario leaves out keeps what the training stack does by default.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Callable

import numpy as np

from moesim.layout import DEFAULT_SMS, DISPATCHERS, OVERLAP_RULES, Layout, LayoutError, MAX_MICROBATCHES, illegal, parse_token
from moesim.schedules import SCHEDULES

AXIS_FIELDS = {
    "pp": "pp", "num_chunks": "vpp", "dp": "dp", "dp_replicate": "rep", "cp": "cp", "tp": "tp", "ep": "ep", "etp": "etp", "zero": "zero",
    "reshard": "reshard", "micro_batch": "mb", "schedule": "schedule", "recompute": "recompute", "dispatcher": "dispatcher",
    "dispatcher_sms": "sms", "overlap": "overlap", "precision": "precision", "grad_dtype": "grad", "optimizer": "optimizer",
    "graphs": "graphs", "stages": "stages",
}
"""Name of each axis in a scenario's ``search:`` -> field of Layout."""
UNEVEN_BATCH = "the global batch is not a multiple of dp*mb*seq_len"
MAX_LAYOUTS = 20_000_000
UNPAIRED = ("gpipe", "zbv", "dualpipev")
"""Schedules in which no backward is followed by a forward alone, so that ``ov:ep`` finds nothing to pair: all forwards come first, every
input gradient has its weight gradient behind it, or the schedule pairs by itself."""


@dataclass
class Space:
    """Rows of codes: ``codes[field]`` indexes ``values[field]``. ``dropped`` = (reason, rows) of what was not legal."""

    values: dict[str, list[Any]]
    codes: dict[str, np.ndarray]
    num_microbatches: np.ndarray
    dropped: dict[str, int]

    def __len__(self) -> int:
        return len(self.num_microbatches)

    def column(self, field: str) -> np.ndarray:
        """Values of one field as an array (objects for fields that are not numbers)."""
        return np.array(self.values[field], dtype=None if isinstance(self.values[field][0], (int, bool)) else object)[self.codes[field]]

    def layout(self, row: int) -> Layout:
        found = {field: self.values[field][self.codes[field][row]] for field in self.values}
        overlap, prefetch = found.pop("overlap")
        return Layout(**found, overlap=overlap, prefetch=prefetch)

    def take(self, rows: np.ndarray) -> "Space":
        return Space(self.values, {f: c[rows] for f, c in self.codes.items()}, self.num_microbatches[rows], self.dropped)


def axis_values(search, default: Layout) -> dict[str, list[Any]]:
    """Layout field -> values to try, parsed. LayoutError (one line) names a value that is not one."""
    out: dict[str, list[Any]] = {}
    for axis, field in AXIS_FIELDS.items():
        given = getattr(search, axis)
        if given is None:
            out[field] = [(default.overlap, default.prefetch)] if field == "overlap" else [getattr(default, field)]
        else:
            out[field] = list(dict.fromkeys(_parse(axis, value) for value in given))
    if search.dp is None:
        out["dp"] = []
    return out


def _parse(axis: str, value: Any) -> Any:
    """One axis value, read by the layout grammar so that both have one definition."""
    try:
        return _READ.get(axis, _degree)(axis, value)
    except LayoutError as error:
        raise LayoutError(f"search.{axis}: {error}") from None


def _degree(axis: str, value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise LayoutError(f"{value!r} is not a positive integer")
    return value


def _token(prefix: str, field: str) -> Callable[[str, Any], Any]:
    return lambda axis, value: _fields(prefix, value, field)[field]


def _overlap(axis: str, value: Any) -> tuple[tuple[str, ...], int]:
    found = _fields("ov:", value, "overlap")
    return found["overlap"], found["prefetch"]


def _fields(prefix: str, value: Any, field: str) -> dict[str, Any]:
    """What the token ``prefix`` + ``value`` sets: ``field``, or it is not a value of this axis."""
    found = parse_token(f"{prefix}{value}")
    if field not in found:
        raise LayoutError(f"{value!r} is a word of the layout text, but sets {', '.join(found)}")
    return found


def _dispatcher(axis: str, value: Any) -> str:
    name = DISPATCHERS.get(value, value)
    if name not in DEFAULT_SMS:
        raise LayoutError(f"{value!r} is not one of {', '.join([*DISPATCHERS, *DEFAULT_SMS])}")
    return name


def _flag(axis: str, value: Any) -> bool:
    if value not in (0, 1, "true", "false", "yes", "no"):
        raise LayoutError(f"{value!r} is not true or false")
    return value in (1, "true", "yes")


def _stages(axis: str, value: Any) -> tuple[int, ...]:
    if value == "even":
        return ()
    parts = str(value).split("/")
    if not all(p.isdigit() for p in parts):
        raise LayoutError(f"{value!r} is not 'even' or layer counts such as 4/4/3")
    return tuple(int(p) for p in parts)


_READ: dict[str, Callable[[str, Any], Any]] = {
    "zero": _token("zero", "zero"), "reshard": _flag, "schedule": _token("", "schedule"), "recompute": _token("rc:", "recompute"),
    "dispatcher": _dispatcher, "dispatcher_sms": lambda axis, v: _degree(axis, v), "overlap": _overlap, "precision": _token("", "precision"),
    "grad_dtype": _token("grad:", "grad"), "optimizer": _token("opt:", "optimizer"), "graphs": _token("graph:", "graphs"), "stages": _stages,
}


class _Table:
    """Rows under construction: columns of values or codes, grown axis by axis and filtered as soon as a rule can decide."""

    def __init__(self) -> None:
        self.columns: dict[str, np.ndarray] = {}
        self.size = 1
        self.dropped: dict[str, int] = {}

    def cross(self, field: str, values: list[int]) -> None:
        count = len(values)
        if self.size * count > MAX_LAYOUTS:
            raise LayoutError(f"search: more than {MAX_LAYOUTS:,} combinations; shorten an axis")
        self.columns = {f: np.repeat(c, count) for f, c in self.columns.items()}
        self.columns[field] = np.tile(np.array(values, dtype=np.int64), self.size)
        self.size *= count

    def keep(self, mask: np.ndarray, reason: str) -> None:
        lost = int(self.size - mask.sum())
        if lost:
            self.dropped[reason] = self.dropped.get(reason, 0) + lost
            self.columns = {f: c[mask] for f, c in self.columns.items()}
            self.size -= lost

    def __getitem__(self, field: str) -> np.ndarray:
        return self.columns[field]


def enumerate_layouts(scenario, default: Layout) -> Space:
    """All legal canonical layouts of ``scenario.search``. Raises LayoutError on a bad axis value."""
    model, workload, world = scenario.model, scenario.workload, scenario.cluster.num_gpus
    values = axis_values(scenario.search, default)
    table = _Table()
    _degrees(table, values, model, workload, world)
    _schedules(table, values, model, workload)
    _experts(table, values, model)
    _policies(table, values)
    return _finish(table, values)


def _degrees(t: _Table, values, model, workload, world: int) -> None:
    for field in ("pp", "tp", "cp"):
        t.cross(field, values[field])
    rest = t["pp"] * t["tp"] * t["cp"]
    t.keep(world % rest == 0, f"pp*cp*tp does not divide the {world} GPUs")
    t.columns["dp"] = world // (t["pp"] * t["tp"] * t["cp"])
    if values["dp"]:
        t.keep(np.isin(t["dp"], values["dp"]), "dp is not among the values asked for")
    kv = model.num_kv_heads if model.attention == "gqa" else model.num_heads
    t.keep((model.num_heads % t["tp"] == 0) & ((kv % t["tp"] == 0) | (t["tp"] % kv == 0)), "tp does not divide the attention heads")
    kinds = model.layer_kinds()
    widths = [w for w in (model.intermediate_size if "dense" in kinds else 0, model.shared_intermediate_size) if w]
    t.keep(np.all([w % t["tp"] == 0 for w in widths] or [np.ones(t.size, bool)], axis=0), "tp does not divide an FFN width")
    chunk = np.where(t["cp"] > 1, 2 * t["cp"], 1) * t["tp"]
    t.keep(workload.seq_len % chunk == 0, "the sequence does not split over cp and tp")
    t.cross("rep", values["rep"])
    t.keep(t["dp"] * t["cp"] % t["rep"] == 0, "rep does not divide dp*cp")
    t.cross("mb", values["mb"])
    t.keep(workload.global_batch_tokens % (t["dp"] * t["mb"] * workload.seq_len) == 0, UNEVEN_BATCH)
    t.columns["num_mb"] = workload.global_batch_tokens // (t["dp"] * t["mb"] * workload.seq_len)
    t.keep(t["num_mb"] <= MAX_MICROBATCHES, f"more than {MAX_MICROBATCHES} microbatches a step")


def _schedules(t: _Table, values, model, workload) -> None:
    names = list(values["schedule"])
    asked = len(names)
    if "1f1b" not in names and 1 in values["pp"]:
        names.append("1f1b")
    values["schedule"] = names
    t.cross("schedule", list(range(len(names))))
    t.keep((t["schedule"] < asked) | (t["pp"] == 1), "")
    t.cross("vpp", values["vpp"])
    plain = np.array([n in ("1f1b",) for n in names])[t["schedule"]]
    t.keep((t["pp"] > 1) | (plain & (t["vpp"] == 1)), "one pipeline rank needs no schedule but 1f1b")
    t.keep(t["pp"] * t["vpp"] <= model.num_layers, "more virtual stages than layers")
    combos = np.stack([t["schedule"], t["pp"], t["num_mb"], t["vpp"]], axis=1)
    distinct, inverse = np.unique(combos, axis=0, return_inverse=True)
    legal = np.array([pp == 1 or SCHEDULES[names[s]].legal(int(pp), int(m), int(v)) is None for s, pp, m, v in distinct], dtype=bool)
    t.keep(legal[inverse.ravel()] if len(distinct) else np.ones(0, bool), "the schedule can't run this many microbatches or chunks")
    t.cross("stages", list(range(len(values["stages"]))))
    lengths = np.array([len(s) for s in values["stages"]])[t["stages"]]
    sums = np.array([sum(s) for s in values["stages"]])[t["stages"]]
    t.keep((lengths == 0) | ((lengths == t["pp"] * t["vpp"]) & (sums == model.num_layers)), "st: does not place every layer on pp*vpp stages")


def _experts(t: _Table, values, model) -> None:
    if not model.num_experts:
        values["ep"], values["etp"] = [1], [1]
    t.cross("ep", values["ep"])
    t.cross("etp", values["etp"])
    t.keep(t["dp"] * t["cp"] * t["tp"] % (t["ep"] * t["etp"]) == 0, "ep*etp does not divide dp*cp*tp")
    if model.num_experts:
        t.keep(model.num_experts % t["ep"] == 0, "ep does not divide the experts")
        t.keep(model.moe_intermediate_size % t["etp"] == 0, "etp does not divide the expert width")


def _policies(t: _Table, values) -> None:
    for field in ("zero", "reshard", "recompute", "dispatcher", "overlap", "precision", "grad", "optimizer", "graphs"):
        t.cross(field, list(range(len(values[field]))))
    # SM counts belong to one dispatcher: NCCL's all-to-all takes none.
    t.cross("sms", values["sms"])
    zero = np.array(values["zero"])[t["zero"]]
    reshard = np.array(values["reshard"], dtype=bool)[t["reshard"]]
    if True in values["reshard"]:
        t.keep((zero == 3) | reshard, "")
    else:
        values["reshard"] = [*values["reshard"], True]
        t.columns["reshard"] = np.where(zero == 3, t["reshard"], len(values["reshard"]) - 1)


def _finish(t: _Table, values) -> Space:
    """Inapplicable choices removed, duplicates dropped, codes for every field."""
    t.dropped.pop("", None)
    _canonical_dispatcher(t, values)
    _canonical_overlap(t, values)
    codes: dict[str, np.ndarray] = {}
    for field in ("pp", "vpp", "dp", "rep", "cp", "tp", "ep", "etp", "mb", "sms"):
        distinct, inverse = np.unique(t[field], return_inverse=True)
        values[field], codes[field] = [int(v) for v in distinct] or [1], inverse.ravel()
    for field in ("zero", "reshard", "schedule", "recompute", "dispatcher", "overlap", "precision", "grad", "optimizer", "graphs", "stages"):
        codes[field] = t[field]
    if not t.size:
        return Space(values, codes, t["num_mb"], t.dropped)
    key = np.zeros(t.size, dtype=np.int64)
    for field, column in codes.items():
        key = key * len(values[field]) + column
    _, first = np.unique(key, return_index=True)
    first.sort()
    return Space(values, {f: c[first] for f, c in codes.items()}, t["num_mb"][first], t.dropped)


def _canonical_dispatcher(t: _Table, values) -> None:
    names = values["dispatcher"]
    if "alltoall" not in names:
        names.append("alltoall")
    plain = names.index("alltoall")
    t.columns["dispatcher"] = np.where(t["ep"] > 1, t["dispatcher"], plain)
    wanted = np.array([DEFAULT_SMS[n] for n in names])[t["dispatcher"]]
    asked = np.where(t["sms"] > 0, t["sms"], wanted)
    t.columns["sms"] = np.where(t["dispatcher"] == plain, 0, asked)


def _canonical_overlap(t: _Table, values) -> None:
    """Rules that have nothing to hide are taken out: expert pairing without dispatch, with one microbatch or in a schedule that pairs by itself, shared experts
    without dispatch, gather prefetch without resharded ZeRO-3, reductions and gathers that a step does not have."""
    zero = np.array(values["zero"])[t["zero"]]
    sharded = (zero == 3) & np.array(values["reshard"], dtype=bool)[t["reshard"]]
    paired = np.array([s in UNPAIRED for s in values["schedule"]])[t["schedule"]]
    applies = {"ep": (t["ep"] > 1) & (t["num_mb"] > 1) & ~paired, "shared": t["ep"] > 1, "fsdp": sharded, "grad": ~sharded & (zero != 2), "param": ~sharded & (zero > 0)}
    names: list[tuple[tuple[str, ...], int]] = []
    out = np.zeros(t.size, dtype=np.int64)
    for code, (rules, prefetch) in enumerate(values["overlap"]):
        here = t["overlap"] == code
        pattern = sum((np.where(applies[r], 1 << i, 0) for i, r in enumerate(rules)), np.zeros(t.size, dtype=np.int64))
        for bits in np.unique(pattern[here]):
            kept = tuple(r for i, r in enumerate(rules) if bits >> i & 1)
            value = (tuple(r for r in OVERLAP_RULES if r in kept), prefetch if "fsdp" in kept else 0)
            if value not in names:
                names.append(value)
            out[here & (pattern == bits)] = names.index(value)
    values["overlap"] = names or [((), 0)]
    t.columns["overlap"] = out


def canonical(layout: Layout, num_mb: int) -> Layout:
    """``layout`` without choices that have nothing to act on (the scalar form of what ``enumerate_layouts`` does)."""
    sharded = layout.zero == 3 and layout.reshard
    applies = {"ep": layout.ep > 1 and num_mb > 1 and layout.schedule not in UNPAIRED, "shared": layout.ep > 1, "fsdp": sharded, "grad": not sharded and layout.zero != 2,
               "param": not sharded and layout.zero > 0}
    overlap = tuple(r for r in layout.overlap if applies[r])
    if layout.ep == 1:
        layout = replace(layout, dispatcher="alltoall", sms=0)
    return replace(layout, overlap=overlap, prefetch=layout.prefetch if "fsdp" in overlap else 0, reshard=layout.reshard or layout.zero != 3)


__all__ = ["Space", "axis_values", "canonical", "enumerate_layouts", "illegal"]
