"""Deliveries beside a run: by a thread of their own, so that no trial waits until a tracker has been reached."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path

from vitlab.trackers.base import Tracker


class Aside(Tracker):
    """A tracker whose updates return at once.  One delivery at a time: what comes meanwhile goes with the next."""

    def __init__(self, tracker: Tracker) -> None:
        self.tracker = tracker
        self.title = tracker.title  # type: ignore[misc]  # of the class, for every other tracker
        self._thread: threading.Thread | None = None

    def deliver(self, *, final: bool, until: float, report: Sequence[Path]) -> str | None:
        return self.tracker.deliver(final=final, until=until, report=report)

    def update(self) -> None:
        """Begin a delivery, unless one is under way."""
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self.tracker.update, name=f"to {self.title}", daemon=True)
            self._thread.start()

    def close(self, report: Sequence[Path] = ()) -> str | None:
        if self._thread is not None:
            self._thread.join()
        return self.tracker.close(report)
