"""Do specs refuse what contradicts itself, and are they whole, frozen and hashable once they exist?"""

import pydantic
import pytest

from moesim.load import load_cluster, load_model, load_scenario
from moesim.spec import ModelSpec, RoutingSpec, Scenario, Tier, Workload

DENSE = {"name": "d", "num_layers": 4, "hidden_size": 64, "vocab_size": 100, "num_heads": 8, "intermediate_size": 128}
MOE = DENSE | {"num_experts": 8, "top_k": 2, "moe_intermediate_size": 32}
MLA = {"attention": "mla", "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8}


def test_what_follows_is_filled_in():
    model = ModelSpec(**MOE, num_shared_experts=2)
    assert (model.num_kv_heads, model.head_dim, model.shared_intermediate_size) == (8, 8, 64)
    assert ModelSpec(**DENSE, **MLA).head_dim == 12


@pytest.mark.parametrize(
    ("base", "change", "says"),
    [
        (MOE, {"top_k": 9}, "top_k 9 must be between 1 and num_experts 8"),
        (MOE, {"top_k": 0}, "top_k 0"),
        (MOE, {"moe_intermediate_size": 0}, "needs moe_intermediate_size"),
        (MOE, {"num_expert_groups": 3}, "not a multiple of num_expert_groups 3"),
        (MOE, {"num_expert_groups": 4, "top_k_groups": 5}, "top_k_groups 5"),
        (MOE, {"num_expert_groups": 8, "top_k_groups": 1}, "above the 1 experts of 1 groups"),
        (MOE, {"shared_intermediate_size": 32}, "contradict"),
        (MOE, {"shared_expert_gate": True}, "num_shared_experts is 0"),
        (MOE, {"num_leading_dense_layers": 4}, "leaves no MoE layer"),
        (MOE, {"moe_layer_interval": 5}, "leaves no MoE layer"),
        (MOE, {"num_leading_dense_layers": 1, "intermediate_size": 0}, "intermediate_size is needed"),
        (DENSE, {"top_k": 2}, "top_k given, but num_experts is 0"),
        (DENSE, {"moe_layer_interval": 2}, "moe_layer_interval given"),
        (DENSE, {"num_kv_heads": 3}, "num_heads 8 is not a multiple of num_kv_heads 3"),
        (DENSE, {"kv_lora_rank": 4}, "kv_lora_rank given, but attention is 'gqa'"),
        (DENSE, {"attention": "mla"}, "needs kv_lora_rank, qk_nope_head_dim, qk_rope_head_dim, v_head_dim"),
        (DENSE | MLA, {"num_kv_heads": 4}, "num_kv_heads must be 8"),
        (DENSE | MLA, {"head_dim": 64}, "must be qk_nope_head_dim"),
        (DENSE | MLA, {"qk_norm": "full"}, "qk_norm does not apply"),
        (DENSE, {"full_attention_every": 2}, "no sliding_window"),
    ],
)
def test_contradictions(base, change, says):
    with pytest.raises(pydantic.ValidationError) as error:
        ModelSpec(**{**base, **change})
    assert says in str(error.value)


@pytest.mark.parametrize("change", [{"hidden_size": 64.0}, {"hidden_size": "64"}, {"num_heads": True}, {"num_layers": 0}, {"hidden": 1}])
def test_strict(change):
    with pytest.raises(pydantic.ValidationError):
        ModelSpec(**{**DENSE, **change})


def test_frozen_and_hashable():
    model, cluster = load_model("mixtral_8x7b"), load_cluster("hgx_h100")
    with pytest.raises(pydantic.ValidationError):
        model.num_layers = 3
    assert hash(model) == hash(load_model("mixtral_8x7b")) and hash(cluster) == hash(load_cluster("hgx_h100"))


def test_layer_kinds():
    assert ModelSpec(**MOE, num_leading_dense_layers=1).layer_kinds() == ("dense", "moe", "moe", "moe")
    assert ModelSpec(**MOE, moe_layer_interval=2).layer_kinds() == ("dense", "moe", "dense", "moe")
    assert ModelSpec(**DENSE).layer_kinds() == ("dense",) * 4


def test_windows():
    model = ModelSpec(**DENSE, sliding_window=16, full_attention_every=2)
    assert [model.window(i) for i in range(4)] == [16, None, 16, None]
    assert {ModelSpec(**DENSE, sliding_window=16).window(i) for i in range(4)} == {16}


@pytest.mark.parametrize(
    "routing",
    [{"kind": "zipf"}, {"kind": "balanced", "zipf_s": 1.0}, {"kind": "histogram"}, {"kind": "dirichlet", "zipf_s": 1.0}, {"capacity_factor": 0.0}],
)
def test_routing_needs_its_own_parameter(routing):
    with pytest.raises(pydantic.ValidationError):
        RoutingSpec(**routing)


def test_stated_skew_is_what_its_source_reports():
    """Busiest over mean, minus 1, of models trained with an auxiliary loss: 0.52 (3B) to 0.72 (1B), https://arxiv.org/abs/2408.15664."""
    s = Workload(seq_len=8, global_batch_tokens=8).skew.zipf_s
    violation = 64 / sum(rank**-s for rank in range(1, 65)) - 1
    assert 0.52 <= violation <= 0.72


def test_batch_is_whole_sequences():
    with pytest.raises(pydantic.ValidationError, match="not a whole number of sequences"):
        Workload(seq_len=4096, global_batch_tokens=5000)


def test_cluster_shape():
    cluster = load_cluster("gb300_nvl72", ["num_nodes=36"])
    assert (cluster.num_gpus, cluster.domain) == (144, 72)
    assert load_cluster("gb300_nvl72", ["num_nodes=1"]).domain == 4
    assert {r.name: r.scope for r in load_cluster("cpu_gloo").resources} == {"cores": "node", "memory": "node"}
    with pytest.raises(ValueError, match="fewer than"):
        load_cluster("hgx_b300", ["tiers.spine.span=600", "num_nodes=512"])
    with pytest.raises(ValueError, match="growing spans"):
        load_cluster("hgx_b300", ["tiers.rail.span=8"])
    with pytest.raises(ValueError, match="only the outermost"):
        load_cluster("hgx_b300", ["tiers.rail.span=null"])


def test_price_is_own_then_list_then_unknown():
    assert load_cluster("hgx_b300").price is None
    assert load_cluster("hgx_b300", ["usd_per_gpu_hour=5.5"]).price == 5.5
    assert load_cluster("hgx_h100").price == load_cluster("hgx_h100").gpu.usd_per_hour.list


def test_scenario_hash_sees_every_change_and_survives_json():
    scenario = load_scenario("olmo_core3_new")
    again = Scenario.model_validate_json(scenario.model_dump_json())
    assert again == scenario and again.hash == scenario.hash and len(scenario.hash) == 16
    changed = ["seed=1", "model.num_experts=64", "cluster.num_nodes=2", "memory.margin=0.1", "layout=dp8", "search.tp=2"]
    assert len({scenario.hash, *(load_scenario("olmo_core3_new", [one]).hash for one in changed)}) == len(changed) + 1
    prose = ["description=other words", "cluster.tiers.rail.source=https://example.org"]
    assert load_scenario("olmo_core3_new", prose).hash == scenario.hash


def test_tier_rate_is_positive():
    with pytest.raises(pydantic.ValidationError):
        Tier(name="x", span=8, bytes_per_s=0.0, transport="ib", source="y")
