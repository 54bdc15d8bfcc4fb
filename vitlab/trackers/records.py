"""What a trial looks like in MLflow: names, parameters, tags, points and files, all as plain values.

Metrics of the journal keep their names, their step (optimizer steps done) and the time they were journalled at, so
that delivering them again changes nothing.  Final values stand under ``final/`` at step 0, where MLflow draws bars;
what they cost stands under ``cost/``.
"""

from __future__ import annotations

import csv
import io
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from vitlab.plan.design import text
from vitlab.plan.values import Plan, Planned, Trial
from vitlab.spec import Analysis
from vitlab.store.folders import Event
from vitlab.store.result import Result
from vitlab.trackers.dashboard import LOADED, ORDER

if TYPE_CHECKING:
    import pandas as pd

ABSENT = "-"
"""The value of a parameter that an arm does not have, so that all runs have the same ones."""

TAG_LENGTH, PARAM_LENGTH, KEY_LENGTH = 5000, 5000, 250
SERIES = ("#0072b2", "#d55e00", "#009e73", "#a1508e", "#b07d00", "#3b9bd1", "#7a4a2b", "#1b1e23", "#6e747c", "#cc3311")
"""Colours of arms, told apart by colour-blind readers."""


class Point(NamedTuple):
    """One value of a metric.  ``t`` is in milliseconds since 1970."""

    name: str
    value: float
    t: int
    step: int


def key(name: str) -> str:
    """A name MLflow accepts for a metric, parameter or tag."""
    name = re.sub(r"[^\w\-. :/]", "_", name).strip("/. ")
    parts = [part for part in name.split("/") if part.strip(".")]  # MLflow refuses what a path would leave out
    return "/".join(parts)[:KEY_LENGTH].rstrip("/. ") or "_"


# -- what a trial is --------------------------------------------------------------------------------------------------


def flat(spec: Mapping[str, Any]) -> dict[str, str]:
    """The resolved spec as dotted parameters: a slot stands for its component, its options below it."""
    found: dict[str, str] = {}
    _flatten("", spec, found)
    return {key(path): _clip(value, PARAM_LENGTH) for path, value in found.items()}


def params(trials: Iterable[Trial]) -> dict[str, dict[str, str]]:
    """Parameters of every trial by its key, each with the same names."""
    flattened = {trial.key: flat(trial.spec) for trial in trials}
    names = sorted(set().union(*flattened.values()))
    return {which: {name: own.get(name, ABSENT) for name in names} for which, own in flattened.items()}


def digest(identity: str) -> str:
    """A data set's identity in the 36 characters MLflow has for it."""
    tail = identity.rpartition(":")[2]
    return (tail if len(tail) >= 8 else identity)[:36]


def tags(plan: Plan, planned: Planned, kind: str) -> dict[str, str]:
    """What tells a trial's run apart, and where it comes from.  What stands in no arm has no such tag."""
    trial = planned.trial
    found = {
        **({"arm": planned.arm, "vitlab.arm": planned.arm} if planned.arm else {}),
        "seed": str(planned.seed),
        "vitlab.study": plan.study,
        "vitlab.kind": kind,
        "vitlab.trial": trial.key,
        "vitlab.code": trial.code,
        "vitlab.origins": ", ".join(trial.origins),
        "vitlab.seeds": json.dumps(dict(trial.seeds)),
        ORDER: order(plan, planned.arm, planned.seed),
    }
    found |= {f"vitlab.needs.{role}": needed for role, needed in trial.needs.items()}
    return {name: _clip(value, TAG_LENGTH) for name, value in found.items()}


def order(plan: Plan, arm: str, seed: int = 0) -> str:
    """Sorts runs by seed, and those of one seed as their arms stand in the design; what has no arm comes last."""
    arms = [known.name for known in plan.arms]
    return f"{seed:09d} {arms.index(arm) if arm in arms else len(arms):06d}"


def colours(plan: Plan) -> dict[str, str]:
    """Arm to colour, for pages that do not group."""
    return {arm.name: SERIES[index % len(SERIES)] for index, arm in enumerate(plan.arms)}


# -- what happened ----------------------------------------------------------------------------------------------------


def points(event: Event) -> list[Point]:
    """The points of a ``metrics`` event."""
    step = int(event.body["step"])
    values = {**event.body["metrics"], "progress/epoch": event.body["epoch"], "progress/images": event.body["images"]}
    return [Point(key(name), storable(float(value)), event.t, step) for name, value in values.items()]


def final_points(result: Result, analysis: Analysis) -> list[Point]:
    """Final values and costs, at step 0."""
    around, outcome = result.circumstances, result.outcome
    t = int(around.ended * 1000)
    values = {f"final/{name}": value for name, value in outcome.metrics.items()}
    seen = [moment.metrics[analysis.metric] for moment in outcome.history if analysis.metric in moment.metrics]
    finite = [value for value in seen if math.isfinite(value)]
    if analysis.at == "best" and finite:
        values[f"best/{analysis.metric}"] = (max if analysis.goal == "max" else min)(finite)
    values |= {"cost/params": around.params, "cost/macs": around.macs, "cost/wall_s": around.wall_s}
    values |= {"cost/memory_bytes": around.memory_bytes}
    if around.wall_s > 0:
        values["cost/images_per_s"] = outcome.images / around.wall_s
    return [Point(key(name), storable(float(value)), t, 0) for name, value in values.items()]


