"""Which implementation of the expert computation runs, and what does each offer?

A backend is seven functions of one meaning, listed in `Backend`; `backend(name, device, dtype)` gives them. Triton is imported only when its
backend is asked for, so a machine without it trains with the other two.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Backend:
    """The functions that an expert layer is made of. T tokens, R rows (token copies), E experts, k choices a token, d hidden, f expert width.

    grouped_gemm(x [R,K], w [E,N,K], offsets int32 [E]) -> [R,N]: row r of expert e times w[e]^T; expert e owns rows
        offsets[e-1]..offsets[e]; rows past offsets[-1] come out as zero, whatever they held.
    permute(tokens [T,d], source int [R], positions int [T,k] | None) -> [R,d]: row r is token source[r], zero where source[r] is -1.
        positions, the inverse (the rows of each token, -1 = none), lets the backward read instead of scatter.
    unpermute(rows [R,d], positions int [T,k], weights [T,k]) -> [T,d]: each token's rows, weighted and summed; -1 adds nothing.
    swiglu(x [R,2f], weight [R] | None) -> [R,f]: silu(first half) * second half * weight.
    route(logits [T,E], top_k, bias, *, score, num_groups, top_k_groups, normalize, scale) -> weights [T,k], experts int32 [T,k], counts int32 [E].
    rms_norm(x [...,d], weight [d], eps) -> [...,d].
    """

    name: str
    grouped_gemm: Callable[..., torch.Tensor]
    permute: Callable[..., torch.Tensor]
    unpermute: Callable[..., torch.Tensor]
    swiglu: Callable[..., torch.Tensor]
    route: Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor]]
    rms_norm: Callable[..., torch.Tensor]


def _triton() -> Backend:
    from . import grouped_gemm, permute, rms_norm, swiglu, topk

    return Backend("triton", grouped_gemm.grouped_gemm, permute.permute, permute.unpermute, swiglu.swiglu, topk.route, rms_norm.rms_norm)


def _grouped_mm() -> Backend:
    from . import grouped_mm, reference

    return Backend("grouped_mm", grouped_mm.grouped_gemm, reference.permute, reference.unpermute, reference.swiglu, reference.route, reference.rms_norm)


def _reference() -> Backend:
    from . import reference as plain

    return Backend("reference", plain.grouped_gemm, plain.permute, plain.unpermute, plain.swiglu, plain.route, plain.rms_norm)


BACKENDS: dict[str, Callable[[], Backend]] = {"triton": _triton, "grouped_mm": _grouped_mm, "reference": _reference}


def choose(device: torch.device | str, dtype: torch.dtype) -> str:
    """The backend that `auto` stands for: triton on CUDA, torch's grouped_mm elsewhere, plain torch in float64."""
    if dtype == torch.float64:
        return "reference"
    return "triton" if torch.device(device).type == "cuda" else "grouped_mm"


def backend(name: str = "auto", device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32) -> Backend:
    """The backend called ``name``; `auto` picks by ``device`` and ``dtype``. ValueError: no such backend, or one that can't run there."""
    chosen = choose(device, dtype) if name == "auto" else name
    if chosen not in BACKENDS:
        near = difflib.get_close_matches(chosen, BACKENDS, n=1)
        raise ValueError(f"kernel backend {chosen!r}: legal are auto, {', '.join(BACKENDS)}" + (f"; did you mean {near[0]}?" if near else ""))
    if dtype == torch.float64 and chosen == "triton":
        raise ValueError("kernel backend triton: no float64 there; legal are reference, grouped_mm")
    if chosen == "triton" and torch.device(device).type != "cuda" and not _interpreted():
        raise ValueError(f"kernel backend triton: needs a CUDA device, this run is on {device}; legal here are grouped_mm, reference")
    return BACKENDS[chosen]()


def _interpreted() -> bool:
    """Whether Triton's interpreter runs the kernels, as tests have it do."""
    from . import runtime

    return runtime.INTERPRET
