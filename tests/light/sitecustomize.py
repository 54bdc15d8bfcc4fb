"""Start of Python for the processes of some tests: their fork servers skip the imports of ``vitlab.runner.preload``.

For tests whose trials are those of ``executor_runner``, which import no torch.  A folder of its own, so that only the
``PYTHONPATH`` of these tests has it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import CodeType, ModuleType

PRELOAD = "vitlab.runner.preload"


class Finder:
    """Finder of the module of the fork server alone."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path) if name == PRELOAD else None
        if spec is not None and spec.origin is not None:
            spec.loader = Signals(name, spec.origin)
        return spec


class Signals(SourceFileLoader):
    """Loader of the part of the module that sets signals and variables, which stands before its imports."""

    def get_code(self, fullname: str) -> CodeType:
        start, heading, _ = (self.get_source(fullname) or "").partition("\nSLOTS = ")
        assert heading and "signal.signal" in start
        return compile(start, self.path, "exec")


sys.meta_path.insert(0, Finder)  # type: ignore[arg-type]
