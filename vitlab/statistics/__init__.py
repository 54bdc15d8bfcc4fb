"""Statistics of few replicates: intervals, exact tests, levels of looks, detectable differences, laws of scaling.

:mod:`vitlab.comparison` judges by them.  A single replicate has no spread and no interval: NaN, never zero.  The
bootstrap is not used: of few replicates, its intervals cover less than their nominal level.  Non-finite values raise
ValueError: the caller leaves out diverged trials and reports them.
"""

from vitlab.statistics.choice import choice_variance as choice_variance
from vitlab.statistics.counts import NORMAL_MAD as NORMAL_MAD
from vitlab.statistics.counts import boschloo as boschloo
from vitlab.statistics.counts import collapsed as collapsed
from vitlab.statistics.counts import collapsed_seeds as collapsed_seeds
from vitlab.statistics.counts import largest_hidden_rate as largest_hidden_rate
from vitlab.statistics.counts import smallest_boschloo as smallest_boschloo
from vitlab.statistics.crossed import MeanSquares as MeanSquares
from vitlab.statistics.crossed import interval_for_new_images as interval_for_new_images
from vitlab.statistics.crossed import sd_interval as sd_interval
from vitlab.statistics.crossed import split_sd as split_sd
from vitlab.statistics.family import adjust_p_values as adjust_p_values
from vitlab.statistics.family import power as power
from vitlab.statistics.replicates import Mean as Mean
from vitlab.statistics.replicates import mean_interval as mean_interval
from vitlab.statistics.replicates import sign_flip as sign_flip
from vitlab.statistics.replicates import smallest_sign_flip_p as smallest_sign_flip_p
from vitlab.statistics.replicates import t_quantile as t_quantile
from vitlab.statistics.scaling import Curve as Curve
from vitlab.statistics.scaling import Estimate as Estimate
from vitlab.statistics.scaling import Law as Law
from vitlab.statistics.scaling import fit_law as fit_law
from vitlab.statistics.scaling import pareto as pareto
from vitlab.statistics.sequential import predictive_power as predictive_power
from vitlab.statistics.sequential import sequential_levels as sequential_levels
from vitlab.statistics.shape import gap_score as gap_score
