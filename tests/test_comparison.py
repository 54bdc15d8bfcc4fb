"""Tests of comparisons against scipy, statsmodels, R, closed forms and simulation."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import synthetic_studies
from numpy.typing import NDArray
from scipy import stats
from sklearn.datasets import load_digits

from vitlab.comparison import Verdict
from vitlab.comparison.arrays import (
    VERDICTS,
    Comparisons,
    Contrast,
    Contrasts,
    find_collapsed_of_both_sides,
    judge_studies,
)
from vitlab.comparison.study import CONTRAST_COLUMNS, Sample, judge_study
from vitlab.planning.values import Arm, MetricFacts, Plan
from vitlab.report import phrasing
from vitlab.report.comparison import summary_rows
from vitlab.report.frame import StudyResults
from vitlab.spec import Analysis
from vitlab.statistics import replicates

A = [0.951, 0.947, 0.958, 0.949, 0.955]
B = [0.972, 0.969, 0.971, 0.975, 0.968]
ONE = Comparisons.all_with_first(1)


def contrast(first: dict[int, float], second: dict[int, float], design: Comparisons = ONE) -> Contrast:
    """Return the contrast of an arm with its baseline, given the value of each at each seed."""
    values_AN = replicates.values_to_array((second, first), sorted(first.keys() | second.keys()))
    return judge_studies(values_AN[None], design).contrasts.single(0, 0)


BETTER = VERDICTS.index(Verdict.BETTER)


def close(value: float) -> object:
    return pytest.approx(value, rel=1e-9)


def pairs(first: Sequence[float], second: Sequence[float], design: Comparisons = ONE) -> Contrast:
    return contrast(dict(enumerate(first)), dict(enumerate(second)), design)


def apart(first: Sequence[float], second: Sequence[float], design: Comparisons = ONE) -> Contrast:
    return contrast(dict(enumerate(first)), {-1 - seed: value for seed, value in enumerate(second)}, design)


# -- a single comparison ----------------------------------------------------------------------------------------------


def test_paired_t_equals_scipy() -> None:
    result, reference = pairs(A, B), stats.ttest_rel(A, B)
    interval = reference.confidence_interval(0.95)
    assert (result.p, result.low, result.high) == (close(reference.pvalue), close(interval.low), close(interval.high))
    assert (result.difference, result.test, result.pairs) == (close(np.mean(A) - np.mean(B)), "paired t", 5)
    assert result.sd == close(np.std(np.subtract(A, B), ddof=1)) and result.shared == 1


def test_welch_t_equals_scipy() -> None:
    result, reference = apart(A, B[:3], replace(ONE, alpha=0.02)), stats.ttest_ind(A, B[:3], equal_var=False)
    interval = reference.confidence_interval(0.98)
    assert (result.test, result.p, result.df) == ("Welch t", close(reference.pvalue), close(reference.df))
    assert (result.low, result.high) == (close(interval.low), close(interval.high))
    stepped = apart([0.3, 0.3, 0.3], [0.2, 0.2, 0.3], replace(ONE, quantum=0.1))
    variances = [0.1**2 / 12, max(np.var([0.2, 0.2, 0.3], ddof=1), 0.1**2 / 12)]
    assert stepped.se == close(math.sqrt(sum(variances) / 3)), "a side without spread scatters as its rounding does"


def test_equal_seeds_are_paired_and_others_left_out() -> None:
    first = dict(enumerate(A))
    shuffled = {4: B[4], 2: B[2], 0: B[0], 7: 0.95}
    found, expected = vars(contrast(first, shuffled)), vars(pairs([A[0], A[2], A[4]], [B[0], B[2], B[4]]))
    assert found.pop("test") == expected.pop("test") and found == pytest.approx(expected, nan_ok=True)


def test_equivalence_equals_two_one_sided_tests_of_statsmodels() -> None:
    from statsmodels.stats.weightstats import ttost_paired

    near = [value - 0.001 * index for index, value in enumerate(B)]
    result = pairs(near, B, replace(ONE, margin=0.005))
    interval = stats.ttest_rel(near, B).confidence_interval(0.9)
    assert result.p_equal == close(ttost_paired(np.array(near), np.array(B), -0.005, 0.005)[0])
    assert (result.equal_low, result.equal_high) == (close(interval.low), close(interval.high))


def test_resampled_t_is_corrected_as_nadeau_and_bengio_do() -> None:
    """Differences 1, 2, 3, 4 of four splits, a tenth held out: variance (1/4 + 1/9) * 5/3 = 65/108."""
    values, none = [1.0, 2.0, 3.0, 4.0], [0.0] * 4
    overlapping = replace(ONE, overlap=1 / 9)
    result = pairs(values, none, overlapping)
    assert (result.se, result.df) == (close(math.sqrt(65 / 108)), 3)
    assert result.p == close(2 * stats.t.sf(2.5 / math.sqrt(65 / 108), 3))
    half = stats.t.ppf(0.975, 3) * math.sqrt(65 / 108)
    mean = replicates.mean_interval(values, overlap=1 / 9, quantum=0.0, alpha=0.05)
    assert (result.low, result.high) == (close(mean.low), close(mean.high)) == (close(2.5 - half), close(2.5 + half))
    welch = apart(A, B[:3], replace(ONE, overlap=0.25))
    assert welch.se == close(math.sqrt(np.var(A, ddof=1) * (1 / 5 + 0.25) + np.var(B[:3], ddof=1) * (1 / 3 + 0.25)))
    # Where the overlap is not known, or differences have no spread, nothing is left to test by.
    assert pairs(values, none, replace(ONE, overlap=math.nan)).test == "none"
    assert pairs([2.0] * 4, [1.0] * 4, overlapping).test == "none"
    assert pairs([2.0] * 4, [2.0] * 4, overlapping).test == "sign flip"


def test_exchangeable_learners_are_told_apart_on_overlapping_splits_by_plain_t_alone() -> None:
    """Nearest class means of random halves of the pixels, on ten splits of each of 300 draws of 200 digits."""
    pixels, labels = load_digits(return_X_y=True)
    draws, accuracy = np.random.default_rng(0), np.empty((300, 2, 10))
    for study in range(300):
        rows = draws.choice(len(labels), 200, replace=False)
        y, x = labels[rows], pixels[rows] * (draws.random((2, 200, 64)) < 0.5)
        for split in range(10):
            order = draws.permutation(200)
            val, train = order[:20], order[20:]
            classes = np.eye(10)[y[train]]
            means = classes.T @ x[:, train] / classes.sum(axis=0)[:, None]
            scores = x[:, val] @ means.transpose(0, 2, 1) - (means**2).sum(axis=2)[:, None] / 2
            accuracy[study, :, split] = (scores.argmax(axis=2) == y[val]).mean(axis=1)
    plain, corrected = (
        (judge_studies(accuracy, replace(ONE, overlap=ratio)).contrasts.p < 0.05).mean() for ratio in (0.0, 20 / 180)
    )
    assert plain > 0.1 and corrected < 0.05 + 3 * math.sqrt(0.05 * 0.95 / 300)


def test_too_few_values_give_the_difference_alone() -> None:
    for result in (
        contrast({0: 0.5}, {0: 0.25}),
        contrast({1: 0.5}, {0: 0.25}),
        contrast({0: 0.5}, {1: 0.25}),
    ):
        assert (result.difference, result.test) == (0.25, "none")
        assert math.isnan(result.p) and math.isnan(result.low) and math.isnan(result.high)
    assert math.isnan(contrast({}, {0: 0.2}).difference)


def test_two_pairs_have_one_degree_of_freedom_and_no_interval() -> None:
    result = pairs([1.0, 3.0], [0.0, 0.0])
    # Mean 2, standard error 1, Cauchy: P(|T| > 2) = 1 - 2/pi * atan(2).
    assert result.p == close(1 - 2 / math.pi * math.atan(2)) and math.isnan(result.low) and math.isnan(result.high)


def test_differences_without_spread_are_not_certain() -> None:
    # Three seeds shifted by exactly the same amount: t would give p = 0.
    result = pairs([0.3, 0.4, 0.5], [0.2, 0.3, 0.4])
    assert (result.test, result.p) == ("sign flip", 0.25) and math.isnan(result.low) and math.isnan(result.se)
    # Equal up to the rounding of a sum at each of ten seeds, which is no difference.
    for first, second in ((A, A), ([0.1 + 0.2] * 10, [0.3] * 10)):
        result = pairs(first, second)
        assert (result.difference, result.p, result.test) == (0.0, 1.0, "sign flip")
    many = pairs([float(i) + 1 for i in range(60)], [float(i) for i in range(60)])
    assert (many.difference, many.p) == (1.0, 2.0**-59)
    assert math.isnan(apart([1.0, 1.0], [2.0, 2.0]).p)


def test_equal_means_differ_by_nothing() -> None:
    """The mean of the differences is a rounding error."""
    first, second = [0.2, 0.7, 0.1, 0.3], [0.1, 0.2, 0.3, 0.7]
    assert np.mean(np.subtract(first, second)) != 0 and pairs(first, second).difference == 0.0


SLEEP = ([0.7, -1.6, -0.2, -1.2, -0.1, 3.4, 3.7, 0.8, 0.0, 2.0], [1.9, 0.8, 1.1, 0.1, -0.1, 4.4, 5.5, 1.6, 4.6, 3.4])
"""Student (1908), Biometrika 6, 1-25: hours of sleep gained by ten patients under two drugs; R's data set `sleep`."""


