"""How does what a person wrote (YAML, presets by name, a Hugging Face config.json, --set k=v) become a checked Scenario?

Everything refused is refused in one line that says where, what, and what is legal: SpecError is the only exception that leaves here.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pydantic

from . import fields, huggingface
from .document import Document, SpecError, parse_yaml, read_text, read_yaml
from .spec import ClusterSpec, GpuSpec, ModelSpec, Scenario, Spec

FOLDERS = {"model": "models", "cluster": "clusters", "gpu": "gpus"}  # what a name is looked up in


class _NotFound(Exception):
    """A name that stands for nothing; whoever knows where it was written says so."""


def _read_config_json(path: Path) -> Document:
    """A Hugging Face config.json as the fields of a ModelSpec."""
    try:
        config = json.loads(read_text(path))
        return Document(huggingface.model_fields(config), {(): str(path)})
    except huggingface.ConfigError as error:
        raise SpecError(f"{path}: {error}") from None
    except (ValueError, RecursionError) as error:
        if isinstance(error, SpecError):
            raise
        raise SpecError(f"{path}: not JSON: {' '.join(str(error).split())[:120]}") from None


# --- presets --------------------------------------------------------------------------------------------------------------------


def scenarios_dir() -> Path:
    """The folder of shipped YAML: beside the package in a checkout, inside it once installed."""
    here = Path(__file__).resolve().parent
    return next((p for p in (here / "scenarios", here.parent / "scenarios") if p.is_dir()), here.parent / "scenarios")


def preset_names(kind: str) -> tuple[str, ...]:
    """Names of the shipped presets of "model", "cluster" or "gpu"."""
    return tuple(sorted(p.stem for p in (scenarios_dir() / FOLDERS[kind]).glob("*.yaml")))


def _read_preset(kind: str, name: str, base: Path) -> Document:
    """The file a name or path stands for: beside the file that names it, in the working directory, or shipped."""
    if len(name) > 400 or not name.isprintable():
        raise _NotFound(f"{kind}: not a name or path: {name[:40]!r}")
    looks_like_path = "/" in name or name.endswith((".yaml", ".yml", ".json"))
    if not looks_like_path and name in preset_names(kind):
        return read_yaml(scenarios_dir() / FOLDERS[kind] / f"{name}.yaml")
    for path in (base / name, Path(name)) if looks_like_path else ():
        path = path / "config.json" if kind == "model" and path.is_dir() else path
        if path.is_file():
            return _read_config_json(path) if kind == "model" and path.suffix == ".json" else read_yaml(path)
    refused = huggingface.refusal(name) if kind == "model" else None
    if refused:
        raise _NotFound(f"{kind}: {refused}")
    what = "no such file" if looks_like_path else f"no such {kind}"
    raise _NotFound(f"{kind}: {what}: '{name}'{'' if looks_like_path else fields.nearest(name, preset_names(kind))}")


class _Assembly:
    """A scenario on its way from text to spec: references are replaced by what they name when something looks inside them."""

    def __init__(self, doc: Document, base: Path) -> None:
        self.doc, self.base = doc, base
        self.overridden: set[fields.Path] = set()

    def resolve(self, path: fields.Path) -> None:
        """Replace a name, path or {preset: name, overrides} at `path` by the fields it stands for."""
        kind = path[-1] if path else ""
        value = fields.data_at(self.doc.data, path)
        name = value.get("preset") if isinstance(value, dict) else value
        if kind not in FOLDERS or not isinstance(name, str):
            return
        try:
            preset = _read_preset(str(kind), name, self.base)
        except _NotFound as error:
            raise self.doc.error(path, str(error)) from None
        if not isinstance(preset.data, dict):
            raise preset.error((), f"a {kind} must be a mapping of keys to values")
        overrides = {k: v for k, v in value.items() if k != "preset"} if isinstance(value, dict) else {}
        if overrides:
            self.overridden.add(path)
        preset.marks |= {p[len(path) :]: m for p, m in self.doc.marks.items() if p[: len(path)] == path and len(p) > len(path)}
        self.doc.mount(path, preset)
        _put(self.doc.data, path, {**preset.data, **overrides})

    def set(self, text: str) -> None:
        """Apply one `--set a.b=value`."""
        key, equals, value = text.partition("=")
        path: fields.Path = tuple(key.strip().split("."))
        if not equals or not all(path):
            raise SpecError(f"--set {text[:80]}: write it as key.key=value")
        parsed = parse_yaml(value, f"--set {key.strip()}")
        parsed.marks = dict.fromkeys(parsed.marks, f"--set {key.strip()}")
        real: fields.Path = ()
        for part in path[:-1]:
            real = self._step(real, part, text)
            self.resolve(real)
        if path[-1] == "preset" and real and real[-1] in FOLDERS:
            # The named preset takes the place of what is there: overrides written for one model mean nothing in another.
            self.doc.mount(real, parsed)
            _put(self.doc.data, real, parsed.data)
            self.overridden.discard(real)
            self.resolve(real)
            return
        real = self._step(real, path[-1], text)
        if len(real) > 1:
            self.overridden.add(real[:1])
        self.doc.mount(real, parsed)
        _put(self.doc.data, real, parsed.data)

    def _step(self, path: fields.Path, part: str, text: str) -> fields.Path:
        """`path` one key deeper; a list is entered by position or by the `name` of its item."""
        parent = fields.data_at(self.doc.data, path) if path else self.doc.data
        if isinstance(parent, list):
            names = [str(p.get("name")) if isinstance(p, dict) else "" for p in parent]
            if part in names:
                return (*path, names.index(part))
            if part.isdecimal() and int(part) < len(parent):
                return (*path, int(part))
            raise SpecError(f"--set {text[:80]}: no '{part}' at {fields.dotted(path)}{fields.nearest(part, names)}")
        if parent is None and path:
            _put(self.doc.data, path, {})
        elif not isinstance(parent, dict):
            raise SpecError(f"--set {text[:80]}: {fields.dotted(path)} has no keys inside it")
        return (*path, part)

    def take_total(self, path: fields.Path) -> Any:
        """Remove `total_params` from a model; None where something overrode the model it belongs to."""
        model = fields.data_at(self.doc.data, path) if path else self.doc.data
        total = model.pop("total_params", None) if isinstance(model, dict) else None
        return None if path in self.overridden else total


def _put(data: Any, path: fields.Path, value: Any) -> None:
    for key in path[:-1]:
        data = data[key]
    data[path[-1]] = value


# --- specs ----------------------------------------------------------------------------------------------------------------------


def _build(cls: type[Spec], assembly: _Assembly) -> Any:
    doc = assembly.doc
    if not isinstance(doc.data, dict):
        raise doc.error((), f"a {cls.__name__} must be a mapping of keys to values")
    try:
        return cls.model_validate(fields.to_si(cls, doc.data))
    except fields.FieldError as error:
        raise doc.error(error.path, str(error)) from None
    except pydantic.ValidationError as error:
        problem = fields.explain(cls, error, doc.data)
        raise doc.error(problem.path, str(problem)) from None


def _check_total(model: ModelSpec, total: Any, doc: Document, path: fields.Path) -> None:
    if total is not None and total != model.num_params:
        raise doc.error((*path, "total_params"), f"total_params says {total!r}, but the model as described has {model.num_params}")


def load_scenario(path: str | Path, sets: Iterable[str] = ()) -> Scenario:
    """The scenario in a YAML file (or shipped under this name), with `--set` overrides applied in order. Raises SpecError."""
    path = Path(path)
    shipped = scenarios_dir() / f"{path}.yaml"
    if not path.exists() and path.parent == Path(".") and not path.suffix:
        if not shipped.is_file():
            names = [p.stem for p in scenarios_dir().glob("*.yaml") if "workload" in read_yaml(p).data]
            raise SpecError(f"no such file or scenario: '{path}'{fields.nearest(path, names)}")
        path = shipped
    return parse_scenario(read_text(path), sets, file=str(path), base=path.parent)


def parse_scenario(text: str, sets: Iterable[str] = (), file: str = "scenario", base: Path = Path(".")) -> Scenario:
    """As load_scenario, from the text itself; paths in it are relative to `base`."""
    assembly = _Assembly(parse_yaml(text, file), base)
    if not isinstance(assembly.doc.data, dict):
        raise assembly.doc.error((), "a scenario must be a mapping of keys to values")
    for one in sets:
        assembly.set(one)
    for reference in (("model",), ("cluster",), ("cluster", "gpu")):
        assembly.resolve(reference)
    total = assembly.take_total(("model",))
    scenario: Scenario = _build(Scenario, assembly)
    _check_total(scenario.model, total, assembly.doc, ("model",))
    return scenario


def _load(kind: str, cls: type[Spec], name: str | Path, sets: Iterable[str]) -> Any:
    assembly = _Assembly(Document({kind: str(name)}), Path("."))
    assembly.resolve((kind,))
    for one in sets:
        assembly.set(f"{kind}.{one}")
    if kind == "cluster":
        assembly.resolve((kind, "gpu"))
    total = assembly.take_total((kind,))
    inner = {p[1:]: mark for p, mark in assembly.doc.marks.items() if p}
    assembly.doc = Document(assembly.doc.data[kind], inner)
    spec = _build(cls, assembly)
    if kind == "model":
        _check_total(spec, total, assembly.doc, ())
    return spec


def load_model(name: str | Path, sets: Iterable[str] = ()) -> ModelSpec:
    """A model by preset name, YAML path or config.json path, with overrides ("num_experts=8"). Raises SpecError."""
    return _load("model", ModelSpec, name, sets)


def load_cluster(name: str | Path, sets: Iterable[str] = ()) -> ClusterSpec:
    """A cluster by preset name or path, with overrides ("num_nodes=512"). Raises SpecError."""
    return _load("cluster", ClusterSpec, name, sets)


def load_gpu(name: str | Path, sets: Iterable[str] = ()) -> GpuSpec:
    """A GPU by preset name or path, with overrides. Raises SpecError."""
    return _load("gpu", GpuSpec, name, sets)


def read_dump(data: Any, where: str) -> Scenario:
    """A scenario from its own JSON form (`model_dump`), as a checkpoint or manifest holds it. Raises SpecError."""
    try:
        return Scenario.model_validate_json(json.dumps(data))
    except (TypeError, ValueError) as error:
        raise SpecError(f"{where}: no scenario of this version: {' '.join(str(error).split())[:160]}") from None
