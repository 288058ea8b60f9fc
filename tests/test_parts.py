"""Is a part priced, ordered and fused as its software runs it? (Against a dumb scheduler, stack counts and conservation.)"""

import random
from dataclasses import replace

import numpy as np
import pytest

from moesim import engine, paths, transformer
from moesim.assembly import Assembler
from moesim.evaluate import Evaluator
from moesim.ops import BYTES_PER_ELEMENT
from moesim.parts import HEADS, Parts, layer_parts
from moesim.program import COMM as COMM_STREAM
from moesim.program import COMPUTE as COMPUTE_STREAM
from moesim.site import Site
from small_scenarios import MODELS, STACKS, random_spaces, scenario

LAYOUTS = {
    "moe": ("dp8", "dp8 ep8", "dp8 ep8 ov:shared", "dp8 ep8 dedup ov:shared fp8", "dp4 tp2 ep4 etp2", "dp2 cp2 tp2 ep8 syncfree ov:shared", "dp8 ep4 rc:norm+moe_act", "dp8 ep8 rc:full grad:bf16"),
    "mla": ("dp8 ep8 ov:shared", "dp2 cp2 tp2 ep4 mxfp8", "dp8 ep4 dedup rc:mla_up"),
    "window": ("dp8", "dp4 tp2 ep2", "dp4 cp2 ep8 graph:layer"),
    "dense": ("dp8", "dp2 tp4", "dp4 cp2 rc:full"),
    "tied": ("dp8", "dp4 tp2"),
}
CASES = [(model, text) for model, texts in LAYOUTS.items() for text in texts]


def parts_of(evaluator, layout):
    """Every distinct part of the model under a layout."""
    names = {part for stage in structure(evaluator, layout) for item, _ in stage for part in layer_parts(item, evaluator.scenario.model)}
    return {name: evaluator.parts.get(name, layout) for name in sorted(names)}


def structure(evaluator, layout):
    from moesim.axes import pipeline

    return pipeline.contents(evaluator.scenario.model, layout)


def nodes_of(part, letter):
    phases = {"F": "F", "B": "RIW", "I": "RI", "W": "W"}[letter]
    return part.forward if letter == "F" else [p for p in part.backward if p.node.phase in phases]


def longest_path(nodes, hidden: bool) -> float:
    """Dumb reference: every node lists who must have ended before it; the end of the last is the answer.

    A computation waits for the one before, for all collectives before that nobody let go, and for what it reads. A collective waits
    for the collective before and for all computed before, or, where a rule lets it go, for what it reads.
    """
    let_go = [hidden and p.node.role == "dispatch" for p in nodes]
    at = {p.node.key: i for i, p in enumerate(nodes)}
    ends = []
    for i, p in enumerate(nodes):
        reads = [at[d] for d in p.node.deps if d in at and at[d] < i]
        before = range(i)
        if p.node.stream == "compute":
            waits = {j for j in before if nodes[j].node.stream == "compute" or not let_go[j]} | set(reads)
        elif let_go[i] and reads:
            waits = {j for j in before if nodes[j].node.stream == "comm"} | set(reads)
        else:
            waits = set(before) - {j for j in before if nodes[j].node.stream == "comm"} | {j for j in before if nodes[j].node.stream == "comm"}
        ends.append(p.seconds + max((ends[j] for j in waits), default=0.0))
    return max(ends, default=0.0)


@pytest.mark.parametrize(("model", "text"), CASES)
def test_serial_path_is_the_dumb_schedule(model, text):
    evaluator = Evaluator(scenario(model))
    for name, part in parts_of(evaluator, evaluator.legal(text)).items():
        for letter in "FBIW":
            assert part.path[letter] == pytest.approx(longest_path(nodes_of(part, letter), part.key.hidden_dispatch), rel=1e-12, abs=1e-15), (name, letter)


