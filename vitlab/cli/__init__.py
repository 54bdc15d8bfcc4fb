"""The command line, which imports neither torch nor mlflow, ray or pandas until a command needs them.

Results go to stdout, progress and warnings to stderr.  Exit codes: 0 done or pass, 1 regressed, 2 usage or a mistake in
a file, 3 internal or plugin error, 4 trials failed or missing, 5 inconclusive if the file makes that a failure,
130 interrupted.
"""

from __future__ import annotations

import errno
import importlib
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import click
from click.shell_completion import CompletionItem

from vitlab import interrupts
from vitlab.errors import Interrupted, UserError, VitlabError, nearest

COMMANDS = {
    "run": "train what is missing, track it, and answer the question",
    "plan": "show the arms and trials, and which are cached",
    "validate": "check study files against the installed components",
    "check": "say whether a change has made a study's trials worse",
    "status": "show how far a study is",
    "studies": "list the studies that have been run, and their versions",
    "report": "print or write the report of a study",
    "compare": "compare the arms of two studies",
    "judge": "judge a table of results, or an MLflow experiment",
    "logs": "print what a trial wrote",
    "gc": "delete results of older code",
    "list": "list the slots, the components of one, or the studies that come with vitlab",
    "show": "show a component: its options, its documentation, where it comes from; or a study's file",
    "new": "begin a study, or a plugin: a package with a component, its test and a study",
    "plugins": "list installed plugins and whether they load",
    "completion": "print the script that completes commands and names in a shell",
    "schema": "print the JSON Schema of study files, plugins included",
    "sync": "deliver to the tracker what is missing there",
    "ui": "open the MLflow server on the results",
    "weights": "convert and inspect checkpoints",
    "explain": "show what a trained model looks at",
    "similarity": "compare the features of a study's arms, block by block (CKA)",
    "coordinates": "check that a parametrization does not depend on width (mup)",
}
"""Command to its line in ``vitlab --help``; each command is in the module of its name."""

EPILOG = (
    "'vitlab list studies' lists the studies that come with vitlab, 'vitlab show study NAME' prints the file of one, "
    "and 'vitlab run NAME' runs it."
)


@contextmanager
def _interrupts() -> Iterator[None]:
    """Raise Interrupted for Ctrl-C, for which click would print an empty line."""
    try:
        yield
    except KeyboardInterrupt:
        raise Interrupted("interrupted") from None


class _Commands(click.Group):
    """A click group that imports a command's module when the command is called."""

    def list_commands(self, context: click.Context) -> list[str]:
        return [*COMMANDS]  # not list(COMMANDS): 'list' is the module of that command once it has been imported

    def get_command(self, context: click.Context, name: str) -> click.Command | None:
        if name not in COMMANDS:
            return None
        module = importlib.import_module(f"vitlab.cli.{name}")
        command: click.Command = module.command
        return command

    def shell_complete(self, context: click.Context, incomplete: str) -> list[CompletionItem]:
        commands = [CompletionItem(name, help=text) for name, text in COMMANDS.items() if name.startswith(incomplete)]
        # The options of the group itself come last.
        return [*commands, *click.Command.shell_complete(self, context, incomplete)]  # no command is imported

    def make_context(self, *args: Any, **options: Any) -> click.Context:
        with _interrupts():
            return super().make_context(*args, **options)

    def invoke(self, context: click.Context) -> object:
        with _interrupts():
            value = super().invoke(context)
            sys.stdout.flush()  # fails here, where errors are reported, if the output cannot be written
            return value

    def resolve_command(
        self, context: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in COMMANDS and not args[0].startswith("-") and not context.resilient_parsing:
            raise click.UsageError(f"no command called '{args[0]}'.{nearest(args[0], COMMANDS)}", context)
        return super().resolve_command(context, args)

    def format_commands(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([*COMMANDS.items()])


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]}, epilog=EPILOG)
@click.version_option(package_name="vitlab")
def cli() -> None:
    """vitlab: a laboratory for Vision Transformer ablations."""


def main() -> None:
    """Run the ``vitlab`` command of this process and exit with its code."""
    try:
        code = cli.main(standalone_mode=False)  # the argument of Context.exit, which click returns
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except VitlabError as error:
        from vitlab.cli import errors

        errors.show(error)
        sys.exit(error.exit_code)
    except (KeyboardInterrupt, click.Abort):
        click.echo("interrupted", err=True)
        sys.exit(130)
    except SystemExit as exit_:
        # click and rich exit with 1 when the reader of a pipe has closed it; nothing else exits with 1 here.
        sys.exit(0 if exit_.code == 1 else exit_.code)
    except BaseException as error:  # a plugin can raise anything
        sys.exit(_unexpected(error))
    if code:
        sys.exit(code)


MACHINE = (
    *(errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO, errno.ESTALE),
    *(errno.ENAMETOOLONG, errno.ELOOP, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.EINVAL, errno.EILSEQ),
    *(errno.ENXIO, errno.EBADF, errno.EFBIG),
)
"""Error numbers of disks, paths and a closed standard output, as opposed to faults of a program."""


def _unexpected(error: BaseException) -> int:
    """Report an unexpected exception and return the exit code."""
    if interrupts.state.raised:  # a library has converted Ctrl-C to its own error
        click.echo("interrupted", err=True)
        return interrupts.EXIT_CODE
    # pathlib hides the number of an error about links behind an exception of its own.
    if isinstance(error, RuntimeError) and getattr(error.__context__, "errno", 0) == errno.ELOOP:
        error = error.__context__ or error  # of Path.resolve, before Python 3.13
    if isinstance(error, OSError) and error.errno in MACHINE:
        place = error.filename or "standard output, or the disk"  # which have no names here
        reason = (error.strerror or str(error)).lower()
        click.echo(
            f"{place}: {reason}. Results so far are kept; choose another place, or make this one writable, then run "
            "the same command to resume.",
            err=True,
        )
        return UserError.exit_code
    from vitlab.registry.tracebacks import culprit

    if (source := culprit(error)) is not None:
        notes = "".join(f", {note}" for note in getattr(error, "__notes__", ()))
        click.echo(f"{source.place}: {type(error).__name__}: {error}{notes}\n{source}", err=True)
        click.echo(f"This is a fault of the plugin in {source.file}.", err=True)
        return VitlabError.exit_code
    traceback.print_exception(error)
    click.echo("This is a fault of vitlab or of a plugin, not of yours; the lines above say where.", err=True)
    return VitlabError.exit_code
