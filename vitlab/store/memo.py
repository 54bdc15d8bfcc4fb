"""Caches of a user: JSON files in the user's cache folder.

The key of an entry covers all its inputs, so that entries cannot be stale and several versions of vitlab can share a
file.  If the folder is not writable, values are computed again.
"""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from vitlab.store.folders import write_bytes


class Memo:
    """A cache file, read on construction.

    Args:
        name: Name of the file.
        most: Maximum number of entries; the latest are kept.
    """

    def __init__(self, name: str, most: int) -> None:
        self.name, self.most = name, most
        self.entries: dict[str, Any] = {}
        with suppress(OSError, RuntimeError, ValueError, TypeError):  # missing or damaged
            self.entries = dict(json.loads(self._file().read_bytes()))

    def keep(self) -> None:
        """Write the entries, if the folder is writable."""
        entries = dict(list(self.entries.items())[-self.most :])
        with suppress(OSError, RuntimeError):  # a read-only folder, or no home
            write_bytes(self._file(), json.dumps(entries).encode(), fsync=False)

    def _file(self) -> Path:
        base = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
        return base / "vitlab" / f"{self.name}.json"
