"""Do the reference and the grouped_mm backend give the oracles' answers, with any loads, over memory full of NaN, and right gradients?"""

from __future__ import annotations

import subprocess
import sys

import kernel_oracles as oracle
import pytest
import torch
from kernel_oracles import LOADS, TAIL, gradients, offsets_of, placement, poisoned, product_bound
from torch.nn import functional as F

from moetrain.kernels import BACKENDS, backend, choose, grouped_mm, reference
from moetrain.kernels.flops import flop_counter

PLAIN = ("reference", "grouped_mm")
DTYPES = (torch.float64, torch.float32, torch.bfloat16)
SIZES = ((16, 24), (10, 7), (33, 1))
"""(K, N), odd ones among them: rows that aren't whole 16 bytes."""


def operands(loads, K, N, dtype, seed=0):
    """x [R+TAIL,K] whose rows past the last offset are NaN, w [E,N,K], offsets."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(sum(loads) + TAIL, K, generator=generator).to(dtype)
    x[sum(loads) :] = float("nan")
    return x, torch.randn(len(loads), N, K, generator=generator).to(dtype), offsets_of(loads)


def within(found, expected, bound):
    assert found.isfinite().all()
    excess = (found.double() - expected).abs() - bound
    assert excess.max() <= 0, f"{int((excess > 0).sum())} of {excess.numel()} beyond the bound, worst by {float(excess.max()):.3g}"


def test_the_poison_is_there():
    """Without our care, torch's grouped product shows the NaN that the tests put into fresh memory and into rows of no expert."""
    x, w, offsets = operands(LOADS["odd"], 16, 24, torch.float32)
    with poisoned():
        assert F.grouped_mm(x, w.transpose(1, 2), offs=offsets)[-TAIL:].isnan().all()


