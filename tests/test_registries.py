"""Does every entry of every registry do what its kind promises? (A newcomer is checked here before anybody writes a test for it.)

Schedules, axes over whole models, cost models at their starting values, clusters' sources and stacks' fields have tests beside
them; here are the checks that need the registries together, and those that run over everything that ships.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache, partial

import numpy as np
import pytest

from moesim import axes, block, layout, paths, routing, transformer
from moesim.assembly import GRAD_BYTES, OPTIMIZER_BYTES, Assembler
from moesim.axes import pipeline
from moesim.costs import COSTS, collectives, dispatch, memory_bound
from moesim.layout import Layout, parse_layout
from moesim.load import load_cluster, load_gpu, load_model, parse_scenario, preset_names, scenarios_dir
from moesim.memory import MOMENT_BYTES
from moesim.ops import BYTES_PER_ELEMENT, Attention, Collective, Dispatch, Gemm, Group, GroupedGemm, MemoryBound
from moesim.parts import HEADS, LAYER_KINDS, Parts, layer_parts
from moesim.profile import load_profile
from moesim.schedules import SCHEDULES
from moesim.space import AXIS_FIELDS
from moesim.spec import SearchSpec
from moesim.stack import Stack, load_stack, stack_names
from moesim.transformer import Work

PROFILES = sorted(p.stem for p in (scenarios_dir() / "profiles").glob("*.yaml"))


# --- one name, one meaning --------------------------------------------------------------------------------------------------


def test_registries_name_the_same_things():
    """A word that the layout grammar takes is known to whoever acts on it."""
    assert set(layout.SCHEDULES) == set(SCHEDULES)
    assert set(layout.DISPATCHERS.values()) == set(layout.DEFAULT_SMS) <= set(dispatch.DISPATCHERS)
    assert set(layout.PRECISIONS) <= set(BYTES_PER_ELEMENT)
    assert set(layout.RECOMPUTE_ROLES) == set(block.RECOMPUTE_MEMBERS)
    assert set(GRAD_BYTES) == {"fp32", "bf16"} and set(OPTIMIZER_BYTES) == set(MOMENT_BYTES) == {"fp32", "bf16", "fp8"}
    assert set(AXIS_FIELDS) == set(SearchSpec.model_fields)
    assert set(AXIS_FIELDS.values()) == set(layout.LAYOUT_FIELDS) - {"prefetch"}  # written as part of ov:fsdpN
    for field, kind in (("host_waits", set(layout.DISPATCHERS.values())), ("permute_passes", set(layout.DISPATCHERS.values()))):
        assert all(set(getattr(load_stack(name), field)) == kind for name in stack_names())
    assert set(collectives.KINDS) >= {"all_gather", "reduce_scatter", "all_reduce", "all_to_all", "send_recv"}


@pytest.mark.parametrize("name", COSTS)
def test_a_cost_model_is_parameters_and_seconds(name):
    module = COSTS[name]
    assert callable(module.seconds) and "Positive" in module.seconds.__doc__ or name == "collectives"
    assert module.PARAMETERS and (module.__doc__ or "").split("\n")[0].count("?") == 1


# --- axes -------------------------------------------------------------------------------------------------------------------

AXIS_EXAMPLES = {"context": ("cp4", "cp"), "expert": ("dp4 ep4", "ep"), "tensor": ("tp2", "tp")}
"""A layout in which an axis acts alone, and the degree it acts by. A new axis adds its own."""


@pytest.mark.parametrize("name", axes.BLOCK_AXES)
def test_an_axis_alone(name):
    """Identity at degree 1; work over the ranks conserved; collectives only in its own group; nothing else changes names."""
    text, degree = AXIS_EXAMPLES[name]
    shard, chosen = axes.BLOCK_AXES[name], parse_layout(text)
    model = load_model("olmo_core3_seed")
    whole = [transformer.attention(model, Work(1, 4096), None), transformer.moe(model, Work(1, 4096))]
    size = getattr(chosen, degree)
    for before in whole:
        assert shard(before, Layout(), model) is before
        after = shard(before, chosen, model)
        copies = size if name == "expert" else 1  # each expert-parallel rank brings a microbatch of its own
        assert after.flops() * size == pytest.approx(before.flops() * copies)
        added = [n for n in after if n.key not in {b.key for b in before}]
        assert all(n.stream == block.COMM and n.op.group.size == size for n in added)
        kept = [n.key for n in after if n not in added]
        assert kept == [n.key for n in before]
        assert all(set(n.deps) <= {m.key for m in after} | {""} for n in after), "a node reads something that is not there"
    assert any(n.stream == block.COMM for b in whole for n in shard(b, chosen, model))


# --- dispatchers ------------------------------------------------------------------------------------------------------------

SEND = Dispatch(tokens=4096, hidden=4096, bytes_per_element=2.0, top_k=8, num_experts=128, group=Group(8), dispatcher="alltoall", sms=0)


def dispatchers(profile) -> list[str]:
    return [name for name in layout.DEFAULT_SMS if name == "alltoall" or f"dispatch.{name}" in profile.term_index]


def seconds(profile, cluster, ops):
    return profile.price(list(ops), cluster).seconds


@lru_cache(maxsize=None)
def cluster_of(profile_name: str, num_nodes: int = 64):
    """A shipped cluster of the GPU that this profile, or the one it was measured from, prices by default."""
    profile = load_profile(profile_name)
    default = profile_name if profile.stamp is None else profile.parent
    name = next(n for n in preset_names("cluster") if load_cluster(n).gpu.profile == default)
    return load_cluster(name, [f"num_nodes={num_nodes}"])


def test_every_dispatcher_has_a_price_on_the_gpu_of_the_seed():
    assert dispatchers(load_profile("b300")) == list(layout.DEFAULT_SMS)


@pytest.mark.parametrize("profile_name", PROFILES)
@pytest.mark.parametrize("name", layout.DEFAULT_SMS)
def test_a_dispatcher(profile_name, name):
    """Positive; more tokens, wider tokens, more skew never cheaper; more SMs never dearer; alone it costs nothing; what it says
    it keeps busy is no longer than it takes."""
    profile, cluster = load_profile(profile_name), cluster_of(profile_name)
    if name not in dispatchers(profile):
        with pytest.raises(ValueError, match="has no term"):
            seconds(profile, cluster, [replace(SEND, dispatcher=name, sms=24)])
        return
    base = replace(SEND, dispatcher=name, sms=layout.DEFAULT_SMS[name])
    for size in (8, 32, 128):
        one = replace(base, group=Group(size))
        variants = [one, replace(one, tokens=8192), replace(one, hidden=8192), replace(one, load=1.5), replace(one, combine=True)]
        here, more, wider, skewed, back = seconds(profile, cluster, variants)
        assert min(here, back) > 0 and more > here and wider > here and skewed >= here
        if one.sms:
            fewer, many = seconds(profile, cluster, [replace(one, sms=8), replace(one, sms=64)])
            assert fewer >= here >= many
        priced = profile.price(variants, cluster)
        assert np.all(priced.nvlink_s <= priced.seconds) and np.all(priced.nic_s <= priced.seconds)
    assert seconds(profile, cluster, [replace(base, group=Group(1))])[0] == 0.0


# --- profiles ---------------------------------------------------------------------------------------------------------------


def op_families():
    """(name, ops of growing size): a larger one never takes less time."""
    sizes = [1, 2, 3, 5, 8, 16, 31, 64, 100]
    for dtype in layout.PRECISIONS:
        yield f"gemm.{dtype} m", [Gemm(128 * s, 4096, 4096, dtype) for s in sizes]
        yield f"gemm.{dtype} k", [Gemm(4096, 4096, 128 * s, dtype) for s in sizes]
        yield f"grouped_gemm.{dtype} rows", [GroupedGemm(16, 1024.0 * s, 4096, 2048, dtype) for s in sizes]
    yield "gemm.wgrad.bf16 n", [Gemm(4096, 128 * s, 8192, "bf16", accumulate=True) for s in sizes]
    yield "grouped_gemm.wgrad.bf16 rows", [GroupedGemm(16, 1024.0 * s, 4096, 2048, grad="weight") for s in sizes]
    for backward in (False, True):
        yield f"attention.{'backward' if backward else 'forward'} batch", [Attention(s, 32, 8, 4096, 4096, 128, 128, 4096 * 4097 / 2, backward) for s in sizes]
        yield f"attention.{'backward' if backward else 'forward'} pairs", [Attention(1, 32, 8, 4096, 4096, 128, 128, 4096 * 20.0 * s, backward) for s in sizes]
    for kind in memory_bound.KINDS:
        yield f"memory.{kind} bytes", [MemoryBound(kind, 1e6 * s) for s in sizes]
    for kind in collectives.KINDS:
        for group in (Group(2), Group(8), Group(64)):
            yield f"{kind}.nvlink bytes over {group.size}", [Collective(kind, 2.0**20 * s, group) for s in sizes]


@pytest.mark.parametrize("name", PROFILES)
def test_a_profile_prices_like_time(name):
    """Over every kind of op that a profile has a term for: positive, finite, monotone; beyond a size the rate stays below peak."""
    profile, cluster = load_profile(name), cluster_of(name)
    priced = 0
    for what, ops in op_families():
        term = what.split(" ")[0]
        if term not in profile.term_index:
            continue
        found = seconds(profile, cluster, ops)
        assert np.all(np.isfinite(found)) and np.all(found > 0), what
        assert np.all(np.diff(found) >= -1e-9 * found[:-1]), what
        peak = profile.peak_flops.get({"mxfp8": "fp8", "nvfp4": "fp4"}.get(term.split(".")[-1], term.split(".")[-1]), profile.peak_flops.get("bf16", np.inf))
        assert all(op.flops / s <= peak for op, s in zip(ops, found)), f"{what}: faster than the data sheet's peak"
        priced += 1
    assert priced >= 25, "a profile has terms for bf16 GEMMs, attention, memory and every collective"


@pytest.mark.parametrize("name", PROFILES)
def test_a_profile_samples_around_one(name):
    """Draws are positive multipliers with median 1, one array a term, equal for equal seeds; an assumed term spreads."""
    profile = load_profile(name)
    draws = profile.sample(np.random.default_rng(3), 4001)
    assert set(draws) == {term.name for term in profile.terms} | {"host"}
    again = profile.sample(np.random.default_rng(3), 4001)
    for term in profile.terms:
        values = draws[term.name]
        assert values.shape == (4001,) and np.all(values > 0) and np.array_equal(values, again[term.name])
        spread = np.hypot(term.sigma_log, np.sqrt(sum(s * s for s in term.shared.values())))
        assert np.median(values) == pytest.approx(1.0, abs=0.01 + 3 * spread / 4001**0.5)
        assert np.std(np.log(values)) == pytest.approx(spread, rel=0.1, abs=1e-9)
        assert spread > 0 or term.provenance == "measured", f"{term.name}: {term.provenance} and yet certain"
        assert term.sources


@pytest.mark.parametrize("name", preset_names("gpu"))
def test_a_gpu_has_a_profile_of_its_own_figures(name):
    gpu = load_gpu(name)
    profile = load_profile(gpu.profile)
    assert profile.num_sms == (gpu.num_sms or 0)
    assert profile.peak_flops.get("bf16") == gpu.peak_flops.get("bf16") and profile.hbm_bytes_per_s == gpu.hbm_bytes_per_s
    assert gpu.host_cpu in profile.host.launch_s


def test_every_profile_is_the_default_of_its_gpu():
    """One machine's own measurements (a profile with a stamp) are nobody's default."""
    assert {load_gpu(name).profile for name in preset_names("gpu")} == {name for name in PROFILES if load_profile(name).stamp is None}


# --- models, clusters, stacks -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", preset_names("model"))
def test_a_model_becomes_blocks_with_its_own_totals(name):
    """Parameters and FLOPs of the blocks of every stage equal the closed form, whatever the split into stages; MTP included."""
    model = load_model(name)
    made = {}

    def part(one):
        if one not in made:
            base, _, window = one.partition("@")
            build = {"embedding": transformer.embedding, "dense": transformer.dense, "moe": transformer.moe, "head": transformer.head,
                     "tied_head": partial(transformer.head, own=True), "mtp_head": partial(transformer.head, own=False), "mtp_projection": transformer.mtp_projection}
            made[one] = transformer.attention(model, Work(1, 2048), int(window) if window else None) if base == "attention" else build[base](model, Work(1, 2048))
        return made[one]

    for counts in ((model.num_layers,), tuple(layout.stage_layers(Layout(pp=min(3, model.num_layers)), model.num_layers))):
        held = [p for stage in pipeline.stage_contents(model, counts) for item, n in stage for _ in range(n) for p in layer_parts(item, model)]
        # A head tied to the embedding is a copy of it on another stage; those of MTP modules read the main one.
        again = held.count("tied_head") * model.vocab_size * model.hidden_size
        assert sum(sum(part(p).params) for p in held) - again == model.num_params
        assert {p.partition("@")[0] for p in held} <= {"attention", "embedding", "mtp_projection", *HEADS, *LAYER_KINDS}


TINY = """
name: tiny
model: {{preset: olmo_core3_seed, num_layers: 2, num_experts: 16}}
cluster: {{preset: {cluster}, num_nodes: {nodes}}}
stack: {stack}
workload: {{seq_len: 2048, global_batch_tokens: {tokens}}}
"""


def tiny(cluster="hgx_b300", stack="generic", num_nodes=1):
    per_node = load_cluster(cluster).gpus_per_node
    return parse_scenario(TINY.format(cluster=cluster, stack=stack, nodes=num_nodes, tokens=2048 * per_node * num_nodes * 2))


@pytest.mark.parametrize("name", [n for n in preset_names("cluster") if load_cluster(n).gpu.profile in PROFILES])
def test_a_cluster_runs_a_step(name):
    """One node and two: a step takes time, and no less once its data-parallel group leaves the NVLink domain."""
    times = []
    for num_nodes in (1, 2):
        scenario = tiny(name, num_nodes=num_nodes)
        parts = Parts(scenario.model, scenario.cluster, scenario.workload, load_stack("generic"), load_profile(scenario.cluster.gpu.profile))
        program = Assembler(parts).program(parse_layout(f"dp{scenario.cluster.num_gpus} ep4 zero1 mb1"))
        times.append(paths.step_seconds([program])[0])
    longest = 60 if scenario.cluster.gpu.peak_flops else 3600  # one core is no GPU
    assert 0 < times[0] < longest and 0 < times[1] < longest
    assert times[0] <= times[1] or 2 * load_cluster(name).gpus_per_node <= load_cluster(name, ["num_nodes=2"]).domain


@pytest.mark.parametrize("name", stack_names())
def test_a_stack_runs_a_step(name):
    """With each dispatcher and each graph setting; capturing launches never makes a step longer."""
    stack = load_stack(name)
    assert isinstance(stack, Stack)
    scenario = tiny(stack=name)
    maker = Assembler(Parts(scenario.model, scenario.cluster, scenario.workload, stack, load_profile("b300")))
    for short in layout.DISPATCHERS:
        steps = [paths.step_seconds([maker.program(parse_layout(f"dp8 ep8 mb1 {short} graph:{graphs}"))])[0] for graphs in ("none", "layer", "full")]
        assert 0 < steps[2] <= steps[1] * (1 + 1e-9) <= steps[0] * (1 + 1e-9) < 60, (short, steps)


@pytest.mark.parametrize("kind", ["balanced", "zipf", "dirichlet"])
def test_a_routing_sends_what_it_receives(kind):
    """Loads of every expert-parallel degree are at least the mean; drops only where a capacity says so."""
    from moesim.spec import RoutingSpec

    spec = RoutingSpec(kind=kind, **{"zipf": {"zipf_s": 0.5}, "dirichlet": {"dirichlet_alpha": 1.0}}.get(kind, {}))
    for ep in (1, 2, 8, 16):
        load = routing.expert_load(spec, 16, 4, 2048, ep, 2, 4, 1)
        assert load.max_over_mean_rank >= 1 - 1e-12 and load.max_over_mean_expert >= load.max_over_mean_rank - 1e-12 and load.drop_fraction == 0
