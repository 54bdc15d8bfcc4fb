"""Fixtures of tests of slots: registrations that end with the test."""

from __future__ import annotations

from typing import Any

import pytest

from vitlab.registry import Slot, plugins


def refusal(slot: Slot[Any], choice: Any, sizes: Any) -> str:
    """Return why a component does not fit sizes or data; empty if it does."""
    resolved = slot.resolve_choice(choice)
    return resolved.component.incompatibility(sizes, resolved.options) or ""


def keep(monkeypatch: pytest.MonkeyPatch, *slots: Slot[Any]) -> None:
    """Remove what the test registers in these slots, directly or by a file."""
    for slot in slots:
        monkeypatch.setattr(slot, "components", dict(slot.components))
    monkeypatch.setattr(plugins, "files", dict(plugins.files))
