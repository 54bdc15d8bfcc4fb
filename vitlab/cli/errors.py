"""Printing of mistakes: each with its line of the file and a caret, in colour on a terminal, and their number."""

from __future__ import annotations

import os
import re
import shutil
import sys
import textwrap
from dataclasses import replace

import click

from vitlab.errors import Problem, SpecError, UserError, VitlabError


def show(error: VitlabError) -> None:
    """Print an error on stderr.

    Colours and wrapped lines are for terminals only; elsewhere a mistake is one line, followed by two of its source.
    Passwords of addresses are masked, as logs may be public.
    """
    from vitlab.spec.changes import public

    terminal = sys.stderr.isatty()
    colour = terminal and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    width = shutil.get_terminal_size().columns if terminal else 0
    if isinstance(error, SpecError):
        for problem in error.problems:
            shown = replace(problem, message=public(problem.message), source=public(problem.source))
            click.echo(public(_excerpt(shown, width)), err=True, color=colour)
        if len(error.problems) > 1:
            files = list(dict.fromkeys(problem.file for problem in error.problems))
            typed = any(file.startswith("--set ") for file in files)
            where = "" if typed else f" in {files[0]}" if len(files) == 1 else f" in {len(files)} files"
            click.echo(f"{len(error.problems)} mistakes{where}", err=True)
    else:
        text = public(str(error))
        click.echo(wrapped(text, width) if isinstance(error, UserError) else text, err=True)


def wrapped(text: str, width: int) -> str:
    """Return text in lines of at most ``width`` columns, broken between words; 0 leaves it as it is."""
    if not width:
        return text
    return "\n".join(
        textwrap.fill(line, width, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
        for line in text.split("\n")
    )


def _excerpt(problem: Problem, width: int) -> str:
    """Return a mistake above its line, of which a long one is cut, and carets below the wrong value."""
    from rich.cells import cell_len

    place = str(problem)[: -len(problem.message) - 2]
    lines = wrapped(str(problem), width)
    if lines.startswith(place):
        lines = click.style(place, bold=True) + lines[len(place) :]
    if not problem.source.strip():
        return lines
    # An invisible separator must not break the line.
    source = "".join(character if character in "\t" or character.isprintable() else "?" for character in problem.source)
    number, start = str(problem.line), problem.column - 1
    value = re.match(r"\"[^\"]*\"|'[^']*'|[\w.+/-]+|.", source[start:])
    carets = "^" * max(1, cell_len(value[0]) if value else 1)
    room = (width or 120) - len(number) - 10  # beside the margin and two ellipses
    if cell_len(source) > room:  # cut around the mistake
        first = max(0, start - room // 3)
        source = f"{'...' if first else ''}{source[first : first + room]}..."
        start -= first - len("...") if first else 0
    before = "".join("\t" if character == "\t" else " " * cell_len(character) for character in source[:start])
    margin, bar = " " * len(number), click.style("|", fg="blue")
    carets = click.style(carets[:room], fg="red", bold=True)
    return f"{lines}\n {click.style(number, fg='blue')} {bar} {source}\n {margin} {bar} {before}{carets}"
