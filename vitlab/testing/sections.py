"""Contract test of sections: a report of two arms with three seeds each, and one before any trial has ended."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

from vitlab import registry
from vitlab.geometry import DataIdentity
from vitlab.identity.trial import Trial
from vitlab.plan.values import Arm, Plan, Planned
from vitlab.spec import STREAMS, Analysis, TrialSpec
from vitlab.store.folders import Store
from vitlab.store.result import Circumstances, Ending, Outcome, TrialResult
from vitlab.testing.assertions import about

WIDTHS = (7.2, 3.6)  #: inches of a page and of a phone


def check_section(choice: registry.ResolvedChoice) -> None:
    """Check that the rows of a section survive JSON, that its columns are equally long, and that figures are drawn."""
    from vitlab.report import collect
    from vitlab.report.document import Report

    name, part = choice.type.rpartition(":")[2], registry.slot("section").build(choice)
    with TemporaryDirectory() as folder:
        for plan, store in _studies(Path(folder)):
            state = "with results" if store.trial(plan.trials[0].trial.key, "").done() else "without a result"
            with about(f"is part of a report {state}"):
                content = collect(plan, store)
                doc = json.loads(json.dumps(content.report.to_json()))
                again = Report.from_json(doc)
            assert again.to_json() == content.report.to_json(), f"rows {state} change when JSON is read again"
            rows = content.report.sections.get(name, ())
            with about(f"is rendered {state}"):
                table = again.table(name)
                figures = [part.figure(rows, content.findings, width) for width in WIDTHS]
            lengths = {len(column.cells) for column in table.columns} if table else set()
            assert len(lengths) < 2, f"columns {state} have {sorted(lengths)} cells; give each one per row"
            assert table is None or bool(table.caption), "a table needs a caption"
            drawn = [figure for figure in figures if figure is not None]
            assert len(drawn) in (0, 2), "a figure is drawn in one of two widths; draw it in both or neither"
            assert all(figure.caption for figure in drawn), "a figure needs a caption"


def _studies(root: Path) -> Iterator[tuple[Plan, Store]]:
    """Yield a study without a result, and with all of them."""
    spec = TrialSpec.model_validate({"data": "digits", "model": "vit", "train": {"steps": 1}})
    arms = (Arm("baseline", {}), Arm("position=none", {"model.position": "none"}, baseline="baseline"))
    store, trials = Store(root), []
    for arm in arms:
        for seed in range(3):
            seeds = dict.fromkeys(STREAMS, seed)
            trials.append(Planned(arm.name, seed, Trial(spec, seeds, (), DataIdentity("d"), key=f"{arm.name}{seed}")))
    plan = Plan("check", "", arms, tuple(trials), Analysis())
    yield plan, store
    for place, planned in enumerate(trials):
        trial = planned.trial
        outcome = Outcome({"val/accuracy": 0.9 + math.sin(place) / 100}, (), "", 1, 1)
        around = Circumstances(0.0, 1.0, "", 1, 1000 + place // 3, 1000, 1, {}, {})
        store.trial(trial.key, trial.code).finish(TrialResult(trial.key, trial.code, Ending.DONE, outcome, around, ""))
    yield plan, store
