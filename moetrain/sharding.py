"""Who holds which piece of each parameter, and when do gradients travel? (Tensor and expert cuts as DTensors, FSDP2 on top.)

One mechanism for every ZeRO stage; only flags differ (the README's table). FSDP2 keeps FP32 masters as shards, gathers weights in the
compute precision and accumulates gradients in the reduction's precision. ZeRO-0 is the same with shards of one rank each and an
all-reduce over the replicas. All reductions are sums: losses are divided beforehand by the tokens of the whole step.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from moesim.layout import Layout
from moesim.ops import Group
from moesim.spec import ModelSpec
from moetrain.collectives import Communicator, _all_gather, _reduce_scatter, all_reduce_
from moetrain.experts import Experts
from moetrain.layers import local
from moetrain.mesh import Mesh
from moetrain.model import Stage
from moetrain.params import logical


class LoggedAllGather:
    """FSDP2's parameter gather, written to the log."""

    def __init__(self, comm: Communicator):
        self.comm = comm

    def allocate(self, size, *, dtype, device):
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor, input_tensor, group, async_op=False):
        size = output_tensor.numel() * output_tensor.element_size()
        log = self.comm.log
        log.add("all_gather", "param_gather", size, self.comm, "step")
        opened = log.begin("param_gather", size, "data", waits=_stands(output_tensor, async_op))
        return _ended(log, opened, _all_gather(output_tensor, input_tensor, group=group, async_op=async_op))


def _stands(x: torch.Tensor, async_op: bool) -> bool:
    """Does nothing compute until FSDP2's collective has ended? (On a GPU it has a stream of its own.)"""
    return x.device.type == "cpu" and not async_op


def _ended(log, opened, work):
    """``work``, with its span closed when it ends: at once where it is None."""
    if work is None or opened is None:
        log.end(opened)
    else:
        work.get_future().add_done_callback(lambda _: log.end(opened))
    return work


class LoggedReduceScatter:
    """FSDP2's gradient reduction, written to the log. Where ``replicas`` add up behind it FSDP2 does that itself and calls `replicated`
    afterwards: what lies between is its span."""

    def __init__(self, comm: Communicator, replicas: Communicator):
        self.comm, self.replicas, self.opened = comm, replicas, None

    def allocate(self, size, *, dtype, device):
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor, input_tensor, group, op, async_op=False):
        size = input_tensor.numel() * input_tensor.element_size()
        log = self.comm.log
        log.add("reduce_scatter", "grad_reduce", size, self.comm, "step")
        stands = _stands(output_tensor, async_op)
        opened = log.begin("grad_reduce", size, "reduce", waits=stands)
        work = _ended(log, opened, _reduce_scatter(output_tensor, input_tensor, group=group, op=op, async_op=async_op))
        if self.replicas.size > 1:
            self.opened = log.begin("grad_reduce", output_tensor.numel() * output_tensor.element_size(), "reduce", waits=stands)
        return work

    def replicated(self, x: torch.Tensor) -> None:
        """The replicas' all-reduce of ``x`` has been issued."""
        log = self.replicas.log
        log.add("all_reduce", "grad_reduce", x.numel() * x.element_size(), self.replicas, "step")
        log.end(self.opened)
        self.opened = None


def policy(dtype: torch.dtype, layout: Layout) -> MixedPrecisionPolicy:
    """Compute in ``dtype``; reduce and accumulate gradients as the layout's ``grad:`` says."""
    reduce = torch.float32 if layout.grad == "fp32" else torch.bfloat16
    if dtype == torch.float32:
        return MixedPrecisionPolicy(reduce_dtype=None if reduce == dtype else reduce, cast_forward_inputs=False)
    return MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=reduce, cast_forward_inputs=False)


