"""Few replicates: means with intervals, exact tests, collapsed seeds, their shape, and seeds crossed with images."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]
NAN = math.nan


def require_finite(values: Sequence[float] | Floats) -> Floats:
    """Return values as an array; one that is not finite raises ValueError."""
    x = np.asarray(values, dtype=float)
    if not np.isfinite(x).all():
        raise ValueError(
            f"{int((~np.isfinite(x)).sum())} of {x.size} values are not finite; leave them out, and report their number"
        )
    return x


class Moments(NamedTuple):
    """Number, mean and sample standard deviation of values, without those that are not finite."""

    n: Ints
    mean: Floats
    sd: Floats


def moments(values: Floats) -> Moments:
    """Return the moments of the finite values along the last axis."""
    is_finite = np.isfinite(values)
    n = is_finite.sum(axis=-1)
    with np.errstate(divide="ignore", invalid="ignore"):
        mean = np.where(is_finite, values, 0.0).sum(axis=-1) / n
        squares = (np.where(is_finite, values - mean[..., None], 0.0) ** 2).sum(axis=-1)
        return Moments(n, mean, np.sqrt(squares / (n - 1)))


def t_quantile(q: float, df: float) -> float:
    """Return the quantile of Student's t at probability ``q``."""
    from scipy.special import stdtrit

    return float(stdtrit(df, q))


MIN_VALUES = 3  #: of an interval: with two values it reaches 13 standard errors to either side
ROUNDING = 1e-12  #: relative to the values: smaller differences are floating-point rounding
SINGLE_ROUNDING = 2.0**-22  #: the same for values that were computed in single precision


@dataclass(frozen=True)
class Mean:
    """A mean with its standard deviation and interval, which are NaN for fewer than two values."""

    n: int
    mean: float
    sd: float
    low: float
    high: float


def mean_interval(values: Sequence[float], alpha: float, quantum: float, overlap: float) -> Mean:
    """Return the mean, the sample standard deviation and the t-interval of level ``1 - alpha``.

    Args:
        values: the values.
        alpha: the level.
        quantum: the step to which values are rounded.  The interval takes the standard deviation for at
            least quantum / sqrt(12), as rounding has it; without a step, values that are all equal have no interval.
        overlap: see :class:`vitlab.comparison.arrays.Comparisons`.

    Raises:
        ValueError: for a value that is not finite.
    """
    x = require_finite(values)
    n = len(x)
    mean = float(x.mean()) if n else NAN
    sd = float(x.std(ddof=1)) if n > 1 else NAN
    if sd <= rounding_error(x):
        sd = 0.0
    if n < MIN_VALUES:
        return Mean(n, mean, sd, NAN, NAN)
    spread = max(sd, quantum / math.sqrt(12))
    half = t_quantile(1 - alpha / 2, n - 1) * (spread * math.sqrt(1 / n + overlap)) if spread else NAN
    return Mean(n, mean, sd, mean - half, mean + half)


