"""Which of a plan's ops does a span of the trainer time? (The nodes that the simulator plays, by layer, role and phase.)

Spans and nodes have the same words, so there is no table between them: a span of role R in layer L and phase F, B or R (again) stands for
the nodes of that role in the parts of that layer; B for the input and the weight gradients. What a step does once (or a unit at a time,
for sharding) stands in tasks of the program that belong to no part.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from moesim.assembly import Assembler, Build
from moesim.block import COMM as COMM_NODE
from moesim.evaluate import Evaluator
from moesim.layout import Layout
from moesim.ops import Collective, Dispatch, Op
from moesim.part import Priced, kind_of, nodes_of
from moesim.parts import LAYER_KINDS, layer_parts
from moesim.program import COMPUTE, Body, Program, Task
from moesim.schedules import Action, Pair
from moesim.timeline import Span

PHASE = {"F": "F", "I": "B", "W": "B", "R": "R"}
ENTRY = re.compile(r"(\d+)([FBIW])(\d+)")

Key = tuple[int, str, str]
"""Layer (-1: none), role, phase."""


@dataclass(frozen=True)
class Slot:
    """What one task of a labelled program is: ``layer`` counts from the first of its virtual stage; -1 and "" outside the model."""

    role: str
    layer: int = -1
    phase: str = ""

    def __str__(self) -> str:
        return f"{self.role}|{self.phase}|{self.layer}"

    @staticmethod
    def of(name: str) -> "Slot":
        role, phase, layer = (*name.split("|"), "", "-1")[:3]
        return Slot(role, int(layer), phase)


class Planned:
    """The step of one layout, kernel by kernel."""

    def __init__(self, evaluator: Evaluator, layout: Layout):
        self.evaluator, self.layout, self.parts = evaluator, layout, evaluator.parts
        self.build = Build(Assembler(evaluator.parts, fuse=False), layout)

    @cached_property
    def items(self) -> tuple[tuple[str, ...], ...]:
        """Names of each virtual stage's layers and ends, in forward order."""
        return tuple(tuple(name for name, count in stage for _ in range(count)) for stage in self.build.contents)

    @cached_property
    def firsts(self) -> tuple[int, ...]:
        """Number of the first layer of each virtual stage."""
        sizes = [sum(_is_layer(name) for name in items) for items in self.items]
        return tuple(sum(sizes[:i]) for i in range(len(sizes)))

    def units(self, stage: int) -> list[tuple[int, tuple[str, ...]]]:
        """(layer within the stage or -1, names of its parts) of everything a virtual stage holds."""
        found, layer = [], 0
        for name in self.items[stage]:
            found.append((layer if _is_layer(name) else -1, layer_parts(name, self.evaluator.scenario.model)))
            layer += _is_layer(name)
        return found

    @cached_property
    def nodes(self) -> Mapping[Key, tuple[Priced, ...]]:
        """Nodes of one microbatch. A collective's are there by role and by the name that it has in its place ("tp_gather_qkv")."""
        found: dict[Key, list[Priced]] = defaultdict(list)
        for stage, first in enumerate(self.firsts):
            for layer, names in self.units(stage):
                for name in names:
                    part = self.parts.get(name, self.layout)
                    for priced in (*part.forward, *part.backward):
                        for word in _words(priced):
                            found[layer + first if layer >= 0 else -1, word, _phase(priced)].append(priced)
        return {key: tuple(nodes) for key, nodes in found.items()}

    def of(self, layer: int, role: str, phase: str) -> tuple[Priced, ...]:
        """Nodes that a span of these three stands for; none where the plan has no such work."""
        return self.nodes.get((layer, role, phase), ())

    def once(self, rank: int) -> Mapping[tuple[str, bool], Counter[Op]]:
        """(role, does it communicate) -> ops of a step, with how often, of one pipeline rank's tasks outside the parts."""
        found: dict[tuple[str, bool], Counter[Op]] = defaultdict(Counter)
        program = self.program
        for index, times in Counter(program.body_index[rank]).items():
            _count(found, program.bodies[index], times)
        for body in (*program.prologue[rank:rank + 1], *program.epilogue[rank:rank + 1]):
            _count(found, body, 1)
        return found

    def seconds(self, layer: int, roles: Sequence[str], phase: str) -> float:
        """Predicted seconds of one span in the model, on a stream of its own."""
        return sum(priced.seconds for role in roles for priced in self.of(layer, role, phase))

    def seconds_once(self, rank: int, roles: Sequence[str], communicates: bool) -> float:
        """Predicted seconds a step of what `once` lists for these roles."""
        bodies = [self.program.bodies[k] for k in self.program.body_index[rank]]
        tasks = (task for body in (*bodies, *self.program.prologue[rank:rank + 1], *self.program.epilogue[rank:rank + 1]) for task in body)
        return sum(task.seconds for task in tasks if task.name in roles and _communicates(task) == communicates)

    # --- the program, each task named after its slot ---

    @cached_property
    def program(self) -> Program:
        program = self.build.program()
        wanted: dict[int, Sequence[Action]] = {}
        for rank, order in enumerate(program.orders):
            for entry, index in zip(order, program.body_index[rank]):
                wanted.setdefault(index, tuple(entry) if isinstance(entry, Pair) else (entry,))
        return replace(program, bodies=tuple(self._labelled(body, wanted[i]) for i, body in enumerate(program.bodies)))

    def _labelled(self, body: Body, actions: Sequence[Action]) -> Body:
        queues = [list(self._expected(action))[::-1] for action in actions]
        return tuple(self._task(task, queues) for task in body)

    def _task(self, task: Task, queues: list[list[tuple[int, Priced]]]) -> Task:
        for queue in queues:
            if queue and task.ops == (queue[-1][1].node.op,) and task.name == queue[-1][1].node.role:
                layer, priced = queue.pop()
                return replace(task, name=str(Slot(priced.node.role, layer, _phase(priced))))
        return task

    def _expected(self, action: Action) -> Iterator[tuple[int, Priced]]:
        """(layer within the stage, node) in the order of the action's body."""
        units = self.units(action.stage)
        if action.letter != "F":
            units = [(layer, names[::-1]) for layer, names in units[::-1]]
        for layer, names in units:
            for name in names:
                yield from ((layer, priced) for priced in nodes_of(self.parts.get(name, self.layout), action.letter))

    def slot(self, span: Span) -> Slot:
        """Of a played span: the layer counted over the model."""
        slot = Slot.of(span.name)
        if slot.layer < 0:
            return slot
        letters = {letter: int(stage) for stage, letter, _ in ENTRY.findall(span.entry)}
        stage = letters.get("F") if slot.phase == "F" else next((letters[x] for x in "BIW" if x in letters), None)
        return replace(slot, layer=slot.layer + self.firsts[stage or 0])

    # --- what is known of an op's price ---

    def provenance(self, op: Op) -> str:
        return self.parts.price(self.parts.kernel(op)[0])[5]

    def sigma(self, op: Op) -> float:
        """Standard deviation of the logarithm of an op's price."""
        return float((self.evaluator.uncertainty.loading(self.parts.kernel(op)[0]) ** 2).sum() ** 0.5)


def kind_name(op: Op) -> str:
    """Kind of a kernel or collective as a word: memory-bound ones by their class, collectives by what they do."""
    return getattr(op, "kind", None) or kind_of(op)


def _is_layer(name: str) -> bool:
    return name.partition("@")[0] in LAYER_KINDS


def _phase(priced: Priced) -> str:
    """Gathered again for a weight gradient: the trainer does the forward's gather again."""
    return "R" if ".G." in priced.node.key else PHASE[priced.node.phase]


def _words(priced: Priced) -> set[str]:
    node = priced.node
    if node.stream != COMM_NODE:
        return {node.role}
    stem = node.key.split(".")[0]
    return {node.role, stem, re.sub("_(q|kv)$", "", stem)}  # two projections of one latent share a gather


def _count(found: dict[tuple[str, bool], Counter[Op]], body: Body, times: int) -> None:
    for task in body:
        if "|" not in task.name:
            for op in task.ops:
                found[task.name, _communicates(task)][op] += times


def _communicates(task: Task) -> bool:
    return task.stream != COMPUTE and any(isinstance(op, (Collective, Dispatch)) for op in task.ops)
