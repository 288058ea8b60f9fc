"""CPU clusters: which ranks share a node, what each op takes of it, and the evaluators on layouts of a machine with few cores."""

import random
from dataclasses import replace

import numpy as np
import pytest
from small_scenarios import scenario

from moesim import engine, paths
from moesim.assembly import Assembler
from moesim.bounds import step_bound
from moesim.evaluate import Evaluator
from moesim.full import full_program
from moesim.load import SpecError, load_cluster, parse_scenario
from moesim.ops import Collective, Group
from moesim.play import play
from moesim.program import COMPUTE, Seat
from moesim.screen import Screen
from moesim.seats import CpuNode, cpu_node, mean_uses
from moesim.space import enumerate_layouts
from moesim.timeline import breakdown

TEXT = """
name: cpu
model: {preset: olmo_core3_seed, num_layers: 4, hidden_size: 256, num_heads: 4, num_kv_heads: 4, head_dim: 64, num_experts: 8, top_k: 2, moe_intermediate_size: 256,
        num_shared_experts: 1, shared_intermediate_size: 256, intermediate_size: 512, vocab_size: 4096}
cluster: {preset: cpu_gloo, gpus_per_node: 4, resources: [{name: cores, capacity: 2, scope: node}, {name: memory, capacity: 40 GB/s, scope: node}]}
workload: {seq_len: 256, global_batch_tokens: 8192}
stack: moetrain
"""
LAYOUTS = ("dp4 zero1 mb2", "dp4 ep4 zero1 mb1", "dp4 ep2 zero2 mb2", "dp4 ep4 zero3 mb2", "pp2 dp2 zero1 mb1 1f1b", "pp2 dp2 ep2 zero1 mb2 1f1b", "pp4 mb1 1f1b", "tp2 dp2 ep2 zero1 mb4",
           "cp2 dp2 zero1 mb2", "pp2 vpp2 dp2 ep2 mb1 interleaved", "pp2 vpp2 dp2 mb1 zbv", "dp4 ep4 zero1 mb2 ov:grad+param+shared", "pp2 vpp2 dp2 ep2 mb1 interleaved ov:ep")


def evaluator(cores=2.0, *sets, kind="cores"):
    shared = f"cluster.resources=[{{name: {kind}, capacity: {cores:g}, scope: node}}, {{name: memory, capacity: 40 GB/s, scope: node}}]"
    return Evaluator(parse_scenario(TEXT, [shared, *sets]))


# --- scenario files -----------------------------------------------------------------------------------------------------------


def test_ranks_and_cores_are_set_apart():
    """As many ranks as asked for on as many cores as there are, inline or by --set, the preset as it lies."""
    s = parse_scenario(TEXT)
    assert (s.cluster.num_gpus, cpu_node(s.cluster)) == (4, CpuNode(2.0, 40e9, 4, False))
    more = parse_scenario(TEXT, ["cluster.gpus_per_node=8", "cluster.resources.cores.capacity=3"])
    assert cpu_node(more.cluster) == CpuNode(3.0, 40e9, 8, False)
    pinned = parse_scenario(TEXT, ["cluster.resources=[{name: pinned_cores, capacity: 2, scope: node}]"])
    assert cpu_node(pinned.cluster) == CpuNode(2.0, 0.0, 4, True) and cpu_node(pinned.cluster).shared == {"cores": 2.0}
    preset = load_cluster("cpu_gloo", ["gpus_per_node=8"])
    assert preset.num_gpus == 8 and cpu_node(preset).num_cores == cpu_node(load_cluster("cpu_gloo")).num_cores
    assert cpu_node(load_cluster("hgx_h100")) is None


