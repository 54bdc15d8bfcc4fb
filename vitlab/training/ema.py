"""Exponential moving average of the weights, evaluated in their place.

Floating point buffers, such as the statistics of batch normalisation, are averaged like weights; integer buffers are
copied from the model.
Reference: Polyak and Juditsky, Acceleration of stochastic approximation by averaging, 1992; timm's ``ModelEmaV3``.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from vitlab.models.contract import Model, State
from vitlab.spec.trial import Ema
from vitlab.training.optim import WeightAverage


class Average(WeightAverage):
    """The average of a model's weights, which starts as a copy of them."""

    def __init__(self, model: Model, how: Ema) -> None:
        self.how = how
        # Parameters and buffers themselves: engines move them to other storage, which detached tensors would miss.
        self._current: dict[str, Tensor] = dict(model.state_dict(keep_vars=True))
        self._averaged = {name: value.detach().clone() for name, value in self._current.items()}

    def decay(self, step: int) -> float:
        """Return the weight of the previous average at a step, counted from 1."""
        if not self.how.warmup:
            return self.how.decay
        return float(min(self.how.decay, 1 - step**-self.how.warmup))

    @torch.no_grad()
    def update(self, step: int) -> None:
        move_towards(self._averaged, self._current, 1 - self.decay(step))

    def replaced_tensors(self) -> list[Tensor]:
        return list(self._current.values())

    def replace(self) -> None:
        _copy_values(self._averaged, self._current)

    def state_dict(self) -> dict[str, Tensor]:
        return self._averaged

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        _copy_values(state, self._averaged)


@torch.no_grad()
def move_towards(target: State, source: State, share: float) -> None:
    """Move floating point values by a share towards others of the same names, and copy integers, such as counters."""
    floats = [name for name, value in target.items() if value.is_floating_point()]
    torch._foreach_lerp_([target[name] for name in floats], [source[name] for name in floats], share)  # type: ignore[no-untyped-call,unused-ignore]
    for name in target.keys() - floats:
        target[name].copy_(source[name])


@torch.no_grad()
def _copy_values(source: Mapping[str, Tensor], target: Mapping[str, Tensor]) -> None:
    for name, value in target.items():
        value.copy_(source[name])