def shard(stage: Stage, mesh: Mesh, dtype: torch.dtype) -> None:
    """Cuts a stage on the meta device in place. A single process that computes in float32 needs no wrapping."""
    if mesh.dense is None:
        return
    _cut(stage, mesh)
    layout, keep = mesh.layout, {"mp_policy": policy(dtype, mesh.layout), "reshard_after_forward": mesh.layout.zero == 3 and mesh.layout.reshard}
    dense = mesh.dense["replicate", "shard"] if mesh["replicate"].size > 1 else mesh.dense["shard"]
    expert = mesh.expert["edp_replicate", "edp"] if mesh["edp_replicate"].size > 1 else mesh.expert["edp"]
    for module in list(stage.modules()):
        if isinstance(module, Experts):
            fully_shard(module, mesh=expert, shard_placement_fn=lambda p: _placement(p, mesh["edp"].size), **keep)
            _connect(module, mesh["edp"], mesh["edp_replicate"])
    tied = stage.head is not None and stage.embedding is not None and stage.head.out.weight is stage.embedding.embed.weight
    blocks = [*stage.layers.values(), *([] if tied else [b for b in (stage.embedding, stage.head) if b is not None])]
    for module in [*blocks, stage]:
        fully_shard(module, mesh=dense, **keep)
        _connect(module, mesh["shard"], mesh["replicate"])
    _prefetch(stage, layout)


def _cut(stage: Stage, mesh: Mesh) -> None:
    """Parameters as DTensors over tp (cut or replicated) or ep."""
    tp, ep = mesh["tp"].size, mesh["ep"].size
    for module in stage.modules():
        for name, traits in getattr(module, "traits", {}).items():
            parameter = module._parameters.get(name)
            if parameter is None or isinstance(parameter, DTensor):
                continue
            if traits.expert and ep > 1:
                where, placement = mesh.expert["ep"], Shard(0)
            elif not traits.expert and tp > 1:
                where, placement = mesh.dense["tp"], Replicate() if traits.tp_dim is None else Shard(traits.tp_dim)
            else:
                continue
            cut = nn.Parameter(distribute_tensor(parameter.data, where, [placement]))
            # A tied weight stays one parameter.
            for other in stage.modules():
                for key, value in other._parameters.items():
                    if value is parameter:
                        other._parameters[key] = cut


def _placement(parameter: torch.Tensor, ranks: int) -> Shard | None:
    """FSDP2 cuts experts along a dimension that divides, the expert number's only where no other does: it is the mesh of ep's."""
    sizes = list(parameter.shape)
    return next((Shard(d) for d in range(len(sizes) - 1, 0, -1) if sizes[d] % ranks == 0), None)


def _connect(module: FSDPModule, shards: Communicator, replicas: Communicator) -> None:
    module.set_gradient_divide_factor(1.0)
    module.set_force_sum_reduction_for_comms(True)
    module.set_custom_all_gather(LoggedAllGather(shards))
    reduction = LoggedReduceScatter(shards, replicas)
    module.set_custom_reduce_scatter(reduction)
    if replicas.size > 1:
        module.set_all_reduce_hook(reduction.replicated)


def _prefetch(stage: Stage, layout: Layout) -> None:
    """`ov:fsdpN`: the next N layers' gathers are issued before this layer's work, in forward and backward."""
    layers = list(stage.layers.values())
    for i, layer in enumerate(layers if layout.overlaps("fsdp") else []):
        layer.set_modules_to_forward_prefetch(layers[i + 1:i + 1 + layout.prefetch])
        layer.set_modules_to_backward_prefetch(layers[max(0, i - layout.prefetch):i][::-1])


def begin_microbatch(parts: Iterable[nn.Module], layout: Layout, last: bool) -> None:
    """Says before a microbatch's forward whether its backward is the step's last: then gradients are reduced (ZeRO-2 and full ZeRO-3:
    always) and gathered weights released."""
    always = layout.zero == 2 or (layout.zero == 3 and layout.reshard)
    for part in parts:
        if isinstance(part, FSDPModule):
            part.set_is_last_backward(last)
            part.set_requires_gradient_sync(last or always)
            part.set_requires_all_reduce(last)
            part.set_reshard_after_backward(last or (layout.zero == 3 and layout.reshard))
        if layout.pp == 1:
            _forget_forwards(part)


def parameter_groups(part: nn.Module) -> Iterator:
    """FSDP2's units of a model part. (One a module before torch 2.12.)"""
    for module in part.modules():
        if isinstance(module, FSDPModule):
            state = module._get_fsdp_state()
            yield from getattr(state, "_fsdp_param_groups", None) or filter(None, [getattr(state, "_fsdp_param_group", None)])


def _forget_forwards(part: nn.Module) -> None:
    """FSDP2 remembers the order of all forwards until a backward is the step's last. With it the first unit of a microbatch would gather
    the last one of the microbatch before, the head, for nothing."""
    for group in parameter_groups(part):
        if hasattr(group.comm_ctx, "post_forward_order"):  # from the first forward on
            group.comm_ctx.post_forward_order.clear()
        group._post_forward_indices.clear()


