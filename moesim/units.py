"""What does "800 Gb/s" mean? (The one place with prefixes, bits and GiB.)

Text with units exists at the edge only; everything inside is SI: bytes, bytes/s, FLOP/s, seconds, watts. Prefixes are decimal
(k, M, G, T, P) or binary (Ki, Mi, Gi, Ti) and case matters, as does b (bit) against B (byte).
"""

from __future__ import annotations

import math
import re
from functools import lru_cache
from typing import Any

DIMENSIONS = {
    "bytes": ("B", "GB"),
    "bytes/s": ("B/s", "GB/s"),
    "FLOP/s": ("FLOP/s", "TFLOP/s"),
    "s": ("s", "us"),
    "W": ("W", "W"),
}  # dimension -> (SI unit, unit an example is given in)

_DEFINITIONS = """
kilo- = 1e3 = k-
mega- = 1e6 = M-
giga- = 1e9 = G-
tera- = 1e12 = T-
peta- = 1e15 = P-
exa- = 1e18 = E-
milli- = 1e-3 = m-
micro- = 1e-6 = u- = µ-
nano- = 1e-9 = n-
kibi- = 1024 = Ki-
mebi- = 1048576 = Mi-
gibi- = 1073741824 = Gi-
tebi- = 1099511627776 = Ti-
bit = [information] = b
byte = 8 * bit = B
second = [time] = s
minute = 60 * second = min
hour = 3600 * second = h
day = 86400 * second = d
flop = [computation] = FLOP
watt = [power] = W
"""
_TEXT = re.compile(r"\s*([+-]?\d+(?:_\d+)*(?:\.\d*)?(?:[eE][+-]?\d{1,3})?)\s*([A-Za-zµ]+(?:\s*/\s*[A-Za-z]+)?)\s*")
_COUNT = re.compile(r"\s*(\d+(?:_\d+)*(?:\.\d+)?)\s*(k|K|M|G|B|T|Ki|Mi|Gi|Ti)?(?:\s*tokens?)?\s*")
_COUNT_PREFIX = {"k": 10**3, "K": 10**3, "M": 10**6, "G": 10**9, "B": 10**9, "T": 10**12}
_COUNT_PREFIX |= {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}


class UnitError(ValueError):
    """A quantity that can't be read; the message is one line and says what would be right."""


@lru_cache(maxsize=1)
def _registry() -> Any:
    import pint  # a fifth of a second: only commands that read a scenario pay it

    registry = pint.UnitRegistry(None)
    registry.load_definitions(_DEFINITIONS.strip().splitlines())
    return registry


@lru_cache(maxsize=4096)
def parse(text: str, dimension: str) -> float:
    """`text` ("288 GB", "800 Gb/s", "2.25 PFLOP/s", "5 us") in the SI unit of `dimension`, a key of DIMENSIONS."""
    unit, example = DIMENSIONS[dimension]
    match = _TEXT.fullmatch(text) if len(text) < 100 else None
    if not match:
        raise UnitError(f"cannot read {text[:60]!r} as a quantity; write a number and a unit, like '8 {example}'")
    import pint

    try:
        factor = _registry().Quantity(1.0, match[2].replace(" ", "")).to(unit).magnitude
    except pint.errors.DimensionalityError:
        raise UnitError(f"{text!r} is not in {dimension}; a legal unit is {example}") from None
    except pint.errors.PintError:
        raise UnitError(f"unknown unit {match[2]!r} in {text!r}; a legal unit is {example}") from None
    value = float(match[1].replace("_", "")) * factor
    if not math.isfinite(value):
        raise UnitError(f"{text!r} is too large to be meant")
    return value


def parse_any(text: str) -> float:
    """`text` in the SI unit of whichever dimension it has."""
    for dimension in DIMENSIONS:
        try:
            return parse(text, dimension)
        except UnitError:
            continue
    raise UnitError(f"cannot read {text[:60]!r} as a quantity; legal units are {', '.join(e for _, e in DIMENSIONS.values())}")


def parse_count(text: str) -> int:
    """A count of tokens: "4 Mi", "4 Mi tokens", "15 T", "1_000_000"."""
    match = _COUNT.fullmatch(text) if len(text) < 100 else None
    if not match:
        raise UnitError(f"cannot read {text[:60]!r} as a count of tokens; write an integer, '4 Mi tokens' or '15 T tokens'")
    number, factor = match[1].replace("_", ""), _COUNT_PREFIX.get(match[2] or "", 1)
    if "." not in number:
        return int(number) * factor
    whole, fraction = number.split(".")
    scaled, rest = divmod(int(whole + fraction) * factor, 10 ** len(fraction))
    if rest:
        raise UnitError(f"{text!r} is not a whole number of tokens")
    return scaled


def suggest(value: float, dimension: str) -> str:
    """How a bare number of this dimension could have been meant, as text to copy: 288 -> '288 GB', 288e9 -> '288 GB'."""
    unit, example = DIMENSIONS[dimension]
    small = {"s": value >= 1e-3, "W": True}.get(dimension, abs(value) < 1e6)
    if small:
        return f"'{value:g} {example}'"
    scale = parse(f"1 {example}", dimension)
    return f"'{value / scale:g} {example}'"
