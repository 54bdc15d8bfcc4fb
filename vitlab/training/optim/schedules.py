"""The slot ``schedule``: learning rate schedules.

A schedule has no state: the learning rate is a function of the step and the length of the training, so that a resumed
training needs nothing else.
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Literal

from vitlab.components.base import Positive
from vitlab.registry import Slot
from vitlab.spec.choice import Portion, Share


class Schedule(ABC):
    """Contract: ``factor(step, steps)`` multiplies the learning rate of a step."""

    @abstractmethod
    def factor(self, step: int, steps: int) -> float:
        """Return the factor of optimizer step ``step``, counted from 0, in a training of ``steps`` steps."""


schedule = Slot("schedule", Schedule)  # type: ignore[type-abstract]  # a contract is not built


@dataclass(kw_only=True)
class _Warm(Schedule):
    """Linear warm-up over the share ``warmup`` of the run (n steps, from 1 / (n + 1)), then ``after``."""

    warmup: Share = 0.0

    def factor(self, step: int, steps: int) -> float:
        # From 1 / (n + 1), so that no step is without a rate.
        warm = round(self.warmup * steps)
        if step < warm:
            return (step + 1) / (warm + 1)
        return self._factor_after_warmup((step - warm) / max(1, steps - warm))

    def _factor_after_warmup(self, progress: float) -> float:
        """Return the factor after the warm-up; ``progress`` grows from 0 and stays below 1."""
        return 1.0


@dataclass(kw_only=True)
class _Falling(_Warm):
    """A warm-up, then a fall from 1 to ``final`` along ``course``."""

    final: Share = 0.0

    def _factor_after_warmup(self, progress: float) -> float:
        return self.final + (1 - self.final) * self.course(progress)

    @abstractmethod
    def course(self, progress: float) -> float:
        """Return the height of the course, from 1 to 0."""


def half_cosine(progress: float) -> float:
    """Return half a cosine, from 1 to 0."""
    return (1 + math.cos(math.pi * progress)) / 2


@schedule.register("cosine")
class Cosine(_Falling):
    """Half a cosine from 1 to ``final``.  Reference: arXiv:1608.03983, without restarts.

    Args:
        warmup: share of the run in which the rate rises.
        final: factor towards which it then falls.
    """

    def course(self, progress: float) -> float:
        return half_cosine(progress)


@schedule.register("linear")
class LinearSchedule(_Falling):
    """A straight line from 1 to ``final``, as ViT was pre-trained on ImageNet-21k.  Reference: arXiv:2010.11929.

    Args:
        warmup: share of the run in which the rate rises.
        final: factor towards which it then falls.
    """

    def course(self, progress: float) -> float:
        return 1 - progress


@schedule.register("constant")
class Constant(_Warm):
    """Always 1, after the warm-up.

    Args:
        warmup: share of the run in which the rate rises.
    """


@schedule.register("polynomial")
@dataclass(kw_only=True)
class Polynomial(_Falling):
    """A power of the remaining share of the run, from 1 to ``final``; 1 is a line.  Reference: arXiv:1606.00915.

    Args:
        warmup: share of the run in which the rate rises.
        power: exponent of the remaining share.
        final: factor towards which it then falls.
    """

    power: Positive = 0.9

    def course(self, progress: float) -> float:
        return math.pow(1 - progress, self.power)


@schedule.register("step")
@dataclass(kw_only=True)
class Steps(_Warm):
    """Constant between milestones, at each of which it is multiplied by ``gamma``.  Reference: arXiv:1512.03385.

    Args:
        warmup: share of the run in which the rate rises.
        at: milestones, as shares of the run; the warm-up counts as part of it.
        gamma: factor of a milestone.
    """

    at: tuple[Share, ...] = (0.5, 0.75)
    gamma: Portion = 0.1

    def factor(self, step: int, steps: int) -> float:
        # A milestone is passed after a step at least, or a run of one step would be trained at the last rate alone.
        passed = sum(step >= max(1, round(share * steps)) for share in self.at if share) + self.at.count(0.0)
        return super().factor(step, steps) * self.gamma**passed


@schedule.register("wsd")
@dataclass(kw_only=True)
class WarmupStableDecay(_Warm):
    """Constant after the warm-up, with a cool-down at the end of the run.  Reference: arXiv:2405.18392.

    Args:
        warmup: share of the run in which the rate rises.
        cooldown: share of the run in which the rate falls, at its end.
        shape: course of the cool-down; ``1-sqrt`` is the best one of the reference.
        final: factor towards which the rate falls.
    """

    cooldown: Share = 0.2
    shape: Literal["1-sqrt", "linear", "cosine"] = "1-sqrt"
    final: Share = 0.0

    def factor(self, step: int, steps: int) -> float:
        """Return the factor of a step; where warm-up and cool-down overlap, it is the product of both."""
        cool = round(self.cooldown * steps)
        progress = max(0, step - (steps - cool)) / max(1, cool)
        falls = {"1-sqrt": 1 - math.sqrt(progress), "linear": 1 - progress, "cosine": half_cosine(progress)}
        return super().factor(step, steps) * (self.final + (1 - self.final) * falls[self.shape])
