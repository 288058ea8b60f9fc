"""Does the screen never promise too little time, and does it see the memory that one layout alone has? (Random legal layouts.)"""

import random
from dataclasses import replace

import numpy as np
import pytest

from moesim import engine, paths
from moesim.bounds import step_bound
from moesim.evaluate import Evaluator
from moesim.program import STREAMS
from moesim.screen import Screen, item_names, structure_of
from moesim.site import Site
from moesim.space import enumerate_layouts
from small_scenarios import AXES, random_spaces, scenario

CLOSE = 1 + 1e-9


def screened(s, **kw):
    evaluator = Evaluator(s, **kw)
    space = enumerate_layouts(s, evaluator.stack.default_layout)
    return evaluator, space, Screen(s, evaluator.parts, space).run()


PAIRED = {**AXES, "ep": [2, 4, 8], "overlap": ["ep", "ep+shared", "ep+grad+param"], "schedule": ["1f1b", "interleaved", "interleaved_zb"], "num_chunks": [1, 2], "pp": [1, 2, 4], "micro_batch": [1],
          "graphs": ["none", "full"], "zero": [1, 2, 3], "etp": [1], "dp_replicate": [1]}  # fmt: skip


def check_rows(seed: int, num_rows: int, rows_each: int = 3, **kw) -> np.ndarray:
    """Plays random rows of random spaces; [rows] of screened bound over engine."""
    rng, ratios = random.Random(seed), []
    for evaluator, space in random_spaces(rng, **kw):
        found = Screen(evaluator.scenario, evaluator.parts, space).run()
        for row in rng.sample(range(len(space)), min(rows_each, len(space))):
            layout = space.layout(row)
            where = f"{evaluator.scenario.model.name} on {evaluator.stack.name}: {layout}"
            program = evaluator.program(layout)
            path, played = paths.step_seconds([program])[0], engine.run(program, spans=False).makespan
            assert found.bound_s[row] <= path * CLOSE, where
            assert step_bound(program) <= path * CLOSE, where
            assert path <= played * CLOSE, where
            peak = evaluator.peak(layout)
            assert found.peak_bytes[row] == pytest.approx(peak.total, rel=1e-9), where
            assert found.heaviest[row] == peak.rank or found.peak_bytes[row] == pytest.approx(peak.total, rel=1e-9), where
            ratios.append(found.bound_s[row] / played)
            if len(ratios) == num_rows:
                return np.array(ratios)


def test_bound_path_engine_and_memory_of_random_layouts():
    assert np.median(check_rows(3, 60, rows_each=5)) >= 0.85


def check_spans(evaluator, layout):
    """One thing at a time on a stream, nothing faster than alone, and no task missing."""
    program = evaluator.program(layout)
    timeline = engine.run(program)
    for rank in range(timeline.num_ranks):
        for stream in range(len(STREAMS)):
            lane = timeline.lane(rank, stream)
            assert all(a.end <= b.start + 1e-12 for a, b in zip(lane, lane[1:])), (str(layout), rank, stream)
            assert all(x.end - x.start >= x.solo * (1 - 1e-6) - 1e-12 for x in lane), (str(layout), rank, stream)
    expected = sum(len(program.bodies[k]) for row in program.body_index for k in row) + sum(map(len, program.epilogue))
    assert sum(not x.name.startswith("send ") for x in timeline.spans) == expected
    assert paths.step_seconds([program])[0] <= timeline.makespan * CLOSE, str(layout)


def test_streams_of_the_engine_run_one_thing_at_a_time():
    """A chain of kernels played as one event, right behind a kernel that contention had slowed, once ended too early."""
    evaluator = Evaluator(scenario("mla", num_nodes=2, stack="olmo_core3_ddp", batch=32))
    check_spans(evaluator, evaluator.legal("pp2 vpp4 dp4 cp2 ep2 etp2 zero3 noreshard mb2 interleaved_zb rc:core_attn syncfree:16 ov:shared grad:bf16 graph:layer"))
    rng = random.Random(31)
    for _, (evaluator, space) in zip(range(6), random_spaces(rng, num_values=1)):
        check_spans(evaluator, space.layout(rng.randrange(len(space))))


