"""Error messages about code that was edited, reloaded or installed after this process had imported it."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from types import ModuleType

from vitlab.imports import last_import, reloads, stamp_of
from vitlab.plan.source import expected, file_of, loaded, tops


def edited_module_message(modules: Iterable[str]) -> str:
    """Return an error message about the first module edited since this process imported it, or ``""``."""
    for module in modules:
        if "==" not in module and loaded(module).digest != expected(module).digest:
            return (
                f"{file_of(module)} was edited after this process had imported it; restart the process (in a "
                "notebook, restart the kernel, or reload the module) and run again"
            )
    return ""


def mixed_versions_message(modules: Iterable[str]) -> str:
    """Return an error message if this process mixes two versions of code, or ``""``.

    After ``b`` alone is reloaded, a module with ``from b import f`` still has the old ``f``; after an upgrade of a
    distribution, the process still runs the version that it imported.
    """
    some_reloaded = reloads() > 0
    for module in modules:
        if "==" in module:
            top = tops.get(module, "")
            last, file = last_import(top), file_of(top)
            if top in sys.modules and last is not None and file is not None and last.stamp != stamp_of(file):
                return (
                    f"{module} was installed after this process had imported {top}; restart the process (in a "
                    "notebook, restart the kernel) and run again"
                )
            continue
        mine = last_import(module) if some_reloaded else None
        if mine is None or module not in sys.modules:
            continue
        for base, name in loaded(module).imports:
            other = last_import(base)
            if other is None or not other.reloaded or other.number <= mine.number or not name:
                continue
            if not isinstance(getattr(sys.modules.get(base), name, None), ModuleType):
                return (
                    f"{file_of(module)} has {name} of {base} from before that was reloaded; reload this file, too, or "
                    "restart the process (in a notebook, restart the kernel), and run again"
                )
    return ""
