"""Sections of a report, one module each; see :mod:`vitlab.report.sections.base` for the contract.

Every module of this package is a section: a new section is a new file and nothing else.
"""

from __future__ import annotations

from typing import Any

from vitlab.report.sections.base import Findings as Findings
from vitlab.report.sections.base import Image as Image
from vitlab.report.sections.base import Section as Section
from vitlab.report.sections.base import Table as Table
from vitlab.report.sections.base import section as section


def sections() -> dict[str, Section[Any]]:
    """Return every section by name, sections of plugins included, in the order of a report."""
    by_name = {name: section.get(name)() for name in section.names()}
    return dict(sorted(by_name.items(), key=lambda item: (item[1].place, item[0])))
