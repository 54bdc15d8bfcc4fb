"""Tests of the statistics against scipy, statsmodels, closed forms, brute force and simulation."""

from __future__ import annotations

import itertools
import math
import subprocess
import sys

import numpy as np
import pytest
from scipy import stats
from scipy.special import polygamma
from sklearn.datasets import load_digits
from statsmodels.stats.multitest import multipletests
from statsmodels.stats.power import TTestPower
from statsmodels.stats.weightstats import ttost_paired

from vitlab import statistics as st
from vitlab.statistics.moderation import inverse_trigamma, lower_prior_df

A = [0.951, 0.947, 0.958, 0.949, 0.955]
B = [0.972, 0.969, 0.971, 0.975, 0.968]


def close(value: float) -> object:
    return pytest.approx(value, rel=1e-9)


def test_mean_interval_equals_scipy():
    result = st.mean_interval(A, alpha=0.1)
    low, high = stats.t.interval(0.9, 4, loc=np.mean(A), scale=stats.sem(A))
    assert (result.n, result.mean, result.sd) == (5, close(np.mean(A)), close(np.std(A, ddof=1)))
    assert (result.low, result.high) == (close(low), close(high))


def test_single_value_has_no_interval_and_two_have_wide_one():
    one = st.mean_interval([0.9])
    assert one.mean == 0.9
    assert math.isnan(one.sd) and math.isnan(one.low) and math.isnan(one.high)
    two = st.mean_interval([0.0, 2.0])
    assert two.high == close(1 + math.tan(math.pi * 0.475))  # one degree of freedom is Cauchy's distribution
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


def test_equivalence_equals_statsmodels():
    near = [value - 0.001 * index for index, value in enumerate(B)]
    result = st.equivalence(st.paired_t_test(near, B), margin=0.005)
    p, _, _ = ttost_paired(np.array(near), np.array(B), -0.005, 0.005)
    interval = stats.ttest_rel(near, B).confidence_interval(0.9)
    assert result.p == close(p)
    assert (result.low, result.high) == (close(interval.low), close(interval.high))
    assert result.equivalent == (interval.low > -0.005 and interval.high < 0.005)
    assert result.equivalent
    assert not st.equivalence(st.paired_t_test(A, B), margin=0.005).equivalent
    with pytest.raises(ValueError, match="positive"):
        st.equivalence(st.paired_t_test(A, B), margin=0)


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


@pytest.mark.parametrize(("m", "df"), [(1, 3), (3, 10), (10, 20)])
def test_largest_of_correlated_t_equals_scipy(m, df):
    shape = np.full((m, m), 0.5) + 0.5 * np.eye(m)
    for t in (1.0, 2.5, 4.0):
        bound = np.full(m, t)
        law = stats.multivariate_t(shape=shape, df=df)
        expected = 1 - law.cdf(bound, lower_limit=-bound, random_state=0, maxpts=100_000)  # by quasi-Monte Carlo
        assert st.max_t_p(t, df, [math.sqrt(0.5)] * m) == pytest.approx(expected, rel=5e-3, abs=1e-4)
    assert st.max_t_p(30.0, df, [0.3]) == pytest.approx(2 * stats.t.sf(30.0, df), rel=1e-6)
    quantile = st.max_t_quantile(0.05, df, [math.sqrt(0.5)] * m)
    assert st.max_t_p(quantile, df, [math.sqrt(0.5)] * m) == pytest.approx(0.05, rel=1e-6)


def test_step_down_starts_with_dunnett():
    draws = np.random.default_rng(0)
    groups = [draws.normal(mean, 1.0, 6) for mean in (0.0, 1.2, 0.2, 2.0)]
    expected = stats.dunnett(*groups[1:], control=groups[0], rng=np.random.default_rng(1))
    df = sum(len(group) - 1 for group in groups)
    p = st.step_down(list(expected.statistic), df, [math.sqrt(0.5)] * 3)
    first = int(np.argmax(np.abs(expected.statistic)))
    assert p[first] == pytest.approx(expected.pvalue[first], rel=0.02, abs=1e-4)
    assert all(step <= single + 1e-3 for step, single in zip(p, expected.pvalue, strict=True))
    last = int(np.argmin(np.abs(expected.statistic)))
    assert p[last] == pytest.approx(2 * stats.t.sf(abs(expected.statistic[last]), df), rel=1e-6)


