"""Does a step change parameters by the rule it names, and by nothing else? (One process; sharded runs are in test_optim_sharded.)"""

from __future__ import annotations

import copy
import io
import math

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

from moetrain.optim import (
    OPTIMIZERS,
    AdamW,
    Muon,
    OptimizerSpec,
    Schedule,
    SkipGuard,
    Storage,
    build_optimizer,
    clip_,
    grad_norm,
    guarded_step,
    lr_factor,
    set_lr,
)
from moetrain.optim import adamw as adamw_file
from moetrain.optim.groups import decays, is_hidden_matrix, make_groups
from moetrain.optim.matrices import chunk_sizes
from moetrain.optim.muon import orthogonalise
from moetrain.optim.rounding import MAX_BETA_NEAREST, stochastic_bfloat16

SHAPES = {"a.weight": (7, 5), "b.bias": (3,), "c.experts.gate_up": (4, 2, 3, 5), "d.norm.weight": (1,), "e.weight": (5, 11)}


def parameters(seed: int = 0, dtype: torch.dtype = torch.float32) -> list[tuple[str, nn.Parameter]]:
    generator = torch.Generator().manual_seed(seed)
    return [(name, nn.Parameter(torch.randn(shape, generator=generator, dtype=dtype))) for name, shape in SHAPES.items()]


def set_grads(named, seed: int, without: tuple[str, ...] = ()) -> None:
    generator = torch.Generator().manual_seed(1000 + seed)
    for name, p in named:
        grad = torch.randn(p.shape, generator=generator, dtype=p.dtype)
        p.grad = None if name in without else grad


def adamw(named, **settings) -> AdamW:
    return AdamW([{"params": named}], 1e-2, **settings)


def values(named) -> list[torch.Tensor]:
    return [p.detach().clone() for _, p in named]


def same(a, b, **tolerance) -> None:
    for x, y in zip(a, b, strict=True):
        torch.testing.assert_close(x, y, **(tolerance or {"rtol": 0, "atol": 0}))


# --- AdamW ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fused", [True, False])
def test_adamw_is_torchs(fused):
    """Bitwise with torch's fused kernel, to 1e-6 with its plain one; over groups of different decay, with gradients missing now and then."""
    mine, theirs = parameters(), parameters()
    groups = [{"params": mine[:2], "weight_decay": 0.1}, {"params": mine[2:], "weight_decay": 0.0}]
    optimizer = AdamW(groups, 1e-2, betas=(0.9, 0.99), eps=1e-6)
    reference = torch.optim.AdamW([{"params": [p for _, p in theirs[:2]], "weight_decay": 0.1},
                                   {"params": [p for _, p in theirs[2:]], "weight_decay": 0.0}],
                                  lr=1e-2, betas=(0.9, 0.99), eps=1e-6, fused=fused)
    for step in range(6):
        missing = ("b.bias",) if step == 2 else ("a.weight", "e.weight") if step == 4 else ()
        set_grads(mine, step, missing)
        set_grads(theirs, step, missing)
        optimizer.step()
        reference.step()
    same(values(mine), values(theirs), **({} if fused else {"rtol": 1e-6, "atol": 1e-6}))
    for (_, p), (_, q) in zip(mine, theirs, strict=True):
        assert optimizer.state[p]["step"] == reference.state[q]["step"]
        torch.testing.assert_close(optimizer.state[p]["exp_avg"], reference.state[q]["exp_avg"])


def test_a_shard_that_is_not_contiguous_steps_alike():
    """The kernel walks raw memory; anything in another order takes the other path."""
    plain, other = torch.randn(6, 8), torch.randn(6, 8)
    rows, columns = nn.Parameter(plain.clone()), nn.Parameter(plain.t().contiguous().t())
    assert not columns.is_contiguous()
    for p in (rows, columns):
        optimizer = adamw([("x", p)])
        for _ in range(3):
            p.grad = other.clone()
            optimizer.step()
    torch.testing.assert_close(rows.detach(), columns.detach(), rtol=1e-6, atol=1e-7)


def test_moments_live_from_the_start_and_a_missing_gradient_touches_nothing():
    named = parameters()
    optimizer = adamw(named)
    before = values(named)
    assert set(optimizer.state) == {p for _, p in named}
    optimizer.step()
    same(values(named), before)
    assert all(float(optimizer.state[p]["step"]) == 0 for _, p in named)


