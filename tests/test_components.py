"""Contract tests of every installed component, plugins included."""

from __future__ import annotations

from vitlab.testing import check_component, parametrize_components

SMALLER = {("patch", "resnet"): {"type": "resnet", "layers": [1, 2, 1], "width_factor": 0.125}}
"""Options for what is large without any: three stages and a block that keeps its width are all there is to it."""


@parametrize_components()
def test_component_passes_contract_test(slot: str, name: str) -> None:
    check_component(slot, SMALLER.get((slot, name), name))
