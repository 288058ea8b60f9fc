"""What is the loss of a microbatch? (Cross entropy over a vocabulary that is never materialised whole, with a z-loss.)

Logits are made for a chunk of tokens at a time; the chunk's gradients are taken at once, so logits live for one chunk only and the
head's product is not computed twice. With the vocabulary cut over tp, each rank brings the maximum, the sum of exponentials and the
target's logit of its part: two small all-reduces a chunk.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.autograd import Function

from moetrain.collectives import Communicator, all_reduce_
from moetrain.seams import BACKWARD, begin, seam

IGNORED = -100


def _exponentials_(logits: torch.Tensor, labels: torch.Tensor, tp: Communicator) -> tuple[torch.Tensor, ...]:
    """Turns float32 logits [n, V/tp] into exp(logits - peak) in place: they are the largest tensor of a step. Returns (logsumexp [n],
    sum of the exponentials [n], target logit [n], the target's local index [n], whether it is held here [n])."""
    own = labels - tp.rank * logits.shape[-1]
    held = (own >= 0) & (own < logits.shape[-1])
    own = own.where(held, torch.zeros_like(own))
    target = logits.gather(-1, own.unsqueeze(-1)).squeeze(-1) * held
    peak = all_reduce_(logits.amax(-1), tp, "tp_loss", dist.ReduceOp.MAX)
    logits.sub_(peak.unsqueeze(-1)).exp_()
    total, target = all_reduce_(torch.stack([logits.sum(-1), target]), tp, "tp_loss")
    return peak + total.log(), total, target, own, held


class _ChunkedCrossEntropy(Function):
    @staticmethod
    def forward(ctx, hidden, weight, labels, scale, z_weight, chunk, tp):
        wide = torch.promote_types(hidden.dtype, torch.float32)
        total, want = hidden.new_zeros(2, dtype=wide), ctx.needs_input_grad[0] or ctx.needs_input_grad[1]
        grad_hidden = torch.empty_like(hidden) if want else None
        # Sums over chunks are kept in float32 even where weights are bf16.
        grad_weight = torch.zeros_like(weight, dtype=wide) if want else None
        for start in range(0, hidden.shape[0], chunk):
            rows = slice(start, start + chunk)
            h, y = hidden[rows], labels[rows]
            begin(tp.log, "head")
            logits = h @ weight.t()
            begin(tp.log, "loss")
            logits = logits.to(wide)
            valid = y != IGNORED
            lse, mass, target, own, held = _exponentials_(logits, y, tp)
            total += torch.stack([((lse - target) * valid).sum(), (lse.square() * valid).sum() * z_weight])
            if want:
                begin(tp.log, "loss", BACKWARD)
                weight_of_row = valid * scale
                grad = logits.mul_(((1 + 2 * z_weight * lse) * weight_of_row / mass).unsqueeze(-1))
                grad[torch.arange(len(y), device=y.device), own] -= held * weight_of_row
                grad = grad.to(hidden.dtype)
                logits = None  # the largest tensors of a step: none may live into the next chunk
                begin(tp.log, "head", BACKWARD)
                grad_hidden[rows] = grad @ weight
                grad_weight = grad_weight.addmm_(grad.t(), h) if wide == hidden.dtype else grad_weight.add_(grad.t() @ h)
            logits = grad = None
        ctx.save_for_backward(grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype))
        return total * scale

    @staticmethod
    def backward(ctx, grad):
        grad_hidden, grad_weight = ctx.saved_tensors
        # Both parts of the loss carry one weight each: the step's loss is their sum.
        factor = grad[0]
        if factor.device.type != "cpu" or factor != 1:
            grad_hidden, grad_weight = grad_hidden * factor.to(grad_hidden.dtype), grad_weight * factor.to(grad_weight.dtype)
        return grad_hidden, grad_weight, None, None, None, None, None


def chunked_cross_entropy(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, scale: float, z_weight: float, chunk: int,
                          tp: Communicator) -> torch.Tensor:
    """[cross entropy, z-loss] of hidden [n, d] against labels [n] (IGNORED: no loss) under head weight [V/tp, d]: sums over tokens
    times ``scale``, z_weight * logsumexp^2 included. Their gradients assume that the two are added: use ``out.sum()``."""
    return seam(tp.log, "head", _ChunkedCrossEntropy.apply, hidden, weight, labels, scale, z_weight, chunk, tp)
