"""The answer of a study: frames, figures and documents.  Importing this imports no other module before it is used."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vitlab.report.render import FORMATS as FORMATS
    from vitlab.report.render import answers as answers
    from vitlab.report.render import read_report as read_report
    from vitlab.report.render import render as render
    from vitlab.report.render import render_between as render_between
    from vitlab.report.render import warm_up as warm_up
    from vitlab.report.render import write as write

__all__ = ["FORMATS", "answers", "read_report", "render", "render_between", "warm_up", "write"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(importlib.import_module("vitlab.report.render"), name)
    raise AttributeError(f"module 'vitlab.report' has no attribute '{name}'")