@pytest.mark.parametrize(
    ("resources", "message"),
    [
        ("[{name: disk, capacity: 2, scope: node}]", "known are cores, pinned_cores, memory"),
        ("[{name: cores, capacity: 2, scope: node}, {name: pinned_cores, capacity: 2, scope: node}]", "give cores or pinned_cores"),
        ("[{name: pinned_cores, capacity: 2.5, scope: node}]", "whole number"),
        ("[{name: cores, capacity: 2, scope: node}, {name: cores, capacity: 4, scope: node}]", "names must differ"),
        ("[{name: cores, capacity: 0, scope: node}]", "capacity"),
    ],
)
def test_nonsense_is_refused_in_one_line(resources, message):
    with pytest.raises(SpecError, match=message) as error:
        parse_scenario(TEXT, [f"cluster.resources={resources}"])
    assert "\n" not in str(error.value)


# --- seats and uses -----------------------------------------------------------------------------------------------------------


def test_seats_follow_the_rank_order():
    assert CpuNode(2.0, 0.0, 4, False).seats(2, 2) == (Seat(0, 2), Seat(0, 2))
    assert CpuNode(2.0, 0.0, 4, False).seats(4, 1) == (Seat(),) * 4
    assert CpuNode(2.0, 0.0, 4, False).seats(2, 8) == (Seat(0, 4), Seat(2, 4))  # 16 ranks, the first 4 of each stage's 8
    assert CpuNode(2.0, 0.0, 4, False).seats(4, 3) == (Seat(0, 3), Seat(1, 2), Seat(1, 2), Seat(2, 3))
    assert CpuNode(2.0, 0.0, 4, True).seats(2, 2) == (Seat(0, 2, (1, 1)),) * 2
    assert CpuNode(2.0, 0.0, 4, True).seats(4, 1) == tuple(Seat(0, 1, pins) for pins in ((1, 0), (0, 1), (1, 0), (0, 1)))
    assert CpuNode(2.0, 0.0, 3, True).seats(1, 3) == (Seat(0, 3, (2, 1)),)


def test_a_collective_takes_what_it_had_when_it_was_measured():
    node, pinned = CpuNode(2.0, 40e9, 4, False), CpuNode(2.0, 40e9, 4, True)
    cores = lambda of, size, stride=1: dict(of.collective(Collective("all_reduce", 1e6, Group(size, stride)), 0.0, 1.0))["cores"]  # noqa: E731
    assert [cores(node, 2), cores(node, 4), cores(node, 8)] == [1.0, 0.5, 0.5]  # of 8 ranks on two nodes, four on each
    assert [cores(pinned, 2), cores(pinned, 4)] == [1.0, 0.5]
    assert (cores(CpuNode(2.0, 0.0, 3, False), 3), cores(CpuNode(2.0, 0.0, 3, True), 3)) == (pytest.approx(2 / 3), 0.5)  # two of three on one core
    memory = dict(node.collective(Collective("all_gather", 1e9, Group(4)), 1e9, 1.0))["memory"]
    assert memory == pytest.approx(4e9 / 40e9)
    assert dict(node.collective(Collective("all_gather", 1e9, Group(4)), 30e9, 1.0))["memory"] == pytest.approx(1 / 4)  # all four ran at once


def test_a_kernel_takes_a_core_and_the_bytes_it_moves():
    assert CpuNode(2.0, 40e9, 4, False).compute(10e9, 1.0) == (("cores", 1.0), ("memory", 0.25))
    assert CpuNode(2.0, 40e9, 4, False).compute(80e9, 1.0) == (("cores", 1.0), ("memory", 1.0))  # from a cache, then
    assert CpuNode(0.5, 0.0, 1, False).compute(1.0, 1.0) == (("cores", 0.5),)
    assert CpuNode(2.0, 40e9, 4, False).compute(1.0, 0.0) == ()


def test_a_run_moves_the_bytes_of_its_kernels():
    one, two = (("cores", 1.0), ("memory", 0.4)), (("cores", 1.0), ("memory", 0.1))
    assert dict(mean_uses([(one, 1.0), (two, 2.0), ((), 0.0)])) == pytest.approx({"cores": 1.0, "memory": 0.2})
    assert mean_uses([(one, 1.0), (one, 3.0)]) == one and mean_uses([]) == mean_uses([((), 1.0)]) == ()


