"""Does a checkpoint come back bit for bit under every layout, with everything that is state?"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys

import pytest
import torch
from small_checkpoints import EXPERTS, FFN, WIDTH, adam, build, contents, load_on, merged, part_of, reference, same, save_on, step
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from moetrain import checkpoint
from moetrain.checkpoint import Checkpointer, CheckpointError
from moetrain.checkpoint.boxes import boxes_of, model_tensors
from moetrain.checkpoint.digest import digest, total
from moetrain.testing import run_ranks

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

# --- the digest -------------------------------------------------------------------------------------------------------------


def splitmix(shape, bits) -> int:
    """The digest by the book, in Python integers, element by element."""
    out = 0
    for position, value in enumerate(bits):
        z = (position * 0x9E3779B97F4A7C15 ^ value) % 2**64
        z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ z >> 27) * 0x94D049BB133111EB % 2**64
        out += z ^ z >> 31
    return out % 2**64


def test_digest_equals_the_definition():
    values = torch.randint(-(2**31), 2**31 - 1, (3, 5, 2), dtype=torch.int32)
    assert digest(values) == splitmix(values.shape, values.flatten().tolist()) == digest(values.view(torch.float32))
    whole = torch.randint(-(2**62), 2**62, (11,), dtype=torch.int64)
    assert digest(whole) == splitmix(whole.shape, whole.tolist())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool, torch.float8_e4m3fn])
def test_digest_adds_up_over_boxes(dtype, monkeypatch):
    monkeypatch.setitem(__import__("moetrain.checkpoint.digest", fromlist=["CHUNK"]).CHUNK, "cpu", 7)
    x = torch.randn(4, 3, 5, 6).to(dtype)
    whole = total([digest(x)])
    for dim in range(4):
        offset, pieces = 0, []
        for piece in x.split([1, x.shape[dim] - 1], dim) if x.shape[dim] > 1 else [x]:
            starts = [offset if d == dim else 0 for d in range(4)]
            for half, inner in zip(piece.split([2, 3], 2) if dim != 2 else [piece], (0, 2)):
                pieces.append(digest(half, x.shape, [s + (inner if d == 2 and dim != 2 else 0) for d, s in enumerate(starts)]))
            offset += piece.shape[dim]
        assert total(pieces) == whole


def test_digest_tells_order_value_and_sign_apart():
    x = torch.arange(1000, dtype=torch.float32)
    swapped, flipped, negative = x.clone(), x.clone(), x.clone()
    swapped[[3, 4]] = x[[4, 3]]
    flipped.view(torch.int32)[7] ^= 1
    negative[0] = -0.0
    found = {digest(t) for t in (x, swapped, flipped, negative, x.flip(0), x.view(10, 100).t().reshape(-1))}
    assert len(found) == 6
    assert digest(torch.zeros(3)) != digest(torch.zeros(4)) and digest(torch.empty(0)) == 0


# --- layouts ----------------------------------------------------------------------------------------------------------------

LAYOUTS = [("ep4", 4), ("hsdp", 4), ("ep2", 4), ("ep2", 2), ("dp", 3), ("tp", 4), ("tp", 2), ("pp", 2), ("pp-virtual", 2), ("one", 1)]


def boxes_hold_the_truth(rank, world, layout):
    """Every box of a rank equals that part of the whole tensor."""
    truth = dict(model_tensors([part_of([0, 1])]))
    covered = {}
    for name, tensor in model_tensors(build(rank, world, layout)):
        for box in boxes_of(name, tensor):
            window = truth[name]
            for dim, (low, count) in enumerate(zip(box.offsets, box.local.shape)):
                window = window.narrow(dim, low, count)
            assert torch.equal(window, box.local), box.key
            covered[box.key] = box.local.numel()
    return covered


@pytest.mark.parametrize("layout, world", LAYOUTS)
def test_boxes_tile_every_tensor(layout, world):
    distinct = merged(run_ranks(boxes_hold_the_truth, world, layout))
    for name, tensor in model_tensors([part_of([0, 1])]):
        assert sum(count for (found, _, _), count in distinct.items() if found == name) == tensor.numel(), name


def strided(rank, world):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    from torch.distributed.tensor.placement_types import _StridedShard
    whole = torch.arange(16.0).view(8, 2)
    # The strided dimension alone: rows 0, 1, 4, 5 on one half of the ranks, 2, 3, 6, 7 on the other; two boxes each.
    local = whole[[0, 1, 4, 5]] if mesh.get_local_rank("dp") == 0 else whole[[2, 3, 6, 7]]
    tensor = DTensor.from_local(local, mesh, [_StridedShard(0, split_factor=2), Replicate()], run_check=False, shape=(8, 2), stride=(2, 1))
    return digest(whole), [(box.offsets, tuple(box.local.shape), digest(box.local, box.shape, box.offsets)) for box in boxes_of("x", tensor)]


def uneven(rank, world):
    """FSDP over tensor parallelism where neither cuts evenly: torch's own reading of the placement is wrong for some of these."""
    mesh = init_device_mesh("cpu", (3, 2), mesh_dim_names=("dp", "tp"))
    found = []
    for rows in range(1, 14):
        module = nn.Module()
        whole = torch.arange(rows * 2.0).view(rows, 2)
        module.weight = nn.Parameter(distribute_tensor(whole, mesh["tp"], [Shard(0)]))
        fully_shard(module, mesh=mesh["dp"])
        boxes = boxes_of("x", module.weight)
        for box in boxes:
            assert torch.equal(whole[box.offsets[0]:box.offsets[0] + box.local.shape[0]], box.local), (rows, box)
        found.append((sum(digest(box.local, box.shape, box.offsets) for box in boxes), digest(whole)))
    return found


