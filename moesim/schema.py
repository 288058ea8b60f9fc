"""What may stand in a scenario file? (A JSON schema of the text form, so that editors complete and check it.)

Made from the specs themselves; it differs from theirs where the file does: quantities are text with a unit, a model, cluster or GPU
may be a name, and what the loader fills in is not required.
"""

from __future__ import annotations

from typing import Any

from . import units
from .spec import Scenario

REFERENCES = {"model": "ModelSpec", "cluster": "ClusterSpec", "gpu": "GpuSpec"}  # key -> definition it may name


def json_schema() -> dict[str, Any]:
    """JSON schema (draft 2020-12) of a scenario file."""
    schema = Scenario.model_json_schema()
    for definition in (schema, *schema["$defs"].values()):
        for key, field in definition.get("properties", {}).items():
            definition["properties"][key] = _text_form(key, field)
    for name in REFERENCES.values():
        definition = schema["$defs"][name]
        definition.pop("required", None)  # a preset supplies the rest
        definition["properties"]["preset"] = {"type": "string", "description": "a shipped preset, or a path"}
    schema["$defs"]["ModelSpec"]["properties"]["total_params"] = {"type": "integer", "description": "checked against the count"}
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    schema["title"] = "moesim scenario"
    return schema


def _text_form(key: str, field: Any) -> Any:
    """One property as it is written in a file."""
    if key in REFERENCES:
        return {"anyOf": [{"type": "string", "description": f"a preset, or a path to a {key} file"}, field]}
    return _axis(_quantities(field))


def _quantities(node: Any) -> Any:
    """The schema with each number that has a dimension replaced by text with a unit."""
    if isinstance(node, list):
        return [_quantities(n) for n in node]
    if not isinstance(node, dict):
        return node
    dimension = node.get("dimension")
    if dimension is None:
        return {k: _quantities(v) for k, v in node.items()}
    kept = {k: node[k] for k in ("title", "default") if k in node}
    if dimension == "tokens":
        return kept | {"anyOf": [{"type": "integer", "minimum": 1}, {"type": "string", "examples": ["4 Mi tokens"]}]}
    if dimension == "any":
        return kept | {"type": ["string", "number"]}
    return kept | {"type": "string", "examples": [f"8 {units.DIMENSIONS[dimension][1]}"]}


def _axis(field: Any) -> Any:
    """A list of values of an axis may also be one value."""
    options = field.get("anyOf", ()) if isinstance(field, dict) else ()
    lists = [o for o in options if o.get("type") == "array" and "anyOf" in o.get("items", {})]
    return {**field, "anyOf": [*options, *lists[0]["items"]["anyOf"]]} if lists else field
