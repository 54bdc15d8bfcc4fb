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
import textwrap
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeAlias
from urllib.parse import quote, urlencode

from vitlab.errors import one_line
from vitlab.report.formats import parts_to_text
from vitlab.report.phrasing import Column
from vitlab.trackers import service

if TYPE_CHECKING:
    from mlflow import MlflowClient

TAG = "mlflow.sharedViewState"  #: experiment tag that stores a view, followed by a dot and the view's id in links

ARMS, TRIALS, RUNS, SUMMARY = "vitlab-arms", "vitlab-trials", "vitlab-runs", "vitlab-summary"
"""Ids of the views: arms as means over their seeds; every trial by itself; all runs; the experiment of summaries."""

ORDER = "vitlab.order"
"""Tag by which runs are sorted: the first seed of every arm precedes the second, because the page loads few runs.  Runs
of earlier versions are last."""

GROUP = "arm label"
"""Tag by which runs are grouped into arms, see :func:`group_label_padded_for_colour`."""

COLOURS = {9: "#1f272d", 15: "#de7921", 19: "#3ba65e", 2: "#b45091", 8: "#facb66"}
COLOURS |= {27: "#4299e0", 13: "#93320b", 25: "#0e538b", 12: "#8396a5", 22: "#c82d4c"}
"""Colours of arms in the order of the design, by their places in the page's palette, near those of reports."""
RUN_NAME, ROOT = "attributes.`Run Name`", "tags.`vitlab.root`"  #: columns of the page's table: name, output folder
DESCRIPTION = "attributes.`Description`"  #: column with the begin of a run's description
PALETTE = 29  #: number of colours in the page's palette

LIMIT = 20_000  #: maximum length of an experiment tag in MLflow
BARS = 100  #: maximum number of bars in one chart

AXES = 8  #: maximum number of parameters on one parallel plot
GROUPS = (("Final values", ("final/", "best/")), ("Curves", ("val/", "train/")), ("Cost", ("cost/",)))
"""Titles of the sections of trials' metrics, and the prefixes of their metrics."""

NOT_COMPARED = {f"final/train/{name}" for name in ("lr", "skipped_steps", "weights_step")}
"""Final values whose charts are deleted, because the page would draw those that are missing."""

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
    kind: str  #: the ``vitlab.kind`` of the runs to show; empty for all
    charts: Sequence[Section]
    columns: Sequence[str]  #: columns of the table, such as ``tags.`seed```
    axes: tuple[Sequence[str], Sequence[str]] = ((), ())
    """Parameters and metrics of a parallel-coordinates plot, one line per run; not drawn for grouped runs."""
    groups: Sequence[str] = ()
    """Labels of arms to show as one bar and one line each, the mean of their runs; empty for every run."""
    images: Mapping[str, int] = field(default_factory=dict)  #: keys and first steps; not shown for grouped runs


def comparison_link(experiment: str, view: str) -> str:
    """Return the address, on its server, of a page with a saved view: charts of arms or trials, or else a table."""
    mode = "&compareRunsMode=CHART" if view in (ARMS, TRIALS) else ""
    return f"#/experiments/{experiment}/runs{TRAINING}{mode}&viewStateShareKey={view}"


def save_views(client: MlflowClient, experiment_id: str, views: Mapping[str, View]) -> int:
    """Write the views, by id, that are missing or outdated, unless they are too long; return how many."""
    experiment = client.get_experiment(experiment_id)
    values = {f"{TAG}.{name}": encode_view(view, experiment.creation_time or 0) for name, view in views.items()}
    return sum(
        service.set_experiment_tag(client, experiment, name, value)
        for name, value in values.items()
        if len(value) <= LIMIT
    )


def sort_metrics_into_sections(metrics: Iterable[str], headline: str, first: Sequence[str]) -> list[Section]:
    """Sort metric names into sections: the first one is about the study's metric, the last one is closed.

    Args:
        metrics: the names.
        headline: the study's metric.
        first: metrics of the first section, in order.
    """
    names = set(metrics)
    sections = [Section(headline, [name for name in first if name in names])]
    rest = sorted(names - set(first), key=lambda name: ("/test/" in name, "/train/" in name, name))
    for title, prefixes in GROUPS:
        sections.append(Section(title, [name for name in rest if name.startswith(prefixes)]))
        rest = [name for name in rest if not name.startswith(prefixes)]
    return [section for section in (*sections, Section("Other", rest, is_open=False)) if section.metrics]


