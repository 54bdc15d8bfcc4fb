"""Contract of the sections of a report.

A section is one file with everything it needs: what it computes, its table, its figure, their captions, and its notes.
The built-in ones are the modules of this package, so a new section is a new file and nothing else; a plugin registers
its own::

    @section.register("slowest")
    class Slowest(Section[Trial]):
        heading = "Slowest trials"
        row = Trial

        def rows(self, findings): ...
        def table(self, rows, report): ...

A report calls :meth:`Section.rows` once and stores the rows in ``report.json``, under the name of the section.  Every
format is rendered from the stored rows; figures alone are drawn from the results.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

from vitlab.planning.values import Plan
from vitlab.registry import Slot
from vitlab.report import frame
from vitlab.report.frame import StudyResults
from vitlab.report.phrasing import Column, Row, Scale
from vitlab.store.folders import Store

if TYPE_CHECKING:
    import pandas as pd

    from vitlab.report.drawing import Drawing
    from vitlab.report.report import Report

RowT = TypeVar("RowT")


@dataclass(frozen=True)
class Findings:
    """What sections are made from."""

    results: StudyResults
    arms: Sequence[Row]  #: see :func:`vitlab.report.comparison.summary_rows`
    store: Store | None = None  #: None for a table of other programs

    @property
    def plan(self) -> Plan:
        """The plan of the study."""
        return self.results.plan

    @property
    def scale(self) -> Scale:
        """The display scale of the metric by which arms are judged."""
        return Scale.of_plan(self.plan)

    @cached_property
    def history(self) -> pd.DataFrame:
        """Every measurement, see :func:`vitlab.report.frame.history`."""
        return frame.measurements_frame(self.results.trials)


@dataclass(frozen=True)
class Table:
    """A table; columns of the highest rank are left out first where there is no room."""

    columns: Sequence[Column]
    caption: str
    caveat: str = ""  #: what a terminal shows of the caption
    lines: int | None = None  #: most lines in a terminal; None for all


@dataclass(frozen=True, kw_only=True)  # two texts, which a page would show in each other's place
class Image:
    """A stored PNG of a page."""

    file: Path
    caption: str
    heading: str  #: of the pictures that stand beside each other


class Section(Generic[RowT]):
    """A part of a report; a method that a section does not define adds nothing."""

    heading: ClassVar[str]
    place: ClassVar[int] = 1000  #: sections are in the order of their places
    row: ClassVar[type[Any] | None] = None  #: dataclass of :meth:`rows`, of JSON values; None if none are stored
    about: ClassVar[str] = ""  #: what its :meth:`images` show
    in_terminal: ClassVar[bool] = True  #: whether a terminal shows the table
    of_seeds: ClassVar[bool] = False  #: whether it has numbers over seeds, of which those that collapsed are said
    of_table: ClassVar[bool] = False  #: whether it is made from a table of other programs, too

    def inputs(self, plan: Plan, store: Store) -> object:
        """Return, as JSON values, the state of what is read beside results; a report of another state is outdated."""
        return None

    def rows(self, findings: Findings) -> Iterable[RowT]:
        """Return what the section has found; without any, it is left out of the report."""
        return ()

    def notes(self, rows: Sequence[RowT], findings: Findings) -> Iterable[str]:
        """Return the caveats of the rows, or the reason why there are none, one sentence each."""
        return ()

    def table(self, rows: Sequence[RowT], report: Report) -> Table | None:
        """Return the table; None if there is none.  It is asked for where there are rows, or none are stored."""
        return None

    def figure(self, rows: Sequence[RowT], findings: Findings) -> Drawing | None:
        """Draw the figure, at most ``drawing.WIDTH`` inches wide; None if there is none.  Asked for as the table is."""
        return None

    def images(self, rows: Sequence[RowT], store: Store) -> Iterable[Image]:
        """Return stored pictures, which the page alone shows."""
        return ()


def _figure_signature_fault(cls: type[Section[Any]]) -> str | None:
    """Return the sentence for a figure with other arguments, which would fail after all trials were trained."""
    names = list(inspect.signature(cls.figure).parameters)
    return None if len(names) == 3 else f"figure({', '.join(names)}); its arguments are self, rows and findings"


section: Slot[Section[Any]] = Slot("section", Section, fault=_figure_signature_fault)


def finite_or_none(values: Mapping[Any, float]) -> dict[str, float | None]:
    """Return values with None for NaN, which JSON has no number for."""
    return {str(name): None if value != value else value for name, value in values.items()}


def all_sections() -> dict[str, Section[Any]]:
    """Return every section by name, sections of plugins included, in the order of a report."""
    by_name = {name: section.get(name)() for name in section.names()}
    return dict(sorted(by_name.items(), key=lambda item: (item[1].place, item[0])))
