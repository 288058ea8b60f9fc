"""Where do tokens go when the router has no say: evenly, at random, or as a record says?

All modes depend on the token's number in the run alone, so any layout routes alike. A record is a safetensors file with
`layer.<i>` [tokens, k] expert numbers (replayed token by token, from the start again when it ends) or `layer.<i>.counts` [E] (a
histogram, replayed in proportion).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch


@dataclass(frozen=True)
class Record:
    """Recorded routing by layer: expert numbers [tokens, k], or rows an expert [E]."""

    experts: dict[int, torch.Tensor]
    counts: dict[int, torch.Tensor]

    @staticmethod
    def read(path: str | Path) -> Record:
        """A record from its file. ValueError in one line where it isn't one."""
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        try:
            tensors = load_file(str(path))
        except (OSError, SafetensorError) as error:
            raise ValueError(f"train.moe.replay: {path}: no routing record: {' '.join(str(error).split())[:100]}") from None
        experts = {int(n.split(".")[1]): t.long() for n, t in tensors.items() if n.count(".") == 1 and n.startswith("layer.")}
        counts = {int(n.split(".")[1]): t.double() for n, t in tensors.items() if n.endswith(".counts")}
        return Record(experts, counts)


MIX = (0x9E3779B97F4A7C15 - (1 << 64), 0xBF58476D1CE4E5B9 - (1 << 64), 0x94D049BB133111EB - (1 << 64))


def mix(x: torch.Tensor) -> torch.Tensor:
    """A 64-bit mixing of int64 values (the finaliser of SplitMix64, https://doi.org/10.1145/2714064.2660195)."""
    x = x * MIX[0]
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * MIX[1]
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * MIX[2]
    return x ^ ((x >> 31) & 0x1FFFFFFFF)


def choose(mode: str, ids: torch.Tensor, layer: int, step: int, num_experts: int, k: int, record: Record | None) -> torch.Tensor:
    """Expert numbers [T, k], distinct in each row, of the tokens ``ids`` [T]."""
    if mode == "balanced":
        return (ids[:, None] * k + torch.arange(k, device=ids.device) + layer) % num_experts
    if mode == "random":
        experts = torch.arange(num_experts, device=ids.device)
        return mix(mix(ids[:, None] * 1_000_003 + layer) ^ mix(experts + 1)).topk(k, -1).indices
    assert mode == "replay" and record is not None, mode
    if layer in record.experts:
        known = record.experts[layer].to(ids.device)
        _check(known, layer, num_experts, k)
        return known[ids % known.shape[0]]
    if layer in record.counts:
        return _in_proportion(ids, record.counts[layer].to(ids.device), layer, num_experts, k)
    raise ValueError(f"train.moe.replay: the record has no layer.{layer}")


def _check(known: torch.Tensor, layer: int, num_experts: int, k: int) -> None:
    if known.shape[-1] != k or int(known.max()) >= num_experts:
        raise ValueError(f"train.moe.replay: layer.{layer} holds {tuple(known.shape)} experts up to {int(known.max())}; "
                         f"this model routes {k} of {num_experts}")


def _in_proportion(ids: torch.Tensor, counts: torch.Tensor, layer: int, num_experts: int, k: int) -> torch.Tensor:
    """The k experts with the largest log(share) + Gumbel noise: distinct, and in proportion for k = 1 (Plackett-Luce beyond)."""
    if counts.numel() != num_experts:
        raise ValueError(f"train.moe.replay: layer.{layer}.counts has {counts.numel()} experts, the model {num_experts}")
    noise = mix(mix(ids[:, None] * 1_000_003 + layer) ^ mix(torch.arange(num_experts, device=ids.device) + 1))
    uniform = ((noise >> 11) & ((1 << 53) - 1)).double().add_(0.5) / (1 << 53)
    return (counts.clamp(min=1e-9).log() - (-uniform.log()).log()).topk(k, -1).indices
