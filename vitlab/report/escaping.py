"""One escaper for each format of text; HTML itself is escaped by :func:`html.escape` and by Jinja."""

from __future__ import annotations

import re
from typing import Any

from vitlab.report import phrasing

TEX = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", phrasing.DASH: "--"}
TEX |= {phrasing.MINUS: "$-$", "<": r"\textless{}", ">": r"\textgreater{}", '"': "''"}
TEX |= {"\N{SUPERSCRIPT TWO}": "$^2$", "|": r"\textbar{}", phrasing.PLUS_MINUS: r"$\pm$"}
TEX |= {char: f"\\{char}" for char in "&%$#_{}"}


_FORMULA = (*"=+-@\t\r\n", "\N{FULLWIDTH EQUALS SIGN}", "\N{FULLWIDTH PLUS SIGN}")
_FORMULA += ("\N{FULLWIDTH HYPHEN-MINUS}", "\N{FULLWIDTH COMMERCIAL AT}")
_NOT_IN_HTML = re.compile("[\0-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff\ufdd0-\ufdef\ufffe\uffff]")


def printable(text: str) -> str:
    """Replace control characters: the name of an arm must not control the terminal."""
    return "".join(char if char.isprintable() else " " for char in text)


def one_line(text: str) -> str:
    """Return text on one line, where it cannot end a comment."""
    return " ".join(printable(text).split())


def markdown(text: str) -> str:
    """Escape text for Markdown and the HTML it allows."""
    # An underscore within a word, as in an option's name, means nothing there.
    escaped = re.sub(r"[\\`*\[\]<|#~$&]|(?<![^\W_])_|_(?=_*(?:[\W]|$))", r"\\\g<0>", one_line(text))
    # At the start of a line these would start a quotation or a list.
    return re.sub(r"^(?=>)|^(\d*)(?=[-+.)](?:\s|$))", r"\1\\", escaped)


def latex(text: str) -> str:
    """Escape text for LaTeX."""
    escaped = "".join(TEX.get(char, char) for char in re.sub(r"-(?=-)", "-\0", one_line(text))).replace("\0", "{}")
    # After two backslashes these would be parsed as its arguments.
    return f"{{}}{escaped}" if escaped.startswith(("[", "*")) else escaped


def csv_cell(value: Any) -> Any:
    """Prefix text that a spreadsheet would evaluate by an apostrophe, as OWASP advises; other values are unchanged."""
    return f"'{value}" if isinstance(value, str) and value.startswith(_FORMULA) else value


def valid_html(page: str) -> str:
    """Replace the characters that are invalid in HTML, and those that change the direction of surrounding text."""
    return _NOT_IN_HTML.sub("\N{REPLACEMENT CHARACTER}", page)
