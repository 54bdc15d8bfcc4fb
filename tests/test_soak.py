"""A short campaign: every fault that needs neither a server nor a cluster, once; ``make soak`` has the rest."""

from __future__ import annotations

import math
import random
from pathlib import Path

import pytest
from soak import STUDY, Bout, undisturbed

FAULTS = ["checkpoint damaged", "disk full", "worker killed", "driver killed", "worker stopped"]


def test_study_result_is_equal_after_random_faults(tmp_path: Path) -> None:
    short = {**STUDY["base"]["train"], "steps": 60, "evaluations": 12}
    run = {**STUDY["run"], "engine": "loop", "workers": 2, "timeout": 5.0}
    design = {"one_at_a_time": {"model.position": ["none"]}}
    study = {**STUDY, "base": {**STUDY["base"], "train": short}, "design": design, "seeds": 2, "run": run}
    reference = undisturbed(tmp_path / "undisturbed", study)
    assert len(reference) == 4
    faults = FAULTS.copy()
    for number in range(4):  # on a busy machine a study may end before every fault was injected
        folder = tmp_path / f"disturbed-{number}"
        bout = Bout(folder, "soak", ["local"], random.Random(number), study=study, step_s=0.03)
        assert bout.play(faults, math.inf, pause_s=(0.1, 0.3)) == []
        assert bout.faults_found(reference) == []
        if not faults:
            return
    pytest.fail(f"no study was long enough for {', '.join(faults)}")
