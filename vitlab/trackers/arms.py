"""Experiment of arm summaries: one run per arm with mean, standard deviation and interval over seeds.

The summaries have their own experiment, because MLflow would average them with the trials.  The values of the study's
metric are read from ``report.json``; of all other final metrics, there are means and standard deviations.
"""

from __future__ import annotations

import math
import statistics
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from vitlab.plan.values import Arm, Plan
from vitlab.store.files import mapping, read_json
from vitlab.store.folders import Store
from vitlab.store.result import Ending
from vitlab.trackers import dashboard, records, service
from vitlab.trackers.replay import TrackedTrial
from vitlab.trackers.trials import FINISHED

if TYPE_CHECKING:
    from mlflow import MlflowClient

OWN = ("mean", "sd", "low", "high", "n")
COMPARED = (
    *("difference", "difference_low", "difference_high", "p", "p_corrected", "effect", "detectable", "better"),
    *("planned", "diverged", "failed"),
)
"""Further columns of the report's summary."""

Points = dict[str, float]  #: metric to value


def summaries(plan: Plan, store: Store, trials: Iterable[TrackedTrial], report: Sequence[Path]) -> dict[str, Points]:
    """Return the values over the seeds of each arm, by arm; empty if there is no report."""
    file = next((path for path in report if path.name == "report.json"), None)
    content = read_json(file, mapping) if file is not None else None
    if content is None:
        return {}
    points = _other_metrics(plan, store, trials)
    headline = plan.analysis.metric
    for row in content["arms"]:
        own = points[str(row["arm"])]
        for column in (*OWN, *COMPARED):
            if row.get(column) is not None and math.isfinite(row[column]):
                own[records.key(f"{column}/{headline}")] = float(row[column])
    return {arm.name: points[arm.name] for arm in plan.arms if arm.name in points}


def deliver(
    client: MlflowClient, experiment: str, root: str, plan: Plan, points: Mapping[str, Points], varied: Sequence[str]
) -> int:
    """Update the experiment of summaries, and return the number of runs written.

    A run with outdated numbers is replaced, because MLflow would keep the old values beside the new ones.

    Args:
        client: MLflow's client.
        experiment: id of the experiment.
        root: identifies this output folder among those that deliver to the same server.
        plan: the study.
        points: values by arm, see :func:`summaries`.
        varied: names of the parameters that differ between arms.
    """
    colours = records.colours(plan)
    outdated = [run for run in service.runs(client, experiment) if run.data.tags.get("vitlab.root") == root]
    writes = 0
    for arm in plan.arms:
        if arm.name not in points:
            continue
        tags = {"arm": arm.name, "vitlab.kind": "arm", "vitlab.study": plan.study, "vitlab.root": root}
        tags |= {"mlflow.runColor": colours[arm.name], dashboard.ORDER: records.order(plan, arm.name)}
        for run in outdated:
            same = run.data.metrics == points[arm.name] and tags.items() <= run.data.tags.items()
            if same and run.info.status == FINISHED:
                outdated.remove(run)
                break
        else:
            _write_run(client, experiment, arm, points[arm.name], tags)
            writes += 1
    for run in outdated:
        client.delete_run(run.info.run_id)
    headline = plan.analysis.metric
    view = dashboard.View(
        "Arms with their intervals",
        "arm",
        dashboard.sections(
            set().union(*points.values()), headline, [f"{name}/{headline}" for name in OWN], [("Means", ("mean/",))]
        ),
        columns=[f"metrics.`{column}/{headline}`" for column in (*OWN, "difference", "p_corrected")],
        axes=(varied, [f"mean/{headline}", f"sd/{headline}"]),
    )
    dashboard.save(client, experiment, {dashboard.SUMMARY: view})
    return writes


def note(plan: Plan) -> str:
    """Return the description of the experiment."""
    return (
        f"**Arms of {plan.study} over their seeds**\n\nMean and standard deviation (sd) over n seeds. Values of "
        f"{plan.analysis.metric}, with intervals (low, high), differences and corrected p values, are those of the "
        "report."
    )


def _other_metrics(plan: Plan, store: Store, trials: Iterable[TrackedTrial]) -> defaultdict[str, Points]:
    """Return mean and standard deviation of the final metrics but the study's, by arm."""
    values: dict[tuple[str, str], list[float]] = defaultdict(list)
    for item in trials:
        trial = item.planned.trial
        result = store.trial(trial.key, trial.code).result() if item.kind == "trial" else None
        if result is not None and result.status == Ending.DONE:
            for metric, value in result.outcome.metrics.items():
                if metric != plan.analysis.metric and math.isfinite(value):
                    values[item.planned.arm, metric].append(value)
    points: defaultdict[str, Points] = defaultdict(dict)
    for (arm, metric), seeds in values.items():
        summary = {"mean": statistics.fmean(seeds), "n": float(len(seeds))}
        if len(seeds) > 1:
            summary["sd"] = statistics.stdev(seeds)
        points[arm] |= {records.key(f"{statistic}/{metric}"): value for statistic, value in summary.items()}
    return points


def _write_run(client: MlflowClient, experiment: str, arm: Arm, points: Points, tags: Mapping[str, str]) -> None:
    """Write the run of an arm."""
    from mlflow.entities import Metric, Param

    run = client.create_run(experiment, tags=dict(tags), run_name=arm.name).info.run_id
    now = int(time.time() * 1000)
    params = [Param("arm", arm.name), *(Param(key, text) for key, text in records.flat(arm.values).items())]
    client.log_batch(run, [Metric(name, value, now, 0) for name, value in points.items()], params)
    client.set_terminated(run, FINISHED)
