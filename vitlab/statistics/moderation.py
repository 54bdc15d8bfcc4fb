"""Comparisons of several arms with one baseline, with variances that are estimated over all arms together.

With three seeds, the variance of one comparison has two degrees of freedom.  The arms of a study, trained with the same
code on the same data, scatter nearly alike, and together they have many.  Let each of m arms have values at the same n
seeds, and value = mean of the arm + effect of the seed + error, the error with a variance of the arm's own.

Arms and baseline *look alike* if no test of level ``NOT_ALIKE`` says otherwise: Bartlett's test of the arms, F tests of
each arm against the other arms, and an F test of the baseline against the arms, which finds only larger variances (the
arms have half of the level for Bartlett's test, and half for all F tests).  Then all comparisons have one variance:

- That of the arms is the mean square of their residuals, without the means of arms and of seeds, with (m - 1) (n - 1)
  degrees of freedom.
- That of the baseline is this mean square times the quantile of the F distribution at ``baseline_level``, however small
  it was found: with few seeds, a baseline that scatters several times as far can look alike, and it is in every
  comparison.

Otherwise each arm has a variance of its own, which the others make more certain:

- The residuals of the m arms, without the means of arms and of seeds, give each arm a variance of n - 1 degrees of
  freedom, and all of them a mean variance.
- The variances of the arms are taken as drawn from a scaled inverse chi-square distribution of ``prior_df`` degrees of
  freedom (empirical Bayes), so each is moved towards the mean accordingly.  ``prior_df`` follows from the spread of the
  log variances.  Few arms tell little about it, so the lower end of its interval is used, not its estimate.
- The baseline is in every comparison, and its variance is not borrowed: the variance of the baseline less the mean of
  the arms, with n - 1 degrees of freedom, stands for it.  The degrees of freedom of the sum are Satterthwaite's.
- An arm whose residuals, around the median of all arms at a seed, are far larger than those of most arms shares
  nothing.  If more than a quarter of the arms are like that, or fewer than four are left, none shares in either case.

In neither case does a comparison have a standard error below its own.  Sharing adds degrees of freedom; it never turns
a comparison that scatters into one that does not, whatever the other arms do.

Comparisons with one baseline are correlated.  Their p values and intervals are those of the largest of correlated t
statistics, which for equal variances is Dunnett's test, in steps from the smallest p value.

References: Bartlett (1937), Proc. R. Soc. A 160, 268-282.  Smyth (2004), Stat. Appl. Genet. Mol. Biol. 3, 3 (moderated
t; the estimate of the prior).  Dunnett (1955), J. Am. Stat. Assoc. 50, 1096-1121.  Satterthwaite (1946), Biometrics
Bulletin 2, 110-114.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from vitlab.statistics.replicates import NAN, Floats, finite, rounding_of

MIN_ARMS = 5  #: with fewer comparisons, false alarms exceed alpha where spreads differ tenfold
MIN_SHARING = 4  #: fewest arms that share once others are left out
MIN_SEEDS = 3  #: two seeds say too little about an arm's spread
MAX_WILD = 0.25  #: largest share of arms that are left out; one arm may always be
WILD_LEVEL = 1e-3  #: chance that an arm is left out whose spread is that of most arms
PRIOR_CONFIDENCE = 0.98  #: confidence that ``prior_df`` is at least what is used
NOT_ALIKE = 0.05  #: level of the tests of whether arms and baseline scatter alike
BASELINE_LEVEL = 0.945  #: with three seeds, share of baselines like the arms whose variance is smaller than counted
LEVEL_STEP = 0.05  #: by which this share falls with each further seed, as unlike baselines are told apart more often
MIN_BASELINE_LEVEL = 0.7  #: from eight seeds on
MIN_SPREAD = 1e-9  #: of differences in simulated studies; those below it do not scatter
DRAWS = 4000  #: simulated studies from which quantiles of the spread of variances are taken


@dataclass(frozen=True)
class Moderated:
    """Standard errors of the differences of several arms from one baseline, estimated together."""

    arms: tuple[int, ...]  #: places of the arms that share; the others differ too much in spread
    se: tuple[float, ...]  #: of the difference of each of them
    df: float  #: degrees of freedom of all of them, those of the comparison that has fewest
    loadings: tuple[float, ...]  #: the correlation of two differences is the product of their loadings
    prior_df: float  #: degrees of freedom that the other arms add to an arm's variance; infinite if all are alike


def moderate(arms: Sequence[Sequence[float]] | Floats, baseline: Sequence[float] | Floats) -> Moderated | str:
    """Return the standard errors of differences from a baseline, or the reason why each has to have its own.

    Args:
        arms: a row of values per arm, one per seed.
        baseline: its values, at the same seeds.

    Raises:
        ValueError: for a value that is not finite, or unequal numbers of values.
    """
    reference = finite(baseline)
    if len(arms) < MIN_ARMS:
        return f"fewer than {MIN_ARMS} comparisons share a baseline and its seeds"
    if any(len(arm) != len(reference) for arm in arms):
        raise ValueError("arms and baseline need values at the same seeds")
    if len(reference) < MIN_SEEDS:
        return f"fewer than {MIN_SEEDS} seeds"
    values = np.stack([finite(arm) for arm in arms])
    spread = rounding_of(values, reference)
    if (residual_variances(values) <= spread**2).any() or ((values - reference).std(axis=1, ddof=1) <= spread).any():
        return "an arm has no spread of its own"
    places, (m, n) = np.flatnonzero(~wild_arms(values)), values.shape
    if len(places) < fewest_sharing(m):
        return "the arms differ too much in spread"
    se, alike = pooled_errors(values, reference)
    if alike:
        return Moderated(tuple(range(m)), tuple(se.tolist()), (m - 1.0) * (n - 1), (math.sqrt(0.5),) * m, math.inf)
    se, df, loadings, prior_df = moderated_errors(values[places], reference)
    return Moderated(tuple(places.tolist()), tuple(se.tolist()), float(df), tuple(loadings.tolist()), float(prior_df))


def fewest_sharing(m: int) -> int:
    """Return how many of ``m`` arms have to be left once those that spread far more than most are left out."""
    return max(MIN_SHARING, m - max(1, int(MAX_WILD * m)))


def pooled_errors(values: Floats, reference: Floats) -> tuple[Floats, npt.NDArray[np.bool_]]:
    """Return the standard errors of differences if arms and baseline look alike, and whether they do.

    Args:
        values: of studies along the leading axes, of arms along the last but one, at seeds along the last.
        reference: of the baseline at the seeds.
    """
    from scipy.special import fdtri

    m, n = values.shape[-2:]
    own = residual_variances(values)
    of_arms, largest = own.mean(axis=-1), own.max(axis=-1)
    of_others = ((m - 1) * of_arms - largest) / (m - 2)
    of_baseline = (reference - values.mean(axis=-2)).var(axis=-1, ddof=1) / (1 + 1 / m)
    df = n - 1, (m - 1) * (n - 1)
    alike = largest <= fdtri(n - 1, (m - 2) * (n - 1), 1 - NOT_ALIKE / 2 / m) * of_others
    alike &= of_baseline <= fdtri(*df, 1 - NOT_ALIKE) * of_arms
    with np.errstate(divide="ignore", invalid="ignore"):  # an arm without residuals
        alike &= log_ratio_of_means(own) <= _quantile_of_log_ratio(m, n)
    total = (1 + fdtri(*df, baseline_level(n))) * of_arms
    differences = (values - reference[..., None, :]).var(axis=-1, ddof=1)
    return np.sqrt(np.maximum(total[..., None], differences) / n), alike


def log_ratio_of_means(variances: Floats) -> Floats:
    """Return the log of the arithmetic mean over the geometric one, along the last axis: Bartlett's statistic."""
    return np.asarray(np.log(variances.mean(axis=-1)) - np.log(variances).mean(axis=-1))


