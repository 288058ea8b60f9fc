"""Does every row of the published runs become a complete Run, or one honest reason?"""

import collections
import csv
import re
from pathlib import Path

import pytest

from moesim import run_fields
from moesim.layout import illegal, parse_layout
from moesim.run_models import NotExpressible, model_of, preset_of
from moesim.runs import Run, Unsupported, parse_run, parse_runs

FILE = Path(__file__).parent.parent / "calibration" / "measurements" / "published_runs.csv"
ROWS = list(csv.DictReader(FILE.open(encoding="utf-8")))
PARSED = parse_runs(ROWS)
RUNS = [p for p in PARSED if isinstance(p, Run)]

# Texts that describe something no layout can say; everything else in the file must parse.
NOT_UNDERSTOOD = {
    ("precision", "MXFP8 (grouped GEMM only)"),
    ("recompute", "full block 5 layers"),
    ("recompute", "selective:mla_up_proj+mhc"),
}


def row(id):
    return next(r for r in ROWS if r["id"] == id)


def run(id, **changes):
    parsed = parse_run({**row(id), **changes})
    assert isinstance(parsed, Run), parsed
    return parsed


def reason(id, **changes):
    parsed = parse_run({**row(id), **changes})
    assert isinstance(parsed, Unsupported), parsed
    return parsed.reason


def test_file_is_the_published_one():
    assert len(ROWS) == 952 and all(r["source_address"] for r in ROWS)
    assert collections.Counter(r["kind"] for r in ROWS) == {"moe": 424, "dense": 528}


def test_enough_rows_are_expressed():
    supported = collections.Counter(r.kind for r in RUNS)
    assert supported["moe"] >= 300
    assert supported["dense"] >= 0.75 * 528


@pytest.mark.parametrize("column", run_fields.PARSERS)
def test_every_text_of_a_column_parses_or_is_listed(column):
    refused = set()
    for text in {r[column] for r in ROWS}:
        try:
            run_fields.PARSERS[column](text)
        except NotExpressible:
            refused.add((column, text))
    assert refused == {pair for pair in NOT_UNDERSTOOD if pair[0] == column}


def test_every_layout_is_legal_and_spans_the_stated_gpus():
    for parsed in RUNS:
        assert illegal(parsed.layout, parsed.model, parsed.workload, parsed.cluster.num_gpus) is None
        assert parsed.cluster.num_gpus == parsed.layout.world == int(row(parsed.id)["gpus"])
        assert parse_layout(str(parsed.layout)) == parsed.layout


def test_stated_degrees_survive():
    for parsed in RUNS:
        source = row(parsed.id)
        for column in ("tp", "pp", "cp", "ep", "etp", "vpp"):
            if source[column] and not (column == "vpp" and parsed.layout.pp == 1):
                assert getattr(parsed.layout, column) == int(source[column]), (parsed.id, column)
        if source["gbs"] and source["seq"]:
            assert parsed.workload.global_batch_tokens == int(source["gbs"]) * int(source["seq"])


def test_a_blank_policy_is_reported_as_assumed():
    for parsed in RUNS:
        source = row(parsed.id)
        for column in ("recompute", "cuda_graphs", "overlap_flags", "precision"):
            if not source[column]:
                assert column in parsed.assumed, (parsed.id, column)
                assert set(parsed.pinned) <= set(parsed.assumed)
            elif "cpu_offload" not in source[column] and (column, source[column]) not in NOT_UNDERSTOOD:
                assert column not in parsed.assumed, (parsed.id, column)


def test_measured_never_reaches_the_question():
    for parsed in RUNS[::40]:
        blank = {c: "" for c in ("tokens_per_s_per_gpu", "step_time_s", "model_tflops_per_gpu", "mfu", "mem_gb_per_gpu")}
        again = run(parsed.id, **blank)
        assert again.scenario() == parsed.scenario() and again.assumed == parsed.assumed
        assert again.measured.tokens_per_s_per_gpu is None


