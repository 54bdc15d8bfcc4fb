"""Saved views of MLflow's comparison page, so that it is useful as it opens.

A view is an experiment tag holding JSON, and the format is the user interface's own: where a version of MLflow reads
it no more, the page opens as it always does.  Nothing else depends on it.
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
"""The tag that runs are sorted by: of more than the page loads, the first seed of every arm goes before the second."""

LIMIT = 20_000  #: characters MLflow holds in an experiment tag
RUNS = 100  #: bars in one chart at most

PALETTE = (
    *("#a6630c", "#c83243", "#b45091", "#8a63bf", "#434a93", "#137dae", "#04867d", "#308613", "#facb66", "#1f272d"),
    *("#445461", "#5f7281", "#8396a5", "#93320b", "#be501e", "#de7921", "#f2be88", "#115026", "#277c43", "#3ba65e"),
    *("#8ddda8", "#9e102c", "#c82d4c", "#e65b77", "#f792a6", "#0e538b", "#2272b4", "#4299e0", "#8acaff"),
)
"""Colours the page gives to groups, by a checksum of the group's name."""

KEYS = (("tag", "arm"), ("param", "arm"), ("tag", "vitlab.arm"))
"""Where the arm of a run stands, and so what runs can be grouped by."""

AXES = 8  #: parameters on one parallel plot at most
OUTCOMES = ("final/train/loss", "cost/macs", "cost/wall_s")
"""What stands beside the judged metric on the axes of a parallel plot."""

Section = tuple[str, Sequence[str], bool]
"""Title, the metrics charted in it, and whether it is open."""


@dataclass(frozen=True)
class Parallel:
    """Axes of a plot of parallel coordinates: a line per run, from what was varied to what came of it."""

    params: Sequence[str]
    metrics: Sequence[str]

    @property
    def drawn(self) -> bool:
        """Whether there is something on either side; MLflow draws no plot of one axis."""
        return bool(self.params) and bool(self.metrics)


def tag(view: str) -> str:
    """The experiment tag a view stands in; ``view`` is what a link names it by."""
    return f"mlflow.sharedViewState.{view}"


def comparison_query(view: str) -> str:
    """What an address of the comparison page says after its question mark, to be opened with a saved view."""
    return f"workflowType=machine_learning&compareRunsMode=CHART&viewStateShareKey={view}"


def save(client: Any, experiment: str, states: Mapping[str, tuple[str, Mapping[str, Any]]]) -> None:
    """Write views, by id their name and state, that are not there yet or are not the same.

    A view that a server has no room for, as those before 3.13 may not, is left out.
    """
    from mlflow.exceptions import MlflowException

    there = client.get_experiment(experiment)
    for view, (name, state) in states.items():
        value = envelope(name, state, there.creation_time or 0)
        if there.tags.get(tag(view)) == value or len(value) > LIMIT:
            continue
        try:
            client.set_experiment_tag(experiment, tag(view), value)
        except MlflowException as error:
            if error.error_code != "INVALID_PARAMETER_VALUE":
                raise


def sections(metrics: Iterable[str], headline: str) -> list[Section]:
    """Sort metric names into sections, the answer first: the judged metric, as bars and as a curve, and the loss.

    Then follow final values, curves, what they cost, and what one rarely asks for.  ``headline`` is the judged metric.
    """
    names = set(metrics)

    def rank(name: str) -> tuple[int, bool, str]:
        group, _, metric = name.removeprefix("final/").removeprefix("best/").partition("/")
        order = ("val", "test", "train").index(group) if group in ("val", "test", "train") else 3
        return (order, metric != headline.partition("/")[2], name)

    answer = [name for name in (f"final/{headline}", f"best/{headline}", headline, "train/loss") if name in names]
    rest = sorted((name for name in names - set(answer) if not name.endswith("/lr")), key=rank)
    final = [name for name in rest if name.startswith(("final/", "best/"))]
    curves = [name for name in rest if name.startswith(("val/", "train/"))]  # the test split is measured only once
    cost = [name for name in rest if name.startswith("cost/")]
    other = sorted(names - {*answer, *final, *curves, *cost})
    found = [(headline, answer, True), ("Final values", final, True), ("Curves", curves, True)]
    return [section for section in (*found, ("Cost", cost, True), ("Other", other, False)) if section[1]]


