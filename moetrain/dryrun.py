"""What would any rank of any run hold and send - and is every layer, expert and number of the model held exactly once? (No device, no
memory, no peers.)

A rank is built as in a run, on the meta device, in a process group that only pretends to have other ranks. One rank of each pipeline
stage is built; what the others of the stage hold follows from the placements of its parameters.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import product

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, debug
from torch.distributed.tensor.placement_types import Placement

from moesim.layout import Layout
from moesim.spec import Scenario
from moetrain import ledger
from moetrain.build import Job, layout_of, make_job
from moetrain.mesh import shapes
from moetrain.params import held, logical

SHARD_AXES = ("shard", "edp")
"""Mesh axes over which FSDP2 cuts what a rank computes with."""
WEIGHT_BYTES, MASTER_BYTES = 2, 4
GRAD_BYTES = {"fp32": 4, "bf16": 2}
MOMENT_BYTES = {"fp32": 8, "bf16": 4, "fp8": 2}
"""Both moments of AdamW."""
cached_held = lru_cache(maxsize=1 << 16)(held)


@contextmanager
def fake_world(rank: int, world: int) -> Iterator[None]:
    """A default process group in which this process is ``rank`` of ``world`` and collectives do nothing. ValueError inside another."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        raise ValueError("a dry run needs a process without a process group; start it without torchrun")
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    _forget_meshes()
    try:
        yield
    finally:
        dist.destroy_process_group()
        _forget_meshes()


def _forget_meshes() -> None:
    """DTensor remembers which mesh the result of an operation lies on. A mesh equals that of another rank, and of a group that is gone."""
    for clear in ("_clear_python_sharding_prop_cache", "_clear_fast_path_sharding_prop_cache"):
        getattr(debug, clear, lambda: None)()


@contextmanager
def built_rank(scenario: Scenario, layout: Layout, rank: int) -> Iterator[Job]:
    """The job of ``rank`` on the meta device, inside its `fake_world`."""
    with fake_world(rank, layout.world):
        yield make_job(scenario, layout, "cpu", empty=True)


@dataclass(frozen=True)
class Piece:
    """A logical parameter as one pipeline stage holds it: ``shape`` of the whole, how ``placements`` cut it over the mesh ``axes`` of
    ``sizes``. ``copy``: the second of a tied embedding."""

    name: str
    shape: tuple[int, ...]
    expert: bool
    placements: tuple[Placement, ...]
    axes: tuple[str, ...]
    sizes: tuple[int, ...]
    copy: bool = False

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def layer(self) -> int | None:
        return int(self.name.split(".")[1]) if self.name.startswith("layers.") else None

    @cached_property
    def shards(self) -> int:
        """Into how many parts it is cut."""
        return math.prod(size for size, placement in zip(self.sizes, self.placements) if not placement.is_replicate())

    def indices(self, at: dict[str, int], dim: int, without: Sequence[str] = ()) -> torch.Tensor:
        """Logical indices along ``dim`` of the rank with mesh coordinates ``at``; axes in ``without`` are taken not to cut."""
        kept = [i for i, axis in enumerate(self.axes) if axis not in without]
        return cached_held(*(tuple(t[i] for i in kept) for t in (self.placements, self.sizes)), tuple(at[self.axes[i]] for i in kept), dim, self.shape[dim])

    def count(self, at: dict[str, int], without: Sequence[str] = ()) -> int:
        """Numbers of it that the rank holds."""
        key = (without, *(at[axis] for axis in self.axes))
        if key not in self._counts:
            self._counts[key] = math.prod(len(self.indices(at, dim, without)) for dim in range(len(self.shape)))
        return self._counts[key]

    @cached_property
    def _counts(self) -> dict[tuple, int]:
        return {}


def pieces_of(job: Job) -> list[Piece]:
    """Every parameter of a rank's stages."""
    found: list[Piece] = []
    for part in job.parts:
        for inner, parameter, traits in logical(part):
            cut = isinstance(parameter, DTensor)
            mesh = parameter.device_mesh if cut else None
            name = part.logical_name(inner)
            found.append(Piece(name, tuple(parameter.shape), traits.expert, tuple(parameter.placements) if cut else (), tuple(mesh.mesh_dim_names) if cut else (),
                               tuple(mesh.shape) if cut else (), any(p.name == name for p in found)))
    return found


@dataclass(frozen=True)
class Bytes:
    """Resident bytes of one rank by category, by the table of ZeRO stages in the README: bf16 weights, gradients, FP32 masters, moments."""

    weights: int
    gradients: int
    masters: int
    moments: int

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.masters + self.moments


