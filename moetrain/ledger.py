"""Are the collectives that a step issued the ones that the planner listed for its layout? (Both lists in one form, and the rules
that a difference must have.)

The planner counts one bf16 step in the steady state with routes spread evenly; compare with `train.dtype: bfloat16`, and with sizes that
the ranks divide (FSDP2 pads what they don't, and sends the padding). A line of either list is a Line: role, kind, bytes by moesim.ops' convention, size and stride of the group. Groups of one rank move nothing and are in
neither. What the trainer does otherwise than the plan, on purpose, is a rule: a function from what is planned to what is expected,
whose docstring says why. RULES holds them all, and a test holds the two lists equal over layouts, line by line.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

from moesim import step_ops
from moesim.layout import Layout, num_microbatches, stage_layers
from moesim.ops import Dispatch
from moesim.schedules import SCHEDULES
from moesim.spec import Scenario
from moetrain.collectives import Entry

FINER = ("tp_gather", "tp_scatter")
"""Roles that the trainer's log tells apart by what they feed (tp_gather_qkv), and the plan does not."""
COUNT_BYTES = 8
"""Routing counts are int64."""


class Line(NamedTuple):
    """A collective. ``stride``: ranks of the group lie so far apart."""

    role: str
    kind: str
    bytes: int
    size: int
    stride: int


@dataclass(frozen=True)
class Where:
    """Which step, and of which pipeline rank."""

    scenario: Scenario
    layout: Layout
    pp_rank: int = 0

    @property
    def num_microbatches(self) -> int:
        return num_microbatches(self.layout, self.scenario.workload)

    @property
    def tokens(self) -> int:
        """Tokens of one microbatch that a rank routes."""
        l = self.layout
        return l.mb * self.scenario.workload.seq_len // (l.cp * l.tp)

    @property
    def stages(self) -> list[int]:
        """Virtual stages of this pipeline rank."""
        l = self.layout
        if l.pp == 1:
            return [0]
        return [stage for stage, rank in enumerate(SCHEDULES[l.schedule].placement(l.pp, l.vpp)) if rank == self.pp_rank]

    @property
    def has_head(self) -> bool:
        return self.layout.num_virtual_stages - 1 in self.stages

    @property
    def moe_layers(self) -> int:
        counts, kinds = stage_layers(self.layout, self.scenario.model.num_layers), self.scenario.model.layer_kinds()
        held = (kinds[sum(counts[:stage]):sum(counts[:stage + 1])] for stage in self.stages)
        return sum(list(part).count("moe") for part in held)

    @property
    def moe_forwards(self) -> int:
        """Forwards of a MoE layer in a step, those of a full recompute included."""
        return self.moe_layers * self.num_microbatches * (2 if self.layout.recompute == ("full",) else 1)

    @property
    def stage_ranks(self) -> int:
        return self.layout.world // self.layout.pp


def issued(entries: Iterable[Entry]) -> Counter[Line]:
    """What a rank's log recorded, as lines."""
    return Counter(Line(_role(e.role), e.kind, e.bytes, e.group.size, e.group.stride) for e in entries)


def _role(role: str) -> str:
    return next((coarse for coarse in FINER if role.startswith(coarse + "_")), role)


def planned(where: Where) -> Counter[Line]:
    """What moesim lists for the pipeline rank, a dispatch or combine as the one all-to-all of its payload."""
    lines: Counter[Line] = Counter()
    for item, times in step_ops.collectives(where.scenario, where.layout)[where.pp_rank].items():
        group, kind = item.op.group, "all_to_all" if isinstance(item.op, Dispatch) else item.op.kind
        if group.size > 1:
            lines[Line(item.role, kind, round(item.op.bytes), group.size, group.stride)] += times
    return lines


def expected(where: Where) -> Counter[Line]:
    """What the trainer should issue: what is planned, under every rule."""
    lines = planned(where)
    for rule in RULES:
        lines = rule(where, lines)
    return +lines


def comparable(where: Where, lines: Counter[Line]) -> Counter[Line]:
    """``lines`` with the collectives of weights and gradients summed where the two lists need not cut them alike: each then counts once,
    with all its bytes. After its last backward, without ``ov:grad``, the plan reduces in one piece what the trainer reduces a layer at a
    time while backward runs, as FSDP2 does; and without ``ov:param`` it gathers so. A model that ties its embedding has embedding and
    head in one unit where one rank holds both."""
    loose = cut_otherwise(where)
    sums: Counter[Line] = Counter()
    for line, times in lines.items():
        if line.role in loose:
            sums[line._replace(bytes=0)] += times * line.bytes
    rest = Counter({line: times for line, times in lines.items() if line.role not in loose})
    return rest + Counter({line._replace(bytes=total): 1 for line, total in sums.items()})


def cut_otherwise(where: Where) -> set[str]:
    """Roles of which the two lists have the same bytes in other pieces."""
    l = where.layout
    tied, resharded = where.scenario.model.tie_embeddings and l.pp == 1, l.zero == 3 and l.reshard
    alike = {"grad_reduce": l.zero == 2 or resharded or l.overlaps("grad"), "param_gather": l.zero == 0 or resharded or l.overlaps("param")}
    return {role for role, same in alike.items() if tied or not same}


# --- rules ------------------------------------------------------------------------------------------------------------------------


