"""Every verdict of the report, on simulated studies of each source: how often it is right, and what intervals hold.

In each study five arms are compared with a baseline, and ``analysis.margin`` is two standard deviations of a seed.  Four
arms equal the baseline in the mean, and one is better by just the margin, so that "equivalent" would be wrong as well.
Studies have ten seeds, or looks after every seed from 3 to 12 until each comparison is decided.  Nothing is given up as
futile here, which could only make wrong claims rarer.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cache
from typing import NamedTuple

import numpy as np
from judging import ALPHA, KINDS, VERDICTS, Comparisons, check, compare, verdicts
from numpy.typing import NDArray
from scipy.special import stdtrit
from sources import Floats, Source
from vitlab.statistics.stopping import stagewise_p

from vitlab import statistics

COMPARISONS = 5
DESIGNS = {"10 seeds": (10,), "3 to 12 seeds, a look after every one": tuple(range(3, 13))}
MARGIN_SD = 2.0  #: margin in standard deviations of a seed
CHECKED = 1  #: studies of each row whose verdicts are compared with the report's own
OF_MEAN = "interval of a mean holds"
HEADS = (
    "wrong claims",
    "intervals hold",
    OF_MEAN,
    "equal: better or worse",
    "equal: equivalent",
    "equal: same",
    "equal: cannot tell",
    "better: better",
    "better: equivalent or worse",
    "better: cannot tell",
    "seeds",
)


class Outcome(NamedTuple):
    """What became of each comparison: studies along the first axis, arms along the second."""

    verdict: NDArray[np.int_]  #: places in ``VERDICTS``
    seeds: NDArray[np.int_]  #: at the end
    holds: Floats  #: 1 if the interval has the true difference, 0 if not, NaN if there is none


def judged(values: Floats, truth: Floats, source: Source, margin: float, sizes: tuple[int, ...]) -> dict[str, Outcome]:
    """Return the outcomes of studies with looks after ``sizes`` seeds, for each kind of variance."""
    m = values.shape[1] - 1
    levels = statistics.sequential_levels(sizes, ALPHA, m) if len(sizes) > 1 else (ALPHA,)
    outcomes = {}
    for kind in KINDS:
        shape = values.shape[0], m
        verdict, seeds, holds = np.zeros(shape, int), np.full(shape, sizes[-1]), np.full(shape, math.nan)
        waiting = np.ones(shape, bool)
        for look, (size, level) in enumerate(zip(sizes, levels, strict=True)):
            compared = compare(values[:, :, :size], source.quantum, source.sign, waiting, level)
            found = verdicts(compared, kind, margin, level, source.sign, waiting)
            ends = waiting & ((found > 0) | (look == len(sizes) - 1))
            verdict[ends], seeds[ends] = found[ends], size
            holds[ends] = _holds(compared, kind, truth, sizes, levels, look, ends)
            waiting &= ~ends
        outcomes[kind] = Outcome(verdict, seeds, holds)
    return outcomes


def _holds(
    compared: Comparisons,
    kind: str,
    truth: Floats,
    sizes: tuple[int, ...],
    levels: tuple[float, ...],
    look: int,
    ends: NDArray[np.bool_],
) -> Floats:
    """Return whether the intervals of the comparisons that end at a look contain the true differences."""
    m = truth.shape[0]
    alone = tuple(level / m for level in levels)
    difference, se, df = (some[ends] for some in (compared.difference, compared.se[kind], compared.df[kind]))
    true = np.broadcast_to(truth, compared.difference.shape)[ends]
    if len(sizes) == 1:
        inside = np.abs(difference - true) <= stdtrit(df, 1 - alone[0] / 2) * se
    else:
        inside = np.zeros(len(se), bool)
        for one, (d, error, free, shift) in enumerate(zip(difference, se, np.round(df, 1), true, strict=True)):
            if error > 0:
                to_truth, to_mean = (
                    abs(stagewise_p(sizes, alone, look, (d - at) / error, at / error, free) - 0.5) for at in (shift, d)
                )
                reach = 0.5 - _half_level(sizes, alone, free)
                of_look = abs(d - shift) <= statistics.t_quantile(1 - alone[look] / 2, free) * error
                inside[one] = to_truth < reach if to_mean < reach else of_look
    return np.where(compared.exact[ends], math.nan, inside)


@cache
def _half_level(sizes: tuple[int, ...], levels: tuple[float, ...], df: float) -> float:
    """Return the level of one side of an interval after all looks."""
    return stagewise_p(sizes, levels, len(sizes) - 1, statistics.t_quantile(1 - levels[-1] / 2, df), 0.0, df)


def row(source: Source, sizes: tuple[int, ...], studies: int, seed: int) -> dict[str, list[float]]:
    """Return the numbers of ``HEADS`` by kind of variance, in percent but for the seeds."""
    draws = np.random.default_rng([seed, 17, len(sizes), *source.name.encode()])
    sd = float(source.draw(draws, (400, COMPARISONS + 1, sizes[-1])).std(axis=2, ddof=1).mean())
    step = source.quantum or sd / 1000
    margin = step * round(MARGIN_SD * sd / step)
    values = source.draw(draws, (studies, COMPARISONS + 1, sizes[-1]))
    truth = np.zeros(COMPARISONS)
    truth[0] = source.sign * margin
    values[:, 1] += truth[0]
    outcomes = judged(values, truth, source, margin, sizes)
    mean, spread = values[:, 2].mean(axis=1), values[:, 2].std(axis=1, ddof=1)
    floor = np.maximum(spread, source.quantum / math.sqrt(12)) / math.sqrt(sizes[-1])
    of_mean = np.abs(mean) <= statistics.t_quantile(1 - ALPHA / 2, sizes[-1] - 1) * floor
    for kind in KINDS:
        for study in range(CHECKED):
            own = check(values[study], source.quantum, source.sign, margin, kind, sizes)
            here = [VERDICTS[place] for place in outcomes[kind].verdict[study]]
            if own != here:
                raise RuntimeError(f"{source.name}, {kind}: the report says {own}, the simulation {here}")
    return {kind: _numbers(outcome, of_mean) for kind, outcome in outcomes.items()}


def _numbers(outcome: Outcome, of_mean: NDArray[np.bool_]) -> list[float]:
    shifted, equal = outcome.verdict[:, 0], outcome.verdict[:, 1:]
    wrong = (equal >= 3).any(axis=1) | np.isin(shifted, (1, 2, 4))
    known = ~np.isnan(outcome.holds).all(axis=1)
    holds = ~(outcome.holds[known] == 0).any(axis=1)
    shares = [wrong, holds, of_mean, equal >= 3, equal == 2, equal == 1, equal == 0]
    shares += [shifted == 3, np.isin(shifted, (1, 2, 4)), shifted == 0]
    return [100 * float(some.mean()) if some.size else math.nan for some in shares] + [float(outcome.seeds.mean())]


def cells(numbers: Mapping[str, list[float]]) -> list[str]:
    """Return the cells of a row: own / moderated, or one number where the variance does not matter."""
    both = zip(HEADS, *(numbers[kind] for kind in KINDS), strict=True)
    return [f"{own:.1f}" if head == OF_MEAN else f"{own:.1f} / {shared:.1f}" for head, own, shared in both]