def test_models_agree_with_the_parameters_the_rows_state():
    for parsed in RUNS:
        stated = row(parsed.id)["params_total_b"]
        if stated and parsed.model.num_mtp_layers == 0 and "96 layers" not in row(parsed.id)["notes"]:
            assert parsed.model.num_params / 1e9 == pytest.approx(float(stated), rel=0.06), parsed.id


def test_tokens_and_tflops_of_one_row_agree_with_the_ledger():
    # Qwen3, DeepSeek-V3, Kimi, Llama of the 25.09+ pages count FLOP as the ledger does (cells are rounded to 16 or 32 tokens)
    checked = 0
    for parsed in RUNS:
        source = row(parsed.id)
        exact = parsed.id.startswith("mb-") and not parsed.model.name.startswith("GPT-OSS")
        if exact and source["tokens_per_s_per_gpu"] and source["model_tflops_per_gpu"]:
            counted = float(source["model_tflops_per_gpu"]) * 1e12 / float(source["tokens_per_s_per_gpu"])
            rounding = 0.012 + 32 / float(source["tokens_per_s_per_gpu"])
            assert counted == pytest.approx(parsed.model.flops_per_token(parsed.workload.seq_len), rel=rounding), parsed.id
            checked += 1
    assert checked > 150


def test_step_time_and_tokens_of_one_row_agree():
    checked = 0
    for parsed in RUNS:
        source = row(parsed.id)
        if source["tokens_per_s_per_gpu"] and source["step_time_s"]:
            expected = parsed.workload.global_batch_tokens / float(source["step_time_s"]) / parsed.cluster.num_gpus
            assert float(source["tokens_per_s_per_gpu"]) == pytest.approx(expected, rel=0.02), parsed.id
            checked += 1
    assert checked > 300


def test_derived_rates_are_labelled_and_match_the_printed_hint():
    derived = [p for p in RUNS if p.measured.kind == "derived"]
    assert derived and all(not row(p.id)["tokens_per_s_per_gpu"] for p in derived)
    for parsed in derived:
        hint = re.search(r"implied about ([\d.]+) tok/s/GPU", row(parsed.id)["notes"])
        if hint:
            assert parsed.measured.tokens_per_s_per_gpu == pytest.approx(float(hint.group(1)), rel=0.01)


def test_old_nvidia_dense_tables_count_the_whole_attention_square():
    parsed = run("mcore-h100-1.7b")
    ledger = parsed.model.flops_by_role(4096)
    whole = sum(ledger.values()) + ledger["attention_core"]
    assert parsed.measured.tokens_per_s_per_gpu == pytest.approx(408.8e12 / whole)


def test_pipeline_layout_strings():
    assert run_fields.stages("layout Et*4|(t*4|)*14tmL; MTP 1") == (4,) * 15 + (1,)
    assert run_fields.stages("layout Et/(tt/)*30L") == (1,) + (2,) * 30 + (0,)
    assert run_fields.stages("ConnectX-8 Ethernet with MRC") is None
    assert run("mlperf60-dsv3-gb200-2048-nvidia").layout.stages == (4,) * 15 + (1,)


def test_routing_of_the_notes():
    assert run("mz-mx22-h100-128-drop").workload.routing.capacity_factor == 1.0
    assert run("mz-q235-h100-long-16384-natural").workload.routing.kind == "zipf"
    paged = run("mlperf60-dsv3-gb200-512-nvidia").workload.routing
    assert (paged.capacity_factor, paged.capacity_scope) == (4.0, "rank")


def test_clusters_take_the_rows_fabric():
    roce = run("internevo-7b-a100-16-tp1z8").cluster
    assert [t.transport for t in roce.tiers[1:]] == ["roce"] * len(roce.tiers[1:])
    assert roce.tiers[1].bytes_per_s == pytest.approx(50e9 / 8)
    rack = run("mlperf60-dsv3-gb200-2048-nvidia").cluster
    assert (rack.tiers[0].span, rack.domain) == (72, 64)  # 2,048 GPUs fill no racks: 64 of each


def test_sharding_texts():
    assert run("internevo-7b-a100-64-tp1z8").layout.rep == 8
    hybrid = run("dgxc-mt70-h100-2048-bf16").layout
    assert hybrid.zero == 3 and hybrid.dp // hybrid.rep in (128, 256)


