"""When did each part of the model work, forwards and backwards? (Hooks on modules that do nothing outside the recorded steps.)

A part's backward begins when the gradient of its output arrives and ends when that of its input is there. Spans inside spans are
allowed: at any moment the one that began last owns the stream (trace.py).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from moetrain.observe.trace import SpanRecorder

ROLES = {"embedding": "embedding", "attention": "attention", "mlp": "mlp", "moe": "moe", "router": "router", "experts": "experts", "shared": "shared", "norm1": "norm",
         "norm2": "norm", "norm_branch": "norm", "head": "head"}
"""The last word of a module's name in a stage -> the kind of its spans."""


def watch(parts: Iterable[nn.Module], spans: SpanRecorder) -> None:
    """Records the parts' modules from now on, in the steps that ``spans`` is on."""
    for part in parts:
        for name, module in part.named_modules():
            kind = ROLES.get(name.rpartition(".")[2])
            if kind is not None:
                layer = next((int(word) for word in name.split(".") if word.isdecimal()), -1)
                _Hooks(spans, kind, layer).attach(module)


class _Hooks:
    """Those of one module. Its forwards don't nest, so one open span at a time is enough; backwards find theirs by closure."""

    def __init__(self, spans: SpanRecorder, kind: str, layer: int):
        self.spans, self.kind, self.extra = spans, kind, {"layer": layer} if layer >= 0 else {}
        self.open: Any = None

    def attach(self, module: nn.Module) -> None:
        module.register_forward_pre_hook(self.before)
        module.register_forward_hook(self.after)

    def before(self, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        if self.spans.on:
            self.open = self.spans.start(self._name("forward"), self.kind, **self.extra)

    def after(self, module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        if not self.spans.on:
            return
        self.spans.stop(self.open)
        self.open = None
        first = output[0] if isinstance(output, tuple) else output
        source = next((x for x in inputs if isinstance(x, torch.Tensor) and x.requires_grad), None)
        if source is not None and isinstance(first, torch.Tensor) and first.requires_grad:
            opened: list[Any] = []
            first.register_hook(lambda _: opened.append(self.spans.start(self._name("backward"), self.kind, **self.extra)))
            source.register_hook(lambda _: self.spans.stop(opened.pop()) if opened else None)

    def _name(self, phase: str) -> str:
        return f"{self.kind} {phase}" + (f" layer {self.extra['layer']}" if self.extra else "")
