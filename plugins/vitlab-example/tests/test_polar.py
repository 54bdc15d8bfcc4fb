import pytest

pytest.importorskip("vitlab_example", reason="pip install -e plugins/vitlab-example")

from vitlab.testing import check_component


def test_polar_keeps_the_contract() -> None:
    check_component("position", "polar")
