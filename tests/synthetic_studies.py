"""Synthetic studies with ended trials and known values."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from vitlab import report
from vitlab.comparison.study import Sample, judge_study
from vitlab.planning.values import Arm, MetricFacts, Plan, Planned, Trial
from vitlab.report import comparison, phrasing
from vitlab.report.frame import StudyResults
from vitlab.spec import STREAMS, Analysis, TrialSpec
from vitlab.store.files import write_json
from vitlab.store.folders import Store
from vitlab.store.result import Circumstances, Measurement, Outcome, TrialResult

STEPS = (0, 50, 100, 150, 200)
BASE = [0.972, 0.969, 0.971, 0.975, 0.968]
NONE = [0.941, 0.937, 0.944, 0.939, 0.940]
NEAR = [0.970, 0.974, 0.969, 0.971, 0.973]
SINE = [0.966, 0.960, 0.968, 0.967, 0.959]
POSITIONS = {"baseline": BASE, "position=none": NONE, "position=sincos2d": NEAR, "position=sinusoidal": SINE}


METRICS = {
    "loss": MetricFacts("min", "number", (0.0, None)),
    "accuracy": MetricFacts("max", "share", (0.0, 1.0), quantum=1.0),
    "top5": MetricFacts("max", "share", (0.0, 1.0), quantum=1.0),
    "ece": MetricFacts("min", "share", (0.0, 1.0)),
}


def trial_of(arm: str, seed: int, lr: float = 2e-3) -> Trial:
    spec = {
        "data": {"type": "digits"},
        "model": {"type": "vit", "position": {"type": arm}},
        "train": {"steps": STEPS[-1], "optimizer": {"type": "adamw", "lr": lr}},
    }
    seeds = {stream: 0 if stream == "split" else seed for stream in STREAMS}
    key = hashlib.blake2b(f"{arm}/{seed}".encode(), digest_size=32).hexdigest()
    return Trial(
        TrialSpec.model_validate(spec),
        seeds,
        ("model:vit vitlab 0.1.0",),
        "sha256:c0ffee",
        key=key,
        code="c" * 16,
    )


def result_of(
    trial: Trial,
    values: Mapping[str, float],
    *,
    curve: Sequence[float] = (),
    status: Any = "done",
    failure: str = "",
    **numerics: Any,
) -> TrialResult:
    accuracy = values.get("val/accuracy", 0.5)
    curve = curve or [accuracy * (1 - math.exp(-0.3 - step / 40)) for step in STEPS[:-1]] + [accuracy]
    history = tuple(
        Measurement(step, step / 20, step * 64, {"val/accuracy": value, "train/loss": 1 - value})
        for step, value in zip(STEPS, curve, strict=True)
    )
    numerics = {"torch": "2.13.0", "device": "cpu", "engine": "eager", "threads": 1, **numerics}
    circumstances = Circumstances(1.79e9, 7.5, "host", 1, 113_290, 1_894_000, 10**8, {"torch": "2.13.0"}, numerics)
    outcome = Outcome(values, history, "w" * 64, STEPS[-1], STEPS[-1] * 64)
    return TrialResult(trial.key, trial.code, status, outcome, circumstances, failure)


def study(
    root: Path,
    arms: Mapping[str, Sequence[float | None]] = POSITIONS,
    *,
    analysis: Analysis | None = None,
    metric: str = "val/accuracy",
    numerics: Mapping[str, Any] = {},
    **plan: Any,
) -> tuple[Plan, Store]:
    """Return a study whose trials ended with the given values; None is a trial that was not started."""
    store, planned = Store(root), []
    for arm, values in arms.items():
        for seed, value in enumerate(values):
            trial = trial_of(arm, seed)
            planned.append(Planned(arm, seed, trial))
            if value is not None:
                finals = {metric: value, metric.replace("val/", "test/"): value - 0.01, "train/loss": 0.1}
                store.trial(trial.key, trial.code).write_result(result_of(trial, finals, **numerics.get(arm, {})))
    study_plan = Plan(
        study="positions",
        question=plan.pop("question", "Does a small ViT need to be told where its patches are?"),
        arms=plan.pop("planned_arms", None)
        or tuple(
            Arm(arm, {"model.position": arm.partition("=")[2] or "learned"}, None if index == 0 else next(iter(arms)))
            for index, arm in enumerate(arms)
        ),
        trials=tuple(planned),
        analysis=analysis or Analysis(),
        **{"metrics": METRICS, **plan},
    )
    write_json(store.study(study_plan.study) / "plan.json", study_plan.to_json())
    return study_plan, store


def outcome(root: Path, *args: Any, **options: Any) -> tuple[Plan, Store, StudyResults, pd.DataFrame]:
    plan, store = study(root, *args, **options)
    results = StudyResults.read(plan, store)
    return plan, store, results, arms_table(results)


def arms_table(results: StudyResults) -> pd.DataFrame:
    return comparison.summary_rows_to_frame(comparison.summary_rows(results), results.plan.analysis).set_index("arm")


def answers_of(results: StudyResults) -> list[str]:
    return [
        answer.sentence
        for answer in phrasing.answer_per_arm(
            comparison.summary_rows(results),
            results.plan.analysis,
            phrasing.Scale.of(results.plan.analysis.metric, results.plan.units),
        )
    ]


def judged_rows(
    plan: Plan,
    values: Mapping[str, Mapping[int, float]],
    awaited: int | Mapping[str, int] = 0,
) -> dict[str, dict[str, Any]]:
    """Return the columns of the comparisons of a plan without trials, by arm."""
    compared = {arm: "baseline" for arm in values if arm != "baseline"}
    samples = {arm: Sample(by_seed) for arm, by_seed in values.items()}
    counts = dict.fromkeys(compared, awaited) if isinstance(awaited, int) else awaited
    return judge_study(plan, compared, samples, awaited=counts, quantum=0.0)


def document(plan: Plan, store: Store) -> dict[str, Any]:
    rendered = report.render(plan, store, "json")
    assert isinstance(rendered, str)
    return json.loads(rendered, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))


def text_of(plan: Plan, store: Store, form: str) -> str:
    rendered = report.render(plan, store, form)
    assert isinstance(rendered, str)
    return rendered
