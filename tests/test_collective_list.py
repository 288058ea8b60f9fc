"""Does a training step issue exactly the collectives that the planner lists for its layout: kind, bytes, group and how often?"""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from moesim import step_ops
from moesim.layout import parse_layout
from moesim.load import parse_scenario
from moesim.ops import Group
from moetrain import train
from moetrain.collectives import Entry
from moetrain.distributed import Seat
from moetrain.ledger import RULES, Where, differences, expected, planned
from moetrain.prepare import prepare
from moetrain.testing import run_ranks

ROWS, SEQ_LEN = 16, 32
TEXT = f"""
name: lists
model: {{name: tiny, num_layers: 4, hidden_size: 32, vocab_size: 64, num_heads: 8, num_kv_heads: 4, head_dim: 8, intermediate_size: 48,
  num_experts: 8, top_k: 2, moe_intermediate_size: 24, num_shared_experts: 1, num_leading_dense_layers: 1, qk_norm: per_head,
  norm_placement: post, embedding_norm: true}}
cluster: cpu_gloo
stack: moetrain
workload: {{seq_len: {SEQ_LEN}, global_batch_tokens: {ROWS * SEQ_LEN}, routing: {{kind: balanced}}}}
train: {{dtype: bfloat16, device: cpu, steps: 10, moe: {{routing: balanced, aux_loss: 0, z_loss: 0}}, log: {{preflight: false}},
  checkpoint: {{resume: never}}, watchdog_s: 0}}
"""
TIED, CAPACITY = "model.tie_embeddings=true", "workload.routing.capacity_factor=1.0"
AUX = "train.moe.aux_loss=0.01"
MLA = ("model.attention=mla", "model.num_kv_heads=8", "model.head_dim=12", "model.q_lora_rank=16", "model.kv_lora_rank=16", "model.qk_nope_head_dim=8",
       "model.qk_rope_head_dim=4", "model.v_head_dim=8", "model.qk_norm=none")
BOTH = "ov:grad+param"
# (ranks, layout, changes of the scenario). Without both overlap rules weights and gradients are compared by their sums.
TABLE = [
    (1, "mb4", ()),
    (2, "dp2 mb4", ()),
    (2, f"dp2 ep2 mb4 {BOTH}", (AUX,)),
    (2, "dp2 zero0 mb4 ov:grad", ()),
    (2, "dp2 zero2 mb4 ov:param", ()),
    (2, "dp2 ep2 zero3 mb4 rc:full", (AUX,)),
    (2, f"dp2 ep2 syncfree mb4 {BOTH} rc:full", (CAPACITY,)),
    (2, f"tp2 mb8 {BOTH}", ("train.network.loss_chunk=100",)),
    (2, f"cp2 mb8 {BOTH} rc:full", MLA),
    (2, f"pp2 vpp2 zbv mb2 {BOTH}", (TIED,)),
    (4, "dp4 rep2 ep2 mb2 zero3", ()),
    (4, f"pp2 tp2 mb2 {BOTH}", (TIED,)),
    (8, f"dp2 cp2 tp2 ep4 mb4 {BOTH}", (AUX,)),
]
MORE = [
    (2, f"dp2 mb4 {BOTH}", ()),
    (2, f"dp2 mb4 {BOTH} grad:bf16", ()),
    (2, "dp2 zero3 mb4", ()),
    (2, "dp2 zero3 mb4", (TIED,)),
    (2, "dp2 zero3 mb4 ov:fsdp2", ()),
    (2, f"dp2 zero3 noreshard mb4 {BOTH}", ()),
    (2, f"dp2 ep2 syncfree mb4 {BOTH}", ()),
    (2, "dp2 ep2 mb4 ov:grad+param+shared", ("train.moe.chunks=2",)),
    (2, f"tp2 mb8 {BOTH}", MLA),
    (2, f"cp2 mb8 {BOTH}", ()),
    (2, f"pp2 mb2 {BOTH}", ()),
    (4, "dp4 zero0 mb2 ov:grad", ()),
    (4, f"tp4 mb8 {BOTH} rc:full", (AUX,)),
    (4, f"dp2 tp2 ep2 mb4 {BOTH}", ()),
    (4, "dp2 tp2 ep4 zero3 mb4 rc:norm+mlp+core_attn", ()),
    (4, f"dp2 cp2 ep4 mb4 {BOTH}", ()),
    (4, f"dp4 rep2 ep2 mb2 {BOTH}", ()),
    (4, "dp4 rep2 ep2 mb2 zero2 ov:param", ()),
    (4, f"pp2 dp2 ep2 mb2 zero3 noreshard {BOTH} rc:full", (TIED,)),
    (4, f"pp2 cp2 vpp2 interleaved mb2 {BOTH}", (AUX,)),
    (4, f"pp2 dp2 ep2 vpp2 dualpipev mb2 {BOTH}", ()),
    (8, f"pp2 dp2 tp2 ep4 vpp2 interleaved_zb mb2 {BOTH} rc:core_attn", ()),
    (8, "dp8 ep4 zero3 mb1 rc:full", ()),
    (4, f"dp2 tp2 mb4 {BOTH} rc:full", MLA),
]

