"""Do the spans of a recorded step name what ran, as often as it ran, without overlap and within the step?"""

from __future__ import annotations

from collections import Counter

import pytest

from moesim.load import parse_scenario
from moesim.program import COMM, COMPUTE
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


def recorded(rank: int, world: int, text: str, folder: str, chunks: int) -> float:
    """One step outside the window and one inside; the loss of the second."""
    scenario = parse_scenario(TEXT, [f"train.moe.chunks={chunks}"])
    job = make_job(scenario, layout_of(scenario, text, world))
    spans = SpanRecorder(folder, rank, 2, 2)
    watch(job.parts, spans)
    job.mesh.log.spans = spans
    loader = SyntheticLoader(64, 16, 8, job.mesh["dp"].rank, job.mesh["dp"].size, job.layout.mb, prefetch=0)
    for number in (1, 2):
        spans.begin_step(number)
        with spans.span("forward_backward", "forward_backward"):
            loss = step.forward_backward(job, step.cut(loader.batch(0), job, 0))
        spans.end_step()
    spans.close()
    return float(loss[0])


@pytest.mark.parametrize("chunks", [1, 2])
def test_every_part_is_there_as_often_as_it_ran(tmp_path, chunks):
    run_ranks(recorded, 2, "dp2 ep2 mb2", str(tmp_path), chunks)
    (found,) = read_spans(sorted(tmp_path.glob("spans-*"))).values()
    timeline, microbatches = found.timeline, 2
    for rank in (0, 1):
        compute = timeline.lane(rank, COMPUTE)
        whole = Counter(span.name for span, extra in zip(timeline.spans, found.extras) if span.rank == rank and "part" not in extra)
        for layer in range(3):
            assert whole[f"attention forward layer {layer}"] == whole[f"attention backward layer {layer}"] == microbatches
        assert whole["mlp forward layer 0"] == whole["head forward"] == microbatches
        assert whole["experts forward layer 1"] == whole["experts backward layer 2"] == microbatches * chunks
        exchanges = [span for span in timeline.lane(rank, COMM) if span.name == "dispatch"]
        assert len(exchanges) >= microbatches * 2 * chunks
        assert all(a.end <= b.start + 1e-9 for a, b in zip(compute, compute[1:]))
        assert 0 < timeline.busy(rank) <= timeline.makespan


def test_recording_changes_no_number(tmp_path):
    (on,) = run_ranks(recorded, 1, "mb4", str(tmp_path), 1)
    (off,) = run_ranks(recorded, 1, "mb4", str(tmp_path / "other"), 1)
    assert on == off
