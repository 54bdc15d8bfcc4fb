"""What holds for every test, of vitlab and of the plugins beside it."""

from __future__ import annotations

import sys

import pytest


@pytest.fixture(autouse=True)
def _torch_draws_the_same_whatever_ran_before() -> None:
    """A test that draws without a seed of its own fails again when it is run again, alone or among others."""
    torch = sys.modules.get("torch")  # where a test needs none, none is imported
    if torch is not None:
        torch.manual_seed(0)
