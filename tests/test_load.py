"""Is everything a person may write read as meant, or refused in one line that says where and what?"""

import json
import random
import time
from pathlib import Path

import pytest

from moesim.huggingface import REFUSED, model_fields
from moesim.load import SpecError, load_cluster, load_model, load_scenario, parse_scenario, preset_names, read_yaml, scenarios_dir
from moesim.schema import json_schema
from moesim.spec import ModelSpec, Scenario

HF = Path(__file__).parent / "fixtures" / "hf"
CONFIGS = sorted(p.stem for p in HF.glob("*.json"))
SCENARIOS = sorted(p.stem for p in scenarios_dir().glob("*.yaml") if "workload" in read_yaml(p).data)
SEED = """\
name: seed
model: {preset: olmo_core3_seed, num_experts: 8}
cluster: {preset: hgx_b300, num_nodes: 2}
workload:
  seq_len: 8192
  global_batch_tokens: 4 Mi tokens
"""


def refusal(text, sets=()):
    with pytest.raises(SpecError) as error:
        parse_scenario(text, sets, file="s.yaml")
    message = str(error.value)
    assert "\n" not in message and len(message) < 600
    return message


# --- what is read -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SCENARIOS)
def test_shipped_scenarios_load(name):
    scenario = load_scenario(name)
    assert scenario.name == name and load_scenario(scenarios_dir() / f"{name}.yaml").hash == scenario.hash


def test_issue_scenarios_are_there():
    sizes = {n: load_scenario(n).cluster.num_gpus for n in SCENARIOS}
    assert sizes["deepseek_v3_512_nodes"] == sizes["olmo_core3_512_nodes"] == 4096
    assert (sizes["deepseek_v3_32_nodes"], sizes["qwen3_235b_64_nodes"], sizes["olmo_core3_new"], sizes["olmo_core3_old"]) == (256, 512, 8, 8)
    assert load_scenario("olmo_core3_new", ["model.num_experts=8"]).model.num_params == 4_580_485_120


def test_units_become_si():
    scenario = parse_scenario(SEED)
    assert scenario.workload.global_batch_tokens == 4 * 2**20 and scenario.cluster.tiers[1].bytes_per_s == 100e9


@pytest.mark.parametrize(
    ("one", "get", "value"),
    [
        ("model.num_experts=32", lambda s: s.model.num_experts, 32),
        ("model=mixtral_8x7b", lambda s: s.model.name, "mixtral_8x7b"),
        ("cluster=hgx_h100", lambda s: s.cluster.gpu.name, "h100"),
        ("cluster.gpu=h200", lambda s: s.cluster.gpu.name, "h200"),
        ("cluster.gpu.hbm_bytes=192 GB", lambda s: s.cluster.gpu.hbm_bytes, 192e9),
        ("cluster.tiers.rail.oversubscription=2", lambda s: s.cluster.tiers[1].oversubscription, 2.0),
        ("cluster.tiers.0.bytes_per_s=1 TB/s", lambda s: s.cluster.tiers[0].bytes_per_s, 1e12),
        ("workload.routing={kind: zipf, zipf_s: 1}", lambda s: s.workload.routing.zipf_s, 1.0),
        ("workload.tokens=1 T", lambda s: s.workload.tokens, 10**12),
        ("memory.margin=0.1", lambda s: s.memory.margin, 0.1),
        ("memory.runtime_reserve_bytes=2 GiB", lambda s: s.runtime_reserve_bytes, 2 * 2**30),
        ("search.tp=8", lambda s: s.search.tp, (8,)),
        ("search.overlap=[none, ep+grad]", lambda s: s.search.overlap, ("none", "ep+grad")),
        ("search.graphs=[full, no]", lambda s: s.search.graphs, ("full", "no")),  # `no` is a word, not a boolean
        ("layout=dp16 ep8", lambda s: s.layout, "dp16 ep8"),
    ],
)
def test_set(one, get, value):
    assert get(parse_scenario(SEED, [one])) == value


