"""Contract tests for components: what each must keep, built-ins and guests alike.

A plugin's whole test can be::

    from vitlab.testing import check_component

    def test_spiral() -> None:
        check_component("position", "spiral")

or, of a package that offers several::

    from vitlab.testing import check_component, parametrize_components

    @parametrize_components(source="acme-vit")
    def test_contract(slot: str, name: str) -> None:
        check_component(slot, name)
"""

from __future__ import annotations

import json
import pickle
import tempfile
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic.errors import PydanticInvalidForJsonSchema

from vitlab import registry
from vitlab.errors import BrokenComponent, OptionError, VitlabError
from vitlab.geometry import Geometry
from vitlab.spec import Choice
from vitlab.testing.expect import during, expect
from vitlab.testing.metrics import check_metric
from vitlab.testing.models import check_model, check_scheme
from vitlab.testing.parts import check_part

if TYPE_CHECKING:
    from pytest import MarkDecorator

MODEL_SIDE = ("patch", "position", "attention", "mlp", "norm", "head", "init", "model")
"""Slots of what a model is made of."""

CHECKED = (*MODEL_SIDE, "metric")
"""The slots whose components :func:`check_component` runs; those of the others it checks for form."""


def components(slot: str) -> list[str]:
    """The names of every installed component of a slot, guests included.

    A name that two sources offer comes once for each, as ``source:name``.  Imports no guest.
    """
    entries = registry.listing(slot)
    offered = Counter(entry.name for entry in entries)
    return [entry.name if offered[entry.name] == 1 else f"{entry.origin.source}:{entry.name}" for entry in entries]


def parametrize_components(*only: str, source: str | None = None) -> MarkDecorator:
    """Call a test, of ``slot`` and ``name``, for every installed component.

    Args:
        only: slots; by default those whose components :func:`check_component` runs, and with a source all.
        source: a distribution; by default all of them.
    """
    import pytest

    wanted = only or (CHECKED if source is None else tuple(registry.SLOT_MODULES))
    if source is None:
        found = [(slot, name) for slot in wanted for name in components(slot)]
    else:
        entries = [entry for slot in wanted for entry in registry.listing(slot) if entry.origin.source == source]
        found = [(entry.slot, f"{source}:{entry.name}") for entry in entries]
    return pytest.mark.parametrize(("slot", "name"), found)


def check_component(slot: str, choice: str | Mapping[str, Any]) -> None:
    """Check that a component keeps the contract of its slot.

    Of every component: options have annotations and defaults and survive JSON, there is a docstring, and the class can
    be pickled by reference.

    Of a part of a model, for a square and an oblong grid of patches and with no prefix tokens (each may be refused,
    with a reason): it builds on the CPU and on the meta device; shapes and types are kept, bfloat16 included; values
    and gradients are finite, every parameter receives a gradient, and that is the slope of what is computed; the second
    time is as the first; a state loads into another instance and computes the same; samples do not mix; what it
    declares (``needs_bias``, ``vmap_safe``, a canonical form, ...) is true; and in a ViT that is known with the batch
    innermost, predictions and gradients are there what they are one by one.

    Of a metric: however a split is cut into batches and ordered, it is the same number, within its bounds, and best
    where predictions are right; what has no label counts nowhere.

    Of a tracker that is handed the journals: its files hold each point once though a driver dies between delivering and
    committing, and are those of the new journal where a trial is trained anew; those of the trials stay as they are.

    Args:
        slot: such as ``position``.
        choice: such as ``rope2d``, ``distribution:rope2d``, or with options ``{"type": "rope2d", "theta": 10}``.

    Raises:
        AssertionError: naming the component, what it did, and what is expected.
    """
    room, name = registry.slot(slot), Choice.of(choice).type
    who = f"{slot} '{name}'"
    with during(f"{who} is looked up", BrokenComponent, VitlabError):
        cls, _ = room.find(name)
    _check_form(who, slot, name, cls)
    if slot == "tracker":
        _check_tracker(who, room, name, cls)
    if slot not in CHECKED:
        return
    with during(f"{who} with its default options" if isinstance(choice, str) else who, OptionError):
        resolved = room.resolve(choice)
    check = {"init": check_scheme, "model": check_model, "metric": check_metric}.get(slot, check_part)
    check(who, resolved)


def _check_form(who: str, slot: str, name: str, cls: type) -> None:
    with during(f"the options of {who} are read", BrokenComponent, TypeError, NameError):
        options = registry.slot(slot).options(cls).model_fields
    missing = [option for option, field in options.items() if field.is_required()]
    if slot in CHECKED and slot != "model":
        known = sorted(set(options) & set(Geometry.__dataclass_fields__))
        expect(not known, f"{who} has the option {', '.join(known)}: that is a size of the model and stands in g")
        expect(not missing, f"{who}: option {', '.join(missing)} needs a default, so that the bare name can be used")
    if not missing:
        _check_json(who, registry.slot(slot), name)
    expect(bool((cls.__doc__ or "").strip()), f"{who} needs a docstring: its first line is what vitlab list prints")
    expect(not (cls.__doc__ or "").startswith("\n"), f"{who}: the docstring begins with one sentence, not a new line")
    if slot in ("position", "attention") and name.rpartition(":")[2] != "none":
        docs = [base.__doc__ or "" for base in cls.__mro__ if base.__module__.partition(".")[0] != "torch"]
        expect(any("Reference:" in doc for doc in docs), f"{who}: the docstring names its paper: 'Reference: arXiv:…'")
    with during(f"{who} is pickled by reference", pickle.PicklingError, AttributeError):
        expect(pickle.loads(pickle.dumps(cls)) is cls, f"{who} must be found again under its module and name")


def _check_json(who: str, room: registry.Slot[Any], name: str) -> None:
    """A trial is written as JSON and read again by its worker."""
    with during(f"{who} with its default options", OptionError):
        plain = room.resolve(name).plain()
    sentence = f"the options of {who} are written as JSON and read again"
    with during(sentence, TypeError, ValueError, OptionError):
        again = room.resolve(json.loads(json.dumps(plain))).plain()
    expect(again == plain, f"{sentence}: {again} is not {plain}")
    with during(f"the options of {who} are described by 'vitlab schema'", PydanticInvalidForJsonSchema):
        room.options(room.find(name)[0]).model_json_schema()


def _check_tracker(who: str, room: registry.Slot[Any], name: str, cls: type) -> None:
    from vitlab.trackers import Replay
    from vitlab.trackers.contract_test import rehearse

    if not issubclass(cls, Replay):
        return  # only its author knows where its points are
    with during(f"{who} with its default options", OptionError):
        choice = room.resolve(name)
    with tempfile.TemporaryDirectory() as folder:
        try:
            rehearse(lambda plan, store, run: room.build(choice, plan, store, run), Path(folder))
        except AssertionError as error:
            raise AssertionError(f"{who}: {error}") from None
        except Exception as error:
            raise AssertionError(f"{who} is handed journals: {error!r}") from error
