"""What does a Hugging Face folder hold, tensor by logical tensor, and is it exactly the model we expect?

Names and shapes are compared from the files' headers before the first byte of data is read. Pickled weights are never opened.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from moesim.spec import ModelSpec
from moetrain.export.config import read_config
from moetrain.export.form import Form, Row
from moetrain.export.names import BALANCE_BIAS, Shapes, logical_shapes

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt")
REBUILT = ("rotary_emb.inv_freq",)
"""Endings of tensors that old files hold and every class computes for itself."""

# Fields that may differ between specs of the same model: names, widths counted otherwise, and what `_layers` compares.
INDIFFERENT = {"name", "num_shared_experts", "num_leading_dense_layers", "moe_layer_interval", "sliding_window", "full_attention_every"}


def load(folder: str | Path, spec: ModelSpec | None = None, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
    """(logical name, full tensor) of every tensor of the model in ``folder``, in model order, on the CPU.

    ``spec``: the model that is expected (None: the one config.json describes). ``dtype``: what to convert to (None: as stored; the
    balancing bias, zero where the file has no place for it, is always float32). Raises ValueError in one line for the first thing
    that is missing, unexpected or of the wrong shape, before anything is yielded.
    """
    where = Path(folder)
    form, found, _ = read_config(where)
    expected = found if spec is None else spec
    _agree(where, found, expected)
    with ExitStack() as stack:
        files = _open(where, stack)
        _check_names(where, files, form, expected)
        yield from _merged(files, form, expected, dtype)


def _merged(files: dict[str, Any], form: Form, spec: ModelSpec, dtype: torch.dtype | None) -> Iterator[tuple[str, Tensor]]:
    rows = {name: row for name, _, row in form.rows(spec)}
    for name, shape in logical_shapes(spec).items():
        if name.endswith(BALANCE_BIAS):
            yield name, _whole(files, rows[name], spec).float() if name in rows else torch.zeros(shape)
        else:
            tensor = _whole(files, rows[name], spec)
            yield name, tensor if dtype is None else tensor.to(dtype)


def _whole(files: dict[str, Any], row: Row, spec: ModelSpec) -> Tensor:
    return row.transform.merge([files[name].get_tensor(name) for name in row.names], spec).contiguous()


def _agree(folder: Path, found: ModelSpec, expected: ModelSpec) -> None:
    for field in ModelSpec.model_fields.keys() - INDIFFERENT:
        here, there = getattr(found, field), getattr(expected, field)
        if here != there and not (field == "intermediate_size" and "dense" not in expected.layer_kinds()):
            raise ValueError(f"{folder / 'config.json'}: {field} is {here}, but the model to be filled has {there}")
    for i, (here, there) in enumerate(zip(_layers(found), _layers(expected), strict=True)):
        if here != there:
            raise ValueError(f"{folder / 'config.json'}: layer {i} is {here}, but the model to be filled has {there}")


def _layers(spec: ModelSpec) -> list[str]:
    """What each layer is: the same stack may be described by different intervals."""
    windows = [spec.window(i) for i in range(spec.num_layers)]
    return [f"{kind}, " + (f"window {w}" if w else "full attention") for kind, w in zip(spec.layer_kinds(), windows, strict=True)]


def _open(folder: Path, stack: ExitStack) -> dict[str, Any]:
    """Every tensor's name -> the open file that holds it; data stays on disk."""
    files: dict[str, Any] = {}
    for path in _paths(folder):
        try:
            opened = stack.enter_context(safe_open(path, framework="pt"))
        except (OSError, SafetensorError) as error:
            raise ValueError(f"{path}: not a readable safetensors file: {' '.join(str(error).split())[:120]}") from None
        names = opened.keys()
        for name in names:
            if name in files:
                raise ValueError(f"{path}: {name} is also in another file")
            files[name] = opened
    return files


def _paths(folder: Path) -> list[Path]:
    """The safetensors files: the single one, or all that the index names."""
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]
    if not (folder / INDEX).is_file():
        pickled = sorted(p.name for pattern in PICKLED for p in folder.glob(pattern))
        if pickled:
            raise ValueError(f"{folder}: only pickled weights ({pickled[0]}), which can run code when read; convert them to safetensors first")
        raise ValueError(f"{folder}: neither {SINGLE} nor {INDEX}")
    try:
        names = sorted(set(json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"].values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise ValueError(f"{folder / INDEX}: not an index of safetensors files") from None
    for name in names:
        if not isinstance(name, str) or Path(name).name != name or not name.endswith(".safetensors"):
            raise ValueError(f"{folder / INDEX}: {name!r:.80} is not the name of a safetensors file beside it")
    return [folder / name for name in names]


def _check_names(folder: Path, files: dict[str, Any], form: Form, spec: ModelSpec) -> None:
    shapes = form.file_shapes(spec)
    missing = [name for name in shapes if name not in files]
    if missing:
        raise ValueError(f"{folder}: {missing[0]} is missing{_more(missing)}")
    strange = [name for name in files if name not in shapes and not name.endswith(REBUILT) and not _is_tied_head(name, files, spec)]
    if strange:
        raise ValueError(f"{folder}: {strange[0]} is not expected in form '{form.name}' of this model{_more(strange)}")
    _check_shapes(folder, files, shapes)


def _check_shapes(folder: Path, files: dict[str, Any], shapes: Shapes) -> None:
    for name, shape in shapes.items():
        stored = files[name].get_slice(name)
        if tuple(stored.get_shape()) != shape:
            raise ValueError(f"{folder}: {name} has shape {stored.get_shape()}, expected {list(shape)}")
        if stored.get_dtype() not in ("F64", "F32", "F16", "BF16"):
            raise ValueError(f"{folder}: {name} is stored as {stored.get_dtype()}, expected F64, F32, F16 or BF16")


def _is_tied_head(name: str, files: dict[str, Any], spec: ModelSpec) -> bool:
    """Whether a head that the model shares with its embedding was stored all the same, with equal values."""
    if name != "lm_head.weight" or not spec.tie_embeddings:
        return False
    return torch.equal(files[name].get_tensor(name), files["model.embed_tokens.weight"].get_tensor("model.embed_tokens.weight"))


def _more(names: list[str]) -> str:
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""
