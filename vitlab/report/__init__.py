"""The answer of a study: frames, figures and documents.  Importing this imports no pandas and no matplotlib."""

import sys
from types import ModuleType
from typing import NoReturn

from vitlab.errors import UserError
from vitlab.report.formats import FORMATS
from vitlab.report.report import (
    Report,
    collect_report,
    import_libraries,
    is_current,
    read_report_if_current,
    render,
    write,
)

__all__ = [
    "FORMATS",
    "Report",
    "collect_report",
    "import_libraries",
    "is_current",
    "read_report_if_current",
    "render",
    "write",
]


class _Package(ModuleType):
    """The type of this package, which has the name of a command that users look for in Python."""

    def __call__(self, *_: object) -> NoReturn:
        raise UserError("vitlab.report is no function; vitlab.compare(STUDY) returns the report of a study")


sys.modules[__name__].__class__ = _Package
