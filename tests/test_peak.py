"""Does a rank hold what the planner says, and what does following it on fake tensors see?"""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from pathlib import Path

import pytest

from moesim.layout import parse_layout
from moesim.load import load_scenario, parse_scenario
from moesim.saved_tensors import Table, load_table, saved_tensors
from moetrain.build import layout_of
from moetrain.dryrun import build_world
from moetrain.peak import CATEGORIES, measure, table

ROOT = Path(__file__).resolve().parent.parent
_spec = importlib.util.spec_from_file_location("memory_benchmark", ROOT / "benchmarks" / "memory.py")
bench = sys.modules["memory_benchmark"] = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(bench)


@pytest.mark.parametrize("point", [*bench.QUICK, *(pytest.param(p, marks=pytest.mark.full) for p in bench.GRID if p not in bench.QUICK and p.model == "small")],
                         ids=lambda p: p.name)
def test_the_planner_says_what_a_rank_holds(point):
    """Masters and moments to the byte; activations within 6% and never more than 6% under; everything within 5%."""
    found = bench.run(point)
    assert found["planned"]["optimizer"] == pytest.approx(found["followed"]["optimizer"], rel=1e-9)
    assert abs(found["activations_error"]) < 0.06 and abs(found["total"]["error"]) < 0.05
    text = table(found)
    assert "together" in text and f"{found['followed']['activations']:,}" in text


def followed(text: str, rank: int = 0, *sets: str):
    scenario = parse_scenario(bench.SMALL, list(sets))
    return scenario, layout_of(scenario, text, parse_layout(text).world), rank


def test_what_rests_is_what_placements_say():
    """Moments: the rank's own rows. Masters and gradient shards: whole padded chunks, the same on every rank of an uneven cut."""
    scenario, layout, _ = followed("dp8 ep4 zero1 mb1", 0, "model.shared_expert_gate=true")
    world = build_world(scenario, layout)
    peaks = [measure(scenario, layout, rank, "gpu") for rank in (0, 7)]
    for rank, peak in zip((0, 7), peaks):
        assert peak.resting["moments"] == world.bytes(rank).moments
        assert peak.resting["masters"] >= world.bytes(rank).masters
        assert peak.categories["masters"] == peak.resting["masters"] and sum(peak.categories.values()) == peak.total
    assert peaks[0].resting["moments"] > peaks[1].resting["moments"] and peaks[0].resting["masters"] == peaks[1].resting["masters"]
    assert tuple(peaks[0].categories) == CATEGORIES


def test_a_cpu_keeps_more_than_a_gpu():
    """Composite norms and the plain gate keep FP32 copies; weights, gradients and state are the same."""
    scenario, layout, _ = followed("dp8 ep4 zero1 mb1")
    gpu, cpu = (measure(scenario, layout, 0, kernels) for kernels in ("gpu", "cpu"))
    assert cpu.categories["activations"] > 1.2 * gpu.categories["activations"]
    assert {k: v for k, v in cpu.categories.items() if k != "activations"} == {k: v for k, v in gpu.categories.items() if k != "activations"}


def test_a_real_rank_holds_what_a_fake_one_does():
    """gloo ranks that exchange real rows, four microbatches: what one leaves must not be there under the next."""
    from moetrain.testing import run_ranks

    text = "dp2 ep2 zero1 mb1"
    real = run_ranks(bench.os_rank, 2, text)
    peak = measure(bench.os_scenario(), layout_of(bench.os_scenario(), text, 2), 0, "cpu")
    assert real[0]["tracked_growth"] == pytest.approx(peak.total - peak.categories["masters"] - peak.categories["moments"], rel=0.005)


def test_what_cannot_be_followed_is_one_line():
    scenario, layout, _ = followed("dp8 ep4 zero1 mb1")
    with pytest.raises(ValueError, match="ranks 0 to 7"):
        measure(scenario, layout, 8)
    with pytest.raises(ValueError, match="legal are cpu, gpu"):
        measure(scenario, layout, 0, "tpu")
    with pytest.raises(ValueError, match="don't spread evenly over 48 experts"):
        measure(*followed("dp8 ep4 zero1 mb1", 0, "model.num_experts=48"))


def test_committed_results_hold():
    """Every point of the grid that has a result: masters and moments to the rows that an uneven cut leaves a rank without (the planner counts
    mean rows), and the errors that README states."""
    points = json.loads(bench.RESULTS.read_text())["points"]
    assert len(points) >= 24 and set(points) <= {p.name for p in bench.GRID}
    for name, found in points.items():
        assert found["planned"]["optimizer"] == pytest.approx(found["followed"]["optimizer"], rel=6e-3), name
        assert found["activations_error"] > -0.06 and abs(found["total"]["error"]) < 0.06, name


# --- whose saved tensors ------------------------------------------------------------------------------------------------------------


def test_every_figure_has_a_source_and_every_set_its_rows():
    found = load_table()
    for rows in (found.norms, found.attention, found.experts, found.losses):
        for row in rows.values():
            assert set(row.sources) == set(type(row).model_fields) - {"sources"} and row.provenance in ("counted", "documented", "assumed")
    assert {"cuda_flash", "cpu_flash", "fa2", "fa3", "fa4", "math"} <= set(found.attention) and {"triton", "grouped_mm", "reference"} <= set(found.experts)
    for name in found.sets:
        assert saved_tensors(name).said().startswith(f"{name}: norm ")


def test_the_default_is_what_the_planner_always_counted():
    """2 bytes an input of a norm and an output, 4 a head, 8 an expert, whole logits: other stacks' published bytes rest on these."""
    rows = saved_tensors("default")
    assert (rows.norm.input, rows.norm.normalised, rows.norm.row_bytes, rows.core.output, rows.core.head_bytes, rows.core.pair_bytes) == (2, 0, 0, 2, 4, 0)
    assert (rows.experts.up, rows.experts.activation, rows.experts.output, rows.experts.expert_bytes, rows.experts.route_bytes) == (2, 0, None, 8, 0)
    assert (rows.loss.logit_bytes, rows.loss.gradient_bytes, rows.loss.chunk) == (2, 4, 0)
    assert saved_tensors("moetrain", "cpu").name == "moetrain_cpu" and saved_tensors("default", "cpu").name == "default"


def test_a_wrong_table_or_set_is_named():
    with pytest.raises(ValueError, match="did you mean moetrain"):
        saved_tensors("moetran")
    values = load_table().model_dump()
    for path, value, said in ((("norms", "fused", "input"), -1.0, "norms.fused.input"), (("sets", "default", "norm"), "fusd", "did you mean fused"),
                              (("losses", "whole", "colour"), 1.0, "losses.whole.colour")):
        broken = json.loads(json.dumps(values))
        broken[path[0]][path[1]][path[2]] = value
        with pytest.raises(ValueError, match=re.escape(said)):
            Table(**broken)


def test_simulate_says_whose_tensors_are_counted():
    from moesim.evaluate import Evaluator

    made = Evaluator(load_scenario("olmo_core3_new", ["stack=moetrain"]))
    found = made.candidate(made.played(made.legal("dp8 ep8 zero1 mb1")), with_skew=False)
    assert found.saved_tensors == "moetrain: norm torch_cuda (documented), attention cuda_flash (documented), experts triton (documented), loss chunked (documented)"
