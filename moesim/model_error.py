"""How far off is the model itself, where its parameters are right? (Out-of-fold residuals of published runs, as one sigma a case.)

Written by ``python -m calibration.out_of_fold --write`` into scenarios/model_error.yaml; a prediction's interval combines it with the
spread from parameter draws.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field


class ModelError(BaseModel):
    """Standard deviations of log(predicted / measured) beyond what draws of prices and of a stack's factors spread. ``base``: stacks
    whose factors runs have fixed, ``unfitted``: the others; ``extrapolated`` is added in quadrature in proportion to the share of
    extrapolated, datasheet or assumed seconds; ``anchored`` takes the place of all where runs of the site were refitted. Where a
    stack's factors were fitted, they took up part of what its prices are off by and of what its runs do not state: ``prices`` and
    ``assumptions`` are the shares of those sigmas that are left; ``factors`` scales the sigma of the factors themselves, whose fit
    takes runs for more independent than they are."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")
    base: float = Field(ge=0, le=2)
    extrapolated: float = Field(ge=0, le=2)
    anchored: float = Field(ge=0, le=2)
    unfitted: float | None = Field(ge=0, le=2, default=None)
    assumptions: float = Field(ge=0, le=1, default=1.0)
    prices: float = Field(ge=0, le=2, default=1.0)
    factors: float = Field(ge=0, le=5, default=1.0)
    num_runs: int = Field(ge=0)
    source: str

    def sigma(self, shares: dict[str, float], anchored: bool = False, fitted: bool = True) -> float:
        """Log standard deviation for a prediction with these provenance shares. fitted: runs have fixed the stack's factors."""
        if anchored:
            return self.anchored
        base = self.base if fitted or self.unfitted is None else self.unfitted
        return (base**2 + (self.extrapolated * self.far(shares)) ** 2) ** 0.5

    @staticmethod
    def far(shares: dict[str, float]) -> float:
        """Share of seconds that no measurement of this GPU stands behind."""
        return sum(shares.get(name, 0.0) for name in ("extrapolated", "datasheet", "assumed"))


@lru_cache(maxsize=1)
def load_model_error(path: Path | None = None) -> ModelError:
    """The shipped model error."""
    from moesim.load import read_yaml, scenarios_dir

    return ModelError(**read_yaml(path or scenarios_dir() / "model_error.yaml").data)