def test_claims_of_difference_and_equivalence_share_alpha():
    """One arm equals the baseline and one differs by the margin; as two families, one claim is false in 8 % of studies."""
    draws, studies, n = np.random.default_rng(0), 4000, 20
    margin = 3.5 / math.sqrt(n)
    d = draws.normal(size=(studies, 2, n)) + np.array([[0.0], [margin]])
    mean, se = d.mean(axis=2), stats.sem(d, axis=2)
    difference = 2 * stats.t.sf(np.abs(mean) / se, n - 1)
    equal = np.maximum(stats.t.sf((mean + margin) / se, n - 1), stats.t.cdf((mean - margin) / se, n - 1))
    false = {"one family": 0, "two families": 0}
    for p, q in zip(difference.tolist(), equal.tolist(), strict=True):
        both = {
            "one family": st.adjust_claims(p, q),
            "two families": (st.adjust_p_values(p), st.adjust_p_values(q)),
        }
        for name, (first, second) in both.items():
            false[name] += first[0] <= 0.05 or second[1] < 0.05
    error = math.sqrt(0.05 * 0.95 / studies)
    assert false["one family"] / studies <= 0.05 + 3 * error
    assert false["two families"] / studies > 0.07


def test_inverse_trigamma_inverts():
    y = np.array([1e-6, 0.01, 0.5, 1.6449340668, 30.0, 1e5])
    assert polygamma(1, inverse_trigamma(y)) == pytest.approx(y, rel=1e-9)
    assert inverse_trigamma(np.array([math.pi**2 / 6])) == pytest.approx([1.0])


def test_comparisons_with_baseline_equal_multcomp():
    """Minutes until patients recover under four blankets (Westfall et al., 1999), by multcomp 1.4-22 in R 4.2.2.

    ``summary(glht(aov(minutes ~ blanket, recovery), mcp(blanket = "Dunnett")), adjusted("single-step" or "free",
    maxpts = 5e6, abseps = 1e-7))``; the quantile is that of ``confint``, of a precision of 1e-3.
    """
    t, patients, df = [-1.33018510935970, -4.65564788275897, -1.88372286866763], [3, 3, 15], 37
    loadings = [math.sqrt(n / (n + 20)) for n in patients]
    single = [st.max_t_p(value, df, loadings) for value in t]
    assert single == pytest.approx([0.455916505392956, 0.000121588417270835, 0.181979558948615], abs=1e-7)
    steps = [0.191598729487478, 0.000121515211800038, 0.127286866296596]
    assert st.step_down(t, df, loadings) == pytest.approx(steps, abs=1e-7)
    assert st.max_t_quantile(0.05, df, loadings) == pytest.approx(2.48808926294249, abs=1e-3)


def test_prior_equals_limma(monkeypatch):
    """``trigammaInverse(y)`` and ``fitFDist(x, df)$df2`` of limma 3.54.1 in R 4.2.2; it takes no lower end."""
    y = np.array([0.01, 0.5, 1.0, 30.0])
    inverses = [100.499166681943, 2.45995294835231, 1.42625512021508, 0.186622530083935]
    assert inverse_trigamma(y) == pytest.approx(inverses, rel=1e-12)
    monkeypatch.setattr("vitlab.statistics.moderation._quantile_of_log_spread", lambda m, n: 1.0)
    variances = np.array([0.12, 0.45, 0.08, 1.9, 0.33, 0.71, 0.27, 0.05])
    for df, prior_df in ((2, math.inf), (4, 3.42085557481125), (9, 2.52153774494866)):
        assert float(lower_prior_df(variances, df + 1)) == pytest.approx(prior_df, rel=1e-10)


