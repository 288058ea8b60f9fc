"""Does preflight measure the links between ranks, and name what is odd?"""

import json
from dataclasses import replace

import pytest

from moetrain.observe.host import QUERY, RankFacts, busy, disk_free, facts, parse_nvlinks, parse_query, used_since
from moetrain.observe.links import Links, _shifts, slow_pairs
from moetrain.observe.preflight import FILE, foreign_cpu, preflight, warnings
from moetrain.testing import run_ranks


def _look(rank, world, folder):
    found = preflight(folder, "cpu", checkpoints=folder, message_bytes=1 << 20, watch_s=0.1)
    return found.fields(), found.devices


@pytest.mark.parametrize("world", [2, 3])
def test_ranks_measure_their_links(tmp_path, world):
    results = run_ranks(_look, world, str(tmp_path / "run"))
    stored = json.loads((tmp_path / "run" / FILE).read_text())
    for fields, devices in results:
        assert set(fields["links"]["pairs"]) == {f"{a}>{b}" for a in range(world) for b in range(world) if a != b}
        assert all(1e6 < rate < 1e12 for rate in fields["links"]["pairs"].values()) and fields["links"]["all_reduce_bus"] > 1e6
        assert len(devices) == world and len(set(devices)) == 1
    assert results[0][0]["links"]["pairs"] == results[-1][0]["links"]["pairs"] == stored["links"]["pairs"]
    assert results[0][0]["warnings"] == results[-1][0]["warnings"] == stored["warnings"]
    assert [r["rank"] for r in stored["ranks"]] == list(range(world)) and stored["ranks"][0]["versions"]["torch"] and stored["ranks"][0]["gpu"] is None
    assert stored["ranks"][1]["disk"]["free"] > 0 and stored["links"]["seconds"] < 20


def test_a_single_process_needs_no_group(tmp_path):
    found = preflight(tmp_path, "cpu", watch_s=0.0)
    assert found.links.pairs == {} and found.links.all_reduce is None and (tmp_path / FILE).exists()
    assert preflight(None, "cpu", watch_s=0.0).devices == found.devices


def test_a_slow_pair_is_named_among_its_own_kind():
    """Links between hosts are slower than inside one: each is held to the median of its kind."""
    hosts = ["a", "a", "a", "b", "b", "b"]
    pairs = {(x, y): 100e9 if hosts[x] == hosts[y] else 20e9 for x in range(6) for y in range(6) if x != y}
    assert slow_pairs(pairs, hosts) == []
    pairs[1, 2], pairs[4, 0], pairs[5, 1] = 60e9, 13e9, 15e9
    found = slow_pairs(pairs, hosts)
    assert found == ["rank 1 (a) to rank 2 (a): 60 GB/s, 60% of the median inside a host", "rank 4 (b) to rank 0 (a): 13 GB/s, 65% of the median between hosts"]
    assert slow_pairs({}, []) == []


def test_every_pair_is_a_shift():
    assert _shifts(2) == [1] and _shifts(8) == [1, 2, 4, 3, 5, 6, 7] and sorted(_shifts(13)) == list(range(1, 13))


def rank_facts(rank, **more) -> RankFacts:
    return replace(facts(rank, "cpu", None, busy()), host="node", cpu_seconds=(1.0, 0.4, 1.0), **more)


def test_what_differs_between_ranks_is_named():
    base = rank_facts(0)
    gpu = dict.fromkeys(QUERY) | {"power.limit": 1000.0, "temperature.gpu": 40.0, "nvlinks": 18, "driver_version": "590.48"}
    ranks = [replace(base, rank=i, gpu=gpu) for i in range(4)]
    ranks[2] = replace(ranks[2], gpu=gpu | {"power.limit": 700.0, "nvlinks": 17, "temperature.gpu": 91.0}, versions=base.versions | {"nccl": "2.1\x1b[31m"})
    found = "\n".join(warnings(ranks, Links({}, None, 0, 0.0), {"node": 0.2}))
    for text in ("power limit (W) 700.0 on ranks 2; others have 1000.0", "NVLink links 17 on ranks 2; others have 18", "rank 2 (node): GPU at 91 C", "nccl version 2.1",
                 "processors of node are 20% busy"):
        assert text in found
    assert "\x1b" not in found and "driver" not in found
    slow = warnings([base, replace(base, rank=1)], Links({(0, 1): 1e9, (1, 0): 9e9}, None, 0, 0.0), {})
    assert any("slow link: rank 0 (node) to rank 1 (node)" in text for text in slow)


def test_a_full_disk_is_named(tmp_path):
    full = replace(rank_facts(0), disk={"folder": "/ckpt", "free": 2**30, "total": 2**40})
    assert any("1 GiB free in /ckpt, checkpoints need 5 GiB" in text for text in warnings([full], Links({}, None, 0, 0.0), {}, 5 * 2**30))
    assert disk_free(tmp_path / "not" / "yet")["free"] > 0


def test_foreign_cpu_is_what_the_run_did_not_use():
    base = rank_facts(0)
    ranks = [replace(base, rank=i, cpu_seconds=(2.0, 0.5, 1.0), processors=base.processors | {"cores": 4}) for i in range(2)]
    assert foreign_cpu(ranks) == {"node": pytest.approx((2.0 - 1.0) / 4)}
    assert foreign_cpu([replace(base, cpu_seconds=None)]) == {"node": None}
    assert used_since(None) is None


def test_counters_of_a_gpu_are_read_as_printed():
    line = "NVIDIA B300 SXM6 AC, 590.48, 1920, 2032, 3996, 185.31, 1100.00, 34, 6, 16\n"
    found = parse_query(line)
    assert found["name"] == "NVIDIA B300 SXM6 AC" and found["driver_version"] == "590.48" and found["power.limit"] == 1100.0 and found["pcie.link.gen.current"] == 6
    assert parse_query(line.replace("185.31", "[N/A]"))["power.draw"] is None
    assert parse_query(None) is parse_query("") is parse_query("no devices") is None
    links = "GPU 0: NVIDIA B300 (UUID: GPU-1)\n\t Link 0: 53.125 GB/s\n\t Link 1: <inactive>\n\t Link 2: 53.125 GB/s\n"
    assert parse_nvlinks(links) == 2 and parse_nvlinks(None) is None
