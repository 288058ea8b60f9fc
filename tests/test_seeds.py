"""Do the seed benchmark's two stacks come out as published, with nothing fitted to them? (https://allenai.org/papers/olmocore3)"""

import pytest

from calibration.seeds import gap, points


@pytest.fixture(scope="module")
def zero_shot():
    return points(anchored=False)


def test_every_point_is_inside_its_interval(zero_shot):
    assert [r["inside"] for r in zero_shot] == [True] * 5


def test_errors_stay_what_they_are_said_to_be(zero_shot):
    assert all(abs(r["error"]) < 0.18 for r in zero_shot)


def test_drop_of_the_new_stack_is_within_two_points(zero_shot):
    drop = lambda key: 1 - zero_shot[2][key] / zero_shot[0][key]  # noqa: E731
    assert abs(drop("predicted") - drop("measured")) < 0.02


def test_the_gap_of_the_stacks_is_explained_but_for_a_tenth():
    for anchored in (False, True):
        assert abs(gap(anchored)["unexplained"]) <= 0.10


def test_one_anchor_brings_the_rest_of_the_site():
    rows = points(anchored=True)
    assert all(r["inside"] for r in rows)
    assert all(abs(r["error"]) < 0.05 for r in rows if r["scenario"] == "olmo_core3_new")
    assert all(abs(r["error"]) < 0.12 for r in rows if r["scenario"] == "olmo_core3_old")
