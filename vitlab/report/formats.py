"""The formats of a report, one entry each: the commands and the files of a report are made from this table."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vitlab.report.escaping import csv_cell
from vitlab.report.latex import latex_table, latex_tables
from vitlab.report.markdown import markdown_report
from vitlab.report.page import page
from vitlab.report.terminal import terminal

if TYPE_CHECKING:
    import pandas as pd

    from vitlab.report.render import Content


@dataclass(frozen=True)
class Format:
    """A format of a report."""

    render: Callable[[Content], str | bytes]
    file: str = ""  #: name in the folder of the report; empty if it is not written there
    of_results: bool = False  #: whether it needs the results, where others are rendered from ``report.json``


def csv(frame: pd.DataFrame) -> str:
    """Return a frame as CSV; text that a spreadsheet would evaluate is prefixed by an apostrophe, as OWASP advises."""
    texts = frame.select_dtypes(exclude="number").columns
    plain = frame.assign(**{str(name): frame[name].map(csv_cell, na_action="ignore") for name in texts})
    return str(plain.rename(columns=csv_cell).to_csv(index=False))


def _json(content: Content) -> str:
    return json.dumps(content.report.to_json(), indent=1, allow_nan=False, ensure_ascii=False) + "\n"


def _parquet(content: Content) -> bytes:
    from vitlab.report.frame import parquet

    return parquet(content.table)


FORMATS = {
    "terminal": Format(lambda content: terminal(content.report)),
    "md": Format(lambda content: markdown_report(content.report), "report.md"),
    "html": Format(page, "report.html", of_results=True),
    "csv": Format(lambda content: csv(content.table), "results.csv", of_results=True),
    "parquet": Format(_parquet, "results.parquet", of_results=True),
    "latex": Format(lambda content: latex_table(content.report), "report.tex"),
    "latex-all": Format(lambda content: latex_tables(content.report)),
    "json": Format(_json, "report.json"),
}
