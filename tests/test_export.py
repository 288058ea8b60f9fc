"""Does a model survive the way to a Hugging Face folder and back bit by bit, and is whatever does not fit refused in one line?"""

from __future__ import annotations

import json

import pytest
import reference_model as reference
import torch
from safetensors.torch import load_file, save_file

from moesim.load import load_model, preset_names
from moesim.spec import ModelSpec
from moetrain.export import FORMS, Constants, export, form_named, load, read_config
from moetrain.export.cli import export_checkpoint, import_model, initial_tensors
from moetrain.export.form import PLAIN
from moetrain.export.names import logical_shapes
from moetrain.export.registry import check

SIZES = {"name": "tiny", "num_layers": 2, "hidden_size": 16, "vocab_size": 29, "num_heads": 4, "num_kv_heads": 2, "head_dim": 6, "intermediate_size": 20}
EXPERTS = {"num_experts": 8, "top_k": 3, "moe_intermediate_size": 10}
LATENT = {"attention": "mla", "num_kv_heads": 4, "head_dim": 10, "q_lora_rank": 9, "kv_lora_rank": 7, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 5}
DEEPSEEK = EXPERTS | LATENT | {"router": "sigmoid", "score_correction_bias": True, "num_expert_groups": 4, "top_k_groups": 2, "routed_scale": 2.5,
                               "num_shared_experts": 2, "num_leading_dense_layers": 1}  # fmt: skip
OLMO3 = EXPERTS | {"norm_placement": "post", "qk_norm": "per_head", "embedding_norm": True, "num_shared_experts": 1, "routed_scale": 3.0,
                   "num_leading_dense_layers": 1}  # fmt: skip
CASES = {
    "mixtral": ("mixtral", EXPERTS | {"intermediate_size": 0}),
    "mixtral_window_tied": ("mixtral", EXPERTS | {"intermediate_size": 0, "sliding_window": 4, "tie_embeddings": True}),
    "qwen3_moe": ("qwen3_moe", EXPERTS | {"qk_norm": "per_head", "qkv_bias": True, "out_bias": True, "normalize_top_k": False}),
    "qwen3_moe_interval": ("qwen3_moe", EXPERTS | {"qk_norm": "per_head", "moe_layer_interval": 2}),
    "olmoe": ("olmoe", EXPERTS | {"intermediate_size": 0, "qk_norm": "full", "normalize_top_k": False}),
    "olmo3moe": ("olmo3moe", OLMO3),
    "olmo3moe_other": ("olmo3moe", OLMO3 | {"qk_norm": "full", "router": "sigmoid", "embedding_norm": False, "num_shared_experts": 0, "routed_scale": 1.0,
                                            "sliding_window": 3, "full_attention_every": 2}),
    "deepseek_v3": ("deepseek_v3", DEEPSEEK),
    "deepseek_v3_direct": ("deepseek_v3", DEEPSEEK | {"q_lora_rank": None, "qkv_bias": True, "out_bias": True}),
    "llama": ("llama", {"qkv_bias": True, "out_bias": True, "mlp_bias": True}),
    "qwen3": ("qwen3", {"qk_norm": "per_head"}),
}  # fmt: skip
each = pytest.mark.parametrize("form, spec", [(form, ModelSpec(**(SIZES | fields))) for form, fields in CASES.values()], ids=CASES.keys())


