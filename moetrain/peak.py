"""What does a rank's step hold at its worst moment, by category - of any rank of any world, without its memory, its peers or a GPU?

The rank is built as in a run, inside a process group that only pretends (`dryrun.fake_world`), and runs a real step on fake tensors, which
have shapes and storages but no bytes, under torch's own FSDPMemTracker
(https://github.com/pytorch/pytorch/blob/main/torch/distributed/_tools/fsdp2_mem_tracker.py). Routing is even, so that row counts are known
without asking anybody. ``kernels`` says whose saved tensors are counted: those of the operations that this CPU runs, or those of a GPU's
fused norm, flash attention and Triton kernels, whose autograd rules run on fake tensors as well.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd import Function
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed._tools.mem_tracker import _UpdateType

from moesim.layout import Layout, num_microbatches
from moesim.spec import Scenario
from moetrain import build, loss, pipeline, sharding, step
from moetrain.data.batch import Batch
from moetrain.dispatch.all_to_all import AllToAll
from moetrain.dryrun import fake_world
from moetrain.kernels import BACKENDS, reference

KERNELS = ("cpu", "gpu")
CATEGORIES = ("masters", "moments", "gathered", "gradients", "gather buffers", "reduction buffers", "activations")
"""FP32 shards; both moments; whole weights in the compute precision; gradients, shards and whole ones; what FSDP2's collectives read and
write; everything else: saved activations, what backward and the loss make on the way, inputs, buffers."""
MICROBATCHES = 2
"""Microbatches a pipeline rank that are followed, where a step has more: what the first leaves behind meets all that the last one adds."""
PASSES = 4
"""Steps that are followed at most: until two of them hold the same, one to find the worst moment, one to look at it."""


@dataclass(frozen=True)
class RankPeak:
    """Bytes of one rank. ``categories`` at the moment when most is held, adding up to ``total``; ``saved`` most bytes that forward left for
    backward at any time; ``resting`` what is held between the last backward and the update: masters, moments, gradients; ``tracker`` torch's
    own categories at its peak; ``backward`` whether that came in backward."""

    rank: int
    layout: str
    kernels: str
    categories: dict[str, int]
    resting: dict[str, int]
    saved: int
    tracker: dict[str, int]
    backward: bool

    @property
    def total(self) -> int:
        return sum(self.categories.values())


def measure(scenario: Scenario, layout: Layout, rank: int = 0, kernels: str = "cpu") -> RankPeak:
    """One step of ``rank`` in bf16 under even routing. ValueError in one line for what can't be followed."""
    scenario = _followed(scenario, layout, rank, kernels)
    with fake_world(rank, layout.world), ExitStack() as stack:
        stack.enter_context(_even_splits())
        stack.enter_context(_kernels(kernels))
        job = build.make_job(scenario, layout, "cpu", empty=True)
        # Process groups, meshes and FSDP2's wrapping can't be made of fake tensors: they come first.
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        for part in job.parts:
            part.to_empty(device="cpu")
            part.tie()
        optimizer = build.make_optimizer(job)
        _one_step(job, optimizer)
        look = None
        for _ in range(PASSES):
            tracker = _Tracker(job.parts, optimizer, look)
            with tracker:
                resting = _one_step(job, optimizer, tracker)
            if tracker.worst_at == look:
                break
            look = tracker.worst_at
    if tracker.found is None or sum(tracker.found.values()) != tracker.most:
        raise ValueError(f"layout '{layout}': two steps of rank {rank} did not hold the same bytes; its peak can't be told")
    return RankPeak(rank, str(layout), kernels, tracker.found, resting, tracker.saved, tracker.torchs, tracker.found_in_backward)


