"""Does every number of every shipped GPU and cluster name its source?"""

import math

import pytest

from moesim.load import load_cluster, load_gpu, preset_names
from moesim.spec import ClusterSpec, GpuSpec

REQUIRED = {"hgx_b300", "gb300_nvl72", "hgx_b200", "gb200_nvl72", "hgx_h100", "hgx_h200", "hgx_h800", "hgx_a100", "cpu_gloo"}
CHOICES = {"num_nodes"}  # what the user decides needs no source
TOKEN_PRICE = {"usd_per_gpu_hour"}  # likewise the user's


def _numbers(spec, kind):
    """Names of the fields that hold a published figure: numbers, peaks and prices that are there and not zero."""
    values = {name: getattr(spec, name) for name in kind.model_fields}
    return {n for n, v in values.items() if isinstance(v, (int, float, dict)) and v and n != "sources"}


@pytest.mark.parametrize("name", preset_names("gpu"))
def test_gpu_sources(name):
    gpu = load_gpu(name)
    published = _numbers(gpu, GpuSpec) | ({"usd_per_hour"} if gpu.usd_per_hour else set())
    assert set(gpu.sources) == published
    assert all("https://" in source for source in gpu.sources.values())


@pytest.mark.parametrize("name", preset_names("cluster"))
def test_cluster_sources(name):
    cluster = load_cluster(name)
    derived = {"resources"} if "resources" in cluster.sources else set()
    assert set(cluster.sources) == (_numbers(cluster, ClusterSpec) - CHOICES - TOKEN_PRICE) | derived
    assert all("https://" in source for source in cluster.sources.values())
    assert all("https://" in tier.source for tier in cluster.tiers)


def test_all_clusters_are_there():
    assert set(preset_names("cluster")) >= REQUIRED


@pytest.mark.parametrize("name", preset_names("cluster"))
def test_cluster_is_plausible(name):
    cluster = load_cluster(name)
    rates = [tier.bytes_per_s for tier in cluster.tiers]
    assert rates == sorted(rates, reverse=True), "an outer tier is never faster than an inner one"
    assert all(r.capacity > 0 and math.isfinite(r.capacity) for r in cluster.resources)
    assert cluster.runtime_reserve_bytes < 0.2 * cluster.gpu.hbm_bytes
    load_cluster(name, ["num_nodes=10000"])


@pytest.mark.parametrize("name", preset_names("gpu"))
def test_gpu_is_plausible(name):
    gpu = load_gpu(name)
    peaks = [gpu.peak_flops[k] for k in ("bf16", "fp8", "fp4") if k in gpu.peak_flops]
    assert peaks == sorted(peaks)
    assert (gpu.hbm_measured_bytes_per_s or 0) < gpu.hbm_bytes_per_s
    assert gpu.parent is None or gpu.parent in preset_names("gpu")


def test_known_hardware():
    """HGX B300: 148 SMs, 2.25 dense BF16 PFLOP/s, 275,040 MiB, 900 GB/s NVLink over 8 GPUs, one 800 Gb/s NIC each."""
    cluster = load_cluster("hgx_b300")
    gpu = cluster.gpu
    assert (gpu.num_sms, gpu.peak_flops["bf16"], gpu.hbm_bytes) == (148, 2.25e15, 275040 * 2**20)
    assert [t.bytes_per_s for t in cluster.tiers] == [900e9, 100e9, 100e9] and cluster.domain == 8
    assert load_gpu("gb300").hbm_bytes == 284208 * 2**20 and load_cluster("gb200_nvl72").domain == 72


def test_failure_rate_is_what_its_source_implies():
    """419 unplanned interruptions on 2,048 nodes in 54 days, https://arxiv.org/abs/2407.21783."""
    assert load_cluster("hgx_h100").failures_per_node_day == pytest.approx(419 / (16384 / 8 * 54), rel=0.01)
