"""Which rank holds up the others, when nothing moves? (From what each rank last wrote down to a verdict and a page to read.)

Ranks call the same collectives over a group in the same order, so their counts tell who got how far: a rank whose last collective has
members that haven't come to it waits for them, and one that is waited for and waits for nobody is where to look.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path


@dataclass(frozen=True)
class Issued:
    """One collective: number ``count`` of this rank over ``group``, in training step ``step``, at Unix time ``at``."""

    kind: str
    role: str
    group: str
    count: int
    step: int
    at: float

    def __str__(self) -> str:
        return f"{self.kind} {self.role} #{self.count} over {self.group}"


@dataclass(frozen=True)
class RankState:
    """What a rank last wrote down. ``silent_s``: how much older that is than the newest, where it is too old to be alive, else 0."""

    rank: int
    step: int = 0
    pid: int = 0
    host: str = ""
    paused: str = ""
    idle_s: float = 0.0
    hung: bool = False
    ended: str = ""
    counts: dict[str, int] = field(default_factory=dict)
    members: dict[str, list[int]] = field(default_factory=dict)
    last: list[Issued] = field(default_factory=list)
    silent_s: float = 0.0

    def dump(self) -> str:
        return json.dumps(asdict(self))


def file_of(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank:05d}.json"


def read_states(folder: Path, world: int, silent_after_s: float) -> dict[int, RankState]:
    """What every rank last wrote down; a rank that never wrote is left out. Ages are told by the file system's clock alone."""
    found: dict[int, tuple[float, RankState]] = {}
    for rank in range(world):
        try:
            text, written = file_of(folder, rank).read_text(), file_of(folder, rank).stat().st_mtime
            values = json.loads(text)
            values["last"] = [Issued(**entry) for entry in values["last"]]
            found[rank] = written, RankState(**values)
        except (OSError, ValueError, TypeError, KeyError):
            continue
    newest = max((written for written, _ in found.values()), default=0.0)
    return {rank: _aged(state, newest - written, silent_after_s) for rank, (written, state) in found.items()}


def _aged(state: RankState, age: float, silent_after_s: float) -> RankState:
    # A rank that told it hangs, or why it ended, has spoken its last word.
    spoken = state.hung or state.ended
    return replace(state, silent_s=age if age > silent_after_s and not spoken else 0.0)


def peers(states: Mapping[int, RankState], rank: int, group: str) -> list[int]:
    """The ranks that share ``group`` with ``rank``: as it was told, otherwise all that issued anything over a group of that name."""
    return states[rank].members.get(group) or [other for other, state in states.items() if group in state.counts]


def waits_for(states: Mapping[int, RankState], rank: int) -> set[int]:
    """Members of the group of a rank's last collective that haven't come to it."""
    if not states[rank].last:
        return set()
    last = states[rank].last[-1]
    return {other for other in peers(states, rank, last.group)
            if other != rank and (other not in states or states[other].counts.get(last.group, 0) < last.count)}


def culprits(states: Mapping[int, RankState], world: int) -> list[int]:
    """The ranks that others wait for and that wait for nobody who is there; all that are waited for, where they wait in a circle."""
    waiting = {rank: waits_for(states, rank) for rank in states}
    late = set().union(*waiting.values()) if waiting else set()
    late |= {rank for rank, state in states.items() if state.silent_s or state.ended} | (set(range(world)) - states.keys())
    return sorted(rank for rank in late if not waiting.get(rank)) or sorted(late)


def disagreement(states: Mapping[int, RankState]) -> str:
    """The first collective that two peers issued under the same number but not as the same one; empty where there is none known."""
    for rank, state in sorted(states.items()):
        mine = {(entry.group, entry.count): entry for entry in state.last}
        for other in sorted(states):
            theirs = {(entry.group, entry.count): entry for entry in states[other].last} if other > rank else {}
            for key in sorted(mine.keys() & theirs.keys(), key=lambda key: mine[key].at):
                a, b = mine[key], theirs[key]
                if (a.kind, a.role) != (b.kind, b.role) and other in peers(states, rank, a.group):
                    return f"rank {rank} issued {a} where rank {other} issued {b}: they ran different code"
    return ""


def verdict(states: Mapping[int, RankState], world: int) -> str:
    """One line: who is behind, and how that shows."""
    if odd := disagreement(states):
        return odd
    late = culprits(states, world)
    if not late:
        last = states[min(states)].last if states else []
        where = f"in {last[-1]}" if last else "before any collective"
        return f"no rank is behind: all are {where}; a device or the network is stuck, not one rank's program"
    rank = late[0]
    what = "is" if len(late) == 1 else f"and {len(late) - 1} more (ranks {_ranges(late)}) are"
    return f"rank {rank} {what} behind: {_how(states, rank)}"


def _how(states: Mapping[int, RankState], rank: int) -> str:
    if rank not in states:
        return "it never wrote a word"
    state = states[rank]
    last = f"its last collective was {state.last[-1]} in step {state.last[-1].step}" if state.last else "it issued no collective"
    if state.ended:
        return f"it ended in step {state.step}: {state.ended}"
    if state.silent_s:
        return f"silent for {state.silent_s:.0f} s (stopped, killed or cut off); when last heard of, {last}"
    return f"paused for {state.paused}, {last}" if state.paused else last


def table(states: Mapping[int, RankState], world: int, now: float) -> Iterable[str]:
    """A line a rank: its step, its last collective and whom it waits for."""
    for rank in range(world):
        state = states.get(rank)
        if state is None:
            yield f"rank {rank}: nothing written"
            continue
        last = f"{state.last[-1]}, {now - state.last[-1].at:.1f} s ago" if state.last else "no collective"
        waiting = sorted(waits_for(states, rank))
        notes = [f"waits for {'rank' if len(waiting) == 1 else 'ranks'} {_ranges(waiting)}"] if waiting else []
        notes += [f"paused: {state.paused}"] if state.paused else []
        notes += [f"silent for {state.silent_s:.1f} s"] if state.silent_s else []
        notes += [f"ended: {state.ended}"] if state.ended else []
        yield f"rank {rank}: step {state.step}, {last}{''.join(f'; {note}' for note in notes)} ({state.host} pid {state.pid})"


def _ranges(ranks: Iterable[int]) -> str:
    """0-3, 7"""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and runs[-1][1] == rank - 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return ", ".join(str(low) if low == high else f"{low}-{high}" for low, high in runs)
