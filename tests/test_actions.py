"""Is what torch's runtime gets the planner's list, with every message received and every gradient reduced once?"""

from __future__ import annotations

import pytest

from moesim.schedules import SCHEDULES, Action, flatten
from moetrain.actions import compute_actions, forward_orders, lowered

CASES = [(name, pp, n, v) for name in SCHEDULES for pp in (2, 3, 4) for n in (2, 4, 8, 16) for v in (1, 2, 4)
         if SCHEDULES[name].legal(pp, n, v) is None]


@pytest.mark.parametrize("name", SCHEDULES)
def test_lists_given_to_torch(name):
    """The planner's order is kept; weights are gathered once and gradients reduced once, behind the stage's last backward; every
    message has a receiver, and both ends of a link name their messages in one order."""
    for _, pp, n, v in [case for case in CASES if case[0] == name]:
        orders, placement = SCHEDULES[name].orders(pp, n, v), SCHEDULES[name].placement(pp, v)
        lists = lowered(orders, placement, n)
        links = {}
        for rank, actions in lists.items():
            assert compute_actions(actions) == list(flatten(orders[rank]))
            kinds = [(a.computation_type.value, a.stage_index) for a in actions if a.microbatch_index is None and a.sub_actions is None]
            held = [stage for stage, holder in enumerate(placement) if holder == rank]
            assert sorted(kinds) == sorted((kind, stage) for kind in ("UNSHARD", "REDUCE_GRAD", "RESHARD") for stage in held)
            for stage in held:
                work = [i for i, a in enumerate(actions) for b in (a.sub_actions or (a,))
                        if b.stage_index == stage and b.computation_type.value in "FBIW"]
                at = {a.computation_type.value: i for i, a in enumerate(actions) if a.stage_index == stage and a.microbatch_index is None}
                assert at["UNSHARD"] < work[0] and work[-1] < at["REDUCE_GRAD"] < at["RESHARD"]
            for a in actions:
                what, to = a.computation_type.value, -1 if a.computation_type.value[-1] == "B" else 1
                if what[:5] in ("SEND_", "RECV_"):
                    sender = a.stage_index if what[0] == "S" else a.stage_index - to
                    link = frozenset((placement[sender], placement[sender + to]))
                    links.setdefault(link, {}).setdefault(rank, []).append((what[-1], sender, a.microbatch_index))
        for ends in links.values():
            assert len(ends) == 2 and len(set(map(tuple, ends.values()))) == 1


def test_forward_alone_runs_every_microbatch_through_every_stage_once():
    for pp, v, shape in [(2, 1, "loop"), (3, 2, "v"), (2, 3, "loop")]:
        placement = {"loop": [r for _ in range(v) for r in range(pp)], "v": [*range(pp), *range(pp)[::-1]]}[shape]
        orders = forward_orders(placement, pp, 3)
        assert sorted(a for order in orders for a in order) == sorted(Action(s, "F", m) for s in range(pp * v) for m in range(3))
        assert all(placement[a.stage] == rank for rank, order in enumerate(orders) for a in order)
        lowered(orders, placement, 3)
