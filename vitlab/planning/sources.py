"""What trials owe to each other: why one cannot learn from a teacher, start from weights, or do without labels.

Two trials may share images; then both hold out the same ones for validation.  Where that cannot be checked, and where
an average of weights keeps much of the initial ones, the plan has a note for the reader of its results.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path as FilePath
from typing import TYPE_CHECKING, Any

from vitlab.errors import Fault, list_some
from vitlab.geometry import DataInfo, image_identity
from vitlab.identity.trial import Trial
from vitlab.planning.values import Plan
from vitlab.registry import ResolvedChoice, slot
from vitlab.spec import Choice, Seeds
from vitlab.spec.tree import Tree, parse_as, value_at
from vitlab.spec.trial import MATCHINGS, TEST_SET_OPTIONS
from vitlab.store.files import read_json

if TYPE_CHECKING:
    from vitlab.planning.arms import ResolvedArm
    from vitlab.planning.resolve import ResolvedTrial

MOST_INITIAL = 0.05
"""Largest share of the initial weights in an average of weights that is not noted."""


def teacher_faults(
    plain: Tree, info: DataInfo, model: ResolvedChoice, teacher: ResolvedTrial | None
) -> Iterator[Fault]:
    """Yield the reasons why a trial cannot learn from its teacher, and their places."""
    place = ("distill", "teacher")
    if info.task != "classification":
        yield place, f"distill needs classification, and the task of this data is {info.task}; remove it"
    if plain["distill"].get("kind") == "labels" and "distillation" not in plain["model"].get("prefix", ()):
        yield place, "kind 'labels' needs a distillation token; write model.prefix: [class, distillation]"
    matchings = [name for name in MATCHINGS if plain["distill"].get(name)]
    for name in matchings:
        if _freezes_all_blocks(plain):
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
        place_of_tokens = ("distill", "tokens")
        models = [("this trial's model", model)]
        if teacher is not None:
            models.append(("its teacher", teacher.model))
        for role, choice in models:
            if not (hasattr(choice.component, "forward_features") and hasattr(choice.component, "forward_head")):
                yield (
                    place_of_tokens,
                    f"{role}, '{choice.type}', has no patch tokens and no feature map; use a ViT or a convolutional "
                    "network, or remove tokens",
                )
        if plain["model"].get("patch_drop"):
            yield (
                place_of_tokens,
                "tokens are matched at every place, and model.patch_drop leaves some out; remove one of the two",
            )
    if teacher is None or plain["distill"].get("kind") == "none":
        return
    if teacher.info.classes != info.classes:
        yield (
            place,
            f"the teacher has {teacher.info.classes} classes and this trial has {info.classes}; make them equal, or "
            "learn from its features or tokens alone, with kind: none",
        )
    elif reason := describe_label_difference(plain["data"], info, teacher.plain["data"], teacher.info):
        yield place, f"the teacher learned other classes: {reason}"


def _freezes_all_blocks(plain: Tree) -> bool:
    freeze, depth = (value_at(plain, path) for path in (("init_from", "freeze"), ("model", "depth")))
    return freeze == "body" or (isinstance(freeze, int) and depth is not None and freeze >= depth)


def describe_label_difference(data: Tree, info: DataInfo, their_data: Tree, their_info: DataInfo) -> str:
    """Return in a clause how the classes of another trial differ from a trial's; empty if they do not, or are unknown.

    Args:
        data: the trial's data in plain values.
        info: the model's view of it.
        their_data: the same of the other trial.
        their_info: the same of the other trial.
    """
    if their_info.labels and info.labels:
        same = their_info.labels == info.labels
        return "" if same else f"{list_some(their_info.labels, 4)}, and here they are {list_some(info.labels, 4)}"
    if data["type"] == their_data["type"] and data["classes"] != their_data["classes"]:
        return f"data.classes {their_data['classes']}, and here {data['classes']}"
    return ""


def validation_leak_reason(data: Choice, identity: str | None, role: str, source: ResolvedTrial) -> str | None:
    """Return why one of a trial's prerequisites may have been trained on its validation images, or None."""
    whose = {"init_from": "pretraining's", "teacher": "teacher's"}
    queue = [(f"the {whose[role]}", source)]
    while queue:
        name, trial = queue.pop(0)
        theirs = trial.spec.data
        if may_share_images(data, identity, theirs, trial.info.content) and (
            reason := why_held_out_images_differ(data, theirs)
        ):
            return f"{name} {reason}: one would be trained on validation images of the other; give both the same"
        queue += [(f"{name} {whose[other]}", prerequisite.trial) for other, prerequisite in trial.needs.items()]
    return None


def self_supervised_conflicts(plain: Tree) -> Iterator[Fault]:
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
        yield ("init_from", "head"), f"objective '{name}' trains no head; fit it in a trial that starts from this one"
    if _freezes_all_blocks(plain):
        yield ("init_from", "freeze"), f"objective '{name}' trains the body alone; remove freeze"


def may_share_images(mine: Choice, my_identity: str | None, theirs: Choice, their_identity: str | None) -> bool:
    """Return whether two trials may share training and validation images.

    Args:
        mine: resolved ``data`` of one trial.
        my_identity: identity of its data; None if unknown.
        theirs: resolved ``data`` of the other trial.
        their_identity: identity of its data; None if unknown.
    """
    if mine.type != theirs.type:
        return False
    return (
        my_identity is None or their_identity is None or image_identity(my_identity) == image_identity(their_identity)
    )


