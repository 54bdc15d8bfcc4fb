"""Tests of the statistics against scipy, statsmodels, closed forms, brute force and simulation."""

from __future__ import annotations

import itertools
import math
import subprocess
import sys

import numpy as np
import pytest
from scipy import stats
from sklearn.datasets import load_digits
from statsmodels.stats.multitest import multipletests
from statsmodels.stats.power import TTestPower

from vitlab import statistics as st

A = [0.951, 0.947, 0.958, 0.949, 0.955]
B = [0.972, 0.969, 0.971, 0.975, 0.968]


def close(value: float) -> object:
    return pytest.approx(value, rel=1e-9)


def test_mean_interval_equals_scipy():
    result = st.mean_interval(A, alpha=0.1)
    low, high = stats.t.interval(0.9, 4, loc=np.mean(A), scale=stats.sem(A))
    assert (result.n, result.mean, result.sd) == (5, close(np.mean(A)), close(np.std(A, ddof=1)))
    assert (result.low, result.high) == (close(low), close(high))


def test_one_and_two_values_have_no_interval():
    one = st.mean_interval([0.9])
    assert one.mean == 0.9
    assert math.isnan(one.sd) and math.isnan(one.low) and math.isnan(one.high)
    two = st.mean_interval([0.0, 2.0])
    assert two.sd == close(math.sqrt(2)) and math.isnan(two.low) and math.isnan(two.high)
    assert math.isnan(st.mean_interval([]).mean)


def test_paired_equals_scipy():
    result = st.paired_t_test(A, B)
    reference = stats.ttest_rel(A, B)
    interval = reference.confidence_interval(0.95)
    assert result.p == close(reference.pvalue)
    assert (result.low, result.high) == (close(interval.low), close(interval.high))
    assert result.difference == close(np.mean(A) - np.mean(B))
    assert (result.test, result.pairs) == ("paired t", 5)


def test_resampled_t_is_corrected_as_nadeau_and_bengio_do():
    """Differences 1, 2, 3, 4 of four splits, a tenth held out: variance (1/4 + 1/9) * 5/3 = 65/108."""
    result = st.paired_t_test([1, 2, 3, 4], [0.0] * 4, overlap=1 / 9)
    assert (result.se, result.df, result.test) == (close(math.sqrt(65 / 108)), 3, "paired t")
    assert result.p == close(2 * stats.t.sf(2.5 / math.sqrt(65 / 108), 3)) and result.p > st.paired_t_test(A, B).p
    assert math.isnan(result.sign_flip_p) and st.paired_t_test([1, 2, 3, 4], [0.0] * 4).se == close(math.sqrt(5 / 12))
    half = stats.t.ppf(0.975, 3) * math.sqrt(65 / 108)
    mean = st.mean_interval([1, 2, 3, 4], overlap=1 / 9)
    assert (result.low, result.high) == (mean.low, mean.high) == (close(2.5 - half), close(2.5 + half))
    welch = st.welch_t_test(A, B[:3], overlap=0.25)
    assert welch.se == close(math.sqrt(np.var(A, ddof=1) * (1 / 5 + 0.25) + np.var(B[:3], ddof=1) * (1 / 3 + 0.25)))
    # The square of the half width goes with 1 / n + overlap, so that it has a lower bound.
    pairs = st.pairs_for_half_width(1.5, result.se, 3, 4, overlap=1 / 9)
    widths = [stats.t.ppf(0.975, n - 1) * math.sqrt(5 / 3 * (1 / n + 1 / 9)) for n in (pairs - 1, pairs)]
    assert widths[0] > 1.5 >= widths[1]
    assert math.isnan(st.pairs_for_half_width(0.8, result.se, 3, 4, overlap=1 / 9))
    # Where the overlap is not known, or differences have no spread, nothing is left to test by.
    assert st.paired_t_test([1, 2, 3, 4], [0.0] * 4, overlap=math.nan).test == "none"
    assert st.paired_t_test([2.0] * 4, [1.0] * 4, overlap=1 / 9).test == "none"
    assert st.paired_t_test([2.0] * 4, [2.0] * 4, overlap=1 / 9).test == "sign flip"