@cache
def group_label_padded_for_colour(arm: str, index: int) -> str:
    """Return a label of an arm for its group: ``4, none (patch_size, position)`` of ``patch_size=4, position=none``.

    The page has little room for it, so what tells arms apart comes first.  The page computes the colour of a group from
    its tag and value, and no tag sets another one: as many spaces stand behind the label as give the colour of the
    arm's place.  Browsers show no spaces at the end.

    Args:
        arm: the name.
        index: place of the arm in the design.
    """
    colour = list(COLOURS)[index % len(COLOURS)]
    path = r"(?:^|(?<=, ))([\w.]+)=(?=(?:[^()]|\((?:[^()]|\([^()]*\))*\))*$)"  # not of an option in brackets
    paths = re.findall(path, arm)
    label = re.sub(path, "", arm) + (f" ({', '.join(paths)})" if paths else "")
    labels = (label + " " * spaces for spaces in range(1000))
    return next((label for label in labels if _group_colour_index(f"tag.{GROUP}.{label}") == colour), label)


def _group_colour_index(group: str) -> int:
    """Return the place of a group's colour in the page's palette, as the page computes it."""
    low = high = 0
    for letter in group:
        low = (low + ord(letter)) % 255
        high = (high + low) % 255
    return (low | high << 8) % PALETTE


def view_state(view: View) -> Json:
    """Return the state of a saved view in the form that the comparison page stores."""
    charts: list[Json] = []
    sections: list[Json] = []

    def section(title: str, is_open: bool, columns: int) -> str:
        name = f"vitlab-section-{len(sections)}"
        sections.append({"uuid": name, "name": title, "display": is_open, "columns": columns})
        return name

    for index, (title, metrics, is_open) in enumerate(view.charts):
        place = section(title, is_open, 2)
        charts += [_metric_chart(name, place) for name in metrics]
        if index == 0 and view.axes[0]:
            params, outcomes = map(list, view.axes)
            axes = {"selectedParams": params[:AXES], "selectedMetrics": outcomes, "showAllRuns": False}
            charts.append(_chart("PARALLEL", "parallel", section("Results by varied option", True, 1), **axes))
    for album, names in groupby(sorted(view.images), key=lambda name: name.rpartition("/")[0] or name):
        place = section(f"Images: {album}", True, 1)  # one column, which leaves room for as many runs as possible
        charts += [
            # Parameters would leave no room for the picture.
            _chart("IMAGE", f"images-{key}", place, imageKeys=[key], step=view.images[key], showRunParams=False)
            for key in names
        ]
    by_arm = {"aggregateFunction": "average", "groupByKeys": [{"mode": "tag", "groupByData": GROUP}]}
    return {
        "searchFilter": view.kind and f"tags.`vitlab.kind` = '{view.kind}'",
        "orderByKey": f"tags.`{ORDER}`",
        "orderByAsc": True,
        "selectedColumns": list(view.columns),
        "columnOrder": [RUN_NAME, *view.columns],
        # In pixels; the page's own widths cut names.
        "columnWidths": {RUN_NAME: 190, ROOT: 400, "tags.`verdict`": 160}
        | {column: 6 * len(column) - 24 for column in view.columns if column.startswith("metrics.")},
        "runsHiddenMode": "SHOW_ALL",
        "groupBy": by_arm if view.groups else None,
        "groupsExpanded": {f"tag.{GROUP}.{label}": False for label in view.groups},
        "hideEmptyCharts": True,
        "autoRefreshEnabled": True,
        "compareRunCharts": charts,
        "compareRunSections": sections,
        "isAccordionReordered": True,
    }


def encode_view(view: View, created_ms: int) -> str:
    """Return the tag's value; a state that exceeds the limit is compressed, as on the page itself."""
    text = json.dumps(view_state(view), separators=(",", ":"))
    value = {"name": view.title, "createdAt": created_ms, "updatedAt": created_ms, "state": text}
    if len(json.dumps(value)) > LIMIT:
        value["state"] = f"deflate;{base64.b64encode(zlib.compress(text.encode(), 9)).decode()}"
    return json.dumps(value)


def _chart(kind: str, name: str, section: str, **fields: object) -> Json:
    common = {"metricSectionId": section, "deleted": name in NOT_COMPARED, "runsCountToCompare": BARS}
    return {"uuid": f"vitlab-{name}", "type": kind, **common, **fields}


