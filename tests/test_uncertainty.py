"""Does every second say where it comes from, and does an error spread to the ops, layouts and intervals that it must reach?"""

import math
import random
from collections import defaultdict

import numpy as np
import pytest

from calibration.coverage import slopes as slopes_by_kind
from moesim import origins, paths
from moesim.coverage import KINDS, Coverage, load_coverage
from moesim.evaluate import Evaluator
from moesim.load import load_cluster
from moesim.model_error import ModelError
from moesim.ops import Collective, Gemm, Group
from moesim.parts import Parts
from moesim.pricing import FARTHEST, PROVENANCE, points
from moesim.profile import InStep, load_profile
from moesim.site import MODEL_SIGMA, NOISE, Site, same_model
from moesim.uncertainty import BEYOND, LONGEST_STEP, Uncertainty, beyond_cause, fit_cause, slopes
from small_scenarios import random_spaces, scenario

EXACT = ModelError(base=0.0, extrapolated=0.0, anchored=0.0, num_runs=0, source="test")
TEXT = "pp2 dp4 ep4 zero1 dedup ov:grad"


@pytest.fixture(scope="module")
def evaluator():
    return Evaluator(scenario("moe"), model_error=EXACT)


@pytest.fixture(scope="module")
def cluster():
    return load_cluster("hgx_b300", ("num_nodes=8",))


def with_terms(profile, **changes):
    """The profile with some fields of every term replaced by what a function makes of the term."""
    terms = tuple(t.model_copy(update={field: make(t) for field, make in changes.items()}) for t in profile.terms)
    return profile.model_copy(update={"terms": terms})


# --- provenance -----------------------------------------------------------------------------------------------------------------


def test_an_op_is_measured_interpolated_or_extrapolated_whatever_its_term_is(cluster):
    profile = load_profile("b300")
    term = profile.term("gemm.bf16")
    low, high = term.valid["m"]
    known = Gemm(1024, 4096, 4096)
    listed = term.model_copy(update={"points": {name: tuple(v.tolist()) for name, v in points([known, Gemm(2048, 4096, 4096)]).items()}})
    profile = profile.model_copy(update={"terms": tuple(listed if t is term else t for t in profile.terms)})
    ops = [known, Gemm(1024, 2048, 4096), Gemm(int(4 * high), 4096, 4096), Gemm(int(low / 2), 4096, 4096)]
    found = profile.price(ops, cluster)
    assert [PROVENANCE[code] for code in found.provenance] == ["measured", "interpolated", "extrapolated", "extrapolated"]
    assert found.beyond == pytest.approx([0.0, 0.0, 2.0, 1.0])
    assert profile.price([Gemm(2**40, 4096, 4096)], cluster).beyond[0] == FARTHEST


def test_a_size_on_a_curve_of_this_machine_is_measured(cluster):
    profile = load_profile("b300")
    curve = next(c for c in profile.curves if (c.kind, c.software, c.lender, c.members) == ("all_gather", profile.nccl, "", 8))
    on, between = curve.bytes[-3], (curve.bytes[-3] + curve.bytes[-2]) / 2
    found = profile.price([Collective("all_gather", size, Group(8)) for size in (on, between, 64 * curve.bytes[-1])], cluster)
    assert [PROVENANCE[code] for code in found.provenance] == ["measured", "interpolated", "extrapolated"]
    lent = profile.model_copy(update={"curves": tuple(c.model_copy(update={"lender": "other"}) for c in profile.curves)})
    assert PROVENANCE[lent.price([Collective("all_gather", on, Group(8))], cluster).provenance[0]] == "interpolated"


def test_shares_are_those_of_a_walk_over_every_kernel(evaluator):
    layout = evaluator.legal(TEXT)
    program = evaluator.program(layout)
    dumb: dict[str, float] = defaultdict(float)
    for rank in range(program.num_ranks):
        for k in program.body_index[rank]:
            for task in program.bodies[k]:
                ops = [op for op in task.ops if evaluator.parts.price(evaluator.parts.kernel(op)[0])[0] > 0]
                assert len(ops) == len(task.terms)
                for op, (_, term, seconds) in zip(ops, task.terms):
                    price = evaluator.parts.price(evaluator.parts.kernel(op)[0])
                    assert price[4] == term
                    dumb[price[5]] += seconds
        for task in program.epilogue[rank]:
            for op, (_, _, seconds) in zip([op for op in task.ops if evaluator.parts.price(op)[0] > 0], task.terms):
                dumb[evaluator.parts.price(op)[5]] += seconds
    total = sum(dumb.values())
    assert evaluator.provenance(program) == pytest.approx({name: s / total for name, s in dumb.items()})
    assert len(dumb) > 1


