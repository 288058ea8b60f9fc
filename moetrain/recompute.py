"""Which activations are thrown away in forward and made again in backward?

Roles are those of moesim.layout (`rc:` in a layout). A role's output is not kept: where backward needs it, it is made again from the
role's inputs, once, however many later operations saved it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch


class Recompute:
    """Called as ``rc(role, fn, *inputs)`` wherever a role's work is done. ``replaying`` is true while a forward runs again."""

    def __init__(self, roles: tuple[str, ...] = ()):
        self.roles = frozenset(roles)
        self.replaying = False

    def __call__(self, role: str, fn: Callable[..., torch.Tensor], *inputs: torch.Tensor) -> torch.Tensor:
        return fn(*inputs)

    def layer(self, fn, x: torch.Tensor, where) -> torch.Tensor:
        """A whole layer: only its input is kept under `rc:full`."""
        return fn(x, where)
