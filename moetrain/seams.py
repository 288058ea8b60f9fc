"""Where does the work of each role begin, forwards and backwards? (Seams in the model, of which a recorder of spans hears.)

One role's work lasts until the next one's begins, so a seam needs no end: the recorder (observe/trace.py) closes one span of the compute
stream as it opens the next. Backward runs in the reverse order of forward, so a role's backward begins when the gradient of its output is
there. Roles are those of the planner's blocks. Off, a seam costs one attribute test.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

FORWARD, BACKWARD, AGAIN = "F", "B", "R"
_OFF = nullcontext()


def seam(log: Any, role: str, fn: Callable[..., Any], *inputs: Any) -> Any:
    """``fn(*inputs)`` as the work of ``role``. ``log``: a CollectiveLog, which knows the recorder."""
    spans = log.spans
    if spans is None or not spans.on or torch.compiler.is_compiling():
        return fn(*inputs)
    spans.turn(role)
    return mark(spans, role, fn(*inputs))


def begin(log: Any, role: str, phase: str | None = None) -> None:
    """What follows is the work of ``role``, as far as the host can tell; no backward is watched. ``phase``: B where a forward computes a
    gradient."""
    spans = log.spans
    if spans is not None and spans.on and not torch.compiler.is_compiling():
        spans.turn(role, phase)


def mark(spans: Any, role: str, output: Any) -> Any:
    """``output`` (a tensor, or a tuple with tensors), watched: when its gradient is there the role's backward begins."""
    layer = spans.layer

    def arrived(_: torch.Tensor) -> None:
        spans.turn(role, BACKWARD, layer)

    for tensor in output if isinstance(output, tuple) else (output,):
        if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
            tensor.register_hook(arrived)
    return output


def residual(log: Any, layer: int, x: torch.Tensor, branch: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """x + branch(x) in layer number ``layer``. The gradients of both uses of ``x`` are added where backward leaves the branch: while spans are recorded a view
    stands there, to be told when that is."""
    spans = log.spans
    if spans is None or not spans.on:
        return x + branch(x)
    spans.layer = layer
    return seam(log, "residual", torch.add, x, branch(mark(spans, "residual", x.view_as(x))))


def action(log: Any, stage: int, letter: str, microbatch: int) -> AbstractContextManager:
    """Around one action of the schedule."""
    spans = log.spans
    return spans.action(stage, letter, microbatch) if spans is not None and spans.on else _OFF


@contextmanager
def again(log: Any) -> Iterator[None]:
    """Around work that backward does again: what it interrupts goes on afterwards."""
    spans = log.spans
    if spans is None or not spans.on:
        yield
        return
    before = spans.interrupt(AGAIN)
    try:
        yield
    finally:
        spans.go_on(before)
