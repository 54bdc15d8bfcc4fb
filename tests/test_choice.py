"""Tests of tuning as a part of the noise."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import synthetic_studies
from scipy import stats

from vitlab.comparison.arrays import Choices, Comparisons, Contrast, judge_studies
from vitlab.planning.values import Rival, Tuning
from vitlab.report.frame import StudyResults
from vitlab.spec import Analysis
from vitlab.statistics.replicates import retuning_variance


@pytest.mark.parametrize("scores", [(0.80, 0.82, 0.79), (0.5, 0.9), (0.80, 0.80, 0.80, 0.80)])
def test_variance_of_choice_equals_its_integral(scores: tuple[float, ...]) -> None:
    chosen, sd, seeds = int(np.argmax(scores)), 0.02, 2
    value = max(scores) - 0.005
    means = np.array(scores)
    means[chosen] = value
    z = np.linspace(-9, 9, 4001)
    expected = 0.0
    for rival, mean in enumerate(means):  # the chance that it is the best, by integration over its score
        others = [stats.norm.cdf(z + (mean - other) / (sd / math.sqrt(seeds))) for other in np.delete(means, rival)]
        expected += np.trapezoid(stats.norm.pdf(z) * np.prod(others, axis=0), z) * (mean - value) ** 2
    variance, df = retuning_variance(scores, chosen, value, sd, seeds)
    assert variance == pytest.approx(expected, rel=0.1, abs=1e-12)
    best = np.random.default_rng(1).normal(means, sd / math.sqrt(seeds), (100_000, len(means))).argmax(axis=1)
    shares = np.bincount(best, minlength=len(means)) / len(best)
    assert df == pytest.approx(max(1.0, 1 / (shares**2).sum() - 1), rel=0.1)


def test_comparison_adds_variance_of_choices() -> None:
    first, second = [0.82, 0.84, 0.83, 0.85], [0.80, 0.81, 0.83, 0.80]
    values, design = np.array([[second, first]]), replace(Comparisons.all_with_first(1), alpha=0.1)

    def contrast(values: np.ndarray, *variances: float) -> Contrast:
        choices = Choices(np.array([[variances]]), np.full((1, 1, len(variances)), 2.0))
        return judge_studies(values, replace(design, choices=choices)).contrasts.single(0, 0)

    alone, tuned = judge_studies(values, design).contrasts.single(0, 0), contrast(values, 1e-4, 0.0)
    variance = alone.se**2 + 1e-4
    df = variance**2 / (alone.se**4 / 3 + 1e-8 / 2)
    low, high = stats.t.interval(0.9, df, alone.difference, math.sqrt(variance))
    assert (tuned.low, tuned.high) == pytest.approx((low, high))
    assert tuned.p == pytest.approx(2 * stats.t.sf(alone.difference / math.sqrt(variance), df))
    assert contrast(values, 0.0).p == pytest.approx(alone.p)
    shifted = np.array([[second, np.add(second, 0.125)]])
    assert (
        judge_studies(shifted, design).contrasts.single(0, 0).test == "sign flip"
        and contrast(shifted, 1e-4).test == "none"
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("response", "tuning_seeds", "seeds", "arms"),
    [
        ((-1.0, 0.0, -1.0), 2, 15, 1),
        ((-10.0, -10.0, -1.5, 0.0), 2, 15, 1),
        ((-10.0, 0.0, -1.0, -10.0, -10.0, -10.0), 1, 15, 5),
        ((-10.0, -10.0, -1.5, 0.0, -10.0), 2, 5, 10),
    ],
)
def test_arms_that_respond_alike_are_told_apart_in_one_of_twenty_studies(
    response: tuple[float, ...], tuning_seeds: int, seeds: int, arms: int
) -> None:
    """Only two rates of a usual grid compete; the choice of each arm counts with their degrees of freedom."""
    studies = 1200 // (arms + 1)
    draws = np.random.default_rng([4, arms, seeds])
    values = np.empty((studies, arms + 1, seeds))
    variance, df = np.zeros((2, studies, arms, 2))
    for study in range(studies):
        for arm in range(arms + 1):
            scores = draws.normal(response, 1 / math.sqrt(tuning_seeds))
            chosen = int(scores.argmax())
            values[study, arm] = x = draws.normal(response[chosen], 1, seeds)
            choice = retuning_variance(scores, chosen, x.mean(), x.std(ddof=1), tuning_seeds)
            places = slice(None) if arm == 0 else arm - 1
            variance[study, places, int(arm > 0)], df[study, places, int(arm > 0)] = choice
    design = Comparisons.all_with_first(arms)
    naive = (judge_studies(values, design).contrasts.p_corrected <= 0.05).any(axis=1).mean()
    found = (
        (judge_studies(values, replace(design, choices=Choices(variance, df))).contrasts.p_corrected <= 0.05)
        .any(axis=1)
        .mean()
    )
    assert naive > 0.07, "the study must be one in which the choice matters"
    assert found <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / studies)


@pytest.mark.slow
def test_report_includes_choice_of_each_tuned_arm(tmp_path: Path) -> None:
    plan, store = synthetic_studies.study(tmp_path)
    arm = "position=none"
    rivals = tuple(
        Rival({"train.optimizer.lr": lr}, tuple(item for item in plan.trials if item.arm == arm)[:2], score, 1.0)
        for lr, score in ((1e-3, 0.930), (2e-3, 0.941), (4e-3, 0.938))
    )
    tuned = replace(plan, tuning=(Tuning(arm, "k" * 8, "val/accuracy", rivals, winner=1),))
    tuned = replace(tuned, analysis=Analysis(variance="own"))
    rows = synthetic_studies.arms_table(StudyResults.read(tuned, store))
    values = np.array(synthetic_studies.NONE)
    variance, _ = retuning_variance([0.930, 0.941, 0.938], 1, values.mean(), values.std(ddof=1), 2)
    assert rows.loc[arm, "choice_sd"] == pytest.approx(math.sqrt(variance)) and variance > 0
    d = values - np.array(synthetic_studies.BASE)
    total = d.var(ddof=1) / 5 + variance
    _, df = retuning_variance([0.930, 0.941, 0.938], 1, values.mean(), values.std(ddof=1), 2)
    df = total**2 / ((d.var(ddof=1) / 5) ** 2 / 4 + variance**2 / df)
    half = stats.t.ppf(1 - 0.05 / 3 / 2, df) * math.sqrt(total)
    assert rows.loc[arm, "difference_high"] - rows.loc[arm, "difference"] == pytest.approx(half)
    [note] = [note for note in synthetic_studies.document(tuned, store)["notes"] if "choice of knobs" in note]
    assert note.startswith("Intervals include the choice of knobs")
    other = replace(tuned, tuning=(replace(tuned.tuning[0], select="val/loss"),))
    assert synthetic_studies.arms_table(StudyResults.read(other, store))["choice_sd"].isna().all()
    [note] = [note for note in synthetic_studies.document(other, store)["notes"] if "choice of knobs" in note]
    assert note.startswith("Intervals do not include the choice of knobs, because val/loss chose them")
