"""What the tests of slots share: registrations that end with the test."""

from __future__ import annotations

from typing import Any

import pytest

from vitlab.registry import Slot, plugin_files, slots


def keep(monkeypatch: pytest.MonkeyPatch, *rooms: Slot[Any]) -> None:
    """Whatever the test registers in these slots, or by a file, is gone after it."""
    for room in rooms:
        for name in ("_members", "_origins"):
            monkeypatch.setattr(room, name, dict(getattr(room, name)))
    monkeypatch.setattr(slots, "_bare", {})
    for name in ("_files", "_texts"):
        monkeypatch.setattr(plugin_files, name, dict(getattr(plugin_files, name)))
    monkeypatch.setattr(plugin_files, "_from_files", list(plugin_files._from_files))
