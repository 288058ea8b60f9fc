"""Does a layout's program hold what the ZeRO table, its schedule and its overlap rules say, op by op?"""

import random
from collections import Counter

import pytest

from moesim import engine, paths
from moesim.assembly import Assembler, interleave, orders_of
from moesim.evaluate import Evaluator
from moesim.layout import num_microbatches
from moesim.ops import Collective, Group
from moesim.parts import layer_parts
from moesim.program import COMM, COMPUTE, DATA, REDUCE, Task
from moesim.schedules import SCHEDULES, Action, Pair, flatten
from moesim.space import UNPAIRED, enumerate_layouts
from moesim.stack import load_stack
from moesim.wiring import wire
from random_programs import random_body
from small_scenarios import random_spaces, scenario

GRAD = {"fp32": 4, "bf16": 2}
# zero, reshard -> (gathers a microbatch and unit, reductions a microbatch and unit, kind and number of reductions a step, gathers a step)
TABLE = {
    (0, True): (0, 0, "all_reduce", 1, 0),
    (1, True): (0, 0, "reduce_scatter", 1, 1),
    (2, True): (0, 1, "reduce_scatter", 0, 1),
    (3, False): (0, 0, "reduce_scatter", 1, 1),
    (3, True): (2, 1, "reduce_scatter", 0, 0),
}
DEGREES = ("dp8", "dp8 ep8", "dp8 ep4 grad:bf16", "dp4 tp2 ep4", "dp4 cp2 ep2 etp2", "pp2 dp4 ep2", "pp2 vpp2 dp4 interleaved_zb", "pp2 vpp2 dp4 ep2 zbv", "pp2 vpp2 dp4 dualpipev",
           "dp8 rep2", "pp2 dp4 rep2 ep2", "pp8", "pp2 dp4 ep4 ov:ep")  # fmt: skip


def rounded(seconds: float) -> float:
    return float(f"{seconds:.10e}")


def tasks_of(program, rank):
    """Every task that one rank runs in a step, repeats included, the epilogue's last."""
    for k in program.body_index[rank]:
        yield from program.bodies[k]
    yield from program.epilogue[rank]


def counted(program, rank, role) -> Counter:
    return Counter(rounded(t.seconds) for t in tasks_of(program, rank) if t.name == role and t.kind == "collective")


def units_of(evaluator, program, layout, rank):
    """[(dense, expert) parameters] of the units of one rank."""
    from moesim.axes import pipeline

    model, contents = evaluator.scenario.model, pipeline.contents(evaluator.scenario.model, layout)
    mine = [contents[s] for s, r in enumerate(program.placement) if r == rank]
    found = [[evaluator.parts.get(n, layout) for n in layer_parts(item, model)] for stage in mine for item, count in stage for _ in range(count)]
    return [(sum(p.dense_params for p in u), sum(p.expert_params for p in u)) for u in found]


