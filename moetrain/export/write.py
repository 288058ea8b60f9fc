"""How does a model get into a Hugging Face folder whole, exact, and a shard at a time?

Tensors stream in by logical name, are cut into the file's names and written shard by shard into a hidden folder beside the target;
every logical tensor is then put together again from those files and compared by digest; only then does the folder get its name.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from moesim.spec import ModelSpec
from moetrain.export.constants import DEFAULT, Constants
from moetrain.export.form import Form
from moetrain.export.names import BALANCE_BIAS, Shapes, logical_shapes
from moetrain.export.read import INDEX, SINGLE, load
from moetrain.export.registry import check, form_named

Source = Mapping[str, Tensor] | Callable[[str], Tensor] | Iterable[tuple[str, Tensor]]
SHARD_BYTES = 5 * 10**9
TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "tokenizer.model", "vocab.json",
    "merges.txt", "chat_template.jinja", "generation_config.json",
)  # fmt: skip


def export(
    tensors: Source,
    spec: ModelSpec,
    form: str,
    folder: str | Path,
    constants: Constants = DEFAULT,
    dtype: torch.dtype | None = None,
    shard_bytes: int = SHARD_BYTES,
    tokenizer: str | Path | None = None,
) -> Path:
    """Writes a model as ``form`` into ``folder``, which must not exist or be empty, and returns the folder.

    ``tensors``: full (unsharded) tensors by logical name: a mapping, a function of the name, or pairs in any order. ``dtype``: what
    to convert to (None: as they are; the balancing bias stays float32). ``tokenizer``: a tokenizer.json or a folder of such files to
    copy. Memory: one shard and one logical tensor. Raises ValueError in one line; nothing is left behind then.
    """
    known = form_named(form)
    check(known, spec, constants)
    if shard_bytes < 1:
        raise ValueError(f"shard_bytes must be at least 1, not {shard_bytes}")
    target = Path(folder)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ValueError(f"{target}: exists and is not an empty folder")
    copies = _tokenizer_files(tokenizer)
    target.parent.mkdir(parents=True, exist_ok=True)
    hidden = Path(tempfile.mkdtemp(dir=target.parent, prefix=f".{target.name}.", suffix=".tmp"))
    try:
        _fill(hidden, tensors, spec, known, constants, dtype, shard_bytes)
        for copy in copies:
            shutil.copyfile(copy, hidden / copy.name)
        hidden.chmod(0o755)
        _publish(hidden, target)
    except BaseException:
        shutil.rmtree(hidden, ignore_errors=True)
        raise
    return target


def _publish(hidden: Path, target: Path) -> None:
    """Every byte on disk first, then the name."""
    for path in [*hidden.iterdir(), hidden]:
        _sync(path)
    os.replace(hidden, target)
    _sync(target.parent)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _fill(folder: Path, tensors: Source, spec: ModelSpec, form: Form, constants: Constants, dtype: torch.dtype | None, shard_bytes: int) -> None:
    shards, digests, found = Shards(folder, shard_bytes), {}, None
    rows = {name: row for name, _, row in form.rows(spec)}
    for name, tensor in _checked(_pairs(tensors, spec), logical_shapes(spec)):
        if name not in rows:
            _must_be_zero(name, tensor, form)
            continue
        tensor = _converted(name, tensor, dtype)
        found = tensor.dtype if not name.endswith(BALANCE_BIAS) else found
        digests[name] = digest(tensor)
        for part_name, part in zip(rows[name].names, rows[name].transform.split(tensor, spec), strict=True):
            shards.add(part_name, part)
    for name in rows.keys() - digests.keys():  # only a balancing bias may be left out
        for part_name in rows[name].names:
            shards.add(part_name, torch.zeros(spec.num_experts))
    shards.close()
    own = {"architectures": [form.architecture], "model_type": form.name, "torch_dtype": str(found).removeprefix("torch.")}
    config = own | form.write_config(spec, constants)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    _verify(folder, spec, digests)


def _converted(name: str, tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    keep = torch.float32 if name.endswith(BALANCE_BIAS) else dtype or tensor.dtype
    return tensor.detach().to(device="cpu", dtype=keep)


def _pairs(tensors: Source, spec: ModelSpec) -> Iterator[tuple[str, Tensor]]:
    """Any source as (name, tensor) pairs; a mapping's unknown names come too, to be refused."""
    if isinstance(tensors, Mapping):
        return iter(tensors.items())
    if callable(tensors):
        return ((name, tensors(name)) for name in logical_shapes(spec))
    return iter(tensors)


