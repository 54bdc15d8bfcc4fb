"""Smoke test of a study: two steps of every combination of its components."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from vitlab.driver.planning import count_params_and_macs, fetch_unidentified_data, plan_study
from vitlab.driver.scheduler import train_missing
from vitlab.driver.session import Session, Watch
from vitlab.errors import TrialFailed
from vitlab.identity.code import used_optional_modules
from vitlab.identity.trial import Trial
from vitlab.planning.values import Plan
from vitlab.spec import read_study
from vitlab.spec.tree import NewTree, Values, value_at
from vitlab.spec.trial import SOURCES, TEST_SET_OPTIONS
from vitlab.store.folders import Store

CORRUPTED_IMAGES = 32
"""Test images of each corruption in a smoke test."""


def run_smoke_test(
    file: str | Path,
    *,
    out: str | Path,
    changes: Values = {},
    plugins: Sequence[str | Path] = (),
    watch: Watch | None = None,
    check_components: Callable[[Plan], None] = lambda _: None,
) -> int:
    """Train two steps of every combination of components of a study and return their number.

    ``check_components`` is called before the first trial, and raises if a component must not be trained.

    Raises:
        TrialFailed: if any combination fails.
    """
    # Matching and tuning do not affect whether components run.
    base = read_study(file, changes)[1].data.get("base")
    short = {**changes, **_changes_to_two_steps(base), "seeds": 1, "match": None, "tune": None}
    study, plan = plan_study(file, changes=short, plugins=plugins)
    store = Store(Path(out).resolve())
    if fetch_unidentified_data(plan, store, file):
        study, plan = plan_study(file, changes=short, plugins=plugins)
    # This builds and runs every model on torch's meta device, as 'vitlab validate --build' does.
    from vitlab.runner.models import check_weights_of_role

    count_params_and_macs(plan, file, check_components, check_weights_of_role)
    check_components(plan)
    by_name = {trial.name: trial for trial in plan.trials_with_keys}
    distinct = {_component_signature(planned.trial, by_name): planned for planned in reversed(plan.trials)}.values()
    missing = [item for item in distinct if not store.folder(item.trial).done()]
    session = Session(store, study.run, plugins, watch or Watch())
    ends = train_missing(plan, missing, session, retry_failed=True)
    if failed := list(ends.values()).count("failed"):
        raise TrialFailed(f"{failed} of {len(distinct)} combinations of components failed; the lines above say why")
    return len(distinct)


def _component_signature(trial: Trial, by_name: Mapping[str, Trial]) -> tuple[object, ...]:
    """Return a value that is equal for trials whose own and whose prerequisites' components are the same."""
    needs = [(role, _component_signature(by_name[name], by_name)) for role, name in sorted(trial.needs.items())]
    spec = trial.spec
    head = None if spec.init_from is None else spec.init_from.head
    test_sets = [bool(spec.data.options.get(name)) for name in TEST_SET_OPTIONS]
    return (trial.origins, used_optional_modules(spec), spec.train.precision, head, *test_sets, *needs)


def _changes_to_two_steps(tree: Any, place: str = "") -> NewTree:
    """Return the changes that shorten a trial and the trials whose weights it starts from to two steps."""
    changes: NewTree = {
        f"{place}train.steps": 2,
        f"{place}train.evaluations": 1,
        f"{place}train.stop_early": None,
    }
    if corrupted := value_at(tree, ("data", "corrupted")):
        few = corrupted if isinstance(corrupted, Mapping) else {}
        few = {"corruptions": corrupted} if isinstance(corrupted, list) else few
        changes[f"{place}data.corrupted"] = {**few, "images": CORRUPTED_IMAGES}
    for path in SOURCES.values():
        source = value_at(tree, (*path, "trial"))
        if isinstance(source, Mapping):
            changes |= _changes_to_two_steps(source, f"{place}{'.'.join(path)}.trial.")
    return changes
