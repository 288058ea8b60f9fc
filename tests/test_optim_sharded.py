"""Does an optimizer over shards do what it would do to the whole parameters? (gloo ranks against one process.)"""

from __future__ import annotations

import math
import random

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

from moetrain.optim import (
    AdamW,
    Muon,
    OptimizerSpec,
    SkipGuard,
    Storage,
    build_optimizer,
    clip_,
    grad_norm,
    guarded_step,
    mesh_copies,
    stage_copies,
)
from moetrain.optim.matrices import chunk_sizes, cuts_of, on_whole
from moetrain.testing import run_ranks

SHAPES = [(7, 5), (3,), (4, 2, 3, 5), (1,), (5, 11), (6, 4, 8), (2, 9)]


def meshes(world: int) -> list[DeviceMesh]:
    flat = init_device_mesh("cpu", (world,), mesh_dim_names=("shard",))
    return [flat] if world < 4 else [flat, init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("a", "b"))]


def random_placements(shape, mesh: DeviceMesh, rng: random.Random) -> list:
    return [rng.choice([Replicate(), *map(Shard, range(len(shape)))]) for _ in range(mesh.ndim)]


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()


class Pair:
    """Parameters on random meshes and the same ones whole, with the same gradients."""

    def __init__(self, world: int, seed: int, shapes=SHAPES) -> None:
        rng, self.generator = random.Random(seed), torch.Generator().manual_seed(seed)
        self.sharded, self.plain = [], []
        choices = meshes(world)
        for i, shape in enumerate(shapes):
            value, mesh = torch.randn(shape, generator=self.generator), rng.choice(choices)
            placed = distribute_tensor(value, mesh, random_placements(shape, mesh, rng))
            self.sharded.append((f"p{i}", nn.Parameter(placed)))
            self.plain.append((f"p{i}", nn.Parameter(value.clone())))

    def set_grads(self, without: tuple[str, ...] = ()) -> None:
        for (name, p), (_, q) in zip(self.sharded, self.plain, strict=True):
            grad = torch.randn(q.shape, generator=self.generator)
            p.grad = None if name in without else distribute_tensor(grad, p.device_mesh, p.placements)
            q.grad = None if name in without else grad

    def compare(self, **tolerance) -> None:
        for (name, p), (_, q) in zip(self.sharded, self.plain, strict=True):
            torch.testing.assert_close(whole(p), q.detach(), **tolerance, msg=lambda m, n=name, p=p: f"{n} {p.placements}: {m}")


# --- AdamW and the norm -----------------------------------------------------------------------------------------------------


def adamw_over_random_shards(rank, world, seeds):
    empty = 0
    for seed in seeds:
        pair = Pair(world, seed)
        empty += sum(p.to_local().numel() == 0 for _, p in pair.sharded)
        mine = AdamW([{"params": pair.sharded}], 1e-2, eps=1e-6)
        reference = torch.optim.AdamW([p for _, p in pair.plain], lr=1e-2, betas=(0.9, 0.95), eps=1e-6, weight_decay=0.1)
        for step in range(3):
            pair.set_grads(("p4",) if step == 1 else ())
            norm = grad_norm([pair.sharded], dist.group.WORLD, stage_copies(world))
            expected = torch.nn.utils.clip_grad_norm_([p for _, p in pair.plain], 1.0)
            assert float(norm) == pytest.approx(float(expected), rel=1e-6)
            clip_([pair.sharded], norm, 1.0)
            mine.step()
            reference.step()
        pair.compare(rtol=1e-6, atol=1e-6)
        for _, p in pair.sharded:
            for name in ("exp_avg", "exp_avg_sq"):
                moment = mine.state[p][name]
                assert (moment.device_mesh, moment.placements, moment.shape) == (p.device_mesh, p.placements, p.shape)
    return empty


@pytest.mark.parametrize("world", [2, 4])
def test_adamw_over_any_shards_is_torchs_over_the_whole(world):
    """Random placements on random meshes, ragged and empty shards among them, clipped by the norm of all."""
    empty = run_ranks(adamw_over_random_shards, world, range(4))
    assert sum(empty) > 0


