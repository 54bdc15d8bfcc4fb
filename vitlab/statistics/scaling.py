"""What a larger budget buys: power laws through arms of different size, and the arms that no other one dominates."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from vitlab.statistics.student import NAN, finite

LEAST_SIZES = 3  #: two sizes lie on every power law


@dataclass(frozen=True)
class PowerLaw:
    """``y = scale * x ** exponent``, with a band of what the spread of the replicates allows.

    The band speaks of the replicates alone: not of whether a power law holds, and not of sizes beyond those fitted.
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
    """A line through the means of log y over log x, each size counting the same.

    The band is a parametric bootstrap: every draw moves the mean of each size as Student's t of its replicates says,
    which holds at three replicates, where resampling them does not.  The draws are the same each time.

    Args:
        points: size to the values of its replicates, such as errors or losses.
        alpha: the band and the interval of the exponent are of level ``1 - alpha``, each point by itself.
        draws: of the bootstrap.

    Returns:
        None where fewer than ``LEAST_SIZES`` sizes have values, or a size or value is not positive.
    """
    sizes = sorted(size for size, values in points.items() if len(values))
    values = [finite(points[size]) for size in sizes]
    if len(sizes) < LEAST_SIZES or sizes[0] <= 0 or any((at <= 0).any() for at in values):
        return None
    log_x = np.log(sizes)
    centre = float(log_x.mean())
    logs = [np.log(at) for at in values]
    means = np.array([at.mean() for at in logs])
    exponent, level = (float(number) for number in np.polyfit(log_x - centre, means, 1))
    fitted = level + exponent * (log_x - centre)
    total = float(((means - means.mean()) ** 2).sum())
    r2 = 1 - float(((means - fitted) ** 2).sum()) / total if total > 0 else NAN
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
    """Of each point, whether no other costs as little and reaches as much, and is better in one of the two.

    Less cost is better, and more value; turn a sign for what is the other way round.  Equal points stand or fall
    together.
    """
    x, y = finite(costs), finite(values)
    better = (x[:, None] <= x) & (y[:, None] >= y) & ((x[:, None] < x) | (y[:, None] > y))
    return [not dominated for dominated in np.any(better, axis=0)]
