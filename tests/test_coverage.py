"""Does the table of kernel coverage say what a fit found, and nothing about stacks without runs?"""

import numpy as np
import pytest

from calibration.coverage import KNOWN, PRIORS, TRAITS, Factors, Point
from moesim.coverage import FEATURES, GENERATIONS, KINDS, features_of, kind_of, load_coverage
from moesim.evaluate import Evaluator
from moesim.factor_errors import FactorErrors
from moesim.load import load_cluster, load_scenario
from moesim.parts import Parts
from moesim.stack import stack_names


def synthetic(rng, factors, num_points, noise):
    """Runs of two stacks on two generations whose residuals follow known factors."""
    points = []
    for i in range(num_points):
        stack, generation = rng.choice(["nemo", "megatron_core"]), rng.choice(["hopper", "blackwell"])
        traits = ("expert_bias",) if rng.random() < 0.3 else ()
        slope = rng.dirichlet(np.ones(len(KINDS)))
        excess = sum(s * sum(factors.get((owner, kind), 0.0) for owner in (stack, generation, *traits)) for s, kind in zip(slope, KINDS))
        points.append(Point(f"run{i}", f"group{i}", stack, generation, traits, excess + noise * rng.standard_normal(), tuple(slope)))
    return points


def test_known_factors_come_back():
    rng = np.random.default_rng(0)
    truth = {("hopper", "memory"): 0.3, ("nemo", "tensor_parallel"): -0.4, ("expert_bias", "grouped_bf16"): 0.5}
    points = synthetic(rng, truth, 3000, 0.02)
    factors = Factors(points)
    theta, _ = factors.solve(points, np.zeros(len(factors.names)))
    for p in points[:50]:
        excess = sum(s * sum(truth.get((o, k), 0.0) for o in (p.stack, p.generation, *p.traits)) for s, k in zip(p.slope, KINDS))
        assert factors.rows([p])[0] @ theta == pytest.approx(excess, abs=0.02)
    assert theta[factors.at["expert_bias", "grouped_bf16"]] == pytest.approx(0.5, abs=0.1)


def test_what_no_run_exercises_stays_at_its_prior():
    slope = tuple(0.5 if kind == "gemm_bf16" else 0.0 for kind in KINDS)
    points = [Point(f"r{i}", f"g{i}", "torchtitan", "hopper", (), 0.1, slope) for i in range(20)]
    factors = Factors(points)
    theta, _ = factors.solve(points, np.zeros(len(factors.names)))
    for name in factors.names:
        if name[1] != "gemm_bf16":
            assert theta[factors.at[name]] == pytest.approx(KNOWN.get(name, 0.0), abs=1e-12)
    assert theta[factors.at["hopper", "gemm_bf16"]] > 0.05


def test_one_wild_run_moves_little():
    rng = np.random.default_rng(1)
    points = synthetic(rng, {}, 200, 0.02)
    wild = Point("wild", "wild", "nemo", "hopper", (), 3.0, points[0].slope)
    factors = Factors(points)
    start = np.zeros(len(factors.names))
    assert np.abs(factors.solve([*points, wild], start)[0] - factors.solve(points, start)[0]).max() < 0.05


def test_the_shipped_table_is_legal_and_leaves_the_seeds_alone():
    table = load_coverage()
    assert set(table.stacks) <= set(stack_names()) and not {"olmo_core3_ddp", "olmo_core_fsdp", "moetrain"} & set(table.stacks)
    for generations in table.stacks.values():
        for generation, kinds in generations.items():
            assert generation in GENERATIONS.values() and set(kinds) <= set(KINDS) and all(0.2 < f < 5 for f in kinds.values())
    assert set(table.features) <= set(FEATURES) and set(TRAITS) == set(FEATURES) and set(PRIORS) == set(KINDS)
    assert table.factors("olmo_core3_ddp", "b300", ("efa",)) == {}
    e = Evaluator(load_scenario("olmo_core3_new"))
    assert e.parts.coverage == {}


def test_a_factor_scales_what_it_names():
    scenario = load_scenario("olmo_core3_new", ("stack=megatron_bridge",))
    table = load_coverage()
    plain = Evaluator(scenario)
    from moesim.coverage import Coverage

    twice = Coverage(source="test", num_runs=0, stacks={"megatron_bridge": {"blackwell": {"attention": 2.0, "host": 3.0}}})
    none = Coverage(source="test", num_runs=0)
    layout = plain.legal("dp8 ep8")
    seconds = {}
    for name, coverage in (("none", none), ("twice", twice)):
        parts = Parts(scenario.model, scenario.cluster, scenario.workload, plain.stack, plain.profile, coverage=coverage)
        part = parts.get("attention", layout)
        seconds[name] = {p.node.key: p.seconds for p in part.forward}, part.host["F"]
    for key, value in seconds["none"][0].items():
        assert seconds["twice"][0][key] == pytest.approx(value * (2.0 if key == "core_attn" else 1.0))
    assert seconds["twice"][1] == pytest.approx(3.0 * seconds["none"][1])
    assert table.num_runs >= 0


