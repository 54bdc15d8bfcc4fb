"""What is found once for a user, and not once for a command: JSON in the user's cache folder.

Every entry stands under a digest of all that it follows from, so it can be out of date no more than that digest can,
and several versions of vitlab share a file.  Where nothing can be kept, it is found again.
"""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from vitlab.store.folders import write_bytes


class Memo:
    """Entries of one kind, as they are on the disk now."""

    def __init__(self, name: str, most: int) -> None:
        """
        Args:
            name: of the file.
            most: entries that are kept, the latest.
        """
        self.name, self.most = name, most
        self.entries: dict[str, Any] = {}
        with suppress(OSError, RuntimeError, ValueError, TypeError):  # not there, or not what was written
            self.entries = dict(json.loads(self._file().read_bytes()))

    def keep(self) -> None:
        """Write them down, where that is possible."""
        entries = dict(list(self.entries.items())[-self.most :])
        with suppress(OSError, RuntimeError):  # nowhere to keep them, or no home
            write_bytes(self._file(), json.dumps(entries).encode(), settled=False)

    def _file(self) -> Path:
        base = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
        return base / "vitlab" / f"{self.name}.json"
