"""How is one logical tensor cut into the tensors of a file, and put together again?

Each transform is a pair of inverse functions: `split(tensor, spec)` gives the file's tensors in the order of the row's names,
`merge(tensors, spec)` the logical one. Both only move elements, so the round trip is exact, and both work on meta tensors, so the
file's shapes follow from the logical ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from moesim.spec import ModelSpec


class Transform(NamedTuple):
    split: Callable[[Tensor, ModelSpec], list[Tensor]]
    merge: Callable[[Sequence[Tensor], ModelSpec], Tensor]


def _split_qkv(t: Tensor, spec: ModelSpec) -> list[Tensor]:
    """Rows grouped by key-value head (its queries, its key, its value) -> all queries, all keys, all values."""
    share = spec.num_heads // spec.num_kv_heads
    grouped = t.unflatten(0, (spec.num_kv_heads, share + 2, spec.head_dim))
    return [grouped[:, :share].flatten(0, 2), grouped[:, share].flatten(0, 1), grouped[:, share + 1].flatten(0, 1)]


def _merge_qkv(parts: Sequence[Tensor], spec: ModelSpec) -> Tensor:
    groups = spec.num_kv_heads
    return torch.cat([p.unflatten(0, (groups, -1, spec.head_dim)) for p in parts], 1).flatten(0, 2)


def _split_pairs(t: Tensor, spec: ModelSpec) -> list[Tensor]:
    """(E, 2, f, d) -> gate and up of expert 0, of expert 1, ..."""
    return list(t.flatten(0, 1))


def _merge_pairs(parts: Sequence[Tensor], spec: ModelSpec) -> Tensor:
    return torch.stack(list(parts)).unflatten(0, (spec.num_experts, 2))


def _interleave(t: Tensor) -> Tensor:
    """Rows of a rotary projection from pairs (i, i + n/2) to pairs (2i, 2i + 1)."""
    return t.unflatten(0, (2, -1)).transpose(0, 1).flatten(0, 1)


def _halve(t: Tensor) -> Tensor:
    """The inverse of _interleave."""
    return t.unflatten(0, (-1, 2)).transpose(0, 1).flatten(0, 1)


def _last_rows(t: Tensor, rope: int, turn: Callable[[Tensor], Tensor]) -> Tensor:
    return torch.cat([t[:-rope], turn(t[-rope:])])


def _each_head(t: Tensor, spec: ModelSpec, turn: Callable[[Tensor], Tensor]) -> Tensor:
    heads = t.unflatten(0, (spec.num_heads, -1))
    return torch.cat([_last_rows(head, spec.qk_rope_head_dim, turn) for head in heads])


def _split_latents(t: Tensor, spec: ModelSpec) -> list[Tensor]:
    """Rows [query latent | key-value latent | rotary key] -> the query latent's (if any) and the rest, rotary rows interleaved."""
    rank = spec.q_lora_rank or 0
    rest = _last_rows(t[rank:], spec.qk_rope_head_dim, _interleave)
    return [t[:rank], rest] if rank else [rest]


def _merge_latents(parts: Sequence[Tensor], spec: ModelSpec) -> Tensor:
    return torch.cat([*parts[:-1], _last_rows(parts[-1], spec.qk_rope_head_dim, _halve)])


SAME = Transform(lambda t, spec: [t], lambda parts, spec: parts[0])
QKV = Transform(_split_qkv, _merge_qkv)
EXPERT_PAIRS = Transform(_split_pairs, _merge_pairs)
EXPERTS = Transform(lambda t, spec: list(t), lambda parts, spec: torch.stack(list(parts)))
LATENTS = Transform(_split_latents, _merge_latents)
LATENT_QUERIES = Transform(lambda t, spec: [_each_head(t, spec, _interleave)], lambda parts, spec: _each_head(parts[0], spec, _halve))
