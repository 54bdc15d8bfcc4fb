"""Resolution of one trial: every component and option, or every mistake.

In: a tree as written under ``base``, after the changes of an arm.  Out: a :class:`ResolvedTrial`, or :class:`Faults`.
With the seeds of a replicate, a resolved trial is a trial with a key, which covers the options in ``identity``.
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path as FilePath
from typing import Any, Literal

from vitlab.errors import DataError, Fault, GeometryError, Path, WeightsError, nearest
from vitlab.geometry import DataInfo
from vitlab.identity.code import NOTHING, Surroundings, component_modules, trial_code_digest, used_optional_modules
from vitlab.identity.trial import Trial, checkpoint_identity, hash_of, weight_file_digests
from vitlab.planning.sources import (
    describe_label_difference,
    self_supervised_conflicts,
    teacher_faults,
    validation_leak_reason,
)
from vitlab.registry import ResolvedChoice, import_optional, import_slot, slot
from vitlab.registry.slot_modules import BUILTIN_ORIGIN
from vitlab.registry.slots import is_choice
from vitlab.spec import Choice, TrainSpec, TrialSpec
from vitlab.spec.changes import STAND_INS
from vitlab.spec.mistakes import collect_mistakes
from vitlab.spec.tree import NewTree, Tree, deep_copy, set_value, value_at
from vitlab.spec.trial import METRICS, OBJECTIVE, SLOTS_OF_A_TRIAL, SOURCES, TEST_SET_OPTIONS

Inform = Callable[[ResolvedChoice], DataInfo]
"""Returns the model's view of a data set; supplied by a caller that can read data."""


DEFAULT_CHOICES = {
    path: TrainSpec.model_fields[path[1]].default.plain() for path in SLOTS_OF_A_TRIAL if path[0] == "train"
}
"""Path of a component in a trial to the one that a trial has by default."""

_UNSEEN = frozenset({"normalize", "validation", "fraction", "per_class", "augment"})
"""Options of data on which the model's view of it does not depend."""

_STAND_IN = DataInfo(image=(224, 224), channels=3, classes=10)
"""Data in the place of data that is not known, for the sizes of a model that do not depend on it."""


class Faults(Exception):
    """All mistakes of one trial, as paths below ``base`` and sentences, and its sound part.

    Args:
        faults: the mistakes.
        plain: the sound part of ``plain`` of a :class:`ResolvedTrial`.
        info: the model's view of the data; None if the data set is invalid.
    """

    def __init__(self, faults: list[Fault], plain: Tree, info: DataInfo | None) -> None:
        self.faults = faults
        self.plain = plain
        self.info = info
        super().__init__("; ".join(sentence for _, sentence in faults))


@dataclass(frozen=True)
class ResolvedTrial:
    """A trial before it has seeds."""

    spec: TrialSpec  #: with every option
    plain: Tree  #: ``spec`` in plain JSON values
    identity: Tree  #: ``plain`` without options at their default and those that cannot change a result
    origins: tuple[str, ...]
    modules: frozenset[str]  #: root modules of its code
    info: DataInfo
    model: ResolvedChoice
    incompatibility: str  #: why these components cannot work together; empty if they can
    needs: Mapping[str, Prerequisite]  #: role to the trial that supplies weights
    files: Mapping[str, Mapping[str, str]]  #: role to the digests of its checkpoint
    versions: Mapping[str, str]  #: see :class:`vitlab.identity.code.Surroundings`
    notes: frozenset[str]  #: sentences of its components for the notes of the plan

    @property
    def foreign_origins(self) -> list[str]:
        """The origins in a trial's key, without built-ins: a slot added later changes no key."""
        return [origin for origin in self.origins if not origin.endswith(f" {BUILTIN_ORIGIN}")]

    def to_seeded_trial(self, seeds: Mapping[str, int], needs: Mapping[str, str]) -> Trial:
        """Return the trial with its seeds, its key and the digest of its code.

        Args:
            seeds: stream to seed.
            needs: role to ``key/code`` of the trials that it starts from.
        """
        # ``files`` is missing, because the digests of the files stand in ``self.identity``.
        hashed = {
            "spec": self.identity,  # the options that are no defaults
            "origins": self.foreign_origins,
            "data": self.info.content,
            "seeds": seeds,
            "needs": {role: name.partition("/")[0] for role, name in needs.items()},  # their code is part of the code
        }
        return Trial(
            self.spec,
            seeds,
            self.origins,
            self.info.content,
            needs,
            self.files,
            key=hash_of(hashed),
            code=trial_code_digest(self.modules, needs, self.versions),
            versions=self.versions,
        )


