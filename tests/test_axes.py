"""Does every axis conserve work and weights, send what it receives, and leave a block alone at degree 1?"""

import math
import random

import pytest

from moesim import axes, transformer
from moesim.block import COMM, backward
from moesim.layout import parse_layout
from moesim.load import load_model
from moesim.ops import Attention, Dispatch, Gemm, GroupedGemm
from moesim.transformer import Work

MODELS = ["olmo_core3_seed", "deepseek_v3", "gpt_oss_20b", "qwen3_30b_a3b", "mixtral_8x7b"]
SEQ = 4096


def parts(model, work):
    made = {"embedding": transformer.embedding(model, work), "head": transformer.head(model, work)}
    made |= {f"attention{w}": transformer.attention(model, work, w) for w in {model.window(i) for i in range(model.num_layers)}}
    kinds = set(model.layer_kinds())
    return made | ({"dense": transformer.dense(model, work)} if "dense" in kinds else {}) | ({"moe": transformer.moe(model, work)} if "moe" in kinds else {})


def fold(model, layout, block_of):
    """Sum over a whole model of ``block_of(block)`` on one rank, pipeline ignored."""
    work = Work(layout.mb, SEQ)
    total = 0.0
    made = parts(model, work)
    for i, kind in enumerate(model.layer_kinds()):
        for name in (f"attention{model.window(i)}", kind):
            total += block_of(axes.shard(made[name], layout, model))
    return total + sum(block_of(axes.shard(made[name], layout, model)) for name in ("embedding", "head"))


@pytest.mark.parametrize("name", MODELS)
def test_fold_over_blocks_is_the_ledger(name):
    """Two counts that share no code: the blocks and the closed form."""
    model, layout = load_model(name), parse_layout("dp1")
    assert fold(model, layout, lambda b: sum(b.params)) == model.num_params
    extra = fold(model, layout, lambda b: sum(n.op.flops for n in b if isinstance(n.op, Attention)))
    counted = fold(model, layout, lambda b: b.flops() + backward(b).flops())
    # Flash attention's backward repeats the score product: 2.5 times forward against the model's 2.
    assert counted - 0.5 * extra == pytest.approx(model.flops_per_token(SEQ) * SEQ, rel=1e-12)


def legal_degrees(model, rng):
    tp = rng.choice([t for t in (1, 2, 4) if model.num_kv_heads % t == 0])
    cp, etp = rng.choice([1, 2, 4]), rng.choice([1, 2])
    ep = rng.choice([e for e in (1, 2, 4, 8) if model.num_experts % e == 0])
    folded = cp * tp
    dp = math.lcm(folded, ep * etp) // folded * rng.choice([1, 2])
    return parse_layout(f"dp{dp} cp{cp} tp{tp} ep{ep} etp{etp} {rng.choice(['a2a', 'dedup', 'syncfree'])}")


@pytest.mark.parametrize("name", MODELS)
def test_flops_and_parameters_are_conserved_over_the_world(name):
    model, rng = load_model(name), random.Random(name)
    one = fold(model, parse_layout("dp1"), lambda b: b.flops())
    for _ in range(12):
        layout = legal_degrees(model, rng)
        per_rank = fold(model, layout, lambda b: b.flops())
        assert per_rank * layout.world == pytest.approx(one * layout.dp, rel=1e-9), str(layout)
        expert = fold(model, layout, lambda b: b.params[1])
        whole = fold(model, parse_layout("dp1"), lambda b: b.params[1])
        assert expert * layout.ep * layout.etp == pytest.approx(whole), str(layout)


@pytest.mark.parametrize("name", MODELS)
def test_degree_one_is_the_identity(name):
    model = load_model(name)
    for block in parts(model, Work(1, SEQ)).values():
        assert axes.shard(block, parse_layout("dp1"), model) is block


@pytest.mark.parametrize("name", MODELS)
def test_expert_parallelism_never_changes_attention(name):
    model = load_model(name)
    work = Work(1, SEQ)
    block = transformer.attention(model, work, None)
    assert axes.shard(block, parse_layout("dp8 ep8"), model) == axes.shard(block, parse_layout("dp8"), model)


