"""Scaling laws, Pareto fronts and interactions of a study's arms.

All are computed from the summary and the results.  None belongs to the study's family of comparisons: claims that need
a correction form families of their own.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vitlab import statistics
from vitlab.plan.design import text
from vitlab.plan.values import Arm, Plan
from vitlab.report import costs
from vitlab.report.frame import joint_overlap, metric_column, usable

if TYPE_CHECKING:
    import pandas as pd

Row = Mapping[str, Any]

SIZES = {"params": "parameters", "macs": "MACs per image", "images": "training images seen"}
COSTS = {"params": "parameters", "macs": "MACs per image", **costs.COST_COLUMNS}
"""Cost columns with their labels.  Speed counts only if measured for each arm alone: trials share their machine."""
SPAN = 2.0  #: smallest ratio of largest to smallest size for a fit
APART = 1.05  #: smallest ratio of largest to smallest cost for a front


@dataclass(frozen=True)
class Scaling:
    """A power law of an error or a loss over one size, through arms that differ only in numbers."""

    size: str  #: a key of ``SIZES``
    series: str  #: the values that distinguish the series; empty for a single series
    arms: tuple[str, ...]
    law: statistics.PowerLaw


def scalings(plan: Plan, frame: pd.DataFrame) -> list[Scaling]:
    """Fit a power law per size and series that has enough arms.

    The fitted quantity is the metric itself if less is better, otherwise one minus the metric.
    """
    points = _sizes(plan, frame)
    laws = []
    for size in SIZES:
        sized = {arm.name: points[arm.name][size] for arm in plan.arms if size in points.get(arm.name, {})}
        arms = [arm for arm in plan.arms if arm.name in sized]
        series_paths = _series_paths(plan, arms, sized, size)
        series: dict[str, list[Arm]] = {}
        for arm in arms:
            series.setdefault(", ".join(_label(path, arm.values.get(path)) for path in series_paths), []).append(arm)
        for label, members in series.items():
            at: dict[float, list[float]] = {}
            for arm in members:
                at.setdefault(sized[arm.name], []).extend(as_error(plan, value) for value in points[arm.name]["values"])
            if len(at) < statistics.scaling.MIN_SIZES or max(at) < SPAN * min(at):
                continue
            law = statistics.power_law(at, plan.analysis.alpha)
            if law is not None:
                names = tuple(arm.name for arm in members)
                laws.append(Scaling(size, label if len(series) > 1 else "", names, law))
    return laws


def as_error(plan: Plan, value: float) -> float:
    """Return a value as an error: a loss unchanged, an accuracy as one minus it."""
    return value if plan.analysis.goal == "min" else 1 - value


def fronts(plan: Plan, rows: Sequence[Row]) -> dict[str, dict[str, bool]]:
    """Return for each cost whether each arm is on the Pareto front of that cost and the result.

    A cost is left out if fewer than two arms have it, or if its largest value is below ``APART`` times its smallest.
    """
    on_front = {}
    for cost in COSTS:
        comparable = [row for row in rows if row["mean"] is not None and row.get(cost) is not None and row[cost] > 0]
        if len(comparable) < 2 or max(row[cost] for row in comparable) < APART * min(row[cost] for row in comparable):
            continue
        cost_values = [-row[cost] if cost in costs.SPEEDS else row[cost] for row in comparable]
        results = [row["mean"] if plan.analysis.goal == "max" else -row["mean"] for row in comparable]
        is_on_front = statistics.pareto(cost_values, results)
        on_front[cost] = {row["arm"]: on for row, on in zip(comparable, is_on_front, strict=True)}
    return on_front


def front_shares(plan: Plan, frame: pd.DataFrame, rows: Sequence[Row]) -> dict[str, dict[str, float]]:
    """Return for each cost how often each arm is on its front if the means are drawn anew from their spread.

    Costs of which an arm has a single seed are left out.
    """
    values, sign = usable(frame, plan.analysis), 1 if plan.analysis.goal == "max" else -1
    by_arm = {row["arm"]: row for row in rows}
    shares = {}
    for cost, on_front in fronts(plan, rows).items():
        costs_of = [by_arm[arm][cost] * (-1 if cost in costs.SPEEDS else 1) for arm in on_front]
        signed = [{seed: sign * value for seed, value in values[arm].items()} for arm in on_front]
        results = statistics.pareto_shares(costs_of, signed)
        if all(math.isfinite(share) for share in results):
            shares[cost] = dict(zip(on_front, results, strict=True))
    return shares


def interactions(plan: Plan, frame: pd.DataFrame) -> list[dict[str, Any]]:
    """Return the two-way interactions of a grid: for every two paths and pair of levels, against the reference levels.

    The reference is the first arm without a baseline.  Effects are means, at each seed, over all settings
    of the other paths at which the four arms exist; they form a family of their own.  Values are in the
    unit of the metric.
    """
    values = usable(frame, plan.analysis)
    paths = plan.paths
    arms = {_at(paths, arm): arm.name for arm in plan.arms if not arm.skip}
    reference = next((arm for arm in plan.arms if arm.baseline is None and not arm.skip), None)
    if reference is None or len(paths) < 2:
        return []
    reference_levels = _at(paths, reference)
    levels = [list(dict.fromkeys(key[index] for key in arms)) for index in range(len(paths))]
    effects: list[tuple[str, str, str, list[dict[int, float]]]] = []
    for (i, first), (j, second) in itertools.combinations(enumerate(paths), 2):
        for a, b in itertools.product(levels[i], levels[j]):
            squares = (
                list(_squares(arms, i, j, (a, reference_levels[i]), (b, reference_levels[j])))
                if a != reference_levels[i] and b != reference_levels[j]
                else []
            )
            if squares:
                cells = [_mean([values.get(square[corner], {}) for square in squares]) for corner in range(4)]
                effects.append(
                    (
                        f"{first}={a}",
                        f"{second}={b}",
                        f"{first}={reference_levels[i]}, {second}={reference_levels[j]}",
                        cells,
                    )
                )
    share = 1 / len(plan.alpha_shares)  # interactions are tested at every look
    level = statistics.simultaneous_alpha(share * plan.analysis.alpha, len(effects), plan.analysis.correction)
    overlap = joint_overlap(frame, arms.values())
    contrasts = [statistics.interaction(*cells, alpha=level, overlap=overlap) for *_, cells in effects]
    p = statistics.adjust_p_values([contrast.p for contrast in contrasts], plan.analysis.correction, share)
    return [
        {"first": first, "second": second, "against": against, "pairs": contrast.pairs, "family": len(effects)}
        | _numbers({"difference": contrast.difference, "low": contrast.low, "high": contrast.high})
        | _numbers({"p": contrast.p, "p_corrected": after})
        for (first, second, against, _), contrast, after in zip(effects, contrasts, p, strict=True)
    ]


def document(plan: Plan, frame: pd.DataFrame, rows: Sequence[Row]) -> dict[str, Any]:
    """Return scaling laws, fronts and interactions as JSON values."""
    laws = []
    for scaling in scalings(plan, frame):
        law = {
            name: getattr(scaling.law, name) for name in ("scale", "exponent", "exponent_low", "exponent_high", "r2")
        }
        laws.append({"size": scaling.size, "series": scaling.series, "arms": list(scaling.arms), **_numbers(law)})
    return {
        "scaling": laws,
        "fronts": fronts(plan, rows),
        "front_shares": front_shares(plan, frame, rows),
        "interactions": interactions(plan, frame),
    }


def notes(plan: Plan, frame: pd.DataFrame, rows: Sequence[Row], content: Mapping[str, Any]) -> list[str]:
    """Return caveats about fronts, power laws and interactions, given :func:`document`."""
    lines = []
    sections = {"fronts": "fronts", "scaling": "power laws", "interactions": "interactions"}
    titles = [name for key, name in sections.items() if content[key]]
    incomplete = [row["arm"] for row in rows if row["diverged"] + row["failed"]]
    if incomplete and titles:
        lines.append(
            f"Warning: some seeds of {'; '.join(incomplete)} diverged or failed, and {' and '.join(titles)} are of the "
            "others alone, with nothing in their place."
        )
    perfect = [
        arm for arm, facts in _sizes(plan, frame).items() if any(as_error(plan, x) <= 0 for x in facts["values"])
    ]
    if perfect and not content["scaling"] and len(perfect) < len(rows):
        lines.append(f"No power law: {'; '.join(perfect)} reached an error of 0, which has no logarithm.")
    return lines


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _label(path: str, value: Any) -> str:
    return f"{path.rpartition('.')[2]}={text(value)}" if _is_number(value) else text(value)


def _series_paths(plan: Plan, arms: Sequence[Arm], sized: Mapping[str, float], size: str) -> list[str]:
    """Return the varied paths that separate arms into series: non-numeric paths, and numbers unrelated to size.

    A number is unrelated if it changes while the size does not: arms of two learning rates are not replicates of one
    size.  The number of images seen is unrelated to every number of the model.
    """
    paths = plan.paths
    selected = {path for path in paths if not all(_is_number(arm.values.get(path)) for arm in arms)}
    if size == "images":
        selected |= {path for path in paths if path.partition(".")[0] == "model"}
    by_size: dict[float, list[Arm]] = {}
    for arm in arms:
        by_size.setdefault(sized[arm.name], []).append(arm)
    for first, second in itertools.chain(*(itertools.combinations(group, 2) for group in by_size.values())):
        differing = [path for path in paths if first.values.get(path) != second.values.get(path)]
        if len(differing) == 1:
            selected.add(differing[0])
    return [path for path in paths if path in selected]


def _at(paths: Sequence[str], arm: Arm) -> tuple[str, ...]:
    return tuple(text(arm.values.get(path)) for path in paths)


def _sizes(plan: Plan, frame: pd.DataFrame) -> dict[str, dict[str, Any]]:
    """Return the sizes and the judged values of each arm."""
    values = usable(frame, plan.analysis)
    by_arm: dict[str, dict[str, Any]] = {}
    for arm, rows in frame[frame[metric_column(plan.analysis)].notna()].groupby("arm", sort=False):
        sizes = {size: float(rows[size].iloc[0]) for size in SIZES if rows[size].notna().any()}
        by_arm[str(arm)] = {**sizes, "values": list(values[str(arm)].values())}
    return by_arm


def _squares(
    arms: Mapping[tuple[str, ...], str], i: int, j: int, first: tuple[str, str], second: tuple[str, str]
) -> Iterator[tuple[str, str, str, str]]:
    """Yield sets of four arms: both changes, the first, the second, neither; other paths are equal within a set."""
    for key in arms:
        if (key[i], key[j]) != (first[0], second[0]):
            continue
        corners = []
        for a, b in ((0, 0), (0, 1), (1, 0), (1, 1)):
            other = list(key)
            other[i], other[j] = first[a], second[b]
            corners.append(arms.get(tuple(other)))
        if all(corner is not None for corner in corners):
            yield tuple(corners)  # type: ignore[misc]


def _mean(sides: Sequence[Mapping[int, float]]) -> dict[int, float]:
    """Return seed to mean over several arms, for the seeds that all of them have."""
    seeds = set.intersection(*(set(side) for side in sides))
    return {seed: sum(side[seed] for side in sides) / len(sides) for seed in sorted(seeds)}


def _numbers(values: Mapping[str, float]) -> dict[str, float | None]:
    return {name: None if math.isnan(value) else value for name, value in values.items()}
