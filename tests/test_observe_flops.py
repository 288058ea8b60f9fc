"""Are the FLOP of a step the planner's, and is MFU divided by a named peak or by nothing?"""

import pytest

from moesim import transformer
from moesim.block import backward
from moesim.layout import RECOMPUTE_ROLES
from moesim.load import load_gpu, load_model, preset_names
from moesim.ops import MemoryBound
from moesim.transformer import Work
from moetrain.observe.flops import StepFlops, recompute_flops, row_flops, step_flops, utilisation
from moetrain.observe.peaks import PRESET_OF_DEVICE, UnknownPeak, peak, peaks

SEED = load_model("olmo_core3_seed", ["num_experts=8"])
B300 = "NVIDIA B300 SXM6 AC"


def test_the_published_rate_of_the_seed_is_the_published_mfu():
    """54,500 tokens/s a GPU of the E = 8 model: 990 TFLOP/s, 44.0% of 2250; 52,000 of E = 128: 42.05%."""
    for experts, rate, share in ((8, 54_500, 0.440), (128, 52_000, 0.4205)):
        spec = load_model("olmo_core3_seed", [f"num_experts={experts}"])
        used = utilisation(step_flops(spec, tokens=8 * rate, seq_len=8192), 1.0, 8, peaks(B300, "bf16"))
        assert used.mfu == pytest.approx(share, abs=5e-4) and used.own_mfu == used.mfu
        assert used.denominator == "2250 TFLOP/s dense bf16 (b300)" and used.refusal is None


def test_the_ledger_of_a_token_is_the_published_integer():
    assert step_flops(SEED, tokens=1, seq_len=8192).model == 18_171_297_792


def test_a_low_precision_run_names_both_denominators():
    used = utilisation(StepFlops(model=2250e12), 1.0, 1, peaks(B300, "mxfp8"))
    assert used.mfu == pytest.approx(1.0) and used.own_mfu == pytest.approx(0.5)
    assert "2250 TFLOP/s dense bf16" in str(used) and "50.0% of 4500 TFLOP/s dense fp8 (b300)" in str(used)


@pytest.mark.parametrize("name", ["NVIDIA B300", "NVIDIA H100 PCIe", "NVIDIA H100 NVL", "NVIDIA GB10", "nvidia h200", "cpu", "", "\x1b[31mNVIDIA H200"])
def test_a_device_that_is_not_in_the_table_has_no_mfu(name):
    """No substring, no case folding, no neighbour: the exact name or a refusal in words."""
    known = peaks(name, "bf16")
    used = utilisation(StepFlops(model=1e15), 1.0, 1, known)
    assert used.mfu is used.own_mfu is used.hfu is None and str(used) == "MFU UNKNOWN peak"
    assert "not in the peak table" in used.refusal and "\x1b" not in used.refusal
    with pytest.raises(UnknownPeak):
        peak(name, "bf16")


def test_two_kinds_of_device_or_no_stated_peak_are_refused():
    assert "2 kinds of device" in peaks([B300, "NVIDIA H200"], "bf16").refusal
    a100 = peaks("NVIDIA A100-SXM4-80GB", "fp8")
    assert a100.bf16.flops_per_s == 312e12 and a100.own is None and "no fp8 peak" in a100.refusal
    assert "fp32" in peaks(B300, "fp32").refusal


def test_every_preset_of_the_table_exists_with_a_sourced_bf16_peak():
    for device, preset in PRESET_OF_DEVICE.items():
        assert preset in preset_names("gpu")
        found = peak(device, "bf16")
        assert found.flops_per_s == load_gpu(preset).peak_flops["bf16"] and found.source.startswith("http")


def test_drops_recompute_and_padding_stand_beside_the_model_flops():
    whole = step_flops(SEED, tokens=1000, seq_len=8192)
    rows = 1000 * SEED.top_k * 7
    assert row_flops(SEED) * rows == SEED.flops_by_role(8192)["routed_experts"] * 1000
    cut = step_flops(SEED, tokens=1000, seq_len=8192, dropped_rows=rows / 10, padded_rows=50)
    assert cut.model == whole.model and cut.counted == pytest.approx(whole.model - whole.dropped - cut.dropped)
    assert cut.dropped == pytest.approx(0.1 * SEED.flops_by_role(8192)["routed_experts"] * 1000)
    assert cut.hardware == pytest.approx(cut.counted + cut.attention_recompute + cut.padding) and cut.padding == 50 * row_flops(SEED)
    with pytest.raises(ValueError, match="dropped rows"):
        step_flops(SEED, tokens=1000, seq_len=8192, dropped_rows=rows + 1)


def _recomputed(spec, seq_len: int, role: str) -> float:
    """FLOP a token of the nodes that one recompute role brings back, summed over the planner's own blocks."""
    work = Work(batch=1, seq_len=seq_len)
    blocks = [transformer.attention(spec, work, spec.window(i)) for i in range(spec.num_layers)]
    blocks += [{"dense": transformer.dense, "moe": transformer.moe}[kind](spec, work) for kind in spec.layer_kinds()]
    nodes = [n for block in blocks for n in backward(block, frozenset({role})) if n.phase == "R"]
    return sum(n.op.flops for n in nodes if not isinstance(n.op, MemoryBound)) / seq_len


@pytest.mark.parametrize("name", ["olmo_core3_seed", "deepseek_v3", "gpt_oss_20b", "qwen3_30b_a3b", "deepseek_v2_lite"])
def test_recompute_is_what_the_planners_blocks_bring_back(name):
    """Role by role, and in full."""
    spec = load_model(name)
    for role in (*RECOMPUTE_ROLES, "full"):
        mine = sum(recompute_flops(spec, 4096, [role]).values())
        assert mine == pytest.approx(_recomputed(spec, 4096, role), rel=1e-9), role


def test_flash_attention_recomputes_half_a_forward_of_scores():
    """`Attention.flops` of a backward pass is 2.5 forward passes; model FLOP count 2 of them."""
    core = SEED.flops_by_role(8192)["attention_core"]
    assert step_flops(SEED, tokens=2, seq_len=8192).attention_recompute == pytest.approx(2 * core / 3 / 2)
    assert step_flops(SEED, tokens=2, seq_len=8192, flash=False).attention_recompute == 0
