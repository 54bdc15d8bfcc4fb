"""Contract tests of every installed component, plugins included."""

from __future__ import annotations

from typing import Annotated

import pytest
import slot_fixtures

from vitlab.components.norm import NoNorm, norm
from vitlab.models.convnet import RegNetY16GF
from vitlab.registry import Pick
from vitlab.spec import Choice
from vitlab.testing import check_component, parametrize_components

SMALLER = {("patch", "resnet"): {"type": "resnet", "layers": [1, 2, 1], "width_factor": 0.125}}
"""Options for what is large without any: three stages and a block that keeps its width are all there is to it."""

NARROWER = {"depths": (1, 1, 2, 1), "widths": (16, 24, 40, 48), "group_width": 8}
"""Sizes of the largest convnet, of which ``test_convnet`` tests the published ones."""

WITH_A_READER = {("tracker", "wandb")}
"""Trackers that read nothing back: the tests of their plugins check them with a reader of the stored files."""


@parametrize_components()
def test_component_passes_contract_test(slot: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for size, value in NARROWER.items():
        monkeypatch.setattr(RegNetY16GF, size, value)
    if (slot, name) in WITH_A_READER:
        pytest.skip("its plugin tests it with a reader of its files")
    check_component(slot, SMALLER.get((slot, name), name))


def test_later_option_leaves_the_keys_of_earlier_trials(monkeypatch: pytest.MonkeyPatch) -> None:
    slot_fixtures.keep(monkeypatch, norm)

    class Before(NoNorm):
        def __init__(self, dim: int, *, eps: float = 1e-6) -> None:
            super().__init__()

    class After(NoNorm):
        def __init__(
            self,
            dim: int,
            *,
            eps: float = 1e-6,
            jitter: float = 0.0,
            inner: Annotated[Choice | str, Pick("norm")] = "layernorm",
        ) -> None:
            super().__init__()

    norm.register("before")(Before)
    norm.register("after")(After)
    earlier, present = (
        norm.resolve_choice("before").hashed(),
        norm.resolve_choice({"type": "after", "inner": "layernorm"}).hashed(),
    )
    assert {**present, "type": "before"} == earlier
    assert norm.resolve_choice({"type": "after", "jitter": 0.5}).hashed()["jitter"] == 0.5
    assert norm.resolve_choice({"type": "after", "inner": "rmsnorm"}).hashed()["inner"]["type"] == "rmsnorm"
    assert (
        norm.resolve_choice({"type": "after", "inner": {"type": "layernorm", "eps": 0.5}}).hashed()["inner"]["eps"]
        == 0.5
    )