def test_sleep_data_equal_r() -> None:
    """R 4: t.test(extra ~ group, sleep, paired = TRUE) and without."""
    result = pairs(*SLEEP)
    assert result.difference / result.se == pytest.approx(-4.0621, abs=5e-5)
    assert (result.df, result.p) == (9, pytest.approx(0.002833, abs=5e-7))
    assert (result.low, result.high) == (pytest.approx(-2.4598858, abs=5e-8), pytest.approx(-0.7001142, abs=5e-8))
    result = apart(*SLEEP)
    assert result.difference / result.se == pytest.approx(-1.8608, abs=5e-5)
    assert result.df == pytest.approx(17.776, abs=5e-4) and result.p == pytest.approx(0.07939, abs=5e-6)
    assert (result.low, result.high) == (pytest.approx(-3.3654832, abs=5e-8), pytest.approx(0.2054832, abs=5e-8))


def test_darwin_maize_equals_fisher() -> None:
    """Fisher (1935), The Design of Experiments, sections 17 and 21: t = 2.148; 1,726 of 32,768 sign changes."""
    eighths = [49.0, -67, 8, 16, 6, 23, 28, 41, 14, 29, 56, 24, 75, 60, -48]
    result = pairs(eighths, [0.0] * 15)
    assert result.difference / result.se == pytest.approx(2.148, abs=5e-4)
    assert replicates.sign_flip_p(eighths) == close(1726 / 32768)


