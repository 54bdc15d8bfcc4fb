"""Laws of scaling through arms of different size, and Pareto fronts.

A law is fitted to the means over seeds of the logarithms, with equal weight per size.  All of its intervals are
Student's t over seeds: each asks how far the residuals of single seeds point along one parameter of the law.  What the
sizes of a seed have in common, such as its split, is therefore no spread between sizes, and the intervals hold
however strongly the sizes of a seed correlate.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from vitlab.statistics.replicates import NAN, Floats, finite, t_quantile

MIN_SIZES = 3  #: two sizes lie on every power law
MIN_SIZES_WITH_OFFSET = 5  #: an offset is a third parameter, and a law has to be able to miss
PLACES = 41  #: points of a curve and its band
MAX_EXPONENT = 10.0  #: a law that falls faster is one step
PARAMETERS = ("level", "exponent", "offset")


@dataclass(frozen=True)
class Estimate:
    """A number with its interval; the ends are NaN if there is none."""

    value: float
    low: float = NAN
    high: float = NAN


@dataclass(frozen=True)
class Curve:
    """A law at several sizes, with a band that holds at each of them by itself."""

    x: tuple[float, ...]  #: from the smallest size to the largest
    y: tuple[float, ...]
    low: tuple[float, ...]
    high: tuple[float, ...]


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
    curve: Curve
    steepens: bool = False  #: whether y falls the faster, the larger x is, so that no power law describes it

    @property
    def levels_off(self) -> bool:
        """True if the sizes show an offset: its interval lies above 0."""
        return self.offset is not None and self.offset.low > 0


def fit_law(points: Mapping[float, Mapping[int, float]], alpha: float = 0.05, overlap: float = 0.0) -> Law | None:
    """Fit a law to the errors or losses of several sizes.

    The interval of the slope is exact for normal logarithms: Student's t of the slopes of single seeds.  Offset and
    exponent are tested at every value in question, with the other parameters fitted, and the interval holds the values
    that are not rejected (a score test by t over seeds); an end of the exponent is infinite if every large value fits.

    Args:
        points: size to seed to value.  Seeds that lack a size are left out.
        alpha: every interval, and the band at every size, is of level ``1 - alpha`` by itself.
        overlap: see :func:`vitlab.statistics.paired_t_test`.

    Returns:
        None if fewer than ``MIN_SIZES`` sizes share a seed, or a size or value is not positive.
    """
    sizes = sorted(size for size, by_seed in points.items() if by_seed)
    seeds = sorted(set.intersection(*(set(points[size]) for size in sizes))) if sizes else []
    if len(sizes) < MIN_SIZES or not seeds or sizes[0] <= 0:
        return None
    y_SX = np.array([finite([points[size][seed] for size in sizes]) for seed in seeds])
    if (y_SX <= 0).any():
        return None
    sample = _Sample(np.log(sizes), np.log(y_SX), alpha, overlap)
    line = _line(sample)
    slope = sample.interval_along(line, "exponent")
    slope = Estimate(-slope.value, -slope.high, -slope.low)
    if len(sizes) < MIN_SIZES_WITH_OFFSET or not slope.high < 0:
        return Law(slope, None, None, sample.curve(line))
    scores = sample.scores(line, "offset")
    if scores.mean() < -sample.half_width(scores):  # an offset below 0 would be needed
        return Law(slope, None, None, sample.curve(line), steepens=True)
    best = min((_fit(sample, {}, begin) for begin in _starts(line, sample)), key=sample.misfit)
    offset = _profile(sample, best, "offset", 0.0, sample.smallest * (1 - 1e-6))
    exponent = _profile(sample, best, "exponent", 0.01, MAX_EXPONENT)
    if exponent.high == MAX_EXPONENT:
        exponent = Estimate(exponent.value, exponent.low, math.inf)
    # A band that took the offset for known would be too narrow where it is fitted as 0.
    return Law(slope, offset, exponent, sample.curve(replace(best, free=PARAMETERS)))


@dataclass(frozen=True)
class _Fit:
    """Parameters of ``log y = log(offset + exp(level - exponent * log x))``, and which of them were free."""

    level: float
    exponent: float
    offset: float
    free: tuple[str, ...]

    def at(self, log_x: Floats) -> Floats:
        """Return log y."""
        return np.asarray(np.log(self.offset + np.exp(self.level - self.exponent * log_x)))

    def derivative(self, name: str, log_x: Floats, centre: float = 0.0) -> Floats:
        """Return the derivative of log y by a parameter; ``level`` is that at ``centre``."""
        falling = np.exp(self.level - self.exponent * log_x)
        share = falling / (self.offset + falling)
        by_name = {"level": share, "exponent": -share * (log_x - centre), "offset": 1 / (self.offset + falling)}
        return np.asarray(by_name[name])


@dataclass(frozen=True)
class _Sample:
    """Logarithms of the values of each seed (S) at each size (X)."""

    log_x: Floats
    logs_SX: Floats
    alpha: float
    overlap: float

    @property
    def means_X(self) -> Floats:
        return np.asarray(self.logs_SX.mean(axis=0))

    @property
    def smallest(self) -> float:
        """The smallest mean, which the offset cannot exceed."""
        return float(np.exp(self.means_X.min()))

    def misfit(self, fit: _Fit) -> float:
        """Return the sum of squares by which a law misses the means."""
        return float(((self.means_X - fit.at(self.log_x)) ** 2).sum())

    def half_width(self, values_S: Floats) -> Floats:
        """Return half of the interval of the mean over seeds, Student's t; NaN for a single seed."""
        n = len(values_S)
        if n < 2 or math.isnan(self.overlap):
            return np.full(values_S.shape[1:], NAN)
        se = values_S.std(axis=0, ddof=1) * math.sqrt(1 / n + self.overlap)
        return np.asarray(t_quantile(1 - self.alpha / 2, n - 1) * se)

    def shifts(self, fit: _Fit) -> Floats:
        """Return by how much each seed, alone, would move the free parameters, to first order (S x parameters)."""
        jacobian = np.stack([fit.derivative(name, self.log_x) for name in fit.free], axis=1)
        return np.asarray((self.logs_SX - fit.at(self.log_x)) @ np.linalg.pinv(jacobian).T)

    def interval_along(self, fit: _Fit, name: str) -> Estimate:
        """Return a parameter with its interval to first order, which is exact for a line."""
        half = float(self.half_width(self.shifts(fit)[:, fit.free.index(name)]))
        value = float(getattr(fit, name))
        return Estimate(value, value - half, value + half)

    def curve(self, fit: _Fit) -> Curve:
        """Return the law with its band."""
        places = np.linspace(self.log_x[0], self.log_x[-1], PLACES)
        gradients = np.stack([fit.derivative(name, places) for name in fit.free])
        half, middle = self.half_width(self.shifts(fit) @ gradients), fit.at(places)
        x, y, low, high = (tuple(np.exp(part).tolist()) for part in (places, middle, middle - half, middle + half))
        return Curve(x, y, low, high)

    def scores(self, fit: _Fit, name: str) -> Floats:
        """Return how far the residuals of each seed point along a fixed parameter, beyond what free ones explain."""
        residuals = self.logs_SX - fit.at(self.log_x)
        jacobian = np.stack([fit.derivative(other, self.log_x) for other in fit.free], axis=1)
        along = fit.derivative(name, self.log_x)
        along = along - jacobian @ np.linalg.lstsq(jacobian, along, rcond=None)[0]
        return np.asarray(residuals @ along)


