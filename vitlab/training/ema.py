"""An exponential moving average of the weights, kept beside a training and evaluated in their place.

Floating point buffers, such as the statistics of batch normalisation, are averaged like weights; whole numbers are
those of the model.
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
    """The average of a model's weights; it begins as the model is."""

    def __init__(self, model: Model, how: Ema) -> None:
        self.how = how
        # Parameters and buffers themselves: a cohort gives them other storage, which detached tensors would not follow.
        self._now: dict[str, Tensor] = dict(model.state_dict(keep_vars=True))
        self._averaged = {name: value.detach().clone() for name, value in self._now.items()}
        self._moving = [name for name, value in self._now.items() if value.is_floating_point()]
        self._counting = [name for name in self._now if name not in self._moving]

    def share(self, step: int) -> float:
        """What the average keeps of itself after a step, counted from 1."""
        if not self.how.warmup:
            return self.how.decay
        return float(min(self.how.decay, 1 - step**-self.how.warmup))

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Take in the weights after a step, counted from 1."""
        averaged, now = ([of[name] for name in self._moving] for of in (self._averaged, self._now))
        torch._foreach_lerp_(averaged, now, 1 - self.share(step))  # type: ignore[no-untyped-call,unused-ignore]
        for name in self._counting:
            self._averaged[name].copy_(self._now[name])

    @contextmanager
    def standing_in(self) -> Iterator[None]:
        """Inside the block the model has the averaged weights, and afterwards its own again."""
        own = {name: value.detach().clone() for name, value in self._now.items()}
        self.replace()
        try:
            yield
        finally:
            _copied(own, self._now)

    def replace(self) -> None:
        """Give the model the averaged weights."""
        _copied(self._averaged, self._now)

    def state_dict(self) -> dict[str, Tensor]:
        """The averaged weights by name."""
        return self._averaged

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Go on from what :meth:`state_dict` gave."""
        _copied(state, self._averaged)


@torch.no_grad()
def _copied(source: Mapping[str, Tensor], target: Mapping[str, Tensor]) -> None:
    for name, value in target.items():
        value.copy_(source[name])
