"""Where do tokens go when the router has no say: evenly, at random, or as a record says?

All modes depend on the token's number in the run alone, so any layout routes alike. A record is a safetensors file with
`layer.<i>` [tokens, k] expert numbers (replayed token by token, from the start again when it ends) or `layer.<i>.counts` [E] (a
histogram, replayed in proportion); a recorder's own files are read too.
"""

from __future__ import annotations

import re
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
        """A record from its file, or from what `train.moe.record` left: one .npz, or the folder of them, whose rows are replayed in
        proportion. ValueError in one line where it isn't one."""
        if Path(path).is_dir() or Path(path).suffix == ".npz":
            return _of_recorder(Path(path))
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        try:
            tensors = load_file(str(path))
        except (OSError, SafetensorError) as error:
            raise ValueError(f"train.moe.replay: {path}: no routing record: {' '.join(str(error).split())[:100]}") from None
        found: dict[bool, dict[int, torch.Tensor]] = {False: {}, True: {}}
        for name, tensor in tensors.items():
            match = NAME.fullmatch(name)
            problem = _problem(tensor, bool(match[2])) if match else "no name of a record: legal are layer.N and layer.N.counts"
            if problem:
                raise ValueError(f"train.moe.replay: {path}: {name[:60]!r}: {problem}")
            found[bool(match[2])][int(match[1])] = tensor.double() if match[2] else tensor.long()
        return Record(found[False], found[True])


def _of_recorder(path: Path) -> Record:
    from moetrain.observe.routing_log import read_rows

    files = sorted(path.glob("rows-*.npz")) if path.is_dir() else [path]
    rows = read_rows(files)
    return Record({}, {int(layer): torch.from_numpy(counts).double() for layer, counts in zip(rows.layers, rows.requested.sum(0))})


NAME = re.compile(r"layer\.(\d+)(\.counts)?")


def _problem(tensor: torch.Tensor, counts: bool) -> str | None:
    """What is wrong with one tensor of a record, or None."""
    if counts:
        good = tensor.ndim == 1 and tensor.numel() > 0 and bool(tensor.double().isfinite().all()) and bool((tensor >= 0).all()) and float(tensor.double().sum()) > 0
        return None if good else "counts must be one finite number from 0 up for each expert, not all 0"
    if tensor.ndim != 2 or not tensor.numel() or tensor.dtype.is_floating_point or int(tensor.min()) < 0:
        return f"{tensor.dtype} {tuple(tensor.shape)}; it must be whole expert numbers from 0 up, [tokens, k]"
    ordered = tensor.long().sort(-1).values
    return "a token names the same expert twice" if bool((ordered[:, 1:] == ordered[:, :-1]).any()) else None


MIX = (0x9E3779B97F4A7C15 - (1 << 64), 0xBF58476D1CE4E5B9 - (1 << 64), 0x94D049BB133111EB - (1 << 64))


def mix(x: torch.Tensor) -> torch.Tensor:
    """A 64-bit mixing of int64 values (the finaliser of SplitMix64, https://doi.org/10.1145/2714064.2660195)."""
    x = x * MIX[0]
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * MIX[1]
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * MIX[2]
    return x ^ ((x >> 31) & 0x1FFFFFFFF)


def choose(mode: str, ids: torch.Tensor, layer: int, num_experts: int, k: int, record: Record | None) -> torch.Tensor:
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
