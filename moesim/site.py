"""What is particular about one site? (Factors on a few constants that no data sheet states; all 1 until runs say otherwise.)

A site is a cluster and a software release. Its factors scale seconds: host launches, the legs of collectives that cross NICs, tensor
cores, the end of the step, and of each model that ran there the whole of its step. A dispatcher that goes through a CPU proxy pays a latency a call, which only such sites have.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Mapping

PROXY_SECONDS = 1e-3
"""Latency of one dispatcher call through CPU proxies over four nodes: 0.1 to 10 ms in published campaigns
(https://github.com/uccl-project/uccl, https://github.com/awslabs/awsome-distributed-ai); the middle on a log scale, assumed."""
NOISE = 0.06
"""Standard deviation of ln(tokens/s) of one run that no site constant explains: repeats spread by 1 to 3%, and the shape of the model
is off by more (the same figure that calibration/coverage.py fits kernel factors with)."""
MODEL_SIGMA = 0.07
"""Standard deviation of ln(factor) on a model's whole step at one site: what the runs of one model at a published site have in common
and those of others there do not (``python -m calibration scoreboard --full`` prints it: 0.07 when this was set, 0.076 with the factors
fitted since)."""

@dataclass(frozen=True)
class Site:
    """multipliers: constant -> factor on its seconds. anchors: ids of the runs behind them; residual: ln(predicted / measured) of each
    after the fit; seen: of each the causes of error that its step showed, cause -> change of ln(step) for one standard deviation.
    models: ``same_model`` -> its constant."""

    multipliers: Mapping[str, float] = field(default_factory=dict)
    anchors: tuple[str, ...] = ()
    residual: tuple[float, ...] = ()
    proxy_dispatcher: bool = False
    seen: tuple[Mapping[str, float], ...] = ()
    models: Mapping[str, str] = field(default_factory=dict)

    def factor(self, constant: str) -> float:
        return self.multipliers.get(constant, 1.0)

    def model_constant(self, model) -> str:
        """Name of the factor on all of a model's seconds: that of the same model under another name, else that of its name, which cuts of
        it and sweeps of its experts share. 1 where no anchor ran either."""
        return (self.models.get(same_model(model)) if self.models else None) or f"model {model.name}"

    def proxy_seconds(self, domains: int) -> float:
        """Latency that CPU proxies add to one dispatch or combine over so many NVLink domains."""
        return PROXY_SECONDS * self.factor("proxy") * (domains - 1) / 3.0 if self.proxy_dispatcher and domains > 1 else 0.0

    @property
    def text(self) -> str:
        """What the report says: "" for a site that nothing is known of."""
        if not self.anchors:
            return ""
        factors = ", ".join(f"{name} x{value:.2f}" for name, value in self.multipliers.items())
        return f"anchored by {len(self.anchors)} run(s): {factors}"


def same_model(model) -> str:
    """The same for models that differ in name only."""
    return hashlib.sha256(repr(model.model_copy(update={"name": "-"})).encode()).hexdigest()[:16]


NEUTRAL = Site()