@pytest.mark.parametrize(("model", "text"), CASES)
def test_path_lies_between_the_busier_stream_and_the_sum(model, text):
    evaluator = Evaluator(scenario(model))
    for name, part in parts_of(evaluator, evaluator.legal(text)).items():
        for letter in "FBIW":
            assert max(part.compute[letter], part.comm[letter]) <= part.path[letter] * (1 + 1e-12) <= (part.compute[letter] + part.comm[letter]) * (1 + 2e-12)
        for what in (part.compute, part.comm, part.host):
            assert what["B"] == pytest.approx(what["I"] + what["W"], rel=1e-12, abs=1e-15), name
        serial = not part.key.hidden_dispatch or name != "moe"
        if serial:
            assert part.path["F"] == pytest.approx(part.compute["F"] + part.comm["F"], rel=1e-12), name


@pytest.mark.parametrize("fuse", [True, False])
@pytest.mark.parametrize(("model", "text"), CASES)
def test_runs_hold_every_kernel_once(model, text, fuse):
    """Seconds, host time, terms and host waits of the tasks are those of the nodes."""
    evaluator = Evaluator(scenario(model))
    for name, part in parts_of(evaluator, evaluator.legal(text)).items():
        for letter in "FBIW":
            tasks, nodes = evaluator.parts.runs(part, letter, fuse), nodes_of(part, letter)
            for stream, which in ((COMPUTE_STREAM, "compute"), (COMM_STREAM, "comm")):
                assert sum(t.seconds for t in tasks if t.stream == stream) == pytest.approx(sum(p.seconds for p in nodes if p.node.stream == which), rel=1e-12, abs=1e-15)
            assert sum(t.host_s for t in tasks) == pytest.approx(sum(p.host_s for p in nodes), rel=1e-12, abs=1e-15)
            assert sum(s for t in tasks for _, _, s in t.terms) == pytest.approx(sum(p.seconds for p in nodes), rel=1e-12, abs=1e-15)
            assert sum(t.blocks_host for t in tasks) == sum(p.node.host_wait for p in nodes)
            assert all(d < i for i, t in enumerate(tasks) for d in t.deps)
            for t in tasks:
                assert sum(s for _, _, s in t.terms) == pytest.approx(t.seconds, rel=1e-12, abs=1e-15)
                assert max(t.host_s, t.seconds) <= t.lag_s * (1 + 1e-12) <= (t.host_s + t.seconds) * (1 + 2e-12)
                assert all(0 < share <= 1 for _, share in t.uses)
        if fuse and name == "moe":
            assert len(evaluator.parts.runs(part, "B", True)) < len(evaluator.parts.runs(part, "B", False))


def plain(program):
    """Without what contends."""
    strip = lambda bodies: tuple(tuple(replace(t, uses=(), sms=0) for t in body) for body in bodies)  # noqa: E731
    no_use = lambda transfer: transfer and replace(transfer, uses=())  # noqa: E731
    return replace(program, bodies=strip(program.bodies), epilogue=strip(program.epilogue), gammas=(), num_sms=0, transfer_forward=no_use(program.transfer_forward),
                   transfer_backward=no_use(program.transfer_backward))


def check_fused(evaluator, layout):
    """Pairs aside: how two bodies are interleaved follows from their runs, so single kernels would be another order."""
    layout = replace(layout, overlap=tuple(r for r in layout.overlap if r != "ep"))
    if layout.schedule == "dualpipev":
        return
    where = f"{evaluator.scenario.model.name} on {evaluator.stack.name}: {layout}"
    fused, single = (Assembler(evaluator.parts, fuse).program(layout) for fuse in (True, False))
    assert sum(map(len, fused.bodies)) <= sum(map(len, single.bodies))
    assert paths.step_seconds([fused])[0] == pytest.approx(paths.step_seconds([single])[0], rel=1e-9), where
    ends = [engine.run(plain(p), spans=False).makespan for p in (fused, single)]
    assert ends[0] == pytest.approx(ends[1], rel=1e-9), where
    assert ends[0] == pytest.approx(paths.step_seconds([fused])[0], rel=1e-9), where


def test_fused_runs_end_when_their_kernels_would():
    rng = random.Random(5)
    for _, (evaluator, space) in zip(range(8), random_spaces(rng, num_values=1)):
        check_fused(evaluator, space.layout(rng.randrange(len(space))))


@pytest.mark.full
def test_fused_runs_end_when_their_kernels_would_on_many_layouts():
    rng = random.Random(6)
    for _, (evaluator, space) in zip(range(100), random_spaces(rng, num_values=1)):
        check_fused(evaluator, space.layout(rng.randrange(len(space))))


