"""What does each part of a layer cost on one rank? (Blocks of a layout, built and priced once each, and cached.)

A part's cost depends on few of a layout's choices: its key. A search over a hundred thousand layouts meets a few hundred
distinct parts, so every part is built, priced (one vectorised call for all new ops) and fused once.
"""

from __future__ import annotations

import math
from collections import Counter
from copy import copy
from dataclasses import replace
from typing import Iterable, Sequence

import numpy as np

from moesim import axes, transformer
from moesim.axes import pipeline
from moesim.block import COMM, COMPUTE, Block, Node, backward, insert_after, recomputed
from moesim.coverage import GENERATIONS, KINDS, Coverage, features_of, load_coverage
from moesim.coverage import kind_of as coverage_kind
from moesim.ops import Collective, Dispatch, Gemm, Group, GroupedGemm, MemoryBound, Op
from moesim.part import Part, PartKey, Priced, make_runs, nodes_of, serial_path
from moesim.pricing import PROVENANCE
from moesim.program import CORES, Task
from moesim.routing import expert_load, rank_loads
from moesim.saved_tensors import saved_tensors
from moesim.schedules import SCHEDULES
from moesim.seats import cpu_node
from moesim.site import NEUTRAL, Site

LAYER_KINDS = ("dense", "moe")
ROUTED = ("permute", "etp_gather", "expert_up", "moe_act", "expert_down")
"""Nodes whose kept output has a row for each route received."""
CPUS = ("x86_64", "aarch64")
"""Architectures whose kernels keep what a CPU's do."""
HEADS = ("head", "tied_head", "mtp_head")
LOAD_MICROBATCHES = 8
"""Microbatches over which skewed routing is averaged: the mean of the maximum settles within a few of them."""
RUN_MICROBATCHES = 1000
"""Memory has to suffice for the worst of so many microbatches, more than are drawn: the expected largest of N values with a normal
tail lies sqrt(2 ln N) deviations above the mean (Cramer 1946, Mathematical Methods of Statistics, 28.6)."""
BF16_GRAD_ADD = 6.0
"""Bytes a parameter to add a bf16 gradient into a bf16 accumulator: read both, write one."""