def gather_early(parts: Iterable[nn.Module], layout: Layout) -> None:
    """`ov:param`: the next step's weights are gathered while the host does other things."""
    for part in parts if layout.overlaps("param") else ():
        for module in part.modules():
            if isinstance(module, FSDPModule):
                module.unshard(async_op=True)


def release(parts: Iterable[nn.Module]) -> None:
    """Gathered weights go: after a forward that no backward follows, which would have done it. Parameters are their shards again."""
    for part in parts:
        for module in part.modules():
            if isinstance(module, FSDPModule):
                module.reshard()


# --- gradients that FSDP2 does not see ------------------------------------------------------------------------------------------


def finish_gradients(parts: list[Stage], mesh: Mesh, ends: Communicator | None) -> None:
    """What is left after the last backward: weights that every tp rank holds whole saw different tokens on each, and the two copies
    of a tied embedding on different stages saw different ends of the model. ``ends`` = first and last stage, where they need it."""
    if mesh["tp"].size > 1:
        _sum_together([_local_grad(p) for p in replicated_over_tp(parts)], mesh["tp"], "tp_grad_reduce")
    pair = tied_copies(parts)
    if len(pair) == 2:
        total = _local_grad(pair[0]) + _local_grad(pair[1])
        for parameter in pair:
            _local_grad(parameter).copy_(total)
    elif pair and ends is not None:
        all_reduce_(_local_grad(pair[0]), ends, "grad_reduce", phase="step")


def replicated_over_tp(parts: Iterable[nn.Module]) -> list[torch.Tensor]:
    """Dense parameters that tensor parallelism does not cut."""
    return [p for part in parts for _, p, traits in logical(part) if not traits.expert and traits.tp_dim is None]


def tied_copies(parts: Iterable[Stage]) -> list[torch.Tensor]:
    """The separate copies of a tied embedding that stages of a pipeline hold: of this rank, none, one or two."""
    parts = list(parts)
    if not parts or not parts[0].spec.tie_embeddings or any(p.embedding is not None and p.head is not None for p in parts):
        return []
    ends = [p.embedding.embed.weight for p in parts if p.embedding is not None]
    return ends + [p.head.out.weight for p in parts if p.head is not None]


@torch.no_grad()
def follow(first: torch.Tensor, second: torch.Tensor) -> None:
    """The second copy of a tied embedding takes the first one's values; both are cut alike."""
    local(second).copy_(local(first))


def _local_grad(parameter: torch.Tensor) -> torch.Tensor:
    grad = parameter.grad
    return grad.to_local() if isinstance(grad, DTensor) else grad


def _sum_together(grads: list[torch.Tensor], comm: Communicator, role: str) -> None:
    """One all-reduce for many small tensors."""
    if not grads:
        return
    flat = torch.cat([g.flatten() for g in grads])
    all_reduce_(flat, comm, role, phase="step")
    for grad, part in zip(grads, flat.split([g.numel() for g in grads])):
        grad.copy_(part.view_as(grad))


def named_parameters(parts: Iterable[Stage]) -> Iterator[tuple[str, nn.Parameter]]:
    """(logical name, parameter) of every model part of this rank."""
    for part in parts:
        for name, parameter, _ in logical(part):
            yield part.logical_name(name), parameter


def once(parts: list[Stage]) -> Iterator[tuple[str, nn.Parameter]]:
    """As `named_parameters`, without the second copy of a tied embedding: what counts in the gradient norm."""
    copies = {id(p) for p in tied_copies(parts)}
    first = {id(part.embedding.embed.weight) for part in parts if part.embedding is not None}
    yield from ((name, p) for name, p in named_parameters(parts) if id(p) not in copies or id(p) in first)


def ends_communicator(mesh: Mesh, spec: ModelSpec) -> Communicator | None:
    """First and last pipeline rank of this rank's column, where a tied embedding lies on both. A collective call on all ranks."""
    layout = mesh.layout
    if layout.pp == 1 or not spec.tie_embeddings:
        return None
    width = layout.world // layout.pp
    mine = None
    for column in range(width):
        ranks = [column, column + (layout.pp - 1) * width]
        group = dist.new_group(ranks)
        if mesh.rank in ranks:
            mine = Communicator("ends", 2, ranks.index(mesh.rank), group, Group(2, (layout.pp - 1) * width), mesh.log)
    return mine
