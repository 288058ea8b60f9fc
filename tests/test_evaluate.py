"""Do the numbers of one candidate add up, and do they move the way they must?"""

import random
from dataclasses import replace

import numpy as np
import pytest

from moesim import engine, paths
from moesim.evaluate import GROUPS, Evaluator, critical_rank, grouped, limit, routing_name
from moesim.layout import LayoutError
from moesim.load import load_scenario
from moesim.model_error import ModelError
from moesim.pricing import PROVENANCE
from moesim.search import simulate
from moesim.site import Site
from moesim.timeline import breakdown
from small_scenarios import random_spaces, scenario

ERROR = ModelError(base=0.08, extrapolated=0.1, anchored=0.05, num_runs=0, source="test")
SKEWED = ("dp8 ep8 zero1", "dp8 ep4 zero1 dedup", "pp2 dp4 ep4 zero1", "dp8 zero1", "dp4 tp2 ep4 zero1 syncfree", "dp8 ep8 zero3 ov:shared")


def candidate_of(evaluator, text, **kw):
    return evaluator.candidate(evaluator.played(evaluator.legal(text)), **kw)


def test_everything_sums_on_random_layouts():
    rng = random.Random(12)
    for _, (evaluator, space) in zip(range(8), random_spaces(rng, num_values=1)):
        layout = space.layout(rng.randrange(len(space)))
        c = evaluator.candidate(evaluator.played(layout), with_skew=False)
        where = f"{evaluator.scenario.model.name}: {layout}"
        assert sum(c.breakdown.values()) == pytest.approx(c.step_s, rel=1e-9), where
        assert min(c.breakdown.values()) >= 0, where
        assert sum(c.memory.values()) == pytest.approx(c.peak_bytes, rel=1e-12) and min(c.memory.values()) >= 0, where
        assert sum(c.provenance.values()) == pytest.approx(1.0, rel=1e-9) and set(c.provenance) <= set(PROVENANCE), where
        assert sum(grouped(c.breakdown).values()) == pytest.approx(c.step_s, rel=1e-9), where
        assert c.low < c.tokens_per_s_per_gpu < c.high, where
        s = evaluator.scenario
        assert c.tokens_per_s_per_gpu * s.cluster.num_gpus * c.step_s == pytest.approx(s.workload.global_batch_tokens, rel=1e-12)
        assert c.mfu == pytest.approx(c.tokens_per_s_per_gpu * s.model.flops_per_token(s.workload.seq_len) / s.cluster.gpu.peak_flops["bf16"], rel=1e-12) and 0 < c.mfu < 1
        assert c.fits == (c.peak_bytes * (1 + s.memory.margin) + s.runtime_reserve_bytes <= s.cluster.gpu.hbm_bytes)
        assert 0 <= c.heaviest_stage < layout.pp
        quick = evaluator.quick(layout)
        assert quick.peak_bytes == c.peak_bytes and quick.fits == c.fits
        assert quick.tokens_per_s_per_gpu == pytest.approx(c.tokens_per_s_per_gpu, rel=0.02), where


def test_breakdown_of_every_rank_sums_to_the_step():
    evaluator = Evaluator(scenario("mla", num_nodes=2))
    timeline = engine.run(evaluator.program(evaluator.legal("pp4 dp4 ep4 zero1 dedup ov:grad+param")))
    for rank in range(4):
        assert sum(breakdown(timeline, rank).values()) == pytest.approx(timeline.makespan, rel=1e-9)


def test_the_critical_rank_has_the_most_work():
    """The stage with one layer too many is the one the others wait for."""
    evaluator = Evaluator(scenario("dense"))
    for stages, rank in (("5/1/1/1", 0), ("1/5/1/1", 1), ("1/1/5/1", 2), ("1/1/1/5", 3)):
        program = evaluator.program(evaluator.legal(f"pp4 dp2 st:{stages}"))
        assert critical_rank(program) == rank
        bubbles = [breakdown(engine.run(program), r).get("bubble", 0.0) for r in range(4)]
        assert bubbles[rank] == min(bubbles)