@lru_cache
def _quantile_of_log_ratio(m: int, n: int) -> float:
    """Return the largest :func:`log_ratio_of_means` with which ``m`` equal arms look alike."""
    variances = residual_variances(np.random.default_rng([m, n]).normal(size=(DRAWS, m, n)))
    return float(np.quantile(log_ratio_of_means(variances), 1 - NOT_ALIKE / 2))


def baseline_level(n: int) -> float:
    """Return the level of the quantile that the variance of a baseline counts as, for ``n`` seeds."""
    return max(MIN_BASELINE_LEVEL, BASELINE_LEVEL - LEVEL_STEP * (n - MIN_SEEDS))


def wild_arms(values: Floats) -> npt.NDArray[np.bool_]:
    """Return whether each arm spreads far more than most arms, for studies along the leading axes.

    Seeds are accounted for by their medians over the arms, on which few arms have no influence.
    """
    from scipy.special import gammaincinv

    centred = values - values.mean(axis=-1, keepdims=True)
    residuals = centred - np.median(centred, axis=-2, keepdims=True)
    squares = residuals.var(axis=-1)
    half_df = (values.shape[-1] - 1) / 2
    limit = gammaincinv(half_df, 1 - WILD_LEVEL) / gammaincinv(half_df, 0.5)
    return np.asarray(squares > limit * np.median(squares, axis=-1, keepdims=True))


