"""Power of the comparisons of a study, and the levels of its looks.

Looks are analyses that are repeated while seeds are added.

Under the null hypothesis, the paired t after n pairs depends only on u, the cosine between the differences and a
constant vector, and u is a Markov chain whatever the variance: after m more pairs it is

    u' = sqrt(n / (n + m)) * sqrt(b) * u + sqrt(m / (n + m)) * sqrt(1 - b) * v

where b is Beta(n/2, m/2), v is the cosine of the new pairs alone, and both are independent of u.  The distribution of u
is followed from look to look on a grid of normal scores, so that far tails are as precise as the middle.
"""

import itertools
import math
from functools import cache

import numpy as np

from vitlab.statistics.replicates import NAN, Floats, t_quantile

MIN_SHARE = 1e-5  #: alpha of one comparison below which looks are corrected by Bonferroni, as the grid ends there
SPENDING_POWER = 2.0  #: alpha is spent with this power of the share of the pairs
MAX_SCORE = 7.0  #: largest normal score of the grid; its p is 3e-12
CELLS = 90  #: of the grid
NODES = 35  #: quadrature nodes of v


@cache
def sequential_levels(sizes: tuple[int, ...], alpha: float, family: int) -> tuple[float, ...]:
    """Return the level of each of several analyses, so that all of them together have level ``alpha``.

    After a share f of the pairs, ``alpha * f**2`` is spent.  The level of an analysis is for the whole family, whose
    correction is applied to it: the levels of single comparisons are those at ``alpha / family``, times ``family``.
    Later steps of a step-down correction, with fewer comparisons, spend less than their share.

    Args:
        sizes: number of pairs at each analysis, in ascending order, from 2.
        alpha: level of all analyses together, two-sided.
        family: number of comparisons.

    References:
        Lan and DeMets (1983), Biometrika 70, 659-663; Kim and DeMets (1987), Biometrika 74, 149-154.
    """
    from scipy.special import ndtr

    share = alpha / family
    spent = [share * (size / sizes[-1]) ** SPENDING_POWER for size in (0, *sizes)]
    if share < MIN_SHARE:
        return tuple(family * (after - before) for before, after in itertools.pairwise(spent))
    scores = np.linspace(0.0, MAX_SCORE, CELLS + 1)
    outside = 2 * ndtr(-scores)  # probability of a larger score, at each edge of the grid
    levels = [spent[1]]
    mass = -np.diff(np.maximum(outside, spent[1]))
    for look, (before, size) in enumerate(itertools.pairwise(sizes), 2):
        spend = spent[look] - spent[look - 1]
        middles = _normal_scores_to_cosines((scores[1:] + scores[:-1]) / 2, before)
        beyond = mass @ _exceedance_at_next_look(
            middles, _normal_scores_to_cosines(scores, size), before, size - before
        )
        # Both tails are nearly linear in their logarithms.
        is_positive = beyond > 1e-300
        log_level = np.interp(-math.log(spend), -np.log(beyond[is_positive]), np.log(outside[is_positive]))
        levels.append(max(spend, math.exp(log_level)))  # what is spent is a valid level, whatever came before
        mass = -np.diff(np.maximum(beyond, spend))
    return tuple(min(alpha, family * level) for level in levels)


def _normal_scores_to_cosines(scores: Floats, pairs: int) -> Floats:
    """Return u at which the two-sided p of the t statistic equals the p of each normal score."""
    from scipy.special import ndtr, stdtrit

    t = -stdtrit(pairs - 1, np.maximum(ndtr(-scores), 1e-300))
    return np.asarray(np.minimum(np.abs(t) / np.hypot(t, math.sqrt(pairs - 1)), 1.0))


def _exceedance_at_next_look(u_I: Floats, bounds_J: Floats, before: int, added: int) -> Floats:
    """Return the probability (I, J) that the next u exceeds each bound in size, given u."""
    if added == 1:
        cosines, weights = np.array([1.0, -1.0]), np.array([0.5, 0.5])
    else:
        scores = np.linspace(-MAX_SCORE, MAX_SCORE, NODES)
        cosines = np.sign(scores) * _normal_scores_to_cosines(np.abs(scores), added)
        weights = np.exp(-0.5 * scores**2) / np.exp(-0.5 * scores**2).sum()
    return np.asarray(
        sum(
            weight * sum(_exceedance_given_u_and_v(sign * u_I, bounds_J, v, before, added) for sign in (1, -1))
            for v, weight in zip(cosines.tolist(), weights.tolist(), strict=True)
        )
    )


def _exceedance_given_u_and_v(u_I: Floats, bounds_J: Floats, v: float, before: int, added: int) -> Floats:
    """Return the probability (I, J) that the next u exceeds each bound, given u and v.

    If b is the square of the cosine of an angle, the next u is a shifted cosine of that angle, so it exceeds a bound
    between two angles.
    """
    from scipy.special import betainc

    first_I = math.sqrt(before / (before + added)) * u_I
    second = math.sqrt(added / (before + added)) * v
    reach_IJ = np.arccos(np.clip(bounds_J / np.maximum(np.hypot(first_I, second), 1e-300)[:, None], -1, 1))
    center_I1 = np.arctan2(second, first_I)[:, None]
    start, end = (np.clip(center_I1 + sign * reach_IJ, 0, math.pi / 2) for sign in (-1, 1))
    below = [betainc(before / 2, added / 2, np.cos(angle) ** 2) for angle in (start, end)]
    return np.asarray(below[0] - below[1])


def t_test_power(effect: float, se: float, df: float, alpha: float) -> float:
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
    margin: float | None,
    overlap: float,
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
        overlap: see :class:`vitlab.comparison.arrays.Comparisons`.

    Returns:
        NaN if there is no spread.

    Reference: Spiegelhalter, Freedman and Blackburn (1986), Control. Clin. Trials 7, 8-17.
    """
    if not (se > 0 and df > 0):
        return NAN
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