def test_every_role_has_one_cause():
    named = [role for roles in GROUPS.values() for role in roles]
    assert len(named) == len(set(named))
    assert grouped({"qkv": 1.0, "mlp_up": 2.0, "bubble": 3.0, "norm": 4.0, "end of step optimizer": 5.0}) == {
        "matrix products": 3.0, "pipeline bubble": 3.0, "memory-bound kernels": 4.0, "end of the step": 5.0}  # fmt: skip
    assert limit({"qkv": 3.0, "norm": 1.0}) == "matrix products 75%, memory-bound kernels 25%"


def test_no_role_of_a_real_program_is_grouped_by_accident():
    """Whatever waits for communication has a cause of its own; "memory-bound kernels" holds no exposed collective."""
    rng = random.Random(3)
    for _, (evaluator, space) in zip(range(6), random_spaces(rng, num_values=1)):
        c = evaluator.candidate(evaluator.played(space.layout(rng.randrange(len(space)))), with_skew=False)
        home = {role for roles in GROUPS.values() for role in roles}
        loose = [r for r in c.breakdown if r.startswith("exposed ") and r not in home]
        assert not loose, (c.layout, loose)


# --- intervals ------------------------------------------------------------------------------------------------------------------


def test_the_interval_is_symmetric_in_logs_and_repeatable():
    evaluator = Evaluator(scenario("moe"), model_error=ERROR)
    one, two = candidate_of(evaluator, "dp8 ep8"), candidate_of(Evaluator(scenario("moe"), model_error=ERROR), "dp8 ep8")
    assert (one.low, one.high) == (two.low, two.high)
    assert one.low * one.high == pytest.approx(one.tokens_per_s_per_gpu**2, rel=1e-9)
    # never narrower than the model's own error: 80% of a normal distribution
    assert np.log(one.high / one.low) >= 2 * 1.2816 * ERROR.base * (1 - 1e-9)


def test_the_interval_widens_with_what_is_not_measured():
    evaluator = Evaluator(scenario("moe"), model_error=ERROR)
    program = evaluator.program(evaluator.legal("dp8 ep8 graph:full"))
    widths = []
    for share in (0.0, 0.3, 0.6, 1.0):
        low, high = evaluator.interval(program, 1.0, {"measured": 1 - share, "extrapolated": share})
        widths.append(high / low)
    assert widths == sorted(widths) and widths[-1] > widths[0] * 1.02
    assert evaluator.interval(program, 1.0, {"assumed": 0.5, "datasheet": 0.5})[1] == pytest.approx(evaluator.interval(program, 1.0, {"extrapolated": 1.0})[1])


def test_the_interval_widens_with_parameter_spread_and_narrows_with_anchors():
    plain = Evaluator(scenario("moe"), model_error=ERROR)
    run = plain.spread([plain.program(plain.legal("dp8 ep8 graph:full"))])
    anchored = Evaluator(scenario("moe"), model_error=ERROR, site=Site(anchors=("run",), seen=(run,)))
    loose = Evaluator(scenario("moe"), profile=_wider(plain.profile, 3.0), model_error=ERROR)
    width = lambda e: (lambda c: c.high / c.low)(candidate_of(e, "dp8 ep8 graph:full"))  # noqa: E731
    assert width(anchored) < width(plain) < width(loose)


def _wider(profile, factor):
    terms = tuple(t.model_copy(update={"sigma_log": t.sigma_log * factor, "shared": {k: v * factor for k, v in t.shared.items()}}) for t in profile.terms)
    return profile.model_copy(update={"terms": terms})


