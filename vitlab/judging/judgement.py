"""``vitlab.judge``: the comparison of arms in results from elsewhere, as the report of a study makes it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, get_args

import numpy as np

from vitlab.comparison import Verdict
from vitlab.errors import UserError, format_count, nearest
from vitlab.judging import criterion
from vitlab.judging.criterion import MAX_IMAGES, ColumnUnit
from vitlab.judging.files import (
    Columns,
    Remarks,
    Table,
    are_metric_values,
    frame_to_table,
    read_table,
    shortlist,
    spell_options_for_caller,
)
from vitlab.judging.trainings import Trainings, add_column_mistakes, read_trainings
from vitlab.planning.values import Arm, Looks, MetricFacts, Plan, why_no_block_average
from vitlab.registry.options import check_arguments
from vitlab.report.comparison import summary_rows
from vitlab.report.frame import StudyResults
from vitlab.report.notes import notes_from_values
from vitlab.report.report import Report
from vitlab.report.sections import Findings
from vitlab.spec import Analysis
from vitlab.spec.choice import Goal, OverBlocks
from vitlab.statistics.power import sequential_levels
from vitlab.store.result import Ending

if TYPE_CHECKING:
    import pandas as pd

    from vitlab.report.notebook import Comparison

OWN_COLUMNS = ("arm", "baseline", "seed", "trial", "status", "params", "macs", "images", "wall_s")
"""Columns of the frame that is compared, beside the metric."""
UNREGISTERED = "These comparisons were not registered before their results were known."


@check_arguments(unchecked=("results", "goal", "over_blocks"))
def judge(
    results: pd.DataFrame | str | Path,
    *,
    metric: str | None = None,
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
    looks: Sequence[int] | None = None,
    over_blocks: OverBlocks | None = None,
) -> Comparison:
    """Compare the arms of results from elsewhere with one of them, as the report of a study does.

    ``results`` has a row per training, or a column per arm and a row per seed::

        comparison = vitlab.judge("results.csv", metric="acc", arm="model", seed="seed")
        print(comparison.render())

    The frame has one row per arm, in units of the table, and ``.answers``, ``.notes`` and ``.figures``, as the frame of
    :func:`vitlab.compare`.

    Args:
        results: a frame, the path of a table (.csv, .tsv, .json, .jsonl, .parquet, .xlsx), or the URI of an MLflow
            experiment, such as ``sqlite:///mlflow.db#NAME``.
        metric: the column of the metric; of a table with a column per arm, its name.  It is needed.
        arm: the column of the arms; by default the one that is called so, or else every column is an arm.
        seed: the column of the seeds, which pair the arms; by default the one that is called so.
        block: the column of data sets or of other blocks; arms are compared within each, and over all of them.
        baseline: the arm that the others are compared with; by default the one of this name, or else the first.
        baselines: the column of the arm that each is compared with, empty where there is none, in place of
            ``baseline``.
        goal: direction in which the metric is better; by default the one that its name tells.
        margin: largest difference that counts as none, in units of the column or as in ``0.5 points``.
        alpha: family-wise error rate.
        images: number of images that the metric counts, from which its smallest step follows.
        chance: what guesses reach, in units of the column, such as 10 in percent of 10 classes; seeds without a
            value are judged with it.
        looks: numbers of seeds at which results were looked at before more seeds were added, such as ``[3, 5, 10]``.
        over_blocks: what is averaged over blocks: ``difference``, by default of shares and percents, or ``relative``
            to the baseline's error.

    Raises:
        UserError: with a sentence for every mistake in the table and in the arguments.
    """
    from vitlab.report.notebook import Comparison

    remarks = Remarks(str(results) if isinstance(results, str | Path) else "results")
    metric = metric or ""
    columns = Columns(metric, arm, seed, block, baselines)
    option_checks = {
        f"--goal {goal}: allowed: max, min": goal in (None, "max", "min"),
        f"--alpha {alpha}: a number between 0 and 0.5 is allowed": 0 < alpha < 0.5,
        f"--images {images}: a number from 1 to 10^12 is allowed": images is None or 1 <= images <= MAX_IMAGES,
        f"--looks {', '.join(map(str, looks or ()))}: growing numbers of seeds from 2 are allowed": (
            looks is None or (min(looks, default=0) >= 2 and [*looks] == sorted({*looks}))
        ),
        f"--over-blocks {over_blocks}: allowed: {', '.join(get_args(OverBlocks))}": (
            over_blocks in (None, *get_args(OverBlocks))
        ),
        "--over-blocks needs --block": over_blocks is None or block is not None,
        "--looks: with --block, every arm needs its seeds in every block; remove it": looks is None or block is None,
    }
    mistakes = remarks.of_options
    mistakes += [sentence for sentence, is_valid in option_checks.items() if not is_valid]
    table = _read_results(results, columns, remarks)
    names = [*table.rows.columns]
    if arm is None and names.count("arm") == 1 and (metric in names or not are_metric_values(table.rows["arm"])):
        columns = replace(columns, arm="arm")
        remarks.notes.append("Arms are those of column 'arm'.")
    if baselines is not None and (baseline is not None or columns.arm is None):
        mistakes.append(
            "--baselines names a column beside the one of the arms, --arm, and cannot be combined with --baseline; "
            "remove one"
        )
    add_column_mistakes(table, columns, remarks)
    goal = goal or criterion.infer_goal(metric)
    if goal is None and metric and (columns.arm is None or metric in names):
        mistakes.append(f"'{metric}' does not tell whether higher or lower is better; say it by --goal, max or min")
    remarks.raise_if_table_has_mistakes()
    trainings = read_trainings(table, columns, remarks)
    is_sound = not remarks.of_table
    compared = _choose_baselines(trainings, baseline, remarks)
    scale = criterion.infer_column_unit(metric, trainings.frame, trainings.is_percent, remarks)
    if not is_sound:  # margin and chance are in a unit that other values may change
        raise remarks.error()
    margin = criterion.parse_margin(margin, metric, scale.whole, mistakes)
    if chance is not None and not (math.isfinite(chance) and (scale.whole is None or 0 <= chance <= scale.whole)):
        mistakes.append(f"--chance {chance:g} is no value of '{metric}'; write it in units of the column")
    quantum = criterion.quantum_in_units(images, metric, scale, remarks)
    seeds = trainings.frame["seed"].nunique()
    if looks and not trainings.is_paired:
        mistakes.append("--looks: looks are at seeds; name their column with --seed")
    elif looks and looks[-1] != seeds:
        mistakes.append(f"--looks: the last look is at all seeds, {seeds}; found {looks[-1]}")
    # The column keeps its name, as only that says which split it is of, unless the frame has a column of that name.
    column = f"metric/{metric}" if metric in OWN_COLUMNS else metric
    if mistakes:  # an analysis cannot hold a wrong option
        raise remarks.error()
    analysis = Analysis(metric=column, goal=goal or "max", alpha=alpha, over_blocks=over_blocks)
    low = None if trainings.frame["value"].min() < 0 else 0.0
    unit, bounds = (scale.unit, (low, None)) if scale.whole is None else ("share", scale.bounds)
    if block is not None and (fault := why_no_block_average(analysis, unit, bounds)):
        mistakes.append(f"--over-blocks: {fault}")
    if mistakes or remarks.of_table:
        raise remarks.error()
    plan = _reconstruct_plan(trainings, compared, analysis.model_copy(update={"margin": margin}), scale, chance)
    own = trainings.frame[["arm", "seed", "status", "value"]].rename(columns={"value": column})
    own = own.assign(baseline=own["arm"].map(compared), trial=np.arange(len(own)))
    frame = own.astype({"arm": "string", "baseline": "string"})  # as of vitlab.report.frame.results
    if looks:
        plan = _with_judged_looks(plan, frame, looks, quantum)
    of_study = StudyResults(plan, frame, quantum=quantum)
    rows = summary_rows(of_study)
    paired = (row for row in rows if row["p"] is not None and row["pairs"] > 1)
    if tests := dict.fromkeys(f"{row['test']} over {row['pairs']} pairs" for row in paired):
        remarks.notes.append(f"Test at equal seeds: {shortlist([*tests])}.")
    # Without seeds, a note of the table says that no arm is paired.
    from_values = [note for note in notes_from_values(of_study, rows) if trainings.is_paired or "Welch" not in note]
    report = Report.from_findings(Findings(of_study, rows), from_values)
    notes = (
        *remarks.notes,
        *report.notes,
        *_notes_on_lost_and_best_values(trainings, metric, chance),
        UNREGISTERED,
    )
    return Comparison.of(replace(report, notes=tuple(map(spell_options_for_caller, notes))))


def _read_results(results: pd.DataFrame | str | Path, columns: Columns, remarks: Remarks) -> Table:
    """Read a table from a frame, a file or an experiment, and take its notes and its source into the remarks.

    Raises:
        UserError: if it cannot be read, with the other mistakes.
    """
    try:
        if not isinstance(results, str | Path):
            table = frame_to_table(results)
        elif "://" in str(results):
            from vitlab.judging.experiment import read_experiment

            table = read_experiment(str(results), columns)
        else:
            table = read_table(Path(results))
    except UserError as error:
        raise remarks.error(str(error)) from None
    remarks.source = table.source
    remarks.notes += table.notes
    return table


def _reconstruct_plan(
    trainings: Trainings, compared: Mapping[str, str], analysis: Analysis, scale: ColumnUnit, chance: float | None
) -> Plan:
    """Return the plan of a study that would have given these trainings."""
    arms, blocks, name = trainings.frame["arm"].unique().tolist(), trainings.blocks, trainings.table.name
    against = dict.fromkeys(arm.removeprefix(f"{blocks[arm]}: ") for arm in compared.values())
    reached = {} if chance is None else dict.fromkeys(arms, chance)
    facts = MetricFacts(analysis.goal, scale.unit, scale.bounds, chance=reached)
    return Plan(
        study=name,
        question=f"{name}: which arms differ from {' or '.join(against) or arms[0]}?",
        arms=tuple(Arm(arm, {}, compared.get(arm), block=blocks[arm]) for arm in arms),
        trials=(),
        analysis=analysis,
        metrics=dict.fromkeys((analysis.metric, analysis.metric.rpartition("/")[2]), facts),
    )


def _choose_baselines(trainings: Trainings, baseline: str | None, remarks: Remarks) -> Mapping[str, str]:
    """Return arm to the arm that it is compared with."""
    arms, blocks = trainings.frame["arm"].unique().tolist(), trainings.blocks
    compared = trainings.baselines
    if compared is None:
        names = {arm: arm.removeprefix(f"{block}: ") for arm, block in blocks.items()}
        if baseline is None:
            baseline = "baseline" if "baseline" in names.values() else names[arms[0]]
            if len(arms) > 1 and baseline != "baseline":
                remarks.notes.append(f"Compared with '{baseline}', the first arm; --baseline names another.")
        compared = {
            arm: f"{blocks[arm]}: {baseline}" if blocks[arm] else baseline for arm in arms if names[arm] != baseline
        }
        if baseline in names.values():
            for block in dict.fromkeys(blocks[arm] for arm, name in compared.items() if name not in arms):
                remarks.notes.append(f"Warning: nothing is compared in '{block}', which has no '{baseline}'.")
            compared = {arm: name for arm, name in compared.items() if name in arms}
    for name in dict.fromkeys(compared.values()):
        if name not in arms:
            remarks.add_mistakes(f"no arm '{name}'.{nearest(name, arms)} Arms: {shortlist(arms)}.")
    return compared


def _with_judged_looks(plan: Plan, frame: pd.DataFrame, sizes: Sequence[int], quantum: float) -> Plan:
    """Return the plan with a look at the first seeds of each size; each look judges what the looks before left open."""
    alpha, compared = plan.analysis.alpha, sum(arm.baseline is not None for arm in plan.arms)
    shares = [level / alpha for level in sequential_levels(tuple(sizes), alpha, max(1, compared))]
    seeds = sorted(frame["seed"].unique().tolist())
    looks = Looks(tuple(tuple(seeds[:size]) for size in sizes), tuple(shares))
    for size in sizes[:-1]:
        so_far = frame[frame["seed"].isin(seeds[:size])]
        rows = summary_rows(StudyResults(replace(plan, looks=looks), so_far, quantum=quantum))
        undecided = tuple(row["arm"] for row in rows if row["verdict"] == Verdict.CANNOT_TELL)
        if not undecided:
            break
        looks = replace(looks, open=(*looks.open, undecided))
    return replace(plan, looks=looks)


def _notes_on_lost_and_best_values(trainings: Trainings, metric: str, chance: float | None) -> Iterator[str]:
    """Yield notes about trainings without a value, and about values that are the best of several."""
    losses = trainings.frame[trainings.frame["status"] != Ending.DONE]
    labels = [
        f"{arm}, {f'seed {name}' if trainings.is_paired else trainings.table.row_label(row)}"
        for row, arm, name in losses[["arm", "name"]].itertuples()
    ]
    if labels:
        yield f"Warning: {format_count(len(losses), 'lost seed')}, without a value: {shortlist(labels)}."
    if labels and chance is None:
        yield (
            "A verdict must also hold with guesses in the place of lost seeds: say by --chance what they reach, "
            "such as 10 for percents of 10 classes, or 0.1 for fractions."
        )
    if not {"best", "max"}.isdisjoint(criterion.split_words(metric)):
        yield (
            f"Warning: '{metric}' seems to be the best of several values. The best is optimistic, the more so the more "
            "values there are, and arms with different numbers of them cannot be compared."
        )
