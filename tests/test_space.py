"""Is the space every legal canonical layout of the axis values, once each? (Held to a loop over the product with the scalar rules.)"""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moesim.layout import DEFAULT_SMS, DISPATCHERS, Layout, LayoutError, _check_shape, illegal, num_microbatches, parse_layout
from moesim.load import SpecError, load_scenario
from moesim.space import AXIS_FIELDS, axis_values, canonical, enumerate_layouts
from moesim.stack import load_stack
from small_scenarios import scenario

VALUES = {
    "pp": [1, 2, 4, 3], "num_chunks": [1, 2, 4], "dp": [1, 2, 4, 8], "cp": [1, 2, 4], "tp": [1, 2, 4, 8], "ep": [1, 2, 4, 8, 3], "etp": [1, 2], "zero": [0, 1, 2, 3],
    "reshard": ["true", "false"], "micro_batch": [1, 2, 4, 3], "schedule": ["gpipe", "1f1b", "interleaved", "interleaved_zb", "zbv", "dualpipev"],
    "recompute": ["none", "norm", "full", "norm+core_attn"], "dispatcher": ["alltoall", "a2a", "dedup", "sync_free"], "dispatcher_sms": [4, 24],
    "overlap": ["none", "ep", "shared+ep", "grad+param", "fsdp1", "ep+fsdp2+grad"], "precision": ["bf16", "mxfp8"], "grad_dtype": ["fp32", "bf16"],
    "optimizer": ["fp32", "fp8"], "graphs": ["none", "router", "full"], "dp_replicate": [1, 2, 4, 3], "stages": ["even", "4/4", "1/2/3/2", "1/1/1/1/1/1/1/1", "3/4"],
}  # fmt: skip
OWN = load_stack("megatron_bridge").default_layout