def _followed(scenario: Scenario, layout: Layout, rank: int, kernels: str) -> Scenario:
    if kernels not in KERNELS:
        raise ValueError(f"kernels {kernels!r}: legal are {', '.join(KERNELS)}")
    if not 0 <= rank < layout.world:
        raise ValueError(f"--rank {rank}: layout '{layout}' has ranks 0 to {layout.world - 1}")
    if layout.world == 1 and layout.zero == 0 and scenario.train.dtype == "float32":
        raise ValueError("one float32 process is not wrapped in FSDP2, and torch's tracker follows nothing else; set train.dtype=bfloat16")
    model, tokens = scenario.model, layout.mb * scenario.workload.seq_len // (layout.cp * layout.tp)
    routes = tokens * model.top_k // scenario.train.moe.chunks if model.num_experts else 0
    if model.num_experts and routes % model.num_experts:
        raise ValueError(f"layout '{layout}': {routes} routes a microbatch and chunk don't spread evenly over {model.num_experts} experts")
    moe = scenario.train.moe.model_copy(update={"routing": "balanced", "backend": "auto"})
    train = scenario.train.model_copy(update={"dtype": "bfloat16", "moe": moe, "compile": False})
    few = min(num_microbatches(layout, scenario.workload), MICROBATCHES * layout.pp)
    workload = scenario.workload.model_copy(update={"global_batch_tokens": few * layout.dp * layout.mb * scenario.workload.seq_len})
    return scenario.model_copy(update={"train": train, "workload": workload})


def _one_step(job: build.Job, optimizer: Any, tracker: _Tracker | None = None) -> dict[str, int]:
    """Forwards and backwards of one step; what is at rest then."""
    rows = job.layout.mb * job.num_microbatches
    ids = torch.zeros(rows, job.scenario.workload.seq_len, dtype=torch.int64)
    microbatches = step.cut(Batch(ids, ids.clone(), torch.zeros_like(ids, dtype=torch.int32)), job, 0)
    if tracker is not None:
        tracker.track_inputs(tuple(t for m in microbatches for t in (m.tokens, m.labels)))
    step.forward_backward(job, microbatches)
    job.statistics._sums, job.statistics._rows = {}, {}  # as collecting them leaves it
    resting = {} if tracker is None else {name: value for name, value in tracker.by_category().items() if name in ("masters", "moments", "gradients")}
    optimizer.zero_grad(set_to_none=True)
    return resting


# --- whose tensors ------------------------------------------------------------------------------------------------------------------