@pytest.mark.parametrize("name, preset", [
    ("Llama-3.1-8B", "llama3_8b"), ("Llama3-70B (12-layer cut)", "llama3_70b"), ("gpt-oss-120b", "gpt_oss_120b"), ("DeepSeek V3", "deepseek_v3"),
    ("GPT-1.7B (Megatron 2021)", "gpt_1_7b_megatron_2021"), ("Nemotron-4-15B", "nemotron4_15b"), ("Falcon-180B", None),
])
def test_spellings_of_names_find_their_preset(name, preset):
    assert preset_of(name) == preset


def test_gpu_spellings():
    for text, cluster in (("H100 SXM", "hgx_h100"), ("NVIDIA GB200 NVL72", "gb200_nvl72"), ("B300", "hgx_b300")):
        assert run("internevo-7b-a100-8-tp1z8", gpu_type=text, nvlink_domain="", net_gbps_per_gpu="").cluster.name == cluster
    assert "no shipped cluster" in reason("internevo-7b-a100-8-tp1z8", gpu_type="MI300X")


def test_the_width_of_shared_experts_is_the_presets():
    model, _ = model_of({**row("pf-mixtral-8x22b-128-folding"), "model": "Qwen2-57B-A14B", "layers": "28", "hidden": "3584", "heads": "28",
                         "kv_heads_or_mla": "4", "experts": "64", "topk": "8", "shared_experts": "1", "expert_ffn": "2560", "vocab": "151936"}, 4096)
    assert model.shared_intermediate_size == 20480 and model.flops_per_token(4096) == pytest.approx(84.7e9, rel=0.005)


@pytest.mark.parametrize("text, expected", [
    ("dp=32 (edp=2)", {"dp": 32}), ("fsdp2=64", {"zero": 3, "shard": 64, "dp": 64}), ("HSDP=4x8", {"zero": 3, "shard": 8, "dp": 32}),
    ("zero2=8 dp=16", {"zero": 2, "dp": 16, "shard": 8}), ("zero1=all", {"zero": 1}), ("ZeRO-3", {"zero": 3}), ("ddp=8", {"dp": 8}),
    ("fsdp=64 SHARD_GRAD_OP", {"zero": 3, "shard": 64, "dp": 64, "reshard": False}),
])
def test_data_parallel_texts(text, expected):
    assert run_fields.data_parallel(text) == expected


def test_a_policy_nobody_taught_is_listed_and_assumed():
    odd = run("mpt-70b-h10080gb-512-mb8", overlap_flags="warp_drive", cuda_graphs="some", recompute="mostly")
    assert {"overlap_flags", "cuda_graphs", "recompute"} <= set(odd.assumed)
    assert [text.split(" not understood")[0] for text in odd.ignored] == ["recompute", "overlap_flags", "cuda_graphs"]


def test_stacks():
    expected = {"tt-l8-h100-8-eager": "torchtitan_eager", "tt-l8-h100-8-compile": "torchtitan", "pf-mixtral-8x22b-128-folding": "megatron_core",
                "vtrain-3.6b-64-tp1dp64pp1-mb8": "megatron_deepspeed", "mg21-a100-1.7b": "megatron_lm_2021", "mpt-70b-h10080gb-512-mb8": "llm_foundry"}
    assert {id: run(id).stack.name for id in expected} == expected
    assert run("mpt-70b-h10080gb-512-mb8", stack="torchtitan").stack.name == "torchtitan"


def test_recipes_of_a_release_fill_what_its_page_leaves_blank():
    graphs = lambda id, **changes: run(id, **changes).layout.graphs  # noqa: E731
    assert graphs("mb-25.09-qwen3-30b-b200-8-fp8-cs-g512") == "full" == graphs("mb-25.09-llama3-8b-gb200-8-fp8-cs-g128")
    assert graphs("mb-25.09-qwen3-235b-b200-64-fp8-cs-g1024") == "none" == graphs("mb-25.09-qwen3-30b-h100-16-fp8-cs-g512")
    assert graphs("mb-25.09-qwen3-30b-b200-8-fp8-cs-g512", cuda_graphs="none") == "none"
    assert "cuda_graphs" in run("mb-25.09-qwen3-30b-b200-8-fp8-cs-g512").pinned


