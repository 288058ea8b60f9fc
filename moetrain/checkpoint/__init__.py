"""How does a run survive its end? (Checkpoints: written whole or not at all, read back under any layout, verified by content.)

    checkpointer = Checkpointer("run/checkpoints", keep=3)
    restored = checkpointer.load("auto", parts, optimizer, present=extra)      # None: nothing there yet
    checkpointer.save(step, parts, optimizer, extra)                           # in the background
    checkpointer.wait()                                                        # before the process ends
"""

from moetrain.checkpoint.checkpointer import Checkpointer
from moetrain.checkpoint.errors import CheckpointError, Damaged
from moetrain.checkpoint.listing import describe, inspect
from moetrain.checkpoint.load import Checks, Restored
from moetrain.checkpoint.save import Saved

__all__ = ["CheckpointError", "Checkpointer", "Checks", "Damaged", "Restored", "Saved", "describe", "inspect"]
