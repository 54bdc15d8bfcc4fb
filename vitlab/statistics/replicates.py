"""Means of few replicates with intervals, and the exact sign-flip test."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

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
