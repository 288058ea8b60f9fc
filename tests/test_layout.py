"""Does the layout text round-trip, refuse nonsense in one line, and place groups where Megatron's rank order puts them?"""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moesim.load import load_cluster
from moesim.ops import Group
from moesim.layout import (DEFAULT_SMS, OVERLAP_RULES, PRECISIONS, RECOMPUTE_ROLES, SCHEDULES, Layout, LayoutError, format_layout, parse_layout,
                           stage_layers)

degrees = st.sampled_from([1, 2, 3, 4, 8])


@st.composite
def layouts(draw):
    pp, cp, tp, ep, etp = (draw(degrees) for _ in range(5))
    dp = draw(st.integers(1, 4)) * ep * etp
    zero = draw(st.integers(0, 3))
    dispatcher = draw(st.sampled_from(sorted(DEFAULT_SMS)))
    rules = draw(st.sets(st.sampled_from(OVERLAP_RULES if zero == 3 else OVERLAP_RULES[:-1])))
    vpp = draw(st.integers(1, 3))
    return Layout(
        pp=pp, vpp=vpp, dp=dp, cp=cp, tp=tp, ep=ep, etp=etp, zero=zero, reshard=zero != 3 or draw(st.booleans()), mb=draw(st.integers(1, 9)),
        schedule=draw(st.sampled_from(SCHEDULES)), recompute=draw(st.sampled_from([(), ("full",), ("norm", "moe_act"), RECOMPUTE_ROLES])), dispatcher=dispatcher,
        sms=0 if dispatcher == "alltoall" else draw(st.sampled_from([8, 24, 32])), overlap=tuple(r for r in OVERLAP_RULES if r in rules),
        prefetch=draw(st.integers(1, 4)) if "fsdp" in rules else 0, precision=draw(st.sampled_from(PRECISIONS)), grad=draw(st.sampled_from(["fp32", "bf16"])),
        optimizer=draw(st.sampled_from(["fp32", "bf16", "fp8"])), graphs=draw(st.sampled_from(["none", "layer", "full"])),
        stages=draw(st.sampled_from([(), tuple(range(pp * vpp))])),
    )


@given(layouts())
@settings(max_examples=300, deadline=None)
def test_text_form_round_trips(layout):
    text = format_layout(layout)
    assert parse_layout(text) == layout
    assert format_layout(parse_layout(" ".join(reversed(text.split())))) == text


@pytest.mark.parametrize("text", ["", "pp", "ppx", "pp0", "zero4", "ep8", "mb1 mb2", "1f1b gpipe", "rc:moeact", "rc:full+norm", "ov:fsdp", "ov:grad2", "noreshard",
                                  "dp4 rep3", "a2a:24", "dedup:x", "st:4/4", "pp2 st:1/2/3", "bf17", "graph:half", "dp99999999999", "dp²"])
def test_bad_text_is_one_line(text):
    with pytest.raises(LayoutError) as error:
        parse_layout(text)
    assert "\n" not in str(error.value) and len(str(error.value)) > 10


def dumb_group(layout, axes, order):
    """Ranks of the group of rank 0 by walking every coordinate, innermost axis first."""
    sizes = [getattr(layout, a) for a in order]
    ranks = []
    for coordinate in itertools.product(*(range(s) for s in reversed(sizes))):
        at = dict(zip(reversed(order), coordinate))
        if all(at[a] == 0 for a in order if a not in axes):
            rank, stride = 0, 1
            for a, s in zip(order, sizes):
                rank, stride = rank + at[a] * stride, stride * s
            ranks.append(rank)
    return sorted(ranks)


@pytest.mark.parametrize("text", ["pp2 dp4 cp2 tp2 ep4 etp2", "pp3 dp8 ep4", "dp2 cp4 tp2 ep8", "pp2 dp6 tp2 ep3 etp2"])
def test_groups_are_where_the_rank_order_puts_them(text):
    layout = parse_layout(text)
    cases = {"tp": (("tp",), 0), "cp": (("cp",), 0), "dp": (("dp",), 0), "dense": (("cp", "dp"), 0), "pp": (("pp",), 0),
             "ep": (("ep",), 1), "etp": (("etp",), 1), "expert": (("edp",), 1)}
    orders = [("tp", "cp", "dp", "pp"), ("etp", "ep", "edp", "pp")]
    for name, (axes, which) in cases.items():
        group = layout.groups[name]
        assert [i * group.stride for i in range(group.size)] == dumb_group(layout, axes, orders[which]), name
    assert layout.ep * layout.etp * layout.edp * layout.pp == layout.world == layout.pp * layout.dp * layout.cp * layout.tp


def test_members_within_a_tier():
    layout = parse_layout("pp2 dp32 tp2 ep16")
    assert layout.groups["ep"].members_within(8) == 8 and layout.groups["ep"].instances(8) == 2
    assert layout.groups["dp"].members_within(8) == 4 and layout.groups["dp"].instances(8) == 8
    assert layout.groups["pp"].members_within(8) == 1
    assert parse_layout("dp64 ep64").groups["ep"].members_within(64) == 64
    assert parse_layout("dp144 ep16").groups["ep"].members_within(72) == 8  # ranks 64-79 lie 8 and 8
    assert parse_layout("dp144 ep36").groups["ep"].members_within(72) == 36
    assert parse_layout("dp144 ep144").groups["ep"].members_within(72) == 72


@pytest.mark.parametrize("num_nodes, domain, inside", [(16, 64, 16), (36, 72, 8), (64, 64, 16), (128, 64, 16)])
def test_power_of_two_groups_straddle_racks_only_when_the_job_fills_them(num_nodes, domain, inside):
    cluster = load_cluster("gb200_nvl72", [f"num_nodes={num_nodes}"])
    assert cluster.domain == domain and Group(16).members_within(domain) == inside


@pytest.mark.parametrize("layers, pp, vpp", [(61, 16, 1), (61, 8, 2), (94, 4, 3), (48, 16, 3), (7, 7, 1), (5, 2, 1)])
def test_even_split_keeps_the_ends_light(layers, pp, vpp):
    counts = stage_layers(Layout(pp=pp, vpp=vpp, dp=1), layers)
    assert sum(counts) == layers and len(counts) == pp * vpp
    assert max(counts) - min(counts) <= 1
    assert counts[0] == min(counts) or layers % (pp * vpp) == 0 or layers - min(counts) * len(counts) > len(counts) - 2
