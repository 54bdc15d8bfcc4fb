"""Comparison of arms with their baselines: samples, the rule of spread, families, looks and verdicts.

:func:`vitlab.comparison.study.judge_study` judges a plan, :func:`vitlab.comparison.arrays.judge_studies` many studies
as arrays.  A replicate is a seed, so there are few: 3, 5, perhaps 10.  The methods follow from that:

- Arms are compared by their differences at equal seeds, with Student's t; without pairs, with Welch's t.
- Comparisons with one baseline at the same seeds average their variances with the mean of all, see
  :func:`vitlab.comparison.arrays.share_variances`.
- P values and intervals are corrected for the family and the looks by Bonferroni's method, in one step, so that a
  verdict and the interval beside it cannot disagree.
- Lost seeds have no value: their trials diverged, failed or were killed.  A verdict has to hold twice: for the
  complete pairs, and with chance level in place of the missing values.
- A comparison with collapsed seeds, or whose differences do not scatter, rests on the exact sign-flip test.
"""

from enum import StrEnum


class Verdict(StrEnum):
    """The result of comparing an arm with its baseline."""

    BETTER = "better"
    WORSE = "worse"
    SAME = "same"
    EQUIVALENT = "equivalent"
    CANNOT_TELL = "cannot tell"
    REFUSED = "refused"


MEANINGS = {
    Verdict.BETTER: "the corrected p value is at most alpha, and the difference is in favour of the arm",
    Verdict.WORSE: "the corrected p value is at most alpha, and the difference is in favour of its baseline",
    Verdict.SAME: "both reached the same value at every seed",
    Verdict.EQUIVALENT: "the difference was shown to lie within the margin of the analysis",
    Verdict.CANNOT_TELL: "none of these: too few seeds, too much spread, trials still to come, or lost seeds that "
    "could change the verdict",
    Verdict.REFUSED: "the comparison would be misleading and is not judged; column `refused` has the reason",
}
"""Meaning of each verdict."""
