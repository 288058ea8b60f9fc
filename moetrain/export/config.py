"""Which model, in which layout, does a folder's config.json describe?"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import pydantic

from moesim import huggingface
from moesim.spec import ModelSpec
from moetrain.export import olmo3moe
from moetrain.export.constants import Constants
from moetrain.export.form import Form
from moetrain.export.registry import FORMS

MAX_CONFIG_BYTES = 10_000_000

# What a class uses where its config.json is silent.
THETA = {"mixtral": 1_000_000.0}
NORM_EPS = {"mixtral": 1e-5, "olmoe": 1e-5, "olmo3moe": 1e-5}

# Names that transformers 5 writes for a class's own: (model_type, its name) -> the published one.
ALIASES = {("qwen3_moe", "num_local_experts"): "num_experts"}

# Features of the known layouts that no spec describes, and the values at which they do nothing.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "clip_qkv": (None,),
    "rope_scaling": (None,),
    "rope_interleave": (True,),
    "quantization_config": (None,),
}


class Imported(NamedTuple):
    form: Form
    spec: ModelSpec
    constants: Constants


def read_config(folder: str | Path) -> Imported:
    """The layout, spec and constants of ``folder``/config.json. Raises ValueError in one line."""
    path = Path(folder) / "config.json"
    config = _json(path)
    kind = str(config.get("model_type"))[:60]
    if kind not in FORMS:
        raise ValueError(f"{path}: model_type '{kind}' has no known layout; known: {', '.join(FORMS)}")
    config |= {new: config[old] for (of, old), new in ALIASES.items() if of == kind and old in config and new not in config}
    for key, legal in NEUTRAL.items():
        if config.get(key, legal[0]) not in legal and not (key == "rope_scaling" and _is_default_rope(config[key])):
            raise ValueError(f"{path}: '{key}' {config[key]!r:.60} is not supported; {' or '.join(map(repr, legal))} is")
    try:
        fields = olmo3moe.model_fields(config) if kind == "olmo3moe" else huggingface.model_fields(config)
        return Imported(FORMS[kind], ModelSpec(**fields), _constants(config, kind))
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        raise ValueError(f"{path}: {'.'.join(map(str, first['loc']))}{': ' if first['loc'] else ''}{first['msg']}") from None
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _json(path: Path) -> dict[str, Any]:
    try:
        if path.stat().st_size > MAX_CONFIG_BYTES:
            raise ValueError(f"{path}: larger than {MAX_CONFIG_BYTES} bytes")
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror or error}") from None
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"{path}: not JSON: {' '.join(str(error).split())[:120]}") from None
    if not isinstance(config, dict):
        raise ValueError(f"{path}: must hold one object")
    return config


def _is_default_rope(value: Any) -> bool:
    return isinstance(value, dict) and value.get("rope_type", value.get("type")) == "default"


def _constants(config: dict[str, Any], kind: str) -> Constants:
    rope = config.get("rope_parameters") or {}
    if not isinstance(rope, dict) or rope.get("rope_type", "default") != "default":
        raise ValueError(f"'rope_parameters' {rope!r:.80} is not supported; rope_type 'default' is")
    theta = rope.get("rope_theta") or config.get("rope_theta") or THETA.get(kind, 10_000.0)
    eos, positions = config.get("eos_token_id"), config.get("max_position_embeddings")
    return Constants(
        rope_theta=_positive("rope_theta", theta),
        norm_eps=_positive("rms_norm_eps", config.get("rms_norm_eps", NORM_EPS.get(kind, 1e-6))),
        embed_scale=_positive("embed_scale", config.get("embed_scale", 1.0)),
        max_positions=positions if type(positions) is int and positions > 0 else 4096,  # OLMo-core writes -1
        eos_token=eos if type(eos) is int else None,
    )


def _positive(key: str, value: Any) -> float:
    if type(value) not in (int, float) or not 0 < value < 1e12:
        raise ValueError(f"'{key}' must be a positive number, not {value!r:.40}")
    return float(value)
