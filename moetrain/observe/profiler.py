"""How is a window of steps profiled without spoiling the throughput? (torch.profiler, with the profiled steps reported.)

A profiled step is slower than others or has a trace written behind it, so each names itself in ``StepRecord.also`` and
`throughput.measure` leaves it out, the step after the window too: the trace is written then.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile


class ProfileWindow:
    """torch.profiler over steps ``first`` to ``last`` (inclusive; ``first`` 0: never) of one rank, as a Chrome trace file."""

    def __init__(self, folder: str | Path, rank: int, first: int, last: int, record_shapes: bool = True) -> None:
        if last < first:
            raise ValueError(f"profile: last step {last} is before the first, {first}")
        self.first, self.last = first, last
        self.path = Path(folder) / f"profile-rank{rank:05d}-steps{first}-{last}.json"
        self._shapes = record_shapes
        self._profile: Any = None

    def begin_step(self, step: int) -> None:
        """Start the profiler at the first step of the window; a run that resumes inside it starts at once."""
        if self._profile is None and 0 < self.first <= step <= self.last:
            activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])
            self._profile = profile(activities=activities, record_shapes=self._shapes)
            self._profile.start()

    def end_step(self, step: int) -> Path | None:
        """Stop and write after the last step of the window; the file then, else None."""
        return self.close() if self._profile is not None and step >= self.last else None

    def profiled(self, step: int) -> bool:
        """Does the window touch this step, so that its time must not count?"""
        return 0 < self.first <= step <= self.last + 1

    def close(self) -> Path | None:
        """Write what was profiled so far, if anything was."""
        if self._profile is None:
            return None
        self._profile.stop()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        part = self.path.with_name("." + self.path.name)
        self._profile.export_chrome_trace(str(part))
        part.replace(self.path)
        self._profile = None
        return self.path
