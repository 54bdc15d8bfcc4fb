"""Why a trial cannot learn from its teacher or start from its initial weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from vitlab.errors import Path
from vitlab.geometry import DataIdentity, DataInfo
from vitlab.plan.shared_images import other_split, same_images
from vitlab.registry import ResolvedChoice
from vitlab.spec import Choice

if TYPE_CHECKING:
    from vitlab.plan.resolve import ResolvedTrial

MATCHINGS = ("features", "tokens")
"""Keys of ``distill`` that match features of the teacher."""


def drop_unused_options(distill: dict[str, Any]) -> None:
    """Remove the options of soft distillation from the identity of any other kind, which does not use them."""
    if distill.get("kind") != "soft":
        distill.pop("tau", None)
        distill.pop("reduction", None)


def incompatibilities(
    plain: Mapping[str, Any], info: DataInfo, model: ResolvedChoice, teacher: ResolvedTrial | None
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


def _without_tokens(
    plain: Mapping[str, Any], model: ResolvedChoice, teacher: ResolvedTrial | None
) -> Iterator[tuple[Path, str]]:
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


def _other_classes(plain: Mapping[str, Any], info: DataInfo, teacher: ResolvedTrial) -> Iterator[str]:
    """Yield why a teacher's logits do not mean the classes of a trial."""
    if teacher.info.classes != info.classes:
        yield (
            f"the teacher has {teacher.info.classes} classes and this trial has {info.classes}; make them equal, or "
            "learn from its features or tokens alone, with kind: none"
        )
    elif reason := other_labels(plain["data"], info, teacher.plain["data"], teacher.info):
        yield f"the teacher learned other classes: {reason}"


def other_labels(data: Mapping[str, Any], info: DataInfo, their_data: Mapping[str, Any], theirs: DataInfo) -> str:
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
