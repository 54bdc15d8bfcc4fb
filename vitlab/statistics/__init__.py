"""Statistics of few replicates: intervals, exact tests, levels of looks, detectable differences, laws of scaling.

:mod:`vitlab.comparison` judges by them.  A single replicate has no spread and no interval: NaN, never zero.  The
bootstrap is not used: of few replicates, its intervals cover less than their nominal level.  Non-finite values raise
ValueError: the caller leaves out diverged trials and reports them.
"""

from vitlab.statistics.power import power, predictive_power, sequential_levels
from vitlab.statistics.replicates import (
    MeanSquares,
    as_array,
    boschloo,
    choice_variance,
    collapsed,
    collapsed_seeds,
    gap_score,
    interval_for_new_images,
    largest_hidden_rate,
    mean_interval,
    sd_interval,
    sign_flip,
    smallest_sign_flip_p,
    split_sd,
    t_quantile,
)
from vitlab.statistics.scaling import Estimate, Law, fit_law, pareto

__all__ = [
    "Estimate",
    "Law",
    "MeanSquares",
    "as_array",
    "boschloo",
    "choice_variance",
    "collapsed",
    "collapsed_seeds",
    "fit_law",
    "gap_score",
    "interval_for_new_images",
    "largest_hidden_rate",
    "mean_interval",
    "pareto",
    "power",
    "predictive_power",
    "sd_interval",
    "sequential_levels",
    "sign_flip",
    "smallest_sign_flip_p",
    "split_sd",
    "t_quantile",
]
