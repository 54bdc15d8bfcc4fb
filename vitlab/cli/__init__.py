"""The command line, which imports neither torch nor mlflow, ray or pandas until a command needs them.

Results go to stdout, progress and warnings to stderr.  A command prints its result, or returns it as a list of lines.
With ``--json``, stdout has one JSON document and nothing else: the result, or the mistakes.

Exit codes: 0 done or pass, 1 differs or regressed, 2 usage or a mistake in
a file, 3 internal or plugin error, 4 trials failed or missing, 5 inconclusive if the file makes that a failure,
130 interrupted.
"""

import json
import os
import sys
from collections.abc import Sequence
from contextlib import nullcontext, redirect_stdout
from pathlib import Path
from typing import Any, TextIO

import click
from click.shell_completion import CompletionItem

from vitlab.imports import import_object

SECTIONS = {
    "Studies": {
        "run": "train what is missing, track it, and answer the question",
        "plan": "show the arms and trials, and which are trained already",
        "validate": "check study files against the installed components",
        "status": "show how far a study is",
        "report": "print the report of a study",
        "compare": "compare the arms of two studies",
        "studies": "list the studies that have been run, and their versions",
        "logs": "print what a trial wrote",
        "gc": "delete results of older code",
        "new": "begin a study, or a plugin with a component of your own",
        "list": "list components, packaged studies, or timm's weights",
        "show": "show a component with its options, or the file of a study",
    },
    "Tracking": {
        "ui": "open the results in MLflow",
        "sync": "deliver to the tracker what is missing there",
    },
    "Trained models and weights": {
        "explain": "show what a trained model looks at",
        "export": "write a trained model as ONNX or for torch.export, with a card",
        "weights": "convert and inspect files of weights",
    },
    "Changed code": {
        "check": "say whether a change has made a study's trials worse",
        "ab": "compare two commits of your repository on a study",
        "coordinates": "check that a parametrization does not depend on width (mup)",
    },
    "Results of other programs": {
        "judge": "judge a table of results, or an MLflow experiment",
    },
    "Editors, shells and agents": {
        "completion": "print the script that completes commands and names in a shell",
        "schema": "print the JSON Schema of study files, plugins included",
        "skill": "print a SKILL.md for agents, with every key and component",
        "plugins": "list installed plugins and whether they load",
    },
}
"""Section of ``vitlab --help`` to its commands and their lines."""

COMMANDS = {name: line for commands in SECTIONS.values() for name, line in commands.items()}

MODULES = {
    "ab": "check",
    "compare": "report",
    "coordinates": "check",
    "explain": "models",
    "export": "models",
    "gc": "status",
    "judge": "report",
    "list": "show",
    "logs": "status",
    "plugins": "show",
    "schema": "show",
    "skill": "new",
    "studies": "status",
    "validate": "plan",
}
"""Modules of commands that are not in the module of their name."""

SETTINGS = {"help_option_names": ["-h", "--help"], "show_default": True}
EPILOG = (
    "'vitlab list studies' lists the studies that come with vitlab, 'vitlab show study NAME' prints the file of one, "
    "and 'vitlab run NAME' runs it.\n\n"
    f"\b\nThe guides, as Markdown:\n  {Path(__file__).parents[1] / 'pages' / 'index.md'}"
)


def _enable_json(context: click.Context, parameter: click.Parameter, value: bool) -> None:
    """Keep the stream of the JSON document, which :func:`main` may have set, as the context's object."""
    if value and context.obj is None:
        context.obj = sys.stdout


JSON = click.Option(
    ["--json"],
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_enable_json,
    help="Print JSON: the result, or the mistakes.",
)


def wants_json() -> bool:
    """Return whether the command was called with ``--json``."""
    return click.get_current_context().obj is not None


def say(sentence: str) -> None:
    """Print a sentence on progress, or a warning, on stderr."""
    click.echo(sentence, err=True)


def print_json(data: Any) -> None:
    """Print a result as the JSON document of a command; a text is one already."""
    output = click.get_current_context().obj
    click.echo(data if isinstance(data, str) else json.dumps(data, indent=1, default=str), file=output)


def print_lines(lines: Sequence[str]) -> None:
    """Print the lines of a result, or with ``--json`` a document of them."""
    if wants_json():
        print_json({"lines": lines})
    else:
        for line in lines:
            click.echo(line)


class _Commands(click.Group):
    """A click group that imports a command's module when the command is called."""

    def get_command(self, context: click.Context, name: str) -> click.Command | None:
        if name not in COMMANDS:
            return None
        command: click.Command = import_object(f"vitlab.cli.{MODULES.get(name, name)}", f"{name}_command")
        for each in command.commands.values() if isinstance(command, click.Group) else [command]:
            if JSON not in each.params:
                each.params.append(JSON)
        return command

    def shell_complete(self, context: click.Context, incomplete: str) -> list[CompletionItem]:
        commands = [CompletionItem(name, help=text) for name, text in COMMANDS.items() if name.startswith(incomplete)]
        # The options of the group itself come last.
        return [*commands, *click.Command.shell_complete(self, context, incomplete)]  # no command is imported

    def invoke(self, context: click.Context) -> None:
        value = super().invoke(context)
        if value is not None:
            print_lines(value)
        (context.obj or sys.stdout).flush()  # fails here, where errors are reported, if it cannot be written

    def format_commands(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        for title, commands in SECTIONS.items():
            with formatter.section(title):
                formatter.write_dl([*commands.items()])


@click.group(
    cls=_Commands, commands=dict.fromkeys(COMMANDS, click.Command(None)), context_settings=SETTINGS, epilog=EPILOG
)
@click.version_option(package_name="vitlab")
def cli() -> None:
    """vitlab: a laboratory for Vision Transformer ablations."""


def _reserve_stdout_for_answer() -> TextIO:
    """Return standard output for the answer alone: what else is written to its descriptor goes to standard error."""
    is_of_process = sys.stdout is sys.__stdout__
    if not is_of_process:  # but of a test
        return sys.stdout
    sys.stdout.flush()
    try:
        os.write(1, b"")
    except OSError:  # the error is reported when the answer is written
        return sys.stdout
    output = os.fdopen(os.dup(1), "w", encoding=sys.stdout.encoding, errors=sys.stdout.errors)
    os.dup2(2, 1)
    return output


def main() -> None:
    """Run the ``vitlab`` command of this process and exit with its code."""
    output = _reserve_stdout_for_answer() if "--json" in sys.argv[1:] else None
    try:
        # What plugins and libraries print must not mix with JSON.
        with nullcontext() if output is None else redirect_stdout(sys.stderr):
            code = cli.main(standalone_mode=False, obj=output)  # the argument of Context.exit, which click returns
    except SystemExit as exit_:
        # click and rich exit with 1 when the reader of a pipe has closed it; nothing else exits with 1 here.
        sys.exit(0 if exit_.code == 1 else exit_.code)
    except BaseException as error:  # a plugin can raise anything
        from vitlab.cli.errors import print_error

        code = print_error(error, output)
    if code:
        sys.exit(code)