def test_exchangeable_learners_are_told_apart_on_overlapping_splits_by_plain_t_alone():
    """Nearest class means of random halves of the pixels, on ten splits of each of 300 draws of 200 digits."""
    pixels, labels = load_digits(return_X_y=True)
    draws, found = np.random.default_rng(0), np.zeros(2)
    for _ in range(300):
        rows = draws.choice(len(labels), 200, replace=False)
        y, x = labels[rows], pixels[rows] * (draws.random((2, 200, 64)) < 0.5)
        accuracy = np.empty((2, 10))
        for split in range(10):
            order = draws.permutation(200)
            val, train = order[:20], order[20:]
            classes = np.eye(10)[y[train]]
            means = classes.T @ x[:, train] / classes.sum(axis=0)[:, None]
            scores = x[:, val] @ means.transpose(0, 2, 1) - (means**2).sum(axis=2)[:, None] / 2
            accuracy[:, split] = (scores.argmax(axis=2) == y[val]).mean(axis=1)
        found += [st.paired_t_test(*accuracy, overlap=ratio).p < 0.05 for ratio in (0.0, 20 / 180)]
    plain, corrected = found / 300
    assert plain > 0.1 and corrected < 0.05 + 3 * math.sqrt(0.05 * 0.95 / 300)


def test_welch_equals_scipy():
    result = st.welch_t_test(A, B[:3], alpha=0.02)
    reference = stats.ttest_ind(A, B[:3], equal_var=False)
    interval = reference.confidence_interval(0.98)
    assert (result.p, result.df) == (close(reference.pvalue), close(reference.df))
    assert (result.low, result.high) == (close(interval.low), close(interval.high))


def test_compare_pairs_equal_seeds_and_falls_back_to_welch():
    first = dict(zip([0, 1, 2, 3, 4], A, strict=True))
    shuffled = dict(zip([4, 2, 0, 7], [B[4], B[2], B[0], 0.1], strict=True))
    assert st.compare(first, shuffled) == st.paired_t_test([A[0], A[2], A[4]], [B[0], B[2], B[4]])
    apart = {seed + 10: value for seed, value in enumerate(B)}
    assert st.compare(first, apart).test == "Welch t"
    assert st.compare(first, apart).p == close(stats.ttest_ind(A, B, equal_var=False).pvalue)


def test_too_few_values_give_difference_only():
    for actual in (st.compare({0: 0.5}, {0: 0.25}), st.compare({1: 0.5}, {0: 0.25}), st.compare({0: 0.5}, {1: 0.25})):
        assert (actual.difference, actual.test) == (0.25, "none")
        assert math.isnan(actual.p) and math.isnan(actual.low) and math.isnan(actual.high)
    assert math.isnan(st.compare({}, {0: 0.2}).difference)


def test_two_pairs_have_one_degree_of_freedom():
    result = st.paired_t_test([1.0, 3.0], [0.0, 0.0])
    # Mean 2, standard error 1, Cauchy: P(|T| > 2) = 1 - 2/pi * atan(2).
    assert result.p == close(1 - 2 / math.pi * math.atan(2))
    assert result.sign_flip_p == 0.5


