"""Do the bytes by category equal what the shapes say, and the peak what the operating system saw?"""

import mmap

import pytest
import torch
from torch import nn

from moetrain.observe.memory import CATEGORIES, Base, MemoryLedger, Static, fullest, ledger, start_peak, static_bytes, status_bytes
from moetrain.testing import run_ranks


def model() -> nn.Module:
    net = nn.Sequential(nn.Linear(64, 32), nn.Linear(32, 64, bias=False), nn.BatchNorm1d(64))
    net.tied = net[1].weight  # the same parameter under two names counts once
    return net


def test_bytes_equal_the_shapes():
    net = model()
    optimizer = torch.optim.AdamW(net.parameters())
    assert static_bytes([net], [optimizer]) == Static(parameters=4 * (64 * 32 + 32 + 32 * 64 + 128), gathered=0, gradients=0, optimizer=0, buffers=4 * 128 + 8)
    net(torch.randn(4, 64)).sum().backward()
    optimizer.step()
    found = static_bytes([net], [optimizer])
    elements = 64 * 32 + 32 + 32 * 64 + 128
    assert found.gradients == 4 * elements and found.optimizer == 2 * 4 * elements + 4 * len(list(net.parameters()))  # moments, and a step count each
    assert found.total == 4 * (4 * elements) + 4 * 5 + 4 * 128 + 8


def test_shared_storage_counts_once_and_meta_tensors_not_at_all():
    net = nn.Linear(8, 8, bias=False)
    net.register_buffer("view", net.weight.detach()[:2])
    with torch.device("meta"):
        other = nn.Linear(1000, 1000)
    assert static_bytes([net, other]) == Static(4 * 64, 0, 0, 0, 0)


def _sharded(rank: int, world: int):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (world,))
    found = []
    for reshard in (True, False):
        net = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False))
        for layer in net:
            fully_shard(layer, mesh=mesh, reshard_after_forward=reshard)
        fully_shard(net, mesh=mesh)
        optimizer = torch.optim.AdamW(net.parameters(), foreach=False)
        loss = net(torch.randn(2, 64)).sum()
        middle = static_bytes([net], [optimizer])
        loss.backward()
        optimizer.step()
        found.append((middle, static_bytes([net], [optimizer])))
    return found


def test_a_shard_counts_as_what_the_rank_holds():
    whole = 2 * 64 * 64 * 4
    for found in run_ranks(_sharded, 2):
        (middle, after), (kept, _) = found
        assert middle.parameters == kept.parameters == after.gradients == whole // 2 and middle.gathered == 0 == after.gathered
        assert kept.gathered == whole  # not resharded between forward and backward
        assert after.optimizer == whole + 8


def test_the_peak_of_a_cpu_is_what_the_system_saw():
    """A block allocated and freed between start and ledger shows as activations, to a few pages."""
    if status_bytes("VmHWM") is None:
        pytest.skip("no /proc/self/status")
    base = start_peak("cpu")
    # Pages of its own: an allocator may hand out memory that earlier tests left resident.
    with mmap.mmap(-1, 64 * 2**20) as block:
        for page in range(0, len(block), mmap.PAGESIZE):
            block[page] = 1
        static = static_bytes([], [])
    found = ledger(static, "cpu", base)
    if base.reset:
        assert found.activations == pytest.approx(64 * 2**20, rel=0.05) and found.peak == found.activations
    assert "VmHWM" in found.line() and "activations 6" in found.line() and found.fields()["peak"] == found.peak


def test_the_peak_of_a_gpu_is_the_allocators(monkeypatch):
    """The CUDA path with the allocator's figures given: categories add up to what it reserved."""
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda device: {"allocated_bytes.all.peak": 700, "reserved_bytes.all.peak": 1000})
    found = ledger(Static(100, 0, 100, 200, 0), "cuda", Base(None, True))
    assert (found.activations, found.allocator, found.peak) == (300, 300, 1000)
    assert sum(getattr(found, name) for name in CATEGORIES) == found.peak


def test_what_is_not_measured_is_unknown():
    unknown = MemoryLedger(0, 8, 0, 8, 16, 0, None, None, None, "UNKNOWN: no /proc/self/status")
    assert "peak UNKNOWN" in unknown.line() and "activations UNKNOWN" in unknown.line() and "gathered" not in unknown.line()
    assert "peak" not in unknown.fields()
    known = ledger(Static(1, 0, 0, 0, 0), "cpu", Base(0, False), rank=3)
    assert fullest([unknown, known]) is known
