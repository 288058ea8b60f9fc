"""Do the spans of a recorded step name the work of every role, as often as it was done, without overlap and within the step?"""

from __future__ import annotations

from collections import Counter

import pytest

from moesim.evaluate import Evaluator
from moesim.load import load_cluster, parse_scenario
from moesim.parts import layer_parts
from moesim.program import COMM, COMPUTE, DATA, REDUCE
from moetrain import step
from moetrain.build import layout_of, make_job
from moetrain.data.synthetic import SyntheticLoader
from moetrain.observe.module_spans import watch
from moetrain.observe.trace import SpanRecorder, read_spans
from moetrain.testing import run_ranks

TEXT = """
name: spans
model: {name: m, num_layers: 3, hidden_size: 32, vocab_size: 64, num_heads: 4, num_kv_heads: 2, head_dim: 8, intermediate_size: 48,
        num_experts: 4, top_k: 2, moe_intermediate_size: 16, num_shared_experts: 1, num_leading_dense_layers: 1}
cluster: cpu_gloo
workload: {seq_len: 16, global_batch_tokens: 128}
"""
BESIDE = {"plan", "balance", "forward", "backward", "param_gather+param_copy_out", "grad_copy_in+grad_reduce"}
"""What a step does for which the planner has no node."""


def recorded(rank: int, world: int, text: str, folder: str, sets: tuple[str, ...] = ()) -> float:
    """One step outside the window and one inside; the loss of the second."""
    scenario = parse_scenario(TEXT, list(sets))
    job = make_job(scenario, layout_of(scenario, text, world))
    spans = SpanRecorder(folder, rank, 2, 2)
    watch(job.parts, spans)
    job.mesh.log.spans = spans
    loader = SyntheticLoader(64, 16, 8, job.mesh["dp"].rank, job.mesh["dp"].size, job.layout.mb, prefetch=0)
    for number in (1, 2):
        spans.begin_step(number)
        loss = step.forward_backward(job, step.cut(loader.batch(0), job, 0))
        spans.end_step()
    spans.close()
    return float(loss[0])


def read(folder):
    (found,) = read_spans(sorted(folder.glob("spans-*"))).values()
    return found


def planned_roles(text: str, sets: tuple[str, ...] = ()) -> set[tuple[str, int, str]]:
    """(role, layer or -1, phase F, B or R) of every node that computes in the planner's step, weight gradients counted as B."""
    scenario = parse_scenario(TEXT, list(sets)).model_copy(update={"cluster": load_cluster("gb300_nvl72"), "profile": None})
    evaluator = Evaluator(scenario)
    from moesim.layout import parse_layout

    layout, found = parse_layout(text), set()
    kinds = scenario.model.layer_kinds()
    for layer, kind in [(-1, "embedding"), *enumerate(kinds), (-1, "head")]:
        for name in layer_parts(kind, scenario.model):
            part = evaluator.parts.get(name, layout)
            found |= {(p.node.role, layer, {"I": "B", "W": "B"}.get(p.node.phase, p.node.phase)) for p in (*part.forward, *part.backward) if p.node.stream == "compute"}
    return found


@pytest.mark.parametrize("text, sets", [("dp2 ep2 mb2", ()), ("dp2 ep2 mb2", ("train.moe.chunks=2",)), ("dp2 mb4 zero3", ()), ("dp1 tp2 mb2", ()),
                                        ("dp2 ep2 mb2 syncfree", ("model.norm_placement=post",)), ("dp1 mb4 rc:full", ()),
                                        ("dp1 mb4 rc:qkv+moe_act", ())])
def test_the_roles_of_a_step_are_the_planners(tmp_path, text, sets):
    """Both directions: no node of the plan lacks a span, no span names work that is in no plan."""
    world = 2 if "dp2" in text or "tp2" in text else 1
    run_ranks(recorded, world, text, str(tmp_path), sets)
    found = read(tmp_path)
    for rank in range(world):
        seen = {(span.kind, extra.get("layer", -1), extra.get("phase")) for span, extra in zip(found.timeline.spans, found.extras)
                if span.rank == rank and span.stream == COMPUTE and span.kind not in BESIDE}
        assert seen == planned_roles(text, sets)


@pytest.mark.parametrize("chunks", [1, 2])
def test_every_role_is_there_as_often_as_it_ran(tmp_path, chunks):
    run_ranks(recorded, 2, "dp2 ep2 mb2", str(tmp_path), (f"train.moe.chunks={chunks}",))
    found, microbatches = read(tmp_path), 2
    for rank in (0, 1):
        compute = found.timeline.lane(rank, COMPUTE)
        pairs = [(span, extra) for span, extra in zip(found.timeline.spans, found.extras) if span.rank == rank]
        whole = Counter(span.name for span, extra in pairs if "part" not in extra)
        for layer in range(3):
            assert whole[f"core_attn forward layer {layer}"] == whole[f"core_attn backward layer {layer}"] == microbatches
            assert whole[f"norm forward layer {layer}"] == 2 * microbatches
        assert whole["mlp_down forward layer 0"] == whole["loss forward"] == microbatches
        assert whole["expert_up forward layer 1"] == whole["moe_act backward layer 2"] == microbatches * chunks
        exchanges = [(span, extra) for span, extra in pairs if span.stream == COMM and span.kind == "dispatch"]
        assert Counter((extra["layer"], extra["phase"]) for _, extra in exchanges) == {(layer, phase): microbatches * chunks for layer in (1, 2) for phase in "FB"}
        assert all(a.end <= b.start + 1e-9 for a, b in zip(compute, compute[1:]))
        assert 0 < found.timeline.busy(rank) <= found.timeline.makespan
        assert {extra["microbatch"] for span, extra in pairs if span.kind == "qkv"} == {0, 1}
        assert {span.entry for span, extra in pairs if span.kind == "qkv"} == {"0F0", "0B0", "0F1", "0B1"}


def test_nothing_computes_while_the_host_waits_for_a_collective(tmp_path):
    run_ranks(recorded, 2, "dp2 ep2 mb2 zero3", str(tmp_path))
    found = read(tmp_path)
    for rank in (0, 1):
        compute = found.timeline.lane(rank, COMPUTE)
        waits = [span for stream in (DATA, REDUCE) for span in found.timeline.lane(rank, stream)]
        waits += [span for span in found.timeline.lane(rank, COMM) if span.kind == "count_exchange"]
        assert {span.kind for span in waits} == {"param_gather", "grad_reduce", "count_exchange"}
        for wait in waits:
            inside = sum(max(0.0, min(span.end, wait.end) - max(span.start, wait.start)) for span in compute)
            assert inside <= 1e-9, (wait, inside)


def test_a_stage_of_a_pipeline_records_its_actions(tmp_path):
    run_ranks(recorded, 2, "pp2 dp1 mb2", str(tmp_path))
    found = read(tmp_path)
    for rank in (0, 1):
        lane = found.timeline.lane(rank, COMPUTE)
        assert {span.entry for span in lane if span.kind == "core_attn"} == {f"{rank}{letter}{m}" for letter in "FB" for m in range(4)}
        layers = {extra["layer"] for span, extra in zip(found.timeline.spans, found.extras) if span.rank == rank and "layer" in extra}
        assert layers == ({0, 1} if rank == 0 else {2}), layers


def test_recording_changes_no_number(tmp_path):
    (on,) = run_ranks(recorded, 1, "mb4", str(tmp_path))
    (off,) = run_ranks(recorded, 1, "mb4", str(tmp_path / "other"))
    assert on == off