def model(spec: ModelSpec, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    params = reference.random_params(spec, dtype=dtype)
    return {n: torch.zeros_like(p) if n.endswith("balance_bias") and not spec.score_correction_bias else p for n, p in params.items()}


def constants_for(form: str) -> Constants:
    return Constants(rope_theta=50_000.0, norm_eps=1e-6, embed_scale=4.0 if form == "olmo3moe" else 1.0, max_positions=64, eos_token=3)


@each
def test_round_trip_is_exact_and_the_config_says_the_same_model(form, spec, tmp_path):
    params, constants = model(spec), constants_for(form)
    export(params, spec, form, tmp_path / "out", constants)
    found = read_config(tmp_path / "out")
    assert found.form.name == form and found.constants == constants
    assert found.spec.model_dump(exclude={"name"}) == spec.model_dump(exclude={"name"})
    loaded = dict(load(tmp_path / "out", spec))
    assert list(loaded) == list(logical_shapes(spec))
    assert all(torch.equal(loaded[name], params[name]) and loaded[name].dtype == torch.float32 for name in params)


@each
def test_names_and_shapes_are_those_of_the_definition(form, spec):
    assert logical_shapes(spec) == reference.shapes(spec)


@each
def test_the_file_has_every_parameter_the_ledger_counts(form, spec):
    counted = sum(torch.Size(shape).numel() for shape in FORMS[form].file_shapes(spec).values())
    assert counted == spec.num_params


def test_shards_stay_under_the_limit_and_are_indexed(tmp_path):
    form, spec = "mixtral", ModelSpec(**(SIZES | EXPERTS | {"intermediate_size": 0}))
    export(model(spec), spec, form, tmp_path / "out", shard_bytes=4096)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    files = sorted((tmp_path / "out").glob("model-*.safetensors"))
    held = {name: path.name for path in files for name in load_file(path)}
    assert len(files) > 3 and held == index["weight_map"] and not (tmp_path / "out" / "model.safetensors").exists()
    sizes = [sum(t.nbytes for t in load_file(path).values()) for path in files]
    assert max(sizes) <= 4096 and sum(sizes) == index["metadata"]["total_size"]
    assert dict(load(tmp_path / "out", spec)).keys() == model(spec).keys()


def test_sources_may_be_mapping_function_or_pairs(tmp_path):
    spec = ModelSpec(**(SIZES | DEEPSEEK))
    params = model(spec)
    export(params.__getitem__, spec, "deepseek_v3", tmp_path / "a")
    export(reversed(params.items()), spec, "deepseek_v3", tmp_path / "b", dtype=torch.bfloat16)
    a, b = dict(load(tmp_path / "a")), dict(load(tmp_path / "b", spec))
    assert all(torch.equal(a[name], params[name]) for name in params)
    assert all(b[n].dtype == (torch.float32 if n.endswith("balance_bias") else torch.bfloat16) for n in b)
    assert all(torch.equal(b[n], params[n].to(b[n].dtype)) for n in b)


# --- refusals ---------------------------------------------------------------------------------------------------------------

MIXTRAL = ModelSpec(**(SIZES | EXPERTS | {"intermediate_size": 0}))
REFUSED = {
    "num_shared_experts 1: form 'mixtral' holds only 0; olmo3moe, deepseek_v3 can": ("mixtral", {"num_shared_experts": 1}),
    "qk_norm per_head: form 'mixtral' holds only none; qwen3_moe, olmo3moe can": ("mixtral", {"qk_norm": "per_head"}),
    "router_bias True: form 'mixtral' holds only False; no form can": ("mixtral", {"router_bias": True}),
    "num_expert_groups 2: form 'olmo3moe' holds only 1; deepseek_v3 can": ("olmo3moe", OLMO3 | {"num_expert_groups": 2, "top_k_groups": 2}),
    "form 'olmo3moe' cannot hold routed_scale 2.5 must be 1 or top_k = 3": ("olmo3moe", OLMO3 | {"routed_scale": 2.5}),
    "form 'olmoe' cannot hold qkv_bias True and out_bias False differ": ("olmoe", {"qk_norm": "full", "qkv_bias": True}),
    "form 'mixtrl' is not known": ("mixtrl", {}),
    "has experts: form 'llama' cannot hold that; mixtral": ("llama", {}),
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_a_form_cannot_hold_is_refused_by_field(message, tmp_path):
    form, fields = REFUSED[message]
    spec = ModelSpec(**(SIZES | EXPERTS | fields))
    with pytest.raises(ValueError, match=message.split(";")[0].replace(".", r"\.")) as refused:
        export({}, spec, form, tmp_path / "out")
    assert message in str(refused.value) and "\n" not in str(refused.value)
    assert list(tmp_path.iterdir()) == []


def test_every_feature_of_a_spec_is_a_number_or_listed():
    """A feature added to ModelSpec must be placed or refused by each form: it can't slip through unlisted."""
    numbers = {"name", "num_layers", "hidden_size", "vocab_size", "num_heads", "num_kv_heads", "head_dim", "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim",
               "qk_rope_head_dim", "v_head_dim", "intermediate_size", "num_experts", "top_k", "moe_intermediate_size", "shared_intermediate_size"}  # fmt: skip
    assert PLAIN.keys() | numbers == ModelSpec.model_fields.keys()
    assert all(form.allows.keys() <= PLAIN.keys() for form in FORMS.values())


@pytest.mark.parametrize("form, name", [("mixtral", "mixtral_8x7b"), ("mixtral", "mixtral_8x22b"), ("qwen3_moe", "qwen3_30b_a3b"), ("olmoe", "olmoe_1b_7b"),
                                        ("olmo3moe", "olmo_core3_seed"), ("deepseek_v3", "deepseek_v3"), ("llama", "llama3_8b")])  # fmt: skip
def test_published_models_fit_their_form(form, name):
    spec = load_model(name)
    check(form_named(form), spec)
    assert sum(torch.Size(shape).numel() for shape in form_named(form).file_shapes(spec).values()) == spec.num_params


def test_every_preset_fits_a_form_or_is_refused_by_each_in_one_line():
    for name in preset_names("model"):
        spec = load_model(name)
        for form in FORMS.values():
            try:
                check(form, spec)
            except ValueError as error:
                assert "\n" not in str(error) and f"form '{form.name}'" in str(error)
            else:
                assert sum(torch.Size(shape).numel() for shape in form.file_shapes(spec).values()) == spec.num_params


BROKEN = {
    "layers.0.norm1.weight: missing": lambda p: p.pop("layers.0.norm1.weight"),
    "layers.9.norm1.weight: not a tensor of this model": lambda p: p.update({"layers.9.norm1.weight": torch.ones(16)}),
    r"layers.0.norm1.weight: shape \[15\], but the model has \[16\]": lambda p: p.update({"layers.0.norm1.weight": torch.ones(15)}),
    "balance_bias is not zero: form 'mixtral' has no place": lambda p: p["layers.1.moe.router.balance_bias"].fill_(0.5),
}


@pytest.mark.parametrize("message", BROKEN)
def test_wrong_tensors_leave_nothing_behind(message, tmp_path):
    params = model(MIXTRAL)
    BROKEN[message](params)
    with pytest.raises(ValueError, match=message):
        export(params, MIXTRAL, "mixtral", tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_a_name_given_twice_is_refused(tmp_path):
    pairs = list(model(MIXTRAL).items())
    with pytest.raises(ValueError, match="embed.weight: given twice"):
        export([*pairs, pairs[0]], MIXTRAL, "mixtral", tmp_path / "out")


def test_what_is_there_is_not_overwritten(tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("x")
    with pytest.raises(ValueError, match="exists and is not an empty folder"):
        export(model(MIXTRAL), MIXTRAL, "mixtral", tmp_path / "out")
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_a_write_that_reads_back_otherwise_is_not_published(tmp_path, monkeypatch):
    from moetrain.export import write

    real = write.load
    monkeypatch.setattr(write, "load", lambda folder, spec: ((n, t + 1 if n == "final_norm.weight" else t) for n, t in real(folder, spec)))
    with pytest.raises(ValueError, match="final_norm.weight: what was read back"):
        export(model(MIXTRAL), MIXTRAL, "mixtral", tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def folder(tmp_path):
    return export(model(MIXTRAL), MIXTRAL, "mixtral", tmp_path / "out")


def change(folder, edit) -> None:
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors")


NORM, ROUTER = "model.layers.0.input_layernorm.weight", "model.layers.1.block_sparse_moe.gate.weight"
DAMAGED = {
    f"{NORM} is missing": lambda t: t.pop(NORM),
    "model.layers.0.extra is not expected in form 'mixtral'": lambda t: t.update({"model.layers.0.extra": torch.ones(2)}),
    rf"{ROUTER} has shape \[16, 8\], expected \[8, 16\]": lambda t: t.update({ROUTER: t[ROUTER].T.contiguous()}),
    f"{NORM} is stored as I64": lambda t: t.update({NORM: t[NORM].long()}),
}


@pytest.mark.parametrize("message", DAMAGED)
def test_damaged_files_are_refused_before_anything_is_yielded(message, folder):
    change(folder, DAMAGED[message])
    with pytest.raises(ValueError, match=message) as refused:
        next(load(folder, MIXTRAL))
    assert "\n" not in str(refused.value)


def test_other_files_and_other_models_are_refused(folder):
    with pytest.raises(ValueError, match="top_k is 3, but the model to be filled has 2"):
        next(load(folder, MIXTRAL.model_copy(update={"top_k": 2})))
    with pytest.raises(ValueError, match="rope_theta is 10000, but this run has 500"):
        next(initial_tensors(folder, MIXTRAL, Constants(rope_theta=500.0)))
    (folder / "model.safetensors").write_bytes(b"\x08\x00\x00\x00\x00\x00\x00\x00notjson!")
    with pytest.raises(ValueError, match="not a readable safetensors file"):
        next(load(folder, MIXTRAL))
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"only pickled weights \(pytorch_model.bin\)"):
        next(load(folder, MIXTRAL))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "../elsewhere.safetensors"}}))
    with pytest.raises(ValueError, match="is not the name of a safetensors file beside it"):
        next(load(folder, MIXTRAL))