def test_bf16_moments_follow_the_rule_with_rounding(monkeypatch):
    """The path against the formula written out, moments rounded between steps; cutting it into small batches changes nothing."""
    named = parameters()
    optimizer = adamw(named, betas=(0.9, 0.95), weight_decay=0.1, storage=Storage("bf16"))
    expected = [(p.detach().double(), torch.zeros(p.shape).double(), torch.zeros(p.shape).double()) for _, p in named]
    cut = parameters()
    in_batches = adamw(cut, betas=(0.9, 0.95), weight_decay=0.1, storage=Storage("bf16"))
    for step in range(1, 5):
        set_grads(named, step)
        set_grads(cut, step)
        optimizer.step()
        with monkeypatch.context() as patch:
            patch.setattr(adamw_file, "BATCH_ELEMENTS", 7)
            in_batches.step()
        for i, (_, p) in enumerate(named):
            w, m, v = expected[i]
            g = p.grad.double()
            m, v = 0.9 * m + 0.1 * g, 0.95 * v + 0.05 * g * g
            w = w * (1 - 1e-3) - 1e-2 * (m / (1 - 0.9**step)) / ((v / (1 - 0.95**step)).sqrt() + 1e-8)
            expected[i] = (w, m.bfloat16().double(), v.bfloat16().double())
    for (_, p), (w, m, v) in zip(named, expected, strict=True):
        assert optimizer.state[p]["exp_avg"].dtype == torch.bfloat16
        # A moment on the edge between two bfloat16 may fall to either side, and take the parameter along by 2^-8 of a step.
        torch.testing.assert_close(p.detach().double(), w, rtol=1e-5, atol=1e-4)
        torch.testing.assert_close(optimizer.state[p]["exp_avg"].double(), m, rtol=2**-7, atol=1e-6)
    same(values(named), values(cut))


def test_bf16_training_ends_near_fp32_training():
    """Least squares on 64 numbers: both come within a few steps' length of the optimum."""
    target = torch.randn(64, generator=torch.Generator().manual_seed(0))
    ends: dict[str, float] = {}
    for moments in ("fp32", "bf16"):
        p = nn.Parameter(torch.zeros(64))
        optimizer = AdamW([{"params": [("x", p)]}], 3e-2, weight_decay=0.0, storage=Storage(moments))
        for step in range(600):
            set_lr(optimizer, 3e-2 * lr_factor(step, Schedule(600, "cosine")))
            p.grad = p.detach() - target
            optimizer.step()
        ends[moments] = float((p.detach() - target).norm())
    assert ends["fp32"] < 0.02 and ends["bf16"] < 0.02


def test_nearest_rounding_freezes_a_slow_moment_and_stochastic_rounding_does_not():
    """With no gradient left a second moment should halve in ln 2 / (1 - beta) = 693 steps."""
    start = torch.linspace(1, 2, 129)[:-1].bfloat16()
    ends = {}
    for rounding in ("nearest", "stochastic"):
        p = nn.Parameter(torch.zeros(128))
        optimizer = AdamW([{"params": [("x", p)]}], 0.0, betas=(0.9, 0.9), storage=Storage("bf16", rounding))
        optimizer.param_groups[0]["beta2"] = 0.999
        optimizer.state[p]["exp_avg_sq"].copy_(start)
        for _ in range(693):
            p.grad = torch.zeros(128)
            optimizer.step()
        ends[rounding] = optimizer.state[p]["exp_avg_sq"].float()
    assert torch.equal(ends["nearest"], start.float())
    assert float(ends["stochastic"].mean() / start.float().mean()) == pytest.approx(0.5, abs=0.02)


def test_a_decay_that_nearest_rounding_would_freeze_is_refused():
    with pytest.raises(ValueError, match="beta2 0.999: bf16 moments rounded to nearest stand still above 0.9961"):
        adamw(parameters(), betas=(0.9, 0.999), storage=Storage("bf16"))
    adamw(parameters(), betas=(0.9, 0.999), storage=Storage("bf16", "stochastic"))
    adamw(parameters(), betas=(0.9, 0.999))
    # The bound: just inside it the smallest number of a binade still moves, just outside it some number doesn't.
    numbers = torch.linspace(1, 2, 129)[:-1]
    assert (numbers.mul(MAX_BETA_NEAREST - 1e-4).bfloat16() != numbers).all()
    assert (numbers.mul(MAX_BETA_NEAREST + 1e-4).bfloat16() == numbers).any()