def brute_force(s, default: Layout) -> set[Layout]:
    """The same set from nested loops: every combination, then the rules of layout.py one row at a time."""
    values = axis_values(s.search, default)
    world, found = s.cluster.num_gpus, set()
    fields = [f for f in values if f != "dp"]
    for combination in itertools.product(*(values[f] for f in fields)):
        row = dict(zip(fields, combination))
        row["overlap"], row["prefetch"] = row["overlap"]
        if not s.model.num_experts:
            row["ep"] = row["etp"] = 1
        if row["dispatcher"] == "alltoall":
            row["sms"] = 0
        else:
            row["sms"] = row["sms"] or DEFAULT_SMS[row["dispatcher"]]
        inner = row["pp"] * row["tp"] * row["cp"]
        if world % inner or (values["dp"] and world // inner not in values["dp"]):
            continue
        if row["pp"] == 1:  # nothing to schedule: one order, whatever schedules were asked for
            row["schedule"] = "1f1b"
            if row["vpp"] > 1:
                continue
        layout = Layout(**row, dp=world // inner)
        if illegal(layout, s.model, s.workload, world):
            continue
        layout = canonical(layout, num_microbatches(layout, s.workload))
        try:
            _check_shape(layout, "")
        except LayoutError:
            continue
        found.add(layout)
    return found


def layouts(space) -> list[Layout]:
    return [space.layout(row) for row in range(len(space))]


def check(s, default=OWN):
    space = enumerate_layouts(s, default)
    rows = layouts(space)
    assert len(set(rows)) == len(rows)
    expected = brute_force(s, default)
    assert set(rows) == expected, sorted(map(str, set(rows) ^ expected))[:5]
    for row, layout in enumerate(rows):
        assert parse_layout(str(layout)) == layout
        assert space.num_microbatches[row] == num_microbatches(layout, s.workload)
    return space


@st.composite
def searches(draw):
    """Three to seven axes; pipeline degrees and schedules always, since most rules meet there."""
    axes = {"pp", "num_chunks", "schedule", *draw(st.lists(st.sampled_from(sorted(VALUES)), min_size=0, max_size=4, unique=True))}
    return {axis: draw(st.lists(st.sampled_from(VALUES[axis]), min_size=1, max_size=3)) for axis in sorted(axes)}


@settings(max_examples=60, deadline=None)
@given(search=searches(), model=st.sampled_from(["moe", "mla", "dense"]), batch=st.sampled_from([8, 24, 64]), stack=st.sampled_from(["megatron_bridge", "olmo_core3_ddp", "torchtitan"]))
def test_the_space_is_the_brute_force_product(search, model, batch, stack):
    check(scenario(model, batch=batch, search=search, stack=stack), load_stack(stack).default_layout)


@pytest.mark.parametrize("axis", sorted(VALUES))
def test_every_axis_alone_with_all_its_values(axis):
    """Beside the axes that give its values something to act on."""
    beside = {"zero": [1, 3], "tp": [1, 2], "ep": [1, 4], "schedule": ["1f1b", "zbv", "interleaved"], "pp": [1, 2, 4], "num_chunks": [1, 2], "dispatcher": ["dedup", "alltoall"]}
    space = check(scenario("moe", search={**beside, axis: VALUES[axis]}))
    assert len(space) > 0
    illegal_everywhere = {"pp": {3}, "ep": {3}, "dp_replicate": {3}, "micro_batch": {3}, "stages": {(3, 4)}}
    field = AXIS_FIELDS[axis]
    seen = set(space.column(field)) if axis not in ("overlap", "recompute", "stages") else {getattr(x, field) for x in layouts(space)}
    asked = set(axis_values(scenario("moe", search={axis: VALUES[axis]}).search, OWN)[field])
    if axis == "overlap":
        assert {"ep", "shared", "grad", "param", "fsdp"} == {rule for x in layouts(space) for rule in x.overlap}
    else:
        assert asked - illegal_everywhere.get(axis, set()) <= seen


@pytest.mark.full
@settings(max_examples=1500, deadline=None)
@given(search=searches(), model=st.sampled_from(["moe", "mla", "dense", "window"]), batch=st.sampled_from([8, 24, 64]), nodes=st.sampled_from([1, 2]))
def test_many_spaces_are_the_brute_force_product(search, model, batch, nodes):
    check(scenario(model, batch=batch, search=search, num_nodes=nodes))


def test_a_schedule_that_was_not_asked_for_runs_on_one_pipeline_rank_only():
    space = enumerate_layouts(scenario("moe", search={"pp": [1, 2, 4], "num_chunks": [1, 2], "schedule": ["zbv"]}), OWN)
    assert {(x.schedule, x.pp > 1) for x in layouts(space)} == {("1f1b", False), ("zbv", True)}


def test_canonical_is_idempotent_and_legal_stays_legal():
    s = scenario("moe", search={"zero": [0, 1, 2, 3], "reshard": ["true", "false"], "ep": [1, 8], "overlap": ["ep+shared+grad+param+fsdp3"], "dispatcher": ["dedup"]})
    rows = layouts(enumerate_layouts(s, OWN))
    for layout in rows:
        assert canonical(layout, num_microbatches(layout, s.workload)) == layout
        assert illegal(layout, s.model, s.workload, 8) is None
    by_policy = {(x.zero, x.reshard, x.ep): x for x in rows}
    assert by_policy[2, True, 1].overlap == ("param",) and by_policy[0, True, 1].overlap == ("grad",)
    assert by_policy[3, True, 8].overlap == ("ep", "shared", "fsdp") and by_policy[3, True, 8].prefetch == 3
    assert by_policy[3, False, 1].overlap == ("grad", "param") and by_policy[3, False, 1].prefetch == 0
    assert by_policy[1, True, 1].dispatcher == "alltoall" and by_policy[1, True, 1].sms == 0


def test_order_of_rows_and_values_does_not_depend_on_the_run():
    s = scenario("moe", search={"pp": [1, 2], "ep": [1, 2, 4], "zero": [1, 3], "overlap": ["none", "ep+fsdp1"]})
    assert layouts(enumerate_layouts(s, OWN)) == layouts(enumerate_layouts(s, OWN))


@pytest.mark.parametrize(("search", "count"), [
    ({"pp": [3]}, 0), ({"tp": [16]}, 0), ({"ep": [3]}, 0), ({"micro_batch": [7]}, 0), ({"schedule": ["zbv"], "pp": [2]}, 0), ({"dp": [3]}, 0), ({"stages": ["1/2"]}, 0),
    ({"num_chunks": [2], "pp": [1]}, 0), ({"dp_replicate": [3]}, 0), ({}, 1),
])  # fmt: skip
def test_empty_spaces_say_what_was_dropped(search, count):
    space = enumerate_layouts(scenario("moe", search=search), OWN)
    assert len(space) == count
    if not count:
        assert sum(space.dropped.values()) >= 1 and all(reason.strip() and "\n" not in reason for reason in space.dropped)


def test_dropped_counts_rows_that_are_not_legal():
    space = enumerate_layouts(scenario("moe", search={"pp": [1, 3, 5], "ep": [1, 3]}), OWN)
    assert len(space) == 1 and len(space.dropped) == 2
    assert sorted(space.dropped.values()) == [1, 2]


@pytest.mark.parametrize(("axis", "value"), [
    ("pp", 0), ("pp", -1), ("pp", "two"), ("zero", 4), ("zero", "x"), ("reshard", "maybe"), ("schedule", "1f2b"), ("recompute", "everything"), ("dispatcher", "deepep"),
    ("dispatcher_sms", 0), ("overlap", "fsdp"), ("overlap", "ep+ep2"), ("precision", "fp4"), ("grad_dtype", "fp16"), ("optimizer", "int8"), ("graphs", "some"), ("stages", "4-4"),
    ("stages", "4/x"), ("dp_replicate", 0), ("micro_batch", 0), ("num_chunks", "many"), ("schedule", "1f1b gpipe"), ("schedule", "zero2"), ("precision", "dp8"), ("schedule", "pp2"),
    ("recompute", "norm pp2"), ("zero", "1 pp4"), ("schedule", ""), ("precision", 8), ("stages", "4//4"), ("recompute", ""), ("overlap", ""),
])  # fmt: skip
def test_a_bad_axis_value_is_one_line_that_names_axis_and_value(axis, value):
    with pytest.raises((LayoutError, SpecError)) as error:
        enumerate_layouts(scenario("moe", search={axis: [value]}), OWN)
    text = str(error.value)
    assert "\n" not in text and axis in text and (str(value).split()[0] if str(value).strip() else "") in text


def test_too_many_combinations_are_refused_in_one_line():
    many = list(range(1, 1200))
    with pytest.raises(LayoutError, match="more than .* combinations; shorten an axis"):
        enumerate_layouts(scenario("moe", search={"dispatcher_sms": many, "micro_batch": [1, 2, 4, 8], "ep": [1, 2, 4, 8], "overlap": VALUES["overlap"], "recompute": VALUES["recompute"],
                                                  "zero": [0, 1, 2, 3], "dispatcher": ["dedup", "sync_free"], "precision": ["bf16", "fp8", "mxfp8"], "optimizer": ["fp32", "bf16", "fp8"],
                                                  "graphs": ["none", "layer", "full"]}), OWN)


def test_every_axis_of_a_scenario_is_a_field_of_the_layout():
    assert {**VALUES, "dp": 0}.keys() == AXIS_FIELDS.keys()
    spellings = {DISPATCHERS[k]: k for k in DISPATCHERS}
    assert set(spellings) == set(DEFAULT_SMS)


def test_a_large_space_stays_small():
    """Codes, not objects: a few bytes a field and row."""
    search = {"pp": [1, 2, 4], "num_chunks": [1, 2], "tp": [1, 2, 4], "cp": [1, 2], "ep": [1, 2, 4, 8], "zero": [0, 1, 2, 3], "micro_batch": [1, 2], "recompute": VALUES["recompute"],
              "precision": ["bf16", "fp8", "mxfp8"], "optimizer": ["fp32", "bf16", "fp8"], "schedule": VALUES["schedule"], "dispatcher": ["alltoall", "dedup"], "graphs": ["none", "layer"]}
    space = enumerate_layouts(scenario("moe", search=search), OWN)
    assert len(space) > 30_000
    assert sum(c.nbytes for c in space.codes.values()) / len(space) < 250
    assert all(isinstance(c, np.ndarray) and c.max() < len(space.values[f]) for f, c in space.codes.items())


def test_a_step_of_too_many_microbatches_is_refused_with_a_reason():
    """A play walks every microbatch: 2^40 tokens would never end."""
    s = load_scenario("olmo_core3_new", ["workload.global_batch_tokens=1099511627776", "search={ep: [8], micro_batch: [1]}"])
    space = enumerate_layouts(s, Layout())
    assert not len(space) and any("microbatches" in reason for reason in space.dropped)
    assert "microbatches" in illegal(parse_layout("dp8 ep8 zero1 mb1"), s.model, s.workload, 8)
