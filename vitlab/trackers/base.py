"""The contract of trackers: they are told when to look, and read what happened from the folders of the trials.

Workers know no tracker.  The driver alone delivers, from the journals, and keeps in the study's folder how far it got;
so a tracker that is away delays nothing, and what it missed is delivered when it is back.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path


class Tracker:
    """Shows the trials of one plan somewhere.  The base class shows them nowhere."""

    def update(self) -> None:
        """Deliver what the journals hold by now.

        Returns soon, however slow the tracker is, and never raises because it is away: what could not be delivered
        waits.
        """

    def close(self, report: Sequence[Path] = ()) -> str | None:
        """Deliver all there is, the report's files among it.

        Returns:
            the address to look at; None where nothing could be reached.
        """
        return None
