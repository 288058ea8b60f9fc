"""How is a float32 number stored in bfloat16, and what is lost?

Bfloat16 keeps 8 significant bits: numbers from 1 to 2 lie 2^-7 apart, so nearest rounding swallows every change below 2^-8 (in units
of the power of two below the number). A moment that decays by (1 - beta) of itself a step therefore never moves when 1 - beta is
below 2^-9, and some values stand still as soon as it is below 2^-8: hence MAX_BETA_NEAREST. Stochastic rounding goes up or down
with the probabilities that make the mean right (https://arxiv.org/abs/2010.06192), so any beta decays.
"""

from __future__ import annotations

import torch
from torch import Tensor

ROUNDINGS = ("nearest", "stochastic")
MAX_BETA_NEAREST = 1 - 2.0**-8


def store(target: Tensor, value: Tensor, generator: torch.Generator | None = None) -> None:
    """Writes float32 ``value`` [any shape] into ``target``: rounded to nearest, or, given a generator and a bfloat16 target,
    stochastically. The generator's device must be the tensors'."""
    if generator is None or target.dtype != torch.bfloat16:
        target.copy_(value)
    else:
        target.copy_(stochastic_bfloat16(value, generator))


def stochastic_bfloat16(value: Tensor, generator: torch.Generator) -> Tensor:
    """float32 -> bfloat16, to one of the two neighbours, with the mean right. Infinities stay; so does the quiet NaN.

    A bfloat16 is the upper half of a float32's bits, so a uniform 16-bit number added to the lower half carries into the upper one
    with just the probability wanted; the sign bit is apart, so this holds for magnitudes of either sign.
    """
    noise = torch.randint(0, 1 << 16, value.shape, dtype=torch.int32, device=value.device, generator=generator)
    bits = (value.contiguous().view(torch.int32) + noise) & -65536
    return bits.view(torch.float32).to(torch.bfloat16)