def test_interaction_equals_repeated_measures_anova() -> None:
    from statsmodels.stats.anova import AnovaRM

    draws = np.random.default_rng(2)
    cells = {(a, b): draws.normal(0.3 * a + 0.2 * b + 0.5 * a * b, 0.4, 8) for a in (0, 1) for b in (0, 1)}
    rows = [
        {"seed": seed, "a": a, "b": b, "y": value}
        for (a, b), values in cells.items()
        for seed, value in enumerate(values)
    ]
    table = AnovaRM(pd.DataFrame(rows), "y", "seed", within=["a", "b"]).fit().anova_table
    result = pairs(cells[1, 1] - cells[1, 0], cells[0, 1] - cells[0, 0])
    assert (result.difference / result.se) ** 2 == pytest.approx(table.loc["a:b", "F Value"])
    assert result.p == pytest.approx(table.loc["a:b", "Pr > F"])


# -- several comparisons ----------------------------------------------------------------------------------------------


def test_variances_are_shared_by_the_rule() -> None:
    """Written out for one study; a loud arm counts at most 100 times a quiet one's variance."""
    draws = np.random.default_rng(1)
    values = draws.normal(size=(1, 9, 4)) * np.array([1, 1, 1, 1, 1, 1, 1, 1, 300])[:, None]
    found = judge_studies(values, Comparisons.all_with_first(8)).contrasts
    d = values[0, 1:] - values[0, :1]
    v = d.var(axis=1, ddof=1)
    c = min(1, (8 - 1) / 6)
    reference = np.array([np.mean([min(other, 100 * own) for other in v]) for own in v])
    variance = np.array([max(own, (own + c * mean) / (1 + c)) for own, mean in zip(v, reference, strict=True)])
    assert v[7] > 100 * v[:7].max() and found.shared[0].tolist() == [8] * 8
    assert found.se[0] == pytest.approx(np.sqrt(variance / 4)) and found.df[0] == pytest.approx([3 * (1 + c)] * 8)
    p = 2 * stats.t.sf(np.abs(d.mean(axis=1)) / np.sqrt(variance / 4), 3 * (1 + c))
    assert found.p_corrected[0] == pytest.approx(np.minimum(1, 8 * p))
    own = judge_studies(values, replace(Comparisons.all_with_first(8), variance="own")).contrasts
    assert own.p[0] == pytest.approx([stats.ttest_1samp(row, 0).pvalue for row in d])


