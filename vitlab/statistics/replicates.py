"""What a handful of replicates shows: means with intervals, and the difference of two arms."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from vitlab.statistics.student import NAN, Floats, finite, t_quantile, t_two_sided

BCA_FROM = 10  #: replicates from which on a bootstrap interval holds what it says
ROUNDING = 1e-12  #: of the size of the values: what differs by less differs by the rounding of floating-point numbers


@dataclass(frozen=True)
class Mean:
    """A mean and what is known of it.  ``sd`` is NaN for one value, ``low`` and ``high`` for fewer than two."""

    n: int
    mean: float
    sd: float
    low: float
    high: float


@dataclass(frozen=True)
class Contrast:
    """The difference of two arms, first less second.

    ``test`` is ``paired t``, ``Welch t``, ``sign flip`` (differences without spread: p only, no interval), or ``none``
    (too few values to judge).  ``pairs`` counts equal seeds; ``correlation`` is that of the pairs, and says what
    pairing gained.
    """

    difference: float
    low: float
    high: float
    p: float
    test: Literal["paired t", "Welch t", "sign flip", "none"]
    pairs: int
    se: float = NAN  #: standard error of ``difference``
    df: float = NAN  #: degrees of freedom of ``se``
    correlation: float = NAN
    sign_flip_p: float = NAN  #: exact cross-check that assumes symmetry only; NaN without pairs
    effect: float = NAN  #: ``difference`` in standard deviations of the seeds, see :func:`standardised`


def mean_interval(values: Sequence[float], alpha: float = 0.05) -> Mean:
    """Mean, sample standard deviation and the t-interval of level ``1 - alpha``.

    Values without spread give an interval of no width for the mean: it says that nothing varied in this sample.

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
    half = t_quantile(1 - alpha / 2, len(x) - 1) * sd / math.sqrt(len(x))
    return Mean(len(x), mean, sd, mean - half, mean + half)


def compare(first: Mapping[int, float], second: Mapping[int, float], alpha: float = 0.05) -> Contrast:
    """The difference of two arms, given the value of each at each seed.

    Paired where at least two seeds are common to both, which leaves the other seeds out; Welch's t where not.
    """
    common = sorted(first.keys() & second.keys())
    if len(common) >= 2:
        return paired([first[seed] for seed in common], [second[seed] for seed in common], alpha)
    if len(first) >= 2 and len(second) >= 2:
        return welch(list(first.values()), list(second.values()), alpha)
    if common:
        return paired([first[common[0]]], [second[common[0]]], alpha)
    x, y = finite(list(first.values())), finite(list(second.values()))
    difference = float(x.mean() - y.mean()) if len(x) and len(y) else NAN
    return Contrast(difference, NAN, NAN, NAN, "none", pairs=0)


def paired(first: Sequence[float], second: Sequence[float], alpha: float = 0.05) -> Contrast:
    """Student's t on the differences of pairs, two-sided.

    Raises:
        ValueError: for unequal lengths, or a value that is not finite.
    """
    x, y = finite(first), finite(second)
    if len(x) != len(y):
        raise ValueError(f"pairs need as many values on either side; found {len(x)} and {len(y)}")
    differences, n = x - y, len(x)
    if n == 0:
        return Contrast(NAN, NAN, NAN, NAN, "none", pairs=0)
    mean = float(differences.mean())
    if n == 1:
        return Contrast(mean, NAN, NAN, NAN, "none", pairs=1)
    if _without_spread(differences, x, y):
        level = abs(mean) <= ROUNDING * max(float(np.abs(x).max()), float(np.abs(y).max()))
        alike = 1.0 if level else smallest_sign_flip_p(n)
        return Contrast(0.0 if level else mean, NAN, NAN, alike, "sign flip", pairs=n, sign_flip_p=alike)
    flipped = sign_flip(differences)
    se, df = float(differences.std(ddof=1)) / math.sqrt(n), n - 1.0
    half = t_quantile(1 - alpha / 2, df) * se
    known = n > 2 and not _without_spread(x, x) and not _without_spread(y, y)
    correlation = float(np.corrcoef(x, y)[0, 1]) if known else NAN
    p = t_two_sided(mean / se, df)
    effect = standardised(x, y)
    return Contrast(mean, mean - half, mean + half, p, "paired t", n, se, df, correlation, flipped, effect)


