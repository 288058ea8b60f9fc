"""Does each recomputed role free what the planner says it frees, do its work again once, and change no number?"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch
from one_step import Seen, check, parallel
from one_step import reference as step_of_one
from torch.autograd import Function
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from moesim import transformer
from moesim.block import recomputed
from moesim.layout import RECOMPUTE_ROLES
from moesim.spec import ModelSpec
from moesim.transformer import Work
from moetrain import layers, recompute
from moetrain import mesh as meshes
from moetrain.kernels import Backend, backend, reference
from moetrain.model import ModelOptions, Stage
from moetrain.moe import MoEOptions
from moetrain.params import materialise
from moetrain.place import Place, place
from moetrain.recompute import Recompute
from moetrain.statistics import RoutingStatistics
from moetrain.testing import run_ranks

ROWS, SEQ_LEN, VOCAB = 4, 32, 64
BASE = dict(name="t", num_layers=2, hidden_size=32, vocab_size=VOCAB, num_heads=4, num_kv_heads=2, head_dim=8, intermediate_size=48, num_experts=8,
            top_k=2, moe_intermediate_size=24, num_shared_experts=1, num_leading_dense_layers=1)
MLA = dict(attention="mla", num_kv_heads=4, head_dim=12, q_lora_rank=16, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=12)
MODELS = {name: ModelSpec(**(BASE | more)) for name, more in {
    "per_head": {"qk_norm": "per_head"}, "full_norm": {"qk_norm": "full"}, "no_norm": {}, "mla": MLA,
    "post": {"norm_placement": "post", "embedding_norm": True}}.items()}
PRE = ["per_head", "full_norm", "no_norm", "mla"]
EVERY = (*((role,) for role in RECOMPUTE_ROLES), ("full",), RECOMPUTE_ROLES)


def ident(roles: tuple[str, ...]) -> str:
    return "all" if len(roles) > 1 else roles[0]


# --- a model whose pointwise kernels keep their inputs, as fused ones on a GPU do ----------------------------------------------


class Fused(Function):
    """One kernel: keeps its inputs alone. What the CPU runs instead is many, each with its own leftovers."""

    @staticmethod
    def forward(ctx, fn, *inputs):
        ctx.fn = fn
        ctx.save_for_backward(*inputs)
        return fn(*inputs)

    @staticmethod
    def backward(ctx, grad):
        inputs = [x.detach().requires_grad_() for x in ctx.saved_tensors]
        with torch.enable_grad():
            return None, *torch.autograd.grad(ctx.fn(*inputs), inputs, grad)


def fused_backend() -> Backend:
    return replace(
        backend("grouped_mm"), swiglu=lambda x: Fused.apply(reference.swiglu, x),
        permute=lambda x, source, positions=None: Fused.apply(lambda x: reference.permute(x, source), x),
        unpermute=lambda rows, positions, weights: Fused.apply(lambda r, w: reference.unpermute(r, positions, w), rows, weights))  # fmt: skip


def make(spec: ModelSpec, roles: tuple[str, ...] = (), kernels: Backend | None = None) -> tuple[Stage, Recompute]:
    rc, tokens = Recompute(roles), ROWS * SEQ_LEN
    moe = MoEOptions(kernels or backend("grouped_mm"), tokens_per_step=tokens)
    stage = Stage(spec, meshes.single(), ModelOptions(tokens_per_step=tokens), moe, rc, RoutingStatistics(spec.num_experts))
    materialise(stage, torch.device("cpu"), seed=0)
    return stage, rc


def inputs(seed: int = 0) -> tuple[torch.Tensor, Place]:
    ids = torch.randint(0, VOCAB, (ROWS, SEQ_LEN), generator=torch.Generator().manual_seed(seed))
    return ids, place(None, torch.arange(ROWS), SEQ_LEN, 1, 0)


# --- bytes -------------------------------------------------------------------------------------------------------------------


class Live(TorchDispatchMode):
    """Remembers every storage that an operator made; ``bytes`` of those that still exist."""

    def __init__(self) -> None:
        super().__init__()
        self.made: dict[int, tuple[StorageWeakRef, int]] = {}

    def know(self, tensors) -> None:
        """Storages that were there before and don't count."""
        self.made |= {t.untyped_storage()._cdata: (StorageWeakRef(t.untyped_storage()), 0) for t in tensors if t is not None}

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        out = operator(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                self.made.setdefault(storage._cdata, (StorageWeakRef(storage), storage.nbytes()))
        return out

    @property
    def bytes(self) -> int:
        return sum(size for made, size in self.made.values() if not made.expired())


def kept_bytes(spec: ModelSpec, roles: tuple[str, ...], monkeypatch) -> int:
    """What a forward leaves for backward."""
    plain = torch.nn.functional.rms_norm
    with monkeypatch.context() as patched:
        patched.setattr(layers.F, "rms_norm", lambda x, size, weight, eps: Fused.apply(lambda x, w: plain(x, size, w, eps), x, weight))
        stage, _ = make(spec, roles, fused_backend())
        ids, where = inputs()
        stage(ids, where, ids)
        live = Live()
        live.know([ids, *stage.parameters(), *stage.buffers(), *where._masks.values(), *(t for pair in where._ropes.values() for t in pair)])
        with live:
            losses = stage(ids, where, ids)
        found = live.bytes
        losses.sum().backward()
    return found


def planned_bytes(spec: ModelSpec, roles: tuple[str, ...]) -> float:
    """The same by the planner's nodes, whose bf16 values are float32 here; this trainer keeps the experts' output, for the gradient of
    the weights it is multiplied by. Of a whole layer, its input stays."""
    work, total = Work(ROWS, SEQ_LEN, saves_expert_output=True), 0.0
    for kind in spec.layer_kinds():
        blocks = transformer.attention(spec, work, None), (transformer.moe if kind == "moe" else transformer.dense)(spec, work)
        total += sum(_in_float32(n, spec, work) for block in blocks for n in block if recomputed(n, frozenset(roles)))
        total -= 4 * work.tokens * spec.hidden_size if roles == ("full",) else 0
    return total


def _in_float32(node, spec: ModelSpec, work: Work) -> float:
    already = {"core_attn": 4 * spec.num_heads * work.tokens, "router": node.saved}.get(node.key, 0.0)
    return 2 * (node.saved - already) + already


INDICES = 8192
"""Bytes that a router of one process keeps beside its scores: choices in int64, weights."""


@pytest.mark.parametrize("name", PRE)
def test_each_role_frees_what_the_planner_says(name, monkeypatch):
    spec = MODELS[name]
    everything = kept_bytes(spec, (), monkeypatch)
    for roles in EVERY:
        freed, planned = everything - kept_bytes(spec, roles, monkeypatch), planned_bytes(spec, roles)
        room = INDICES if {"router", "full"} & set(roles) else 0
        # Latents stand in one tensor with the rotary part of the keys.
        room += 4 * ROWS * SEQ_LEN * spec.num_layers * (spec.qk_rope_head_dim or 0) if "qkv" in roles else 0
        # A whole layer holds small things that the planner leaves out: orders of rows, sums of squares.
        room += planned // 40 if roles == ("full",) else 0
        assert planned <= freed <= planned + room, (roles, freed, planned)


@pytest.mark.parametrize("roles", [(), RECOMPUTE_ROLES, ("full",)], ids=["none", "all", "full"])
def test_nothing_is_left_after_backward(roles):
    stage, _ = make(MODELS["per_head"], roles)
    ids, where = inputs()
    stage(ids, where, ids).sum().backward()
    live = Live()
    live.know([ids, *stage.parameters(), *stage.buffers(), *(p.grad for p in stage.parameters()), *(t for pair in where._ropes.values() for t in pair)])
    with live:
        stage(ids, where, ids).sum().backward()
    # The counts of a step that hasn't been collected.
    assert live.bytes < 1024


# --- numbers -----------------------------------------------------------------------------------------------------------------


def gradients(spec: ModelSpec, roles: tuple[str, ...]) -> dict[str, torch.Tensor]:
    """Of two microbatches, forward both before the first backward, as in a pipeline."""
    stage, _ = make(spec, roles)
    losses = [stage(ids, where, ids).sum() for ids, where in (inputs(0), inputs(1))]
    for loss in losses:
        loss.backward()
    return {name: p.grad for name, p in stage.named_parameters()}


@pytest.mark.parametrize("name", MODELS)
def test_no_bit_of_any_gradient_changes(name):
    plain = gradients(MODELS[name], ())
    for roles in EVERY:
        for parameter, grad in gradients(MODELS[name], roles).items():
            assert torch.equal(grad, plain[parameter]), (roles, parameter)


@pytest.mark.parametrize("roles", [RECOMPUTE_ROLES, ("full",)], ids=ident)
def test_input_and_weight_gradients_may_be_taken_apart(roles):
    """As zero-bubble schedules do: what was made again for the first serves the second."""
    stage, _ = make(MODELS["per_head"], roles)
    ids, where = inputs()
    hidden = stage.embedding(ids).detach().requires_grad_()
    stage.embedding = None
    wanted = torch.autograd.grad(stage(hidden, where, ids).sum(), [hidden, *stage.parameters()])
    loss = stage(hidden, where, ids).sum()
    found = torch.autograd.grad(loss, [hidden], retain_graph=True) + torch.autograd.grad(loss, list(stage.parameters()))
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


@pytest.mark.parametrize("roles", [RECOMPUTE_ROLES, ("full",), ("norm",)], ids=ident)
def test_work_is_done_again_once_however_many_read_it(roles, monkeypatch):
    """A norm's output is read by the router, the shared experts and the rows sent; its work runs again once."""
    made, again = [], []
    create, replay = recompute._Region.__init__, recompute._Region.replay
    monkeypatch.setattr(recompute._Region, "__init__", lambda self, *a: (made.append(a[1]), create(self, *a))[1])
    monkeypatch.setattr(recompute._Region, "replay", lambda self: (again.append(self.role), replay(self))[1])
    stage, rc = make(MODELS["per_head"], roles)
    ids, where = inputs()
    losses = stage(ids, where, ids)
    assert not again and not rc._discarded
    losses.sum().backward()
    assert made and Counter(again) == Counter(made)
    assert not rc.replaying


def test_an_evaluation_remembers_nothing():
    stage, rc = make(MODELS["per_head"], RECOMPUTE_ROLES)
    ids, where = inputs()
    with torch.no_grad():
        stage(ids, where, ids)
    assert not rc._discarded


def test_work_that_is_not_the_same_again_is_refused():
    rc, weight, calls = Recompute(("mlp",)), torch.ones(3, requires_grad=True), []

    def changing(x: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return (x * weight).exp() if len(calls) == 1 else x * weight

    with rc.watch():
        out = rc("mlp", changing, torch.ones(3, requires_grad=True)).square().sum()
    with pytest.raises(RuntimeError, match="rc:mlp saved"):
        out.backward()


# --- with collectives --------------------------------------------------------------------------------------------------------


def roles_issued(layout: str, world: int) -> list[Counter]:
    """(role, phase) of every collective of a step, by rank."""
    return [Counter((e.role, e.phase) for e in rank[0][-1]) for rank in run_ranks(parallel, world, [(layout, "post", ())])]


def test_a_layer_that_runs_again_sends_again_in_backward_and_gathers_no_weight_more():
    plain, full = (roles_issued(f"dp2 ep2 zero3 mb2{rc}", 2)[0] for rc in ("", " rc:full"))
    sent = plain["dispatch", "forward"]
    assert sent and full == plain + Counter({("dispatch", "backward"): sent, ("combine", "backward"): sent, ("count_exchange", "backward"): sent,
                                             ("balance_counts", "backward"): sent})
    roles = roles_issued("dp2 ep2 zero3 mb2 rc:" + "+".join(RECOMPUTE_ROLES), 2)[0]
    assert roles == plain


def fused_parallel(rank: int, world: int, cases) -> list:
    """As ``parallel``, where combine keeps the experts' output for its weights' gradient, as the GPU's kernel does."""
    plain = reference.unpermute
    reference.unpermute = lambda rows, positions, weights: Fused.apply(lambda r, w: plain(r, positions, w), rows, weights)
    return parallel(rank, world, cases)


@pytest.mark.parametrize("model, layout", [("pre", "dp2 zero3 mb2 rc:experts"), ("post", "dp2 zero3 mb2 rc:norm")])
def test_an_output_wanted_before_its_module_s_weights_are_back_gathers_them(model, layout):
    """Combine's backward comes before that of the experts, the first layer's before that of the embedding's norm."""
    plain = roles_issued("dp2 zero3 mb2", 2)[0]
    for (left,) in run_ranks(fused_parallel, 2, [(layout, model, ())]):
        check(Seen(*left), step_of_one(model, (), layout), 1e-5)
        assert Counter((e.role, e.phase) for e in left[-1]) == plain


def test_tokens_gathered_over_tp_are_gathered_again_in_backward():
    """As the planner has it: the weight gradient's gather."""
    issued = roles_issued("tp2 mb8", 2)[0]
    for role in ("tp_gather_qkv", "tp_gather_mlp_up", "tp_gather_shared_up"):
        assert issued[role, "backward"] == 2 * issued[role, "forward"] > 0  # a gather, and the scatter of the input's gradient


