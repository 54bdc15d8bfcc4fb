"""``vitlab.judge``: the comparison of arms in results from elsewhere, as the report of a study makes it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from vitlab.comparison.verdict import Verdict
from vitlab.errors import UserError, count, nearest
from vitlab.judging.cells import Remarks, names_of, shortlist, texts
from vitlab.judging.criterion import Criterion, chance_in_units, goal_of, margin_in_units, quantum_in_units, scale_of
from vitlab.judging.files import Table, read_table, table_of_frame
from vitlab.judging.trainings import Trainings, check_columns, read_trainings
from vitlab.judging.words import role_of, words
from vitlab.plan.values import Arm, Looks, MetricFacts, Plan
from vitlab.report.comparison import summary
from vitlab.report.document import Content
from vitlab.report.notes import table_notes
from vitlab.report.study_results import StudyResults
from vitlab.spec import Analysis
from vitlab.spec.choice import Goal
from vitlab.store.result import Ending

if TYPE_CHECKING:
    import pandas as pd

    from vitlab.report.notebook import Comparison

OWN_COLUMNS = ("arm", "baseline", "seed", "trial", "status", "params", "macs", "images", "wall_s")
"""Columns of the frame that is compared, beside the metric."""
UNREGISTERED = "These comparisons were not registered before their results were known."


@dataclass(frozen=True)
class Judgement:
    """The comparison of the arms of a table: answers, a frame, and reports in several formats."""

    content: Content

    @property
    def answers(self) -> list[str]:
        """The answers, one sentence per comparison."""
        return self.compare().answers

    @property
    def notes(self) -> tuple[str, ...]:
        """What else a reader has to know, one sentence each."""
        return tuple(self.content.report.notes)

    def compare(self) -> Comparison:
        """Return one row per arm in the columns of :func:`vitlab.compare`, in units of the table."""
        from vitlab.report.notebook import Comparison

        return Comparison.of(self.content.report)

    def render(self, format: str = "terminal") -> str | bytes:
        """Return the report in a format, see :func:`vitlab.report.render`; bytes for parquet, otherwise text.

        Raises:
            UserError: if there is no such format.
        """
        return self.content.render(format)

    def _repr_html_(self) -> str:
        return self.compare()._repr_html_()


def judge(
    results: pd.DataFrame | str | Path,
    *,
    metric: str,
    arm: str | None = None,
    seed: str | None = None,
    block: str | None = None,
    baseline: str | None = None,
    baselines: str | None = None,
    goal: Goal | None = None,
    margin: float | str | None = None,
    alpha: float = 0.05,
    images: int | None = None,
    chance: float | None = None,
    classes: int | None = None,
    looks: Sequence[int] | None = None,
) -> Judgement:
    """Compare the arms of results from elsewhere with one of them, as the report of a study does.

    ``results`` has a row per training, or a column per arm and a row per seed::

        judgement = vitlab.judge("results.csv", metric="acc", arm="model", seed="seed")
        print(judgement.render())

    Args:
        results: a frame, the path of a table (.csv, .tsv, .json, .jsonl, .parquet, .xlsx), or the URI of an MLflow
            experiment, such as ``sqlite:///mlflow.db#NAME``.
        metric: the column of the metric; of a table with a column per arm, its name.
        arm: the column of the arms; without it, every column is an arm.
        seed: the column of the seeds, which pair the arms; by default the one that is called so.
        block: the column of data sets or other blocks; not judged yet.
        baseline: the arm that the others are compared with; by default the one of this name, or else the first.
        baselines: the column of the arm that each is compared with, empty where there is none, in place of
            ``baseline``.
        goal: direction in which the metric is better; by default the one that its name tells.
        margin: largest difference that counts as none, in units of the column or as in ``0.5 points``.
        alpha: family-wise error rate.
        images: number of images that the metric counts, from which its smallest step follows.
        chance: what guesses reach, in units of the column; seeds without a value are judged with it.
        classes: number of classes, from which ``chance`` follows for accuracies and errors.
        looks: numbers of seeds at which results were looked at before more seeds were added, such as ``[3, 5, 10]``.

    Raises:
        UserError: with a sentence for every mistake in the table and in the arguments.
    """
    remarks = Remarks("results" if not isinstance(results, str | Path) else str(results))
    _check_options(remarks, alpha=alpha, goal=goal, images=images, classes=classes, looks=looks)
    if block is not None:
        remarks.option("block is not judged yet; judge the rows of one block at a time")
    if baselines is not None and (baseline is not None or arm is None):
        other = "a column per arm" if arm is None else "--baseline"
        remarks.option(f"--baselines names a column, and cannot be combined with {other}; remove one")
    try:
        table = _table(results, metric, arm, seed, baselines)
    except UserError as error:
        raise remarks.error(str(error)) from None
    remarks.source = table.source
    remarks.notes += table.notes
    direction = goal or goal_of(metric)
    _check_columns(table, remarks, metric, arm, seed, baselines)
    if direction is None and (arm is None or metric in table.rows):
        remarks.option(f"'{metric}' does not tell whether higher or lower is better; add --goal max or --goal min")
    remarks.check()
    trainings = read_trainings(table, remarks, metric=metric, arm=arm, seed=seed, baselines=baselines)
    compared = _comparisons(trainings, baseline, remarks)
    scale = scale_of(metric, trainings.frame, trainings.is_percent, remarks)
    criterion = Criterion(
        direction or "max",
        scale,
        margin_in_units(margin, metric, scale, remarks),
        chance_in_units(chance, classes, metric, scale, remarks),
        quantum_in_units(images, metric, scale, remarks),
    )
    if looks and not (trainings.is_paired and looks[-1] == trainings.frame["seed"].nunique()):
        seeds = trainings.frame["seed"].nunique()
        remarks.option(f"--looks: the last look is at all seeds, {seeds}, and they need a column")
    remarks.check_all()
    content = _compare(trainings, compared, metric, criterion, alpha, looks or ())
    notes = (
        *remarks.notes,
        *content.report.notes,
        *_lost_seeds(trainings),
        *_single_values(trainings, metric),
        UNREGISTERED,
    )
    return Judgement(replace(content, report=replace(content.report, notes=notes)))


def _check_options(
    remarks: Remarks,
    *,
    goal: str | None,
    alpha: float,
    images: int | None,
    classes: int | None,
    looks: Sequence[int] | None,
) -> None:
    if goal not in (None, "max", "min"):
        remarks.option(f"--goal {goal}: allowed are max and min")
    if not 0 < alpha < 0.5:
        remarks.option(f"--alpha {alpha}: a number between 0 and 0.5 is allowed")
    if images is not None and images < 1:
        remarks.option(f"--images {images}: a number from 1 is allowed")
    if classes is not None and classes < 2:
        remarks.option(f"--classes {classes}: a number from 2 is allowed")
    if looks is not None and (not looks or looks[0] < 2 or any(b <= a for a, b in itertools.pairwise(looks))):
        remarks.option(f"--looks {', '.join(map(str, looks))}: growing numbers of seeds from 2 are allowed")


def _table(
    results: pd.DataFrame | str | Path, metric: str, arm: str | None, seed: str | None, baselines: str | None
) -> Table:
    if not isinstance(results, str | Path):
        return table_of_frame(results)
    if "://" in str(results):
        from vitlab.judging.experiment import read_experiment

        return read_experiment(str(results), metric=metric, arm=arm, seed=seed, baselines=baselines)
    return read_table(Path(results))


def _check_columns(
    table: Table, remarks: Remarks, metric: str, arm: str | None, seed: str | None, baselines: str | None
) -> None:
    if arm is not None:
        check_columns(table, remarks, arm, seed, baselines, metric)
        return
    check_columns(table, remarks, seed)
    if metric in table.rows:
        others = [name for name in names_of(table.rows) if name != metric and role_of(name) is None]
        remarks.mistake(f"'{metric}' is a column: name the column of the arms with --arm (found: {shortlist(others)})")


def _comparisons(trainings: Trainings, baseline: str | None, remarks: Remarks) -> Mapping[str, str]:
    """Return arm to the arm that it is compared with."""
    arms = trainings.frame["arm"].unique().tolist()
    compared = trainings.baselines
    if compared is None:
        if baseline is None:
            baseline = "baseline" if "baseline" in arms else arms[0]
            if len(arms) > 1 and baseline != "baseline":
                remarks.notes.append(f"Compared with '{baseline}', the first arm; --baseline names another.")
        compared = {arm: baseline for arm in arms if arm != baseline}
    for name in dict.fromkeys(compared.values()):
        if name not in arms:
            remarks.mistake(f"no arm '{name}'.{nearest(name, arms)} Arms: {shortlist(arms)}.")
    return compared


def _compare(
    trainings: Trainings,
    compared: Mapping[str, str],
    metric: str,
    criterion: Criterion,
    alpha: float,
    looks: Sequence[int],
) -> Content:
    """Compare the arms; of several looks, each is at the first seeds, and the next one judges what it leaves open."""
    # The column keeps its name, as only that says which split it is of, unless the frame has a column of that name.
    column = f"metric/{metric}" if metric in OWN_COLUMNS else metric
    arms, name = trainings.frame["arm"].unique().tolist(), trainings.table.name
    chance = {} if criterion.chance is None else dict.fromkeys(arms, criterion.chance)
    facts = MetricFacts(criterion.goal, criterion.scale.unit, criterion.scale.bounds, chance=chance)
    plan = Plan(
        study=name,
        question=f"{name}: which arms differ from {' or '.join(dict.fromkeys(compared.values())) or arms[0]}?",
        arms=tuple(Arm(arm, {}, compared.get(arm)) for arm in arms),
        trials=(),
        analysis=Analysis(metric=column, goal=criterion.goal, margin=criterion.margin, alpha=alpha),
        metrics={column.rpartition("/")[2]: facts},
    )
    frame = _results(trainings.frame, column, compared)
    if looks:
        from vitlab.statistics import sequential_levels

        shares = [level / alpha for level in sequential_levels(tuple(looks), alpha, max(1, len(compared)))]
        seeds = sorted(frame["seed"].unique().tolist())
        plan = replace(plan, looks=Looks(tuple(tuple(seeds[:size]) for size in looks), tuple(shares)))
    for size in looks[:-1]:
        assert plan.looks is not None
        seen = frame[frame["seed"].isin(seeds[:size])]
        open_arms = [
            row["arm"]
            for row in summary(StudyResults(plan, seen, quantum=criterion.quantum))
            if row["verdict"] == Verdict.CANNOT_TELL
        ]
        if not open_arms:
            break
        plan = replace(plan, looks=replace(plan.looks, open=(*plan.looks.open, tuple(open_arms))))
    results = StudyResults(plan, frame, quantum=criterion.quantum)
    rows = summary(results)
    return Content.of(results, rows, table_notes(results, rows))


def _results(frame: pd.DataFrame, column: str, compared: Mapping[str, str]) -> pd.DataFrame:
    """Return trainings as a frame of :func:`vitlab.report.frame.results`."""
    import pandas as pd

    absent = pd.array([pd.NA], dtype="Int64").take([0] * len(frame))
    return pd.DataFrame(
        {
            "arm": frame["arm"].astype("string").array,
            "baseline": frame["arm"].map(compared).astype("string").array,
            "seed": frame["seed"].array,
            "trial": np.arange(len(frame)),
            "status": frame["status"].array,
            column: frame["value"].array,
            **dict.fromkeys(("params", "macs", "images"), absent),
            "wall_s": math.nan,
        }
    )


def _lost_seeds(trainings: Trainings) -> list[str]:
    """Return a note that names the trainings without a value."""
    lost = trainings.frame[trainings.frame["status"] != Ending.DONE]
    if lost.empty:
        return []
    labels = [
        f"{arm}, {f'seed {name}' if trainings.is_paired else trainings.table.place(row)}"
        for row, arm, name in lost[["arm", "name"]].itertuples()
    ]
    return [f"Warning: {count(len(lost), 'lost seed')}, without a value: {shortlist(labels)}."]


def _single_values(trainings: Trainings, metric: str) -> list[str]:
    """Return notes about arms with one value, and about values that are the best of several."""
    import pandas as pd

    rows, counts = trainings.table.rows, trainings.frame["arm"].value_counts(sort=False)
    lines = []
    if single := [*counts[counts == 1].index]:
        arms = shortlist(single)
        lines.append(f"Warning: one value of {arms}: no spread, no interval, no test. 3 seeds or more can be judged.")
        for name in (name for name in names_of(rows) if role_of(name) == "count"):
            if (pd.to_numeric(texts(rows[name]), errors="coerce") > 1).any():
                lines.append(
                    f"Warning: column '{name}' says that values stand for several trainings; their mean or best has no "
                    "spread that can be judged; a table with a row per training has."
                )
    if not {"best", "max"}.isdisjoint(words(metric)):
        lines.append(
            f"Warning: '{metric}' seems to be the best of several values. The best is optimistic, the more so the more "
            "values there are, and arms with different numbers of them cannot be compared."
        )
    return lines
