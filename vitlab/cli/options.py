"""Options and path formatting shared by several commands."""

import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import click
from click.core import ParameterSource

from vitlab.cli import say
from vitlab.cli.completion import complete_packaged_or_file, complete_study
from vitlab.errors import UserError, line_width, wrap_text

Callback = TypeVar("Callback", bound=Callable[..., Any])

PATH = click.Path(path_type=Path)
FILE = click.Path(path_type=Path, dir_okay=False)
FOLDER = click.Path(path_type=Path, file_okay=False)

file_argument = click.argument("file", type=PATH, shell_complete=complete_packaged_or_file)
study_argument = click.argument("study", type=PATH, shell_complete=complete_study)
out_option = click.option("--out", type=FOLDER, default="vitlab-runs", help="Folder for everything that is written.")
set_option = click.option(
    "--set",
    "changes",
    multiple=True,
    metavar="PATH=VALUE",
    help="Change a value of the file, such as data.root=/data or seeds=5.",
)
_plugins = partial(
    click.option,
    "--plugin",
    "plugins",
    multiple=True,
    type=FILE,
    help="A Python file that registers components.",
)
plugin_option = _plugins()


def _load_plugins(context: click.Context, parameter: click.Parameter, files: Sequence[Path]) -> None:
    from vitlab.registry import load_file

    for file in () if context.resilient_parsing else files:  # completion runs nothing
        load_file(file)


loading_plugin_option = _plugins(callback=_load_plugins, expose_value=False)
"""The same, for commands that plan nothing: the files are loaded before the command begins."""


def add_study_options(function: Callback) -> Callback:
    """Add what a command asks on the study that it plans: FILE, --out, --set and --plugin."""
    for option in (plugin_option, set_option, out_option, file_argument):
        function = option(function)
    return function


junit_option = click.option("--junit", type=FILE, help="Write JUnit XML here.")


def parse_numbers(text: str) -> tuple[int, ...]:
    """Return several whole numbers, such as ``3,5,10``."""
    try:
        return tuple(map(int, text.split(",")))
    except ValueError:
        raise click.BadParameter(f"'{text}' is no list such as 3,5,10.") from None


def words_of_given_options(context: click.Context, *, without: Sequence[str]) -> Iterator[str]:
    """Yield the words of the command line that repeat the options of a command, except those in ``without``."""
    for option in context.command.params:
        if not isinstance(option, click.Option) or set(without) & set(option.opts):
            continue
        name = str(option.name)
        if context.get_parameter_source(name) is ParameterSource.DEFAULT:
            continue
        if option.is_flag:
            yield option.opts[0]
            continue
        for value in context.params[name] if option.multiple else [context.params[name]]:
            yield from (option.opts[0], str(value))


def parse_changes(changes: tuple[str, ...]) -> dict[str, Any]:
    """Return ``PATH=VALUE`` pairs as a mapping; values are parsed as in a study file."""
    from vitlab.spec.yaml import read_value

    values, mistakes = {}, []
    for change in changes:
        path, _, text = change.partition("=")
        try:
            if not all(path.split(".")):
                raise ValueError("write PATH=VALUE, such as data.root=/data")
            if not text.strip():
                raise ValueError(f"the value is missing; write {path.split(':')[0]}=VALUE, where null stands for none")
            values[path] = read_value(text)
        except ValueError as error:
            mistakes.append(f"--set {change}: {error}")
    if mistakes:
        raise UserError(*mistakes)
    return values


def find_study_file(file: Path) -> Path:
    """Return the file of a study, given by its path or by the name of a packaged study; print a note if both exist."""
    if "=" in str(file) and not file.exists():
        raise UserError(f"{file}: no such file; a value of the study file is changed by --set {file}")
    from vitlab.planning import packaged

    return packaged.find_study_file(file, say)


def print_indented(head: str, text: str) -> None:
    """Print a text behind a head; where lines have a width, break them between words and indent them below the text."""
    width = line_width(sys.stdout)
    click.echo(wrap_text(head + text, width, " " * (len(head) if len(head) < width // 2 else 4)))
