"""What the tests of slots share: registrations that end with the test."""

from __future__ import annotations

from typing import Any

import pytest

from vitlab.slots import Slot, files, registry


def keep(monkeypatch: pytest.MonkeyPatch, *rooms: Slot[Any]) -> None:
    """Whatever the test registers in these slots, or by a file, is gone after it."""
    for room in rooms:
        for name in ("_members", "_origins"):
            monkeypatch.setattr(room, name, dict(getattr(room, name)))
    monkeypatch.setattr(registry, "_bare", {})
    for name in ("_files", "_texts"):
        monkeypatch.setattr(files, name, dict(getattr(files, name)))
    monkeypatch.setattr(files, "_from_files", list(files._from_files))
