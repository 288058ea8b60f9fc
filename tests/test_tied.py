"""Does a tied embedding stay one weight when a pipeline holds two copies of it, on two ranks or on one?"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from moesim.load import parse_scenario
from moetrain import sharding, step
from moetrain.build import layout_of, make_job, make_optimizer
from moetrain.data.synthetic import SyntheticLoader
from moetrain.testing import run_ranks

TEXT = """
name: tied
model: {name: m, num_layers: 4, hidden_size: 16, vocab_size: 32, tie_embeddings: true, num_heads: 2, intermediate_size: 24,
        num_experts: 4, top_k: 2, moe_intermediate_size: 8, num_leading_dense_layers: 1}
cluster: cpu_gloo
workload: {seq_len: 8, global_batch_tokens: 64}
train: {moe: {aux_loss: 0.0}}
"""


def trained(rank: int, world: int, text: str, kind: str) -> tuple[list[float], dict[str, np.ndarray]]:
    """Losses of three steps, and the last values of every copy of the embedding."""
    scenario = parse_scenario(TEXT, [f"train.optimizer.kind={kind}"])
    job = make_job(scenario, layout_of(scenario, text, world))
    optimizer = make_optimizer(job)
    loader = SyntheticLoader(32, 8, 8, job.mesh["dp"].rank, job.mesh["dp"].size, job.layout.mb, prefetch=0)
    losses = []
    for i in range(3):
        loss = step.forward_backward(job, step.cut(loader.batch(i), job, i))
        losses.append(float(step.reduce_loss(job, loss)[0]))
        optimizer.step()
        optimizer.zero_grad()
    copies = [p.full_tensor() if hasattr(p, "full_tensor") else p for n, p in sharding.named_parameters(job.parts) if n == "embed.weight"]
    return losses, {str(i): copy.detach().clone() for i, copy in enumerate(copies)}


@pytest.mark.parametrize("kind", ["adamw", "muon"])
@pytest.mark.parametrize("text", ["pp2 mb1", pytest.param("pp2 vpp2 mb1 zbv", id="both copies on one rank")])
def test_copies_take_the_same_steps_as_the_one_weight(text, kind):
    single, (alone,) = run_ranks(trained, 1, "mb1", kind)[0][0], [run_ranks(trained, 1, "mb1", kind)[0][1]]
    ranks = run_ranks(trained, 2, text, kind)
    assert ranks[0][0] == pytest.approx(single, rel=1e-5)
    copies = [c for _, held in ranks for c in held.values()]
    assert len(copies) == 2
    for copy in copies:
        assert np.abs(copy - alone["0"]).max() < 1e-5
    assert torch.equal(torch.as_tensor(copies[0]), torch.as_tensor(copies[1]))
