"""Does the fit find the truth when there is one, say how sure it is, and refuse what can't be known?"""

from __future__ import annotations

import numpy as np
import pytest

from calibration.fit import fit
from calibration.posterior import learn
from calibration.recovery import DESIGNS, TOLERANCE, recover
from moesim.costs import attention, gemm, memory_bound
from moesim.costs.base import Parameter

LINE = (Parameter("latency_s", "s", 1e-7, 1e-3, 1e-5), Parameter("rate", "bytes/s", 1e9, 1e13, 1e11))
SIZES = np.geomspace(1e3, 1e9, 40)


SLOW = ("grouped_gemm",)
"""GPU tiles over groups: minutes for 200 draws; `python -m calibration recover grouped_gemm` shows them."""


def line(p):
    return p["latency_s"] + SIZES / p["rate"]


def test_a_known_line_is_recovered_with_nominal_coverage():
    """200 noisy copies of one truth: 90% intervals hold it 90% of the time, within what 200 draws can tell (4 sigma = 8.5%)."""
    truth = {"latency_s": 1.27e-5, "rate": 5.08e11}
    rng, inside = np.random.default_rng(7), {name: 0 for name in truth}
    for _ in range(200):
        noisy = line(truth) * np.exp(0.05 * rng.standard_normal(len(SIZES)))
        found = fit(line, noisy, LINE, robust=False)
        for name, value in truth.items():
            inside[name] += abs(found.parameters[name] - value) <= 1.645 * found.stderr[name]
    assert all(0.9 * 200 - 17 <= hits <= 0.9 * 200 + 17 for hits in inside.values()), inside


def test_covariance_agrees_with_the_scatter_of_repeats():
    truth, rng = {"latency_s": 1.27e-5, "rate": 5.08e11}, np.random.default_rng(3)
    found = [fit(line, line(truth) * np.exp(0.05 * rng.standard_normal(len(SIZES))), LINE, robust=False) for _ in range(150)]
    scatter = np.cov([[f.parameters[n] for n in truth] for f in found], rowvar=False)
    stated = np.mean([[[f.covariance[a][b] for b in truth] for a in truth] for f in found], axis=0)
    assert np.diag(stated) == pytest.approx(np.diag(scatter), rel=0.35)
    assert np.sign(stated[0, 1]) == np.sign(scatter[0, 1])


def test_latency_and_half_size_can_not_both_be_known():
    """t = latency + (bytes + half) / rate: half only ever appears as half / rate beside the latency."""
    parameters = (*LINE, Parameter("half_bytes", "bytes", 1.0, 1e9, 1e5))
    measured = line({"latency_s": 2e-5, "rate": 4e11})
    with pytest.raises(ValueError, match="can't be told apart") as caught:
        fit(lambda p: p["latency_s"] + (SIZES + p["half_bytes"]) / p["rate"], measured, parameters)
    assert "latency_s" in str(caught.value) and "half_bytes" in str(caught.value)


def test_a_parameter_nothing_depends_on_is_refused():
    with pytest.raises(ValueError, match="unused changes no prediction"):
        fit(line, line({"latency_s": 1e-5, "rate": 1e11}), (*LINE, Parameter("unused", "1", 0.1, 10.0, 1.0)))


def test_fewer_measurements_than_parameters_are_refused():
    with pytest.raises(ValueError, match="1 measurements can't identify 2"):
        fit(lambda p: np.array([p["latency_s"] + 1 / p["rate"]]), np.array([1e-5]), LINE)


def test_a_belief_settles_what_measurements_leave_open():
    flat = np.full(10, 1e-5)
    found = fit(lambda p: p["latency_s"] + 10.0 / p["rate"] * np.ones(10), flat, LINE, prior={"rate": (3e11, 0.2)})
    assert found.parameters["rate"] == pytest.approx(3e11, rel=0.05)
    assert found.parameters["latency_s"] == pytest.approx(1e-5, rel=0.01)


def test_outliers_do_not_move_a_robust_fit():
    truth = {"latency_s": 1.27e-5, "rate": 5.08e11}
    measured = line(truth)
    measured[::10] *= 3
    assert fit(line, measured, LINE).parameters["rate"] == pytest.approx(truth["rate"], rel=0.05)


def test_a_value_at_its_bound_is_named_and_has_no_error():
    measured = line({"latency_s": 1e-9, "rate": 1e11})
    found = fit(line, measured, LINE)
    assert found.at_bound == ("latency_s",) and "latency_s" not in found.stderr


def shapes(seed):
    rng = np.random.default_rng(seed)
    return (np.round(np.exp(rng.uniform(np.log(low), np.log(high), 250))) for low, high in ((64, 32768), (1024, 32768), (768, 16384)))


@pytest.mark.parametrize("width", [2.0, 1.0])
def test_the_gemm_model_is_recovered(width):
    m, n, k = shapes(11)
    truth = {p.name: p.start for p in gemm.PARAMETERS} | {"rate": 2.1e15, "ramp_k": 120.0, "droop": 0.4, "floor_s": 0.0}
    fixed = {"floor_s": 0.0} | ({"quant_row_s": 0.0, "quant_bandwidth": 5e12} if width == 2.0 else {})
    truth |= fixed

    def predict(p):
        return gemm.seconds(p, 148, m, n, k, width, 2.0)

    measured = predict(truth) * np.exp(0.03 * np.random.default_rng(5).standard_normal(len(m)))
    found = fit(predict, measured, gemm.PARAMETERS, fixed)
    for name in ("rate", "bandwidth", "fixed_s"):
        assert found.parameters[name] == pytest.approx(truth[name], rel=0.1), name
        assert abs(found.parameters[name] - truth[name]) < 4 * found.stderr[name], name
    assert found.sigma_log == pytest.approx(0.03, rel=0.25)


