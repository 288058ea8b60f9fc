"""Do transformers' own classes compute, from our exported folders, what our definition computes - and the other way round?

Theirs in float32 with eager attention, the definition in float64. Differences are relative to the largest value compared.
"""

from __future__ import annotations

import pytest
import torch
from peer_models import TRANSFORMERS, constants_of, cross_entropy, difference, gradients, logits_of, params_of, spec_of, tokens
from transformers import AutoConfig, AutoModelForCausalLM

from moetrain.export import export, load, read_config
from moetrain.export.form import Form

TOLERANCE = 1e-5
each = pytest.mark.parametrize("form, spec", [(form, spec_of(fields)) for form, fields in TRANSFORMERS.values()], ids=TRANSFORMERS.keys())


def theirs_of(folder):
    """Their class with every tensor of the folder in it and none left over."""
    model, info = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"], info
    return model.eval()


def as_logical(form: Form, spec, named: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors under the file's names, put together under the logical ones."""
    return {name: row.transform.merge([named[n] for n in row.names], spec) for name, _, row in form.rows(spec) if not name.endswith("balance_bias")}


def per_expert(named: dict[str, torch.Tensor], form: Form, spec) -> dict[str, torch.Tensor]:
    """Their parameters (or gradients) under the file's names: the class keeps all experts of a layer in one tensor."""
    out = {}
    for name, tensor in named.items():
        folder = name.rsplit(".", 1)[0]
        if name.endswith("experts.gate_up_proj"):
            for e, pair in enumerate(tensor):
                gate, up = pair.chunk(2)
                out |= {f"{folder}.{e}.gate_proj.weight": gate, f"{folder}.{e}.up_proj.weight": up}
        elif name.endswith("experts.down_proj"):
            out |= {f"{folder}.{e}.down_proj.weight": t for e, t in enumerate(tensor)}
        else:
            out[name] = tensor
    if form.name == "mixtral":
        old = (("mlp.gate.", "block_sparse_moe.gate."), ("mlp.experts.", "block_sparse_moe.experts."), ("gate_proj", "w1"), ("up_proj", "w3"), ("down_proj", "w2"))
        for new, was in old:
            out = {name.replace(new, was): tensor for name, tensor in out.items()}
    return out


@each
def test_they_compute_our_logits_from_our_folder(form, spec, tmp_path, record_property):
    params, constants = params_of(spec), constants_of(form)
    model = theirs_of(export(params, spec, form, tmp_path / "out", constants))
    with torch.no_grad():
        ours, theirs = logits_of(params, spec, constants, tokens()), model(tokens(), use_cache=False).logits
    record_property("difference", difference(ours, theirs))
    assert difference(ours, theirs) < TOLERANCE


@each
def test_we_compute_their_logits_from_their_folder(form, spec, tmp_path, record_property):
    """Their random model, saved by them, read by us; config.json written by them too."""
    export(params_of(spec), spec, form, tmp_path / "ours", constants_of(form))
    torch.manual_seed(5)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path / "ours", initializer_range=0.2), attn_implementation="eager").eval()
    model.save_pretrained(tmp_path / "theirs")
    found = read_config(tmp_path / "theirs")
    assert found.spec.model_dump(exclude={"name"}) == spec.model_dump(exclude={"name"}) and found.constants == constants_of(form)
    params = dict(load(tmp_path / "theirs", spec))
    with torch.no_grad():
        ours, theirs = logits_of(params, spec, found.constants, tokens()), model(tokens(), use_cache=False).logits
    record_property("difference", difference(ours, theirs))
    assert difference(ours, theirs) < TOLERANCE


@each
def test_gradients_are_the_same(form, spec, tmp_path, record_property):
    params, constants = params_of(spec), constants_of(form)
    model = theirs_of(export(params, spec, form, tmp_path / "out", constants))
    cross_entropy(model(tokens(), use_cache=False).logits, tokens()).backward()
    grads = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in model.named_parameters()}
    theirs = as_logical(read_config(tmp_path / "out").form, spec, per_expert(grads, read_config(tmp_path / "out").form, spec))
    ours = gradients(params, spec, constants, tokens())
    worst = max(difference(ours[name], theirs[name]) for name in theirs if theirs[name].any() or ours[name].any())
    record_property("difference", worst)
    assert theirs.keys() == {name for name in ours if not name.endswith("balance_bias")} and worst < TOLERANCE