def test_every_task_of_a_cpu_program_takes_a_core():
    made = evaluator()
    for text in LAYOUTS:
        program = made.program(made.legal(text))
        assert program.shared == {"cores": 2.0, "memory": 1.0} and len(program.seats) == program.num_ranks
        for body in (*program.bodies, *program.epilogue):
            for task in body:
                uses = dict(task.uses)
                assert set(uses) <= {"cores", "memory"} and ("cores" in uses) == (task.seconds > 0), (text, task.name)
                assert uses.get("cores", 1.0) == pytest.approx(1.0) if task.stream == COMPUTE else uses.get("cores", 1.0) in (0.5, 1.0)


def test_a_gpu_program_has_nothing_of_it():
    made = Evaluator(scenario("moe"))
    program = made.program(made.legal("pp2 dp4 ep4 zero1 mb1 ov:grad+param"))
    assert program.shared == {} and program.seats == ()
    assert {name for body in (*program.bodies, *program.epilogue) for task in body for name, _ in task.uses} <= {"hbm", "nvlink", "nic"}


# --- whole steps --------------------------------------------------------------------------------------------------------------


def test_ranks_on_half_the_cores_compute_for_twice_as_long():
    """The collectives lose nothing: they had half a core each when they were measured. (Without the end of the step, where copies and
    reductions do compete.)"""
    few, many = (evaluator(cores, "cluster.resources.memory.capacity=4000 GB/s") for cores in (2.0, 4.0))
    for text in ("dp4 zero1 mb2", "dp4 ep4 zero1 mb1", "tp4 mb4"):
        layout = few.legal(text)
        slow, fast = (replace(made.program(layout), epilogue=()) for made in (few, many))
        step, solo = engine.run(slow), play(slow)
        compute = sum(s.solo for s in solo.lane(0, COMPUTE))
        assert engine.run(fast).makespan == pytest.approx(solo.makespan, rel=1e-9)
        assert step.makespan == pytest.approx(solo.makespan + compute, rel=1e-9)
        lost = breakdown(step, 0)
        assert lost["contention"] == pytest.approx(compute, rel=1e-9) and sum(lost.values()) == pytest.approx(step.makespan)


def test_fewer_cores_never_make_a_step_shorter():
    for text in LAYOUTS:
        steps = []
        for cores in (1.0, 2.0, 3.0, 4.0, 64.0):
            made = evaluator(cores)
            program = made.program(made.legal(text))
            steps.append(engine.run(replace(program, bodies=program.bodies), spans=False).makespan)
        assert all(a >= b * (1 - 1e-6) for a, b in zip(steps, steps[1:])), (text, steps)


@pytest.mark.parametrize("kind", ["cores", "pinned_cores"])
@pytest.mark.parametrize("text", LAYOUTS)
def test_one_rank_a_stage_is_every_rank(text, kind):
    made = evaluator(2.0, kind=kind)
    layout = made.legal(text)
    one, full = engine.run(made.program(layout), spans=False).makespan, engine.run(full_program(made, layout), spans=False).makespan
    assert full == pytest.approx(one, rel=0.01)


@pytest.mark.parametrize("text", LAYOUTS)
def test_enough_cores_give_the_longest_path(text):
    made = evaluator(64.0, "cluster.resources.memory.capacity=4000 GB/s")
    program = made.program(made.legal(text))
    assert engine.run(program).makespan == pytest.approx(play(program).makespan, rel=1e-9)


def test_pinned_ranks_are_never_faster():
    free, pinned = evaluator(2.0), evaluator(2.0, kind="pinned_cores")
    for text in LAYOUTS:
        times = [engine.run(e.program(e.legal(text)), spans=False).makespan for e in (free, pinned)]
        assert times[1] >= times[0] * (1 - 1e-6), text
    times = [engine.run(e.program(e.legal("pp4 mb1 1f1b")), spans=False).makespan for e in (free, pinned)]
    assert times[1] > 1.05 * times[0]  # stages 0 and 2 share a core, whatever the other does


