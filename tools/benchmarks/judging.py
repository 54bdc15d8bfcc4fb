"""The verdicts of the report on many simulated studies at once, by the functions of ``vitlab.statistics``.

What is compared, and by which test, follows :mod:`vitlab.report.comparison`: Student's t with own or moderated variances,
and the exact sign-flip test where seeds have collapsed or differences do not scatter.  :func:`check` compares the verdicts
with those of the report itself.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import stdtr

from vitlab import statistics
from vitlab.plan.values import Arm, Looks, Plan
from vitlab.report import comparison
from vitlab.report.verdict import decide
from vitlab.spec import Analysis
from vitlab.statistics import counts
from vitlab.statistics.moderation import MIN_SPREAD

Floats = NDArray[np.float64]
Mask = NDArray[np.bool_]
KINDS = ("own", "moderated")
ALPHA = 0.05
VERDICTS = ("cannot tell", "same", "equivalent", "better", "worse")


@dataclass(frozen=True)
class Comparisons:
    """Comparisons with the baseline, with studies along the first axis and arms along the second."""

    difference: Floats
    se: Mapping[str, Floats]  #: by kind of variance
    df: Mapping[str, Floats]
    exact: Mask  #: whether the sign-flip test decides
    collapsed: Mask  #: whether seeds of either arm collapsed
    exact_p: Floats  #: of that test
    joint: Mask  #: for each study, whether all comparisons share their spread


def compare(
    values: Floats, quantum: float = 0.0, sign: int = 1, waiting: Mask | None = None, least_p: float = ALPHA
) -> Comparisons:
    """Compare the arms of every study with its first.

    Args:
        values: of studies, arms and seeds.
        quantum: the step of the metric.
        sign: 1 if larger values are better.
        waiting: comparisons that are judged; the others share nothing.
        least_p: p values above it are not needed: the sign-flip test is left out where it cannot reach it.
    """
    differences = values[:, 1:] - values[:, :1]
    collapsed_arms = _collapsed(values, sign)
    collapsed = collapsed_arms[:, 1:] | collapsed_arms[:, :1]
    scatters = differences.std(axis=2, ddof=1) > MIN_SPREAD
    exact = collapsed | ~scatters
    share = ~exact if waiting is None else ~exact & waiting
    own, se, df, joint = statistics.study_errors(values, quantum / math.sqrt(6), share)
    mean, n = differences.mean(axis=2), values.shape[2]
    exact_p = np.ones(mean.shape)
    if statistics.smallest_sign_flip_p(n) <= least_p:
        # A sum of signed values exceeds their norm with a probability of more than 0.05 (7/32).
        far = n * mean**2 > (differences**2).mean(axis=2)
        for study, arm in zip(*np.nonzero(exact & far & (waiting if waiting is not None else True)), strict=True):
            exact_p[study, arm] = statistics.sign_flip(differences[study, arm])
    own_df = np.full(own.shape, n - 1.0)
    return Comparisons(
        mean, {"own": own, "moderated": se}, {"own": own_df, "moderated": df}, exact, collapsed, exact_p, joint
    )


def _collapsed(values: Floats, sign: int) -> Mask:
    """Return whether seeds of each arm collapsed, as :func:`vitlab.statistics.collapsed_seeds` does."""
    n = values.shape[2]
    distance = sign * (values - np.median(values, axis=2, keepdims=True))
    size = np.abs(distance)
    within = np.median(size, axis=2)
    flat = np.sort(np.where(size > 0, size, np.inf).reshape(len(values), -1), axis=1)
    count = np.isfinite(flat).sum(axis=1)
    rows, middle = np.arange(len(flat)), np.maximum(count - 1, 0)
    common = (flat[rows, middle // 2] + flat[rows, np.minimum(count // 2, flat.shape[1] - 1)]) / 2
    scale = counts.NORMAL_MAD * math.sqrt(n / (n - 1)) * np.maximum(common[:, None], within)
    return np.asarray((distance.min(axis=2) < -counts.COLLAPSED_SD * scale) & (count > 0)[:, None] & (n >= 3))


def first_step(values: Floats, quantum: float, sign: int = 1, alpha: float = ALPHA) -> dict[str, tuple[Floats, Floats]]:
    """Return the differences of every study and the bounds they have to exceed at the first step of the correction.

    Where the sign-flip test decides, the bound is 0 if it is significant, and infinite if not.
    """
    m = values.shape[1] - 1
    compared = compare(values, quantum, sign, least_p=alpha / m)
    nowhere = np.zeros(len(values), bool)
    bounds = {}
    for kind in KINDS:
        joint = compared.joint if kind == "moderated" else nowhere
        bound = statistics.first_step_bounds(compared.se[kind], compared.df[kind], joint, alpha)
        bound[compared.exact] = np.where(compared.exact_p <= alpha / m, 0.0, np.inf)[compared.exact]
        bounds[kind] = (compared.difference, bound)
    return bounds


def verdicts(
    compared: Comparisons, kind: str, margin: float, level: float, sign: int, waiting: Mask
) -> NDArray[np.int_]:
    """Return the verdicts on comparisons with a margin, as places in ``VERDICTS``; decided ones get "cannot tell".

    Args:
        compared: the comparisons.
        kind: of the variances.
        margin: of equivalence.
        level: of this look, for the family.
        sign: see :func:`compare`.
        waiting: the comparisons that earlier looks left open.
    """
    se, df, difference = compared.se[kind], compared.df[kind], compared.difference
    usable = waiting & ~compared.exact
    with np.errstate(divide="ignore", invalid="ignore"):
        p = np.where(usable, 2 * stdtr(df, -np.abs(difference) / se), np.nan)
        above, below = stdtr(df, -(difference + margin) / se), stdtr(df, (difference - margin) / se)
        equal = np.where(usable, np.maximum(above, below), np.nan)
    p = np.where(waiting & compared.exact, compared.exact_p, p)
    p, equal = _corrected(p, equal)
    better = sign * difference > 0
    result = np.where(equal < level, 2, 0)
    result = np.where(p <= level, np.where(better, 3, 4), result)
    same = compared.exact & ~compared.collapsed & (difference == 0)
    return np.where(waiting, np.where(same, 1, result), 0)


def _corrected(p: Floats, equal: Floats) -> tuple[Floats, Floats]:
    """Return corrected p values of all studies, as :func:`vitlab.statistics.adjust_claims` does for one."""
    studies, m = p.shape
    both = np.stack([p, equal], axis=1).reshape(studies, 2 * m)
    order = np.argsort(np.where(np.isnan(both), np.inf, both), axis=1, kind="stable")
    open_claims, largest, rows = np.full((studies, m), 2), np.zeros(studies), np.arange(studies)
    adjusted = np.full(both.shape, np.nan)
    for place in order.T:
        known = ~np.isnan(both[rows, place])
        factor = (open_claims > 0).sum(axis=1)
        largest = np.where(known, np.maximum(largest, both[rows, place] * factor), largest)
        adjusted[rows, place] = np.where(known, np.minimum(largest, 1.0), np.nan)
        open_claims[rows, place % m] -= known
    return adjusted[:, :m], adjusted[:, m:]


def check(
    values: Floats, quantum: float, sign: int, margin: float | None, kind: str, sizes: tuple[int, ...]
) -> list[str]:
    """Return the report's own verdicts on one study, with looks after ``sizes`` seeds."""
    arms = {str(arm): dict(enumerate(row)) for arm, row in enumerate(values.tolist())}
    compared = dict.fromkeys([*arms][1:], "0")
    analysis = Analysis(metric="val/x", variance=kind, margin=margin, goal="max" if sign > 0 else "min")
    looks = None
    if len(sizes) > 1:
        levels = statistics.sequential_levels(sizes, ALPHA, len(compared))
        looks = Looks(tuple(tuple(range(size)) for size in sizes), tuple(level / ALPHA for level in levels))
    planned = tuple(Arm(arm, {}, compared.get(arm)) for arm in arms)
    still = tuple[tuple[str, ...], ...]()
    while True:
        some = None if looks is None else Looks(looks.seeds, looks.shares, still)
        plan = Plan("s", "", planned, (), analysis, looks=some)
        rows = comparison.judge(plan, compared, arms, {}, {}, dict.fromkeys(compared, 0), quantum)
        found = {arm: str(decide(_row(arm, row), analysis)) for arm, row in rows.items()}
        waiting = tuple(arm for arm, verdict in found.items() if verdict == "cannot tell")
        if looks is None or not waiting or len(still) == len(sizes) - 1:
            return [found[arm] for arm in compared]
        still = (*still, waiting)


def _row(arm: str, row: Mapping[str, Any]) -> dict[str, Any]:
    cells = {"arm": arm, "baseline": "0", "p_equal_corrected": None, **row}
    return {name: None if isinstance(cell, float) and math.isnan(cell) else cell for name, cell in cells.items()}
