"""Comparison of arms over blocks, such as data sets: the mean of their differences, and a difference in a new block.

The blocks are a sample of those that the question is about, so the differences in them are random effects, and a block
is one observation as a seed is within a block.  Every block has the same weight: few seeds estimate a precision too
badly to weigh by it.  The variance of the mean is then Hartung and Knapp's (2001, Statistics in Medicine 20, 3875-3889)
with equal weights, which is the variance between blocks over their number, and is never below what the seeds within
the blocks leave open (Roever, Knapp and Friede 2015, BMC Medical Research Methodology 15, 99).
"""

from dataclasses import dataclass, replace

import numpy as np

from vitlab.comparison.arrays import Comparisons, ContrastArrays, compute_contrasts, decide_verdicts
from vitlab.statistics.replicates import NAN, Floats, Ints


@dataclass(frozen=True)
class BlockJudgements:
    """Comparisons over blocks (S, C); NaN where something was not computed."""

    contrasts: ContrastArrays  #: ``pairs`` counts blocks
    verdict: Ints  #: place in ``VERDICTS``
    new_low: Floats  #: prediction interval of the difference in a new block, by as many seeds; of each comparison alone
    new_high: Floats


def judge_blocks(differences_SCB: Floats, se_SCB: Floats, comparisons: Comparisons) -> BlockJudgements:
    """Judge the mean differences over blocks.

    Args:
        differences_SCB: difference of each comparison in each block; NaN where a block lacks it.
        se_SCB: its standard error from the seeds of the block; NaN where it is not known.
        comparisons: each of an arm with the first place.
    """
    from scipy.special import stdtrit

    known_SCB = np.isfinite(differences_SCB)
    n = known_SCB.sum(axis=2)
    with np.errstate(divide="ignore", invalid="ignore"):
        within = np.sqrt(np.nansum(np.where(known_SCB, se_SCB, NAN) ** 2, axis=2)) / n
    values_SAB = np.concatenate([np.zeros_like(differences_SCB[:, :1]), differences_SCB], axis=1)
    result = compute_contrasts(values_SAB, replace(comparisons, least_se=within), np.zeros_like(n))
    half = np.where(
        np.isnan(result.low), NAN, stdtrit(result.df, 1 - comparisons.alpha / 2) * result.se * np.sqrt(n + 1)
    )
    low, high = (np.clip(result.difference + side * half, -comparisons.reach, comparisons.reach) for side in (-1, 1))
    return BlockJudgements(result, decide_verdicts(result, comparisons), low, high)
