"""How long must an overlapped forward and backward take at least? (The pieces of a pair, played on arrays for many layouts at once.)

A piece is a run of compute with the collectives behind it; what its own body computes next waits for those. In a pair the pieces
of the two bodies alternate on the compute stream (``program.interleave``), and their collectives share one stream. Played without
hosts, gathers and contention this is a path of the pair, so it bounds the pair from below; where nothing else is in the way it is
the pair.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Callable, Iterable, Sequence

import numpy as np

from moesim.bounds import Durations
from moesim.critical import PAIR_TIMES

Piece = tuple[np.ndarray, np.ndarray | None]
"""Seconds of compute and of the collectives behind it, [L] each; None where none is."""


def pieces(work: Iterable[tuple[bool, float]]) -> list[tuple[float, float]]:
    """(compute seconds, seconds of the collectives behind) of each run; ``work``: (is it compute, seconds) in program order. What
    begins or ends with a collective begins or ends with an empty run."""
    out: list[list[float]] = []
    for compute, seconds in work:
        if not compute:
            if not out:
                out.append([0.0, 0.0])
            out[-1][1] += seconds
        elif not out or out[-1][1]:
            out.append([seconds, 0.0])
        else:
            out[-1][0] += seconds
    if out and out[-1][1]:
        out.append([0.0, 0.0])
    return [(compute, comm) for compute, comm in out]


def join(parts: Sequence[Sequence[Piece]]) -> list[Piece]:
    """Pieces of parts that follow each other: compute runs on where no collective stands between."""
    out: list[Piece] = []
    for part in parts:
        for compute, comm in part:
            if out and out[-1][1] is None:
                out[-1] = (out[-1][0] + compute, comm)
            else:
                out.append((compute, comm))
    return out


def merged_order(num_first: int, num_second: int) -> list[tuple[int, int]]:
    """(side, piece) in the order of the compute stream: piece i of n stands at i / n, the first body first on ties."""
    return [(side, i) for _, side, i in sorted((i / n, side, i) for side, n in enumerate((num_first, num_second)) for i in range(n))]


def play_pair(first: Sequence[Piece], second: Sequence[Piece]) -> np.ndarray:
    """[PAIR_TIMES, L] Each way through the pair: stream to stream; inputs 0, 1 to stream; stream to outputs 0, 1; input i to output
    j. The first body's first piece leads the pair, so its input and the stream are one."""
    order = merged_order(len(first), len(second))
    (stream, ends), (late, late_ends) = (_play((first, second), order, gate) for gate in (0, 1))
    return np.array([stream, stream, late, ends[0], ends[1], ends[0], ends[1], late_ends[0], late_ends[1]])


def _play(sides, order, gate: int):
    """End of the stream and of each side's last compute, with all at rest at 0 (gate 0) or only the second side's input (gate 1)."""
    num = len(sides[0][0][0])
    compute = np.zeros(num) if gate == 0 else np.full(num, -np.inf)
    comm = np.full(num, -np.inf)
    ready, ends, begun = [compute, compute], [compute, compute], [False, False]
    for side, i in order:
        seconds, behind = sides[side][i]
        start = np.maximum(compute, ready[side])
        if gate == 1 and side == 1 and not begun[1]:
            start = np.maximum(start, 0.0)
        begun[side] = True
        compute = ends[side] = start + seconds
        if behind is not None:
            comm = ready[side] = np.maximum(comm, compute) + behind
        else:
            ready[side] = compute
    return compute, ends


@dataclass(frozen=True)
class PairedDurations(Durations):
    """Durations whose pairs are played. ``sequence(letter, stage)``: pieces of one action for the rows given by ``groups``: lists of
    row numbers whose layouts have the same pieces; rows in no group keep what Durations knows."""

    groups: tuple[np.ndarray, ...] = ()
    sequence: Callable[[str, int, int], list[Piece]] | None = None
    contents: tuple = ()
    known: dict = field(default_factory=dict)

    def pair(self, kind) -> np.ndarray:
        """[PAIR_TIMES, L]; stages of the same contents share one answer."""
        (letter_a, a), (letter_b, b) = kind
        least = super().pair(kind)
        key = (letter_a, self.contents[a], letter_b, self.contents[b])
        if key not in self.known:
            played = np.full((PAIR_TIMES, least.shape[1]), -np.inf)
            for g, rows in enumerate(self.groups):
                played[:, rows] = play_pair(self.sequence(letter_a, a, g), self.sequence(letter_b, b, g))
            self.known[key] = played
        return np.maximum(least, self.known[key])
