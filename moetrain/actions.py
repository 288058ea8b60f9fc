"""How does the planner's list of actions become the list that torch's pipeline runtime executes?

torch's own schedule classes would build equal lists (a test holds them equal), but refuse counts that are fine, such as fewer
microbatches than stages, and gather weights again where a rank has more than three stages.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch.distributed.pipelining.schedules import _Action, _add_reduce_grad, _add_send_recv, _ComputationType

from moesim.schedules import Action, Order, Pair

COMPUTE = {_ComputationType(letter): letter for letter in "FBIW"}


def lowered(orders: Sequence[Order], placement: Sequence[int], num_microbatches: int) -> dict[int, list[_Action]]:
    """torch's actions of every pipeline rank: the orders' own, gathers of the local stages' weights before them, a stage's gradient
    reduction behind its last backward, and messages where neighbouring stages lie on different ranks."""
    actions = {}
    for rank, order in enumerate(orders):
        held = [stage for stage, holder in enumerate(placement) if holder == rank]
        # All gathers are issued at once: compute of the first stage hides the rest.
        gathers, releases = ([_Action(stage, kind, None) for stage in held] for kind in (_ComputationType.UNSHARD, _ComputationType.RESHARD))
        actions[rank] = gathers + _add_reduce_grad([_as_torch(item) for item in order], num_microbatches) + releases
    # Receives are put into the receiver's list when the sender sends: one order of messages for both ends of every link.
    return _add_send_recv(actions, stage_to_rank=lambda stage: placement[stage], num_stages=len(placement))


def _as_torch(item: Action | Pair) -> _Action:
    if isinstance(item, Pair):
        return _Action(-1, _ComputationType.OVERLAP_F_B, None, (_as_torch(item.first), _as_torch(item.second)))
    return _Action(item.stage, _ComputationType(item.letter), item.microbatch)


def compute_actions(actions: Iterable[_Action]) -> list[Action]:
    """What of a rank's list is work, in its order, as moesim's actions; pairs one by one, as torch runs them."""
    flat = (part for action in actions for part in (action.sub_actions or (action,)))
    return [Action(a.stage_index, COMPUTE[a.computation_type], a.microbatch_index) for a in flat if a.computation_type in COMPUTE]


def forward_orders(placement: Sequence[int], pp: int, num_microbatches: int) -> tuple[Order, ...]:
    """Forward alone: each rank takes all microbatches through its first stage, then through its next."""
    return tuple(tuple(Action(stage, "F", m) for stage, holder in enumerate(placement) if holder == rank for m in range(num_microbatches))
                 for rank in range(pp))
