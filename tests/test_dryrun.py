"""Is every layer, expert and number of a model held exactly once by the ranks of a layout, up to worlds that no test could start?"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from functools import lru_cache

import pytest
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate, Shard

from moesim.evaluate import Evaluator
from moesim.layout import parse_layout
from moesim.load import load_scenario, parse_scenario
from moetrain.build import Job, layout_of, make_job
from moetrain.dryrun import World, build_world, built_rank, dryrun, fake_world, faults, total_numel
from moetrain.params import local_index, logical
from moetrain.testing import run_ranks

# 128 experts: counted by OLMo-core 3's own code (https://pypi.org/project/ai2-olmo-core/3.0.0/).
SEED_NUMEL = 46_862_510_080
SEED = ["dp8 ep8 zero1 mb1", "dp64 ep8 zero1 mb1", "pp2 dp32 ep8 zero1 mb1", "pp4 vpp2 interleaved dp16 ep16 zero1 mb1", "dp16 tp4 ep16 zero3 mb1", "dp512 ep64 zero1 mb1",
        "pp2 dp256 ep64 zero1 mb1", "pp2 vpp2 zbv dp64 cp2 tp2 ep32 zero1 mb1", "dp512 rep8 ep128 zero2 mb1", "dp64 ep64 zero0 mb1"]
SMALL = """
name: small
model: {name: small, num_layers: 4, hidden_size: 32, vocab_size: 64, num_heads: 8, num_kv_heads: 4, head_dim: 8, intermediate_size: 48, num_experts: 8,
  top_k: 2, moe_intermediate_size: 24, num_shared_experts: 1, num_leading_dense_layers: 1, qk_norm: per_head}
