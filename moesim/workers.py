"""How do worker processes leave Ctrl-C to their parent and end when it dies?"""

from __future__ import annotations

import os
import signal
import threading
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing.context import BaseContext

CHECK_SECONDS = 0.5


def worker_pool(workers: int, context: BaseContext | None = None) -> ProcessPoolExecutor:
    """A pool whose workers ignore SIGINT (each would print a traceback) and exit soon after a killed parent, which can't tell them."""
    return ProcessPoolExecutor(workers, mp_context=context, initializer=_serve, initargs=(os.getpid(),))


def _serve(parent: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_watch, args=(parent,), daemon=True).start()


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(CHECK_SECONDS)
    os._exit(1)
