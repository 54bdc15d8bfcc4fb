"""The optimizer schedule_free, whose averaged weights take the place of a falling learning rate."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from vitlab.training.optim.contract import Beta, Decay, Group, Optimizer, Rate, Small, WeightAverage, eager, optimizer


@optimizer.register("schedule_free")
class ScheduleFree(Optimizer):
    """AdamW with averaged weights in place of a falling learning rate.  Reference: arXiv:2405.15682.

    The authors' package schedulefree.  The averaged weights are evaluated, stored and passed on to other trials;
    ``train.ema`` is refused beside them.  Use ``schedule: {type: constant, warmup: 0.05}``: a falling rate would be
    averaged as well.  The averages of batch norm are those of the weights in training, not of the averaged weights.

    Args:
        lr: Largest learning rate; larger than AdamW's, by 1 to 10.
        betas: Share of the averaged weights in those at which the gradient is taken, and decay rate of the average of
            its square.
        eps: Added to the denominator.
        weight_decay: Factor of the weight decay, which is decoupled.
    """

    library = "schedulefree"

    def __init__(
        self,
        *,
        lr: Rate = 2.5e-3,
        betas: tuple[Rate, Beta] = (0.9, 0.999),
        eps: Small = 1e-8,
        weight_decay: Decay = 0.05,
    ) -> None:
        self.lr = lr
        self.betas = betas
        self.eps = eps
        self.weight_decay = weight_decay

    @classmethod
    def incompatibility(cls, train: Mapping[str, Any]) -> str | None:
        """Return a sentence for a training that averages its weights a second time."""
        if train.get("ema") is not None:
            return "schedule_free averages the weights itself; remove train.ema, or choose another optimizer"
        return super().incompatibility(train)

    def build(self, groups: Sequence[Group]) -> torch.optim.Optimizer:
        """Build schedulefree's AdamW in its training mode."""
        from schedulefree import AdamWScheduleFree

        built: torch.optim.Optimizer = eager(AdamWScheduleFree)(groups, lr=self.lr, betas=self.betas, eps=self.eps)
        built.train()  # type: ignore[attr-defined]
        return built

    def average(self, built: torch.optim.Optimizer) -> WeightAverage:
        """Return the average that the optimizer computes from its state."""
        return OptimizerAverage(built)


class OptimizerAverage:
    """The averaged weights of an optimizer with the methods ``train`` and ``eval``.

    Args:
        built: The optimizer, in its training mode.
    """

    def __init__(self, built: Any) -> None:
        self.built = built

    def update(self, step: int) -> None:
        """Do nothing: the optimizer updates its state itself."""

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Give the model the averaged weights inside the block, and its own again afterwards."""
        # The way back by the optimizer's own train() would round, and so make results depend on evaluations.
        parameters = [p for group in self.built.param_groups for p in group["params"]]
        own = [p.detach().clone() for p in parameters]
        self.replace()
        try:
            yield
        finally:
            self.built.train()
            with torch.no_grad():
                for p, value in zip(parameters, own, strict=True):
                    p.copy_(value)

    def replace(self) -> None:
        """Give the model the averaged weights."""
        self.built.eval()

    def state_dict(self) -> dict[str, Tensor]:
        """Return nothing: the state of the average is the optimizer's."""
        return {}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Do nothing."""
