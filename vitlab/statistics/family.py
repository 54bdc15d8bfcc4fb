"""Multiple comparisons: corrected p values, simultaneous intervals, power."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from vitlab.statistics.replicates import NAN, t_quantile

MAX_SEEDS = 10_000  #: the search for a number of seeds ends here


def adjust_p_values(p_values: Sequence[float], share: float = 1.0) -> list[float]:
    """Return p values corrected by Holm's method and for the share of alpha that these tests have, in the order given.

    NaN marks a comparison that was planned and cannot be tested: it stays NaN and counts in the family.
    """
    p = np.asarray(p_values, dtype=float)
    tested, count = np.where(np.isnan(p), 1.0, p), len(p)
    order, adjusted = np.argsort(tested, kind="stable"), np.empty(count)
    adjusted[order] = np.maximum.accumulate((count - np.arange(count)) * tested[order])
    return [NAN if math.isnan(value) else min(1.0, float(new) / share) for value, new in zip(p, adjusted, strict=True)]


def power(effect: float, se: float, df: float, alpha: float = 0.05) -> float:
    """Return the power of a two-sided t-test with this standard error to detect a true difference of ``effect``.

    The noncentral t distribution is integrated over the numerator, because scipy 1.17's ``nct`` returns NaN at places.
    """
    from scipy.special import chdtr

    critical, shift = t_quantile(1 - alpha / 2, df), abs(effect) / se
    z = np.linspace(-9.0, 9.0, 4001)
    normal = np.exp(-0.5 * z**2) / math.sqrt(2 * math.pi)
    return float(np.trapezoid(normal * chdtr(df, df * ((z + shift) / critical) ** 2), z))


def detectable_difference(se: float, df: float, alpha: float = 0.05, chance: float = 0.8) -> float:
    """Return the smallest true difference that a two-sided t-test detects with power ``chance``.

    Args:
        se: standard error of the difference; for pairs, the standard deviation of the differences over root n.
        df: degrees of freedom; for pairs, n - 1.
        alpha: level of the test; for the m comparisons of a family, the first must pass alpha / m.
        chance: the power.

    Returns:
        NaN if there is no spread.
    """
    if not (se > 0 and df > 0):
        return NAN
    from scipy.optimize import brentq

    high = t_quantile(1 - alpha / 2, df) + 10.0
    while power(high, 1.0, df, alpha) < chance:
        high *= 2
    return se * float(brentq(lambda shift: power(shift, 1.0, df, alpha) - chance, 0.0, high))


def pairs_for_half_width(
    half_width: float, se: float, df: float, pairs: int, alpha: float = 0.05, overlap: float = 0.0
) -> float:
    """Return the number of pairs whose interval of level ``1 - alpha`` is expected to be no wider than given.

    Args:
        half_width: half of the width of the interval.
        se: standard error of the difference with the present pairs.
        df: its degrees of freedom, which grow with the pairs.
        pairs: number of present pairs.
        alpha: the level.
        overlap: see :class:`vitlab.comparison.arrays.Design`; more pairs do not reduce what it adds.

    Returns:
        NaN if there is no spread, or if more than ``MAX_SEEDS`` are needed.
    """
    if not (se > 0 and df > 0 and half_width > 0 and pairs > 1):
        return NAN

    def enough(n: int) -> bool:
        narrowed = se * math.sqrt((1 / n + overlap) / (1 / pairs + overlap))
        return t_quantile(1 - alpha / 2, df * (n - 1) / (pairs - 1)) * narrowed <= half_width

    too_few, upper = 1, 2
    while not enough(upper):
        too_few, upper = upper, 2 * upper
        if too_few >= MAX_SEEDS:
            return NAN
    while upper - too_few > 1:
        middle = (too_few + upper) // 2
        too_few, upper = (too_few, middle) if enough(middle) else (middle, upper)
    return float(upper) if upper <= MAX_SEEDS else NAN