class _Tracker(FSDPMemTracker):
    """torch's tracker over all parts of a rank, its storages told apart by who holds them rather than by when they were made (it takes FP32
    sums of gradients for temporaries). ``look``: the number of the allocation at which to look."""

    def __init__(self, parts: list[nn.Module], optimizer: Any, look: int | None):
        super().__init__(parts[0], optimizer)
        self._mod_tracker = _Backward()  # the tracker's own hooks break where gradients of inputs and weights are taken apart
        self._root_mod = nn.ModuleList(parts)  # several stages a rank under interleaving
        self.parts, self.optimizer, self.look = parts, optimizer, look
        self.count = self.most = self.saved = 0
        self.making: str | None = None
        self.worst_at: int | None = None
        self.found: dict[str, int] | None = None
        self.found_in_backward = False
        self.torchs: dict[str, int] = {}

    def _fsdp_state_pre_forward(self, module, original):
        inner = super()._fsdp_state_pre_forward(module, self._within("gather buffers", original))

        def forward(*args, **kwargs):
            if not self._mod_tracker.is_bw:
                # Another microbatch, which torch's tracker would take for another step.
                self.memory_tracking.pop(module, None)
            return inner(*args, **kwargs)

        return forward

    def _fsdp_param_group_pre_backward(self, module, original):
        return super()._fsdp_param_group_pre_backward(module, self._within("gather buffers", original))

    def _fsdp_param_group_post_backward(self, module, original):
        return super()._fsdp_param_group_post_backward(module, self._within("reduction buffers", original))

    def _within(self, category: str, original):
        """``original``, a part of FSDP2: what is made in it and held by nobody else is a buffer of its collectives."""
        def run(*args, **kwargs):
            before, self.making = self.making, category
            try:
                return original(*args, **kwargs)
            finally:
                self.making = before

        return run

    def _update_snap(self, u_type, winfo, *args, **kwargs) -> None:
        if self.making is not None and u_type is _UpdateType.ADD:
            winfo.made_in = self.making
        super()._update_snap(u_type, winfo, *args, **kwargs)

    def _update_peak_stats(self, state) -> None:
        super()._update_peak_stats(state)
        self.count += 1
        total = sum(device["Total"] for device in self._curr_mem_snap.values())
        self.saved = max(self.saved, sum(device.get(self._ref_class.ACT, 0) for device in self._curr_mem_snap.values()))
        if total > self.most:
            self.most, self.worst_at = total, self.count
        if self.count == self.look:
            self.found, self.found_in_backward = self.by_category(), self._mod_tracker.is_bw
            self.torchs = {getattr(k, "value", k): sum(d.get(k, 0) for d in self._curr_mem_snap.values()) for d in self._curr_mem_snap.values() for k in d}

    def by_category(self) -> dict[str, int]:
        """CATEGORIES -> bytes held now."""
        owner, found = self._owners(), dict.fromkeys(CATEGORIES, 0)
        buffers = {self._ref_class.ALL_GATHER: "gather buffers", self._ref_class.REDUCE_SCATTER: "reduction buffers"}
        for storage, (info, _) in list(self._WINFO.items()):
            found[owner.get(storage._cdata) or buffers.get(info.reftype) or getattr(info, "made_in", "activations")] += info.mem_consumed
        return found

    def _owners(self) -> dict[int, str]:
        """Address of a storage -> who holds it."""
        owner: dict[int, str] = {}
        for group in (group for part in self.parts for group in sharding.parameter_groups(part)):
            partial = getattr(group, "_partial_reduce_output", None)  # of shards, not yet summed over the replicas
            if partial is not None:
                owner[partial.untyped_storage()._cdata] = "gradients"
            for held in group.fsdp_params:
                whole = getattr(held, "_unsharded_param", None)
                for name, tensors in (
                    ("masters", [held._sharded_param_data, held.sharded_param]), ("gathered", [*held.all_gather_outputs, whole]),
                    ("gradients", [getattr(whole, "grad", None), getattr(held, "unsharded_accumulated_grad", None), held.sharded_param.grad]),
                ):
                    for tensor in tensors:
                        if tensor is not None:
                            owner.setdefault(getattr(tensor, "_local_tensor", tensor).untyped_storage()._cdata, name)
        for values in self.optimizer.state.values():
            for name, tensor in values.items():
                if name != "step":  # counts lie on the host
                    owner[getattr(tensor, "_local_tensor", tensor).untyped_storage()._cdata] = "moments"
        return owner


class _Backward:
    """What the tracker asks of its module tracker: are we in backward?"""

    parents = frozenset({"Global"})
    is_bw = property(lambda self: torch._C._current_graph_task_id() != -1)

    def get_known_fqn(self, module: nn.Module) -> str:
        return ""

    def __enter__(self) -> None:
        """Nothing to set up."""

    def __exit__(self, *_: object) -> None:
        """Nor to take down."""


# --- what fake tensors can't say ----------------------------------------------------------------------------------------------------


@contextmanager
def _even_splits() -> Iterator[None]:
    """Split sizes of an exchange as even routing makes them; no rows are missing, so none are cleared; the loss's gradient is one."""
    plan = AllToAll.plan

    def planned(self, routing):
        share = routing.experts.numel() // self.ep.size
        with patch.object(FakeTensor, "tolist", lambda table: [[share] * table.shape[1]] * table.shape[0], create=True):
            return plan(self, routing)

    ask = getattr(pipeline._Runtime, "_warmup_p2p", lambda *_: None)

    def asked(*arguments):
        # Stages vote whether all know their shapes: all do.
        with patch.object(FakeTensor, "item", lambda vote: 1, create=True):
            return ask(*arguments)

    answered = patch.object(pipeline._Runtime, "_warmup_p2p", asked, create=True)
    with patch.object(AllToAll, "plan", planned), patch.object(reference, "cleared", lambda x, rows: x), answered:
        yield


