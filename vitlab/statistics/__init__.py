"""Statistics of few replicates: intervals, paired tests, multiple-comparison corrections, detectable effects.

A replicate is a seed, so ``n`` is small: 3, 5, perhaps 10.  The methods follow from that:

- Two arms are compared by their differences at equal seeds, with Student's t; without pairs, with Welch's t.
- A single replicate has no spread and no interval: NaN, never zero.  Two replicates have one degree of freedom.
- Differences that are all equal have no spread; the exact sign-flip test replaces t.
- The bootstrap is not used: of few replicates, its intervals cover less than their nominal level.

Non-finite values raise ValueError: the caller leaves out diverged trials and reports them.
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
from vitlab.statistics.family import Correction as Correction
from vitlab.statistics.family import adjust_p_values as adjust_p_values
from vitlab.statistics.family import detectable_difference as detectable_difference
from vitlab.statistics.family import pairs_for_half_width as pairs_for_half_width
from vitlab.statistics.family import power as power
from vitlab.statistics.family import simultaneous_alpha as simultaneous_alpha
from vitlab.statistics.replicates import Contrast as Contrast
from vitlab.statistics.replicates import Mean as Mean
from vitlab.statistics.replicates import compare as compare
from vitlab.statistics.replicates import interaction as interaction
from vitlab.statistics.replicates import mean_interval as mean_interval
from vitlab.statistics.replicates import paired_t_test as paired_t_test
from vitlab.statistics.replicates import sign_flip as sign_flip
from vitlab.statistics.replicates import smallest_sign_flip_p as smallest_sign_flip_p
from vitlab.statistics.replicates import t_quantile as t_quantile
from vitlab.statistics.replicates import t_two_sided as t_two_sided
from vitlab.statistics.replicates import welch_t_test as welch_t_test
from vitlab.statistics.scaling import Curve as Curve
from vitlab.statistics.scaling import Estimate as Estimate
from vitlab.statistics.scaling import Law as Law
from vitlab.statistics.scaling import fit_law as fit_law
from vitlab.statistics.scaling import pareto as pareto
from vitlab.statistics.sequential import predictive_power as predictive_power
from vitlab.statistics.sequential import sequential_levels as sequential_levels
