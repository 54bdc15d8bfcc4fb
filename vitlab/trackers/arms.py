"""Experiment of arm summaries: one run per arm with mean, standard deviation and interval over seeds.

The summaries have their own experiment, because MLflow would average them with the trials.  The values of the study's
metric are read from ``report.json``; those of all other final metrics come from :mod:`vitlab.statistics`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from vitlab.plan.values import Arm, Plan
from vitlab.store.files import read_json
from vitlab.store.folders import Store
from vitlab.store.result import Ending
from vitlab.trackers import dashboard, records, service
from vitlab.trackers.address import Address
from vitlab.trackers.description import NOTE
from vitlab.trackers.replay import TrackedTrial

FINISHED = "FINISHED"
OWN = ("mean", "sd", "low", "high", "n")
COMPARED = (
    *("difference", "difference_low", "difference_high", "p", "p_corrected"),
    *("planned", "diverged", "failed"),
)
"""Further columns of the report's summary."""


def report_points(report: Sequence[Path], metric: str) -> dict[str, dict[str, float]]:
    """Return the report's values of each arm by metric name; empty if there is no report."""
    file = next((path for path in report if path.name == "report.json"), None)
    doc = read_json(file) if file is not None else None
    points_by_arm: dict[str, dict[str, float]] = {}
    for row in doc["arms"] if doc else ():
        points = {f"{column}/{metric}": row.get(column) for column in (*OWN, *COMPARED)}
        present = {records.key(name): float(value) for name, value in points.items() if value is not None}
        points_by_arm[str(row["arm"])] = {name: value for name, value in present.items() if math.isfinite(value)}
    return points_by_arm


def finals(plan: Plan, store: Store, trials: Iterable[TrackedTrial]) -> dict[str, dict[str, list[float]]]:
    """Return the final values over the seeds of each arm, by arm and metric, without the study's metric."""
    values: dict[str, dict[str, list[float]]] = {}
    for item in trials:
        trial = item.planned.trial
        folder = store.trial(trial.key, trial.code)
        result = folder.result() if item.kind == "trial" and folder.done() else None
        if result is None or result.status != Ending.DONE:
            continue
        for name, value, _, _ in records.final_points(result, plan.analysis):
            group, _, metric = name.partition("/")
            if group == "final" and metric != plan.analysis.metric:
                values.setdefault(item.planned.arm, {}).setdefault(metric, []).append(value)
    return values


def deliver(
    client: Any,
    address: Address,
    root: str,
    plan: Plan,
    *,
    summary: Mapping[str, Mapping[str, float]],
    others: Mapping[str, Mapping[str, Sequence[float]]],
    varied: Sequence[str],
) -> str:
    """Update the experiment of summaries to match the report.

    A run with outdated numbers is replaced, because MLflow would keep the old values beside the new ones.

    Args:
        client: MLflow's client.
        address: the destination.
        root: identifies this output folder among those that deliver to the same server.
        plan: the study.
        summary: see :func:`report_points`.
        others: see :func:`finals`.
        varied: names of the parameters that differ between arms.

    Returns:
        The id of the experiment.
    """
    name = f"{plan.study}/arms"
    tags = {"vitlab.study": plan.study}
    tags[NOTE] = (
        f"Arms of {plan.study} over their seeds: mean, standard deviation (sd), and the "
        f"{1 - plan.analysis.alpha:.0%} t-interval of the mean (low, high) over n seeds. Values of "
        f"{plan.analysis.metric}, with differences and corrected p values, are those of the report."
    )
    experiment = service.experiment(client, name, address, name, tags)
    own_runs = [run for run in service.runs(client, experiment) if run.data.tags.get("vitlab.root") == root]
    existing: dict[str, Any] = {}
    for run in own_runs:
        arm = run.data.tags.get("arm", "")
        if arm in existing or arm not in summary:
            client.delete_run(run.info.run_id)
        else:
            existing[arm] = run
    colours, names = records.colours(plan), set[str]()
    splits = len({item.trial.seeds.get("split") for item in plan.trials})
    for arm in plan.arms:
        if arm.name not in summary:
            continue
        means = records.arm_points(others.get(arm.name, {}), plan.analysis.alpha, splits)
        points = {**means, **summary[arm.name]}
        names |= set(points)
        tags = {"arm": arm.name, "vitlab.kind": "arm", "vitlab.study": plan.study, "vitlab.root": root}
        tags |= {"mlflow.runColor": colours[arm.name], dashboard.ORDER: records.order(plan, arm.name)}
        run = existing.get(arm.name)
        if run is not None:
            same = run.data.metrics == points and tags.items() <= run.data.tags.items()
            if same and run.info.status == FINISHED:
                continue
            client.delete_run(run.info.run_id)
        _run(client, experiment, arm, points, tags)
    headline = plan.analysis.metric
    charts = dashboard.summary_sections(names, headline)
    columns = [f"metrics.`{column}/{headline}`" for column in (*OWN, "difference", "p_corrected")]
    axes = dashboard.Parallel(varied[: dashboard.AXES], [f"mean/{headline}", f"sd/{headline}"])
    state = dashboard.comparison(charts, columns=columns, kind="arm", parallel=axes)
    dashboard.save(client, experiment, {dashboard.SUMMARY: ("Arms with their intervals", state)})
    return experiment


def _run(client: Any, experiment: str, arm: Arm, points: Mapping[str, float], tags: Mapping[str, str]) -> None:
    from mlflow.entities import Metric, Param

    run = client.create_run(experiment, tags=dict(tags), run_name=arm.name).info.run_id
    now = int(time.time() * 1000)
    params = [Param("arm", arm.name), *(Param(key, text) for key, text in records.flat(arm.values).items())]
    client.log_batch(run, metrics=[Metric(name, value, now, 0) for name, value in points.items()], params=params)
    client.set_terminated(run, FINISHED)