def test_moderated_error_of_equal_arms_is_exact():
    """With equal arms and another baseline, it is the sum of two independent mean squares of an analysis of variance."""
    draws = np.random.default_rng(3)
    m, n = 6, 4
    base = draws.normal(size=n)
    pattern = draws.normal(size=(m, n))
    arms = pattern + base
    # Give the residuals of every arm the same length, so that nothing speaks against a common variance.
    for _ in range(200):
        arms -= arms.mean(axis=1, keepdims=True)
        effect = arms.mean(axis=0)
        arms = arms - effect
        arms /= np.sqrt((arms**2).sum(axis=1, keepdims=True))
    arms = arms + base
    residual = arms - arms.mean(axis=1, keepdims=True) - arms.mean(axis=0) + arms.mean()
    within = (residual**2).sum() / ((m - 1) * (n - 1))
    reference = base + 10 * draws.normal(size=n)
    between = np.var(reference - arms.mean(axis=0), ddof=1)
    result = st.moderate(arms, reference)
    assert result.prior_df == math.inf
    part = (1 - 1 / m) * within
    total = between + part
    own = np.var(reference - arms, axis=1, ddof=1)
    assert np.square(result.se) * n == pytest.approx(np.maximum(total, own))
    assert result.df == pytest.approx(total**2 / (between**2 / (n - 1) + part**2 / ((m - 1) * (n - 1))))


def residual_squares(values):
    """Return the sum of squares that arms and seeds leave, by regression on their indicators."""
    arms, seeds = np.indices(values.shape)
    effects = [np.eye(len(values))[arms.ravel()], np.eye(values.shape[1])[seeds.ravel()]]
    design = np.hstack(effects)
    return float(np.square(values.ravel() - design @ np.linalg.lstsq(design, values.ravel())[0]).sum())


@pytest.mark.parametrize(("n", "level"), [(3, 0.945), (5, 0.845), (12, 0.7)])
def test_arms_that_look_alike_have_one_variance(n, level):
    """F tests compare regressions with and without an arm; Bartlett's limit is that of scipy over equal arms."""
    draws, m, kinds = np.random.default_rng([21, n]), 6, set()
    equal = draws.normal(size=(20_000, m, n))
    equal = (
        equal - equal.mean(axis=2, keepdims=True) - (equal - equal.mean(axis=2, keepdims=True)).mean(axis=1)[:, None]
    )
    limit = np.quantile(stats.bartlett(*equal.transpose(1, 0, 2), axis=1).statistic, 0.975)
    for study in range(60):
        scale = np.ones((m + 1, 1))
        scale[study % (m + 1)] = draws.choice([1, 3, 10])
        values = draws.normal(size=(m + 1, n)) * scale + 3 * draws.normal(size=n)
        squares, df = residual_squares(values[1:]), (m - 1) * (n - 1)
        others = [residual_squares(np.delete(values[1:], arm, axis=0)) for arm in range(m)]
        f = [(squares - rest) / (n - 1) / (rest / (df - n + 1)) for rest in others]
        baseline = (residual_squares(values) - squares) / (n - 1) / (squares / df)
        residuals = values[1:] - values[1:].mean(axis=1, keepdims=True)
        bartlett = stats.bartlett(*(residuals - residuals.mean(axis=0))).statistic
        if abs(bartlett / limit - 1) < 0.05:
            continue  # the limits are simulated
        alike = min(stats.f.sf(f, n - 1, df - n + 1)) >= 0.025 / m and stats.f.sf(baseline, n - 1, df) >= 0.05
        alike = bool(alike and bartlett < limit)
        result = st.moderate(values[1:], values[0])
        kinds.add(alike)
        if alike:
            total = squares / df * (1 + stats.f.ppf(level, n - 1, df))
            own = (values[1:] - values[0]).var(axis=1, ddof=1)
            assert np.square(result.se) * n == pytest.approx(np.maximum(total, own))
            assert (result.arms, result.df, result.prior_df) == (tuple(range(m)), df, math.inf)
            assert np.square(result.loadings) == pytest.approx(0.5)
        elif not isinstance(result, str):
            assert result.df < df
    assert kinds == {True, False}


def test_baseline_that_scatters_ten_times_as_far_keeps_its_variance():
    *arms, base = np.random.default_rng(5).normal(size=(11, 5))
    assert st.moderate(arms, base).df == 36
    result = st.moderate(arms, 10 * base)
    assert 4 <= result.df < 4.5 and min(result.se) > 9 * base.std(ddof=1) / math.sqrt(5)