@dataclass(frozen=True)
class Prerequisite:
    """A trial that another one needs."""

    trial: ResolvedTrial
    seed: Literal["same"] | int


@dataclass
class _Draft:
    """A trial while it is resolved: its sound parts, and the mistakes so far."""

    tree: Tree  #: as written
    plain: NewTree
    identity: NewTree
    faults: list[Fault]  #: places below ``base``, and sentences
    parts: dict[Path, ResolvedChoice] = field(default_factory=dict)  #: sound components of the slots of a trial
    wrong: dict[Path, Collection[str | int]] = field(default_factory=dict)  #: path of a component to its wrong options
    model: ResolvedChoice | None = None  #: with defaults in the place of wrong options
    data: ResolvedChoice | None = None  #: the same
    objective: type[Any] | None = None
    info: DataInfo | None = None
    incompatibility: str = ""
    metrics: list[ResolvedChoice] = field(default_factory=list)  #: those that the trial names
    needs: dict[str, Prerequisite] = field(default_factory=dict)
    files: dict[str, dict[str, str]] = field(default_factory=dict)

    def add_faults(self, *problems: tuple[Path, str | None], below: Path = ()) -> None:
        """Add the problems that have a sentence to the mistakes; their places are paths below another one."""
        self.faults += [((*below, *place), sentence) for place, sentence in problems if sentence]

    def section(self, name: str) -> Tree | None:
        """Return a section in plain values; None if it is not set or wrong."""
        value = self.plain.get(name)
        return value if isinstance(value, Mapping) else None


