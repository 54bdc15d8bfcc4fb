"""Tuning as a part of the noise: what another choice of knobs would have changed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from vitlab.statistics.replicates import NAN, Contrast, t_quantile, t_two_sided

DRAWS = 4000  #: choices that are drawn again


def choice_variance(scores: Sequence[float], chosen: int, value: float, sd: float, seeds: int) -> float:
    """Return the mean squared change of an arm's value if its knobs were chosen again, by other tuning seeds.

    The scores are drawn again around themselves, that of the chosen rival around the arm's value, which no choice has
    biased; each time the best rival is chosen.  On arms that respond alike, tests that add this variance to that of the
    difference have at most their level (simulated for 2 to 6 rivals, 1 to 3 tuning seeds and 3 to 15 seeds).

    Args:
        scores: mean score of each rival over the tuning seeds; larger is better.
        chosen: index of the chosen rival.
        value: mean of the arm over its seeds, in the same sense.
        sd: standard deviation of the arm between seeds.
        seeds: number of tuning seeds.
    """
    if len(scores) < 2 or not sd > 0:
        return 0.0
    means_K = np.array(scores, dtype=float)
    means_K[chosen] = value
    draws_MK = np.random.default_rng(len(scores)).standard_normal((DRAWS, len(scores)))
    again_M = (means_K + sd / math.sqrt(seeds) * draws_MK).argmax(axis=1)
    return float(((means_K[again_M] - value) ** 2).mean())


def with_choices(contrast: Contrast, variances: Sequence[tuple[float, float]], alpha: float) -> Contrast:
    """Return a comparison whose standard error has the variance of the choice of knobs, too.

    A comparison by the sign-flip test loses its p value, because that test cannot have this variance.

    Args:
        contrast: the comparison.
        variances: of each tuned arm in it, with its degrees of freedom: one less than its rivals.
        alpha: the interval has level ``1 - alpha``.
    """
    variances = [(variance, df) for variance, df in variances if variance > 0]
    if not variances or contrast.test == "none":
        return contrast
    if not contrast.se > 0:
        return replace(contrast, test="none", p=NAN)
    terms = [(contrast.se**2, contrast.df), *variances]
    variance = sum(term for term, _ in terms)
    se, df = math.sqrt(variance), variance**2 / sum(term**2 / count for term, count in terms)
    half = t_quantile(1 - alpha / 2, df) * se
    low, high = contrast.difference - half, contrast.difference + half
    p = t_two_sided(contrast.difference / se, df)
    return replace(contrast, test="tuned t", low=low, high=high, p=p, se=se, df=df)
