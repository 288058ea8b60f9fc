"""What do all cost models share? (declared parameters: what a fit may move, and how far; where a group of ranks lives)"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np


@dataclass(frozen=True, slots=True)
class Parameter:
    """One number of a cost model. ``start`` is where a fit begins and what an unmeasured GPU is given before scaling.

    ``scales`` names the datasheet figure the value is proportional to ("flops", "hbm", "nvlink", "nic") or, with a leading
    "1/", inversely proportional to; "" = it does not scale. A GPU without measurements takes its parent's value times the
    ratio of those figures.
    """

    name: str
    unit: str
    low: float
    high: float
    start: float
    scales: str = ""
    fitted: bool = True

    def __post_init__(self) -> None:
        assert self.low <= self.start <= self.high, self


class Reach(NamedTuple):
    """Where a group lives, one value an op: ``inside`` members share a domain, ``outside`` domains take part; link rates in
    bytes/s per GPU and direction; ``latency`` = seconds the fabric adds a hop (0 when the transport's own figure is all there is)."""

    inside: np.ndarray
    outside: np.ndarray
    nvlink: np.ndarray
    nic: np.ndarray
    latency: np.ndarray
