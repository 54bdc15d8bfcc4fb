"""MetricFacts: what a metric declares, stored with the plan so that reports need no torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from vitlab.spec.choice import Goal, Unit


@dataclass(frozen=True)
class MetricFacts:
    """The facts of a metric that do not depend on results, as it declares them; see vitlab.training.metrics.Metric."""

    goal: Goal
    unit: Unit
    bounds: tuple[float | None, float | None]  #: its range; None for an infinite end
    quantum: float = 0.0  #: smallest change, times the number of images; 0 if it has none
    chance: Mapping[str, float] = field(default_factory=dict)
    """Arm to the value of guesses, where it is known."""
    step: float = 0.0  #: smallest change, whatever the number of images, such as 1 for a count; 0 if it has none

    def smallest_change(self, images: int | None) -> float:
        """Return the smallest change of the metric over a number of images; 0 if it has none or it is not known."""
        return self.step or (self.quantum / images if images else 0.0)


def own_metric(name: str, names: Iterable[str]) -> str | None:
    """Return the metric that a name in results belongs to: ``accuracy`` for ``accuracy_dist``."""
    return max((one for one in names if name == one or name.startswith(f"{one}_")), key=len, default=None)
