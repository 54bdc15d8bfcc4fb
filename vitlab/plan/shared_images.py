"""Trials on the same images: whether two share them, and whether they hold out the same ones for validation."""

from __future__ import annotations

from typing import Any

from vitlab.geometry import DataIdentity
from vitlab.identity.key import canonical
from vitlab.registry import ResolvedChoice, slot
from vitlab.spec import Choice


def same_images(
    mine: Choice, my_identity: DataIdentity | None, theirs: Choice, their_identity: DataIdentity | None
) -> bool:
    """Return whether two trials may share training and validation images.

    Args:
        mine: resolved ``data`` of one trial.
        my_identity: identity of its data; None if unknown.
        theirs: resolved ``data`` of the other trial.
        their_identity: identity of its data; None if unknown.
    """
    if mine.type != theirs.type:
        return False
    return my_identity is None or their_identity is None or my_identity.images == their_identity.images


def images_of(data: ResolvedChoice, identity: DataIdentity | None) -> tuple[str | None, str]:
    """Return what identifies the images of a data set: its files or, where it has none, the options that draw them.

    Options that every data set has do not count; they select images, or change how a model sees them.

    Args:
        data: the data set.
        identity: identity of its files; None if unknown.
    """
    room = slot("dataset")
    component: Any = data.component
    own = {
        name: value
        for name, value in data.hashed().items()
        if name == "type" or (component.generated and not (room.shared and name in room.shared.model_fields))
    }
    return None if identity is None else identity.images, canonical(own)


def other_split(mine: Choice, theirs: Choice) -> str | None:
    """Return why two trials on the same images hold out different ones under one seed, or None.

    The form is ``NAME is THEIRS, and here it is MINE``.  Fractions, images per class, colours and sizes do not change
    which images are held out; a subset of the classes does so only if whole groups are held out.
    """
    here, there = (_held_out(data) for data in (mine, theirs))
    if here != there:
        return f"data.validation is {there}, and here it is {here}"
    room = slot("dataset")
    grouped = room.get(mine.type).groups is not room.contract.groups
    classes, other_classes = mine.options.get("classes"), theirs.options.get("classes")
    if grouped and classes != other_classes:
        return f"data.classes is {other_classes}, and here it is {classes}"
    return None


def _held_out(data: Choice) -> str:
    """Format the share of the training images that is held out, or state that the data set defines the split."""
    room = slot("dataset")
    component: Any = room.get(data.type)
    share = data.options.get("validation")
    if share is None and component.held_out is not room.contract.held_out:
        built: Any = room.build(data)
        if built.missing() is not None or built.held_out() is not None:
            return "unset (the authors' own images)"
    return f"{component.validation if share is None else share:g}"
