"""How does a rank work through its share of a pipeline: which stage on which microbatch, what travels, when are gradients summed?

torch.distributed.pipelining's runtime executes the very list that moesim.schedules writes (see actions), for every schedule. What a
stage needs beside its input (where the tokens stand, labels) is looked up by microbatch number and never enters torch's argument
splitting. The last stage's output is its loss, so only losses leave the pipeline.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

from moesim.layout import Layout
from moesim.ops import Group
from moesim.schedules import SCHEDULES, Order, flatten
from moetrain import sharding
from moetrain.actions import compute_actions, forward_orders, lowered
from moetrain.balance import attach
from moetrain.collectives import Communicator
from moetrain.mesh import Mesh
from moetrain.model import Stage
from moetrain.seams import action

if TYPE_CHECKING:
    from moetrain.build import Job
    from moetrain.step import Microbatch


def can_split_backward() -> bool:
    """Whether autograd starts at a custom Function's node, as weight gradients taken alone do. torch 2.11 can't."""
    node = attach(torch.zeros(1, requires_grad=True), torch.zeros(())).grad_fn
    try:
        return len(node._input_metadata) > 0
    except RuntimeError:
        return False


# --- torch's stage and runtime, with what they leave open -------------------------------------------------------------------------


class _PipelineStage(PipelineStage):
    """One local stage. ``message``: a meta tensor like what neighbouring stages send each other."""

    def __init__(self, part: Stage, index: int, num_stages: int, mesh: Mesh, message: torch.Tensor):
        # With shapes given no forward is run to infer them, which would be counted as routing and waste a gather.
        ids = torch.empty(message.shape[0], message.shape[1] * mesh["tp"].size, dtype=torch.int64, device="meta")
        losses = torch.empty(2, device="meta", requires_grad=True)
        super().__init__(part, index, num_stages, mesh.device, input_args=(ids if index == 0 else message,),
                         output_args=(losses if index == num_stages - 1 else message,), group=mesh["pp"].pg)
        self.message, self.log = message, mesh.log
        self.link = Communicator("pp", 2, 0, mesh["pp"].pg, Group(2, mesh["pp"].group.stride), mesh.log)
        self.microbatches: Sequence[Microbatch] = ()
        self.current: Microbatch | None = None
        # A stage of no layers hands on what it gets.
        self.is_empty = next(part.parameters(), None) is None

    # torch allocates receive buffers for every microbatch of a step and keeps them, so that memory would grow with the number of
    # microbatches instead of those in flight. Here they are on the meta device until a receive is posted, and dropped after use.

    @contextmanager
    def _on_meta(self) -> Iterator[None]:
        device, self.device = self.device, torch.device("meta")
        try:
            yield
        finally:
            self.device = device

    def _prepare_forward_infra(self, *args, **kwargs):
        with self._on_meta():
            return super()._prepare_forward_infra(*args, **kwargs)

    def _prepare_backward_infra(self, *args, **kwargs):
        with self._on_meta():
            return super()._prepare_backward_infra(*args, **kwargs)

    def _post_metadata_inference_cleanup(self) -> None:
        """torch frees what shape inference left, gradients of earlier backwards with it. None is run here."""

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        # Before 2.13 the links are tried out by messages that a V's turning rank sends to itself, which hangs on gloo.
        return []

    def _buffers(self, infos) -> None:
        for info in infos:
            info.buffer = torch.empty_like(self.message, device=self.device, requires_grad=False)

    def _drop(self, infos) -> None:
        for info in infos:
            info.buffer = self.message

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        self._buffers(self.args_recv_info[fwd_chunk_id])
        return super().get_fwd_recv_ops(fwd_chunk_id)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        self._buffers(self.grad_recv_info[bwd_chunk_id])
        return super().get_bwd_recv_ops(bwd_chunk_id)

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        ops = self._logged(super().get_fwd_send_ops(fwd_chunk_id), "forward")
        if not self.has_backward:
            del self.fwd_cache[fwd_chunk_id]
        return ops

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        # Messages must be contiguous; a gradient may be any view.
        self.bwd_cache[bwd_chunk_id] = tuple(grad.contiguous() for grad in self.bwd_cache[bwd_chunk_id])
        return self._logged(super().get_bwd_send_ops(bwd_chunk_id), "backward")

    def _logged(self, ops: list[dist.P2POp], phase: str) -> list[dist.P2POp]:
        for op in ops:
            self.log.add("send_recv", "pp_send", op.tensor.numel() * op.tensor.element_size(), self.link, phase)
        return ops

    def forward_one_chunk(self, fwd_chunk_id: int, args, kwargs=None, save_forward_output: bool = True):
        self.current = self.microbatches[fwd_chunk_id]
        if not self.is_first:
            for info in self.args_recv_info[fwd_chunk_id]:
                info.buffer.requires_grad_(self.has_backward)
        with action(self.log, self.stage_index, "F", fwd_chunk_id):
            output = super().forward_one_chunk(fwd_chunk_id, (self.current.tokens,) if self.is_first else (), {}, save_forward_output)
        if not self.is_first:
            self._drop(self.args_recv_info[fwd_chunk_id])
        self.current = None
        return output

    def forward_maybe_with_nosync(self, x: torch.Tensor) -> torch.Tensor:
        if self.is_empty:
            return x.clone()
        output = self.submod(x, self.current.where, self.current.labels if self.is_last else None)
        if not self.is_last:
            output = output.contiguous()
            assert (output.shape, output.dtype) == (self.message.shape, self.message.dtype), (output.shape, output.dtype, self.message)
        return output

    def backward_one_chunk(self, bwd_chunk_id: int, loss=None, full_backward: bool = True, last_backward: bool = False) -> None:
        with action(self.log, self.stage_index, "B" if full_backward else "I", bwd_chunk_id):
            super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)
        self._drop(self.grad_recv_info[bwd_chunk_id])

    def backward_weight_one_chunk(self, bwd_chunk_id: int, *args, **kwargs) -> None:
        # The first stage's I did nothing, for nobody waits for it: its W is a whole backward.
        with action(self.log, self.stage_index, "W", bwd_chunk_id):
            super().backward_weight_one_chunk(bwd_chunk_id, *args, **kwargs)
            self._accumulate()

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        # FSDP2 never woke up in a stage that has no parameters.
        if not self.is_empty:
            super().perform_reduce_grad(grad_scale_factor)

    def _accumulate(self) -> None:
        """Weight gradients taken alone run no hook of FSDP2, and would be summed over microbatches in the compute precision: this
        adds them up in that of the reduction, as after a whole backward."""
        for group in sharding.parameter_groups(self.submod):
            for parameter in group.fsdp_params:
                parameter.accumulate_unsharded_grad_if_needed()
                parameter.to_accumulated_grad_if_needed()


class _Runtime(_PipelineScheduleRuntime):
    """torch's runtime over lists that are given. The stages' losses are summed: they are already divided by the step's tokens."""

    def __init__(self, stages: list[_PipelineStage], orders: Sequence[Order], placement: Sequence[int], num_microbatches: int, backward: bool):
        super().__init__(stages, num_microbatches, loss_fn=torch.sum if backward else None, scale_grads=False)
        # torch guesses that stages lie in a loop.
        self.stage_index_to_group_rank = dict(enumerate(placement))
        for stage in stages:
            stage.stage_index_to_group_rank = self.stage_index_to_group_rank
        self.pipeline_order_with_comms = lowered(orders, placement, num_microbatches)
        runs = compute_actions(self.pipeline_order_with_comms[self.rank])
        if runs != list(flatten(orders[self.rank])):
            raise ValueError(f"torch {torch.__version__} would run {' '.join(map(str, runs))} on pipeline rank {self.rank}, not the schedule's order")

    def _maybe_compute_loss(self, stage: _PipelineStage, output: torch.Tensor, *args, **kwargs) -> None:
        if stage.is_last and self._has_backward:
            self._internal_losses.append(output.sum())

    def _merge_outputs(self, output_chunks: list[torch.Tensor]) -> torch.Tensor:
        return torch.stack(output_chunks).detach().double().sum(0)

    def run(self, microbatches: Sequence[Microbatch]) -> torch.Tensor | None:
        """[cross entropy, z-loss] summed over the microbatches on the rank of the last stage, None elsewhere."""
        if len(microbatches) != self._n_microbatches:
            raise ValueError(f"this pipeline runs {self._n_microbatches} microbatches a step, got {len(microbatches)}")
        for stage in self._stages:
            stage.microbatches = microbatches
        try:
            return self.step()
        except RuntimeError as error:
            # torch wraps what a stage's forward raises in a dump of its arguments.
            raise (error.__cause__ if isinstance(error.__cause__, ValueError) else error) from error.__cause__
        finally:
            for stage in self._stages:
                stage.microbatches = ()


