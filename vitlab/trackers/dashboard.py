"""The page of a study's experiment in MLflow: saved views of its comparison page, and its description.

A view is an experiment tag that holds JSON in the user interface's own format.  A version of MLflow that does not
support the format opens its default page.  Nothing else depends on the views.

The description is the report with its pictures, and links to runs and files.  Links name no host, so they lead to the
server that shows the page.
"""

from __future__ import annotations

import base64
import json
import re
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeAlias
from urllib.parse import quote, urlencode

from vitlab.trackers import service
from vitlab.trackers.service import comparison_query

if TYPE_CHECKING:
    from mlflow import MlflowClient

TAG = "mlflow.sharedViewState"  #: experiment tag that stores a view, followed by a dot and the view's id in links

ARMS, TRIALS, SUMMARY = "vitlab-arms", "vitlab-trials", "vitlab-summary"
"""Ids of the views: arms as means over their seeds; every trial by itself; the experiment of summaries."""

ORDER = "vitlab.order"
"""Tag by which runs are sorted: the first seed of every arm precedes the second, because the page loads few runs."""

LIMIT = 20_000  #: maximum length of an experiment tag in MLflow
RUNS = 100  #: maximum number of bars in one chart

AXES = 8  #: maximum number of parameters on one parallel plot
GROUPS = (("Final values", ("final/", "best/")), ("Curves", ("val/", "train/")), ("Cost", ("cost/",)))
"""Titles of the sections of trials' metrics, and the prefixes of their metrics."""

CURVES = ("val", "test", "train", "system", "progress")
"""First parts of the names of metrics that have a value at many steps."""

Json: TypeAlias = dict[str, object]


class Section(NamedTuple):
    """A section of charts, one per metric."""

    title: str
    metrics: Sequence[str]
    is_open: bool = True


@dataclass(frozen=True)
class View:
    """A saved view of a comparison page."""

    title: str
    kind: str  #: the ``vitlab.kind`` of the runs to show
    charts: Sequence[Section]
    columns: Sequence[str]  #: columns of the table, such as ``tags.`seed```
    axes: tuple[Sequence[str], Sequence[str]] = ((), ())
    """Parameters and metrics of a parallel-coordinates plot, one line per run; not drawn for grouped runs."""
    arms: Sequence[str] = ()  #: arms to show as one bar and one line each, the mean of their runs; empty for every run
    images: Mapping[str, int] = field(default_factory=dict)  #: keys and first steps; not shown for grouped runs


def save_views(client: MlflowClient, experiment_id: str, views: Mapping[str, View]) -> int:
    """Write the views, by id, that are missing or outdated, unless they are too long; return how many."""
    experiment = client.get_experiment(experiment_id)
    values = {f"{TAG}.{name}": encode_view(view, experiment.creation_time or 0) for name, view in views.items()}
    return sum(
        service.set_experiment_tag(client, experiment, name, value)
        for name, value in values.items()
        if len(value) <= LIMIT
    )


def sort_into_sections(metrics: Iterable[str], headline: str, first: Sequence[str]) -> list[Section]:
    """Sort metric names into sections: the first one is about the study's metric, the last one is closed.

    Args:
        metrics: the names.
        headline: the study's metric.
        first: metrics of the first section, in order.
    """
    names = set(metrics)
    found = [Section(headline, [name for name in first if name in names])]
    rest = sorted(names - set(first), key=lambda name: ("/test/" in name, "/train/" in name, name))
    for title, prefixes in GROUPS:
        found.append(Section(title, [name for name in rest if name.startswith(prefixes)]))
        rest = [name for name in rest if not name.startswith(prefixes)]
    return [section for section in (*found, Section("Other", rest, is_open=False)) if section.metrics]


def view_state(view: View) -> Json:
    """Return the state of a saved view in the form that the comparison page stores."""
    charts: list[Json] = []
    sections: list[Json] = []

    def section(title: str, is_open: bool, columns: int) -> str:
        name = f"vitlab-section-{len(sections)}"
        sections.append({"uuid": name, "name": title, "display": is_open, "isReordered": False, "columns": columns})
        return name

    for index, (title, metrics, is_open) in enumerate(view.charts):
        place = section(title, is_open, 3)
        charts += [_metric_chart(name, place) for name in metrics]
        if index == 0 and view.axes[0]:
            charts.append(_parallel_chart(*view.axes, section("Results by varied option", True, 1)))
    for album, names in groupby(sorted(view.images), key=lambda name: name.rpartition("/")[0] or name):
        place = section(f"Images: {album}", True, 1)  # one column, which leaves room for as many runs as possible
        charts += [_image_chart(name, view.images[name], place) for name in names]
    by_arm = {"aggregateFunction": "average", "groupByKeys": [{"mode": "tag", "groupByData": "arm"}]}
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
        "groupsExpanded": {f"tag.arm.{arm}": False for arm in view.arms},
        "hideEmptyCharts": True,
        "autoRefreshEnabled": True,
        "compareRunCharts": charts,
        "compareRunSections": sections,
        "isAccordionReordered": True,
        "globalLineChartConfig": {"xAxisKey": "step", "lineSmoothness": 0, "selectedXAxisMetricKey": ""},
    }