@contextmanager
def _kernels(kernels: str) -> Iterator[None]:
    """The operations of ``kernels`` in place of what this machine would run, on fake tensors."""
    with ExitStack() as stack:
        swap = lambda *arguments: stack.enter_context(patch.object(*arguments))  # noqa: E731
        swap(loss._ChunkedCrossEntropy, "backward", staticmethod(_scaled_loss if kernels == "gpu" else _unscaled_loss))
        if kernels == "gpu":
            try:
                triton = BACKENDS["triton"]()
            except ImportError:
                raise ValueError("kernels gpu: counting what Triton kernels keep needs the triton package") from None
            swap(build, "backend", lambda *_: triton)
            swap(nn.functional, "rms_norm", _fused_norm)
            swap(nn.functional, "scaled_dot_product_attention", _flash)
        yield


def _unscaled_loss(ctx, grad):
    return (*ctx.saved_tensors, *[None] * 5)


def _scaled_loss(ctx, grad):
    return (*(None if t is None else t * grad[0].to(t.dtype) for t in ctx.saved_tensors), *[None] * 5)


class _FusedNorm(Function):
    """CUDA's fused RMSNorm as its autograd rule has it: input, gain and one FP32 number a row are kept
    (https://github.com/pytorch/pytorch/blob/main/tools/autograd/derivatives.yaml, _fused_rms_norm)."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight, x.new_empty((*x.shape[:-1], 1), dtype=torch.float32))
        return x.new_empty(x.shape)

    @staticmethod
    def backward(ctx, grad):
        x, weight, _ = ctx.saved_tensors
        return x.new_empty(x.shape), torch.empty_like(weight)


def _fused_norm(x, shape, weight, eps):
    return _FusedNorm.apply(x, weight)


def _flash(q, k, v, attn_mask=None, is_causal=False, enable_gqa=False, **_):
    """CUDA's flash attention (aten, so with its own autograd rule and shapes). It takes no mask: a masked core runs in torch's
    memory-efficient kernel, which keeps the same tensors beside the mask."""
    out = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, is_causal)[0]
    return out[..., :v.shape[-1]]


# --- the command --------------------------------------------------------------------------------------------------------------------

WORDS = {"optimizer": ("masters", "moments"), "gathered": ("gathered",), "gradients": ("gradients",), "moving units": ("gather buffers", "reduction buffers"),
         "activations": ("activations",)}
"""The planner's category -> those here. Under resharding it counts gathered weights among the units that come and go."""


def compared(scenario: Scenario, layout: Layout, rank: int, kernels: str) -> dict[str, Any]:
    """One rank followed, and what the planner says of it: plain data for a report or JSON."""
    from moesim.rank_memory import planned

    peak = measure(scenario, layout, rank, kernels)
    followed = {name: sum(peak.categories[c] for c in parts) for name, parts in WORDS.items()}
    # The planner reads what the trainer runs as: its own stack, bf16.
    ours = planned(scenario.model_copy(update={"stack": "moetrain"}), layout, rank // (layout.world // layout.pp), kernels)
    total = sum(ours.values())
    return {"layout": str(layout), "rank": rank, "world": layout.world, "kernels": kernels, "followed": followed, "planned": ours,
            "total": {"followed": peak.total, "planned": total, "error": total / peak.total - 1}, "activations_error": ours["activations"] / followed["activations"] - 1,
            "resting": peak.resting, "tracker": peak.tracker, "in_backward": peak.backward}


def table(found: dict[str, Any]) -> str:
    """`compared` as text."""
    lines = [f"rank {found['rank']} of {found['world']}, layout {found['layout']}, kernels {found['kernels']}: at its worst moment, in "
             f"{'backward' if found['in_backward'] else 'forward'}", f"  {'bytes of':<16} {'followed':>20} {'planned':>20}"]
    rows = [(name, found["followed"][name], found["planned"][name]) for name in WORDS] + [("together", found["total"]["followed"], found["total"]["planned"])]
    for name, own, plan in rows:
        lines.append(f"  {name:<16} {own:>20,} {round(plan):>20,}" + (f"  {plan / own - 1:+.1%}" if own else ""))
    lines.append("  at rest          " + ", ".join(f"{name} {value:,}" for name, value in found["resting"].items()))
    lines.append("  torch's tracker  " + ", ".join(f"{name} {value:,}" for name, value in found["tracker"].items() if value))
    return "\n".join(lines)


__all__ = ["CATEGORIES", "KERNELS", "RankPeak", "compared", "measure", "table"]