# --- what a step calls ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Pipeline:
    """This rank's stages and the schedule they run. ``message`` is one microbatch's hidden states [mb, S/(cp*tp), d] on the meta
    device; ``evaluators`` are forward-only runtimes by (number, rows) of their microbatches, made when first needed."""

    parts: list[Stage]
    stages: list[int]
    mesh: Mesh
    message: torch.Tensor
    placement: tuple[int, ...]
    training: _Runtime
    evaluators: dict[tuple[int, int], _Runtime] = field(default_factory=dict)

    def evaluator(self, num_microbatches: int, rows: int) -> _Runtime:
        key = num_microbatches, rows
        if key not in self.evaluators:
            message = torch.empty((rows, *self.message.shape[1:]), dtype=self.message.dtype, device="meta")
            orders = forward_orders(self.placement, self.mesh["pp"].size, num_microbatches)
            stages = _stages(self.parts, self.stages, len(self.placement), self.mesh, message)
            self.evaluators[key] = _Runtime(stages, orders, self.placement, num_microbatches, backward=False)
        return self.evaluators[key]


def _stages(parts: Sequence[Stage], numbers: Sequence[int], num_stages: int, mesh: Mesh, message: torch.Tensor) -> list[_PipelineStage]:
    return [_PipelineStage(part, number, num_stages, mesh, message) for part, number in zip(parts, numbers, strict=True)]