def test_every_part_of_a_breakdown_says_what_it_is_priced_from():
    rng = random.Random(5)
    for _, (evaluator, space) in zip(range(5), random_spaces(rng, num_values=1)):
        layout = space.layout(rng.randrange(len(space)))
        program, where = evaluator.program(layout), evaluator.played(layout).breakdown
        found = evaluator.sources(program, where)
        assert set(found) == set(where), layout
        for part, shares in found.items():
            assert set(shares) <= set(PROVENANCE) and sum(shares.values()) == pytest.approx(1.0), (str(layout), part)


def test_a_part_is_priced_from_its_own_ops(evaluator):
    """Everything assumed but attention: only attention is not."""
    profile = with_terms(evaluator.profile, provenance=lambda t: "measured" if t.kind == "attention" else "assumed", valid=lambda t: {})
    other = Evaluator(scenario("moe"), profile=profile, model_error=EXACT)
    program = other.program(other.legal("dp8 ep8"))
    found = other.sources(program, ("core_attn", "qkv", "exposed dispatch", "end of step optimizer", "host"))
    assert found["core_attn"] == {"interpolated": 1.0}
    assert found["qkv"] == found["exposed dispatch"] == found["end of step optimizer"] == {"assumed": 1.0}


# --- loadings -------------------------------------------------------------------------------------------------------------------


def test_extrapolated_ops_are_wider_than_interpolated_ones(evaluator):
    uncertainty = Uncertainty(evaluator.parts)
    high = evaluator.profile.term("gemm.bf16").valid["m"][1]
    near, *far = (uncertainty.loading(Gemm(int(high * 2**k), 4096, 4096)) for k in range(4))
    column = uncertainty.at["gemm.bf16 beyond"]
    assert near[column] == 0 and [row[column] for row in far] == pytest.approx([BEYOND, 2 * BEYOND, 3 * BEYOND])
    widths = [float(np.linalg.norm(row)) for row in (near, *far)]
    assert widths == sorted(widths) and widths[3] > math.hypot(widths[0], 2.5 * BEYOND)


def test_the_interval_of_far_ops_is_wider(evaluator):
    """The same prices, measured at other sizes."""
    near = Evaluator(scenario("moe"), profile=with_terms(evaluator.profile, provenance=lambda t: "measured", valid=lambda t: {}), model_error=EXACT)
    away = {"m": (1.0, 2.0), "rows_per_group": (1.0, 2.0), "bytes": (1.0, 1e3)}
    far = Evaluator(scenario("moe"), profile=with_terms(near.profile, valid=lambda t: away), model_error=EXACT)
    bands = []
    for e in (near, far):
        program = e.program(e.legal("dp8 ep8 graph:full"))
        shares = e.provenance(program)
        bands.append((e.interval(program, 1.0, shares), shares))
    assert "extrapolated" not in bands[0][1] and bands[1][1]["extrapolated"] > 0.7
    assert bands[1][0][1] / bands[1][0][0] > 1.1 * bands[0][0][1] / bands[0][0][0]


def test_loadings_are_those_of_parameters_drawn_from_their_covariance(cluster):
    """Against the dumb way: many profiles, each with parameters of its own."""
    profile, ops = load_profile("gb300"), [Gemm(512, 1536, 768), Gemm(8192, 8192, 8192), Gemm(256, 100352, 4096), Gemm(65536, 512, 512)]
    term = profile.term("gemm.bf16")
    names = list(term.covariance)
    scale = np.array([term.parameters[name] for name in names])
    relative = np.array([[term.covariance[a][b] for b in names] for a in names]) / np.outer(scale, scale)
    assert np.sqrt(np.diag(relative)).max() < LONGEST_STEP
    rng = np.random.default_rng(3)
    logs = []
    for step in rng.multivariate_normal(np.zeros(len(names)), relative, 400):
        moved = term.model_copy(update={"parameters": {**term.parameters, **dict(zip(names, (scale * np.exp(step)).tolist()))}})
        logs.append(np.log(profile.model_copy(update={"terms": tuple(moved if t is term else t for t in profile.terms)}).price(ops, cluster).seconds))
    found = slopes(profile, term, ops, cluster)
    assert np.linalg.norm(found, axis=1) == pytest.approx(np.std(logs, axis=0), rel=0.15)


def test_slopes_are_the_columns_of_the_fit_causes(evaluator):
    uncertainty, op = Uncertainty(evaluator.parts), Gemm(256, 100352, 4096)
    term = evaluator.profile.term("gemm.bf16")
    columns = [uncertainty.at[fit_cause(term, j)] for j in range(len(term.covariance))]
    assert uncertainty.loading(op)[columns] == pytest.approx(slopes(evaluator.profile, term, [op], evaluator.scenario.cluster)[0])
    # the wildest direction was cut to a step that somebody could believe
    assert np.abs(uncertainty.loading(op)[columns]).max() < LONGEST_STEP


