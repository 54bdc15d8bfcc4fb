"""Seeds crossed with images: what a finite split adds to the spread, and intervals for new images too.

Every training of an arm is evaluated on the same images, so its values form a table of seeds by images.  The mean
squares of a two-way analysis of variance split its spread between seeds, images and the rest.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from vitlab.statistics.replicates import Floats, t_quantile


@dataclass(frozen=True)
class MeanSquares:
    """Mean squares of a table of seeds by images, and its size."""

    seeds: float
    images: float
    rest: float
    shape: tuple[int, int]  #: number of seeds and of images

    @classmethod
    def of(cls, values_SI: Floats) -> MeanSquares:
        """Return the mean squares of a table (seeds, images), with at least two of each."""
        s, i = values_SI.shape
        mean_S, mean_I, mean = values_SI.mean(axis=1), values_SI.mean(axis=0), values_SI.mean()
        by_seed = float(((mean_S - mean) ** 2).sum()) * i
        by_image = float(((mean_I - mean) ** 2).sum()) * s
        rest = float(((values_SI - mean) ** 2).sum()) - by_seed - by_image
        return cls(by_seed / (s - 1), by_image / (i - 1), max(0.0, rest) / ((s - 1) * (i - 1)), (s, i))


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
    squares = MeanSquares.of(values_SI)
    return math.sqrt(squares.rest / squares.shape[1])


def interval_for_new_images(differences_SI: Floats, se: float, df: float, alpha: float = 0.05) -> tuple[float, float]:
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
    squares = MeanSquares.of(differences_SI)
    s, i = squares.shape
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
