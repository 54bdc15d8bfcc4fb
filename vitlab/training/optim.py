"""The slots ``optimizer`` and ``schedule``: optimizers and learning rate schedules.

A schedule has no state: the learning rate is a function of the step and the length of the training, so that a resumed
training needs nothing else.
"""

from __future__ import annotations

import copy
import math
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import nn

from vitlab.registry import Slot

Group = dict[str, Any]
"""A parameter group of a torch optimizer: named ``params``, ``weight_decay``, and ``lr_scale`` if its learning rate
differs from the optimizer's."""

Rate = Annotated[float, Field(gt=0)]
Decay = Annotated[float, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1)]
Beta = Annotated[float, Field(ge=0, lt=1)]
Small = Annotated[float, Field(gt=0)]


class Optimizer(ABC):
    """Contract: options in the constructor; ``build`` turns parameter groups into a torch optimizer.

    ``lr`` is the learning rate at schedule factor 1, and ``weight_decay`` that of the decaying parameters.  The
    training sets ``lr`` in every group before every step.
    """

    lr: float
    weight_decay: float

    @abstractmethod
    def build(self, groups: Sequence[Group]) -> torch.optim.Optimizer:
        """Return a torch optimizer over ``groups``, each with its own ``weight_decay``."""


optimizer: Slot[Optimizer] = Slot("optimizer", Optimizer)  # type: ignore[type-abstract]  # a contract is not built


@optimizer.register("adamw")
class AdamW(Optimizer):
    """Adam with decoupled weight decay, scaled by the learning rate.  Reference: arXiv:1711.05101.

    Args:
        lr: Largest learning rate.
        betas: Decay rates of the averages of the gradient and its square.
        eps: Added to the denominator.
        weight_decay: Factor of the weight decay.
    """

    def __init__(
        self,
        *,
        lr: Rate = 1e-3,
        betas: tuple[Beta, Beta] = (0.9, 0.999),
        eps: Small = 1e-8,
        weight_decay: Decay = 0.05,
    ) -> None:
        self.lr = lr
        self.betas = betas
        self.eps = eps
        self.weight_decay = weight_decay

    def build(self, groups: Sequence[Group]) -> torch.optim.Optimizer:
        """Build torch's AdamW."""
        return torch.optim.AdamW(groups, lr=self.lr, betas=self.betas, eps=self.eps, fused=fused(groups))


@optimizer.register("adam")
class Adam(Optimizer):
    """Adam; weight decay is added to the gradient.  Reference: arXiv:1412.6980.

    Args:
        lr: Largest learning rate.
        betas: Decay rates of the averages of the gradient and its square.
        eps: Added to the denominator.
        weight_decay: Factor of the weight decay.
    """

    def __init__(
        self,
        *,
        lr: Rate = 1e-3,
        betas: tuple[Beta, Beta] = (0.9, 0.999),
        eps: Small = 1e-8,
        weight_decay: Decay = 0.0,
    ) -> None:
        self.lr = lr
        self.betas = betas
        self.eps = eps
        self.weight_decay = weight_decay

    def build(self, groups: Sequence[Group]) -> torch.optim.Optimizer:
        """Build torch's Adam."""
        return torch.optim.Adam(groups, lr=self.lr, betas=self.betas, eps=self.eps, fused=fused(groups))


@optimizer.register("sgd")
class SGD(Optimizer):
    """Stochastic gradient descent with momentum, as in fine-tuning of arXiv:2010.11929.

    Args:
        lr: Largest learning rate.
        momentum: Factor of the previous update.
        nesterov: Nesterov's momentum.
        weight_decay: Factor of the weight decay.
    """

    def __init__(
        self,
        *,
        lr: Rate = 0.01,
        momentum: Beta = 0.9,
        nesterov: bool = False,
        weight_decay: Decay = 0.0,
    ) -> None:
        self.lr = lr
        self.momentum = momentum
        self.nesterov = nesterov and momentum > 0  # equal without momentum, where torch refuses nesterov
        self.weight_decay = weight_decay

    def build(self, groups: Sequence[Group]) -> torch.optim.Optimizer:
        """Build torch's SGD with momentum."""
        return torch.optim.SGD(groups, lr=self.lr, momentum=self.momentum, nesterov=self.nesterov, fused=fused(groups))


def decay_groups(model: nn.Module, weight_decay: float, declared: Collection[str] = ()) -> list[Group]:
    """Return the trainable parameters in at most two groups: those exempt from weight decay, then the others.

    Vectors, scalars, parameters named ``bias`` and the names in ``declared`` (the model's ``no_weight_decay``) are
    exempt.
    """
    exempt: list[tuple[str, nn.Parameter]] = []
    decaying: list[tuple[str, nn.Parameter]] = []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            is_exempt = parameter.ndim <= 1 or name.endswith(".bias") or name in declared
            (exempt if is_exempt else decaying).append((name, parameter))
    groups = [{"params": exempt, "weight_decay": 0.0}, {"params": decaying, "weight_decay": weight_decay}]
    return [group for group in groups if group["params"]]