@given(st.floats(-(2.0**99), 2.0**99, width=32))
@settings(max_examples=60, deadline=None)
def test_stochastic_rounding_goes_to_a_neighbour_with_the_right_mean(x):
    value = torch.full((4096,), x)
    rounded = stochastic_bfloat16(value, torch.Generator().manual_seed(3)).float()
    seen = rounded.unique()
    bits = value[:1].view(torch.int32)
    low, part = (bits & -65536).view(torch.float32), float(bits & 65535) / 65536
    high = ((bits & -65536) + 65536).view(torch.float32)
    assert set(seen.tolist()) <= {float(low), float(high)}
    assert float((rounded == high).double().mean()) == pytest.approx(part, abs=5 * math.sqrt(max(part * (1 - part), 1e-9) / 4096) + 1e-9)


def test_stochastic_rounding_keeps_what_is_not_finite_and_repeats():
    odd = torch.tensor([math.inf, -math.inf, math.nan, 0.0, -0.0, 1.5])
    out = stochastic_bfloat16(odd, torch.Generator().manual_seed(0)).float()
    torch.testing.assert_close(out, odd, equal_nan=True, rtol=0, atol=0)
    runs = []
    for _ in range(2):
        named = parameters()
        optimizer = adamw(named, storage=Storage("bf16", "stochastic", seed=5))
        for step in range(3):
            torch.manual_seed(step * 17)  # the global generator plays no part
            set_grads(named, step)
            optimizer.step()
        runs.append(values(named))
    same(*runs)


def test_no_two_pieces_of_a_parameter_round_by_the_same_numbers(monkeypatch):
    monkeypatch.setattr(adamw_file, "BATCH_ELEMENTS", 256)
    p = nn.Parameter(torch.zeros(512))
    optimizer = AdamW([{"params": [("x", p)]}], 1e-2, storage=Storage("bf16", "stochastic"))
    p.grad = torch.rand(256, generator=torch.Generator().manual_seed(0)).repeat(2)
    optimizer.step()
    halves = optimizer.state[p]["exp_avg"].view(2, 256)
    assert 64 < int((halves[0] != halves[1]).sum()) < 192


# --- Muon -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(1, 16, 16), (3, 8, 24), (3, 24, 8), (2, 1, 7), (2, 64, 32)])
def test_orthogonalise_keeps_the_directions_and_evens_the_values(shape):
    """Against the singular value decomposition: the same U and V, all values between 0.65 and 1.25."""
    generator = torch.Generator().manual_seed(0)
    u, _, v = torch.linalg.svd(torch.randn(shape, generator=generator), full_matrices=False)
    s = torch.linspace(1.0, 0.1, u.shape[-1])
    result = orthogonalise(u @ torch.diag(s) @ v)
    core = u.mT @ result @ v.mT
    diagonal = core.diagonal(dim1=-2, dim2=-1)
    assert diagonal.min() > 0.65 and diagonal.max() < 1.25
    torch.testing.assert_close(core, torch.diag_embed(diagonal), rtol=0, atol=2e-4)


