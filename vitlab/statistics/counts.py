"""Seeds that came to nothing: collapsed trainings, and the exact test of their number."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from vitlab.statistics.replicates import Floats

Mask = npt.NDArray[np.bool_]

MAX_EXACT = 80  #: seeds of a group from which on a test by Boschloo takes long, and one by Fisher is hardly blunter
COLLAPSED_SD = 10.0  #: robust standard deviations on the worse side of the median at which a training has collapsed
NORMAL_MAD = 1.4826  #: standard deviation of a normal distribution in median absolute deviations


def collapsed(values_SAN: Floats, sign: int = 1) -> Mask:
    """Return which values are far worse than the other values of their arm (studies, arms, seeds).

    The scale is the median distance to the median of an arm, over all arms of the study (without distances of 0) or
    in the arm itself, whichever is larger.  Arms of fewer than three values have none.

    Args:
        values_SAN: the values; NaN where one is missing.
        sign: 1 if larger values are better, -1 if smaller ones are.
    """
    n_SA = np.isfinite(values_SAN).sum(axis=2)
    distance_SAN = sign * (values_SAN - finite_median(values_SAN)[:, :, None])
    with np.errstate(divide="ignore", invalid="ignore"):
        unbiased_SAN = np.abs(distance_SAN) * np.sqrt(n_SA / (n_SA - 1))[:, :, None]
    size_SAN = np.where(n_SA[:, :, None] >= 3, unbiased_SAN, math.nan)
    # A distance of 0 says nothing about the scale: of an odd number of seeds the median is one of them, and where most
    # values are equal by rounding, any other one would collapse.
    moved_SN = np.where(size_SAN > 0, size_SAN, math.nan).reshape(len(values_SAN), -1)
    scale_SA = NORMAL_MAD * np.maximum(finite_median(moved_SN)[:, None], finite_median(size_SAN))
    with np.errstate(invalid="ignore"):
        return np.asarray(distance_SAN < -COLLAPSED_SD * scale_SA[:, :, None])


def collapsed_seeds(arms: Mapping[str, Mapping[int, float]], sign: int = 1) -> dict[str, list[int]]:
    """Return the collapsed seeds of each arm, see :func:`collapsed`."""
    seeds = sorted(set().union(*arms.values()))
    [flags_AN] = collapsed(as_array(arms.values(), seeds)[None], sign)
    return {
        arm: [seed for seed, is_collapsed in zip(seeds, row, strict=True) if is_collapsed]
        for arm, row in zip(arms, flags_AN, strict=True)
    }


def as_array(arms: Collection[Mapping[int, float]], seeds: Sequence[int]) -> Floats:
    """Return the values of arms at seeds (A, N); NaN where an arm has none."""
    rows = [[values.get(seed, math.nan) for seed in seeds] for values in arms]
    return np.array(rows, dtype=float).reshape(len(arms), len(seeds))


def finite_median(values: Floats) -> Floats:
    """Return the median of the finite values along the last axis; NaN if there are none."""
    if not values.shape[-1]:
        return np.full(values.shape[:-1], math.nan)
    ordered, n = np.sort(values, axis=-1), np.isfinite(values).sum(axis=-1)  # NaN are last
    middle = np.stack([np.maximum(n - 1, 0) // 2, np.minimum(n // 2, values.shape[-1] - 1)], axis=-1)
    return np.asarray(np.take_along_axis(ordered, middle, axis=-1).mean(axis=-1))


def largest_hidden_rate(n: int, alpha: float = 0.05) -> float:
    """Return the largest share of collapsing trainings that none of ``n`` leaves possible, at level ``1 - alpha``."""
    return float(1 - alpha ** (1 / n))


@lru_cache(maxsize=4096)
def boschloo(bad: tuple[int, int], seeds: tuple[int, int]) -> float:
    """Return the one-sided p of Boschloo's exact test that the second of two groups has the larger share of bad seeds.

    Unlike Fisher's test, it does not take the number of bad seeds as given: four of ten beside none of ten have
    p = 0.021, and 0.043 by Fisher's.  Of more than 80 seeds, p is Fisher's, which is never smaller.

    Reference: Boschloo (1970), Statistica Neerlandica 24, 1-35.
    """
    from scipy.stats import boschloo_exact, fisher_exact

    good = [size - number for size, number in zip(seeds, bad, strict=True)]
    test = boschloo_exact if max(seeds) <= MAX_EXACT else fisher_exact
    return float(test([bad, good], alternative="less").pvalue)
