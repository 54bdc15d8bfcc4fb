import math
from pathlib import Path

import pytest

pytest.importorskip("vitlab_example", reason="pip install -e plugins/vitlab-example")

import torch

from vitlab.plugin import Geometry, check_component, slot


def test_polar_passes_contract_test() -> None:
    check_component("position", "polar")


def test_polar_encodes_distance_and_direction() -> None:
    """Compare a 3x3 grid with hand calculation: the centre, and the patch in the middle of the right edge."""
    sizes = {"image": (6, 6), "channels": 1, "patch": (2, 2), "reduction": 1, "dim": 8, "depth": 1, "heads": 1}
    g = Geometry(**sizes, prefix=("class",), classes=2)
    rows_TD = slot("position").build({"type": "polar", "temperature": 4}, g).add(torch.zeros(1, 10, 8), 0)[0]
    assert rows_TD[0].tolist() == [0] * 8  # the class token
    assert rows_TD[5].tolist() == [0, 0, 1, 1, 0, 0, 1, 1]  # distance 0, direction 0
    turn = [math.pi, 2 * math.pi]  # frequencies 1 and 4 ** (1 / 2), at distance 1
    expected = [math.sin(turn[0]), math.sin(turn[1]), math.cos(turn[0]), math.cos(turn[1]), 0, 0, 1, 1]
    assert rows_TD[6].tolist() == pytest.approx(expected, abs=1e-6)


def test_study_can_be_planned() -> None:
    from vitlab.lab import plan_study

    _, plan = plan_study(Path(__file__).parents[1] / "study.yaml")
    assert [bool(arm.skip) for arm in plan.arms] == [False] * 3
