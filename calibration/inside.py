"""What do training steps say of a profile, beyond what was timed alone? (Anchor steps -> roles inside steps and meetings.)

Files of `calibration ops` are anchors: of one process they say what roles cost, of several with a core each what spread experts and
collectives outside the layers add. Lines of whole steps that are marked as anchors say how long ranks wait for each other. All other
whole steps are left alone: they are what the profile is judged by.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from calibration.meetings import meetings
from calibration.roles import in_step
from moesim.layout import parse_layout
from moesim.load import load_cluster
from moesim.measurement import Measurement, read_measurements
from moesim.profile import HardwareProfile

CLUSTER = "cpu_gloo"
MOST_ANCHORS = 5


@dataclass(frozen=True)
class Anchors:
    """``alone``: in-step lines of anchors of one process, ``together`` of several; ``steps``: lines of whole anchor steps."""

    alone: tuple[tuple[Measurement, ...], ...]
    together: tuple[tuple[Measurement, ...], ...]
    steps: tuple[Measurement, ...]

    @property
    def num_cases(self) -> int:
        """Different (model, layout) among all of them."""
        recorded = {lines[0].parameters["layout"] for lines in (*self.alone, *self.together)}
        return max(len(recorded), len({m.parameters.get("case") for m in self.steps}))


def anchors(files: Sequence[Path]) -> Anchors:
    """Those among the lines of ``files``. ValueError for more than MOST_ANCHORS: a fit that has seen many steps is no prediction of them."""
    alone, together, steps = [], [], []
    for path in files:
        lines = tuple(read_measurements(path))
        inside = tuple(m for m in lines if m.layout is None and m.method.get("where") == "step" and {"roles", "layout"} <= set(m.parameters))
        steps += [m for m in lines if m.layout is not None and m.reason is None and m.parameters.get("anchor")]
        if inside:
            (alone if parse_layout(inside[0].parameters["layout"]).world == 1 else together).append(inside)
    found = Anchors(tuple(alone), tuple(together), tuple(steps))
    if found.num_cases > MOST_ANCHORS:
        raise ValueError(f"{found.num_cases} different anchor steps: at most {MOST_ANCHORS}, so that enough others are left to judge by")
    return found


def applied(profile: HardwareProfile, given: Anchors, origin: str) -> HardwareProfile:
    """The profile with what the anchors say."""
    if not given.alone:
        return profile
    inside = profile.but(in_step=in_step(profile, load_cluster(CLUSTER), given.alone, (origin,), given.together))
    return inside.but(meetings=meetings(inside, given.steps, (origin,))) if given.steps else inside
