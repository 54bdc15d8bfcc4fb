"""vitlab: a laboratory for Vision Transformer ablations.

The public names are imported on first use, so that ``import vitlab`` costs nothing.
"""

from __future__ import annotations

from vitlab import interrupts

if interrupts.is_command():
    interrupts.install()  # before all other imports, which take a while

from typing import TYPE_CHECKING, Any

from vitlab import imports
from vitlab._version import __version__ as __version__

imports.watch()

if TYPE_CHECKING:
    from vitlab.driver.planning import plan
    from vitlab.errors import SpecError, UserError, VitlabError
    from vitlab.judging.judgement import judge
    from vitlab.lab import run
    from vitlab.report.api import compare, history, load, predictions, results

__all__ = [
    "SpecError",
    "UserError",
    "VitlabError",
    "__version__",
    "compare",
    "history",
    "judge",
    "load",
    "plan",
    "predictions",
    "results",
    "run",
]


def __getattr__(name: str) -> Any:
    return imports.attribute(__name__, name)


def __dir__() -> list[str]:
    return sorted(__all__)
