"""Saved views of MLflow's comparison page, which then shows useful charts when it opens.

A view is an experiment tag that holds JSON in the user interface's own format.  A version of MLflow that does not
support the format opens its default page.  Nothing else depends on the views.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations, groupby
from typing import TYPE_CHECKING, TypeAlias

from vitlab.trackers import service

if TYPE_CHECKING:
    from mlflow import MlflowClient

TAG = "mlflow.sharedViewState"  #: experiment tag that stores a view, followed by a dot and the view's id in links

ARMS, TRIALS, SUMMARY = "vitlab-arms", "vitlab-trials", "vitlab-summary"
"""Ids of the views: arms as means over their seeds; every trial by itself; the experiment of summaries."""

LOADED = 100  #: runs the page loads at once
ORDER = "vitlab.order"
"""Tag by which runs are sorted: the first seed of every arm precedes the second, because the page loads few runs."""

LIMIT = 20_000  #: maximum length of an experiment tag in MLflow
RUNS = 100  #: maximum number of bars in one chart

PALETTE = (
    *("#a6630c", "#c83243", "#b45091", "#8a63bf", "#434a93", "#137dae", "#04867d", "#308613", "#facb66", "#1f272d"),
    *("#445461", "#5f7281", "#8396a5", "#93320b", "#be501e", "#de7921", "#f2be88", "#115026", "#277c43", "#3ba65e"),
    *("#8ddda8", "#9e102c", "#c82d4c", "#e65b77", "#f792a6", "#0e538b", "#2272b4", "#4299e0", "#8acaff"),
)
"""Colours of groups on the page, indexed by a checksum of the group's name."""

KEYS = (("tag", "arm"), ("param", "arm"), ("tag", "vitlab.arm"))
"""Tags and parameters that hold the arm of a run, by which runs can be grouped."""

AXES = 8  #: maximum number of parameters on one parallel plot
OUTCOMES = ("final/train/loss", "cost/macs", "cost/wall_s")
"""Metrics on the axes of a parallel plot besides the study's metric."""

Json: TypeAlias = dict[str, object]
Section = tuple[str, Sequence[str], bool]
"""Title of a section, its charted metrics, and True if it is open."""


@dataclass(frozen=True)
class Parallel:
    """Axes of a parallel-coordinates plot: one line per run, from its varied parameters to its metrics."""

    params: Sequence[str]
    metrics: Sequence[str]


@dataclass(frozen=True)
class View:
    """A saved view of a comparison page."""

    title: str
    kind: str  #: the ``vitlab.kind`` of the runs to show
    charts: Sequence[Section]
    columns: Sequence[str]  #: columns of the table, such as ``tags.`seed```
    parallel: Parallel | None = None  #: not drawn for grouped runs whose varied parameters are words
    arms: Sequence[str] = ()  #: arms to show as one bar and one line each, the mean of their runs; empty for every run
    images: Mapping[str, int] = field(default_factory=dict)  #: keys and first steps; not shown for grouped runs


def save(client: MlflowClient, experiment_id: str, views: Mapping[str, View]) -> int:
    """Write the views, by id, that are missing or outdated, unless they are too long; return how many."""
    experiment = client.get_experiment(experiment_id)
    values = {f"{TAG}.{name}": envelope(view, experiment.creation_time or 0) for name, view in views.items()}
    return sum(
        service.set_experiment_tag(client, experiment, name, value)
        for name, value in values.items()
        if len(value) <= LIMIT
    )


def sections(metrics: Iterable[str], headline: str) -> list[Section]:
    """Sort metric names into sections: the study's metric and the loss, final values, curves, costs, and others.

    ``headline`` is the study's metric; the first section shows it as bars and as a curve.
    """
    names = set(metrics)
    primary = [name for name in (f"final/{headline}", f"best/{headline}", headline, "train/loss") if name in names]
    groups = {"Final values": ("final/", "best/"), "Curves": ("val/", "train/"), "Cost": ("cost/",)}
    sections: list[Section] = [(headline, primary, True)]
    rest = sorted(names - set(primary), key=lambda name: ("/test/" in name, "/train/" in name, name))
    for title, prefixes in groups.items():
        charts = [name for name in rest if name.startswith(prefixes) and not name.endswith("/lr")]
        sections.append((title, charts, True))
        rest = [name for name in rest if name not in charts]
    return [section for section in (*sections, ("Other", rest, False)) if section[1]]


def summary_sections(metrics: Iterable[str], headline: str) -> list[Section]:
    """Return the sections of the summary experiment: the study's metric, the means of other metrics, and the rest."""
    names = set(metrics)
    primary = [name for statistic in ("mean", "low", "high", "sd", "n") if (name := f"{statistic}/{headline}") in names]
    means = sorted(name for name in names - set(primary) if name.startswith("mean/"))
    rest = sorted(names - {*primary, *means})
    groups = [(headline, primary, True), ("Means", means, True), ("Other", rest, False)]
    return [section for section in groups if section[1]]


def axes(varied: Sequence[str], metrics: Iterable[str], headline: str) -> Parallel:
    """Return the axes for trials: varied parameters, the study's metric, its test value, the loss and the costs."""
    names = set(metrics)
    test = f"final/test/{headline.partition('/')[2]}"
    candidates = dict.fromkeys((f"best/{headline}", f"final/{headline}", test, *OUTCOMES))
    return Parallel(list(varied)[:AXES], [name for name in candidates if name in names])


