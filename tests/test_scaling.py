"""Tests of laws of scaling: coverage by simulation, and agreement with scipy."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats
from scipy.optimize import curve_fit

from vitlab.statistics import scaling


def points(sizes: np.ndarray, logs_SX: np.ndarray) -> dict[float, dict[int, float]]:
    return {
        float(size): {seed: float(np.exp(log)) for seed, log in enumerate(logs_SX[:, x])}
        for x, size in enumerate(sizes)
    }


def correlated(random: np.random.Generator, seeds: int, sizes: int, correlation: float) -> np.ndarray:
    """Return standard normal deviations whose sizes correlate within a seed."""
    own, common = random.standard_normal((seeds, sizes)), random.standard_normal((seeds, 1))
    return np.sqrt(correlation) * common + np.sqrt(1 - correlation) * own


@pytest.mark.parametrize(("seeds", "correlation"), [(3, 0.9), (5, 0.9), (5, 0.0)])
def test_band_and_slope_miss_at_their_level_however_sizes_correlate(seeds: int, correlation: float) -> None:
    sizes, studies, random = np.array([1.0, 4.0, 16.0, 64.0]), 600, np.random.default_rng(seeds)
    truth = np.log(3 * sizes**-0.25)
    slope_missed = band_missed = 0
    for _ in range(studies):
        law = scaling.fit_law(
            points(sizes, truth + 0.05 * correlated(random, seeds, len(sizes), correlation)), overlap=0.0, alpha=0.05
        )
        assert law is not None and law.offset is None
        slope_missed += not law.slope.low <= -0.25 <= law.slope.high
        x, _, low, high = law.curve[:, law.curve.shape[1] // 2]
        band_missed += not low <= 3 * x**-0.25 <= high
    # Four standard errors of a simulated rate of 5 %.
    assert abs(slope_missed / studies - 0.05) < 0.036 and abs(band_missed / studies - 0.05) < 0.036


def test_slope_is_mean_of_slopes_of_seeds() -> None:
    random, sizes = np.random.default_rng(0), np.array([1.0, 2.0, 8.0])
    logs = random.normal(0, 0.1, (4, 3)) - 0.3 * np.log(sizes)
    slopes = [stats.linregress(np.log(sizes), row).slope for row in logs]
    interval = stats.ttest_1samp(slopes, 0).confidence_interval(0.9)
    law = scaling.fit_law(points(sizes, logs), alpha=0.1, overlap=0.0)
    assert law is not None
    assert (law.slope.value, law.slope.low, law.slope.high) == pytest.approx((np.mean(slopes), *interval))
    corrected = scaling.fit_law(points(sizes, logs), alpha=0.1, overlap=0.25)
    assert corrected is not None, "four seeds and an overlap of a quarter: the variance is twice as large"
    assert corrected.slope.high - corrected.slope.low == pytest.approx(np.sqrt(2) * (law.slope.high - law.slope.low))


def test_offset_and_exponent_are_recovered_as_by_curve_fit() -> None:
    random, sizes = np.random.default_rng(1), np.geomspace(1, 64, 7)
    truth = np.log(0.05 + sizes**-0.5)
    logs = truth + 0.01 * correlated(random, 5, len(sizes), 0.5)
    law = scaling.fit_law(points(sizes, logs), overlap=0.0, alpha=0.05)
    assert law is not None and law.offset is not None and law.exponent is not None and law.offset.low > 0
    assert law.exponent.low < 0.5 < law.exponent.high and law.offset.low < 0.05 < law.offset.high
    assert law.exponent.high - law.exponent.low < 0.1

    def model(x: np.ndarray, offset: float, level: float, exponent: float) -> np.ndarray:
        return offset + level * x**-exponent

    means = np.exp(logs.mean(axis=0))
    found, _ = curve_fit(model, sizes, means, p0=(0.02, 1.0, 0.4), sigma=means)
    assert (law.offset.value, law.exponent.value) == pytest.approx((found[0], found[2]), rel=1e-4)
    without = stats.linregress(np.log(sizes), logs.mean(axis=0)).slope
    assert law.slope.value == pytest.approx(without) and without > -0.45, "without an offset it falls more slowly"


@pytest.mark.slow
@pytest.mark.parametrize("offset", [0.0, 0.05])
def test_intervals_of_offset_and_exponent_miss_at_their_level(offset: float) -> None:
    sizes, studies, random = np.geomspace(1, 32, 5), 60, np.random.default_rng(3)
    truth, missed, steep = np.log(offset + sizes**-0.5), np.zeros(2), 0
    for _ in range(studies):
        law = scaling.fit_law(
            points(sizes, truth + 0.01 * correlated(random, 5, len(sizes), 0.9)), overlap=0.0, alpha=0.05
        )
        assert law is not None
        if law.offset is None or law.exponent is None:
            steep += law.steepens
            continue
        missed += [
            not law.offset.low <= offset <= law.offset.high,
            not law.exponent.low <= 0.5 <= law.exponent.high,
        ]
    assert (missed <= stats.binom.isf(1e-4, studies, 0.05)).all(), missed
    assert steep <= stats.binom.isf(1e-4, studies, 0.025)


def test_error_that_falls_ever_faster_follows_no_power_law() -> None:
    log_x = np.linspace(0, 4, 6)
    logs = np.random.default_rng(5).normal(0, 0.01, (4, 6)) - 0.05 * log_x**2
    law = scaling.fit_law(points(np.exp(log_x), logs), overlap=0.0, alpha=0.05)
    assert law is not None and law.steepens and law.offset is None and law.slope.high < 0


def test_flat_error_has_slope_and_no_exponent() -> None:
    logs = np.random.default_rng(4).normal(0, 0.01, (3, 5)) + 0.02 * np.arange(5)
    law = scaling.fit_law(points(np.geomspace(1, 16, 5), logs), overlap=0.0, alpha=0.05)
    assert law is not None and law.slope.value > 0 and law.offset is None and law.exponent is None


def test_seeds_that_lack_a_size_are_left_out_and_one_seed_has_no_interval() -> None:
    sizes, logs = np.array([1.0, 2.0, 4.0]), np.log([[0.8, 0.6, 0.5], [0.7, 0.6, 0.4], [0.9, 0.1, 0.1]])
    complete, lacking = points(sizes, logs[:2]), points(sizes, logs)
    del lacking[4.0][2]
    first, second = (scaling.fit_law(each, alpha=0.05, overlap=0.0) for each in (lacking, complete))
    assert first is not None and second is not None and first.slope == second.slope
    assert np.array_equal(first.curve, second.curve, equal_nan=True)
    single = scaling.fit_law(points(sizes, logs[:1]), overlap=0.0, alpha=0.05)
    assert single is not None and np.isnan([single.slope.low, single.slope.high, *single.curve[2]]).all()


def test_no_law_without_three_sizes_or_of_zeros() -> None:
    assert scaling.fit_law({1.0: {0: 1.0}, 2.0: {0: 1.0}}, overlap=0.0, alpha=0.05) is None
    assert scaling.fit_law({1.0: {0: 1.0}, 2.0: {0: 1.0}, 3.0: {0: 0.0}}, overlap=0.0, alpha=0.05) is None
    assert scaling.fit_law({1.0: {0: 1.0}, 2.0: {1: 1.0}, 3.0: {2: 1.0}}, overlap=0.0, alpha=0.05) is None, (
        "no seed has all sizes"
    )
    assert scaling.fit_law({}, overlap=0.0, alpha=0.05) is None
