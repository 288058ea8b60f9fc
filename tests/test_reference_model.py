"""Is the definition of the model what it claims: as many parameters as the ledger counts, causal, blind across documents?"""

from __future__ import annotations

import pytest
import reference_model as reference
import torch

from moesim.load import load_model, preset_names
from moesim.spec import ModelSpec

MODELS = preset_names("model")
TINY = {"name": "tiny", "num_layers": 2, "hidden_size": 16, "vocab_size": 29, "num_heads": 4, "num_kv_heads": 2, "head_dim": 6, "intermediate_size": 20}
MOE = {"num_experts": 8, "top_k": 3, "moe_intermediate_size": 10, "num_leading_dense_layers": 1}
MLA = {"attention": "mla", "num_kv_heads": 4, "head_dim": 10, "q_lora_rank": 9, "kv_lora_rank": 7, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 5}
VARIANTS = {
    "dense": {},
    "mixtral": MOE,
    "post": MOE | {"norm_placement": "post", "embedding_norm": True, "qk_norm": "per_head", "num_shared_experts": 1, "routed_scale": 3.0},
    "branch": MOE | {"norm_placement": "post", "moe_branch_norm": True, "num_shared_experts": 1},
    "branch_pre": MOE | {"moe_branch_norm": True, "num_shared_experts": 1},
    "full_qk_norm": MOE | {"qk_norm": "full", "normalize_top_k": False, "tie_embeddings": True},
    "groups": MOE | {"num_expert_groups": 4, "top_k_groups": 2, "router": "sigmoid", "score_correction_bias": True},
    "mla": MOE | MLA,
    "mla_direct_queries": MOE | MLA | {"q_lora_rank": None, "qkv_bias": True, "out_bias": True},
    "windows": MOE | {"sliding_window": 3, "full_attention_every": 2, "attention_sinks": True},
    "biases": MOE | {"qkv_bias": True, "out_bias": True, "router_bias": True, "expert_bias": True, "mlp_bias": True, "norm_bias": True},
    "gated_shared": MOE | {"num_shared_experts": 2, "shared_expert_gate": True},
}
CASES = {name: ModelSpec(**(TINY | changes)) for name, changes in VARIANTS.items()}
each = pytest.mark.parametrize("spec", CASES.values(), ids=CASES.keys())
# the definition's dense layers have three matrices; positions are rotary; what predicts tokens further ahead is not part of it
DEFINED = {"gated_mlp": True, "num_position_embeddings": 0, "num_mtp_layers": 0}


def tokens(rows: int = 2, size: int = 7) -> torch.Tensor:
    return torch.randint(0, 29, (rows, size), generator=torch.Generator().manual_seed(3))


def counted(spec: ModelSpec) -> int:
    """Elements of all shapes; the balancing bias where the ledger counts it too."""
    found = reference.shapes(spec)
    sizes = {name: torch.Size(shape).numel() for name, shape in found.items()}
    return sum(size for name, size in sizes.items() if spec.score_correction_bias or not name.endswith("balance_bias"))


@each
def test_parameters_are_those_of_the_ledger(spec):
    assert counted(spec) == spec.num_params


@pytest.mark.parametrize("name", MODELS)
def test_parameters_of_published_models_are_those_of_the_ledger(name):
    spec = load_model(name)
    if any(getattr(spec, field) != value for field, value in DEFINED.items()):
        pytest.skip("outside the definition")
    assert counted(spec) == spec.num_params


@each
def test_every_parameter_matters_and_the_balancing_bias_has_no_gradient(spec):
    params = {name: p.requires_grad_() for name, p in reference.random_params(spec, dtype=torch.float64).items()}
    result = reference.run(params, spec, tokens(4, 12))
    (result.logits * torch.linspace(-1, 1, 29, dtype=torch.float64)).sum().backward()
    still = {name for name, p in params.items() if p.grad is None or not p.grad.any()}
    assert still == {name for name in params if name.endswith("balance_bias")}


@each
def test_no_token_sees_a_later_one_or_another_document(spec):
    params, ids = reference.random_params(spec, dtype=torch.float64), tokens()
    documents = torch.tensor([[0, 0, 0, 1, 1, 1, 1], [0, 1, 1, 1, 1, 2, 2]])
    together = reference.forward(params, spec, ids, documents)
    for row, (ids_row, doc_row) in enumerate(zip(ids, documents, strict=True)):
        for doc in doc_row.unique():
            alone = reference.forward(params, spec, ids_row[doc_row == doc][None])[0]
            torch.testing.assert_close(together[row][doc_row == doc], alone, rtol=0, atol=1e-11)
            shorter = reference.forward(params, spec, ids_row[doc_row == doc][None, :-1])[0] if (doc_row == doc).sum() > 1 else alone[:-1]
            torch.testing.assert_close(alone[:-1], shorter, rtol=0, atol=1e-11)


def test_balance_loss_is_one_at_even_load_and_grows_with_skew():
    even = reference.Routing(torch.zeros(8, 4), torch.full((8, 4), 0.25), torch.arange(16).view(8, 2) % 4, torch.ones(8, 2))
    assert float(reference.balance_loss(even, "softmax")) == pytest.approx(1.0)
    scores = torch.tensor([[0.7, 0.1, 0.1, 0.1]]).expand(8, 4)
    skewed = reference.Routing(scores.log(), scores, torch.tensor([[0, 1]]).expand(8, 2), torch.ones(8, 2))
    assert float(reference.balance_loss(skewed, "softmax")) == pytest.approx(4 / 2 * (0.7 + 0.1))
    assert float(reference.z_loss(torch.zeros(8, 4))) == pytest.approx(1.3862943611**2)


def test_groups_limit_the_choice():
    """Group 0 has the best single expert, groups 1 and 2 the best pairs."""
    spec = CASES["groups"]
    assert reference._choose([9.0, -9.0, 3.0, 3.0, 2.0, 3.0, 0.0, 0.0], spec) == [2, 3, 5]


def test_losses_cover_every_moe_layer():
    spec = ModelSpec(**(TINY | MOE | {"num_layers": 3}))
    found = reference.losses(reference.random_params(spec), spec, tokens())
    assert found["balance"].shape == found["z"].shape == (2,)
