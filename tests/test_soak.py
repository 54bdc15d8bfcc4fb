"""A short campaign: every fault that needs neither a server nor a cluster, once; ``make soak`` has the rest."""

from __future__ import annotations

import math
import random
from pathlib import Path

from soak import STUDY, Bout, undisturbed

FAULTS = ["checkpoint damaged", "disk full", "worker killed", "driver killed", "worker stopped"]


def test_study_result_is_equal_after_random_faults(tmp_path: Path) -> None:
    short = {**STUDY["base"]["train"], "steps": 60, "evaluations": 12}
    run = {**STUDY["run"], "engine": "loop", "workers": 2, "timeout": 5.0}
    design = {"one_at_a_time": {"model.position": ["none"]}}
    study = {**STUDY, "base": {**STUDY["base"], "train": short}, "design": design, "seeds": 2, "run": run}
    reference = undisturbed(tmp_path / "undisturbed", study)
    assert len(reference) == 4
    bout = Bout(tmp_path / "disturbed", "soak", ["local"], random.Random(0), study=study, step_s=0.03)
    faults = FAULTS.copy()
    assert bout.play(faults, math.inf, pause_s=(0.1, 0.3)) == []
    assert bout.faults_found(reference) == []
    assert not faults, "it ended before all had befallen it"
