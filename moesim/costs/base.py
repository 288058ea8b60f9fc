"""What is a declared parameter of a cost model? (name, unit, bounds: what a fit may move, and how far.)"""

from __future__ import annotations

from dataclasses import dataclass


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
