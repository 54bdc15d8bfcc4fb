"""Scaling: power laws through arms of different size, and Pareto fronts."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from vitlab.statistics.replicates import NAN, finite

MIN_SIZES = 3  #: two sizes lie on every power law


@dataclass(frozen=True)
class PowerLaw:
    """``y = scale * x ** exponent``, with a confidence band.

    The band covers the spread of the replicates alone: neither the fit of a power law as such, nor extrapolation.
    """

    scale: float
    exponent: float
    exponent_low: float  #: NaN where some size has fewer than two replicates
    exponent_high: float
    r2: float  #: share of the variance of log y over the sizes that the line explains
    x: tuple[float, ...]  #: places of the band, from the smallest size to the largest
    y: tuple[float, ...]
    low: tuple[float, ...]
    high: tuple[float, ...]


def power_law(points: Mapping[float, Sequence[float]], alpha: float = 0.05, draws: int = 4000) -> PowerLaw | None:
    """Fit a line through the means of log y over log x, with equal weight per size.

    The band is a parametric bootstrap: every draw shifts the mean of each size by Student's t of its replicates, which
    is valid at three replicates, where resampling is not.  The draws are the same each time.

    Args:
        points: size to the values of its replicates, such as errors or losses.
        alpha: the band and the interval of the exponent are of level ``1 - alpha``, each point by itself.
        draws: of the bootstrap.

    Returns:
        None if fewer than ``MIN_SIZES`` sizes have values, or a size or value is not positive.
    """
    sizes = sorted(size for size, values in points.items() if len(values))
    values = [finite(points[size]) for size in sizes]
    if len(sizes) < MIN_SIZES or sizes[0] <= 0 or any((at <= 0).any() for at in values):
        return None
    log_x = np.log(sizes)
    centre = float(log_x.mean())
    logs = [np.log(at) for at in values]
    means = np.array([at.mean() for at in logs])
    exponent, level = (float(number) for number in np.polyfit(log_x - centre, means, 1))
    fit = level + exponent * (log_x - centre)
    total = float(((means - means.mean()) ** 2).sum())
    r2 = 1 - float(((means - fit) ** 2).sum()) / total if total > 0 else NAN
    places = np.linspace(log_x[0], log_x[-1], 41)
    line = level + exponent * (places - centre)
    low = high = np.full(len(places), NAN)
    ends = (NAN, NAN)
    if all(len(at) >= 2 for at in logs):
        random = np.random.default_rng(0)
        shifts = [random.standard_t(len(at) - 1, draws) * float(at.std(ddof=1)) / math.sqrt(len(at)) for at in logs]
        exponents, levels = np.polyfit(log_x - centre, means[:, None] + np.stack(shifts), 1)
        lines = levels[:, None] + exponents[:, None] * (places - centre)
        low, high = np.quantile(lines, [alpha / 2, 1 - alpha / 2], axis=0)
        least, most = np.quantile(exponents, [alpha / 2, 1 - alpha / 2])
        ends = float(least), float(most)
    curves = (tuple(np.exp(curve).tolist()) for curve in (places, line, low, high))
    return PowerLaw(math.exp(level - exponent * centre), exponent, ends[0], ends[1], r2, *curves)


def pareto(costs: Sequence[float], values: Sequence[float]) -> list[bool]:
    """Return for each point whether it is on the Pareto front of low cost and high value.

    Negate a quantity to reverse its direction.  Equal points are on the front together or not at all.
    """
    x, y = finite(costs), finite(values)
    better = (x[:, None] <= x) & (y[:, None] >= y) & ((x[:, None] < x) | (y[:, None] > y))
    return [not dominated for dominated in np.any(better, axis=0)]


def pareto_shares(costs: Sequence[float], values: Sequence[Mapping[int, float]], draws: int = 2000) -> list[float]:
    """Return for each arm how often it is on the Pareto front of low cost and high value if means are drawn anew.

    The means of a draw are those of the arms, each shifted by Student's t of its replicates; the shifts of two arms
    correlate as their values at equal seeds do.  The draws are the same each time.

    Args:
        costs: of the arms, without uncertainty.
        values: of each arm by seed.
        draws: number of draws.

    Returns:
        NaN for every arm if one of them has fewer than two values.
    """
    if any(len(arm) < 2 for arm in values):
        return [NAN] * len(values)
    random = np.random.default_rng(0)
    seeds = {seed: place for place, seed in enumerate(sorted(set().union(*values)))}
    normal = random.standard_normal((draws, len(seeds)))
    scales = {n: 1 / np.sqrt(n * random.chisquare(n - 1, draws)) for n in sorted({len(arm) for arm in values})}
    means = []
    for arm in values:
        x, places = finite([*arm.values()]), [seeds[seed] for seed in arm]
        means.append(x.mean() + scales[len(x)] * (normal[:, places] @ (x - x.mean())))
    drawn, x = np.stack(means), finite(costs)
    cheaper, strictly = x[:, None] <= x, x[:, None] < x
    higher = drawn[:, None] >= drawn
    dominated = cheaper[:, :, None] & higher & (strictly[:, :, None] | (drawn[:, None] > drawn))
    return [float(share) for share in 1 - dominated.any(axis=0).mean(axis=1)]