def welch(first: Sequence[float], second: Sequence[float], alpha: float = 0.05) -> Contrast:
    """Welch's t, two-sided: no pairs, no common variance.

    Raises:
        ValueError: for a value that is not finite.
    """
    x, y = finite(first), finite(second)
    if len(x) < 2 or len(y) < 2:
        difference = float(x.mean() - y.mean()) if len(x) and len(y) else NAN
        return Contrast(difference, NAN, NAN, NAN, "none", pairs=0)
    difference = float(x.mean() - y.mean())
    a, b = float(x.var(ddof=1)) / len(x), float(y.var(ddof=1)) / len(y)
    if _without_spread(x, x) and _without_spread(y, y):
        return Contrast(difference, NAN, NAN, NAN, "none", pairs=0)
    se = math.sqrt(a + b)
    df = (a + b) ** 2 / (a**2 / (len(x) - 1) + b**2 / (len(y) - 1))
    half = t_quantile(1 - alpha / 2, df) * se
    p = t_two_sided(difference / se, df)
    low, high = difference - half, difference + half
    return Contrast(difference, low, high, p, "Welch t", 0, se, df, effect=standardised(x, y))


def sign_flip(differences: Sequence[float] | Floats) -> float:
    """Two-sided p of the exact sign-flip test: how often signs drawn at random give a sum as far from 0.

    Exact for up to 40 differences, by sums of either half of them; NaN beyond, where t needs no second opinion.
    """
    d = finite(differences)
    if len(d) == 0 or len(d) > 40:
        return NAN
    left, right = (_signed_sums(half) for half in (d[: len(d) // 2], d[len(d) // 2 :]))
    left.sort()  # sorted on either side, a search finds what it needs in the cache
    right.sort()
    scale = float(np.abs(d).sum())
    bound = abs(float(d.sum())) - 1e-12 * scale  # sums that are equal but for rounding count as equal
    if bound <= 0:
        return 1.0
    above = len(right) - np.searchsorted(right, bound - left, side="left")
    below = np.searchsorted(right, -bound - left, side="right")
    return float((above.sum() + below.sum()) / 2.0 ** len(d))


def smallest_sign_flip_p(n: int) -> float:
    """The smallest two-sided p that ``n`` differences can reach: below it, the test cannot reject whatever happens."""
    return min(1.0, 2.0 ** (1 - n))


def standardised(first: Sequence[float] | Floats, second: Sequence[float] | Floats) -> float:
    """Hedges' g: the difference of the means in standard deviations of both sides, freed of its small-sample bias.

    The standard deviation is that of replicates, not of differences, so that pairs and no pairs are on one scale.

    Reference: Hedges (1981), J. Educational Statistics 6, 107-128.

    Returns:
        NaN for fewer than two values on either side, and where neither has spread.
    """
    x, y = finite(first), finite(second)
    if len(x) < 2 or len(y) < 2 or (_without_spread(x, x, y) and _without_spread(y, x, y)):
        return NAN
    df = len(x) + len(y) - 2
    pooled = math.sqrt((float(x.var(ddof=1)) * (len(x) - 1) + float(y.var(ddof=1)) * (len(y) - 1)) / df)
    unbias = math.exp(math.lgamma(df / 2) - math.lgamma((df - 1) / 2)) / math.sqrt(df / 2)
    return unbias * float(x.mean() - y.mean()) / pooled


def bca(values: Sequence[float] | Floats, alpha: float = 0.05, draws: int = 9999) -> tuple[float, float]:
    """Bootstrap interval of the mean, corrected for bias and skew; the draws are the same each time.

    A cross-check on t that assumes no normal differences.  Below ``BCA_FROM`` values it holds less than it says, and
    is NaN; so it is for values without spread.

    Reference: Efron (1987), J. Am. Stat. Assoc. 82, 171-185.
    """
    x = finite(values)
    if len(x) < BCA_FROM or _without_spread(x, x):
        return NAN, NAN
    from scipy.stats import bootstrap

    found = bootstrap(
        (x,),
        np.mean,
        confidence_level=1 - alpha,
        n_resamples=draws,
        method="BCa",
        vectorized=True,
        rng=np.random.default_rng(0),
    ).confidence_interval
    return float(found.low), float(found.high)


# -- how it is done ---------------------------------------------------------------------------------------------------


def _without_spread(values: Floats, *scales: Floats) -> bool:
    """Whether values are the same but for the rounding of the numbers they were made of."""
    scale = max(float(np.abs(scale).max()) for scale in scales)
    return float(values.std(ddof=1)) <= ROUNDING * scale


def _signed_sums(values: Floats) -> Floats:
    """The sums of ``values`` under every choice of signs."""
    sums = np.zeros(1)
    for value in values:
        sums = np.concatenate([sums + value, sums - value])
    return sums
