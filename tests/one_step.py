"""What does one training step leave behind, under any layout, and what should it: the same step in one process, tokens cut alike?

The reference is one process without a process group. Where a figure depends on which tokens stand together (capacity, balance losses
of a rank or a sequence), the reference takes the same groups of tokens, and loops over them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor

from moesim.layout import Layout, parse_layout
from moesim.load import parse_scenario
from moetrain import build, sharding, step
from moetrain.balance import Balance, update_bias
from moetrain.data.batch import Batch
from moetrain.dispatch.local import Local, LocalPlan
from moetrain.moe import MoE
from moetrain.optim import grad_norm, stage_copies
from moetrain.place import local_positions, place
from moetrain.router import Router, Routing
from moetrain.step import Microbatch

ROWS, SEQ_LEN, VOCAB, EXPERTS, TOP_K = 8, 16, 64, 8, 2
TOKENS = ROWS * SEQ_LEN
TEXT = f"""
name: one_step
seed: 3
model: {{name: tiny, num_layers: 3, hidden_size: 32, vocab_size: {VOCAB}, num_heads: 4, num_kv_heads: 2, head_dim: 8, intermediate_size: 48,
  num_experts: {EXPERTS}, top_k: {TOP_K}, moe_intermediate_size: 24, num_shared_experts: 1, num_leading_dense_layers: 1}}
