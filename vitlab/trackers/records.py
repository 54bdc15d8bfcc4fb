"""Representation of trials in MLflow: names, parameters, tags, points and files as plain values.

Metrics of the journal keep their names, steps (optimizer steps) and times: delivering them again changes
nothing.  Final values are stored under ``final/`` at step 0, for which MLflow draws bars, and costs under ``cost/``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from vitlab.planning.values import Arm, Plan, Planned, Trial
from vitlab.spec import Analysis
from vitlab.spec.design import format_value
from vitlab.store.folders import Event
from vitlab.store.result import TrialResult
from vitlab.trackers.dashboard import COLOURS, GROUP, ORDER, group_label_padded_for_colour

if TYPE_CHECKING:
    import pandas as pd

ABSENT = "-"
"""Value of a parameter that an arm lacks: all runs have the same parameters."""

COLOUR, BLUE = "mlflow.runColor", "#2272b4"  #: tag with the colour of a run, and the colour of those of no arm
LENGTH, KEY_LENGTH = 5000, 250  #: of tags and parameters, and of their names


class Point(NamedTuple):
    """One value of a metric.  ``t`` is in milliseconds since 1970."""

    name: str
    value: float
    t: int
    step: int


def mlflow_name(name: str) -> str:
    """Convert a name to one that MLflow accepts for a metric, parameter or tag."""
    name = re.sub(r"[^\w\-. :/]", "_", name).strip("/. ")
    parts = [part for part in name.split("/") if part.strip(".")]  # MLflow rejects names that are no normalised path
    return "/".join(parts)[:KEY_LENGTH].rstrip("/. ") or "_"


# -- parameters and tags ----------------------------------------------------------------------------------------------


def flatten_spec(spec: Mapping[str, Any], place: str = "") -> dict[str, str]:
    """Flatten a resolved spec to dotted parameters; a component's type is the value of its slot's own path."""
    flattened: dict[str, str] = {}
    for name, value in spec.items():
        path = f"{place}.{name}" if place else name
        if isinstance(value, Mapping) and {"data", "model", "train"} <= set(value):  # a nested trial in a few words
            model, data = (format_value(dict(value[part]).get("type", value[part])) for part in ("model", "data"))
            value = f"{model} trained on {data}"
        if isinstance(value, Mapping) and value:
            flattened |= flatten_spec(value, path)
        else:
            key = place if name == "type" and isinstance(value, str) else path
            flattened[mlflow_name(key)] = truncate(repr(value) if isinstance(value, float) else format_value(value))
    return flattened


def params_by_trial(trials: Iterable[Trial]) -> dict[str, dict[str, str]]:
    """Return the parameters of every trial by trial key, each with the same names."""
    flattened = {trial.key: flatten_spec(trial.spec.plain()) for trial in trials}
    names = sorted(set().union(*flattened.values()))
    return {trial_key: {name: own.get(name, ABSENT) for name in names} for trial_key, own in flattened.items()}


def trial_tags(plan: Plan, planned: Planned, kind: str) -> dict[str, str]:
    """Return the tags of a trial's run: identity, origin and those of pages; a trial of no arm has no arm tags.

    Args:
        plan: the study.
        planned: the trial.
        kind: ``trial``, ``prerequisite`` or ``tuning``.
    """
    trial, arm = planned.trial, truncate(planned.arm)
    return {
        **({"arm": arm, "vitlab.arm": arm} if arm else {}),
        "seed": str(planned.seed),
        "vitlab.study": plan.study,
        "vitlab.kind": kind,
        "vitlab.trial": trial.key,
        "vitlab.code": trial.code,
        "vitlab.data": trial.data or ABSENT,
        **display_tags(plan.arms, planned.arm, planned.seed),
    }


def display_tags(arms: Sequence[Arm], arm: str, seed: int = 0) -> dict[str, str]:
    """Return the tags by which pages sort runs, by seed and then by arm, those of no arm last; colour and group them.

    Args:
        arms: of the study.
        arm: name of the run's arm; empty for none.
        seed: its seed.
    """
    place = next((place for place, each in enumerate(arms) if each.name == arm), len(arms))
    tags = {ORDER: f"{seed:09d} {place:06d}", COLOUR: BLUE}
    if place < len(arms):
        tags |= {COLOUR: list(COLOURS.values())[place % len(COLOURS)], GROUP: group_label_padded_for_colour(arm, place)}
    return tags


# -- points -----------------------------------------------------------------------------------------------------------


def points(event: Event) -> list[Point]:
    """Return the points of a ``metrics`` event."""
    values = {**event.body["metrics"], "progress/epoch": event.body["epoch"], "progress/images": event.body["images"]}
    return _to_points(values, event.t, int(event.body["step"]))


def final_points(result: TrialResult, analysis: Analysis) -> list[Point]:
    """Return final values and costs as points at step 0."""
    run, outcome = result.circumstances, result.outcome
    values = {f"final/{name}": value for name, value in outcome.metrics.items()}
    best = outcome.value(analysis.metric, "best", analysis.goal)
    if analysis.at == "best" and best is not None:
        values[f"best/{analysis.metric}"] = best
    values |= {
        "cost/params": run.params,
        "cost/macs": run.macs,
        "cost/wall_s": run.wall_s,
        "cost/memory_bytes": run.memory_bytes,
    }
    if run.wall_s > 0:
        values["cost/images_per_s"] = outcome.images / run.wall_s
    return _to_points(values, int(run.ended * 1000), 0)


def _to_points(values: Mapping[str, float], t: int, step: int) -> list[Point]:
    """Return points; an infinity becomes NaN: MLflow would store the largest float, which hides all else in a chart."""
    return [
        Point(mlflow_name(name), math.nan if math.isinf(value) else float(value), t, step)
        for name, value in values.items()
    ]


def start_tags(event: Event) -> dict[str, str]:
    """Return the tags that describe the attempt of an event ``start``."""
    return {"vitlab.attempts": str(event.body.get("attempt", 1)), "vitlab.host": str(event.body.get("host", ""))}


def result_tags(result: TrialResult) -> dict[str, str]:
    """Return the tags that describe a result and its circumstances."""
    circumstances = result.circumstances
    values = {
        "vitlab.status": result.status,
        "vitlab.weights": result.outcome.weights,
    }
    for kind, group in (("version", circumstances.versions), ("numerics", circumstances.numerics)):
        values |= {f"vitlab.{kind}.{mlflow_name(name)}": format_value(value) for name, value in group.items()}
    return {name: truncate(value) for name, value in values.items()}


# -- files and descriptions -------------------------------------------------------------------------------------------


def load_confusion_matrices(predictions: Path) -> dict[str, pd.DataFrame]:
    """Return a confusion matrix (labels by predictions) per split; empty if images have no single label.

    Splits whose name is not a plain word are omitted, because the name becomes part of a file name.
    """
    import pandas as pd

    table, columns = pd.read_parquet(predictions), ["split", "label", "prediction"]
    tables: dict[str, pd.DataFrame] = {}
    if not set(columns) <= set(table):
        return tables
    for split, own in table.dropna(subset=columns).groupby("split"):
        if not re.fullmatch(r"\w+", str(split)):
            continue
        classes = sorted({*own["label"], *own["prediction"]})
        counts = pd.crosstab(own["label"], own["prediction"]).reindex(index=classes, columns=classes, fill_value=0)
        names: dict[object, object] = {}
        for column in ("label", "prediction"):
            if f"{column}_name" in own:
                names |= dict(zip(own[column], own[f"{column}_name"], strict=True))
        tables[str(split)] = counts.rename(index=names, columns=names)
    return tables


def truncate(value: str) -> str:
    """Shorten a tag or parameter to what MLflow accepts."""
    return value if len(value) <= LENGTH else f"{value[: LENGTH - 1]}…"
