"""Is the measurement that is named the one that a dumb search would name, and are its gains what knowing it would bring?"""

import json
import math
from dataclasses import replace

import numpy as np
import pytest

from moesim import advise
from moesim.advise import Beliefs, Band, advice, asked, chances, decided, explained, gains, in_turn, seen_alone, step_rows, told
from moesim.evaluate import Evaluator
from moesim.model_error import ModelError
from moesim.ops import Gemm
from moesim.search import list_ops, plan, what_to_measure
from moetrain.bench.requests import ordered, read_requests
from small_scenarios import scenario

EXACT = ModelError(base=0.001, extrapolated=0.0, anchored=0.001, num_runs=0, source="test")
TEXT = "dp8 ep8 zero1 graph:full ov:grad+param"


def beliefs(seed=0, num_steps=3, num_ops=4, num_causes=6, apart=0.02):
    rng = np.random.default_rng(seed)
    return Beliefs(0.1 * rng.standard_normal((num_steps, num_causes)), apart * np.arange(num_steps), 0.2 * rng.standard_normal((num_ops, num_causes)))


@pytest.fixture(scope="module")
def evaluator():
    return Evaluator(scenario("moe"), model_error=EXACT)


def candidates_of(evaluator, *texts):
    found = [evaluator.candidate(evaluator.played(evaluator.legal(text)), with_skew=False) for text in texts]
    return sorted(found, key=lambda c: c.step_s)


# --- what a measurement tells ----------------------------------------------------------------------------------------------------


def test_knowledge_after_measurements_is_the_conditional_normal_distribution():
    """Against the textbook: covariance of all rows given noisy observations of some, in one matrix inversion."""
    for seed in range(5):
        now = beliefs(seed)
        rows, seen = np.concatenate([now.steps, now.ops]), now.ops[[1, 3, 1]]
        after = told(told(told(now, now.ops[1]), told(now, now.ops[1]).ops[3]), told(told(now, now.ops[1]), told(now, now.ops[1]).ops[3]).ops[1])
        gain = rows @ seen.T @ np.linalg.inv(seen @ seen.T + advise.NOISE**2 * np.eye(3))
        left = np.concatenate([after.steps, after.ops])
        assert left @ left.T == pytest.approx(rows @ rows.T - gain @ seen @ rows.T, abs=1e-12)


def test_variance_explained_is_what_is_gone_afterwards():
    now = beliefs(1)
    for i, loading in enumerate(now.ops):
        after = told(now, loading)
        assert (now.steps**2).sum(axis=1) - (after.steps**2).sum(axis=1) == pytest.approx(explained(now, now.ops)[i])


def test_the_value_of_a_measurement_is_that_of_playing_it_out():
    """Draw the world, look at the measurement, choose the best by what is expected then: how often is it another, and what does it save?"""
    now = beliefs(2, apart=0.04)
    rng = np.random.default_rng(7)
    changes, shorter = decided(now, now.ops)
    for i, loading in enumerate(now.ops):
        world = rng.standard_normal((40_000, now.steps.shape[1]))
        seen = world @ loading + advise.NOISE * rng.standard_normal(len(world))
        expected = now.points + np.outer(seen, now.steps @ loading) / (loading @ loading + advise.NOISE**2)
        choice = expected.argmin(axis=1)
        true = now.points + world @ now.steps.T
        saved = true[:, 0] - true[np.arange(len(world)), choice]
        assert changes[i] == pytest.approx(np.mean(choice != 0), abs=0.01)
        assert shorter[i] == pytest.approx(saved.mean(), abs=4 * saved.std() / 200)


def test_what_tells_nothing_is_worth_nothing():
    now = replace(beliefs(3), ops=np.zeros((2, 6)))
    assert not explained(now, now.ops).any() and decided(now, now.ops)[1] == pytest.approx([0.0, 0.0], abs=1e-12)
    assert told(now, now.ops[0]).steps == pytest.approx(now.steps)


# --- against brute force ---------------------------------------------------------------------------------------------------------


