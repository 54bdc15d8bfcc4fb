"""Deliveries in a background thread, so that no trial waits for a tracker."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path

from vitlab.trackers.base import Tracker


class BackgroundTracker(Tracker):
    """Tracker whose updates return at once; updates during a delivery are combined into the next one."""

    def __init__(self, tracker: Tracker) -> None:
        self.tracker = tracker
        self.title = tracker.title  # type: ignore[misc]  # a class attribute of every other tracker
        self._thread: threading.Thread | None = None

    def deliver(self, *, final: bool, until: float, report: Sequence[Path]) -> str | None:
        """Deliver through the tracker, while the thread waits."""
        return self.tracker.deliver(final=final, until=until, report=report)

    def update(self) -> None:
        """Start a delivery unless one is in progress."""
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self.tracker.update, name=f"to {self.title}", daemon=True)
            self._thread.start()

    def close(self, report: Sequence[Path] = ()) -> str | None:
        """Wait for the thread, then close the tracker."""
        self._join()
        return self.tracker.close(report)

    def sync(self, report: Sequence[Path] = ()) -> str | None:
        """Wait for the thread, then deliver everything again."""
        self._join()
        return self.tracker.sync(report)

    def _join(self) -> None:
        """Wait for the delivery that is under way."""
        if self._thread is not None:
            self._thread.join()