def test_zero_spread_is_not_certainty():
    # Three seeds shifted by exactly the same amount: t would give p = 0.
    result = st.paired_t_test([0.3, 0.4, 0.5], [0.2, 0.3, 0.4])
    assert (result.test, result.p) == ("sign flip", 0.25)
    assert (
        math.isnan(result.low)
        and math.isnan(result.high)
        and math.isnan(st.detectable_difference(result.se, result.df))
    )
    same = st.paired_t_test(A, A)
    assert (same.difference, same.p, same.test) == (0.0, 1.0, "sign flip")
    assert math.isnan(st.welch_t_test([1.0, 1.0], [2.0, 2.0]).p)
    # Equal up to the rounding of a sum at each of ten seeds, which is no difference.
    rounded = st.paired_t_test([0.1 + 0.2] * 10, [0.3] * 10)
    assert (rounded.difference, rounded.p, rounded.test) == (0.0, 1.0, "sign flip")
    many = st.paired_t_test([float(i) + 1 for i in range(60)], [float(i) for i in range(60)])
    assert (many.difference, many.p) == (1.0, 2.0**-59)


def test_non_finite_values_are_refused():
    for values in ([0.9, math.nan], [math.inf, 0.9]):
        with pytest.raises(ValueError, match="1 of 2 values are not finite"):
            st.mean_interval(values)
        with pytest.raises(ValueError, match="not finite"):
            st.paired_t_test(values, [0.1, 0.2])
        with pytest.raises(ValueError, match="not finite"):
            st.welch_t_test([0.1, 0.2], values)


@pytest.mark.parametrize("n", [1, 2, 5, 6, 9])
def test_sign_flip_equals_brute_force(n):
    d = np.random.default_rng(n).normal(0.5, 1, n).round(1)  # rounded, so that there are ties
    sums = [abs(np.dot(signs, d)) for signs in itertools.product([1, -1], repeat=n)]
    assert st.sign_flip(d) == close(np.mean([total >= abs(d.sum()) - 1e-9 for total in sums]))


def test_sign_flip_equals_scipy_permutation_test_and_its_bound():
    d = np.random.default_rng(3).normal(0.4, 1, 10)
    reference = stats.permutation_test((d,), np.mean, permutation_type="samples", n_resamples=np.inf)
    assert st.sign_flip(d) == close(reference.pvalue)
    assert st.sign_flip([1, 2, 3, 4, 5]) == st.smallest_sign_flip_p(5) == 0.0625
    assert st.sign_flip(np.ones(40)) == close(2.0**-39)
    assert math.isnan(st.sign_flip(np.ones(41)))


def test_holm_equals_hand_calculation():
    # Sorted .01 .02 .04: times 3, 2, 1, and never falling.
    assert st.adjust_p_values([0.04, 0.01, 0.02]) == [close(0.04), close(0.03), close(0.04)]
    assert st.adjust_p_values([0.04, 0.01, 0.5], "bonferroni") == [close(0.12), close(0.03), 1.0]
    assert st.adjust_p_values([0.04, 0.01], "none") == [0.04, 0.01]
    assert st.adjust_p_values([]) == []


def test_undecidable_comparison_counts_in_family():
    p, missing = st.adjust_p_values([0.03, math.nan])
    assert p == close(0.06)
    assert math.isnan(missing)


@pytest.mark.parametrize(("n", "alpha"), [(3, 0.05), (5, 0.05), (5, 0.05 / 3), (20, 0.01), (200, 0.05)])
def test_detectable_effect_equals_statsmodels(n, alpha):
    size = TTestPower().solve_power(nobs=n, alpha=alpha, power=0.8, alternative="two-sided")
    assert st.detectable_difference(0.7 / math.sqrt(n), n - 1, alpha) == pytest.approx(0.7 * size, rel=1e-5)


def test_power_at_one_degree_of_freedom_equals_simulation():
    # Sizes at which scipy's noncentral t fails.
    draws = np.random.default_rng(0).normal(20.0, math.sqrt(2.0), (200_000, 2))
    t = draws.mean(1) / (draws.std(1, ddof=1) / math.sqrt(2))
    share = np.mean(np.abs(t) > stats.t.ppf(0.975, 1))
    assert st.power(20.0, 1.0, 1, 0.05) == pytest.approx(share, abs=0.004)
    assert st.power(0.0, 1.0, 1, 0.05) == pytest.approx(0.05, abs=1e-6)


