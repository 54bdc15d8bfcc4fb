"""vitlab: a laboratory for Vision Transformer ablations.

The public names are imported on first use, so that ``import vitlab`` costs nothing.
"""

from __future__ import annotations

from vitlab import interrupts

if interrupts.is_command():
    interrupts.install()  # before all other imports, which take a while

import importlib
from typing import TYPE_CHECKING, Any

from vitlab import imports
from vitlab._version import __version__ as __version__

imports.watch()

if TYPE_CHECKING:
    from vitlab.errors import SpecError as SpecError
    from vitlab.errors import UserError as UserError
    from vitlab.errors import VitlabError as VitlabError
    from vitlab.judging.judgement import judge as judge
    from vitlab.lab import run as run
    from vitlab.report.api import compare as compare
    from vitlab.report.api import history as history
    from vitlab.report.api import load as load
    from vitlab.report.api import predictions as predictions
    from vitlab.report.api import results as results

_HOMES = {
    "SpecError": "vitlab.errors",
    "UserError": "vitlab.errors",
    "VitlabError": "vitlab.errors",
    "compare": "vitlab.report.api",
    "history": "vitlab.report.api",
    "judge": "vitlab.judging.judgement",
    "load": "vitlab.report.api",
    "predictions": "vitlab.report.api",
    "results": "vitlab.report.api",
    "run": "vitlab.lab",
}

__all__ = [
    "SpecError",
    "UserError",
    "VitlabError",
    "__version__",
    "compare",
    "history",
    "judge",
    "load",
    "predictions",
    "results",
    "run",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'vitlab' has no attribute '{name}'")


def __dir__() -> list[str]:
    return sorted(__all__)