def build(parts: list[Stage], numbers: list[int], mesh: Mesh, hidden_size: int, seq_len: int, dtype: torch.dtype,
          num_microbatches: int) -> Pipeline | None:
    """The pipeline of ``mesh.layout`` over ``parts``, the virtual stages ``numbers``; None where there is none. A collective call.
    ValueError in one line where torch can't run the schedule."""
    layout: Layout = mesh.layout
    if layout.pp == 1:
        return None
    schedule = SCHEDULES[layout.schedule]
    if schedule.splits_backward and not can_split_backward():
        raise ValueError(f"schedule {schedule.name} takes weight gradients apart, which torch {torch.__version__} can't do through custom "
                         "functions; use torch 2.13, or 1f1b or interleaved")
    placement = schedule.placement(layout.pp, layout.vpp)
    message = torch.empty(layout.mb, seq_len // (layout.cp * layout.tp), hidden_size, dtype=dtype, device="meta", requires_grad=True)
    stages = _stages(parts, numbers, len(placement), mesh, message)
    # NCCL opens a group's communicator in the first call, which all ranks must make together; messages alone would not.
    dist.all_reduce(torch.zeros(1, device=mesh.device), group=mesh["pp"].pg)
    orders = schedule.orders(layout.pp, num_microbatches, layout.vpp)
    return Pipeline(parts, numbers, mesh, message, placement, _Runtime(stages, orders, placement, num_microbatches, backward=True))


def forward_backward(job: Job, microbatches: Sequence[Microbatch]) -> torch.Tensor:
    """Gradients of the step in the parameters of this rank's stages; [cross entropy, z-loss] of its tokens on the last stage's ranks,
    zeros elsewhere."""
    losses = job.pipeline.training.run(microbatches)
    sharding.finish_gradients(job.parts, job.mesh, job.ends)
    return torch.zeros(2, dtype=torch.float64, device=job.device) if losses is None else losses


def evaluate(job: Job, microbatches: Sequence[Microbatch]) -> torch.Tensor:
    """The same losses without gradients, of any number of microbatches of equal shape."""
    losses = job.pipeline.evaluator(len(microbatches), microbatches[0].tokens.shape[0]).run(microbatches)
    return torch.zeros(2, dtype=torch.float64, device=job.device) if losses is None else losses
