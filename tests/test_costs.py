"""Does every cost model behave like time? (positive, finite, monotone in size, never faster than the wire)"""

from __future__ import annotations

import numpy as np
import pytest

from moesim.costs import (
    COSTS, attention, collectives, core_attention, core_gemm, core_grouped_gemm, core_memory, dispatch, fused_ffn, gemm, grouped_gemm, memory_bound,
)
from moesim.costs.base import Reach
from moesim.costs.collectives import Curve
from moesim.costs.tiles import tile_seconds
from moesim.pricing import expected_copies
from moesim.profile import load_profile

SIZES = np.unique(np.round(np.geomspace(1, 200_000, 120)))
SMS = 148


def defaults(module) -> dict[str, float]:
    return {p.name: p.start for p in module.PARAMETERS}


def sweeps():
    """(model, axis, seconds over SIZES of that axis)"""
    g, gg, f, a, mb = (defaults(m) for m in (gemm, grouped_gemm, fused_ffn, attention, memory_bound))
    one = np.ones_like(SIZES)
    for width in (2.0, 1.0, 0.5625):
        yield "gemm", f"m at {width} B", gemm.seconds(g, SMS, SIZES, 4096, 7168, width, 2.0)
        yield "gemm", f"n at {width} B", gemm.seconds(g, SMS, 512, SIZES, 7168, width, 2.0)
        yield "gemm", f"k at {width} B", gemm.seconds(g, SMS, 512, 4096, SIZES, width, 2.0)
    for weight in (False, True):
        yield "grouped_gemm", f"rows, weight {weight}", grouped_gemm.seconds({**g, **gg}, SMS, 16, SIZES * 16, 4096, 2048, 2.0, weight)
        yield "grouped_gemm", f"n, weight {weight}", grouped_gemm.seconds({**g, **gg}, SMS, 16, 4096, SIZES, 2048, 2.0, weight)
    yield "fused_ffn", "tokens", fused_ffn.seconds(f, SMS, SIZES, 8, 4096, 1536, 128, 2.0, 0.0 * one)
    yield "fused_ffn", "tokens, skewed", fused_ffn.seconds(f, SMS, SIZES, 8, 4096, 1536, 128, 2.0, 1.2 * one)
    for backward in (False, True):
        yield "attention", f"pairs, backward {backward}", attention.seconds(a, SMS, 1, 32, 4096.0, SIZES * 40, 128.0, 128.0, 1e8, backward)
        yield "attention", f"batch, backward {backward}", attention.seconds(a, SMS, SIZES, 32, 512.0, 512 * 256.0, 128.0, 128.0, SIZES * 1e6, backward)
    yield "memory_bound", "bytes", memory_bound.seconds(mb, np.zeros(len(SIZES), int), SIZES * 1e3)
    yield from core_sweeps()


def core_sweeps():
    """The same of one CPU core."""
    c, cg, ca, cm = (defaults(m) for m in (core_gemm, core_grouped_gemm, core_attention, core_memory))
    for axis, shape in (("m", (SIZES, 256, 512)), ("n", (64, SIZES, 512)), ("k", (64, 256, SIZES))):
        yield "core_gemm", axis, core_gemm.seconds(c, *shape, 2.0)
    for weight in (False, True):
        yield "core_grouped_gemm", f"rows, weight {weight}", core_grouped_gemm.seconds(cg, 8, SIZES, 256, 512, weight, False)
        yield "core_grouped_gemm", f"n, weight {weight}", core_grouped_gemm.seconds(cg, 8, 512, SIZES, 512, weight, True)
        yield "core_attention", f"pairs, backward {weight}", core_attention.seconds(ca, 4, 8, 256.0, SIZES * 10, 64.0, 64.0, weight)
        yield "core_attention", f"q_len, backward {weight}", core_attention.seconds(ca, 4, 8, SIZES, 1e5, 64.0, 64.0, weight)
    yield "core_memory", "bytes", core_memory.seconds(cm, SIZES * 1e4)


@pytest.mark.parametrize("model,axis,seconds", list(sweeps()), ids=lambda v: v if isinstance(v, str) else "")
def test_positive_finite_monotone(model, axis, seconds):
    assert model in COSTS
    assert np.all(np.isfinite(seconds)) and np.all(seconds > 0)
    assert np.all(np.diff(seconds) >= -1e-12 * seconds[:-1]), axis


def test_every_model_declares_its_parameters_with_units_and_bounds():
    for name, module in COSTS.items():
        names = [p.name for p in module.PARAMETERS]
        assert len(names) == len(set(names)), name
        assert all(p.unit and p.low < p.high for p in module.PARAMETERS), name


