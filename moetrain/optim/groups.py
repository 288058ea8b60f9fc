"""Which parameters decay, and which does Muon take? (By logical name.)

Norm weights, biases and attention sinks never decay: they are few, and pulling them to zero removes what they are for. The embedding
decays only on request: its rows would shrink between the rare appearances of their tokens. Muon takes the hidden matrices;
embedding, head, router and the shared branch's gate map to or from separate outputs rather than between hidden spaces.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

Named = tuple[str, torch.nn.Parameter]


def decays(name: str, embedding: bool = False) -> bool:
    """Whether weight decay acts on the parameter of this logical name; ``embedding``: on embed.weight too."""
    if name == "embed.weight":
        return embedding
    owner, _, last = name.rpartition(".")
    return not (last.endswith("bias") or last == "sinks" or "norm" in owner.rpartition(".")[2])


def is_hidden_matrix(name: str, parameter: torch.Tensor) -> bool:
    """Whether Muon takes it."""
    outer = name in ("embed.weight", "head.weight") or name.endswith((".router.weight", ".shared_gate.weight"))
    return parameter.ndim >= 2 and decays(name) and not outer


def make_groups(named: Iterable[Named], weight_decay: float, *, decay_embedding: bool = False, matrices: bool = False,
                matrix_lr_scale: float = 1.0) -> list[dict[str, Any]]:
    """Parameter groups, none empty: what decays, what doesn't and, if ``matrices``, the hidden matrices apart from both. Parameters
    that need no gradient are left out."""
    groups: dict[str, dict[str, Any]] = {}
    for name, parameter in named:
        if not parameter.requires_grad:
            continue
        decay = weight_decay if decays(name, decay_embedding) else 0.0
        hidden = matrices and is_hidden_matrix(name, parameter)
        settings = {"weight_decay": decay, **({"matrices": hidden} if matrices else {}), "lr_scale": matrix_lr_scale if hidden else 1.0}
        groups.setdefault(repr(settings), {"params": [], **settings})["params"].append((name, parameter))
    return list(groups.values())