def test_orthogonalise_follows_the_polynomial_and_ignores_length():
    """A diagonal matrix: each value goes its own way by x -> ax + bx^3 + cx^5."""
    s = torch.tensor([1.0, 0.5, 0.01, 0.0])
    expected = s.double() / s.double().norm()
    for _ in range(5):
        expected = 3.4445 * expected - 4.7750 * expected**3 + 2.0315 * expected**5
    torch.testing.assert_close(orthogonalise(torch.diag(s)[None])[0].diagonal().double(), expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(orthogonalise(1e-3 * torch.diag(s)[None]), orthogonalise(1e3 * torch.diag(s)[None]), rtol=2e-3, atol=1e-4)
    assert torch.equal(orthogonalise(torch.zeros(2, 3, 4)), torch.zeros(2, 3, 4))


@pytest.mark.parametrize("scale, theirs", [("spectral", "original"), ("match_rms", "match_rms_adamw")])
@pytest.mark.parametrize("nesterov", [True, False])
def test_muon_is_torchs(scale, theirs, nesterov):
    """With the iteration in bfloat16 as torch has it."""
    start = {"tall": torch.randn(12, 5), "wide": torch.randn(6, 14), "twin": torch.randn(12, 5)}
    mine = [(name, nn.Parameter(value.clone())) for name, value in start.items()]
    reference = [nn.Parameter(value.clone()) for value in start.values()]
    optimizer = Muon([{"params": mine, "matrices": True}], 0.02, momentum=0.9, nesterov=nesterov, scale=scale, dtype=torch.bfloat16)
    torchs = torch.optim.Muon(reference, lr=0.02, momentum=0.9, nesterov=nesterov, weight_decay=0.1, adjust_lr_fn=theirs)
    for step in range(4):
        set_grads(mine, step)
        set_grads([("", p) for p in reference], step)
        optimizer.step()
        torchs.step()
    # One rounding of bfloat16 in an update of length 0.02 x scale.
    same(values(mine), [p.detach() for p in reference], rtol=0, atol=2e-3)


def test_a_stack_of_experts_is_as_many_matrices(monkeypatch):
    """(E, 2, f, d) steps as 2E parameters (f, d) would, in whatever batches."""
    whole = torch.randn(4, 2, 6, 10)
    stack = [("experts.gate_up", nn.Parameter(whole.clone()))]
    parts = [(f"m{i}", nn.Parameter(m.clone())) for i, m in enumerate(whole.flatten(0, 1))]
    for named, most in ((stack, 1 << 26), (parts, 120)):
        monkeypatch.setattr("moetrain.optim.muon.BATCH_ELEMENTS", most)
        optimizer = Muon([{"params": named, "matrices": True}], 0.02)
        for step in range(3):
            grads = torch.randn(whole.shape, generator=torch.Generator().manual_seed(step))
            for (_, p), grad in zip(named, [grads] if named is stack else grads.flatten(0, 1), strict=True):
                p.grad = grad.clone()
            optimizer.step()
    torch.testing.assert_close(stack[0][1].detach().flatten(0, 1), torch.stack([p.detach() for _, p in parts]), rtol=1e-5, atol=1e-6)


def test_an_expert_without_tokens_only_decays():
    p = nn.Parameter(torch.randn(3, 4, 6))
    before = p.detach().clone()
    optimizer = Muon([{"params": [("x", p)], "matrices": True}], 0.1, weight_decay=0.5)
    p.grad = torch.randn(3, 4, 6)
    p.grad[1] = 0
    optimizer.step()
    torch.testing.assert_close(p.detach()[1], before[1] * 0.95)
    assert p.isfinite().all() and not torch.allclose(p.detach()[0], before[0] * 0.95)


@pytest.mark.parametrize("rows, columns", [(64, 64), (32, 128), (128, 32)])
def test_matched_updates_are_as_long_as_adamws(rows, columns):
    """A root mean square near 0.2 an entry (full rank, values near 1: sqrt(min) over sqrt(rows x columns), times 0.2 sqrt(max))."""
    p = nn.Parameter(torch.zeros(rows, columns))
    optimizer = Muon([{"params": [("x", p)], "matrices": True}], 1.0, weight_decay=0.0)
    p.grad = torch.randn(rows, columns)
    optimizer.step()
    assert 0.14 < float(p.detach().square().mean().sqrt()) < 0.25


def test_muon_takes_hidden_matrices_and_leaves_the_rest_to_adamw():
    model = little_model()
    optimizer = build_optimizer(list(model.items()), OptimizerSpec("muon", 1e-2))
    matrices = {optimizer.names[p] for group in optimizer.param_groups if group["matrices"] for p in group["params"]}
    assert matrices == {f"layers.0.{name}" for name in ("attention.qkv.weight", "moe.experts.gate_up", "moe.experts.down", "mlp.gate.weight")}
    with pytest.raises(ValueError, match="b is no matrix"):
        Muon([{"params": [("b", nn.Parameter(torch.zeros(3)))], "matrices": True}], 1e-2)
    others = [(name, p) for name, p in model.items() if name not in matrices]
    twins = [(name, nn.Parameter(p.detach().clone())) for name, p in others]
    plain = build_optimizer(twins, OptimizerSpec("adamw", 1e-2))
    set_grads(others, 1)
    set_grads(twins, 1)
    optimizer.step()
    plain.step()
    same(values(others), values(twins))


# --- groups -----------------------------------------------------------------------------------------------------------------


def little_model() -> dict[str, nn.Parameter]:
    shapes = {
        "embed.weight": (9, 4), "layers.0.norm1.weight": (4,), "layers.0.attention.qkv.weight": (8, 4), "layers.0.attention.qkv.bias": (8,),
        "layers.0.attention.q_norm.weight": (2,), "layers.0.attention.sinks": (2,), "layers.0.mlp.gate.weight": (6, 4),
        "layers.0.moe.router.weight": (4, 4), "layers.0.moe.router.bias": (4,), "layers.0.moe.experts.gate_up": (4, 2, 3, 4),
        "layers.0.moe.experts.down": (4, 4, 3), "layers.0.moe.experts.gate_up_bias": (4, 2, 3), "layers.0.moe.experts.down_bias": (4, 4),
        "layers.0.moe.shared_gate.weight": (1, 4), "final_norm.weight": (4,), "head.weight": (9, 4),
    }  # fmt: skip
    return {name: nn.Parameter(torch.randn(shape)) for name, shape in shapes.items()}


def test_norms_biases_and_sinks_never_decay_and_the_embedding_by_option():
    model = little_model()
    still = {"layers.0.norm1.weight", "layers.0.attention.qkv.bias", "layers.0.attention.q_norm.weight", "layers.0.attention.sinks",
             "layers.0.moe.router.bias", "layers.0.moe.experts.gate_up_bias", "layers.0.moe.experts.down_bias", "final_norm.weight"}
    for embedding in (False, True):
        groups = make_groups(list(model.items()), 0.1, decay_embedding=embedding)
        by_decay = {group["weight_decay"]: {name for name, _ in group["params"]} for group in groups}
        assert by_decay[0.0] == still | (set() if embedding else {"embed.weight"})
        assert by_decay[0.0] | by_decay[0.1] == set(model)
    assert not decays("embed_norm.weight") and not decays("layers.2.norm_branch.weight") and decays("layers.0.attention.up_q.weight")
    assert not is_hidden_matrix("layers.0.moe.router.weight", model["layers.0.moe.router.weight"])


def test_frozen_parameters_are_left_out_and_no_group_is_empty():
    model = little_model()
    model["embed.weight"].requires_grad_(False)
    optimizer = build_optimizer([(n, p) for n, p in model.items() if p.ndim > 1 and "bias" not in n], OptimizerSpec())
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1]
    assert model["embed.weight"] not in optimizer.state


