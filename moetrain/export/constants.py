"""Which numbers of a model change its output but no shape, and so stand in no spec?"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Constants:
    """``embed_scale`` multiplies embedded tokens, before their norm if they have one. ``max_positions`` is the longest sequence the
    model was trained on, ``eos_token`` the token that ends a document: both only inform whoever serves the model."""

    rope_theta: float = 10_000.0
    norm_eps: float = 1e-6
    embed_scale: float = 1.0
    max_positions: int = 4096
    eos_token: int | None = None


DEFAULT = Constants()
