"""Is what the trainer can't run refused in one line that says what to change, and is all else legal of moesim's run?"""

from __future__ import annotations

import pytest

from moesim.layout import parse_layout
from moesim.load import load_model, load_scenario
from moesim.spec import ModelSpec
from moetrain.build import layout_of
from moetrain.supports import supports

SMALL = {"name": "m", "num_layers": 8, "hidden_size": 64, "vocab_size": 96, "num_heads": 8, "num_kv_heads": 4, "head_dim": 8, "intermediate_size": 96,
         "num_experts": 8, "top_k": 2, "moe_intermediate_size": 32, "num_leading_dense_layers": 1}


@pytest.mark.parametrize("change, says", [
    ({"num_mtp_layers": 1}, "model.num_mtp_layers=0"),
    ({"norm_bias": True}, "RMSNorm"),
    ({"num_position_embeddings": 128}, "rotary"),
    ({"gated_mlp": False}, "SwiGLU"),
    ({"mlp_bias": True}, "biases of dense FFNs"),
    ({"moe_branch_norm": True, "num_shared_experts": 1}, "norm_placement=post"),
])
def test_models_that_are_not_built(change, says):
    assert says in supports(parse_layout("dp1"), ModelSpec(**SMALL | change))


@pytest.mark.parametrize("text, change, says", [
    ("tp8 mb1", {}, "does not divide 4 key-value heads"),
    ("tp2 mb1", {"qk_norm": "full"}, "qk_norm full"),
    ("tp2 mb1", {"out_bias": True}, "output bias"),
    ("tp4 mb1", {"vocab_size": 90}, "vocabulary of 90"),
    ("dp2 etp2 mb1", {}, "spread them with ep"),
    ("dp2 ep2 ov:ep", {}, "train.moe.chunks=2"),
    ("dp5 mb1", {}, "raise ep"),
    ("vpp2 interleaved", {}, "pp above 1"),
    ("pp2 zero2", {}, "use zero1"),
    ("pp2 zero3", {}, "zero3 noreshard"),
    ("dp1 fp8", {}, "use bf16"),
    ("dp1 opt:fp8", {}, "opt:bf16"),
    ("dp1 graph:layer", {}, "leave out graph:"),
])
def test_layouts_that_are_not_run(text, change, says):
    reason = supports(parse_layout(text), ModelSpec(**SMALL | change))
    assert reason and says in reason and "\n" not in reason


@pytest.mark.parametrize("text", [
    "dp8 ep8 zero1", "dp8 ep4 zero0", "dp8 ep2 zero2 mb2", "dp8 zero3 ov:fsdp1", "dp8 zero3 noreshard ep8", "dp8 rep2 ep4", "dp4 tp2 ep8", "dp2 cp2 tp2 ep4",
    "pp2 dp2 ep2", "pp4 vpp2 interleaved", "pp2 vpp2 zbv", "pp2 vpp2 dualpipev", "pp2 vpp2 interleaved_zb", "dp2 ep2 syncfree ov:shared+grad+param rc:full",
    "dp2 rc:norm+moe_act grad:bf16 opt:bf16", "dp1 gpipe",
])
def test_layouts_that_are_run(text):
    assert supports(parse_layout(text), ModelSpec(**SMALL)) is None


@pytest.mark.parametrize("name", ["olmo_core3_new", "olmo_core3_old"])
def test_both_stacks_of_the_seed_benchmark_differ_by_their_layout_alone(name):
    """And so does the ablation between them: FSDP2 that keeps its gathered weights in the accumulation window."""
    assert layout_of(load_scenario(name), None, 8) == parse_layout(load_scenario(name).layout)
    assert supports(parse_layout("dp8 zero3 noreshard mb2 1f1b"), load_scenario(name).model) is None


@pytest.mark.parametrize("name", ["deepseek_v3", "qwen3_235b_a22b", "mixtral_8x7b", "gpt_oss_120b", "olmoe_1b_7b", "kimi_k2"])
def test_published_models_are_built(name):
    assert supports(parse_layout("dp8 ep8 zero1"), load_model(name)) is None