CONFIGS = {
    "model_type 'gpt2' has no known layout": {"model_type": "gpt2"},
    "'hidden_act' 'gelu' is not supported": {"hidden_act": "gelu"},
    "'rope_scaling' .* is not supported": {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
    "'rope_parameters' .* is not supported": {"rope_parameters": {"rope_type": "llama3"}},
    "top_k 30 must be between 1 and num_experts 8": {"num_experts_per_tok": 30},
    "'rms_norm_eps' must be a positive number": {"rms_norm_eps": "small"},
}


@pytest.mark.parametrize("message", CONFIGS)
def test_configs_that_mean_another_model_are_refused(message, folder):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | CONFIGS[message]))
    with pytest.raises(ValueError, match=message) as refused:
        read_config(folder)
    assert "\n" not in str(refused.value) and str(path) in str(refused.value)


JUNK = [None, -1, 0, 1, 2.5, "text", True, [], [7], {}, {"type": "x"}, 10**12, float("nan")]


@pytest.mark.parametrize("form", FORMS)
def test_a_config_with_any_one_value_replaced_is_a_model_or_one_line(form, tmp_path):
    fields = next(fields for of, fields in CASES.values() if of == form)
    spec = ModelSpec(**(SIZES | fields))
    config = FORMS[form].write_config(spec, constants_for(form)) | {"model_type": form}
    for key in config:
        for value in JUNK:
            (tmp_path / "config.json").write_text(json.dumps(config | {key: value}))
            try:
                assert read_config(tmp_path).spec.num_params > 0
            except ValueError as error:
                assert "\n" not in str(error) and len(str(error)) < 600