@pytest.mark.full
def test_streams_of_the_engine_run_one_thing_at_a_time_on_many_layouts():
    rng = random.Random(32)
    for _, (evaluator, space) in zip(range(120), random_spaces(rng, num_values=1)):
        check_spans(evaluator, space.layout(rng.randrange(len(space))))


def test_bound_path_engine_of_overlapped_pairs():
    assert np.median(check_rows(21, 40, rows_each=5, models=("moe", "mla", "window"), axes=PAIRED)) >= 0.8


@pytest.mark.full
@pytest.mark.parametrize("seed", range(2))
def test_bound_path_engine_of_many_overlapped_pairs(seed):
    ratios = check_rows(300 + seed, 150, models=("moe", "mla", "window"), axes=PAIRED)
    print(f"pairs: bound / engine over {len(ratios)} layouts: median {np.median(ratios):.3f}, 10% {np.percentile(ratios, 10):.3f}")
    assert np.median(ratios) >= 0.8


@pytest.mark.full
@pytest.mark.parametrize("seed", range(4))
def test_bound_path_engine_and_memory_of_many_random_layouts(seed):
    ratios = check_rows(100 + seed, 150)
    print(f"bound / engine over {len(ratios)} layouts: median {np.median(ratios):.3f}, 10% {np.percentile(ratios, 10):.3f}")
    assert np.median(ratios) >= 0.85


@pytest.mark.parametrize("stack", ["olmo_core3_ddp", "megatron_core"])
@pytest.mark.parametrize("overlap", ["none", "grad", "param", "grad+param"])
def test_the_end_of_the_step_is_bounded_for_every_zero(stack, overlap):
    """Gathers after the optimizer stand beside what the host does between steps; the bound may not add the two up."""
    s = scenario("dense", stack=stack, search={"zero": [0, 1, 2, 3], "reshard": ["true", "false"], "overlap": [overlap], "pp": [1, 2]})
    evaluator, space, found = screened(s)
    assert len(space) == 10
    path = paths.step_seconds([evaluator.program(space.layout(row)) for row in range(len(space))])
    assert (found.bound_s <= path * CLOSE).all()
    assert np.median(found.bound_s / path) > 0.9


def test_the_bound_follows_a_sites_constants():
    s = scenario("moe", num_nodes=2, search={"zero": [1, 2, 3], "ep": [1, 16], "overlap": ["none", "grad+param"]})
    site = Site({"host": 3.0, "nic": 2.0, "gemm": 1.3, "end_of_step": 2.0})
    evaluator, space, found = screened(s, site=site)
    _, _, plain = screened(s)
    path = paths.step_seconds([evaluator.program(space.layout(row)) for row in range(len(space))])
    assert (found.bound_s <= path * CLOSE).all()
    assert (found.bound_s >= plain.bound_s * (1 - 1e-12)).all() and (found.bound_s > plain.bound_s * 1.05).any()
    assert np.array_equal(found.peak_bytes, plain.peak_bytes)


def test_rows_do_not_depend_on_their_neighbours():
    """Screening one row alone gives what it gave among others."""
    s = scenario("mla", search={"pp": [1, 2], "ep": [1, 4, 8], "zero": [1, 3], "overlap": ["none", "ep+shared"], "recompute": ["none", "full"]})
    evaluator, space, found = screened(s)
    rng = np.random.default_rng(0)
    for row in rng.choice(len(space), 6, replace=False):
        alone = Screen(s, evaluator.parts, space.take(np.array([row]))).run()
        assert alone.bound_s[0] == pytest.approx(found.bound_s[row], rel=1e-12)
        assert alone.peak_bytes[0] == pytest.approx(found.peak_bytes[row], rel=1e-12)


def test_progress_counts_every_row_once():
    s = scenario("moe", search={"pp": [1, 2], "ep": [1, 8], "zero": [1, 3]})
    evaluator = Evaluator(s)
    space = enumerate_layouts(s, evaluator.stack.default_layout)
    told = []
    Screen(s, evaluator.parts, space).run(lambda done, total: told.append((done, total)))
    assert told[-1] == (len(space), len(space))
    assert [done for done, _ in told] == sorted({done for done, _ in told})