def without(profile, name):
    """The profile that knows one term exactly."""
    known = {"sigma_log": 0.0, "shared": {}, "covariance": {}, "valid": {}}
    return profile.model_copy(update={"terms": tuple(t.model_copy(update=known) if t.name == name else t for t in profile.terms)})


def plain(profile):
    """Terms with nothing in common, nothing fitted, no range."""
    bare = {"shared": {}, "covariance": {}, "valid": {}}
    return profile.model_copy(update={"terms": tuple(t.model_copy(update=bare) for t in profile.terms)})


def test_the_first_advice_is_what_knowing_each_term_in_turn_finds(evaluator):
    """One term's errors put to zero and the spread worked out anew, for each: the largest drop is the term that is named."""
    profile = plain(evaluator.profile)
    whole = Evaluator(scenario("moe"), profile=profile, model_error=EXACT)
    (candidate,) = candidates_of(whole, TEXT)
    variance = lambda e: sum(x**2 for x in e.spread([e.program(e.legal(TEXT))]).values())  # noqa: E731
    total = variance(whole)
    used = sorted({a.term for a in asked(whole, [whole.program(whole.legal(TEXT))])})
    drops = {name: 1 - variance(Evaluator(scenario("moe"), profile=without(profile, name), model_error=EXACT)) / total for name in used}
    matter = [name for name in sorted(drops, key=drops.get, reverse=True) if drops[name] > 7e-3]
    found = advice(whole, [candidate], count=len(matter), noise=1e-6)["measure"]
    by_term = {line["term"]: line["variance_share"] for line in found}
    assert len(matter) > 4 and [line["term"] for line in found] == matter, "one op of each term, the largest drop first"
    assert by_term == pytest.approx({name: drops[name] for name in matter}, abs=2e-3)
    # little but launches and what runs left open of the stack's factors is left once these terms are known
    left = sum(x**2 for cause, x in candidate.spread.items() if cause == "host" or cause.startswith("software "))
    assert sum(by_term.values()) == pytest.approx(1 - left / total, abs=2e-2)


def test_the_interval_afterwards_is_that_of_a_profile_that_knows_the_term(evaluator):
    whole = Evaluator(scenario("moe"), profile=plain(evaluator.profile), model_error=EXACT)
    (candidate,) = candidates_of(whole, TEXT)
    line = advice(whole, [candidate], noise=1e-6)["measure"][0]
    known = Evaluator(scenario("moe"), profile=without(whole.profile, line["term"]), model_error=EXACT)
    (after,) = candidates_of(known, TEXT)
    assert math.log(line["high"] / line["low"]) == pytest.approx(math.log(after.high / after.low), rel=0.15)  # 64 draws against first order
    assert math.log(after.high / after.low) < 0.97 * math.log(candidate.high / candidate.low)


def test_what_decides_a_ranking_is_asked_for_and_not_what_both_share(evaluator):
    """Two layouts that differ in their all-to-all: tensor cores would narrow either interval most, and tell nothing of the order."""
    one, other = candidates_of(evaluator, "dp8 ep8 zero1 graph:full ov:grad+param", "dp8 ep8 zero1 graph:full dedup ov:grad+param")
    assert one.layout != other.layout
    close = replace(other, step_s=one.step_s * 1.005, fits=True)
    loud = Evaluator(scenario("moe"), profile=_sigma(evaluator.profile, {"dispatch.dedup": 0.5, "all_to_all.nvlink": 0.5}), model_error=EXACT)
    pair = [replace(c, spread=loud.spread([loud.program(loud.legal(c.layout))])) for c in (one, close)]
    found = advice(loud, pair, count=3)
    assert found["goal"] == "ranking"
    assert {found["measure"][0]["term"]} <= {"dispatch.dedup", "all_to_all.nvlink"}
    assert found["measure"][0]["winner_changes"] > 0.1 and 0 < found["measure"][0]["regret_removed"] < 0.5
    assert found["another_is_best"] > 0.3
    alone = advice(loud, pair[:1], count=1)
    assert alone["goal"] == "interval" and alone["another_is_best"] == 0.0


