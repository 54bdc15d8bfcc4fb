"""The description of a study's experiment: the report itself, its pictures shown, with links to where things are.

Links lead to the server that shows the page, whatever its address: they name no host.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

from vitlab.trackers.dashboard import LIMIT, comparison_query

NOTE = "mlflow.note.content"
LITTLE = 5000  #: characters an experiment's tag holds in earlier versions
MORE = "\n\n*The rest is in the report.*\n"
SEEDS = 8  #: runs of an arm that are linked
SMALL = "report/small"
"""Where among a run's files the pictures are in a size that fits the page, which scales none."""
WIDTH = 860  #: pixels of them
TRAINING = "?workflowType=machine_learning"  #: without it the page shows what belongs to language models


def link(text: str, experiment: str, run: str = "", artifact: str = "", view: str = "") -> str:
    """A Markdown link to an experiment's comparison page, to a run, or to a file of it."""
    place = f"#/experiments/{experiment}/runs"
    if run:
        place += f"/{run}" + (f"/artifacts/{quote(artifact)}" if artifact else "") + TRAINING
    elif view:
        place += f"?{comparison_query(view)}"
    return f"[{plain(text)}]({place})"


def plain(text: str) -> str:
    """Text that Markdown, and the HTML it allows, take for nothing but text."""
    return "".join(f"&#{ord(char)};" if char in "\\`*_{}[]<>()|#~$&!:-" else char for char in " ".join(text.split()))


def describe(report: str, links: Iterable[str], runs: Sequence[tuple[str, Sequence[str]]], run: str) -> str:
    """The description, in full.

    Args:
        report: as Markdown, with pictures named by their files.
        links: to what stands beside it.
        runs: arm and links to its runs.
        run: the id of the run that holds the report's files.
    """
    head, _, rest = _shown(report, run).partition("\n")
    text = f"{head}\n\n{' · '.join(links)}\n{rest}"
    table = ["", "## Runs", "", "| arm | runs |", "| --- | --- |"]
    table += [f"| {plain(arm)} | {' '.join(found[:SEEDS])}{' …' * (len(found) > SEEDS)} |" for arm, found in runs]
    return text + "\n".join(table) + "\n"


def shrink(pictures: Iterable[Path], into: Path) -> None:
    """Write pictures in a size that fits the page."""
    from PIL import Image

    for file in pictures:
        with Image.open(file) as picture:
            picture.thumbnail((WIDTH, 4 * WIDTH))
            picture.save(into / file.name)


def set_note(client: Any, experiment: str, text: str) -> None:
    """Make it the experiment's description: as much as MLflow has room for."""
    from mlflow.exceptions import MlflowException

    try:
        client.set_experiment_tag(experiment, NOTE, short(text, LIMIT))
    except MlflowException:  # servers of earlier versions have less
        client.set_experiment_tag(experiment, NOTE, short(text, LITTLE))


def short(text: str, limit: int) -> str:
    """The text, or its first lines."""
    return text if len(text) <= limit else text[: text.rfind("\n", 0, limit - len(MORE))] + MORE


def _shown(markdown: str, run: str) -> str:
    """Pictures from the run's files; and escapes as MLflow's Markdown understands them."""

    def address(match: re.Match[str]) -> str:
        return f"![{match[1]}](get-artifact?{urlencode({'path': f'{SMALL}/{match[2]}', 'run_uuid': run})})"

    found = re.sub(r"\\([<>&$#|])", lambda match: f"&#{ord(match[1])};", markdown)
    return re.sub(r"^!\[([\w ]*)\]\((\w+\.png)\)$", address, found, flags=re.MULTILINE)