def _line(sample: _Sample) -> _Fit:
    """Fit a law without an offset."""
    slope, level = (float(number) for number in np.polyfit(sample.log_x, sample.means_X, 1))
    return _Fit(level, -slope, 0.0, ("level", "exponent"))


def _starts(line: _Fit, sample: _Sample) -> Iterator[_Fit]:
    """Yield laws with a small and a large offset, through the middle and with the slope of a line."""
    centre = float(sample.log_x.mean())
    for share in (0.05, 0.5, 0.9):
        offset = share * sample.smallest
        height = math.exp(line.level - line.exponent * centre) - offset
        exponent = min(line.exponent * (height + offset) / height, MAX_EXPONENT / 2)
        yield _Fit(math.log(height) + exponent * centre, exponent, offset, PARAMETERS)


def _fit(sample: _Sample, fixed: Mapping[str, float], begin: _Fit) -> _Fit:
    """Fit the parameters that are not fixed to the means of logarithms, by least squares."""
    from scipy.optimize import least_squares

    centre = float(sample.log_x.mean())
    free = [name for name in PARAMETERS if name not in fixed]
    bounds = {"level": (-np.inf, np.inf), "exponent": (0.0, MAX_EXPONENT), "offset": (0.0, sample.smallest)}

    def fit_of(values: Sequence[float], names: Sequence[str]) -> _Fit:
        found = {**fixed, **dict(zip(free, map(float, values), strict=True))}
        # The search takes the level at the middle of the sizes, where it depends least on the exponent.
        return _Fit(found["level"] + found["exponent"] * centre, found["exponent"], found["offset"], tuple(names))

    start = {"level": begin.level - begin.exponent * centre, "exponent": begin.exponent, "offset": begin.offset}
    low, high = (np.array([bounds[name][end] for name in free]) for end in (0, 1))
    found = least_squares(
        lambda values: fit_of(values, free).at(sample.log_x) - sample.means_X,
        np.clip([start[name] for name in free], low + 1e-9, high - 1e-9),
        lambda values: np.stack([fit_of(values, free).derivative(name, sample.log_x, centre) for name in free], axis=1),
        bounds=(low, high),
        x_scale=[sample.smallest if name == "offset" else 1.0 for name in free],
    )
    # A parameter at its bound cannot move, so it explains no residuals.
    inside = [name for name, at in zip(free, found.active_mask, strict=True) if at == 0]
    return fit_of(found.x, inside)


def _profile(sample: _Sample, best: _Fit, name: str, least: float, most: float) -> Estimate:
    """Return a parameter with the interval of the values from ``least`` to ``most`` that are not rejected."""
    value = float(getattr(best, name))

    def is_rejected(candidate: float) -> bool:
        scores = sample.scores(_fit(sample, {name: candidate}, best), name)
        return bool(abs(scores.mean()) > sample.half_width(scores))

    low, high = (end if not is_rejected(end) else _boundary(is_rejected, value, end) for end in (least, most))
    return Estimate(value, min(low, value), max(high, value))


def _boundary(is_rejected: Callable[[float], bool], inside: float, outside: float) -> float:
    """Return where values begin to be rejected, by bisection."""
    for _ in range(14):
        middle = (inside + outside) / 2
        inside, outside = (inside, middle) if is_rejected(middle) else (middle, outside)
    return outside


def pareto(costs: Sequence[float], values: Sequence[float]) -> list[bool]:
    """Return for each point whether it is on the Pareto front of low cost and high value.

    Negate a quantity to reverse its direction.  Equal points are on the front together or not at all.
    """
    x, y = finite(costs), finite(values)
    better = (x[:, None] <= x) & (y[:, None] >= y) & ((x[:, None] < x) | (y[:, None] > y))
    return [not dominated for dominated in np.any(better, axis=0)]
