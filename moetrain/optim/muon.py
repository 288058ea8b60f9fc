"""How does Muon step over matrices that are cut across ranks?

Momentum, then the nearest semi-orthogonal matrix, found by a Newton-Schulz iteration, in place of the momentum itself
(https://kellerjordan.github.io/posts/muon/). The iteration needs whole matrices: ranks exchange strips for whole matrices, each works
on its share of them, and the strips of the results go back (see matrices). A matrix is the last two dimensions of a parameter, so a
stack of experts (E, 2, f, d) is 2E of them. Fused projections (qkv, MLA's down and up) count as the single matrices they are stored
as: their parts are orthogonalised together, not each by itself. What is no hidden matrix (embedding, head, router, norms, biases)
steps by AdamW.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

from moetrain.optim.adamw import adamw_defaults, adamw_group
from moetrain.optim.base import FP32, ShardedOptimizer, Storage
from moetrain.optim.matrices import Cut, cuts_of, on_whole
from moetrain.optim.rounding import store
from moetrain.optim.shards import local, local_grad, shard_number

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of x -> ax + bx^3 + cx^5: steepest at zero among those that keep singular values near 1 (https://kellerjordan.github.io/posts/muon/)."""
STEPS = 5
BATCH_ELEMENTS = 1 << 26
"""Elements of whole matrices that a rank orthogonalises at a time (at least one matrix): about 3 copies of them live at once."""

SCALES: dict[str, Callable[[int, int], float]] = {
    "match_rms": lambda rows, columns: 0.2 * math.sqrt(max(rows, columns)),
    "spectral": lambda rows, columns: math.sqrt(max(1.0, rows / columns)),
}
"""By what an update is multiplied. match_rms gives it the root mean square of an AdamW update, so both share one learning rate
(https://arxiv.org/abs/2502.16982); spectral is the original."""


def orthogonalise(matrices: Tensor, steps: int = STEPS, coefficients: tuple[float, float, float] = COEFFICIENTS,
                  eps: float = 1e-7) -> Tensor:
    """U S' V^T for each U S V^T of [B, rows, columns], with the values S' within about 0.3 of 1 (those of S far below its largest
    lag behind), in the dtype given. A matrix of zeros stays zero."""
    a, b, c = coefficients
    rows, columns = matrices.shape[-2:]
    x = matrices.mT if rows > columns else matrices
    # The Frobenius norm bounds the spectral norm, so every singular value starts in [0, 1].
    norms = torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True, dtype=torch.promote_types(x.dtype, torch.float32))
    x = x / norms.add_(eps).to(x.dtype)
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if rows > columns else x