def sign_flip_p(differences: Sequence[float] | Floats) -> float:
    """Return the two-sided p of the exact sign-flip test: the share of sign assignments with a sum as far from 0.

    Exact for up to 40 differences, by meeting in the middle; NaN beyond, where t needs no cross-check.
    """
    d = require_finite(differences)
    n = len(d)
    if n == 0 or n > 40:
        return NAN
    first_sums, second_sums = (_signed_sums(half) for half in (d[: n // 2], d[n // 2 :]))
    first_sums.sort()  # with both halves sorted, the binary searches stay in the cache
    second_sums.sort()
    scale = float(np.abs(d).sum())
    bound = abs(float(d.sum())) - 1e-12 * scale  # sums that differ by rounding alone count as equal
    if bound <= 0:
        return 1.0
    above = len(second_sums) - np.searchsorted(second_sums, bound - first_sums, side="left")
    below = np.searchsorted(second_sums, -bound - first_sums, side="right")
    return float((above.sum() + below.sum()) / 2.0**n)


def rounding_error(values: Floats) -> Floats:
    """Return the size of differences that the rounding of values explains, along the last axis; NaN are missing.

    Values that single precision represents exactly were computed in it.
    """
    values = np.where(np.isfinite(values), values, 0.0)
    is_single = (values == values.astype(np.float32)).all(axis=-1)
    return np.asarray(np.where(is_single, SINGLE_ROUNDING, ROUNDING) * np.abs(values).max(axis=-1, initial=0.0))


def _signed_sums(values: Floats) -> Floats:
    """Return the sums of ``values`` under every assignment of signs."""
    sums = np.zeros(1)
    for value in values:
        sums = np.concatenate([sums + value, sums - value])
    return sums


# -- the shape of their distribution, and the noise of a choice -------------------------------------------------------

SAMPLES = 20_000  #: simulated samples of normal values
CHOICES = 4000  #: choices that are drawn again


def non_normality_score(values_AN: Floats) -> float:
    """Return how far the largest gaps between the seeds of arms exceed the gaps of normal values, in standard errors.

    The gap of an arm is the largest one between neighbours among its seeds, over their range.  Values at two levels
    have large gaps, and so do skewed ones.  The median of the other arms at a seed is subtracted first, because arms at
    equal seeds share what the seed does.

    Args:
        values_AN: of arms at the same seeds.

    Returns:
        NaN for fewer than three seeds or arms.  Arms with equal values at two seeds, as rounded ones may have, are left
        out.
    """
    arms, n = values_AN.shape
    if n < 3 or arms < 3:
        return NAN
    others_AN = np.stack([np.median(np.delete(values_AN, arm, axis=0), axis=0) for arm in range(arms)])
    gaps_AN, own_AN = (np.diff(np.sort(x_AN, axis=1), axis=1) for x_AN in (values_AN - others_AN, values_AN))
    gaps_AN = gaps_AN[(np.minimum(gaps_AN, own_AN) > rounding_error(values_AN)[:, None]).all(axis=1)]
    if len(gaps_AN) < 3:
        return NAN
    largest_A = gaps_AN.max(axis=1) / gaps_AN.sum(axis=1)
    larger = 1 - (np.searchsorted(_largest_gaps_of_normal_samples(n), largest_A) - 0.5) / SAMPLES  # p of each arm
    return float((-np.log(np.clip(larger, 1 / SAMPLES, 1)).mean() - 1) * math.sqrt(len(gaps_AN)))


@cache
def _largest_gaps_of_normal_samples(n: int) -> Floats:
    """Return the sorted largest gaps of samples of normal values."""
    gaps = np.diff(np.sort(np.random.default_rng(0).standard_normal((SAMPLES, n)), axis=1), axis=1)
    return np.asarray(np.sort(gaps.max(axis=1) / gaps.sum(axis=1)))


def retuning_variance(
    scores: Sequence[float], chosen: int, value: float, sd: float, n_seeds: int
) -> tuple[float, float]:
    """Return the mean squared change of an arm's value if its knobs were chosen again, and its degrees of freedom.

    The scores are drawn again around themselves, the chosen rival's around the arm's value, which no choice has
    biased; each time the best rival is chosen.  The degrees of freedom count the rivals that could have won: one
    less than their effective number, 1 / sum(p^2) with the share p of the draws that a rival wins, and at least 1.

    Args:
        scores: mean score of each rival over the tuning seeds; larger is better.
        chosen: index of the chosen rival.
        value: mean of the arm over its seeds, in the same sense.
        sd: standard deviation of the arm between seeds.
        n_seeds: number of tuning seeds.
    """
    if len(scores) < 2 or not sd > 0:
        return 0.0, 1.0
    means_K = np.array(scores, dtype=float)
    means_K[chosen] = value
    draws_MK = np.random.default_rng(len(scores)).standard_normal((CHOICES, len(scores)))
    again_M = (means_K + sd / math.sqrt(n_seeds) * draws_MK).argmax(axis=1)
    shares_K = np.bincount(again_M, minlength=len(scores)) / CHOICES
    return float(((means_K[again_M] - value) ** 2).mean()), max(1.0, 1 / float((shares_K**2).sum()) - 1)


# -- seeds that came to nothing ----------------------------------------------------------------------------------------

MAX_EXACT = 80  #: seeds of a group from which on a test by Boschloo takes long, and one by Fisher is hardly blunter
COLLAPSED_SD = 10.0  #: robust standard deviations on the worse side of the median at which a training has collapsed
IMAGES_SD = 3.0  #: standard deviations by the images alone that it must be away, too: at chance, most seeds are equal
NORMAL_MAD = 1.4826  #: standard deviation of a normal distribution in median absolute deviations


def find_collapsed(values_SAN: Floats, sign: int = 1, quantum: Floats | float = 0.0) -> Mask:
    """Return which values are far worse than the other values of their arm (studies, arms, seeds).

    The scale is the median distance to the median of an arm, over all arms of the study (without distances of 0) or
    in the arm itself, whichever is larger.  Arms of fewer than three values have none.

    Args:
        values_SAN: the values; NaN where one is missing.
        sign: 1 if larger values are better, -1 if smaller ones are.
        quantum: 1 / images of a share of right predictions (S, 1); 0 for other metrics.
    """
    n_SA, median_SA = np.isfinite(values_SAN).sum(axis=2), finite_median(values_SAN)
    distance_SAN = sign * (values_SAN - median_SA[:, :, None])
    with np.errstate(divide="ignore", invalid="ignore"):
        unbiased_SAN = np.abs(distance_SAN) * np.sqrt(n_SA / (n_SA - 1))[:, :, None]
    size_SAN = np.where(n_SA[:, :, None] >= 3, unbiased_SAN, NAN)
    # A distance of 0 says nothing about the scale: of an odd number of seeds the median is one of them, and where most
    # values are equal by rounding, any other one would collapse.
    moved_SN = np.where(size_SAN > 0, size_SAN, NAN).reshape(len(values_SAN), -1)
    scale_SA = NORMAL_MAD * np.maximum(finite_median(moved_SN)[:, None], finite_median(size_SAN))
    with np.errstate(invalid="ignore"):
        of_images_SA = np.sqrt(np.maximum(median_SA * (1 - median_SA) * quantum, 0.0))
        limit_SA = np.maximum(COLLAPSED_SD * scale_SA, IMAGES_SD * of_images_SA)
        return np.asarray(distance_SAN < -limit_SA[:, :, None])


def collapsed_seeds_by_arm(
    arms: Mapping[str, Mapping[int, float]], sign: int, quantum: float = 0.0
) -> dict[str, list[int]]:
    """Return the collapsed seeds of each arm, see :func:`find_collapsed`."""
    seeds = sorted(set().union(*arms.values()))
    [flags_AN] = find_collapsed(values_to_array(arms.values())[None], sign, quantum)
    return {
        arm: [seed for seed, is_collapsed in zip(seeds, row, strict=True) if is_collapsed]
        for arm, row in zip(arms, flags_AN, strict=True)
    }


def values_to_array(arms: Collection[Mapping[int, float]], seeds: Sequence[int] | None = None) -> Floats:
    """Return the values of arms at seeds (A, N), by default at all seeds of the arms; NaN where an arm has none."""
    seeds = sorted(set().union(*arms)) if seeds is None else seeds
    rows = [[values.get(seed, NAN) for seed in seeds] for values in arms]
    return np.array(rows, dtype=float).reshape(len(arms), len(seeds))


def finite_median(values: Floats) -> Floats:
    """Return the median of the finite values along the last axis; NaN if there are none."""
    if not values.shape[-1]:
        return np.full(values.shape[:-1], NAN)
    ordered, n = np.sort(values, axis=-1), np.isfinite(values).sum(axis=-1)  # NaN are last
    middle = np.stack([np.maximum(n - 1, 0) // 2, np.minimum(n // 2, values.shape[-1] - 1)], axis=-1)
    return np.asarray(np.take_along_axis(ordered, middle, axis=-1).mean(axis=-1))


def collapse_rate_bound(n: int) -> float:
    """Return the largest share of collapsing trainings that none of ``n`` leaves possible, at level 0.95."""
    return float(1 - 0.05 ** (1 / n))


@lru_cache(maxsize=4096)
def boschloo_p(bad: tuple[int, int], seeds: tuple[int, int]) -> float:
    """Return the one-sided p of Boschloo's exact test that the second of two groups has the larger share of bad seeds.

    Unlike Fisher's test, it does not take the number of bad seeds as given: four of ten beside none of ten have
    p = 0.021, and 0.043 by Fisher's.  Of more than 80 seeds, p is Fisher's, which is never smaller.

    Reference: Boschloo (1970), Statistica Neerlandica 24, 1-35.
    """
    from scipy.stats import boschloo_exact, fisher_exact

    good = [size - number for size, number in zip(seeds, bad, strict=True)]
    test = boschloo_exact if max(seeds) <= MAX_EXACT else fisher_exact
    return float(test([bad, good], alternative="less").pvalue)


# -- seeds crossed with images -----------------------------------------------------------------------------------------
# Every training of an arm is evaluated on the same images, so its values form a table of seeds by images.  The mean
# squares of a two-way analysis of variance split its spread between seeds, images and the rest.


@dataclass(frozen=True)
class MeanSquares:
    """Mean squares of a table of seeds by images, without the one between seeds."""

    images: float
    rest: float

    @classmethod
    def from_table(cls, values_SI: Floats) -> MeanSquares:
        """Return the mean squares of a table (seeds, images), with at least two of each."""
        s, i = values_SI.shape
        mean_S, mean_I, mean = values_SI.mean(axis=1), values_SI.mean(axis=0), values_SI.mean()
        by_seed = float(((mean_S - mean) ** 2).sum()) * i
        by_image = float(((mean_I - mean) ** 2).sum()) * s
        rest = float(((values_SI - mean) ** 2).sum()) - by_seed - by_image
        return cls(by_image / (i - 1), max(0.0, rest) / ((s - 1) * (i - 1)))


def sd_interval(sd: float, df: float, alpha: float = 0.05) -> tuple[float, float]:
    """Return the interval of a standard deviation of normal values, of level ``1 - alpha``."""
    from scipy.special import chdtri

    return sd * math.sqrt(df / float(chdtri(df, alpha / 2))), sd * math.sqrt(df / float(chdtri(df, 1 - alpha / 2)))


def split_sd(values_SI: Floats) -> float:
    """Return the standard deviation between seeds that equally good models would have on this finite split.

    Models are equally good if they would have the same mean over all images of the kind.  The variance between seeds
    is expected to be the sum of this one's square and the models' own variance.

    Reference: Jordan (2023), arXiv:2304.01910, section 4.
    """
    return math.sqrt(MeanSquares.from_table(values_SI).rest / values_SI.shape[1])


def interval_for_new_images(differences_SI: Floats, se: float, df: float, alpha: float) -> tuple[float, float]:
    """Return the interval of a mean difference for new trainings that are evaluated on new images.

    Seeds and images are crossed random effects: the variance between images, without the rest, is added to the
    comparison's variance, and the degrees of freedom are Satterthwaite's, at least the comparison's.  The interval
    contains the one for the same images.

    Args:
        differences_SI: differences of two arms at the same seeds and images.
        se: standard error of the mean difference for new trainings on the same images.
        df: degrees of freedom of ``se``.
        alpha: the level is ``1 - alpha``.

    Reference: Searle, Casella and McCulloch (1992), Variance Components, section 4.5.
    """
    squares = MeanSquares.from_table(differences_SI)
    s, i = differences_SI.shape
    added = squares.images - squares.rest
    variance, terms = se**2, [(se**2, df)]
    if added > 0:
        variance += added / (s * i)
        terms += [(squares.images / (s * i), i - 1), (squares.rest / (s * i), (s - 1) * (i - 1))]
    # The images' part is a difference of mean squares: where it nearly cancels, Satterthwaite's formula gives too few.
    total_df = max(df, variance**2 / sum(term**2 / count for term, count in terms))
    half = t_quantile(1 - alpha / 2, total_df) * math.sqrt(variance)
    half = max(half, t_quantile(1 - alpha / 2, df) * se)
    mean = float(differences_SI.mean())
    return mean - half, mean + half
