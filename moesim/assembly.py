"""What program does one layout run? (Priced parts -> bodies, order, transfers and the end of the step.)

ZeRO decides which gathers and reductions exist, and where they stand:

| zero | reshard | weights resident | gradients resident | each microbatch | each step |
|---|---|---|---|---|---|
| 0 | - | all | all | - | all-reduce gradients |
| 1 | - | all | all | - | reduce-scatter gradients, all-gather weights |
| 2 | - | all | shard | reduce-scatter gradients | all-gather weights |
| 3 | no | all | all | - | all-gather weights, reduce-scatter gradients |
| 3 | yes | shard | shard | all-gather weights (forward and backward), reduce-scatter gradients | - |

With ``ov:grad`` the step's reductions run under the last microbatch's backward, layer by layer; else after it. With ``ov:param``
the step's gathers run under the next step's first forward, layer by layer; else after the optimizer. ``ov:fsdpN`` issues the
gather of layer i + N before the work of layer i; a gather waits until the weights of the layer N + 2 before are released.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from moesim.axes import pipeline
from moesim.layout import Layout, num_microbatches
from moesim.ops import Collective, Group, MemoryBound
from moesim.parts import Parts, layer_parts
from moesim.program import COMM, COMPUTE, DATA, REDUCE, Body, CoRun, Program, Task, Transfer, interleave
from moesim.schedules import SCHEDULES, Action, Pair, flatten

MAX_BODIES = 4096
LAUNCH_QUEUE = 1024
"""Kernels a host may have in flight before a launch blocks (the depth of the CUDA launch queue, as commonly observed:
https://forums.developer.nvidia.com/t/how-many-kernels-can-be-queued/64126). Assumed; matters only where the host is far ahead."""
END_OF_STEP = ("grad_reduce", "tp_grad_reduce", "param_gather", "grad_norm", "router_stats", "loss_reduce")
"""Collectives of the end of the step (where weights are not resharded), which a site's own factor scales."""
GRAD_BYTES = {"fp32": 4.0, "bf16": 2.0}
REDUCED_GRAD_BYTES = 4.0
"""A gradient once it is reduced lies beside the FP32 master, whatever it travelled in."""
LOSS_BYTES = 32.0
"""The step's loss in two parts and which of two signals a rank was sent, FP64."""
OPTIMIZER_BYTES = {"fp32": 26.0, "bf16": 18.0, "fp8": 14.0}
"""AdamW traffic a parameter beside the gradient: master read and written (8), two moments read and written (16 in FP32, 8 in
BF16, 4 in FP8), bf16 weight written (2)."""


@lru_cache(maxsize=2048)
def orders_of(schedule: str, pp: int, num_mb: int, vpp: int, paired: bool):
    """(orders, placement) of a layout; ``paired`` merges each backward with the forward that follows it."""
    entry = SCHEDULES[schedule]
    orders = entry.orders(pp, num_mb, vpp)
    if paired:
        orders = tuple(tuple(_pair(order)) for order in orders)
    return orders, entry.placement(pp, vpp)


def _pair(order):
    """Backward followed by the forward of another microbatch becomes one overlapped entry; warm-up and cool-down stay alone."""
    out, i = [], 0
    while i < len(order):
        here, after = order[i], order[i + 1] if i + 1 < len(order) else None
        if _mergeable(here, after):
            out.append(Pair(after, here))
            i += 2
        else:
            out.append(here)
            i += 1
    return out


def _mergeable(here, after) -> bool:
    single = isinstance(here, Action) and isinstance(after, Action)
    return single and here.letter in "BI" and after.letter == "F" and (here.stage, here.microbatch) != (after.stage, after.microbatch)


class Assembler:
    """Programs of layouts that share one ``Parts`` cache."""

    def __init__(self, parts: Parts, fuse: bool = True):
        self.parts, self.fuse, self.model = parts, fuse, parts.model
        self.gammas = co_runs(parts.profile.gammas)
        self.num_sms = parts.profile.num_sms
        self.bodies: dict[tuple, Body] = {}

    def program(self, layout: Layout) -> Program:
        """The step of ``layout``; the layout must be legal for the scenario."""
        return Build(self, layout).program()


def co_runs(gammas) -> tuple[CoRun, ...]:
    """Measured slowdowns; grouped GEMMs, which nobody measured apart, take those of GEMMs on either side."""
    found = {(g.running, g.beside): g.gamma for g in gammas}
    for running, beside in list(found):
        for pair in ((_grouped(running), beside), (running, _grouped(beside)), (_grouped(running), _grouped(beside))):
            found.setdefault(pair, found[running, beside])
    return tuple(CoRun(running, beside, gamma) for (running, beside), gamma in found.items())


def _grouped(kind: str) -> str:
    return "grouped_gemm" if kind == "gemm" else kind


class Build:
    """One layout's bodies, made once for each distinct (stage content, letter, variant)."""

    def __init__(self, maker: Assembler, layout: Layout):
        self.maker, self.parts, self.layout = maker, maker.parts, layout
        self.contents = pipeline.contents(maker.model, layout)
        self.num_mb = num_microbatches(layout, maker.parts.workload)
        self.orders, self.placement = orders_of(layout.schedule, layout.pp, self.num_mb, layout.vpp, layout.overlaps("ep"))
        self.bodies: list[Body] = []
        self.known: dict[tuple, int] = {}
        self.marks = self._marks(any(a.letter == "W" for order in self.orders for a in flatten(order)))

    def program(self) -> Program:
        index = tuple(self.index_of(r) for r in range(self.layout.pp))
        return Program(
            orders=self.orders, placement=self.placement, body_index=index, bodies=tuple(self.bodies),
            epilogue=tuple(self._epilogue(r) for r in range(self.layout.pp)), **self.surroundings(self.bodies), **self.sharing(self.layout.pp),
        )

    def index_of(self, rank: int) -> tuple[int, ...]:
        """Index in ``bodies`` of each entry of one pipeline rank's order; makes the bodies that are not there yet."""
        return tuple(self._entry(e, *self.marks) for e in self.orders[rank])

    def surroundings(self, bodies: list[Body]) -> dict:
        """What a program of these bodies holds beside them: transfers between stages, host run-ahead, co-run factors, SMs."""
        size = self.layout.mb * self.parts.workload.seq_len / (self.layout.tp * self.layout.cp) * self.maker.model.hidden_size * 2.0
        hop = self._transfer(size)
        launches = max((sum(t.host_s for t in b) for b in bodies), default=0.0) / max(self.parts.launch_s, 1e-12)
        return {
            "transfer_forward": hop, "transfer_backward": hop, "run_ahead": 1 + max(1, round(LAUNCH_QUEUE / max(1.0, launches))),
            "gammas": self.maker.gammas, "num_sms": self.maker.num_sms,
        }

    def sharing(self, num_played: int) -> dict:
        """What the ranks of a node share, and where each of the ``num_played`` ranks sits."""
        node = self.parts.node
        return {"shared": node.shared, "seats": node.seats(num_played, self.layout.world // num_played)} if node else {}

    def _transfer(self, size: float) -> Transfer | None:
        if self.layout.pp == 1:
            return None
        op = Collective("send_recv", size, Group(2, self.layout.groups["pp"].stride))
        seconds, nvlink, nic, *_ = self.parts.price(op)
        return Transfer(seconds, self.parts.uses(op, seconds, nvlink, nic), op)

    def _marks(self, split: bool) -> tuple[set[Action], set[Action]]:
        """First forward and last gradient-completing action of every virtual stage."""
        firsts, lasts = {}, {}
        done = "W" if split else "B"
        for order in self.orders:
            for action in flatten(order):
                if action.letter == "F":
                    firsts.setdefault(action.stage, action)
                if action.letter in (done, "B"):
                    lasts[action.stage] = action
        return set(firsts.values()), set(lasts.values())

    def _entry(self, entry, firsts, lasts) -> int:
        if isinstance(entry, Pair):
            keys = tuple(self._variant(a, firsts, lasts) for a in entry)
            return self._remember(keys, lambda: interleave(*(self._body(k, j) for j, k in enumerate(keys))))
        key = self._variant(entry, firsts, lasts)
        return self._remember(key, lambda: self._body(key, 0))

    def _remember(self, key, make) -> int:
        if key not in self.known:
            self.known[key] = len(self.bodies)
            self.bodies.append(self._shared(key, make))
        return self.known[key]

    def _shared(self, key, make) -> Body:
        """Bodies are the same for every layout that agrees on what they hold, wherever its pipeline puts them."""
        l = self.layout
        sharding = (l.zero, l.reshard, l.dp, l.rep, l.prefetch) if _reads_shards(key) else ()
        wide = self.parts.key("moe", l)  # all that the cost of any part depends on, the layers that uneven rows are summed over included
        found = self.maker.bodies.get((key, wide, sharding))
        if found is None:
            if len(self.maker.bodies) >= MAX_BODIES:
                self.maker.bodies.clear()
            found = self.maker.bodies[key, wide, sharding] = make()
        return found

    def _variant(self, action: Action, firsts, lasts) -> tuple:
        last = len(self.contents) - 1
        place = (action.stage == 0, action.stage == last)
        return (self.contents[action.stage], place, action.letter, self._gathers(action, firsts), self._reduces(action, lasts))

    def _gathers(self, action: Action, firsts) -> bool:
        l = self.layout
        if self.sharded:
            return action.letter in "FBI"
        return l.zero >= 1 and l.overlaps("param") and action in firsts

    def _reduces(self, action: Action, lasts) -> str:
        """Which reductions follow the action: "" none, "shards" those to the shards, "all" those over replicas too (once a step)."""
        l = self.layout
        if action in lasts and (l.zero == 2 or self.sharded or l.overlaps("grad")):
            return "all"
        return "shards" if (l.zero == 2 or self.sharded) and action.letter in "BW" else ""

    def _body(self, key: tuple, slot: int) -> Body:
        content, (first, last), letter, gathers, reduces, *_ = key
        units = [layer_parts(name, self.maker.model) for name, count in content for _ in range(count)]
        if letter != "F":
            units = [tuple(reversed(u)) for u in reversed(units)]
        tape = Tape()
        ahead = self._prefetch(len(units))
        made: list[tuple[int, ...]] = []
        released: list[int] = []
        reductions: list[tuple[int, ...]] = []
        waiting: list[tuple[str, ...]] = []
        for i, unit in enumerate(units):
            while gathers and len(made) <= min(i + ahead, len(units) - 1):
                bucket = self._bucket(units[len(made):], first)
                made += [self._gather(tape, _merged(bucket)[0], released, len(made))] * len(bucket)
            tape.wait(made[i] if gathers else ())
            if gathers and self.sharded:
                self._copy(tape, "param_copy_out", self.parts.stack.fsdp_copy_out_bytes, unit)
            for name in unit:
                tape.part(self._tasks(name, key, i if letter == "F" else len(units) - 1 - i))
            released.append(tape.last)
            waiting.append(unit)
            if reduces and (i == len(units) - 1 or len(self._bucket([*waiting, unit], first)) == len(waiting)):
                reductions.append(self._reduce(tape, _merged(waiting)[0], reductions, replicas=reduces == "all"))
                waiting = []
        if tape.last < 0:
            # A stage without layers passes on what it gets.
            tape.add(Task("pass", "memory_bound", COMPUTE, 0.0))
        return tape.body(needs=not (letter == "F" and first) and letter != "W", slot=slot,
                         gives=letter != "W" and not (letter == "F" and last) and not (letter != "F" and first))

    def _tasks(self, name: str, key: tuple, unit: int) -> tuple[Task, ...]:
        """Runs of one part in the body of ``key``; ``unit`` counts the body's layers in forward order."""
        return self.parts.runs(self.parts.get(name, self.layout), key[2], self.maker.fuse)

    def _bucket(self, units: list[tuple[str, ...]], first: bool) -> list[tuple[str, ...]]:
        """The units at the head of ``units`` whose weights and gradients travel as one: as many as fill a bucket of this software; a
        whole chunk behind the first stage, where the rest of the pipeline hides it."""
        stack = self.parts.stack
        if self.sharded or not stack.bucket_params:
            return units[:1]
        full = max(stack.bucket_params, stack.bucket_params_per_rank * self.layout.groups["shard"].size) if first else float("inf")
        dense = expert = 0.0
        for count, unit in enumerate(units, start=1):
            more = self.unit_params(unit)
            dense, expert = dense + more[0], expert + more[1]
            if max(dense, expert) >= full:
                return units[:count]
        return units

    def _prefetch(self, num_units: int) -> int:
        return self.layout.prefetch if self.sharded else num_units

    def unit_params(self, unit: tuple[str, ...]) -> tuple[float, float]:
        found = [self.parts.get(name, self.layout) for name in unit]
        return sum(p.dense_params for p in found), sum(p.expert_params for p in found)

    def _gather(self, tape: "Tape", unit, released, position) -> tuple[int, ...]:
        window = self.layout.prefetch + 2
        deps = (released[position - window],) if self.sharded and position >= window else ()
        ops = self.gather_ops(unit)
        if self.sharded and ops:
            tape.add(self._shard_kernel("param_gather", self.parts.stack.fsdp_cast_bytes, ops, 2.0, DATA, deps))
        return tuple(tape.add(self._collective("param_gather", op, DATA, deps)) for op in ops)

    def _shard_kernel(self, role: str, width: float, ops, whole_bytes: float, stream: int, deps=()) -> Task:
        """A kernel over this rank's shards of what ``ops`` make whole: casts before a gather, sums after a reduction."""
        shard = sum(op.bytes / whole_bytes / op.group.size for op in ops if op.kind != "all_reduce")
        return replace(self._kernel(role, width * shard, deps, kind="copy"), stream=stream)

    def gather_ops(self, unit) -> list[Collective]:
        """All-gathers that make one unit's bf16 weights whole."""
        dense, expert = self.unit_params(unit)
        groups = self.layout.groups
        return [Collective("all_gather", 2.0 * n, g) for n, g in ((dense, groups["shard"]), (expert, groups["expert"])) if n and g.size > 1]

    def reduce_ops(self, unit, replicas: bool = True) -> list[Collective]:
        """Reductions of one unit's gradients: scatter to shards, or all-reduce under ZeRO-0; HSDP adds the ``replicas``."""
        dense, expert = self.unit_params(unit)
        groups, width = self.layout.groups, GRAD_BYTES[self.layout.grad]
        kind = "all_reduce" if self.layout.zero == 0 else "reduce_scatter"
        found = [Collective(kind, width * n, g) for n, g in ((dense, groups["shard"]), (expert, groups["expert"])) if n and g.size > 1]
        if self.layout.rep > 1 and replicas:
            found.append(Collective("all_reduce", width * dense / groups["shard"].size, groups["replica"]))
        return found

    @property
    def sharded(self) -> bool:
        """Are weights gathered and gradients reduced in every microbatch, layer by layer?"""
        return self.layout.zero == 3 and self.layout.reshard

    def _copy(self, tape: "Tape", role: str, width: float, unit) -> None:
        """Copy between the parameters of one unit and the one buffer that its collective works on."""
        if self.gather_ops(unit) and width:
            # Of a microbatch's bookkeeping each unit's forward and backward has its part.
            share = 0.5 / max(1, sum(count for stage in self.contents for _, count in stage) // self.layout.pp)
            tape.part((self._kernel(role, width * sum(self.unit_params(unit)), kind="copy", times=share),))

    def _reduce(self, tape: "Tape", unit, before: list[tuple[int, ...]], replicas: bool) -> tuple[int, ...]:
        ops = self.reduce_ops(unit, replicas)
        if self.sharded and ops:
            flying = self.parts.stack.fsdp_reduces_in_flight
            tape.wait(before[-flying] if len(before) >= flying else ())
            self._copy(tape, "grad_copy_in", self.parts.stack.fsdp_copy_in_bytes, unit)
        made = tuple(tape.add(self._collective("grad_reduce", op, REDUCE, (tape.last,) if tape.last >= 0 else ())) for op in ops)
        if self.sharded and ops:
            tape.add(self._shard_kernel("grad_reduce", self.parts.stack.fsdp_accumulate_bytes, ops, GRAD_BYTES[self.layout.grad], REDUCE))
        return made

    def _collective(self, role: str, op: Collective, stream: int, deps=(), **kw) -> Task:
        seconds, nvlink, nic, sms, term, _ = self.parts.price(op)
        seconds = self.parts.profile.in_step_seconds(role, "X", seconds, is_spread=self.layout.ep > 1)
        if role in END_OF_STEP and not self.sharded:
            seconds, nvlink, nic = (x * self.parts.site.factor("end_of_step") for x in (seconds, nvlink, nic))
        waits = 0.0 if self.sharded else self.parts.meeting_s
        seconds += waits
        return Task(role, "collective", stream, seconds, self._issue_s(), deps=deps, uses=self.parts.uses(op, seconds, nvlink, nic, waits), sms=sms,
                    terms=((role, term, seconds),), ops=(op,), **kw)

    def _issue_s(self) -> float:
        return 0.0 if self.layout.graphs == "full" else self.parts.launch_s

    def _kernel(self, role: str, moved: float, deps=(), kind: str = "optimizer", times: float = 1.0, **kw) -> Task:
        op = MemoryBound(kind, moved)
        seconds, *_, term, _ = self.parts.price(op)
        seconds = self.parts.profile.in_step_seconds(role, "S", seconds, times)
        return Task(role, "memory_bound", COMPUTE, seconds, self._issue_s(), deps=deps, uses=self.parts.kernel_uses(op, seconds), terms=((role, term, seconds),), ops=(op,), **kw)

    def rank_units(self, rank: int) -> list[tuple[str, ...]]:
        """FSDP units of everything a pipeline rank holds, in reverse (gradients become ready from the last layer on)."""
        stages = [s for s, r in enumerate(self.placement) if r == rank]
        units = [layer_parts(name, self.maker.model) for s in stages for name, count in self.contents[s] for _ in range(count)]
        return units[::-1]

    def shard_params(self, rank: int) -> float:
        """Parameters whose optimizer state this rank keeps."""
        l, totals = self.layout, [self.unit_params(u) for u in self.rank_units(rank)]
        dense, expert = sum(t[0] for t in totals), sum(t[1] for t in totals)
        return dense + expert if l.zero == 0 else dense / l.groups["shard"].size + expert / max(1, l.edp)

    def _epilogue(self, rank: int) -> Body:
        l, tape, units = self.layout, Tape(), self.rank_units(rank)
        tape.add(Task("drain", "memory_bound", COMPUTE, 0.0))
        in_step = l.zero == 2 or self.sharded or l.overlaps("grad")
        buffered = self.parts.stack.fsdp_every_stage and not self.sharded
        whole = sum(sum(self.unit_params(unit)) for unit in units) if buffered else 0.0
        after = 0
        if whole:
            after = tape.add(self._kernel("grad_copy_in", self.parts.stack.fsdp_copy_in_bytes * whole * (self.num_mb if l.zero == 2 else 1), kind="copy"))
        buckets = units if self.parts.stack.fsdp_every_stage else _merged(units)
        for unit in [] if in_step else buckets:
            self._reduce_bucket(tape, unit, after)
        self._small(tape, rank)
        reduced = tape.add(Task("grads_reduced", "memory_bound", REDUCE, 0.0))
        shard = self.shard_params(rank)
        norm = tape.add(self._kernel("grad_norm", GRAD_BYTES[l.grad] * shard, (reduced,)))
        total = tape.add(self._collective("grad_norm", Collective("all_reduce", 8.0, l.groups["world"]), COMM, (norm,), barrier=0))
        traffic = OPTIMIZER_BYTES[l.optimizer] + GRAD_BYTES[l.grad]
        step = tape.add(replace(self._kernel("optimizer", traffic * shard, (total,)), blocks_host=True))
        if whole:
            tape.add(self._kernel("param_copy_out", (self.parts.stack.fsdp_cast_bytes + self.parts.stack.fsdp_copy_out_bytes) * whole, kind="copy",
                                  times=self.num_mb))
        if l.zero in (1, 2) or (l.zero == 3 and not l.reshard):
            for unit in [] if l.overlaps("param") else buckets:
                for op in self.gather_ops(unit):
                    tape.add(self._collective("param_gather", op, DATA, (step,)))
        tape.add(Task("between_steps", "memory_bound", COMPUTE, 0.0, host_s=self.parts.stack.end_of_step_s))
        return tuple(tape.tasks)

    def _reduce_bucket(self, tape: "Tape", units: tuple[str, ...], after: int) -> None:
        for op in self.reduce_ops(units):
            tape.add(self._collective("grad_reduce", op, REDUCE, (after,)))

    def _small(self, tape: "Tape", rank: int) -> None:
        """Collectives that carry few bytes and still cost their latency: gradients of what tensor-parallel ranks hold whole, the tied
        embedding's gradient between the first and last stage, expert counts of balancing losses and biases, the loss itself."""
        l, model = self.layout, self.maker.model
        shards = 1 if l.zero == 0 else l.groups["shard"].size
        items = [name for unit in self.rank_units(rank) for name in unit]
        if l.tp > 1 and (whole := sum(self.parts.get(name, l).replicated_params for name in items)):
            tape.add(self._collective("tp_grad_reduce", Collective("all_reduce", REDUCED_GRAD_BYTES * whole / shards, l.groups["tp"]), REDUCE, (0,)))
        ends = self.placement[0], self.placement[-1]
        if model.tie_embeddings and ends[0] != ends[1] and rank in ends:
            size = REDUCED_GRAD_BYTES * model.vocab_size * model.hidden_size / (l.tp * shards)
            tape.add(self._collective("grad_reduce", Collective("all_reduce", size, Group(2, l.groups["pp"].stride * (l.pp - 1))), REDUCE, (0,)))
        stage = Group(l.world // l.pp)
        if (layers := sum(name.startswith("moe") for name in items)) and stage.size > 1:
            # For each layer: routes asked for and kept of every expert, and two losses, FP64.
            size = 8.0 * (2 * model.num_experts + 2) * layers
            tape.add(self._collective("router_stats", Collective("all_reduce", size, stage), REDUCE, (0,)))
        if l.world > 1:
            tape.add(self._collective("loss_reduce", Collective("all_reduce", LOSS_BYTES, l.groups["world"]), REDUCE, (0,)))


def _reads_shards(key: tuple) -> bool:
    """Does a body (or a pair) gather weights or reduce gradients?"""
    variants = key if isinstance(key[0][0], tuple) and isinstance(key[0][0][0], tuple) else (key,)
    return any(v[3] or v[4] for v in variants)


def _merged(units: list[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """All of a rank's units as one bucket: nothing waits for a part of it once the step's compute has ended."""
    return [tuple(name for unit in units for name in unit)] if units else []


class Tape:
    """Tasks of one body in host order, with part-relative dependencies resolved."""

    def __init__(self) -> None:
        self.tasks: list[Task] = []
        self.last = -1
        self.pending: tuple[int, ...] = ()

    def add(self, task: Task) -> int:
        self.tasks.append(task)
        if task.stream == COMPUTE:
            self.last = len(self.tasks) - 1
        return len(self.tasks) - 1

    def wait(self, deps: tuple[int, ...]) -> None:
        """The next compute task waits for ``deps`` too."""
        self.pending += deps

    def part(self, runs: tuple[Task, ...]) -> None:
        if self.last < 0 and runs and runs[0].stream == COMM:
            # A body that begins with a collective: it waits for what its rank computed before, as any other.
            self.add(Task("start", "memory_bound", COMPUTE, 0.0))
        base, before = len(self.tasks), self.last
        for task in runs:
            deps = tuple(base + d if d >= 0 else before for d in task.deps if d >= 0 or before >= 0)
            if task.stream == COMPUTE and self.pending:
                deps, self.pending = tuple(dict.fromkeys(deps + self.pending)), ()
            self.add(task if deps == task.deps else task.with_deps(deps))

    def body(self, needs: bool, gives: bool, slot: int) -> Body:
        """The body, its first compute task waiting for the input and its last one giving the output."""
        first = next((i for i, t in enumerate(self.tasks) if t.stream == COMPUTE), -1)
        tasks = list(self.tasks)
        if first >= 0 and needs:
            tasks[first] = replace(tasks[first], input=slot)
        if first >= 0 and gives:
            tasks[self.last] = replace(tasks[self.last], output=slot)
        return tuple(tasks)


__all__ = ["Assembler", "Build", "interleave", "orders_of"]
