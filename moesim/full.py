"""What does the step look like with every rank played? (The oracle of the representative rank, for small worlds.)

By default one rank a pipeline stage stands for its peers and the busiest rank's load is averaged over layers and microbatches.
Here each rank has its own tasks: its experts' rows in each layer and microbatch (``routing.rank_loads``), and a rendezvous for
every collective over the ranks of its real group, so that all wait for the slowest. Microbatches of different expert-parallel
groups are different draws. A dispatch or combine takes as long as for the busiest receiver, because a group takes the longest
of its members' seconds.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import cached_property

import numpy as np

from moesim import memory
from moesim.assembly import Build
from moesim.axes import pipeline
from moesim.evaluate import Evaluator
from moesim.layout import Layout, num_microbatches
from moesim.ops import Group
from moesim.part import Part, comm_groups, make_runs
from moesim.parts import HEADS, layer_parts
from moesim.program import COMM, Body, Program, Task
from moesim.routing import rank_loads
from moesim.schedules import Pair, flatten

MAX_RANKS = 64
RESOLUTION = 1e-3
"""Loads are rounded to this share of the mean, so that ranks with the same rows share a part's price."""


def full_program(evaluator: Evaluator, layout: Layout, *, seed: int = 0) -> Program:
    """The step of ``layout`` with all its ranks, rank r*peers + j being peer j of pipeline rank r. ``seed`` is added to the
    routing's own. ValueError above MAX_RANKS ranks."""
    players, peers = _players(evaluator, layout, seed), layout.world // layout.pp
    players[0].cast.price()
    bodies: list[Body] = []
    index = []
    for player in players:
        index.append(tuple(k + len(bodies) for k in player.index_of(player.rank // peers)))
        bodies += player.bodies
    first = players[0]
    return Program(
        orders=tuple(order for order in first.orders for _ in range(peers)), placement=tuple(r * peers for r in first.placement), body_index=tuple(index),
        bodies=tuple(bodies), epilogue=tuple(p.epilogue() for p in players), peers=peers, **first.surroundings(bodies),
        **first.sharing(layout.world),
    )


def full_peaks(evaluator: Evaluator, layout: Layout, *, seed: int = 0) -> np.ndarray:
    """Bytes of each rank at its own worst moment, [world]: what each microbatch in flight keeps is that rank's rows of that
    microbatch, summed over its layers. ValueError above MAX_RANKS ranks."""
    shared, slack = evaluator.categories(layout), evaluator.scenario.memory.allocator_slack
    peers, persistent = layout.world // layout.pp, memory.persistent_buffers(layout)
    out = np.zeros(layout.world)
    for player in _players(evaluator, layout, seed):
        here = {name: float(values[0, player.rank // peers]) for name, values in shared.items()}
        working, buffers = player.largest()
        moving = player.most_kept() + here["gathered weights"] + working
        out[player.rank] = here["weights"] + here["gradients"] + here["optimizer"] + persistent * buffers + moving * (1.0 + slack)
    return out


def _players(evaluator: Evaluator, layout: Layout, seed: int) -> list["_Player"]:
    if layout.world > MAX_RANKS:
        raise ValueError(f"layout {str(layout)!r}: every rank is played on at most {MAX_RANKS} GPUs, this layout has {layout.world}")
    cast = _Cast(evaluator, layout, seed)
    return [_Player(cast, rank) for rank in range(layout.world)]


class _Cast:
    """What the ranks share: loads, parts by load, and the numbers of their meetings."""

    def __init__(self, evaluator: Evaluator, layout: Layout, seed: int):
        self.maker, self.parts, self.layout = evaluator.assembler, evaluator.parts, layout
        self.num_mb = num_microbatches(layout, self.parts.workload)
        self.moe_units = [_moe_units(stage, self.parts.model) for stage in pipeline.contents(self.parts.model, layout)]
        self.loads = self._loads(seed) if self.parts.model.num_experts else None
        self.by_load: dict[int, Part] = {}
        self.runs: dict[tuple[int, str], tuple[Task, ...]] = {}
        self.meetings: dict[tuple, int] = {}

    def _loads(self, seed: int) -> np.ndarray:
        """Rows each expert-parallel rank keeps over the mean requested, [edp, num_mb, MoE layers of the model, ep]."""
        l, model, routing = self.layout, self.parts.model, self.parts.workload.routing
        routing = routing.model_copy(update={"seed": routing.seed + seed})
        num_moe, num_draws = sum(map(len, self.moe_units)), self.num_mb * l.edp
        drawn = rank_loads(routing, model.num_experts, model.top_k, self.parts.tokens(l), l.ep, num_moe, num_draws, l.etp)[:, :num_moe]
        return drawn[np.arange(num_draws) % len(drawn)].reshape(l.edp, self.num_mb, num_moe, l.ep)

    @cached_property
    def kept_by_rows(self) -> tuple[float, float]:
        """(fixed, slope): bytes a MoE part keeps are fixed + slope * load."""
        one, two = (part.saved for part in self.parts.at_load(self.layout, (1.0, 2.0)))
        return 2.0 * one - two, two - one

    @property
    def is_even(self) -> bool:
        return self.loads is None or bool(np.ptp(self.loads) == 0.0)

    def price(self) -> None:
        """Parts for all loads, in one pass."""
        levels = sorted(set(np.rint(self.loads / RESOLUTION).astype(int).ravel().tolist())) if self.loads is not None else []
        self.by_load = dict(zip(levels, self.parts.at_load(self.layout, [level * RESOLUTION for level in levels])))

    def tasks(self, load: float, letter: str) -> tuple[Task, ...]:
        key = (round(load / RESOLUTION), letter)
        if key not in self.runs:
            self.runs[key] = make_runs(self.by_load[key[0]], letter, self.maker.fuse)
        return self.runs[key]

    def number(self, group: Group, rank: int, place: tuple) -> int:
        """One number for the members of the group that holds ``rank``, at one place of their program."""
        instance = (rank // (group.size * group.stride), rank % group.stride)
        return self.meetings.setdefault((group, instance, place), len(self.meetings))


def _moe_units(stage, model) -> list[int]:
    """Positions, in forward order, of a stage's layers that hold routed experts."""
    names = [name for name, count in stage for _ in range(count)]
    return [i for i, name in enumerate(names) if "moe" in layer_parts(name, model)]


def _freeing_first(order):
    """The actions of an order, the backward of a pair before its forward, which takes its room."""
    for entry in order:
        yield from reversed(entry) if isinstance(entry, Pair) and entry.first.letter == "F" else flatten([entry])


class _Player(Build):
    """One rank's own bodies."""

    def __init__(self, cast: _Cast, rank: int):
        super().__init__(cast.maker, cast.layout)
        peer = rank % (cast.layout.world // cast.layout.pp)
        ep, etp = cast.layout.ep, cast.layout.etp
        self.cast, self.rank = cast, rank
        self.loads = None if cast.loads is None else cast.loads[peer // (ep * etp), :, :, peer // etp % ep]
        self.before = np.cumsum([0, *map(len, cast.moe_units)])
        self.slot, self.met = 0, Counter()

    def epilogue(self) -> Body:
        return self._fresh(0, lambda: self._epilogue(self.rank // (self.layout.world // self.layout.pp)))

    def load(self, stage: int, unit: int, microbatch: int) -> float:
        """Rows over the mean of the unit-th layer of a virtual stage."""
        return float(self.loads[microbatch, self.before[stage] + self.cast.moe_units[stage].index(unit)])

    def most_kept(self) -> float:
        """The largest sum of what the microbatches in flight keep."""
        peers = self.layout.world // self.layout.pp
        held = most = 0.0
        released = "W" if any(a.letter == "W" for a in flatten(self.orders[self.rank // peers])) else "B"
        for action in _freeing_first(self.orders[self.rank // peers]):
            if action.letter == "F":
                held += self._kept(action.stage, action.microbatch)
                most = max(most, held)
            elif action.letter in ("B", released):
                held -= self._kept(action.stage, action.microbatch)
        return most

    def largest(self) -> tuple[float, float]:
        """(bytes that live only inside one layer's backward, receive buffer) of this rank's worst layer and microbatch."""
        units = self.rank_units(self.rank // (self.layout.world // self.layout.pp))
        names = {name for unit in units for name in unit}
        found = {name: self.parts.get(name, self.layout) for name in names}
        if "moe" in names:
            (found["moe"],) = self.parts.at_load(self.layout, [float(self.loads.max())])
        beside = max(sum(found[p].saved for p in unit if p not in HEADS) for unit in units) if self.layout.overlaps("ep") else 0.0
        return beside + max(p.transient for p in found.values()), max(p.buffer for p in found.values())

    def _kept(self, stage: int, microbatch: int) -> float:
        """Bytes one microbatch keeps on one virtual stage: a MoE part keeps a fixed amount and one that follows its rows."""
        names = [p for item, count in self.contents[stage] for _ in range(count) for p in layer_parts(item, self.maker.model)]
        even = sum(self.parts.get(name, self.layout).saved for name in names if name != "moe")
        if not self.cast.moe_units[stage]:
            return even
        at = self.before[stage]
        rows = self.loads[microbatch, at:at + len(self.cast.moe_units[stage])].sum()
        fixed, slope = self.cast.kept_by_rows
        return even + fixed * len(self.cast.moe_units[stage]) + slope * rows

    def _variant(self, action, firsts, lasts) -> tuple:
        return (*super()._variant(action, firsts, lasts), action.stage, 0 if self.cast.is_even else action.microbatch)

    def _shared(self, key: tuple, make) -> Body:
        """Every rank's bodies are its own: they name the meetings of its own groups."""
        return make()

    def _body(self, key: tuple, slot: int) -> Body:
        return self._fresh(slot, lambda: super(_Player, self)._body(key, slot))

    def _fresh(self, slot: int, make) -> Body:
        """A body, whose collectives are counted from 0 again: peers make the same ones in the same order."""
        self.slot, self.met = slot, Counter()
        return make()

    def _tasks(self, name: str, key: tuple, unit: int) -> tuple[Task, ...]:
        part, letter = self.parts.get(name, self.layout), key[2]
        tasks = self.cast.tasks(self.load(key[5], unit, key[6]), letter) if name == "moe" else super()._tasks(name, key, unit)
        groups = iter(comm_groups(part, letter))
        return tuple(self._meet(task, next(groups)) if task.stream == COMM else task for task in tasks)

    def _collective(self, role, op, stream, deps=(), **kw) -> Task:
        task = super()._collective(role, op, stream, deps, **kw)
        return task if task.barrier >= 0 else self._meet(task, op.group)

    def _meet(self, task: Task, group: Group) -> Task:
        if group.size == 1:
            return task
        self.met[group] += 1
        return replace(task, group=self.cast.number(group, self.rank, (self.slot, self.met[group])))
