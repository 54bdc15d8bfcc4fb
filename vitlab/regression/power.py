"""Probabilities with which an unchanged model passes the gate."""

from __future__ import annotations

import math

import numpy as np

from vitlab import statistics
from vitlab.regression.arrays import MIN_SEEDS
from vitlab.statistics.replicates import t_quantile

MAX_SEEDS = 200  #: largest number of seeds that is recommended


def chance_to_pass(n: int, sd: float, margin: float, alpha: float) -> float:
    """Return the probability that an unchanged model passes the test of one arm and metric.

    Old and new values at one seed are taken as independent: any change of rounding has the effect of another seed
    (arXiv:2103.04514).

    Args:
        n: seeds.
        sd: standard deviation from seed to seed.
        margin: of the cell.
        alpha: of the test.
    """
    se = sd * math.sqrt(2 / n)
    if n < MIN_SEEDS:
        return 0.0
    return statistics.power(margin, se, n - 1, 2 * alpha) if se > 0 else 1.0


def chance_in_two_looks(first: int, second: int, sd: float, margin: float, alpha: float, draws: int = 20_000) -> float:
    """Simulate :func:`chance_to_pass` with ``first`` seeds, and ``second`` seeds if the cell has not passed by then."""
    d = np.random.default_rng(0).normal(0.0, sd * math.sqrt(2), (draws, second))
    passed = np.zeros(draws, dtype=bool)
    for n in (first, second):
        se = d[:, :n].std(1, ddof=1) / math.sqrt(n)
        passed |= d[:, :n].mean(1) + t_quantile(1 - alpha, n - 1) * se < margin
    return float(passed.mean())


def seeds_to_pass(sd_of_differences: float, margin: float, alpha: float, chance: float = 0.8) -> int | None:
    """Return the fewest seeds with which an unchanged model passes at ``chance``; None above ``MAX_SEEDS``."""
    sd = sd_of_differences / math.sqrt(2)
    too_few, enough = MIN_SEEDS - 1, MAX_SEEDS
    if chance_to_pass(MAX_SEEDS, sd, margin, alpha) < chance:
        return None
    while enough - too_few > 1:
        middle = (too_few + enough) // 2
        if chance_to_pass(middle, sd, margin, alpha) >= chance:
            enough = middle
        else:
            too_few = middle
    return enough
