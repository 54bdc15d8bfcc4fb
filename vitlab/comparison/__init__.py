"""Comparison of arms with their baselines: samples, the rule of spread, families, looks and verdicts.

:func:`vitlab.comparison.study.judge` judges a plan, :func:`vitlab.comparison.arrays.judge` any number of studies as
arrays.  A replicate is a seed, so there are few: 3, 5, perhaps 10.  The methods follow from that:

- Arms are compared by their differences at equal seeds, with Student's t; without pairs, with Welch's t.
- Comparisons with one baseline at the same seeds average their variances with the mean of all, see
  :func:`vitlab.comparison.arrays.share_variances`.
- P values and intervals are corrected for the family and the looks by Bonferroni's method, in one step, so that a
  verdict and the interval beside it cannot disagree.
- Seeds that diverged or failed have no value.  A verdict has to hold twice: for the complete pairs, and with chance
  level in place of the missing values.
- A comparison with collapsed seeds, or whose differences do not scatter, rests on the exact sign-flip test.
"""
