"""The first steps of a training, recomputed every time: what a change of the code cannot hide from.

A trace trains an arm for a few steps, on the CPU, with one thread, the schedule shortened to them, by the engine that
trains its seeds, and keeps the loss of every step.  Nothing is taken from a store of results, nor left in one: what an
arm starts from (a teacher, a pre-trained body) is trained as briefly, in a folder that is gone afterwards.

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
from vitlab.runner.run import begin_trial, run_trial
from vitlab.runner.settings import Settings
from vitlab.spec.trial import LENGTHS
from vitlab.store.folders import Store
from vitlab.training.cohort import Cohort, Stacking, require_stackable, stacking_incompatibility
from vitlab.training.loop import Training, evaluation_batches, forward_logits

EXACT_STEPS = 20
LEARNING_STEPS = 100


@dataclass(frozen=True)
class Trace:
    """The beginning of a training."""

    engine: str  #: that computed it
    losses: tuple[float, ...]  #: of every step
    before: float  #: loss on the first validation images, before the first step
    after: float  #: and after the last


def trace(
    plan: Plan,
    planned: Planned,
    steps: int,
    precision: str | None = None,
    engine: str = "loop",
    plugins: Sequence[str | Path] = (),
) -> Trace:
    """The first steps of one trial of a plan.

    Args:
        plan: in which the trial, and those it starts from, stand.
        planned: the trial.
        steps: how many; fewer where the trial itself is shorter.
        precision: instead of the trial's own.
        engine: ``vmap`` and ``stack`` train it as the one member of a cohort, if it can be stacked; ``loop`` by itself.
        plugins: files of components.
    """
    settings = Settings(device="cpu", plugins=tuple(str(Path(plugin).resolve()) for plugin in plugins))
    trials = {_name(trial): trial for trial in (*(item.trial for item in plan.trials), *plan.prerequisites)}
    with tempfile.TemporaryDirectory(prefix="vitlab-trace-") as folder:
        store = Store(Path(folder))
        for needed in _needed(planned.trial, trials):
            short = shortened(needed, steps, precision)
            run_trial(replace(short, code=""), store.trial(short.key, short.code), settings)
        short = shortened(planned.trial, steps, precision)
        with begin_trial(replace(short, code=""), store.trial(short.key, short.code), settings) as training:
            before = _loss(training)
            engine = _advance(training, engine)
            losses = torch.stack(training.losses["loss"]).double().tolist() if training.steps else []
            return Trace(engine, tuple(losses), before, _loss(training))


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


def _advance(training: Training, engine: str) -> str:
    """Take every step.  Returns the engine: as in a worker, what cannot be stacked is trained by itself."""
    if engine != "loop":
        try:
            require_stackable(training.model)
            unknown = stacking_incompatibility(training.model, training.spec.precision, training.feed.device)
            how: Stacking = "stack" if engine == "stack" and unknown is None else "vmap"
            cohort, engine = Cohort([training], how), how
            while training.step < training.steps:
                cohort.advance()
        except Exception:
            if training.step > 0:
                raise
            engine = "loop"
    while training.step < training.steps:
        training.advance()
    return engine


@torch.no_grad()
def _loss(training: Training) -> float:
    """Mean negative log-likelihood on the first batch of validation images, as in an evaluation."""
    batch = next(evaluation_batches(training.feed, "val", training.task))
    training.model.eval()
    logits = forward_logits(training.model, batch.x_BCHW, training.spec.precision)[""]
    training.model.train()
    return float(F.cross_entropy(logits, batch.y_B))  # labels of pixels that have none are left out by its default
