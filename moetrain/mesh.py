"""Which ranks does this rank share each axis with? (Layout -> DeviceMeshes and one Communicator an axis.)

Three meshes over the same ranks, pipeline slowest and tensor fastest, exactly as moesim.layout numbers them: tokens lie on
(pp, dp, cp, tp), dense weights on (pp, replicate, shard, tp) with replicate*shard = dp*cp, experts on (pp, edp, ep, etp). Under
ZeRO-0 nothing is sharded: both have shards of one rank and all the rest as replicas.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from moesim.layout import Layout
from moesim.ops import Group
from moetrain.collectives import CollectiveLog, Communicator

TOKEN_AXES, DENSE_AXES, EXPERT_AXES = ("pp", "dp", "cp", "tp"), ("pp", "replicate", "shard", "tp"), ("pp", "edp_replicate", "edp", "ep", "etp")


@dataclass(frozen=True)
class Mesh:
    """This rank's place in a layout. ``dense`` and ``expert`` are None in a run of one process without a process group."""

    layout: Layout
    device: torch.device
    log: CollectiveLog
    rank: int = 0
    dense: DeviceMesh | None = None
    expert: DeviceMesh | None = None
    comms: dict[str, Communicator] = field(default_factory=dict)

    def __getitem__(self, axis: str) -> Communicator:
        """pp dp cp tp shard replicate edp edp_replicate ep etp | data (all ranks of a stage) | world."""
        return self.comms[axis]


def single(device: torch.device | str = "cpu", layout: Layout | None = None) -> Mesh:
    """One process, no process group: every axis has size 1."""
    log = CollectiveLog()
    axes = {*TOKEN_AXES, *DENSE_AXES, *EXPERT_AXES, "data", "world"}
    return Mesh(layout or Layout(), torch.device(device), log, comms={a: Communicator(a, log=log) for a in axes})


def shapes(layout: Layout) -> dict[tuple[str, ...], tuple[int, ...]]:
    """Axes of each of the three meshes -> their sizes."""
    dense_ranks = layout.dp * layout.cp
    replicas, copies = (dense_ranks, layout.edp) if layout.zero == 0 else (layout.rep, 1)
    return {
        TOKEN_AXES: (layout.pp, layout.dp, layout.cp, layout.tp),
        DENSE_AXES: (layout.pp, replicas, dense_ranks // replicas, layout.tp),
        EXPERT_AXES: (layout.pp, copies, layout.edp // copies, layout.ep, layout.etp),
    }


def build(layout: Layout, device: torch.device | str = "cpu") -> Mesh:
    """The meshes of ``layout`` over the default process group. ValueError when its size is not the layout's world."""
    device = torch.device(device)
    world = dist.get_world_size()
    if world != layout.world:
        raise ValueError(f"layout '{layout}' needs {layout.world} ranks, this run has {world}: start it with that many, or change dp")
    log, rank = CollectiveLog(), dist.get_rank()
    meshes = {axes: DeviceMesh(device.type, torch.arange(world).view(shape), mesh_dim_names=axes) for axes, shape in shapes(layout).items()}
    comms = {}
    for axes, mesh in meshes.items():
        for axis in axes:
            comms.setdefault(axis, _communicator(axis, mesh, log))
    comms["world"] = Communicator("world", world, rank, dist.group.WORLD, Group(world), log)
    comms["data"] = _data(layout, rank, log)
    return Mesh(layout, device, log, rank, meshes[DENSE_AXES], meshes[EXPERT_AXES], comms)


def _communicator(axis: str, mesh: DeviceMesh, log: CollectiveLog) -> Communicator:
    dim = mesh.mesh_dim_names.index(axis)
    stride = mesh.mesh.stride()[dim]
    size = mesh.size(dim)
    return Communicator(axis, size, mesh.get_local_rank(axis), mesh.get_group(axis), Group(size, stride if size > 1 else 1), log)


def _data(layout: Layout, rank: int, log: CollectiveLog) -> Communicator:
    """All ranks of one pipeline stage: those that together see the whole batch."""
    size = layout.world // layout.pp
    groups = [list(range(start, start + size)) for start in range(0, layout.world, size)]
    pg = dist.group.WORLD if layout.pp == 1 else dist.new_subgroups_by_enumeration(groups)[0]
    return Communicator("data", size, rank % size, pg, Group(size), log)