def test_comparisons_share_with_those_of_their_baseline_and_seeds() -> None:
    values = np.random.default_rng(2).normal(size=(1, 8, 5))
    values[0, 3, 4] = math.nan  # other seeds
    values[0, 4] = values[0, 0] + 1  # no spread
    values[0, 5, 0] = -1000.0  # collapsed
    design = replace(Comparisons.all_with_first(7), baselines=np.array([0, 0, 0, 0, 0, 0, 1]))
    found = judge_studies(values, design).contrasts
    assert found.shared[0].tolist() == [3, 3, 1, 1, 1, 3, 1]
    assert [found.single(0, place).test for place in (0, 2, 3, 4)] == ["paired t", "paired t", "sign flip", "sign flip"]
    # Registered comparisons share with registered ones alone, so that later ones change nothing of them.
    later = replace(Comparisons.all_with_first(3), registered=np.array([True, True, False]))
    both = judge_studies(values[:, :4, :4], later).contrasts
    alone = judge_studies(values[:, :3, :4], Comparisons.all_with_first(2)).contrasts
    assert both.shared[0].tolist() == [2, 2, 3] and both.se[0, :2] == pytest.approx(alone.se[0])
    two = judge_studies(values[:, :4, :2], Comparisons.all_with_first(3)).contrasts
    assert two.shared[0].tolist() == [1, 1, 1], "two pairs tell too little"


def test_many_studies_are_judged_as_each_alone() -> None:
    draws = np.random.default_rng(11)
    values = draws.normal(size=(60, 6, 5))
    values[draws.random(values.shape) < 0.1] = math.nan
    values[20:30, 2, 1] -= 100  # collapsed
    values[30:35, 3] = values[30:35, 0]  # equal
    values[35:40, 4] = values[35:40, 0] + 0.5  # without spread
    lost = np.isnan(values) & (draws.random(values.shape) < 0.5)
    design, chance = replace(Comparisons.all_with_first(5), margin=1.5), np.array([0.0, 0, 0, math.nan, 0, 0])
    together = judge_studies(values, design, lost_SAN=lost, chance_A=chance)
    verdicts = set()
    for study in range(60):
        alone = judge_studies(values[[study]], design, lost_SAN=lost[[study]], chance_A=chance)
        for name in Contrasts.__dataclass_fields__:
            of_all, of_one = (getattr(some.contrasts, name) for some in (together, alone))
            assert of_all[study] == pytest.approx(of_one[0], nan_ok=True), name
        assert together.verdict[study].tolist() == alone.verdict[0].tolist()
        verdicts |= {VERDICTS[place] for place in alone.verdict[0]}
    assert {Verdict.SAME, Verdict.CANNOT_TELL} <= verdicts