def test_no_factor_beats_the_wire():
    """A dispatch over NICs is at its line rate or above, whatever factor was fitted; a factor above one still counts."""
    from moesim.coverage import Coverage
    from moesim.ops import Dispatch

    scenario = load_scenario("olmo_core3_new", ("stack=megatron_bridge", "cluster.num_nodes=8"))
    plain, seconds = Evaluator(scenario), {}
    layout = plain.legal("dp64 ep64 dedup")
    for factor in (0.01, 1.0, 3.0):
        coverage = Coverage(source="test", num_runs=0, stacks={"megatron_bridge": {"blackwell": {"dispatch": factor}}})
        parts = Parts(scenario.model, scenario.cluster, scenario.workload, plain.stack, plain.profile, coverage=coverage)
        op, seconds[factor] = next((p.node.op, p.seconds) for p in parts.get("moe", layout).forward if isinstance(p.node.op, Dispatch))
        wire = max(parts.prices[op][1:3])
    assert seconds[0.01] == pytest.approx(wire) and wire < seconds[1.0] and seconds[3.0] == pytest.approx(3 * seconds[1.0])


@pytest.mark.parametrize("stack, width", [("megatron_bridge", 2.0), ("quantising", 1.0)])
def test_rows_travel_in_bf16_unless_the_stack_quantises_them(stack, width):
    from moesim.ops import BYTES_PER_ELEMENT, Dispatch

    scenario = load_scenario("olmo_core3_new", ("stack=megatron_bridge",))
    plain = Evaluator(scenario)
    own = plain.stack if stack == "megatron_bridge" else plain.stack.model_copy(update={"quantised_dispatch": True})
    parts = Parts(scenario.model, scenario.cluster, scenario.workload, own, plain.profile)
    part = parts.get("moe", plain.legal("dp8 ep8 dedup fp8"))
    sent = [p.node.op.bytes_per_element for p in part.forward if isinstance(p.node.op, Dispatch)]
    assert sent == [pytest.approx(width if width == 2.0 else BYTES_PER_ELEMENT["fp8"]), 2.0]


@pytest.mark.parametrize("role, term, kind", [
    ("qkv", "gemm.bf16", "gemm_bf16"), ("mlp_up", "gemm.wgrad.mxfp8", "gemm_fp8"), ("head", "gemm.nvfp4", "gemm_fp4"), ("expert_up", "gemm.fp8", "grouped_fp8"),
    ("expert_down", "grouped_gemm.wgrad.bf16", "grouped_bf16"), ("core_attn", "attention.backward", "attention"), ("norm", "memory.norm", "memory"),
    ("tp_gather", "all_gather.nvlink", "tensor_parallel"), ("dispatch", "all_to_all.nvlink", "dispatch"), ("combine", "dispatch.dedup", "dispatch"),
    ("grad_reduce", "reduce_scatter.nic", None), ("cp_gather", "all_gather.nvlink", None),
])
def test_kinds(role, term, kind):
    assert kind_of(role, term) == kind


def test_traits_are_read_from_model_and_cluster():
    model = load_scenario("olmo_core3_new").model
    assert features_of(model, load_cluster("hgx_b300")) in ((), ("efa",))
    assert features_of(model.model_copy(update={"expert_bias": True}), load_cluster("hgx_h100"))[:1] == ("expert_bias",)


@pytest.mark.parametrize("damage", [
    lambda d: [], lambda d: {}, lambda d: None, lambda d: {**d, "lower": [[1.0, 2.0], *d["lower"][1:]]}, lambda d: {**d, "own": "x"},
    lambda d: {**d, "columns": [d["columns"][0], *d["columns"][:-1]]}, lambda d: {**d, "lower": [[float("nan")], *d["lower"][1:]]},
])
def test_errors_of_factors_come_back_whole_or_not_at_all(damage):
    plain = load_coverage().errors.plain()
    again = FactorErrors.from_plain(plain)
    assert again.columns == load_coverage().errors.columns and np.allclose(again.covariance, load_coverage().errors.covariance, rtol=1e-3)
    with pytest.raises(ValueError) as found:
        FactorErrors.from_plain(damage(plain))
    assert "\n" not in str(found.value)