def test_sets_apply_in_order_and_reach_what_they_replace():
    sets = ["cluster=hgx_h100", "cluster.num_nodes=4", "model=qwen3_30b_a3b", "model.num_layers=2"]
    scenario = parse_scenario(SEED, sets)
    assert (scenario.cluster.num_gpus, scenario.cluster.gpu.name, scenario.model.num_layers) == (32, "h100", 2)


def test_resources_follow_overrides():
    assert {r.name: r.capacity for r in load_cluster("hgx_b300", ["gpu.num_sms=140"]).resources}["sms"] == 140


def test_paths_are_relative_to_the_file(tmp_path):
    (tmp_path / "m.yaml").write_text((scenarios_dir() / "models" / "dbrx.yaml").read_text())
    (tmp_path / "config.json").write_text((HF / "kimi_k2.json").read_text())
    (tmp_path / "s.yaml").write_text(SEED.replace("{preset: olmo_core3_seed, num_experts: 8}", "m.yaml"))
    assert load_scenario(tmp_path / "s.yaml").model.name == "dbrx"
    assert load_scenario(tmp_path / "s.yaml", ["model=./config.json"]).model.num_experts == 384


def test_a_wrong_total_is_refused_unless_the_model_was_changed(tmp_path):
    text = (scenarios_dir() / "models" / "dbrx.yaml").read_text().replace("131596523520", "131596523521")
    (tmp_path / "m.yaml").write_text(text)
    with pytest.raises(SpecError, match=r"m.yaml:\d+: total_params says 131596523521, but the model as described has 131596523520"):
        load_model(tmp_path / "m.yaml")
    assert load_model(tmp_path / "m.yaml", ["num_layers=2"]).num_layers == 2


def test_every_model_asserts_its_total():
    for name in preset_names("model"):
        assert read_yaml(scenarios_dir() / "models" / f"{name}.yaml").data["total_params"] == load_model(name).num_params


# --- Hugging Face -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CONFIGS)
def test_config_json_counts_as_the_yaml(name):
    ours, theirs = load_model(name), load_model(HF / f"{name}.json")
    assert theirs.params_by_role() == ours.params_by_role()
    assert theirs.flops_by_role(8192) == ours.flops_by_role(8192)
    same = set(ModelSpec.model_fields) - {"name", "intermediate_size"}  # configs give a dense width even where no layer is dense
    assert {f: getattr(theirs, f) for f in same} == {f: getattr(ours, f) for f in same}


