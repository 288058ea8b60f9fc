"""Is this step's gradient fit to be used, or should the step be skipped?

A step is skipped where its loss or gradient norm isn't finite, or lies above mean + sigma * deviation of the recent ones. Skipping
means that nothing happens: parameters, moments and step counts stay as they are, gradients are dropped. Inputs are numbers that were
already reduced over all ranks, so all ranks decide alike without another word.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from dataclasses import dataclass
from typing import Any, final

import torch

LEAST_DEVIATION = 1e-3
"""Of the mean: values that hardly vary at all would otherwise make any change an outlier."""


@dataclass(frozen=True)
class Verdict:
    """What to do with a step, and why: ``reason`` is "" for one to take, else one line."""

    skip: bool
    reason: str = ""


@final
class SkipGuard:
    """Watches loss and gradient norm, a window of the last ``window`` values of each.

    Outliers are judged once the window is half full; ``sigma`` None judges none, only what isn't finite. An outlier enters the window
    as the limit that it crossed: one spike can't blind the guard, and a lasting small shift is accepted after a few steps. After
    ``max_consecutive`` skips in a row a RuntimeError names the step and the value. ValueError for settings out of range.
    """

    def __init__(self, window: int = 128, sigma: float | None = 6.0, max_consecutive: int = 10) -> None:
        for name, value, least in (("window", window, 2), ("max_consecutive", max_consecutive, 1), ("sigma", sigma, 1)):
            if value is not None and value < least:
                raise ValueError(f"optimizer skip {name} {value}: must be at least {least}")
        self.window, self.sigma, self.max_consecutive = window, sigma, max_consecutive
        self.values: dict[str, deque[float]] = {"loss": deque(maxlen=window), "gradient norm": deque(maxlen=window)}
        self.consecutive = 0
        self.skipped: dict[str, int] = {}

    def judge(self, step: int, loss: float, norm: float) -> Verdict:
        """The verdict on ``step``, remembered. RuntimeError after too many skips in a row."""
        seen = {"loss": float(loss), "gradient norm": float(norm)}
        reasons = [reason for name, value in seen.items() for reason in self._reasons(name, value)]
        for name, value in seen.items():
            if math.isfinite(value):
                self.values[name].append(min(value, self.limit(name)))
        if not reasons:
            self.consecutive = 0
            return Verdict(False)
        kind, text = reasons[0]
        self.skipped[kind] = self.skipped.get(kind, 0) + 1
        self.consecutive += 1
        if self.consecutive >= self.max_consecutive:
            raise RuntimeError(f"step {step}: {self.consecutive} steps skipped in a row, the last because {text}")
        return Verdict(True, text)

    def limit(self, name: str) -> float:
        """Above what a value of ``name`` (loss | gradient norm) is an outlier now; infinity while there are too few to tell."""
        values = self.values[name]
        if self.sigma is None or len(values) < max(2, self.window // 2):
            return math.inf
        mean = statistics.fmean(values)
        return mean + self.sigma * max(statistics.pstdev(values, mean), LEAST_DEVIATION * abs(mean))

    def _reasons(self, name: str, value: float) -> list[tuple[str, str]]:
        """(kind, text) of what is wrong with ``value``, at most one."""
        if not math.isfinite(value):
            return [(f"{name} not finite", f"the {name} is {value}")]
        limit = self.limit(name)
        return [(f"{name} outlier", f"the {name} {value:.6g} is above {limit:.6g}")] if value > limit else []

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps: lists of floats and integers."""
        return {"values": {name: list(values) for name, values in self.values.items()}, "consecutive": self.consecutive,
                "skipped": dict(self.skipped)}

    def load_state(self, state: dict[str, Any]) -> None:
        """Takes up where ``state`` was saved; of a longer window, the latest values."""
        for name, values in self.values.items():
            values.clear()
            values.extend(float(value) for value in state["values"][name])
        self.consecutive = int(state["consecutive"])
        self.skipped = {str(kind): int(count) for kind, count in state["skipped"].items()}


def guarded_step(optimizer: torch.optim.Optimizer, guard: SkipGuard, step: int, loss: float, norm: float) -> Verdict:
    """Steps ``optimizer`` unless ``guard`` says to skip; either way the gradients are gone afterwards."""
    verdict = guard.judge(step, loss, norm)
    if not verdict.skip:
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return verdict
