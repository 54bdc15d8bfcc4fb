"""Tuning as a part of the noise: what another choice of knobs would have changed."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

DRAWS = 4000  #: choices that are drawn again


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
    draws_MK = np.random.default_rng(len(scores)).standard_normal((DRAWS, len(scores)))
    again_M = (means_K + sd / math.sqrt(seeds) * draws_MK).argmax(axis=1)
    shares_K = np.bincount(again_M, minlength=len(scores)) / DRAWS
    return float(((means_K[again_M] - value) ** 2).mean()), max(1.0, 1 / float((shares_K**2).sum()) - 1)
