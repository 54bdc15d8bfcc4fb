"""Many comparisons at once: corrected p values, simultaneous intervals, power, equivalence."""

from __future__ import annotations

import gc
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from vitlab.statistics.replicates import Contrast
from vitlab.statistics.student import NAN, t_quantile

Correction = Literal["holm", "bonferroni", "none"]
MOST_SEEDS = 10_000  #: a difference that needs more is not told by seeds


def simultaneous(alpha: float, family: int, method: Correction = "holm") -> float:
    """The ``alpha`` of each of ``family`` intervals, so that all of them hold at once with chance ``1 - alpha``.

    Bonferroni's, whatever corrects the p values: what Holm's steps gain is no interval's.  A comparison that Holm
    tells apart at a later step may therefore stand beside an interval that still holds 0.
    """
    return alpha if method == "none" else alpha / max(1, family)


def corrected(p_values: Sequence[float], method: Correction = "holm", looks: int = 1) -> list[float]:
    """p values corrected for the family they form, and for the looks that share alpha, in the order given.

    NaN stands for a comparison that was planned and cannot be judged: it stays NaN, and counts in the family.
    """
    p = np.asarray(p_values, dtype=float)
    if method == "none" or len(p) == 0:
        return [float(value) for value in np.minimum(looks * p, 1.0)]
    from statsmodels.stats.multitest import multipletests

    gc.freeze()  # it sweeps the whole heap on every call, which frozen objects are no part of: a second, beside torch
    try:
        adjusted = multipletests(np.where(np.isnan(p), 1.0, p), method=method)[1]
    finally:
        gc.unfreeze()
    return [NAN if math.isnan(value) else min(1.0, looks * float(new)) for value, new in zip(p, adjusted, strict=True)]


def power(effect: float, se: float, df: float, alpha: float = 0.05) -> float:
    """Chance that a two-sided t-test with this standard error finds a true difference of ``effect``.

    The noncentral t distribution, as an integral over the numerator: scipy 1.17's ``nct`` is NaN at places.
    """
    from scipy.special import chdtr

    critical, shift = t_quantile(1 - alpha / 2, df), abs(effect) / se
    z = np.linspace(-9.0, 9.0, 4001)
    normal = np.exp(-0.5 * z**2) / math.sqrt(2 * math.pi)
    return float(np.trapezoid(normal * chdtr(df, df * ((z + shift) / critical) ** 2), z))


def detectable(se: float, df: float, alpha: float = 0.05, chance: float = 0.8) -> float:
    """The smallest true difference that a two-sided t-test finds with the given chance (its power).

    Args:
        se: standard error of the difference; for pairs, the standard deviation of the differences over root n.
        df: degrees of freedom; for pairs, n - 1.
        alpha: level of the test; for the m comparisons of a family, alpha / m is what the first of them must pass.
        chance: the power asked for.

    Returns:
        NaN where there is no spread to judge by.
    """
    if not (se > 0 and df > 0):
        return NAN
    from scipy.optimize import brentq

    high = t_quantile(1 - alpha / 2, df) + 10.0
    while power(high, 1.0, df, alpha) < chance:
        high *= 2
    return se * float(brentq(lambda shift: power(shift, 1.0, df, alpha) - chance, 0.0, high, xtol=1e-9))


@dataclass(frozen=True)
class Equivalence:
    """Two one-sided tests: the interval of level ``1 - 2 alpha``, and p for "differs by the margin or more"."""

    low: float
    high: float
    p: float
    equivalent: bool


def equivalence(contrast: Contrast, margin: float, alpha: float = 0.05) -> Equivalence:
    """Whether a difference is shown to lie within ``margin`` on either side (TOST).

    Reference: Schuirmann (1987), J. Pharmacokin. Biopharm. 15, 657-680.

    Raises:
        ValueError: for a margin that is not positive.
    """
    if not margin > 0:
        raise ValueError(f"the margin of an equivalence test is a positive number; found {margin}")
    if not contrast.se > 0:
        return Equivalence(NAN, NAN, NAN, False)
    from scipy.special import stdtr

    half = t_quantile(1 - alpha, contrast.df) * contrast.se
    above = float(stdtr(contrast.df, -(contrast.difference + margin) / contrast.se))
    below = float(stdtr(contrast.df, (contrast.difference - margin) / contrast.se))
    p = max(above, below)
    return Equivalence(contrast.difference - half, contrast.difference + half, p, p < alpha)


def seeds_needed(difference: float, sd: float, alpha: float = 0.05, chance: float = 0.8) -> float:
    """How many pairs a two-sided t-test needs to find a true ``difference`` with the given chance.

    Args:
        difference: the true difference.
        sd: standard deviation of the differences of pairs.
        alpha: level of the test, see :func:`detectable`.
        chance: the power asked for.

    Returns:
        At least 2; NaN where there is nothing to find, no spread, or where it takes more than ``MOST_SEEDS``.
    """
    if not (sd > 0 and abs(difference) > 0):
        return NAN

    def enough(n: int) -> bool:
        return power(difference, sd / math.sqrt(n), n - 1, alpha) >= chance

    few, many = 1, 2
    while not enough(many):
        few, many = many, 2 * many
        if few >= MOST_SEEDS:
            return NAN
    while many - few > 1:
        middle = (few + many) // 2
        few, many = (few, middle) if enough(middle) else (middle, many)
    return float(many) if many <= MOST_SEEDS else NAN
