"""How does what a person wrote (YAML, presets by name, a Hugging Face config.json, --set k=v) become a checked Scenario?

Everything refused is refused in one line that says where, what, and what is legal: SpecError is the only exception that leaves here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pydantic
import yaml

from . import fields, huggingface
from .spec import ClusterSpec, GpuSpec, ModelSpec, Scenario, Spec

MAX_BYTES = 1_000_000
MAX_DEPTH = 20
FOLDERS = {"model": "models", "cluster": "clusters", "gpu": "gpus"}  # what a name is looked up in


class SpecError(ValueError):
    """Input that can't be used; the message is one line."""


class _NotFound(Exception):
    """A name that stands for nothing; whoever knows where it was written says so."""


@dataclass
class Document:
    """Plain data being assembled, and the file and line each part came from."""

    data: Any
    marks: dict[fields.Path, str] = field(default_factory=dict)

    def where(self, path: fields.Path) -> str:
        while path not in self.marks and path:
            path = path[:-1]
        return self.marks.get(path, "")

    def error(self, path: fields.Path, message: str) -> SpecError:
        place = self.where(path)
        return SpecError(" ".join(f"{place}: {message}".split()) if place else " ".join(message.split()))

    def mount(self, path: fields.Path, other: Document) -> None:
        """Forget where what stood at `path` came from; it now comes from `other`."""
        kept = {p: mark for p, mark in self.marks.items() if p[: len(path)] != path}
        self.marks = kept | {path + p: mark for p, mark in other.marks.items()}


# --- text -----------------------------------------------------------------------------------------------------------------------


class _Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    yaml_implicit_resolvers: dict[str, Any] = {}  # plain scalars are resolved below, by the rules of YAML 1.2


_INT = re.compile(r"[-+]?\d+(_\d+)*")
_FLOAT = re.compile(r"[-+]?(\d+(_\d+)*)?\.?\d+([eE][-+]?\d+)?|[-+]?\d+\.([eE][-+]?\d+)?|[-+]?\.(inf|nan|Inf|NaN)")
_WORDS = {"true": True, "True": True, "false": False, "False": False, "null": None, "~": None, "": None}


def _scalar(node: yaml.ScalarNode) -> Any:
    text = node.value
    if node.style or len(text) > 400:
        return text
    if text in _WORDS:
        return _WORDS[text]
    if _INT.fullmatch(text):
        return int(text) if len(text) <= 40 else float("inf")
    if _FLOAT.fullmatch(text):
        return float(text.lower().replace(".inf", "inf").replace(".nan", "nan"))
    return text


def _plain(node: yaml.Node, path: fields.Path, doc: Document, file: str, seen: set[int]) -> Any:
    """The node as dicts, lists and scalars, noting in doc where each key stands."""
    place = f"{file}:{node.start_mark.line + 1}"
    doc.marks.setdefault(path, place)
    if id(node) in seen:
        raise doc.error(path, "aliases (*name) are not supported; write the value out")
    if len(path) > MAX_DEPTH:
        raise doc.error(path, f"nested deeper than {MAX_DEPTH} levels")
    seen.add(id(node))
    if not node.tag.startswith("tag:yaml.org,2002:") or node.tag.rsplit(":", 1)[1] not in ("map", "seq", "str"):
        raise doc.error(path, f"tag {node.tag} is not supported")
    if isinstance(node, yaml.ScalarNode):
        return _scalar(node)
    if isinstance(node, yaml.SequenceNode):
        return [_plain(n, (*path, i), doc, file, seen) for i, n in enumerate(node.value)]
    return _mapping(node, path, doc, file, seen)


def _mapping(node: yaml.MappingNode, path: fields.Path, doc: Document, file: str, seen: set[int]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key_node, value_node in node.value:
        if not isinstance(key_node, yaml.ScalarNode):
            raise doc.error(path, "a key must be plain text")
        key = key_node.value
        doc.marks[(*path, key)] = f"{file}:{key_node.start_mark.line + 1}"
        if key in found:
            raise doc.error((*path, key), f"key '{key}' is given twice")
        found[key] = _plain(value_node, (*path, key), doc, file, seen)
    return found


def parse_yaml(text: str, file: str) -> Document:
    """One YAML document as plain data: no aliases, no tags, no duplicate keys, bounded depth. `file` names it in messages."""
    doc = Document(None, {(): file})
    try:
        node = yaml.compose(text, Loader=_Loader)
        if node is not None:
            del doc.marks[()]
            doc.data = _plain(node, (), doc, file, set())
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise SpecError(f"{file}:{line}: not YAML: {error.problem or error.context}") from None
    except (yaml.YAMLError, RecursionError) as error:
        raise SpecError(f"{file}: not YAML: {' '.join(str(error).split())[:120]}") from None
    return doc


def read_yaml(path: str | Path) -> Document:
    """A YAML file as plain data. Raises SpecError."""
    return parse_yaml(_read_text(Path(path)), str(path))


def _read_text(path: Path) -> str:
    try:
        if path.stat().st_size > MAX_BYTES:
            raise SpecError(f"{path}: larger than {MAX_BYTES} bytes")
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError, ValueError) as error:
        if isinstance(error, SpecError):
            raise
        reason = getattr(error, "strerror", None) or "not UTF-8 text"
        raise SpecError(f"{path}: cannot read: {reason}") from None


def _read_config_json(path: Path) -> Document:
    """A Hugging Face config.json as the fields of a ModelSpec."""
    try:
        config = json.loads(_read_text(path))
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
            names = [p.stem for p in scenarios_dir().glob("*.yaml")]
            raise SpecError(f"no such file or scenario: '{path}'{fields.nearest(path, names)}")
        path = shipped
    return parse_scenario(_read_text(path), sets, file=str(path), base=path.parent)


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
