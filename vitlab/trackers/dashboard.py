"""Saved views of MLflow's comparison page, so that the page shows useful charts when it opens.

A view is an experiment tag that holds JSON in the user interface's own format.  A version of MLflow that does not
support the format opens its default page.  Nothing else depends on the views.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

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

Section = tuple[str, Sequence[str], bool]
"""Title of a section, its charted metrics, and True if it is open."""


@dataclass(frozen=True)
class Parallel:
    """Axes of a parallel-coordinates plot: one line per run, from its varied parameters to its metrics."""

    params: Sequence[str]
    metrics: Sequence[str]

    @property
    def is_drawable(self) -> bool:
        """True if there are both parameters and metrics; MLflow draws no plot of one axis."""
        return bool(self.params) and bool(self.metrics)


def tag(view: str) -> str:
    """Return the experiment tag that stores a view; ``view`` is its id in links."""
    return f"mlflow.sharedViewState.{view}"


def comparison_query(view: str) -> str:
    """Return the query string that opens the comparison page with a saved view."""
    return f"workflowType=machine_learning&compareRunsMode=CHART&viewStateShareKey={view}"


def save(client: Any, experiment: str, states: Mapping[str, tuple[str, Mapping[str, Any]]]) -> None:
    """Write the views, given as id to name and state, that are missing or outdated.

    Views that exceed the server's limit, which may be lower before MLflow 3.13, are omitted.
    """
    from mlflow.exceptions import MlflowException

    stored = client.get_experiment(experiment)
    for view, (name, state) in states.items():
        value = envelope(name, state, stored.creation_time or 0)
        if stored.tags.get(tag(view)) == value or len(value) > LIMIT:
            continue
        try:
            client.set_experiment_tag(experiment, tag(view), value)
        except MlflowException as error:
            if error.error_code != "INVALID_PARAMETER_VALUE":
                raise


def sections(metrics: Iterable[str], headline: str) -> list[Section]:
    """Sort metric names into sections: the study's metric and the loss, final values, curves, costs, and others.

    ``headline`` is the study's metric; the first section shows it as bars and as a curve.
    """
    names = set(metrics)

    def rank(name: str) -> tuple[int, bool, str]:
        group, _, metric = name.removeprefix("final/").removeprefix("best/").partition("/")
        order = ("val", "test", "train").index(group) if group in ("val", "test", "train") else 3
        return (order, metric != headline.partition("/")[2], name)

    primary = [name for name in (f"final/{headline}", f"best/{headline}", headline, "train/loss") if name in names]
    rest = sorted((name for name in names - set(primary) if not name.endswith("/lr")), key=rank)
    final = [name for name in rest if name.startswith(("final/", "best/"))]
    curves = [name for name in rest if name.startswith(("val/", "train/"))]  # the test split is measured only once
    cost = [name for name in rest if name.startswith("cost/")]
    other = sorted(names - {*primary, *final, *curves, *cost})
    groups = [(headline, primary, True), ("Final values", final, True), ("Curves", curves, True)]
    return [section for section in (*groups, ("Cost", cost, True), ("Other", other, False)) if section[1]]


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


def comparison(
    charts: Iterable[Section],
    *,
    columns: Sequence[str],
    kind: str,
    arms: Sequence[str] = (),
    parallel: Parallel | None = None,
    images: Mapping[str, int] = {},
) -> dict[str, Any]:
    """Return the state of a saved view in the form that the comparison page stores.

    Args:
        charts: the sections of charts.
        columns: columns of the table, such as ``tags.`seed```.
        kind: the ``vitlab.kind`` of the runs to show.
        arms: arms to show as one bar and one line each, the mean of their runs; empty to show every run.
        parallel: the axes of a parallel-coordinates plot.  For grouped runs, MLflow draws only numeric parameters.
        images: image keys and the first step of each.  For grouped runs, MLflow shows no images.
    """
    chart_list: list[dict[str, Any]] = []
    section_list: list[dict[str, Any]] = []

    def section(title: str, opened: bool, columns: int) -> str:
        name = f"vitlab-section-{len(section_list)}"
        section_list.append({"uuid": name, "name": title, "display": opened, "isReordered": False, "columns": columns})
        return name

    for index, (title, metrics, opened) in enumerate(charts):
        if index == 1 and parallel is not None and parallel.is_drawable:  # after the section of the study's metric
            chart_list.append(_parallel(parallel, section("Results by varied option", True, 1)))
        place = section(title, opened, 3 if index else 2)
        chart_list += [_chart(name, place) for name in metrics]
    for title, keys in _albums(images).items():
        place = section(title, True, 1)  # one column, so that as many runs as possible stand side by side
        chart_list += [_images(name, images[name], place) for name in keys]
    mode, key = group_key(arms)
    by_arm = {"aggregateFunction": "average", "groupByKeys": [{"mode": mode, "groupByData": key}]}
    return {
        "searchFilter": f"tags.`vitlab.kind` = '{kind}'",
        "orderByKey": f"tags.`{ORDER}`",
        "orderByAsc": True,
        "startTime": "ALL",
        "lifecycleFilter": "Active",
        "datasetsFilter": [],
        "modelVersionFilter": "All Runs",
        "selectedColumns": list(columns),
        "runsHiddenMode": "SHOW_ALL",
        "useGroupedValuesInCharts": bool(arms),
        "groupBy": by_arm if arms else None,
        "groupsExpanded": {_group(mode, key, arm): False for arm in arms},
        "hideEmptyCharts": True,
        "autoRefreshEnabled": True,
        "compareRunCharts": chart_list,
        "compareRunSections": section_list,
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


def envelope(name: str, state: Mapping[str, Any], made_ms: int) -> str:
    """Return the tag's value; a state that exceeds the limit is compressed, as on the page itself."""
    text = json.dumps(state, separators=(",", ":"))
    value = _envelope(name, text, made_ms)
    if len(value) > LIMIT:
        value = _envelope(name, f"deflate;{base64.b64encode(zlib.compress(text.encode(), 9)).decode()}", made_ms)
    return value


