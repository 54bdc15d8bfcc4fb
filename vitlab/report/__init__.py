"""The answer of a study: frames, figures and documents.  Importing this imports no pandas and no matplotlib."""

from vitlab.report.formats import FORMATS as FORMATS
from vitlab.report.report import Report as Report
from vitlab.report.report import collect_report as collect_report
from vitlab.report.report import import_libraries as import_libraries
from vitlab.report.report import is_current as is_current
from vitlab.report.report import read_report_if_current as read_report_if_current
from vitlab.report.report import render as render
from vitlab.report.report import write as write
