"""Judgement of many studies by the gate: cells and counts, from an array of values (studies, cells, sides, seeds).

:func:`vitlab.regression.decide.judge` judges a study by it, and simulations judge thousands.  The rules are in
:mod:`vitlab.regression.decide`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
from scipy.special import stdtr, stdtrit

from vitlab import statistics
from vitlab.comparison.arrays import MIN_SEEDS, Ints, Mask, moments
from vitlab.statistics.counts import NORMAL_MAD, finite_median
from vitlab.statistics.replicates import NAN, Floats, rounding_of

Verdict = Literal["pass", "regressed", "inconclusive"]
VERDICTS: tuple[Verdict, ...] = ("pass", "inconclusive", "regressed")
OUTLIER_FACTOR = 3.0  #: largest pooled standard deviation, in robust ones; more is due to outliers


@dataclass(frozen=True)
class Cells:
    """What is judged in every study of an array: cells C, each with the values of two sides at seeds N.

    Cells of several metrics share their trainings, so these are counted once.
    """

    margin: Floats  #: of each cell, or of each study and cell
    min_abs: Floats
    quantum: Floats
    trainings: Ints  #: the arm of each cell
    counted: Mask  #: cells whose trainings are counted and tested

    @classmethod
    def of_arms(cls, arms: int, margin: Floats, min_abs: Floats, quantum: float = 0.0) -> Cells:
        """Return cells of one metric."""
        return cls(margin, min_abs, np.full(arms, quantum), np.arange(arms), np.ones(arms, bool))


@dataclass(frozen=True)
class Judged:
    """The judged cells of studies (S, C), and the counts of all arms (S)."""

    pairs: Ints  #: seeds that neither side lost
    means: Floats  #: of the baseline and of the candidate (S, C, 2)
    identical: Mask
    se: Floats
    worst: Floats
    p: Floats
    p_adjusted: Floats
    has_more: Mask  #: whether the candidate lost a larger share
    verdict: Ints  #: place in ``VERDICTS``
    collapsed: Ints  #: (S, C, 2)
    broken: Ints  #: lost and collapsed seeds of the baseline and of the candidate (S, C, 2)
    seeds: Ints  #: among these (S, C, 2)
    count_broken: Ints  #: (S, 2)
    count_seeds: Ints  #: (S, 2)
    count_p: Floats  #: adjusted (S); NaN without lost and collapsed trainings
    count_verdict: Ints  #: (S)
    family: Ints  #: (S)

    @property
    def overall(self) -> Ints:
        """Return the verdict of each study (S)."""
        return np.asarray(np.maximum(self.verdict.max(axis=1), self.count_verdict))


def judge_arrays(values_SC2N: Floats, lost_SC2N: Mask, cells: Cells, alpha: float = 0.05) -> Judged:
    """Judge every cell of every study.

    Args:
        values_SC2N: of the baseline and of the candidate, signed so that larger is better; NaN where there is none.
        lost_SC2N: seeds that diverged or have no finite value.
        cells: their thresholds.
        alpha: of the family.
    """
    collapsed_SC2N = _collapsed(values_SC2N)
    sound_SC2N = np.where(collapsed_SC2N, NAN, values_SC2N)
    n, drop, sd = moments(sound_SC2N[:, :, 0] - sound_SC2N[:, :, 1])
    rounding = rounding_of(sound_SC2N.reshape(*n.shape, -1))
    drop, sd = np.where(np.abs(drop) <= rounding, 0.0, drop), np.where(sd > rounding, sd, 0.0)
    both = np.isfinite(values_SC2N).all(axis=2)
    equal = (values_SC2N[:, :, 0] == values_SC2N[:, :, 1]) | ~both
    identical = equal.all(axis=2) & (both.sum(axis=2) >= MIN_SEEDS)
    with np.errstate(divide="ignore", invalid="ignore"):
        se = np.maximum(sd, cells.quantum / math.sqrt(6)) / np.sqrt(n)
        # Equal differences of a metric without steps have no spread; only their signs can be tested.
        p = np.where(se > 0, stdtr(n - 1, -drop / se), np.where(drop > 0, 0.5**n, 1.0))
        worst = drop + np.where(se > 0, stdtrit(n - 1, 1 - alpha) * se, 0.0)
    is_tested = cells.counted & (n >= MIN_SEEDS) & ~identical
    p = np.where(identical, 1.0, np.where(is_tested, p, NAN))
    worst = np.where(identical, 0.0, np.where(is_tested, worst, NAN))
    used = np.isfinite(sound_SC2N).all(axis=2, keepdims=True)
    with np.errstate(invalid="ignore"):
        means = np.where(used, sound_SC2N, 0.0).sum(axis=3) / used.sum(axis=3)

    present = np.isfinite(values_SC2N) | lost_SC2N
    broken_SC2, seeds_SC2, sums, sizes = _count(present, collapsed_SC2N | lost_SC2N, cells)
    p = np.maximum(p, _chance_of_a_whole_arm(n, broken_SC2, seeds_SC2, sums, sizes))
    family = n.shape[1] + (sums.sum(axis=1) > 0)
    p_adjusted = np.minimum(1.0, family[:, None] * p)
    count_p = np.minimum(1.0, family * _p_of_counts(sums, sizes))

    share_SC2 = broken_SC2 / np.maximum(seeds_SC2, 1)
    count_share = sums / np.maximum(sizes, 1)
    has_more = cells.counted & (share_SC2[:, :, 1] > share_SC2[:, :, 0])
    with np.errstate(invalid="ignore"):
        passes = (identical | (worst < cells.margin)) & ~has_more
        regressed = (p_adjusted < alpha) & (drop >= cells.min_abs) & ~(worst < cells.margin)
        count_verdict = np.select([count_p < alpha, count_share[:, 1] > count_share[:, 0]], [2, 1], 0)
    verdict = np.select([regressed, passes], [2, 0], 1)
    return Judged(
        n, means, identical, se, worst, p, p_adjusted, has_more, verdict, collapsed_SC2N.sum(axis=3),
        broken_SC2, seeds_SC2, sums, sizes, count_p, count_verdict, family,
    )  # fmt: skip


def _collapsed(values_SC2N: Floats) -> Mask:
    """Return which seeds collapsed: by the other seeds of their side, or by the seeds of both sides together.

    The second rule finds two of three seeds that collapsed.  It compares equal numbers of both sides, so that a drop of
    all seeds of a side, which the test of means has to find, is no collapse.
    """
    s, c, _, n = values_SC2N.shape
    by_side = statistics.collapsed(values_SC2N.reshape(s * c, 2, n))
    common = np.where(np.isfinite(values_SC2N).all(axis=2, keepdims=True), values_SC2N, NAN)
    together = statistics.collapsed(common.reshape(s * c, 1, 2 * n))
    return np.asarray((by_side | together.reshape(by_side.shape)).reshape(values_SC2N.shape))


def _count(present: Mask, broken: Mask, cells: Cells) -> tuple[Ints, Ints, Ints, Ints]:
    """Return lost and collapsed trainings, and all, of each cell's arm (S, C, 2) and of all arms (S, 2)."""
    groups = [cells.trainings == training for training in np.unique(cells.trainings)]
    of_arm, is_bad = (
        np.stack([np.any(flags[:, group], axis=1) for group in groups], axis=1) for flags in (present, broken)
    )  # (S, T, 2, N)
    common = np.all(of_arm, axis=2, keepdims=True)
    used = of_arm & (common | ~np.any(common, axis=3, keepdims=True))
    bad_ST2, all_ST2 = (used & is_bad).sum(axis=3), used.sum(axis=3)
    is_counted = np.array([cells.counted[group].any() for group in groups])
    sums, sizes = (n[:, is_counted].sum(axis=1) for n in (bad_ST2, all_ST2))
    return bad_ST2[:, cells.trainings], all_ST2[:, cells.trainings], sums, sizes