def test_provenance_shares_are_shares_of_priced_seconds():
    """A profile whose terms are all of one class gives that class everything."""
    evaluator = Evaluator(scenario("moe"))
    profile = evaluator.profile.model_copy(update={"terms": tuple(t.model_copy(update={"provenance": "assumed"}) for t in evaluator.profile.terms)})
    assert candidate_of(Evaluator(scenario("moe"), profile=profile), "dp8 ep8", with_skew=False).provenance == {"assumed": pytest.approx(1.0)}


# --- money ----------------------------------------------------------------------------------------------------------------------


def test_days_and_dollars_by_hand():
    s = scenario("moe", sets=["cluster.usd_per_gpu_hour=3.5", "workload.tokens=2000000000000"])
    c = candidate_of(Evaluator(s), "dp8 ep8", with_skew=False)
    hours = 2e12 / (c.tokens_per_s_per_gpu * 8) / 3600
    assert c.days == pytest.approx(hours / 24, rel=1e-12)
    assert c.usd == pytest.approx(hours * 8 * 3.5, rel=1e-12)
    assert c.days == pytest.approx(2e12 / s.workload.global_batch_tokens * c.step_s / 86400, rel=1e-12)


def test_what_is_unknown_stays_unknown():
    priced = candidate_of(Evaluator(scenario("moe")), "dp8", with_skew=False)
    assert priced.usd is None and priced.days > 0  # no list price of a B300 is published
    untold = scenario("moe", sets=["workload.tokens=null", "cluster.usd_per_gpu_hour=3"])
    c = candidate_of(Evaluator(untold), "dp8", with_skew=False)
    assert c.days is None and c.usd is None
    listed = candidate_of(Evaluator(scenario("moe", cluster="hgx_h100")), "dp8 ep8", with_skew=False)
    assert listed.usd == pytest.approx(listed.days * 24 * 8 * 6.155, rel=1e-12)


# --- routing --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", ["moe", "mla"])
@pytest.mark.parametrize("zipf", [0.15, 0.5, 1.0])
def test_skew_is_never_faster_or_lighter_than_balance(model, zipf):
    evaluator = Evaluator(scenario(model, sets=[f"workload.skew={{kind: zipf, zipf_s: {zipf}}}"]))
    for text in (f"{t} graph:{g}" for t in SKEWED for g in ("none", "full")):
        c = candidate_of(evaluator, text)
        assert c.skewed.step_s >= c.step_s * (1 - 1e-9), text
        assert c.skewed.peak_bytes >= c.peak_bytes * (1 - 1e-12), text
        assert c.skewed.drop_fraction == 0.0
        assert c.skewed.routing == f"zipf({zipf})"


def test_more_skew_is_more_time_and_memory():
    found = [candidate_of(Evaluator(scenario("moe", sets=[f"workload.skew={{kind: zipf, zipf_s: {z}}}"])), "dp8 ep8 graph:full").skewed for z in (0.01, 0.2, 0.6, 1.2)]
    assert [f.step_s for f in found] == sorted(f.step_s for f in found)
    assert [f.peak_bytes for f in found] == sorted(f.peak_bytes for f in found)
    assert found[-1].step_s > 1.05 * found[0].step_s


def test_without_expert_parallelism_every_rank_gets_the_same_rows():
    c = candidate_of(Evaluator(scenario("moe")), "dp8 zero1")
    assert c.skewed.peak_bytes == pytest.approx(c.peak_bytes, rel=1e-9)