def _metric_chart(metric: str, section: str) -> Json:
    if metric.partition("/")[0] not in CURVES:
        return _chart("BAR", metric, section, metricKey=metric)
    how = {"lineSmoothness": 0, "xAxisKey": "step", "yAxisExpressions": [], "range": {}}
    return _chart("LINE", metric, section, metricKey=metric, selectedMetricKeys=[metric], **how)


# -- description -------------------------------------------------------------------------------------------------------

NOTE = "mlflow.note.content"
MORE = "\n\n*The rest is in the report.*\n"
SMALL = "report/small"
"""Artifact folder of the pictures scaled to the page, which does not scale them itself."""
WIDTH, TABLE = 860, 139  #: widths of these pictures in pixels, and of tables in characters
TRAINING = "?workflowType=machine_learning"  #: selects the training view; the default view is for language models


def file_link(experiment: str, run: str, file: str) -> str:
    """Return the address, on its server, of a file of a run."""
    return f"#/experiments/{experiment}/runs/{run}/artifacts/{quote(file)}{TRAINING}"


def escape_markdown(text: str) -> str:
    """Escape what Markdown, or the HTML in it, would take for its own; the list of experiments shows the text raw."""
    special = r"[\\`*\[\]<>|#$&@]|~(?=~)|:(?=\S)|\b_|_\b"
    return re.sub(special, lambda match: f"&#{ord(match[0])};", one_line(text))


def describe_arms(answer: str, table: str, metric: str, run_id: str) -> str:
    """Return the description of the experiment of summaries.

    Args:
        answer: what the report says, and a link to the study.
        table: link to the table, and which version of the study is described.
        metric: the study's metric, with its unit.
        run_id: the id of the run that holds the figure of the arms; empty if there is none.
    """
    picture = f"\n{_picture('arms', 'arms.png', run_id)}\n" if run_id else ""
    return (
        f"{answer}\n\n{table}\n\nMean, standard deviation (sd) and interval (low, high) of {escape_markdown(metric)} "
        f"over n seeds, differences and adjusted p values, as in the report.\n{picture}"
    )


def describe_study(report: str, answer: str, links: Iterable[str], run: str) -> str:
    """Return the description, truncated to whole lines within MLflow's limit.

    The page shows the first line and a half until it is opened, so the answer comes first, and the question is no
    heading.

    Args:
        report: the report as Markdown, with pictures named by their files.
        answer: what it says, and a link to the table of arms.
        links: links to views, files and models.
        run: the id of the run that holds the report's files.
    """
    title, _, rest = _convert_to_mlflow_markdown(report, run).partition("\n")
    text = f"{answer}\n\n{title.removeprefix('# ')}\n\n{' · '.join(links)}\n{rest}\n"
    return text if len(text) <= LIMIT else text[: text.rfind("\n", 0, LIMIT - len(MORE))] + MORE


def shrink_pictures(pictures: Iterable[Path], folder: Path) -> None:
    """Write pictures scaled to the width of the page."""
    from PIL import Image

    folder.mkdir(parents=True)
    for file in pictures:
        with Image.open(file) as picture:
            picture.thumbnail((WIDTH, 4 * WIDTH))
            picture.save(folder / file.name)


def _convert_to_mlflow_markdown(markdown: str, run: str) -> str:
    """Link pictures to the run's files, and convert tables and escapes to what MLflow's Markdown supports."""
    text = re.sub(r"(?:^\|.*\n)+", lambda match: _table_as_text(match[0]), markdown, flags=re.MULTILINE)
    text = re.sub(r"\\([<>&$#|])", lambda match: f"&#{ord(match[1])};", text)
    picture = re.compile(r"^!\[([\w ]*)\]\((\w+\.png)\)$", re.MULTILINE)
    return picture.sub(lambda match: _picture(match[1], match[2], run), text)


def _table_as_text(table: str) -> str:
    """Return a Markdown table as a block of code; in a table, the page would break words, and align no number."""
    lines = [
        [re.sub(r"\\(.)", r"\1", cell) for cell in re.split(r" *(?<!\\)\| *", line)[1:-1]]
        for line in table.splitlines()
    ]
    columns = [
        Column(title, tuple(cells), right=rule.endswith(":")) for title, rule, *cells in zip(*lines, strict=True)
    ]
    return textwrap.indent(parts_to_text(columns, width=TABLE), "    ")


def _picture(title: str, file: str, run: str) -> str:
    """Return a picture of the report as Markdown."""
    return f"![{title}](get-artifact?{urlencode({'path': f'{SMALL}/{file}', 'run_uuid': run})})"
