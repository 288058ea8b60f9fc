"""What does a class of specs expect at each key: which unit, which nested spec, which names - and how is a wrong value explained?

Works on any pydantic class whose fields carry a "dimension" in their JSON-schema extra; knows no spec by name.
"""

from __future__ import annotations

import difflib
import types
import typing
from collections.abc import Iterator
from functools import lru_cache
from typing import Annotated, Any

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from . import units

Path = tuple[Any, ...]


class FieldError(ValueError):
    """A wrong value and where it stands; `path` is the keys that lead to it."""

    def __init__(self, path: Path, message: str) -> None:
        super().__init__(message)
        self.path = path


def _parts(annotation: Any) -> Iterator[Any]:
    """Every annotation inside this one, itself first, through Annotated, unions, tuples and dict values."""
    yield annotation
    origin = typing.get_origin(annotation)
    if origin is Annotated:
        yield from _parts(typing.get_args(annotation)[0])
    elif origin in (typing.Union, types.UnionType, tuple, dict):
        for part in typing.get_args(annotation):
            yield from _parts(part)


def _extra(metadata: Any) -> dict[str, Any]:
    return metadata.json_schema_extra or {} if isinstance(metadata, FieldInfo) else {}


@lru_cache(maxsize=1024)
def _expects(cls: type[BaseModel], key: str) -> tuple[str | None, type[BaseModel] | None]:
    """(dimension, nested spec) of a field."""
    field = cls.model_fields[key]
    dimension = _extra(field).get("dimension")
    nested = None
    for part in _parts(field.annotation):
        for metadata in getattr(part, "__metadata__", ()):
            dimension = dimension or _extra(metadata).get("dimension")
        if isinstance(part, type) and issubclass(part, BaseModel):
            nested = part
    return dimension, nested


def to_si(cls: type[BaseModel], data: Any, path: Path = ()) -> Any:
    """`data` as the class wants it: text with units turned into SI numbers, lists into tuples. Raises FieldError."""
    if not isinstance(data, dict):
        return data
    return {k: _field_to_si(cls, k, v, (*path, k)) if k in cls.model_fields else v for k, v in data.items()}


def _field_to_si(cls: type[BaseModel], key: str, value: Any, path: Path) -> Any:
    dimension, nested = _expects(cls, key)
    if isinstance(value, list):
        return tuple(to_si(nested, v, (*path, i)) if nested else v for i, v in enumerate(value))
    if isinstance(value, dict):
        if nested:
            return to_si(nested, value, path)
        return {k: _number(v, dimension, (*path, k)) if dimension else v for k, v in value.items()}
    return _number(value, dimension, path) if dimension else value


def to_text(spec: BaseModel) -> dict[str, Any]:
    """A spec as its file would say it: quantities as text with a unit, defaults left out. The inverse of `to_si`, to the last bit."""
    return {key: _field_to_text(type(spec), key, getattr(spec, key)) for key in type(spec).model_fields if key in spec.model_dump(exclude_defaults=True)}


def _field_to_text(cls: type[BaseModel], key: str, value: Any) -> Any:
    dimension, _ = _expects(cls, key)
    if isinstance(value, BaseModel):
        return to_text(value)
    if isinstance(value, (tuple, list)):
        return [to_text(v) if isinstance(v, BaseModel) else v for v in value]
    if isinstance(value, dict):
        return {k: _quantity_text(v, dimension) for k, v in value.items()}
    return _quantity_text(value, dimension)


def _quantity_text(value: Any, dimension: str | None) -> Any:
    unit = units.DIMENSIONS[dimension][0] if dimension in units.DIMENSIONS else ""
    return f"{value!r} {unit}" if unit and value is not None else value


def _number(value: Any, dimension: str, path: Path) -> Any:
    bare = isinstance(value, (int, float)) and not isinstance(value, bool)
    if bare and dimension in units.DIMENSIONS and value != 0:
        raise FieldError(path, f"{dotted(path)}: {value:g} has no unit; write it as text, like {units.suggest(value, dimension)}")
    if not isinstance(value, str):
        return float(value) if bare and dimension != "tokens" else value
    try:
        if dimension == "tokens":
            return units.parse_count(value)
        return units.parse_any(value) if dimension == "any" else units.parse(value, dimension)
    except units.UnitError as error:
        raise FieldError(path, f"{dotted(path)}: {error}") from None


def dotted(path: Path) -> str:
    """("cluster", "tiers", 0, "span") -> "cluster.tiers.0.span"."""
    return ".".join(str(p) for p in path) or "the file"


def nearest(name: Any, known: Any) -> str:
    """'; did you mean ...?' for a name close to a known one, else the known ones where they are few."""
    names = sorted(str(k) for k in known)
    match = difflib.get_close_matches(str(name), names, 1, 0.6)
    if match:
        return f": did you mean '{match[0]}'?"
    return f"; legal: {', '.join(names)}" if 0 < len(names) <= 40 else ""


def _class_at(cls: type[BaseModel], path: Path) -> type[BaseModel] | None:
    for key in path:
        if isinstance(key, int):
            continue
        if key not in cls.model_fields:
            return None
        nested = _expects(cls, key)[1]
        if nested is None:
            return None
        cls = nested
    return cls


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def explain(cls: type[BaseModel], error: ValidationError, data: Any) -> FieldError:
    """The most useful of a validation's complaints: a misspelt key before what its absence causes."""
    problems = error.errors(include_url=False)
    rank = {"extra_forbidden": 0, "value_error": 2, "missing": 3}
    problem = min(problems, key=lambda p: rank.get(p["type"], 1))
    path = _inside(problem["loc"], data, problem["type"] in ("missing", "extra_forbidden"))
    where, kind = path[:-1], problem["type"]
    place = f" at {dotted(where)}" if where else ""
    if kind == "extra_forbidden":
        parent = _class_at(cls, where)
        known = parent.model_fields if parent else ()
        return FieldError(path, f"unknown key '{path[-1]}'{place}{nearest(path[-1], known)}")
    if kind == "missing":
        return FieldError(where, f"missing key '{path[-1]}'{place}")
    if kind == "value_error":
        return FieldError(path, f"{dotted(path)}: {problem['ctx']['error']}")
    message = problem["msg"][0].lower() + problem["msg"][1:]
    hint = nearest(problem["input"], _literals(problem)) if kind == "literal_error" else ""
    return FieldError(path, f"{dotted(path)}: {message}, not {_short(problem['input'])}{hint if hint.startswith(':') else ''}")


def _literals(problem: Any) -> list[str]:
    return problem["ctx"]["expected"].replace(" or ", ", ").replace("'", "").split(", ")


def data_at(data: Any, path: Path) -> Any:
    """The value at a path, or None."""
    for key in path:
        try:
            data = data[key]
        except (KeyError, IndexError, TypeError):
            return None
    return data


def _inside(loc: Path, data: Any, keep_last: bool) -> Path:
    """The part of a validator's location that exists in the data (it appends names of union members and the like)."""
    path: Path = ()
    for i, key in enumerate(loc):
        last = keep_last and i == len(loc) - 1
        if not last and data_at(data, (*path, key)) is None and not _has(data, path, key):
            return path
        path = (*path, key)
    return path


def _has(data: Any, path: Path, key: Any) -> bool:
    parent = data_at(data, path) if path else data
    return isinstance(parent, dict) and key in parent or isinstance(parent, (list, tuple)) and isinstance(key, int) and key < len(parent)
