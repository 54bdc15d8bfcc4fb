"""Options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from vitlab.errors import UserError
from vitlab.spec.yaml import read_value

file_argument = click.argument("file", type=click.Path(path_type=Path))
out_option = click.option(
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path("vitlab-runs"),
    show_default=True,
    help="Folder for everything that is written.",
)
set_option = click.option(
    "--set",
    "changes",
    multiple=True,
    metavar="PATH=VALUE",
    help="Change a value of the file, such as data.root=/data or seeds=5.",
)
plugin_option = click.option(
    "--plugin",
    "plugins",
    multiple=True,
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="A Python file that registers components.",
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


def parse_changes(changes: tuple[str, ...]) -> dict[str, Any]:
    """``PATH=VALUE`` pairs; values are read as in a study file.

    Raises:
        UserError: for what is not such a pair.
    """
    values = {}
    for change in changes:
        path, equals, text = change.partition("=")
        if not equals or not path or any(not part for part in path.split(".")):
            raise UserError(f"--set {change}: write PATH=VALUE, such as data.root=/data")
        try:
            values[path] = read_value(text)
        except ValueError as error:
            raise UserError(f"--set {change}: {error}") from None
    return values
