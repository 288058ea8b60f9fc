"""What do all optimizers here share: parameters by logical name, state that exists from the start, and a state dict that fits?

The state of a parameter is allocated with the optimizer, as DTensors cut like the parameter. So memory is at its height before the
first step, a checkpoint loads in place, and torch's checkpoint helpers needn't take a step to find out what the state is (which
would leave the step count at 1).
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moetrain.optim.rounding import MAX_BETA_NEAREST, ROUNDINGS
from moetrain.optim.shards import seed_of

MOMENTS = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Storage:
    """How moments are kept: ``moments`` fp32 | bf16, ``rounding`` nearest | stochastic (of bf16 ones). The random numbers of a step
    depend on ``seed``, the step, the parameter's name and its shard, so replicas of a shard stay bitwise equal, and a resumed run
    draws what it would have drawn. ValueError for an unknown word."""

    moments: str = "fp32"
    rounding: str = "nearest"
    seed: int = 0

    def __post_init__(self) -> None:
        for name, value, legal in (("moments", self.moments, MOMENTS), ("rounding", self.rounding, ROUNDINGS)):
            if value not in legal:
                raise ValueError(f"optimizer {name} {value!r}: legal are {', '.join(legal)}")

    @property
    def dtype(self) -> torch.dtype:
        return MOMENTS[self.moments]

    def check_beta(self, name: str, beta: float) -> None:
        """ValueError where nearest rounding would freeze a bfloat16 moment."""
        if self.dtype == torch.bfloat16 and self.rounding == "nearest" and beta > MAX_BETA_NEAREST:
            raise ValueError(f"optimizer {name} {beta}: bf16 moments rounded to nearest stand still above {MAX_BETA_NEAREST:.4f}; "
                             "take rounding: stochastic, moments: fp32, or a smaller one")

    def generator(self, device: torch.device, *key: object) -> torch.Generator | None:
        """The random numbers for what ``key`` names; None for nearest rounding."""
        if self.rounding == "nearest" or self.dtype != torch.bfloat16:
            return None
        return torch.Generator(device).manual_seed(seed_of(self.seed, *key))


FP32 = Storage()


class ShardedOptimizer(torch.optim.Optimizer, abc.ABC):
    """A torch Optimizer over plain tensors and DTensors of any meshes.

    ``groups``: dicts with "params", a list of (logical name, parameter), and settings, which ``defaults`` completes. Every group has
    "lr", what ``step`` uses, and "lr_scale", by which ``set_lr`` multiplies. Empty groups are dropped. A parameter without a
    gradient is left alone, moments and step count included. Raises ValueError for no parameter, one named or given twice, one on
    the meta device.
    """

    def __init__(self, groups: Iterable[Mapping[str, Any]], defaults: dict[str, Any], storage: Storage) -> None:
        groups = [group for group in groups if group["params"]]
        _check_names([name for group in groups for name, _ in group["params"]])
        self.storage = storage
        self.names = {parameter: name for group in groups for name, parameter in group["params"]}
        plain = [{**group, "params": [parameter for _, parameter in group["params"]]} for group in groups]
        super().__init__(plain, {"lr_scale": 1.0, **defaults})
        for group in self.param_groups:
            moments = self._moments_of(group)
            for parameter in group["params"]:
                self._allocate(parameter, moments)

    @abc.abstractmethod
    def _moments_of(self, group: dict[str, Any]) -> tuple[str, ...]:
        """The names of the moments that a parameter of ``group`` has."""

    @abc.abstractmethod
    def _update(self, group: dict[str, Any], parameters: list[Tensor]) -> None:
        """One step of ``parameters``, all of which have gradients; their step counts have been raised."""

    def _allocate(self, parameter: Tensor, moments: tuple[str, ...]) -> None:
        if parameter.is_meta:
            raise ValueError(f"parameter {self.names[parameter]} has no memory yet: materialise the model, then build its optimizer")
        # Moments are never less precise than fp32 by accident: a float64 parameter, of a test, has float64 ones.
        dtype = self.storage.dtype
        dtype = dtype if dtype == torch.bfloat16 else torch.promote_types(parameter.dtype, dtype)
        self.state[parameter] = {"step": torch.zeros((), dtype=torch.float32)}
        self.state[parameter] |= {name: torch.zeros_like(parameter, dtype=dtype, requires_grad=False) for name in moments}

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:
        """Updates every parameter that has a gradient. No closure: ValueError."""
        if closure is not None:
            raise ValueError("step takes no closure: the loss has been computed by then")
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            for parameter in parameters:
                self.state[parameter]["step"] += 1
            if parameters:
                self._update(group, parameters)

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Copies saved steps and moments in place, rounding to this optimizer's dtype. Settings (learning rate, decay ...) stay this
        optimizer's: they come from the run's configuration, not from a checkpoint. ValueError where a parameter's state is missing or
        has another shape."""
        saved = [key for group in state_dict["param_groups"] for key in group["params"]]
        mine = [parameter for group in self.param_groups for parameter in group["params"]]
        if len(saved) != len(mine):
            raise ValueError(f"the saved optimizer has {len(saved)} parameters, this one {len(mine)}")
        for key, parameter in zip(saved, mine, strict=True):
            self._load(parameter, state_dict["state"].get(key, {}))

    def _load(self, parameter: Tensor, saved: Mapping[str, Any]) -> None:
        for name, tensor in self.state[parameter].items():
            value = saved.get(name)
            if value is None:
                raise ValueError(f"the saved optimizer has no {name} of {self.names[parameter]}; it has {sorted(saved) or 'nothing'}")
            if tuple(tensor.shape) != tuple(torch.as_tensor(value).shape if name == "step" else value.shape):
                raise ValueError(f"the saved {name} of {self.names[parameter]} is {list(value.shape)}, not {list(tensor.shape)}")
            tensor.copy_(torch.as_tensor(value) if name == "step" else value)

    def by_step(self, parameters: list[Tensor]) -> dict[int, list[Tensor]]:
        """Parameters by how many steps they have taken: one list, unless some lacked a gradient now and then. Counts lie on the CPU,
        so reading them waits for no device."""
        lists: dict[int, list[Tensor]] = {}
        for parameter in parameters:
            lists.setdefault(int(self.state[parameter]["step"]), []).append(parameter)
        return lists


def _check_names(names: list[str]) -> None:
    if not names:
        raise ValueError("an optimizer needs at least one parameter")
    twice = sorted({name for name in names if names.count(name) > 1}) if len(set(names)) < len(names) else []
    if twice:
        raise ValueError(f"parameters named twice: {', '.join(twice)}")


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Gives every group ``lr`` times the group's own multiplier."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get("lr_scale", 1.0)