@pytest.mark.parametrize("seeds", [3, 5])
def test_report_judges_as_the_array_function_does(seeds: int) -> None:
    draws = np.random.default_rng(seeds)
    arms = ["baseline", "a", "b", "c"]
    values = 0.8 + 0.01 * draws.normal(size=(50, 4, seeds)) + 0.02 * draws.normal(size=(50, 4, 1))
    plan = Plan("s", "", tuple(Arm(arm, {}, None if arm == "baseline" else "baseline") for arm in arms), (), Analysis())
    judged = judge_studies(values, Comparisons.all_with_first(3))
    for study in range(50):
        samples = {arm: Sample(dict(enumerate(row))) for arm, row in zip(arms, values[study].tolist(), strict=True)}
        found = judge_study(plan, dict.fromkeys(arms[1:], "baseline"), samples, quantum=0.0)
        assert [one["verdict"] for one in found.values()] == [VERDICTS[place] for place in judged.verdict[study]]
        for place, one in enumerate(found.values()):
            expected = vars(judged.contrasts.single(study, place))
            assert one["test"] == expected.pop("test")
            assert {name: one[CONTRAST_COLUMNS.get(name, name)] for name in expected} == pytest.approx(
                expected, nan_ok=True
            )


def test_a_verdict_and_its_interval_never_disagree() -> None:
    draws = np.random.default_rng(3)
    values = draws.normal(size=(400, 5, 4)) + 1.5 * draws.normal(size=(400, 5, 1))
    for design in (Comparisons.all_with_first(4), replace(Comparisons.all_with_first(4), share=0.3, margin=1.0)):
        judged = judge_studies(values, design)
        excludes_zero = (judged.contrasts.low > 0) | (judged.contrasts.high < 0)
        has_interval = ~np.isnan(judged.contrasts.low)
        assert (excludes_zero == (judged.verdict >= BETTER))[has_interval].all() and excludes_zero.any()
        if design.margin is not None:
            inside = (judged.contrasts.equal_low > -1) & (judged.contrasts.equal_high < 1)
            assert (inside == (judged.contrasts.p_equal_corrected < 0.05))[has_interval].all()


SPREADS: Mapping[str, tuple[int, NDArray[np.float64]]] = {
    "6 of 20 at ten times": (3, np.array([1.0, *[10.0] * 6, *[1.0] * 14])),
    "3 of 10 at ten times": (3, np.array([1.0, *[10.0] * 3, *[1.0] * 7])),
    "2 of 6 at ten times": (3, np.array([1.0, *[10.0] * 2, *[1.0] * 4])),
    "10 of 40 at twelve times": (3, np.array([1.0, *[12.0] * 10, *[1.0] * 30])),
    "baseline four times": (3, np.array([4.0, *[1.0] * 10])),
    "6 of 20 at six times": (5, np.array([1.0, *[6.0] * 6, *[1.0] * 14])),
    "equal": (3, np.ones(6)),
}


@pytest.mark.parametrize("name", SPREADS)
def test_alpha_holds_where_arms_scatter_differently(name: str) -> None:
    n, spread = SPREADS[name]
    studies, m = 3000, len(spread) - 1
    values = np.random.default_rng([7, n, m]).standard_normal((studies, m + 1, n)) * spread[:, None]
    alarms = (judge_studies(values, Comparisons.all_with_first(m)).verdict >= BETTER).any(axis=1).mean()
    assert alarms <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / studies)


def test_alpha_holds_for_a_loud_arm_beside_arms_that_differ() -> None:
    """The last step of a step-down procedure, at which a loud arm alone is left: in one step nothing changes for it."""
    studies, m, n = 3000, 5, 3
    values = np.random.default_rng(8).standard_normal((studies, m + 1, n))
    values[:, 1] *= 10
    values[:, 2:] += 1e4
    alarms = (judge_studies(values, Comparisons.all_with_first(m)).verdict[:, 0] >= BETTER).mean()
    assert alarms <= 0.05


def test_equal_arms_are_told_apart_by_differences_of_which_single_comparisons_see_little() -> None:
    studies, n, m = 2000, 3, 10
    values = np.random.default_rng(9).standard_normal((studies, m + 1, n))
    values[:, 1] += 6.1
    found = {
        kind: (
            judge_studies(values, replace(Comparisons.all_with_first(m), variance=kind)).verdict[:, 0] >= BETTER
        ).mean()
        for kind in ("shared", "own")
    }
    assert found["shared"] == pytest.approx(0.8, abs=0.04) and found["own"] < 0.3


