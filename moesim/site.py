"""What is particular about one site? (Factors on a few constants that no data sheet states; all 1 until runs say otherwise.)

A site is a cluster and a software release. Its factors scale seconds: host launches, the legs of collectives that cross NICs, tensor
cores, the end of the step. A dispatcher that goes through a CPU proxy pays a latency a call, which only such sites have.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Mapping

PROXY_SECONDS = 1e-3
"""Latency of one dispatcher call through CPU proxies over four nodes: 0.1 to 10 ms in published campaigns
(https://github.com/uccl-project/uccl, https://github.com/awslabs/awsome-distributed-ai); the middle on a log scale, assumed."""
TERMS = {"gemm": ("gemm.", "grouped_gemm."), "nic": (".nic",), "host": ("host",)}
"""Site constant -> what its profile terms contain: their parameter draws narrow as anchors pin the constant."""


@dataclass(frozen=True)
class Site:
    """multipliers: constant -> factor on its seconds. learned: constant -> share of its prior's variance that anchors removed.
    anchors: ids of the runs behind them; residual: ln(predicted / measured) of each after the fit."""

    multipliers: Mapping[str, float] = field(default_factory=dict)
    learned: Mapping[str, float] = field(default_factory=dict)
    anchors: tuple[str, ...] = ()
    residual: tuple[float, ...] = ()
    proxy_dispatcher: bool = False

    def factor(self, constant: str) -> float:
        return self.multipliers.get(constant, 1.0)

    def proxy_seconds(self, domains: int) -> float:
        """Latency that CPU proxies add to one dispatch or combine over so many NVLink domains."""
        return PROXY_SECONDS * self.factor("proxy") * (domains - 1) / 3.0 if self.proxy_dispatcher and domains > 1 else 0.0

    def narrowing(self, term: str) -> float:
        """Factor on the log spread of a profile term that anchors leave."""
        for constant, marks in TERMS.items():
            if any(mark in term for mark in marks):
                return (1.0 - min(1.0, self.learned.get(constant, 0.0))) ** 0.5
        return 1.0

    @property
    def text(self) -> str:
        """What the report says: "" for a site that nothing is known of."""
        if not self.anchors:
            return ""
        factors = ", ".join(f"{name} x{value:.2f}" for name, value in self.multipliers.items())
        return f"anchored by {len(self.anchors)} run(s): {factors}"


NEUTRAL = Site()