# --- the host -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stack", STACKS)
@pytest.mark.parametrize("text", ["dp8", "dp8 ep8", "dp8 ep8 dedup fp8", "dp2 cp2 tp2 ep4 mxfp8 graph:layer", "dp8 ep2 graph:full"])
def test_launches_of_a_layer_are_the_stacks_counts(stack, text):
    """From the fields of the stack alone, written out once more."""
    evaluator = Evaluator(scenario("moe", stack=stack))
    layout, s, parts = evaluator.legal(text), evaluator.stack, evaluator.parts
    scale = (s.fp8_launch_ratio if layout.precision != "bf16" else 1.0) * parts.launch_s
    free, free_moe, outside = 1 - s.graph_coverage[layout.graphs], 1 - s.graph_coverage_moe[layout.graphs], layout.graphs != "full"
    tensor = s.launches_tp / 2 if layout.tp > 1 else 0
    experts = s.launches_per_local_expert * 16 / layout.ep + (s.launches_alltoall_extra if layout.ep > 1 and layout.dispatcher == "alltoall" else 0)
    expected = {"attention": free * (s.launches_attention + tensor + (s.launches_cp if layout.cp > 1 else 0)), "dense": free * (s.launches_dense_ffn + tensor),
                "moe": free_moe * (s.launches_moe + tensor) + outside * experts, "head": outside * s.launches_head}
    for name, launches in expected.items():
        part = parts.get(name, layout)
        assert part.host["F"] == pytest.approx(launches * scale, rel=1e-12), name
        if layout.tp == 1:
            # What adds a gradient up in a kernel of its own, and what is rebuilt, comes on top of the ratio.
            adjoint = sum(p.host_s for p in part.backward if not p.node.key.endswith(".add") and p.node.phase != "R")
            assert adjoint == pytest.approx(launches * scale * s.backward_launch_ratio, rel=1e-12), name


@pytest.mark.parametrize("stack", STACKS)
@pytest.mark.parametrize("text", ["dp8", "dp8 ep8", "dp8 ep8 dedup", "dp8 ep8 syncfree", "dp8 ep8 graph:full", "dp4 tp2 ep4"])
def test_host_waits_of_a_moe_layer_are_the_stacks(stack, text):
    evaluator = Evaluator(scenario("moe", stack=stack))
    layout = evaluator.legal(text)
    part = evaluator.parts.get("moe", layout)
    waits = 0 if layout.graphs == "full" else evaluator.stack.waits(layout.dispatcher, layout.ep)
    for letter, expected in (("F", waits), ("B", 0)):
        assert sum(t.blocks_host for t in evaluator.parts.runs(part, letter)) == expected
    assert not any(t.blocks_host for t in evaluator.parts.runs(evaluator.parts.get("attention", layout), "F"))


def test_a_host_wait_makes_launching_serial():
    """With very slow launches, a layer that waits for the host can't hide them behind device work."""
    layout = "dp8 ep8 dedup"
    steps = {}
    for waits in (0, 1):
        evaluator = Evaluator(scenario("moe"))
        stack = evaluator.stack.model_copy(update={"host_waits": {"alltoall": 1, "sync_free": 0, "dedup": waits}})
        evaluator = Evaluator(scenario("moe"), stack=stack, site=Site({"host": 3.0}))
        steps[waits] = paths.step_seconds([evaluator.program(evaluator.legal(layout))])[0]
    assert steps[1] > steps[0]


# --- rules and roles ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", ["moe", "mla"])
@pytest.mark.parametrize("text", ["dp8 ep8", "dp8 ep8 dedup", "dp8 ep8 syncfree mxfp8", "dp4 tp2 ep4", "dp8 ep2 mb2"])
def test_shared_overlap_hides_the_lesser_of_dispatch_and_shared_experts(model, text):
    evaluator = Evaluator(scenario(model))
    serial, hidden = (evaluator.parts.get("moe", evaluator.legal(text + rule)) for rule in ("", " ov:shared"))
    assert serial.compute == hidden.compute and serial.comm == hidden.comm
    for letter in "FB":
        nodes = nodes_of(serial, letter)
        dispatch = sum(p.seconds for p in nodes if p.node.role == "dispatch")
        shared = sum(p.seconds for p in nodes if p.node.stream == "compute" and (p.node.role.startswith("shared") or p.node.key.startswith("quant_shared")))
        saved = serial.path[letter] - hidden.path[letter]
        assert saved <= min(dispatch, shared) * (1 + 1e-9), letter
        if evaluator.legal(text).tp == 1:  # else the gathers of the shared experts queue behind the dispatch
            assert saved == pytest.approx(min(dispatch, shared), rel=1e-9), letter