def expected(evaluator, layout, units, kind, width, times, steps=1) -> Counter:
    """Seconds -> how often, of a collective over the replicas of each unit's dense and expert weights, from degrees alone; ``steps``:
    how often a reduction goes on over the replicas of the shards."""
    out: Counter = Counter()
    replicas = (layout.dp * layout.cp // layout.rep, layout.tp), (layout.dp * layout.cp * layout.tp // (layout.ep * layout.etp), layout.ep * layout.etp)
    for unit in units:
        for count, (size, stride) in zip(unit, replicas):
            if count and size > 1:
                out[rounded(evaluator.parts.price(Collective(kind, width * count, Group(size, stride)))[0])] += times
        if kind != "all_gather" and layout.rep > 1:
            share = layout.dp * layout.cp // layout.rep
            out[rounded(evaluator.parts.price(Collective("all_reduce", width * unit[0] / share, Group(layout.rep, layout.tp * share)))[0])] += times and steps
    return +out


@pytest.mark.parametrize("overlap", ["", "grad", "param", "grad+param"])
@pytest.mark.parametrize(("zero", "reshard"), TABLE)
def test_the_zero_table_op_by_op(zero, reshard, overlap):
    evaluator = Evaluator(scenario("moe", batch=32), stack=load_stack("megatron_bridge").model_copy(update={"bucket_params": 0.0}))
    gathers_mb, reduces_mb, kind, reduces_step, gathers_step = TABLE[zero, reshard]
    for degrees in DEGREES:
        rules = ([overlap] if overlap else []) + (["ep"] if "ov:ep" in degrees else [])
        text = " ".join([degrees.replace(" ov:ep", ""), f"zero{zero}", *([] if reshard else ["noreshard"]), *(["ov:" + "+".join(rules)] if rules else [])])
        layout = evaluator.legal(text)
        program, num_mb = evaluator.program(layout), num_microbatches(layout, evaluator.scenario.workload)
        for rank in range(layout.pp):
            units, width = units_of(evaluator, program, layout, rank), GRAD[layout.grad]
            bucket = [tuple(map(sum, zip(*units)))]
            gathers = expected(evaluator, layout, units, "all_gather", 2, gathers_mb * num_mb)
            gathers += expected(evaluator, layout, units if "param" in overlap else bucket, "all_gather", 2, gathers_step)
            reduces = expected(evaluator, layout, units, kind, width, reduces_mb * num_mb)
            reduces += expected(evaluator, layout, units if "grad" in overlap else bucket, kind, width, reduces_step)
            assert counted(program, rank, "param_gather") == gathers, (text, rank)
            assert counted(program, rank, "grad_reduce") == reduces, (text, rank)


@pytest.mark.parametrize(("zero", "reshard"), TABLE)
def test_when_the_steps_collectives_run(zero, reshard):
    """With their rules they stand in bodies (reductions in a stage's last backward, gathers in its first forward), else at the end."""
    evaluator = Evaluator(scenario("moe", batch=32))
    for rule, name, per_microbatch in (("grad", "grad_reduce", TABLE[zero, reshard][1]), ("param", "param_gather", TABLE[zero, reshard][0])):
        for on in (False, True):
            layout = evaluator.legal(f"pp2 dp4 zero{zero} {'' if reshard else 'noreshard'} {'ov:' + rule if on else ''}")
            program = evaluator.program(layout)
            step = TABLE[zero, reshard][3 if rule == "grad" else 4]
            for rank in (0, 1):
                at_end = sum(t.name == name and t.kind == "collective" for t in program.epilogue[rank])
                where = [entry for entry, k in zip(program.orders[rank], program.body_index[rank]) if any(t.name == name for t in program.bodies[k])]
                assert (at_end > 0) == bool(step and not on), (rule, on)
                if per_microbatch:
                    assert len(where) == 8 * per_microbatch
                elif step and on:
                    first, last = Action(rank, "F", 0), Action(rank, "B", 7)
                    assert where == [last if rule == "grad" else first]
                else:
                    assert where == []


def test_optimizer_and_norm_touch_what_the_rank_owns():
    """Bytes of AdamW from parameter counts: 26 (FP32 moments) and 4 for the gradient, on a rank's share."""
    from moesim.ops import MemoryBound

    evaluator = Evaluator(scenario("moe"))
    for text, dense_shards, expert_shards in (("dp8 zero0", 1, 1), ("dp8 zero1", 8, 8), ("dp8 ep4 zero1", 8, 2), ("dp8 ep8 zero3", 8, 1), ("dp8 rep2 zero1", 4, 8), ("dp4 tp2 ep4 zero2", 4, 2)):
        layout = evaluator.legal(text)
        program = evaluator.program(layout)
        dense, expert = map(sum, zip(*units_of(evaluator, program, layout, 0)))
        share = dense / dense_shards + expert / expert_shards
        steps = [t for t in program.epilogue[0] if t.name == "optimizer"]
        assert [t.seconds for t in steps] == [pytest.approx(evaluator.parts.price(MemoryBound("optimizer", 30 * share))[0], rel=1e-9)], text
        norm = next(t for t in program.epilogue[0] if t.name == "grad_norm" and t.kind == "memory_bound")
        assert norm.seconds == pytest.approx(evaluator.parts.price(MemoryBound("optimizer", 4 * share))[0], rel=1e-9)


# --- order and pairs ------------------------------------------------------------------------------------------------------------


def sizes(name):
    schedule = SCHEDULES[name]
    for pp in (1, 2, 3, 4, 8):
        for num_mb in (1, 2, 4, 6, 8, 16, 24):
            for chunks in (1, 2, 3) if schedule.shape == "loop" else (2,):
                if schedule.legal(pp, num_mb, chunks) is None:
                    yield pp, num_mb, chunks


@pytest.mark.parametrize("name", sorted(SCHEDULES))
def test_pairing_keeps_every_action_once_and_never_locks(name):
    seen = 0
    for pp, num_mb, chunks in sizes(name):
        plain, placement = orders_of(name, pp, num_mb, chunks, False)
        paired, same = orders_of(name, pp, num_mb, chunks, True)
        assert same == placement
        wire(paired, placement).levels  # ValueError on a deadlock
        for before, after in zip(plain, paired):
            assert Counter(flatten(before)) == Counter(flatten(after))
            backward = [a for a in flatten(after) if a.letter != "F"]
            assert backward == [a for a in flatten(before) if a.letter != "F"]  # order among themselves is the schedule's
            assert [a for a in flatten(after) if a.letter == "F"] == [a for a in flatten(before) if a.letter == "F"]
            for entry in after:
                if isinstance(entry, Pair):
                    assert {a.letter for a in entry} <= set("FBI") and entry.first.microbatch != entry.second.microbatch or entry.first.stage != entry.second.stage
        seen += sum(isinstance(e, Pair) for order in paired for e in order)
    assert (seen > 0) == (name not in UNPAIRED or name == "dualpipev")
    if name in UNPAIRED:  # the rule changes nothing, so the canonical layout is without it
        assert all(orders_of(name, *size, False) == orders_of(name, *size, True) for size in sizes(name))


def test_1f1b_pairs_its_steady_state():
    """By hand: the first rank of two with four microbatches runs two forwards ahead of nothing, then pairs."""
    orders, _ = orders_of("1f1b", 2, 4, 1, True)
    assert list(map(str, orders[0])) == ["0F0", "0F1", "(0F2|0B0)", "(0F3|0B1)", "0B2", "0B3"]
    assert list(map(str, orders[1])) == ["1F0", "(1F1|1B0)", "(1F2|1B1)", "(1F3|1B2)", "1B3"]


def test_interleaving_two_bodies_keeps_each_of_them():
    rng = random.Random(2)
    for _ in range(200):
        a, b = (random_body(rng, rng.randint(1, 9), 1) for _ in range(2))
        b = tuple(Task(**{f: getattr(t, f) for f in t.__slots__} | {"name": "b:" + t.name}) for t in b)
        out = interleave(a, b)
        assert len(out) == len(a) + len(b)
        for body, mine in ((a, [t for t in out if not t.name.startswith("b:")]), (b, [t for t in out if t.name.startswith("b:")])):
            assert [t.name for t in mine] == [t.name for t in body]
            for old, new in zip(body, mine):
                assert [body[d].name for d in old.deps] == [out[d].name for d in new.deps]
                assert (old.seconds, old.stream, old.host_s) == (new.seconds, new.stream, new.host_s)
        assert all(d < i for i, t in enumerate(out) for d in t.deps)


@pytest.mark.parametrize("degrees", ["dp64 ep16", "pp4 vpp2 dp16 ep16 interleaved"])
def test_pairs_hide_dispatch_and_combine(degrees):
    """Where the links are the bottleneck a pair hides most of them; without a pipeline never more than all of them (in one, the
    critical path crosses the collectives of several ranks)."""
    evaluator = Evaluator(scenario("moe", num_nodes=8, batch=512, seq_len=4096))
    alone, paired = (evaluator.program(evaluator.legal(f"{degrees} zero1 graph:full{rule}")) for rule in ("", " ov:ep"))
    steps = [paths.step_seconds([p])[0] for p in (alone, paired)]
    exchanged = max(sum(t.seconds for t in tasks_of(alone, rank) if t.stream == COMM) for rank in range(alone.num_ranks))
    assert 0.1 * exchanged < steps[0] - steps[1]
    assert "pp" in degrees or steps[0] - steps[1] <= exchanged


@pytest.mark.parametrize("text", ["pp4 dp2 1f1b", "pp4 dp2 gpipe", "pp2 vpp2 dp4 interleaved", "pp2 vpp2 dp4 interleaved_zb", "pp4 vpp2 dp2 zbv", "pp4 vpp2 dp2 dualpipev", "pp4 vpp2 dp2 zbv ep2 ov:ep"])
def test_every_activation_and_gradient_is_sent_once(text):
    evaluator = Evaluator(scenario("moe", batch=32))
    layout = evaluator.legal(text)
    program, num_mb = evaluator.program(layout), num_microbatches(layout, evaluator.scenario.workload)
    timeline = engine.run(program)
    crossing = sum(a != b for a, b in zip(program.placement, program.placement[1:]))
    sends = [s for s in timeline.spans if s.name.startswith("send ")]
    assert len(sends) == 2 * crossing * num_mb
    size = layout.mb * 2048 * evaluator.scenario.model.hidden_size * 2.0
    hop = evaluator.parts.price(Collective("send_recv", size, Group(2, layout.dp)))[0]
    assert program.transfer_forward.seconds == program.transfer_backward.seconds == hop
    assert min(s.end - s.start for s in sends) >= hop * (1 - 1e-9)
    # each action ran once
    assert Counter(a for order in program.orders for a in flatten(order)) == Counter({a: 1 for order in program.orders for a in flatten(order)})


def test_sequence_and_tensor_parallelism_cut_what_is_sent():
    evaluator = Evaluator(scenario("moe"))
    for text, parts in (("pp2 dp4", 1), ("pp2 dp2 tp2", 2), ("pp2 dp2 cp2", 2), ("pp2 tp2 cp2", 4)):
        layout = evaluator.legal(text)
        size = 2048 * evaluator.scenario.model.hidden_size * 2.0 / parts
        assert evaluator.program(layout).transfer_forward.seconds == evaluator.parts.price(Collective("send_recv", size, Group(2, 4)))[0]


# --- end of step ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["dp8 zero0", "dp8 ep4 zero1", "pp4 dp2 zero1 ov:grad", "pp2 dp4 zero2", "pp2 dp4 zero3", "pp2 vpp2 dp4 zero1 zbv ov:grad+param", "pp2 dp4 ep4 zero3 noreshard"])
def test_no_optimizer_starts_before_every_reduction_ended(text):
    evaluator = Evaluator(scenario("moe", batch=32))
    timeline = engine.run(evaluator.program(evaluator.legal(text)))
    reductions = [s.end for s in timeline.spans if s.stream == REDUCE]
    steps = [s for s in timeline.spans if s.name == "optimizer"]
    norms = [s for s in timeline.spans if s.name == "grad_norm" and s.stream == COMM]
    assert len(steps) == len(norms) == timeline.num_ranks
    assert min(s.start for s in steps) >= max(reductions)
    assert max(s.start for s in norms) == pytest.approx(min(s.start for s in norms), abs=1e-12)
    assert min(s.start for s in norms) >= max(s.end for s in timeline.spans if s.entry != "epilogue" and s.stream == COMPUTE)
    after = [s.start for s in timeline.spans if s.entry == "epilogue" and s.name == "param_gather"]
    assert all(start >= min(s.end for s in steps) for start in after)


def test_a_tied_embedding_is_reduced_between_the_stages_that_hold_it():
    """First and last stage of a loop; where the pipeline turns round both are on one rank, and nothing is sent."""
    evaluator = Evaluator(scenario("tied", batch=32))
    model = evaluator.scenario.model
    for text, ranks in (("pp4 dp2 zero1", {0, 3}), ("pp2 vpp2 dp4 interleaved zero1", {0, 1}), ("dp8 zero1", set()), ("pp4 vpp2 dp2 zero1 zbv", set()), ("pp4 vpp2 dp2 zero1 dualpipev", set())):
        layout = evaluator.legal(text)
        program = evaluator.program(layout)
        size = 4 * model.vocab_size * model.hidden_size / layout.dp
        found = set()
        for rank in range(layout.pp):
            span = Group(2, layout.dp * (layout.pp - 1)) if layout.pp > 1 else Group(2, 1)
            seconds = rounded(evaluator.parts.price(Collective("all_reduce", size, span))[0])
            if any(rounded(t.seconds) == seconds for t in program.epilogue[rank]):
                found.add(rank)
        assert found == ranks, text


# --- prefetch -------------------------------------------------------------------------------------------------------------------


def gathered_intervals(timeline, entry: str, rank: int, units: int):
    """[(first gather starts, last gather ends, layer starts, layer's weights are released)] of one body, in its order."""
    data = [s for s in timeline.lane(rank, DATA) if s.entry == entry and s.kind == "collective"]
    compute = [s for s in timeline.lane(rank, COMPUTE) if s.entry == entry]
    starts = [i for i, s in enumerate(compute) if s.name == "param_copy_out"] + [len(compute)]
    assert len(starts) == units + 1 and len(data) % units == 0
    each = len(data) // units
    out = []
    for u in range(units):
        mine = [s for s in compute[starts[u]:starts[u + 1]] if s.name != "grad_copy_in"]
        out.append((data[u * each].start, data[(u + 1) * each - 1].end, mine[0].start, mine[-1].end))
    return out


@pytest.mark.parametrize("window", [0, 1, 2, 4])
@pytest.mark.parametrize("num_nodes", [1, 8])
def test_a_gather_waits_for_the_release_of_the_layer_before_the_window(window, num_nodes):
    s = scenario("dense", num_nodes=num_nodes, stack="torchtitan", batch=128)
    evaluator = Evaluator(s)
    layout = evaluator.legal(f"dp{8 * num_nodes} zero3" + (f" ov:fsdp{window}" if window else " ov:none"))
    assert layout.prefetch == window
    timeline = engine.run(evaluator.program(layout))
    for entry in ("0F0", "0B0"):
        found = gathered_intervals(timeline, entry, 0, 8 + 2)
        for i, (start, end, begins, _) in enumerate(found):
            assert begins >= end  # nobody computes with weights that are not there
            if i >= window + 2:
                assert start >= found[i - window - 2][3]
        moments = sorted({start for start, *_ in found})
        held = [sum(start <= t < release for start, _, _, release in found) for t in moments]
        assert max(held) <= window + 2


def test_a_wider_window_is_never_slower_and_helps_where_the_host_waits():
    """A host that waits for the device in every layer issues the next gather late, unless a window lets it go ahead."""
    evaluator = Evaluator(scenario("moe", num_nodes=4, stack="olmo_core_fsdp", batch=64))
    steps = [paths.step_seconds([evaluator.program(evaluator.legal("dp32 zero3" + (f" ov:fsdp{n}" if n else " ov:none")))])[0] for n in (0, 1, 2, 4)]
    assert all(b <= a * (1 + 1e-12) for a, b in zip(steps, steps[1:]))
    assert steps[1] < 0.99 * steps[0]


# --- everything together --------------------------------------------------------------------------------------------------------


def test_programs_of_random_layouts_are_whole():
    """Tasks name earlier tasks, terms sum to seconds, ids agree, all ranks share the barrier, and the step's parts are consistent."""
    rng = random.Random(4)
    for _, (evaluator, space) in zip(range(10), random_spaces(rng, num_values=1)):
        layout = space.layout(rng.randrange(len(space)))
        program = evaluator.program(layout)
        assert program.num_ranks == layout.pp and len(program.placement) == layout.pp * layout.vpp
        for body in (*program.bodies, *program.epilogue):
            for i, t in enumerate(body):
                assert all(0 <= d < i for d in t.deps), str(layout)
                assert not t.terms or sum(s for *_, s in t.terms) == pytest.approx(t.seconds, rel=1e-9)
                assert t.seconds >= 0 and t.host_s >= 0
        assert all([t.barrier for t in body if t.barrier >= 0] == [0] for body in program.epilogue)
        for rank, order in enumerate(program.orders):
            assert len(order) == len(program.body_index[rank])
            for entry, k in zip(order, program.body_index[rank]):
                inputs = sorted(t.input for t in program.bodies[k] if t.input >= 0)
                outputs = sorted(t.output for t in program.bodies[k] if t.output >= 0)
                acts = list(flatten((entry,)))
                last = len(program.placement) - 1
                assert inputs == [j for j, a in enumerate(acts) if a.letter != "W" and not (a.letter == "F" and a.stage == 0)], (str(layout), str(entry))
                assert outputs == [j for j, a in enumerate(acts) if a.letter != "W" and not (a.letter == "F" and a.stage == last) and not (a.letter != "F" and a.stage == 0)]


@pytest.mark.parametrize("skewed", [False, True])
def test_a_program_does_not_depend_on_what_was_assembled_before(skewed):
    """Whatever is shared between layouts, a fresh evaluator makes the same program."""
    rng = random.Random(8)
    axes = {"pp": [1, 2, 4], "num_chunks": [1, 2], "ep": [2, 4], "zero": [1, 2, 3], "dp_replicate": [1, 2], "schedule": ["1f1b", "interleaved", "zbv"], "overlap": ["none", "grad+param+ep", "fsdp1"],
            "micro_batch": [1, 2], "optimizer": ["fp32", "bf16"]}
    s = scenario("moe", batch=16, search=axes)
    used = Evaluator(s)
    space = enumerate_layouts(s, used.stack.default_layout)
    layouts = [space.layout(row) for row in rng.sample(range(len(space)), 40)]
    programs = [(used.skewed if skewed else used).program(layout) for layout in layouts]
    for layout, program in list(zip(layouts, programs))[-15:]:
        fresh = Evaluator(s)
        alone = (fresh.skewed if skewed else fresh).program(layout)
        assert alone.bodies == program.bodies and alone == program, str(layout)


def test_an_assembler_repeats_itself():
    evaluator = Evaluator(scenario("moe"))
    layout = evaluator.legal("pp2 dp4 ep4 zero1 ov:ep+grad+param")
    assert Assembler(evaluator.parts).program(layout) == Assembler(evaluator.parts).program(layout) == evaluator.program(layout)
