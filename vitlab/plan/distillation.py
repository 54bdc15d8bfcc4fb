"""The parts of a trial's distillation: those outside its identity, and why it cannot learn from its teacher."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from vitlab.errors import Path
from vitlab.geometry import DataInfo
from vitlab.registry import ResolvedChoice

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
    here, there = plain["data"], teacher.plain["data"]
    same = here["type"] == there["type"]
    if teacher.info.classes != info.classes:
        yield (
            f"the teacher has {teacher.info.classes} classes and this trial has {info.classes}; make them equal, or "
            "learn from its features or tokens alone, with kind: none"
        )
    elif teacher.info.labels and info.labels and teacher.info.labels != info.labels:
        theirs, mine = _listed(teacher.info.labels), _listed(info.labels)
        yield f"the teacher's classes are {theirs}, and those of this trial {mine}"
    elif same and here["classes"] != there["classes"]:
        yield f"the teacher's data.classes is {there['classes']}, and here it is {here['classes']}"


def _listed(labels: tuple[str, ...]) -> str:
    return ", ".join(labels[:4]) + (", ..." if len(labels) > 4 else "")
