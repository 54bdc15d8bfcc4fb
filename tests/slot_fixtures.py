"""Fixtures of tests of slots: registrations that end with the test."""

from __future__ import annotations

from typing import Any

import pytest

from vitlab.registry import Slot, plugin_files, slots


def keep(monkeypatch: pytest.MonkeyPatch, *rooms: Slot[Any]) -> None:
    """Remove what the test registers in these slots, directly or by a file."""
    for room in rooms:
        for name in ("_members", "_origins"):
            monkeypatch.setattr(room, name, dict(getattr(room, name)))
    monkeypatch.setattr(slots, "_resolved", {})
    for name in ("_files", "_texts"):
        monkeypatch.setattr(plugin_files, name, dict(getattr(plugin_files, name)))
    monkeypatch.setattr(plugin_files, "_from_files", list(plugin_files._from_files))
