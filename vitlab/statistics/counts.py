"""Seeds that came to nothing: collapsed trainings, and the exact test of their number."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

COLLAPSED_SD = 10.0  #: robust standard deviations on the worse side of the median at which a training has collapsed
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


def fisher(bad: tuple[int, int], seeds: tuple[int, int]) -> float:
    """Return the one-sided p of Fisher's exact test that the second of two groups has the larger share of bad seeds."""
    total = sum(bad)
    ways = sum(math.comb(seeds[1], k) * math.comb(seeds[0], total - k) for k in range(bad[1], min(total, seeds[1]) + 1))
    return ways / math.comb(sum(seeds), total)