def test_uneven_cuts_of_a_dimension_by_two_meshes():
    for rows in zip(*run_ranks(uneven, 6)):
        assert sum(part for part, _ in rows) % 2**64 == rows[0][1]


SAVED_ON = [("ep4", 4), ("tp", 4), ("dp", 3), ("pp-virtual", 2), ("one", 1)]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """One checkpoint of the same run from each of several layouts."""
    made = {}
    for layout, world in SAVED_ON:
        folder = tmp_path_factory.mktemp(layout)
        run_ranks(save_on, world, layout, folder, layout == "ep4")
        made[layout] = folder
    return made


def test_digests_do_not_depend_on_the_layout(saved):
    found = [checkpoint.inspect(folder, verify=True)[0] for folder in saved.values()]
    assert all(entry["ok"] for entry in found)
    assert len({json.dumps(entry["tensors"]) for entry in found}) == 1
    assert found[0]["tensors"]["model.layers.1.moe.experts.gate_up"]["shape"] == [EXPERTS, 2, FFN, WIDTH]


def test_replicas_are_written_once(saved):
    for folder in saved.values():
        newest = next(folder.glob("step-*"))
        index = json.loads((newest / "index.json").read_text())
        written = sum(math.prod(chunk[1]) for entry in index.values() for chunk in entry["chunks"])
        assert written == checkpoint.inspect(newest)[0]["elements"]


@pytest.mark.parametrize("to, world", [("ep2", 2), ("ep4", 4), ("tp", 2), ("dp", 2), ("pp", 2), ("one", 1)])
@pytest.mark.parametrize("source", ["ep4", "tp"])
def test_resume_on_another_layout(saved, source, to, world):
    results = run_ranks(load_on, world, to, saved[source])
    assert all(extra["step"] == 2 and extra["layout"] == source for extra, *_ in results)
    same(merged(before for _, before, _, _ in results), reference(2))
    same(merged(after for _, _, after, _ in results), reference(3))


@pytest.mark.full
@pytest.mark.parametrize("to, world", LAYOUTS)
@pytest.mark.parametrize("source", [layout for layout, _ in SAVED_ON])
def test_resume_from_every_layout_on_every_other(saved, source, to, world):
    results = run_ranks(load_on, world, to, saved[source])
    same(merged(after for _, _, after, _ in results), reference(3))


def test_a_chain_of_layouts(tmp_path):
    """EP4 -> EP2 -> EP1 -> PP2 -> TP2, one step on each, equals five steps on one process."""
    run_ranks(save_on, 4, "ep4", tmp_path, False, 1)
    for steps, (layout, world) in enumerate([("ep2", 2), ("dp", 2), ("pp", 2), ("tp", 2)], 2):
        run_ranks(continue_on, world, layout, tmp_path, steps)
    parts = [part_of([0, 1])]
    optimizer = adam(parts)
    assert Checkpointer(tmp_path).load("auto", parts, optimizer).step == 5
    same(contents(parts, optimizer), reference(5))


def continue_on(rank, world, layout, folder, steps):
    parts = build(rank, world, layout)
    optimizer = adam(parts)
    checkpointer = Checkpointer(folder)
    checkpointer.load("auto", parts, optimizer)
    step(parts, optimizer)
    checkpointer.save(steps, parts, optimizer, {})
    checkpointer.wait()


def test_strided_shards_are_several_boxes():
    results = run_ranks(strided, 4)
    whole = results[0][0]
    assert all(len(boxes) == 2 for _, boxes in results)
    assert sum({(o, s): d for _, boxes in results for o, s, d in boxes}.values()) % 2**64 == whole


def test_each_rank_of_four_holds_its_own_experts(saved):
    index = json.loads(next(saved["ep4"].glob("step-*/index.json")).read_text())
    firsts = {chunk[0][0] for chunk in index["model.layers.0.moe.experts.gate_up"]["chunks"]}
    assert firsts == set(range(EXPERTS))


# --- what else is state -----------------------------------------------------------------------------------------------------


