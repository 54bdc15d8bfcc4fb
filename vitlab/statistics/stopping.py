"""Estimates and intervals of comparisons whose number of pairs depended on their results.

A comparison that is tested at several looks and ends at the first significant one has a mean that is too large on
average, and an interval of one test does not have its level.  Both are corrected by ordering all results that the
comparison could have ended with: by the look at which it favours the first side, and by t at the same look (stage-wise
ordering).  The interval has every difference under which a result as far in either direction is not too improbable, so
it excludes 0 if the test is significant; the estimate is the difference under which the result is the median.

Given the mean and the variance of the pairs at a look, the earlier pairs depend on no parameter, and their t statistics
depend on the t of this look alone.  So two functions of t describe the earlier looks: the probability that none
was significant, and that one was, in favour of the first side.  As the variance is not known, results are compared
given the sum of squares around the difference of the hypothesis, which is sufficient for it and independent of t.

References: Tsiatis, Rosner and Mehta (1984), Biometrics 40, 797-803; Jennison and Turnbull (2000), Group Sequential
Methods with Applications to Clinical Trials, sections 8.4 and 8.5.
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np

from vitlab.statistics.replicates import Floats, root, t_quantile

MAX_SCORE = 7.0  #: largest normal score of the grids; its p is 3e-12
SCORES = np.linspace(-MAX_SCORE, MAX_SCORE, 201)  #: normal scores of t at which functions of it are known
FINE_SCORES = np.linspace(-MAX_SCORE, MAX_SCORE, 1201)  #: edges of the cells over which they are integrated
NODES = (120, 32)  #: quadrature nodes of the mean and of the variance of earlier pairs, given those of all
MAX_WIDTH = 1e9  #: of an interval, in standard errors


def after_stopping(
    difference: float, se: float, df: float, sizes: tuple[int, ...], levels: tuple[float, ...], look: int
) -> tuple[float, float, float]:
    """Return the median-unbiased estimate of a difference after looks, and the lower and upper end of its interval.

    The interval has the level of all looks together.  If it does not contain the mean difference, the comparison would
    have ended earlier, had its standard error been that of this look; it was larger, as variances were shared then.
    The estimate is then the mean, and the interval that of the test at this look, which holds at all looks at once.

    Args:
        difference: mean difference of the pairs at the look at which the comparison ended.
        se: its standard error.
        df: the degrees of freedom of ``se``.
        sizes: number of pairs at each look of the study, in ascending order.
        levels: level of the test of this comparison at each look, two-sided.
        look: place of the look at which it ended, from 0.
    """
    t, last = difference / se, len(sizes) - 1
    level = 2 * stagewise_p(sizes, levels, last, t_quantile(1 - levels[-1] / 2, df), 0.0, df)

    if look == 0:
        half = t_quantile(1 - level / 2, df) * se
        return difference, difference - half, difference + half

    def difference_at(probability: float) -> float:
        def excess(shift: float) -> float:
            return stagewise_p(sizes, levels, look, t - shift, shift, df) - probability

        width = 1.0
        while excess(t - width) * excess(t + width) > 0 and width < MAX_WIDTH:
            width *= 2
        return se * root(excess, t - width, t + width)

    low, high = difference_at(level / 2), difference_at(1 - level / 2)
    if not low <= difference <= high:
        half = t_quantile(1 - levels[look] / 2, df) * se
        return difference, difference - half, difference + half
    return difference_at(0.5), low, high


def stagewise_p(
    sizes: tuple[int, ...], levels: tuple[float, ...], look: int, t: float, shift: float, df: float
) -> float:
    """Return the one-sided p of a hypothesis: how likely a result at least as far in favour of the first side is.

    Args:
        sizes: number of pairs at each look of the study, in ascending order.
        levels: level of the test at each look, two-sided.
        look: place of the look at which the comparison ended, from 0.
        t: statistic of the hypothesis at the look.
        shift: the difference under the hypothesis, in standard errors of the look.
        df: degrees of freedom of these.
    """
    earlier, none = _earlier_looks(sizes[: look + 1], levels[:look])
    t_of, above = _fine_grid(df)
    # The t of no difference, for each t of the hypothesis and the sum of squares around it.
    cosine = _cosine(t_of + shift * np.sqrt((df + t_of**2) / (df + t**2)), df)
    knots = _cosine(_t_of_scores(SCORES, df), df)
    beyond = np.clip(np.minimum(above[:-1], _upper(t, df)) - above[1:], 0, None)
    return float((above[:-1] - above[1:]) @ np.interp(cosine, knots, earlier) + beyond @ np.interp(cosine, knots, none))


@lru_cache(maxsize=256)
def _earlier_looks(sizes: tuple[int, ...], levels: tuple[float, ...]) -> tuple[Floats, Floats]:
    """Return two probabilities given the t of the last of some looks, at the normal scores ``SCORES``.

    They are that an earlier look was significant in favour of the first side, and that none was significant.

    The mean of the earlier pairs is that of all plus a share w of the residuals, and the squares of the rest of the
    residuals are divided between earlier and later pairs; w and the share b follow beta distributions.

    Args:
        sizes: number of pairs at each look.
        levels: of the test at each look but the last.
    """
    if len(sizes) == 1:
        return np.zeros(len(SCORES)), np.ones(len(SCORES))
    from scipy.special import betainc, betaincinv

    before, pairs = sizes[-2:]
    added = pairs - before
    earlier, none = _earlier_looks(sizes[:-1], levels[:-1])
    u_I = _cosine(_t_of_scores(SCORES, pairs - 1), pairs - 1)
    middles_W, cells_W = _cells(NODES[0] if added > 1 else math.prod(NODES))
    w_W = np.copysign(np.sqrt(betaincinv(0.5, (pairs - 2) / 2, np.abs(2 * middles_W - 1))), middles_W - 0.5)
    residual_I1 = np.sqrt(1 - u_I[:, None] ** 2)
    mean_IW = math.sqrt(before / pairs) * u_I[:, None] + math.sqrt(added / pairs) * residual_I1 * w_W
    squares_IW = np.maximum(residual_I1**2 * (1 - w_W**2), 1e-300)
    # The earlier look was significant if the share b of squares is no larger than this.
    largest_IW = mean_IW**2 * (before - 1) / t_quantile(1 - levels[-1] / 2, before - 1) ** 2 / squares_IW
    if added > 1:
        middles_B, cells_B = _cells(NODES[1])
        half_df = (before - 1) / 2, (added - 1) / 2
        b_B, largest_IW = betaincinv(*half_df, middles_B), betainc(*half_df, np.minimum(largest_IW, 1.0))
    else:
        b_B, cells_B, largest_IW = np.ones(1), np.ones(1), np.floor(np.minimum(largest_IW, 1.0))
    significant_IWB = np.clip(largest_IW[..., None] - (np.cumsum(cells_B) - cells_B), 0.0, cells_B)
    cosine_IWB = mean_IW[..., None] / np.sqrt(mean_IW[..., None] ** 2 + squares_IW[..., None] * b_B)
    knots = _cosine(_t_of_scores(SCORES, before - 1), before - 1)
    none_IWB = np.interp(cosine_IWB, knots, none)
    first_IWB = np.interp(cosine_IWB, knots, earlier) * cells_B + none_IWB * significant_IWB * (cosine_IWB > 0)
    none_IWB = none_IWB * (cells_B - significant_IWB)
    return first_IWB.sum(axis=2) @ cells_W, none_IWB.sum(axis=2) @ cells_W


def _cells(count: int) -> tuple[Floats, Floats]:
    """Return the middles of cells of a distribution, as quantiles, and their probabilities; they resolve its tails."""
    from scipy.special import ndtr

    scores = np.linspace(-MAX_SCORE, MAX_SCORE, count + 1)
    cells = np.diff(ndtr(scores))
    return ndtr((scores[1:] + scores[:-1]) / 2), cells / cells.sum()


@lru_cache(maxsize=256)
def _fine_grid(df: float) -> tuple[Floats, Floats]:
    """Return t in the middle of each cell of ``FINE_SCORES``, and the probability above each edge."""
    above = _upper(_t_of_scores(FINE_SCORES, df), df)
    above[0], above[-1] = 1.0, 0.0
    return _t_of_scores((FINE_SCORES[1:] + FINE_SCORES[:-1]) / 2, df), above


def _upper(t: Floats | float, df: float) -> Floats:
    """Return the probability of a larger t."""
    from scipy.special import stdtr

    return np.asarray(stdtr(df, -np.asarray(t)))


def _t_of_scores(scores: Floats, df: float) -> Floats:
    """Return the t statistics whose p values are those of normal scores."""
    from scipy.special import ndtr, stdtrit

    return np.asarray(-np.sign(scores) * stdtrit(df, ndtr(-np.abs(scores))))


def _cosine(t: Floats, df: float) -> Floats:
    """Return the cosine of the angle between the values behind a t statistic and a constant vector."""
    return np.asarray(t / np.hypot(t, math.sqrt(df)))
