"""Which bytes does each implementation of a kernel keep for backward? (scenarios/saved_tensors.yaml, read strictly.)

The same model in the same layout keeps other tensors on a CPU than on a GPU, and with another attention or gate kernel: a composite norm keeps
FP32 copies, a kernel that weighs rows keeps them. What follows from a model's shapes alone (inputs of products, queries, keys and values)
stands in ``transformer``; what depends on who computes it stands here, each figure with its source.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from moesim.load import read_yaml, scenarios_dir

Width = Annotated[float, Field(ge=0, le=1024, allow_inf_nan=False)]


class Row(BaseModel):
    """One implementation: figures, and where each comes from."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")
    sources: dict[str, Annotated[str, Field(min_length=3)]]

    @model_validator(mode="after")
    def _check(self) -> Row:
        figures = set(type(self).model_fields) - {"sources"}
        if figures != set(self.sources):
            raise ValueError(f"sources must name each of {', '.join(sorted(figures))}; it names {', '.join(sorted(self.sources))}")
        return self

    @property
    def provenance(self) -> str:
        """"counted" | "documented" | "assumed": the weakest of its figures'."""
        kinds = {"assumed" if text.startswith("assumed") else "counted" if text.startswith("counted") else "documented" for text in self.sources.values()}
        return next(kind for kind in ("assumed", "documented", "counted") if kind in kinds)


class Norm(Row):
    """``input`` and ``normalised``: bytes a value of the input and of the input over its root mean square; ``row_bytes`` a row."""

    input: Width
    normalised: Width
    row_bytes: Width


class Core(Row):
    """Of softmax attention: bytes a value of its output, a query of a head, and a pair of query and key of a head."""

    output: Width
    head_bytes: Width
    pair_bytes: Width


class Experts(Row):
    """Bytes a value of the gate and up projection, a value of the gate's own result beside what the next product reads, a value of
    the experts' output (None: the stack says whether it is kept), a token and expert of the router, and a route."""

    up: Width
    activation: Width
    output: Width | None
    expert_bytes: Width
    route_bytes: Width


class Loss(Row):
    """Bytes a logit, and of its gradient; ``chunk`` tokens whose logits exist at once (0: all)."""

    logit_bytes: Width
    gradient_bytes: Width
    chunk: Annotated[int, Field(ge=0, le=1 << 24)]


class Choice(BaseModel):
    """The rows that one software runs with."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")
    norm: str
    attention: str
    experts: str
    loss: str


class Table(BaseModel):
    """The whole file."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")
    norms: dict[str, Norm]
    attention: dict[str, Core]
    experts: dict[str, Experts]
    losses: dict[str, Loss]
    sets: dict[str, Choice]

    @model_validator(mode="after")
    def _check(self) -> Table:
        for name, choice in self.sets.items():
            for field, rows in (("norm", self.norms), ("attention", self.attention), ("experts", self.experts), ("loss", self.losses)):
                if (wanted := getattr(choice, field)) not in rows:
                    near = difflib.get_close_matches(wanted, rows, n=1)
                    raise ValueError(f"sets.{name}.{field}: {wanted!r} is no row; legal are {', '.join(rows)}" + (f"; did you mean {near[0]}?" if near else ""))
        return self


@dataclass(frozen=True)
class Saved:
    """The rows of one set, with what they are called."""

    name: str
    choice: Choice
    norm: Norm
    core: Core
    experts: Experts
    loss: Loss

    def said(self) -> str:
        """One line: whose kernels' saved tensors are counted, and how each is known."""
        rows = (("norm", self.norm), ("attention", self.core), ("experts", self.experts), ("loss", self.loss))
        return f"{self.name}: " + ", ".join(f"{field} {getattr(self.choice, field)} ({row.provenance})" for field, row in rows)


@lru_cache(maxsize=1)
def load_table() -> Table:
    """The shipped table. ValueError in one line for a file that doesn't hold."""
    return Table(**read_yaml(scenarios_dir() / "saved_tensors.yaml").data)


def saved_tensors(name: str, device: Literal["gpu", "cpu"] = "gpu") -> Saved:
    """The rows of set ``name``; on a CPU those of ``NAME_cpu``, where there are any. ValueError for no such set."""
    table = load_table()
    wanted = f"{name}_cpu" if device == "cpu" and f"{name}_cpu" in table.sets else name
    if wanted not in table.sets:
        near = difflib.get_close_matches(wanted, table.sets, n=1)
        raise ValueError(f"saved_tensors {wanted!r}: legal are {', '.join(table.sets)}" + (f"; did you mean {near[0]}?" if near else ""))
    choice = table.sets[wanted]
    return Saved(wanted, choice, table.norms[choice.norm], table.attention[choice.attention], table.experts[choice.experts], table.losses[choice.loss])
