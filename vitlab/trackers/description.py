"""Description of a study's experiment: the report with its pictures, and links to runs and files.

Links name no host, so they lead to the server that shows the page.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from urllib.parse import quote, urlencode

from vitlab.trackers.address import comparison_query
from vitlab.trackers.dashboard import LIMIT

NOTE = "mlflow.note.content"
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
    table += [f"| {plain(arm)} | {' '.join(items[:SEEDS])}{' …' * (len(items) > SEEDS)} |" for arm, items in runs]
    text += "\n".join(table) + "\n"
    return text if len(text) <= LIMIT else text[: text.rfind("\n", 0, LIMIT - len(MORE))] + MORE


def shrink(pictures: Iterable[Path], folder: Path) -> None:
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
