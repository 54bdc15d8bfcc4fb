"""The answer of a study: frames, figures and documents.  Importing this imports no pandas and no matplotlib."""

from vitlab.report.document import Content as Content
from vitlab.report.document import Report as Report
from vitlab.report.document import collect as collect
from vitlab.report.document import is_current as is_current
from vitlab.report.document import read_report as read_report
from vitlab.report.document import render as render
from vitlab.report.document import state as state
from vitlab.report.document import warm_up as warm_up
from vitlab.report.document import write as write
from vitlab.report.formats import FORMATS as FORMATS