DENSE = {"hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8, "tie_word_embeddings": False}
# Totals of the checkpoints' safetensors metadata on huggingface.co.
DENSE_CONFIGS = [
    (DENSE | {"model_type": "mistral", "intermediate_size": 14336, "num_hidden_layers": 32, "vocab_size": 32000, "sliding_window": 4096}, 7_241_732_096),
    (DENSE | {"model_type": "qwen3", "intermediate_size": 12288, "num_hidden_layers": 36, "vocab_size": 151936, "head_dim": 128}, 8_190_735_360),
    (
        {"model_type": "qwen2", "hidden_size": 3584, "intermediate_size": 18944, "num_attention_heads": 28, "num_hidden_layers": 28}
        | {"num_key_value_heads": 4, "vocab_size": 152064, "sliding_window": 131072, "use_sliding_window": False},
        7_615_616_512,
    ),
    (
        {"model_type": "qwen3", "hidden_size": 1024, "intermediate_size": 3072, "num_attention_heads": 16, "num_hidden_layers": 28}
        | {"num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936, "tie_word_embeddings": True},
        596_049_920,
    ),
]


@pytest.mark.parametrize(("config", "total"), DENSE_CONFIGS)
def test_dense_config(config, total):
    model = ModelSpec(**model_fields(config))
    assert model.num_params == total and model.sliding_window == (4096 if config["model_type"] == "mistral" else None)


@pytest.mark.parametrize("kind", [k for k in REFUSED if not k.endswith("_")])
def test_inexpressible_config_is_refused_by_name(kind, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(DENSE | {"model_type": kind, "num_hidden_layers": 2, "vocab_size": 9}))
    with pytest.raises(SpecError, match=f"'{kind}' has .*, which cannot be expressed"):
        load_model(tmp_path / "config.json")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"model_type": "bert"}, "model_type 'bert' is not known; known: deepseek_v2"),
        ({"layer_types": ["linear_attention", "full_attention"]}, "layers of type 'linear_attention' cannot be expressed"),
        ({"layer_types": ["full_attention"]}, "must name every layer once"),
        ({"hidden_size": None}, "model_type 'llama' needs 'hidden_size'"),
        ({"hidden_size": "4096"}, "'hidden_size' must be an integer"),
        ({"intermediate_size": 0}, "intermediate_size is needed"),
    ],
)
def test_bad_config(change, says, tmp_path):
    config = DENSE | {"model_type": "llama", "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 9, "sliding_window": 8} | change
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(SpecError) as error:
        load_model(tmp_path / "config.json")
    assert says in str(error.value)


def test_models_refused_by_name():
    for name in ("nemotron_h_56b", "Qwen3-Next-80B-A3B", "nemotron-3-nano-30b-a3b", "jamba_large", "deepseek-v4-pro"):
        assert "cannot be expressed" in refusal(SEED.replace("{preset: olmo_core3_seed, num_experts: 8}", name))


# --- what is refused --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("num_experts: 8", "num_expert: 8", "s.yaml:2: unknown key 'num_expert' at model: did you mean 'num_experts'?"),
        ("seq_len: 8192", "seqlen: 8192", "s.yaml:5: unknown key 'seqlen' at workload: did you mean 'seq_len'?"),
        ("workload:", "worklod:", "s.yaml:4: unknown key 'worklod': did you mean 'workload'?"),
        ("seq_len: 8192", "seq_len: 8192.5", "s.yaml:5: workload.seq_len: input should be a valid integer"),
        ("seq_len: 8192", "seq_len: -1", "s.yaml:5: workload.seq_len: input should be greater than or equal to 1, not -1"),
        ("seq_len: 8192", "seq_len: .nan", "s.yaml:5: workload.seq_len"),
        ("seq_len: 8192", "seq_len: 1e300", "s.yaml:5: workload.seq_len"),
        ("seq_len: 8192", "seq_len: " + "9" * 60, "s.yaml:5: workload.seq_len"),
        ("seq_len: 8192", "seq_len: 8192\n  seq_len: 4096", "s.yaml:6: key 'seq_len' is given twice"),
        ("4 Mi tokens", "4 Mi tonnes", "s.yaml:6: workload.global_batch_tokens: cannot read '4 Mi tonnes' as a count of tokens"),
        ("num_nodes: 2", "num_nodes: 2, gpu: {preset: b300, hbm_bytes: 288}", "cluster.gpu.hbm_bytes: 288 has no unit; write it as text, like '288 GB'"),
        ("num_nodes: 2", "num_nodes: 2, runtime_reserve_bytes: 8 Gb/s", "is not in bytes"),
        ("olmo_core3_seed", "olmo_core3_sede", "s.yaml:2: model: no such model: 'olmo_core3_sede': did you mean 'olmo_core3_seed'?"),
        ("hgx_b300", "hgx_b3000", "s.yaml:3: cluster: no such cluster: 'hgx_b3000': did you mean 'hgx_b300'?"),
        ("hgx_b300", "missing/file.yaml", "s.yaml:3: cluster: no such file: 'missing/file.yaml'"),
        ("num_nodes: 2", "num_nodes: 2, gpu: {preset: b300, host_cpu: grce}", "did you mean 'grace'?"),
        ("name: seed", "name: [seed", "s.yaml:2: not YAML"),
        ("name: seed", "name: &a seed\ndescription: *a", "aliases (*name) are not supported"),
        ("name: seed", "name: &a [*a]", "aliases (*name) are not supported"),
        ("name: seed", "name: !!python/object/apply:os.system [ls]", "tag tag:yaml.org,2002:python/object/apply:os.system is not supported"),
        ("name: seed", "name: " + "[" * 5000, "not YAML"),
        ("name: seed", "name: " + "[" * 50 + "]" * 50, "nested deeper than 20 levels"),
        ("name: seed", "? [a, b]\n: c\nname: seed", "a key must be plain text"),
        ("name: seed", "name: seed\x00", "not YAML"),
        ("name: seed\n", "", "missing key 'name'"),
    ],
)
def test_refused_with_place_and_reason(old, new, says):
    assert says in refusal(SEED.replace(old, new))


