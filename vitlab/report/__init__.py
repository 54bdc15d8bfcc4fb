"""The answer of a study: frames, figures and documents.  Importing this imports no pandas and no matplotlib."""

from vitlab.report.document import Report as Report
from vitlab.report.document import state as state
from vitlab.report.formats import FORMATS as FORMATS
from vitlab.report.render import Content as Content
from vitlab.report.render import answers as answers
from vitlab.report.render import collect as collect
from vitlab.report.render import is_current as is_current
from vitlab.report.render import read_report as read_report
from vitlab.report.render import render as render
from vitlab.report.render import warm_up as warm_up
from vitlab.report.render import write as write