def test_a_core_multiplies_at_its_rate_in_the_limit_and_pays_each_group():
    """Large products take 2 m n k / rate; small m is slow by what packing costs; 8 groups cost 7 group times more than one of all rows."""
    p = defaults(core_gemm)
    big = 2.0 * 30_000**3 / p["rate"]
    assert core_gemm.seconds(p, 30_000, 30_000, 30_000, 2.0) == pytest.approx(big, rel=0.01)
    assert core_gemm.seconds(p, 1, 4096, 4096, 2.0) > 5 * 2.0 * 4096**2 / p["rate"]
    g = defaults(core_grouped_gemm)
    one, eight = (core_grouped_gemm.seconds(g, groups, 4096.0, 256, 512, False, False) for groups in (1, 8))
    assert eight - one == pytest.approx(7 * (g["group_s"] + 2 * g["ramp_rows"] * 256 * 512 / g["rate"]))


def test_a_stream_is_fast_in_cache_and_slow_beyond():
    p = defaults(core_memory)
    marginal = lambda b: (core_memory.seconds(p, 1.001 * b) - core_memory.seconds(p, b)) / (0.001 * b)  # noqa: E731
    assert 1 / marginal(p["cache_bytes"] / 1e4) == pytest.approx(p["bandwidth"] * p["cached"], rel=0.01)
    assert 1 / marginal(p["cache_bytes"] * 1e4) == pytest.approx(p["bandwidth"], rel=0.01)


def test_tiles_equal_the_dumb_count_where_nothing_is_smooth():
    """One tile shape's worth of work exactly filling the GPU: waves x tile flops / per-SM rate, ramp included."""
    params = {"rate": 1e15, "ramp_k": 100.0, "small_tile": 0.0, "quantisation": 1.0, "sm_bandwidth": 1e18, "split_s": 1.0}
    seconds = tile_seconds(params, 16, np.array([1024.0]), np.array([1024.0]), np.array([4096.0]), 2.0)
    assert seconds[0] == pytest.approx(2 * 1024 * 1024 * (4096 + 100) / 1e15)


def test_gemm_never_beats_its_roofline():
    rng = np.random.default_rng(0)
    m, n, k = (np.round(np.exp(rng.uniform(np.log(16), np.log(40_000), 400))) for _ in range(3))
    params = defaults(gemm)
    seconds = gemm.seconds(params, SMS, m, n, k, 2.0, 2.0)
    assert np.all(seconds >= 2 * m * n * k / params["rate"])
    assert np.all(seconds >= 2 * (m * k + k * n + m * n) / params["bandwidth"])


def reach(inside, outside, nvlink=9e11, nic=1e11) -> Reach:
    inside, outside = np.broadcast_arrays(np.atleast_1d(inside), np.atleast_1d(outside))
    full = np.ones(inside.shape)
    return Reach(inside * full, outside * full, nvlink * full, nic * full, 0 * full)


@pytest.fixture(scope="module")
def tables():
    return load_profile("b300").curve_tables


@pytest.mark.parametrize("kind", collectives.KINDS)
@pytest.mark.parametrize("inside,outside", [(2, 1), (8, 1), (3, 1), (72, 1), (8, 8), (1, 64), (72, 3)])
def test_collectives_are_monotone_and_never_faster_than_the_link(tables, kind, inside, outside):
    if kind == "send_recv":
        inside, outside = 2 if outside == 1 else 1, min(outside, 2)
    size = np.geomspace(8, 2e10, 200)
    where = reach(np.full(200, inside), outside)
    seconds, nvlink, nic = collectives.seconds(defaults(collectives), tables, kind, size, where)
    assert np.all(np.isfinite(seconds)) and np.all(seconds > 0) and np.all(np.diff(seconds) >= -1e-15)
    assert np.all(nvlink <= seconds) and np.all(nic <= seconds)
    assert (nic > 0).all() == (outside > 1) and (nvlink > 0).all() == (inside > 1)


def test_wire_bytes_conserve_the_algorithm():
    """Ring: every rank forwards 2(n-1)/n of an all-reduced buffer; all-to-all: what stays home plus what leaves is the send buffer."""
    params = defaults(collectives)
    n_in, n_out = np.array([8.0]), np.array([4.0])
    nv, nic = collectives.leg_bytes(params, "all_to_all", 3.2e9, n_in, n_out)
    assert nv + nic == pytest.approx(3.2e9 * 31 / 32)
    nv, nic = collectives.leg_bytes(params, "all_reduce", 3.2e9, n_in, n_out)
    assert nv == pytest.approx(2 * 3.2e9 * 31 / 32)
    assert nic * 8 == pytest.approx(2 * 3.2e9 * 31 / 32)  # every edge of a ring carries the same, those that leave a domain too
    two = collectives.leg_bytes(params, "all_reduce", 3.2e9, n_in, np.array([2.0]))[1]
    assert two * 8 == pytest.approx(3.2e9)  # over a tree of two domains the border sees the buffer once each way


