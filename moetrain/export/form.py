"""What does a Hugging Face layout have to say of itself: its names, its limits, its config.json?

A form is a literal table from logical names to the file's names, plus the values of each model feature it has a place for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from moesim.spec import ModelSpec
from moetrain.export.constants import Constants
from moetrain.export.names import BALANCE_BIAS, Shape, logical_shapes
from moetrain.export.transforms import SAME, Transform


class Row(NamedTuple):
    """The file's names of one logical tensor; "{i}" stands for the layer, "{e}" for each expert in turn."""

    names: tuple[str, ...]
    transform: Transform = SAME


Table = Mapping[str, Row]
ANY = None
"""Every value of a field."""

# What a form has a place for unless it says otherwise: a dense or sparse pre-norm decoder with grouped-query attention.
# Features left out here (sizes, num_experts, top_k ...) are numbers every form can hold.
PLAIN: Mapping[str, tuple[Any, ...] | None] = {
    "num_position_embeddings": (0,),
    "tie_embeddings": ANY,
    "attention": ("gqa",),
    "qk_norm": ("none",),
    "qkv_bias": (False,),
    "out_bias": (False,),
    "sliding_window": (None,),
    "full_attention_every": (1,),
    "attention_sinks": (False,),
    "norm_placement": ("pre",),
    "norm_bias": (False,),
    "embedding_norm": (False,),
    "moe_branch_norm": (False,),
    "gated_mlp": (True,),
    "mlp_bias": (False,),
    "num_shared_experts": (0,),
    "shared_expert_gate": (False,),
    "router": ("softmax",),
    "router_bias": (False,),
    "expert_bias": (False,),
    "score_correction_bias": (False,),
    "num_expert_groups": (1,),
    "top_k_groups": (1,),
    "routed_scale": (1.0,),
    "normalize_top_k": (True,),
    "num_leading_dense_layers": (0,),
    "moe_layer_interval": (1,),
    "num_mtp_layers": (0,),
}


@dataclass(frozen=True)
class Form:
    """``table`` and ``write_config`` may look at the spec; ``limit`` says in one line what else the form cannot hold, or None."""

    name: str
    architecture: str
    moe: bool
    table: Callable[[ModelSpec], Table]
    write_config: Callable[[ModelSpec, Constants], dict[str, Any]]
    allows: Mapping[str, tuple[Any, ...] | None]
    limit: Callable[[ModelSpec, Constants], str | None] = lambda spec, constants: None

    def legal(self, field: str) -> tuple[Any, ...] | None:
        """The values of a feature that the form has a place for; ANY for every one."""
        return self.allows.get(field, PLAIN[field])

    def can(self, field: str, value: Any) -> bool:
        return self.legal(field) is ANY or value in self.legal(field)

    def rows(self, spec: ModelSpec) -> Iterator[tuple[str, Shape, Row]]:
        """(logical name, shape, row with the file's names written out) of every logical tensor that has a place in the file."""
        table = self.table(spec)
        for name, shape in logical_shapes(spec).items():
            pattern, layer = _pattern(name)
            row = table.get(pattern)
            if row is not None:
                yield name, shape, Row(tuple(_expand(row.names, layer, spec.num_experts)), row.transform)
            elif not name.endswith(BALANCE_BIAS):
                raise ValueError(f"{name}: form '{self.name}' has no place for it")

    def file_shapes(self, spec: ModelSpec) -> dict[str, Shape]:
        """Every tensor of the file and its shape."""
        found: dict[str, Shape] = {}
        for _, shape, row in self.rows(spec):
            parts = row.transform.split(torch.empty(shape, device="meta"), spec)
            found |= {name: tuple(part.shape) for name, part in zip(row.names, parts, strict=True)}
        return found


def _pattern(name: str) -> tuple[str, str]:
    """("layers.{i}.norm1.weight", "3") of "layers.3.norm1.weight"."""
    parts = name.split(".", 2)
    return (f"layers.{{i}}.{parts[2]}", parts[1]) if parts[0] == "layers" else (name, "")


def _expand(names: tuple[str, ...], layer: str, num_experts: int) -> Iterator[str]:
    per_expert = "{e}" in names[0]
    for e in range(num_experts if per_expert else 1):
        for name in names:
            yield name.replace("{i}", layer).replace("{e}", str(e))


# --- rows that many layouts share -------------------------------------------------------------------------------------------

PREFIX = "model.layers.{i}."


def renamed(logical: str, name: str, transform: Transform = SAME) -> Table:
    """One row of a tensor inside a layer."""
    return {f"layers.{{i}}.{logical}": Row((PREFIX + name,), transform)}


def linear(logical: str, name: str) -> Table:
    """A linear map's weight and bias."""
    return renamed(f"{logical}.weight", f"{name}.weight") | renamed(f"{logical}.bias", f"{name}.bias")


def mlp(logical: str, name: str) -> Table:
    """The three matrices of an FFN called gate_proj, up_proj, down_proj."""
    return linear(f"{logical}.gate", f"{name}.gate_proj") | linear(f"{logical}.up", f"{name}.up_proj") | linear(f"{logical}.down", f"{name}.down_proj")
