"""Traces: the losses of the first training steps, recomputed in every check.

A trace trains an arm for a few steps on the CPU with one thread, with the schedule shortened to them and the engine
that trains its seeds, and records the loss of every step.  Stored results are neither read nor written: prerequisites
(a teacher, a pre-trained body) are trained as briefly in a temporary folder.

A trace in double precision agrees to many digits across processors; a second one in the arm's own precision covers the
kernels of that precision.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
import torch.nn.functional as F

from vitlab.engines import supported_engine
from vitlab.engines.base import EngineFailed
from vitlab.plan.values import Plan, Planned, Trial
from vitlab.regression.baseline import Trace
from vitlab.runner.job import Job, JobTrial, Settings
from vitlab.runner.run import begin_trial, execute
from vitlab.spec.trial import LENGTHS
from vitlab.store.folders import Store
from vitlab.training.evaluation import evaluation_batches
from vitlab.training.loop import Training

EXACT_STEPS = 20
LEARNING_STEPS = 100


def trace(
    plan: Plan,
    planned: Planned,
    steps: int,
    precision: str | None = None,
    engine: str = "loop",
    plugins: Sequence[str | Path] = (),
) -> Trace:
    """Train the first steps of one trial of a plan.

    Args:
        plan: the plan with the trial and its prerequisites.
        planned: the trial.
        steps: their number; fewer if the trial itself is shorter.
        precision: replaces the trial's own.
        engine: the engine, or a fallback that supports the trial, trains it by itself.
        plugins: files of components.
    """
    settings = Settings(device="cpu", plugins=tuple(str(Path(plugin).resolve()) for plugin in plugins))
    trials = {_name(trial): trial for trial in (*(item.trial for item in plan.trials), *plan.prerequisites)}
    with tempfile.TemporaryDirectory(prefix="vitlab-trace-") as root:
        store = Store(Path(root))
        for prerequisite in _prerequisites(planned.trial, trials):
            short = shorten(prerequisite, steps, precision)
            folder = store.trial(short.key, short.code).path
            [outcome] = execute(Job((JobTrial(short.key, folder, replace(short, code="")),), settings))
            if isinstance(outcome, Exception):
                raise outcome
        short = shorten(planned.trial, steps, precision)
        while True:
            with begin_trial(replace(short, code=""), store.trial(short.key, short.code), settings) as training:
                before = _loss(training)
                engine, engine_type, _ = supported_engine(engine, training)
                try:
                    computation = engine_type([training])
                    while training.step < training.steps:
                        computation.train_step()
                except EngineFailed as failed:
                    engine = failed.fallback
                    continue
                losses = torch.stack(training.losses["loss"]).double().tolist() if training.steps else []
                return Trace(
                    precision=short.spec.train.precision,
                    engine=engine,
                    losses=tuple(losses),
                    before=before,
                    after=_loss(training),
                )


def shorten(trial: Trial, steps: int, precision: str | None) -> Trial:
    """Return the trial with its training limited to a number of steps."""
    train = trial.spec.train
    changes = {
        **dict.fromkeys(LENGTHS),
        "steps": steps if train.steps is None else min(steps, train.steps),
        "evaluations": 1,
        "precision": precision or train.precision,
    }
    return replace(trial, spec=trial.spec.model_copy(update={"train": train.model_copy(update=changes)}))


def _prerequisites(trial: Trial, trials: dict[str, Trial]) -> Iterable[Trial]:
    """Yield the prerequisites of a trial, each after its own prerequisites."""
    for name in trial.needs.values():
        yield from _prerequisites(trials[name], trials)
        yield trials[name]


def _name(trial: Trial) -> str:
    return f"{trial.key}/{trial.code}"


@torch.no_grad()
def _loss(training: Training) -> float:
    """Return the mean loss on the first batch of validation images, as in an evaluation."""
    objective = training.objective
    batch = objective.evaluation_batch(next(evaluation_batches(training.feed, "val", training.task)))
    objective.module.eval()
    view = objective.views(batch.x_BCHW, batch.y_B)[""]
    objective.module.train()
    if not objective.labels:
        return float(view.mean())
    return float(F.cross_entropy(view, batch.y_B))  # its default ignore_index leaves out pixels without a label
