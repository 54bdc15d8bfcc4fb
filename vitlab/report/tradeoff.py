"""What size and design buy: power laws over arms of different size, the arms that no other dominates, interactions.

All of it is read from the summary and the results; nothing here is judged in the family of the study, and every claim
that needs a correction has a family of its own.
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
from vitlab.report.frame import judged, usable

if TYPE_CHECKING:
    import pandas as pd

Row = Mapping[str, Any]

SIZES = {"params": "parameters", "macs": "MACs per image", "images": "training images seen"}
COSTS = {"params": "parameters", "macs": "MACs per image", **costs.MEASURED}
"""What is traded.  Speed is part of it only where it was measured of each arm alone: trials share their machine."""
SPAN = 2.0  #: largest over smallest size from which on a scaling is worth a fit
APART = 1.05  #: largest over smallest cost from which on there is something to trade


@dataclass(frozen=True)
class Scaling:
    """A power law of an error or a loss over one size, through arms that differ by nothing but numbers."""

    size: str  #: a key of ``SIZES``
    series: str  #: what the arms share and others do not; nothing where there is one series alone
    arms: tuple[str, ...]
    law: statistics.PowerLaw


def scalings(plan: Plan, frame: pd.DataFrame) -> list[Scaling]:
    """Every power law there are arms enough for, one per size and series.

    What falls is fitted: the metric itself where less is better, else what it lacks of one (the error, for shares).
    """
    points = _sizes(plan, frame)
    found = []
    for size in SIZES:
        sized = {arm.name: points[arm.name][size] for arm in plan.arms if size in points.get(arm.name, {})}
        arms = [arm for arm in plan.arms if arm.name in sized]
        named = _told_apart_by(plan, arms, sized, size)
        series: dict[str, list[Arm]] = {}
        for arm in arms:
            series.setdefault(", ".join(_label(path, arm.values.get(path)) for path in named), []).append(arm)
        for label, members in series.items():
            at: dict[float, list[float]] = {}
            for arm in members:
                at.setdefault(sized[arm.name], []).extend(fallen(plan, value) for value in points[arm.name]["values"])
            if len(at) < statistics.scaling.MIN_SIZES or max(at) < SPAN * min(at):
                continue
            law = statistics.power_law(at, plan.analysis.alpha)
            if law is not None:
                names = tuple(arm.name for arm in members)
                found.append(Scaling(size, label if len(series) > 1 else "", names, law))
    return found


def fallen(plan: Plan, value: float) -> float:
    """A value as something that a power law lets fall: a loss as it is, an accuracy as an error."""
    return value if plan.analysis.goal == "min" else 1 - value


def fronts(plan: Plan, rows: Sequence[Row]) -> dict[str, dict[str, bool]]:
    """Return, for every cost in which the arms differ, which arms no other arm beats in both cost and result."""
    found = {}
    for cost in COSTS:
        known = [row for row in rows if row["mean"] is not None and row.get(cost) is not None and row[cost] > 0]
        if len(known) < 2 or max(row[cost] for row in known) < APART * min(row[cost] for row in known):
            continue
        dear = [-row[cost] if cost in costs.SPEEDS else row[cost] for row in known]
        good = [row["mean"] if plan.analysis.goal == "max" else -row["mean"] for row in known]
        stands = statistics.pareto(dear, good)
        found[cost] = {row["arm"]: on for row, on in zip(known, stands, strict=True)}
    return found


def interactions(plan: Plan, frame: pd.DataFrame) -> list[dict[str, Any]]:
    """Two-way effects of a grid: for every two paths and every pair of their levels, beside the reference levels.

    The reference is the first arm that is compared with no other.  Effects are means, at each seed, over all settings
    of the other paths at which the four arms exist; they form a family of their own.  Values are shares of one, or
    whatever the metric is in.
    """
    values = usable(frame, plan.analysis)
    paths = plan.paths
    arms = {_at(paths, arm): arm.name for arm in plan.arms if not arm.skip}
    reference = next((arm for arm in plan.arms if arm.baseline is None and not arm.skip), None)
    if reference is None or len(paths) < 2:
        return []
    at = _at(paths, reference)
    levels = [list(dict.fromkeys(key[index] for key in arms)) for index in range(len(paths))]
    found: list[tuple[str, str, str, list[dict[int, float]]]] = []
    for (i, first), (j, second) in itertools.combinations(enumerate(paths), 2):
        for a, b in itertools.product(levels[i], levels[j]):
            squares = list(_squares(arms, i, j, (a, at[i]), (b, at[j]))) if a != at[i] and b != at[j] else []
            if squares:
                cells = [_mean([values.get(square[corner], {}) for square in squares]) for corner in range(4)]
                found.append((f"{first}={a}", f"{second}={b}", f"{first}={at[i]}, {second}={at[j]}", cells))
    level = statistics.simultaneous_alpha(plan.level, len(found), plan.analysis.correction)
    contrasts = [statistics.interaction(*cells, alpha=level) for *_, cells in found]
    p = statistics.adjust_p_values([contrast.p for contrast in contrasts], plan.analysis.correction, plan.sharing)
    return [
        {"first": first, "second": second, "against": against, "pairs": contrast.pairs, "family": len(found)}
        | _numbers({"difference": contrast.difference, "low": contrast.low, "high": contrast.high})
        | _numbers({"p": contrast.p, "p_corrected": after})
        for (first, second, against, _), contrast, after in zip(found, contrasts, p, strict=True)
    ]


def document(plan: Plan, frame: pd.DataFrame, rows: Sequence[Row]) -> dict[str, Any]:
    """All of it as JSON values."""
    laws = []
    for found in scalings(plan, frame):
        law = {name: getattr(found.law, name) for name in ("scale", "exponent", "exponent_low", "exponent_high", "r2")}
        laws.append({"size": found.size, "series": found.series, "arms": list(found.arms), **_numbers(law)})
    return {"scaling": laws, "fronts": fronts(plan, rows), "interactions": interactions(plan, frame)}


# -- how it is done ---------------------------------------------------------------------------------------------------


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _label(path: str, value: Any) -> str:
    return f"{path.rpartition('.')[2]}={text(value)}" if _is_number(value) else text(value)


def _told_apart_by(plan: Plan, arms: Sequence[Arm], sized: Mapping[str, float], size: str) -> list[str]:
    """The varied paths that part arms into series: whatever is no number, and numbers that are no matter of size.

    A number is none if it changes while the size does not: arms of two learning rates are no replicates of one size.
    Of images seen, no number of the model is.
    """
    paths = plan.paths
    named = {path for path in paths if not all(_is_number(arm.values.get(path)) for arm in arms)}
    if size == "images":
        named |= {path for path in paths if path.partition(".")[0] == "model"}
    alike: dict[float, list[Arm]] = {}
    for arm in arms:
        alike.setdefault(sized[arm.name], []).append(arm)
    for first, second in itertools.chain(*(itertools.combinations(group, 2) for group in alike.values())):
        differing = [path for path in paths if first.values.get(path) != second.values.get(path)]
        if len(differing) == 1:
            named.add(differing[0])
    return [path for path in paths if path in named]


def _at(paths: Sequence[str], arm: Arm) -> tuple[str, ...]:
    return tuple(text(arm.values.get(path)) for path in paths)


def _sizes(plan: Plan, frame: pd.DataFrame) -> dict[str, dict[str, Any]]:
    """Arm to its sizes and its judged values."""
    known = usable(frame, plan.analysis)
    found: dict[str, dict[str, Any]] = {}
    for arm, rows in frame[frame[judged(plan.analysis)].notna()].groupby("arm", sort=False):
        sizes = {size: float(rows[size].iloc[0]) for size in SIZES if rows[size].notna().any()}
        found[str(arm)] = {**sizes, "values": list(known[str(arm)].values())}
    return found


def _squares(
    arms: Mapping[tuple[str, ...], str], i: int, j: int, first: tuple[str, str], second: tuple[str, str]
) -> Iterator[tuple[str, str, str, str]]:
    """Four arms each: both changes, the first alone, the second alone, neither; the other paths are as they are."""
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
    """The mean over several arms at each seed that all of them have."""
    seeds = set.intersection(*(set(side) for side in sides))
    return {seed: sum(side[seed] for side in sides) / len(sides) for seed in sorted(seeds)}


def _numbers(values: Mapping[str, float]) -> dict[str, float | None]:
    return {name: None if math.isnan(value) else value for name, value in values.items()}
