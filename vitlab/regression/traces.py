"""Traces: the losses of the first training steps, recomputed in every check.

A trace trains an arm for a few steps on the CPU with one thread, with the schedule shortened to them and the engine
that trains its seeds, and records the loss of every step.  Stored results are neither read nor written.

A trace in double precision agrees to many digits across processors; a second one in the arm's own precision covers the
kernels of that precision.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F

from vitlab.driver.benchmark import brief_trial
from vitlab.engines import supported_engine
from vitlab.engines.base import EngineFailed
from vitlab.plan.values import Plan, Planned
from vitlab.regression.baseline import Trace
from vitlab.runner.job import Settings
from vitlab.runner.run import begin_trial
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
    with brief_trial(plan, planned, steps, settings, precision) as (trial, folder):
        while True:
            with begin_trial(trial, folder, settings) as training:
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
                    precision=trial.spec.train.precision,
                    engine=engine,
                    losses=tuple(losses),
                    before=before,
                    after=_loss(training),
                )


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
