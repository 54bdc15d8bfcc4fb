"""Notes of a plan: what a reader of its results has to know about its trials."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from vitlab.identity.trial import Trial
from vitlab.plan.arms import ResolvedArm
from vitlab.plan.match import images_seen
from vitlab.plan.resolve import ResolvedTrial
from vitlab.plan.sources import other_split, same_images
from vitlab.plan.values import Plan
from vitlab.spec import Choice, Seeds, TrainSpec
from vitlab.store.files import read_json

MOST_INITIAL = 0.05
"""Largest share of the initial weights in an average of weights that is not noted."""


def notes_on_components(arms: Iterable[ResolvedArm]) -> list[str]:
    """Return the notes that the components of the arms declare, each once."""
    return sorted(set().union(*(arm.trial.notes for arm in arms if not arm.skip)))


def notes_on_averages(plan: Plan, training_images: Callable[[Choice, Mapping[str, int]], int | None]) -> list[str]:
    """Return a note for each average of weights that ends with much of the initial weights.

    Args:
        plan: the plan.
        training_images: returns their number; None if it is not known.
    """
    arms_by_note: dict[str, list[str]] = {}
    trials = [(f"'{item.arm}'", item.trial) for item in (*plan.trials, *plan.pending)]
    for name, trial in [*trials, *(("a prerequisite", trial) for trial in plan.prerequisites)]:
        train = trial.spec.train
        if train.ema is None or train.ema.warmup:  # with a warm-up, the first step replaces the initial weights
            continue
        count = None if train.epochs is None else training_images(trial.spec.data, trial.seeds)
        if (steps := _steps(train, count)) is None:
            continue
        share = train.ema.decay**steps
        if share > MOST_INITIAL:
            note = (
                f"train.ema: after {steps:,} steps the average of the weights still holds {100 * share:.0f} % of the "
                f"initial weights ({{arms}}), and the average is evaluated; train longer, set a decay below "
                f"{train.ema.decay:g}, or remove warmup: 0."
            )
            arms_by_note.setdefault(note, []).append(name)
    return [note.replace("{arms}", ", ".join(dict.fromkeys(names))) for note, names in arms_by_note.items()]


def _steps(train: TrainSpec, examples: int | None) -> int | None:
    """Return the optimizer steps of a training; None if they depend on an unknown number of training images."""
    if train.steps is not None:
        return train.steps
    images = images_seen(train, examples)
    return None if images is None else images // min(train.batch_size, examples or train.batch_size)


def notes_on_files(arms: Iterable[ResolvedArm], seeds: Seeds) -> list[str]:
    """Return notes on arms whose initial weights or teacher may have been trained on their validation images.

    ``spec.json`` beside a trial's weights tells the data of the trial and of its prerequisites.  For weights from
    elsewhere, the training data is unknown.
    """
    arms_by_note: dict[str, list[str]] = {}
    for arm in arms:
        if arm.skip:
            continue
        for role, source in arm.trial.spec.sources().items():
            reason = ""
            if source.pretrained is not None:
                reason = _unknown(source.pretrained) if role == "teacher" else ""
            elif source.checkpoint is not None:
                file = Path(source.checkpoint)
                exposure = _has_seen(file, arm.trial, seeds)
                reason = exposure or (_unknown(file.name) if exposure is None and role == "teacher" else "")
            if reason:
                arms_by_note.setdefault(f"{_SEEN_BY[role]} ({{arms}}): {reason}.", []).append(f"'{arm.name}'")
    return [note.replace("{arms}", ", ".join(names)) for note, names in arms_by_note.items()]


_SEEN_BY = {"init_from": "Validation seen in pretraining", "teacher": "Validation seen by teacher"}


def _has_seen(file: Path, trial: ResolvedTrial, seeds: Seeds, visited: frozenset[Path] = frozenset()) -> str | None:
    """Return how the weights in a file may have been trained on a trial's validation images.

    Returns:
        A clause, empty if they were not; None if there is no readable ``spec.json`` beside the file.
    """
    try:
        source = Trial.from_json(read_json(file.with_name("spec.json")))
        theirs, identity, split = source.spec.data, source.data, source.seeds["split"]
        mine = trial.spec.data
        if same_images(mine, trial.info.content, theirs, identity):
            reason = other_split(mine, theirs)
            if reason is not None or {seeds.streams(seed)["split"] for seed in seeds.all} != {split}:
                why = f" ({reason})" if reason else ""
                return f"{file.parent.name[:8]}/{file.name} was trained on another split of {mine.type}{why}"
    except (KeyError, TypeError, ValueError):
        return None  # the file is missing or is not a trial's spec
    if len(file.parents) < 3:  # not in a trial's folder: the trials that it needed cannot be located
        return ""
    visited |= {file}
    for source_key in source.needs.values():
        needs_file = file.parents[2] / source_key / file.name
        if needs_file not in visited and (clause := _has_seen(needs_file, trial, seeds, visited)):
            return clause
    return ""


def _unknown(teacher: str) -> str:
    return (
        f"the teacher {teacher} may have been trained on their validation images, so accuracies on these may be "
        "too high"
    )
