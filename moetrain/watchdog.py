"""What happens when a rank hangs? (Every rank says what it was doing, the report names who is behind, and the processes end.)

A thread in each rank watches that collectives and steps go on. What each rank last did lies in small files in the run's folder, which
outlive any process and need no connection. When nothing moved for the limit, every rank writes its collectives and all its Python
stacks beside them and exits with a code of its own, so that the launcher starts the run anew.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import socket
import sys
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Self

import torch.distributed as dist

from moetrain.hang_report import Issued, RankState, file_of, read_states, table, verdict

EXIT_CODE = 70
"""Of a process that its watchdog ended (EX_SOFTWARE of sysexits.h)."""
LOCKED_S = 10.0
"""Beyond twice the limit: how long the interpreter's lock may be held."""
KEPT = 64
"""Collectives each rank remembers."""


class Watchdog:
    """Watches this rank from its construction until ``close``; ``with`` closes it, and tells the other ranks of an exception. Every rank
    makes one; collective where ``attempt`` is left out.

    ``limit_s`` seconds without a ``note`` or a ``step`` (while not paused) end the process with EXIT_CODE, after a report
    FOLDER/ATTEMPT/hang-rank-NNNNN.txt; one rank's alarm is everyone's. ``members``: the ranks of each group this rank is in, by the name under which
    ``note`` hears of it. ``on_hang`` is called with the report's path instead of ending the process (tests). ValueError for a limit that is none.
    """

    def __init__(self, folder: str | os.PathLike[str], limit_s: float, rank: int | None = None, world: int | None = None,
                 members: Mapping[str, Sequence[int]] | None = None, attempt: str | None = None, on_hang: Callable[[Path], None] | None = None) -> None:
        if not limit_s > 0:
            raise ValueError(f"watchdog_s is {limit_s}; a number of seconds above 0 (leave the watchdog out for none)")
        there = dist.is_initialized()
        self.rank = rank if rank is not None else dist.get_rank() if there else 0
        self.world = world if world is not None else dist.get_world_size() if there else 1
        self.limit_s, self.on_hang = float(limit_s), on_hang
        self.members = {name: list(ranks) for name, ranks in (members or {}).items()}
        self.folder = Path(folder) / (attempt or _agreed_attempt())
        self.folder.mkdir(parents=True, exist_ok=True)
        self.write_s = min(30.0, max(1.0, limit_s / 20))
        self._lock = threading.Lock()
        self._last: deque[Issued] = deque(maxlen=KEPT)
        self._counts: dict[str, int] = {}
        self._step, self._moved, self._written = 0, time.monotonic(), 0.0
        self._paused: list[str] = []
        self._ended = ""
        self._closed = threading.Event()
        self._write()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._thread.start()

    def note(self, kind: str, role: str, group: str) -> None:
        """A collective is about to be issued. Costs a microsecond."""
        with self._lock:
            count = self._counts[group] = self._counts.get(group, 0) + 1
            self._last.append(Issued(kind, role, group, count, self._step, time.time()))
            self._moved = time.monotonic()

    def step(self, number: int) -> None:
        """Training step ``number`` begins."""
        self._step, self._moved = number, time.monotonic()

    @contextlib.contextmanager
    def paused(self, reason: str) -> Iterator[None]:
        """Within it this rank may take its time: loading a checkpoint, validation, compilation."""
        self._paused.append(reason)
        try:
            yield
        finally:
            self._moved = time.monotonic()
            self._paused.remove(reason)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        self.close("" if kind is None else f"{kind.__name__}: {' '.join(str(error).split())[:200]}")

    def close(self, ended: str = "") -> None:
        """Stops watching. A run that ended well removes what this rank wrote, the folder too when it is the last; ``ended`` is why one
        did not. Where the alarm was raised this doesn't return: the process ends with EXIT_CODE when its report is written, not with
        the error that a peer's end caused."""
        self._closed.set()
        self._thread.join()
        faulthandler.cancel_dump_traceback_later()
        if ended:
            self._ended = ended
            self._write()
            return
        file_of(self.folder, self.rank).unlink(missing_ok=True)
        self._own("stacks").unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            self.folder.rmdir()

    # --- the thread ----------------------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        tick = min(1.0, self.limit_s / 8)
        # Where a call that keeps the interpreter's lock is what hangs, this thread stands still too. faulthandler's own, which needs no
        # lock, then writes the stacks and ends the process (with code 1).
        with self._own("stacks").open("w") as stacks:
            while not self._closed.wait(tick):
                faulthandler.dump_traceback_later(2 * self.limit_s + LOCKED_S, exit=True, file=stacks)
                idle = 0.0 if self._paused else time.monotonic() - self._moved
                if idle > self.limit_s or self._alarm.exists():
                    self._hang(idle)
                    return
                if time.monotonic() - self._written >= self.write_s:
                    with contextlib.suppress(OSError):
                        self._write()

    @property
    def _alarm(self) -> Path:
        return self.folder / "alarm"

    def _own(self, what: str, rank: int | None = None) -> Path:
        return self.folder / f"{what}-rank-{self.rank if rank is None else rank:05d}.txt"

    def _write(self, hung: bool = False) -> None:
        with self._lock:
            last, counts = list(self._last), dict(self._counts)
        state = RankState(self.rank, self._step, os.getpid(), socket.gethostname(), ", ".join(self._paused), time.monotonic() - self._moved, hung,
                          self._ended, counts, self.members, last)
        path = file_of(self.folder, self.rank)
        temp = path.with_suffix(".tmp")
        temp.write_text(state.dump())
        os.replace(temp, path)
        self._written = time.monotonic()

    def _hang(self, idle: float) -> None:
        report = self._own("hang")
        try:
            self._alarm.touch()
            self._write(hung=True)
            states = self._gather()
            self._report(report, states, idle)
            first = min((rank for rank, state in states.items() if state.hung), default=self.rank)
            print(self._summary(states, report, first), file=sys.stderr, flush=True)
            self._await_reports(states)
        except OSError as error:
            print(f"watchdog: rank {self.rank}: no progress for {idle:.1f} s, and no report: {error}", file=sys.stderr, flush=True)
            faulthandler.dump_traceback(all_threads=True)
        if self.on_hang is not None:
            self.on_hang(report)
            return
        os._exit(EXIT_CODE)

    def _gather(self) -> dict[int, RankState]:
        """What all ranks wrote, once each has told that it hangs or has had time to."""
        deadline = time.monotonic() + min(10.0, max(2.0, self.limit_s / 4))
        while True:
            states = read_states(self.folder, self.world, 2 * self.write_s)
            spoken = [state for state in states.values() if state.hung]
            if len(spoken) == self.world:
                return states
            if time.monotonic() > deadline:
                # Written anew so that the file system's clock tells how old the others' words are.
                self._write(hung=True)
                return read_states(self.folder, self.world, 2 * self.write_s)
            time.sleep(max(0.1, self.world / 500))

    def _await_reports(self, states: Mapping[int, RankState]) -> None:
        """The first process to end breaks the others' connections: all have their reports by then, if they can."""
        deadline = time.monotonic() + 3.0
        paths = [self._own("hang", rank) for rank, state in states.items() if state.hung]
        while not all(path.exists() for path in paths) and time.monotonic() < deadline:
            time.sleep(max(0.05, self.world / 1000))

    def _report(self, path: Path, states: Mapping[int, RankState], idle: float) -> None:
        reason = f"no collective and no step for {idle:.1f} s" if idle > self.limit_s else "another rank raised the alarm"
        lines = [f"rank {self.rank} of {self.world}: {reason}; the limit is {self.limit_s:g} s", "", verdict(states, self.world), "",
                 *table(states, self.world, time.time()), "", f"the last collectives of rank {self.rank}, newest last:",
                 *(f"  step {entry.step}  {entry}  {time.strftime('%H:%M:%S', time.localtime(entry.at))}" for entry in states[self.rank].last), "",
                 f"the Python stacks of rank {self.rank}:", ""]
        temp = path.with_suffix(".tmp")
        with temp.open("w") as file:
            file.write("\n".join(lines))
            file.flush()
            faulthandler.dump_traceback(file=file, all_threads=True)
            os.fsync(file.fileno())
        os.replace(temp, path)

    def _summary(self, states: Mapping[int, RankState], report: Path, first: int) -> str:
        if self.rank != first:
            return f"watchdog: rank {self.rank} ends (code {EXIT_CODE}); its report is {report}"
        shown = list(table(states, self.world, time.time()))
        more = [f"... and {len(shown) - 16} more ranks in {report}"] if len(shown) > 16 else [f"stacks in {report}"]
        return "\n".join([f"watchdog: nothing moved for {self.limit_s:g} s: {verdict(states, self.world)}", *shown[:16], *more])


def _agreed_attempt() -> str:
    """A name that all ranks of this start of the run share, and no other start has."""
    name = [f"{time.strftime('%Y%m%dT%H%M%S')}-{uuid.uuid4().hex[:8]}"]
    if dist.is_initialized():
        dist.broadcast_object_list(name, src=0)
    return name[0]
