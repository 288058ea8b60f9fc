"""How do a scenario and a layout become model parts, an optimizer and their place among the ranks?

Everything is made on the meta device, cut, and only then given memory, so no rank ever holds more than its share.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from moesim.layout import Layout, illegal, num_microbatches, parse_layout, parse_token, stage_layers
from moesim.schedules import SCHEDULES
from moesim.spec import Scenario
from moetrain import mesh as meshes
from moetrain import pipeline, sharding, supports
from moetrain.balance import Balance
from moetrain.collectives import Communicator
from moetrain.dispatch.plan import Capacity
from moetrain.forced import Record
from moetrain.kernels import backend
from moetrain.layers import GatedMLP, RMSNorm
from moetrain.mesh import Mesh
from moetrain.model import ModelOptions, Stage
from moetrain.moe import MoEOptions
from moetrain.optim import OptimizerSpec, build_optimizer
from moetrain.params import materialise
from moetrain.recompute import Recompute
from moetrain.statistics import RoutingStatistics


@dataclass(frozen=True)
class Job:
    """One rank's half of a run: what it trains and with what. ``parts`` in the order of their stages."""

    scenario: Scenario
    layout: Layout
    mesh: Mesh
    dtype: torch.dtype
    parts: list[Stage]
    stages: list[int]
    statistics: RoutingStatistics
    num_microbatches: int
    ends: Communicator | None
    recompute: Recompute
    pipeline: pipeline.Pipeline | None = None

    @property
    def device(self) -> torch.device:
        return self.mesh.device


def layout_of(scenario: Scenario, text: str | None, world: int) -> Layout:
    """The layout to run: ``text``, or the scenario's; dp is what is left of the world where it isn't named. ValueError if it can't run."""
    text = text or scenario.layout or "mb1"
    degrees = {key: value for token in text.split() for key, value in parse_token(token).items() if key in ("pp", "dp", "cp", "tp")}
    if "dp" not in degrees:
        left = math.prod(degrees.values())
        if world % left:
            raise ValueError(f"layout '{text}' needs a multiple of pp*cp*tp = {left} ranks, this run has {world}")
        text = f"{text} dp{world // left}"
    layout = parse_layout(text)
    if layout.world != world:
        raise ValueError(f"layout '{layout}' needs {layout.world} ranks, this run has {world}: start it with `torchrun "
                         f"--nproc-per-node {layout.world} -m moetrain train ...`, or pass another --layout")
    reason = illegal(layout, scenario.model, scenario.workload, world)
    if reason:
        raise ValueError(f"layout '{layout}': {reason}")
    supports.check(scenario, layout)
    if scenario.train.compile and layout.tp > 1:
        raise ValueError("train.compile: not with tp above 1, whose shards are wrapped anew in every forward")
    return layout


def compute_dtype(scenario: Scenario, device: torch.device) -> torch.dtype:
    """What ``train.dtype`` means on this device."""
    name = scenario.train.dtype
    return {"float32": torch.float32, "bfloat16": torch.bfloat16, "auto": torch.bfloat16 if device.type == "cuda" else torch.float32}[name]


def model_options(scenario: Scenario) -> ModelOptions:
    n = scenario.train.network
    return ModelOptions(n.rope_theta, n.norm_eps, n.init_std, n.embed_scale, n.head_z_loss, n.loss_chunk, scenario.workload.global_batch_tokens)


def moe_options(scenario: Scenario, layout: Layout, device: torch.device, dtype: torch.dtype) -> MoEOptions:
    m, routing = scenario.train.moe, scenario.workload.routing
    record = Record.read(m.replay) if m.replay else None
    return MoEOptions(
        backend(m.backend, device, dtype), Balance(m.aux_loss, m.aux_scope, m.z_loss), Capacity(routing.capacity_factor, routing.capacity_scope),
        m.routing, record, m.bias_rate, m.chunks, layout.overlaps("shared"), scenario.workload.global_batch_tokens)


def local_stages(layout: Layout, rank: int) -> list[int]:
    """Virtual stages of pipeline rank ``rank``, in model order."""
    if layout.pp == 1:
        return [0]
    placement = SCHEDULES[layout.schedule].placement(layout.pp, layout.vpp)
    return [stage for stage, holder in enumerate(placement) if holder == rank]


def make_parts(scenario: Scenario, mesh: Mesh, dtype: torch.dtype, statistics: RoutingStatistics, recompute: Recompute) -> list[Stage]:
    """This rank's stages, cut, on the meta device."""
    layout, model = mesh.layout, scenario.model
    counts = stage_layers(layout, model.num_layers)
    moe = moe_options(scenario, layout, mesh.device, dtype)
    parts = []
    for stage in local_stages(layout, mesh["pp"].rank):
        start = sum(counts[:stage])
        ends = (stage == 0, stage == len(counts) - 1)
        part = Stage(model, mesh, model_options(scenario), moe, recompute, statistics, range(start, start + counts[stage]), ends)
        sharding.shard(part, mesh, dtype)
        parts.append(part)
    return parts


def make_job(scenario: Scenario, layout: Layout, device: torch.device | str = "cpu", mesh: Mesh | None = None, empty: bool = False) -> Job:
    """A rank's job. Needs the default process group unless the world is one float32 process. ``empty``: leave it on the meta device."""
    device = torch.device(device)
    dtype = compute_dtype(scenario, device)
    if mesh is None:
        alone = layout.world == 1 and dtype == torch.float32 and layout.grad == "fp32"
        mesh = meshes.single(device, layout) if alone else meshes.build(layout, device)
    statistics, recompute = RoutingStatistics(max(1, scenario.model.num_experts)), Recompute(layout.recompute, mesh.log, layout.tp)
    parts = make_parts(scenario, mesh, dtype, statistics, recompute)
    seed = scenario.seed if scenario.train.seed is None else scenario.train.seed
    for part in [] if empty else parts:
        materialise(part, device, seed)
    if scenario.train.compile and not empty:
        compile_pieces(parts)
    ends = sharding.ends_communicator(mesh, scenario.model)
    stages, number = local_stages(layout, mesh["pp"].rank), num_microbatches(layout, scenario.workload)
    pipes = pipeline.build(parts, stages, mesh, scenario.model.hidden_size, scenario.workload.seq_len, dtype, number)
    return Job(scenario, layout, mesh, dtype, parts, stages, statistics, number, ends, recompute, pipes)


def compile_pieces(parts: list[Stage]) -> None:
    """torch.compile of what fuses well and has fixed shapes: norms and gated FFNs. Routed rows change in number and stay eager."""
    for part in parts:
        for module in part.modules():
            if isinstance(module, (RMSNorm, GatedMLP)):
                module.compile(dynamic=False)


def make_optimizer(job: Job):
    """The optimizer over all parts; a second copy of a tied embedding on one rank follows the first."""
    o = job.scenario.train.optimizer
    spec = OptimizerSpec(kind=o.kind, lr=o.lr, betas=(o.beta1, o.beta2), eps=o.eps, weight_decay=o.weight_decay, decay_embedding=o.decay_embeddings,
                         moments=job.layout.optimizer, momentum=o.momentum)
    named = dict(sharding.named_parameters(job.parts))
    for part in job.parts[:1]:
        named |= dict(sharding.named_parameters([part]))  # of two copies of a tied embedding, the first stage's
    optimizer = build_optimizer(list(named.items()), spec)
    copies = sharding.tied_copies(job.parts)
    if len(copies) == 2:
        optimizer.register_step_post_hook(lambda *_: sharding.follow(*copies))
    return optimizer
