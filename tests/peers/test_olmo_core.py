"""Does OLMo-core 3 compute the same model: logits, gradients, auxiliary losses, parameters, FLOPs? (ai2-olmo-core 3.0.0)

Twice: its Hugging Face class, from our exported folder; and its own model, block and router. Theirs in float32, the definition in
float64; differences are relative to the largest value compared.
"""

from __future__ import annotations

import pytest
import reference_model as reference
import torch

pytest.importorskip("olmo_core")

import olmo_core_model as core
from olmo_core.nn.moe.v2.hf.configuration_olmo3moe import Olmo3MoeConfig
from olmo_core.nn.moe.v2.hf.modeling_olmo3moe import Olmo3MoeForCausalLM
from peer_models import OLMO_CORE, constants_of, cross_entropy, difference, gradients, logits_of, numbers_of, params_of, spec_of, tokens

from moesim.load import load_model
from moetrain.export import FORMS, export, load, read_config

TOLERANCE = 1e-5
CONSTANTS = constants_of("olmo3moe")
FORM = FORMS["olmo3moe"]
BALANCE, Z = 0.015, 1e-3
each = pytest.mark.parametrize("spec", [spec_of(fields) for fields in OLMO_CORE.values()], ids=OLMO_CORE.keys())


def hf_model(folder):
    """Their Hugging Face class with every tensor of the folder in it and none left over."""
    model, info = Olmo3MoeForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"], info
    return model.eval()


def worst(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    assert ours.keys() == theirs.keys()
    return max(difference(ours[name], theirs[name]) for name in theirs if theirs[name].any() or ours[name].any())


# --- the Hugging Face class -------------------------------------------------------------------------------------------------


@each
def test_the_hugging_face_class_computes_our_logits_and_gradients(spec, tmp_path, record_property):
    params = params_of(spec)
    model = hf_model(export(params, spec, "olmo3moe", tmp_path / "out", CONSTANTS))
    logits = model(tokens(), use_cache=False).logits
    ours = logits_of(params, spec, CONSTANTS, tokens())
    cross_entropy(logits, tokens()).backward()
    named = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in model.named_parameters()}
    theirs = {name: row.transform.merge([named[n] for n in row.names], spec) for name, _, row in FORM.rows(spec)}
    grads = {name: g for name, g in gradients(params, spec, CONSTANTS, tokens()).items() if not name.endswith("balance_bias")}
    record_property("logits", difference(ours, logits.detach()))
    record_property("gradients", worst(grads, theirs))
    assert difference(ours, logits.detach()) < TOLERANCE and worst(grads, theirs) < TOLERANCE


@each
def test_we_compute_the_logits_of_a_folder_they_wrote(spec, tmp_path, record_property):
    export(params_of(spec), spec, "olmo3moe", tmp_path / "ours", CONSTANTS)
    torch.manual_seed(7)
    config = Olmo3MoeConfig.from_pretrained(tmp_path / "ours", initializer_range=0.2)
    config._attn_implementation = "eager"
    model = Olmo3MoeForCausalLM(config).eval()
    model.save_pretrained(tmp_path / "theirs")
    found = read_config(tmp_path / "theirs")
    assert found.spec.model_dump(exclude={"name"}) == spec.model_dump(exclude={"name"}) and found.constants == CONSTANTS
    with torch.no_grad():
        theirs = model(tokens(), use_cache=False).logits
    ours = logits_of(dict(load(tmp_path / "theirs", spec)), spec, CONSTANTS, tokens())
    record_property("logits", difference(ours, theirs))
    assert difference(ours, theirs) < TOLERANCE


# --- the model itself -------------------------------------------------------------------------------------------------------


def run(model, ids):
    """Logits and gradients of their model for the mean cross entropy over all but the last token of each row."""
    labels = torch.cat([ids[:, 1:], torch.full((len(ids), 1), -100)], 1)
    out = model(ids, labels=labels, loss_reduction="mean", return_logits=True)
    out.loss.backward()
    return out.logits.detach(), {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in model.named_parameters()}


