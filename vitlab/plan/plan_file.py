"""plan.json of a study: the plan of its last run, and the decisions of earlier runs on which the next plan depends."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from vitlab.errors import UserError
from vitlab.plan.registration import with_registration
from vitlab.plan.values import UNDECIDED, Decisions, Plan
from vitlab.spec import Study
from vitlab.spec.tree import Tree
from vitlab.store.files import Damaged, load_json, mapping, read_json, write_json
from vitlab.store.folders import Store


def read_plan(file: Path) -> Plan | None:
    """Return the plan in a file, or None if there is no file.

    Raises:
        UserError: if the file is not a plan, or one in another format.
    """
    try:
        return load_json(file, lambda data: _plan_of(file, data))
    except Damaged as error:
        raise UserError(
            f"{file} is damaged or in another format ({error}); 'vitlab run' sets it aside, plans the study again, and "
            "keeps every result"
        ) from None


def read_decisions(store: Store, study: Study) -> Decisions:
    """Return the decisions of earlier runs of a study; none if the study asks for none or has not been run."""
    if study.tune is None and study.run.engine != "measured" and len(study.seeds.looks) == 1:
        return UNDECIDED
    decisions = Decisions.of(plan_data(store.study(study.study) / "plan.json") or {})
    return decisions if study.run.engine == "measured" else replace(decisions, benchmarks={})


def registered(plan: Plan, store: Store) -> Plan:
    """Return the plan with the analysis registered at the first run."""
    file = store.study(plan.study) / "plan.json"
    return with_registration(plan, plan_data(file), lambda *trial: store.trial(*trial).done())


def write_plan(plan: Plan, store: Store) -> Plan:
    """Write the plan and return it as :func:`registered` does."""
    plan = registered(plan, store)
    write_json(store.study(plan.study) / "plan.json", plan.to_json())
    return plan


def plan_data(file: Path) -> Tree | None:
    """Return the JSON of the plan in a file, or None if the file does not exist or is damaged."""

    def checked(data: Any) -> Tree:
        _plan_of(file, data)
        return mapping(data)

    return read_json(file, checked)


def _plan_of(file: Path, data: Any) -> Plan:
    """Parse a plan, and check that its study is the folder's."""
    plan = Plan.from_json(data)
    if file.parent.parent.name == "studies" and plan.study != file.parent.name:
        raise ValueError(f"it is the plan of study {plan.study[:100]!r}")
    return plan