def test_false_alarm_rate_is_nominal():
    """Without differences, the paired test errs in 5 % of studies, a family of three under Holm in at most 5 %."""
    random = np.random.default_rng(11)
    single = family = covered = 0
    studies = 1500
    for _ in range(studies):
        baseline = random.normal(0, 1, 5)
        p = []
        for _ in range(3):
            result = st.paired_t_test(0.5 * baseline + random.normal(0, 1, 5), 0.5 * baseline)
            p.append(result.p)
            covered += result.low <= 0 <= result.high
        single += p[0] < 0.05
        family += min(st.adjust_p_values(p)) < 0.05
    assert single / studies == pytest.approx(0.05, abs=0.017)  # three standard errors
    assert family / studies == pytest.approx(0.047, abs=0.018)
    assert covered / (3 * studies) == pytest.approx(0.95, abs=0.01)


# -- worked examples, as numbers --------------------------------------------------------------------------------------

# Student (1908), Biometrika 6, 1-25: hours of sleep gained by ten patients under two drugs; R's data set `sleep`.
SLEEP_1 = [0.7, -1.6, -0.2, -1.2, -0.1, 3.4, 3.7, 0.8, 0.0, 2.0]
SLEEP_2 = [1.9, 0.8, 1.1, 0.1, -0.1, 4.4, 5.5, 1.6, 4.6, 3.4]


def test_sleep_data_equal_r():
    """R 4: t.test(extra ~ group, sleep, paired = TRUE) and without."""
    pairs = st.paired_t_test(SLEEP_1, SLEEP_2)
    assert pairs.difference / pairs.se == pytest.approx(-4.0621, abs=5e-5)
    assert (pairs.df, pairs.p) == (9, pytest.approx(0.002833, abs=5e-7))
    assert (pairs.low, pairs.high) == (pytest.approx(-2.4598858, abs=5e-8), pytest.approx(-0.7001142, abs=5e-8))
    apart = st.welch_t_test(SLEEP_1, SLEEP_2)
    assert apart.difference / apart.se == pytest.approx(-1.8608, abs=5e-5)
    assert apart.df == pytest.approx(17.776, abs=5e-4)
    assert apart.p == pytest.approx(0.07939, abs=5e-6)
    assert (apart.low, apart.high) == (pytest.approx(-3.3654832, abs=5e-8), pytest.approx(0.2054832, abs=5e-8))


def test_darwin_maize_equals_fisher():
    """Fisher (1935), The Design of Experiments, sections 17 and 21: t = 2.148; 1,726 of 32,768 sign changes."""
    eighths = [49, -67, 8, 16, 6, 23, 28, 41, 14, 29, 56, 24, 75, 60, -48]
    result = st.paired_t_test(eighths, [0.0] * 15)
    assert result.difference / result.se == pytest.approx(2.148, abs=5e-4)
    assert result.sign_flip_p == close(1726 / 32768)


def test_holm_equals_r():
    """R: p.adjust(c(0.01, 0.02, 0.03, 0.04, 0.05), "holm")."""
    assert st.adjust_p_values([0.01, 0.02, 0.03, 0.04, 0.05]) == pytest.approx([0.05, 0.08, 0.09, 0.09, 0.09])


@pytest.mark.parametrize("method", ["holm", "bonferroni"])
def test_corrections_equal_statsmodels(method):
    random = np.random.default_rng(4)
    families = [random.random(size) ** 3 for size in (1, 2, 3, 8, 40)]
    families += [np.array([0.04, 0.04, 0.01, 0.04]), np.array([0.0, 1.0, 1.0]), np.array([0.2, math.nan, 0.001, 0.2])]
    for p in families:
        for share in (1, 0.5):
            expected = 1 / share * multipletests(np.where(np.isnan(p), 1.0, p), method=method)[1]
            expected = np.where(np.isnan(p), math.nan, np.minimum(expected, 1.0))
            assert st.adjust_p_values(list(p), method, share) == pytest.approx(list(expected), rel=1e-14, nan_ok=True)