cluster: cpu_gloo
workload: {{seq_len: {SEQ_LEN}, global_batch_tokens: {TOKENS}, routing: {{kind: balanced}}}}
train: {{moe: {{aux_loss: 0.02, z_loss: 0.001}}, network: {{head_z_loss: 0.001, init_std: 0.1}}}}
"""
MLA = ("attention=mla", "num_kv_heads=4", "head_dim=12", "q_lora_rank=16", "kv_lora_rank=16", "qk_nope_head_dim=8", "qk_rope_head_dim=4", "v_head_dim=8")
GROUPS = ("router=sigmoid", "num_expert_groups=4", "top_k_groups=2", "score_correction_bias=true", "routed_scale=2.5", "router_bias=true", "expert_bias=true")
MODELS: dict[str, tuple[str, ...]] = {
    "pre": ("seed=4",),
    "post": ("seed=0", "norm_placement=post", "qk_norm=per_head", "embedding_norm=true"),
    "branch": ("seed=0", "norm_placement=post", "moe_branch_norm=true", "qkv_bias=true"),
    "mla": ("seed=5", *MLA),
    "mla_direct": ("seed=2", *MLA, "q_lora_rank=null", "qkv_bias=true"),
    "window": ("seed=5", "sliding_window=5", "full_attention_every=2", "attention_sinks=true"),
    "groups": ("seed=11", *GROUPS),
    "gate": ("seed=1", "shared_expert_gate=true", "num_shared_experts=2", "qk_norm=per_head"),
    "tied": ("seed=2", "tie_embeddings=true", "normalize_top_k=false"),
    "interval": ("seed=2", "num_leading_dense_layers=0", "moe_layer_interval=2", "num_layers=4"),
    "full_norm": ("seed=2", "qk_norm=full", "out_bias=true"),
}
"""A seed each whose routers are far from ties, and what differs from the model above."""
DOCUMENTS = ("train.data.mask_documents=true",)


@dataclass(frozen=True)
class Seen:
    """What a step left: [cross entropy, z-loss], gradient norm, gradients by logical name, loads by layer as (requested, kept, balance
    loss, z-loss), biases of the choice by layer, and the collectives of one rank."""

    loss: np.ndarray
    norm: float
    grads: dict[str, np.ndarray]
    loads: dict[int, tuple]
    biases: dict[int, np.ndarray]
    entries: list


def settings(model: str, sets: Sequence[str]) -> list[str]:
    seed, *rest = MODELS[model]
    return [seed, *(f"model.{s}" for s in rest), *sets]


def batch_of(number: int) -> Batch:
    """The whole batch of a step: ids, labels with holes, three documents of different lengths a row."""
    generator = torch.Generator().manual_seed(number + 1)
    ids = torch.randint(0, VOCAB, (ROWS, SEQ_LEN + 1), generator=generator)
    labels = ids[:, 1:].contiguous()
    labels[:, 5] = -100
    ends = torch.randint(0, SEQ_LEN, (ROWS, 2), generator=generator)
    documents = (torch.arange(SEQ_LEN) > ends[:, :1]).int() + (torch.arange(SEQ_LEN) > ends[:, 1:]).int()
    return Batch(ids[:, :-1].contiguous(), labels, documents)


def whole(tensor: torch.Tensor) -> np.ndarray:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().float().numpy().copy()


def moe_layers(job: build.Job) -> list[MoE]:
    return [m for part in job.parts for m in part.modules() if isinstance(m, MoE)]


def take_step(job: build.Job, microbatches: Sequence[Microbatch]) -> Seen:
    for _, parameter in sharding.named_parameters(job.parts):
        parameter.grad = None
    job.mesh.log.entries.clear()
    job.mesh.log.recording = True
    loss = step.reduce_loss(job, step.forward_backward(job, microbatches))
    entries, job.mesh.log.recording = list(job.mesh.log.entries), False
    loads = job.statistics.collect(job.mesh["data"])
    norm = grad_norm([sharding.once(job.parts)], job.mesh["world"].pg, stage_copies(job.layout.world // job.layout.pp))
    grads = {name: whole(p.grad) for name, p in sharding.named_parameters(job.parts)}
    for layer in moe_layers(job):
        if layer.options.bias_rate:
            update_bias(layer.router.balance_bias, loads[layer.layer].requested, layer.options.bias_rate)
    found = {i: (load.requested.numpy(), load.kept.numpy(), load.balance_loss, load.z_loss) for i, load in loads.items()}
    return Seen(loss.numpy(), float(norm), grads, found, {m.layer: m.router.balance_bias.numpy().copy() for m in moe_layers(job)}, entries)


def parallel(rank: int, world: int, cases: Sequence[tuple[str, str, tuple[str, ...]]], steps: int = 1) -> list[tuple]:
    """The last step of each case (layout, model, settings), as this rank saw it: fields of Seen."""
    seen = []
    for layout, model, sets in cases:
        scenario = parse_scenario(TEXT, settings(model, sets))
        job = build.make_job(scenario, build.layout_of(scenario, layout, world))
        rows = torch.arange(ROWS).chunk(job.layout.dp)[job.mesh["dp"].rank]
        for number in range(steps):
            full = batch_of(number)
            left = take_step(job, step.cut(Batch(full.tokens[rows], full.labels[rows], full.documents[rows]), job, number))
        seen.append((left.loss, left.norm, left.grads, left.loads, left.biases, left.entries))
    return seen


# --- the reference --------------------------------------------------------------------------------------------------------------


def together(layout: Layout, ranks: int) -> list[list[int]]:
    """Rows of the batch that ``ranks`` neighbouring data ranks process in one microbatch, rank by rank: one list for each."""
    share = ROWS // layout.dp
    return [[rank * share + first + i for rank in range(start, start + ranks) for i in range(layout.mb)]
            for first in range(0, share, layout.mb) for start in range(0, layout.dp, ranks)]


@lru_cache(maxsize=None)
def reference(model: str, sets: tuple[str, ...] = (), layout: str = f"mb{ROWS}", ranks: int = 0, keep: str = "", steps: int = 1,
              ties: bool = False) -> Seen:
    """The last of ``steps`` steps in one process. Its microbatches are those of ``ranks`` neighbouring data ranks of ``layout`` taken
    as one (0: of all); balance losses that a rank or a sequence has for itself are summed over the tokens that each rank holds;
    ``keep`` names the dumb loop that applies capacity. Fails where a router is so near a tie that rounding could turn it, unless ``ties`` are welcome."""
    scenario, cut = parse_scenario(TEXT, settings(model, sets)), parse_layout(layout)
    job = build.make_job(scenario, Layout(mb=ROWS))
    decisions = _watch_routers(job)
    for layer in moe_layers(job):
        _stand_in(layer, cut, ranks or cut.dp, keep)
    for number in range(steps):
        full = batch_of(number)
        microbatches = [_microbatch(job, full, rows, number) for rows in together(cut, ranks or cut.dp)]
        seen = take_step(job, microbatches)
    settled = ties or scenario.train.moe.routing != "learned"
    assert settled or all(far_from_ties(*each) for each in decisions), "a router is near a tie: another seed"
    return seen


def _microbatch(job: build.Job, full: Batch, rows: list[int], number: int) -> Microbatch:
    documents = full.documents[rows] if job.scenario.train.data.mask_documents else None
    where = place(documents, torch.tensor(rows) + number * ROWS, SEQ_LEN, 1, 0)
    return Microbatch(full.tokens[rows], full.labels[rows], where)


def _watch_routers(job: build.Job) -> list[tuple[Router, torch.Tensor, torch.Tensor, torch.Tensor]]:
    seen: list[tuple[Router, torch.Tensor, torch.Tensor, torch.Tensor]] = []
    for layer in moe_layers(job):
        layer.router.register_forward_hook(lambda router, _, out: seen.append((router, out.logits.detach(), out.experts, router.balance_bias.clone())))
    return seen


MARGIN = 1e-3


def far_from_ties(router: Router, logits: torch.Tensor, experts: torch.Tensor, bias: torch.Tensor) -> bool:
    """Whether the choices stand when every chosen logit falls and every other one rises, so that they come MARGIN closer."""
    spec = router.spec
    moved = (logits + MARGIN / 2).scatter_add(-1, experts, torch.full_like(logits, -MARGIN))
    chosen = router.backend.route(moved, spec.top_k, bias if router.use_bias else None, score=spec.router, num_groups=spec.num_expert_groups,
                                  top_k_groups=spec.top_k_groups)[1]
    return torch.equal(chosen.long().sort(-1).values, experts.sort(-1).values)


def _stand_in(layer: MoE, cut: Layout, ranks: int, keep: str) -> None:
    """Makes a layer of one process treat its tokens as the ranks of ``cut`` would."""
    scope = layer.options.balance.scope
    if scope != "global":
        balance = layer.options.balance
        layer.options = replace(layer.options, balance=_Pieces(balance.aux_loss, scope, balance.z_loss, _pieces(cut, ranks)))
    if keep:
        assert ranks == cut.ep and cut.cp == cut.tp == 1, cut
        layer.dispatcher = _Dumb(layer.dispatcher, ranks, KEEP[keep])


def _pieces(cut: Layout, ranks: int) -> tuple[tuple[int, torch.Tensor], ...]:
    """(sequences, token numbers) that each rank holds of a microbatch made of those of ``ranks`` data ranks."""
    found = []
    for data in range(ranks):
        rows = torch.arange(data * cut.mb, (data + 1) * cut.mb)
        for context in range(cut.cp):
            for positions in local_positions(SEQ_LEN, cut.cp, context).chunk(cut.tp):
                found.append((cut.mb, (rows[:, None] * SEQ_LEN + positions).flatten()))
    return tuple(found)


@dataclass(frozen=True)
class _Pieces(Balance):
    """Balance losses summed over pieces of the tokens, each by itself."""

    pieces: tuple[tuple[int, torch.Tensor], ...] = ()

    def share(self, routing: Routing, sequences: int, data: Any) -> list[torch.Tensor]:
        own = Balance(self.aux_loss, self.scope, self.z_loss)
        return [own.share(Routing(routing.weights[t], routing.experts[t], torch.bincount(routing.experts[t].flatten(), minlength=EXPERTS),
                                  routing.logits[t]), count, data) for count, t in self.pieces]

    def loss(self, logits, share, spec, tokens_per_step):
        own = Balance(self.aux_loss, self.scope, self.z_loss)
        each = [own.loss(logits[t], part, spec, tokens_per_step) for (_, t), part in zip(self.pieces, share, strict=True)]
        return tuple(sum(column) for column in zip(*each, strict=True))


# --- capacity by dumb loops -----------------------------------------------------------------------------------------------------


def keep_by_expert(experts: list[list[list[int]]], factor: float, ranks: int) -> set[tuple[int, int, int]]:
    """Routes (rank, token, choice) that survive when each expert takes the first ceil(factor * mean) of all ranks' routes.
    ``experts`` [ranks][T][k]."""
    limit = math.ceil(factor * len(experts) * len(experts[0]) * TOP_K / EXPERTS)
    taken, kept = [0] * EXPERTS, set()
    for rank, tokens in enumerate(experts):
        for token, choices in enumerate(tokens):
            for j, e in enumerate(choices):
                if taken[e] < limit:
                    kept.add((rank, token, j))
                    taken[e] += 1
    return kept


def _queue(experts: list[list[list[int]]]) -> list[tuple[int, int, int, int]]:
    """(expert, source rank, token, choice) of all routes in the order of a receiver's rows."""
    return sorted((e, rank, token, j) for rank, tokens in enumerate(experts) for token, choices in enumerate(tokens) for j, e in enumerate(choices))


