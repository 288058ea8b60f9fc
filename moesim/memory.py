"""How many bytes does each pipeline rank hold at its worst moment? (A fold of the parts over the schedule.)

Static bytes follow the ZeRO table of ``assembly``; activations are the largest, over the moments of the schedule, of the sum of
what each local chunk keeps for its microbatches in flight; on top come what lives only for a while: gathered weights, recomputed
activations, dispatcher buffers, and the allocator's slack on everything that is not static.

All functions take arrays over layouts of one structure (same stages, same order): rows L, items K of the stage contents, virtual
stages V, ranks R. One layout is L = 1, so that the search and the report share every formula.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

WEIGHT_BYTES = 2.0
GRAD_BYTES = {"fp32": 4.0, "bf16": 2.0}
MASTER_BYTES = 4.0
MOMENT_BYTES = {"fp32": 8.0, "bf16": 4.0, "fp8": 2.0}
"""Both AdamW moments of one parameter (low-precision moments: https://arxiv.org/abs/2603.07685, 6 + 8/d bytes a parameter)."""
CATEGORIES = ("weights", "gradients", "optimizer", "activations", "logits", "gathered weights", "working set", "dispatcher buffers", "allocator slack")


@dataclass(frozen=True)
class Items:
    """Bytes and parameters of one item (a layer of each kind, embedding, head, MTP module) on one rank: arrays [L, K]."""

    dense: np.ndarray
    expert: np.ndarray
    saved: np.ndarray
    logits: np.ndarray
    """The part of what is kept that belongs to the head and its loss."""
    transient: np.ndarray
    """Largest amount that lives only inside one such item's backward."""
    buffer: np.ndarray


@dataclass(frozen=True)
class Policy:
    """What a layout does with weights, gradients and optimizer state: arrays [L]."""

    zero: np.ndarray
    reshard: np.ndarray
    grad_bytes: np.ndarray
    moment_bytes: np.ndarray
    dense_shards: np.ndarray
    expert_shards: np.ndarray
    prefetch: np.ndarray
    persistent_buffers: np.ndarray
    """Receive and send buffers a dispatcher keeps all the time (0: allocated as they are needed)."""
    paired: np.ndarray | float = 0.0
    """1 where a microbatch's forward runs under another's backward, layer beside layer."""
    fsdp: bool = False
    """FSDP2's units hold weights and gradients, at every ZeRO stage."""
    num_microbatches: np.ndarray | int = 1 << 30
    """Of a step: whole gradients are there at the peak only where some microbatch ended before it."""


def persistent_buffers(layout) -> float:
    """Receive and send buffers of one layer's rows that a layout's dispatcher keeps all the time."""
    return 0.0 if layout.dispatcher == "alltoall" else 2.0


@dataclass(frozen=True)
class Structure:
    """Who holds what, when: contents [V, K] counts of each item, the rank of each virtual stage, and for each rank the vectors
    of microbatches in flight, a count for each local chunk (``schedules.live_vectors``)."""

    contents: np.ndarray
    placement: tuple[int, ...]
    live: tuple[tuple[tuple[int, ...], ...], ...]

    @property
    def num_ranks(self) -> int:
        return len(self.live)

    def stages_of(self, rank: int) -> list[int]:
        return [s for s, r in enumerate(self.placement) if r == rank]

    def rank_contents(self) -> np.ndarray:
        """[R, K] counts of each item on each rank."""
        out = np.zeros((self.num_ranks, self.contents.shape[1]))
        np.add.at(out, list(self.placement), self.contents)
        return out


def peak(items: Items, policy: Policy, structure: Structure, allocator_slack: float) -> dict[str, np.ndarray]:
    """category -> bytes [L, R] at each rank's peak; the categories add up to the peak."""
    held = structure.rank_contents().T
    dense, expert = items.dense @ held, items.expert @ held
    if policy.fsdp:
        return _fsdp_peak(items, policy, structure, allocator_slack, dense, expert)
    out = _static(dense, expert, policy)
    out["activations"] = _in_flight(items.saved - items.logits, structure)
    out["logits"] = _in_flight(items.logits, structure)
    present = held.T > 0
    out["gathered weights"] = _gathered(items, policy, present)
    # A forward that runs under a backward takes the room that the backward frees, one layer late.
    out["working set"] = _largest(items.transient, present) + np.reshape(policy.paired, (-1, 1)) * _largest(items.saved - items.logits, present)
    out["dispatcher buffers"] = _largest(items.buffer, present) * policy.persistent_buffers[:, None]
    moving = sum(out[name] for name in ("activations", "logits", "gathered weights", "working set"))
    out["allocator slack"] = allocator_slack * moving
    return {name: out[name] for name in CATEGORIES}


def total(categories: dict[str, np.ndarray]) -> np.ndarray:
    """[L, R] peak bytes."""
    return sum(categories.values())


def _static(dense: np.ndarray, expert: np.ndarray, p: Policy) -> dict[str, np.ndarray]:
    column = lambda a: np.asarray(a, dtype=float)[:, None]  # noqa: E731
    parameters = dense + expert
    share = dense / column(p.dense_shards) + expert / column(p.expert_shards)
    sharded = column((p.zero == 3) & p.reshard) > 0
    thin_grads = sharded | (column(p.zero == 2) > 0)
    state = MASTER_BYTES + column(p.moment_bytes)
    return {
        "weights": WEIGHT_BYTES * np.where(sharded, share, parameters),
        "gradients": column(p.grad_bytes) * np.where(thin_grads, share, parameters),
        "optimizer": state * np.where(column(p.zero == 0) > 0, parameters, share),
    }


def _fsdp_peak(items: Items, p: Policy, structure: Structure, slack: float, dense: np.ndarray, expert: np.ndarray) -> dict[str, np.ndarray]:
    """``peak`` where FSDP2's units hold weights and gradients: FP32 shards alone are at rest, whole bf16 weights appear at their first use,
    whole gradients outlive a microbatch only where another follows. The peak is the worst of two kinds of moments, all activations being
    there at both: the loss, and a layer's backward. (https://github.com/pytorch/pytorch/blob/main/torch/distributed/fsdp/_fully_shard/)"""
    column = lambda a: np.reshape(np.asarray(a, dtype=float), (-1, 1))  # noqa: E731
    out, present = _static(dense, expert, p), structure.rank_contents() > 0
    share = dense / column(p.dense_shards) + expert / column(p.expert_shards)
    resharded = column((p.zero == 3) & p.reshard)
    thin = np.maximum(resharded, column(p.zero == 2))
    accumulates = 1.0 * (column(p.num_microbatches) > 1)
    out["weights"] = WEIGHT_BYTES * (1.0 - resharded) * (dense + expert)
    out["gradients"] = column(p.grad_bytes) * accumulates * np.where(thin > 0, share, dense + expert)
    unit = items.dense + items.expert
    is_head = items.logits > 0
    # Where gradients are reduced in every microbatch, what the last reduction read, the embedding's, stays until the next.
    left = column(p.grad_bytes) * thin * accumulates * unit[:, :1] * np.ones_like(unit)
    # Under resharding: the unit's weights and the buffer they came in, or the next unit's. In backward: its bf16 gradients, and what the
    # reduction before it read, where that is not just taken out of whole sums.
    gathered = WEIGHT_BYTES * 2.0 * resharded * unit
    backward = WEIGHT_BYTES * unit + column(p.grad_bytes) * np.maximum(thin, 1.0 - accumulates) * unit + WEIGHT_BYTES * column(p.prefetch) * resharded * unit
    moving = gathered + np.where(is_head, left, backward)
    worst = _worst(items, structure, moving, present)
    out["activations"], out["logits"] = _in_flight(items.saved - items.logits, _with_inputs(structure)), _in_flight(items.logits, structure)
    out["gradients"] = _grown(out, p, structure, thin)
    one = _largest(items.logits, present)
    out["logits"] = np.where(worst["head"] > 0, out["logits"], np.maximum(out["logits"] - one, 0.0))
    out["gathered weights"], out["working set"] = worst["moving"], worst["transient"] + column(p.paired) * _largest(items.saved - items.logits, present)
    out["dispatcher buffers"] = _largest(items.buffer, present) * p.persistent_buffers[:, None]
    out["allocator slack"] = slack * sum(out[name] for name in ("activations", "logits", "gathered weights", "working set"))
    return {name: out[name] for name in CATEGORIES}


def _grown(out: dict[str, np.ndarray], p: Policy, structure: Structure, thin: np.ndarray) -> np.ndarray:
    """Gradients [L, R] that add to the peak. Where all microbatches of a step are in flight at once, the first gradients come as the first of
    them goes."""
    flying = np.array([max(sum(vector) for vector in vectors) / max(1, len(vectors[0])) for vectors in structure.live])
    all_fly = (structure.num_ranks > 1) & (np.reshape(p.num_microbatches, (-1, 1)) <= flying) & (thin == 0)
    return np.where(all_fly, np.maximum(out["gradients"] - out["activations"] / np.maximum(flying, 1.0), 0.0), out["gradients"])


def _with_inputs(structure: Structure) -> Structure:
    """The same with what the embedding leaves, or else the stage's received input of that size, on every stage (the embedding comes first)."""
    contents = structure.contents.copy()
    contents[:, 0] = 1
    return replace(structure, contents=contents)


def _worst(items: Items, structure: Structure, moving: np.ndarray, present: np.ndarray) -> dict[str, np.ndarray]:
    """transient, moving, head [L, R] of the item whose moment needs most on each rank; logits count at the loss alone."""
    need = items.transient + moving + items.logits
    at = np.stack([np.where(row, need, -1.0).argmax(axis=1) for row in present], axis=1)
    take = lambda values: np.take_along_axis(values, at, axis=1)  # noqa: E731
    return {"transient": take(items.transient), "moving": take(moving), "head": take(items.logits)}


def _in_flight(saved: np.ndarray, structure: Structure) -> np.ndarray:
    """[L, R]: the largest, over the schedule's moments, of what the chunks' microbatches in flight keep."""
    by_stage = saved @ structure.contents.T
    out = np.zeros((saved.shape[0], structure.num_ranks))
    for rank, vectors in enumerate(structure.live):
        chunks = by_stage[:, structure.stages_of(rank)]
        out[:, rank] = (chunks @ np.array(vectors, dtype=float).T).max(axis=1)
    return out


def _largest(values: np.ndarray, present: np.ndarray) -> np.ndarray:
    """[L, R]: the largest value among the items a rank holds."""
    return np.stack([values[:, row].max(axis=1) if row.any() else np.zeros(len(values)) for row in present], axis=1)


def _gathered(items: Items, p: Policy, present: np.ndarray) -> np.ndarray:
    """Whole bf16 weights of the layers that are gathered at once, with the whole gradient of the one in backward."""
    whole = _largest(items.dense + items.expert, present)
    layers = np.asarray(p.prefetch, dtype=float) + 2.0
    each_microbatch = (p.zero == 3) & p.reshard
    weights = np.where(each_microbatch, layers, 0.0) * WEIGHT_BYTES
    gradients = np.where(each_microbatch | (p.zero == 2), p.grad_bytes, 0.0)
    return (weights + gradients)[:, None] * whole
