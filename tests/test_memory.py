"""Does a rank hold the bytes that conservation laws, the ZeRO table and published runs say?"""

import re

import numpy as np
import pytest
from small_scenarios import scenario

from calibration.folds import MEASUREMENTS
from calibration.memory_check import check, table
from moesim import memory
from moesim.evaluate import Evaluator
from moesim.load import load_scenario, parse_scenario
from moesim.layout import parse_layout, stage_layers
from moesim.predict import read_rows
from moesim.stack import load_stack

GIB = 2.0**30
SEQ = 2048


def held(text, num_mb=8, model="moe", stack="megatron_core"):
    """(evaluator, layout) of a cut model on as many GPUs as the layout has."""
    layout = parse_layout(text)
    s = scenario(model, num_nodes=max(1, layout.world // 8), batch=num_mb * layout.dp * layout.mb, seq_len=SEQ, stack=stack)
    made = Evaluator(s)
    return made, made.legal(layout)


def ranks(text, num_mb=8, **kw):
    """Category -> bytes of each pipeline rank."""
    made, layout = held(text, num_mb, **kw)
    return {name: values[0] for name, values in made.categories(layout).items()}


def params(model):
    """(dense, expert) parameters of a model of gated experts without biases."""
    expert = model.layer_kinds().count("moe") * model.num_experts * 3 * model.hidden_size * model.moe_intermediate_size
    return model.num_params - expert, expert


VARIED = ("dp8 ep8 zero1 mb1 dedup", "pp4 dp4 ep4 zero2 mb2 rc:norm", "pp2 vpp2 dp4 ep2 zero1 mb1 interleaved ov:ep", "dp8 zero3 mb1 ov:fsdp2")


@pytest.mark.parametrize("text", VARIED)
def test_categories_add_up_to_the_peak_of_the_heaviest_rank(text):
    made, layout = held(text)
    peak, by_rank = made.peak(layout), memory.total(made.categories(layout))[0]
    assert tuple(peak.categories) == memory.CATEGORIES and all(v >= 0 for v in peak.categories.values())
    assert peak.total == pytest.approx(by_rank.max()) and by_rank.argmax() == peak.rank


@pytest.mark.parametrize("text", ["dp8 ep8 zero1", "pp2 dp4 ep4 zero1 rc:full", "pp4 vpp2 dp4 ep2 zero1 interleaved", "pp2 dp8 ep8 zero3 dedup"])
def test_memory_grows_with_the_micro_batch(text):
    totals = [made.peak(layout).total for made, layout in (held(f"{text} mb{mb}") for mb in (1, 2, 4))]
    assert totals == sorted(totals) and totals[0] < totals[-1]


ZERO = {  # text -> (weights, gradients, optimizer) sharded?
    "zero0": (0, 0, 0), "zero1": (0, 0, 1), "zero2": (0, 1, 1), "zero3 noreshard": (0, 0, 1), "zero3": (1, 1, 1),
    "rep2 zero1": (0, 0, 1), "rep2 zero3": (1, 1, 1), "rep4 zero2": (0, 1, 1),
}  # fmt: skip


@pytest.mark.parametrize("text", ZERO)
@pytest.mark.parametrize("dtypes", ["", "grad:bf16 opt:bf16", "opt:fp8"])
def test_weights_gradients_and_optimizer_to_the_byte(text, dtypes):
    """Dense weights shard over the data-parallel ranks (of one replica under HSDP), experts over the ranks that hold the same ones."""
    made, layout = held(f"dp16 ep4 {text} mb1 {dtypes}")
    dense, expert = params(made.scenario.model)
    expert /= 4
    share = dense / (16 // layout.rep) + expert / 4
    grad, moments = (2 if "grad:bf16" in dtypes else 4), {"opt:bf16": 4, "opt:fp8": 2}.get((dtypes.split() or [""])[-1], 8)
    found = made.peak(layout).categories
    for name, width, sharded in zip(("weights", "gradients", "optimizer"), (2, grad, 4 + moments), ZERO[text]):
        assert found[name] == pytest.approx(width * (share if sharded else dense + expert), rel=1e-12), name


def test_eighteen_bytes_a_parameter():
    """BF16 weight 2, FP32 gradient 4, master 4 and moments 8, the last twelve sharded: https://allenai.org/papers/olmocore3"""
    made, layout = held("dp8 zero0 mb1")
    found = made.peak(layout).categories
    assert sum(found[n] for n in ("weights", "gradients", "optimizer")) == pytest.approx(18 * made.scenario.model.num_params)


def test_expert_weights_are_divided_by_ep_and_etp_only():
    texts = ("dp8", "dp4 tp2", "dp2 cp2 tp2", "dp8 ep4", "dp4 tp2 ep4", "dp4 tp2 ep4 etp2", "dp16 ep8")
    sizes = [made.parts.get("moe", layout).expert_params for made, layout in (held(text + " zero1 mb1") for text in texts)]
    assert [sizes[0] / size for size in sizes] == [1, 1, 1, 4, 4, 8, 8]


def test_expert_parallelism_trades_tokens_it_does_not_remove_them():
    kept = [ranks(f"dp8 ep{ep} zero1 mb1")["activations"][0] for ep in (1, 2, 4, 8)]
    assert kept == pytest.approx([kept[0]] * 4)


def deepseek(text, num_mb=16, stack="megatron_core", model="deepseek_v3_mtp"):
    layout = parse_layout(text)
    s = parse_scenario(f"name: t\nmodel: {model}\ncluster: {{preset: gb200_nvl72, num_nodes: {layout.world // 4}}}\n"
                       f"workload: {{seq_len: 4096, global_batch_tokens: {4096 * layout.dp * layout.mb * num_mb}}}\n")
    made = Evaluator(s, stack=load_stack(stack) if isinstance(stack, str) else stack)
    return made, made.legal(layout)


@pytest.mark.parametrize("stages", [None, "1/4/4/4/4/4/4/4/4/4/4/4/4/4/4/4", "15/4/4/4/4/4/4/4/4/2/2/2/2/2/2/2"])
def test_the_heaviest_of_uneven_stages_sets_memory(stages):
    """61 layers on 16 ranks: each rank holds its own layers, the first the embedding, the last the head."""
    made, layout = deepseek("pp16 dp8 ep8 zero1 mb1" + (f" st:{stages}" if stages else ""), num_mb=32, model="deepseek_v3")
    model, counts = made.scenario.model, stage_layers(layout, 61)
    assert sum(counts) == 61 and len(set(counts)) > 1
    size = lambda *names: sum(p.dense_params + p.expert_params for p in (made.parts.get(n, layout) for n in names))  # noqa: E731
    layers = [size("attention", kind) for kind in model.layer_kinds()]
    starts = np.cumsum([0, *counts])
    own = np.array([sum(layers[a:b]) for a, b in zip(starts, starts[1:])])
    own[0] += size("embedding")
    own[-1] += size("head")
    weights = made.categories(layout)["weights"][0]
    assert weights == pytest.approx(2 * own)
    totals, peak = memory.total(made.categories(layout))[0], made.peak(layout)
    assert peak.total == totals.max() > 1.05 * totals.mean() and peak.rank == totals.argmax()


@pytest.mark.parametrize("num_mb", [1, 2, 3, 8])
def test_microbatches_in_flight(num_mb):
    """1F1B holds min(pp - rank, m) microbatches, GPipe all of them."""
    base = "pp4 dp2 ep2 zero1 mb1"
    one = ranks(f"{base} gpipe", 1)
    all_of_them, few = ranks(f"{base} gpipe", num_mb), ranks(f"{base} 1f1b", num_mb)
    for name in ("activations", "logits"):
        assert all_of_them[name] == pytest.approx(num_mb * one[name])
        assert few[name] == pytest.approx([min(4 - r, num_mb) * v for r, v in enumerate(one[name])])


def test_interleaving_holds_what_its_warm_up_starts():
    """Rank 0 starts 2(pp - 1) + (v - 1) pp chunks before its first backward (https://arxiv.org/abs/2104.04473), and then one more."""
    pp, v = 4, 2
    chunk = ranks("pp4 vpp2 dp2 ep2 zero1 mb1 interleaved rc:full", 8)["activations"][0]
    layer = 2.0 * SEQ * 2048
    assert chunk == pytest.approx((2 * (pp - 1) + (v - 1) * pp + 1) * layer)  # one layer a chunk of the 8-layer model


def test_a_paired_forward_takes_the_room_its_backward_frees():
    """Merged forward and backward need no second microbatch (https://arxiv.org/abs/2603.07685), but for the layer in hand."""
    made, layout = held("dp8 ep8 zero1 mb1 ov:ep")
    paired, plain = made.peak(layout).categories, ranks("dp8 ep8 zero1 mb1")
    layer = max(sum(made.parts.get(n, layout).saved for n in ("attention", kind)) for kind in ("moe", "dense"))
    assert paired["activations"] == plain["activations"][0] and paired["logits"] == plain["logits"][0]
    assert paired["working set"] == pytest.approx(plain["working set"][0] + layer)


def test_recompute_keeps_what_it_says():
    full, some, none = (ranks(f"dp8 ep8 zero1 mb1 {rc}") for rc in ("rc:full", "rc:norm+moe_act", ""))
    made, layout = held("dp8 ep8 zero1 mb1")
    model = made.scenario.model
    assert full["activations"][0] == pytest.approx(model.num_layers * 2 * SEQ * model.hidden_size)  # each layer's input
    rows, width = SEQ * model.top_k, model.moe_intermediate_size
    norms = (2 * model.num_layers + 1) * 2 * SEQ * model.hidden_size  # two a layer and the embedding's
    acts = model.layer_kinds().count("moe") * 2 * rows * width
    assert none["activations"][0] - some["activations"][0] == pytest.approx(norms + acts)
    assert full["working set"][0] > none["working set"][0] and full["logits"][0] == none["logits"][0] > 0


def test_low_precision_saves_gemm_inputs_only():
    """A core's bf16 output and the router's bf16 input stay, beside quantised copies of both."""
    made, layout = held("dp8 ep8 zero1 mb1 fp8")
    saved = {p.node.key: p.node.saved for name in ("attention", "moe") for p in made.parts.get(name, layout).forward}
    model = made.scenario.model
    values = SEQ * model.hidden_size
    assert saved["norm1"] == values and saved["norm2"] == 3 * values
    assert saved["core_attn"] == 3 * SEQ * model.num_heads * model.head_dim + 4 * SEQ * model.num_heads
    assert saved["permute"] == model.top_k * values


def test_gathered_weights_follow_the_prefetch_window():
    base = ranks("dp8 ep4 zero3 mb1")["gathered weights"][0]
    two = ranks("dp8 ep4 zero3 mb1 ov:fsdp2")["gathered weights"][0]
    made, layout = held("dp8 ep4 zero3 mb1")
    layers = [[made.parts.get(name, layout) for name in names] for names in (("attention", "moe"), ("attention", "dense"), ("head",))]
    largest = max(sum(p.dense_params + p.expert_params for p in parts) for parts in layers)
    assert two - base == pytest.approx(2 * 2 * largest)
    assert ranks("dp8 ep4 zero1 mb1")["gathered weights"][0] == 0


def test_fused_accumulation_leaves_one_gradient_a_weight_shape():
    """Transformer Engine's get_dummy_wgrad: bf16, one a shape, experts share theirs."""
    text = "dp8 ep8 zero1 mb1"
    base = load_stack("megatron_core")
    with_, without = (Evaluator(held(text)[0].scenario, stack=base.model_copy(update={"weight_grad_placeholders": flag})) for flag in (True, False))
    layout = held(text)[1]
    model = with_.scenario.model
    d, f, shared = model.hidden_size, model.moe_intermediate_size, model.shared_intermediate_size
    extra = with_.parts.get("moe", layout).transient - without.parts.get("moe", layout).transient
    assert extra == pytest.approx(2 * d * (3 * f + 3 * shared + model.num_experts))


# --- published figures --------------------------------------------------------------------------------------------------

OLMO = {  # layout, GPUs, GiB of https://allenai.org/papers/olmocore3 (recompute study; Table 6), 16,384 tokens a microbatch, 32 experts
    "dp4 ep4 zero1 mb2 syncfree ov:grad+param": (4, 103.03),
    "dp4 ep4 zero1 mb2 syncfree ov:grad+param rc:full": (4, 76.90),
    "dp8 ep8 zero1 mb2 syncfree ov:grad+param": (8, 77.85),
    "dp8 zero1 mb2 ov:grad+param": (8, 129.3),
}  # fmt: skip


def olmo(text, num_gpus):
    s = load_scenario("olmo_core3_new", ("model.num_experts=32", f"cluster.gpus_per_node={num_gpus}", "workload.global_batch_tokens=524288"))
    made = Evaluator(s)
    return made, made.legal(text)


@pytest.mark.parametrize("text", OLMO)
def test_olmo_core_3_peaks_within_3_percent(text):
    num_gpus, measured = OLMO[text]
    made, layout = olmo(text, num_gpus)
    assert made.peak(layout).total / GIB == pytest.approx(measured, rel=0.03)


def test_olmo_core_3_static_and_saved_bytes():
    """Static 62.2 GiB on 4 GPUs; one routed block keeps 29.5 * T * d bf16 values (same report), which counts an expert output that
    the stack here does not keep: 10%."""
    made, layout = olmo("dp4 ep4 zero1 mb2 syncfree ov:grad+param", 4)
    found = made.peak(layout).categories
    assert sum(found[n] for n in ("weights", "gradients", "optimizer")) / GIB == pytest.approx(62.2, rel=0.005)
    block = sum(made.parts.get(n, layout).saved for n in ("attention", "moe"))
    assert block == pytest.approx(2 * 29.5 * 16384 * 4096, rel=0.10)


def deepseek_categories(extra="", outputs=False):
    """GB by category on the heaviest rank of DeepSeek-V3 on PP4 VPP4 EP64 (256 GPUs), the layout of that paper's own benchmark."""
    stack = load_stack("megatron_core").model_copy(update={"saves_expert_output": outputs})
    made, layout = deepseek(f"pp4 vpp4 dp64 ep64 zero1 mb1 interleaved {extra}", stack=stack)
    return {name: bytes_ / 1e9 for name, bytes_ in made.peak(layout).categories.items()}


def test_deepseek_v3_in_megatron():
    """199.5 GB = 36.4 weights and gradients, 32.1 main weights and optimizer states, 131.0 activations: Table 3 of
    https://arxiv.org/abs/2603.07685. It names neither layout nor rank: 10% for each part (a layer more or less), 5% for the sum."""
    found = deepseek_categories()
    parts = (found["weights"] + found["gradients"], found["optimizer"], found["activations"])
    assert parts == pytest.approx((36.4, 32.1, 131.0), rel=0.10)
    assert sum(parts) == pytest.approx(199.5, rel=0.05)


def test_what_deepseek_v3_saves():
    """Same paper: 30.4 GB by recomputing MLA's up-projection, 26.3 GB by not keeping expert outputs, about 16 of 131 GB by FP8 inputs of
    linear layers. Layers in flight cancel in ratios: 5% for the first, 20% for the rounded last."""
    base, kept = deepseek_categories()["activations"], deepseek_categories(outputs=True)["activations"]
    up, low = (base - deepseek_categories(text)["activations"] for text in ("rc:mla_up", "mxfp8"))
    assert up / (kept - base) == pytest.approx(30.4 / 26.3, rel=0.05)
    assert low / kept == pytest.approx(16.0 / 131.0, rel=0.20)


@pytest.fixture(scope="module")
def published():
    return check(read_rows(MEASUREMENTS / "published_runs.csv"))


def test_runs_whose_allocated_bytes_are_printed(published):
    """Median within 6%, never under by more than 5%: PyTorch's peak allocated bytes, dtypes documented."""
    known = [c for c in published if c.figure == "allocated" and c.dtypes == "documented"]
    assert len(known) >= 43
    errors = [c.error for c in known]
    assert np.median(np.abs(errors)) <= 0.06 and min(errors) > -0.05 and max(errors) < 0.10


def test_expert_models_in_megatron_bridge(published):
    """The recompute sweep of Moonlight on 8 H100 (Megatron-Bridge's memory-tuning card): within 5%, and in its order."""
    sweep = [c for c in published if c.id.startswith("mbpr-moonlight")]
    assert len(sweep) == 6 and max(abs(c.error) for c in sweep) < 0.05
    none, selective = (next(c for c in sweep if c.id.endswith(end)) for end in ("rc-none", "rc-ln-moe_act"))
    assert selective.predicted < none.predicted


def test_table_says_what_each_figure_counts(published):
    lines = table(published)
    assert any(line.startswith("simumax") and "allocated" in line for line in lines) and any("torchtitan" in line and "reserved" in line for line in lines)
    counts = [int(n) for n in re.findall(r" n +(\d+) ", "\n".join(lines[:-1]))]
    assert sum(counts) == len(published)
    assert lines[-1].startswith("reserved beyond allocated")
