"""Reading of plan.json of a study that has been run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vitlab.errors import UserError
from vitlab.plan.metrics import with_facts
from vitlab.plan.values import Plan
from vitlab.store.damage import Damaged
from vitlab.store.files import load_json, mapping, read_json


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


def plan_data(file: Path) -> Mapping[str, Any] | None:
    """Return the JSON of the plan in a file, or None if the file does not exist or is damaged."""

    def checked(data: Any) -> Mapping[str, Any]:
        _plan_of(file, data)
        return mapping(data)

    return read_json(file, checked)


def _plan_of(file: Path, data: Any) -> Plan:
    """Parse a plan; refuse one of another study than its folder's."""
    plan = Plan.from_json(data)
    if "metrics" not in data:  # stored by an earlier version
        plan = with_facts(plan)
    if file.parent.parent.name == "studies" and plan.study != file.parent.name:
        raise ValueError(f"it is the plan of study {plan.study[:100]!r}")
    return plan