def moderated_errors(values: Floats, reference: Floats) -> tuple[Floats, Floats, Floats, Floats]:
    """Return the fields of :class:`Moderated` for studies along the leading axes, in which arms do not look alike.

    Args:
        values: of arms, along the last axis but one, at seeds, along the last.
        reference: of the baseline at the seeds.
    """
    m, n = values.shape[-2:]
    own = residual_variances(values)
    prior_df = lower_prior_df(own, n)[..., None]
    with np.errstate(invalid="ignore"):
        shared = np.where(np.isinf(prior_df), 1.0, prior_df / (prior_df + n - 1.0))
    of_arms = (1 - 1 / m) * (shared * own.mean(axis=-1, keepdims=True) + (1 - shared) * own)
    df_of_arms = np.minimum(prior_df + n - 1.0, (m - 1.0) * (n - 1.0))
    of_baseline = (reference - values.mean(axis=-2)).var(axis=-1, ddof=1)[..., None]
    total = of_baseline + of_arms
    df = total**2 / (of_baseline**2 / (n - 1) + of_arms**2 / df_of_arms)
    # A baseline that scatters more than the arms would correlate the comparisons more; that is not relied upon.
    loadings = np.sqrt(np.minimum(of_baseline / total, 0.5))
    differences = (values - reference[..., None, :]).var(axis=-1, ddof=1)
    return np.sqrt(np.maximum(total, differences) / n), df.min(axis=-1), loadings, prior_df[..., 0]


def study_errors(
    values: Floats, spread: float = 0.0, paired: npt.NDArray[np.bool_] | None = None
) -> tuple[Floats, Floats, Floats, npt.NDArray[np.bool_]]:
    """Return the standard errors of differences from the baseline in simulated studies, as :func:`moderate` does.

    Args:
        values: of studies along the first axis, of the baseline and the arms along the second, at seeds.
        spread: least standard deviation of a difference, that of rounding.
        paired: comparisons of each study that may share; by default all whose differences scatter.

    Returns:
        Own and moderated standard errors of each comparison, the degrees of freedom of the latter, and whether all
        comparisons of a study share.
    """
    m, n = values.shape[1] - 1, values.shape[2]
    own_sd = (values[:, 1:] - values[:, :1]).std(axis=2, ddof=1)
    own = np.maximum(own_sd, spread) / math.sqrt(n)
    se, df, joint = own.copy(), np.full(own.shape, n - 1.0), np.zeros(len(own), bool)
    usable = own_sd > MIN_SPREAD if paired is None else paired & (own_sd > MIN_SPREAD)
    for count in range(MIN_ARMS, m + 1) if n >= MIN_SEEDS else ():
        studies = np.flatnonzero(usable.sum(axis=1) == count)
        places = np.argsort(~usable[studies], axis=1, kind="stable")[:, :count]
        if not len(studies):
            continue
        shares = ~wild_arms(values[studies[:, None], 1 + places])
        pooled, alike = pooled_errors(values[studies[:, None], 1 + places], values[studies, 0])
        alike &= shares.sum(axis=1) >= fewest_sharing(count)
        rows, columns = studies[alike, None], places[alike]
        se[rows, columns] = np.maximum(pooled[alike], own[rows, columns])
        df[rows, columns], joint[studies[alike]] = (count - 1.0) * (n - 1), count == m
        studies, places, shares = studies[~alike], places[~alike], shares[~alike]
        for size in range(fewest_sharing(count), count + 1):
            some = np.flatnonzero(shares.sum(axis=1) == size)
            if not len(some):
                continue
            within = np.argsort(~shares[some], axis=1, kind="stable")[:, :size]
            rows, columns = studies[some][:, None], np.take_along_axis(places[some], within, axis=1)
            with np.errstate(divide="ignore", invalid="ignore"):  # an arm without residuals
                shared, shared_df, _, _ = moderated_errors(values[rows, 1 + columns], values[rows[:, 0], 0])
            known = np.isfinite(shared) & np.isfinite(shared_df)[:, None]
            se[rows, columns] = np.where(known, np.maximum(shared, own[rows, columns]), own[rows, columns])
            df[rows, columns] = np.where(known, shared_df[:, None], n - 1.0)
            joint[rows[:, 0]] = known.all(axis=1) & (size == m)
    return own, se, df, joint


