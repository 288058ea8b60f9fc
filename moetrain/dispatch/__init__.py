"""How do tokens get to their experts and back? (One interface, few forms, picked by name.)

A form has three calls. ``plan(routing)`` decides which routes are kept and where they go. ``dispatch(tokens, plan)`` sends them and
returns a function that waits and gives (rows [R, d] sorted by local expert, offsets [local experts] of where each expert's rows
end). ``combine(rows, plan, weights)`` sends results back and returns a function that waits and gives [T, d]. What is computed
between a call and its wait runs beside the exchange.
"""

from __future__ import annotations

from moetrain.collectives import Communicator
from moetrain.dispatch import all_to_all, local, sync_free
from moetrain.dispatch.plan import Capacity
from moetrain.kernels import Backend

FORMS = {"local": local.Local, "alltoall": all_to_all.AllToAll, "sync_free": sync_free.SyncFree}


def dispatcher(name: str, num_experts: int, ep: Communicator, capacity: Capacity, backend: Backend):
    """The form ``name`` of moesim.layout's dispatchers; one rank needs no exchange. ValueError for a form that isn't built in."""
    if ep.size == 1:
        name = "local"
    if name == "dedup":
        from moetrain.dispatch import deepep

        return deepep.DeepEP(num_experts, ep, capacity, backend)
    return FORMS[name](num_experts, ep, capacity, backend)