def _sigma(profile, sigmas):
    return profile.model_copy(update={"terms": tuple(t.model_copy(update={"sigma_log": sigmas[t.name]}) if t.name in sigmas else t for t in profile.terms)})


# --- order ----------------------------------------------------------------------------------------------------------------------


def test_a_term_is_not_asked_about_twice(evaluator):
    program = evaluator.program(evaluator.legal(TEXT))
    ops = asked(evaluator, [program])
    found = sorted(zip(gains(evaluator, [program], [1.0], ops), ops), key=lambda pair: -pair[0])
    firsts: dict[str, float] = {}
    for gain, a in found:
        assert gain >= -1e-12
        if a.term in firsts:
            assert gain <= 0.5 * firsts[a.term] + 1e-9, a
        firsts.setdefault(a.term, gain)
    assert len(firsts) > 5
    # They add up to all that measuring removes, whatever the order.
    left = Beliefs(step_rows(evaluator, [evaluator.spread([program])]), np.zeros(1), seen_alone(evaluator, ops))
    whole = np.linalg.norm(left.steps)
    for i in range(len(ops)):
        left = told(left, left.ops[i])
    assert sum(gain for gain, _ in found) == pytest.approx(whole - np.linalg.norm(left.steps))


def test_of_ops_that_tell_the_same_the_longest_is_measured():
    now = Beliefs(np.array([[0.1, 0.0]]), np.zeros(1), np.array([[0.2, 0.0], [0.2, 0.0], [0.0, 0.3]]))
    order = [pick for pick, _ in in_turn(now, np.ones(1), np.array([1.0, 5.0, 9.0]), 3)]
    assert order[0] == 1


def test_what_was_measured_or_shows_in_a_step_only_is_not_asked_for(evaluator):
    program = evaluator.program(evaluator.legal(TEXT))
    ops = asked(evaluator, [program])
    rows = seen_alone(evaluator, ops)
    assert not rows[:, [evaluator.uncertainty.at[c] for c in ("sustained", "attention")]].any()
    again = [replace(a, provenance="measured") for a in ops]
    assert not seen_alone(evaluator, again).any() and sum(gains(evaluator, [program], [1.0], again)) == pytest.approx(0.0, abs=1e-12)


def test_ops_carry_their_gain_and_the_bench_orders_by_it(tmp_path):
    s = scenario("moe", layout=TEXT)
    lines = list(list_ops(s))
    file = tmp_path / "ops.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    requests = ordered(read_requests(file))
    by_gain = sorted((line["gain"] for line in lines), reverse=True)
    assert [r.gain for r in requests] == pytest.approx(by_gain)
    assert by_gain[0] > 0 and {type(r.op).__name__ for r in requests[:5]} != {"Gemm"}
    # of several layouts too
    assert any(line["gain"] > 0 for line in list_ops(scenario("moe", search={"ep": [4, 8]})))


def test_the_bench_falls_back_to_its_own_rule_where_a_line_has_no_gain(tmp_path):
    file = tmp_path / "ops.jsonl"
    lines = [{"op": "Gemm", "m": 8 * i, "n": 8, "k": 8, "predicted_s": float(i), "provenance": "extrapolated", "gain": 1.0 / i} for i in (1, 2, 3)]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert [r.op.m for r in ordered(read_requests(file))] == [8, 16, 24]
    del lines[0]["gain"]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert [r.op.m for r in ordered(read_requests(file))] == [24, 16, 8]
    file.write_text(json.dumps({**lines[1], "gain": "much"}) + "\n")
    with pytest.raises(ValueError, match="ops.jsonl:1: gain is 'much'"):
        read_requests(file)


# --- sentences ------------------------------------------------------------------------------------------------------------------


