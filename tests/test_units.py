"""Is text with a unit read as physics means it, and refused when it means nothing?"""

import pytest

from moesim import units


@pytest.mark.parametrize(
    ("text", "dimension", "value"),
    [
        ("800 Gb/s", "bytes/s", 100e9),
        ("100 GB/s", "bytes/s", 100e9),
        ("275040 MiB", "bytes", 275040 * 2**20),
        ("1 GiB", "bytes", 2**30),
        ("2.25 PFLOP/s", "FLOP/s", 2.25e15),
        ("5us", "s", 5e-6),
        ("2 min", "s", 120.0),
        ("1_000 W", "W", 1000.0),
        ("8 Tb / s", "bytes/s", 1e12),
    ],
)
def test_value(text, dimension, value):
    assert units.parse(text, dimension) == pytest.approx(value, rel=1e-15)


@pytest.mark.parametrize(
    ("text", "dimension", "part"),
    [
        ("8 gb", "bytes", "unknown unit 'gb'"),  # case matters: a bit is b, a byte is B
        ("8 GB", "bytes/s", "is not in bytes/s"),
        ("800 Gb", "bytes/s", "is not in bytes/s"),
        ("8", "bytes", "write a number and a unit"),
        ("GB", "bytes", "write a number and a unit"),
        ("9**9**9 GB", "bytes", "write a number and a unit"),
        ("1e999 GB", "bytes", "too large"),
        ("8 GB/s/s", "bytes/s", "write a number and a unit"),
        ("1 " + "k" * 200 + "B", "bytes", "write a number and a unit"),
    ],
)
def test_refusal(text, dimension, part):
    with pytest.raises(units.UnitError, match=part.replace("*", r"\*")) as error:
        units.parse(text, dimension)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("text", "count"),
    [("4 Mi tokens", 4 * 2**20), ("4Mi", 4 * 2**20), ("15 T", 15 * 10**12), ("14.8 T tokens", 148 * 10**11), ("1_000", 1000)],
)
def test_count(text, count):
    assert units.parse_count(text) == count


@pytest.mark.parametrize("text", ["4 Mi tonnes", "-5", "1.5", "0.1 k tokens2", "", "1e3"])
def test_count_refusal(text):
    with pytest.raises(units.UnitError):
        units.parse_count(text)


@pytest.mark.parametrize("dimension", units.DIMENSIONS)
def test_suggestion_parses(dimension):
    for value in (1e-6, 3.0, 288.0, 288e9, 2.25e15):
        units.parse(units.suggest(value, dimension).strip("'"), dimension)
    assert units.suggest(288, "bytes") == units.suggest(288e9, "bytes") == "'288 GB'"