@pytest.mark.parametrize("text", ["", "[]", "just words", "- a", "3"])
def test_not_a_mapping(text):
    assert "must be a mapping" in refusal(text)


@pytest.mark.parametrize(
    ("one", "says"),
    [
        ("model.num_experts", "write it as key.key=value"),
        ("=3", "write it as key.key=value"),
        ("model..x=3", "write it as key.key=value"),
        ("model.num_expertz=3", "--set model.num_expertz: unknown key 'num_expertz' at model: did you mean 'num_experts'?"),
        ("model.num_experts=[1", "not YAML: did not find expected"),
        ("model.num_experts.x=3", "model.num_experts has no keys inside it"),
        ("cluster.tiers.rial.span=3", "no 'rial' at cluster.tiers: did you mean 'rail'?"),
        ("cluster.tiers.7.span=3", "no '7' at cluster.tiers"),
        ("model.top_k=9", "top_k 9 must be between 1 and num_experts 8"),
        ("nothing=3", "unknown key 'nothing'"),
    ],
)
def test_refused_sets(one, says):
    assert says in refusal(SEED, [one])


def test_files_that_cannot_be_read(tmp_path):
    (tmp_path / "big.yaml").write_text("#" * 2_000_000)
    (tmp_path / "latin.yaml").write_bytes(b"name: \xff\xfe")
    for path, says in ((tmp_path / "big.yaml", "larger than"), (tmp_path / "latin.yaml", "not UTF-8"), (tmp_path, "not a file"), ("/dev/zero", "not a file"), ("no.yaml", "cannot read")):
        with pytest.raises(SpecError, match=says):
            load_scenario(path)
    with pytest.raises(SpecError, match="no such file or scenario: 'olmo_core3_nw': did you mean 'olmo_core3_new'"):
        load_scenario("olmo_core3_nw")


def test_config_json_bombs(tmp_path):
    for text in ("[" * 100_000, '{"a": NaN', "[]", '{"model_type": ["x"]}', '{"text_config": {}}'):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(SpecError):
            load_model(tmp_path / "config.json")


# --- fuzz -------------------------------------------------------------------------------------------------------------------------

VALUES = ["-1", "0", "1e308", ".nan", ".inf", "null", "true", "''", "[]", "{}", "x", "'8 GB'", "8 Gb/s", "9" * 50, "[1, [2]]", "{a: 1}", "*a", "&a 1", "!!x 1"]


def mutants(text, number, seed):
    """`number` texts a slip, a merge or a prank away from `text`."""
    rng = random.Random(seed)
    for _ in range(number):
        lines = text.splitlines()
        for _ in range(rng.randint(1, 3)):
            _mutate(lines, rng)
        yield "\n".join(lines)


def _mutate(lines, rng):
    i = rng.randrange(len(lines))
    key, colon, _ = lines[i].partition(":")
    kind = rng.randrange(6)
    if kind == 0 and colon:
        lines[i] = f"{key}: {rng.choice(VALUES)}"
    elif kind == 1 and len(key) > 3:
        at = rng.randrange(len(key))
        lines[i] = key[:at] + rng.choice("aZ_ :-#'{") + key[at + 1 :] + lines[i][len(key) :]
    elif kind == 2:
        lines.insert(rng.randrange(len(lines) + 1), lines[i])
    elif kind == 3 and len(lines) > 1:
        del lines[i]
    elif kind == 4:
        lines[i] = rng.choice(["  ", "\t", ""]) + lines[i].lstrip()
    else:
        at = rng.randrange(len(lines[i]) + 1)
        lines[i] = lines[i][:at] + rng.choice("[]{}:,&*!|>'\"%@`\x00\u2028é0") + lines[i][at:]


def outcome(load, *args):
    """Whether it loads; anything but success or one clear line is a failure of the test."""
    try:
        load(*args)
    except SpecError as error:
        assert str(error) and "\n" not in str(error) and "Traceback" not in str(error)
        return False
    return True


