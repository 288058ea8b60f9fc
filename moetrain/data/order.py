"""Which sequence of which source is sample i of the run, on any number of ranks, after any resume?

Sample numbers are global: the run is samples 0, 1, 2, ... and a rank reads the ones that are its. Nothing here knows of ranks or keeps
state: sample i is computed from i, so that the next number alone resumes a run.

    mix         sample -> (source, how many samples of it came before), by a table of one period
    permutation (source, epoch, position) -> sequence, by a keyed Feistel network: nothing the size of the data set is stored
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

import numpy as np

ORDER_VERSION = 1
"""Rises when the same inputs give another order; part of a loader's fingerprint."""

MAX_PERIOD = 1 << 16
"""Weights whose common denominator is larger are rounded to multiples of 1/MAX_PERIOD."""

NUM_ROUNDS = 6
_WORD = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


# ---- hashing ------------------------------------------------------------------------------------------------------------------


def mix64(x: np.ndarray) -> np.ndarray:
    """A bijection of 64-bit words in which every input bit moves every output bit (finaliser of SplitMix64, Steele et al. 2014)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def key_of(*parts: int) -> int:
    """One 64-bit key from several integers, in order: (1, 2) and (2, 1) differ."""
    key = 0
    for part in parts:
        key = int(mix64(np.array([(key ^ (part & _WORD)) + _GOLDEN & _WORD], dtype=np.uint64))[0])
    return key


# ---- permutation --------------------------------------------------------------------------------------------------------------


def permute(positions: np.ndarray, size: int, key: int) -> np.ndarray:
    """Where a keyed permutation of 0..size-1 sends each position ([n] int64 -> [n] int64), in O(1) memory.

    A Feistel network permutes the next even power of two, at most 4 size; a position that lands outside is sent on until it lands
    inside (cycle walking, Black and Rogaway 2002), less than 4 turns on average.
    """
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    keys = [np.uint64(key_of(key, turn)) for turn in range(NUM_ROUNDS)]
    image = _feistel(np.asarray(positions).astype(np.uint64), half, keys)
    while (outside := np.flatnonzero(image >= size)).size:
        image[outside] = _feistel(image[outside], half, keys)
    return image.astype(np.int64)


def _feistel(x: np.ndarray, half: int, keys: Sequence[np.uint64]) -> np.ndarray:
    shift, mask = np.uint64(half), np.uint64((1 << half) - 1)
    left, right = x >> shift, x & mask
    for key in keys:
        left, right = right, left ^ (mix64(right + key) & mask)
    return (left << shift) | right


# ---- mix ----------------------------------------------------------------------------------------------------------------------


def period_counts(weights: Sequence[float]) -> tuple[int, ...]:
    """How many samples of each source one period holds. Decimal weights are taken as written (0.7, 0.3 -> 7, 3).

    Raises ValueError for a weight that isn't positive and finite, or is too small for the longest period.
    """
    for place, weight in enumerate(weights):
        if not (math.isfinite(weight) and weight > 0):
            raise ValueError(f"the weight of source {place} is {weight}; a weight is a positive number")
    exact = [Fraction(str(weight)) for weight in weights]
    scale = math.lcm(*(w.denominator for w in exact))
    whole = [int(w * scale) for w in exact]
    counts = [n // math.gcd(*whole) for n in whole]
    if sum(counts) > MAX_PERIOD:
        counts = _largest_remainder([Fraction(n, sum(whole)) * MAX_PERIOD for n in whole])
    if 0 in counts:
        raise ValueError(f"the weight of source {counts.index(0)} is below 1/{MAX_PERIOD} of the mix; raise it or leave the source out")
    return tuple(counts)


def _largest_remainder(shares: Sequence[Fraction]) -> list[int]:
    floors = [math.floor(share) for share in shares]
    by_remainder = sorted(range(len(shares)), key=lambda j: (floors[j] - shares[j], j))
    missing = int(sum(shares)) - sum(floors)
    return [floors[j] + (j in by_remainder[:missing]) for j in range(len(shares))]


@lru_cache(maxsize=8)
def mix_table(counts: tuple[int, ...]) -> np.ndarray:
    """The source of each sample of a period ([sum(counts)] int64): every prefix is within 1 - 1/(2n-2) of its share, n > 1 sources.

    Tijdeman's chairman assignment (Discrete Mathematics 32, 1980): of the sources that are behind enough, the one that would be too far
    behind soonest. Integers only; ties go to the first source.
    """
    num, period = len(counts), sum(counts)
    if num == 1:
        return np.zeros(period, dtype=np.int64)
    spread = 2 * num - 2
    given, table = [0] * num, np.empty(period, dtype=np.int64)
    for slot in range(period):
        behind = [(slot + 1) * count - period * have for count, have in zip(counts, given, strict=True)]
        due = (j for j in range(num) if spread * behind[j] >= period)
        table[slot] = chosen = min(due, key=lambda j: (Fraction(period * (spread - 1) - spread * behind[j], counts[j]), j))
        given[chosen] += 1
    return table


# ---- order --------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Order:
    """The whole run's order. sizes: sequences of each source; weights: their shares of the samples (any scale); seed: of the shuffles."""

    sizes: tuple[int, ...]
    weights: tuple[float, ...]
    seed: int

    def __post_init__(self) -> None:
        if not self.sizes or len(self.sizes) != len(self.weights):
            raise ValueError(f"a mix needs one weight a source; got {len(self.sizes)} sources and {len(self.weights)} weights")
        if min(self.sizes) < 1:
            raise ValueError(f"source {self.sizes.index(min(self.sizes))} holds no sequence")
        period_counts(self.weights)

    def locate(self, samples: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Of each sample number ([n] int64): source, epoch of that source, and sequence in it (each [n] int64)."""
        counts = period_counts(self.weights)
        source, nth = _turn(np.asarray(samples, dtype=np.int64), counts)
        epoch, position = np.divmod(nth, np.asarray(self.sizes, dtype=np.int64)[source])
        sequence = np.empty_like(position)
        for which, turn in sorted(set(zip(source.tolist(), epoch.tolist(), strict=True))):
            here = (source == which) & (epoch == turn)
            sequence[here] = permute(position[here], self.sizes[which], key_of(self.seed, which, turn))
        return source, epoch, sequence


def _turn(samples: np.ndarray, counts: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """The source of each sample, and how many samples of that source came before it."""
    table = mix_table(counts)
    block, slot = np.divmod(samples, len(table))
    source = table[slot]
    return source, block * np.asarray(counts, dtype=np.int64)[source] + _earlier(counts)[slot]


@lru_cache(maxsize=8)
def _earlier(counts: tuple[int, ...]) -> np.ndarray:
    table = mix_table(counts)
    earlier = np.empty_like(table)
    for source, count in enumerate(counts):
        earlier[table == source] = np.arange(count)
    return earlier