@pytest.mark.parametrize("model", ["moe", "mla", "dense"])
def test_full_recompute_runs_the_layers_once_more_and_nothing_else(model):
    """What is recomputed is transformer layers, not the embedding; the vocabulary projection and the loss follow each other without a gap
    (`--recompute-granularity full`, https://github.com/NVIDIA/Megatron-LM/blob/main/megatron/core/transformer/transformer_block.py)."""
    evaluator = Evaluator(scenario(model))
    plain_parts, full_parts = (parts_of(evaluator, evaluator.legal(f"dp8{rc}")) for rc in ("", " rc:full"))
    for name, part in plain_parts.items():
        again = full_parts[name].path["B"] - part.path["B"]
        expected = 0.0 if name in (*HEADS, "embedding") else part.path["F"]
        assert again == pytest.approx(expected, rel=1e-9, abs=1e-12), name
        assert full_parts[name].path["F"] == part.path["F"] and full_parts[name].path["W"] == part.path["W"]


def test_selective_recompute_adds_the_forward_of_its_roles():
    evaluator = Evaluator(scenario("moe"))
    base, again = (evaluator.parts.get("moe", evaluator.legal(f"dp8 ep8{rc}")) for rc in ("", " rc:norm+moe_act"))
    extra = sum(p.seconds for p in base.forward if p.node.role in ("norm", "moe_act"))
    assert again.path["B"] - base.path["B"] == pytest.approx(extra, rel=1e-9)
    kept = sum(p.node.saved for p in base.forward if p.node.role in ("norm", "moe_act"))
    assert base.saved - again.saved == pytest.approx(kept, rel=1e-12) and kept > 0
    assert again.transient - base.transient == pytest.approx(kept, rel=1e-12)


def test_a_stack_without_grouped_kernels_runs_one_gemm_an_expert():
    grouped, loop = Evaluator(scenario("moe")), Evaluator(scenario("moe"))
    stack = loop.stack.model_copy(update={"grouped_gemm": "loop"})
    other = "loop" if grouped.stack.grouped_gemm == "grouped" else "grouped"
    loop = Evaluator(scenario("moe"), stack=stack.model_copy(update={"grouped_gemm": other}))
    layout = grouped.legal("dp8 ep2")
    terms = {}
    for evaluator in (grouped, loop):
        up = next(p for p in evaluator.parts.get("moe", layout).forward if p.node.role == "expert_up")
        terms[evaluator.stack.grouped_gemm] = up
    assert terms["grouped"].term.startswith("grouped_gemm") and terms["loop"].term.startswith("gemm")
    one, times = loop.parts.kernel(terms["loop"].node.op) if loop.stack.grouped_gemm == "loop" else grouped.parts.kernel(terms["loop"].node.op)
    assert times == 8 and one.flops * times == pytest.approx(terms["loop"].node.op.flops, rel=0.01)


@pytest.mark.parametrize(("constant", "kinds"), [("gemm", ("gemm", "grouped_gemm")), ("nic", ("dispatch", "collective"))])
def test_a_sites_factor_scales_what_it_names(constant, kinds):
    # A stack without a row in kernel_coverage.yaml: its kernels are the profile's.
    base, site = (Evaluator(scenario("moe", num_nodes=2, stack="moetrain"), site=Site(m)) for m in ({}, {constant: 2.0}))
    layout = base.legal("dp16 ep16")
    for name, part in parts_of(base, layout).items():
        for a, b in zip(part.forward, site.parts.get(name, layout).forward):
            if constant == "gemm":
                assert b.seconds == pytest.approx(a.seconds * (2.0 if a.kind in kinds else 1.0), rel=1e-12)
            else:
                assert b.seconds == pytest.approx(a.seconds * (1 + dict(a.uses).get("nic", 0.0)), rel=1e-9) and (a.kind in kinds or b.seconds == a.seconds)
    assert Evaluator(scenario("moe"), site=Site({"host": 2.0})).parts.launch_s == 2 * Evaluator(scenario("moe")).parts.launch_s


