"""How long must an overlapped forward and backward take at least? (The alternating order of a pair, as a closed form.)

In a pair the compute runs of the two bodies alternate: f1 b1 f2 b2 ... (a run ends where a collective stands behind it). A run
waits for the collectives of its own body behind its predecessor, so between f_i and f_{i+1} stand both the collective a_i and the run b_i, and between b_i and b_{i+1} both c_i and
f_{i+1}. Two chains follow, each a path of the pair and so a lower bound of it:

    sum f + sum max(a_i, b_i) + last b        first f + sum b + sum max(c_i, f_{i+1})

The form below holds for bodies of n MoE layers whose only collectives are dispatch and combine: then both have 2n + 1 runs.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from moesim.bounds import Durations
from moesim.critical import PAIR_TIMES
from moesim.program import COMPUTE, Task


def pieces(runs: tuple[Task, ...]) -> list[tuple[float, float]]:
    """(compute seconds, seconds of the collectives behind) of each run of a part; [] where it begins with a collective."""
    out: list[list[float]] = []
    for task in runs:
        if task.stream != COMPUTE:
            if not out:
                return []
            out[-1][1] += task.seconds
        elif not out or out[-1][1]:
            out.append([task.seconds, 0.0])
        else:
            out[-1][0] += task.seconds
    return [(compute, comm) for compute, comm in out]


@dataclass(frozen=True)
class Alternation:
    """Arrays over layouts [L] (and stages [L, V]) of what the chains need. before/between/after: compute of a MoE layer's three
    runs, forward f and backward b; dispatch/combine: collectives after the first and the second; attention: the layer's other
    half; lead, tail: compute of a stage outside its MoE layers, in front of the first and behind the last. valid [L, V]: stages the form
    fits; layers [V]: MoE layers of each stage; compute [L, V]: all compute."""

    f: np.ndarray
    b: np.ndarray
    f_comm: np.ndarray
    b_comm: np.ndarray
    f_attention: np.ndarray
    b_attention: np.ndarray
    f_lead: np.ndarray
    f_tail: np.ndarray
    b_lead: np.ndarray
    b_tail: np.ndarray
    f_compute: np.ndarray
    b_compute: np.ndarray
    layers: np.ndarray
    valid: np.ndarray

    def ways(self, s: int, t: int) -> np.ndarray:
        """[PAIR_TIMES, L] Lower bounds of each way through forward of stage s beside backward of stage t; -inf where the form does
        not hold. The forward's first run is the pair's first, the backward's last its last."""
        n = int(self.layers[s])
        if n == 0 or n != int(self.layers[t]):
            return np.full((PAIR_TIMES, len(self.valid)), -np.inf)
        (p0, _, p2), (q0, q1, q2) = self.f, self.b
        p1, (dispatch, combine), (first, second) = self.f[1], self.f_comm, self.b_comm
        f_1, b_1 = self.f_lead[:, s] + self.f_attention + p0, q0 + self.b_tail[:, t]
        inner_b, inner_f = q2 + self.b_attention + q0, p2 + self.f_attention + p0
        to_f = self.f_compute[:, s] + np.maximum(dispatch, b_1) + (n - 1) * np.maximum(dispatch, inner_b) + n * np.maximum(combine, q1)
        from_b = self.b_compute[:, t] + n * np.maximum(first, p1) + (n - 1) * np.maximum(second, inner_f) + np.maximum(second, p2 + self.f_tail[:, s])
        whole = np.maximum(to_f + q2 + self.b_attention + self.b_lead[:, t], f_1 + from_b)
        crossing = to_f - f_1 - np.maximum(dispatch, b_1) + b_1
        found = np.array([whole, whole, from_b, to_f, whole, to_f, whole, crossing, from_b])
        return np.where(self.valid[:, s] & self.valid[:, t], found, -np.inf)


@dataclass(frozen=True)
class PairedDurations(Durations):
    """Durations whose pairs know that their runs alternate."""

    alternation: Alternation | None = None

    def pair(self, kind) -> np.ndarray:
        (letter_a, a), (letter_b, b) = kind
        least = super().pair(kind)
        if self.alternation is None or (letter_a, letter_b) != ("F", "B"):
            return least
        return np.maximum(least, self.alternation.ways(a, b))