@final
class Muon(ShardedOptimizer):
    """Muon for groups with "matrices": True (parameters of at least 2 dimensions), AdamW for the others; Storage says how all moments
    are kept. State of a matrix parameter: momentum (cut as it is), step; of the others as AdamW's.

    ``momentum`` of a running mean of gradients, used ahead by Nesterov's rule unless ``nesterov`` is False. ``scale`` match_rms |
    spectral, by the sizes of the whole matrix. ``dtype`` of the iteration: bfloat16 on a GPU, else float32. A step is a collective:
    every rank of a mesh must have gradients of the same parameters. Ranks that hold the same shard do the same work. ValueError for
    settings out of range and for a vector among matrices.
    """

    def __init__(self, groups: Iterable[Mapping[str, Any]], lr: float, *, momentum: float = 0.95, nesterov: bool = True,
                 scale: str = "match_rms", betas: tuple[float, float] = (0.9, 0.95), eps: float = 1e-8, weight_decay: float = 0.1,
                 storage: Storage = FP32, dtype: torch.dtype | None = None) -> None:
        if scale not in SCALES:
            raise ValueError(f"optimizer scale {scale!r}: legal are {', '.join(SCALES)}")
        if not 0 <= momentum < 1:
            raise ValueError(f"optimizer momentum {momentum}: must be in [0, 1)")
        storage.check_beta("momentum", momentum)
        self.nesterov, self.scale, self.dtype = nesterov, scale, dtype
        super().__init__(groups, {**adamw_defaults(lr, betas, eps, weight_decay, storage), "momentum": momentum, "matrices": False}, storage)

    def _moments_of(self, group: dict[str, Any]) -> tuple[str, ...]:
        vectors = [self.names[p] for p in group["params"] if p.ndim < 2] if group["matrices"] else []
        if vectors:
            raise ValueError(f"{vectors[0]} is no matrix: Muon takes parameters of 2 dimensions or more, AdamW the others")
        return ("momentum",) if group["matrices"] else ("exp_avg", "exp_avg_sq")

    def _update(self, group: dict[str, Any], parameters: list[Tensor]) -> None:
        if not group["matrices"]:
            adamw_group(self, group, parameters)
            return
        for kind, some in _by_kind(parameters).items():
            for batch in _batches(some, kind):
                self._matrix_step(batch, kind, group)

    def _matrix_step(self, parameters: list[Tensor], kind: Kind, group: dict[str, Any]) -> None:
        strips = [self._direction(parameter, group["momentum"]) for parameter in parameters]
        stacked = torch.cat(strips)
        dtype = self.dtype or (torch.bfloat16 if stacked.is_cuda else stacked.dtype)
        updates = on_whole(stacked.to(dtype), kind.cuts, lambda whole: orthogonalise(whole) if whole.numel() else whole)
        step = group["lr"] * SCALES[self.scale](kind.rows, kind.columns)
        for parameter, update in zip(parameters, updates.split([strip.shape[0] for strip in strips]), strict=True):
            mine = local(parameter)
            mine.mul_(1 - group["lr"] * group["weight_decay"]).add_(update.reshape(mine.shape), alpha=-step)

    def _direction(self, parameter: Tensor, momentum: float) -> Tensor:
        """What to orthogonalise of a parameter, this rank's strips [matrices, rows, columns]; moves the momentum on."""
        state = self.state[parameter]
        kept = local(state["momentum"])
        wide = torch.promote_types(kept.dtype, torch.float32)
        grad = local_grad(parameter).to(wide)
        mean = kept.to(wide).lerp_(grad, 1 - momentum)
        store(kept, mean, self.storage.generator(kept.device, "momentum", int(state["step"]), self.names[parameter], shard_number(parameter)))
        ahead = grad.lerp(mean, momentum) if self.nesterov else mean
        return ahead.reshape(_count(ahead), *ahead.shape[-2:])


class Kind(NamedTuple):
    """What matrices must share to be worked on together: their whole size, and how they are cut."""

    rows: int
    columns: int
    cuts: tuple[Cut, ...]
    device: torch.device
    dtype: torch.dtype


def _by_kind(parameters: list[Tensor]) -> dict[Kind, list[Tensor]]:
    """In the order of the parameters, so that every rank comes to the same list."""
    kinds: dict[Kind, list[Tensor]] = {}
    for parameter in parameters:
        kind = Kind(*parameter.shape[-2:], cuts_of(parameter), parameter.device, parameter.dtype)
        kinds.setdefault(kind, []).append(parameter)
    return kinds


def _batches(parameters: list[Tensor], kind: Kind) -> Iterator[list[Tensor]]:
    """Lists of parameters with about BATCH_ELEMENTS a rank; those of which all ranks that share the cuts hold no matrix are left out."""
    ways = math.prod(cut.ways for cut in kind.cuts)
    most = max(1, BATCH_ELEMENTS * ways // max(1, kind.rows * kind.columns))
    batch: list[Tensor] = []
    held = 0
    for parameter in parameters:
        count = _count(local(parameter))
        if batch and held + count > most:
            yield batch
            batch, held = [], 0
        if count:
            batch.append(parameter)
            held += count
    if batch:
        yield batch


def _count(stack: Tensor) -> int:
    return math.prod(stack.shape[:-2])
