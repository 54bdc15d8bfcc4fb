"""Summary of a study: one row per arm, with its mean and its difference from the baseline, as JSON values."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from vitlab import statistics
from vitlab.comparison.samples import Sample
from vitlab.comparison.study import Comparison, judge_study
from vitlab.plan.values import Plan
from vitlab.report.comparison_columns import MEANINGS
from vitlab.report.frame import GROUPS, STATUSES
from vitlab.report.study_results import StudyResults
from vitlab.spec import Analysis
from vitlab.store.result import Ending

if TYPE_CHECKING:
    import pandas as pd


@dataclass
class ArmData:
    """The trials of an arm, as columns of the results."""

    name: str
    baseline: str | None
    seeds: list[int] = field(default_factory=list)
    statuses: list[str] = field(default_factory=list)
    trials: list[str] = field(default_factory=list)
    sizes: list[tuple[float, float]] = field(default_factory=list)  #: parameters and MACs
    images: list[float] = field(default_factory=list)
    wall_s: list[float] = field(default_factory=list)
    tested: list[float] = field(default_factory=list)  #: test metric of the same name, if the results have it

    def lost(self, values: Mapping[int, float]) -> list[int]:
        """Return the seeds that diverged or failed, or lack a finite value that other seeds of the arm have."""
        lost = dict(zip(self.trials[::-1], zip(self.seeds[::-1], self.statuses[::-1], strict=True), strict=True))
        return [
            seed
            for seed, status in reversed(lost.values())
            if seed not in values
            and (status in (Ending.DIVERGED, Ending.FAILED) or (status == Ending.DONE and bool(values)))
        ]

    @property
    def open_seeds(self) -> set[int]:
        """Return the seeds whose trial has not ended."""
        return {s for s, status in zip(self.seeds, self.statuses, strict=True) if status in ("running", "missing")}


def arm_data(results: StudyResults) -> dict[str, ArmData]:
    """Return the trials of each arm."""
    frame, test = results.frame, _test_column(results.plan.analysis)
    columns = [frame[name].tolist() for name in ("arm", "baseline", "seed", "status", "trial")]
    for name in ("params", "macs", "images", "wall_s", test):
        in_frame = (
            frame[name].to_numpy(dtype=float, na_value=math.nan) if name in frame else np.full(len(frame), math.nan)
        )
        columns.append(in_frame.tolist())
    arms: dict[str, ArmData] = {}
    for arm, baseline, seed, status, trial, params, macs, images, wall_s, tested in zip(*columns, strict=True):
        data = arms.setdefault(str(arm), ArmData(str(arm), baseline if isinstance(baseline, str) else None))
        data.seeds.append(int(seed))
        data.statuses.append(str(status))
        data.trials.append(str(trial))
        data.sizes.append((params, macs))
        data.images.append(images)
        data.wall_s.append(wall_s)
        data.tested.append(tested)
    return arms


def summary(results: StudyResults, refused: Mapping[str, str] = {}) -> list[dict[str, Any]]:
    """Return one row per arm, in JSON values: its mean and its difference from the baseline.

    Columns are those of :func:`column_names`, whatever has been measured.  What is missing is None; infinities are the
    texts ``inf`` and ``-inf``, because JSON has no number for them.

    Args:
        results: the results.
        refused: arm to a reason why its comparison is refused, in addition to those of its prerequisites.
    """
    arms = arm_data(results)
    comparisons = compare(results, arms, refused)
    compared = {arm: comparison.baseline for arm, comparison in comparisons.items()}
    return [_row(data, results, comparisons.get(arm), compared) for arm, data in arms.items()]


def compare(
    results: StudyResults, arms: Mapping[str, ArmData], refused: Mapping[str, str] = {}
) -> dict[str, Comparison]:
    """Return the comparison of every arm that has a baseline."""
    values = results.values
    compared = {arm: data.baseline for arm, data in arms.items() if data.baseline is not None}
    names = dict.fromkeys([*arms, *compared.values()])
    samples = {
        arm: Sample(
            values.get(arm, {}),
            arms[arm].lost(values.get(arm, {})) if arm in arms else (),
            results.overlap.get(arm, 0.0),
            results.images.get(arm, {}),
        )
        for arm in names
    }
    awaited = awaited_trials(results.plan, arms, compared)
    return judge_study(results.plan, compared, samples, quantum=results.quantum, refused=refused, awaited=awaited)


def awaited_trials(plan: Plan, arms: Mapping[str, ArmData], compared: Mapping[str, str]) -> dict[str, int]:
    """Return the number of trials per comparison that have not ended, those of its latest look included."""
    counts = {}
    for arm, baseline in compared.items():
        sides = [arms[name] if name in arms else ArmData(name, None) for name in (arm, baseline)]
        seeds = [side.open_seeds for side in sides]
        if plan.looks is not None:
            due = set(plan.looks.seeds[plan.looks.number(arm)])
            # Seeds of a look that has just become due may not be planned yet.
            seeds = [still & due | due - set(side.seeds) for still, side in zip(seeds, sides, strict=True)]
        counts[arm] = sum(map(len, seeds))
    return counts


def column_names(analysis: Analysis) -> list[str]:
    """Return the columns of :func:`summary`, which depend on the study's metric alone.

    They are those of ``MEANINGS``, followed by the mean of the test metric of the same name and its standard deviation
    (``test/NAME``, ``test/NAME_sd``), unless a table of other programs does not say which split its metric is of.
    """
    test = _test_column(analysis)
    return [*MEANINGS, *([test, f"{test}_sd"] if test else [])]


def summary_frame(rows: Sequence[Mapping[str, Any]], analysis: Analysis) -> pd.DataFrame:
    """Return the rows of :func:`summary` as a frame."""
    import pandas as pd

    columns = column_names(analysis)
    return pd.DataFrame(rows, columns=columns).astype({name: _type(name) for name in columns})


def _row(
    data: ArmData, results: StudyResults, comparison: Comparison | None, compared: Mapping[str, str]
) -> dict[str, Any]:
    """Return the row of an arm, given all comparisons as arm to baseline."""
    plan = results.plan
    analysis, facts = plan.analysis, plan.facts(plan.analysis.metric)
    values = results.values.get(data.name, {})
    mean = statistics.mean_interval(
        [*values.values()], analysis.alpha, results.quantum, results.overlap_of([data.name])
    )
    lowest, highest = (None, None) if facts is None else facts.bounds
    row: dict[str, Any] = {"arm": data.name, "baseline": data.baseline, "planned": len(data.seeds)}
    row |= {status: data.statuses.count(status) for status in STATUSES}
    row |= {"n": mean.n, "mean": mean.mean, "sd": mean.sd}
    row["low"] = mean.low if lowest is None else max(mean.low, lowest)
    row["high"] = mean.high if highest is None else min(mean.high, highest)
    of_images = [results.images[data.name][seed] for seed in values if seed in results.images.get(data.name, {})]
    row["split_sd"] = statistics.split_sd(np.array(of_images)) if len(of_images) > 1 else math.nan
    if comparison is not None:
        row |= comparison_columns(comparison, plan)
        collapsed = set(comparison.collapsed)
    else:
        beside = [name for name, baseline in compared.items() if baseline == data.name]
        group = {name: results.values.get(name, {}) for name in (data.name, *beside)}
        collapsed = set(statistics.collapsed_seeds(group, 1 if analysis.goal == "max" else -1)[data.name])
    sound = [value for seed, value in values.items() if seed not in collapsed]
    row["collapsed"] = len(collapsed)
    row["sound_mean"] = float(np.mean(sound)) if collapsed else math.nan
    row |= dict(zip(("params", "macs"), np.fmax.reduce(np.array(data.sizes)), strict=True))
    row["wall_s"] = float(np.nansum(data.wall_s))
    speeds = [images / wall_s for images, wall_s in zip(data.images, data.wall_s, strict=True) if wall_s > 0]
    speeds = [speed for speed in speeds if math.isfinite(speed)]
    row["images_per_s"] = float(np.median(speeds)) if speeds else math.nan
    if test := _test_column(analysis):
        tested = [x for seed, x in zip(data.seeds, data.tested, strict=True) if seed in values and not math.isnan(x)]
        with np.errstate(invalid="ignore"):  # infinite values have no deviation
            row[test] = float(np.mean(tested)) if tested else math.nan
            row[f"{test}_sd"] = float(np.std(tested, ddof=1)) if len(tested) > 1 else math.nan
    return {name: _json_value(row.get(name), _type(name)) for name in column_names(analysis)}


def comparison_columns(comparison: Comparison, plan: Plan) -> dict[str, Any]:
    """Return the columns of a comparison."""
    contrast, filled = comparison.contrast, comparison.with_chance
    names = ["verdict", "complete_verdict", "refused", "exploratory", "registered", "family", "look", "awaited"]
    row = {name: getattr(comparison, name) for name in [*names, "sound_difference", "choice_sd", "decidable"]}
    names = ["test", "shared", "pairs", "difference", "p", "p_corrected"]
    names += ["equal_low", "equal_high", "p_equal", "p_equal_corrected"]
    row |= {name: getattr(contrast, name) for name in names}
    row |= {f"difference_{name}": getattr(contrast, name) for name in ("sd", "se", "df", "low", "high")}
    row |= {"looks": len(plan.alpha_shares), "broken": comparison.lost, "collapsed_pairs": contrast.collapsed}
    row |= dict(zip(("new_images_low", "new_images_high"), comparison.new_images, strict=True))
    if filled is not None:
        row |= {f"chance_{name}": getattr(filled, name) for name in ("difference", "low", "high")}
        row |= {"chance": comparison.chance, "chance_p": filled.p_corrected, "chance_p_equal": filled.p_equal_corrected}
    return row


def _test_column(analysis: Analysis) -> str | None:
    """Return the test metric of the same name as the metric, if the metric says which split it is of."""
    split, _, name = analysis.metric.partition("/")
    return f"test/{name}" if split in GROUPS else None


def _type(column: str) -> str:
    """Return the type of a column of :func:`summary`."""
    return MEANINGS[column][0] if column in MEANINGS else "float64"


def _json_value(value: Any, kind: str) -> str | int | float | bool | None:
    """Return a value of a column of a type as a JSON value, see :func:`summary`."""
    if value is None or kind == "string":
        return None if value is None else str(value)
    if math.isnan(value):
        return None
    if math.isinf(value):
        return str(float(value))
    return float(value) if kind == "float64" else bool(value) if kind == "boolean" else int(value)