def test_a_group_has_its_own_multiple_of_the_learning_rate():
    optimizer = build_optimizer(list(little_model().items()), OptimizerSpec("muon", 1e-2, matrix_lr_scale=3.0))
    set_lr(optimizer, 0.5)
    assert {(group["matrices"], group["lr"]) for group in optimizer.param_groups} == {(True, 1.5), (False, 0.5)}


@pytest.mark.parametrize("change, message", [
    ({"kind": "adam"}, "optimizer 'adam': legal are adamw, muon"),
    ({"moments": "fp8"}, "optimizer moments 'fp8': legal are fp32, bf16"),
    ({"rounding": "up"}, "optimizer rounding 'up': legal are nearest, stochastic"),
    ({"lr": -1.0}, "optimizer lr -1.0"), ({"lr": math.nan}, "optimizer lr nan"), ({"betas": (0.9, 1.0)}, "optimizer beta2 1.0"),
    ({"kind": "muon", "scale": "rms"}, "optimizer scale 'rms': legal are match_rms, spectral"),
    ({"kind": "muon", "momentum": 1.0}, "optimizer momentum 1.0"),
    ({"kind": "muon", "momentum": 0.999, "moments": "bf16"}, "optimizer momentum 0.999: bf16 moments"),
])  # fmt: skip
def test_bad_settings_are_refused_in_one_line(change, message):
    with pytest.raises(ValueError, match=message) as seen:
        build_optimizer(list(little_model().items()), OptimizerSpec(**change))
    assert "\n" not in str(seen.value)


