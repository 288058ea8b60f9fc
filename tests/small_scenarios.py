"""Scenarios for tests: cut models that exercise every kind of layer, on few GPUs, with random search axes."""

from dataclasses import dataclass

from moesim.evaluate import Evaluator
from moesim.load import parse_scenario
from moesim.space import enumerate_layouts


@dataclass(frozen=True)
class Answer:
    """What `moesim predict` takes from a simulator of one run."""

    tokens_per_s_per_gpu: float
    low: float
    high: float
    peak_bytes: float = 50e9
    fits: bool = True


MODELS = {
    # shared expert, leading dense layer, norm after the embedding
    "moe": {"preset": "olmo_core3_seed", "hidden_size": 2048, "num_heads": 16, "num_kv_heads": 4, "num_experts": 16, "moe_intermediate_size": 2048,
            "shared_intermediate_size": 2048, "intermediate_size": 8192, "vocab_size": 32000},
    # latent attention, grouped routing, a multi-token-prediction module
    "mla": {"preset": "deepseek_v3", "num_layers": 8, "hidden_size": 2048, "num_heads": 16, "num_experts": 32, "num_leading_dense_layers": 1, "num_mtp_layers": 1,
            "top_k": 4, "vocab_size": 32000, "q_lora_rank": 512, "intermediate_size": 4096, "moe_intermediate_size": 1024, "shared_intermediate_size": 1024},
    # windows, sinks, biases
    "window": {"preset": "gpt_oss_20b", "num_layers": 8, "vocab_size": 32000, "num_experts": 16},
    "dense": {"preset": "llama3_8b", "num_layers": 8, "vocab_size": 32000},
    "tied": {"preset": "gpt3_175b", "num_layers": 8, "hidden_size": 2048, "num_heads": 16, "num_kv_heads": 16, "head_dim": 128, "intermediate_size": 8192, "vocab_size": 32000},
}
STACKS = ("megatron_bridge", "megatron_core", "olmo_core3_ddp", "olmo_core_fsdp", "torchtitan")
AXES = {
    "pp": [1, 2, 4, 8], "num_chunks": [1, 2, 4], "cp": [1, 2], "tp": [1, 2, 4], "ep": [1, 2, 4, 8], "etp": [1, 2], "zero": [0, 1, 2, 3], "reshard": ["true", "false"],
    "micro_batch": [1, 2], "schedule": ["gpipe", "1f1b", "interleaved", "interleaved_zb", "zbv", "dualpipev"], "recompute": ["none", "norm+moe_act", "core_attn", "full"],
    "dispatcher": ["alltoall", "dedup", "sync_free"], "overlap": ["none", "ep", "shared", "grad+param", "ep+shared+grad+param+fsdp2", "fsdp1"],
    "precision": ["bf16", "fp8", "mxfp8"], "grad_dtype": ["fp32", "bf16"], "optimizer": ["fp32", "bf16", "fp8"], "graphs": ["none", "router", "layer", "full"], "dp_replicate": [1, 2],
    "dispatcher_sms": [8, 16],
}  # fmt: skip


def scenario(model="moe", *, num_nodes=1, stack="megatron_bridge", batch=64, seq_len=2048, search=None, sets=(), cluster="hgx_b300", layout=None):
    """A scenario of a cut model: ``batch`` sequences a step on ``num_nodes`` of 8 GPUs."""
    document = {
        "name": "small", "model": MODELS[model], "cluster": {"preset": cluster, "num_nodes": num_nodes}, "stack": stack,
        "workload": {"seq_len": seq_len, "global_batch_tokens": batch * seq_len, "tokens": 1_000_000_000}, "search": search or {},
    }
    if layout:
        document["layout"] = layout
    return parse_scenario(_yaml(document), list(sets))


def _yaml(value) -> str:
    """Flow-style YAML of plain data."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{k}: {_yaml(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_yaml, value)) + "]"
    return f'"{value}"' if isinstance(value, str) else str(value)


ROUTINGS = ("{kind: balanced}", "{kind: zipf, zipf_s: 0.5}", "{kind: zipf, zipf_s: 0.8, capacity_factor: 1.25, capacity_scope: rank}", "{kind: dirichlet, dirichlet_alpha: 0.5, capacity_factor: 1.5}")


def random_axes(rng, num_values=2, axes=AXES):
    """A search over a few values of every axis; where a schedule needs chunks they may be missing, which is the caller's luck."""
    return {axis: rng.sample(values, min(len(values), rng.randint(1, num_values))) for axis, values in axes.items()}


def random_spaces(rng, models=tuple(MODELS), num_values=2, axes=AXES):
    """Endless (evaluator, space) of random scenarios that have at least one legal layout."""
    while True:
        model, stack, nodes = rng.choice(models), rng.choice(STACKS), rng.choice((1, 2))
        try:
            s = scenario(model, num_nodes=nodes, stack=stack, batch=rng.choice((32, 64)), search=random_axes(rng, num_values, axes),
                         sets=[f"workload.routing={rng.choice(ROUTINGS)}"])
            evaluator = Evaluator(s)
            space = enumerate_layouts(s, evaluator.stack.default_layout)
        except ValueError as error:
            raise AssertionError(f"{model} {stack}: {error}") from error
        if len(space):
            yield evaluator, space