def test_items_of_the_stages_are_the_items_of_the_model():
    """However a model is cut, its layers, embedding, head and MTP module are somewhere exactly once."""
    for model in ("moe", "mla", "window", "dense"):
        s = scenario(model)
        evaluator, items = Evaluator(s), item_names(s.model)
        whole = structure_of(s.model, evaluator.legal("dp8 zero1"), 8, items).contents.sum(axis=0)
        for text in ("pp2 dp4", "pp4 vpp2 dp2 interleaved", "pp2 vpp2 dp4 zbv", "pp4 dp2 st:1/3/2/2"):
            cut = structure_of(s.model, evaluator.legal(text), 16, items)
            assert cut.contents.sum(axis=0).tolist() == whole.tolist()
            assert cut.rank_contents().sum(axis=0).tolist() == whole.tolist()


def test_more_of_anything_that_is_kept_is_never_less_memory():
    """Memory against dumb orderings: recompute keeps less, more shards keep less, smaller states are smaller."""
    s = scenario("moe", num_nodes=2)
    evaluator = Evaluator(s)
    peak = lambda text: evaluator.peak(evaluator.legal(text)).total  # noqa: E731
    assert peak("dp16 zero0") > peak("dp16 zero1") > peak("dp16 zero2") > peak("dp16 zero3")
    assert peak("dp16 zero1") > peak("dp16 zero1 rc:moe_act") > peak("dp16 zero1 rc:full")
    assert peak("dp16 zero1 opt:fp32") > peak("dp16 zero1 opt:bf16") > peak("dp16 zero1 opt:fp8")
    assert peak("dp16 zero1 grad:fp32") > peak("dp16 zero1 grad:bf16")
    assert peak("dp16 zero1") > peak("dp16 ep4 zero1") > peak("dp16 ep16 zero1")
    assert peak("dp16 rep4 zero1") > peak("dp16 rep2 zero1") > peak("dp16 zero1")
    assert peak("dp16 zero1 mb2") > peak("dp16 zero1 mb1")
    assert peak("pp2 dp8 zero1 gpipe") > peak("pp2 dp8 zero1 1f1b")
    assert peak("dp16 zero3 ov:fsdp4") > peak("dp16 zero3 ov:fsdp1") > peak("dp16 zero3")
    assert peak("dp16 ep16 zero1 dedup") > peak("dp16 ep16 zero1")


def test_static_bytes_of_the_zero_table_by_hand():
    """Weights, gradients, optimizer bytes from nothing but parameter counts."""
    s = scenario("moe")
    evaluator, model = Evaluator(s), s.model
    experts = 3 * model.hidden_size * model.moe_intermediate_size * model.num_experts * model.layer_kinds().count("moe")
    dense = model.num_params - experts
    for zero, extra, weights, gradients, state in ((0, "", 1, 1, 1), (1, "", 1, 1, 8), (2, "", 1, 8, 8), (3, "noreshard", 1, 1, 8), (3, "", 8, 8, 8)):
        found = evaluator.peak(evaluator.legal(f"dp8 zero{zero} {extra}")).categories
        for name, width, shards in (("weights", 2, weights), ("gradients", 4, gradients), ("optimizer", 12, state)):
            assert found[name] == pytest.approx(width * model.num_params / shards, rel=1e-6), (zero, extra, name)
        # ep4 leaves a quarter of the experts on a rank, replicated twice
        found = evaluator.peak(evaluator.legal(f"dp8 ep4 zero{zero} {extra}")).categories
        share = lambda shards: dense / shards + experts / 4 / min(shards, 2)  # noqa: E731
        for name, width, shards in (("weights", 2, weights), ("gradients", 4, gradients), ("optimizer", 12, state)):
            assert found[name] == pytest.approx(width * share(shards), rel=1e-6), (zero, extra, name, "ep4")


def test_the_scalar_and_the_vector_form_share_every_category():
    s = scenario("mla", search={"pp": [2], "ep": [4], "zero": [3], "overlap": ["fsdp2"], "recompute": ["norm+moe_act"], "dispatcher": ["dedup"]})
    evaluator, space, found = screened(s)
    assert len(space) == 1
    categories = evaluator.peak(space.layout(0)).categories
    assert sum(categories.values()) == pytest.approx(found.peak_bytes[0], rel=1e-12)
    assert all(v >= 0 for v in categories.values()) and categories["gathered weights"] > 0 and categories["dispatcher buffers"] > 0
    other = evaluator.peak(replace(space.layout(0), prefetch=4)).categories
    assert other["gathered weights"] > categories["gathered weights"] and other["weights"] == categories["weights"]