def test_where_the_model_outweighs_the_prices_a_run_is_advised(evaluator):
    (candidate,) = candidates_of(Evaluator(scenario("moe"), model_error=ModelError(base=0.3, extrapolated=0.0, anchored=0.05, num_runs=0, source="t")), TEXT)
    unsure = Evaluator(scenario("moe"), model_error=ModelError(base=0.3, extrapolated=0.0, anchored=0.05, num_runs=0, source="t"))
    found = advice(unsure, [candidate])
    assert found["sigma_model"] == 0.3 > found["sigma_prices"]
    assert found["text"].startswith("the model's own error (30%) outweighs") and "an anchor run" in found["text"]
    assert candidate.low < found["anchor"]["low"] < found["anchor"]["high"] < candidate.high
    (sure,) = candidates_of(evaluator, TEXT)
    assert advice(evaluator, [sure])["text"].startswith("measure ")


def test_where_the_host_decides_launches_are_to_be_timed(evaluator):
    (bound,) = candidates_of(evaluator, "dp8 ep8 zero1 graph:none")
    assert abs(bound.spread["host"]) > 0.1
    found = advice(evaluator, [bound])
    assert "time launches" in found["text"] and bound.low < found["host"]["low"] < found["host"]["high"] < bound.high
    (free,) = candidates_of(evaluator, TEXT)
    assert "time launches" not in advice(evaluator, [free])["text"]


def test_an_interval_after_everything_is_known_is_the_models_own(evaluator):
    (candidate,) = candidates_of(evaluator, TEXT)
    band = Band(candidate, 0.04, 0.1)
    low, high = band.after(0.04)
    assert math.log(high / low) == pytest.approx(2 * 1.2816 * 0.1)
    assert band.after(0.0, 0.0)[1] == pytest.approx(candidate.tokens_per_s_per_gpu * math.exp(1.2816 * band.prices))


def test_chances_by_hand():
    """Two layouts with errors of their own only: the difference is normal."""
    (base,) = candidates_of(Evaluator(scenario("moe")), TEXT)
    pair = [base, replace(base, step_s=base.step_s * math.exp(0.05))]
    wrong, regret = chances(pair, np.zeros((2, 3)), [0.1, 0.1])
    spread = math.sqrt(2 * advise.OWN_SHARE) * 0.1
    phi = 0.5 * math.erfc(0.05 / spread / math.sqrt(2))
    assert wrong == pytest.approx(phi, abs=0.03)
    density = math.exp(-((0.05 / spread) ** 2) / 2) / math.sqrt(2 * math.pi)
    assert regret == pytest.approx(spread * density - 0.05 * phi, abs=0.003)


def test_words_name_the_op_alone():
    assert advise.words(Gemm(8, 16, 32)) == "Gemm m=8 n=16 k=32 bf16"


def test_a_plan_says_what_would_make_it_surer():
    s = scenario("moe", search={"ep": [2, 4, 8], "overlap": ["grad+param"], "graphs": ["full"]})
    found = plan(s, workers=1)
    assert found.advice["winner"] == found.candidates[0].layout and len(found.advice["measure"]) == 1
    assert json.loads(json.dumps(found.advice)) == found.advice
    more = what_to_measure(s, lines=4)
    assert more["measure"][0] == found.advice["measure"][0] and 1 < len(more["measure"]) <= 4
    assert all(line["variance_share"] >= advise.LEAST_SHARE or line["regret_removed"] >= 0.98 * advise.SETTLED for line in more["measure"])
    one = what_to_measure(s, found.candidates[0].layout, lines=2)
    assert one["goal"] == "interval" and one["winner"] == found.candidates[0].layout
    assert what_to_measure(scenario("moe", search={"ep": [8]}, sets=["cluster.gpu.hbm_bytes=8 GB"])) is None


def test_rows_are_the_spreads(evaluator):
    (candidate,) = candidates_of(evaluator, TEXT)
    (row,) = step_rows(evaluator, [candidate.spread])
    assert sorted(row[row != 0]) == pytest.approx(sorted(candidate.spread.values()))
