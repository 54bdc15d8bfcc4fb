"""Tests of the statistics against scipy, statsmodels, closed forms, brute force and simulation."""

from __future__ import annotations

import itertools
import math
import subprocess
import sys

import numpy as np
import pytest
from scipy import stats
from statsmodels.stats.power import TTestPower

from vitlab.statistics import power, replicates, scaling

A = [0.951, 0.947, 0.958, 0.949, 0.955]
B = [0.972, 0.969, 0.971, 0.975, 0.968]


def close(value: float) -> object:
    return pytest.approx(value, rel=1e-9)


def test_mean_interval_equals_scipy():
    result = replicates.mean_interval(A, alpha=0.1, overlap=0.0, quantum=0.0)
    low, high = stats.t.interval(0.9, 4, loc=np.mean(A), scale=stats.sem(A))
    assert (result.n, result.mean, result.sd) == (5, close(np.mean(A)), close(np.std(A, ddof=1)))
    assert (result.low, result.high) == (close(low), close(high))


def test_one_and_two_values_have_no_interval():
    one = replicates.mean_interval([0.9], overlap=0.0, quantum=0.0, alpha=0.05)
    assert one.mean == 0.9
    assert math.isnan(one.sd) and math.isnan(one.low) and math.isnan(one.high)
    two = replicates.mean_interval([0.0, 2.0], overlap=0.0, quantum=0.0, alpha=0.05)
    assert two.sd == close(math.sqrt(2)) and math.isnan(two.low) and math.isnan(two.high)
    assert math.isnan(replicates.mean_interval([], overlap=0.0, quantum=0.0, alpha=0.05).mean)


def test_non_finite_values_are_refused():
    for values in ([0.9, math.nan], [math.inf, 0.9]):
        with pytest.raises(ValueError, match="1 of 2 values are not finite"):
            replicates.mean_interval(values, overlap=0.0, quantum=0.0, alpha=0.05)


@pytest.mark.parametrize("n", [1, 2, 5, 6, 9])
def test_sign_flip_equals_brute_force(n):
    d = np.random.default_rng(n).normal(0.5, 1, n).round(1)  # rounded, so that there are ties
    sums = [abs(np.dot(signs, d)) for signs in itertools.product([1, -1], repeat=n)]
    assert replicates.sign_flip_p(d) == close(np.mean([total >= abs(d.sum()) - 1e-9 for total in sums]))


def test_sign_flip_equals_scipy_permutation_test_and_its_bound():
    d = np.random.default_rng(3).normal(0.4, 1, 10)
    reference = stats.permutation_test((d,), np.mean, permutation_type="samples", n_resamples=np.inf)
    assert replicates.sign_flip_p(d) == close(reference.pvalue)
    assert replicates.sign_flip_p([1, 2, 3, 4, 5]) == 0.0625
    assert replicates.sign_flip_p(np.ones(40)) == close(2.0**-39)
    assert math.isnan(replicates.sign_flip_p(np.ones(41)))


@pytest.mark.parametrize(("n", "alpha"), [(3, 0.05), (5, 0.05), (5, 0.05 / 3), (20, 0.01), (200, 0.05)])
def test_power_equals_statsmodels(n, alpha):
    for effect in (0.3, 1.0, 2.0):
        expected = TTestPower().power(effect_size=effect, nobs=n, alpha=alpha, alternative="two-sided")
        assert power.t_test_power(0.7 * effect, 0.7 / math.sqrt(n), n - 1, alpha) == pytest.approx(expected, abs=1e-5)


def test_power_at_one_degree_of_freedom_equals_simulation():
    # Sizes at which scipy's noncentral t fails.
    draws = np.random.default_rng(0).normal(20.0, math.sqrt(2.0), (200_000, 2))
    t = draws.mean(1) / (draws.std(1, ddof=1) / math.sqrt(2))
    share = np.mean(np.abs(t) > stats.t.ppf(0.975, 1))
    assert power.t_test_power(20.0, 1.0, 1, 0.05) == pytest.approx(share, abs=0.004)
    assert power.t_test_power(0.0, 1.0, 1, 0.05) == pytest.approx(0.05, abs=1e-6)


def test_pareto_front_equals_brute_force():
    random = np.random.default_rng(8)
    for _ in range(50):
        costs, values = random.integers(0, 6, (2, 9)).astype(float)
        front = scaling.on_pareto_front(costs, values)
        for index, (cost, value) in enumerate(zip(costs, values, strict=True)):
            dominated = any(
                c <= cost and v >= value and (c, v) != (cost, value) for c, v in zip(costs, values, strict=True)
            )
            assert front[index] == (not dominated)


def test_statistics_import_neither_torch_nor_statsmodels():
    heavy = "{'torch', 'scipy', 'statsmodels', 'pandas', 'mlflow'}"
    code = f"import sys, vitlab.statistics; found = {heavy} & set(sys.modules); sys.exit(str(found) if found else 0)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