def test_capacity_bounds_the_busiest_rank_and_drops_the_rest():
    """With a capacity of c no rank takes more than c times the mean, and what is dropped is what overflowed."""
    dropless = Evaluator(scenario("moe", sets=["workload.skew={kind: zipf, zipf_s: 1.0}"]))
    busiest = dropless.skewed.parts.load(dropless.legal("dp8 ep8 graph:full")).max_over_mean_rank
    assert busiest > 1.3
    drops, steps = [], []
    for capacity in (1.0, 1.25, 1.5, 100.0):
        evaluator = Evaluator(scenario("moe", sets=[f"workload.skew={{kind: zipf, zipf_s: 1.0, capacity_factor: {capacity}, capacity_scope: rank}}"]))
        c, load = candidate_of(evaluator, "dp8 ep8 graph:full"), evaluator.skewed.parts.load(evaluator.legal("dp8 ep8 graph:full"))
        assert load.max_over_mean_rank <= min(capacity, busiest) * (1 + 1e-3)
        assert c.skewed.drop_fraction == load.drop_fraction and c.drop_fraction == 0.0
        assert load.drop_fraction == pytest.approx(1 - load.kept_rows / load.requested_rows, abs=1e-9)
        drops.append(load.drop_fraction)
        steps.append(c.skewed.step_s)
    assert drops == sorted(drops, reverse=True) and drops[0] > 0.1 and drops[-1] == 0.0
    assert steps == sorted(steps)
    assert steps[-1] == pytest.approx(candidate_of(dropless, "dp8 ep8 graph:full").skewed.step_s, rel=1e-9)


def test_a_dense_model_has_no_skew_column():
    c = candidate_of(Evaluator(scenario("dense")), "dp8")
    assert c.skewed is None and c.drop_fraction == 0.0


def test_names_of_routings():
    s = scenario("moe")
    assert routing_name(s.workload.routing) == "balanced" and routing_name(s.workload.skew) == "zipf(0.15)"
    assert routing_name(s.workload.routing.model_copy(update={"kind": "dirichlet", "dirichlet_alpha": 2.0})) == "dirichlet(2.0)"


# --- layouts and invariants -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["dp4", "dp8 ep3", "tp16 dp1", "dp8 mb7", "pp16", "dp8 st:1/2", "pp2 dp4 zbv", "nonsense"])
def test_an_illegal_layout_is_one_line(text):
    with pytest.raises(LayoutError) as error:
        Evaluator(scenario("moe")).legal(text)
    assert "\n" not in str(error.value) and text in str(error.value)


def test_a_layout_comes_back_canonical():
    evaluator = Evaluator(scenario("moe"))
    assert str(evaluator.legal("dp8 zero2 dedup ov:grad+ep+shared")) == "dp8 zero2 mb1 1f1b"
    assert evaluator.legal("dp8 ep8 zero1 dedup ov:ep") == evaluator.legal("1f1b ov:ep dedup mb1 zero1 ep8 dp8")


def test_expert_parallelism_never_changes_attention_work():
    evaluator = Evaluator(scenario("moe"))
    seconds = {sum(s for body in evaluator.program(evaluator.legal(t)).bodies for task in body for role, _, s in task.terms if role == "core_attn") for t in ("dp8", "dp8 ep2", "dp8 ep8")}
    assert len(seconds) == 1


def test_memory_is_monotone_in_micro_batch_at_a_fixed_number_of_microbatches():
    peaks = []
    for mb in (1, 2, 4):
        evaluator = Evaluator(scenario("moe", batch=32 * mb))
        layout = evaluator.legal(f"pp2 dp4 ep4 mb{mb}")
        peaks.append(evaluator.peak(layout).total)
    assert peaks == sorted(peaks) and peaks[0] < peaks[-1]


def test_expert_memory_is_divided_by_ep_and_etp_only():
    """Nothing resharded: weights of experts by ep*etp, whatever tp, cp and dp are."""
    evaluator = Evaluator(scenario("moe"))
    expert = lambda t: evaluator.parts.get("moe", evaluator.legal(t)).expert_params  # noqa: E731
    whole = expert("dp8")
    for text, parts in (("dp8 ep8", 8), ("dp4 tp2 ep4", 4), ("dp4 tp2 ep4 etp2", 8), ("tp8", 1), ("cp2 dp4 ep2", 2), ("pp2 dp4 ep4", 4)):
        assert expert(text) == pytest.approx(whole / parts), text