def fuzz(number, seed, tmp_path):
    results = []
    for path in [scenarios_dir() / f"{name}.yaml" for name in SCENARIOS]:
        results += [outcome(parse_scenario, text, (), path.name, path.parent) for text in mutants(path.read_text(), number, seed)]
    for kind, load in (("models", load_model), ("clusters", load_cluster)):
        for path in sorted((scenarios_dir() / kind).glob("*.yaml"))[:: 8 if kind == "models" else 1]:
            for text in mutants(path.read_text(), number, seed):
                (tmp_path / "x.yaml").write_text(text, encoding="utf-8")
                results.append(outcome(load, tmp_path / "x.yaml"))
    return results


def test_mutants_are_read_or_refused_in_one_line(tmp_path):
    results = fuzz(30, 1, tmp_path)
    assert 0.02 < sum(results) / len(results) < 0.6, "mutants must both pass and fail, or the fuzz tests nothing"


@pytest.mark.full
def test_thousands_of_mutants(tmp_path):
    assert len(fuzz(300, 2, tmp_path)) > 5000


def test_mutants_of_configs(tmp_path):
    rng = random.Random(3)
    for name in CONFIGS:
        config = json.loads((HF / f"{name}.json").read_text())
        for _ in range(20):
            inner = config["text_config"] if "text_config" in config else config
            changed = dict(inner)
            changed[rng.choice(sorted(changed))] = rng.choice([None, -1, 0, 1e9, "x", [], {}, True, [1], 10**30])
            (tmp_path / "config.json").write_text(json.dumps(changed))
            outcome(load_model, tmp_path / "config.json")


def test_mutants_of_sets():
    rng = random.Random(4)
    keys = ["model", "cluster", "cluster.gpu", "cluster.tiers.rail.span", "search.tp", "memory", "workload.routing.kind", "name", "model.top_k", "seed"]
    for _ in range(300):
        outcome(parse_scenario, SEED, [f"{rng.choice(keys)}={rng.choice(VALUES)}" for _ in range(2)])


# --- schema and speed -------------------------------------------------------------------------------------------------------------


def test_schema_knows_every_key():
    schema = json_schema()
    json.dumps(schema)
    assert set(schema["properties"]) == set(Scenario.model_fields)
    model = schema["$defs"]["ModelSpec"]
    assert set(model["properties"]) == set(ModelSpec.model_fields) | {"preset", "total_params"} and "required" not in model
    assert schema["$defs"]["GpuSpec"]["properties"]["hbm_bytes"]["type"] == "string"


def test_loading_is_quick():
    load_scenario("deepseek_v3_512_nodes")
    started = time.perf_counter()
    for _ in range(10):
        load_scenario("deepseek_v3_512_nodes")
    assert (time.perf_counter() - started) / 10 < 0.1


def test_setting_a_preset_replaces_what_was_there():
    """Overrides of one model mean nothing in another: --set model.preset takes the place of the whole model."""
    found = load_scenario("olmo_core3_new", ["model.preset=qwen3_30b_a3b", "model.num_layers=4"])
    assert (found.model.name, found.model.num_layers) == ("qwen3_30b_a3b", 4)
    assert load_scenario("olmo_core3_new", ["cluster.preset=hgx_h100"]).cluster.gpu.name == load_cluster("hgx_h100").gpu.name
    with pytest.raises(SpecError, match="no such model: 'qwen3_30b_a3'.*qwen3_30b_a3b"):
        load_scenario("olmo_core3_new", ["model.preset=qwen3_30b_a3"])


@pytest.mark.parametrize("value", ["[]", "null"])
def test_an_axis_has_a_value_or_is_left_out(value):
    if value == "null":
        assert load_scenario("olmo_core3_new", ["search.ep=null"]).search.ep is None
        return
    with pytest.raises(SpecError, match="search.ep: needs at least one value"):
        load_scenario("olmo_core3_new", [f"search.ep={value}"])


def test_only_scenarios_are_offered_as_scenarios():
    with pytest.raises(SpecError) as error:
        load_scenario("kernel_coverag")
    assert "kernel_coverage" not in str(error.value) and "template" in str(error.value)
