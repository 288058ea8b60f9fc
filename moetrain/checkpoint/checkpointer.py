"""When is a checkpoint written beside training, and how does its failure come to light? (One save in flight, in a thread of its own.)"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn

from moetrain.checkpoint import folders
from moetrain.checkpoint.boxes import State
from moetrain.checkpoint.errors import CheckpointError, Damaged, one_line, ranks_of
from moetrain.checkpoint.load import BOTH, Checks, Restored, restore
from moetrain.checkpoint.save import Keeping, Saved, Staging, announce, check_extra, write


@dataclass
class Flight:
    """One save in the background: its thread, and how it ended."""

    step: int
    began: float
    thread: threading.Thread
    saved: Saved | None = None
    failed: CheckpointError | None = None


class Checkpointer:
    """Saves to and loads from ``folder``. Every rank of the run makes one, at the same place (it makes a gloo group of its own), and every
    rank calls save and load.

    ``keep`` newest checkpoints stay (None: all), and those whose step is a multiple of ``keep_every``. ``asynchronous``: save copies the state to
    host memory, in the state's size, and returns; otherwise it writes shard by shard from where the state lies and returns when that is done.
    """

    def __init__(self, folder: str | os.PathLike[str], keep: int | None = None, asynchronous: bool = True, group: dist.ProcessGroup | None = None,
                 keep_every: int | None = None, log: Callable[[str], None] | None = None) -> None:
        for name, value in (("keep", keep), ("keep_every", keep_every)):
            if value is not None and value < 1:
                raise CheckpointError(f"{name} is {value}; a whole number of at least 1, or none")
        self.folder, self.asynchronous = Path(folder), asynchronous
        self.keeping = Keeping(keep, keep_every)
        self.ranks = ranks_of(group)
        self.log = log or logging.getLogger("moetrain.checkpoint").warning
        self.last: Saved | None = None
        self._staging = Staging({})
        self._flight: Flight | None = None
        self._failure: CheckpointError | None = None
        self._cleaned = False

    def save(self, step: int, parts: Sequence[nn.Module], optimizer: Any = None, extra: dict[str, Any] | None = None) -> float:
        """Writes a checkpoint; the seconds for which training was held up. Collective.

        CheckpointError when a synchronous save fails or ``extra`` is no JSON; a save in the background that fails is told by poll, wait or
        a line of log at the next save.
        """
        began = time.monotonic()
        extra = dict(extra or {})
        check_extra(extra)
        self._land(waiting_for=step)
        self._clean()
        if failure := self.poll():
            self.log(failure)
        boxes = State(parts, optimizer).boxes
        if not self.asynchronous:
            self.last = write(self.folder, step, boxes, {}, extra, self.ranks, self.keeping)
            announce(self.last, self.log)
            return time.monotonic() - began
        staged, digests = self._staging.copy(boxes)
        thread = threading.Thread(target=self._write, args=(step, staged, digests, extra), name=f"checkpoint-{step}", daemon=True)
        self._flight = Flight(step, time.monotonic(), thread)
        thread.start()
        return time.monotonic() - began

    def _clean(self) -> None:
        """Once, by a run that resumes from here or saves here; one that only reads must not touch what another is writing."""
        if not self._cleaned:
            self._cleaned = True
            self.ranks.first(lambda: folders.clean(self.folder, self.log))

    def _write(self, step: int, staged, digests, extra) -> None:
        flight = self._flight
        try:
            flight.saved = write(self.folder, step, staged, digests, extra, self.ranks, self.keeping)
        except CheckpointError as error:
            flight.failed = error
        except BaseException as error:  # noqa: BLE001  (a thread's exception would be printed and forgotten)
            flight.failed = CheckpointError(f"checkpoint of step {step} was not written: {one_line(error)}")

    def _land(self, waiting_for: int | None = None) -> None:
        """Waits for the save in flight, if any, and takes note of how it ended."""
        flight = self._flight
        if flight is None:
            return
        if waiting_for is not None and flight.thread.is_alive():
            self.log(f"checkpoint of step {waiting_for} waits for that of step {flight.step}, {time.monotonic() - flight.began:.1f} s in the writing: "
                     "save less often, or write to a faster disk")
        flight.thread.join()
        self._flight = None
        if flight.saved is not None:
            self.last = flight.saved
            announce(flight.saved, self.log)
        self._failure = flight.failed or self._failure

    def poll(self) -> str | None:
        """Why the last save in the background failed, once; None otherwise. Costs nothing: call it every step."""
        if self._flight is not None and not self._flight.thread.is_alive():
            self._land()
        failure, self._failure = self._failure, None
        return str(failure) if failure else None

    def wait(self) -> None:
        """Returns when nothing is in flight. CheckpointError when the last save failed and nobody has heard of it yet."""
        self._land()
        if failure := self.poll():
            raise CheckpointError(failure)

    def leave(self, seconds: float) -> None:
        """At the end of a run that failed: gives a save in flight some time to end well; what else failed is said elsewhere."""
        if self._flight is not None:
            self._flight.thread.join(seconds)

    def latest(self) -> Path | None:
        """The newest checkpoint that is whole by its state.json and its files' sizes; None where there is none."""
        return next((path for path in folders.newest_first(self.folder) if folders.whole(path)), None)

    def load(self, where: str | os.PathLike[str], parts: Sequence[nn.Module], optimizer: Any = None, present: dict[str, Any] | None = None,
             checks: Checks = BOTH) -> Restored | None:
        """Fills ``parts`` and ``optimizer`` (None: leaves it out) in place from a checkpoint of any layout. Collective.

        ``where``: "auto" for the newest in the folder that verifies (None where there is none at all), the path of one, or a folder of them.
        ``present``: this run's extra; its "identity" must equal the saved one's, changes of "config", "layout", "world_size" and "torch" are
        noted. CheckpointError in one line: Damaged for bad files, otherwise for a model, data or optimizer that isn't the saved one's.
        After an error parts and optimizer may be half filled.
        """
        self._land()
        if str(where) == "auto":
            self._clean()
        root = self.folder if str(where) == "auto" else Path(where)
        candidates = self.ranks.first(lambda: self._candidates(root))
        if not candidates:
            if str(where) == "auto":
                return None
            candidates = [root]
        skipped: list[str] = []
        for path in candidates:
            try:
                restored = restore(path, parts, optimizer, present, self.ranks, checks)
            except Damaged as error:
                if len(candidates) == 1 and str(where) != "auto":
                    raise
                skipped.append(f"skipped {path.name}: {error}")
                continue
            return Restored(restored.path, restored.step, restored.extra, (*skipped, *restored.notes))
        raise Damaged(f"none of the {len(candidates)} checkpoints in {root} can be used; {'; '.join(skipped)}")

    @staticmethod
    def _candidates(root: Path) -> list[Path]:
        return [root] if folders.PUBLISHED.fullmatch(root.name) else list(folders.newest_first(root))