def test_mtp_follows_the_notes():
    assert run("mb-26.04-dsv3-gb300-256-mxfp8-g4096").model.num_mtp_layers == 1
    assert run("mb-25.11-dsv3-gb200-256-bf16-g4096").model.num_mtp_layers == 0


@pytest.mark.parametrize("id, changes, words", [
    ("mb-26.04.01-nano3-gb300-8-mxfp8-g512", {}, "Mamba"),
    ("mpt-70b-h10080gb-512-mb8", {"gpus": "510"}, "world mismatch|whole number"),
    ("mpt-70b-h10080gb-512-mb8", {"gbs": "4095"}, "not a multiple"),
    ("mpt-70b-h10080gb-512-mb8", {"gpu_type": "TPU v5"}, "gpu_type"),
    ("mpt-70b-h10080gb-512-mb8", {"precision": "INT3"}, "precision"),
    ("mpt-70b-h10080gb-512-mb8", {"tp": "two"}, "tp: 'two'"),
    ("mpt-70b-h10080gb-512-mb8", {"layers": "1e300"}, "layers"),
    ("mpt-70b-h10080gb-512-mb8", {"mbs": "0"}, "mbs"),
    ("mpt-70b-h10080gb-512-mb8", {"seq": ""}, "seq: not stated"),
    ("mpt-70b-h10080gb-512-mb8", {"stack": "megatron_cor"}, "nearest 'megatron_core'"),
    ("mpt-70b-h10080gb-512-mb8", {"notes": "LoRA"}, "LoRA"),
    ("mpt-70b-h10080gb-512-mb8", {"tokens_per_s_per_gpu": "nan"}, "tokens_per_s_per_gpu"),
    ("mpt-70b-h10080gb-512-mb8", {"net_gbps_per_gpu": "-4"}, "net_gbps"),
    ("pf-mixtral-8x22b-128-folding", {"kv_heads_or_mla": "GQA"}, "kv_heads_or_mla"),
    ("pf-mixtral-8x22b-128-folding", {"topk": "9"}, "top_k"),
])
def test_bad_cells_get_one_reason(id, changes, words):
    text = reason(id, **changes)
    assert re.search(words, text) and "\n" not in text


def test_garbage_never_raises():
    import random

    rng = random.Random(7)
    junk = ["", "-1", "nan", "1e99", "9" * 400, "\x00", "dp=", "selective:", "MLA(", "é", "=HYPERLINK(1)", "0", "3.5"]
    for _ in range(1500):
        source = dict(rng.choice(ROWS))
        for column in rng.sample(list(source), 3):
            source[column] = rng.choice(junk)
        parsed = parse_run(source)
        assert isinstance(parsed, (Run, Unsupported))
        if isinstance(parsed, Unsupported):
            assert parsed.reason and "\n" not in parsed.reason


@pytest.mark.parametrize("flags, vpp, expected", [("ep_a2a_1f1b", "", 2), ("ep_a2a_1f1b", "4", 4), ("none", "", 1)])
def test_forwards_paired_with_backwards_mean_an_interleaved_pipeline(flags, vpp, expected):
    """Megatron pairs them in its interleaved schedule only; 94 layers count embedding and loss, 12 a rank."""
    found = next(r for r in ROWS if r["id"] == "mbpr-q235-b200-1760-bf16-before")
    assert parse_run({**found, "overlap_flags": flags, "vpp": vpp}).layout.vpp == expected


@pytest.mark.parametrize("text, sms", [("hybridep", 16), ("deepep", 20), ("deepep (24 SMs)", 24), ("deepep over UCCL-EFA", 20)])
def test_a_named_dispatcher_has_its_own_sms(text, sms):
    found = next(r for r in ROWS if r["id"] == "aws-q30-h100-64-ep16-mb4-ov0-uccl")
    assert parse_run({**found, "dispatcher": text}).layout.sms == sms