def test_intervals_cover_at_once() -> None:
    studies, m, n = 3000, 4, 6
    values = np.random.default_rng(21).standard_normal((studies, m + 1, n))
    truth = np.array([1.0, 0.0, 0.0, 0.0])
    values[:, 1:] += truth[:, None]
    found = judge_studies(values, Comparisons.all_with_first(m)).contrasts
    covered = ((found.low <= truth) & (truth <= found.high)).all(axis=1).mean()
    assert covered >= 0.95 - 3 * math.sqrt(0.05 * 0.95 / studies)


def test_rounding_makes_no_gaps_between_seeds() -> None:
    draws = np.random.default_rng(0)
    for _ in range(300):
        tenths = np.round(10 * (90 + 0.3 * draws.normal(size=(6, 3))))
        whole, shifted = (replicates.non_normality_score(values) for values in (tenths, tenths / 10))
        assert whole == pytest.approx(shifted, rel=1e-6, nan_ok=True)


# -- lost and collapsed seeds -----------------------------------------------------------------------------------------


def test_collapsed_seeds_are_found_by_the_scale_of_their_pair() -> None:
    draws = np.random.default_rng(4)
    values = 0.9 + 0.002 * draws.normal(size=(1, 3, 8))
    values[0, 1, 5] = 0.1
    arms, baselines = np.moveaxis(find_collapsed_of_both_sides(values, Comparisons.all_with_first(2)), 2, 0)
    assert np.argwhere(arms).tolist() == [[0, 0, 5]] and not baselines.any()
    arms, _ = np.moveaxis(
        find_collapsed_of_both_sides(2 - values, replace(Comparisons.all_with_first(2), sign=-1)), 2, 0
    )
    assert np.argwhere(arms).tolist() == [[0, 0, 5]], "of a loss, larger is worse"
    arms, _ = np.moveaxis(find_collapsed_of_both_sides(2 - values, Comparisons.all_with_first(2)), 2, 0)
    assert not arms.any(), "far better is no collapse"
    images = replace(Comparisons.all_with_first(2), quantum=1 / 100)
    arms, _ = np.moveaxis(find_collapsed_of_both_sides(values, images), 2, 0)
    assert np.argwhere(arms).tolist() == [[0, 0, 5]], "100 images do not explain 0.8"
    values_at_chance = np.array([[[204, 225, 211, 212], [17, 29, 28, 29]]]) / 288
    for quantum, found in ((0.0, True), (1 / 288, False)):
        one = replace(Comparisons.all_with_first(1), quantum=quantum)
        assert find_collapsed_of_both_sides(values_at_chance, one).any() == found, "288 images explain 12 of them"
    judged = judge_studies(values, Comparisons.all_with_first(2))
    assert judged.contrasts.single(0, 0).test == "sign flip" and judged.contrasts.single(0, 1).test == "paired t"
    unpaired = values.copy()
    unpaired[0, 0, :4], unpaired[0, 1, 4:] = math.nan, math.nan
    unpaired[0, 1, 0] = 0.1
    assert judge_studies(unpaired, Comparisons.all_with_first(2)).contrasts.single(0, 0).test == "none", (
        "nothing rests on t"
    )


def test_verdict_has_to_hold_with_chance_in_place_of_lost_seeds() -> None:
    base = 0.9 + 0.001 * np.arange(6)
    arm = base + 0.02 + 0.0003 * np.array([1, -1, 0, 1, -1, 0])
    values, lost = np.array([[base, arm]]), np.zeros((1, 2, 6), bool)
    values[0, 1, 5], lost[0, 1, 5] = math.nan, True
    judged = judge_studies(values, ONE, lost_SAN=lost, chance_A=np.array([0.1, 0.1]))
    filled = stats.ttest_rel([*arm[:5], 0.1], base)
    assert judged.with_chance.p[0, 0] == pytest.approx(filled.pvalue)
    assert VERDICTS[judged.complete_verdict[0, 0]] is Verdict.BETTER
    assert VERDICTS[judged.verdict[0, 0]] is Verdict.CANNOT_TELL
    unknown = judge_studies(values, ONE, lost_SAN=lost)
    assert VERDICTS[unknown.verdict[0, 0]] is Verdict.CANNOT_TELL and math.isnan(unknown.with_chance.p[0, 0])


