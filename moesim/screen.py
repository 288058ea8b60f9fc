"""Which of very many layouts are worth a closer look? (Memory and a lower bound of the step for every row of a Space, as arrays.)

Rows that share a structure (stages, order) are one array computation; what a layer costs is looked up by part, so that the work
grows with distinct parts and structures, not with layouts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Callable

import numpy as np

from moesim import memory
from moesim.assembly import GRAD_BYTES, OPTIMIZER_BYTES, orders_of
from moesim.axes import pipeline
from moesim.bounds import Durations, screen_structure
from moesim.overlap import PairedDurations, Piece, join, pieces
from moesim.layout import stage_layers
from moesim.ops import Collective, Group, MemoryBound
from moesim.part import Part, PartKey, work_of
from moesim.parts import HEADS, Parts, layer_parts
from moesim.schedules import SCHEDULES
from moesim.space import Space

LETTERS = "FBIW"
SECONDS = ("path", "compute", "comm", "host")
"""What a Part has by letter; where ranks share cores, their core-seconds too."""
NUM_LISTS = 16
"""Lists that the structures of a space are dealt to: a few for each worker, so that all end together."""
PART_FIELDS = ("tp", "cp", "mb", "precision", "recompute", "graphs", "grad")
SHARD_FIELDS = ("tp", "cp", "dp", "rep", "ep", "etp", "grad", "precision", "sharded", "each")
MOE_FIELDS = (*PART_FIELDS, "ep", "etp", "dispatcher", "sms", "shared", "layers")


@dataclass(frozen=True)
class Screened:
    """Arrays over the rows of a Space: peak bytes of the heaviest rank, that rank, a lower bound of the step in seconds."""

    peak_bytes: np.ndarray
    heaviest: np.ndarray
    bound_s: np.ndarray


class Screen:
    """Screening of one Space; ``parts`` keeps everything priced for the layouts that are looked at later."""

    def __init__(self, scenario, parts: Parts, space: Space):
        self.scenario, self.parts, self.space, self.model = scenario, parts, space, scenario.model
        self.items = item_names(self.model)
        self.value = {f: space.column(f) for f in space.values if f not in ("overlap", "recompute", "stages")}
        self.seconds = (*SECONDS, "cores") if parts.node else SECONDS
        self.runs: tuple | None = None
        self.combinations: dict[tuple[str, ...], tuple[np.ndarray, np.ndarray]] = {}
        self.rules = {r: np.array([r in names for names, _ in space.values["overlap"]])[space.codes["overlap"]] for r in ("ep", "shared", "grad", "param", "fsdp")}
        self.prefetch = np.array([n for _, n in space.values["overlap"]])[space.codes["overlap"]]
        self.sharded = (self.value["zero"] == 3) & self.value["reshard"]
        self.flags = {"shared": self.rules["shared"], "sharded": self.sharded, "each": self.sharded | (self.value["zero"] == 2), "layers": self._uneven_layers()}
        self.dense_shards = self.value["dp"] * self.value["cp"] // self.value["rep"]
        self.expert_shards = self.value["dp"] * self.value["cp"] * self.value["tp"] // (self.value["ep"] * self.value["etp"])

    def run(self, progress: Callable[[int, int], None] | None = None, spread=None) -> Screened:
        """Every row. ``spread(lists of structure numbers)`` yields ``screen_structures`` of each list, in order: here one after the
        other, in a search by its workers, which inherit what ``prepare`` made."""
        count, done = len(self.space), 0
        peak, heaviest, bound = np.zeros(count), np.zeros(count, dtype=np.int64), np.full(count, np.inf)
        lists = self.prepare()
        for part in (spread or (lambda todo: map(self.screen_structures, todo)))(lists):
            for number, (of_peak, of_heaviest, of_bound) in part:
                rows = self.groups[number]
                peak[rows], heaviest[rows], bound[rows] = of_peak, of_heaviest, of_bound
                done += len(rows)
                if progress:
                    progress(done, count)
        return Screened(peak, heaviest, bound)

    def prepare(self) -> list[list[int]]:
        """Prices every part, groups rows by structure; lists of structure numbers to screen together, the largest structures apart."""
        self.table = self._items()
        self._pieces()
        self.groups = self._groups()
        order = sorted(range(len(self.groups)), key=lambda g: -len(self.groups[g]))
        return [order[start::NUM_LISTS] for start in range(min(NUM_LISTS, len(order)))]

    def screen_structures(self, numbers: list[int]) -> list[tuple[int, tuple[np.ndarray, np.ndarray, np.ndarray]]]:
        """(number, (peak bytes, heaviest rank, bound)) of each structure."""
        return [(number, self._screen(self.groups[number])) for number in numbers]

    def _screen(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        layout, num_mb = self.space.layout(rows[0]), int(self.space.num_microbatches[rows[0]])
        structure = structure_of(self.model, layout, num_mb, self.items)
        total = memory.total(self.memory(rows, structure))
        return total.max(axis=1), total.argmax(axis=1), self._bound(rows, structure, layout.schedule, num_mb, layout.overlaps("ep"))

    def memory(self, rows: np.ndarray, structure: memory.Structure) -> dict[str, np.ndarray]:
        """Category -> bytes [rows, ranks]."""
        t, v = self.table, self.value
        items = memory.Items(**{n: t[n][rows] for n in ("dense", "expert", "saved", "logits", "transient", "buffer")})
        policy = memory.Policy(
            v["zero"][rows], v["reshard"][rows], np.array([GRAD_BYTES[g] for g in v["grad"][rows]]), np.array([memory.MOMENT_BYTES[o] for o in v["optimizer"][rows]]),
            self.dense_shards[rows], self.expert_shards[rows], self.prefetch[rows], np.where(v["dispatcher"][rows] == "alltoall", 0.0, 2.0),
            self.rules["ep"][rows].astype(float), self.parts.stack.fsdp_every_stage, self.space.num_microbatches[rows],
        )
        return memory.peak(items, policy, structure, self.scenario.memory.allocator_slack)

    def _groups(self) -> list[np.ndarray]:
        """Rows of every structure present: stages, order, microbatches."""
        s = self.space
        key = np.stack([s.codes["pp"], s.codes["vpp"], s.codes["schedule"], s.codes["stages"], self.rules["ep"].astype(int), s.num_microbatches], axis=1)
        distinct, inverse = np.unique(key, axis=0, return_inverse=True)
        order = np.argsort(inverse.ravel(), kind="stable")
        cuts = np.searchsorted(inverse.ravel()[order], np.arange(len(distinct) + 1))
        return [order[cuts[i]:cuts[i + 1]] for i in range(len(distinct))]

    def _items(self) -> dict[str, np.ndarray]:
        """[rows, items] arrays of everything a fold over the stages needs."""
        names = ["dense", "expert", "saved", "logits", "transient", "buffer"] + [f"{what}_{letter}" for what in self.seconds for letter in LETTERS]
        table = {n: np.zeros((len(self.space), len(self.items))) for n in names}
        for k, item in enumerate(self.items):
            for part in layer_parts(item, self.model):
                values = self._part_values(part)
                for n, column in values.items():
                    if n in ("transient", "buffer"):
                        table[n][:, k] = np.maximum(table[n][:, k], column)
                    else:
                        table[n][:, k] += column
        return table | self._sharding(table)

    def _fields(self, is_moe: bool) -> tuple[str, ...]:
        """Choices that a part's key depends on: as PartKey says, for this stack and profile."""
        if is_moe:
            return (*MOE_FIELDS, "pp") if self.parts.stack.counts_globally else MOE_FIELDS
        return (*PART_FIELDS, "ep") if self.parts.profile.knows_spread else PART_FIELDS

    def _part_values(self, name: str) -> dict[str, np.ndarray]:
        """One part's numbers for every row, priced once for each distinct key."""
        first, inverse = self._distinct(self._fields(name.partition("@")[0] == "moe"))
        wanted = [(self.parts.key(name, layout), layout) for layout in map(self.space.layout, first)]
        self.parts.ensure(wanted)
        found = [_numbers(self.parts.cache[key], self.seconds) for key, _ in wanted]
        return {n: np.array([f[n] for f in found])[inverse] for n in found[0]}

    def _uneven_layers(self) -> np.ndarray:
        """Layers over which each row's uneven loads are summed (``Parts.uneven_layers``), worked out once a structure."""
        s = self.space
        if self.scenario.workload.routing.kind == "balanced" or not len(s):
            return np.zeros(len(s), dtype=np.int64)
        key = np.stack([s.codes[f] for f in ("pp", "vpp", "schedule", "stages")], axis=1)
        _, first, inverse = np.unique(key, axis=0, return_index=True, return_inverse=True)
        return np.array([self.parts.uneven_layers(s.layout(i)) for i in first])[inverse.ravel()]

    def _distinct(self, fields: tuple[str, ...]) -> tuple[np.ndarray, np.ndarray]:
        """(a row of each distinct combination of ``fields``, the combination of every row); worked out once for each choice."""
        if fields not in self.combinations:
            code = np.zeros(len(self.space), dtype=np.int64)
            for f in fields:
                column = self.flags[f].astype(np.int64) if f in self.flags else self.space.codes[f]
                size = int(column.max(initial=0)) + 1
                code = code * size + column
            _, first, inverse = np.unique(code, return_index=True, return_inverse=True)
            self.combinations[fields] = first, inverse.ravel()
        return self.combinations[fields]

    def _sharding(self, table) -> dict[str, np.ndarray]:
        """Gathers, reductions and copies of one item under resharded ZeRO-3, and reductions under ZeRO-2: seconds [rows, items]."""
        rows, inverse = self._distinct(SHARD_FIELDS)
        stack, full = self.parts.stack, self.sharded[rows]
        each = full | (self.value["zero"][rows] == 2)
        columns: dict[str, list[np.ndarray]] = {"gather": [], "reduce": [], "copy_out": [], "copy_in": [], "step_reduce": [], "step_gather": []}
        for k in range(len(self.items)):
            dense, expert = table["dense"][rows, k], table["expert"][rows, k]
            moved = np.where(full, dense * (self.dense_shards[rows] > 1) + expert * (self.expert_shards[rows] > 1), 0.0)
            shard = full * (dense * (self.dense_shards[rows] > 1) / self.dense_shards[rows] + expert * (self.expert_shards[rows] > 1) / self.expert_shards[rows])
            columns["gather"].append(self._collectives("all_gather", rows, dense * full, expert * full) + self._kernels("copy", stack.fsdp_cast_bytes * shard))
            columns["reduce"].append(self._collectives("reduce_scatter", rows, dense * each, expert * each) + self._kernels("copy", stack.fsdp_accumulate_bytes * shard))
            columns["step_reduce"].append(self._collectives("reduce_scatter", rows, dense * ~each, expert * ~each))
            columns["step_gather"].append(self._collectives("all_gather", rows, dense * ~each, expert * ~each))
            columns["copy_out"].append(self._kernels("copy", stack.fsdp_copy_out_bytes * moved))
            columns["copy_in"].append(self._kernels("copy", stack.fsdp_copy_in_bytes * moved))
        return {name: np.stack(found, axis=1)[inverse] for name, found in columns.items()}

    def _collectives(self, kind: str, rows: np.ndarray, dense: np.ndarray, expert: np.ndarray) -> np.ndarray:
        """Seconds of the dense and the expert collective of ``kind`` over each row's replicas; nothing where there is nothing."""
        v = self.value
        width = 2.0 if kind == "all_gather" else np.array([GRAD_BYTES[g] for g in v["grad"][rows]])
        total = np.zeros(len(rows))
        for count, size, stride in ((dense, self.dense_shards[rows], v["tp"][rows]), (expert, self.expert_shards[rows], (v["ep"] * v["etp"])[rows])):
            moved = np.where(size > 1, width * count, 0.0)
            total += self._priced(np.stack([moved, size, stride], axis=1), lambda b, s, g: Collective(kind, b, Group(int(s), int(g))) if b else None)
        return total

    def _kernels(self, kind: str, moved: np.ndarray) -> np.ndarray:
        return self._priced(moved[:, None], lambda b: MemoryBound(kind, b) if b else None)

    def _priced(self, keys: np.ndarray, make) -> np.ndarray:
        """Seconds of ``make(*key)`` for every row of keys; None costs nothing."""
        if not keys[:, 0].any():
            return np.zeros(len(keys))
        distinct, inverse = np.unique(keys, axis=0, return_inverse=True)
        ops = [make(*map(float, row)) for row in distinct]
        self.parts.price_ops(op for op in ops if op is not None)
        return np.array([self.parts.prices[op][0] if op is not None else 0.0 for op in ops])[inverse.ravel()]

    def _bound(self, rows, structure: memory.Structure, schedule: str, num_mb: int, paired: bool) -> np.ndarray:
        """Lower bound of the step: the schedule played on lower bounds of its actions, and what no overlap can hide at its end."""
        pp = structure.num_ranks
        vpp = len(structure.placement) // pp
        durations = self._durations(rows, structure)
        through = screen_structure(lambda m: orders_of(schedule, pp, m, vpp, paired), num_mb, durations)
        found = through + self._tail(rows, structure) + (self._ends(rows, structure, durations) if pp == 1 else 0.0)
        return np.maximum(found, self._node_seconds(rows, structure, num_mb)) if self.parts.node and self.parts.node.num_cores else found

    def _node_seconds(self, rows, structure: memory.Structure, num_mb: int) -> np.ndarray:
        """Seconds [rows] that the cores of all nodes need for what all ranks do on them, if none ever stood idle."""
        f, b, i, w = ((self.table[f"cores_{letter}"][rows] @ structure.contents.T).sum(axis=1) for letter in LETTERS)
        moved = self._optimizer_bytes(rows, *self._held(rows, structure))
        once = self._kernels("optimizer", moved.ravel()).reshape(moved.shape).sum(axis=1)
        each = self.scenario.cluster.num_gpus / structure.num_ranks / self.scenario.cluster.num_nodes
        return each * (num_mb * (f + np.minimum(b, i + w)) + once) / self.parts.node.num_cores

    def _durations(self, rows, structure: memory.Structure) -> Durations:
        """Seconds [rows, stages] that one action of each letter can't beat, by lane."""
        fold = lambda name: self.table[name][rows] @ structure.contents.T  # noqa: E731
        compute, path, comm, host = ({x: fold(f"{what}_{x}") for x in LETTERS} for what in ("compute", "path", "comm", "host"))
        out, into, gather, reduce = fold("copy_out"), fold("copy_in"), fold("gather"), fold("reduce")
        for x in "FBI":
            compute[x], path[x] = compute[x] + out, path[x] + out
        for x in "BW":
            compute[x], path[x] = compute[x] + into, path[x] + into
        none = np.zeros_like(gather)
        data = {"F": gather, "B": gather, "I": gather, "W": none}
        reduced = {"F": none, "B": reduce, "I": none, "W": reduce}
        lanes = {x: np.stack([compute[x], comm[x], data[x], reduced[x], host[x]]) for x in LETTERS}
        return self._paired(rows, structure, Durations(path, lanes, self._hop(rows)))

    def _paired(self, rows, structure: memory.Structure, plain: Durations) -> PairedDurations:
        """Durations whose pairs are played, for the rows in which every collective holds up its own body."""
        signature, inverse, tables = self._pieces()
        codes = np.where(self.rules["shared"][rows], -1, signature[inverse[rows]])
        groups = tuple(np.flatnonzero(codes == code) for code in np.unique(codes) if code >= 0)
        stages = pipeline.contents(self.model, self.space.layout(int(rows[0])))
        units = [[layer_parts(name, self.model) for name, count in stage for _ in range(count)] for stage in stages]

        def sequence(letter: str, stage: int, group: int) -> list[Piece]:
            at = inverse[rows[groups[group]]]
            order = units[stage] if letter == "F" else [unit[::-1] for unit in units[stage][::-1]]
            cut = {name: [(compute[at], None if comm is None else comm[at]) for compute, comm in tables[name, letter][codes[groups[group][0]]]]
                   for unit in order for name in unit}
            return join([cut[name] for unit in order for name in unit])

        return PairedDurations(plain.path, plain.lanes, plain.hop, groups=groups, sequence=sequence, contents=stages)

    def _pieces(self):
        """(signature [combinations], combination of each row, tables): combinations of one signature cut every part into the same
        pieces; tables[part, letter][signature] = its pieces over all combinations (zeros outside the signature)."""
        if self.runs is None:
            first, inverse = self._distinct(self._fields(True))
            names = tuple(dict.fromkeys(part for item in self.items for part in layer_parts(item, self.model)))
            layouts = [self.space.layout(row) for row in first]
            known: dict[tuple, list] = {}
            cut = {}
            for name in names:
                keys = [self.parts.key(name, layout) for layout in layouts]
                for letter in "FBI":
                    for key in dict.fromkeys(keys):
                        known[key, letter] = pieces(work_of(self.parts.cache[key], letter))
                    cut[name, letter] = [known[key, letter] for key in keys]
            shapes = [tuple(tuple(comm > 0 for _, comm in found[u]) for found in cut.values()) for u in range(len(layouts))]
            numbers = {shape: i for i, shape in enumerate(dict.fromkeys(shapes))}
            signature = np.array([numbers[shape] for shape in shapes])
            tables = {}
            for key, found in cut.items():
                tables[key] = []
                for i in numbers.values():
                    members = np.flatnonzero(signature == i)
                    columns = np.zeros((len(found[members[0]]), 2, len(layouts)))
                    for u in members:
                        columns[:, :, u] = found[u]
                    tables[key].append([(compute, comm if comm.any() else None) for compute, comm in columns])
            self.runs = signature, inverse, tables
        return self.runs

    def _hop(self, rows) -> np.ndarray:
        v = self.value
        size = v["mb"][rows] * self.scenario.workload.seq_len / (v["tp"][rows] * v["cp"][rows]) * self.model.hidden_size * 2.0
        stride = (v["tp"] * v["cp"] * v["dp"])[rows]
        many = v["pp"][rows] > 1
        return self._priced(np.stack([size * many, stride * many], axis=1), lambda b, s: Collective("send_recv", b, Group(2, int(s))) if b else None)

    def _ends(self, rows, structure: memory.Structure, durations: Durations) -> np.ndarray:
        """What the first forward can't hide of the gathers under it and the last backward of the reductions, on one pipeline rank."""
        factor = self.parts.site.factor("end_of_step")
        gather, reduce = ((self.table[name][rows] @ structure.contents.T)[:, 0] * factor for name in ("step_gather", "step_reduce"))
        # What the bound counts for one action: its path, or where a lane rules the step, its share of that lane.
        first, last = (np.maximum(durations.path[x][:, 0], durations.lanes[x][:, :, 0].max(axis=0)) for x in "FB")
        under_first = np.where(self.rules["param"][rows], np.maximum(0.0, gather - first), 0.0)
        return under_first + np.where(self.rules["grad"][rows], np.maximum(0.0, reduce - last), 0.0)

    def _tail(self, rows, structure: memory.Structure) -> np.ndarray:
        """Seconds after the last backward that nothing hides: gradient norm and optimizer of the lightest rank, and reductions and
        gathers that the layout does not overlap."""
        dense, expert = self._held(rows, structure)
        reduce, gather = self._exposed(rows, dense, expert)
        # Weights are gathered while the host is busy between two steps: the longer of the two counts.
        return reduce + self._kernels("optimizer", self._optimizer_bytes(rows, dense, expert).min(axis=1)) + np.maximum(gather, self.parts.stack.end_of_step_s)

    def _held(self, rows, structure: memory.Structure) -> tuple[np.ndarray, np.ndarray]:
        """(dense, expert) parameters [rows, pipeline ranks]."""
        held = structure.rank_contents().T
        return self.table["dense"][rows] @ held, self.table["expert"][rows] @ held

    def _optimizer_bytes(self, rows, dense, expert) -> np.ndarray:
        """[rows, pipeline ranks] that gradient norm and optimizer move."""
        v, zero = self.value, self.value["zero"][rows][:, None]
        shard = np.where(zero == 0, dense + expert, dense / self.dense_shards[rows][:, None] + expert / self.expert_shards[rows][:, None])
        grads = np.array([GRAD_BYTES[g] for g in v["grad"][rows]])
        traffic = np.array([OPTIMIZER_BYTES[o] for o in v["optimizer"][rows]]) + 2 * grads
        return traffic[:, None] * shard

    def _exposed(self, rows, dense, expert) -> tuple[np.ndarray, np.ndarray]:
        """Seconds of (reductions, gathers) that no other work of the step can hide."""
        zero = self.value["zero"][rows]
        if self.rules["grad"][rows].all() and self.rules["param"][rows].all():
            return np.zeros(len(rows)), np.zeros(len(rows))
        after = ~self.sharded[rows] & (zero != 2) & ~self.rules["grad"][rows]
        gathers = ~self.sharded[rows] & (zero > 0) & ~self.rules["param"][rows]
        least_dense, least_expert = dense.min(axis=1), expert.min(axis=1)
        kind = "reduce_scatter"
        reduce = np.where(after, self._collectives(kind, rows, least_dense, least_expert), 0.0)
        gather = np.where(gathers, self._collectives("all_gather", rows, least_dense, least_expert), 0.0)
        factor = self.parts.site.factor("end_of_step")
        return reduce * factor, gather * factor