def norm_by_one_reduction(rank, world):
    """A 2-stage pipeline of 2 ranks a stage: each rank knows its stage only, one parameter of which is a plain tensor."""
    stage, grads = rank // 2, [torch.full((6, 4), 1.0), torch.full((3,), 2.0), torch.full((4, 2), 3.0), torch.full((5,), 4.0)]
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "shard"))["shard"]
    cut, copied = grads[2 * stage], grads[2 * stage + 1]
    weight = nn.Parameter(distribute_tensor(torch.zeros(cut.shape), mesh, [Shard(0)]))
    bias = nn.Parameter(torch.zeros(copied.shape))
    weight.grad, bias.grad = distribute_tensor(cut, mesh, [Shard(0)]), copied
    with CommDebugMode() as seen:
        norm = grad_norm([[("w", weight)], [("b", bias)]], dist.group.WORLD, stage_copies(2))
    assert seen.get_total_counts() == 1, seen.get_comm_counts()
    return float(norm)


def test_pipeline_stages_add_up_in_one_all_reduce():
    expected = math.sqrt(24 * 1 + 3 * 4 + 8 * 9 + 5 * 16)
    assert run_ranks(norm_by_one_reduction, 4) == pytest.approx([expected] * 4, rel=1e-12)


def norm_of_hsdp_and_experts(rank, world):
    """Dense weights on (replicate, shard), experts on (edp, ep), a tensor-parallel pair of which one is whole on all; 4 ranks."""
    dense, expert = (init_device_mesh("cpu", (2, 2), mesh_dim_names=names) for names in (("replicate", "shard"), ("edp", "ep")))
    tp = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "tp"))
    placed = [
        ((6, 3), dense, [Replicate(), Shard(0)]), ((4, 2, 3, 5), expert, [Shard(2), Shard(0)]), ((4, 6), tp, [Shard(0), Shard(1)]),
        ((3,), tp, [Shard(0), Replicate()]), ((4, 2), expert["ep"], [Shard(0)]), ((5,), None, None),
    ]  # fmt: skip
    generator, total, named = torch.Generator().manual_seed(0), 0.0, []
    for i, (shape, mesh, placements) in enumerate(placed):
        grad = torch.randn(shape, generator=generator)
        total += float(grad.double().square().sum())
        p = nn.Parameter(distribute_tensor(torch.zeros(shape), mesh, placements) if mesh else torch.zeros(shape))
        p.grad = distribute_tensor(grad, mesh, placements) if mesh else grad
        named.append((f"p{i}", p))
    norm = grad_norm([named], dist.group.WORLD, stage_copies(4))
    assert float(norm) == pytest.approx(math.sqrt(total), rel=1e-12)
    # The mesh alone doesn't know of replicas outside it: the experts on ep only count twice, and so does the plain tensor, four times.
    by_mesh = grad_norm([named], dist.group.WORLD, mesh_copies)
    extra = float(whole(named[4][1].grad).double().square().sum()) + 3 * float(named[5][1].grad.double().square().sum())
    assert float(by_mesh) == pytest.approx(math.sqrt(total + extra), rel=1e-12)
    assert float(grad_norm([named], lambda t: t * 4 if dist.all_reduce(t) else t, stage_copies(4))) == float(norm)


def test_every_logical_gradient_counts_once():
    run_ranks(norm_of_hsdp_and_experts, 4)


def test_shards_that_do_not_fit_the_stage_are_refused():
    def one(rank, world):
        mesh = init_device_mesh("cpu", (2,))
        p = nn.Parameter(distribute_tensor(torch.zeros(4), mesh, [Shard(0)]))
        with pytest.raises(ValueError, match="w is cut into 2 shards, which don't divide the 3 ranks of its stage"):
            stage_copies(3)("w", p)

    run_ranks(one, 2)


def partial_gradient(rank, world):
    mesh = init_device_mesh("cpu", (world,))
    p = nn.Parameter(distribute_tensor(torch.zeros(3), mesh, [Replicate()]))
    p.grad = DTensor.from_local(torch.full((3,), rank + 1.0), mesh, [Partial()])
    assert float(grad_norm([[("w", p)]], dist.group.WORLD)) == pytest.approx(math.sqrt(3) * world * (world + 1) / 2)
    q = nn.Parameter(torch.zeros(3))
    q.grad = torch.full((3,), world * (world + 1) / 2)
    for parameter in (p, q):
        AdamW([{"params": [("w", parameter)]}], 0.1).step()
    assert torch.equal(whole(p), q.detach())


def test_a_partial_sum_is_summed_before_it_counts():
    run_ranks(partial_gradient, 2)


# --- Muon -------------------------------------------------------------------------------------------------------------------


