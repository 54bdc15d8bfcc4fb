"""Laws of scaling through arms of different size, and Pareto fronts.

Every interval of a law is Student's t over seeds: it asks how far the residuals of each seed, relative to the mean at
that size, point along one parameter of the law.  What the sizes of a seed have in common, such as its split, is
therefore no spread between sizes, and the intervals hold however strongly the sizes of a seed correlate.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from vitlab.statistics.replicates import NAN, Floats, require_finite, t_quantile

MIN_SIZES = 3  #: two sizes lie on every power law
MIN_SIZES_WITH_OFFSET = 5  #: an offset is a third parameter, and a law has to be able to miss
PLACES = 41  #: points of a curve and its band
EXPONENTS = (0.01, 10.0)  #: a law that falls faster is one step, and its interval has no upper end


@dataclass(frozen=True)
class Estimate:
    """A number with its interval; the ends are NaN if there is none."""

    value: float
    low: float = NAN
    high: float = NAN


@dataclass(frozen=True)
class Law:
    """The dependence of an error or a loss y on a size x.

    ``slope`` describes the sizes at hand: it is the slope of the line through log y over log x, and the exponent of
    ``y = A x ** slope`` if there is no offset, which three or four sizes cannot show.  From five sizes on
    ``y = offset + A x ** -exponent`` is fitted; both estimates are None with fewer sizes, where the line is not shown
    to fall, and where it is shown to steepen.
    """

    slope: Estimate
    offset: Estimate | None
    exponent: Estimate | None
    curve: Floats
    """Sizes, y there, and the ends of a band that holds at each size by itself, (4, sizes)."""
    steepens: bool = False  #: whether y falls faster and faster with x, as no power law does


@dataclass(frozen=True)
class _Sample:
    """Values of each seed (S) at each size (X), and the test over seeds."""

    log_x: Floats  #: less its mean
    y_SX: Floats
    alpha: float
    overlap: float

    @property
    def means_X(self) -> Floats:
        """Geometric means over seeds."""
        return np.asarray(np.exp(np.log(self.y_SX).mean(axis=0)))

    def half_width(self, values_S: Floats) -> Floats:
        """Return half of the interval of the mean over seeds; NaN for a single seed."""
        n = len(values_S)
        if n < 2 or math.isnan(self.overlap):
            return np.full(values_S.shape[1:], NAN)
        se = values_S.std(axis=0, ddof=1) * math.sqrt(1 / n + self.overlap)
        return np.asarray(t_quantile(1 - self.alpha / 2, n - 1) * se)

    def project_residuals_onto_change(self, fit_X: Floats, along_X: Floats, explained_X: Sequence[Floats]) -> Floats:
        """Return how far each seed's residuals point along a change of a fit, beyond what other changes explain."""
        others = np.stack(explained_X, axis=1) / fit_X[:, None]
        along = along_X / fit_X
        along = along - others @ np.linalg.lstsq(others, along, rcond=None)[0]
        return np.asarray(np.log(self.y_SX / fit_X) @ along)

    def fit_with_exponent(self, exponent: float) -> tuple[float, float, Floats]:
        """Return offset and factor of the law of this exponent that is nearest to the means, and its fit."""
        falling = np.exp(-exponent * self.log_x)
        columns = np.stack([np.ones_like(falling), falling], axis=1) / self.means_X[:, None]
        offset, factor = np.linalg.lstsq(columns, np.ones_like(falling), rcond=None)[0]
        if offset <= 0:
            offset, factor = 0.0, float(columns[:, 1].sum() / (columns[:, 1] ** 2).sum())
        return float(offset), float(factor), np.asarray(offset + factor * falling)

    def misfit(self, exponent: float) -> float:
        """Return the sum of squares by which the law of this exponent misses the means, relative to them."""
        return float(((1 - self.fit_with_exponent(exponent)[2] / self.means_X) ** 2).sum())

    def scores_of_exponent(self, exponent: float) -> Floats:
        """Return the :meth:`project_residuals_onto_change` of the exponent at a value of it."""
        offset, factor, fit = self.fit_with_exponent(exponent)
        falling = factor * np.exp(-exponent * self.log_x)
        return self.project_residuals_onto_change(
            fit, -self.log_x * falling, [falling, np.ones_like(fit)] if offset else [falling]
        )

    def scores_of_offset(self, offset: float) -> Floats:
        """Return the :meth:`project_residuals_onto_change` of the offset at a value of it."""
        slope, level = np.polyfit(self.log_x, np.log(self.means_X - offset), 1)
        falling = np.exp(level + slope * self.log_x)
        return self.project_residuals_onto_change(
            offset + falling, np.ones_like(falling), [falling, self.log_x * falling]
        )

    def interval(self, value: float, scores_at: Callable[[float], Floats], lower: float, upper: float) -> Estimate:
        """Return a parameter with the interval of the values whose scores are not told from 0."""

        def is_rejected(candidate: float) -> bool:
            scores_S = scores_at(candidate)
            return bool(abs(scores_S.mean()) > self.half_width(scores_S))

        ends = []
        for end in (lower, upper):
            inside = value
            for _ in range(40 if is_rejected(end) else 0):
                middle = (inside + end) / 2
                inside, end = (inside, middle) if is_rejected(middle) else (middle, end)
            ends.append(end)
        return Estimate(value, *ends)

    def law_with_band(
        self, centre: float, exponent: float, offset: float, factor: float, *, with_offset: bool
    ) -> Floats:
        """Return the law with its band, to first order."""

        def changes(log_x: Floats) -> tuple[Floats, Floats]:
            falling = factor * np.exp(-exponent * log_x)
            columns = [falling, -log_x * falling, *([np.ones_like(falling)] if with_offset else [])]
            return offset + falling, np.stack(columns, axis=1) / (offset + falling)[:, None]

        fit, at_sizes = changes(self.log_x)
        places = np.linspace(self.log_x[0], self.log_x[-1], PLACES)
        y, at_places = changes(places)
        shifts = np.log(self.y_SX / fit) @ np.linalg.pinv(at_sizes).T
        factors = np.exp(self.half_width(shifts @ at_places.T))
        return np.stack([np.exp(places + centre), y, y / factors, y * factors])