def test_fused_runs_take_what_their_kernels_take():
    """Runs against their kernels one by one, where memory is short for most kernels, for some, for none. What fusing costs: a kernel that is
    never short by itself may be beside one that is."""
    for rate, tolerance in ((6, 3e-3), (20, 3e-3), (4000, 1e-9)):
        made = evaluator(4.0, f"cluster.resources.memory.capacity={rate} GB/s")
        for text in ("dp4 ep4 zero1 mb1", "pp2 dp2 zero1 mb1 1f1b"):
            layout = made.legal(text)
            apart = Assembler(made.parts, fuse=False).program(layout)
            fused, split = engine.run(made.program(layout), spans=False).makespan, engine.run(apart, spans=False).makespan
            assert split > play(apart).makespan * (1.02 if rate == 6 else 1 - 1e-9)  # memory is short indeed
            assert fused == pytest.approx(split, rel=tolerance), (rate, text)


# --- order of evaluators ------------------------------------------------------------------------------------------------------

AXES = ("search={pp: [1, 2, 4], num_chunks: [1, 2], cp: [1, 2], tp: [1, 2], ep: [1, 2, 4], zero: [0, 1, 2, 3], micro_batch: [1, 2, 4], schedule: [gpipe, 1f1b, interleaved, zbv], "
        "overlap: [none, shared, grad+param], recompute: [none, full]}")


def test_screen_bound_path_engine_in_this_order_on_random_layouts():
    rng, tight = random.Random(3), []
    for cores, kind in ((2.0, "cores"), (1.0, "cores"), (2.0, "pinned_cores"), (3.0, "cores")):
        made = evaluator(cores, AXES, kind=kind)
        space = enumerate_layouts(made.scenario, made.stack.default_layout)
        screened = Screen(made.scenario, made.parts, space).run()
        for row in rng.sample(range(len(space)), 25):
            layout = space.layout(row)
            program = made.program(layout)
            bound, path, simulated = step_bound(program), paths.step_seconds([program])[0], engine.run(program, spans=False).makespan
            where = f"{kind} {cores:g} {layout}"
            assert screened.bound_s[row] <= path * (1 + 1e-9), where
            assert bound <= path * (1 + 1e-9) and path <= simulated * (1 + 1e-9), where
            tight.append(screened.bound_s[row] / simulated)
    assert np.median(tight) > 0.9 and min(tight) > 0.5


def test_the_screen_ranks_layouts_by_what_cores_there_are():
    """On four cores a pipeline of four idles and data parallelism does not; on one core both do the same work: the screen knows."""
    bounds = {}
    for cores in (1.0, 4.0):
        made = evaluator(cores, "search={pp: [1, 4], micro_batch: [1], ep: [1], zero: [0], schedule: [1f1b]}")
        space = enumerate_layouts(made.scenario, made.stack.default_layout)
        found = Screen(made.scenario, made.parts, space).run().bound_s
        bounds[cores] = {space.layout(row).pp: found[row] for row in range(len(space))}
    assert bounds[4.0][4] > 1.15 * bounds[4.0][1]
    assert bounds[1.0][4] < 1.1 * bounds[1.0][1] and bounds[1.0][1] > 3 * bounds[4.0][1]


def test_quick_extends_a_shared_machine_too():
    made = evaluator(2.0, "workload.global_batch_tokens=32768")
    for text in ("dp4 ep4 zero1 mb1", "pp2 dp2 ep2 zero1 mb1 1f1b", "pp4 mb1 1f1b"):
        layout = made.legal(text)
        assert made.quick(layout).tokens_per_s_per_gpu == pytest.approx(made.tokens_per_s(made.played(layout).step_s), rel=0.01), text