def strips_and_back(rank, world):
    """Whole matrices arrive whole, each at one rank of those that share it, and every strip goes back to where it came from."""
    for mesh in meshes(world):
        for shape in ((7, 5), (4, 2, 3, 5), (1, 6), (5, 9, 4)):
            for seed in range(6):
                value = torch.arange(math.prod(shape)).float().view(shape)
                p = distribute_tensor(value, mesh, random_placements(shape, mesh, random.Random(seed)))
                mine = p.to_local()
                strips = mine.reshape(math.prod(mine.shape[:-2]), *mine.shape[-2:])
                seen = []
                back = on_whole(strips, cuts_of(p), lambda x, seen=seen: seen.append(x) or x + 1)
                assert torch.equal(back.view(mine.shape), mine + 1), (shape, p.placements)
                flat = value.view(-1, *shape[-2:])
                assert seen[0].shape[1:] == flat.shape[1:] and all((matrix == flat).flatten(1).all(1).any() for matrix in seen[0])


@pytest.mark.parametrize("world", [2, 4])
def test_strips_become_matrices_and_return(world):
    run_ranks(strips_and_back, world)


def muon_over_random_shards(rank, world, seeds, moments):
    for seed in seeds:
        pair = Pair(world, seed, [s for s in SHAPES if len(s) > 1] + [(5, 11)])
        mine, reference = ([{"params": named, "matrices": True}] for named in (pair.sharded, pair.plain))
        mine, reference = (Muon(groups, 0.02, storage=Storage(moments)) for groups in (mine, reference))
        for step in range(3):
            pair.set_grads(("p2",) if step == 1 else ())
            mine.step()
            reference.step()
        pair.compare(rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("moments", ["fp32", "bf16"])
def test_muon_over_any_shards_is_muon_over_the_whole(world, moments):
    run_ranks(muon_over_random_shards, world, range(4), moments)


# --- under FSDP2 ------------------------------------------------------------------------------------------------------------


class Block(nn.Module):
    """A dense matrix, a norm, a bias and four experts, all of which take part in the loss."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.norm = nn.Module()
        self.norm.weight = nn.Parameter(torch.ones(8))
        self.up = nn.Linear(8, 10)
        self.experts = nn.Module()
        self.experts.gate_up = nn.Parameter(torch.empty(4, 2, 8, 10))
        self.experts.down = nn.Parameter(torch.empty(4, 8, 8))
        self.experts.forward = self._mix
        for p in self.parameters():
            p.data = torch.randn(p.shape, generator=generator) / 3

    def _mix(self, x, first: int):
        gate_up, down = (w.to_local() if isinstance(w, DTensor) else w for w in (self.experts.gate_up, self.experts.down))
        scales = torch.arange(1.0, 5.0, dtype=x.dtype)[first:first + len(down)]
        gate, up = torch.einsum("erfd,nd->renf", gate_up, x)
        return torch.einsum("edf,enf,e->nd", down, nn.functional.silu(gate) * up, scales)

    def forward(self, x, first: int = 0):
        return self.experts(self.up(x * self.norm.weight), first)


def shard(model: Block, world: int, ep: int, policy: MixedPrecisionPolicy) -> None:
    """Experts on (edp, ep), cut by expert over ep and by the second dimension over edp (rows of both if edp is all), the rest over all
    ranks. The second dimension tells gate from up in the one, and is the rows of the other."""
    mesh = init_device_mesh("cpu", (world // ep, ep), mesh_dim_names=("edp", "ep"))
    for name, p in list(model.experts.named_parameters()):
        setattr(model.experts, name, nn.Parameter(distribute_tensor(p.detach(), mesh["ep"], [Shard(0)])))
    fully_shard(model.experts, mesh=mesh["edp"], shard_placement_fn=lambda p: Shard(1 if ep > 1 else p.ndim - 2), mp_policy=policy)
    fully_shard(model, mesh=init_device_mesh("cpu", (world,), mesh_dim_names=("shard",)), mp_policy=policy)


def backward(model: Block, seed: int, ep: int = 1, rank: int = 0) -> None:
    """All ranks see one batch. Ranks of an ep group add their experts' outputs; FSDP2's mean over equal gradients is the gradient, but
    for the shared weights, where each ep rank has its experts' part only: their mean over ranks is 1/ep of it."""
    x = torch.randn(5, 8, generator=torch.Generator().manual_seed(seed))
    weights = torch.randn(5, 8, generator=torch.Generator().manual_seed(99 + seed))
    local = rank % ep * (4 // ep)
    (model(x, local).float() * weights).sum().backward()
    if ep > 1:
        for name, p in model.named_parameters():
            if "experts" not in name:
                p.grad.mul_(ep)


def fsdp_against_one_process(rank, world, ep, kind, narrow):
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32) if narrow else MixedPrecisionPolicy()
    model, reference, twin = Block(), Block(), Block()
    shard(model, world, ep, policy)
    shard(twin, world, ep, policy)
    first = (Shard(1 if ep > 1 else 2), Shard(0))
    assert [p.placements for p in model.experts.parameters()] == [first, (Shard(1), Shard(0))]
    spec = OptimizerSpec(kind, 1e-2)
    mine, other = build_optimizer(list(model.named_parameters()), spec), build_optimizer(list(reference.named_parameters()), spec)
    torchs = torch.optim.AdamW([{"params": g["params"], "weight_decay": g["weight_decay"]} for g in
                                build_optimizer(list(twin.named_parameters()), OptimizerSpec("adamw", 1e-2)).param_groups],
                               lr=1e-2, betas=(0.9, 0.95), fused=True)
    for step in range(4):
        backward(model, step, ep, rank)
        backward(twin, step, ep, rank)
        backward(reference, step)
        named, plain = list(model.named_parameters()), list(reference.named_parameters())
        norm, expected = grad_norm([named], dist.group.WORLD, stage_copies(world)), grad_norm([plain])
        assert float(norm) == pytest.approx(float(expected), rel=5e-2 if narrow else 1e-6)
        for optimizer in (mine, other, torchs):
            optimizer.step()
            optimizer.zero_grad()
    assert all(p.dtype == torch.float32 for p in model.parameters())
    for (name, p), q, t in zip(model.named_parameters(), reference.parameters(), twin.parameters(), strict=True):
        if kind == "adamw":
            assert torch.equal(p.to_local(), t.to_local()), name
        if not narrow:
            torch.testing.assert_close(whole(p), q.detach(), rtol=1e-5, atol=2e-5, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("kind", ["adamw", "muon"])
@pytest.mark.parametrize("world, ep, narrow", [(2, 2, False), (4, 2, False), (4, 2, True), (4, 1, False)])
def test_training_under_fsdp2_is_training_whole(kind, world, ep, narrow):
    """AdamW bit for bit as torch's over the same shards; both optimizers as over the unsharded model, in float32."""
    run_ranks(fsdp_against_one_process, world, ep, kind, narrow)


def over_tensor_parallel(rank, world):
    """FSDP2 over tensor parallelism: a row-cut and a column-cut matrix, the former cut twice along one dimension (a strided shard)."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "tp"))
    for rows, columns in ((8, 6), (10, 7), (6, 4)):
        generator = torch.Generator().manual_seed(rows)
        start = {name: torch.randn(rows, columns, generator=generator) for name in ("a", "b")}
        model = nn.Module()
        for name, cut in (("a", 0), ("b", 1)):
            model.register_parameter(name, nn.Parameter(distribute_tensor(start[name], mesh["tp"], [Shard(cut)])))
        fully_shard(model, mesh=mesh["fsdp"])
        plain = [(name, nn.Parameter(value.clone())) for name, value in start.items()]
        optimizers = [Muon([{"params": list(named), "matrices": True}], 0.02) for named in (model.named_parameters(), plain)]
        for _ in range(2):
            for (_, p), (_, q) in zip(model.named_parameters(), plain, strict=True):
                q.grad = torch.randn(rows, columns, generator=generator)
                p.grad = shard_like(q.grad, p, mesh)
            assert float(grad_norm([model.named_parameters()], dist.group.WORLD)) == pytest.approx(float(grad_norm([plain])), rel=1e-6)
            for optimizer in optimizers:
                optimizer.step()
        for (name, p), (_, q) in zip(model.named_parameters(), plain, strict=True):
            expected = shard_like(q.detach(), p, mesh).to_local()
            torch.testing.assert_close(p.to_local().detach(), expected, rtol=1e-5, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")
    return [str(p.placements) for _, p in model.named_parameters()]


def shard_like(value: torch.Tensor, p: DTensor, mesh: DeviceMesh) -> DTensor:
    """The shard that FSDP2 over tensor parallelism leaves: tp's piece first, then fsdp's piece of that."""
    for dim, axis in ((p.placements[1].dim, "tp"), (p.placements[0].dim, "fsdp")):
        lengths = chunk_sizes(value.shape[dim], 2)
        value = value.split(lengths, dim)[mesh.get_local_rank(axis)]
    return DTensor.from_local(value.contiguous(), p.device_mesh, p.placements, shape=p.shape, stride=p.stride())


def test_muon_and_the_norm_over_a_dimension_cut_twice():
    placements = run_ranks(over_tensor_parallel, 4)[0]
    assert "_S" in placements[0] and "_S" not in placements[1]


# --- replicas, skipping, checkpoints ----------------------------------------------------------------------------------------


def replicas_with_stochastic_rounding(rank, world):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    value = torch.randn(6, 8, generator=torch.Generator().manual_seed(0))
    ends = {}
    for kind in ("adamw", "muon"):
        p = nn.Parameter(distribute_tensor(value, mesh, [Replicate(), Shard(0)]))
        optimizer = build_optimizer([("w", p)], OptimizerSpec(kind, 1e-2, moments="bf16", rounding="stochastic"))
        for step in range(3):
            torch.manual_seed(rank)
            p.grad = distribute_tensor(torch.randn(6, 8, generator=torch.Generator().manual_seed(step)), mesh, p.placements)
            optimizer.step()
        moment = optimizer.state[p]["exp_avg" if kind == "adamw" else "momentum"]
        ends[kind] = (p.to_local().detach(), moment.to_local())
    return ends


def test_replicas_of_a_shard_round_alike():
    ranks = run_ranks(replicas_with_stochastic_rounding, 4)
    for kind in ("adamw", "muon"):
        for i in range(2):
            assert (ranks[0][kind][i] == ranks[2][kind][i]).all() and (ranks[1][kind][i] == ranks[3][kind][i]).all()


def bad_value_on_one_rank(rank, world, kind):
    model, clean = Block(), Block()
    for each in (model, clean):
        shard(each, world, 2, MixedPrecisionPolicy())
    optimizers = [build_optimizer(list(each.named_parameters()), OptimizerSpec(kind, 1e-2)) for each in (model, clean)]
    guards = [SkipGuard(), SkipGuard()]
    skipped = []
    for step in (0, 7, 1):
        for each, optimizer, guard in zip((model, clean), optimizers, guards, strict=True):
            if step == 7 and each is clean:
                continue
            backward(each, step, 2, rank)
            if step == 7 and rank == 1:
                each.experts.down.grad.to_local().view(-1)[0] = math.nan
            norm = grad_norm([each.named_parameters()], dist.group.WORLD, stage_copies(world))
            clip_([each.named_parameters()], norm, 1.0)
            skipped.append(guarded_step(optimizer, guard, step, 1.0, float(norm)).skip)
    for p, q in zip(model.parameters(), clean.parameters(), strict=True):
        assert torch.equal(p.to_local(), q.to_local())
    return skipped


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_a_bad_value_on_one_rank_is_skipped_by_all_without_a_trace(kind):
    assert run_ranks(bad_value_on_one_rank, 2, kind) == [[False, False, True, False, False]] * 2


def train_and_save(rank, world, ep, kind, moments, folder):
    model, optimizer = sharded_run(world, ep, kind, moments)
    for step in range(3):
        backward(model, step, ep, rank)
        optimizer.step()
        optimizer.zero_grad()
    weights, state = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=folder)
    return whole_state(model, optimizer)


def load_elsewhere(rank, world, ep, kind, moments, folder):
    model, optimizer = sharded_run(world, ep, kind, moments)
    weights, state = get_state_dict(model, optimizer)
    dcp.load({"model": weights, "optimizer": state}, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)
    return whole_state(model, optimizer)


def sharded_run(world, ep, kind, moments):
    model = Block()
    shard(model, world, ep, MixedPrecisionPolicy())
    return model, build_optimizer(list(model.named_parameters()), OptimizerSpec(kind, 1e-2, moments=moments))


def whole_state(model, optimizer):
    state = {f"{name}/{key}": whole(value) for name, p in model.named_parameters() for key, value in optimizer.state[p].items()}
    return {**state, **{name: whole(p) for name, p in model.named_parameters()}}


@pytest.mark.parametrize("kind, moments", [("adamw", "fp32"), ("muon", "bf16")])
def test_a_checkpoint_of_four_ranks_loads_on_two(tmp_path, kind, moments):
    """Moments are logical tensors: every number of every one of them arrives, on another mesh."""
    saved = run_ranks(train_and_save, 4, 2, kind, moments, str(tmp_path))[0]
    for world, ep in ((2, 2), (4, 4), (1, 1)):
        loaded = run_ranks(load_elsewhere, world, ep, kind, moments, str(tmp_path))[0]
        assert loaded.keys() == saved.keys()
        for name, value in saved.items():
            assert (loaded[name] == value).all(), name
    assert float(saved["up.weight/step"]) == 3