def _envelope(name: str, state: str, made_ms: int) -> str:
    return json.dumps({"name": name, "createdAt": made_ms, "updatedAt": made_ms, "state": state})


def _group(mode: str, key: str, arm: str) -> str:
    """Return the page's name of a group."""
    return f"{mode}.{key}.{arm}"


def _difference(colour: str, reference: str) -> int:
    """Return the squared distance of two colours."""
    first, second = bytes.fromhex(colour[1:]), bytes.fromhex(reference[1:])
    return sum((a - b) ** 2 for a, b in zip(first, second, strict=True))


def _albums(images: Iterable[str]) -> dict[str, list[str]]:
    """Return image keys by section title."""
    albums: dict[str, list[str]] = {}
    for name in sorted(images):
        albums.setdefault(f"Images: {name.rpartition('/')[0] or name}", []).append(name)
    return albums


def _parallel(axes: Parallel, section: str) -> dict[str, Any]:
    return {
        "uuid": "vitlab-parallel",
        "type": "PARALLEL",
        "metricSectionId": section,
        "deleted": False,
        "isGenerated": False,
        "runsCountToCompare": RUNS,
        "selectedParams": list(axes.params),
        "selectedMetrics": list(axes.metrics),
        "showAllRuns": False,
    }


def _images(key: str, step: int, section: str) -> dict[str, Any]:
    return {
        "uuid": f"vitlab-images-{key}",
        "type": "IMAGE",
        "metricSectionId": section,
        "deleted": False,
        "isGenerated": True,
        "runsCountToCompare": RUNS,
        "imageKeys": [key],
        "step": step,
        "showRunParams": False,  # parameters would leave no room for the picture
        "displayName": key,
    }


def _chart(metric: str, section: str) -> dict[str, Any]:
    is_curve = metric.partition("/")[0] in ("val", "test", "train", "system", "progress")
    chart: dict[str, Any] = {
        "uuid": f"vitlab-{metric}",
        "type": "LINE" if is_curve else "BAR",
        "metricSectionId": section,
        "deleted": False,
        "isGenerated": True,
        "metricKey": metric,
        "runsCountToCompare": RUNS,
        "displayName": f"{metric.removeprefix('final/')} (final)" if metric.startswith("final/") else metric,
    }
    if is_curve:
        chart |= {
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
    return chart