def layer_groups(groups: Sequence[Group], layers: Mapping[str, int], factor: float) -> list[Group]:
    """Split groups by layer, with a learning rate ``factor`` times that of the next deeper layer.

    Args:
        groups: The groups of :func:`decay_groups`.
        layers: Depth of every parameter by name; the deepest layer has the optimizer's learning rate.
        factor: At most 1.

    Reference: arXiv:2106.08254 (BEiT), arXiv:2003.10555.
    """
    deepest = max(layers.values())
    split_groups = []
    for group in groups:
        for layer in sorted({layers[name] for name, _ in group["params"]}):
            params = [(name, parameter) for name, parameter in group["params"] if layers[name] == layer]
            split_groups.append({**group, "params": params, "lr_scale": factor ** (deepest - layer)})
    return split_groups


def fused(groups: Sequence[Group]) -> bool:
    """Return True if torch has a fused optimizer kernel for these parameters, which is several times faster.

    Fused and unfused updates differ in the last bits, so the choice depends on device and dtype alone.
    """
    parameters = [item[1] if isinstance(item, tuple) else item for group in groups for item in group["params"]]
    return all(p.device.type in ("cpu", "cuda") and p.is_floating_point() for p in parameters)


class Joint:
    """Optimizers of several models that step together, with one call for all parameters of equal settings.

    For torch's elementwise optimizers the result is bitwise equal, and each optimizer keeps its own state.  Other
    optimizers step one by one.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        kinds: tuple[type[torch.optim.Optimizer], ...] = (torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD)
        self._separate = [optimizer for optimizer in optimizers if type(optimizer) not in kinds]
        self._grouped: list[tuple[torch.optim.Optimizer, list[torch.optim.Optimizer]]] = []
        for kind in kinds:
            if members := [optimizer for optimizer in optimizers if type(optimizer) is kind]:
                combined = copy.copy(members[0])
                states = {p: one.state[p] for one in members for group in one.param_groups for p in group["params"]}
                combined.state = defaultdict(dict, states)
                self._grouped.append((combined, members))

    def step(self) -> None:
        """Take a step of every optimizer."""
        for optimizer in self._separate:
            optimizer.step()
        for combined, members in self._grouped:
            combined.param_groups = _merged(group for member in members for group in member.param_groups)
            combined.step()


def _merged(groups: Iterable[Group]) -> list[Group]:
    """Merge the groups that differ in nothing but their parameters."""
    merged: list[tuple[Group, list[nn.Parameter]]] = []
    for group in groups:
        settings = {name: value for name, value in group.items() if name not in ("params", "param_names")}
        for equal, params in merged:
            if equal == settings:
                params.extend(group["params"])
                break
        else:
            merged.append((settings, list(group["params"])))
    return [{**settings, "params": params} for settings, params in merged]


# -- schedules ---------------------------------------------------------------------------------------------------------


class Schedule(ABC):
    """Contract: ``factor(step, steps)`` multiplies the learning rate of a step."""

    @abstractmethod
    def factor(self, step: int, steps: int) -> float:
        """Return the factor of optimizer step ``step``, counted from 0, in a training of ``steps`` steps."""


schedule: Slot[Schedule] = Slot("schedule", Schedule)  # type: ignore[type-abstract]  # a contract is not built


class _Warm(Schedule):
    """Linear warm-up over the share ``warmup`` of the run (n steps, from 1 / (n + 1)), then ``after``."""

    warmup: float

    def factor(self, step: int, steps: int) -> float:
        warm = round(self.warmup * steps)
        if step < warm:
            return (step + 1) / (warm + 1)
        return self.after((step - warm) / max(1, steps - warm))

    @abstractmethod
    def after(self, progress: float) -> float:
        """Return the factor after the warm-up; ``progress`` grows from 0 and stays below 1."""


@schedule.register("cosine")
class Cosine(_Warm):
    """Half a cosine from 1 to ``final``.  Reference: arXiv:1608.03983, without restarts.

    Args:
        warmup: share of the run in which the rate rises.
        final: factor towards which it then falls.
    """

    def __init__(self, *, warmup: Share = 0.0, final: Share = 0.0) -> None:
        self.warmup = warmup
        self.final = final

    def after(self, progress: float) -> float:
        """Return the factor along half a cosine, from 1 to ``final``."""
        return self.final + (1 - self.final) * (1 + math.cos(math.pi * progress)) / 2


@schedule.register("linear")
class LinearSchedule(_Warm):
    """A straight line from 1 to ``final``, as ViT was pre-trained on ImageNet-21k.  Reference: arXiv:2010.11929.

    Args:
        warmup: share of the run in which the rate rises.
        final: factor towards which it then falls.
    """

    def __init__(self, *, warmup: Share = 0.0, final: Share = 0.0) -> None:
        self.warmup = warmup
        self.final = final

    def after(self, progress: float) -> float:
        """Return the factor along a line, from 1 to ``final``."""
        return self.final + (1 - self.final) * (1 - progress)


@schedule.register("constant")
class Constant(_Warm):
    """Always 1, after the warm-up.

    Args:
        warmup: share of the run in which the rate rises.
    """

    def __init__(self, *, warmup: Share = 0.0) -> None:
        self.warmup = warmup

    def after(self, progress: float) -> float:
        """Return 1."""
        return 1.0


def set_rate(target: torch.optim.Optimizer, rate: float) -> None:
    """Set the learning rate of every group of an optimizer, scaled by its ``lr_scale``."""
    for group in target.param_groups:
        group["lr"] = rate * group.get("lr_scale", 1.0)