def fit_law(points: Mapping[float, Mapping[int, float]], alpha: float, overlap: float) -> Law | None:
    """Fit a law to the errors or losses of several sizes, each size with equal weight.

    The interval of the slope is exact for normal logarithms: Student's t of the slopes of single seeds.  Offset and
    exponent are tested at every value in question, with the other parameters fitted, and the interval holds the values
    that are not rejected.

    Args:
        points: size to seed to value.  Seeds that lack a size are left out.
        alpha: every interval, and the band at every size, is of level ``1 - alpha`` by itself.
        overlap: see :class:`vitlab.comparison.arrays.Comparisons`.

    Returns:
        None if fewer than ``MIN_SIZES`` sizes share a seed, or a size or value is not positive.
    """
    from scipy.optimize import minimize_scalar

    sizes = sorted(size for size, by_seed in points.items() if by_seed)
    seeds = sorted(set.intersection(*(set(points[size]) for size in sizes))) if sizes else []
    if len(sizes) < MIN_SIZES or not seeds or sizes[0] <= 0:
        return None
    y_SX = np.array([require_finite([points[size][seed] for size in sizes]) for seed in seeds])
    if (y_SX <= 0).any():
        return None
    centre = float(np.log(sizes).mean())
    sample = _Sample(np.log(sizes) - centre, y_SX, alpha, overlap)
    slopes_S = np.polyfit(sample.log_x, np.log(y_SX).T, 1)[0]
    half, value, level = float(sample.half_width(slopes_S)), float(slopes_S.mean()), math.exp(np.log(y_SX).mean())
    slope = Estimate(value, value - half, value + half)
    line = sample.law_with_band(centre, -value, 0.0, level, with_offset=False)
    if len(sizes) < MIN_SIZES_WITH_OFFSET or not slope.high < 0:
        return Law(slope, None, None, line)
    curvature_S = sample.scores_of_offset(0.0)
    if curvature_S.mean() < -sample.half_width(curvature_S):  # an offset below 0 would be needed
        return Law(slope, None, None, line, steepens=True)
    best = float(minimize_scalar(sample.misfit, bounds=EXPONENTS, method="bounded", options={"xatol": 1e-9}).x)
    offset, factor, _ = sample.fit_with_exponent(best)
    exponent = sample.interval(best, sample.scores_of_exponent, *EXPONENTS)
    if exponent.high == EXPONENTS[1]:
        exponent = Estimate(best, exponent.low, math.inf)
    offsets = sample.interval(offset, sample.scores_of_offset, 0.0, float(sample.means_X.min()) * (1 - 1e-6))
    return Law(slope, offsets, exponent, sample.law_with_band(centre, best, offset, factor, with_offset=True))


def on_pareto_front(costs: Sequence[float], values: Sequence[float]) -> list[bool]:
    """Return for each point whether it is on the Pareto front of low cost and high value.

    Negate a quantity to reverse its direction.  Equal points are on the front together or not at all.
    """
    x, y = require_finite(costs), require_finite(values)
    better = (x[:, None] <= x) & (y[:, None] >= y) & ((x[:, None] < x) | (y[:, None] > y))
    return [not dominated for dominated in np.any(better, axis=0)]