def detection_bounds(values: Floats, alpha: float, spread: float = 0.0) -> tuple[Floats, Floats]:
    """Return the size that each difference from the baseline has to exceed, with own and with moderated variances.

    The family is corrected as in a report, at its first step.  The t statistics count as those of equal arms, which
    correlate by 0.5.  Differences without spread have an infinite bound, as the sign-flip test decides on them.

    Args:
        values: see :func:`study_errors`.
        alpha: family-wise level.
        spread: see :func:`study_errors`.
    """
    own, se, df, joint = study_errors(values, spread)
    without_spread = (values[:, 1:] - values[:, :1]).std(axis=2, ddof=1) <= MIN_SPREAD
    alone = first_step_bounds(own, np.full(own.shape, values.shape[2] - 1.0), np.zeros(len(own), bool), alpha)
    shared = first_step_bounds(se, df, joint, alpha)
    return np.where(without_spread, np.inf, alone), np.where(without_spread, np.inf, shared)


def first_step_bounds(se: Floats, df: Floats, joint: npt.NDArray[np.bool_], alpha: float) -> Floats:
    """Return the size that each difference has to exceed at the first step of the correction, see :func:`study_errors`.

    It is that of the largest of correlated t statistics where all comparisons of a study share, else Bonferroni's.
    """
    from scipy.special import stdtrit

    m = se.shape[1]
    bounds = se * stdtrit(df, 1 - alpha / 2 / m)
    if joint.any():
        bounds[joint] = se[joint] * np.exp(np.interp(1 / df[joint], *_critical_values(m, alpha)))
    return np.asarray(bounds)


@lru_cache
def _critical_values(m: int, alpha: float) -> tuple[Floats, Floats]:
    """Return 1 / df, and the log of the bound of the largest of ``m`` t statistics of equal arms, to interpolate."""
    inverse_df = np.array([1e-3, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.65, 0.8, 1.0])
    bounds = [max_t_quantile(alpha, 1 / value, [math.sqrt(0.5)] * m) for value in inverse_df]
    return inverse_df, np.log(bounds)


def residual_variances(values: Floats) -> Floats:
    """Return the variance of each arm without the effects of seeds; unbiased if all arms have the same."""
    m, n = values.shape[-2:]
    residuals = values - values.mean(axis=-1, keepdims=True) - values.mean(axis=-2, keepdims=True)
    residuals = residuals + values.mean(axis=(-2, -1), keepdims=True)
    return np.asarray((residuals**2).sum(axis=-1) / ((n - 1) * (1 - 1 / m)))


def lower_prior_df(variances: Floats, n: int) -> Floats:
    """Return the lower end of the prior degrees of freedom of variances of ``n`` values each, along the last axis.

    The variance of log variances is that of chi-square, trigamma((n - 1) / 2), plus that of the prior,
    trigamma(prior_df / 2), of which the upper end is taken.
    """
    from scipy.special import polygamma

    observed = np.log(variances).var(axis=-1, ddof=1)
    excess = observed / _quantile_of_log_spread(variances.shape[-1], n) - float(polygamma(1, (n - 1) / 2))
    return np.where(excess > 0, 2 * inverse_trigamma(np.where(excess > 0, excess, 1.0)), math.inf)


