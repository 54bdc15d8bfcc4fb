"""Group-sequential tests: levels of analyses that are repeated while seeds are added.

Under the null hypothesis, the paired t after n pairs depends only on u, the cosine between the differences and a
constant vector, and u is a Markov chain whatever the variance: after m more pairs it is

    u' = sqrt(n / (n + m)) * sqrt(b) * u + sqrt(m / (n + m)) * sqrt(1 - b) * v

where b is Beta(n/2, m/2), v is the cosine of the new pairs alone, and both are independent of u.  So the joint
distribution of all t is exact, up to the error of drawing u.
"""

from __future__ import annotations

import itertools
import math
from functools import cache

import numpy as np
from numpy.typing import NDArray

from vitlab.statistics.replicates import t_quantile

PATHS = 1 << 16  #: draws of u, mirrored
SPENDING_POWER = 2.0  #: alpha is spent with this power of the share of the pairs


@cache
def sequential_levels(sizes: tuple[int, ...], alpha: float = 0.05, family: int = 1) -> tuple[float, ...]:
    """Return the level of each of several analyses, so that all of them together have level ``alpha``.

    After a share f of the pairs, ``alpha * f**2`` is spent.  The level of an analysis is for the whole family, whose
    correction is applied to it: the levels of single comparisons are those at ``alpha / family``, times ``family``.
    Later steps of a step-down correction, with fewer comparisons, spend less than their share.

    Args:
        sizes: number of pairs at each analysis, in ascending order.
        alpha: level of all analyses together, two-sided.
        family: number of comparisons.

    References:
        Lan and DeMets (1983), Biometrika 70, 659-663; Kim and DeMets (1987), Biometrika 74, 149-154.
    """
    share = alpha / family
    draws = np.random.default_rng(20231)
    u = np.sqrt(draws.beta(0.5, (sizes[0] - 1) / 2, PATHS))  # u of the first pairs; the sign is that of its mirror
    levels = [share * (sizes[0] / sizes[-1]) ** SPENDING_POWER]
    alive = u[u < _cosine(levels[0], sizes[0])]
    for before, size in itertools.pairwise(sizes):
        added = size - before
        spent = share * (before / sizes[-1]) ** SPENDING_POWER
        wanted = share * (size / sizes[-1]) ** SPENDING_POWER - spent
        b = draws.beta(before / 2, added / 2, len(alive))
        center = math.sqrt(before / size) * np.sqrt(b) * alive
        spread = math.sqrt(added / size) * np.sqrt(1 - b)
        levels.append(_level(center, spread, size, added, wanted * PATHS))
        u = np.abs(center + spread * _draw_cosine(draws, added, len(alive)))
        alive = u[u < _cosine(levels[-1], size)]
    return tuple(min(alpha, family * level) for level in levels)


def predictive_power(
    difference: float, se: float, df: float, sizes: tuple[int, int], level: float, margin: float | None = None
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

    Returns:
        NaN if there is no spread.

    Reference: Spiegelhalter, Freedman and Blackburn (1986), Control. Clin. Trials 7, 8-17.
    """
    if not (se > 0 and df > 0):
        return math.nan
    from scipy.special import stdtr

    now, then = sizes
    sd = se * math.sqrt(now)
    later_df = df * (then - 1) / (now - 1)
    later_se = sd / math.sqrt(then)
    scale = sd * math.sqrt(1 / now - 1 / then)

    def below(limit: float) -> float:
        return float(stdtr(df, (limit - difference) / scale))

    reach = t_quantile(1 - level / 2, later_df) * later_se
    chance = below(-reach) + 1 - below(reach)
    if margin is not None:
        inner = min(margin - t_quantile(1 - level, later_df) * later_se, reach)
        chance += max(0.0, below(inner) - below(-inner))
    return chance


def _cosine(level: float, pairs: int) -> float:
    """Return u of the critical t of a two-sided level."""
    t = t_quantile(1 - level / 2, pairs - 1)
    return t / math.hypot(t, math.sqrt(pairs - 1))


def _level(center: NDArray[np.float64], spread: NDArray[np.float64], size: int, added: int, expected: float) -> float:
    """Return the level at which the expected number of paths whose next u exceeds its critical value is as given."""
    from scipy.optimize import brentq

    def surplus(log_level: float) -> float:
        bound = _cosine(math.exp(log_level), size)
        tails = _cosine_tail((bound - center) / spread, added) + _cosine_tail((bound + center) / spread, added)
        return math.log(max(float(tails.sum()), 1e-300) / expected)

    low, high = math.log(1e-12), math.log(0.5)
    return math.exp(brentq(surplus, low, high, xtol=1e-4))


def _cosine_tail(v: NDArray[np.float64], pairs: int) -> NDArray[np.float64]:
    """Return the probability that the cosine of some pairs and a constant vector exceeds ``v``."""
    if pairs == 1:
        return np.where(v < -1, 1.0, np.where(v < 1, 0.5, 0.0))
    from scipy.special import betainc

    inside = np.clip(v, -1, 1)
    half = 0.5 * betainc((pairs - 1) / 2, 0.5, 1 - inside**2)
    return np.asarray(np.where(inside > 0, half, 1 - half))


def _draw_cosine(draws: np.random.Generator, pairs: int, count: int) -> NDArray[np.float64]:
    """Draw cosines of some pairs and a constant vector."""
    sign = draws.choice([-1.0, 1.0], count)
    return sign if pairs == 1 else sign * np.sqrt(draws.beta(0.5, (pairs - 1) / 2, count))