def padded_buffers(where: Where, lines: Counter[Line]) -> Counter[Line]:
    """`syncfree` sends buffers of fixed size, one a pair of ranks, whose rows the host need not know: as many as all routes of a rank
    where nothing may be dropped, so that ep times the payload travels; with a capacity factor that factor times it. Counts of rows, which
    are inside the plan's one-sided puts, follow in an exchange of their own."""
    l, model = where.layout, where.scenario.model
    if l.dispatcher != "sync_free" or l.ep == 1:
        return lines
    routes, factor = where.tokens * model.top_k, where.scenario.workload.routing.capacity_factor
    places = routes if factor is None else min(routes, math.ceil(factor * routes / l.ep))
    group, out = l.groups["ep"], Counter()
    for line, times in lines.items():
        out[line._replace(bytes=l.ep * places * model.hidden_size * 2) if line.role in ("dispatch", "combine") else line] += times
    out[Line("count_exchange", "all_to_all", COUNT_BYTES * model.num_experts, group.size, group.stride)] += where.moe_forwards
    return out


def chunked_layers(where: Where, lines: Counter[Line]) -> Counter[Line]:
    """`train.moe.chunks` cuts each layer's tokens: every chunk has its exchange of counts, dispatch and combine."""
    tokens, chunks = where.tokens, where.scenario.train.moe.chunks
    per = -(-tokens // chunks)
    sizes = [min(per, tokens - start) for start in range(0, tokens, per)]
    return _cut(lines, {"dispatch": [s / tokens for s in sizes], "combine": [s / tokens for s in sizes], "count_exchange": [1.0] * len(sizes)})


def chunked_loss(where: Where, lines: Counter[Line]) -> Counter[Line]:
    """Logits exist for `train.network.loss_chunk` tokens at a time, and each chunk's sums are reduced by themselves."""
    tokens, per = where.tokens * where.layout.tp, where.scenario.train.network.loss_chunk
    return _cut(lines, {"tp_loss": [min(per, tokens - start) / tokens for start in range(0, tokens, per)]})


def _cut(lines: Counter[Line], shares: dict[str, list[float]]) -> Counter[Line]:
    out: Counter[Line] = Counter()
    for line, times in lines.items():
        for share in shares.get(line.role, [1.0]):
            out[line._replace(bytes=round(line.bytes * share))] += times
    return out


def head_gathers_once(where: Where, lines: Counter[Line]) -> Counter[Line]:
    """The loss takes its gradients in forward, chunk by chunk, so the head's gathered input is not needed again, as the plan has it."""
    l = where.layout
    if l.tp == 1 or not where.has_head:
        return lines
    return lines - Counter({_head_gather(where): where.num_microbatches})


def _head_gather(where: Where) -> Line:
    tp = where.layout.tp
    return Line("tp_gather", "all_gather", 2 * where.tokens * tp * where.scenario.model.hidden_size, tp, 1)


def full_recompute_keeps_gathers(where: Where, lines: Counter[Line]) -> Counter[Line]:
    """A layer that runs again keeps the tokens that it gathers until its backward is done with them: two gathers where the plan has three, as
    in frameworks whose products keep the cut tokens and gather by themselves. (After `head_gathers_once`.)"""
    if where.layout.recompute != ("full",):
        return lines
    out, at_head = Counter(lines), where.num_microbatches if where.has_head else 0
    for line, times in lines.items():
        if line.role == "tp_gather" and line.kind == "all_gather":
            once = at_head if line.bytes == _head_gather(where).bytes else 0
            out[line] = once + (times - once) * 2 // 3
    return out


def balance_counts(where: Where, lines: Counter[Line]) -> Counter[Line]:
    """A balance loss of scope global needs the routes that all ranks of the stage counted, in every MoE layer's forward. A plan counts
    that for software that does so by default, whatever the run says; scopes micro and sequence need no collective."""
    moe = where.scenario.train.moe
    lines = Counter({line: times for line, times in lines.items() if line.role != "balance_counts"})
    if moe.aux_loss and moe.aux_scope == "global":
        lines = lines + _of_stage(where, "balance_counts", 4 * where.scenario.model.num_experts, where.moe_forwards)
    return lines


def reports(where: Where, lines: Counter[Line]) -> Counter[Line]:
    """How many rows the busiest rank received is reported each step; nothing waits for it, and it is no part of a plan."""
    return lines + _of_stage(where, "report", 8 * where.moe_layers, 1 if where.moe_layers else 0)


def _of_stage(where: Where, role: str, size: int, times: int) -> Counter[Line]:
    return Counter({Line(role, "all_reduce", size, where.stage_ranks, 1): times} if times and where.stage_ranks > 1 else {})


RULES: tuple[Callable[[Where, Counter[Line]], Counter[Line]], ...] = (
    padded_buffers, chunked_layers, chunked_loss, head_gathers_once, full_recompute_keeps_gathers, balance_counts, reports)


def differences(where: Where, entries: Iterable[Entry]) -> list[str]:
    """One sentence for each line that the step issued more or less often than expected; empty where the lists are equal."""
    found, wanted = comparable(where, issued(entries)), comparable(where, expected(where))
    return [f"{line.kind} for {line.role} of {line.bytes:,} bytes over {line.size} ranks, {line.stride} apart: {found[line]} issued, {wanted[line]} expected"
            for line in sorted({*found, *wanted}) if found[line] != wanted[line]]
