"""Do inputs that once got past the checks end in one line before anything starts?"""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file

from moesim.layout import parse_layout
from moesim.load import SpecError, load_model, load_scenario
from moetrain.bench.requests import read_requests
from moetrain.forced import Record
from moetrain.kernels import backend
from moetrain.observe.routing_log import RoutingRecorder
from moetrain.prepare import run_folder
from moetrain.supports import supports


def test_random_ids_read_no_folder():
    with pytest.raises(SpecError, match="reads no folder"):
        load_scenario("quickstart", ["train.data.kind=synthetic"])


def test_rotary_widths_are_even():
    model = load_scenario("quickstart", ["model.head_dim=7"]).model
    assert "must be even" in supports(parse_layout("dp1"), model)
    assert supports(parse_layout("dp1"), load_model("deepseek_v3")) is None


def test_triton_needs_a_gpu():
    with pytest.raises(ValueError, match="needs a CUDA device"):
        backend("triton", "cpu", torch.float32)


@pytest.mark.parametrize("name, tensor, says", [
    ("layer.0", torch.zeros(0, 2, dtype=torch.long), "[tokens, k]"), ("layer.0", torch.tensor(3), "[tokens, k]"),
    ("layer.0", torch.tensor([[0, -1]]), "[tokens, k]"), ("layer.0", torch.rand(3, 2), "[tokens, k]"), ("layer.0", torch.zeros(3, 4, 2, dtype=torch.long), "[tokens, k]"),
    ("layer.0", torch.tensor([[1, 1]]), "the same expert twice"), ("layer.x", torch.tensor([[0, 1]]), "legal are layer.N"),
    ("layer..counts", torch.ones(4), "legal are layer.N"), ("layer.0.counts", torch.zeros(4), "not all 0"),
    ("layer.0.counts", torch.tensor([1.0, float("nan")]), "finite"), ("layer.0.counts", torch.tensor([1.0, -1.0]), "from 0 up"),
])
def test_a_record_is_whole_or_refused(tmp_path, name, tensor, says):
    save_file({name: tensor}, tmp_path / "r.safetensors")
    with pytest.raises(ValueError) as error:
        Record.read(tmp_path / "r.safetensors")
    assert says in str(error.value) and "\n" not in str(error.value)


def test_what_a_run_recorded_can_be_replayed(tmp_path):
    """As it lies there: the folder, or one file of it."""
    recorder = RoutingRecorder(tmp_path, 0, [1, 2], 4, 2)
    counts = torch.tensor([3, 0, 4, 1])
    for step in (1, 2):
        for layer in (1, 2):
            recorder.add(layer, counts * layer, counts * layer)
        recorder.end_step(step)
    recorder.flush()
    for path in (tmp_path, next(tmp_path.glob("rows-*.npz"))):
        record = Record.read(path)
        assert record.counts[1].tolist() == [6, 0, 8, 2] and record.counts[2].tolist() == [12, 0, 16, 4] and not record.experts


@pytest.mark.parametrize("name", ["../../out", ".hidden", "a/b", "bell\a"])
def test_a_name_stays_in_its_folder(name):
    scenario = load_scenario("quickstart").model_copy(update={"name": name})
    with pytest.raises(ValueError, match="becomes part of the run's folder"):
        run_folder(scenario)


@pytest.mark.parametrize("line, says", [
    ({"op": "Gemm", "m": 1, "n": 1, "k": 1, "dtype": "zzz"}, "dtype 'zzz'"), ({"op": "Gemm", "m": 1, "n": 1, "k": 1, "provenance": ["x"]}, "provenance"),
    ({"op": "Gemm", "m": 1, "n": 1, "k": 1, "predicted_s": 10**400}, "predicted_s"), ({"op": "Gemm", "m": 0, "n": 1, "k": 1}, "nothing to time"),
    ({"op": "GroupedGemm", "groups": 0, "rows": 1, "n": 1, "k": 1}, "nothing to time"),
])
def test_an_op_that_can_not_be_timed_is_refused_by_its_line(tmp_path, line, says):
    (tmp_path / "ops.jsonl").write_text(json.dumps(line) + "\n")
    with pytest.raises(ValueError, match="ops.jsonl:1: ") as error:
        read_requests(tmp_path / "ops.jsonl")
    assert says in str(error.value)