class Resolver:
    """Resolver of trials, which asks once for the view of each data set."""

    def __init__(self, inform: Inform, surroundings: Surroundings = NOTHING) -> None:
        self._inform = inform
        self._surroundings = surroundings
        self._infos: dict[str, DataInfo] = {}

    def resolve_trial(self, tree: Tree) -> ResolvedTrial:
        """Resolve ``base`` after an arm's changes.

        Raises:
            Faults: with every mistake.
            BrokenComponent: if a plugin that it names cannot be imported.
        """
        collected = collect_mistakes(TrialSpec, tree, STAND_INS)
        spec = collected.value
        plain = deep_copy(collected.tree) if spec is None else spec.plain()
        identity = (
            deep_copy(plain) if spec is None else spec.model_dump(mode="json", exclude_none=True, exclude_defaults=True)
        )
        draft = _Draft(tree, plain, identity, [(mistake.path, mistake.message) for mistake in collected.mistakes])
        # Every step goes on with what the steps before it found sound, so that all mistakes are reported together.
        self._resolve_components(draft)
        self._load_and_check_data_info(draft)
        self._check_model_compatibility(draft)
        self._check_optimizer(draft)
        self._resolve_metrics(draft)
        self._check_stop_early_objective_and_metric(draft)
        self._resolve_sources(draft)
        self._check_sources(draft)
        if draft.faults:
            raise Faults(draft.faults, draft.plain, draft.info)
        return self._make_resolved_trial(draft)

    def _resolve_components(self, draft: _Draft) -> None:
        """Resolve the component of every slot of a trial."""
        for path, name in SLOTS_OF_A_TRIAL.items():
            value = value_at(draft.plain, path)
            if isinstance(value, Mapping) and value_at(draft.tree, path) is None:
                value = {**value, "type": slot(name).qualify_builtin(value["type"])}
            if value is None:
                continue  # reported by TrialSpec
            checked = slot(name).check_choice(value)
            if checked.faults:
                draft.add_faults(*checked.faults, below=path)
                draft.wrong[path] = checked.wrong
            choice = checked.sound
            if not isinstance(choice, ResolvedChoice):
                continue
            if path in (("model",), ("data",)):
                setattr(draft, str(path[0]), choice)
            # A default component can stand in for a wrong one while the rest is checked; other defaults would mislead.
            wrong = draft.wrong.get(path, ())
            if "type" not in wrong and all(is_choice(choice.fields[str(option)]) for option in wrong):
                draft.parts[path] = choice
                set_value(draft.plain, path, choice.plain())
                if choice.hashed() == DEFAULT_CHOICES.get(path):
                    draft.identity[path[0]].pop(path[1], None)
                else:
                    set_value(draft.identity, path, choice.hashed())
            elif isinstance(value, Mapping):  # arms may change options of parts that have their defaults
                as_written = {name: value[name] for name in wrong if name in value}
                set_value(draft.plain, path, {**choice.plain(), **as_written})
        if OBJECTIVE in draft.parts:
            draft.objective = draft.parts[OBJECTIVE].component
        elif OBJECTIVE not in draft.wrong:  # the rest of ``train`` is wrong, and leaves no spec with defaults
            objectives = slot("objective")
            draft.objective = objectives.get(objectives.qualify_builtin(DEFAULT_CHOICES[OBJECTIVE]["type"]))

    def _load_and_check_data_info(self, draft: _Draft) -> None:
        """Get the model's view of the data, and check what depends on it alone."""
        if draft.data is None or not _UNSEEN.issuperset(draft.wrong.get(("data",), ())):
            return
        try:
            if (key := json.dumps(draft.data.plain(), sort_keys=True)) not in self._infos:
                self._infos[key] = self._inform(draft.data)
        except DataError as error:
            quoted = (
                name for name, value in draft.data.options.items() if value is not None and f"'{name}'" in str(error)
            )
            draft.add_faults((("data", *itertools.islice(quoted, 1)), str(error)))
            return
        draft.info = self._infos[key]
        task = draft.info.task
        if task != "classification" and value_at(draft.plain, ("train", "mix")) is not None:
            sentence = f"train.mix needs classification, and the task of this data is {task}; remove it"
            draft.add_faults((("train", "mix"), sentence))
        loss = draft.parts.get(("train", "loss"))
        reads_labels = draft.objective is None or draft.objective.labels
        if loss is not None and reads_labels and task not in (tasks := loss.component.tasks):
            sentence = f"loss '{loss.type}' is for {' and '.join(tasks)}, and the task of this data is {task}"
            draft.add_faults((("train", "loss"), f"{sentence}; write loss: bce"))
        weights, sentence = loss and loss.options.get("class_weights"), ""
        if isinstance(weights, tuple) and len(weights) != draft.info.classes:
            sentence = f"the data has {draft.info.classes} classes; write one number for each, or balanced"
        elif weights == "balanced" and task == "segmentation":
            sentence = "balanced counts images, and this data has a class at every pixel; write a number for each class"
        draft.add_faults((("train", "loss", "class_weights"), sentence))

    def _check_model_compatibility(self, draft: _Draft) -> None:
        """Check that the model fits the data, and the objective both."""
        model, info, objective = draft.model, draft.info, draft.objective
        if model is None:
            return
        reason, unknown = "", {*draft.wrong.get(("model",), ()), *([] if info else ["patch_size"])}
        try:
            reason = model.component.incompatibility(info or _STAND_IN, model.options) or ""
        except GeometryError as error:
            sizes = [(options, message) for options, message in error.faults if unknown.isdisjoint(options)]
            draft.add_faults(*((("model", options[0]), message) for options, message in sizes))
        if not reason and info is not None and objective is not None:
            reason = objective.incompatibility(info, model, draft.plain) or ""
        if not reason and objective is not None and not objective.labels and _is_mup(model):
            reason = (
                "parametrization mup scales the parts of the model, and objective "
                f"'{value_at(draft.plain, (*OBJECTIVE, 'type'))}' trains further ones; use parametrization: standard"
            )
        draft.incompatibility = reason

    def _check_optimizer(self, draft: _Draft) -> None:
        place = ("train", "optimizer")
        train = draft.section("train")
        if place not in draft.parts or train is None:
            return
        optimizer: Any = draft.parts[place].component
        reason = optimizer.incompatibility(train)
        if not reason and draft.model is not None and _is_mup(draft.model):
            reason = import_optional("mup").optimizer_incompatibility(optimizer)
        draft.add_faults((place, reason))

    def _resolve_metrics(self, draft: _Draft) -> None:
        """Resolve the metrics that a trial names.

        The identity has those that it does not report anyway, sorted, because their order changes no result.
        """
        values = value_at(draft.plain, METRICS)
        if not isinstance(values, list | tuple):
            return  # reported by TrialSpec
        choices: list[ResolvedChoice] = []
        for index, value in enumerate(values):
            checked = slot("metric").check_choice(value)
            draft.add_faults(*checked.faults, below=(*METRICS, index))
            if not checked.faults and isinstance(checked.sound, ResolvedChoice):
                choices.append(checked.sound)
        if choices and len(choices) == len(values) and draft.info is not None and draft.objective is not None:
            without_labels = "" if draft.objective.labels else str(value_at(draft.plain, (*OBJECTIVE, "type")))
            indices, faults = import_slot("metric").indices_of_extra_metrics(draft.info, choices, without_labels)
            draft.add_faults(*(((index,), sentence) for index, sentence in faults), below=METRICS)
            draft.metrics = [choices[index] for index in indices]
        else:
            choices.clear()
        set_value(draft.plain, METRICS, [choice.plain() for choice in choices])
        if draft.metrics:
            set_value(draft.identity, METRICS, sorted((choice.hashed() for choice in draft.metrics), key=json.dumps))
        else:
            value_at(draft.identity, METRICS[:-1]).pop(METRICS[-1], None)

    def _check_stop_early_objective_and_metric(self, draft: _Draft) -> None:
        """Check that the objective of a training that stops early needs no known end, and the metric that stops it."""
        train, place = draft.section("train"), ("train", "stop_early")
        rule = None if train is None else train.get("stop_early")
        if not isinstance(rule, Mapping):
            return
        objective = draft.parts.get(OBJECTIVE)
        if objective is not None and objective.component.needs_end:
            sentence = (
                f"stop_early: objective '{objective.bare_name}' follows the planned length, whose end such a training "
                "does not reach; remove stop_early"
            )
            draft.add_faults((place, sentence))
        if draft.info is None or draft.objective is None:
            return
        standard = draft.objective.standard_metrics(draft.info)
        reported = import_slot("metric").build_metrics(draft.info, draft.metrics, standard)
        names = [name for name, metric in reported.items() if "val" in metric.splits]
        metric = rule.get("metric")  # None where the study file is not sound
        if metric is not None and metric not in names:
            fault = f"no metric of validation is called '{metric}'.{nearest(metric, names)}"
            draft.add_faults(((*place, "metric"), f"{fault} Reported: {', '.join(names)}"))

    def _resolve_sources(self, draft: _Draft) -> None:
        """Resolve the teacher and the initial weights.

        In the identity, a checkpoint counts by its content, published weights by their digest, a trial by its identity.
        What timm names and what the hub holds is fetched, and is a checkpoint from here on.
        """
        for role, path in SOURCES.items():
            match value_at(draft.plain, path):
                case {"checkpoint": str(name)}:
                    self._resolve_checkpoint(draft, role, path, name)
                case {"pretrained": str(name)}:
                    self._resolve_published_weights(draft, role, path, name)
                case {"timm": str(name)} | {"hub": str(name)} as source:
                    self._fetch_and_resolve_file(draft, role, path, source, name)
                case {"trial": Mapping()} as source:
                    self._resolve_prerequisite(draft, role, path, source)

    def _resolve_checkpoint(self, draft: _Draft, role: str, path: Path, file_name: str) -> None:
        place, file = (*path, "checkpoint"), FilePath(file_name)
        if not os.path.isfile(file):  # False, where Path raises, for names that no file can have
            is_folder = f"{file} is a folder; name the file of weights in it"
            draft.add_faults((place, is_folder if os.path.isdir(file) else f"no such file: {file}"))
            return
        file = FilePath(os.path.abspath(file))  # a link in the hub's cache has the name, and the configs beside it
        draft.files[role] = weight_file_digests(file)
        set_value(draft.identity, place, checkpoint_identity(draft.files[role]))
        set_value(draft.plain, place, str(file))

    def _fetch_and_resolve_file(self, draft: _Draft, role: str, path: Path, source: Tree, name: str) -> None:
        kind = "timm" if "timm" in source else "hub"
        try:
            file = str(import_optional("weights").fetch_by_name(kind, name))
        except WeightsError as error:
            draft.add_faults(((*path, kind), str(error)))
            return
        for tree in (draft.plain, draft.identity):
            value_at(tree, path).pop(kind)
            set_value(tree, (*path, "checkpoint"), file)
        self._resolve_checkpoint(draft, role, path, file)

    def _resolve_published_weights(self, draft: _Draft, role: str, path: Path, name: str) -> None:
        place = (*path, "pretrained")
        try:
            digest = import_optional("weights").digest_prefix_of_published(name)
        except (WeightsError, ImportError) as error:  # torchvision may be missing, or of another torch
            draft.add_faults((place, str(error)))
            return
        set_value(draft.identity, place, {"name": name, "sha256": digest})
        if digest is not None:
            draft.files[role] = {name: digest}

    def _resolve_prerequisite(self, draft: _Draft, role: str, path: Path, source: Tree) -> None:
        place = (*path, "trial")
        own = value_at(draft.tree, place)
        tree = own if isinstance(own, Mapping) else source["trial"]
        inherits = role == "teacher" and "data" not in tree
        if inherits and (data := draft.section("data")) is not None:
            # Test sets beside the test split are of the student alone.
            tree = {"data": {name: value for name, value in data.items() if name not in TEST_SET_OPTIONS}, **tree}
        try:
            trial = self.resolve_trial(tree)
        except Faults as error:  # those of the student's data are reported already
            draft.add_faults(*(each for each in error.faults if not (inherits and each[0][0] == "data")), below=place)
            return
        draft.add_faults((place, trial.incompatibility))
        set_value(draft.identity, place, trial.identity)
        set_value(draft.plain, place, trial.plain)
        draft.needs[role] = Prerequisite(trial, source.get("seed", "same"))

    def _check_sources(self, draft: _Draft) -> None:
        """Check what trials owe to each other: classes, splits, and labels that an objective does not read."""
        info, plain = draft.info, draft.plain
        if draft.section("distill") is not None and info is not None and ("model",) in draft.parts and draft.model:
            teacher = draft.needs["teacher"].trial if "teacher" in draft.needs else None
            draft.add_faults(*teacher_faults(plain, info, draft.model, teacher))
        if info is not None and draft.section("data") is not None:
            for role, prerequisite in draft.needs.items():
                reason = validation_leak_reason(Choice.parse(plain["data"]), info.content, role, prerequisite.trial)
                draft.add_faults(((*SOURCES[role], "trial"), reason))
            source = draft.needs.get("init_from")
            if source is not None and plain["init_from"].get("head") == "keep":
                reason = describe_label_difference(plain["data"], info, source.trial.plain["data"], source.trial.info)
                sentence = (
                    f"head: keep keeps the outputs of other classes ({reason}); write head: new" if reason else None
                )
                draft.add_faults((("init_from", "head"), sentence))
        if draft.objective is not None and not draft.objective.labels:
            draft.add_faults(*self_supervised_conflicts(plain))

    def _make_resolved_trial(self, draft: _Draft) -> ResolvedTrial:
        """Return the trial of a draft without mistakes."""
        assert draft.info is not None
        spec = TrialSpec.model_validate(draft.plain)
        choices = [*draft.parts.values(), *draft.metrics]
        parts = [part for choice in choices for part in choice.walk()]
        notes = {note for part in parts if (note := getattr(part.component, "plan_note", ""))}
        return ResolvedTrial(
            spec,
            draft.plain,
            draft.identity,
            origins=tuple(sorted({f"{part.slot}:{part.bare_name} {part.origin}" for part in parts})),
            modules=used_optional_modules(spec) | self._surroundings.files | component_modules(choices),
            info=draft.info,
            model=draft.parts["model",],
            incompatibility=draft.incompatibility,
            needs=draft.needs,
            files=draft.files,
            versions=self._surroundings.versions,
            notes=frozenset(notes).union(*(other.trial.notes for other in draft.needs.values())),
        )


def _is_mup(model: ResolvedChoice) -> bool:
    return model.options.get("parametrization") == "mup"