def state(view: View) -> Json:
    """Return the state of a saved view in the form that the comparison page stores."""
    charts: list[Json] = []
    sections: list[Json] = []

    def section(title: str, is_open: bool, columns: int) -> str:
        name = f"vitlab-section-{len(sections)}"
        sections.append({"uuid": name, "name": title, "display": is_open, "isReordered": False, "columns": columns})
        return name

    for index, (title, metrics, is_open) in enumerate(view.charts):
        if index == 1 and view.parallel is not None and view.parallel.params:  # after the study's metric
            charts.append(_parallel(view.parallel, section("Results by varied option", True, 1)))
        place = section(title, is_open, 3 if index else 2)
        charts += [_metric(name, place) for name in metrics]
    for album, names in groupby(sorted(view.images), key=lambda name: name.rpartition("/")[0] or name):
        place = section(f"Images: {album}", True, 1)  # one column, which leaves room for as many runs as possible
        charts += [_images(name, view.images[name], place) for name in names]
    mode, key = group_key(view.arms)
    by_arm = {"aggregateFunction": "average", "groupByKeys": [{"mode": mode, "groupByData": key}]}
    return {
        "searchFilter": f"tags.`vitlab.kind` = '{view.kind}'",
        "orderByKey": f"tags.`{ORDER}`",
        "orderByAsc": True,
        "startTime": "ALL",
        "lifecycleFilter": "Active",
        "datasetsFilter": [],
        "modelVersionFilter": "All Runs",
        "selectedColumns": list(view.columns),
        "runsHiddenMode": "SHOW_ALL",
        "useGroupedValuesInCharts": bool(view.arms),
        "groupBy": by_arm if view.arms else None,
        "groupsExpanded": {_group(mode, key, arm): False for arm in view.arms},
        "hideEmptyCharts": True,
        "autoRefreshEnabled": True,
        "compareRunCharts": charts,
        "compareRunSections": sections,
        "isAccordionReordered": True,
        "globalLineChartConfig": {"xAxisKey": "step", "lineSmoothness": 0, "selectedXAxisMetricKey": ""},
    }


def group_key(arms: Sequence[str]) -> tuple[str, str]:
    """Return the mode and key to group runs by that give the arms the most distinct colours.

    A group's colour follows from its name and cannot be chosen; of five arms, two are likely to share one.  Among the
    keys that hold the arm, the chosen one maximises the smallest colour difference, then the second smallest.
    """

    def differences(key: tuple[str, str]) -> list[int]:
        colours = [group_colour(_group(*key, arm)) for arm in arms]
        return sorted(_difference(*pair) for pair in combinations(colours, 2))

    return max(KEYS, key=differences)


def group_colour(group: str) -> str:
    """Return the page's colour of a group."""
    low = high = 0
    for character in group:
        low = (low + ord(character)) % 255
        high = (high + low) % 255
    return PALETTE[(low | high << 8) % len(PALETTE)]


def envelope(view: View, made_ms: int) -> str:
    """Return the tag's value; a state that exceeds the limit is compressed, as on the page itself."""
    text = json.dumps(state(view), separators=(",", ":"))
    value = {"name": view.title, "createdAt": made_ms, "updatedAt": made_ms, "state": text}
    if len(json.dumps(value)) > LIMIT:
        value["state"] = f"deflate;{base64.b64encode(zlib.compress(text.encode(), 9)).decode()}"
    return json.dumps(value)


def _group(mode: str, key: str, arm: str) -> str:
    """Return the page's name of a group."""
    return f"{mode}.{key}.{arm}"


def _difference(colour: str, reference: str) -> int:
    """Return the squared distance of two colours."""
    first, second = bytes.fromhex(colour[1:]), bytes.fromhex(reference[1:])
    return sum((a - b) ** 2 for a, b in zip(first, second, strict=True))


def _chart(kind: str, name: str, section: str, **fields: object) -> Json:
    common = {"metricSectionId": section, "deleted": False, "isGenerated": True, "runsCountToCompare": RUNS}
    return {"uuid": f"vitlab-{name}", "type": kind, **common, **fields}


def _parallel(axes: Parallel, section: str) -> Json:
    fields = {"selectedParams": list(axes.params), "selectedMetrics": list(axes.metrics), "showAllRuns": False}
    return _chart("PARALLEL", "parallel", section, **fields) | {"isGenerated": False}


def _images(key: str, step: int, section: str) -> Json:
    # Parameters would leave no room for the picture.
    return _chart("IMAGE", f"images-{key}", section, imageKeys=[key], step=step, showRunParams=False, displayName=key)


def _metric(metric: str, section: str) -> Json:
    title = f"{metric.removeprefix('final/')} (final)" if metric.startswith("final/") else metric
    chart = _chart("BAR", metric, section, metricKey=metric, displayName=title)
    if metric.partition("/")[0] not in ("val", "test", "train", "system", "progress"):
        return chart
    return chart | {
        "type": "LINE",
        "selectedMetricKeys": [metric],
        "lineSmoothness": 0,
        "scaleType": "linear",
        "xAxisScaleType": "linear",
        "xAxisKey": "step",
        "selectedXAxisMetricKey": "",
        "yAxisKey": "metric",
        "yAxisExpressions": [],
        "range": {},
        "ignoreOutliers": False,
        "useGlobalXaxisKey": True,
        "useGlobalLineSmoothing": True,
    }