@each
@pytest.mark.parametrize("auxiliary", [False, True], ids=["plain", "auxiliary"])
def test_the_core_model_computes_our_logits_and_gradients(spec, auxiliary, monkeypatch, record_property):
    """With the auxiliary losses on, their gradients are those of cross entropy + coefficient * (sum over layers of our losses)."""
    core.on_cpu(monkeypatch)
    params, numbers, ids = params_of(spec), numbers_of(CONSTANTS), tokens()
    balance, z = (BALANCE, Z) if auxiliary else (None, None)
    logits, theirs = run(core.build(spec, CONSTANTS, params, balance, z).train(), ids)
    leaves = {name: p.double().requires_grad_() for name, p in params.items()}
    result = reference.run(leaves, spec, ids, constants=numbers)
    loss = cross_entropy(result.logits, ids)
    if auxiliary:
        loss = loss + sum(BALANCE * reference.balance_loss(r, spec.router) + Z * reference.z_loss(r.logits) for r in result.routings)
    loss.backward()
    ours = core.from_logical({name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in leaves.items()}, spec)
    record_property("logits", difference(result.logits.detach(), logits))
    record_property("gradients", worst(ours, theirs))
    assert difference(result.logits.detach(), logits) < TOLERANCE and worst(ours, theirs) < TOLERANCE


@pytest.mark.parametrize("router", ["softmax", "sigmoid"])
def test_auxiliary_losses_have_the_same_values_and_gradients(router, record_property):
    """Their router alone, without any substitution."""
    spec = spec_of(OLMO_CORE["seed"] | {"router": router})
    params = params_of(spec)
    weight = params["layers.1.moe.router.weight"].clone().requires_grad_()
    x = torch.randn(3, 16, spec.hidden_size, generator=torch.Generator().manual_seed(2))
    theirs = core.model_config(spec, CONSTANTS, BALANCE, Z).block.routed_experts_router.build().train()
    with torch.no_grad():
        theirs.weight.copy_(weight.flatten())
    weights, chosen, _, info = theirs(x, False, loss_div_factor=x.shape[0] * x.shape[1])
    theirs.compute_aux_loss(*info).backward()
    layer = {"moe.router.weight": weight, "moe.router.balance_bias": params["layers.1.moe.router.balance_bias"]}
    ours = reference.route(layer, x.flatten(0, 1), spec)
    balance, z = reference.balance_loss(ours, router), reference.z_loss(ours.logits)
    (BALANCE * balance + Z * z).backward()
    balance, z = float(balance.detach()), float(z.detach())
    assert torch.equal(ours.chosen, chosen.flatten(0, 1))
    found = {"weights": difference(ours.weights.detach(), weights.detach().flatten(0, 1)), "balance": abs(balance / float(theirs.load_balancing_loss) - 1),
             "z": abs(z / float(theirs.z_loss) - 1), "gradient": difference(weight.grad, theirs.weight.grad.view_as(weight))}  # fmt: skip
    for name, value in found.items():
        record_property(name, value)
    assert max(found.values()) < TOLERANCE


# --- the ledger -------------------------------------------------------------------------------------------------------------

SEED_FLOPS = {8: 18_171_297_792, 32: 18_175_426_560, 48: 18_178_179_072, 64: 18_180_931_584, 128: 18_191_941_632}


@pytest.mark.parametrize("num_experts", SEED_FLOPS)
def test_parameters_and_flops_of_the_benchmark_model(num_experts):
    """Their count of the built module (on the meta device) and our ledger's. Theirs adds 6 FLOP a gain of QK norms and final norm."""
    spec = load_model("olmo_core3_seed", [f"num_experts={num_experts}"])
    config = core.model_config(spec, CONSTANTS)
    model = config.build(init_device="meta")
    assert config.num_params == sum(p.numel() for p in model.parameters()) == spec.num_params
    assert config.num_active_params == spec.num_active_params
    gains = spec.hidden_size + spec.num_layers * 2 * spec.head_dim
    assert spec.flops_per_token(8192) == SEED_FLOPS[num_experts] == model.num_flops_per_token(8192) - 6 * gains
