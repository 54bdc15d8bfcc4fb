"""Seeds that came to nothing: collapsed trainings, and the exact test of their number."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from vitlab.statistics.replicates import Floats

COLLAPSED_SD = 10.0  #: robust standard deviations on the worse side of the median at which a training has collapsed
MAX_EXACT = 300  #: seeds of a group beyond which :func:`boschloo` is bounded
NORMAL_MAD = 1.4826  #: standard deviation of a normal distribution in median absolute deviations


def collapsed_seeds(arms: Mapping[str, Mapping[int, float]], sign: int = 1) -> dict[str, list[int]]:
    """Return the seeds of each arm whose value is far worse than those of the other seeds of the arm.

    The scale is the median distance to the median of an arm, over all arms and in the arm itself, whichever is larger.

    Args:
        arms: arm to its values by seed; arms of fewer than three values have no collapsed seeds.
        sign: 1 if larger values are better, -1 if smaller ones are.
    """
    distances = {
        arm: sign * (np.array([*values.values()]) - np.median([*values.values()]))
        for arm, values in arms.items()
        if len(values) >= 3
    }
    moved = [abs(x[x != 0]) * math.sqrt(len(x) / (len(x) - 1)) for x in distances.values()]
    everywhere = np.concatenate(moved) if moved else np.empty(0)
    if not len(everywhere):
        return {arm: [] for arm in arms}
    common = float(np.median(everywhere))
    result: dict[str, list[int]] = {arm: [] for arm in arms}
    for arm, x in distances.items():
        scale = NORMAL_MAD * max(common, float(np.median(np.abs(x))) * math.sqrt(len(x) / (len(x) - 1)))
        result[arm] = [
            seed for seed, distance in zip(arms[arm], x, strict=True) if float(distance) < -COLLAPSED_SD * scale
        ]
    return result


@lru_cache(maxsize=4096)
def boschloo(bad: tuple[int, int], seeds: tuple[int, int]) -> float:
    """Return the one-sided p of Boschloo's exact test that the second of two groups has the larger share of bad seeds.

    It is the probability of a p of Fisher's exact test as small as that of these groups, at the share common to both
    that makes it largest.  Unlike Fisher's test, it does not take the number of bad seeds as given: four of ten beside
    none of ten have p = 0.021, and 0.043 by Fisher's.  For groups of more than 300 seeds, p is that of Fisher's
    test, which is never smaller.

    Reference: Boschloo (1970), Statistica Neerlandica 24, 1-35.
    """
    if max(seeds) > MAX_EXACT:
        return float(_fisher(sum(bad), seeds)[bad[1] - max(0, sum(bad) - seeds[0])])
    tables, (first_SA, second_SB) = _fisher_tables(seeds), (_binomial(n) for n in seeds)
    as_small = tables <= tables[bad] * (1 + 1e-9)
    return min(1.0, float(((first_SA @ as_small) * second_SB).sum(axis=1).max()))


def smallest_boschloo(total: int, seeds: tuple[int, int]) -> float:
    """Return the smallest p of :func:`boschloo` that any split of so many bad seeds has."""
    second = min(total, seeds[1])
    return boschloo((total - second, second), seeds)


@lru_cache
def _fisher_tables(seeds: tuple[int, int]) -> Floats:
    """Return the one-sided p of Fisher's exact test for each number of bad seeds of both groups."""
    first, second = seeds
    tables = np.ones((first + 1, second + 1))
    for total in range(1, first + second + 1):
        k = np.arange(max(0, total - first), min(total, second) + 1)
        tables[total - k, k] = _fisher(total, seeds)
    return tables


def _fisher(total: int, seeds: tuple[int, int]) -> Floats:
    """Return the one-sided p of Fisher's exact test of ``total`` bad seeds, by their number in the second group."""
    first, second = seeds
    k = np.arange(max(0, total - first), min(total, second) + 1)
    logs = _log_ways(second, k) + _log_ways(first, total - k) - _log_ways(first + second, np.array(total))
    return np.asarray(np.minimum(1.0, np.exp(logs)[::-1].cumsum()[::-1]))


def _log_ways(n: int, k: npt.NDArray[np.int_]) -> Floats:
    """Return the log of the number of ways to choose ``k`` of ``n``."""
    from scipy.special import gammaln

    return np.asarray(gammaln(n + 1) - gammaln(k + 1) - gammaln(n - k + 1))


@lru_cache
def _binomial(n: int) -> Floats:
    """Return the probability of each number of bad seeds of ``n``, for shares from 0 to 1 along the first axis."""
    share_S1, k_K = np.linspace(0, 1, 1001)[:, None], np.arange(n + 1)
    return np.asarray(np.exp(_log_ways(n, k_K)) * share_S1**k_K * (1 - share_S1) ** (n - k_K))
