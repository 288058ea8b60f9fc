"""Does the trainer's own model, started from another implementation's checkpoint, compute that implementation's logits and gradients?

Their random model, saved by them, read by us into the model that is trained. Float32 on both sides; differences are relative to the
largest value compared.
"""

from __future__ import annotations

import pytest
import torch
from peer_models import OLMO_CORE, TRANSFORMERS, constants_of, cross_entropy, difference, numbers_of, params_of, spec_of, tokens
from small_stages import gradients, stage_with, whole
from test_transformers import as_logical, per_expert
from transformers import AutoConfig, AutoModelForCausalLM

from moesim.layout import Layout
from moetrain.balance import Balance
from moetrain.export import export, load, read_config
from moetrain.supports import supports

TOLERANCE = 1e-5
CASES = TRANSFORMERS | {f"olmo3moe_{name}": ("olmo3moe", fields) for name, fields in OLMO_CORE.items()}
BUILT = {name: (form, spec_of(fields)) for name, (form, fields) in CASES.items() if supports(Layout(), spec_of(fields)) is None}
BALANCE, Z = 0.015, 1e-3


def their_model(folder):
    """A random model of the class that the folder's config.json names."""
    torch.manual_seed(11)
    if read_config(folder).form.name != "olmo3moe":
        return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder, initializer_range=0.15), attn_implementation="eager").eval()
    pytest.importorskip("olmo_core")
    from olmo_core.nn.moe.v2.hf.configuration_olmo3moe import Olmo3MoeConfig
    from olmo_core.nn.moe.v2.hf.modeling_olmo3moe import Olmo3MoeForCausalLM

    config = Olmo3MoeConfig.from_pretrained(folder, initializer_range=0.15)
    config._attn_implementation = "eager"
    return Olmo3MoeForCausalLM(config).eval()


@pytest.mark.parametrize("kernels", ["reference", "grouped_mm"])
@pytest.mark.parametrize("name", BUILT)
def test_the_trained_model_continues_their_checkpoint(name, kernels, tmp_path, record_property):
    form, spec = BUILT[name]
    ids = tokens()
    export(params_of(spec), spec, form, tmp_path / "ours", constants_of(form))
    model = their_model(tmp_path / "ours")
    model.save_pretrained(tmp_path / "theirs")
    found = read_config(tmp_path / "theirs")
    stage = stage_with(spec, dict(load(tmp_path / "theirs", spec)), numbers_of(found.constants), ids.numel(), kernels)
    ours, theirs = stage(ids, whole(ids)), model(ids, use_cache=False).logits
    cross_entropy(ours, ids).backward()
    cross_entropy(theirs, ids).backward()
    named = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in model.named_parameters()}
    wanted, grads = as_logical(found.form, spec, per_expert(named, found.form, spec)), gradients(stage)
    worst = max(difference(grads[n], wanted[n]) for n in wanted if wanted[n].any() or grads[n].any())
    record_property("logits", difference(ours.detach(), theirs.detach()))
    record_property("gradients", worst)
    assert grads.keys() == wanted.keys() and difference(ours.detach(), theirs.detach()) < TOLERANCE and worst < TOLERANCE


@pytest.mark.parametrize("name", OLMO_CORE)
def test_auxiliary_losses_reach_the_router_as_in_olmo_core(name, monkeypatch, record_property):
    """Gradients of cross entropy and both auxiliary losses, ours and those of their own model and training path."""
    pytest.importorskip("olmo_core")
    import olmo_core_model as core
    from test_olmo_core import run, worst

    core.on_cpu(monkeypatch)
    spec, constants, ids = spec_of(OLMO_CORE[name]), constants_of("olmo3moe"), tokens()
    logits, theirs = run(core.build(spec, constants, params_of(spec), BALANCE, Z).train(), ids)
    stage = stage_with(spec, params_of(spec), numbers_of(constants), ids.numel(), balance=Balance(BALANCE, "micro", Z))
    ours = stage(ids, whole(ids))
    cross_entropy(ours, ids).backward()
    grads = core.from_logical(gradients(stage), spec)
    record_property("logits", difference(ours.detach(), logits))
    record_property("gradients", worst(grads, theirs))
    assert difference(ours.detach(), logits) < TOLERANCE and worst(grads, theirs) < TOLERANCE
