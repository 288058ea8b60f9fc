"""Do learning-rate schedules follow their closed forms, and does the guard skip what it should and nothing else?"""

from __future__ import annotations

import itertools
import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moetrain.optim import Schedule, SkipGuard

# --- schedules --------------------------------------------------------------------------------------------------------------


@given(st.sampled_from(["constant", "cosine", "wsd"]), st.integers(1, 200), st.data())
@settings(max_examples=200, deadline=None)
def test_a_schedule_climbs_then_never_climbs_again(kind, steps, data):
    warmup = data.draw(st.integers(0, steps))
    decay = data.draw(st.integers(0, steps - warmup)) if kind == "wsd" else 0
    shape, least = data.draw(st.sampled_from(["linear", "1-sqrt", "cosine"])), data.draw(st.floats(0, 1))
    s = Schedule(steps, kind, warmup, decay, least, shape)
    factors = [s.factor(i) for i in range(steps)]
    assert factors[:warmup] == [(i + 1) / warmup for i in range(warmup)]
    after = factors[warmup:]
    assert all(a >= b - 1e-12 for a, b in itertools.pairwise(after)) and all(least - 1e-12 <= f <= 1 for f in after)
    assert not after or after[0] == 1
    if steps > warmup and (kind == "cosine" or decay):
        assert s.factor(steps) == pytest.approx(least) and s.factor(10 * steps) == pytest.approx(least)


def test_schedules_are_their_closed_forms():
    cosine = Schedule(110, "cosine", 10, min_lr_ratio=0.1)
    assert [cosine.factor(s) for s in (0, 9, 10, 35, 60, 85, 110)] == pytest.approx(
        [0.1, 1.0, 1.0, 0.1 + 0.9 * (0.5 + 0.5 / math.sqrt(2)), 0.55, 0.1 + 0.9 * (0.5 - 0.5 / math.sqrt(2)), 0.1])
    wsd = Schedule(100, "wsd", 10, 40, 0.0)
    assert [wsd.factor(s) for s in (9, 10, 59, 60, 70, 99, 100)] == pytest.approx([1, 1, 1, 1, 0.75, 1 / 40, 0])
    root = Schedule(100, "wsd", 10, 40, 0.2, "1-sqrt")
    assert [root.factor(s) for s in (60, 70, 96)] == pytest.approx([1, 0.2 + 0.8 * 0.5, 0.2 + 0.8 * (1 - math.sqrt(0.9))])
    assert {Schedule(5).factor(s) for s in range(9)} == {1.0}


@pytest.mark.parametrize("change, message", [
    ({"kind": "linear"}, "schedule 'linear': legal are constant, cosine, wsd"), ({"decay": "exp"}, "schedule decay 'exp'"),
    ({"kind": "wsd", "warmup_steps": 60, "decay_steps": 50}, "schedule wsd: 110 steps of warm-up and decay in a run of 100"),
    ({"warmup_steps": -1}, "a run has at least 1 step, a part 0"), ({"min_lr_ratio": 1.5}, "min_lr_ratio 1.5: must be from 0 to 1"),
])  # fmt: skip
def test_a_schedule_that_does_not_fit_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        Schedule(100, **change)


# --- the guard --------------------------------------------------------------------------------------------------------------


def filled(window: int = 16, **settings) -> SkipGuard:
    guard = SkipGuard(window, **settings)
    for step in range(window):
        assert not guard.judge(step, 2.0 + 0.1 * (-1) ** step, 1.0 + 0.1 * (-1) ** step).skip
    return guard


def test_an_outlier_is_what_lies_sigma_deviations_above_the_mean():
    for loss, norm, skip in ((2.59, 1.0, False), (2.61, 1.0, True), (2.0, 1.59, False), (2.0, 1.61, True), (-50.0, 0.0, False)):
        guard = filled()
        assert guard.judge(16, loss, norm).skip is skip, (loss, norm)
    verdict = filled().judge(16, 9.0, 1.0)
    assert verdict.reason == "the loss 9 is above 2.6"


def test_nothing_is_an_outlier_before_the_window_is_half_full():
    guard = SkipGuard(16)
    for step in range(8):
        assert not guard.judge(step, 2.0 + 0.1 * (-1) ** step if step < 7 else 1e9, 1.0).skip
    guard = SkipGuard(16)
    for step in range(8):
        guard.judge(step, 2.0, 1.0)
    assert guard.judge(8, 2.1, 1.0).skip and not filled(sigma=None).judge(16, 1e9, 1e9).skip


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_skipped_at_once_and_never_enters_the_window(bad):
    guard = SkipGuard(16)
    assert guard.judge(0, bad, 1.0).skip and guard.judge(1, 1.0, bad).skip and not guard.judge(2, 1.0, 1.0).skip
    assert guard.skipped == {"loss not finite": 1, "gradient norm not finite": 1}
    assert all(math.isfinite(v) for values in guard.values.values() for v in values)


def test_a_spike_does_not_blind_the_guard_and_a_small_shift_is_accepted():
    guard = filled(128)
    assert guard.judge(128, 1e30, 1.0).skip and guard.judge(129, 1e4, 1.0).skip and guard.judge(130, 3.0, 1.0).skip
    shifted = [filled(128).judge(128, 2.0, 1.0)]
    guard = filled(128)
    shifted = [guard.judge(128 + i, 2.8, 1.0).skip for i in range(10)]
    assert shifted[0] and not shifted[-1]


def test_too_many_skips_in_a_row_end_the_run_and_say_which():
    guard = filled()
    for step in range(16, 25):
        assert guard.judge(step, math.nan, 1.0).skip
    with pytest.raises(RuntimeError, match="step 25: 10 steps skipped in a row, the last because the loss is nan"):
        guard.judge(25, math.nan, 1.0)
    guard = SkipGuard(max_consecutive=2)
    assert [guard.judge(i, v, 1.0).skip for i, v in enumerate([math.nan, 1.0, math.nan, 1.0, math.nan])] == [True, False] * 2 + [True]


def test_the_guards_state_is_plain_and_carries_on():
    guard = filled()
    guard.judge(16, math.nan, 1.0)
    again = SkipGuard(16)
    again.load_state(json.loads(json.dumps(guard.state())))
    assert again.state() == guard.state()
    for loss in (2.5, 2.7, math.inf, 2.0):
        assert guard.judge(17, loss, 1.0) == again.judge(17, loss, 1.0)
    shorter = SkipGuard(4)
    shorter.load_state(guard.state())
    assert list(shorter.values["loss"]) == list(guard.values["loss"])[-4:]