@dataclass(frozen=True)
class World:
    """All ranks of a layout: ``stages`` the pieces of each pipeline rank."""

    scenario: Scenario
    layout: Layout
    stages: tuple[tuple[Piece, ...], ...]

    @property
    def stage_ranks(self) -> int:
        return self.layout.world // self.layout.pp

    def pipeline_rank(self, rank: int) -> int:
        return rank // self.stage_ranks

    def place(self, rank: int) -> dict[str, int]:
        """Coordinate of ``rank`` on every axis of the meshes of dense weights and of experts."""
        return self._places[rank]

    @cached_property
    def _places(self) -> list[dict[str, int]]:
        where: list[dict[str, int]] = [{} for _ in range(self.layout.world)]
        for axes, sizes in shapes(self.layout).items():
            for at, coordinate in zip(where, product(*map(range, sizes))):
                at.update(zip(axes, coordinate))
        return where

    def held(self, rank: int) -> tuple[int, int]:
        """(numbers whose masters are this rank's, numbers it computes with once they are gathered)."""
        at, pieces = self.place(rank), self.stages[self.pipeline_rank(rank)]
        return sum(p.count(at) for p in pieces), sum(p.count(at, SHARD_AXES) for p in pieces)

    def bytes(self, rank: int) -> Bytes:
        shard, whole = self.held(rank)
        l = self.layout
        resharded = l.zero == 3 and l.reshard
        return Bytes(WEIGHT_BYTES * (shard if resharded else whole), GRAD_BYTES[l.grad] * (shard if resharded or l.zero == 2 else whole),
                     MASTER_BYTES * shard, MOMENT_BYTES[l.optimizer] * shard)

    def layers(self, rank: int) -> list[int]:
        return sorted({p.layer for p in self.stages[self.pipeline_rank(rank)]} - {None})

    def experts(self, rank: int) -> list[int]:
        """Numbers of the experts that this rank computes."""
        first = next((p for p in self.stages[self.pipeline_rank(rank)] if p.expert), None)
        return [] if first is None else first.indices(self.place(rank), 0, SHARD_AXES).tolist()


