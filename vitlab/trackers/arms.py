"""Arms in an experiment of their own: mean, standard deviation and interval over seeds, a run for each.

Beside the trials they would be averaged in.  What is judged is the report's own row, read from ``report.json`` and not
computed again; of all other final values the mean and interval are those of :mod:`vitlab.statistics`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from vitlab.plan.values import Arm, Plan
from vitlab.store.folders import Store, read_json
from vitlab.trackers import dashboard, records, service
from vitlab.trackers.address import Address
from vitlab.trackers.description import NOTE
from vitlab.trackers.tracked_trials import Shown

FINISHED = "FINISHED"
OWN = ("mean", "sd", "low", "high", "n")
COMPARED = (
    *("difference", "difference_low", "difference_high", "p", "p_corrected", "effect", "detectable", "better"),
    *("planned", "diverged", "failed"),
)
"""Columns of the report's summary that stand beside them."""


def judged(report: Sequence[Path], metric: str) -> dict[str, dict[str, float]]:
    """Arm to what the report says of it; empty where there is no report."""
    file = next((path for path in report if path.name == "report.json"), None)
    doc = read_json(file) if file is not None else None
    found: dict[str, dict[str, float]] = {}
    for row in doc["arms"] if doc else ():
        points = {f"{what}/{metric}": row.get(what) for what in (*OWN, *COMPARED)}
        known = {records.key(name): float(value) for name, value in points.items() if value is not None}
        found[str(row["arm"])] = {name: value for name, value in known.items() if math.isfinite(value)}
    return found


def finals(plan: Plan, store: Store, trials: Iterable[Shown]) -> dict[str, dict[str, list[float]]]:
    """Arm to metric to the values of its seeds, of the trials that are done, for all metrics but the judged one."""
    values: dict[str, dict[str, list[float]]] = {}
    for item in trials:
        trial = item.planned.trial
        folder = store.trial(trial.key, trial.code)
        result = folder.result() if item.kind == "trial" and folder.done() else None
        if result is None or result.status != "done":
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
    """Bring the experiment of summaries up to the report.

    A run that holds other numbers than those of now is replaced: MLflow would keep the old ones beside the new.

    Args:
        client: MLflow's client.
        address: where.
        root: tells this output folder from others that deliver to the same server.
        plan: the study.
        summary: see :func:`judged`.
        others: see :func:`finals`.
        varied: names of the parameters that differ between arms.

    Returns:
        the id of the experiment.
    """
    name = f"{plan.study}/arms"
    tags = {"vitlab.study": plan.study}
    tags[NOTE] = (
        f"Arms of {plan.study} over their seeds: mean, standard deviation (sd), and the "
        f"{1 - plan.analysis.alpha:.0%} t-interval of the mean (low, high) over n seeds. What is said of "
        f"{plan.analysis.metric}, differences and corrected p values among it, is the report's."
    )
    experiment = service.experiment(client, name, address, name, tags)
    mine = [run for run in service.runs(client, experiment) if run.data.tags.get("vitlab.root") == root]
    there: dict[str, Any] = {}
    for run in mine:
        arm = run.data.tags.get("arm", "")
        if arm in there or arm not in summary:
            client.delete_run(run.info.run_id)
        else:
            there[arm] = run
    colours, names = records.colours(plan), set[str]()
    for arm in plan.arms:
        if arm.name not in summary:
            continue
        points = {**records.arm_points(others.get(arm.name, {}), plan.analysis.alpha), **summary[arm.name]}
        names |= set(points)
        tags = {"arm": arm.name, "vitlab.kind": "arm", "vitlab.study": plan.study, "vitlab.root": root}
        tags |= {"mlflow.runColor": colours[arm.name], dashboard.ORDER: records.order(plan, arm.name)}
        run = there.get(arm.name)
        if run is not None:
            same = run.data.metrics == points and tags.items() <= run.data.tags.items()
            if same and run.info.status == FINISHED:
                continue
            client.delete_run(run.info.run_id)
        _run(client, experiment, arm, points, tags)
    headline = plan.analysis.metric
    charts = dashboard.summary_sections(names, headline)
    columns = [f"metrics.`{what}/{headline}`" for what in (*OWN, "difference", "p_corrected")]
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
