"""The campaign of ``make soak`` in small: one killed worker, without a server or a cluster."""

from __future__ import annotations

import math
import random
from pathlib import Path

import pytest
import soak
from soak import STUDY, Bout, undisturbed

UNDRAWN = """
import importlib
importlib.import_module("vitlab.report.render").Content.figures = lambda self: {}
"""


def test_study_result_is_equal_after_killed_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(soak, "DRIVER", UNDRAWN + soak.DRIVER)
    short = {**STUDY["base"]["train"], "steps": 40, "evaluations": 4}
    run = {**STUDY["run"], "engine": "loop", "workers": 2}
    study = {"base": {**STUDY["base"], "train": short}, "seeds": 2, "run": run}
    reference = undisturbed(tmp_path / "undisturbed", study)
    assert len(reference) == 2
    faults = ["worker killed"]
    # Each of the two trainings takes three seconds, so the fault has its moment.
    bout = Bout(tmp_path / "disturbed", "soak", ["local"], random.Random(0), study=study, step_s=0.075)
    assert bout.play(faults, math.inf, pause_s=(0.1, 0.3)) == [] and not faults
    assert bout.faults_found(reference) == [] and bout.done == {"worker killed": 1}
