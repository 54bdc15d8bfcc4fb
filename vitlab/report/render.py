"""Reports of studies: collected, rendered in a format, written into a folder, and read from there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from vitlab.errors import UserError, nearest
from vitlab.plan.values import Plan
from vitlab.plan.versions import folder_of
from vitlab.report import phrasing
from vitlab.report.document import Report, document, state
from vitlab.report.formats import FORMATS, csv
from vitlab.report.markdown import markdown_report
from vitlab.report.phrasing import Row
from vitlab.report.sections import Findings, sections
from vitlab.report.study_results import StudyResults
from vitlab.store.files import read_json, write_bytes
from vitlab.store.folders import Store

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

    from vitlab.report.drawing import Drawing


@dataclass(frozen=True)
class Picture:
    """A figure with its SVG as wide as a page and as wide as a phone, and its caption."""

    figure: Figure
    svg: str
    narrow_svg: str
    caption: str


@dataclass(frozen=True)
class Content:
    """The content of a report, which all formats share."""

    report: Report
    findings: Findings | None = None  #: None for a report that was stored

    @classmethod
    def of(cls, results: StudyResults, arms: Sequence[Row], notes: Sequence[str]) -> Content:
        """Return the content of a comparison that belongs to no single study: answers, arms and notes."""
        findings = Findings(results, arms)
        return cls(Report.of(findings, notes), findings)

    def figures(self) -> dict[str, tuple[Drawing, Drawing]]:
        """Return the figure of each section that has one, as wide as a page and as wide as a phone."""
        from vitlab.report.drawing import NARROW, WIDE

        drawings = {}
        for name, part in sections().items():
            rows = self.report.sections.get(name, ())
            wide, narrow = (part.figure(rows, self._findings, width) for width in (WIDE, NARROW))
            if wide is not None and narrow is not None:
                drawings[name] = wide, narrow
        return drawings

    @cached_property
    def pictures(self) -> dict[str, Picture]:
        """The figures as SVG, by section."""
        from vitlab.report.drawing import svg

        return {
            name: Picture(wide.figure, svg(wide.figure, name), svg(narrow.figure, name), wide.caption)
            for name, (wide, narrow) in self.figures().items()
        }

    @property
    def table(self) -> pd.DataFrame:
        """The results, one row per trial; of what belongs to no single study, one row per arm."""
        if self.report.made is not None:
            return self._findings.results.frame
        from vitlab.report.comparison import summary_frame

        return summary_frame(self.report.arms, self.report.analysis)

    def render(self, format: str) -> str | bytes:
        """Return the report in one format, see :func:`render`."""
        _check_format(format)
        return FORMATS[format].render(self)

    @property
    def _findings(self) -> Findings:
        assert self.findings is not None, "a stored report is rendered in the formats that need no results"
        return self.findings


def render(plan: Plan, store: Store, format: str) -> str | bytes:
    """Render the report of a study in one format; bytes for parquet, otherwise text.

    Args:
        plan: the study.
        store: the output folder.
        format: one of ``FORMATS``: terminal (fitted to the width of this one), md, html, json, csv, parquet, latex (the
            arms, in the width of a paper) or latex-all (every table with all its columns).

    Raises:
        UserError: if there is no such format.
    """
    _check_format(format)  # before results are read
    return collect(plan, store).render(format)


def collect(plan: Plan, store: Store) -> Content:
    """Return the content of a study's report."""
    from vitlab.report.comparison import summary

    at = state(plan, store)
    results = StudyResults.read(plan, store)
    findings = Findings(results, summary(results), store)
    return Content(document(findings, at), findings)


def read_report(plan: Plan, store: Store, format: str) -> str | bytes | None:
    """Return the report that :func:`write` stored, without pandas; None if it is missing or outdated.

    Raises:
        UserError: if there is no such format.
    """
    _check_format(format)
    folder, form = folder_of(store.study(plan.study), plan.version) / "report", FORMATS[format]
    try:
        doc = read_json(folder / FORMATS["json"].file)
        if not isinstance(doc, dict) or doc.get("state") != state(plan, store):
            return None
        if not form.of_results:  # report.md refers to pictures that lie beside that file only
            return form.render(Content(Report.from_json(doc)))
        data = (folder / form.file).read_bytes()
        return data if format == "parquet" else data.decode()
    except (OSError, ValueError, LookupError, TypeError, AttributeError):  # a damaged file is rendered anew
        return None


def is_current(plan: Plan, store: Store) -> bool:
    """Return True if the stored report is up to date in every format, without pandas."""
    folder = folder_of(store.study(plan.study), plan.version) / "report"
    files = [form.file for form in FORMATS.values() if form.file]
    return all((folder / name).is_file() for name in files) and read_report(plan, store, "json") is not None


def answers(results: StudyResults) -> list[str]:
    """Return one sentence per comparison."""
    from vitlab.report.comparison import summary

    return phrasing.answers(summary(results), results.plan.analysis, results.plan.units)


def warm_up() -> None:
    """Import what a report needs beyond this module, which takes seconds; for a thread of its own."""
    from importlib import import_module

    for kind in ("agg", "pdf", "svg"):
        import_module(f"matplotlib.backends.backend_{kind}")
    for name in ("pandas", "scipy.special", "vitlab.report.comparison"):
        import_module(name)


def write(content: Content, folder: Path) -> list[Path]:
    """Write a report into ``folder``: documents, tables and pictures.  Returns the files written.

    They are the files of ``FORMATS``, ``summary.csv`` (one row per arm), ``history.parquet``, and the figures as
    ``.png``, ``.pdf`` and ``.svg``.
    """
    from vitlab.report.comparison import summary_frame
    from vitlab.report.drawing import pdf, png
    from vitlab.report.frame import parquet

    report, pictures = content.report, content.pictures
    files: dict[str, str | bytes] = {f"{name}.svg": picture.svg for name, picture in pictures.items()}
    for name, picture in pictures.items():
        picture.figure.set_layout_engine("none")  # it keeps the layout of the SVG, and takes half the time
        files |= {f"{name}.png": png(picture.figure), f"{name}.pdf": pdf(picture.figure)}
    captions = {name: picture.caption for name, picture in pictures.items()}
    files["summary.csv"] = csv(summary_frame(report.arms, report.analysis))
    files["history.parquet"] = parquet(content._findings.history)
    # report.json is the last, because its state marks the other files as current.
    files |= {form.file: form.render(content) for form in FORMATS.values() if form.file}
    files[FORMATS["md"].file] = markdown_report(report, captions)
    for name, data in files.items():
        write_bytes(folder / name, data if isinstance(data, bytes) else data.encode())
    return [folder / name for name in files]


def _check_format(format: str) -> None:
    if format not in FORMATS:
        raise UserError(f"no report format '{format}'.{nearest(format, FORMATS)} Formats: {', '.join(FORMATS)}.")
