"""Contract tests for components, built-in or from plugins.

The complete test of a plugin can be::

    from vitlab.plugin import check_component

    def test_spiral() -> None:
        check_component("position", "spiral")

or, for a package with several components::

    from vitlab.plugin import check_component, parametrize_components

    @parametrize_components(source="acme-vit")
    def test_contract(slot: str, name: str) -> None:
        check_component(slot, name)
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any
from unittest import SkipTest

from vitlab import registry
from vitlab.data.prepare import data_info
from vitlab.errors import BrokenComponent
from vitlab.geometry import Geometry
from vitlab.identity.code import iter_resolved_choices
from vitlab.identity.trial import Trial
from vitlab.planning.values import Plan
from vitlab.registry.plugins import place_of_class
from vitlab.spec import Choice
from vitlab.testing.assertions import FirstCallFailed, check_each, prefix_failures
from vitlab.testing.data import check_augment, check_dataset
from vitlab.testing.executors import check_executor
from vitlab.testing.models import check_init_scheme, check_model, check_part
from vitlab.testing.results import check_section, check_tracker
from vitlab.testing.training import (
    check_engine,
    check_loss,
    check_metric,
    check_objective,
    check_optimizer,
    check_schedule,
)

if TYPE_CHECKING:
    from pytest import MarkDecorator


CHECKS: Mapping[str, Callable[[registry.ResolvedChoice], None]] = {
    **dict.fromkeys(("patch", "position", "block", "attention", "mlp", "norm", "head"), check_part),
    "init": check_init_scheme,
    "model": check_model,
    "dataset": check_dataset,
    "augment": check_augment,
    "optimizer": check_optimizer,
    "schedule": check_schedule,
    "loss": check_loss,
    "objective": check_objective,
    "metric": check_metric,
    "engine": check_engine,
    "executor": check_executor,
    "section": check_section,
    "tracker": check_tracker,
}
"""Slot to the check of its components."""

NEEDS_OPTIONS = ("model", "dataset", "executor")
"""Slots whose components may have options without a default."""


def components(slot: str, source: str | None = None) -> list[str]:
    """Return the names of every installed component of a slot, without importing any plugin.

    A name that two sources offer is listed once for each, as ``source:name``.

    Args:
        slot: such as ``position``.
        source: name of a distribution; by default all distributions.
    """
    entries = registry.list_entries(slot)
    offered = Counter(entry.name for entry in entries)
    return [
        entry.name if offered[entry.name] == 1 else f"{entry.origin.source}:{entry.name}"
        for entry in entries
        if source in (None, entry.origin.source)
    ]


def parametrize_components(*only: str, source: str | None = None) -> MarkDecorator:
    """Parametrize a test of ``slot`` and ``name`` over every installed component.

    Args:
        only: slots; by default all slots.
        source: name of a distribution; by default all distributions.
    """
    import pytest

    parameters = [(slot, name) for slot in only or CHECKS for name in components(slot, source)]
    return pytest.mark.parametrize(("slot", "name"), parameters)


def check_component(slot: str, choice: str | Mapping[str, Any]) -> None:
    """Check that a component implements the contract of its slot.

    Every component: options have annotations and defaults and survive a round trip through JSON, and it has a
    docstring.

    Parts of a model, on a square and an oblong grid of patches and without prefix tokens (a part may refuse each with a
    reason):

    - The part builds on the CPU and on the meta device, and works after it was moved to another device.
    - Shapes and dtypes are preserved, bfloat16 included; values and gradients are finite.
    - Every parameter receives a gradient, which matches finite differences.
    - Results are repeatable, and samples do not mix, in evaluation and in training.
    - A state dict loads into another instance and gives the same results, also after a pass in training.
    - Declarations (``takes_bias``, ``vmap_safe``, ``reads``, a canonical form, ...) are true.

    Data sets: both splits are as ``info`` says and equal at every reading, labels are classes, and test
    images are no training images.  A data set whose files are not here is skipped.

    Augmentations: the change of an image depends on the key and on the image alone, in any batch, and keeps shape and
    dtype; masks get no new labels.

    Optimizers and objectives, on a small ViT: two equal trainings end with equal weights, bit for bit, and so does one
    that is interrupted and goes on from its checkpoint.  The groups of an optimizer decide on rate and weight decay.

    Engines: trainings of a small ViT end with the weights that the loop gives, up to rounding, and each with the
    weights that it gets alone, bit for bit.

    Schedules: factors are positive and depend on the step and the length alone, for every warm-up and for one step.

    Losses: the mean over images, equal in micro-batches, with finite gradients, and lower for right predictions.

    Metrics: the value is independent of batch sizes and order, within its bounds, and best for correct predictions;
    unlabelled pixels and images do not count.

    Executors, on small jobs in worker processes of this machine:

    - ``slots`` is at least 1 and at most ``run.workers``, and no more jobs run at a time.
    - Every job ends exactly once: as ``done`` only with a result in the store, as ``lost`` if its process is killed,
      and as ``error`` if its trial raises.  Every other ending than ``done`` and ``stopped`` has a sentence.
    - ``poll`` waits up to its timeout and no longer.
    - ``cancel`` makes running jobs write a checkpoint and end as ``stopped``, and leaves no process; the next executor
      trains such a job to its end.
    - What a worker prints is in ``log.txt`` of the job's folder.
    - No method raises.

    A job's process is found by what it prints to that log, so on other machines neither its death nor its end is
    checked.  If jobs run in the driver's process (``in_driver``), the endings ``done`` and ``error`` are checked,
    and that ``cancel`` drops jobs that have not begun; the log and the stop of a running job are not.  Not checked
    for any executor: GPUs and threads, ``run.timeout``, SIGTERM, the death of the driver, child processes of a
    worker, and optional methods.

    Trackers of journals: files hold each point once even if a driver dies between delivery and commit; after a trial is
    retrained they hold the new journal; files of other trials do not change.

    Sections, of a report with results and of one without: rows survive JSON, the columns of a table are equally long,
    figures are drawn, and tables and figures have captions.

    Args:
        slot: such as ``position``.
        choice: such as ``rope2d``, ``distribution:rope2d``, or with options ``{"type": "rope2d", "theta": 10}``.

    Raises:
        AssertionError: with the component, the line of its class, its behaviour and the expected behaviour; a line for
            each check that fails, of those that do not depend on each other.
        unittest.SkipTest: with the reason, if a component cannot be used here, such as an executor without its cluster
            or a data set without its files; pytest reports the test as skipped.
    """
    if not __debug__:  # a test without assertions would pass whatever the component does
        raise SkipTest("python -O removes the assertions that this test consists of")
    component_slot, name = registry.slot(slot), Choice.parse(choice).type
    with prefix_failures(f"{slot} '{name}'"):
        cls, _ = component_slot.find(name)
    with prefix_failures(f"{slot} '{name}' ({place_of_class(cls)})"):
        with prefix_failures("its options"):
            options = component_slot.options(cls).model_fields
        required = [option for option, field in options.items() if field.is_required()]
        checks = [
            partial(_check_options, slot, name, cls, options, required),
            partial(_check_docstring, cls),
        ]
        if required and isinstance(choice, str):
            check_each(*checks)
            raise SkipTest(f"needs {required[0]}: give its options, as in {{'type': '{name}', '{required[0]}': ...}}")
        check_each(*checks, lambda: CHECKS[slot](component_slot.resolve_choice(choice)))


def check_plugin_components(plan: Plan) -> None:
    """Check the components of a plan's trials that are not built-in, with the options that the trials give them.

    Models and data sets are left out: their checks take images of another size, and read every image.

    Raises:
        BrokenComponent: with every fault.
    """
    trials = [*plan.prerequisites, *(planned.trial for planned in plan.trials_and_pending)]
    distinct = {
        (part.slot, str(part), _target_of_loss(trial) if part.slot == "loss" else ""): part
        for trial in trials
        for choice in iter_resolved_choices(trial.spec)
        for part in choice.walk()
        if part.origin.source != registry.BUILT_IN
    }
    faults = dict[str, None]()  # components with several sets of options may have the same one
    for (slot, _, target), part in distinct.items():
        if slot not in ("model", "dataset"):
            try:
                check_component(slot, part.plain())
                if target:
                    with prefix_failures(f"loss '{part.type}' ({place_of_class(part.component)})"):
                        check_loss(part, target)
            except AssertionError as error:
                # Options of a study, such as a weight per class, may not fit the data that a check invents.
                if not isinstance(error, FirstCallFailed) or part.hashed() == {"type": part.type}:
                    faults |= dict.fromkeys(error.args)
            except SkipTest:
                continue
    if faults:
        raise BrokenComponent(*faults)


def _target_of_loss(trial: Trial) -> str:
    """Return the kind of target that a trial's loss gets in place of class indices, or an empty text."""
    if trial.spec.train.mix is not None:
        return "class shares"
    return {"segmentation": "pixels", "multilabel": "class shares"}.get(data_info(trial.spec.data).task, "")


def _check_options(slot: str, name: str, cls: type, options: Collection[str], required: Sequence[str]) -> None:
    """Check the options of a component, of which ``required`` ones have no default."""
    if CHECKS[slot] is check_part:
        sizes = ", ".join(sorted(set(options) & set(Geometry.__dataclass_fields__)))
        assert not sizes, f"has the option {sizes}: remove it, it is a size of the model; read it from g"
    assert slot in NEEDS_OPTIONS or not required, (
        f"option {', '.join(required)} needs a default, so that the bare name can be used"
    )
    if not required:
        component_slot = registry.slot(slot)
        plain = component_slot.resolve_choice(name).plain()
        with prefix_failures("its options are written as JSON and read again"):
            again = component_slot.resolve_choice(json.loads(json.dumps(plain))).plain()
            assert again == plain, f"{again} is not {plain}"
        with prefix_failures("its options are described by 'vitlab schema'"):
            component_slot.options(cls).model_json_schema()


def _check_docstring(cls: type) -> None:
    assert (cls.__doc__ or "").strip(), "needs a docstring: its first line is what vitlab list prints"
