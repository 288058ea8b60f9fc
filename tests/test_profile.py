"""Do shipped profiles load, price every kind of op, and say where each number comes from?"""

from __future__ import annotations

import subprocess
import sys
import time

import numpy as np
import pytest

from moesim.load import load_cluster
from moesim.ops import Attention, Collective, Dispatch, Gemm, Group, GroupedGemm, MemoryBound
from moesim.pricing import PROVENANCE
from moesim.profile import PROFILES, load_profile

NAMES = sorted(path.stem for path in PROFILES.glob("*.yaml"))
BF16 = (
    Gemm(16384, 4096, 4096), Gemm(4096, 4096, 16384, accumulate=True), Gemm(4096, 64, 4096, dtype="fp32"),
    GroupedGemm(16, 65536, 8192, 4096), GroupedGemm(16, 65536, 8192, 4096, grad="input"), GroupedGemm(16, 65536, 8192, 4096, grad="weight"),
    Attention(2, 32, 8, 8192, 8192, 128, 128, 8192 * 8193 / 2), Attention(2, 32, 8, 8192, 8192, 128, 128, 8192 * 8193 / 2, backward=True),
    *(MemoryBound(kind, 2.0**28) for kind in ("elementwise", "norm", "permute", "quantise", "loss", "optimizer", "embedding", "copy")),
    *(
        Collective(kind, 2.0**26, Group(size, stride))
        for kind in ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")
        for size, stride in ((4, 1), (8, 1), (16, 1), (8, 8))
    ),
    Collective("send_recv", 2.0**26, Group(2)), Collective("send_recv", 2.0**26, Group(2, 8)),
    *(Dispatch(4096, 7168, 2.0, 8, 256, Group(size), name, 24) for size in (8, 32) for name in ("alltoall", "sync_free", "dedup")),
)


@pytest.fixture(scope="module")
def cluster():
    return load_cluster("hgx_b300", ("num_nodes=8",))


def test_eight_gpus_and_a_cpu_ship_and_what_was_measured_names_its_machine():
    own = [name for name in NAMES if load_profile(name).stamp is not None]
    assert [name for name in NAMES if name not in own] == ["a100", "b200", "b300", "cpu_gloo", "gb200", "gb300", "h100", "h200", "h800"]
    for name in own:
        profile = load_profile(name)
        assert profile.parent in NAMES and profile.stamp.num_lines > 0 and all(len(digest) == 64 for digest in profile.stamp.files.values())


@pytest.mark.parametrize("name", NAMES)
def test_every_profile_prices_every_kind(name, cluster):
    profile = load_profile(name)
    prices = profile.price(BF16, cluster)
    assert np.all(np.isfinite(prices.seconds)) and np.all(prices.seconds > 0)
    for busy in (prices.nvlink_s, prices.nic_s, prices.hbm_s):
        assert np.all(busy >= 0) and np.all(busy <= prices.seconds)
    assert np.all(prices.term >= 0) and np.all(prices.term < len(profile.terms))
    compute = np.array([op.flops for op in BF16])
    assert np.all(compute / prices.seconds <= profile.peak_flops.get("bf16", np.inf))


@pytest.mark.parametrize("name", NAMES)
def test_every_term_has_a_public_source_and_an_error(name):
    profile = load_profile(name)
    for term in profile.terms:
        measured = profile.stamp is not None and term.provenance == "measured"
        assert all(source.startswith("https://") or measured and source.startswith("measured: ") for source in term.sources), term.name
        assert term.sigma_log > 0 or any(term.shared.values()), term.name
    for level in profile.sustained.values():
        assert level.sources and 0.5 < level.factor < 1.1


def test_low_precisions_need_a_table(cluster):
    assert load_profile("b300").price([Gemm(4096, 4096, 4096, dtype=d) for d in ("fp8", "mxfp8", "nvfp4")], cluster).seconds.min() > 0
    with pytest.raises(ValueError, match="a100.*gemm.fp8"):
        load_profile("a100").price([Gemm(4096, 4096, 4096, dtype="fp8")], cluster)


def test_provenance_follows_the_validity_range(cluster):
    profile = load_profile("b300")
    inside, outside = Gemm(4096, 7168, 2048), Gemm(4_000_000, 7168, 2048)
    got = [PROVENANCE[code] for code in profile.price([inside, outside], cluster).provenance]
    assert got == ["interpolated", "extrapolated"]
    wanted = {"attention.backward", "gemm.wgrad.bf16", "memory.copy", "all_gather.nic", "all_to_all.nic"}
    assert {term.name for term in profile.terms if term.provenance == "extrapolated"} >= wanted


def test_extrapolated_terms_are_wider_than_measured_ones():
    profile = load_profile("b300")
    assert profile.term("gemm.wgrad.bf16").sigma_log > profile.term("gemm.bf16").sigma_log
    assert load_profile("h200").term("gemm.bf16").sigma_log > load_profile("h100").term("gemm.bf16").sigma_log
    assert profile.term("attention.backward").sigma_log > profile.term("attention.forward").sigma_log


def test_training_is_slower_than_the_burst_table(cluster):
    profile = load_profile("b300")
    op = [Gemm(8192, 8192, 8192)]
    assert profile.price(op, cluster).seconds[0] > profile.price(op, cluster, in_training=False).seconds[0]


def test_draws_are_log_normal_and_share_causes():
    profile = load_profile("b300")
    draws = profile.sample(np.random.default_rng(0), 20_000)
    assert set(draws) == {term.name for term in profile.terms} | {"host"}
    dense, grouped, memory = (np.log(draws[name]) for name in ("gemm.bf16", "grouped_gemm.bf16", "memory.norm"))
    term = profile.term("gemm.bf16")
    expected = np.hypot(term.sigma_log, term.shared["sustained"])
    assert np.std(dense) == pytest.approx(expected, rel=0.03)
    assert np.corrcoef(dense, grouped)[0, 1] > 0.3 > abs(np.corrcoef(dense, memory)[0, 1])
    again = profile.sample(np.random.default_rng(0), 20_000)
    assert all(np.array_equal(draws[name], again[name]) for name in draws)


def test_twenty_thousand_ops_are_priced_in_a_moment(cluster):
    profile, ops = load_profile("b300"), [Gemm(m, 4096, 4096) for m in range(64, 10_064)] + [Collective("all_gather", 1e6 + b, Group(16)) for b in range(10_000)]
    start = time.perf_counter()
    profile.price(ops, cluster)
    assert time.perf_counter() - start < 1.0  # 0.05 s on an idle core; the bound leaves room for a busy machine


def test_import_stays_light():
    code = "import sys, moesim.profile; print([m for m in ('scipy', 'plotly', 'pint', 'torch') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"


def test_a_wrong_profile_is_one_line(tmp_path):
    with pytest.raises(ValueError, match="known are"):
        load_profile("b3000")
    for text in ("[1, 2", "name: 3", "a: *b", "terms: !!python/object:os.system {}"):
        path = tmp_path / "p.yaml"
        path.write_text(text)
        with pytest.raises(ValueError) as caught:
            load_profile(path)
        assert "\n" not in str(caught.value) and "p.yaml" in str(caught.value)


def test_numbers_are_finite(tmp_path):
    text = (PROFILES / "h100.yaml").read_text().replace("hbm_bytes_per_s: 3350000000000.0", "hbm_bytes_per_s: .inf")
    (tmp_path / "p.yaml").write_text(text)
    with pytest.raises(ValueError, match="finite"):
        load_profile(tmp_path / "p.yaml")