@pytest.mark.parametrize("n", [3, 5, 20])
def test_rate_that_no_collapse_hides_is_the_exact_binomial_bound(n: int) -> None:
    bound = stats.binomtest(0, n, alternative="less").proportion_ci(0.95, method="exact").high
    assert replicates.collapse_rate_bound(n) == pytest.approx(bound)


# -- what is printed --------------------------------------------------------------------------------------------------


def rows_of(arms: Mapping[str, Sequence[float]], quantum: float = 0.0, **analysis: object) -> list[dict[str, object]]:
    names = [*arms]
    frame = pd.DataFrame(
        {
            "arm": pd.Series(np.repeat(names, [len(values) for values in arms.values()]), dtype="string"),
            "seed": list(itertools.chain(*(range(len(values)) for values in arms.values()))),
            "val/accuracy": list(itertools.chain(*arms.values())),
        }
    )
    frame["baseline"] = frame["arm"].where(frame["arm"] == names[0], names[0]).mask(frame["arm"] == names[0])
    frame["trial"], frame["status"] = frame["arm"] + frame["seed"].astype(str), "done"
    frame = frame.assign(params=10, macs=10, images=100, wall_s=1.0)
    plan = Plan(
        "s",
        "",
        tuple(Arm(name, {}, None if name == names[0] else names[0]) for name in names),
        (),
        Analysis(**analysis),
        metrics={"accuracy": MetricFacts("max", "share", (0.0, 1.0))},
    )
    return summary_rows(StudyResults(plan, frame, quantum=quantum))


def sentences(rows: list[dict[str, object]]) -> list[str]:
    return [
        answer.sentence
        for answer in phrasing.answer_per_arm(
            rows, Analysis(), phrasing.Scale.of("val/accuracy", {"accuracy": "share"})
        )
    ]


def test_intervals_stay_within_the_bounds_of_an_accuracy() -> None:
    rows = rows_of({"baseline": [0.99, 0.9, 0.6], "a": [0.05, 0.9, 0.4], "b": [0.9, 0.1, 0.5]})
    assert rows[0]["high"] == 1.0 and rows[0]["low"] > 0
    assert (rows[1]["difference_low"], rows[1]["difference_high"]) == (-1.0, 1.0)
    assert "to 100.0, p" in sentences(rows)[0]


def test_two_values_are_printed_without_interval() -> None:
    rows = rows_of({"baseline": [0.962, 0.983], "a": [0.90, 0.95]})
    assert rows[1]["low"] is rows[1]["difference_low"] is None and rows[1]["difference_sd"] is not None
    [sentence] = sentences(rows)
    assert "(\N{MINUS SIGN}6.2 and \N{MINUS SIGN}3.3 at the two seeds, which gives no useful interval, p = " in sentence
    [alone] = sentences(rows_of({"baseline": [0.962, 0.983]}))
    assert alone.endswith("(96.2 and 98.3 at the two seeds, which gives no useful interval).")


def test_difference_over_common_seeds_says_so() -> None:
    rows = rows_of({"baseline": [0.72, 0.75, 0.74], "a": [0.73, 0.75, 0.72, 0.6, 0.65]})
    assert ", over the 3 seeds that both have (" in sentences(rows)[0]


def test_equal_means_are_level() -> None:
    rows = rows_of({"baseline": [0.1, 0.2, 0.3, 0.7], "a": [0.2, 0.7, 0.1, 0.3]})
    assert sentences(rows)[0].startswith("cannot tell: a is level with baseline")


def test_collapsed_seeds_stand_beside_what_is_without_them() -> None:
    arms = {"baseline": [0.9, 0.901, 0.899, 0.902, 0.9, 0.9], "a": [0.93, 0.931, 0.929, 0.1, 0.93, 0.932]}
    row = rows_of(arms)[1]
    sound = np.delete(np.subtract(arms["a"], arms["baseline"]), 3)
    assert row["collapsed"] == 1 and row["sound_difference"] == pytest.approx(sound.mean())
    assert row["sound_mean"] == pytest.approx(np.delete(arms["a"], 3).mean())
    assert "1 seed collapsed, so t is not used; the others are 3.0 points above)" in sentences([row])[0]


