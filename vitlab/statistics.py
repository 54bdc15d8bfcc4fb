"""Judging a handful of replicates honestly: intervals, paired tests, corrections, detectable effects.

A replicate is a seed, so ``n`` is small: 3, 5, perhaps 10.  What that asks for:

- Two arms are compared by the differences at equal seeds, with Student's t; where there are no pairs, Welch's t.
- One replicate has no spread and gets no interval: NaN, never zero.  Two have one degree of freedom, and the interval
  is as wide as that makes it.
- Differences that are all the same have no spread to judge by either; the exact sign-flip test stands in for t.
- No bootstrap: percentile intervals hold far less than they say below ten replicates.
- A study is one family of comparisons; what it could have detected is said beside what it found.

Non-finite values are refused: whoever calls has to leave out what diverged, and to say so.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

Correction = Literal["holm", "bonferroni", "none"]
Floats = npt.NDArray[np.float64]
NAN = math.nan


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


def mean_interval(values: Sequence[float], alpha: float = 0.05) -> Mean:
    """Mean, sample standard deviation and the t-interval of level ``1 - alpha``.

    Values without spread give an interval of no width for the mean: it says that nothing varied in this sample.

    Raises:
        ValueError: for a value that is not finite.
    """
    x = _finite(values)
    if len(x) == 0:
        return Mean(0, NAN, NAN, NAN, NAN)
    mean = float(x.mean())
    if len(x) == 1:
        return Mean(1, mean, NAN, NAN, NAN)
    sd = float(x.std(ddof=1))
    half = _t_quantile(1 - alpha / 2, len(x) - 1) * sd / math.sqrt(len(x))
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
    x, y = _finite(list(first.values())), _finite(list(second.values()))
    difference = float(x.mean() - y.mean()) if len(x) and len(y) else NAN
    return Contrast(difference, NAN, NAN, NAN, "none", pairs=0)


def paired(first: Sequence[float], second: Sequence[float], alpha: float = 0.05) -> Contrast:
    """Student's t on the differences of pairs, two-sided.

    Raises:
        ValueError: for unequal lengths, or a value that is not finite.
    """
    x, y = _finite(first), _finite(second)
    if len(x) != len(y):
        raise ValueError(f"pairs need as many values on either side; found {len(x)} and {len(y)}")
    differences, n = x - y, len(x)
    if n == 0:
        return Contrast(NAN, NAN, NAN, NAN, "none", pairs=0)
    mean = float(differences.mean())
    if n == 1:
        return Contrast(mean, NAN, NAN, NAN, "none", pairs=1)
    flipped = sign_flip(differences)
    if _without_spread(differences, x, y):
        return Contrast(mean, NAN, NAN, flipped, "sign flip", pairs=n, sign_flip_p=flipped)
    se, df = float(differences.std(ddof=1)) / math.sqrt(n), n - 1.0
    half = _t_quantile(1 - alpha / 2, df) * se
    correlation = float(np.corrcoef(x, y)[0, 1]) if n > 2 and x.std() > 0 and y.std() > 0 else NAN
    p = _t_two_sided(mean / se, df)
    return Contrast(mean, mean - half, mean + half, p, "paired t", n, se, df, correlation, flipped)


def welch(first: Sequence[float], second: Sequence[float], alpha: float = 0.05) -> Contrast:
    """Welch's t, two-sided: no pairs, no common variance.

    Raises:
        ValueError: for a value that is not finite.
    """
    x, y = _finite(first), _finite(second)
    if len(x) < 2 or len(y) < 2:
        difference = float(x.mean() - y.mean()) if len(x) and len(y) else NAN
        return Contrast(difference, NAN, NAN, NAN, "none", pairs=0)
    difference = float(x.mean() - y.mean())
    a, b = float(x.var(ddof=1)) / len(x), float(y.var(ddof=1)) / len(y)
    if _without_spread(x, x) and _without_spread(y, y):
        return Contrast(difference, NAN, NAN, NAN, "none", pairs=0)
    se = math.sqrt(a + b)
    df = (a + b) ** 2 / (a**2 / (len(x) - 1) + b**2 / (len(y) - 1))
    half = _t_quantile(1 - alpha / 2, df) * se
    p = _t_two_sided(difference / se, df)
    return Contrast(difference, difference - half, difference + half, p, "Welch t", 0, se, df)


def sign_flip(differences: Sequence[float] | Floats) -> float:
    """Two-sided p of the exact sign-flip test: how often signs drawn at random give a sum as far from 0.

    Exact for up to 40 differences, by sums of either half of them; NaN beyond, where t needs no second opinion.
    """
    d = _finite(differences)
    if len(d) == 0 or len(d) > 40:
        return NAN
    left, right = (_signed_sums(half) for half in (d[: len(d) // 2], d[len(d) // 2 :]))
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


def corrected(p_values: Sequence[float], method: Correction = "holm") -> list[float]:
    """p values corrected for the family they form, in the order given.

    NaN stands for a comparison that was planned and cannot be judged: it stays NaN, and counts in the family.
    """
    p = np.asarray(p_values, dtype=float)
    if method == "none" or len(p) == 0:
        return [float(value) for value in p]
    from statsmodels.stats.multitest import multipletests

    adjusted = multipletests(np.where(np.isnan(p), 1.0, p), method=method)[1]
    return [NAN if math.isnan(value) else float(new) for value, new in zip(p, adjusted, strict=True)]


def power(effect: float, se: float, df: float, alpha: float = 0.05) -> float:
    """Chance that a two-sided t-test with this standard error finds a true difference of ``effect``.

    The noncentral t distribution, as an integral over the numerator: scipy 1.17's ``nct`` is NaN at places.
    """
    from scipy.special import chdtr

    critical, shift = _t_quantile(1 - alpha / 2, df), abs(effect) / se
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

    high = _t_quantile(1 - alpha / 2, df) + 10.0
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

    half = _t_quantile(1 - alpha, contrast.df) * contrast.se
    above = float(stdtr(contrast.df, -(contrast.difference + margin) / contrast.se))
    below = float(stdtr(contrast.df, (contrast.difference - margin) / contrast.se))
    p = max(above, below)
    return Equivalence(contrast.difference - half, contrast.difference + half, p, p < alpha)


@dataclass(frozen=True)
class Superiority:
    """The probability that a replicate of the first arm exceeds one of the second, ties counted half."""

    probability: float
    low: float
    high: float


def superiority_of_pairs(first: Sequence[float], second: Sequence[float], alpha: float = 0.05) -> Superiority:
    """Probability that the first exceeds the second at the same seed, with the exact interval of Clopper and Pearson.

    Reference: Bouthillier et al., arXiv:2103.03098.
    """
    x, y = _finite(first), _finite(second)
    if len(x) != len(y):
        raise ValueError(f"pairs need as many values on either side; found {len(x)} and {len(y)}")
    if len(x) == 0:
        return Superiority(NAN, NAN, NAN)
    from statsmodels.stats.proportion import proportion_confint

    wins = float((x > y).sum() + 0.5 * (x == y).sum())
    low, high = proportion_confint(wins, len(x), alpha=alpha, method="beta")
    return Superiority(wins / len(x), float(low), float(high))


def superiority(first: Sequence[float], second: Sequence[float], alpha: float = 0.05) -> Superiority:
    """Probability that any replicate of the first exceeds any of the second, for arms without pairs.

    The interval inverts Newcombe's score approximation, which does not collapse where one arm is all above the other.

    Reference: Newcombe (2006), Statistics in Medicine 25, 559-573, method 5.
    """
    x, y = _finite(first), _finite(second)
    m, n = len(x), len(y)
    if m == 0 or n == 0:
        return Superiority(NAN, NAN, NAN)
    from scipy.optimize import brentq
    from scipy.special import ndtri

    found = float((x[:, None] > y).mean() + 0.5 * (x[:, None] == y).mean())
    z2 = float(ndtri(1 - alpha / 2)) ** 2

    def excess(theta: float) -> float:
        spread = 1 + ((m + n) / 2 - 1) * ((1 - theta) / (2 - theta) + theta / (1 + theta))
        return (found - theta) ** 2 - z2 * theta * (1 - theta) * spread / (m * n)

    inside = min(max(found, 1e-9), 1 - 1e-9)  # 0 and 1 are roots themselves where that is what was found
    low = 0.0 if found == 0 else float(brentq(excess, 0.0, inside))
    high = 1.0 if found == 1 else float(brentq(excess, inside, 1.0))
    return Superiority(found, low, high)


# -- how it is done ---------------------------------------------------------------------------------------------------


def _finite(values: Sequence[float] | Floats) -> Floats:
    x = np.asarray(values, dtype=float)
    if not np.isfinite(x).all():
        raise ValueError(f"{int((~np.isfinite(x)).sum())} of {x.size} values are not finite; leave them out and say so")
    return x


def _without_spread(values: Floats, *scales: Floats) -> bool:
    """Whether values are the same but for the rounding of the numbers they were made of."""
    scale = max(float(np.abs(scale).max()) for scale in scales)
    return float(values.std(ddof=1)) <= 1e-12 * scale


def _signed_sums(values: Floats) -> Floats:
    """The sums of ``values`` under every choice of signs."""
    sums = np.zeros(1)
    for value in values:
        sums = np.concatenate([sums + value, sums - value])
    return sums


# The special functions behind scipy.stats.t, which spends a hundred times as long on reading its arguments.


def _t_quantile(q: float, df: float) -> float:
    from scipy.special import stdtrit

    return float(stdtrit(df, q))


def _t_two_sided(t: float, df: float) -> float:
    from scipy.special import stdtr

    return float(2 * stdtr(df, -abs(t)))