def keep_by_rank(experts: list[list[list[int]]], factor: float, ranks: int) -> set[tuple[int, int, int]]:
    """Each receiving rank takes the first ceil(factor * T * k) of its rows, ordered by expert, then source, then token."""
    taken, kept = [0] * ranks, set()
    for e, rank, token, j in _queue(experts):
        receiver = e // (EXPERTS // ranks)
        if taken[receiver] < math.ceil(factor * len(experts[0]) * TOP_K):
            kept.add((rank, token, j))
            taken[receiver] += 1
    return kept


def keep_by_pair(experts: list[list[list[int]]], factor: float, ranks: int) -> set[tuple[int, int, int]]:
    """Each receiver takes from each source the first ceil(factor * T * k / ranks) rows, ordered by expert, then token."""
    taken, kept = [[0] * ranks for _ in range(ranks)], set()
    for e, rank, token, j in _queue(experts):
        receiver = e // (EXPERTS // ranks)
        if taken[rank][receiver] < math.ceil(factor * len(experts[0]) * TOP_K / ranks):
            kept.add((rank, token, j))
            taken[rank][receiver] += 1
    return kept


KEEP = {"expert": keep_by_expert, "rank": keep_by_rank, "pair": keep_by_pair}


class _Dumb:
    """One process's dispatcher that drops what ``keep`` says ``ranks`` ranks would, whose tokens stand one rank after another."""

    def __init__(self, inner: Local, ranks: int, keep):
        self.inner, self.ranks, self.keep = inner, ranks, keep
        self.dispatch, self.combine = inner.dispatch, inner.combine

    def plan(self, routing: Routing) -> LocalPlan:
        experts = routing.experts
        size = experts.shape[0] // self.ranks
        kept = self.keep([part.tolist() for part in experts.split(size)], self.inner.capacity.factor, self.ranks)
        rows = sorted((int(experts[rank * size + t, j]), rank * size + t, j) for rank, t, j in kept)
        positions = torch.full_like(experts, -1)
        for row, (_, token, j) in enumerate(rows):
            positions[token, j] = row
        counts = torch.bincount(torch.tensor([e for e, _, _ in rows]), minlength=EXPERTS)
        return LocalPlan(torch.tensor([token for _, token, _ in rows]), positions, counts, counts)