@pytest.mark.parametrize("loads", LOADS.values(), ids=LOADS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", PLAIN)
def test_grouped_gemm_and_its_gradients_match_the_double_loop(name, dtype, loads):
    gemm = backend(name, dtype=dtype).grouped_gemm
    for K, N in SIZES:
        x, w, offsets = operands(loads, K, N, dtype)
        x.requires_grad_(), w.requires_grad_()
        grad = torch.randn(x.shape[0], N, generator=torch.Generator().manual_seed(1)).to(dtype)
        grad[sum(loads) :] = float("nan")
        with poisoned():
            out = gemm(x, w, offsets)
            grad_x, grad_w = torch.autograd.grad(out, (x, w), grad)
        x, w, wt = x.detach(), w.detach(), w.detach().transpose(1, 2)
        within(out, oracle.grouped_gemm(x, w, offsets), product_bound(oracle.grouped_gemm, x, w, offsets, K, dtype))
        within(grad_x, oracle.grouped_gemm(grad, wt, offsets), product_bound(oracle.grouped_gemm, grad, wt, offsets, N, dtype))
        within(grad_w, oracle.weight_grad(grad, x, offsets), product_bound(oracle.weight_grad, grad, x, offsets, max(1, *loads), dtype))
        assert not out[sum(loads) :].any() and not grad_x[sum(loads) :].any()
        assert not grad_w[[e for e, n in enumerate(loads) if n == 0]].any()


@pytest.mark.parametrize("name", PLAIN)
def test_no_rows_at_all_keep_the_path_back(name):
    """A rank without rows still takes part in the backward's collectives, so every function must stay in the graph."""
    kernels = backend(name)
    x, w = torch.zeros(0, 8, requires_grad=True), torch.ones(4, 6, 8, requires_grad=True)
    out = kernels.grouped_gemm(x, w, offsets_of([0] * 4))
    assert out.shape == (0, 6)
    grad_x, grad_w = torch.autograd.grad(out.sum(), (x, w))
    assert grad_x.shape == x.shape and not grad_w.any()
    none = torch.full((3, 2), -1, dtype=torch.int32)
    weights = torch.ones(3, 2, requires_grad=True)
    for grad in torch.autograd.grad(kernels.unpermute(x, none, weights).sum(), (x, weights)):
        assert not grad.any()
    assert torch.autograd.grad(kernels.permute(x, none[0]).sum(), x)[0].shape == x.shape


@pytest.mark.parametrize("name", PLAIN)
def test_the_gradient_of_a_sum_has_no_strides_and_is_taken(name):
    x, w, offsets = operands([3, 2], 8, 8, torch.bfloat16)
    w.requires_grad_()
    backend(name).grouped_gemm(x, w, offsets).sum().backward()
    assert w.grad.isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_permute_and_unpermute(dtype):
    source, positions = placement(num_tokens=9, top_k=3, num_dropped=4, num_padding=5)
    tokens, rows, weights = torch.randn(9, 6).to(dtype), torch.randn(len(source), 6).to(dtype), torch.rand(9, 3)
    rows[source < 0] = float("nan")
    permuted = reference.permute(tokens, source)
    for r, t in enumerate(source.tolist()):
        assert torch.equal(permuted[r], tokens[t] if t >= 0 else torch.zeros(6, dtype=dtype))
    magnitude = oracle.unpermute(rows.abs(), positions, weights)
    found = reference.unpermute(rows, positions, weights.double() if dtype == torch.float64 else weights)
    within(found, oracle.unpermute(rows, positions, weights), magnitude * 5 * max(oracle.UNIT[dtype], oracle.UNIT[torch.float32]))


def test_permute_there_and_back_gives_each_token_its_copies():
    source, positions = placement(num_tokens=8, top_k=2, num_dropped=0, num_padding=3)
    tokens = torch.randn(8, 5, dtype=torch.float64)
    back = reference.unpermute(reference.permute(tokens, source), positions, torch.ones(8, 2, dtype=torch.float64))
    assert torch.equal(back, 2 * tokens)


@pytest.mark.parametrize("weighted", (False, True))
def test_swiglu_matches_the_double_loop(weighted):
    x, weight = torch.randn(5, 14), torch.rand(5) if weighted else None
    expected = oracle.swiglu(x, weight)
    assert torch.allclose(reference.swiglu(x.double(), None if weight is None else weight.double()), expected, rtol=1e-13, atol=0)
    assert torch.allclose(reference.swiglu(x, weight).double(), expected, rtol=1e-6, atol=1e-7)


def test_rms_norm_matches_the_double_loop_and_torch():
    x, weight = torch.randn(5, 14, dtype=torch.float64), torch.randn(14, dtype=torch.float64)
    found = reference.rms_norm(x, weight, 1e-5)
    assert torch.allclose(found, oracle.rms_norm(x, weight, 1e-5), rtol=1e-13)
    assert torch.allclose(found, F.rms_norm(x, (14,), weight, 1e-5), rtol=1e-13)


ROUTERS = [
    dict(top_k=3, score=score, num_groups=groups, top_k_groups=kept, normalize=normalize, scale=scale)
    for score in ("softmax", "sigmoid") for groups, kept in ((1, 1), (4, 2), (12, 3)) for normalize, scale in ((True, 2.5), (False, 1.0))
]


@pytest.mark.parametrize("biased", (False, True))
@pytest.mark.parametrize("options", ROUTERS, ids=lambda o: f"{o['score']}-{o['num_groups']}-{o['normalize']}")
def test_route_matches_sorting_by_hand(options, biased):
    logits, bias = torch.randn(20, 12, generator=torch.Generator().manual_seed(3)), torch.randn(12) if biased else None
    weights, experts, counts = reference.route(logits.double(), bias=None if bias is None else bias.double(), **options)
    expected = oracle.route(logits, bias=bias, **options)
    assert experts.tolist() == expected[1] and counts.tolist() == expected[2]
    assert torch.allclose(weights, torch.tensor(expected[0], dtype=torch.float64), rtol=1e-12)


def test_equal_scores_go_to_the_lower_number_and_nan_to_the_last():
    logits = torch.zeros(2, 6)
    logits[1, :3] = float("nan")  # softmax makes the whole row NaN
    for score in reference.SCORES:
        assert reference.route(logits[:1], 2, score=score)[1].tolist() == [[0, 1]]
        experts = reference.route(logits, 4, score=score)[1]
        assert all(len(set(row)) == 4 and set(row) <= set(range(6)) for row in experts.tolist())
    assert reference.route(logits, 4, score="sigmoid")[1][1].tolist() == [3, 4, 5, 0]


def test_scores_that_underflow_give_no_nan():
    weights, _, _ = reference.route(torch.full((1, 4), -200.0), 2, score="sigmoid")
    assert weights.tolist() == [[0.0, 0.0]]


def _float64(function):
    """Cases of gradcheck: a function of float64 leaves."""
    source, positions = placement(num_tokens=4, top_k=2, num_dropped=1, num_padding=1)
    random = lambda *shape: torch.randn(*shape, dtype=torch.float64, requires_grad=True)  # noqa: E731
    return {
        "grouped_gemm": (lambda x, w: reference.grouped_gemm(x, w, offsets_of([2, 0, 3])), (random(6, 3), random(3, 2, 3))),
        "grouped_mm": (lambda x, w: grouped_mm.grouped_gemm(x, w, offsets_of([2, 0, 3])), (random(6, 3), random(3, 2, 3))),
        "permute": (lambda tokens: reference.permute(tokens, source), (random(4, 3),)),
        "unpermute": (lambda rows, weights: reference.unpermute(rows, positions, weights), (random(len(source), 3), random(4, 2))),
        "swiglu": (reference.swiglu, (random(3, 8), random(3))),
        "rms_norm": (lambda x, w: reference.rms_norm(x, w, 1e-5), (random(3, 5), random(5))),
        "softmax": (lambda x: reference.route(x, 2, scale=2.0)[0], (random(3, 6),)),
        "sigmoid": (lambda x: reference.route(x, 2, score="sigmoid", num_groups=3, top_k_groups=2)[0], (random(3, 6),)),
        "scores": (lambda x: reference.route(x, 2, normalize=False)[0], (random(3, 6),)),
    }[function]


@pytest.mark.parametrize("function", ("grouped_gemm", "grouped_mm", "permute", "unpermute", "swiglu", "rms_norm", "softmax", "sigmoid", "scores"))
def test_gradients_by_finite_differences(function):
    torch.manual_seed(0)
    call, leaves = _float64(function)
    assert torch.autograd.gradcheck(call, leaves)


def test_grouped_mm_gradients_equal_autograd_of_the_reference():
    x, w, offsets = operands([4, 0, 9], 16, 8, torch.float64)
    x[-TAIL:] = 0
    expected = gradients(lambda x, w: reference.grouped_gemm(x, w, offsets), [x, w])
    found = gradients(lambda x, w: grouped_mm.grouped_gemm(x, w, offsets), [x.float(), w.float()])
    for a, b in zip([found[0], *found[1]], [expected[0], *expected[1]], strict=True):
        assert torch.allclose(a.double(), b, rtol=1e-5, atol=1e-5)


def test_custom_operators_are_well_made():
    x, w, offsets = operands([4, 0, 9], 16, 8, torch.float32)
    x = x.nan_to_num().requires_grad_()
    torch.library.opcheck(torch.ops.moetrain.grouped_mm.default, (x, w.requires_grad_(), offsets))
    torch.library.opcheck(torch.ops.moetrain.grouped_mm_weight_grad.default, (torch.randn(x.shape[0], 8), x.detach(), offsets))


def test_compiles_whole_and_once_for_any_loads():
    """fullgraph: no break; and another routing of as many rows compiles nothing anew."""
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounter()
    run = torch.compile(lambda x, w, offsets: grouped_mm.grouped_gemm(x, w, offsets) * 2, fullgraph=True, backend=counter)
    x, w, offsets = operands([4, 0, 9], 16, 8, torch.float32)
    for loads in ([4, 0, 9], [13, 0, 0], [1, 6, 6]):
        offsets = offsets_of(loads)
        assert torch.equal(run(x, w, offsets), 2 * grouped_mm.grouped_gemm(x, w, offsets))
    assert counter.frame_count == 1


def test_flops_are_counted_exactly():
    R, N, K = 13 + TAIL, 8, 16
    x, w, offsets = operands([4, 0, 9], K, N, torch.bfloat16)
    x, w = x.requires_grad_(), w.requires_grad_()
    with flop_counter(display=False) as counted:
        grouped_mm.grouped_gemm(x, w, offsets).sum().backward()
    assert counted.get_total_flops() == 3 * 2 * R * N * K
    with flop_counter(display=False) as counted:
        F.grouped_mm(x, w.transpose(1, 2), offs=offsets)
        F.grouped_mm(torch.ones(R, N).bfloat16().t(), x, offs=offsets)
    assert counted.get_total_flops() == 2 * 2 * R * N * K
    B, H, S, D = 2, 4, 64, 16
    q = torch.randn(B, H, S, D, requires_grad=True)
    with flop_counter(display=False) as counted:
        F.scaled_dot_product_attention(q, q, q, is_causal=True).sum().backward()
    forward = 2 * 2 * B * H * S * S * D  # two products
    assert counted.get_total_flops() == forward + 5 * forward // 2  # and five: the scores again, and four gradients


@pytest.mark.parametrize("recipe", ("rowwise", "block128", "mxfp8"))
def test_fp8_values_times_scales_give_the_input_back(recipe):
    """Relative error of one e4m3 rounding, 2^-4 of the value, or half the smallest step of its group; and the largest value never saturates."""
    x, w = torch.randn(6, 256) * torch.logspace(-6, 6, 6)[:, None], torch.randn(3, 200, 256)
    x[2] = 0
    for tensor in (x, w):
        values, scales = reference.quantise(tensor, recipe)
        back = reference.dequantise(values, scales, recipe)
        largest = tensor.abs().amax(-1, keepdim=True) if recipe != "block128" or tensor.ndim == 2 else tensor.abs().amax((-1, -2), keepdim=True)
        smallest_step = 2.0**-9 * 2 * largest / 448
        assert ((back - tensor).abs() <= torch.maximum(2.0**-4 * tensor.abs(), smallest_step)).all()
        assert values.float().abs().max() <= 448 and not values.float()[2 if tensor is x else 0 : 0].any()


def test_mxfp8_scale_is_the_least_power_of_two_that_saturates_nothing():
    for largest, power in ((448.0, 1.0), (449.0, 2.0), (896.0, 2.0), (0.0, 1.0), (448 / 2**20, 2.0**-20)):
        x = torch.zeros(1, 32)
        x[0, 5] = largest
        _, scales = reference.quantise(x, "mxfp8")
        assert 2.0 ** (int(scales) - 127) == power


def test_backends_are_chosen_by_device_and_type():
    assert set(BACKENDS) == {"triton", "grouped_mm", "reference"}
    assert [choose("cuda", torch.bfloat16), choose("cpu", torch.bfloat16), choose("cpu", torch.float32)] == ["triton", "grouped_mm", "grouped_mm"]
    assert choose("cuda", torch.float64) == choose("cpu", torch.float64) == "reference"
    assert backend().name == "grouped_mm" and backend(dtype=torch.float64).name == "reference"


def test_bad_requests_are_refused_in_one_line():
    x, w, offsets = operands([4, 9], 16, 8, torch.float32)
    calls = {
        "did you mean grouped_mm": lambda: backend("grouped_nn"),
        "no float64": lambda: backend("triton", dtype=torch.float64),
        "don't fit": lambda: reference.grouped_gemm(x, w[:, :, :3], offsets),
        "int32": lambda: grouped_mm.grouped_gemm(x, w, offsets.long()),
        "one type": lambda: grouped_mm.grouped_gemm(x, w.bfloat16(), offsets),
        "legal are softmax": lambda: reference.route(torch.zeros(1, 4), 2, score="relu"),
        "groups must be equal": lambda: reference.route(torch.zeros(1, 4), 2, num_groups=3),
        "2 of 4 experts": lambda: reference.route(torch.zeros(1, 4), 3, num_groups=2, top_k_groups=1),
        "multiple of 32": lambda: reference.quantise(torch.zeros(1, 40), "mxfp8"),
        "legal are rowwise": lambda: reference.quantise(torch.zeros(1, 40), "int8"),
    }
    for words, call in calls.items():
        with pytest.raises(ValueError, match=words) as caught:
            call()
        assert "\n" not in str(caught.value)


def test_without_triton_the_other_backends_train():
    """A machine that has no triton: importing it fails in this process, and nothing but its own backend notices."""
    script = """
import sys; sys.modules["triton"] = None
import torch, moetrain.kernels as kernels, moetrain.kernels.flops
x, w = torch.ones(3, 8), torch.ones(2, 4, 8, requires_grad=True)
for name in ("auto", "reference"):
    kernels.backend(name).grouped_gemm(x, w, torch.tensor([1, 3], dtype=torch.int32)).sum().backward()
try:
    kernels.backend("triton")
except ImportError:
    print(w.grad.sum().item())
"""
    assert subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.strip() == f"{2 * 3 * 8 * 4:.1f}"