def summary_sections(metrics: Iterable[str], headline: str) -> list[Section]:
    """Sections of the experiment of summaries: the judged metric, then the means of all others, then the rest."""
    names = set(metrics)
    judged = [name for what in ("mean", "low", "high", "sd", "n") if (name := f"{what}/{headline}") in names]
    means = sorted(name for name in names - set(judged) if name.startswith("mean/"))
    rest = sorted(names - {*judged, *means})
    found = [(headline, judged, True), ("Means", means, True), ("Other", rest, False)]
    return [section for section in found if section[1]]


def axes(varied: Sequence[str], metrics: Iterable[str], headline: str) -> Parallel:
    """The axes for trials: what was varied, the judged metric, its value on the test split, the loss, the cost."""
    names = set(metrics)
    test = f"final/test/{headline.partition('/')[2]}"
    wanted = dict.fromkeys((f"best/{headline}", f"final/{headline}", test, *OUTCOMES))
    return Parallel(list(varied)[:AXES], [name for name in wanted if name in names])


def comparison(
    charts: Iterable[Section],
    *,
    columns: Sequence[str],
    kind: str,
    arms: Sequence[str] = (),
    parallel: Parallel | None = None,
    images: Mapping[str, int] = {},
) -> dict[str, Any]:
    """The state of a view.

    Args:
        charts: what to chart.
        columns: columns of the table, such as ``tags.`seed```.
        kind: the ``vitlab.kind`` of the runs to show.
        arms: where one bar and one line shall stand for each arm, the mean of its runs: the arms.
        parallel: the axes of a plot of parallel coordinates.  Of runs that are grouped, MLflow draws none with a
            parameter that is no number.
        images: keys of images to the step to begin with.  Of runs that are grouped, MLflow shows none.
    """
    chart_list: list[dict[str, Any]] = []
    section_list: list[dict[str, Any]] = []

    def section(title: str, opened: bool, columns: int) -> str:
        name = f"vitlab-section-{len(section_list)}"
        shown = {"uuid": name, "name": title, "display": opened, "isReordered": False, "columns": columns}
        section_list.append(shown)
        return name

    for index, (title, metrics, opened) in enumerate(charts):
        if index == 1 and parallel is not None and parallel.drawn:  # the answer stands before it
            chart_list.append(_parallel(parallel, section("What came of what was varied", True, 1)))
        place = section(title, opened, 3 if index else 2)
        chart_list += [_chart(name, place) for name in metrics]
    for title, keys in _albums(images).items():
        place = section(title, True, 1)  # as many runs side by side as there is room for
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
    """What to group runs by, so that no two arms look alike.

    A group's colour cannot be chosen, it follows from its name, and of five arms two are likely to share one.  So of
    the keys that hold the arm the one is taken under which the most similar two differ most, then the next two.
    """

    def differences(key: tuple[str, str]) -> list[int]:
        colours = [group_colour(_group(*key, arm)) for arm in arms]
        return sorted(_difference(*pair) for pair in combinations(colours, 2))

    return max(KEYS, key=differences)


def group_colour(group: str) -> str:
    """The page's colour of a group."""
    low = high = 0
    for character in group:
        low = (low + ord(character)) % 255
        high = (high + low) % 255
    return PALETTE[(low | high << 8) % len(PALETTE)]


def envelope(name: str, state: Mapping[str, Any], made_ms: int) -> str:
    """The tag's value.  A state too long for a tag is compressed, as the page itself would do."""
    text = json.dumps(state, separators=(",", ":"))
    whole = _envelope(name, text, made_ms)
    if len(whole) > LIMIT:
        whole = _envelope(name, f"deflate;{base64.b64encode(zlib.compress(text.encode(), 9)).decode()}", made_ms)
    return whole


def _envelope(name: str, state: str, made_ms: int) -> str:
    return json.dumps({"name": name, "createdAt": made_ms, "updatedAt": made_ms, "state": state})


def _group(mode: str, key: str, arm: str) -> str:
    """The page's own name of a group."""
    return f"{mode}.{key}.{arm}"


def _difference(one: str, other: str) -> int:
    """Squared distance of two colours."""
    first, second = bytes.fromhex(one[1:]), bytes.fromhex(other[1:])
    return sum((a - b) ** 2 for a, b in zip(first, second, strict=True))


def _albums(images: Iterable[str]) -> dict[str, list[str]]:
    """Title to the images under it."""
    found: dict[str, list[str]] = {}
    for name in sorted(images):
        found.setdefault(f"Images: {name.rpartition('/')[0] or name}", []).append(name)
    return found


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
        "showRunParams": False,  # they would leave no room for the picture
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
