"""Tests of tuning as a part of the noise."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import synthetic_studies
from scipy import stats

from vitlab.plan.values import Rival, Tuning
from vitlab.report.frame import results
from vitlab.statistics import Contrast, choice_variance, paired_t_test, with_choices


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
    assert choice_variance(scores, chosen, value, sd, seeds) == pytest.approx(expected, rel=0.1, abs=1e-12)


def test_comparison_adds_variance_of_choices() -> None:
    first, second = [0.82, 0.84, 0.83, 0.85], [0.80, 0.81, 0.83, 0.80]
    contrast = paired_t_test(first, second)
    tuned = with_choices(contrast, [(1e-4, 2.0), (0.0, 2.0)], 0.1)
    variance = contrast.se**2 + 1e-4
    df = variance**2 / (contrast.se**4 / 3 + 1e-8 / 2)
    low, high = stats.t.interval(0.9, df, contrast.difference, math.sqrt(variance))
    assert (tuned.low, tuned.high) == pytest.approx((low, high)) and tuned.test == "tuned t"
    assert tuned.p == pytest.approx(2 * stats.t.sf(contrast.difference / math.sqrt(variance), df))
    assert with_choices(contrast, [(0.0, 2.0)], 0.1) == contrast
    flipped = replace(contrast, test="sign flip", se=math.nan, df=math.nan)
    assert with_choices(flipped, [(1e-4, 2.0)], 0.1).test == "none"


@pytest.mark.parametrize("response", [(-1.0, 0.0, -1.0), (-2.0, 0.0, -2.0), (0.0, 2.0, 3.0), (0.0, 1.0)])
def test_arms_that_respond_alike_are_told_apart_in_one_of_twenty_studies(response: tuple[float, ...]) -> None:
    draws, studies, seeds, tuning_seeds = np.random.default_rng(4), 800, 15, 2
    found = naive = 0
    for _ in range(studies):
        values, variances = [], []
        for _ in range(2):
            scores = draws.normal(response, 1 / math.sqrt(tuning_seeds))
            chosen = int(scores.argmax())
            values.append(draws.normal(response[chosen], 1, seeds))
            variance = choice_variance(scores, chosen, values[-1].mean(), values[-1].std(ddof=1), tuning_seeds)
            variances.append((variance, len(response) - 1.0))
        contrast: Contrast = paired_t_test(*values)
        naive += contrast.p < 0.05
        found += with_choices(contrast, variances, 0.05).p < 0.05
    assert naive / studies > 0.1, "the study must be one in which the choice matters"
    assert found / studies <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / studies)


def test_report_includes_choice_of_each_tuned_arm(tmp_path: Path) -> None:
    plan, store = synthetic_studies.study(tmp_path)
    arm = "position=none"
    rivals = tuple(
        Rival({"train.optimizer.lr": lr}, tuple(item for item in plan.trials if item.arm == arm)[:2], score, 1.0)
        for lr, score in ((1e-3, 0.930), (2e-3, 0.941), (4e-3, 0.938))
    )
    tuned = replace(plan, tuning=(Tuning(arm, "k" * 8, "val/accuracy", rivals, winner=1),))
    rows = synthetic_studies.arms_table(results(tuned, store), tuned)
    values = np.array(synthetic_studies.NONE)
    variance = choice_variance([0.930, 0.941, 0.938], 1, values.mean(), values.std(ddof=1), 2)
    assert rows.loc[arm, "choice_sd"] == pytest.approx(math.sqrt(variance)) and variance > 0
    assert rows["test"].tolist()[1:] == ["tuned t", "paired t", "paired t"]
    d = values - np.array(synthetic_studies.BASE)
    total = d.var(ddof=1) / 5 + variance
    df = total**2 / ((d.var(ddof=1) / 5) ** 2 / 4 + variance**2 / 2)
    half = stats.t.ppf(1 - 0.05 / 3 / 2, df) * math.sqrt(total)
    assert rows.loc[arm, "difference_high"] - rows.loc[arm, "difference"] == pytest.approx(half)
    [note] = [note for note in synthetic_studies.document(tuned, store)["notes"] if "choice of knobs" in note]
    assert note.startswith("Intervals include the choice of knobs")
    other = replace(tuned, tuning=(replace(tuned.tuning[0], select="val/loss"),))
    assert synthetic_studies.arms_table(results(other, store), other)["choice_sd"].isna().all()
    [note] = [note for note in synthetic_studies.document(other, store)["notes"] if "choice of knobs" in note]
    assert note.startswith("Intervals do not include the choice of knobs, because val/loss chose them")