# --- the cache ------------------------------------------------------------------------------------------------------------------


def test_the_key_holds_everything_that_a_cost_depends_on():
    """Layouts that share a key get the same part from caches of their own."""
    rng, seen = random.Random(9), 0
    for _, (evaluator, space) in zip(range(12), random_spaces(rng)):
        fresh = lambda: Parts(evaluator.scenario.model, evaluator.scenario.cluster, evaluator.scenario.workload, evaluator.stack, evaluator.profile)  # noqa: E731, B023
        known = {}
        for row in rng.sample(range(len(space)), min(len(space), 12)):
            layout = space.layout(row)
            for name in parts_of(evaluator, layout):
                key = evaluator.parts.key(name, layout)
                if key in known and known[key][1] != layout:
                    one, other = (fresh().get(name, x) for x in (known[key][1], layout))
                    assert one == other, (name, str(layout), str(known[key][1]))
                    seen += 1
                known.setdefault(key, (name, layout))
        if seen > 60:
            break
    assert seen > 20


def test_pricing_in_one_call_equals_pricing_one_by_one():
    evaluator = Evaluator(scenario("mla"))
    layout = evaluator.legal("dp8 ep8 dedup mxfp8")
    wanted = [(evaluator.parts.key(n, layout), layout) for n in ("attention", "moe", "head", "dense")]
    together, apart = Evaluator(scenario("mla")).parts, evaluator.parts
    together.ensure(wanted)
    assert [together.cache[key] for key, _ in wanted] == [apart.get(key.name, layout) for key, _ in wanted]


def test_parameters_of_all_parts_are_the_models():
    for model in MODELS:
        evaluator = Evaluator(scenario(model))
        layout = evaluator.legal("dp8 zero1")
        total = sum(count * sum(p.dense_params + p.expert_params for p in (evaluator.parts.get(n, layout) for n in layer_parts(item, evaluator.scenario.model)))
                    for stage in structure(evaluator, layout) for item, count in stage)
        assert np.isclose(total, evaluator.scenario.model.num_params, rtol=1e-6), model


# --- experts whose products apply the activation ----------------------------------------------------------------------------------


def expert_traffic(stack, graphs, precision):
    """(bytes of what stands between the expert products, forward; the same backward; bytes kept) of one MoE layer."""
    e = Evaluator(scenario("moe", stack=stack))
    block = transformer.moe(e.scenario.model, e.parts.work(e.legal(f"dp8 ep8 {graphs} {precision}")))
    between = [n for n in block if n.key in ("moe_act", "quant_moe")]
    return (sum(n.op.bytes for n in between), sum(n.op.bytes * n.op.backward_ratio for n in between), sum(n.saved for n in block))


def test_a_graph_over_the_step_folds_activation_and_cast_into_the_expert_products():
    """Rows x width: without, 3 values read and written in bf16 and a cast; with, the cast values alone, and backward reads gate and up."""
    model = scenario("moe").model
    values = scenario("moe").workload.seq_len * model.top_k * model.moe_intermediate_size
    forward, backward, kept = expert_traffic("megatron_core", "graph:full", "mxfp8")
    width = BYTES_PER_ELEMENT["mxfp8"]
    assert forward == pytest.approx(width * values) and backward == pytest.approx(4.0 * values)
    apart = expert_traffic("megatron_core", "graph:router", "mxfp8")
    assert apart[0] > 6 * values > 6 * forward / width * 0.99 and apart[1] > 2 * backward and apart[2] == kept
    for stack, graphs, precision in (("megatron_core", "graph:full", "bf16"), ("megatron_core", "graph:full", "fp8"), ("torchtitan", "graph:full", "mxfp8")):
        assert not Evaluator(scenario("moe", stack=stack)).parts.work(Evaluator(scenario("moe", stack=stack)).legal(f"dp8 ep8 {graphs} {precision}")).fuses_experts
