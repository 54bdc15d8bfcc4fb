"""Columns of the summary of a study, with their types and meanings."""

from __future__ import annotations

from vitlab.comparison.verdict import Verdict

MEANINGS = {
    "arm": ("string", "the arm"),
    "baseline": (
        "string",
        "the arm it is compared with; if there is none, this and all columns of the comparison are missing",
    ),
    "planned": ("int64", "trials, one a seed"),
    "done": ("int64", "trials that ended well"),
    "diverged": ("int64", "trials whose loss was not finite"),
    "failed": ("int64", "trials that ended without a result"),
    "running": ("int64", "trials that run now"),
    "missing": ("int64", "trials that have not started, or stopped before their end"),
    "n": ("int64", "values judged"),
    "mean": ("float64", "their mean"),
    "sd": ("float64", "their sample standard deviation; missing for one"),
    "split_sd": ("float64", "what it would be for equally good models, on a split of this size; needs predictions"),
    "low": (
        "float64",
        "t-interval of the mean, of level 1 - alpha, within the bounds of the metric; needs three values",
    ),
    "high": ("float64", "its upper end"),
    "collapsed": ("int64", "values among them that are far worse than the others, in robust standard deviations"),
    "sound_mean": ("float64", "the mean without these; missing where there are none"),
    "verdict": (
        "string",
        f"{', '.join(list(Verdict)[:-1])} or {Verdict.REFUSED}; missing where the arm is compared with nothing",
    ),
    "refused": ("string", "why the comparison is not judged, where the verdict is refused"),
    "complete_verdict": (
        "string",
        "the verdict of the complete pairs alone; another one where broken seeds overturn it",
    ),
    "test": (
        "string",
        "paired t, Welch t, sign flip or none (too few values); where seeds vary the split, t is corrected for the "
        "overlap of training sets",
    ),
    "shared": ("Int64", "comparisons whose variances are averaged with its own, itself included"),
    "look": ("Int64", "the look that the comparison was judged at: 2 if the first was inconclusive, and so on"),
    "looks": ("Int64", "looks that share alpha: more than 1 if the study adds seeds to inconclusive comparisons"),
    "decidable": (
        "float64",
        "probability that all seeds that the comparison may get decide it, if seeds are added until it is decided",
    ),
    "awaited": ("Int64", "trials of the comparison that have not ended"),
    "choice_sd": ("float64", "standard deviation that the choice of tuned knobs adds to the difference"),
    "pairs": ("Int64", "seeds that both sides have"),
    "family": ("Int64", "comparisons that it is corrected for, with registered ones that are not made"),
    "registered": (
        "boolean",
        "whether it was registered before its first result, and is corrected for such ones alone",
    ),
    "collapsed_pairs": ("Int64", "collapsed seeds of both sides; with any, no verdict rests on t"),
    "broken": ("Int64", "seeds of both sides that diverged or failed"),
    "difference": ("float64", "mean difference from the baseline, over complete pairs"),
    "sound_difference": ("float64", "the same without collapsed seeds; missing where there are none"),
    "difference_sd": ("float64", "sample standard deviation of the differences between seeds"),
    "difference_se": ("float64", "standard error of the difference that the test uses"),
    "difference_df": ("float64", "its degrees of freedom"),
    "difference_low": (
        "float64",
        "its interval, which holds for the whole family, and after all looks, at once; needs three pairs",
    ),
    "difference_high": ("float64", "the upper end of that"),
    "new_images_low": ("float64", "the same interval for trainings that are evaluated on new images, too"),
    "new_images_high": ("float64", "its upper end"),
    "p": ("float64", "two-sided p of this comparison alone"),
    "p_corrected": ("float64", "the same, corrected for the family and the looks"),
    "chance": ("float64", "what guessing reaches, where seeds are broken and that is known"),
    "chance_difference": ("float64", "the difference, with chance in the place of broken seeds"),
    "chance_low": ("float64", "its interval, which holds for the whole family at once"),
    "chance_high": ("float64", "the upper end of that"),
    "chance_p": ("float64", "its p, corrected"),
    "chance_p_equal": ("float64", "as p_equal_corrected, with chance in the place of broken seeds"),
    "equal_low": ("float64", "interval of level 1 - 2 alpha, to be set against the margin of the analysis"),
    "equal_high": ("float64", "its upper end"),
    "p_equal": ("float64", "p of the test that the difference lies within the margin, alone"),
    "p_equal_corrected": ("float64", "the same, corrected for the family and the looks"),
    "exploratory": ("string", "the part of the comparison that was decided after the first run"),
    "params": ("Int64", "parameters of the model"),
    "macs": ("Int64", "multiply-accumulates of one image, forward"),
    "wall_s": ("float64", "seconds of all trials together"),
    "images_per_s": ("float64", "training images per second, of the median trial"),
}
"""Columns of :func:`summary` with their types and meanings; the same for every study."""
COLUMNS = tuple(MEANINGS)
