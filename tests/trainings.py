"""One training by itself, for tests of what a training computes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from vitlab.data.prepare import Feed
from vitlab.engines.base import train as train_together
from vitlab.models.contract import Model
from vitlab.spec import TrainSpec
from vitlab.store.result import Outcome
from vitlab.training.loop import State, Training


def train(
    model: Model,
    feed: Feed,
    spec: TrainSpec,
    seeds: Mapping[str, int],
    *,
    resume: State | None = None,
    save: Callable[[State], None] = lambda state: None,
    stop: Callable[[], bool] = lambda: False,
    every_s: float = 60.0,
    **options: Any,
) -> Outcome | None:
    """Train a model in place, from the start or from a saved state; ``options`` are those of ``Training``."""
    training = Training(model, feed, spec, seeds, write=save, **options)
    if resume is not None:
        training.load(resume)
    return train_together([training], stop=stop, every_s=every_s)[0]
