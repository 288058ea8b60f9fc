"""How are collectives and expert dispatch timed? (Through the trainer's own calls, on as many groups at once as the world holds.)

Every rank takes part; a rank that is in no group waits. What a reduction overwrites is filled again before each repeat.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from moesim.ops import COLLECTIVE_ADJOINT, Collective, Dispatch
from moetrain import collectives
from moetrain.bench.work import Machine, Skip, Work
from moetrain.collectives import Communicator
from moetrain.dispatch import dispatcher
from moetrain.dispatch.plan import Capacity
from moetrain.router import Routing, count

ROLE = "bench"


def _idle() -> None:
    """What a rank outside every group does."""


def collective(op: Collective, machine: Machine) -> Work:
    """One collective of ``op.bytes``, by the size conventions of moesim.ops. Reductions are of FP32 values, as the trainer's are."""
    if op.kind not in COLLECTIVE_ADJOINT:
        raise Skip(f"no collective {op.kind!r}: known are {', '.join(COLLECTIVE_ADJOINT)}")
    comm = machine.communicator(op.group)
    dtype = "fp32" if op.kind in ("all_reduce", "reduce_scatter") else machine.dtype
    width, parts = 4 if dtype == "fp32" else 2, 1 if op.kind in ("all_reduce", "send_recv") else op.group.size
    share = max(1, round(op.bytes / (width * parts)))
    moved = float(share * width * parts)
    method = {"kernel": op.kind, "transport": "nccl" if machine.cuda else "gloo", "group": [op.group.size, op.group.stride]}
    if comm is None:
        return Work([_idle], 0.0, moved, dtype, method, everyone=True, single=True)
    made = machine.sets(2 * moved, lambda: CALLS[op.kind](machine, comm, share, dtype), comm)
    calls, refill = [call for call, _ in made], [fill for _, fill in made]
    method["sets"] = len(made)
    return Work(calls, 0.0, moved, dtype, method, before=lambda i: refill[i](), everyone=True, single=True)


Made = tuple[Callable[[], object], Callable[[], object]]


def _all_gather(machine: Machine, comm: Communicator, share: int, dtype: str) -> Made:
    x = machine.normal(share, dtype=dtype)
    return lambda: collectives.gather_forward(x, 0, comm, ROLE, "forward"), _idle


def _reduce_scatter(machine: Machine, comm: Communicator, share: int, dtype: str) -> Made:
    x = machine.normal(share * comm.size, dtype=dtype)
    return lambda: collectives.scatter_forward(x, 0, comm, ROLE, "forward"), _idle


def _all_reduce(machine: Machine, comm: Communicator, share: int, dtype: str) -> Made:
    source = machine.normal(share, dtype=dtype)
    x = source.clone()
    return lambda: collectives.all_reduce_(x, comm, ROLE), lambda: x.copy_(source)


def _all_to_all(machine: Machine, comm: Communicator, share: int, dtype: str) -> Made:
    x = machine.normal(share * comm.size, dtype=dtype)
    return lambda: collectives.all_to_all(x, None, None, comm, ROLE), _idle


def _send_recv(machine: Machine, comm: Communicator, share: int, dtype: str) -> Made:
    """Even members send to the next one."""
    x = machine.normal(share, dtype=dtype)
    peer = comm.rank ^ 1
    if peer >= comm.size:
        return _idle, _idle
    other = dist.get_global_rank(comm.pg, peer)
    if comm.rank % 2 == 0:
        return lambda: dist.send(x, other, group=comm.pg), _idle
    return lambda: dist.recv(x, other, group=comm.pg), _idle


CALLS = {"all_gather": _all_gather, "reduce_scatter": _reduce_scatter, "all_reduce": _all_reduce, "all_to_all": _all_to_all, "send_recv": _send_recv}


# --- dispatch and combine ----------------------------------------------------------------------------------------------------


