"""Every installed component, guests included, keeps the contract of its slot."""

from __future__ import annotations

import pytest

from vitlab.testing import MODEL_SIDE, check_component, components

INSTALLED = [(slot, name) for slot in MODEL_SIDE for name in components(slot)]


@pytest.mark.parametrize(("slot", "name"), INSTALLED)
def test_contract(slot: str, name: str) -> None:
    check_component(slot, name)


def test_every_slot_has_components() -> None:
    assert {slot for slot, _ in INSTALLED} == set(MODEL_SIDE)
