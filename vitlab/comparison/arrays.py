"""Judgement of many studies at once: comparisons of arms, from an array of values (studies, arms, seeds).

The report judges one study, and simulations judge thousands.  Missing values are NaN.  Axes: S studies, A arms, C
comparisons, N seeds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields, replace
from typing import Generic, Literal, TypeVar

import numpy as np

from vitlab.comparison import Verdict
from vitlab.spec import Analysis
from vitlab.statistics import replicates
from vitlab.statistics.replicates import NAN, Floats, Ints, Mask, Moments, moments, rounding_error

Variance = Literal["shared", "own"]
Correction = Literal["bonferroni", "none"]
Number = TypeVar("Number")
Count = TypeVar("Count")
Name = TypeVar("Name")

TESTS = ("none", "paired t", "Welch t", "sign flip")
NONE, PAIRED, WELCH, SIGN_FLIP = range(4)
VERDICTS = (Verdict.CANNOT_TELL, Verdict.SAME, Verdict.EQUIVALENT, Verdict.BETTER, Verdict.WORSE)
CLAIMS = [VERDICTS.index(Verdict.BETTER), VERDICTS.index(Verdict.WORSE)]  #: verdicts on which arm is better
DEFAULTS = Analysis()
MIN_SEEDS = 3  #: with fewer pairs there is no interval, and variances are not shared
MAX_VARIANCE_RATIO = 100.0  #: largest variance that another comparison adds to a mean, relative to one's own
FULL_WEIGHT_FROM = 7  #: comparisons from which on the mean variance of all weighs as much as one's own


@dataclass(frozen=True)
class Choices:
    """Variances that the choice of tuned knobs adds to the differences (S, C, sides), and their degrees of freedom."""

    variance: Floats = field(default_factory=lambda: np.zeros((1, 1, 1)))
    df: Floats = field(default_factory=lambda: np.ones((1, 1, 1)))

    @property
    def total(self) -> Floats:
        """The variance that both sides add to a difference (S, C)."""
        return np.asarray(self.variance.sum(axis=2))


@dataclass(frozen=True)
class Comparisons:
    """The comparisons of a study, and the rules they are judged by; the same in every study unless it is (S, C)."""

    arms: Ints  #: place of the arm of each comparison (C)
    baselines: Ints  #: place of its baseline (C)
    family: Ints  #: number of comparisons that each is corrected for (C)
    alpha: float = 0.05  #: level of all comparisons together
    share: float = 1.0  #: part of alpha that this look has
    correction: Correction = "bonferroni"
    variance: Variance = "shared"
    sign: int = 1  #: 1 if larger values are better, -1 if smaller ones are
    quantum: Floats | float = 0.0  #: smallest change of a value; 0 if there is none (C)
    margin: float | None = None  #: of equivalence
    overlap: Floats | float = 0.0
    """Validation images over training images, where each seed holds out others of the same images, else 0 (C).

    The variance of the mean of n differences is then (1 / n + overlap) times theirs (corrected resampled t; Nadeau and
    Bengio (2003), Machine Learning 52, 239-281, equation 9).  NaN if it is not known, so that nothing can be tested.
    """
    least_se: Floats | float = 0.0  #: least standard error of a paired difference (S, C)
    choices: Choices = Choices()  #: what tuning adds
    tested: Mask | bool = True
    """Comparisons that are tested at this look; the others get differences alone, and share nothing (S, C)."""
    registered: Mask | bool = True  #: comparisons that share with registered ones alone (C)
    reach: float = math.inf  #: largest difference that the bounds of the metric allow

    @classmethod
    def all_with_first(cls, n_arms: int, analysis: Analysis = DEFAULTS) -> Comparisons:
        """Return the comparisons of so many arms with the first one, by the rules of an analysis."""
        return cls(
            1 + np.arange(n_arms),
            np.zeros(n_arms, int),
            np.full(n_arms, n_arms),
            alpha=analysis.alpha,
            correction=analysis.correction,
            variance=analysis.variance,
            sign=1 if analysis.goal == "max" else -1,
            margin=analysis.margin,
        )

    @property
    def levels(self) -> Floats:
        """Return the level of each comparison at this look (C)."""
        return self.alpha * self.share / self.correction_factors

    @property
    def correction_factors(self) -> Floats:
        """Return the factor of each p value that corrects it for the family (C)."""
        return np.where(self.correction == "none", 1.0, np.maximum(self.family, 1))


@dataclass(frozen=True)
class Contrasts(Generic[Number, Count, Name]):
    """Differences from the baselines and their tests (S, C), or a single one; NaN where something was not computed."""

    difference: Number
    pairs: Count
    sd: Number  #: own standard deviation of the differences between seeds
    test: Name  #: place in ``TESTS``; its name if this is a single one
    shared: Count  #: comparisons whose variances are averaged, itself included
    se: Number  #: standard error of ``difference``
    df: Number
    low: Number
    high: Number
    p: Number
    p_corrected: Number
    equal_low: Number
    equal_high: Number
    p_equal: Number  #: of the test that the difference is within the margin
    p_equal_corrected: Number
    collapsed: Count  #: collapsed seeds of both sides

    def single(self, study: int, comparison: int) -> Contrast:
        """Return the contrast of one comparison of one study."""
        numbers = {column.name: getattr(self, column.name)[study, comparison].item() for column in fields(self)}
        return Contrasts(**{**numbers, "test": TESTS[numbers["test"]]})


Contrast = Contrasts[float, int, str]
ContrastArrays = Contrasts[Floats, Ints, Ints]


@dataclass(frozen=True)
class Judgements:
    """Comparisons with their verdicts."""

    contrasts: ContrastArrays  #: of complete pairs
    with_chance: ContrastArrays  #: with chance in the place of lost seeds
    verdict: Ints  #: place in ``VERDICTS`` (S, C)
    complete_verdict: Ints  #: the same of the complete pairs alone
    lost: Ints  #: lost seeds of both sides (S, C)
    collapsed_arms: Mask  #: seeds of the arm of each comparison that collapsed (S, C, N)
    sound_difference: Floats  #: mean difference without collapsed seeds; NaN where there are none (S, C)


def judge_studies(
    values_SAN: Floats,
    comparisons: Comparisons,
    *,
    lost_SAN: Mask | None = None,
    chance_A: Floats | float = NAN,
) -> Judgements:
    """Judge every comparison of every study.

    A verdict on a comparison with lost seeds has to hold twice: for the complete pairs, and with chance level in the
    place of the lost values.

    Args:
        values_SAN: the values.
        comparisons: what is compared, and by which rules.
        lost_SAN: seeds without a value, because their trials diverged, failed or were killed.
        chance_A: value of guesses of each arm; NaN if it is not known.
    """
    # Seeds far worse than the others of their arm, whose spread no t test describes.
    collapsed_SC2N = find_collapsed_of_both_sides(values_SAN, comparisons)
    collapsed_SC = collapsed_SC2N.sum(axis=(2, 3))
    contrasts = compute_contrasts(values_SAN, comparisons, collapsed_SC)
    verdict_SC = decide_verdicts(contrasts, comparisons)
    judgements = Judgements(
        contrasts,
        with_chance=contrasts,
        verdict=verdict_SC,
        complete_verdict=verdict_SC,
        lost=np.zeros_like(contrasts.pairs),
        collapsed_arms=collapsed_SC2N[:, :, 0],
        sound_difference=_differences_without_collapsed(values_SAN, comparisons, collapsed_SC2N),
    )
    if lost_SAN is None or not lost_SAN.any():
        return judgements
    return _judge_with_lost_seeds(judgements, values_SAN, lost_SAN, chance_A, comparisons)


def _differences_without_collapsed(values_SAN: Floats, comparisons: Comparisons, collapsed_SC2N: Mask) -> Floats:
    """Return the mean differences without collapsed seeds; NaN where there are none (S, C)."""
    d_SCN = values_SAN[:, comparisons.arms] - values_SAN[:, comparisons.baselines]
    sound_SC = moments(np.where(collapsed_SC2N.any(axis=2), NAN, d_SCN)).mean
    return np.where(collapsed_SC2N.any(axis=(2, 3)), sound_SC, NAN)


def _judge_with_lost_seeds(
    judgements: Judgements, values_SAN: Floats, lost_SAN: Mask, chance_A: Floats | float, comparisons: Comparisons
) -> Judgements:
    """Return the judgement of studies with lost seeds, given the judgement of their complete pairs."""
    complete = judgements.contrasts
    chance_A1 = np.broadcast_to(chance_A, values_SAN.shape[1])[:, None]
    # Without the value of guesses nothing can stand for a lost value, and no verdict can hold.
    unknown_SA = (lost_SAN & np.isnan(chance_A1)).any(axis=2)
    unknown_SC = unknown_SA[:, comparisons.arms] | unknown_SA[:, comparisons.baselines]
    filled_SAN = np.where(lost_SAN, chance_A1, values_SAN)
    with_chance = replace(comparisons, tested=comparisons.tested & ~unknown_SC)
    filled = compute_contrasts(filled_SAN, with_chance, complete.collapsed)
    filled = replace(filled, difference=np.where(unknown_SC, NAN, filled.difference))
    lost_SA = lost_SAN.sum(axis=2)
    lost_SC = lost_SA[:, comparisons.arms] + lost_SA[:, comparisons.baselines]
    same_side = np.sign(filled.difference) == np.sign(complete.difference)
    with np.errstate(invalid="ignore"):
        holds = np.where(
            judgements.verdict == VERDICTS.index(Verdict.EQUIVALENT),
            filled.p_equal_corrected < comparisons.alpha,
            (filled.p_corrected <= comparisons.alpha) & same_side & np.isin(judgements.verdict, CLAIMS),
        )
    verdict_SC = np.where((lost_SC > 0) & ~holds, VERDICTS.index(Verdict.CANNOT_TELL), judgements.verdict)
    return replace(judgements, with_chance=filled, verdict=verdict_SC, lost=lost_SC)


def compute_contrasts(values_SAN: Floats, comparisons: Comparisons, collapsed_SC: Ints) -> ContrastArrays:
    """Compare arms with their baselines at equal seeds, or by Welch's t where they share fewer than two.

    Differences that do not scatter, and those with collapsed seeds, are tested by the exact sign-flip test, which has
    no interval.  Arrays whose names have no axes are (S, C).
    """
    from scipy.special import stdtr  # not at the top: a stored report is shown without scipy

    samples = _compute_pair_statistics(values_SAN, comparisons)
    test = _choose_tests(samples, comparisons, collapsed_SC)
    se, df, shared = _standard_errors_and_df(samples, test, comparisons)
    p = _p_values(samples, test, se, df)
    test = np.where((test == SIGN_FLIP) & np.isnan(p), NONE, test)
    difference, reach = samples.difference, comparisons.reach
    size = np.where(test == WELCH, np.minimum(samples.x.n, samples.y.n), samples.d.n)
    interval_se = np.where(size >= MIN_SEEDS, se, NAN)
    low, high = _bounded_interval(difference, interval_se, df, comparisons.levels / 2, reach)
    equal_low = equal_high = p_equal = np.full(test.shape, NAN)
    if comparisons.margin is not None:
        equal_low, equal_high = _bounded_interval(difference, interval_se, df, comparisons.levels, reach)
        below, above = (stdtr(df, (sign * difference - comparisons.margin) / se) for sign in (1, -1))
        p_equal = np.maximum(below, above)
    # A look may spend its share of alpha alone: its p values are enlarged, and compare with alpha at every look.
    factors = comparisons.correction_factors / comparisons.share
    return Contrasts(
        difference=difference,
        pairs=samples.d.n,
        sd=np.where(samples.d.n > 1, samples.d.sd, NAN),
        test=test,
        shared=shared,
        se=se,
        df=df,
        low=low,
        high=high,
        p=p,
        p_corrected=np.minimum(1.0, factors * p),
        equal_low=equal_low,
        equal_high=equal_high,
        p_equal=p_equal,
        p_equal_corrected=np.minimum(1.0, factors * p_equal),
        collapsed=collapsed_SC,
    )


@dataclass(frozen=True)
class _Samples:
    """The samples behind each comparison (S, C): differences d at equal seeds, and values x of the arm, y of the other.

    The difference is the mean of d; where there are fewer than two pairs, the difference of the means.
    """

    d_SCN: Floats
    d: Moments
    x: Moments
    y: Moments
    is_welch: Mask  #: too few pairs, and values enough for Welch's t
    difference: Floats  #: 0 within rounding
    scatters: Mask  #: False where all spread is rounding


def _compute_pair_statistics(values_SAN: Floats, comparisons: Comparisons) -> _Samples:
    x_SCN, y_SCN = values_SAN[:, comparisons.arms], values_SAN[:, comparisons.baselines]
    d_SCN = x_SCN - y_SCN
    d, x, y = map(moments, (d_SCN, x_SCN, y_SCN))
    is_welch = (d.n < 2) & (x.n >= 2) & (y.n >= 2)
    difference = np.where(is_welch | (d.n == 0), x.mean - y.mean, d.mean)
    rounding = rounding_error(np.concatenate([x_SCN, y_SCN], axis=2))
    either_scatters = (x.sd > rounding_error(x_SCN)) | (y.sd > rounding_error(y_SCN))
    return _Samples(
        d_SCN,
        d,
        x,
        y,
        is_welch,
        difference=np.where(np.abs(difference) <= rounding, 0.0, difference),
        scatters=np.where(d.n >= 2, d.sd > rounding, either_scatters),
    )


def _choose_tests(samples: _Samples, comparisons: Comparisons, collapsed_SC: Ints) -> Ints:
    """Return the test of each comparison as its place in ``TESTS`` (S, C)."""
    overlap, is_paired, is_sound = np.asarray(comparisons.overlap), samples.d.n >= 2, collapsed_SC == 0
    by_t = comparisons.tested & samples.scatters & is_sound & ~np.isnan(overlap)
    # Only independent seeds can be flipped; differences of 0 at every seed need no test.
    is_same = ~samples.scatters & (samples.difference == 0) & is_sound
    flips = comparisons.tested & is_paired & ~by_t & ((overlap == 0) | is_same) & (comparisons.choices.total == 0)
    return np.select([by_t & is_paired, by_t & samples.is_welch, flips], [PAIRED, WELCH, SIGN_FLIP], NONE)


def _standard_errors_and_df(samples: _Samples, test: Ints, comparisons: Comparisons) -> tuple[Floats, Floats, Ints]:
    """Return standard errors and degrees of freedom of tests by t, else NaN, and the number of shared variances."""
    d, x, y, overlap, choices = samples.d, samples.x, samples.y, np.asarray(comparisons.overlap), comparisons.choices
    added = choices.total
    # Two values that are rounded to the quantum differ by rounding alone with variance quantum**2 / 6, so less spread
    # than that is not known.
    variance = np.maximum(d.sd, comparisons.quantum / math.sqrt(6)) ** 2
    weight, shared = np.zeros(test.shape), np.ones(test.shape, dtype=int)
    if comparisons.variance == "shared":
        takes_part = (test == PAIRED) & (d.n >= MIN_SEEDS)
        variance, weight, shared = share_variances(variance, takes_part, samples.d_SCN, comparisons)
    with np.errstate(divide="ignore", invalid="ignore"):
        se2, df = np.maximum(variance * (1 / d.n + overlap), comparisons.least_se**2), (d.n - 1) * (1 + weight)
        floor = comparisons.quantum**2 / 12  # of a single value, by its rounding
        se2_x, se2_y = (np.maximum(side.sd**2, floor) * (1 / side.n + overlap) for side in (x, y))
        se2 = np.where(test == WELCH, se2_x + se2_y, se2)
        df = np.where(test == WELCH, (se2_x + se2_y) ** 2 / (se2_x**2 / (x.n - 1) + se2_y**2 / (y.n - 1)), df)
        # Satterthwaite's degrees of freedom of a sum of independent variances.
        total_df = (se2 + added) ** 2 / (se2**2 / df + (choices.variance**2 / choices.df).sum(axis=2))
    by_t = (test == PAIRED) | (test == WELCH)
    se = np.where(by_t, np.sqrt(np.maximum(se2 + added, 0)), NAN)
    return se, np.where(by_t, np.where(added > 0, total_df, df), NAN), shared


def _p_values(samples: _Samples, test: Ints, se: Floats, df: Floats) -> Floats:
    """Return the two-sided p of each test (S, C); NaN where there is none."""
    from scipy.special import stdtr

    p = np.asarray(2 * stdtr(df, -np.abs(samples.difference) / se))
    for place in zip(*np.nonzero(test == SIGN_FLIP), strict=True):
        pairs = samples.d_SCN[place][np.isfinite(samples.d_SCN[place])]
        if samples.difference[place] == 0:
            p[place] = 1.0
        elif samples.scatters[place]:
            p[place] = replicates.sign_flip_p(pairs)
        else:  # all are equal, but for rounding: the smallest p that the test can reach
            p[place] = min(1.0, 2.0 ** (1 - len(pairs)))
    return p


def share_variances(
    variance: Floats, takes_part: Mask, d_SCN: Floats, comparisons: Comparisons
) -> tuple[Floats, Floats, Ints]:
    """Return variances averaged over like comparisons, the weight of their mean, and their number (S, C).

    Like are comparisons with one baseline whose differences are over the same seeds.  The variance of another
    comparison counts for at most 100 times one's own, so that an arm that scatters wildly does not take the power of
    the others, and no comparison gets less than its own.  The baseline's noise is in every difference, so it needs no
    guard.  The rule is vitlab's own: ``docs/pages/statistics.md`` has what simulations of it found.
    """
    seen_SCN, registered = np.isfinite(d_SCN), np.broadcast_to(comparisons.registered, len(comparisons.arms))
    like = (seen_SCN[:, :, None] == seen_SCN[:, None]).all(axis=3) & (
        comparisons.baselines[:, None] == comparisons.baselines
    )
    # Comparisons that were added later learn from registered ones, whose variances must not depend on what was added.
    like &= takes_part[:, :, None] & takes_part[:, None] & (registered | ~registered[:, None])
    count = np.maximum(like.sum(axis=2), 1)
    weight = np.minimum(1.0, (count - 1) / (FULL_WEIGHT_FROM - 1))
    capped = np.minimum(variance[:, None], MAX_VARIANCE_RATIO * variance[:, :, None])
    mean = np.where(like, capped, 0.0).sum(axis=2) / count
    return np.maximum(variance, (variance + weight * mean) / (1 + weight)), weight, count


def find_collapsed_of_both_sides(values_SAN: Floats, comparisons: Comparisons) -> Mask:
    """Return which seeds of each arm and its baseline collapsed (S, C, 2, N); the two together give the scale."""
    pairs_SC2N = np.stack([values_SAN[:, comparisons.arms], values_SAN[:, comparisons.baselines]], axis=2)
    s, c, *rest = pairs_SC2N.shape  # there may be no seeds yet
    quantum_SC = np.broadcast_to(comparisons.quantum, (s, c)).reshape(-1, 1)
    flags = replicates.find_collapsed(pairs_SC2N.reshape(s * c, *rest), comparisons.sign, quantum_SC)
    return flags.reshape(pairs_SC2N.shape)


def decide_verdicts(contrasts: ContrastArrays, comparisons: Comparisons) -> Ints:
    """Return the verdict of each comparison as its place in ``VERDICTS`` (S, C)."""
    # Signs are flipped where a seed collapsed or all differences are equal, so that without a collapsed seed a mean of
    # 0 says that every difference is 0.
    same = (contrasts.test == SIGN_FLIP) & (contrasts.difference == 0) & (contrasts.collapsed == 0)
    # An exact test's p can be equal to alpha, and then claims a difference.
    claimed = contrasts.p_corrected <= comparisons.alpha
    better = comparisons.sign * contrasts.difference > 0
    # Of several that hold, the first counts: an arm that differs from its baseline is better or worse, even if the
    # difference lies within the margin.
    conditions = {
        Verdict.SAME: same,
        Verdict.BETTER: claimed & better,
        Verdict.WORSE: claimed & ~better,
        Verdict.EQUIVALENT: contrasts.p_equal_corrected < comparisons.alpha,
    }
    cannot_tell = VERDICTS.index(Verdict.CANNOT_TELL)
    return np.select([*conditions.values()], [VERDICTS.index(verdict) for verdict in conditions], cannot_tell)


def _bounded_interval(difference: Floats, se: Floats, df: Floats, tail: Floats, reach: float) -> tuple[Floats, Floats]:
    """Return the interval that leaves out a tail on either side, no wider than the bounds of the metric."""
    from scipy.special import stdtrit

    half = stdtrit(df, 1 - tail) * se
    return np.clip(difference - half, -reach, reach), np.clip(difference + half, -reach, reach)