class Parts:
    """Cache of priced parts for one model, cluster, workload, stack and profile."""

    def __init__(self, model, cluster, workload, stack, profile, site: Site = NEUTRAL, coverage: Coverage | None = None):
        self.model, self.cluster, self.workload, self.stack, self.profile, self.site = model, cluster, workload, stack, profile, site
        self.cache: dict[PartKey, Part] = {}
        self.prices: dict[Op, tuple] = {}
        self.tasks: dict[tuple[PartKey, str, bool], tuple[Task, ...]] = {}
        table, traits = coverage or load_coverage(), features_of(model, cluster, site.proxy_dispatcher)
        self.coverage = table.factors(stack.name, cluster.gpu.name, traits)
        self.is_fitted = table.has(stack.name, cluster.gpu.name)
        self.factor_errors = table.errors.root(KINDS, stack.name, GENERATIONS[cluster.gpu.name], traits) if self.is_fitted and table.errors else None
        self.site_factor = site.factor(site.model_constant(model))
        self.launch_s = profile.host.launch_s[cluster.gpu.host_cpu] * site.factor("host") * self.coverage.get("host", 1.0) * self.site_factor
        self.node = cpu_node(cluster)
        self.keeps = saved_tensors(stack.saved_tensors, "cpu" if cluster.gpu.arch in CPUS else "gpu")
        self.meeting_s = profile.meeting_s(self.node.ranks_per_core) if self.node else 0.0
        self.num_moe = max(1, model.layer_kinds().count("moe")) if model.num_experts else 1
        self.fewest: dict[tuple, int] = {}
        self.worst: dict[tuple, float] = {}

    def for_batch(self, workload) -> "Parts":
        """These parts for a workload that differs in its global batch only: none of their costs depends on it, the caches are shared."""
        other = copy(self)
        other.workload = workload
        return other

    def key(self, name: str, layout) -> PartKey:
        """Key of a part named as ``pipeline.stage_contents`` names layers ("attention@128", "moe", "head", ...)."""
        base, _, window = name.partition("@")
        moe = base == "moe"
        # Full recompute is of layers: between the vocabulary projection and its backward there is nothing to save memory for.
        recompute = () if base in HEADS else layout.recompute
        common = (base, int(window) if window else None, layout.tp, layout.cp, layout.mb, layout.precision, recompute, layout.graphs, layout.grad)
        if not moe:
            return PartKey(*common, ep=layout.ep if self.profile.knows_spread else 1)
        stage = layout.world // layout.pp if self.stack.counts_globally else 1
        return PartKey(*common, layout.ep, layout.etp, layout.dispatcher, layout.sms, layout.overlaps("shared"), stage, self.uneven_layers(layout))

    def ensure(self, wanted: Iterable[tuple[PartKey, object]]) -> None:
        """Build and price every (key, a layout that has it) not known yet, in one pass."""
        blocks, rooms, missing = {}, {}, {}
        for key, layout in wanted:
            if key in self.cache:
                continue
            missing[key], key = layout, key._replace(layers=0)
            if key not in self.cache and key not in blocks:
                blocks[key], rooms[key] = self._blocks(key, layout), self._room(key, layout)
        self.price_ops(self.kernel(n.op)[0] for pair in blocks.values() for block in pair for n in block)
        for key, (forward, adjoint) in blocks.items():
            self.cache[key] = self._part(key, forward, adjoint, *rooms[key])
        self.cache |= {key: self._uneven(key, layout) for key, layout in missing.items() if key.layers}

    def get(self, name: str, layout) -> Part:
        key = self.key(name, layout)
        if key not in self.cache:
            self.ensure([(key, layout)])
        return self.cache[key]

    def price_ops(self, ops: Iterable[Op]) -> None:
        new = [op for op in dict.fromkeys(ops) if op not in self.prices]
        if not new:
            return
        p = self.profile.price(new, self.cluster)
        names = [t.name for t in self.profile.terms]
        for i, op in enumerate(new):
            seconds, nic = self._at_site(op, float(p.seconds[i]), float(p.nic_s[i]))
            seconds, nvlink, nic = (self.site_factor * x for x in (seconds, float(p.nvlink_s[i]), nic))
            self.prices[op] = (seconds, nvlink, nic, int(p.sms[i]), names[p.term[i]], PROVENANCE[p.provenance[i]])

    def _at_site(self, op: Op, seconds: float, nic: float) -> tuple[float, float]:
        """(seconds, NIC seconds) with the site's factors: tensor cores, the leg that crosses NICs, a dispatcher's proxies."""
        if isinstance(op, (Gemm, GroupedGemm)):
            return seconds * self.site.factor("gemm"), nic
        slower = nic * (self.site.factor("nic") - 1.0)
        proxy = self.site.proxy_seconds(op.group.instances(self.cluster.domain)) if isinstance(op, Dispatch) else 0.0
        return max(seconds + slower + proxy, 0.05 * seconds), nic + slower

    def uses(self, op: Collective | Dispatch, seconds: float, nvlink: float, nic: float, waits_s: float = 0.0) -> tuple[tuple[str, float], ...]:
        """Shares of the links, and of the memory that feeds them, that a collective takes at its solo speed; on a CPU, of its cores, which
        the part of ``seconds`` that it ``waits_s`` for others leaves to them."""
        if seconds <= 0:
            return ()
        if self.node:
            works = seconds - waits_s
            return tuple((name, share * works / seconds) for name, share in self.node.collective(op, nvlink * self.cluster.tiers[0].bytes_per_s, works))
        capacity = {r.name: r.capacity for r in self.cluster.resources}
        # What crosses a link is read from one HBM and written to another: each rank does both.
        hbm = 2.0 * sum(busy * capacity.get(name, 0.0) for name, busy in (("nvlink", nvlink), ("nic", nic))) / capacity.get("hbm", np.inf)
        return tuple((name, min(1.0, busy / seconds)) for name, busy in (("nvlink", nvlink), ("nic", nic), ("hbm", hbm)) if busy > 0)

    def kernel_uses(self, op: Op, seconds: float) -> tuple[tuple[str, float], ...]:
        """What a memory-bound kernel of the end of the step takes."""
        return self.node.compute(op.bytes, seconds) if self.node else (("hbm", 1.0),)

    def price(self, op: Op) -> tuple:
        if op not in self.prices:
            self.price_ops([op])
        return self.prices[op]

    def work(self, layout) -> transformer.Work:
        """Microbatch of ``layout``: its size, recipe and the load of the busiest rank."""
        load = self.load(layout)
        kept = 1.0 - load.drop_fraction if load else 1.0
        # Loads are of the rows requested; a Work's factors are of those that are kept.
        return transformer.Work(
            layout.mb, self.workload.seq_len, layout.precision, self.stack.pointwise_fusion,
            permutes=self.stack.permutes(layout.dispatcher, layout.ep), saves_expert_output=self.stack.saves_expert_output, keeps=self.keeps,
            fuses_experts=self.stack.fuses_experts and layout.graphs == "full" and layout.precision == "mxfp8",
            load=load.max_over_mean_rank / kept if load else 1.0,
            max_expert=load.max_over_mean_expert / load.max_over_mean_rank if load else 1.0, kept=kept,
        )

    def load(self, layout):
        """Expert load of a layout (None for a dense model)."""
        if not self.model.num_experts:
            return None
        model = self.model
        return expert_load(self.workload.routing, model.num_experts, model.top_k, self.tokens(layout), layout.ep, self.num_moe, LOAD_MICROBATCHES, layout.etp)

    def _uneven(self, key: PartKey, layout) -> Part:
        """The part of ``key`` from the one that keeps mean rows: what backward needs follows the fullest rank's rows over its layers."""
        mean = self.cache[key._replace(layers=0)]
        question = (key.layers, self.tokens(layout), layout.ep, layout.etp)
        if question not in self.worst:
            self.worst[question] = self._worst_sum(key.layers, layout) / self.work(layout).kept
        return replace(mean, key=key, saved=mean.saved + mean.routed * (self.worst[question] - 1.0))

    def _worst_sum(self, layers: int, layout) -> float:
        """Rows that the fullest rank keeps, summed over so many layers, over the mean requested: the worst of a run, not only of the
        microbatches drawn. In-flight microbatches are taken to be as uneven as one: popular experts stay popular."""
        model, routing, places = self.model, self.workload.routing, -(-self.num_moe // layers)
        question = (routing, model.num_experts, model.top_k, self.tokens(layout), layout.ep, layers, LOAD_MICROBATCHES * places, layout.etp)
        load = expert_load(*question)
        if routing.kind == "histogram":
            return load.memory_factor
        sums = rank_loads(*question).mean(axis=1)
        reach = math.sqrt(2.0 * math.log(RUN_MICROBATCHES * places * layout.ep))
        most = layout.ep if routing.capacity_factor is None else load.buffer_rows / load.requested_rows
        return min(most, max(load.memory_factor, float(sums.mean() + reach * sums.std())))

    def uneven_layers(self, layout) -> int:
        """MoE layers of the pipeline rank that has fewest: fewer layers even out less. 0 where every rank gets the same rows."""
        if self.workload.routing.kind == "balanced":
            return 0
        key = (layout.schedule, layout.pp, layout.vpp, layout.stages)
        if key not in self.fewest:
            held = [0] * layout.pp
            for stage, rank in zip(pipeline.contents(self.model, layout), SCHEDULES[layout.schedule].placement(layout.pp, layout.vpp)):
                held[rank] += sum(count for name, count in stage if "moe" in layer_parts(name, self.model))
            self.fewest[key] = min((count for count in held if count), default=self.num_moe)
        return self.fewest[key]

    def _room(self, key: PartKey, layout) -> tuple[float, float]:
        """(rows of a rank's worst layer and microbatch over the mean kept, rows a receive buffer has room for over the mean requested).
        What one layer holds for a while follows the former."""
        load = self.load(layout) if key.name == "moe" else None
        if load is None:
            return 1.0, 1.0
        if not self.uneven_layers(layout):
            return 1.0, load.buffer_rows / load.requested_rows
        room = self._worst_sum(1, layout)
        return room * load.requested_rows / load.kept_rows, room

    def tokens(self, layout) -> int:
        """Tokens one rank brings to a MoE layer in one microbatch."""
        return max(1, layout.mb * self.workload.seq_len // (layout.cp * layout.tp))

    def at_load(self, layout, loads: Sequence[float]) -> list[Part]:
        """The MoE part of a rank that keeps each of ``loads`` times the mean of the rows requested; not remembered."""
        key = self.key("moe", layout)
        mean = self.work(layout)
        # Loads are of requested rows; a Work's factors are of those that are kept.
        own = [replace(mean, load=load / mean.kept, memory_load=load / mean.kept) for load in loads]
        blocks = [self._blocks(key, layout, work) for work in own]
        self.price_ops(self.kernel(n.op)[0] for pair in blocks for block in pair for n in block)
        return [self._part(key, *pair, room=load) for pair, load in zip(blocks, loads)]

    def _blocks(self, key: PartKey, layout, work: transformer.Work | None = None) -> tuple[Block, Block]:
        forward = axes.shard(_BUILD[key.name](self.model, work or self.work(layout), key.window), layout, self.model)
        if key.name == "moe" and key.stage > 1:
            counts = Collective("all_reduce", 4.0 * self.model.num_experts, Group(key.stage))
            forward = insert_after(forward, "router", Node("balance_counts", "balance_counts", counts, ("router",), stream=COMM, gradient=False))
        forward = self._host(self._sent(_keys_kept(forward, key.cp) if self.stack.fsdp_every_stage else forward), key)
        # Full recompute is of layers, and no layer makes an embedding again.
        again = frozenset(key.recompute) - ({"full"} if key.name == "embedding" else frozenset())
        adjoint = backward(forward, again, self.stack.backward_launch_ratio)
        return forward, self._accumulate(_weights_before_dispatch(adjoint) if key.hidden_dispatch else adjoint, key)

    def _sent(self, block: Block) -> Block:
        """Rows as this software's dispatchers send them."""
        if self.stack.quantised_dispatch:
            return block
        return Block(tuple(n.but(op=replace(n.op, bytes_per_element=2.0)) if isinstance(n.op, Dispatch) else n for n in block))

    def _host(self, block: Block, key: PartKey) -> Block:
        """Kernel launches and device-to-host waits of this software."""
        launches = self._launches(key) * (self.stack.fp8_launch_ratio if key.precision != "bf16" else 1.0)
        marked: set[str] = set()
        if key.name == "moe":
            waits = self.stack.waits(key.dispatcher, key.ep) if key.graphs != "full" else 0
            order = ("count_exchange", "permute", "dispatch", "router") if key.ep > 1 else ("permute", "router")
            present = {n.key for n in block}
            marked = set([k for k in order if k in present][:waits])
        return Block(tuple(n.but(launches=launches / len(block), host_wait=n.key in marked) for n in block))

    def _launches(self, key: PartKey) -> float:
        """Launches of a part's forward that no graph holds."""
        s, base = self.stack, key.name
        free, free_moe = 1.0 - s.graph_coverage[key.graphs], 1.0 - s.graph_coverage_moe[key.graphs]
        tensor = s.launches_tp / 2 if key.tp > 1 else 0.0
        if base == "attention":
            mla = s.launches_mla if self.model.attention == "mla" else 0.0
            return free * (s.launches_attention + mla + tensor + (s.launches_cp if key.cp > 1 else 0.0))
        if base == "dense":
            return free * (s.launches_dense_ffn + tensor)
        if base == "moe":
            plain = s.launches_alltoall_extra if key.ep > 1 and key.dispatcher == "alltoall" else 0.0
            outside = plain + s.launches_per_local_expert * self.model.num_experts / key.ep
            return free_moe * (s.launches_moe + tensor) + (outside if key.graphs != "full" else 0.0)
        return s.launches_head if base in HEADS and key.graphs != "full" else 0.0

    def _accumulate(self, block: Block, key: PartKey) -> Block:
        """Weight gradients as this software adds them up: FP32 in the GEMM's epilogue (8 bytes a parameter), or a bf16 gradient
        written by the GEMM and added by a kernel of its own."""
        extra = self.stack.grad_accumulate_bytes if key.grad == "fp32" else BF16_GRAD_ADD
        if extra == 8.0:
            return block
        nodes: list[Node] = []
        for n in block:
            if n.phase != "W" or not isinstance(n.op, (Gemm, GroupedGemm)):
                nodes.append(n)
                continue
            op = n.op
            size = float(op.m * op.n) if isinstance(op, Gemm) else float(op.groups * op.n * op.k)
            # The GEMM itself is priced with an FP32 accumulating epilogue; its own kernel moves what is beyond that.
            nodes.append(n)
            if extra > 8.0:
                nodes.append(n.but(key=n.key + ".add", op=MemoryBound("elementwise", (extra - 8.0) * size, 0.0), deps=(n.key,)))
        return Block(tuple(nodes))

    def _part(self, key: PartKey, forward: Block, adjoint: Block, worst: float = 1.0, room: float = 1.0) -> Part:
        f, b = (self._priced(block, key.ep > 1) for block in (forward, adjoint))
        dense, expert = forward.params
        whole_over_tp = sum(n.params for n in forward if not n.expert and n.shard in ("seq", "inner", "none"))
        recompute = frozenset(key.recompute)
        saved = forward.saved_bytes(recompute)
        whole = forward.saved_bytes()
        if key.recompute == ("full",):
            # The layer's input is all that stays; it is the output of the part before, counted here once a layer.
            saved = next((n.saved for n in forward if n.key == "residual1"), 0.0)
        gradient = self._largest_gradient(key, forward)
        routed = sum(n.saved for n in forward if n.key in ROUTED and not recomputed(n, recompute)) if saved > 0 and recompute != {"full"} else 0.0
        unused = _weight_shapes(forward) if self.stack.weight_grad_placeholders else 0.0
        part = Part(key, f, b, dense, whole_over_tp, expert, saved, (whole - saved + gradient) * worst + unused, _buffer(forward) * room, {}, {}, {}, {}, routed, {})
        for letter in "FBIW":
            nodes = nodes_of(part, letter)
            part.compute[letter] = sum(p.seconds for p in nodes if p.node.stream == COMPUTE)
            part.comm[letter] = sum(p.seconds for p in nodes if p.node.stream == COMM)
            part.host[letter] = sum(p.host_s for p in nodes)
            part.cores[letter] = sum(p.seconds * dict(p.uses).get(CORES, 0.0) for p in nodes) if self.node else 0.0
            part.path[letter] = serial_path(nodes, key.hidden_dispatch)
        return part

    def _largest_gradient(self, key: PartKey, forward: Block) -> float:
        """Bytes that backward needs at once beside what forward kept: without more knowledge, the largest output's gradient."""
        if key.name in HEADS and self.keeps.loss.chunk:
            return self._mask_bytes(key) + transformer.loss_room(self.model, transformer.Work(key.mb, self.workload.seq_len, keeps=self.keeps), key.tp, key.cp)
        if self.stack.fsdp_every_stage:
            return _walked(forward) + self._mask_bytes(key)
        return max((n.saved for n in forward if n.key != "loss"), default=0.0)

    def _mask_bytes(self, key: PartKey) -> float:
        """Which keys each query of a rank sees, a byte a pair: under context parallelism its two chunks are no plain triangle."""
        return self.workload.seq_len**2 / key.cp if key.cp > 1 and self.stack.fsdp_every_stage else 0.0

    def _priced(self, block: Block, is_spread: bool) -> tuple[Priced, ...]:
        together = Counter((n.role, n.phase) for n in block)
        return tuple(self._price_node(n, 1.0 / together[n.role, n.phase], is_spread) for n in block)

    def _price_node(self, node: Node, share: float, is_spread: bool) -> Priced:
        """``share``: what part of its role's work in this block the node is, by count. ``is_spread``: experts lie on several ranks."""
        op, times = self.kernel(node.op)
        seconds, nvlink, nic, sms, term, provenance = self.prices[op]
        # No software is faster than the wire.
        seconds = max(seconds * self.coverage.get(coverage_kind(node.role, term), 1.0), nvlink, nic)
        seconds = self.profile.in_step_seconds(node.role, node.phase, seconds * times, share, is_spread)
        waits = self.meeting_s if node.stream == COMM and seconds > 0 else 0.0
        seconds += waits
        uses = self.uses(node.op, seconds / times, nvlink, nic, waits) if node.stream == COMM else self.node.compute(op.bytes * times, seconds) if self.node else ()
        return Priced(node, seconds, sms, term, provenance, node.launches * self.launch_s, uses, bool(self.node) and self.node.may_starve(uses))

    def kernel(self, op: Op) -> tuple[Op, int]:
        """What this software launches for an op, and how often: a stack without grouped kernels runs one GEMM an expert."""
        if not isinstance(op, GroupedGemm) or self.stack.grouped_gemm == "grouped":
            return op, 1
        rows = max(1, math.ceil(op.rows / op.groups))
        one = Gemm(op.k, op.n, rows, op.dtype, accumulate=True) if op.grad == "weight" else Gemm(rows, op.n, op.k, op.dtype)
        return one, op.groups

    def runs(self, part: Part, letter: str, fuse: bool = True) -> tuple[Task, ...]:
        """Tasks of one part for one letter; see ``Part``."""
        key = (part.key._replace(layers=0), letter, fuse)
        if key not in self.tasks:
            self.tasks[key] = make_runs(part, letter, fuse)
        return self.tasks[key]


def _window_attention(model, work, window):
    return transformer.attention(model, work, window)


_BUILD = {
    "embedding": lambda m, w, _: transformer.embedding(m, w),
    "attention": _window_attention,
    "dense": lambda m, w, _: transformer.dense(m, w),
    "moe": lambda m, w, _: transformer.moe(m, w),
    "mtp_projection": lambda m, w, _: transformer.mtp_projection(m, w),
    "head": lambda m, w, _: transformer.head(m, w),
    "tied_head": lambda m, w, _: transformer.head(m, w, own=True),
    "mtp_head": lambda m, w, _: transformer.head(m, w, own=False),
}


def layer_parts(name: str, model) -> tuple[str, ...]:
    """Parts of one item of ``pipeline.stage_contents``, in forward order."""
    base, _, window = name.partition("@")
    if base in LAYER_KINDS:
        return ("attention" + (f"@{window}" if window else ""), base)
    if base == "mtp":
        last = model.layer_kinds()[-1]
        return ("mtp_projection", "attention", last, "mtp_head")
    return (name,)


def _weight_shapes(block: Block) -> float:
    """Bytes of one bf16 tensor for each weight's shape; experts share one."""
    return sum(2.0 * n.op.n * n.op.k for n in block if n.params and isinstance(n.op, (Gemm, GroupedGemm)))


def _keys_kept(forward: Block, cp: int) -> Block:
    """Keys and values of the whole sequence are what attention's backward reads where context parallelism gathers them; this rank's own keys,
    half of its share of those, are then not kept apart."""
    return Block(tuple(n.but(saved=n.op.bytes * (1.0 - 0.5 / cp)) if n.key == "cp_gather" else n for n in forward))


def _walked(forward: Block) -> float:
    """Most bytes of gradients that a walk back through a part holds beyond the kept outputs it has let go: at each node the gradient of its
    output and of its input, and the residual stream's."""
    made = [(_output_bytes(n), n.saved) for n in forward if n.stream == COMPUTE and (n.saved or isinstance(n.op, (Gemm, GroupedGemm)))]
    most = gone = 0.0
    for i, (output, saved) in reversed(list(enumerate(made))):
        most = max(most, output + (made[i - 1][0] if i else 0.0) - gone)
        gone += saved
    return most


def _output_bytes(node: Node) -> float:
    """Bytes of a node's output in bf16, as far as its op or what is kept of it says."""
    op = node.op
    return 2.0 * (op.m if isinstance(op, Gemm) else op.rows) * op.n if isinstance(op, (Gemm, GroupedGemm)) else node.saved


def _buffer(block: Block) -> float:
    """Bytes of a dispatcher's receive buffer with room for the mean rows requested, beyond the activations that backward keeps."""
    return max((n.op.tokens * n.op.top_k * n.op.hidden * 2.0 for n in block if isinstance(n.op, Dispatch)), default=0.0)


def _weights_before_dispatch(adjoint: Block) -> Block:
    """Frameworks compute both gradients of a product in one call, so what stands beside the adjoint of a dispatch are the shared
    experts, not the weight gradients of the routed ones."""
    keys = {n.key for n in adjoint}
    weights = lambda deps: tuple(w for d in deps if (w := d.removesuffix(".I0") + ".W0") in keys)  # noqa: E731
    return Block(tuple(n.but(deps=n.deps + weights(n.deps)) if n.role == "dispatch" else n for n in adjoint))


