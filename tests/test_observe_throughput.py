"""Is a throughput measured by its contract, and are results with other routing or drops kept apart?"""

import numpy as np
import pytest

from moetrain.observe.balance import summarise
from moetrain.observe.flops import Utilisation
from moetrain.observe.metrics import StepRecord
from moetrain.observe.throughput import Contract, aa_noise, difference, measure, speedup

NAMES = {"config": "c" * 64, "layout": "dp8 ep8 zero1 mb2 1f1b", "device": "NVIDIA B300 SXM6 AC"}
ROWS = np.array([[50, 30, 10, 10]])


def run(seconds, routing="random", capacity=1.25, keep=100, also=None, restarts=None, start=1):
    kept = np.minimum(ROWS, keep)
    balance = summarise(ROWS, kept, routing=routing, capacity_factor=capacity)
    use = Utilisation(0.4, "2250 TFLOP/s dense bf16 (b300)", 0.4, "2250 TFLOP/s dense bf16 (b300)", 0.45)
    return [StepRecord(start + i, s, 8000, 8, balance=balance, use=use, also=(also or {}).get(start + i, ()), restart=(restarts or {}).get(start + i, 0))
            for i, s in enumerate(seconds)]


def test_the_median_is_of_the_window_only():
    """Warm-up, profiled, validating and checkpointing steps and what lies past the window never enter."""
    rng = np.random.default_rng(1)
    good = rng.uniform(0.9, 1.1, 50)
    seconds = np.concatenate([np.full(10, 60.0), good, np.full(20, 30.0)])
    also = {20: ("profile",), 30: ("validation",), 40: ("checkpoint",), 41: ("checkpoint",)}
    for step in also:
        seconds[step - 1] = 500.0
    found = measure(run(seconds, also=also), Contract(10, 50, 30), **NAMES)
    used = np.delete(good, [9, 19, 29, 30])
    assert found.num_steps == 46 and (found.first_step, found.last_step) == (11, 60)
    assert found.median == pytest.approx(np.median(1000 / used)) and found.p10 == pytest.approx(np.percentile(1000 / used, 10))
    assert found.overall == pytest.approx(1000 * 46 / used.sum()) and found.median_step_s == pytest.approx(np.median(used))
    assert dict(found.excluded) == {"profile": 1, "validation": 1, "checkpoint": 2} and found.mfu == 0.4
    assert "2 checkpoint" in str(found) and "random routing" in str(found) and "capacity 1.25 an expert" in str(found) and "dropped 0.00%" in str(found)


def test_a_restart_warms_up_again():
    restarts = dict.fromkeys(range(26, 61), 1)
    found = measure(run(np.ones(60), restarts=restarts), Contract(10, 50, 30), **NAMES)
    assert found.num_steps == 15 + 25


def test_a_skipped_update_does_not_count():
    records = run(np.ones(50))
    records[20] = StepRecord(21, 0.1, 8000, 8, skipped="grad norm", balance=records[0].balance)
    assert dict(measure(records, Contract(10, 40, 30), **NAMES).excluded) == {"skipped update": 1}


def test_too_few_steps_are_refused():
    with pytest.raises(ValueError, match="20 of 30 steps count .*the contract needs 30: run longer"):
        measure(run(np.ones(30)), Contract(10, 50, 30), **NAMES)
    for bad in ((0, 50, 30), (1, 10, 30), (1, 10, 0)):
        with pytest.raises(ValueError, match="warmup"):
            Contract(*bad)


def test_results_of_other_routing_capacity_or_drops_are_not_compared():
    contract = Contract(1, 30, 5)
    base = measure(run(np.ones(30)), contract, **NAMES)
    noise = aa_noise([base, measure(run(np.full(30, 1.01)), contract, **NAMES), measure(run(np.full(30, 0.99)), contract, **NAMES)])
    assert noise.largest == pytest.approx(0.01, rel=0.05) and "A/A noise over 3 runs" in str(noise)
    for other, word in ((run(np.ones(30), routing="learned"), "routing"), (run(np.ones(30), capacity=None), "capacity_factor"), (run(np.ones(30), keep=40), "drops")):
        with pytest.raises(ValueError, match=f"not comparable: {word} differ"):
            speedup(measure(other, contract, **NAMES), base, noise)
    faster = measure(run(np.full(30, 0.5)), contract, **(NAMES | {"layout": "dp8 ep4"}))
    assert speedup(faster, base, noise) == (2.0, True) and speedup(base, base, noise) == (1.0, False)
    assert "layout differs" in difference(faster.key, base.key)
    with pytest.raises(ValueError, match="layout differs"):
        aa_noise([base, faster])
    with pytest.raises(ValueError, match="at least 2"):
        aa_noise([base])
    mixed = run(np.ones(15)) + run(np.ones(15), routing="learned", start=16)
    with pytest.raises(ValueError, match="mixes routing"):
        measure(mixed, contract, **NAMES)