def chosen_experts(tokens: int, op: Dispatch, first: int) -> torch.Tensor:
    """Expert numbers [tokens, top_k], distinct in a row, such that the group's first rank receives about ``op.load`` times the mean:
    a share of the tokens picks that rank's experts first, the rest goes round. ``first``: number of this rank's first token."""
    ranks, local = op.group.size, op.num_experts // op.group.size
    own = min(op.top_k, local) / op.top_k  # of a loaded token's routes, those that reach the first rank
    share = min(1.0, (op.load - 1) / ranks / (own - 1 / ranks)) if own > 1 / ranks else 0.0
    loaded = (torch.arange(tokens) * share).floor() != (torch.arange(1, tokens + 1) * share).floor()
    choices = torch.arange(op.top_k)
    # Each kind of token goes round by its own count, so that neither is in step with the other.
    light = (first + (~loaded).cumsum(0))[:, None] * op.top_k + choices
    heavy = (loaded.cumsum(0)[:, None] * op.top_k + choices) % local if local >= op.top_k else choices.expand(tokens, -1)
    return torch.where(loaded[:, None], heavy, light % op.num_experts)


def dispatch(op: Dispatch, machine: Machine) -> Work:
    """Dispatch of ``op.tokens`` (those kept) or combine of what they became, permutes included, the plan made beforehand."""
    if op.bytes_per_element not in (2.0, 4.0):
        raise Skip(f"the trainer sends rows of 2 or 4 bytes a value, not {op.bytes_per_element:g}")
    if op.num_experts % op.group.size:
        raise Skip(f"{op.num_experts} experts do not divide over {op.group.size} ranks")
    comm = machine.communicator(op.group)
    dtype = machine.dtype if op.bytes_per_element == 2.0 else "fp32"
    tokens, width = max(1, round(op.tokens * op.kept)), 4 if dtype == "fp32" else 2
    moved = float(tokens * op.top_k * op.hidden * width)
    method = {"kernel": f"{op.dispatcher} {'combine' if op.combine else 'dispatch'}", "transport": "nccl" if machine.cuda else "gloo",
              "backend": machine.backend.name, "tokens": tokens}
    if comm is None:
        return Work([_idle], 0.0, moved, dtype, method, everyone=True, single=True)
    form = _form(op, machine, comm)
    held = moved * (3 + 2 * (op.group.size if op.dispatcher == "sync_free" else op.load))
    plans: list = []
    calls = machine.sets(held, lambda: _call(op, machine, comm, form, tokens, dtype, plans), comm)
    return Work(calls, 0.0, moved, dtype, method | {"sets": len(calls)}, received_rows(plans[0], comm), everyone=True, single=True)


def _form(op: Dispatch, machine: Machine, comm: Communicator):
    try:
        return dispatcher(op.dispatcher, op.num_experts, comm, Capacity(), machine.backend)
    except KeyError:
        raise Skip(f"the trainer has no dispatcher {op.dispatcher!r}") from None
    except ValueError as error:
        raise Skip(str(error)) from None


def _call(op: Dispatch, machine: Machine, comm: Communicator, form, tokens: int, dtype: str, plans: list):
    experts = chosen_experts(tokens, op, comm.rank * tokens).to(machine.device)
    weights = machine.normal(tokens, op.top_k).softmax(-1)
    plan = form.plan(Routing(weights, experts, count(experts, op.num_experts), machine.normal(tokens, op.num_experts)))
    plans.append(plan)
    x = machine.normal(tokens, op.hidden, dtype=dtype)
    if not op.combine:
        return lambda: form.dispatch(x, plan)()
    arrived, _ = form.dispatch(x, plan)()
    rows = machine.normal(*arrived.shape, dtype=dtype)
    return lambda: form.combine(rows, plan, weights)()


def received_rows(plan, comm: Communicator) -> tuple[int, ...]:
    """Rows that each rank of this rank's group receives."""
    found = collectives.gather_forward(plan.received.sum().view(1), 0, comm, ROLE, "forward")
    return tuple(found.tolist())