def test_bad_parameters_are_refused():
    p = nn.Parameter(torch.zeros(2))
    with pytest.raises(ValueError, match="at least one parameter"):
        adamw([])
    with pytest.raises(ValueError, match="named twice: x"):
        adamw([("x", p), ("x", nn.Parameter(torch.zeros(2)))])
    with pytest.raises(ValueError, match="parameter x has no memory yet"):
        adamw([("x", nn.Parameter(torch.zeros(2, device="meta")))])
    with pytest.raises(ValueError, match="takes no closure"):
        adamw([("x", p)]).step(lambda: 0)


# --- clipping ---------------------------------------------------------------------------------------------------------------


def test_the_norm_and_the_clip_are_torchs():
    named, theirs = parameters(), parameters()
    for step, most in ((0, 1.0), (1, 1e6)):
        set_grads(named, step, ("b.bias",))
        set_grads(theirs, step, ("b.bias",))
        before = [p.grad.clone() for _, p in named if p.grad is not None]
        norm = grad_norm([named[:2], named[2:]])
        clip_([named[:2], named[2:]], norm, most)
        expected = torch.nn.utils.clip_grad_norm_([p for _, p in theirs], most)
        assert float(norm) == pytest.approx(float(expected), rel=1e-6)
        for (_, p), (_, q) in zip(named, theirs, strict=True):
            if p.grad is not None:
                torch.testing.assert_close(p.grad, q.grad, rtol=1e-5, atol=1e-7)
        if most > float(norm):
            same([p.grad for _, p in named if p.grad is not None], before)


def test_the_norm_of_nothing_of_empty_and_of_huge_gradients():
    p, q = nn.Parameter(torch.zeros(0, 4)), nn.Parameter(torch.zeros(3))
    assert float(grad_norm([])) == 0 and float(grad_norm([[("q", q)]])) == 0
    p.grad, q.grad = torch.zeros(0, 4), torch.full((3,), 1e30)
    assert float(grad_norm([[("p", p), ("q", q)]])) == pytest.approx(math.sqrt(3) * 1e30)
    q.grad[1] = math.nan
    assert math.isnan(float(grad_norm([[("p", p), ("q", q)]])))
    q.grad[1] = math.inf
    assert math.isinf(float(grad_norm([[("p", p), ("q", q)]])))


def test_narrow_gradients_are_scaled_by_the_exact_factor():
    """0.9973, which bfloat16 would make 0.9961."""
    p = nn.Parameter(torch.zeros(128, dtype=torch.bfloat16))
    p.grad = torch.linspace(1, 2, 129)[:-1].bfloat16()
    expected = (p.grad.float() * 0.9973).bfloat16()
    clip_([[("p", p)]], torch.tensor(16.0).double(), 16 * 0.9973)
    assert torch.equal(p.grad, expected)


# --- skipped steps ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", list(OPTIMIZERS))
@pytest.mark.parametrize("moments, rounding", [("fp32", "nearest"), ("bf16", "stochastic")])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_skipped_step_leaves_no_trace(kind, moments, rounding, bad):
    """Bit for bit, and so do the steps after it: they equal those of a run that never saw the bad batch."""
    model = little_model()
    named, clean = list(model.items()), [(n, nn.Parameter(p.detach().clone())) for n, p in model.items()]
    spec = OptimizerSpec(kind, 1e-2, moments=moments, rounding=rounding)
    optimizer, other = build_optimizer(named, spec), build_optimizer(clean, spec)
    guard, calm = SkipGuard(), SkipGuard()
    step_of(clean, other, calm, 0)
    step_of(named, optimizer, guard, 0)
    before, state = values(named), copy.deepcopy(optimizer.state_dict()["state"])
    assert step_of(named, optimizer, guard, 7, bad).skip
    assert all(p.grad is None for _, p in named)
    same(values(named), before)
    for key, kept in optimizer.state_dict()["state"].items():
        same(list(kept.values()), list(state[key].values()))
    for step in (1, 2):
        assert not step_of(named, optimizer, guard, step).skip and not step_of(clean, other, calm, step).skip
    same(values(named), values(clean))


def step_of(named, optimizer, guard, seed: int, poison: float | None = None):
    set_grads(named, seed)
    if poison is not None:
        named[2][1].grad.view(-1)[1] = poison
    norm = grad_norm([named])
    clip_([named], norm, 1.0)
    return guarded_step(optimizer, guard, seed, 1.0, float(norm))


