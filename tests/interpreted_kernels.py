"""Do the triton kernels compute what their references do? (run by test_kernels_interpreter.py, in a process where triton interprets)

Bounds as in kernel_oracles; fresh memory reads as NaN throughout, and so do rows of no expert.
"""

from __future__ import annotations

import sys
from pathlib import Path

import kernel_oracles as oracle
import pytest
import torch
import triton
from kernel_oracles import LOADS, TAIL, gradients, offsets_of, placement, poisoned, product_bound

from moetrain.kernels import backend, grouped_gemm, permute, reference, rms_norm, runtime, scaled_gemm, swiglu, topk
from moetrain.kernels.flops import flop_counter

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))
import gpu_kernels  # noqa: E402
import gpu_parity  # noqa: E402

assert runtime.INTERPRET, "set TRITON_INTERPRET=1 before the first import of triton"
DTYPES = (torch.float32, torch.bfloat16)
UNIT = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-7}
"""Largest relative error of rounding: the interpreter cuts float32 down to bfloat16 where a GPU rounds to nearest."""


def tile(m: int, n: int, k: int) -> triton.Config:
    return triton.Config(dict(BLOCK_M=m, BLOCK_N=n, BLOCK_K=k, GROUP_M=2, PER_SM=1), num_warps=4, num_stages=1)


TILES = (tile(16, 32, 16), tile(64, 16, 32))
"""Small ones, so that experts span several and end inside one, and every program walks more than one."""
HOT = {**LOADS, "hot": [2, 61, 0, 1], "past a tile": [32, 16, 48, 17]}


@pytest.fixture(autouse=True)
def _nan_memory():
    with poisoned():
        yield


