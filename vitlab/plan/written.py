"""Plans as they were written: plan.json of a study that has been run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vitlab.errors import UserError
from vitlab.plan.values import Plan
from vitlab.store import read_json


def read_plan(file: Path) -> Plan | None:
    """The plan in a file, or None where there is no file.

    Raises:
        UserError: if it holds none, or one of another version.
    """
    data = plan_data(file)
    try:
        return None if data is None else Plan.from_json(data)
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise _unreadable(file, error) from None


def plan_data(file: Path) -> Mapping[str, Any] | None:
    """The same as it stands there, for what one of another version may hold as well.

    Raises:
        UserError: if it is no JSON.
    """
    try:
        data = read_json(file)
    except ValueError as error:
        raise _unreadable(file, error) from None
    if data is not None and not isinstance(data, Mapping):
        raise _unreadable(file, TypeError(f"{type(data).__name__}, no mapping"))
    return data


def _unreadable(file: Path, error: Exception) -> UserError:
    return UserError(
        f"{file} is no plan that can be read ({error!r}); without it, 'vitlab run' plans the study anew, and trains "
        "nothing that is there"
    )
