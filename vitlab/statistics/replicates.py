"""Means of few replicates with intervals, the exact sign-flip test, their shape, and the noise of a choice."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
NAN = math.nan


def finite(values: Sequence[float] | Floats) -> Floats:
    """Return values as an array.

    Raises:
        ValueError: for a value that is not finite.
    """
    x = np.asarray(values, dtype=float)
    if not np.isfinite(x).all():
        raise ValueError(
            f"{int((~np.isfinite(x)).sum())} of {x.size} values are not finite; leave them out, and report their number"
        )
    return x


def t_quantile(q: float, df: float) -> float:
    """Return the quantile of Student's t at probability ``q``."""
    from scipy.special import stdtrit

    return float(stdtrit(df, q))


MIN_VALUES = 3  #: of an interval: with two values it reaches 13 standard errors to either side
ROUNDING = 1e-12  #: relative to the values: smaller differences are floating-point rounding
SINGLE_ROUNDING = 2.0**-22  #: the same for values that were computed in single precision


@dataclass(frozen=True)
class Mean:
    """A mean with its standard deviation and interval, which are NaN for fewer than two values."""

    n: int
    mean: float
    sd: float
    low: float
    high: float


def mean_interval(values: Sequence[float], alpha: float = 0.05, quantum: float = 0.0, overlap: float = 0.0) -> Mean:
    """Return the mean, the sample standard deviation and the t-interval of level ``1 - alpha``.

    Args:
        values: the values.
        alpha: the level.
        quantum: the step to which values are rounded.  The interval takes the standard deviation for at
            least quantum / sqrt(12), as rounding has it; without a step, values that are all equal have no interval.
        overlap: see :class:`vitlab.comparison.arrays.Design`.

    Raises:
        ValueError: for a value that is not finite.
    """
    x = finite(values)
    n = len(x)
    mean = float(x.mean()) if n else NAN
    sd = float(x.std(ddof=1)) if n > 1 else NAN
    if n < MIN_VALUES:
        return Mean(n, mean, sd, NAN, NAN)
    spread = max(sd if sd > rounding_of(x) else 0.0, quantum / math.sqrt(12))
    half = t_quantile(1 - alpha / 2, n - 1) * (spread * math.sqrt(1 / n + overlap)) if spread else NAN
    return Mean(n, mean, sd, mean - half, mean + half)


def sign_flip(differences: Sequence[float] | Floats) -> float:
    """Return the two-sided p of the exact sign-flip test: the share of sign assignments with a sum as far from 0.

    Exact for up to 40 differences, by meeting in the middle; NaN beyond, where t needs no cross-check.
    """
    d = finite(differences)
    if len(d) == 0 or len(d) > 40:
        return NAN
    left, right = (_signed_sums(half) for half in (d[: len(d) // 2], d[len(d) // 2 :]))
    left.sort()  # with both halves sorted, the binary searches stay in the cache
    right.sort()
    scale = float(np.abs(d).sum())
    bound = abs(float(d.sum())) - 1e-12 * scale  # sums that differ by rounding alone count as equal
    if bound <= 0:
        return 1.0
    above = len(right) - np.searchsorted(right, bound - left, side="left")
    below = np.searchsorted(right, -bound - left, side="right")
    return float((above.sum() + below.sum()) / 2.0 ** len(d))


def smallest_sign_flip_p(n: int) -> float:
    """Return the smallest two-sided p that a sign-flip test of ``n`` differences can reach."""
    return min(1.0, 2.0 ** (1 - n))


def rounding_of(values: Floats) -> Floats:
    """Return the size of differences that the rounding of values explains, along the last axis; NaN are missing.

    Values that single precision represents exactly were computed in it.
    """
    values = np.where(np.isfinite(values), values, 0.0)
    is_single = (values == values.astype(np.float32)).all(axis=-1)
    return np.asarray(np.where(is_single, SINGLE_ROUNDING, ROUNDING) * np.abs(values).max(axis=-1, initial=0.0))


def _signed_sums(values: Floats) -> Floats:
    """Return the sums of ``values`` under every assignment of signs."""
    sums = np.zeros(1)
    for value in values:
        sums = np.concatenate([sums + value, sums - value])
    return sums


# -- the shape of their distribution, and the noise of a choice -------------------------------------------------------

SAMPLES = 20_000  #: simulated samples of normal values
CHOICES = 4000  #: choices that are drawn again


def gap_score(values_AN: Floats) -> float:
    """Return how far the largest gaps between the seeds of arms exceed the gaps of normal values, in standard errors.

    The gap of an arm is the largest one between neighbours among its seeds, over their range.  Values at two levels
    have large gaps, and so do skewed ones.  The median of the other arms at a seed is subtracted first, because arms at
    equal seeds share what the seed does.

    Args:
        values_AN: of arms at the same seeds.

    Returns:
        NaN for fewer than three seeds or arms.  Arms with equal values at two seeds, as rounded ones may have, are left
        out.
    """
    arms, n = values_AN.shape
    if n < 3 or arms < 3:
        return math.nan
    others = np.stack([np.median(np.delete(values_AN, arm, axis=0), axis=0) for arm in range(arms)])
    gaps_AN = np.diff(np.sort(values_AN - others, axis=1), axis=1)
    gaps_AN = gaps_AN[(gaps_AN > 0).all(axis=1) & (np.diff(np.sort(values_AN, axis=1), axis=1) > 0).all(axis=1)]
    if len(gaps_AN) < 3:
        return math.nan
    largest_A = gaps_AN.max(axis=1) / gaps_AN.sum(axis=1)
    larger = 1 - (np.searchsorted(_normal_gaps(n), largest_A) - 0.5) / SAMPLES  # p of each arm
    return float((-np.log(np.clip(larger, 1 / SAMPLES, 1)).mean() - 1) * math.sqrt(len(gaps_AN)))


@cache
def _normal_gaps(n: int) -> Floats:
    """Return the sorted largest gaps of samples of normal values."""
    gaps = np.diff(np.sort(np.random.default_rng(0).standard_normal((SAMPLES, n)), axis=1), axis=1)
    return np.asarray(np.sort(gaps.max(axis=1) / gaps.sum(axis=1)))


def choice_variance(scores: Sequence[float], chosen: int, value: float, sd: float, seeds: int) -> tuple[float, float]:
    """Return the mean squared change of an arm's value if its knobs were chosen again, and its degrees of freedom.

    The scores are drawn again around themselves, the chosen rival's around the arm's value, which no choice has
    biased; each time the best rival is chosen.  The degrees of freedom count the rivals that could have won: one
    less than their effective number, 1 / sum(p^2) with the share p of the draws that a rival wins, and at least 1.

    Args:
        scores: mean score of each rival over the tuning seeds; larger is better.
        chosen: index of the chosen rival.
        value: mean of the arm over its seeds, in the same sense.
        sd: standard deviation of the arm between seeds.
        seeds: number of tuning seeds.
    """
    if len(scores) < 2 or not sd > 0:
        return 0.0, 1.0
    means_K = np.array(scores, dtype=float)
    means_K[chosen] = value
    draws_MK = np.random.default_rng(len(scores)).standard_normal((CHOICES, len(scores)))
    again_M = (means_K + sd / math.sqrt(seeds) * draws_MK).argmax(axis=1)
    shares_K = np.bincount(again_M, minlength=len(scores)) / CHOICES
    return float(((means_K[again_M] - value) ** 2).mean()), max(1.0, 1 / float((shares_K**2).sum()) - 1)