def test_the_same_stack_described_otherwise_is_the_same_model(tmp_path):
    """Two layers, the second sparse: one leading dense layer, or every second one."""
    spec = ModelSpec(**(SIZES | OLMO3 | {"num_leading_dense_layers": 0, "moe_layer_interval": 2, "sliding_window": 5, "full_attention_every": 3}))
    folder = export(model(spec), spec, "olmo3moe", tmp_path / "out")
    assert read_config(folder).spec.num_leading_dense_layers == 1
    assert dict(load(folder, spec)).keys() == model(spec).keys()
    with pytest.raises(ValueError, match="layer 0 is dense, window 5, but the model to be filled has moe, window 5"):
        next(load(folder, spec.model_copy(update={"moe_layer_interval": 1})))


def test_a_tied_head_stored_all_the_same_must_be_equal(tmp_path):
    spec = MIXTRAL.model_copy(update={"tie_embeddings": True})
    folder = export(model(spec), spec, "mixtral", tmp_path / "out")
    change(folder, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    assert "head.weight" not in dict(load(folder, spec))
    change(folder, lambda t: t["lm_head.weight"].add_(1))
    with pytest.raises(ValueError, match="lm_head.weight is not expected"):
        next(load(folder, spec))


# --- the command line's functions -------------------------------------------------------------------------------------------


def test_commands_export_import_and_start_from(tmp_path):
    spec, constants = ModelSpec(**(SIZES | OLMO3)), constants_for("olmo3moe")
    (tmp_path / "tokenizer.json").write_text("{}")
    said = export_checkpoint(model(spec).items(), spec, "olmo3moe", tmp_path / "out", constants, tokenizer=tmp_path / "tokenizer.json")
    assert "olmo3moe" in said and f"{spec.num_params:,}" in said and (tmp_path / "out" / "tokenizer.json").exists()
    said = import_model(tmp_path / "out", tmp_path / "model.yaml")
    assert "embed_scale 4.0" in said
    assert load_model(str(tmp_path / "model.yaml")).model_dump(exclude={"name"}) == spec.model_dump(exclude={"name"})
    started = dict(initial_tensors(tmp_path / "out", spec, constants))
    assert all(torch.equal(started[n], p.bfloat16().float()) for n, p in model(spec).items())
    with pytest.raises(ValueError, match="dtype 'int8' is not known"):
        export_checkpoint(model(spec), spec, "olmo3moe", tmp_path / "again", constants, "int8")
    with pytest.raises(ValueError, match="no tokenizer there"):
        export(model(spec), spec, "olmo3moe", tmp_path / "again", constants, tokenizer=tmp_path / "out" / "nothing")