def storable(value: float) -> float:
    """The value, or NaN for an infinity: MLflow stores the largest number there is, and a chart shows nothing else."""
    return math.nan if math.isinf(value) else value


def result_tags(result: Result) -> dict[str, str]:
    """How a result came about."""
    around, outcome = result.circumstances, result.outcome
    found = {
        "vitlab.status": result.status,
        "vitlab.host": around.host,
        "vitlab.attempts": str(around.attempts),
        "vitlab.weights": outcome.weights,
    }
    moments = [outcome.metrics, *(moment.metrics for moment in outcome.history)]
    strange = sorted({name for metrics in moments for name, value in metrics.items() if not math.isfinite(value)})
    if strange:
        found["vitlab.nonfinite"] = ", ".join(strange)
    found |= {f"vitlab.version.{key(name)}": version for name, version in around.versions.items()}
    found |= {f"vitlab.numerics.{key(name)}": text(value) for name, value in around.numerics.items()}
    return {name: _clip(value, TAG_LENGTH) for name, value in found.items()}


# -- what it left behind ----------------------------------------------------------------------------------------------


def history_csv(result: Result) -> str:
    """Every measurement as a row: ``step, epoch, images`` and a column per metric."""
    history = result.outcome.history
    names = list(dict.fromkeys(name for moment in history for name in moment.metrics))
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["step", "epoch", "images", *names])
    for moment in history:
        writer.writerow([moment.step, moment.epoch, moment.images, *(moment.metrics.get(name, "") for name in names)])
    return out.getvalue()


def confusion(predictions: Path) -> dict[str, pd.DataFrame]:
    """Split to confusion matrix: a row per label, a column per prediction.  Empty where images have no one label.

    What is no plain word is no split: it would become the name of a file.
    """
    import pandas as pd
    from pyarrow import parquet

    if not {"split", "label", "prediction"} <= set(parquet.read_schema(predictions).names):
        return {}
    frame = pd.read_parquet(predictions, columns=["split", "label", "prediction"])
    found = {}
    for split, rows in frame[frame["split"].str.fullmatch(r"\w+")].groupby("split", sort=True):
        classes = sorted({*rows["label"].tolist(), *rows["prediction"].tolist()})
        table = pd.crosstab(rows["label"], rows["prediction"]).reindex(index=classes, columns=classes, fill_value=0)
        found[str(split)] = table
    return found


def arm_points(values: Mapping[str, Sequence[float]], alpha: float) -> dict[str, float]:
    """Mean, standard deviation and t-interval of each metric over the seeds of an arm; what is unknown is left out."""
    from vitlab.statistics import mean_interval

    found: dict[str, float] = {}
    for name, seeds in values.items():
        summary = mean_interval([value for value in seeds if math.isfinite(value)], alpha)
        for what in ("mean", "sd", "low", "high", "n"):
            value = float(getattr(summary, what))
            if math.isfinite(value):
                found[key(f"{what}/{name}")] = value
    return found


def note(plan: Plan) -> str:
    """The experiment's description, in Markdown: the question and the arms."""
    rows = [f"| {_cell(arm.name)} | {_cell(arm.baseline or '')} | {_cell(arm.skip)} |" for arm in plan.arms]
    lines = [
        f"**{plan.question or plan.study}**",
        "",
        f"Judged by `{plan.analysis.metric}`, {plan.analysis.goal}, {plan.analysis.at}. "
        "Group by `arm`: means over seeds. Intervals and tests are in the report, with the run of the study.",
        "",
        "| arm | compared with | not run because |",
        "| --- | --- | --- |",
        *rows,
        *(f"\n{item}" for item in plan.notes),
    ]
    if len(plan.trials) > LOADED:
        lines.append(
            f"\nMLflow loads {LOADED} runs at a time, here the first seeds of every arm; 'Load more' under the table "
            f"loads the others. Means over all seeds are in the report, and in the experiment {plan.study}/arms."
        )
    return _clip("\n".join(lines), TAG_LENGTH)


# -- how it is done ---------------------------------------------------------------------------------------------------


def _flatten(path: str, value: Any, found: dict[str, str]) -> None:
    if not isinstance(value, Mapping) or not value:
        found[path] = text(value) if not isinstance(value, float) else repr(value)
        return
    if {"data", "model", "train"} <= set(value) and path:  # a trial inside a trial is told by what it trains
        model, data = (text(dict(value[part]).get("type", value[part])) for part in ("model", "data"))
        found[path] = f"{model} trained on {data}"
        return
    if isinstance(value.get("type"), str):
        found[path] = value["type"]
    for name, item in value.items():
        if name != "type" or not isinstance(item, str):
            _flatten(f"{path}.{name}" if path else str(name), item, found)


def _clip(value: str, length: int) -> str:
    return value if len(value) <= length else f"{value[: length - 1]}…"


def _cell(value: str) -> str:
    return value.replace("|", "\\|")
