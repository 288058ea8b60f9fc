"""Which layouts are known, and can this one hold this model?"""

from __future__ import annotations

import difflib
from typing import Any

from moesim.spec import ModelSpec
from moetrain.export import deepseek_v3, llama, mixtral, olmo3moe, olmoe, qwen3
from moetrain.export.constants import DEFAULT, Constants
from moetrain.export.form import ANY, PLAIN, Form

FORMS: dict[str, Form] = {
    form.name: form for form in (mixtral.FORM, qwen3.MOE, olmoe.FORM, olmo3moe.FORM, deepseek_v3.FORM, llama.FORM, qwen3.DENSE_FORM)
}
KEEPS_EMBED_SCALE = ("olmo3moe",)


def form_named(name: str) -> Form:
    """The form of this name. Raises ValueError with the nearest name."""
    if name in FORMS:
        return FORMS[name]
    near = difflib.get_close_matches(name, FORMS, 1)
    hint = f"; did you mean '{near[0]}'?" if near else ""
    raise ValueError(f"form '{name[:60]}' is not known (known: {', '.join(FORMS)}){hint}")


def check(form: Form, spec: ModelSpec, constants: Constants = DEFAULT) -> None:
    """Refuses, in one line that names the field and the forms that can hold it, a model the form has no place for."""
    if bool(spec.num_experts) != form.moe:
        kind = "experts" if spec.num_experts else "no experts"
        raise ValueError(f"model '{spec.name}' has {kind}: form '{form.name}' cannot hold that; {_list(f.name for f in FORMS.values() if f.moe != form.moe)} can")
    for field in PLAIN:
        if not form.can(field, getattr(spec, field)):
            raise ValueError(_refusal(form, spec, field))
    if constants.embed_scale != 1.0 and form.name not in KEEPS_EMBED_SCALE:
        raise ValueError(f"embed_scale {constants.embed_scale:g}: form '{form.name}' has no place for it; {_list(KEEPS_EMBED_SCALE)} can")
    problem = form.limit(spec, constants)
    if problem:
        raise ValueError(f"form '{form.name}' cannot hold {problem}")


def _refusal(form: Form, spec: ModelSpec, field: str) -> str:
    value = getattr(spec, field)
    others = [other.name for other in FORMS.values() if other.moe == form.moe and other.can(field, value)]
    who = f"{_list(others)} can" if others else "no form can"
    return f"{field} {_text(value)}: form '{form.name}' holds only {_list(_text(v) for v in form.legal(field) or ())}; {who}"


def _text(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _list(names: Any) -> str:
    return ", ".join(names)


__all__ = ["ANY", "FORMS", "check", "form_named"]