def encode_view(view: View, made_ms: int) -> str:
    """Return the tag's value; a state that exceeds the limit is compressed, as on the page itself."""
    text = json.dumps(view_state(view), separators=(",", ":"))
    value = {"name": view.title, "createdAt": made_ms, "updatedAt": made_ms, "state": text}
    if len(json.dumps(value)) > LIMIT:
        value["state"] = f"deflate;{base64.b64encode(zlib.compress(text.encode(), 9)).decode()}"
    return json.dumps(value)


def _chart_state(kind: str, name: str, section: str, **fields: object) -> Json:
    common = {"metricSectionId": section, "deleted": False, "isGenerated": True, "runsCountToCompare": RUNS}
    return {"uuid": f"vitlab-{name}", "type": kind, **common, **fields}


def _parallel_chart(params: Sequence[str], metrics: Sequence[str], section: str) -> Json:
    fields = {"selectedParams": list(params[:AXES]), "selectedMetrics": list(metrics), "showAllRuns": False}
    return _chart_state("PARALLEL", "parallel", section, **fields) | {"isGenerated": False}


def _image_chart(key: str, step: int, section: str) -> Json:
    # Parameters would leave no room for the picture.
    return _chart_state(
        "IMAGE", f"images-{key}", section, imageKeys=[key], step=step, showRunParams=False, displayName=key
    )


def _metric_chart(metric: str, section: str) -> Json:
    chart = _chart_state("BAR", metric, section, metricKey=metric, displayName=metric)
    if metric.partition("/")[0] not in CURVES:
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


# -- description -------------------------------------------------------------------------------------------------------

NOTE = "mlflow.note.content"
MORE = "\n\n*The rest is in the report.*\n"
SEEDS = 8  #: maximum number of linked runs per arm
SMALL = "report/small"
"""Artifact folder of the pictures scaled to the page, which does not scale them itself."""
WIDTH = 860  #: width of these pictures in pixels
TRAINING = "?workflowType=machine_learning"  #: selects the training view; the default view is for language models


def markdown_link(text: str, experiment: str, run: str = "", artifact: str = "", view: str = "") -> str:
    """Return a Markdown link to an experiment's comparison page, to a run, or to a file of a run."""
    place = f"#/experiments/{experiment}/runs"
    if run:
        place += f"/{run}" + (f"/artifacts/{quote(artifact)}" if artifact else "") + TRAINING
    elif view:
        place += f"?{comparison_query(view)}"
    return f"[{escape_markdown(text)}]({place})"


def escape_markdown(text: str) -> str:
    """Escape a text for Markdown and the HTML that Markdown allows."""
    return "".join(f"&#{ord(char)};" if char in "\\`*_{}[]<>()|#~$&!:-" else char for char in " ".join(text.split()))


def describe_study(report: str, links: Iterable[str], runs: Sequence[tuple[str, Sequence[str]]], run: str) -> str:
    """Return the description, truncated to whole lines within MLflow's limit.

    The page shows the first line and a half until it is opened, so the title is a line of bold text, no heading.

    Args:
        report: the report as Markdown, with pictures named by their files.
        links: links to views, files and models.
        runs: arms and the links to their runs.
        run: the id of the run that holds the report's files.
    """
    title, _, rest = _adapt_markdown(report, run).partition("\n")
    text = f"**{title.removeprefix('# ')}**\n\n{' · '.join(links)}\n{rest}"
    table = ["", "## Runs", "", "| arm | runs |", "| --- | --- |"]
    table += [
        f"| {escape_markdown(arm)} | {' '.join(items[:SEEDS])}{' …' * (len(items) > SEEDS)} |" for arm, items in runs
    ]
    text += "\n".join(table) + "\n"
    return text if len(text) <= LIMIT else text[: text.rfind("\n", 0, LIMIT - len(MORE))] + MORE


def shrink_pictures(pictures: Iterable[Path], folder: Path) -> None:
    """Write pictures scaled to the width of the page."""
    from PIL import Image

    folder.mkdir(parents=True)
    for file in pictures:
        with Image.open(file) as picture:
            picture.thumbnail((WIDTH, 4 * WIDTH))
            picture.save(folder / file.name)


def _adapt_markdown(markdown: str, run: str) -> str:
    """Link pictures to the run's files and convert escapes to a form that MLflow's Markdown supports."""

    def address(match: re.Match[str]) -> str:
        return f"![{match[1]}](get-artifact?{urlencode({'path': f'{SMALL}/{match[2]}', 'run_uuid': run})})"

    escaped = re.sub(r"\\([<>&$#|])", lambda match: f"&#{ord(match[1])};", markdown)
    return re.sub(r"^!\[([\w ]*)\]\((\w+\.png)\)$", address, escaped, flags=re.MULTILINE)
