"""The answer of a study: frames, figures and documents.  Importing this imports no pandas and no matplotlib."""

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