def test_numbers_tied_weights_and_wrappers_come_back(tmp_path):
    first, last = nn.Module(), nn.Module()
    first.embed, last.embed = nn.Parameter(torch.randn(4, 2)), None
    last.embed = nn.Parameter(first.embed.data.clone())
    optimizer = torch.optim.SGD([first.embed, last.embed], lr=0.1)
    optimizer.state[first.embed] = {"count": 3, "beta": 0.25, "on": True}
    Checkpointer(tmp_path, asynchronous=False).save(1, [first, last], optimizer)
    wanted = first.embed.data.clone()
    optimizer.state[first.embed] = {"count": 0, "beta": 0.0, "on": False}
    with torch.no_grad():
        first.embed.zero_(), last.embed.zero_()
    assert Checkpointer(tmp_path).load("auto", [first, last], optimizer).step == 1
    assert torch.equal(first.embed, wanted) and torch.equal(last.embed, wanted)
    assert optimizer.state[first.embed] == {"count": 3, "beta": 0.25, "on": True} and optimizer.state[first.embed]["on"] is True
    wrapped = nn.Module()
    wrapped._orig_mod = first
    assert [name for name, _ in model_tensors([wrapped])] == ["embed"]


def test_moments_of_another_type_are_cast_and_said(tmp_path):
    parts = [part_of([0])]
    optimizer = adam(parts)
    step(parts, optimizer)
    Checkpointer(tmp_path, asynchronous=False).save(1, parts, optimizer)
    for state in optimizer.state.values():
        state["exp_avg"] = torch.zeros_like(state["exp_avg"], dtype=torch.bfloat16)
    notes = Checkpointer(tmp_path).load("auto", parts, optimizer).notes
    assert len(notes) == 1 and "4 tensors change type, first optim.layers.0.moe.experts.gate_up.exp_avg was float32 and is bfloat16" in notes[0]
    assert all(state["exp_avg"].any() for state in optimizer.state.values())


def drift(rank, world, folder):
    parts = build(rank, world, "dp")
    parts[0].layers["0"].moe.balance_bias += rank
    said = []
    Checkpointer(folder, asynchronous=False, log=said.append).save(1, parts, None, {"step": rank})
    return said


def test_replicas_that_drifted_apart_are_named(tmp_path):
    said = run_ranks(drift, 2, tmp_path)
    assert "model.layers.0.moe.balance_bias is not the same on ranks 0 and 1" in said[0][0] and len(said[0]) == 2
    assert "run's state on rank 1 is not that of rank 0" in said[1][1]


MEASURED = """
import sys, torch
from torch import nn
from moetrain.checkpoint import Checkpointer, Checks

def resident(field):
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(field)) / 1024

def extra_mib(fn):
    open("/proc/self/clear_refs", "w").write("5")
    before = resident("VmRSS")
    fn()
    return resident("VmHWM") - before

model = nn.ParameterDict({f"p{i}": nn.Parameter(torch.randn(1 << 20)) for i in range(16)})
optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
for p in model.parameters():
    p.grad = torch.ones_like(p)
optimizer.step()
for p in model.parameters():
    p.grad = None
small = nn.Linear(2, 2)
Checkpointer(sys.argv[1] + "/warm", asynchronous=False).save(1, [small])
Checkpointer(sys.argv[1] + "/warm").load("auto", [small])
checkpointer = Checkpointer(sys.argv[1], asynchronous=False)
print(extra_mib(lambda: checkpointer.save(1, [model], optimizer)), extra_mib(lambda: checkpointer.load("auto", [model], optimizer)))
"""


def test_saving_and_loading_need_one_tensor_of_memory_beyond_the_state(tmp_path):
    """192 MiB of weights and moments in tensors of 4 MiB: the process grows by few of them, by its own high-water mark."""
    env = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536", "OMP_NUM_THREADS": "1"}
    out = subprocess.run([sys.executable, "-W", "ignore", "-c", MEASURED, str(tmp_path)], env=env, capture_output=True, text=True, check=True)
    save, load = map(float, out.stdout.split())
    assert save < 16 and load < 24, (save, load)


@pytest.mark.parametrize("extra, words", [
    ({"a": {1: 2}}, "extra.a has the key 1"),
    ({"a": [0, {"b": {1, 2}}]}, "extra.a[1].b is a set"),
    ({"seed": torch.tensor(1)}, "extra.seed is a Tensor"),
])
def test_extra_that_is_not_json_is_refused_before_anything_is_written(tmp_path, extra, words):
    with pytest.raises(CheckpointError) as error:
        Checkpointer(tmp_path).save(1, [part_of([0])], None, extra)
    assert words in str(error.value) and not list(tmp_path.iterdir())


def test_extra_comes_back_exactly(tmp_path):
    extra = {"seed": 2**63 + 1, "loss": 0.1 + 0.2, "window": [1e300, float("inf")], "none": None, "text": "é\u2028"}
    Checkpointer(tmp_path, asynchronous=False).save(1, [part_of([])], None, extra)
    assert Checkpointer(tmp_path).load("auto", [part_of([])]).extra == extra