# --- comparison -----------------------------------------------------------------------------------------------------------------


def difference(found: np.ndarray, wanted: np.ndarray) -> float:
    """Largest difference over the largest value wanted."""
    return float(np.abs(found - wanted).max() / max(float(np.abs(wanted).max()), 1e-12))


def worst_gradient(found: Seen, wanted: Seen) -> tuple[float, str]:
    assert found.grads.keys() == wanted.grads.keys()
    return max((difference(found.grads[name], grad), name) for name, grad in wanted.grads.items())


def check(found: Seen, wanted: Seen, tolerance: float) -> None:
    """Loss, gradients, their norm, routes asked for and kept, balance losses: all as wanted."""
    assert difference(found.loss, wanted.loss) < tolerance, (found.loss, wanted.loss)
    error, name = worst_gradient(found, wanted)
    assert error < tolerance, (name, error)
    assert abs(found.norm / wanted.norm - 1) < tolerance, (found.norm, wanted.norm)
    assert found.loads.keys() == wanted.loads.keys()
    for layer, (requested, kept, balance, z) in wanted.loads.items():
        np.testing.assert_array_equal(found.loads[layer][0], requested)
        np.testing.assert_array_equal(found.loads[layer][1], kept)
        assert abs(found.loads[layer][2] - balance) <= tolerance * abs(balance) and abs(found.loads[layer][3] - z) <= tolerance * abs(z)


def skewed_record(path: Path) -> Path:
    """A record that sends most of one batch's tokens to few experts, and none to the last two."""
    generator = torch.Generator().manual_seed(11)
    shares = torch.tensor([0.5, 0.2, 0.1, 0.1, 0.05, 0.05, 0.0, 0.0])
    save_file({f"layer.{i}": torch.multinomial(shares.expand(TOKENS, -1), TOP_K, generator=generator) for i in range(8)}, str(path))
    return path