@lru_cache
def _quantile_of_log_spread(m: int, n: int) -> float:
    """Return a low quantile of the variance of the log variances of ``m`` equal arms, as a share of its mean."""
    spread = np.log(residual_variances(np.random.default_rng([m, n]).normal(size=(DRAWS, m, n)))).var(axis=-1, ddof=1)
    return float(np.quantile(spread, 1 - PRIOR_CONFIDENCE) / spread.mean())


def inverse_trigamma(y: Floats) -> Floats:
    """Return the positive numbers at which the trigamma function has the values ``y``, by Newton's method.

    Reference: Smyth (2004), appendix.
    """
    from scipy.special import polygamma

    x = 0.5 + 1 / y
    for _ in range(50):
        value = polygamma(1, x)
        step = value * (1 - value / y) / polygamma(2, x)
        x = x + step
        if np.all(np.abs(step) <= 1e-12 * x):
            break
    return np.asarray(x)


def max_t_p(t: float, df: float, loadings: Sequence[float]) -> float:
    """Return the probability that the largest of correlated t statistics is at least ``t`` in absolute value.

    The statistics share the estimate of their variance (``df`` degrees of freedom, infinite if it is known), and two of
    them correlate by the product of their loadings: sqrt(0.5) each for equal arms and baseline, which is Dunnett's
    two-sided test.
    """
    from scipy.special import gammaln, ndtr

    nodes, weights = _normal_grid()
    size, counts = np.unique(np.abs(np.asarray(loadings, dtype=float)), return_counts=True)
    alone = np.sqrt(1 - size**2)
    if math.isfinite(df):
        width = 8 / math.sqrt(2 * df)
        lowest = -max(32 / df + 0.5, width)  # below it lies 1e-14 of the distribution
        log_s = np.linspace(lowest, width, 161)  # log of s, where s**2 is chi-square / df
        log_density = df * log_s - df / 2 * np.exp(2 * log_s) + df / 2 * math.log(df / 2) - gammaln(df / 2)
        shares = 2 * np.exp(log_density)
        scale, shares = np.exp(log_s), shares / shares.sum()
    else:
        scale, shares = np.ones(1), np.ones(1)
    bound = abs(t) * scale[:, None, None]
    shift = size * nodes[None, :, None]
    inside = ndtr((bound - shift) / alone) - ndtr((-bound - shift) / alone)
    outside = 1 - np.prod(inside**counts, axis=2)
    return float(min(1.0, max(0.0, shares @ (outside @ weights))))


def max_t_quantile(alpha: float, df: float, loadings: Sequence[float]) -> float:
    """Return the bound that the largest of correlated t statistics exceeds with probability ``alpha``."""
    from scipy.optimize import brentq

    high = 2.0
    while max_t_p(high, df, loadings) > alpha:
        high *= 2
    return float(brentq(lambda t: max_t_p(t, df, loadings) - alpha, 0.0, high))


def step_down(t: Sequence[float], df: float, loadings: Sequence[float]) -> list[float]:
    """Return step-down max-T p values, in the order given.

    The largest statistic is set against the largest of all, the next against the largest of the others, and so on.

    Reference: Westfall and Young (1993), Resampling-Based Multiple Testing, algorithm 2.8.
    """
    order = sorted(range(len(t)), key=lambda index: -abs(t[index]))
    adjusted, largest = [NAN] * len(t), 0.0
    for rank, index in enumerate(order):
        rest = [loadings[other] for other in order[rank:]]
        largest = max(largest, max_t_p(t[index], df, rest))
        adjusted[index] = largest
    return adjusted


@lru_cache
def _normal_grid() -> tuple[Floats, Floats]:
    """Return points and weights that integrate over the standard normal distribution."""
    nodes = np.linspace(-8.0, 8.0, 57)
    weights = np.exp(-(nodes**2) / 2)
    return nodes, weights / weights.sum()
