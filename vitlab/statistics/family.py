"""Multiple comparisons: corrected p values, simultaneous intervals, power."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from vitlab.statistics.replicates import NAN, t_quantile


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