def test_the_attention_model_is_recovered():
    length = np.geomspace(512, 65536, 25)
    fixed = {p.name: p.start for p in attention.PARAMETERS if p.name not in ("rate", "half_keys")}
    truth = fixed | {"rate": 1.6e15, "half_keys": 950.0}

    def predict(p):
        return attention.seconds(p, 148, 8, 32, length, length * (length + 1) / 2, 128.0, 128.0, 8 * length * 32 * 1024, False)

    found = fit(predict, predict(truth) * np.exp(0.01 * np.random.default_rng(2).standard_normal(25)), attention.PARAMETERS, fixed)
    assert found.parameters["rate"] == pytest.approx(1.6e15, rel=0.02)
    assert found.parameters["half_keys"] == pytest.approx(950.0, rel=0.05)


def test_share_and_peak_of_a_memory_kernel_can_not_both_be_known():
    fixed = {p.name: p.start for p in memory_bound.PARAMETERS if p.name not in ("norm", "peak", "fixed_s")}
    index = np.full(len(SIZES), memory_bound.KINDS.index("norm"))
    measured = 3e-6 + SIZES / 5e12
    with pytest.raises(ValueError, match="can't be told apart"):
        fit(lambda p: memory_bound.seconds(p, index, SIZES), measured, memory_bound.PARAMETERS, fixed)


# --- with beliefs, unknown misfit and outliers --------------------------------------------------------------------------------


@pytest.mark.full
@pytest.mark.parametrize("kind", [k for k in DESIGNS if k not in SLOW])
def test_intervals_hold_the_truth_as_often_as_they_claim(kind):
    """200 truths, measurements with outliers: 68% and 95% intervals within three points, over all parameters."""
    found = recover(kind, 200)
    assert found.is_nominal, found
    assert max(found.learned.values()) > 0.9  # the measurements say something


def test_intervals_of_a_cheap_model_hold(kind="core_memory"):
    """The same in a second: 60 draws of 4 parameters tell within 2 x 3.0 points."""
    found = recover(kind, 60)
    assert abs(found.held[0.68] - 0.68) < TOLERANCE + 0.04 and abs(found.held[0.95] - 0.95) < TOLERANCE + 0.02, found


def test_an_overconfident_fit_would_be_seen():
    """Coverage is a test that can fail: with half the errors it claims, 68% intervals would hold less than half."""
    rng, truth, inside = np.random.default_rng(0), {"latency_s": 1e-5, "rate": 1e11}, []
    for _ in range(60):
        noisy = line(truth) * np.exp(0.05 * rng.standard_normal(len(SIZES)))
        found = learn(line, noisy, np.full(len(SIZES), 0.05), LINE, {n: (v, 1.0) for n, v in truth.items()})
        inside += [abs(np.log(found.parameters[n] / truth[n])) / np.sqrt(found.covariance[i, i]) for i, n in enumerate(found.names)]
    assert np.mean(np.array(inside) < 0.5) < 0.5 < 0.58 < np.mean(np.array(inside) < 1.0) < 0.79


def test_a_belief_that_measurements_leave_alone_is_pinned_and_one_that_nothing_touches_refused():
    flat = np.full(10, 1e-5)
    believed = {"latency_s": (1e-5, 1.0), "rate": (1e12, 0.3)}
    found = learn(lambda p: p["latency_s"] + 10.0 / p["rate"] * np.ones(10), flat, np.full(10, 0.01), LINE, believed)
    assert found.pinned == ("rate",) and found.parameters["rate"] == 1e12 and found.stderr["rate"] == pytest.approx(0.3e12)
    assert found.parameters["latency_s"] == pytest.approx(1e-5, rel=0.01)
    with pytest.raises(ValueError, match="say nothing about rate"):
        learn(lambda p: np.full(10, 1e-5) * p["rate"] ** 0, flat, np.full(10, 0.01), LINE, {"rate": (1e12, 0.3)})


def test_a_pair_that_only_beliefs_tell_apart_is_named():
    parameters = (*LINE, Parameter("half_bytes", "bytes", 1.0, 1e9, 1e5))
    believed = {"latency_s": (2e-5, 0.5), "rate": (4e11, 0.5), "half_bytes": (4e6, 0.5)}
    measured = line({"latency_s": 3e-5, "rate": 4e11})
    found = learn(lambda p: p["latency_s"] + (SIZES + p["half_bytes"]) / p["rate"], measured, np.full(len(SIZES), 0.01), parameters, believed)
    assert ("latency_s", "half_bytes") in found.together


def test_misfit_is_told_from_noise():
    truth, rng = {"latency_s": 1e-5, "rate": 1e11}, np.random.default_rng(4)
    sizes = np.geomspace(1e3, 1e9, 400)
    predict = lambda p: p["latency_s"] + sizes / p["rate"]  # noqa: E731
    noise = rng.uniform(0.01, 0.05, 400)
    seconds = predict(truth) * np.exp(np.hypot(noise, 0.08) * rng.standard_normal(400))
    found = learn(predict, seconds, noise, LINE, {n: (v, 1.0) for n, v in truth.items()})
    assert found.misfit == pytest.approx(0.08, rel=0.15)
