"""Sections of a report, one module each; see :mod:`vitlab.report.sections.base` for the contract."""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules
from typing import Any

from vitlab.report.sections.base import Findings as Findings
from vitlab.report.sections.base import Image as Image
from vitlab.report.sections.base import Section as Section
from vitlab.report.sections.base import Table as Table
from vitlab.report.sections.base import section as section

# Every module of this package is a section: a new section is a new file and nothing else.
for _module in iter_modules(__path__, f"{__name__}."):
    import_module(_module.name)


def sections() -> dict[str, Section[Any]]:
    """Return every section by name, sections of plugins included, in the order of a report."""
    by_name = {name: section.get(name)() for name in section.names()}
    return dict(sorted(by_name.items(), key=lambda item: (item[1].place, item[0])))