def operands(loads, K, N, dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(sum(loads) + TAIL, K, generator=generator).to(dtype)
    grad = torch.randn(sum(loads) + TAIL, N, generator=generator).to(dtype)
    x[sum(loads) :], grad[sum(loads) :] = float("nan"), float("nan")
    return x, torch.randn(len(loads), N, K, generator=generator).to(dtype), grad, offsets_of(loads)


def within(found, expected, bound):
    assert found.isfinite().all()
    excess = (found.double() - expected).abs() - bound
    assert excess.max() <= 0, f"{int((excess > 0).sum())} of {excess.numel()} beyond the bound, worst by {float(excess.max()):.3g}"


def check_products(loads, K, N, dtype, config, tma, truth=oracle):
    """Forward, input gradient and weight gradient against the double loop, or (sizes too large for it) the reference in float64."""
    x, w, grad, offsets = operands(loads, K, N, dtype)
    rows, weights = truth.grouped_gemm, truth.weight_grad
    wide_x, wide_w, wide_grad = x.double(), w.double(), grad.double()
    out = grouped_gemm.rows_product(x, w, offsets, config, tma)
    within(out, rows(wide_x, wide_w, offsets), product_bound(rows, wide_x, wide_w, offsets, K, dtype, UNIT))
    wt, wide_wt = w.transpose(1, 2), wide_w.transpose(1, 2)
    grad_x = grouped_gemm.rows_product(grad, wt, offsets, config, tma)
    within(grad_x, rows(wide_grad, wide_wt, offsets), product_bound(rows, wide_grad, wide_wt, offsets, N, dtype, UNIT))
    grad_w = grouped_gemm.weight_grad(grad, x, offsets, config, tma)
    within(grad_w, weights(wide_grad, wide_x, offsets), product_bound(weights, wide_grad, wide_x, offsets, max(1, *loads), dtype, UNIT))
    assert not out[sum(loads) :].any() and not grad_x[sum(loads) :].any()
    assert not grad_w[[e for e, n in enumerate(loads) if n == 0]].any()


@pytest.mark.parametrize("loads", HOT.values(), ids=HOT)
def test_products_for_any_loads(loads):
    check_products(loads, 40, 48, torch.bfloat16, TILES[0], tma=False)


@pytest.mark.parametrize("K, N", ((40, 48), (33, 7), (1, 65), (16, 32)))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_products_of_odd_sizes(dtype, K, N):
    check_products(LOADS["odd"], K, N, dtype, TILES[1], tma=False)


@pytest.mark.parametrize("loads", (HOT["hot"], HOT["all empty"], HOT["past a tile"]), ids=str)
def test_products_by_bulk_copies(loads):
    """Descriptors read whole tiles: rows of other experts and NaN past the last one come in and must not go out."""
    check_products(loads, 40, 48, torch.bfloat16, TILES[0], tma=True)


@pytest.mark.full
@pytest.mark.parametrize("tma", (False, True))
@pytest.mark.parametrize("config", (*TILES, *grouped_gemm.CONFIGS["bulk"]), ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_products_of_every_config(dtype, config, tma):
    if tma and dtype == torch.float32:
        pytest.skip("float32 is never copied in bulk")
    for loads in ([130, 0, 7, 300], [0, 0, 1, 0]):
        check_products(loads, 144, 272, dtype, config, tma, truth=reference)


def test_many_experts():
    """More than a vector's power of two, most of them empty."""
    loads = [0] * 37
    loads[3], loads[36] = 5, 20
    check_products(loads, 16, 16, torch.float32, TILES[0], tma=False)


def test_grouped_gemm_gradients_equal_autograd_of_the_reference():
    x, w, _, offsets = operands([4, 0, 29], 16, 24, torch.float64)
    x[-TAIL:] = 0
    expected = gradients(lambda x, w: reference.grouped_gemm(x, w, offsets), [x, w])
    found = gradients(lambda x, w: backend("triton").grouped_gemm(x, w, offsets), [x.float(), w.float()])
    for a, b in zip([found[0], *found[1]], [expected[0], *expected[1]], strict=True):
        assert torch.allclose(a.double(), b, rtol=1e-5, atol=1e-5)


def test_no_rows_and_no_tokens():
    x, w, offsets = torch.zeros(0, 8, requires_grad=True), torch.ones(4, 6, 8, requires_grad=True), offsets_of([0] * 4)
    kernels = backend("triton")
    grad_x, grad_w = torch.autograd.grad(kernels.grouped_gemm(x, w, offsets).sum(), (x, w))
    assert grad_x.shape == x.shape and not grad_w.any()
    none, weights = torch.full((3, 2), -1, dtype=torch.int32), torch.ones(3, 2, requires_grad=True)
    out = kernels.unpermute(x, none, weights)
    assert not out.any() and not any(g.any() for g in torch.autograd.grad(out.sum(), (x, weights)))
    assert not kernels.permute(x, none[0]).any() and kernels.swiglu(x).shape == (0, 4)
    assert kernels.route(torch.zeros(0, 4), 2)[2].tolist() == [0] * 4
    scale = torch.ones(8, requires_grad=True)
    assert not torch.autograd.grad(kernels.rms_norm(x, scale, 1e-6).sum(), scale)[0].any()


def close(dtype: torch.dtype, found, expected, factor: float):
    """Within ``factor`` unit roundoffs of the largest value: for functions of a few operations."""
    pairs = zip([found[0], *found[1]], [expected[0], *expected[1]], strict=True)
    for a, b in pairs:
        assert a.isfinite().all() and (a.double() - b).abs().max() <= factor * UNIT[dtype] * max(1.0, float(b.abs().max()))


@pytest.mark.parametrize("name", ("swiglu", "weighted swiglu", "rms_norm"))
@pytest.mark.parametrize("width", (1, 37, 128, 1500))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_elementwise_kernels_and_gradients(dtype, width, name):
    torch.manual_seed(0)
    kernels, rows = backend("triton"), 70
    call, plain, inputs = {
        "swiglu": (kernels.swiglu, reference.swiglu, [torch.randn(rows, 2 * width)]),
        "weighted swiglu": (kernels.swiglu, reference.swiglu, [torch.randn(rows, 2 * width), torch.rand(rows)]),
        "rms_norm": (lambda x, w: kernels.rms_norm(x, w, 1e-5), lambda x, w: reference.rms_norm(x, w, 1e-5), [torch.randn(rows, width), torch.randn(width)]),
    }[name]
    inputs = [inputs[0].to(dtype), *(t.to(dtype) if name == "rms_norm" else t for t in inputs[1:])]
    close(dtype, gradients(call, inputs), gradients(plain, [t.double() for t in inputs]), 8 if dtype == torch.bfloat16 else 64)


def test_rms_norm_keeps_leading_dims():
    x, weight = torch.randn(2, 3, 4, 16), torch.randn(16)
    assert torch.allclose(backend("triton").rms_norm(x, weight, 1e-6), reference.rms_norm(x, weight, 1e-6), atol=1e-6)


@pytest.mark.parametrize("width", (5, 2100))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_permute_and_unpermute_and_gradients(dtype, width):
    torch.manual_seed(0)
    kernels = backend("triton")
    source, positions = placement(num_tokens=70, top_k=3, num_dropped=11, num_padding=9)
    tokens, rows, weights = torch.randn(70, width).to(dtype), torch.randn(len(source), width).to(dtype), torch.rand(70, 3)
    expected = gradients(lambda t: reference.permute(t, source), [tokens.double()])
    for given in (positions, None):
        found = gradients(lambda t, given=given: kernels.permute(t, source, given), [tokens])
        assert torch.equal(found[0].double(), expected[0])
        close(dtype, found, expected, 4)
    expected = gradients(lambda r, w: reference.unpermute(r, positions, w), [rows.double(), weights.double()])
    poisoned_rows = rows.masked_fill((source < 0)[:, None], float("nan"))
    close(dtype, gradients(lambda r, w: kernels.unpermute(r, positions, w), [poisoned_rows, weights]), expected, 8 if dtype == torch.bfloat16 else 256)


ROUTERS = [
    dict(top_k=k, score=score, num_groups=groups, top_k_groups=kept, normalize=normalize, scale=scale)
    for score in ("softmax", "sigmoid") for k, groups, kept in ((3, 1, 1), (4, 4, 2), (2, 12, 3), (12, 1, 1))
    for normalize, scale in ((True, 2.5), (False, 1.0))
]


@pytest.mark.parametrize("options", ROUTERS, ids=lambda o: f"{o['score']}-{o['top_k']}-{o['num_groups']}-{o['normalize']}")
def test_route_and_its_gradient(options):
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(70, 12, generator=generator)
    for bias in (None, torch.randn(12, generator=generator)):
        found, plain = topk.route(logits, bias=bias, **options), reference.route(logits, bias=bias, **options)
        assert torch.equal(found[1], plain[1]) and torch.equal(found[2], plain[2])
        expected = gradients(lambda x: reference.route(x, bias=None if bias is None else bias.double(), **options)[0], [logits.double()])
        close(torch.float32, gradients(lambda x: topk.route(x, bias=bias, **options)[0], [logits]), expected, 16)


def test_equal_scores_go_to_the_lower_number_and_nan_to_the_last():
    logits = torch.zeros(3, 6)
    logits[1], logits[2, :3] = float("nan"), float("nan")
    for options in (dict(score="softmax"), dict(score="sigmoid"), dict(score="sigmoid", num_groups=3, top_k_groups=2)):
        found, plain = topk.route(logits, 3, **options), reference.route(logits, 3, **options)
        assert torch.equal(found[1], plain[1]) and torch.equal(found[2], plain[2])
        assert found[1][:2].tolist() == [[0, 1, 2]] * 2


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("recipe", scaled_gemm.RECIPES)
def test_fp8_products(recipe, dtype):
    """Values and scales to the bit; the product within the bound of a float32 sum of what was quantised."""
    loads = [5, 0, 17, 9]
    x, w, _, offsets = operands(loads, 256, 136, dtype)
    x[3] = 0
    for tensor in (x[: sum(loads)], w):
        found, plain = scaled_gemm.quantise(tensor, recipe), reference.quantise(tensor, recipe)
        assert torch.equal(found.values.float(), plain[0].float()) and torch.equal(found.scales, plain[1])
    out = scaled_gemm.scaled_grouped_gemm(x, w, offsets, recipe)
    a, b = (reference.dequantise(*reference.quantise(t, recipe), recipe).double() for t in (x, w))
    bound = product_bound(oracle.grouped_gemm, a, b, offsets, 256 + 4, torch.float32, UNIT) + oracle.grouped_gemm(a.abs(), b.abs(), offsets) * UNIT[dtype]
    within(out, oracle.grouped_gemm(a, b, offsets), bound)
    assert not out[sum(loads) :].any()


def test_fp8_gradients_are_those_of_the_unquantised_product():
    x, w, _, offsets = operands([4, 0, 29], 32, 24, torch.float32)
    x[-TAIL:] = 0
    found = gradients(lambda x, w: scaled_gemm.scaled_grouped_gemm(x, w, offsets, "mxfp8"), [x, w])
    expected = gradients(lambda x, w: reference.grouped_gemm(x, w, offsets), [x.double(), w.double()])
    for a, b in zip(found[1], expected[1], strict=True):
        assert torch.allclose(a.double(), b, rtol=1e-5, atol=1e-5)


OPERATORS = {
    "grouped_gemm": lambda: (torch.randn(9, 8, requires_grad=True), torch.randn(2, 6, 8, requires_grad=True), offsets_of([4, 3])),
    "grouped_gemm_weight_grad": lambda: (torch.randn(9, 6), torch.randn(9, 8), offsets_of([4, 3])),
    "gather_rows": lambda: (torch.randn(4, 6, requires_grad=True), torch.tensor([2, -1, 0, 2]), None),
    "combine_rows": lambda: (torch.randn(4, 6, requires_grad=True), torch.tensor([[2, -1], [0, 3]]), torch.rand(2, 2, requires_grad=True)),
    "swiglu": lambda: (torch.randn(4, 6, requires_grad=True), torch.rand(4, requires_grad=True)),
    "rms_norm": lambda: (torch.randn(4, 6, requires_grad=True), torch.rand(6, requires_grad=True), 1e-6),
    "route": lambda: (torch.randn(4, 6, requires_grad=True), torch.rand(6), 2, True, 3, 2, True, 2.5),
    "scaled_grouped_gemm": lambda: (torch.randn(9, 32, requires_grad=True), torch.randn(2, 6, 32, requires_grad=True), offsets_of([4, 3]), "mxfp8"),
}


@pytest.mark.parametrize("name", OPERATORS)
def test_custom_operators_are_well_made(name):
    torch.use_deterministic_algorithms(False)  # the check compares outputs bit by bit with a graph's, NaN among them
    torch.library.opcheck(getattr(torch.ops.moetrain, name).default, OPERATORS[name]())


def test_compiles_whole():
    x, w, _, offsets = operands([4, 0, 9], 16, 8, torch.float32)
    run = torch.compile(lambda x, w, o: grouped_gemm.grouped_gemm(x, w, o) * 2, fullgraph=True, backend="aot_eager")
    assert torch.equal(run(x, w, offsets), 2 * grouped_gemm.grouped_gemm(x, w, offsets))


def test_flops_are_counted_exactly():
    x, w, _, offsets = operands([4, 0, 9], 16, 8, torch.float32)
    with flop_counter(display=False) as counted:
        grouped_gemm.grouped_gemm(x.requires_grad_(), w.requires_grad_(), offsets).sum().backward()
    assert counted.get_total_flops() == 3 * 2 * x.shape[0] * 8 * 16
    with flop_counter(display=False) as counted:
        scaled_gemm.scaled_grouped_gemm(x, w, offsets, "rowwise").sum().backward()
    assert counted.get_total_flops() == 3 * 2 * x.shape[0] * 8 * 16


def test_two_runs_are_equal_to_the_bit():
    source, positions = placement(num_tokens=40, top_k=3, num_dropped=5, num_padding=2)
    rows, weights = torch.randn(len(source), 32), torch.rand(40, 3)
    once, again = (gradients(lambda r, w: permute.unpermute(r, positions, w), [rows, weights]) for _ in range(2))
    assert torch.equal(once[0], again[0]) and all(map(torch.equal, once[1], again[1]))


def test_bad_shapes_are_refused_in_one_line():
    calls = {
        "R,2f": lambda: swiglu.swiglu(torch.zeros(3, 5)),
        "at most 16384": lambda: rms_norm.rms_norm(torch.zeros(1, 20000), torch.ones(20000), 1e-6),
        "top_k 5": lambda: topk.route(torch.zeros(1, 4), 5),
        "multiple of 128": lambda: scaled_gemm.scaled_grouped_gemm(torch.zeros(2, 32), torch.zeros(1, 4, 32), offsets_of([2]), "block128"),
    }
    for words, call in calls.items():
        with pytest.raises(ValueError, match=words) as caught:
            call()
        assert "\n" not in str(caught.value)


SMALL = gpu_parity.Sizes(loads=(0, 30, 1, 0, 45), K=128, N=136, tokens=40, top_k=3, width=48, experts=16, tail=3)


def test_the_gpu_script_compares_passes_rightly():
    verdicts = [*gpu_parity.passes("cpu", SMALL, UNIT), *gpu_parity.torch_grouped_mm("cpu", SMALL)]
    assert len(verdicts) > 30 and all(v.ok for v in verdicts), [v for v in verdicts if not v.ok]


@pytest.mark.full
def test_the_gpu_script_compares_products_rightly():
    verdicts = [*gpu_parity.products("cpu", SMALL, UNIT), *gpu_parity.fp8("cpu", SMALL, UNIT)]
    assert len(verdicts) > 40 and all(v.ok for v in verdicts), [v for v in verdicts if not v.ok]


def test_a_wrong_answer_is_called_wrong():
    exact, bound = torch.ones(3, dtype=torch.float64), torch.tensor([1e-3, 1e-3, 0.0])
    assert gpu_parity.verdict("right", torch.tensor([1.0005, 1.0, 1.0]), exact, bound).ok
    for found in ([1.002, 1.0, 1.0], [1.0, 1.0, 1.0001], [float("nan"), 1.0, 1.0]):
        assert not gpu_parity.verdict("wrong", torch.tensor(found), exact, bound).ok


def test_the_gpu_script_times_every_kernel_once():
    """With a clock that only calls: what is timed runs, and each rate has its operations or bytes."""
    torch.use_deterministic_algorithms(False)
    called = []

    def once(call):
        called.append(call())
        return [1.0]

    rows = [*gpu_kernels.products(gpu_kernels.Product(2, 8, 64, 128, hot=True), once, "cpu"), *gpu_kernels.passes(once, "cpu", 16, 2, 32, 16, 8)]
    assert len(called) == len(rows) and {row["op"] for row in rows} >= {"forward", "dgrad", "wgrad", "quantise", "permute", "unpermute backward", "route"}
    assert all(("tflops" in row) != ("gigabytes_per_second" in row) for row in rows)