def test_terms_with_a_common_cause_move_together(evaluator):
    uncertainty = Uncertainty(evaluator.parts)
    one, other = (uncertainty.loading(op) for op in (Gemm(4096, 4096, 4096), Gemm(4096, 4096, 4096, accumulate=True)))
    common = uncertainty.at["sustained"]
    assert one[common] == other[common] > 0
    assert one[uncertainty.at["gemm.bf16"]] > 0 == other[uncertainty.at["gemm.bf16"]]


# --- programs -------------------------------------------------------------------------------------------------------------------


def test_naming_ops_changes_no_second(evaluator):
    program = evaluator.program(evaluator.legal(TEXT))
    named = evaluator.uncertainty.named(program)
    assert paths.step_seconds([named])[0] == paths.step_seconds([program])[0]
    nothing = np.zeros((3, len(evaluator.uncertainty.causes)))
    assert paths.step_draws(named, evaluator.uncertainty.factors(named, nothing)) == pytest.approx(paths.step_seconds([program])[0])


def test_a_common_cause_of_everything_scales_the_step(evaluator):
    """All seconds from one cause of sigma s: one standard deviation of it is a step exp(s) as long."""
    blank = with_terms(evaluator.profile, sigma_log=lambda t: 0.0, shared=lambda t: {"all": 0.2}, covariance=lambda t: {}, provenance=lambda t: "assumed")
    free = blank.host.model_copy(update={"sigma_log": 0.0, "launch_s": dict.fromkeys(blank.host.launch_s, 0.0)})
    stack = evaluator.stack.model_copy(update={"end_of_step_s": 0.0})
    other = Evaluator(scenario("moe"), profile=blank.model_copy(update={"host": free}), stack=stack, model_error=EXACT)
    for text in ("dp8 ep8", "pp2 dp4 ep4 zero1 dedup ov:grad"):
        found = other.spread([other.program(other.legal(text))])
        assert {cause: x for cause, x in found.items() if not cause.startswith("software ")} == pytest.approx({"all": 0.2}, rel=1e-6)


def many_draws(evaluator, program, count=2000):
    """ln(step) of many draws through the longest path: what a few of them and a first order have to agree with."""
    named = evaluator.uncertainty.named(program)
    return np.log(paths.step_draws(named, evaluator.uncertainty.factors(named, evaluator.uncertainty.draws(7, count))))


def test_few_draws_beside_their_first_order_say_what_many_draws_say(evaluator):
    for text in ("dp8 ep8 zero1 graph:full", TEXT):
        program = evaluator.program(evaluator.legal(text))
        spread, truth = evaluator.spread([program]), float(np.std(many_draws(evaluator, program)))
        assert math.hypot(*spread.values()) == pytest.approx(truth, rel=0.12)
        assert evaluator.sigma_step([program], spread) == pytest.approx(truth, rel=0.06)


def test_a_run_of_the_site_leaves_of_its_own_step_what_one_noisy_look_does(evaluator):
    """Of a step with variance v (its model's own included) a look with noise n leaves v n^2 / (v + n^2); a run unlike it keeps more."""
    program = evaluator.program(evaluator.legal(TEXT))
    model = evaluator.scenario.model
    seen = {**evaluator.spread([program]), f"model {model.name}": MODEL_SIGMA}
    before = sum(x * x for x in seen.values())
    for count in (1, 3):
        site = Site(anchors=("run",) * count, seen=(seen,) * count, models={same_model(model): f"model {model.name}"})
        other = Evaluator(scenario("moe"), model_error=EXACT, site=site)
        left = lambda text: sum(x * x for x in other.spread([other.program(other.legal(text))]).values())  # noqa: E731
        assert left(TEXT) == pytest.approx(before * NOISE**2 / count / (before + NOISE**2 / count), rel=0.02)
        unlike = evaluator.spread([evaluator.program(evaluator.legal("dp8 ep8 zero1 graph:full"))])
        assert left(TEXT) < left("dp8 ep8 zero1 graph:full") < sum(x * x for x in unlike.values()) + MODEL_SIGMA**2


