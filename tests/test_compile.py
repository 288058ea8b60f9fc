"""Does compiling pieces of the model change nothing but their speed, and does it settle after the first step?

Ragged numbers of routed rows made compiled trainers recompile without end; here what is compiled has fixed shapes.
"""

from __future__ import annotations

import pytest
import torch

from moesim.load import parse_scenario
from moetrain import sharding, step
from moetrain.build import layout_of, make_job
from moetrain.data.synthetic import SyntheticLoader

TEXT = """
name: compiled
model: {name: m, num_layers: 2, hidden_size: 32, vocab_size: 64, num_heads: 4, num_kv_heads: 2, head_dim: 8, intermediate_size: 48,
        num_experts: 4, top_k: 2, moe_intermediate_size: 16, num_shared_experts: 1, num_leading_dense_layers: 1}
cluster: cpu_gloo
workload: {seq_len: 16, global_batch_tokens: 64}
layout: mb2
"""


def gradients(compiled: bool, steps: int) -> list[dict[str, torch.Tensor]]:
    """Of each step, the weights untouched in between."""
    scenario = parse_scenario(TEXT, [f"train.compile={str(compiled).lower()}"])
    job = make_job(scenario, layout_of(scenario, None, 1))
    loader = SyntheticLoader(64, 16, 4, micro_batch=2, prefetch=0)
    found = []
    for i in range(steps):
        step.forward_backward(job, step.cut(loader.batch(i), job, i))
        named = list(sharding.named_parameters(job.parts))
        found.append({name: p.grad.clone() for name, p in named})
        for _, p in named:
            p.grad = None
    return found


def test_compiled_gradients_and_no_recompilation_after_the_first_step():
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    plain, compiled = gradients(False, 3), gradients(True, 1)
    first = counters["stats"]["unique_graphs"]
    assert first > 0
    again = gradients(True, 3)
    assert counters["stats"]["unique_graphs"] == first, "recompiled"
    for one, other in ((plain[0], compiled[0]), (plain[2], again[2])):
        assert max(float((one[n] - other[n]).abs().max() / (one[n].abs().max() + 1e-12)) for n in one) < 1e-5


def test_tensor_parallel_shards_are_not_compiled():
    with pytest.raises(ValueError, match="train.compile"):
        layout_of(parse_scenario(TEXT, ["train.compile=true"]), "tp2 mb2", 2)
