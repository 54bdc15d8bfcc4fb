"""Scaling: how the error falls with the size of the model or the number of images, where the study asks for that."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from vitlab.explaining.colours import SERIES
from vitlab.planning.match import is_number
from vitlab.planning.values import Arm
from vitlab.report.drawing import NARROW, Drawing, apply_style, empty_figure, format_ticks_without_exponents, wrap_line
from vitlab.report.frame import StudyResults
from vitlab.report.phrasing import DASH, MINUS, Columns, Scale, percent
from vitlab.report.sections import Findings, Section, Table, section
from vitlab.spec.design import format_value
from vitlab.statistics import scaling
from vitlab.statistics.scaling import Estimate

if TYPE_CHECKING:
    from vitlab.report.report import Report

SIZES = {"params": "parameters", "macs": "MACs per image", "images": "training images seen"}
PLAIN = Scale("", 1.0, "", "")  #: of slopes and exponents
SPAN = 2.0  #: smallest ratio of largest to smallest size for a fit


@dataclass(frozen=True)
class Scaling:
    """The law of an error or a loss over size, through arms that differ only in numbers, see :class:`scaling.Law`.

    An end of an interval is None if there is none: seeds are too few, or every larger exponent fits.
    """

    size: str  #: params, macs or images
    series: str  #: the values that distinguish the series; empty for a single series
    arms: tuple[str, ...]  #: the arms of the series
    seeds: int  #: number of seeds that all sizes have
    slope: float  #: slope of the line through the logarithms of error and size
    slope_low: float | None  #: its interval, by t over seeds
    slope_high: float | None  #: its upper end
    offset: float | None  #: error that is left at any size; missing below five sizes, and if the error does not fall
    offset_low: float | None  #: its interval
    offset_high: float | None  #: its upper end
    exponent: float | None  #: exponent of the law with this offset; missing as the offset is
    exponent_low: float | None  #: its interval
    exponent_high: float | None  #: its upper end; missing where every larger one fits
    steepens: bool = False  #: whether the error falls the faster, the larger the size

    @property
    def levels_off(self) -> bool:
        """True if the sizes show an offset."""
        return self.offset_low is not None and self.offset_low > 0


@section.register("scaling")
class ScalingLaws(Section[Scaling]):
    """Laws of the error or the loss over the size that the study names."""

    heading = "Scaling"
    place = 40
    row = Scaling
    of_seeds = True

    def rows(self, findings: Findings) -> Iterator[Scaling]:
        for label, arms in _arms_by_series(findings.results).items():
            points = _errors_by_size(findings.results, arms)
            if _reason_against_law(points, ""):
                continue
            overlap = findings.results.largest_val_train_ratio(arm.name for arm in arms)
            if law := scaling.fit_law(points, findings.plan.analysis.alpha, overlap):
                seeds = len(set.intersection(*(set(by_seed) for by_seed in points.values())))
                size, names = str(findings.plan.analysis.power_law), tuple(arm.name for arm in arms)
                ends = (
                    *_value_and_finite_ends(law.slope)[1:],
                    *_value_and_finite_ends(law.offset),
                    *_value_and_finite_ends(law.exponent),
                )
                yield Scaling(size, label, names, seeds, law.slope.value, *ends, law.steepens)

    def notes(self, rows: Sequence[Scaling], findings: Findings) -> Iterator[str]:
        size = findings.plan.analysis.power_law
        if size is None:
            return
        scale, fitted = findings.scale, {row.series for row in rows}
        for label, arms in _arms_by_series(findings.results).items():
            if label not in fitted:
                because = (
                    _reason_against_law(_errors_by_size(findings.results, arms), SIZES[size])
                    or "no seed has a value at every size"
                )
                yield f"No law over {SIZES[size]}{f' for {label}' * bool(label)}: {because}."
        for row in rows:
            who = f"For {row.series}, the" if row.series else "The"
            if row.steepens:
                yield f"{who} error falls faster and faster with {SIZES[size]}: no power law describes it."
            elif row.slope_high is None or row.slope_high >= 0:
                yield f"{who} error is not shown to fall with {SIZES[size]}, so no exponent is fitted."
            elif row.offset_high is not None and not row.levels_off:
                most = scale.end(row.offset_high, scale.decimals_for_intervals([row.offset_high / 2]))
                yield (
                    f"{who} sizes cannot tell whether the error keeps falling or levels off: every offset from 0 to "
                    f"{f'{most} {scale.unit}'.rstrip()} fits."
                )

    def table(self, rows: Sequence[Scaling], report: Report) -> Table:
        scale, column = report.scale, Columns(rows)
        interval = f"{percent(1 - report.analysis.alpha)} interval"
        table = [
            column.text_column("arms with", "series"),
            column("sizes", lambda row: str(len(row.arms)), rank=2),
            column("seeds", lambda row: str(row.seeds), rank=2),
            column("slope of the logarithms", lambda row: PLAIN.number(row.slope, 3)),
            column(interval, lambda row: _format_interval(row.slope_low, row.slope_high), rank=1),
        ]
        with_offset = any(row.offset is not None for row in rows)
        if with_offset:
            decimals = scale.decimals_for_intervals([row.offset_high and row.offset_high / 2 for row in rows])
            title = f"offset ({scale.unit})" if scale.unit else "offset"
            table += [
                column(title, lambda row: scale.number(row.offset, decimals)),
                column(interval, lambda row: scale.interval(row.offset_low, row.offset_high, decimals), rank=1),
                column("exponent", lambda row: PLAIN.number(row.exponent, 3)),
                column(interval, lambda row: _format_interval(row.exponent_low, row.exponent_high), rank=1),
            ]
        error = report.analysis.metric if report.analysis.goal == "min" else f"1 {MINUS} {report.analysis.metric}"
        few = scaling.MIN_SIZES_WITH_OFFSET
        law = (
            f"Power law of {error} over {SIZES[rows[0].size]}, fitted to logarithms at seeds that all sizes have; "
            "intervals are Student's t over seeds, each by itself."
        )
        caption = f"{law} The slope describes these sizes"
        if with_offset:
            caption += f"; offset and exponent belong to the law: offset + A \N{MIDDLE DOT} size^{MINUS}exponent"
        elif all(len(row.arms) < few for row in rows):
            caption += f": fewer than {few} cannot show whether the error levels off at larger ones"
        return Table([column for column in table if set(column.cells) != {""}], f"{caption}.", law)

    def figure(self, rows: Sequence[Scaling], findings: Findings) -> Drawing:
        plan, scale = findings.plan, findings.scale
        with apply_style():
            figure = empty_figure(NARROW, 3.4)
            axes = figure.subplots()
            for row, colour in zip(rows, itertools.cycle(SERIES), strict=False):
                points = _errors_by_size(findings.results, [arm for arm in plan.arms if arm.name in row.arms])
                law = scaling.fit_law(points, plan.analysis.alpha, findings.results.largest_val_train_ratio(row.arms))
                assert law is not None
                for size, by_seed in points.items():
                    errors = scale.factor * np.array(list(by_seed.values()))
                    same = np.full(len(errors), size)
                    axes.plot(same, errors, "o", markersize=3, color=colour, markerfacecolor="none")
                    axes.plot(size, math.exp(np.log(errors).mean()), "o", markersize=5.5, color=colour)
                label = f"{wrap_line(row.series, 30)}\n" if row.series else ""
                label += (
                    f"exponent {PLAIN.number(row.exponent, 3)}"
                    if row.levels_off
                    else f"slope {PLAIN.number(row.slope, 3)}"
                )
                x, *ends = law.curve
                y, low, high = scale.factor * np.array(ends)
                axes.plot(x, y, color=colour, linewidth=1.4, label=label)
                axes.fill_between(x, low, high, color=colour, alpha=0.14, linewidth=0)
            axes.set_xscale("log")
            axes.set_yscale("log")
            format_ticks_without_exponents(axes)
            axes.set_xlabel(SIZES[rows[0].size])
            less = "" if plan.analysis.goal == "min" else (f"100 % {MINUS} " if scale.is_share else f"1 {MINUS} ")
            axes.set_ylabel(less + scale.title)
            axes.grid()
            axes.legend()
            error = f"1 {MINUS} {plan.analysis.metric}" if less else plan.analysis.metric
            caption = (
                f"{error} over size, both on logarithmic axes: each seed (small), the geometric mean of each size, and "
                f"the fitted law with its {percent(1 - plan.analysis.alpha)} band, which holds at each size by itself."
            )
            return Drawing(figure, caption)


def _value_and_finite_ends(estimate: Estimate | None) -> tuple[float | None, float | None, float | None]:
    """Return value, low and high, each None where it is missing or infinite."""
    if estimate is None:
        return None, None, None
    low, high = (end if math.isfinite(end) else None for end in (estimate.low, estimate.high))
    return estimate.value, low, high


def _format_interval(low: float | None, high: float | None) -> str:
    """Format an interval; without an upper end every larger value fits."""
    if low is None:
        return DASH
    return f"at least {PLAIN.number(low, 3)}" if high is None else PLAIN.interval(low, high, 3)


def _arm_size(results: StudyResults, arm: str) -> float | None:
    """Return the size of an arm that the study names; None if no trial has it."""
    sizes = results.frame.loc[results.frame["arm"] == arm, str(results.plan.analysis.power_law)].dropna()
    return float(sizes.iloc[0]) if len(sizes) else None


def _errors_by_size(results: StudyResults, arms: Sequence[Arm]) -> dict[float, dict[int, float]]:
    """Return size to seed to error; of arms of equal size, the geometric mean at the seeds that all have."""
    logs: dict[float, dict[int, list[float]]] = {}
    for arm in arms:
        size = _arm_size(results, arm.name)
        if size is not None:
            by_seed = logs.setdefault(size, {})
            for seed, value in results.values.get(arm.name, {}).items():
                error = value if results.plan.analysis.goal == "min" else 1 - value
                by_seed.setdefault(seed, []).append(error)
    return {
        size: {seed: math.prod(errors) ** (1 / len(errors)) for seed, errors in by_seed.items() if min(errors) >= 0}
        for size, by_seed in logs.items()
    }


def _reason_against_law(points: Mapping[float, Mapping[int, float]], size: str) -> str:
    """Return why no law can be fitted to some points; empty if one can."""
    if any(error <= 0 for by_seed in points.values() for error in by_seed.values()):
        return "an error of 0 has no logarithm"
    sizes = [value for value, by_seed in points.items() if by_seed]
    if len(sizes) < scaling.MIN_SIZES:
        return f"it has {len(sizes)} different numbers of {size}, and two lie on every power law"
    if max(sizes) < SPAN * min(sizes):
        return f"the largest number of {size} is less than {SPAN:g} times the smallest"
    return ""


def _arms_by_series(results: StudyResults) -> dict[str, list[Arm]]:
    """Return the arms of each series that is to lie on one law, by label; empty if the study asks for none."""
    plan = results.plan
    if plan.analysis.power_law is None:
        return {}
    sized = {arm.name: at for arm in plan.arms if (at := _arm_size(results, arm.name)) is not None}
    arms = [arm for arm in plan.arms if arm.name in sized]
    paths = [path for path in plan.paths if not all(is_number(arm.values.get(path)) for arm in arms)]
    # A number that alone changes while the size does not parts series, too: arms of two learning rates are not
    # replicates of one size.
    for first, second in itertools.combinations(arms, 2):
        differing = [path for path in plan.paths if first.values.get(path) != second.values.get(path)]
        if len(differing) == 1 and sized[first.name] == sized[second.name]:
            paths += differing
    paths = [path for path in plan.paths if path in paths]
    series: dict[str, list[Arm]] = {}
    for arm in arms:
        series.setdefault(", ".join(_label(path, arm.values.get(path)) for path in paths), []).append(arm)
    return series if len(series) > 1 else {"": arms} if arms else {}


def _label(path: str, value: Any) -> str:
    return f"{path.rpartition('.')[2]}={format_value(value)}" if is_number(value) else format_value(value)