def test_a_ring_takes_the_protocol_that_is_fastest_at_its_size(tables):
    """NCCL's own model of an all-gather over 128 domains of 8: LL's steps where there is next to nothing to send, Simple's for a
    large buffer (https://github.com/NVIDIA/nccl/blob/5067397c26/src/graph/tuning.cc: 0.6 and 2.7 us, 3.4 and 14 us a step)."""
    params, where = defaults(collectives), reach(8, 128, nic=1e10)
    near, far = 128 * 7, 127
    small, large = (collectives.seconds(params, tables, "all_gather", np.array([size]), where)[0][0] for size in (1.0, 64e9))
    assert small == pytest.approx(near * 0.6e-6 + far * 2.7e-6, rel=0.1)  # and the latency inside a domain
    moving = 64e9 * 1023 / 1024 / 8 / (1e10 * params["ring_efficiency"] * 64 ** -params["decay"])
    assert moving < large < 1.05 * moving + near * 3.4e-6 + far * 14e-6


def test_a_dispatcher_over_two_nodes_pays_for_both_legs():
    """HybridEP on 16 H100, 16 SMs, bf16: 72 and 63 GB/s with the sender's own node counted, which is 1.6 and 1.9 ms for 4,096 tokens of
    7,168 (https://github.com/deepseek-ai/DeepEP/blob/hybrid-ep/docs/README_Hybrid-EP.md); the NIC alone would take 1.3."""
    from moesim.load import load_cluster
    from moesim.ops import Dispatch, Group
    from moesim.profile import load_profile

    op = Dispatch(tokens=4096, hidden=7168, bytes_per_element=2.0, top_k=8, num_experts=128, group=Group(16), dispatcher="dedup", sms=16)
    seconds = load_profile("h100").price([op], load_cluster("hgx_h100", ("num_nodes=2",))).seconds[0]
    assert 1.45e-3 < seconds < 1.9e-3


def test_a_group_of_one_costs_nothing(tables):
    seconds, nvlink, nic = collectives.seconds(defaults(collectives), tables, "all_reduce", np.array([1e9]), reach(1, 1))
    assert seconds[0] == nvlink[0] == nic[0] == 0


def test_measured_points_come_back_and_the_protocol_switch_survives(tables):
    """B300 all-gather over 8 GPUs, NCCL 2.29.2: 29.0 us at 4 MiB, 100 us at 16 MiB, 136 us at 64 MiB
    (https://github.com/ai-dynamo/aiconfigurator, b300_sxm/comm/nccl/2.29.2)."""
    got = collectives.inside_seconds(tables["all_gather"], "all_gather", 2.0 ** np.array([22, 24, 26]), np.full(3, 8.0))
    assert got * 1e6 == pytest.approx([29.0, 100.0, 136.0], rel=0.01)


def test_monotone_is_the_nearest_sequence():
    assert collectives.monotone([1.0, 9.0, 2.0, 3.0, 10.0]).tolist() == [1.0, 2.0, 2.0, 3.0, 10.0]
    rng = np.random.default_rng(1)
    for _ in range(50):
        noisy = np.sort(rng.random(12)) + 0.2 * rng.random(12)
        smooth = collectives.monotone(noisy)
        assert np.all(np.diff(smooth) >= 0)
        assert np.abs(smooth - noisy).sum() <= np.abs(np.maximum.accumulate(noisy) - noisy).sum() + 1e-12


def test_beyond_the_last_size_the_last_rate_holds():
    curve = Curve(np.array([1.0, 2.0]), np.array([10.0, 12.0]))
    far = collectives.curve_seconds(curve, np.array([2.0, 4.0]))
    assert far[0] == 12.0 and far[1] > 12.0


def routes(tokens, sms=24.0, combine=False, load=1.0):
    full = np.ones(np.shape(tokens))
    return dispatch.Routes(tokens * full, 14336 * full, 5.29 * full, 1.99 * full, load * full, sms * full, full > (0 if combine else 1))


def test_dispatch_is_monotone_in_tokens_and_sms_and_respects_both_wires():
    params = defaults(dispatch)
    where = reach(np.full(len(SIZES), 8), 4)
    seconds, nvlink, nic = dispatch.seconds(params, routes(SIZES), where)
    assert np.all(np.diff(seconds) >= 0) and np.all(seconds > 0)
    assert np.all(nvlink <= seconds) and np.all(nic <= seconds)
    one = reach(8, 1)
    by_sms = [dispatch.seconds(params, routes(np.array([4096.0]), sms), one)[0][0] for sms in (4, 8, 16, 24, 64)]
    assert np.all(np.diff(by_sms) < 0)


@pytest.mark.parametrize("nodes,expected", [(2, 1.99), (4, 3.61), (8, 5.29)])
def test_copies_follow_the_hypergeometric_count(nodes, expected):
    """256 experts, 8 drawn: the distinct nodes of https://arxiv.org/abs/2412.19437's layout."""
    assert expected_copies(8, nodes, 256, 8, None)[1] == pytest.approx(expected, abs=0.005)
    rank, node = expected_copies(8, nodes, 256, 8, 2)
    assert node <= 2 and node <= rank <= 8
    assert expected_copies(8, 3, 256, 8, None)[0] <= 8
