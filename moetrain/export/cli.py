"""What do `moetrain export`, `moetrain import` and `--init-from` do, once a checkpoint is a stream of (name, tensor)?

Plain functions of parsed arguments: the command line mounts them. All raise ValueError in one line, which it turns into exit code 2.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, fields
from pathlib import Path

import torch
from torch import Tensor

from moesim.files import write_atomically
from moesim.spec import ModelSpec
from moetrain.export.config import read_config
from moetrain.export.constants import Constants
from moetrain.export.read import load
from moetrain.export.write import SHARD_BYTES, Source, export

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
INFORMATIVE = {"max_positions", "eos_token"}
"""Constants that don't change what a model computes."""


def dtype_named(name: str | None) -> torch.dtype | None:
    """None stays None: tensors keep their own."""
    if name is None or name in DTYPES:
        return DTYPES[name] if name else None
    raise ValueError(f"dtype '{name[:40]}' is not known; known: {', '.join(DTYPES)}")


def export_checkpoint(
    tensors: Source, spec: ModelSpec, form: str, out: str | Path, constants: Constants, dtype: str | None = "bfloat16",
    shard_bytes: int = SHARD_BYTES, tokenizer: str | Path | None = None,
) -> str:  # fmt: skip
    """`moetrain export CHECKPOINT --form FORM -o OUT`: writes the folder and says in a line what is in it."""
    folder = export(tensors, spec, form, out, constants, dtype_named(dtype), shard_bytes, tokenizer)
    files = sorted(folder.glob("*.safetensors"))
    size = sum(path.stat().st_size for path in files)
    return f"{folder}: {form}, {spec.num_params:,} parameters, {size:,} bytes in {len(files)} file(s); read back and equal"


def initial_tensors(folder: str | Path, spec: ModelSpec, constants: Constants, dtype: torch.dtype | None = torch.float32) -> Iterator[tuple[str, Tensor]]:
    """`--init-from FOLDER`: every tensor of a run's model by logical name, once the folder is sure to hold exactly that model."""
    theirs = read_config(folder).constants
    for field in fields(Constants):
        here, there = getattr(theirs, field.name), getattr(constants, field.name)
        if field.name not in INFORMATIVE and here != there:
            raise ValueError(f"{Path(folder) / 'config.json'}: {field.name} is {here:g}, but this run has {there:g}")
    yield from load(folder, spec, dtype)


def import_model(folder: str | Path, out: str | Path | None = None) -> str:
    """`moetrain import FOLDER [-o MODEL.yaml]`: checks every name and shape, and writes the model's spec as a preset."""
    form, spec, constants = read_config(folder)
    for _ in load(folder, spec):  # the first yield comes after all checks
        break
    numbers = ", ".join(f"{name} {value}" for name, value in asdict(constants).items())
    if out is not None:
        write_atomically(out, preset(spec, constants))
    return f"{folder}: {form.name}, {spec.num_params:,} parameters; {numbers}"


def preset(spec: ModelSpec, constants: Constants) -> str:
    """A model preset: the fields that differ from their defaults, as YAML (JSON scalars are YAML)."""
    given = spec.model_dump(mode="json", exclude_defaults=True)
    numbers = [f"# {name}: {value}" for name, value in asdict(constants).items()]
    lines = [f"{name}: {json.dumps(value)}" for name, value in given.items()]
    return "\n".join([*lines, f"total_params: {spec.num_params}", *numbers]) + "\n"