@pytest.mark.parametrize("name", [m for m in MODELS])
def test_experts_are_divided_by_etp_and_ep_never_by_tp_or_dp(name):
    model = load_model(name)
    whole = transformer.moe(model, Work(1, SEQ)).params[1]
    for text, parts_ in (("dp8 ep8", 8), ("dp4 tp2 ep2", 2), ("dp4 tp2 ep4 etp2", 8), ("dp2 cp2 tp2", 1)):
        assert axes.shard(transformer.moe(model, Work(1, SEQ)), parse_layout(text), model).params[1] == pytest.approx(whole / parts_)


def test_every_collective_has_its_adjoint_and_bytes_return():
    """Dispatch forward = combine of gradients backward, and the other way round; gathers become scatters of the same size."""
    model = load_model("deepseek_v3")
    layout = parse_layout("dp8 cp2 tp2 ep16 etp2 dedup")
    block = axes.shard(transformer.moe(model, Work(1, SEQ)), layout, model)
    forward = [n.op for n in block if n.stream == COMM]
    adjoint = [n.op for n in backward(block) if n.stream == COMM and n.phase == "I"]
    assert len(forward) == len(adjoint)
    for op, mirrored in zip(forward, reversed(adjoint)):
        if isinstance(op, Dispatch):
            assert mirrored.combine is not op.combine and mirrored.tokens == op.tokens and mirrored.group == op.group
            assert op.bytes <= op.tokens * op.top_k * op.hidden * 2.0
        else:
            assert mirrored.bytes == op.bytes and mirrored.group == op.group and {op.kind, mirrored.kind} in ({"all_gather", "reduce_scatter"}, {"all_reduce"}, {"all_to_all"})


def test_adjoint_of_a_gemm_is_two_gemms_of_the_same_work():
    op = Gemm(512, 1024, 256)
    (dgrad,), (wgrad,) = op.adjoint()
    assert dgrad.flops == wgrad.flops == op.flops and (dgrad.m, dgrad.n, dgrad.k) == (512, 256, 1024) and (wgrad.m, wgrad.n, wgrad.k) == (256, 1024, 512)
    grouped = GroupedGemm(4, 2048.0, 1024, 256)
    (dgrad,), (wgrad,) = grouped.adjoint()
    assert dgrad.flops == wgrad.flops == grouped.flops and wgrad.grad == "weight"


@pytest.mark.parametrize("roles", [("full",), ("norm",), ("moe_act", "norm"), ("experts",), ("core_attn",), ("shared", "mlp_act")])
def test_recompute_trades_saved_bytes_for_exactly_its_forward_work(roles):
    model = load_model("deepseek_v3")
    layout = parse_layout("dp8 ep8")
    for block in (axes.shard(b, layout, model) for b in parts(model, Work(1, SEQ)).values()):
        plain, again = backward(block), backward(block, frozenset(roles))
        rerun = [n for n in again if n.phase == "R"]
        assert again.flops() == pytest.approx(plain.flops() + sum(n.op.flops for n in rerun))
        kept = block.saved_bytes(frozenset(roles))
        dropped = sum(n.saved for n in block if n.key + ".R" in {r.key for r in rerun})
        assert kept == pytest.approx(block.saved_bytes() - dropped) and (kept < block.saved_bytes() or not dropped)


def test_saved_activations_of_the_seed_block_are_the_published_count():
    """29.5 T*d bf16 values a routed block at top-4: attention 4.5, norms 2, routed 20, shared 3 (https://allenai.org/papers/olmocore3).
    QK norm keeps its 1.25 on top, which that count leaves out."""
    model = load_model("olmo_core3_seed")
    work = Work(2, 8192, saves_expert_output=True)
    kept = transformer.attention(model, work, None).saved_bytes() + transformer.moe(model, work).saved_bytes()
    values = kept / (2.0 * work.tokens * model.hidden_size)
    assert values == pytest.approx(29.5 + 1.5, abs=0.6)
