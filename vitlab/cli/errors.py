"""Errors of the command line: exit codes, sentences with the line of the file and a caret, and JSON for programs.

The JSON is ``{"exit_code", "kind", "mistakes": [{"file", "line", "column", "path", "message", "value", "allowed",
"suggestion"}]}``, described on the page :doc:`guides/json`; ``result`` is added where a command has one all the same.
"""

import errno
import json
import os
import re
import sys
import traceback
from contextlib import suppress
from typing import Any, TextIO

import click

from vitlab import interrupts
from vitlab.errors import (
    Interrupted,
    Problem,
    UserError,
    VitlabError,
    closest,
    line_width,
    nearest,
    one_line,
    public,
)

MACHINE = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO, errno.ESTALE, errno.EFBIG)
"""Error numbers of disks, as opposed to faults of a program."""

ALLOWED = re.compile(
    r"\b(?:[Aa]llowed(?: here)?|Options|Installed|Reported|Streams|[Tt]here|Slots|Seeds|one of): "
    r"(.+?)(?:\.(?:\s|$)|;|$)"
)
ARMS = re.compile(r"\bArms: (.+)(?<! more)\.$")  #: names, in which a comma may be, unless there are too many for all
ROW = re.compile(r"\bline (\d+)\b")  #: of a table, in whose messages it stands
REWORDED = {
    r"Invalid value for '\[?(.*?)\]?': ": r"\1: ",
    "valid integer( range)?": "whole number",
    "valid float( range)?": "number",
    r"('\S*') is not one of": r"found \1; allowed:",
}  #: pattern of click's words to ours
SUGGESTION = re.compile(r"Did you mean '([^']+)'\?")
NAME = re.compile(r"'?([\w./:@+-]+)'?")


def print_error(error: BaseException, output: TextIO | None = None) -> int:
    """Print an error on stderr, and as JSON on ``output`` if there is one; return the exit code.

    Colours are for terminals only; without :func:`line_width`, a mistake is one line, followed by two of its source.
    Passwords of addresses are masked, as logs may be public.
    """
    if isinstance(error, click.UsageError) and error.ctx and not error.message.startswith("Usage: "):  # help of a group
        message = one_line(error.message if hasattr(error, "possibilities") else error.format_message())
        for pattern, words in REWORDED.items():
            message = re.sub(pattern, words, message)
        hint = f"{_hint_at_word_or_change(error, error.ctx)} See '{error.ctx.command_path} --help'."
        error = click.UsageError(f"{message.removesuffix('.')}.{hint}")
    code, kind, text = _exit_code_kind_and_text(error)
    mistakes = error.mistakes if isinstance(error, VitlabError) else [Problem("", 0, 0, text)]
    if output is not None:
        document: dict[str, Any] = {"exit_code": code, "kind": kind, "mistakes": [*map(_problem_to_json, mistakes)]}
        if (result := getattr(error, "result", None)) is not None:
            document["result"] = result
        with suppress(OSError):  # it cannot be written
            click.echo(public(json.dumps(document, indent=1, default=str)), file=output)
    colour = sys.stderr.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    with suppress(BrokenPipeError):  # whoever read the messages has gone
        for problem in mistakes:
            click.echo(problem.excerpt(line_width(sys.stderr), click.style), err=True, color=colour)
        if len(mistakes) > 1 and isinstance(error.args[0], Problem):
            click.echo(f"{len(mistakes)} mistakes", err=True)
    return code