def test_an_uneven_split_is_judged_by_its_heaviest_stage():
    evaluator = Evaluator(scenario("dense"))
    even, uneven = (evaluator.peak(evaluator.legal(f"pp2 dp4 zero1{st}")) for st in ("", " st:2/6"))
    assert uneven.rank == 1 and uneven.total > even.total
    steps = [paths.step_seconds([evaluator.program(evaluator.legal(f"pp2 dp4 zero1{st}"))])[0] for st in ("", " st:2/6")]
    assert steps[1] > steps[0]


def test_recompute_trades_memory_for_time():
    evaluator = Evaluator(scenario("moe"))
    plain, full = (candidate_of(evaluator, f"dp8 ep8{rc}", with_skew=False) for rc in ("", " rc:full"))
    assert full.peak_bytes < plain.peak_bytes and full.step_s > plain.step_s
    assert full.breakdown["recompute"] > 0 and "recompute" not in plain.breakdown


def test_budget_is_what_the_rule_leaves():
    s = scenario("moe", sets=["memory={margin: 0.1, runtime_reserve_bytes: 10 GB}"])
    evaluator = Evaluator(s)
    assert evaluator.budget_bytes * 1.1 + 10e9 == pytest.approx(s.cluster.gpu.hbm_bytes, rel=1e-12)


def test_quick_equals_the_engine_where_a_schedule_is_long():
    evaluator = Evaluator(scenario("moe", batch=512))
    for text in ("dp8 ep8 zero1", "pp4 dp2 zero1", "pp2 vpp2 dp4 interleaved ep4", "pp2 dp4 zero2", "dp8 zero3", "pp4 vpp2 dp2 zbv ov:grad+param"):
        layout = evaluator.legal(text)
        played = evaluator.tokens_per_s(evaluator.played(layout).step_s)
        close = 0.03 if "zbv" in text else 0.005  # weight gradients fill other bubbles in a longer run
        assert evaluator.quick(layout).tokens_per_s_per_gpu == pytest.approx(played, rel=close), text


def test_a_layout_is_what_it_says_in_every_field():
    """Each policy that costs or saves time does so: changing it changes the step."""
    evaluator = Evaluator(scenario("moe", num_nodes=2))
    base = evaluator.legal("dp16 ep8 zero1 dedup ov:none")
    step = lambda layout: paths.step_seconds([evaluator.program(replace(layout, graphs="full"))])[0]  # noqa: E731
    changes = ({"precision": "fp8"}, {"recompute": ("full",)}, {"overlap": ("grad",)}, {"overlap": ("param",)}, {"overlap": ("shared",)}, {"grad": "bf16"}, {"optimizer": "bf16"},
               {"zero": 2}, {"zero": 0}, {"dispatcher": "alltoall", "sms": 0}, {"mb": 2}, {"ep": 4}, {"dp": 8, "tp": 2}, {"dp": 8, "cp": 2}, {"dp": 8, "pp": 2}, {"rep": 2})
    for change in changes:
        assert step(replace(base, **change)) != step(base), change
    assert paths.step_seconds([evaluator.program(base)])[0] > step(base)  # and graphs take the host away


def test_mfu_counts_no_dropped_rows():
    """Capacity 0.01 drops 99% of the routed rows: their FLOP were never done."""
    s = load_scenario("olmo_core3_new", ["workload.routing={kind: balanced, capacity_factor: 0.01}", "model.top_k=16"])
    c, _ = simulate(s, "dp8 ep8 zero1 mb4")
    roles = s.model.flops_by_role(s.workload.seq_len)
    done = sum(roles.values()) - 0.99 * roles["routed_experts"]
    assert c.drop_fraction == pytest.approx(0.99, abs=1e-3) and c.mfu < 1
    assert c.mfu == pytest.approx(c.tokens_per_s_per_gpu * done / 2.25e15, rel=0.01)