def _checked(pairs: Iterator[tuple[str, Tensor]], shapes: Shapes) -> Iterator[tuple[str, Tensor]]:
    """The pairs, once it is sure that each is expected, of the right shape and the first of its name, and at the end that none lacks."""
    waiting = dict(shapes)
    for name, tensor in pairs:
        if name not in shapes:
            raise ValueError(f"{name}: not a tensor of this model")
        if waiting.pop(name, None) is None:
            raise ValueError(f"{name}: given twice")
        if tuple(tensor.shape) != shapes[name]:
            raise ValueError(f"{name}: shape {list(tensor.shape)}, but the model has {list(shapes[name])}")
        yield name, tensor
    lacking = [name for name in waiting if not name.endswith(BALANCE_BIAS)]
    if lacking:
        raise ValueError(f"{lacking[0]}: missing" + (f", and {len(lacking) - 1} more" if len(lacking) > 1 else ""))


def _must_be_zero(name: str, tensor: Tensor, form: Form) -> None:
    if bool(tensor.any()):
        raise ValueError(f"{name} is not zero: form '{form.name}' has no place for it; deepseek_v3 can")


def _verify(folder: Path, spec: ModelSpec, digests: dict[str, str]) -> None:
    for name, tensor in load(folder, spec):
        if name in digests and digest(tensor) != digests[name]:
            raise ValueError(f"{name}: what was read back is not what was written; nothing is published")


def digest(tensor: Tensor) -> str:
    """SHA-256 of a tensor's dtype, shape and bytes."""
    data = tensor.detach().cpu().contiguous()
    found = hashlib.sha256(f"{data.dtype} {tuple(data.shape)} ".encode())
    found.update(memoryview(data.flatten().view(torch.uint8).numpy()))
    return found.hexdigest()


def _tokenizer_files(tokenizer: str | Path | None) -> list[Path]:
    if tokenizer is None:
        return []
    path = Path(tokenizer)
    found = [path] if path.is_file() else [path / name for name in TOKENIZER_FILES if (path / name).is_file()]
    if not found or path.is_file() and path.name not in TOKENIZER_FILES:
        raise ValueError(f"{path}: no tokenizer there; expected one of {', '.join(TOKENIZER_FILES[:4])} ...")
    return found


class Shards:
    """The files of one checkpoint while they are written: tensors pile up to ``limit`` bytes, then become a file."""

    def __init__(self, folder: Path, limit: int) -> None:
        self._folder, self._limit = folder, limit
        self._pile: dict[str, Tensor] = {}
        self._bytes = self._total = 0
        self._files: list[list[str]] = []

    def add(self, name: str, tensor: Tensor) -> None:
        """Copies, so that the pile never keeps the whole of a tensor it holds a part of."""
        size = tensor.numel() * tensor.element_size()
        if self._pile and self._bytes + size > self._limit:
            self._flush()
        self._pile[name] = tensor.clone(memory_format=torch.contiguous_format)
        self._bytes += size
        self._total += size

    def _flush(self) -> None:
        save_file(self._pile, self._folder / f"{len(self._files)}.part", metadata={"format": "pt"})
        self._files.append(list(self._pile))
        self._pile, self._bytes = {}, 0

    def close(self) -> None:
        """Gives the files their names: one alone, or numbered with an index."""
        if self._pile:
            self._flush()
        count = len(self._files)
        names = [SINGLE] if count == 1 else [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]
        for i, name in enumerate(names):
            os.replace(self._folder / f"{i}.part", self._folder / name)
        if count > 1:
            weight_map = {tensor: name for name, held in zip(names, self._files, strict=True) for tensor in held}
            index = {"metadata": {"total_size": self._total}, "weight_map": dict(sorted(weight_map.items()))}
            (self._folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
