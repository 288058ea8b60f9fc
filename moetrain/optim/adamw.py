"""How does AdamW step over sharded parameters, with moments in float32 or bfloat16?

Adam with decoupled weight decay (https://arxiv.org/abs/1711.05101). It works element by element, so a rank updates its shards
and talks to nobody. Float32 moments go through torch's fused kernel; bfloat16 ones are widened, updated in float32, used, and
rounded back, a bounded batch at a time, so that the float32 copies stay small.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

from moetrain.optim.base import FP32, ShardedOptimizer, Storage
from moetrain.optim.rounding import store
from moetrain.optim.shards import local, local_grad, pieces, shard_number

BATCH_ELEMENTS = 1 << 24
"""Elements widened at a time on the bfloat16 path: up to 4 float32 copies of them live at once, 256 MiB."""


class Settings(NamedTuple):
    """One step of one group; ``step`` counts from 1."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    step: int


class Shard(NamedTuple):
    """What a rank holds of a parameter: equally shaped local tensors, and a key that is the same on ranks that hold the same shard."""

    parameter: Tensor
    grad: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    key: tuple[object, ...]


@final
class AdamW(ShardedOptimizer):
    """AdamW over groups of (name, parameter); ShardedOptimizer says what a group is, Storage how moments are kept.

    State of a parameter: exp_avg, exp_avg_sq (cut as it is), step. ValueError for settings out of range.
    """

    def __init__(self, groups: Iterable[Mapping[str, Any]], lr: float, *, betas: tuple[float, float] = (0.9, 0.95), eps: float = 1e-8,
                 weight_decay: float = 0.1, storage: Storage = FP32) -> None:
        super().__init__(groups, adamw_defaults(lr, betas, eps, weight_decay, storage), storage)

    def _moments_of(self, group: dict[str, Any]) -> tuple[str, ...]:
        return ("exp_avg", "exp_avg_sq")

    def _update(self, group: dict[str, Any], parameters: list[Tensor]) -> None:
        adamw_group(self, group, parameters)


def adamw_defaults(lr: float, betas: tuple[float, float], eps: float, weight_decay: float, storage: Storage) -> dict[str, float]:
    """A group's settings, checked: ValueError, in one line, for the first that is out of range."""
    for name, value in (("lr", lr), ("eps", eps), ("weight_decay", weight_decay)):
        if not 0 <= value < float("inf"):
            raise ValueError(f"optimizer {name} {value}: must be a finite number from 0 up")
    for name, beta in zip(("beta1", "beta2"), betas, strict=True):
        if not 0 <= beta < 1:
            raise ValueError(f"optimizer {name} {beta}: must be in [0, 1)")
        storage.check_beta(name, beta)
    return {"lr": lr, "beta1": betas[0], "beta2": betas[1], "eps": eps, "weight_decay": weight_decay}


def adamw_group(optimizer: ShardedOptimizer, group: dict[str, Any], parameters: list[Tensor]) -> None:
    """One AdamW step of ``parameters``, of ``group``."""
    for step, some in optimizer.by_step(parameters).items():
        shards = [_shard(optimizer, parameter, step) for parameter in some]
        adamw_([shard for shard in shards if shard.parameter.numel()], Settings(*(group[key] for key in Settings._fields[:5]), step),
               optimizer.storage)


def _shard(optimizer: ShardedOptimizer, parameter: Tensor, step: int) -> Shard:
    state = optimizer.state[parameter]
    tensors = (local(parameter), local_grad(parameter), local(state["exp_avg"]), local(state["exp_avg_sq"]))
    return Shard(*tensors, (step, optimizer.names[parameter], shard_number(parameter)))


def adamw_(shards: list[Shard], how: Settings, storage: Storage) -> None:
    """Updates parameters and moments in place, ``how.step`` being the step now taken."""
    by_kind: dict[tuple[torch.device, torch.dtype, bool], list[Shard]] = {}
    for shard in shards:
        by_kind.setdefault((shard.parameter.device, shard.parameter.dtype, _fusable(shard)), []).append(shard)
    for (device, dtype, fusable), some in by_kind.items():
        if fusable:
            _fused(some, how, device)
        else:
            for batch in _batches(some):
                _widened(batch, how, torch.promote_types(dtype, torch.float32), storage)


def _fusable(shard: Shard) -> bool:
    """The kernel walks raw memory, so all four must have one dtype and one order."""
    return all(tensor.is_contiguous() and tensor.dtype == shard.parameter.dtype for tensor in shard[:4])


def _fused(shards: list[Shard], how: Settings, device: torch.device) -> None:
    columns = [list(column) for column in list(zip(*shards, strict=True))[:4]]
    # Filled on the device: no copy from the host, and one counter serves all.
    steps = [torch.full((), float(how.step), dtype=torch.float32, device=device)] * len(shards)
    torch._fused_adamw_(*columns, [], steps, lr=how.lr, beta1=how.beta1, beta2=how.beta2, weight_decay=how.weight_decay, eps=how.eps,
                        amsgrad=False, maximize=False)


def _batches(shards: list[Shard]) -> Iterator[list[Shard]]:
    """The same shards, cut and gathered into batches of about BATCH_ELEMENTS, never more unless a shard can't be cut."""
    batch: list[Shard] = []
    held = 0
    for shard in shards:
        for number, piece in enumerate(pieces(shard[:4], BATCH_ELEMENTS)):
            if batch and held + piece[0].numel() > BATCH_ELEMENTS:
                yield batch
                batch, held = [], 0
            batch.append(Shard(*piece, (*shard.key, number)))
            held += piece[0].numel()
    yield batch


def _widened(shards: list[Shard], how: Settings, wide: torch.dtype, storage: Storage) -> None:
    """The same in ``wide`` whatever the dtypes. The step uses the moments as they are before rounding."""
    parameters, grads, firsts, seconds, keys = (list(column) for column in zip(*shards, strict=True))
    grads = [grad.to(wide) for grad in grads]
    wide_firsts, wide_seconds = [first.to(wide) for first in firsts], [second.to(wide) for second in seconds]
    torch._foreach_lerp_(wide_firsts, grads, 1 - how.beta1)
    torch._foreach_mul_(wide_seconds, how.beta2)
    torch._foreach_addcmul_(wide_seconds, grads, grads, 1 - how.beta2)
    del grads
    for moments, values, name in ((firsts, wide_firsts, "exp_avg"), (seconds, wide_seconds, "exp_avg_sq")):
        for moment, value, key in zip(moments, values, keys, strict=True):
            store(moment, value, storage.generator(moment.device, name, *key))
    scales = torch._foreach_sqrt(wide_seconds)
    torch._foreach_div_(scales, (1 - how.beta2**how.step) ** 0.5)
    torch._foreach_add_(scales, how.eps)
    torch._foreach_mul_(parameters, 1 - how.lr * how.weight_decay)
    torch._foreach_addcdiv_(parameters, wide_firsts, scales, -how.lr / (1 - how.beta1**how.step))
