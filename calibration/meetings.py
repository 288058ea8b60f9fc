"""How long do ranks wait for each other at a collective, beyond its wire time? (Whole steps of anchors -> `Meeting` of a profile.)

Ranks arrive unevenly, and where several share a core one has to be scheduled before it can send. No collective timed alone shows that. What
anchor steps took beyond their prediction is laid on the collectives that everybody waits for, as a fixed time each, for
every number of ranks a core apart.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from moesim.evaluate import Evaluator
from moesim.load import load_scenario
from moesim.measurement import Measurement
from moesim.profile import HardwareProfile, Meeting

TRIAL_S = 1e-3
"""Fixed time with which the steps are played once more, to see how they move."""


@dataclass(frozen=True)
class _Seen:
    """An anchor's step: measured, predicted without any fixed time, and seconds that one second of it adds."""

    measured_s: float
    predicted_s: float
    slope: float


def meetings(profile: HardwareProfile, anchors: Sequence[Measurement], sources: Sequence[str]) -> tuple[Meeting, ...]:
    """Fixed times for ``profile`` (whose own are not read) from lines of whole steps: several launches of one case count by their median."""
    launches: dict[str, list[Measurement]] = defaultdict(list)
    for line in anchors:
        launches[line.parameters["case"]].append(line)
    found: dict[float, list[_Seen]] = defaultdict(list)
    for lines in launches.values():
        if int(lines[0].parameters["world"]) > 1:
            ranks, seen = _seen(profile, lines)
            found[ranks] += [seen] if seen.slope > 0 else []
    return tuple(_meeting(ranks, seen, sources) for ranks, seen in sorted(found.items()) if seen)


def _seen(profile: HardwareProfile, lines: Sequence[Measurement]) -> tuple[float, _Seen]:
    about = lines[0].parameters
    scenario = load_scenario(about["scenario"], [s for s in about["set"] if not s.startswith("train.")])
    plain = Evaluator(scenario, profile.but(meetings=()))
    node = plain.parts.node
    ranks = node.ranks_per_core if node else 1.0
    trial = Meeting(ranks_per_core=ranks, extra_s=TRIAL_S, stderr=0.0, sources=("trial",))
    moved = Evaluator(scenario, profile.but(meetings=(trial,)))
    before, after = (e.played(e.legal(lines[0].layout)).step_s for e in (plain, moved))
    return ranks, _Seen(float(np.median([line.median for line in lines])), before, (after - before) / TRIAL_S)


def _meeting(ranks: float, seen: Sequence[_Seen], sources: Sequence[str]) -> Meeting:
    """Least squares of relative errors, not below zero; one anchor's error is taken to be a tenth of its residual at least."""
    slopes = np.array([s.slope / s.measured_s for s in seen])
    rest = np.array([1.0 - s.predicted_s / s.measured_s for s in seen])
    extra = max(0.0, float(slopes @ rest / (slopes @ slopes)))
    left = np.maximum(np.abs(rest - slopes * extra), 0.1 * np.abs(rest))
    return Meeting(ranks_per_core=ranks, extra_s=extra, stderr=float(np.sqrt(np.mean(left**2) / (slopes @ slopes))), sources=tuple(sources))