def test_pairs_for_half_width_are_fewest():
    def half(n: int, sd: float, alpha: float) -> float:
        low, high = stats.t.interval(1 - alpha, n - 1, scale=sd / math.sqrt(n))
        return float(high - low) / 2

    for sd, alpha, width in ((1.0, 0.05, 0.3), (0.02, 0.05 / 3, 0.01), (1.0, 0.01, 0.9)):
        n = round(st.pairs_for_half_width(width, sd / math.sqrt(5), 4, 5, alpha))
        assert half(n, sd, alpha) <= width < half(n - 1, sd, alpha)
    assert math.isnan(st.pairs_for_half_width(1e-4, 1.0, 4, 5)) and math.isnan(st.pairs_for_half_width(1.0, 0.0, 4, 5))


def test_interaction_equals_repeated_measures_anova():
    import pandas as pd
    from statsmodels.stats.anova import AnovaRM

    random = np.random.default_rng(2)
    cells = {(a, b): random.normal(0.3 * a + 0.2 * b + 0.5 * a * b, 0.4, 8) for a in (0, 1) for b in (0, 1)}
    rows = [
        {"seed": seed, "a": a, "b": b, "y": value}
        for (a, b), values in cells.items()
        for seed, value in enumerate(values)
    ]
    table = AnovaRM(pd.DataFrame(rows), "y", "seed", within=["a", "b"]).fit().anova_table
    sides = [dict(enumerate(cells[cell])) for cell in ((1, 1), (1, 0), (0, 1), (0, 0))]
    result = st.interaction(*sides)
    assert (result.difference / result.se) ** 2 == pytest.approx(table.loc["a:b", "F Value"])
    assert result.p == pytest.approx(table.loc["a:b", "Pr > F"])
    del sides[0][0], sides[3][7]
    assert st.interaction(*sides).pairs == 6
    assert st.interaction({}, *sides[1:]).test == "none"


def test_pareto_front_equals_brute_force():
    random = np.random.default_rng(8)
    for _ in range(50):
        costs, values = random.integers(0, 6, (2, 9)).astype(float)
        front = st.pareto(costs, values)
        for index, (cost, value) in enumerate(zip(costs, values, strict=True)):
            dominated = any(
                c <= cost and v >= value and (c, v) != (cost, value) for c, v in zip(costs, values, strict=True)
            )
            assert front[index] == (not dominated)


def test_simultaneous_intervals_cover_and_power_is_nominal():
    """The reference simulates scipy's t: four arms, one baseline, six seeds, one arm that differs."""
    random = np.random.default_rng(21)
    studies, m, n = 1500, 4, 6
    level = st.simultaneous_alpha(0.05, m)
    assert (level, st.simultaneous_alpha(0.05, m, "none")) == (0.0125, 0.05)
    true = st.detectable_difference(math.sqrt(2 / n), n - 1, level)
    every = detected = 0
    for _ in range(studies):
        baseline = random.normal(0, 1, n)
        arms = [random.normal(true if arm == 0 else 0, 1, n) for arm in range(m)]
        contrasts = [st.paired_t_test(arm, baseline, level) for arm in arms]
        every += all(c.low <= (true if i == 0 else 0) <= c.high for i, c in enumerate(contrasts))
        detected += contrasts[0].p <= level
    assert every / studies >= 0.95 - 3 * 0.0057
    assert detected / studies == pytest.approx(0.8, abs=0.032)


def test_statistics_import_neither_torch_nor_statsmodels():
    heavy = "{'torch', 'scipy', 'statsmodels', 'pandas', 'mlflow'}"
    code = f"import sys, vitlab.statistics; found = {heavy} & set(sys.modules); sys.exit(str(found) if found else 0)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