cluster: cpu_gloo
workload: {seq_len: 32, global_batch_tokens: 4096, routing: {kind: balanced}}
train: {dtype: bfloat16}
"""
UNEVEN = ("model.shared_expert_gate=true", "model.num_shared_experts=1")  # a gate of one row over several shards
TIED = ("model.tie_embeddings=true",)
GROUPS = ("model.score_correction_bias=true", "model.router=sigmoid", "model.expert_bias=true", "model.attention_sinks=true", "model.qkv_bias=true")
LAYOUTS = [("mb1", ()), ("dp4 tp2 ep4 zero1", TIED), ("dp8 rep2 ep2 zero1", UNEVEN), ("pp2 vpp2 dp2 interleaved zero3 noreshard", GROUPS)]
MORE = [("dp8 ep4 zero1", UNEVEN), ("dp8 ep8 zero3", GROUPS), ("dp2 cp2 tp2 ep2 zero2", ()), ("dp8 ep2 zero0", ()), ("pp2 dp4 ep2 zero1", TIED),
        ("pp2 vpp2 zbv dp2 tp2 zero1", TIED), ("pp4 dp2 st:0/2/1/1 zero1", ())]


@lru_cache(maxsize=None)
def seed_world(text: str) -> World:
    scenario = load_scenario("olmo_core3_new", ["model.num_experts=128", "train.dtype=bfloat16"])
    return build_world(scenario, layout_of(scenario, text, parse_layout(text).world))


def small_world(text: str, sets=()) -> World:
    scenario = parse_scenario(SMALL, list(sets))
    return build_world(scenario, layout_of(scenario, text, parse_layout(text).world))


@pytest.mark.parametrize("text", SEED)
def test_the_seed_model_is_held_exactly_once(text):
    """47 B parameters on 8, 64 and 512 ranks: the ledger's integer, each layer on one stage, each expert of each layer on edp ranks."""
    world = seed_world(text)
    assert not faults(world)
    assert total_numel(world) == SEED_NUMEL == world.scenario.model.num_params
    layers = Counter((rank // world.stage_ranks, layer) for rank in range(world.layout.world) for layer in world.layers(rank))
    assert sorted(layer for _, layer in layers) == list(range(8)) and set(layers.values()) == {world.stage_ranks}
    experts = Counter((world.pipeline_rank(rank), expert) for rank in range(world.layout.world) for expert in world.experts(rank))
    assert len(experts) == 128 * world.layout.pp and set(experts.values()) == {world.layout.edp}
    # Summed over the ranks of the stages, each shard counted once, the masters are the model.
    held = sum(piece.count(world.place(rank)) * piece.shards / world.stage_ranks
               for rank in range(world.layout.world) for piece in world.stages[world.pipeline_rank(rank)])
    assert held == pytest.approx(SEED_NUMEL, rel=1e-12)


@pytest.mark.parametrize("text", SEED)
def test_resident_bytes_are_the_planners(text):
    """Each category of moesim's memory, for each pipeline rank: the mean of its ranks, and every rank's own where all dimensions divide."""
    world = seed_world(text)
    found = Evaluator(world.scenario).categories(world.layout)
    for stage in range(world.layout.pp):
        ranks = [world.bytes(stage * world.stage_ranks + i) for i in range(world.stage_ranks)]
        for name, values in (("weights", [r.weights for r in ranks]), ("gradients", [r.gradients for r in ranks]), ("optimizer", [r.masters + r.moments for r in ranks])):
            assert sum(values) / len(values) == pytest.approx(found[name][0, stage], rel=1e-12), (stage, name)
            if world.layout.world <= 64:
                assert min(values) == max(values)
            assert max(values) <= found[name][0, stage] * 1.001


@pytest.mark.parametrize(("zero", "bytes_of"), [
    ("zero0", lambda whole, shard, g, m: (2 * whole, g * whole, 4 * whole, m * whole)),
    ("zero1", lambda whole, shard, g, m: (2 * whole, g * whole, 4 * shard, m * shard)),
    ("zero2", lambda whole, shard, g, m: (2 * whole, g * shard, 4 * shard, m * shard)),
    ("zero3 noreshard", lambda whole, shard, g, m: (2 * whole, g * whole, 4 * shard, m * shard)),
    ("zero3", lambda whole, shard, g, m: (2 * shard, g * shard, 4 * shard, m * shard)),
])
@pytest.mark.parametrize(("recipe", "g", "m"), [("", 4, 8), ("grad:bf16 opt:bf16", 2, 4)])
def test_the_table_of_zero_stages(zero, bytes_of, recipe, g, m):
    """From the model's count alone: dense weights over 8 ranks, experts over the 2 that hold the same ones."""
    world = small_world(f"dp8 ep4 {zero} {recipe}")
    model = world.scenario.model
    expert = 3 * model.num_experts * 3 * model.hidden_size * model.moe_intermediate_size
    dense = model.num_params - expert
    wanted = bytes_of(dense + expert // 4, dense // 8 + expert // 4 // 2, g, m)
    for rank in range(8):
        found = world.bytes(rank)
        assert (found.weights, found.gradients, found.masters, found.moments) == wanted and found.total == sum(wanted)


def real_rank(rank: int, ranks: int, world: World) -> None:
    check_rank(world, rank, make_job(world.scenario, world.layout, empty=True), indices=True)


def check_rank(world: World, rank: int, job: Job, indices: bool = False) -> None:
    """Coordinates, and of each parameter the shape of the local shard and, in a real process group, which logical indices it is."""
    at, pieces, axes = world.place(rank), iter(world.stages[world.pipeline_rank(rank)]), ("pp", "dp", "cp", "tp", "ep", "shard", "edp")
    assert [at[axis] for axis in axes] == [job.mesh[axis].rank for axis in axes]
    for part in job.parts:
        for name, parameter, _ in logical(part):
            piece = next(pieces)
            assert piece.name == part.logical_name(name)
            local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            held = [piece.indices(at, dim) for dim in range(parameter.ndim)]
            assert tuple(map(len, held)) == tuple(local.shape) and piece.count(at) == local.numel()
            for mine, own in zip(held, local_index(parameter) if indices and local.numel() and isinstance(parameter, DTensor) else ()):
                assert mine.tolist() == (list(range(own.start, own.stop)) if isinstance(own, slice) else own.tolist())
    assert next(pieces, None) is None


@pytest.mark.parametrize(("text", "sets"), [*LAYOUTS, *(pytest.param(*case, marks=pytest.mark.full) for case in MORE)])
def test_arithmetic_is_what_real_ranks_build(text, sets):
    world = small_world(text, sets)
    assert not faults(world)
    run_ranks(real_rank, world.layout.world, world)


@pytest.mark.parametrize(("text", "rank"), [("dp512 ep64 zero1 mb1", 511), ("pp2 vpp2 zbv dp64 cp2 tp2 ep32 zero1 mb1", 300), ("dp16 tp4 ep16 zero3 mb1", 21)])
def test_arithmetic_is_what_a_rank_of_the_seed_builds(text, rank):
    world = seed_world(text)
    with built_rank(world.scenario, world.layout, rank) as job:
        check_rank(world, rank, job)


def changed(world: World, which: str, **fields) -> World:
    return replace(world, stages=tuple(tuple(replace(p, **fields) if p.name == which else p for p in stage) for stage in world.stages))


def test_what_is_missing_or_held_twice_is_named():
    world = small_world("pp2 dp4 ep2 zero1")
    down = "layers.1.moe.experts.down"
    gone = replace(world, stages=(tuple(p for p in world.stages[0] if p.layer != 1), world.stages[1]))
    twice = replace(world, stages=(world.stages[0], (*world.stages[1], *(p for p in world.stages[0] if p.layer == 1))))
    whole = changed(world, down, placements=(Replicate(), Replicate()))
    assert "layer 1 is held by 0 stages" in faults(gone) and any("the model has" in fault for fault in faults(gone))
    assert "layer 1 is held by 2 stages" in faults(twice)
    # A parameter held whole where the plan cuts it is consistent in itself: bytes tell.
    assert not faults(whole) and whole.bytes(0).masters > world.bytes(0).masters
    (piece,) = (p for p in world.stages[0] if p.name == down)
    short = changed(world, down, shape=(piece.shape[0] - 1, *piece.shape[1:]))
    assert any("the model has" in fault for fault in faults(short))
    crossed = changed(world, down, placements=(Shard(1), Shard(0)), sizes=(2, 3))
    assert any(down in fault for fault in faults(crossed))


def test_the_report_of_a_rank():
    scenario = load_scenario("olmo_core3_new", ["model.num_experts=128"])
    text = dryrun(scenario, "pp2 dp256 ep64 zero1 mb1 ov:grad+param", 300)
    assert "rank 300 of 512" in text and "pp 1 dp 44 cp 0 tp 0 edp 0 ep 44" in text
    assert "layers              4-7 of 8, experts 88-89 of 128" in text
    assert "all 512 ranks: 8 layers, 128 experts of each MoE layer and 46,862,510,080 parameters" in text
    # The bytes of dispatch: tokens * top_k * hidden * 2, forward and back, of 4 MoE layers in 2 microbatches.
    assert f"16 {8192 * 4 * 4096 * 2:>15,}" in text
    assert "planner's pieces" not in text and "planner's pieces" in dryrun(scenario, "dp8 ep8 zero1 mb1")
    # 128 rows of 7 routers and 128 gains of 16 norms of heads, over 512 ranks: the last ones hold none of them.
    world = seed_world("dp512 ep64 zero1 mb1")
    assert world.held(0)[0] == world.held(511)[0] + 7 * 4096 + 16 and world.held(0)[1] == world.held(511)[1]


def test_what_cannot_be_is_one_line():
    scenario = load_scenario("olmo_core3_new", ["model.num_experts=128"])
    with pytest.raises(ValueError, match="ranks 0 to 7"):
        dryrun(scenario, "dp8 ep8 zero1 mb1", 8)
    with pytest.raises(ValueError, match="etp"):
        dryrun(scenario, "dp8 ep4 etp2 zero1 mb1")
    with fake_world(0, 2), pytest.raises(ValueError, match="without torchrun"):
        dryrun(scenario, "dp8 ep8 zero1 mb1")
    assert not dist.is_initialized()
    assert "8 ranks" in dryrun(load_scenario("olmo_core3_new"), None)


@pytest.mark.full
def test_thousands_of_ranks():
    scenario = load_scenario("olmo_core3_512_nodes")
    layout = layout_of(scenario, "dp4096 ep128 zero1 mb1", 4096)
    world = build_world(scenario, layout)
    assert not faults(world) and total_numel(world) == scenario.model.num_params
    assert math.isclose(sum(world.bytes(rank).masters for rank in range(0, 4096, 64)), 64 * world.bytes(0).masters, rel_tol=1e-3)
