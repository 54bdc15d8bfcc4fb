"""Power: the probability that seeds detect a difference, before a study and in the middle of it."""

from __future__ import annotations

import math

import numpy as np

from vitlab.statistics.replicates import t_quantile


def power(effect: float, se: float, df: float, alpha: float = 0.05) -> float:
    """Return the power of a two-sided t-test with this standard error to detect a true difference of ``effect``.

    The noncentral t distribution is integrated over the numerator, because scipy 1.17's ``nct`` returns NaN at places.
    """
    from scipy.special import chdtr

    critical, shift = t_quantile(1 - alpha / 2, df), abs(effect) / se
    z = np.linspace(-9.0, 9.0, 4001)
    normal = np.exp(-0.5 * z**2) / math.sqrt(2 * math.pi)
    return float(np.trapezoid(normal * chdtr(df, df * ((z + shift) / critical) ** 2), z))


def predictive_power(
    difference: float,
    se: float,
    df: float,
    sizes: tuple[int, int],
    level: float,
    margin: float | None = None,
    overlap: float = 0.0,
) -> float:
    """Return the probability that a comparison will be decided with more pairs, given the pairs so far.

    Future pairs follow the predictive distribution under a flat prior, and the spread is taken as known then.  Decided
    is a difference from zero or, with a margin, equivalence.

    Args:
        difference: mean difference of the pairs so far.
        se: its standard error.
        df: the degrees of freedom of ``se``.
        sizes: number of pairs now and then.
        level: level of the comparison's test then, two-sided.
        margin: margin of equivalence, if there is one.
        overlap: see :class:`vitlab.comparison.arrays.Design`.

    Returns:
        NaN if there is no spread.

    Reference: Spiegelhalter, Freedman and Blackburn (1986), Control. Clin. Trials 7, 8-17.
    """
    if not (se > 0 and df > 0):
        return math.nan
    from scipy.special import stdtr

    now, then = sizes
    sd = se / math.sqrt(1 / now + overlap)
    later_df = df * (then - 1) / (now - 1)
    later_se = sd * math.sqrt(1 / then + overlap)
    scale = sd * math.sqrt(1 / now - 1 / then)

    def below(limit: float) -> float:
        return float(stdtr(df, (limit - difference) / scale))

    reach = t_quantile(1 - level / 2, later_df) * later_se
    chance = below(-reach) + 1 - below(reach)
    if margin is not None:
        inner = min(margin - t_quantile(1 - level, later_df) * later_se, reach)
        chance += max(0.0, below(inner) - below(-inner))
    return chance
