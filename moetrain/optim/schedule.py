"""Which part of its full value has the learning rate at a step?

Factors from integers alone, so that any step of a run can be computed without the steps before. Step s is the s-th from 0; the
warm-up gives 1/w, 2/w ... 1 to the first w steps; a decay over n steps starts from 1 and has come down to the minimum after its last
step, so no step is wasted at zero. Cosine: https://arxiv.org/abs/1608.03983. WSD (warm-up, stable, decay):
https://arxiv.org/abs/2404.06395; its 1-sqrt decay: https://arxiv.org/abs/2405.18392.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

KINDS = ("constant", "cosine", "wsd")

DECAYS: dict[str, Callable[[float], float]] = {
    "linear": lambda done: 1 - done,
    "1-sqrt": lambda done: 1 - math.sqrt(done),
    "cosine": lambda done: 0.5 * (1 + math.cos(math.pi * done)),
}
"""From the part of a decay that is done, 0 to 1, to what is left, 1 to 0."""


@dataclass(frozen=True)
class Schedule:
    """``steps`` of the whole run; ``warmup_steps`` linear ones come first. ``decay_steps``: the last ones, of wsd, by ``decay`` linear |
    1-sqrt; cosine decays from the end of the warm-up to the end of the run. ``min_lr_ratio``: where a decay ends, and what holds
    after it. ValueError for what doesn't fit."""

    steps: int
    kind: str = "constant"
    warmup_steps: int = 0
    decay_steps: int = 0
    min_lr_ratio: float = 0.0
    decay: str = "linear"

    def __post_init__(self) -> None:
        problem = _problem(self)
        if problem:
            raise ValueError(problem)

    def factor(self, step: int) -> float:
        """In [min_lr_ratio, 1] after the warm-up. ValueError for a step before 0."""
        return lr_factor(step, self)


def lr_factor(step: int, s: Schedule) -> float:
    """The learning rate of ``step`` (from 0) as a part of its full value."""
    if step < 0:
        raise ValueError(f"step {step}: steps count from 0")
    if step < s.warmup_steps:
        return (step + 1) / s.warmup_steps
    if s.kind == "constant":
        return 1.0
    length = s.decay_steps if s.kind == "wsd" else s.steps - s.warmup_steps
    done = step - (s.steps - length)
    if done <= 0 or not length:
        return 1.0
    left = DECAYS["cosine" if s.kind == "cosine" else s.decay](min(1.0, done / length))
    return s.min_lr_ratio + (1 - s.min_lr_ratio) * left


def _problem(s: Schedule) -> str | None:
    if s.kind not in KINDS:
        return f"schedule {s.kind!r}: legal are {', '.join(KINDS)}"
    if s.decay not in DECAYS:
        return f"schedule decay {s.decay!r}: legal are {', '.join(DECAYS)}"
    if s.steps < 1 or s.warmup_steps < 0 or s.decay_steps < 0:
        return f"schedule of {s.steps} steps, {s.warmup_steps} of warm-up, {s.decay_steps} of decay: a run has at least 1 step, a part 0"
    used = s.warmup_steps + (s.decay_steps if s.kind == "wsd" else 0)
    if used > s.steps:
        return f"schedule {s.kind}: {used} steps of warm-up and decay in a run of {s.steps}"
    if not 0 <= s.min_lr_ratio <= 1:
        return f"schedule min_lr_ratio {s.min_lr_ratio}: must be from 0 to 1"
    return None
