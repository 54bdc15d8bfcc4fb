"""The first steps of a training, recomputed every time: what a change of the code cannot hide from.

A trace trains an arm for a few steps, on the CPU, with one thread, the schedule shortened to them, and keeps the loss
of every step.  Nothing is taken from a store of results, nor left in one: what an arm starts from (a teacher, a
pre-trained body) is trained as briefly, in a folder that is gone afterwards.

A trace in double precision agrees to many digits from one processor to the next; beside it stands one in the
precision that the arm is trained in, whose kernels may be others.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from vitlab.plan.values import Plan, Planned, Trial
from vitlab.spec.trial import LENGTHS
from vitlab.store import Store
from vitlab.training.loop import Training, evaluation_batches, views_of
from vitlab.trial import Settings, begin_trial, run_trial

EXACT_STEPS = 20
LEARNING_STEPS = 100


@dataclass(frozen=True)
class Trace:
    """The beginning of a training."""

    losses: tuple[float, ...]  #: of every step
    before: float  #: loss on the first validation images, before the first step
    after: float  #: and after the last


def trace(
    plan: Plan, planned: Planned, steps: int, precision: str | None = None, plugins: Sequence[str | Path] = ()
) -> Trace:
    """The first steps of one trial of a plan.

    Args:
        plan: in which the trial, and those it starts from, stand.
        planned: the trial.
        steps: how many; fewer where the trial itself is shorter.
        precision: instead of the trial's own.
        plugins: files of components.
    """
    settings = Settings(device="cpu", plugins=tuple(str(Path(plugin).resolve()) for plugin in plugins))
    trials = {_name(trial): trial for trial in (*(item.trial for item in plan.trials), *plan.prerequisites)}
    with tempfile.TemporaryDirectory(prefix="vitlab-trace-") as folder:
        store = Store(Path(folder))
        for needed in _needed(planned.trial, trials):
            short = shortened(needed, steps, precision)
            run_trial(short, store.trial(short.key, short.code), settings)
        short = shortened(planned.trial, steps, precision)
        with begin_trial(short, store.trial(short.key, short.code), settings) as training:
            before = _loss(training)
            for _ in range(training.steps):
                training.advance()
            losses = torch.stack(training.losses["loss"]).double().tolist() if training.steps else []
            return Trace(tuple(losses), before, _loss(training))


def shortened(trial: Trial, steps: int, precision: str | None) -> Trial:
    """The same trial with a training of so many steps, or fewer where it has fewer."""
    train: dict[str, Any] = {**trial.spec["train"], "evaluations": 1}
    planned = train.get("steps")
    train |= {**dict.fromkeys(LENGTHS), "steps": steps if planned is None else min(steps, planned)}
    if precision is not None:
        train["precision"] = precision
    return replace(trial, spec={**trial.spec, "train": train})


# -- how it is done ---------------------------------------------------------------------------------------------------


def _needed(trial: Trial, trials: dict[str, Trial]) -> Iterable[Trial]:
    """What a trial starts from, each after what it starts from itself."""
    for name in trial.needs.values():
        yield from _needed(trials[name], trials)
        yield trials[name]


def _name(trial: Trial) -> str:
    return f"{trial.key}/{trial.code}"


@torch.no_grad()
def _loss(training: Training) -> float:
    """Mean negative log-likelihood on the first batch of validation images, as in an evaluation."""
    batch = next(evaluation_batches(training.feed, "val", training.task))
    training.model.eval()
    logits = views_of(training.model, batch.x_BCHW, training.spec.precision)[""]
    training.model.train()
    return float(F.cross_entropy(logits, batch.y_B))  # labels of pixels that have none are left out by its default
