"""Does the trainer's model compute what its definition says: logits, gradients, auxiliary losses, whatever the kernels?

Float32 against the definition in float64; differences are relative to the largest value compared.
"""

from __future__ import annotations

import pytest
import reference_model as reference
import torch
from small_stages import gradients, stage_with, whole
from test_reference_model import CASES, tokens

from moesim.layout import Layout
from moesim.spec import ModelSpec
from moetrain.balance import Balance
from moetrain.supports import supports

TOLERANCE = 1e-5
CONSTANTS = reference.Constants(rope_theta=5_000.0, norm_eps=1e-5, embed_scale=2.0)
EVERY = CASES | {"biases": CASES["biases"].model_copy(update={"norm_bias": False, "mlp_bias": False})}
BUILT = {name: spec for name, spec in EVERY.items() if supports(Layout(), spec) is None}
each = pytest.mark.parametrize("spec", list(BUILT.values()), ids=list(BUILT))
DOCUMENTS = torch.tensor([[0, 0, 0, 1, 1, 1, 1], [0, 1, 1, 1, 1, 2, 2]], dtype=torch.int32)
BALANCE, Z = 0.05, 0.02


def params_of(spec: ModelSpec) -> dict[str, torch.Tensor]:
    return reference.random_params(spec, std=0.15)


def difference(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return float((ours - theirs).abs().max() / theirs.abs().max().clamp_min(1e-30))


def labels_of(ids: torch.Tensor) -> torch.Tensor:
    """The next token; nothing after the last one, nor for the third."""
    labels = torch.cat([ids[:, 1:], torch.full((len(ids), 1), -100)], 1)
    labels[:, 2] = -100
    return labels


def defined(spec: ModelSpec, ids: torch.Tensor, documents: torch.Tensor | None, auxiliary: bool):
    """(loss, gradients by name) of the definition: cross entropy summed over labelled tokens and the auxiliary losses' means over
    tokens, the first divided by the tokens of the step."""
    leaves = {name: p.double().requires_grad_() for name, p in params_of(spec).items()}
    result = reference.run(leaves, spec, ids, documents, CONSTANTS)
    losses = torch.nn.functional.cross_entropy(result.logits.flatten(0, 1), labels_of(ids).flatten(), ignore_index=-100, reduction="sum") / ids.numel()
    total = losses
    for r in result.routings if auxiliary else ():
        total = total + BALANCE * reference.balance_loss(r, spec.router) + Z * reference.z_loss(r.logits)
    total.backward()
    return losses.detach(), {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in leaves.items()}


@each
@pytest.mark.parametrize("documents", [None, DOCUMENTS], ids=["whole", "documents"])
def test_logits(spec, documents):
    ids = tokens()
    stage = stage_with(spec, params_of(spec), CONSTANTS, ids.numel())
    with torch.no_grad():
        ours = stage(ids, whole(ids, documents))
        wanted = reference.forward({n: p.double() for n, p in params_of(spec).items()}, spec, ids, documents, CONSTANTS)
    assert difference(ours, wanted) < TOLERANCE


@each
@pytest.mark.parametrize("auxiliary", [False, True], ids=["plain", "auxiliary"])
@pytest.mark.parametrize("kernels, chunks", [("reference", 1), ("grouped_mm", 1), ("reference", 3)])
def test_loss_and_gradients(spec, auxiliary, kernels, chunks):
    if kernels == "grouped_mm":  # rows of its matrices must be multiples of 16 bytes
        spec = spec.model_copy(update={"moe_intermediate_size": 12 if spec.num_experts else 0})
    ids = tokens()
    balance = Balance(BALANCE, "global", Z) if auxiliary else Balance()
    stage = stage_with(spec, params_of(spec), CONSTANTS, ids.numel(), kernels, balance, chunks)
    loss = stage(ids, whole(ids, DOCUMENTS), labels_of(ids))[0]
    loss.backward()
    wanted_loss, wanted = defined(spec, ids, DOCUMENTS, auxiliary)
    found = gradients(stage)
    assert difference(loss.detach(), wanted_loss) < TOLERANCE
    assert found.keys() == {name for name in wanted if not name.endswith("balance_bias")}
    worst = max(found, key=lambda name: difference(found[name], wanted[name]) if wanted[name].any() or found[name].any() else 0.0)
    assert difference(found[worst], wanted[worst]) < TOLERANCE or not wanted[worst].any() and not found[worst].any(), worst
