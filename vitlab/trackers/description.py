"""Description of a study's experiment: the report with its pictures, and links to runs and files.

Links name no host, so they lead to the server that shows the page, whatever its address.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

from vitlab.trackers.dashboard import LIMIT, comparison_query

NOTE = "mlflow.note.content"
OLD_LIMIT = 5000  #: maximum length of an experiment tag in earlier versions
MORE = "\n\n*The rest is in the report.*\n"
SEEDS = 8  #: maximum number of linked runs per arm
SMALL = "report/small"
"""Artifact folder of the pictures scaled to the page, which does not scale them itself."""
WIDTH = 860  #: width of these pictures in pixels
TRAINING = "?workflowType=machine_learning"  #: selects the training view; the default view is for language models


def link(text: str, experiment: str, run: str = "", artifact: str = "", view: str = "") -> str:
    """Return a Markdown link to an experiment's comparison page, to a run, or to a file of a run."""
    place = f"#/experiments/{experiment}/runs"
    if run:
        place += f"/{run}" + (f"/artifacts/{quote(artifact)}" if artifact else "") + TRAINING
    elif view:
        place += f"?{comparison_query(view)}"
    return f"[{plain(text)}]({place})"


def plain(text: str) -> str:
    """Escape a text for Markdown and the HTML that Markdown allows."""
    return "".join(f"&#{ord(char)};" if char in "\\`*_{}[]<>()|#~$&!:-" else char for char in " ".join(text.split()))


def describe(report: str, links: Iterable[str], runs: Sequence[tuple[str, Sequence[str]]], run: str) -> str:
    """Return the full description.

    Args:
        report: the report as Markdown, with pictures named by their files.
        links: links to views, files and models.
        runs: arms and the links to their runs.
        run: the id of the run that holds the report's files.
    """
    head, _, rest = _adapt_markdown(report, run).partition("\n")
    text = f"{head}\n\n{' · '.join(links)}\n{rest}"
    table = ["", "## Runs", "", "| arm | runs |", "| --- | --- |"]
    table += [f"| {plain(arm)} | {' '.join(items[:SEEDS])}{' …' * (len(items) > SEEDS)} |" for arm, items in runs]
    return text + "\n".join(table) + "\n"


def shrink(pictures: Iterable[Path], folder: Path) -> None:
    """Write pictures scaled to the width of the page."""
    from PIL import Image

    for file in pictures:
        with Image.open(file) as picture:
            picture.thumbnail((WIDTH, 4 * WIDTH))
            picture.save(folder / file.name)


def set_note(client: Any, experiment: str, text: str) -> None:
    """Set the experiment's description, truncated to MLflow's limit."""
    from mlflow.exceptions import MlflowException

    try:
        client.set_experiment_tag(experiment, NOTE, short(text, LIMIT))
    except MlflowException:  # servers of earlier versions have a lower limit
        client.set_experiment_tag(experiment, NOTE, short(text, OLD_LIMIT))


def short(text: str, limit: int) -> str:
    """Truncate a text to whole lines within ``limit`` characters."""
    return text if len(text) <= limit else text[: text.rfind("\n", 0, limit - len(MORE))] + MORE


def _adapt_markdown(markdown: str, run: str) -> str:
    """Link pictures to the run's files and convert escapes to a form that MLflow's Markdown supports."""

    def address(match: re.Match[str]) -> str:
        return f"![{match[1]}](get-artifact?{urlencode({'path': f'{SMALL}/{match[2]}', 'run_uuid': run})})"

    escaped = re.sub(r"\\([<>&$#|])", lambda match: f"&#{ord(match[1])};", markdown)
    return re.sub(r"^!\[([\w ]*)\]\((\w+\.png)\)$", address, escaped, flags=re.MULTILINE)
