"""A check of whether the seeds of all arms lie as normal values do, or in groups, or with some far out."""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np

from vitlab.statistics.replicates import Floats

DRAWS = 20_000  #: simulated samples of normal values


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
    larger = 1 - (np.searchsorted(_normal_gaps(n), largest_A) - 0.5) / DRAWS  # p of each arm
    return float((-np.log(np.clip(larger, 1 / DRAWS, 1)).mean() - 1) * math.sqrt(len(gaps_AN)))


@lru_cache
def _normal_gaps(n: int) -> Floats:
    """Return the sorted largest gaps of samples of normal values."""
    gaps = np.diff(np.sort(np.random.default_rng(0).standard_normal((DRAWS, n)), axis=1), axis=1)
    return np.asarray(np.sort(gaps.max(axis=1) / gaps.sum(axis=1)))
