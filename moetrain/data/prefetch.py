"""How is the next step's batch made while this step computes, and how long did the step wait for it?"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

T = TypeVar("T")


class Prefetcher(Generic[T]):
    """``make(step)`` of the next ``depth`` steps, in one background thread (0: none, made when asked for). Final.

    The thread starts with the first `get`, so that a process may fork before it. An error of ``make`` is raised by the `get` of its step.
    """

    def __init__(self, make: Callable[[int], T], depth: int) -> None:
        if depth < 0:
            raise ValueError(f"prefetch is {depth}; it is the number of steps to make ahead, 0 or more")
        self._make = make
        self._depth = depth
        self._thread: ThreadPoolExecutor | None = None
        self._ahead: dict[int, Future[T]] = {}
        self.wait_s = 0.0

    def get(self, step: int) -> T:
        """What ``make(step)`` gave. `wait_s` is then the time this call blocked, in seconds."""
        start = time.perf_counter()
        if not self._depth:
            made = self._make(step)
        else:
            future = self._ahead.pop(step, None) or self._submit(step)
            self._forget(keep=range(step + 1, step + 1 + self._depth))
            for later in range(step + 1, step + 1 + self._depth):
                if later not in self._ahead:
                    self._ahead[later] = self._submit(later)
            made = future.result()
        self.wait_s = time.perf_counter() - start
        return made

    def clear(self) -> None:
        """Forget what was made ahead."""
        self._forget(keep=range(0))

    def close(self) -> None:
        """Forget what was made ahead and end the thread; a later `get` starts another."""
        self.clear()
        if self._thread is not None:
            self._thread.shutdown(wait=True)
            self._thread = None

    def _submit(self, step: int) -> Future[T]:
        if self._thread is None:
            self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="batches")
        return self._thread.submit(self._make, step)

    def _forget(self, keep: range) -> None:
        for step in [s for s in self._ahead if s not in keep]:
            self._ahead.pop(step).cancel()
