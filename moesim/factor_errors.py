"""How sure are the factors on one software's kernels? (Covariance of their logarithms: what runs leave open, beside what they say.)

Factors are fitted together, so that their errors hang together: runs fix what a step costs in all better than what attention or
dispatch cost in it. A prediction unlike any of those runs (another GPU, another mix of kernels) is less certain than its neighbours
are, and this is by how much. The table is data (scenarios/kernel_errors.json), written beside the factors by
``python -m calibration.coverage``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Mapping, Sequence

import numpy as np

@dataclass(frozen=True)
class FactorErrors:
    """columns: (owner, kind) of each factor, an owner being a GPU generation, a stack or one of ``traits``; covariance [columns, columns]
    of ln(factor); own: kind -> standard deviation of ln(a stack's own factor) before any run of it; same: stack -> whose kernels it
    runs."""

    columns: tuple[tuple[str, str], ...]
    covariance: np.ndarray = field(repr=False, compare=False)
    own: Mapping[str, float] = field(default_factory=dict)
    same: Mapping[str, str] = field(default_factory=dict)
    traits: tuple[str, ...] = ()

    def root(self, kinds: Sequence[str], stack: str, generation: str, traits: Sequence[str] = ()) -> np.ndarray:
        """[kinds, causes] what independent standard normals add to ln(factor) of one stack on one generation; its product with its
        transpose is their covariance. Causes are those of the stack there whatever the traits, so that rows of runs with other traits
        speak of the same ones."""
        stack = self.same.get(stack, stack)
        owners = {owner for owner, _ in self.columns}
        extra = [c for c in self.columns if c[0] not in (generation, stack) and c[0] in self.traits]
        wanted = [*({(generation, kind), (stack, kind)} for kind in kinds), *({c} for c in extra)]
        picks = np.array([[c in some for c in self.columns] for some in wanted], dtype=float)
        covariance = picks @ self.covariance @ picks.T
        if stack not in owners:
            covariance += np.diag([self.own.get(kind, 0.0) ** 2 for kind in kinds] + [0.0] * len(extra))
        values, vectors = np.linalg.eigh(covariance)
        of_kind = np.array([[float(i == at) for at in range(len(kinds))] + [float(c[0] in traits and c[1] == kind) for c in extra]
                            for i, kind in enumerate(kinds)])
        return of_kind @ (vectors * np.sqrt(np.maximum(values, 0.0)))

    def plain(self, digits: int = 4) -> dict[str, Any]:
        """JSON-ready: the lower triangle."""
        rows = [[float(f"{x:.{digits}g}") for x in row[: i + 1]] for i, row in enumerate(self.covariance)]
        return {"columns": [list(c) for c in self.columns], "lower": rows, "own": dict(self.own), "same": dict(self.same), "traits": list(self.traits)}

    @classmethod
    def from_plain(cls, data: Mapping[str, Any]) -> "FactorErrors":
        """Of what ``plain`` wrote. ValueError (one line) where it isn't that."""
        try:
            columns = tuple((str(owner), str(kind)) for owner, kind in data["columns"])
            lower = np.zeros((len(columns), len(columns)))
            for i, row in enumerate(data["lower"]):
                lower[i, : i + 1] = row
            own = {str(kind): float(sigma) for kind, sigma in data["own"].items()}
            found = cls(columns, lower + np.tril(lower, -1).T, own, dict(data["same"]), tuple(data["traits"]))
        except (TypeError, KeyError, IndexError, AttributeError, ValueError) as error:
            raise ValueError(f"not a lower triangle of covariances with its columns, own, same and traits ({type(error).__name__}: {error})") from None
        if len(set(columns)) < len(columns) or not np.all(np.isfinite(found.covariance)) or np.any(np.diag(found.covariance) < 0):
            raise ValueError("columns appear twice, or covariances are not finite")
        return found