def why_held_out_images_differ(mine: Choice, theirs: Choice) -> str | None:
    """Return why two trials on the same images hold out different ones under one seed, or None.

    The form is ``NAME is THEIRS, and here it is MINE``.  Fractions, images per class, colours and sizes do not change
    which images are held out; a subset of the classes does so only if whole groups are held out.
    """
    here, there = (_format_held_out(data) for data in (mine, theirs))
    if here != there:
        return f"data.validation is {there}, and here it is {here}"
    datasets = slot("dataset")
    grouped = datasets.get(mine.type).groups is not datasets.contract.groups
    classes, other_classes = mine.options.get("classes"), theirs.options.get("classes")
    if grouped and classes != other_classes:
        return f"data.classes is {other_classes}, and here it is {classes}"
    return None


def _format_held_out(data: Choice) -> str:
    """Format the share of the training images that is held out, or state that the data set defines the split."""
    datasets = slot("dataset")
    component: Any = datasets.get(data.type)
    share = data.options.get("validation")
    if share is None and component.held_out is not datasets.contract.held_out:
        built: Any = datasets.build(data)
        if built.missing() is not None or built.held_out() is not None:
            return "unset (the authors' own images)"
    return f"{component.validation if share is None else share:g}"


# -- notes ------------------------------------------------------------------------------------------------------------


def notes_on_short_ema(plan: Plan, training_images: Callable[[Choice, Mapping[str, int]], int | None]) -> list[str]:
    """Return a note for each average of weights that ends with much of the initial weights.

    Args:
        plan: the plan.
        training_images: returns their number; None if it is not known.
    """
    arms_by_note: dict[str, list[str]] = {}
    trials = [(f"'{item.arm}'", item.trial) for item in plan.trials_and_pending]
    for name, trial in [*trials, *(("a prerequisite", trial) for trial in plan.prerequisites)]:
        train = trial.spec.train
        if train.ema is None or train.ema.warmup:  # with a warm-up, the first step replaces the initial weights
            continue
        count = None if train.epochs is None else training_images(trial.spec.data, trial.seeds)
        images = train.images_seen(count)
        if images is None:
            continue
        steps = images // min(train.batch_size, count or train.batch_size)
        share = train.ema.decay**steps
        if share > MOST_INITIAL:
            note = (
                f"train.ema: after {steps:,} steps the average of the weights still holds {100 * share:.0f} % of the "
                f"initial weights ({{arms}}), and the average is evaluated; train longer, set a decay below "
                f"{train.ema.decay:g}, or remove warmup: 0."
            )
            arms_by_note.setdefault(note, []).append(name)
    return [note.replace("{arms}", ", ".join(dict.fromkeys(names))) for note, names in arms_by_note.items()]


def notes_on_leaks(arms: Iterable[ResolvedArm], seeds: Seeds) -> list[str]:
    """Return notes on arms whose initial weights or teacher may have been trained on their validation images.

    ``spec.json`` beside a trial's weights tells the data of the trial and of its prerequisites.  For weights from
    elsewhere, the training data is unknown.
    """
    arms_by_note: dict[str, list[str]] = {}
    for arm in arms:
        if arm.skip:
            continue
        for role, source in arm.trial.spec.sources().items():
            if source.trial is not None:
                continue
            file = FilePath(source.pretrained or str(source.checkpoint))
            reason = _find_validation_leak(file, arm.trial, seeds) if source.pretrained is None else None
            if reason is None and role == "teacher":
                reason = (
                    f"the teacher {file.name} may have been trained on their validation images, so accuracies on these "
                    "may be too high"
                )
            if reason:
                arms_by_note.setdefault(f"{_SEEN_BY[role]} ({{arms}}): {reason}.", []).append(f"'{arm.name}'")
    return [note.replace("{arms}", ", ".join(names)) for note, names in arms_by_note.items()]


_SEEN_BY = {"init_from": "Validation seen in pretraining", "teacher": "Validation seen by teacher"}


def _find_validation_leak(
    file: FilePath, trial: ResolvedTrial, seeds: Seeds, visited: frozenset[FilePath] = frozenset()
) -> str | None:
    """Return how the weights in a file may have been trained on a trial's validation images.

    Returns:
        A clause, empty if they were not; None if there is no readable ``spec.json`` beside the file.
    """
    try:
        source = parse_as(Trial, read_json(file.with_name("spec.json")))
        theirs, identity, split = source.spec.data, source.data, source.seeds["split"]
        mine = trial.spec.data
        if may_share_images(mine, trial.info.content, theirs, identity):
            reason = why_held_out_images_differ(mine, theirs)
            if reason is not None or {seeds.stream_seeds(seed)["split"] for seed in seeds.all} != {split}:
                why = f" ({reason})" if reason else ""
                return f"{file.parent.name[:8]}/{file.name} was trained on another split of {mine.type}{why}"
    except (KeyError, TypeError, ValueError):
        return None  # the file is missing or is not a trial's spec
    if len(file.parents) < 3:  # not in a trial's folder: the trials that it needed cannot be located
        return ""
    visited |= {file}
    for source_key in source.needs.values():
        needs_file = file.parents[2] / source_key / file.name
        if needs_file not in visited and (clause := _find_validation_leak(needs_file, trial, seeds, visited)):
            return clause
    return ""
