"""Do checkpoints of the trainer's own model and optimizers hold the same bits under every layout, there and back?"""

from __future__ import annotations

import pytest
import torch

from moesim.load import parse_scenario
from moetrain import build, checkpoint
from moetrain.checkpoint import Checkpointer
from moetrain.testing import run_ranks

TEXT = """
name: kept
seed: 3
model: {name: tiny, num_layers: 4, hidden_size: 32, vocab_size: 64, num_heads: 4, num_kv_heads: 2, head_dim: 8, intermediate_size: 48,
  num_experts: 8, top_k: 2, moe_intermediate_size: 24, num_shared_experts: 1, num_leading_dense_layers: 1, qk_norm: per_head}
cluster: cpu_gloo
workload: {seq_len: 16, global_batch_tokens: 256, routing: {kind: balanced}}
train: {moe: {bias_rate: 0.001}, optimizer: {kind: KIND}}
"""
LAYOUTS = [("dp4 ep4", 4), ("tp2 dp2 ep2", 4), ("pp2 vpp2 zbv mb2", 2), ("pp2 dp2 ep2", 4)]
MORE = [("dp2 ep2", 2), ("dp4 ep2", 4), ("dp2 zero3", 2), ("dp4 rep2", 4), ("pp2", 2), ("tp2", 2), ("cp2 dp2", 4)]


def job_of(text: str, world: int, kind: str, sets=()):
    """A job and its optimizer (none of ``kind`` "none"), whose moments are no zeros but follow from the weights they belong to."""
    scenario = parse_scenario(TEXT.replace("KIND", "adamw" if kind == "none" else kind), list(sets))
    job = build.make_job(scenario, build.layout_of(scenario, text, world))
    optimizer = None if kind == "none" else build.make_optimizer(job)
    with torch.no_grad():
        for parameter, state in optimizer.state.items() if optimizer else ():
            for number, (key, value) in enumerate(sorted(state.items())):
                value.copy_(parameter * (number + 2)) if key != "step" else value.fill_(5)
        for part in job.parts:
            for buffer in part.buffers():
                buffer.add_(torch.arange(buffer.numel()).view(buffer.shape))
    return job, optimizer


def saves(rank, world, text, kind, folder, sets=()):
    job, optimizer = job_of(text, world, kind, sets)
    said = []
    Checkpointer(folder, asynchronous=False, log=said.append).save(1, job.parts, optimizer, {"layout": text})
    return said


def moves(rank, world, text, kind, source, target, sets=()):
    """Loads into a job whose every value is wrong, and saves what it got."""
    job, optimizer = job_of(text, world, kind, sets)
    with torch.no_grad():
        states = optimizer.state.values() if optimizer else []
        for tensor in [t for part in job.parts for t in part.state_dict().values()] + [t for state in states for t in state.values()]:
            tensor.fill_(9)
    restored = Checkpointer(source, log=lambda line: None).load("auto", job.parts, optimizer)
    Checkpointer(target, asynchronous=False).save(2, job.parts, optimizer, {})
    return restored.extra["layout"]


def tensors(folder):
    (found,) = checkpoint.inspect(folder, verify=True)
    assert found["ok"]
    return found["tensors"]


def digests_agree(tmp_path, kind, layouts, sets=()):
    run_ranks(saves, 1, "dp1", kind, tmp_path / "one", sets)
    one = tensors(tmp_path / "one")
    for text, world in layouts:
        said = run_ranks(saves, world, text, kind, tmp_path / text, sets)
        assert said == [[]] * world, text  # no replica drifted, nothing else to remark
        assert tensors(tmp_path / text) == one, text
    return one


@pytest.mark.parametrize("kind, layouts", [
    ("adamw", LAYOUTS), ("muon", [("dp2 ep2", 2)]), pytest.param("adamw", MORE, marks=pytest.mark.full), pytest.param("muon", LAYOUTS + MORE, marks=pytest.mark.full),
])
def test_every_layout_saves_the_same_bits(tmp_path, kind, layouts):
    one = digests_agree(tmp_path, kind, layouts)
    assert one["model.layers.1.moe.experts.gate_up"]["shape"] == [8, 2, 24, 32] and "model.layers.3.moe.router.balance_bias" in one
    assert ("optim.layers.1.moe.experts.down.momentum" in one) == (kind == "muon") and "optim.embed.weight.exp_avg_sq" in one


def test_a_tied_embedding_is_one_tensor(tmp_path):
    """Also where one rank holds the first stage's copy and the last's."""
    sets = ("model.tie_embeddings=true",)
    digests_agree(tmp_path, "adamw", [("dp2 ep2", 2), ("pp2", 2)], sets)
    one = digests_agree(tmp_path / "weights", "none", [("pp2 vpp2 zbv mb2", 2)], sets)
    assert "model.embed.weight" in one and not any("head" in name for name in one)
    run_ranks(moves, 2, "pp2 vpp2 zbv mb2", "none", tmp_path / "weights" / "one", tmp_path / "back", sets)
    assert tensors(tmp_path / "back") == one


@pytest.mark.parametrize("source, world, target, other", [
    ("dp4 ep4", 4, "dp2 ep2", 2), ("dp2 ep2", 2, "dp1", 1), ("pp2 vpp2 zbv mb2", 2, "tp2 dp2 ep2", 4), ("tp2 dp2 ep2", 4, "pp2", 2),
])
def test_there_and_back(tmp_path, source, world, target, other):
    run_ranks(saves, world, source, "adamw", tmp_path / "source")
    assert run_ranks(moves, other, target, "adamw", tmp_path / "source", tmp_path / "target") == [source] * other
    assert tensors(tmp_path / "target") == tensors(tmp_path / "source")
