"""What trials owe to each other: why one cannot learn from a teacher, start from weights, or do without labels.

Two trials may share images; then both hold out the same ones for validation.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from vitlab.errors import Path
from vitlab.geometry import DataIdentity, DataInfo
from vitlab.identity.trial import canonical
from vitlab.registry import ResolvedChoice, slot
from vitlab.spec import Choice
from vitlab.spec.tree import NewTree, Tree
from vitlab.spec.trial import TEST_SET_OPTIONS

if TYPE_CHECKING:
    from vitlab.plan.resolve import ResolvedTrial

MATCHINGS = ("features", "tokens")
"""Keys of ``distill`` that match features of the teacher."""


def drop_unused_options(distill: NewTree) -> None:
    """Remove the options of soft distillation from the identity of any other kind, which does not use them."""
    if distill.get("kind") != "soft":
        distill.pop("tau", None)
        distill.pop("reduction", None)


def incompatibilities(
    plain: Tree, info: DataInfo, model: ResolvedChoice, teacher: ResolvedTrial | None
) -> Iterator[tuple[Path, str]]:
    """Yield the reasons why a trial cannot learn from its teacher, and their places."""
    place = ("distill", "teacher")
    if info.task != "classification":
        yield place, f"distill needs classification, and the task of this data is {info.task}; remove it"
    if plain["distill"].get("kind") == "labels" and "distillation" not in plain["model"].get("prefix", ()):
        yield place, "kind 'labels' needs a distillation token; write model.prefix: [class, distillation]"
    matchings = [name for name in MATCHINGS if plain["distill"].get(name)]
    for name in matchings:
        if (plain.get("init_from") or {}).get("freeze") == "body":
            yield (
                ("distill", name),
                f"{name} train the body of the model, which init_from.freeze holds fixed; remove it",
            )
        if plain["model"].get("parametrization") == "mup":
            yield (
                ("distill", name),
                f"parametrization mup scales the parts of the model, and {name} train a further one; use "
                "parametrization: standard",
            )
    if "tokens" in matchings:
        yield from _without_tokens(plain, model, teacher)
    if teacher is None:
        return
    if plain["distill"].get("kind") != "none":
        yield from ((place, reason) for reason in _other_classes(plain, info, teacher))


def _without_tokens(plain: Tree, model: ResolvedChoice, teacher: ResolvedTrial | None) -> Iterator[tuple[Path, str]]:
    """Yield the reasons why tokens cannot be matched place by place."""
    place = ("distill", "tokens")
    models = [("this trial's model", model)]
    if teacher is not None:
        models.append(("its teacher", teacher.model))
    for role, choice in models:
        if not (hasattr(choice.component, "forward_features") and hasattr(choice.component, "forward_head")):
            yield (
                place,
                f"{role}, '{choice.type}', has no patch tokens and no feature map; use a ViT or a convolutional "
                "network, or remove tokens",
            )
    if plain["model"].get("patch_drop"):
        yield place, "tokens are matched at every place, and model.patch_drop leaves some out; remove one of the two"


def _other_classes(plain: Tree, info: DataInfo, teacher: ResolvedTrial) -> Iterator[str]:
    """Yield why a teacher's logits do not mean the classes of a trial."""
    if teacher.info.classes != info.classes:
        yield (
            f"the teacher has {teacher.info.classes} classes and this trial has {info.classes}; make them equal, or "
            "learn from its features or tokens alone, with kind: none"
        )
    elif reason := other_labels(plain["data"], info, teacher.plain["data"], teacher.info):
        yield f"the teacher learned other classes: {reason}"


def other_labels(data: Tree, info: DataInfo, their_data: Tree, theirs: DataInfo) -> str:
    """Return in a clause how the classes of another trial differ from a trial's; empty if they do not, or are unknown.

    Args:
        data: the trial's data in plain values.
        info: the model's view of it.
        their_data: the same of the other trial.
        theirs: the same of the other trial.
    """
    if theirs.labels and info.labels:
        same = theirs.labels == info.labels
        return "" if same else f"{_listed(theirs.labels)}, and here they are {_listed(info.labels)}"
    if data["type"] == their_data["type"] and data["classes"] != their_data["classes"]:
        return f"data.classes {their_data['classes']}, and here {data['classes']}"
    return ""


def _listed(labels: tuple[str, ...]) -> str:
    return ", ".join(labels[:4]) + (", ..." if len(labels) > 4 else "")


def other_split_below(data: Choice, identity: DataIdentity | None, role: str, source: ResolvedTrial) -> str | None:
    """Return why one of a trial's prerequisites may have been trained on its validation images, or None."""
    whose = {"init_from": "pretraining's", "teacher": "teacher's"}
    queue = [(f"the {whose[role]}", source)]
    while queue:
        name, trial = queue.pop(0)
        theirs = trial.spec.data
        if same_images(data, identity, theirs, trial.info.content) and (reason := other_split(data, theirs)):
            return f"{name} {reason}: one would be trained on validation images of the other; give both the same"
        queue += [(f"{name} {whose[other]}", prerequisite.trial) for other, prerequisite in trial.needs.items()]
    return None


def parts_with_labels(plain: Tree) -> Iterator[tuple[Path, str]]:
    """Yield the parts of a trial that need labels, which its objective does not read."""
    name = plain["train"]["objective"]["type"]
    if plain.get("distill"):
        yield ("distill",), f"objective '{name}' learns without labels and without a teacher; remove distill"
    if plain["train"].get("mix"):
        yield ("train", "mix"), f"objective '{name}' learns without labels, which train.mix mixes; remove it"
    data = plain.get("data") or {}  # a trial without data is refused elsewhere
    for option in TEST_SET_OPTIONS:
        if data.get(option):
            yield ("data", option), f"objective '{name}' trains no predictions to test on further images; remove it"
    source = plain.get("init_from") or {}
    if source.get("head") == "fitted":
        message = f"objective '{name}' trains no head; fit it in a trial that starts from this one"
        yield ("init_from", "head"), message
    if source.get("freeze") == "body":
        yield ("init_from", "freeze"), f"objective '{name}' trains the body alone; remove freeze"


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
