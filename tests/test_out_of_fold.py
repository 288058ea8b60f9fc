"""Are runs held out judged by factors that never saw them, and do the sigmas hold the share of runs they claim?"""

import csv

import numpy as np
import pytest

from calibration.coverage import Factors, Point, errors_of, ln_factors
from calibration.folds import MEASUREMENTS
from calibration.out_of_fold import AWAY, COVERED, LABELS, HeldOut, anchored_sigma, half_width, held_out, model_error
from moesim.coverage import KINDS, Coverage
from moesim.model_error import load_model_error
from moesim.predict import Z80

NONE = Coverage(source="none", num_runs=0)
with (MEASUREMENTS / "published_runs.csv").open() as file:
    ROWS = [row for row in csv.DictReader(file) if row["gpu_type"] in ("H100", "B200")][:240:2]
SLOPE = tuple(1.0 if kind == "memory" else 0.0 for kind in KINDS)


def points(rng, excess):
    """One point a row; ``excess`` maps a row to the residual of its memory-bound kernels."""
    generation = {"H100": "hopper", "B200": "blackwell"}
    return [Point(r["id"], r["id"], "nemo", generation[r["gpu_type"]], (), excess(r) + 0.03 * rng.standard_normal(), SLOPE, spread=0.02, doubt=0.05, far=0.5)
            for r in ROWS]


def test_a_common_excess_is_explained_from_the_other_runs():
    found = points(np.random.default_rng(0), lambda row: 0.4)
    out = held_out(found, NONE, ROWS)
    errors = [abs(e.error) for e in out["unseen layout"].values()]
    assert len(errors) > 50 and np.median(errors) < 0.06


def test_noise_of_one_run_never_explains_itself():
    rng = np.random.default_rng(1)
    found = points(rng, lambda row: 0.0)
    odd = found[0].id
    wild = [p if p.id != odd else Point(p.id, p.group, p.stack, p.generation, p.traits, p.residual + 1.0, p.slope, p.spread, p.doubt, p.far) for p in found]
    for label, before in held_out(found, NONE, ROWS).items():
        if odd in before:
            assert held_out(wild, NONE, ROWS)[label][odd].error == pytest.approx(before[odd].error + 1.0, abs=1e-9)


def test_shipped_factors_cancel():
    """Points played with a table and corrected for it give the same held-out errors as points played without."""
    table = Coverage(source="test", num_runs=0, stacks={"nemo": {g: {"memory": 1.5} for g in ("hopper", "blackwell")}})
    found = points(np.random.default_rng(2), lambda row: 0.3)
    moved = [Point(p.id, p.group, p.stack, p.generation, p.traits, p.residual - float(np.log(1.5)), p.slope) for p in found]
    assert ln_factors(table, moved) == pytest.approx([float(np.log(1.5))] * len(moved))
    a, b = held_out(found, NONE, ROWS), held_out(moved, table, ROWS)
    for label in a:
        for name, one in a[label].items():
            assert b[label][name].error == pytest.approx(one.error, abs=1e-9) and b[label][name].variance == pytest.approx(one.variance, rel=1e-6)


def test_sigmas_hold_what_they_claim_and_more_from_afar():
    rng = np.random.default_rng(3)
    found = points(rng, lambda row: 0.0)
    draw = lambda sigma: {p.id: HeldOut(sigma * rng.standard_normal(), variance=0.0) for p in found}  # noqa: E731
    residuals = {LABELS[0]: draw(0.10), LABELS[1]: draw(0.25), LABELS[2]: {}}
    sigmas = model_error(residuals, found)
    assert sigmas["extrapolated"] > 0 and sigmas["assumptions"] >= 0.25
    by_id = {p.id: p for p in found}
    for label, least in zip(LABELS, (COVERED, AWAY)):
        assert np.mean([abs(e.error) <= half_width(by_id[i], sigmas, e.variance) for i, e in residuals[label].items()]) >= least
    # Without anything from afar the band is as narrow as its own runs ask: 0.10, of which draws explain 0.02.
    alone = model_error({LABELS[0]: residuals[LABELS[0]], LABELS[1]: {}, LABELS[2]: {}}, found)
    assert half_width(found[0], alone, 0.0) == pytest.approx(1.28 * 0.10, rel=0.2)


def test_what_the_fit_leaves_open_widens_the_bands_of_what_it_never_saw():
    """Two stacks, of which one has never run here: its factors are as uncertain as before any run."""
    rng = np.random.default_rng(5)
    seen = points(rng, lambda row: 0.2)
    factors = Factors([*seen, Point("new", "new", "torchtitan", "hopper", (), 0.0, SLOPE)])
    _, covariance = factors.solve(seen, np.zeros(len(factors.names)))
    known, new = factors.rows([seen[0], Point("new", "new", "torchtitan", seen[0].generation, (), 0.0, SLOPE)])
    assert new @ covariance @ new > 10 * (known @ covariance @ known)
    root = errors_of(NONE, seen).root(KINDS, "nemo", seen[0].generation)
    assert np.square(np.array(SLOPE) @ root).sum() == pytest.approx(known @ covariance @ known, rel=0.02)
    unseen = errors_of(NONE, seen).root(KINDS, "torchtitan", seen[0].generation)
    assert np.square(np.array(SLOPE) @ unseen).sum() > 10 * (known @ covariance @ known)


def test_the_sigma_of_anchored_runs_is_what_their_bands_lack():
    rng = np.random.default_rng(4)
    errors = 0.10 * rng.standard_normal(4000)
    half = [Z80 * np.hypot(0.06, 0.03)] * len(errors)  # draws of 0.06, made with a sigma of 0.03
    assert anchored_sigma(errors, half, 0.03) == pytest.approx(np.sqrt(0.10**2 - 0.06**2), abs=0.01)
    assert anchored_sigma([], [], 0.03) == 0.03


def test_the_shipped_model_error_came_from_runs():
    shipped = load_model_error()
    assert shipped.num_runs > 500 and 0 < shipped.base < 0.3 and shipped.extrapolated > 0 and shipped.anchored < 0.2
