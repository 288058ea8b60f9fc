"""What do the tests of checkpoints save? (A tiny model with every kind of shard, built by hand under several layouts.)"""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from moetrain.checkpoint import Checkpointer
from moetrain.checkpoint.boxes import model_tensors

EXPERTS, WIDTH, FFN = 4, 6, 10


class Tiny(nn.Module):
    """A layer with what the real ones have: a linear of uneven rows, stacked experts, a router's buffer, a norm."""

    def __init__(self, layer: int) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 8, bias=False)
        self.moe = nn.Module()
        self.moe.experts = nn.Module()
        self.moe.experts.gate_up = nn.Parameter(torch.empty(EXPERTS, 2, FFN, WIDTH))
        self.moe.register_buffer("balance_bias", torch.zeros(EXPERTS))
        self.norm = nn.Parameter(torch.empty(5))
        self.seen = nn.Parameter(torch.empty(7, 3))
        generator = torch.Generator().manual_seed(layer)
        for tensor in self.state_dict().values():
            tensor.copy_(torch.randn(tensor.shape, generator=generator))


def part_of(layers: list[int]) -> nn.Module:
    """A pipeline stage: some layers under their global names."""
    part = nn.Module()
    part.layers = nn.ModuleDict({str(layer): Tiny(layer) for layer in layers})
    return part


def shard(part: nn.Module, mesh, ep_mesh=None, tp: bool = False) -> nn.Module:
    """Experts on (efsdp, ep), everything else on dp, or on (dp, tp) with rows cut twice."""
    for layer in part.layers.values():
        if ep_mesh is not None:
            experts = layer.moe.experts
            experts.gate_up = nn.Parameter(distribute_tensor(experts.gate_up.data, ep_mesh["ep"], [Shard(0)]))
            fully_shard(experts, mesh=ep_mesh["efsdp"], shard_placement_fn=lambda p: Shard(3))
        if tp:
            layer.qkv.weight = nn.Parameter(distribute_tensor(layer.qkv.weight.data, mesh["tp"], [Shard(0)]))
            layer.seen = nn.Parameter(distribute_tensor(layer.seen.data, mesh["tp"], [Shard(1)]))
            layer.norm = nn.Parameter(distribute_tensor(layer.norm.data, mesh["tp"], [Replicate()]))
            if ep_mesh is None:
                layer.moe.experts.gate_up = nn.Parameter(distribute_tensor(layer.moe.experts.gate_up.data, mesh["tp"], [Shard(2)]))
        fully_shard(layer, mesh=mesh["dp"] if mesh.ndim > 1 else mesh)
    return part


def build(rank: int, world: int, layout: str) -> list[nn.Module]:
    """The parts of this rank: one | dp | hsdp | epN (N of the ranks share the experts) | tp | pp (two stages) | pp-virtual (two a rank)."""
    if layout == "one":
        return [part_of([0, 1])]
    if layout.startswith("pp"):
        stages = [[0], [1]] if layout == "pp" else [[], [0], [1], []]
        return [part_of(stage) for stage in stages[rank::world]]
    if layout == "tp":
        mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("dp", "tp"))
        return [shard(part_of([0, 1]), mesh, tp=True)]
    if layout == "hsdp":
        mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicate", "shard"))
        for layer in (part := part_of([0, 1])).layers.values():
            fully_shard(layer, mesh=mesh)
        return [part]
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("dp",))
    if layout == "dp":
        return [shard(part_of([0, 1]), mesh)]
    ep = int(layout.removeprefix("ep"))
    return [shard(part_of([0, 1]), mesh, init_device_mesh("cpu", (world // ep, ep), mesh_dim_names=("efsdp", "ep")))]


def adam(parts: list[nn.Module], lr: float = 0.1) -> torch.optim.Optimizer | None:
    parameters = [p for part in parts for p in part.parameters()]
    return torch.optim.AdamW(parameters, lr=lr, foreach=False) if parameters else None


def step(parts: list[nn.Module], optimizer) -> None:
    """One update by gradients that depend on position only, so that every layout makes the same one."""
    for p in (p for part in parts for p in part.parameters()):
        p.grad = (p.detach() * 0.3 + 0.01).clone()
    if optimizer is not None:
        optimizer.step()


def contents(parts: list[nn.Module], optimizer) -> dict[str, torch.Tensor]:
    """Every logical tensor in full, of this rank's parts."""
    found = {}
    for name, tensor in model_tensors(parts):
        found[name] = tensor
        for key, value in (optimizer.state.get(tensor, {}) if optimizer is not None else {}).items():
            found[f"{name}.{key}"] = value
    return {name: (t.full_tensor() if isinstance(t, DTensor) else t).detach().clone() for name, t in found.items()}


def save_on(rank, world, layout, folder, asynchronous=False, steps=2, **more):
    parts = build(rank, world, layout)
    optimizer = adam(parts)
    for _ in range(steps):
        step(parts, optimizer)
    checkpointer = Checkpointer(folder, asynchronous=asynchronous)
    checkpointer.save(steps, parts, optimizer, {"step": steps, "layout": layout, **more})
    if asynchronous:
        step(parts, optimizer)  # training goes on; the saved state must not
    checkpointer.wait()
    return contents(parts, optimizer) if not asynchronous else None


def load_on(rank, world, layout, folder, **more):
    parts = build(rank, world, layout)
    with torch.no_grad():
        for tensor in (t for _, t in model_tensors(parts)):
            tensor.fill_(7)
    optimizer = adam(parts)
    restored = Checkpointer(folder).load("auto", parts, optimizer, **more)
    before = contents(parts, optimizer)
    step(parts, optimizer)
    return restored.extra, before, contents(parts, optimizer), restored.notes


def reference(steps: int):
    parts = [part_of([0, 1])]
    optimizer = adam(parts)
    for _ in range(steps):
        step(parts, optimizer)
    return contents(parts, optimizer)


def merged(results) -> dict:
    return {name: value for result in results for name, value in result.items()}


def same(found: dict, wanted: dict) -> None:
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        torch.testing.assert_close(torch.as_tensor(found[name]), value, rtol=0, atol=0, msg=name)


def fresh():
    parts = [part_of([0])]
    return parts, adam(parts)
