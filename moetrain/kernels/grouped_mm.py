"""How does torch's own grouped product serve as a backend on any device, its sharp edges filed off?

torch.nn.functional.grouped_mm wants row strides of whole 16 bytes and leaves rows past the last offset (and, on some devices, the weight
gradient of an expert without rows) as the allocator found them. Both are put right here, without asking the device for the offsets. It has no
float64: the reference stands in.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from . import reference
from .grouped_op import define

ALIGNMENT_BYTES = 16


def _rows(x: Tensor, w: Tensor, offsets: Tensor) -> Tensor:
    """x [R,K] times w [E,N,K]: [R,N], zero past offsets[-1]."""
    num_rows, width = x.shape[0], w.shape[1]
    if num_rows == 0 or x.dtype == torch.float64:
        return reference.grouped_gemm(x, w, offsets)
    x, w = _pad(x, 1), _pad(_pad(w, 1), 2)
    out = F.grouped_mm(x, w.transpose(1, 2), offs=offsets)
    past = torch.arange(num_rows, device=x.device) >= offsets[-1]
    out = reference.cleared(out, past)
    return out if out.shape[1] == width else out[:, :width].contiguous()


def _weight_grad(grad: Tensor, x: Tensor, offsets: Tensor) -> Tensor:
    """grad [R,N]^T times x [R,K] over each expert's rows: [E,N,K], zero for an expert without rows."""
    height, width = grad.shape[1], x.shape[1]
    if x.shape[0] == 0 or x.dtype == torch.float64:
        return reference.weight_grad(grad, x, offsets)
    out = F.grouped_mm(_pad(grad, 1).t(), _pad(x, 1), offs=offsets)
    empty = torch.diff(offsets, prepend=offsets.new_zeros(1)) == 0
    out = reference.cleared(out.flatten(1), empty).view_as(out)
    return out if out.shape[1:] == (height, width) else out[:, :height, :width].contiguous()


def _pad(x: Tensor, dim: int) -> Tensor:
    """x with zeros after dim until it spans whole 16 bytes; rows made contiguous."""
    unit = ALIGNMENT_BYTES // x.element_size()
    missing = -x.shape[dim] % unit
    if missing:
        return F.pad(x, [0, 0] * (x.ndim - 1 - dim) + [0, missing])
    return x if _regular(x) else x.contiguous()


def _regular(x: Tensor) -> bool:
    """Whether the strides are ones grouped_mm takes: one dim of the last two dense, the other in whole 16 bytes."""
    small, large = sorted(x.stride()[-2:])
    return small == 1 and large * x.element_size() % ALIGNMENT_BYTES == 0 and x.data_ptr() % ALIGNMENT_BYTES == 0


grouped_gemm = define("grouped_mm", _rows, _weight_grad)