def test_interval_for_new_images_is_never_absurd() -> None:
    """Differences of mean squares that nearly cancel leave no degrees of freedom by Satterthwaite's formula."""
    draws, widest = np.random.default_rng(0), 0.0
    for _ in range(1500):
        differences = draws.choice([-1.0, 0.0, 1.0], p=[0.05, 0.9, 0.05], size=(3, 288))
        means = differences.mean(axis=1)
        se = means.std(ddof=1) / math.sqrt(3)
        if se > 0:
            low, high = replicates.interval_for_new_images(differences, se, 2.0, alpha=0.05)
            widest = max(widest, high - low)
    assert widest < 2


def test_seeds_in_groups_are_noted() -> None:
    """Two levels in most studies of 20 arms with 5 seeds; normal seeds, correlated or loud, in about 1 %."""
    draws = np.random.default_rng(3)
    score = replicates.non_normality_score
    two_levels = [(draws.random((21, 5)) < 0.3) + 0.07 * draws.standard_normal((21, 5)) for _ in range(60)]
    normal = [draws.standard_normal((21, 5)) + 3 * draws.standard_normal(5) for _ in range(300)]
    loud = [draws.standard_normal((6, 5)) * np.array([4.0, 1, 1, 10, 1, 1])[:, None] for _ in range(300)]
    assert np.mean([score(values) > 3 for values in two_levels]) > 0.8
    assert np.mean([score(values) > 3 for values in [*normal, *loud]]) < 0.03
    assert math.isnan(score(np.round(draws.standard_normal((4, 5))))), "rounded values have gaps of their own"


def test_worked_example_of_the_page_is_that_of_the_report() -> None:
    """The table of the page is judged, and every number of its steps is recomputed with scipy."""
    page = Path(__file__, "../../docs/pages/statistics.md").resolve().read_text(encoding="utf-8")
    example = page.partition("## A worked example")[2].partition("\n## ")[0]
    lines = [line.strip("| ").split(" | ") for line in example.splitlines() if line.startswith("| ")][2:]
    arms = {name: [float(cell) / 100 for cell in cells[:4]] for name, *cells in lines}
    rows = rows_of(arms)
    quoted = [" ".join(text.split()) for text in re.findall(r"(?:^> ?.*\n?)+", example, re.M)]
    told = " ".join(quoted[0].replace("> ", "").replace(">", "").split())
    assert told == " ".join(sentences(rows))
    d = 100 * np.array([np.subtract(values, arms["baseline"]) for values in list(arms.values())[1:]])
    v, df = d.var(axis=1, ddof=1), 3 * (1 + 1 / 3)
    shared = np.maximum(v, (v + v.mean() / 3) / (1 + 1 / 3))
    t = d.mean(axis=1) / np.sqrt(shared / 4)
    steps = [*v, v.mean(), *shared[:2], np.sqrt(shared[1] / 4)]
    assert all(f"{number:.4f}" in example for number in steps)
    assert all(
        text in example for text in (f"{-t[0]:.1f}, {t[1]:.2f} and {t[2]:.2f}", f"{df:.0f}.", "2.225, 0.825 and 0.1")
    )
    assert f"{stats.t.ppf(1 - 0.05 / 6, df):.3f}" in example
    adjusted = np.minimum(1, 3 * 2 * stats.t.sf(np.abs(t), df))
    assert [row["p_corrected"] for row in rows[1:]] == pytest.approx(adjusted.tolist())
    assert f"{adjusted[0]:.4f}, {adjusted[1]:.4f}" in " ".join(example.split())


def test_synthetic_rows_have_every_column() -> None:
    values = {"baseline": dict(enumerate(B)), "a": dict(enumerate(A))}
    plan = Plan("s", "", (Arm("baseline", {}), Arm("a", {}, "baseline")), (), Analysis())
    assert synthetic_studies.judged_rows(plan, values)["a"]["p"] == pytest.approx(stats.ttest_rel(A, B).pvalue)