def test_moderation_needs_arms_and_seeds_and_spread():
    *arms, base = np.random.default_rng(0).normal(size=(6, 5))
    assert "fewer than 5 comparisons" in st.moderate(arms[:4], base)
    assert "fewer than 3 seeds" in st.moderate(np.array(arms)[:, :2], base[:2])
    assert "no spread" in st.moderate([*arms[:4], base + 1], base)
    with pytest.raises(ValueError, match="same seeds"):
        st.moderate(arms, base[:4])
    own = np.var(np.array(arms) - base, axis=1, ddof=1) / 5
    assert (np.square(st.moderate(arms, base).se) >= own - 1e-12).all()
    wild = np.random.default_rng(1).normal(size=(7, 5))
    wild[4] *= 200
    assert st.moderate(wild[:6], wild[6]).arms == (0, 1, 2, 3, 5)
    assert st.moderate(wild[:6], wild[6]).se == st.moderate(wild[[0, 1, 2, 3, 5]], wild[6]).se
    wild[3] *= 200
    assert "differ too much" in st.moderate(wild[:6], wild[6])


def test_errors_of_many_studies_equal_those_of_each():
    draws = np.random.default_rng(11)
    values = draws.normal(size=(40, 8, 4))
    values[10:20, 3] *= 50  # an arm that shares nothing
    values[20:30, 2:5] *= 50  # too many of them
    paired = np.ones((40, 7), bool)
    paired[30:35, 0] = False  # a comparison on which another test decides
    paired[35:, :3] = False  # too few are left
    own, se, df, joint = st.study_errors(values, 0.1, paired)
    assert own == pytest.approx(np.maximum((values[:, 1:] - values[:, :1]).std(axis=2, ddof=1), 0.1) / 2)
    kinds = []
    for study in range(40):
        arms = np.flatnonzero(paired[study])
        result = st.moderate(values[study, 1 + arms], values[study, 0])
        expected, expected_df = own[study].copy(), np.full(7, 3.0)
        if not isinstance(result, str):
            places = arms[list(result.arms)]
            expected[places], expected_df[places] = np.maximum(result.se, own[study, places]), result.df
        assert (se[study], df[study]) == (pytest.approx(expected), pytest.approx(expected_df))
        assert joint[study] == (not isinstance(result, str) and len(result.arms) == 7)
        kinds.append(0 if isinstance(result, str) else len(result.arms))
    assert {0, 6, 7} <= set(kinds)


@pytest.mark.parametrize(("n", "ratio"), [(3, 3.0), (5, 1.5)])
@pytest.mark.parametrize(
    ("baseline", "every_other", "rho"), [(1, 1, 0.0), (1, 1, 0.9), (2, 1, 0.0), (4, 1, 0.5), (1, 4, 0.0)]
)
def test_moderated_comparisons_keep_alpha_and_find_more(n, ratio, baseline, every_other, rho):
    """3,000 studies of 10 comparisons: false alarms, and the power for a part of what a comparison alone detects."""
    draws, studies, m = np.random.default_rng([8, n, baseline, every_other, int(10 * rho)]), 3000, 10
    noise = draws.normal(size=(studies, m + 1, n))
    noise[:, 0] *= baseline
    noise[:, 1::2] *= every_other
    noise = math.sqrt(1 - rho) * noise + math.sqrt(rho) * draws.normal(size=(studies, 1, n))
    _, bounds = st.detection_bounds(noise, 0.05)
    difference = noise[:, 1:].mean(axis=2) - noise[:, :1].mean(axis=2)
    alarms = (np.abs(difference) > bounds).any(axis=1).mean()
    assert alarms <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / studies)
    if baseline == every_other == 1:
        effect = st.detectable_difference(math.sqrt(2 * (1 - rho) / n), n - 1, 0.05 / m) / ratio
        assert (np.abs(difference + effect) > bounds)[:, 0].mean() >= 0.8 - 3 * math.sqrt(0.8 * 0.2 / studies)


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