@pytest.mark.parametrize("change", [{"window": 1}, {"sigma": 0.5}, {"max_consecutive": 0}])
def test_a_guard_out_of_range_is_refused(change):
    with pytest.raises(ValueError, match=f"optimizer skip {next(iter(change))}"):
        SkipGuard(**change)


# --- checkpoints ------------------------------------------------------------------------------------------------------------


class Bag(nn.Module):
    """A module whose parameters have the names of a little model."""

    def __init__(self, model: dict[str, nn.Parameter]) -> None:
        super().__init__()
        for name, parameter in model.items():
            owner = self
            *path, last = name.split(".")
            for part in path:
                if part not in owner._modules:
                    owner.add_module(part, nn.Module())
                owner = owner._modules[part]
            owner.register_parameter(last, parameter)


@pytest.mark.parametrize("kind", list(OPTIMIZERS))
@pytest.mark.parametrize("moments, rounding", [("fp32", "nearest"), ("bf16", "nearest")])
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_checkpoint_carries_on_bit_for_bit(tmp_path, kind, moments, rounding):
    """Through torch's distributed checkpoint; bfloat16 moments stay bfloat16, settings stay the new run's."""
    spec = OptimizerSpec(kind, 1e-2, moments=moments, rounding=rounding)
    model = little_model()
    named, bag = list(model.items()), Bag(model)
    optimizer = build_optimizer(named, spec)
    for step in range(3):
        set_grads(named, step, ("layers.0.mlp.gate.weight",) if step == 1 else ())
        optimizer.step()
    dcp.save(get_optimizer_state_dict(bag, optimizer), checkpoint_id=str(tmp_path / "c"))

    fresh = {name: nn.Parameter(p.detach().clone()) for name, p in model.items()}
    other, other_bag = build_optimizer(list(fresh.items()), spec), Bag(fresh)
    assert all(float(other.state[p]["step"]) == 0 for p in fresh.values())
    saved = get_optimizer_state_dict(other_bag, other)
    dcp.load(saved, checkpoint_id=str(tmp_path / "c"))
    set_lr(other, 0.5)
    set_optimizer_state_dict(other_bag, other, saved)
    assert {group["lr"] for group in other.param_groups} == {0.5}
    set_lr(other, spec.lr)
    for (_, p), q in zip(named, fresh.values(), strict=True):
        assert {k: v.dtype for k, v in optimizer.state[p].items()} == {k: v.dtype for k, v in other.state[q].items()}
    for step in range(3, 5):
        set_grads(named, step)
        set_grads(list(fresh.items()), step)
        optimizer.step()
        other.step()
    same(values(named), values(list(fresh.items())))


def test_a_plain_state_dict_round_trips_and_a_wrong_one_is_refused():
    named, twins = parameters(), parameters()
    optimizer, other = adamw(named, storage=Storage("bf16")), adamw(twins, storage=Storage("bf16"))
    set_grads(named, 0)
    optimizer.step()
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    other.load_state_dict(torch.load(file, weights_only=True))
    for (_, p), (_, q) in zip(named, twins, strict=True):
        same(list(optimizer.state[p].values()), list(other.state[q].values()))
    wide = adamw(parameters())
    wide.load_state_dict(optimizer.state_dict())
    assert all(state["exp_avg"].dtype == torch.float32 for state in wide.state.values())
    other.load_state_dict(wide.state_dict())
    assert all(state["exp_avg"].dtype == torch.bfloat16 for state in other.state.values())
    saved = optimizer.state_dict()
    del saved["state"][1]["exp_avg"]
    with pytest.raises(ValueError, match=r"no exp_avg of b.bias; it has \['exp_avg_sq', 'step'\]"):
        other.load_state_dict(saved)
    with pytest.raises(ValueError, match="has 5 parameters, this one 4"):
        adamw(parameters()[:4]).load_state_dict(optimizer.state_dict())


@given(st.integers(0, 40), st.integers(1, 9))
@settings(max_examples=80, deadline=None)
def test_chunk_sizes_are_torchs(size, ways):
    chunks = [len(c) for c in torch.arange(size).chunk(ways)] if size else []
    assert chunk_sizes(size, ways) == (chunks + [0] * ways)[:ways]
