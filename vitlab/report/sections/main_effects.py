"""Main effects of a grid: each level against the baseline's, averaged over the settings of the other factors."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from vitlab.comparison.study import Sample, judge_study, refusals_by_arm
from vitlab.planning.values import Arm
from vitlab.report.comparison import read_samples, with_equal_looks
from vitlab.report.frame import StudyResults
from vitlab.report.phrasing import Columns, difference_columns
from vitlab.report.sections import Findings, Section, Table, finite_or_none, section
from vitlab.report.sections.interactions import Grid

if TYPE_CHECKING:
    from vitlab.report.report import Report

CAVEAT = "P values and intervals are corrected for the main effects alone, a family beside the comparisons of arms."


@dataclass(frozen=True)
class MainEffect:
    """The effect of a level, in the unit of the metric; numbers are None where too few seeds have them."""

    level: str  #: as ``path=value``
    against: str  #: the baseline's level
    settings: int  #: settings of the other factors, over which the difference is averaged
    pairs: int  #: seeds that all of their arms have
    family: int  #: main effects that are corrected together
    verdict: str
    difference: float | None
    low: float | None
    high: float | None
    p_corrected: float | None


@section.register("main_effects")
class MainEffects(Section[MainEffect]):
    """Difference of every level of a grid from the baseline's, averaged over the other factors."""

    heading = "Main effects"
    place = 25
    row = MainEffect

    def rows(self, findings: Findings) -> Iterator[MainEffect]:
        """Return the effect of every level that has the reference's beside it in two settings or more.

        The reference is the first arm without a baseline.  There are none where a comparison of arms is refused, where
        arms were tuned one by one, whose seeds do not know the choice, and over blocks, which may have unlike scales.
        """
        plan = findings.plan
        grid = Grid.from_plan(plan)
        tuned = any(tuning.arm for tuning in plan.tuning)
        if grid is None or tuned or refusals_by_arm(plan) or any(arm.block for arm in plan.arms):
            return
        settings: defaultdict[tuple[str, str], list[Arm]] = defaultdict(list)
        for path, place in grid.factors.items():
            reference = grid.reference[place]
            for levels, arm in grid.arms.items():
                if levels[place] != reference and (other := grid.arm(levels, place)):
                    key = f"{path}={levels[place]}", f"{path}={reference}"
                    settings[key].append(replace(plan.arm(arm), baseline=other))
        effects = {key: arms for key, arms in settings.items() if len(arms) > 1}
        judged = judge_averages(findings.results, [*effects.values()])
        for ((level, against), arms), row in zip(effects.items(), judged, strict=True):
            columns = "difference", "difference_low", "difference_high", "p_corrected"
            numbers = finite_or_none({name: row[name] for name in columns}).values()
            yield MainEffect(level, against, len(arms), row["pairs"], row["family"], str(row["verdict"]), *numbers)

    def table(self, rows: Sequence[MainEffect], report: Report) -> Table:
        column = Columns(rows)
        columns = [
            column.text("level"),
            column.text("compared with", "against", rank=2),
            column("settings", lambda row: str(row.settings), rank=3),
            column("n", lambda row: str(row.pairs), rank=1),
            *difference_columns(rows, report.analysis, report.scale, "main effect"),
            column.text("verdict"),
        ]
        return Table(
            columns,
            "Difference of each level from the baseline's, averaged over the settings of the other factors "
            f"that have both, at the n seeds that all of their arms have; other seeds are left out. {CAVEAT}",
            CAVEAT,
        )


def judge_averages(results: StudyResults, effects: Sequence[Sequence[Arm]]) -> list[dict[str, Any]]:
    """Return the comparison of the average of some arms with the average of their baselines, for each effect.

    Averages are judged as arms are: see :func:`vitlab.comparison.study.judge_study`.
    """
    samples = read_samples(results)

    def average(arms: Iterable[str | None]) -> Sample:
        alike = [samples.get(str(arm), Sample({})) for arm in arms]
        seeds = sorted(set.intersection(*(set(sample.values) for sample in alike)))
        values = {seed: float(np.mean([sample.values[seed] for sample in alike])) for seed in seeds}
        overlap = float(np.max([sample.overlap for sample in alike]))  # NaN if one is not known
        return Sample(values, sorted({seed for sample in alike for seed in sample.lost}), overlap)

    compared, averages = dict[str, str](), dict[str, Sample]()
    for place, arms in enumerate(effects):
        own, others = ([str(getattr(arm, side)) for arm in arms] for side in ("name", "baseline"))
        compared[f"level {place}"] = "; ".join(others)
        averages |= {f"level {place}": average(own), "; ".join(others): average(others)}
    plan = with_equal_looks(results.plan)
    return [*judge_study(plan, compared, averages, quantum=results.quantum).values()]
