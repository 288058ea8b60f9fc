"""Which modules' calls begin a role, and when does FSDP2 work around them? (Hooks that do nothing outside the recorded steps.)

A module of ROLES is a seam as those of moetrain/seams.py are: its role begins when it is called, and in backward when the gradient of its
output is there. Around the modules that FSDP2 wraps the compute stream casts weights and copies them to and from the buffers that travel:
that time has spans of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from moetrain import seams
from moetrain.observe.trace import SpanRecorder

ROLES = {
    "embedding.embed": "embedding", "norm": "norm", "norm1": "norm", "norm2": "norm", "norm_branch": "norm",
    "attention.qkv": "qkv", "attention.q_norm": "qk_norm", "attention.k_norm": "qk_norm", "attention.out": "attn_out",
    "attention.down": "mla_down", "attention.q_latent_norm": "qk_norm", "attention.kv_latent_norm": "qk_norm",
    "attention.up_q": "mla_up", "attention.up_kv": "mla_up",
    "mlp.gate": "mlp_up", "mlp.up": "mlp_up", "mlp.down": "mlp_down", "moe.router": "router",
    "shared.gate": "shared_up", "shared.up": "shared_up", "shared.down": "shared_down", "moe.shared_gate": "shared_down",
}
"""The end of a module's name in a stage -> the role of its work."""
GATHER, REDUCE = "param_gather+param_copy_out", "grad_copy_in+grad_reduce"
"""What the compute stream does for FSDP2, before and after the collectives."""


def watch(parts: Iterable[nn.Module], spans: SpanRecorder) -> None:
    """Records the parts' modules from now on, in the steps that ``spans`` is on."""
    for part in parts:
        for name, module in part.named_modules():
            words = name.split(".")
            role = ROLES.get(".".join(words[-2:])) or ROLES.get(words[-1])
            layer = next((int(word) for word in words if word.isdecimal()), -1)
            # The order matters: FSDP2's hooks run between those put before it and those behind.
            if isinstance(module, FSDPModule):
                _watch_sharded(module, layer, spans)
            if role is not None:
                _watch_role(module, role, layer, spans)


def _watch_role(module: nn.Module, role: str, layer: int, spans: SpanRecorder) -> None:
    def before(module: nn.Module, inputs: tuple[Any, ...]) -> None:
        if spans.on and not torch.compiler.is_compiling():
            spans.turn(role, layer=layer)

    def after(module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        if spans.on and not torch.compiler.is_compiling():
            seams.mark(spans, role, output)

    module.register_forward_pre_hook(before)
    module.register_forward_hook(after)


def _watch_sharded(module: nn.Module, layer: int, spans: SpanRecorder) -> None:
    held: list[Any] = []

    def reduces(_: Any) -> None:
        spans.turn(REDUCE, "B", layer)

    def wakes(_: Any) -> None:
        held.append(spans.interrupt(spans.phase))
        spans.turn(GATHER, "B", layer)

    def woken(_: Any) -> None:
        """The role that the module's last seam began goes on."""
        if held:
            spans.go_on(held.pop())

    def hook(output: Any, heard: Callable[[Any], None]) -> None:
        for tensor in output if isinstance(output, tuple) else (output,):
            if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                tensor.register_hook(heard)

    def gathers(module: nn.Module, inputs: tuple[Any, ...]) -> None:
        if spans.on:
            spans.turn(GATHER, layer=layer)

    def gathered(module: nn.Module, inputs: tuple[Any, ...]) -> None:
        if not spans.on:
            return
        spans.turn(None)
        for x in inputs:
            if isinstance(x, torch.Tensor) and "PostBackward" in type(x.grad_fn).__name__:
                x.grad_fn.register_prehook(reduces)

    def returned(heard: Callable[[Any], None]) -> Callable[..., None]:
        return lambda module, inputs, output: hook(output, heard) if spans.on else None

    module.register_forward_pre_hook(gathers, prepend=True)
    module.register_forward_pre_hook(gathered)
    module.register_forward_hook(returned(wakes), prepend=True)
    module.register_forward_hook(returned(woken))