def _hint_at_word_or_change(error: click.UsageError, context: click.Context) -> str:
    """Return a sentence with the command or the option that may be meant: the nearest, or ``--set``; else nothing."""
    from vitlab.spec.changes import TOP_KEYS, paths_by_name
    from vitlab.spec.mistakes import foreign_option_hint

    if ".yaml" in error.message:
        return " A command takes one study file: 'vitlab run FILE', or 'vitlab new study FILE' for a new one."
    word = getattr(error, "option_name", getattr(error, "command_name", ""))
    near = nearest(word, getattr(error, "possibilities", None) or ())  # click's own may be far from it
    options = [option for parameter in context.command.params for option in parameter.opts]
    if word and (begun := [f"'{option}'" for option in options if option.startswith(f"-{word}")]):  # by a letter
        near = f" Did you mean {' or '.join(begun)}?"
    option, changes = word.strip("-").replace("-", "_"), list[str]()
    if how := foreign_option_hint(f"{context.info_name}_{option}") or foreign_option_hint(f"vitlab_{option}"):
        return how
    is_extra = "extra argument" in error.message
    if is_extra and "--arm" in options and "study" in context.params:
        of_images = " An arm is named by --arm ARM, an image by --image IMAGE."
        return of_images if "--image" in options else " An arm is named by --arm ARM."
    if "--set" not in options:
        return near
    paths = paths_by_name({"train": {"optimizer": {"lr": 0}}}) | {"seed": "seeds"}
    if is_extra:
        changes = [
            f"{paths.get(name, name)}={value}" for name, value in re.findall(r"([\w.]+)=([^\s)]*)", error.message)
        ] or ["PATH=VALUE"]
    elif path := option if "." in option else paths.get(option):
        near, changes = "", [f"{path}=VALUE"]
    elif how := foreign_option_hint(option) or near:
        return how
    elif path := closest(option, TOP_KEYS):
        changes = [f"{path}=VALUE"]
    return f"{near} A value of the study file is changed by --set {' --set '.join(changes)}." if changes else near


def _problem_to_json(problem: Problem) -> dict[str, Any]:
    """Return a mistake as plain values; what its sentence lists and suggests is there by itself, too."""
    allowed, meant = ALLOWED.search(problem.message), SUGGESTION.search(problem.message)
    names = [NAME.fullmatch(item) for item in allowed[1].split(", ")] if allowed else []
    arms, row = ARMS.search(problem.message), ROW.search(problem.message)
    facts = {
        **vars(problem),
        "line": problem.line or (int(row[1]) if row else 0),
        "path": ".".join(map(str, problem.path)),
        "allowed": [name[1] for name in names if name] if names and all(names) else arms and arms[1].split("; "),
        "suggestion": meant[1] if meant else None,
    }
    del facts["source"]
    return facts


def _exit_code_kind_and_text(error: BaseException) -> tuple[int, str, str]:
    if isinstance(error, click.ClickException):
        return error.exit_code, "usage", error.format_message()
    if isinstance(error, VitlabError):
        return error.exit_code, error.kind, str(error)
    if interrupts.state.raised or isinstance(error, KeyboardInterrupt | click.Abort):
        return Interrupted.exit_code, Interrupted.kind, "interrupted"  # a library may have converted Ctrl-C
    # pathlib hides the number of an error about links behind an exception of its own.
    if isinstance(error, RuntimeError) and getattr(error.__context__, "errno", 0) == errno.ELOOP:
        error = error.__context__ or error  # of Path.resolve, before Python 3.13
    if isinstance(error, OSError) and _is_system_error(error):
        place = error.filename or "standard output, or the disk"  # which have no names here
        reason = (error.strerror or str(error)).lower()
        advice = "Results so far are kept; choose another place, or make this one writable, then run the same command"
        return (
            UserError.exit_code,
            "machine",
            f"{place}: {reason}. {advice} to resume; failed trials need --retry-failed.",
        )
    from vitlab.registry.plugins import find_plugin_frame, format_frame

    if (source := find_plugin_frame(error)) is not None:
        lines = f"{format_frame(source)}: {type(error).__name__}: {error}\n    {source.line}"
        return VitlabError.exit_code, "plugin", f"{lines}\nThis is a fault of the plugin in {source.filename}."
    text = f"{''.join(traceback.format_exception(error))}This is a fault of vitlab or of a plugin; see the lines above."
    return VitlabError.exit_code, VitlabError.kind, text


def _is_system_error(error: OSError) -> bool:
    """Return whether an error is of a disk, a path or a closed standard output, and not of a program."""
    # An error that names a file is about that file, unless a program looks for one that is not there.
    if error.errno in MACHINE or (error.filename and error.errno != errno.ENOENT):
        return True
    try:
        os.write(1, b"")
    except OSError:
        return error.errno == errno.EBADF
    return False
