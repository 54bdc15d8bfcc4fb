"""Saved views of MLflow's comparison page, so that it is useful as it opens.

A view is an experiment tag holding JSON, and the format is the user interface's own: where a version of MLflow reads
it no more, the page opens as it always does.  Nothing else depends on it.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

ARMS, TRIALS, SUMMARY = "vitlab-arms", "vitlab-trials", "vitlab-summary"
"""Ids of the views: arms as means over their seeds; every trial by itself; the experiment of summaries."""

LIMIT = 20_000  #: characters MLflow holds in an experiment tag
RUNS = 100  #: bars in one chart at most

Section = tuple[str, Sequence[str], bool]
"""Title, the metrics charted in it, and whether it is open."""


def tag(view: str) -> str:
    """The experiment tag a view stands in; ``view`` is what a link names it by."""
    return f"mlflow.sharedViewState.{view}"


def sections(metrics: Iterable[str], headline: str) -> list[Section]:
    """Sort metric names into sections: final values, curves, what they cost.  ``headline`` is the judged metric."""
    names = set(metrics)

    def rank(name: str) -> tuple[bool, int, bool, str]:
        group, _, metric = name.removeprefix("final/").removeprefix("best/").partition("/")
        order = ("val", "test", "train").index(group) if group in ("val", "test", "train") else 3
        return (headline not in name, order, metric != headline.partition("/")[2], name)

    final = sorted((name for name in names if name.startswith(("final/", "best/"))), key=rank)
    curves = sorted((name for name in names if name.partition("/")[0] in ("val", "test", "train")), key=rank)
    cost = sorted(name for name in names if name.startswith("cost/"))
    rest = sorted(names - {*final, *curves, *cost})
    found = [("Final values", final, True), ("Curves", curves, True), ("Cost", cost, True), ("Other", rest, False)]
    return [section for section in found if section[1]]


def summary_sections(metrics: Iterable[str], headline: str) -> list[Section]:
    """Sections of the experiment of summaries: the judged metric, then the means of all others, then the rest."""
    names = set(metrics)
    judged = [name for what in ("mean", "low", "high", "sd", "n") if (name := f"{what}/{headline}") in names]
    means = sorted(name for name in names - set(judged) if name.startswith("mean/"))
    rest = sorted(names - {*judged, *means})
    found = [(headline, judged, True), ("Means", means, True), ("Other", rest, False)]
    return [section for section in found if section[1]]


def comparison(charts: Iterable[Section], *, grouped: bool, columns: Sequence[str], kind: str) -> dict[str, Any]:
    """The state of a view.

    Args:
        charts: what to chart.
        grouped: one bar and one line per arm, the mean of its runs; else one per run.
        columns: columns of the table, such as ``tags.`seed```.
        kind: the ``vitlab.kind`` of the runs to show.
    """
    chart_list, section_list = [], []
    for index, (title, metrics, opened) in enumerate(charts):
        section = f"vitlab-section-{index}"
        section_list.append({"uuid": section, "name": title, "display": opened, "isReordered": False})
        chart_list += [_chart(name, section) for name in metrics]
    by_arm = {"aggregateFunction": "average", "groupByKeys": [{"mode": "tag", "groupByData": "arm"}]}
    return {
        "searchFilter": f"tags.`vitlab.kind` = '{kind}'",
        "orderByKey": "attributes.start_time",
        "orderByAsc": False,
        "startTime": "ALL",
        "lifecycleFilter": "Active",
        "datasetsFilter": [],
        "modelVersionFilter": "All Runs",
        "selectedColumns": list(columns),
        "runsHiddenMode": "SHOW_ALL",
        "useGroupedValuesInCharts": grouped,
        "groupBy": by_arm if grouped else None,
        "hideEmptyCharts": True,
        "autoRefreshEnabled": True,
        "compareRunCharts": chart_list,
        "compareRunSections": section_list,
        "isAccordionReordered": True,
        "globalLineChartConfig": {"xAxisKey": "step", "lineSmoothness": 0, "selectedXAxisMetricKey": ""},
    }


def envelope(name: str, state: Mapping[str, Any], *, made_ms: int) -> str:
    """The tag's value.  A state too long for a tag is compressed, as the page itself would do."""
    text = json.dumps(state, separators=(",", ":"))
    whole = _envelope(name, text, made_ms)
    if len(whole) > LIMIT:
        whole = _envelope(name, f"deflate;{base64.b64encode(zlib.compress(text.encode(), 9)).decode()}", made_ms)
    return whole


def same(old: str | None, new: str) -> bool:
    """Whether two tag values hold one view, whenever they were made."""
    if old is None:
        return False
    try:
        before, after = json.loads(old), json.loads(new)
    except ValueError:
        return False
    return isinstance(before, dict) and all(before.get(key) == after[key] for key in ("name", "state"))


def _envelope(name: str, state: str, made_ms: int) -> str:
    return json.dumps({"name": name, "createdAt": made_ms, "updatedAt": made_ms, "state": state})


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
        "displayName": metric,
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