def build_world(scenario: Scenario, layout: Layout) -> World:
    """The world of a layout, from the first rank of each pipeline stage."""
    stages = []
    for first in range(0, layout.world, layout.world // layout.pp):
        with built_rank(scenario, layout, first) as job:
            stages.append(tuple(pieces_of(job)))
    return World(scenario, layout, tuple(stages))


# --- is everything there exactly once? ----------------------------------------------------------------------------------------------


def faults(world: World) -> list[str]:
    """What is missing, held twice or too much, in sentences; empty where each layer, expert and number is held exactly once (or, where
    ranks are replicas, by equally many)."""
    return [*_model(world), *(fault for pieces in world.stages for piece in pieces for fault in _cuts(world, piece)), *_sums(world)]


def _model(world: World) -> Iterator[str]:
    """Layers over stages, and all parameters against the model's own count."""
    model = world.scenario.model
    times = Counter(layer for pieces in world.stages for layer in {p.layer for p in pieces} - {None})
    yield from (f"layer {i} is held by {times[i]} stages" for i in range(model.num_layers) if times[i] != 1)
    names = Counter(p.name for pieces in world.stages for p in pieces if not p.copy)
    ends = {"embed.weight"} if model.tie_embeddings and world.layout.pp > 1 else set()
    yield from (f"{name} is held by {n} stages" for name, n in names.items() if n > (2 if name in ends else 1))
    total = total_numel(world)
    # The bias that only chooses experts is a buffer here.
    buffers = model.num_experts * model.layer_kinds().count("moe") if model.score_correction_bias else 0
    if total + buffers != model.num_params:
        yield f"the stages hold {total + buffers:,} parameters, the model has {model.num_params:,}"


def total_numel(world: World) -> int:
    """Numbers of the logical model, each name once."""
    return sum({p.name: p.numel for pieces in world.stages for p in pieces}.values())


def _cuts(world: World, piece: Piece) -> Iterator[str]:
    """Along each dimension the ranks' indices are a partition: so is their product, as no mesh axis cuts two dimensions."""
    if world.stage_ranks % piece.shards:
        yield f"{piece.name} is cut into {piece.shards} shards, which don't divide the {world.stage_ranks} ranks of its stage"
    for dim, size in enumerate(piece.shape):
        cutting = [i for i, placement in enumerate(piece.placements) if not placement.is_replicate() and placement.dim == dim]
        at = [dict(zip((piece.axes[i] for i in cutting), where)) for where in product(*(range(piece.sizes[i]) for i in cutting))]
        found = torch.cat([piece.indices(dict.fromkeys(piece.axes, 0) | where, dim) for where in at])
        if len(found) != size or not torch.equal(found.sort().values, torch.arange(size)):
            yield f"{piece.name}: its {len(at)} shards hold {len(found)} indices of the {size} along dimension {dim}, or some of them twice"


def _sums(world: World) -> Iterator[str]:
    """Numbers held by all ranks, each divided by the ranks that hold the same: the parameters of the stage."""
    for stage, pieces in enumerate(world.stages):
        ranks = [world.place(stage * world.stage_ranks + i) for i in range(world.stage_ranks)]
        for piece in pieces:
            counted, copies = sum(piece.count(at) for at in ranks), world.stage_ranks // piece.shards
            if counted != piece.numel * copies:
                yield f"{piece.name}: all ranks hold {counted:,} numbers of it, not {copies} times {piece.numel:,}"


# --- the command --------------------------------------------------------------------------------------------------------------------


def dryrun(scenario: Scenario, layout_text: str | None, rank: int = 0) -> str:
    """What ``rank`` of a layout holds and sends, and the check over all ranks, as text. The world is the layout's, or where it names no dp
    the scenario's cluster. ValueError in one line for what can't run."""
    scenario = scenario.model_copy(update={"train": scenario.train.model_copy(update={"dtype": "bfloat16"})})
    layout = layout_to_run(scenario, layout_text)
    if not 0 <= rank < layout.world:
        raise ValueError(f"--rank {rank}: layout '{layout}' has ranks 0 to {layout.world - 1}")
    world = build_world(scenario, layout)
    wrong = faults(world)
    if wrong:
        raise ValueError(f"layout '{layout}': {wrong[0]}" + (f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""))
    return "\n".join([*_rank_lines(world, rank), *_collective_lines(world, rank), *_world_lines(world)])


def layout_to_run(scenario: Scenario, text: str | None) -> Layout:
    """The layout of ``text`` or the scenario: of a world of its own where it names dp, else of the scenario's cluster. ValueError if it can't run."""
    from moesim.layout import parse_layout

    text = text or scenario.layout
    named = text is not None and any(token.startswith("dp") and token[2:].isdigit() for token in text.split())
    return layout_of(scenario, text, parse_layout(text).world if named else scenario.cluster.num_gpus)


def _rank_lines(world: World, rank: int) -> Iterator[str]:
    at, size = world.place(rank), world.bytes(rank)
    shard, whole = world.held(rank)
    experts, model = world.experts(rank), world.scenario.model
    yield f"rank {rank} of {world.layout.world}, layout {world.layout}: " + " ".join(f"{axis} {at[axis]}" for axis in ("pp", "dp", "cp", "tp", "edp", "ep"))
    yield f"  layers              {_ranges(world.layers(rank))} of {model.num_layers}" + (f", experts {_ranges(experts)} of {model.num_experts}" if experts else "")
    yield f"  parameters          {whole:,} to compute with, {shard:,} in its shard"
    for name, value in (("weights, bf16", size.weights), (f"gradients, {world.layout.grad}", size.gradients), ("masters, fp32", size.masters),
                        ("moments, " + world.layout.optimizer, size.moments), ("together", size.total)):
        yield f"  {name:<19} {value:>18,} bytes {value / 2**30:>9.2f} GiB"


def _collective_lines(world: World, rank: int) -> Iterator[str]:
    yield f"  collectives of a step (routes spread evenly)\n    {'times':>7} {'bytes':>15}  {'ranks':>5} {'apart':>5}  kind, for what"
    where = ledger.Where(world.scenario, world.layout, world.pipeline_rank(rank))
    lines = ledger.expected(where)
    for line, times in sorted(lines.items(), key=lambda item: (-item[0].bytes * item[1], item[0])):
        yield f"    {times:>7,} {line.bytes:>15,}  {line.size:>5} {line.stride:>5}  {line.kind}, {line.role}"
    if roles := ledger.cut_otherwise(where) & {line.role for line in lines}:
        yield f"    ({' and '.join(sorted(roles))} in the planner's pieces: the trainer's are a layer each, with the same bytes together)"


def _world_lines(world: World) -> Iterator[str]:
    totals = [world.bytes(rank).total for rank in range(world.layout.world)]
    model = world.scenario.model
    experts = f", {model.num_experts} experts of each MoE layer" if model.num_experts else ""
    yield (f"all {world.layout.world} ranks: {model.num_layers} layers{experts} and {total_numel(world):,} parameters, each held exactly once or by equally "
           f"many replicas; {min(totals) / 2**30:.2f} to {max(totals) / 2**30:.2f} GiB a rank")


def _ranges(numbers: Sequence[int]) -> str:
    """[0, 1, 2, 5] -> "0-2, 5"."""
    runs: list[list[int]] = []
    for n in numbers:
        if runs and n == runs[-1][1] + 1:
            runs[-1][1] = n
        else:
            runs.append([n, n])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs) or "none"


__all__ = ["Bytes", "Piece", "World", "build_world", "built_rank", "dryrun", "fake_world", "faults", "layout_to_run", "pieces_of", "total_numel"]
