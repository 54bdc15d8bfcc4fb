"""Printing of mistakes: each with its line of the file and a caret, in colour on a terminal, and their number."""

from __future__ import annotations

import os
import re
import shutil
import sys
import textwrap
import unicodedata
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
    place = str(problem)[: -len(problem.message) - 2]
    lines = wrapped(str(problem), width)
    if lines.startswith(place):
        lines = click.style(place, bold=True) + lines[len(place) :]
    if not problem.source.strip():
        return lines
    number = str(problem.line)
    margin = " " * len(number)
    source, start = problem.source, problem.column - 1
    room = (width or 120) - len(number) - 4
    if _columns(source) > room:  # cut around the mistake
        first = max(0, min(start - room // 3, len(source) - room + 3))
        cut = "..." if first else ""
        source, start = cut + source[first:], start - first + len(cut)
        source = source if len(source) <= room else f"{source[: room - 3]}..."
    source = re.sub(r"[^\t\S]", " ", source)  # an invisible separator must not break the line
    length = max(1, len(match[0]) if (match := re.match(r"\"[^\"]*\"|'[^']*'|[\w.+/-]+|\S", source[start:])) else 1)
    before = "".join("\t" if character == "\t" else " " * _columns(character) for character in source[:start])
    carets = click.style("^" * _columns(source[start : start + length] or " "), fg="red", bold=True)
    bar = click.style("|", fg="blue")
    return f"{lines}\n {click.style(number, fg='blue')} {bar} {_printable(source)}\n {margin} {bar} {before}{carets}"


def _columns(text: str) -> int:
    """Return the width of a text in terminal columns."""
    return sum(
        0 if unicodedata.combining(character) else 1 + (unicodedata.east_asian_width(character) in "WF")
        for character in text
    )


def _printable(text: str) -> str:
    return "".join(character if character == "\t" or character.isprintable() else "?" for character in text)
