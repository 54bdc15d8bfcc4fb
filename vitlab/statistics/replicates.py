"""Means of few replicates with intervals, and the difference of two arms."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

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


def t_two_sided(t: float, df: float) -> float:
    """Return the two-sided p value of a t statistic."""
    from scipy.special import stdtr

    return float(2 * stdtr(df, -abs(t)))


MIN_VALUES = 3  #: of an interval: those of two values reach 13 standard errors to either side
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


@dataclass(frozen=True)
class Contrast:
    """The difference of two arms, first less second.

    ``test`` is ``paired t``, ``Welch t``, ``sign flip`` (differences without spread: p only, no interval), or ``none``
    (too few values to test).  ``pairs`` counts equal seeds.
    """

    difference: float
    low: float
    high: float
    p: float
    test: Literal["paired t", "Welch t", "sign flip", "none"]
    pairs: int
    se: float = NAN  #: standard error of ``difference``
    df: float = NAN  #: degrees of freedom of ``se``
    sign_flip_p: float = NAN  #: exact cross-check that assumes symmetry only; NaN without pairs
    overlap: float = 0.0  #: see :func:`paired_t_test`


def mean_interval(values: Sequence[float], alpha: float = 0.05, quantum: float = 0.0, overlap: float = 0.0) -> Mean:
    """Return the mean, the sample standard deviation and the t-interval of level ``1 - alpha``.

    Args:
        values: the values.
        alpha: the level.
        quantum: the step to which values are rounded.  The interval is that of a standard deviation of at least
            quantum / sqrt(12), that of the rounding; without a step, values that are all equal have no interval.
        overlap: see :func:`paired_t_test`.

    Raises:
        ValueError: for a value that is not finite.
    """
    x = finite(values)
    if len(x) == 0:
        return Mean(0, NAN, NAN, NAN, NAN)
    mean = float(x.mean())
    if len(x) == 1:
        return Mean(1, mean, NAN, NAN, NAN)
    sd = float(x.std(ddof=1))
    spread = max(0.0 if _without_spread(x, x) else sd, quantum / math.sqrt(12))
    se = spread * math.sqrt(1 / len(x) + overlap)
    half = t_quantile(1 - alpha / 2, len(x) - 1) * se if spread > 0 and len(x) >= MIN_VALUES else NAN
    return Mean(len(x), mean, sd, mean - half, mean + half)


def compare(
    first: Mapping[int, float],
    second: Mapping[int, float],
    alpha: float = 0.05,
    quantum: float = 0.0,
    overlap: float = 0.0,
) -> Contrast:
    """Return the difference of two arms, given the value of each at each seed.

    The test is paired if both arms share at least two seeds (other seeds are left out), otherwise Welch's t.  See
    :func:`paired_t_test` about ``quantum`` and ``overlap``.
    """
    common = sorted(first.keys() & second.keys())
    if len(common) >= 2:
        pairs = [[side[seed] for seed in common] for side in (first, second)]
        return paired_t_test(pairs[0], pairs[1], alpha, quantum, overlap)
    if len(first) >= 2 and len(second) >= 2:
        return welch_t_test(list(first.values()), list(second.values()), alpha, overlap)
    if common:
        return paired_t_test([first[common[0]]], [second[common[0]]], alpha)
    x, y = finite(list(first.values())), finite(list(second.values()))
    difference = float(x.mean() - y.mean()) if len(x) and len(y) else NAN
    return Contrast(difference, NAN, NAN, NAN, "none", pairs=0)


def paired_t_test(
    first: Sequence[float],
    second: Sequence[float],
    alpha: float = 0.05,
    quantum: float = 0.0,
    overlap: float = 0.0,
) -> Contrast:
    """Run a two-sided paired Student's t-test.

    With ``overlap``, it is the corrected resampled t-test: the variance of the mean of n differences is
    (1 / n + overlap) times theirs, and tests that need independent seeds, such as the sign-flip test, are left out.

    Args:
        first: values of one side.
        second: values of the other, in the same order.
        alpha: of the interval.
        quantum: the step to which values are rounded; differences scatter by at least quantum / sqrt(6).
        overlap: validation images over training images, if each seed holds out others of the same images; else 0.  NaN
            if that is not known, so that nothing can be tested.

    Reference: Nadeau and Bengio (2003), Machine Learning 52, 239-281, equation 9.

    Raises:
        ValueError: for unequal lengths, or a value that is not finite.
    """
    x, y = finite(first), finite(second)
    if len(x) != len(y):
        raise ValueError(f"pairs need equal numbers of values; found {len(x)} and {len(y)}")
    differences, n = x - y, len(x)
    if n == 0:
        return Contrast(NAN, NAN, NAN, NAN, "none", pairs=0)
    mean = float(differences.mean())
    if n == 1:
        return Contrast(mean, NAN, NAN, NAN, "none", pairs=1)
    if _without_spread(differences, x, y):
        no_difference = abs(mean) <= rounding_of(x, y)
        if overlap != 0 and not no_difference:
            return Contrast(mean, NAN, NAN, NAN, "none", pairs=n, overlap=overlap)
        p = 1.0 if no_difference else smallest_sign_flip_p(n)
        return Contrast(0.0 if no_difference else mean, NAN, NAN, p, "sign flip", n, sign_flip_p=p, overlap=overlap)
    if math.isnan(overlap):
        return Contrast(mean, NAN, NAN, NAN, "none", pairs=n, overlap=overlap)
    sign_flip_p = sign_flip(differences) if overlap == 0 else NAN
    se, df = max(float(differences.std(ddof=1)), quantum / math.sqrt(6)) * math.sqrt(1 / n + overlap), n - 1.0
    half = t_quantile(1 - alpha / 2, df) * se
    p = t_two_sided(mean / se, df)
    low, high = mean - half, mean + half
    return Contrast(mean, low, high, p, "paired t", n, se, df, sign_flip_p, overlap=overlap)


def welch_t_test(
    first: Sequence[float], second: Sequence[float], alpha: float = 0.05, overlap: float = 0.0
) -> Contrast:
    """Run a two-sided Welch's t-test: no pairs, unequal variances.  See :func:`paired_t_test` about ``overlap``.

    Raises:
        ValueError: for a value that is not finite.
    """
    x, y = finite(first), finite(second)
    if len(x) < 2 or len(y) < 2:
        difference = float(x.mean() - y.mean()) if len(x) and len(y) else NAN
        return Contrast(difference, NAN, NAN, NAN, "none", pairs=0)
    difference = float(x.mean() - y.mean())
    a, b = (float(side.var(ddof=1)) * (1 / len(side) + overlap) for side in (x, y))
    if math.isnan(overlap) or (_without_spread(x, x) and _without_spread(y, y)):
        return Contrast(difference, NAN, NAN, NAN, "none", pairs=0, overlap=overlap)
    se = math.sqrt(a + b)
    df = (a + b) ** 2 / (a**2 / (len(x) - 1) + b**2 / (len(y) - 1))
    half = t_quantile(1 - alpha / 2, df) * se
    p = t_two_sided(difference / se, df)
    low, high = difference - half, difference + half
    return Contrast(difference, low, high, p, "Welch t", 0, se, df, overlap=overlap)


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


def _without_spread(values: Floats, *scales: Floats) -> bool:
    """Return whether values are equal except for the rounding of the numbers they were computed from."""
    return float(values.std(ddof=1)) <= rounding_of(*scales)


def rounding_of(*values: Floats) -> float:
    """Return the size of differences that the rounding of values explains.

    Values that single precision represents exactly were computed in it.
    """
    single = all(bool((x == x.astype(np.float32)).all()) for x in values)
    return (SINGLE_ROUNDING if single else ROUNDING) * max(float(np.abs(x).max()) for x in values)


def _signed_sums(values: Floats) -> Floats:
    """Return the sums of ``values`` under every assignment of signs."""
    sums = np.zeros(1)
    for value in values:
        sums = np.concatenate([sums + value, sums - value])
    return sums


def interaction(
    both: Mapping[int, float],
    first: Mapping[int, float],
    second: Mapping[int, float],
    neither: Mapping[int, float],
    *,
    alpha: float = 0.05,
    overlap: float = 0.0,
) -> Contrast:
    """Return the interaction of two changes: ``both - first - second + neither``.

    Each argument maps a seed to a value; Student's t is taken over the seeds that all four share.  For two factors of
    two levels this is the interaction of a repeated-measures analysis of variance with the seed as the subject, and F
    is the square of t.  See :func:`paired_t_test` about ``overlap``.
    """
    seeds = sorted(both.keys() & first.keys() & second.keys() & neither.keys())
    return paired_t_test(
        [both[seed] - first[seed] for seed in seeds],
        [second[seed] - neither[seed] for seed in seeds],
        alpha,
        overlap=overlap,
    )