def test_what_runs_left_open_of_a_stack_widens_its_steps():
    """Factors of a stack are drawn with their covariance: the step spreads by its slopes on them, in quadrature with prices."""
    table = load_coverage()
    free = Coverage(**table.model_dump(exclude={"errors"}))
    known = Evaluator(scenario("moe", stack="megatron_bridge"), model_error=EXACT)
    parts = lambda coverage: Parts(*(getattr(known.parts, x) for x in ("model", "cluster", "workload", "stack", "profile")), coverage=coverage)  # noqa: E731
    sure = Evaluator(scenario("moe", stack="megatron_bridge"), model_error=EXACT, parts=parts(free))
    program = known.program(known.legal(TEXT))
    whole, prices = (e.spread([program]) for e in (known, sure))
    mine = {cause: x for cause, x in whole.items() if cause.startswith("software ")}
    assert mine and not any(cause.startswith("software ") for cause in prices)
    assert {c: x for c, x in whole.items() if c not in mine} == pytest.approx(prices, rel=1e-6)
    root = table.errors.root(KINDS, "megatron_bridge", "blackwell")
    expected = np.array(slopes_by_kind(np.ones(1), [program])) @ root
    assert math.hypot(*mine.values()) == pytest.approx(float(np.linalg.norm(expected)), rel=0.1)
    assert known.price_sigma(whole) == pytest.approx(math.hypot(*prices.values()), rel=1e-6)


def test_what_a_role_costs_inside_a_step_is_drawn_with_the_role(evaluator):
    """A ratio of one that nobody is sure of changes no price, and spreads by what the role takes of the step."""
    unsure = tuple(InStep(role="core_attn", phase=phase, ratio=1.0, sigma_log=0.2, num_steps=3, sources=("test",)) for phase in "FB")
    other = Evaluator(scenario("moe"), profile=evaluator.profile.model_copy(update={"in_step": unsure}), model_error=EXACT)
    layout = other.legal("dp8 ep8 graph:full")
    program, plain = other.program(layout), evaluator.program(layout)
    assert paths.step_seconds([program])[0] == pytest.approx(paths.step_seconds([plain])[0])
    known, found = evaluator.spread([plain]), other.spread([program])
    share = other.played(layout).breakdown["core_attn"] / other.played(layout).step_s
    assert set(found) - set(known) == {"core_attn in a step"}
    assert found["core_attn in a step"] == pytest.approx(0.2 * share, rel=0.1)
    assert {k: v for k, v in found.items() if k in known} == pytest.approx(known)
    assert not other.uncertainty.loading(next(op for op in other.parts.prices if op.__class__.__name__ == "Attention"))[other.uncertainty.at["core_attn in a step"]]


def test_transfers_are_drawn_too(evaluator):
    program = evaluator.program(evaluator.legal("pp4 dp2 mb1"))
    op = origins.transfer_op(program)
    rows = evaluator.uncertainty.loads(evaluator.uncertainty.named(program))
    assert np.array_equal(rows["send"], evaluator.uncertainty.loading(op)) and np.any(rows["send"])
    assert beyond_cause(evaluator.profile.term("send_recv.nvlink")) in evaluator.uncertainty.at


def test_an_op_timed_alone_shows_nothing_of_the_models_factor(evaluator):
    """At a site with runs, an op by itself speaks of its price only, as those runs leave it."""
    model, op = evaluator.scenario.model, Gemm(4096, 4096, 4096)
    seen = {**evaluator.spread([evaluator.program(evaluator.legal(TEXT))]), f"model {model.name}": MODEL_SIGMA}
    other = Evaluator(scenario("moe"), model_error=EXACT, site=Site(anchors=("run",), seen=(seen,), models={same_model(model): f"model {model.name}"}))
    hidden = ("sustained",)
    before, after = (e.uncertainty.alone(op, hidden) for e in (evaluator, other))
    assert np.linalg.norm(after) <= np.linalg.norm(before) < np.linalg.norm(evaluator.uncertainty.loading(op))
    names = list(other.uncertainty.causes)
    assert abs(after[names.index(f"model {model.name}")]) < 0.1 * MODEL_SIGMA
    assert np.linalg.norm(other.uncertainty.host_alone()) <= np.linalg.norm(evaluator.uncertainty.host_alone())


def test_what_a_run_shows_of_another_stacks_factors_is_noise(evaluator):
    seen = evaluator.spread([evaluator.program(evaluator.legal(TEXT))])
    left = {}
    for stack in ("megatron_bridge", "torchtitan"):
        e = Evaluator(scenario("moe", stack=stack), model_error=EXACT, site=Site(anchors=("run",), seen=(seen,)))
        plain = Evaluator(scenario("moe", stack=stack), model_error=EXACT)
        left[stack] = np.linalg.norm(e.uncertainty.alone(Gemm(4096, 4096, 4096), ())) / np.linalg.norm(plain.uncertainty.alone(Gemm(4096, 4096, 4096), ()))
    assert left["megatron_bridge"] < left["torchtitan"] <= 1.0