def structure_of(model, layout, num_mb: int, items: tuple[str, ...]) -> memory.Structure:
    """Stage contents and microbatches in flight of one layout."""
    stages = pipeline.stage_contents(model, stage_layers(layout, model.num_layers))
    contents = np.array([[dict(stage).get(item, 0) for item in items] for stage in stages], dtype=float)
    schedule = SCHEDULES[layout.schedule]
    # Pairs of "ov:ep" merge a backward with the forward after it: as many microbatches are in flight as without (memory.peak).
    return memory.Structure(contents, schedule.placement(layout.pp, layout.vpp), schedule.live_vectors(layout.pp, num_mb, layout.vpp))


def item_names(model) -> tuple[str, ...]:
    """Every item that ``pipeline.stage_contents`` can name for this model."""
    whole = pipeline.stage_contents(model, (model.num_layers,))
    names = tuple(dict.fromkeys(name for name, _ in whole[0]))
    return (*names, "tied_head") if model.tie_embeddings else names


def _numbers(part: Part, seconds: tuple[str, ...]) -> dict[str, float]:
    out = {"dense": part.dense_params, "expert": part.expert_params, "saved": part.saved, "logits": part.saved if part.key.name in HEADS else 0.0,
           "transient": part.transient, "buffer": part.buffer}
    for what in seconds:
        out |= {f"{what}_{letter}": getattr(part, what)[letter] for letter in LETTERS}
    return out


__all__ = ["PartKey", "Screen", "Screened", "item_names", "structure_of"]