KINDS = {"allreduce_": "all_reduce", "_allgather_base_": "all_gather", "_reduce_scatter_base_": "reduce_scatter", "alltoall_base_": "all_to_all", "send": "send_recv"}


class Heard(TorchDispatchMode):
    """Counts what reaches the process groups, whoever calls them."""

    def __init__(self):
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            self.counts[KINDS.get(func._opname, func._opname)] += 1
        return func(*args, **(kwargs or {}))


def second_step(rank: int, world: int, text: str, sets: tuple[str, ...], folder: str) -> tuple:
    """(pipeline rank, lines of the log, what reached the process groups) of one rank's second step: a first one gathers weights that later
    ones have."""
    scenario = parse_scenario(TEXT, [*sets, f"train.log.folder={folder}"])
    run = prepare(scenario, text, Seat(rank, world, torch.device("cpu")))
    train.one_step(run, [])
    run.job.mesh.log.recording = True
    with Heard() as heard:
        train.one_step(run, [])
    where = Where(scenario, run.job.layout, run.job.mesh["pp"].rank)
    return where.pp_rank, differences(where, run.job.mesh.log.entries), dict(heard.counts), dict(Counter(e.kind for e in run.job.mesh.log.entries))


@pytest.mark.parametrize(("world", "text", "sets"), [*TABLE, *(pytest.param(*case, marks=pytest.mark.full) for case in MORE)],
                         ids=lambda value: value if isinstance(value, str) else None)
def test_a_step_issues_what_the_planner_lists(world, text, sets, tmp_path):
    for pp_rank, wrong, heard, logged in run_ranks(second_step, world, text, sets, str(tmp_path)):
        assert not wrong, (pp_rank, wrong)
        # The log hears everything: what reached the process groups is what it holds, and receives; and, for the report, what stages tell
        # each other of their layers' loads as Python objects (their sizes, then they).
        heard.pop("recv_", None)
        assert heard.pop("allgather_", 0) == (2 if "pp2" in text else 0)
        assert heard == logged


def where_of(text: str, sets=()) -> Where:
    return Where(parse_scenario(TEXT, list(sets)), parse_layout(text))


def entries_of(lines: Counter) -> list[Entry]:
    return [Entry(line.kind, line.role, line.bytes, Group(line.size, line.stride), "step") for line in lines.elements()]


def test_one_collective_more_or_less_is_named():
    where = where_of(f"dp4 ep2 mb2 {BOTH}")
    lines = expected(where)
    assert not differences(where, entries_of(lines))
    for line in lines:
        for times in (-1, 1):
            changed = Counter(lines)
            changed[line] += times
            (said,) = differences(where, entries_of(+changed))
            assert f"{lines[line] + times} issued, {lines[line]} expected" in said and line.kind in said and f"{line.bytes:,}" in said
    wider = Counter({line._replace(stride=line.stride + 1) if line.role == "dispatch" else line: n for line, n in lines.items()})
    assert len(differences(where, entries_of(wider))) == 2


def test_every_rule_says_why_and_is_needed():
    """A rule that changes nothing in any layout of the tables would hide that the lists agree without it."""
    cases = [where_of(text, sets) for _, text, sets in [*TABLE, *MORE]]
    for rule in RULES:
        assert len(rule.__doc__) > 80
        assert any(rule(where, planned(where)) != planned(where) for where in cases), rule.__name__


def test_counts_do_not_depend_on_the_machine_or_its_size():
    scenario = parse_scenario(TEXT)
    layout = parse_layout(f"dp4 ep2 mb2 {BOTH}")
    found = step_ops.collectives(scenario, layout)
    for cluster in ("hgx_h100", "gb200_nvl72"):
        assert step_ops.collectives(parse_scenario(TEXT.replace("cpu_gloo", cluster)), layout) == found


def test_counts_of_a_pipeline_are_the_ones_of_its_schedule():
    """Sends from the schedule alone: one forward and one backward a microbatch over each of a loop's links, none inside a rank."""
    scenario = parse_scenario(TEXT)
    for text, sends in (("pp2 mb4", [4, 4]), ("pp4 mb4", [4, 8, 8, 4]), ("pp2 vpp2 interleaved mb4", [12, 12]), ("pp2 vpp2 zbv mb4", [8, 8])):
        found = step_ops.collectives(scenario, parse_layout(text))
        assert [sum(n for item, n in rank.items() if item.role == "pp_send") for rank in found] == sends, text
