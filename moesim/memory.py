"""How many bytes does each pipeline rank hold at its worst moment? (A fold of the parts over the schedule.)

Static bytes follow the ZeRO table of ``assembly``; activations are the largest, over the moments of the schedule, of the sum of
what each local chunk keeps for its microbatches in flight; on top come what lives only for a while: gathered weights, recomputed
activations, dispatcher buffers, and the allocator's slack on everything that is not static.

All functions take arrays over layouts of one structure (same stages, same order): rows L, items K of the stage contents, virtual
stages V, ranks R. One layout is L = 1, so that the search and the report share every formula.
"""

from __future__ import annotations

from dataclasses import dataclass

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
