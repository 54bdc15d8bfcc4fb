"""Exponential moving average of the weights, evaluated in their place.

Floating point buffers, such as the statistics of batch normalisation, are averaged like weights; integer buffers are
copied from the model.
Reference: Polyak and Juditsky, Acceleration of stochastic approximation by averaging, 1992; timm's ``ModelEmaV3``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from vitlab.models.contract import Model
from vitlab.spec.trial import Ema


class Average:
    """The average of a model's weights, which starts as a copy of them."""

    def __init__(self, model: Model, how: Ema) -> None:
        self.how = how
        # Parameters and buffers themselves: engines move them to other storage, which detached tensors would miss.
        self._current: dict[str, Tensor] = dict(model.state_dict(keep_vars=True))
        self._averaged = {name: value.detach().clone() for name, value in self._current.items()}
        self._float_names = [name for name, value in self._current.items() if value.is_floating_point()]
        self._integer_names = [name for name in self._current if name not in self._float_names]

    def share(self, step: int) -> float:
        """Return the weight of the previous average at a step, counted from 1."""
        if not self.how.warmup:
            return self.how.decay
        return float(min(self.how.decay, 1 - step**-self.how.warmup))

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Update the average with the weights after a step, counted from 1."""
        averaged, current = ([of[name] for name in self._float_names] for of in (self._averaged, self._current))
        torch._foreach_lerp_(averaged, current, 1 - self.share(step))  # type: ignore[no-untyped-call,unused-ignore]
        for name in self._integer_names:
            self._averaged[name].copy_(self._current[name])

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Give the model the averaged weights inside the block, and its own again afterwards."""
        own = {name: value.detach().clone() for name, value in self._current.items()}
        self.replace()
        try:
            yield
        finally:
            _copy(own, self._current)

    def replace(self) -> None:
        """Give the model the averaged weights."""
        _copy(self._averaged, self._current)

    def state_dict(self) -> dict[str, Tensor]:
        """Return the averaged weights by name."""
        return self._averaged

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore the weights that :meth:`state_dict` returned."""
        _copy(state, self._averaged)


@torch.no_grad()
def _copy(source: Mapping[str, Tensor], target: Mapping[str, Tensor]) -> None:
    for name, value in target.items():
        value.copy_(source[name])