def _p_of_counts(sums: Ints, sizes: Ints) -> Floats:
    """Return the p of Boschloo's test that the candidate lost more (S); NaN if neither side lost any."""
    p = np.where(sums.sum(axis=1) > 0, 1.0, NAN)
    for study in np.flatnonzero(sums[:, 1] * sizes[:, 0] > sums[:, 0] * sizes[:, 1]):
        old, new = sums[study].tolist()
        p[study] = statistics.boschloo((old, new), tuple(sizes[study].tolist()))
    return p


def _chance_of_a_whole_arm(n: Ints, broken: Ints, seeds: Ints, sums: Ints, sizes: Ints) -> Floats:
    """Return the probability that as many trainings of an arm all come to nothing, at the rate of the others (S, C)."""
    others = sizes.sum(axis=1, keepdims=True) - seeds[:, :, 1]
    bad = sums.sum(axis=1, keepdims=True) - broken[:, :, 1]
    rate = np.clip((bad + 1) / (others + 1), 0.0, 1.0)
    return np.where(bad > 0, rate ** np.maximum(n, 1), 0.0)


def as_array(arms: Mapping[str, Mapping[int, float]]) -> Floats:
    """Return the values of arms by seed as one study of an array (1, A, N)."""
    return statistics.as_array(arms.values(), sorted(set().union(*arms.values())))[None]


def pooled_sd(values_SAN: Floats) -> Floats:
    """Return the pooled standard deviation within the arms of each study; 0 if none has two values."""
    n, _, sd = moments(values_SAN)
    df = np.maximum(n - 1, 0)
    squares = np.where(df > 0, df * sd**2, 0.0).sum(axis=1)
    return np.asarray(np.sqrt(squares / np.maximum(df.sum(axis=1), 1)))


def robust_sd(values_SAN: Floats, sign: int = 1) -> Floats:
    """Return the pooled standard deviation of the seeds that did not collapse, limited where a few outliers dominate.

    The limit is a multiple of the standard deviation that follows from the median distance to the median of an arm.
    """
    sound = np.where(statistics.collapsed(values_SAN, sign), NAN, values_SAN)
    pooled, n = pooled_sd(sound), np.isfinite(sound).sum(axis=2, keepdims=True)
    distances = np.abs(sound - finite_median(sound)[:, :, None]) * np.sqrt(n / np.maximum(n - 1, 1))
    robust = NORMAL_MAD * finite_median(np.where(n > 2, distances, NAN).reshape(len(sound), -1))
    return np.asarray(np.where(robust > 0, np.minimum(pooled, OUTLIER_FACTOR * robust), pooled))
