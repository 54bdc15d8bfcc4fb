"""Resolution of one arm's changes to a trial with all components and options, collecting every mistake."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path as FilePath
from typing import Any, Literal

from vitlab.errors import DataError, GeometryError, OptionError, Path, WeightsError
from vitlab.geometry import DataIdentity, DataInfo
from vitlab.identity.code import NOTHING, Surroundings, modules_of, optional_modules
from vitlab.identity.key import canonical, digests_of, identity_of
from vitlab.plan.design import put, value_at
from vitlab.plan.distillation import drop_unused_options, incompatibilities
from vitlab.plan.shared_images import other_split, same_images
from vitlab.plan.unlabelled import parts_with_labels
from vitlab.registry import ResolvedChoice, optional_module, slot, slot_package
from vitlab.registry.slot_modules import BUILTIN_ORIGIN
from vitlab.registry.slots import is_choice
from vitlab.spec import Choice, TrainSpec, TrialSpec
from vitlab.spec.collect import collect, copied
from vitlab.spec.sentences import faults as spec_faults
from vitlab.spec.study import STAND_INS
from vitlab.spec.trial import METRICS, OBJECTIVE, SLOTS_OF_A_TRIAL, SOURCES, TEST_SET_OPTIONS

Inform = Callable[[ResolvedChoice], DataInfo]
"""Returns the model's view of a data set; supplied by a caller that can read data."""


DEFAULT_CHOICES = {
    path: TrainSpec.model_fields[path[1]].default.plain() for path in SLOTS_OF_A_TRIAL if path[0] == "train"
}
"""Path of a component in a trial to the one that a trial has by default."""


class Faults(Exception):
    """All mistakes of one trial, as paths below ``base`` and sentences, and its sound part.

    Args:
        faults: the mistakes.
        plain: the sound part of ``plain`` of a :class:`ResolvedTrial`.
        info: the model's view of the data; None if the data set is invalid.
    """

    def __init__(self, faults: list[tuple[Path, str]], plain: Mapping[str, Any], info: DataInfo | None) -> None:
        self.faults = faults
        self.plain = plain
        self.info = info
        super().__init__("; ".join(sentence for _, sentence in faults))


@dataclass(frozen=True)
class ResolvedTrial:
    """A trial before it has seeds."""

    spec: TrialSpec  #: with every option
    plain: Mapping[str, Any]  #: ``spec`` in plain JSON values
    identity: Mapping[str, Any]  #: ``plain`` without options at their default and those that cannot change a result
    origins: tuple[str, ...]
    modules: frozenset[str]  #: root modules of its code
    info: DataInfo
    model: ResolvedChoice
    incompatibility: str  #: why these components cannot work together; empty if they can
    needs: Mapping[str, Prerequisite] = field(default_factory=dict)  #: role to the trial that supplies weights
    files: Mapping[str, Mapping[str, str]] = field(default_factory=dict)  #: role to the digests of its checkpoint
    versions: Mapping[str, str] = field(default_factory=dict)  #: see :class:`vitlab.identity.code.Surroundings`

    @property
    def data(self) -> str | None:
        """The identity of the data as keys contain it."""
        return None if self.info.content is None else str(self.info.content)

    @property
    def foreign_origins(self) -> list[str]:
        """The origins in a trial's key: those of built-ins are left out, so that a slot added later changes no key."""
        return [origin for origin in self.origins if not origin.endswith(f" {BUILTIN_ORIGIN}")]

    @cached_property
    def canonical(self) -> dict[str, str]:
        """The parts of a trial's key that all seeds share, as canonical JSON."""
        parts = {"spec": self.identity, "origins": self.foreign_origins, "data": self.data}
        return {name: canonical(part) for name, part in parts.items()}


@dataclass(frozen=True)
class Prerequisite:
    """A trial that another one needs."""

    trial: ResolvedTrial
    seed: Literal["same"] | int


class _CachedChoice:
    """A resolved choice with its derived values, computed once because the arms of a study share most choices."""

    def __init__(self, choice: ResolvedChoice) -> None:
        self.choice = choice
        self.plain = choice.plain()
        self.hashed = choice.hashed()
        self.origins = {f"{part.slot}:{part.type.rpartition(':')[2]} {part.origin}" for part in choice.parts()}
        self.modules = modules_of([choice])


class Resolver:
    """Resolver of trials, with a cache of choices, most of which the arms of a study share."""

    def __init__(self, inform: Inform, surroundings: Surroundings = NOTHING) -> None:
        self._inform = inform
        self._surroundings = surroundings
        self._choices: dict[tuple[str, str], tuple[_CachedChoice | None, OptionError | None]] = {}
        self._infos: dict[str, DataInfo] = {}

    def resolve(self, tree: Mapping[str, Any]) -> ResolvedTrial:
        """Resolve ``base`` after an arm's changes.

        Raises:
            Faults: with every mistake.
            BrokenComponent: if a plugin that it names cannot be imported.
        """
        collected = collect(TrialSpec, tree, partial(spec_faults, top=TrialSpec.model_fields), STAND_INS)
        faults = [(fault.path, fault.message) for fault in collected.faults]
        spec = collected.value
        plain = copied(collected.tree) if spec is None else spec.plain()
        identity = copied(plain) if spec is None else spec.without_defaults()
        parts: dict[Path, _CachedChoice] = {}
        model_choice: ResolvedChoice | None = None
        wrong: dict[Path, Collection[str | int]] = {}
        for path, name in SLOTS_OF_A_TRIAL.items():
            value = value_at(plain, path)
            if isinstance(value, Mapping) and value_at(tree, path) is None:
                value = {**value, "type": slot(name).qualify_builtin(value["type"])}
            choice, option_error = self._choice(name, value)
            if option_error is not None:
                faults += [((*path, *inner), sentence) for inner, sentence in option_error.faults]
                wrong[path] = option_error.wrong
            if path == ("model",) and choice is not None:
                model_choice = choice.choice
            # A default component can stand in for a wrong one while the rest is checked; other defaults would mislead.
            if choice is not None and all(_is_component(choice.choice, name) for name in wrong.get(path, ())):
                parts[path] = choice
                put(plain, path, choice.plain)
                if choice.hashed == DEFAULT_CHOICES.get(path):
                    identity[path[0]].pop(path[1], None)
                else:
                    put(identity, path, choice.hashed)
        info, incompatibility = None, ""
        if ("data",) in parts:
            try:
                info = self._info(parts["data",].choice, plain["data"])
                identity["data"] = _corrupted_in_key(identity["data"], info)
            except DataError as error:
                faults.append((("data",), str(error)))
        if info is not None and model_choice is not None:
            try:
                incompatibility = model_choice.component.incompatibility(info, model_choice.options) or ""  # type: ignore[attr-defined]
            except GeometryError as error:
                faulty = wrong.get(("model",), ())
                faults += [
                    (("model", options[0]), message)
                    for options, message in error.faults
                    if not any(option in faulty for option in options)
                ]
        objective = self._objective(parts, wrong)
        if objective is not None and info is not None and model_choice is not None and not incompatibility:
            incompatibility = objective.incompatibility(info, model_choice, plain) or ""
        is_mup = model_choice is not None and model_choice.options.get("parametrization") == "mup"
        if is_mup and objective is not None and not objective.labels and not incompatibility:
            incompatibility = (
                f"parametrization mup scales the parts of the model, and objective "
                f"'{value_at(plain, (*OBJECTIVE, 'type'))}' trains further ones; use parametrization: standard"
            )
        optimizer, train = parts.get(("train", "optimizer")), plain.get("train")
        if optimizer is not None and isinstance(train, Mapping):
            reason = optimizer.choice.component.incompatibility(train)  # type: ignore[attr-defined]
            if not reason and is_mup:
                reason = optional_module("mup").optimizer_incompatibility(optimizer.choice.component)
            faults += [(("train", "optimizer"), reason)] if reason else []
        metrics = self._metrics(plain, identity, info, objective, faults)
        if info is not None and info.task != "classification" and value_at(plain, ("train", "mix")) is not None:
            sentence = f"train.mix needs classification, and the task of this data is {info.task}; remove it"
            faults.append((("train", "mix"), sentence))
        needs, files = self._needs(tree, plain, identity, faults)
        if isinstance(plain.get("distill"), Mapping):
            drop_unused_options(identity["distill"])
            if info is not None and model_choice is not None and ("model",) in parts:
                teacher = needs["teacher"].trial if "teacher" in needs else None
                faults += incompatibilities(plain, info, model_choice, teacher)
        if info is not None and isinstance(plain.get("data"), Mapping):
            places = {"init_from": ("init_from", "trial"), "teacher": ("distill", "teacher")}
            for role, prerequisite in needs.items():
                reason = _other_split_below(Choice.of(plain["data"]), info.content, role, prerequisite.trial)
                faults += [(places[role], reason)] if reason else []
        if objective is not None and not objective.labels:
            faults += parts_with_labels(plain)
        if faults:
            raise Faults(faults, plain, info)
        assert info is not None and objective is not None
        model = parts["model",].choice
        all_parts = [*parts.values(), *metrics]
        origins = sorted(set().union(*(part.origins for part in all_parts)))
        trial_spec = TrialSpec.model_validate(plain)
        modules = optional_modules(trial_spec).union(self._surroundings.files, *(part.modules for part in all_parts))
        versions = self._surroundings.versions
        return ResolvedTrial(
            trial_spec,
            plain,
            identity,
            tuple(origins),
            modules,
            info,
            model,
            incompatibility,
            needs,
            files,
            versions,
        )

    def _objective(
        self, parts: Mapping[Path, _CachedChoice], wrong: Mapping[Path, Collection[str | int]]
    ) -> type[Any] | None:
        """Return the class of a trial's objective; None if its options are invalid."""
        if OBJECTIVE in wrong:
            return None
        if OBJECTIVE in parts:
            return parts[OBJECTIVE].choice.component
        # The rest of ``train`` is wrong, and leaves no spec with defaults.
        objectives = slot("objective")
        return objectives.get(objectives.qualify_builtin(TrainSpec.model_fields["objective"].default.type))

    def _needs(
        self,
        tree: Mapping[str, Any],
        plain: dict[str, Any],
        identity: dict[str, Any],
        faults: list[tuple[Path, str]],
    ) -> tuple[dict[str, Prerequisite], dict[str, dict[str, str]]]:
        """Resolve teacher and initial weights: prerequisites by role, and digests of checkpoint files by role.

        Both become part of ``identity``, where a checkpoint counts by its content.
        """
        needs: dict[str, Prerequisite] = {}
        files: dict[str, dict[str, str]] = {}
        for role, path in SOURCES.items():
            source, identified = value_at(plain, path), value_at(identity, path)
            if not isinstance(source, Mapping):
                continue
            if isinstance(source.get("checkpoint"), str):
                file = FilePath(source["checkpoint"])
                if not os.path.isfile(file):  # False, where Path raises, for names that no file can have
                    faults.append(((*path, "checkpoint"), f"no such file: {file}"))
                else:
                    file = file.resolve()
                    files[role] = digests_of(file)
                    identified["checkpoint"] = identity_of(files[role])
                    put(plain, (*path, "checkpoint"), str(file))
            elif isinstance(source.get("pretrained"), str):
                try:
                    digest = optional_module("weights").digest_of(source["pretrained"])
                except WeightsError as error:
                    faults.append(((*path, "pretrained"), str(error)))
                except ImportError:
                    pass  # without torchvision, the name alone identifies the weights
                else:
                    identified["pretrained"] = {"name": source["pretrained"], "sha256": digest}
                    if digest is not None:
                        files[role] = {source["pretrained"]: digest}
            elif isinstance(source.get("trial"), Mapping):
                own = value_at(tree, (*path, "trial"))
                nested = own if isinstance(own, Mapping) else source["trial"]
                if role == "teacher" and "data" not in nested:
                    if not isinstance(plain.get("data"), Mapping) or any(place[0] == "data" for place, _ in faults):
                        continue  # its mistakes are reported already
                    # Test sets beside the test split are of the student alone.
                    shared = {name: value for name, value in plain["data"].items() if name not in TEST_SET_OPTIONS}
                    nested = {"data": shared, **nested}
                try:
                    trial = self.resolve(nested)
                except Faults as error:
                    faults += [((*path, "trial", *inner), sentence) for inner, sentence in error.faults]
                    continue
                if trial.incompatibility:
                    faults.append(((*path, "trial"), trial.incompatibility))
                identified["trial"] = trial.identity
                put(plain, (*path, "trial"), trial.plain)
                needs[role] = Prerequisite(trial, source.get("seed", "same"))
        return needs, files

    def _metrics(
        self,
        plain: dict[str, Any],
        identity: dict[str, Any],
        info: DataInfo | None,
        objective: type[Any] | None,
        faults: list[tuple[Path, str]],
    ) -> list[_CachedChoice]:
        """Return the metrics that a trial names, without those that every trial reports.

        Both trees are updated in place; in ``identity`` the metrics are sorted, because their order changes no result.
        """
        values = value_at(plain, METRICS)
        if not isinstance(values, list | tuple):
            return []  # reported by TrialSpec
        choices: list[_CachedChoice] = []
        for index, value in enumerate(values):
            choice, error = self._choice("metric", value)
            if error is not None:
                faults += [((*METRICS, index, *inner), sentence) for inner, sentence in error.faults]
            elif choice is not None:
                choices.append(choice)
        indices: list[int] = []
        if choices and len(choices) == len(values) and info is not None and objective is not None:
            without_labels = "" if objective.labels else str(value_at(plain, (*OBJECTIVE, "type")))
            metric_choices = [choice.choice for choice in choices]
            indices, metric_faults = slot_package("metric").resolve_metrics(info, metric_choices, without_labels)
            faults += [((*METRICS, index), sentence) for index, sentence in metric_faults]
        metrics = [choices[index] for index in indices]
        if metrics:
            put(plain, METRICS, [choice.plain for choice in metrics])
            put(identity, METRICS, sorted((choice.hashed for choice in metrics), key=json.dumps))
        else:  # without metrics, the key is left out of the spec and the identity
            for tree in (plain, identity):
                value_at(tree, METRICS[:-1]).pop(METRICS[-1], None)
        return metrics

    def _choice(self, name: str, value: Any) -> tuple[_CachedChoice | None, OptionError | None]:
        """Return the choice and its mistakes; if it has some, with defaults for the wrong options, or None."""
        if value is None:
            return None, None  # reported by TrialSpec
        cache_key = (name, json.dumps(value, sort_keys=True, default=repr))
        if cache_key not in self._choices:
            try:
                self._choices[cache_key] = _CachedChoice(slot(name).resolve(value)), None
            except OptionError as error:
                sound = _CachedChoice(error.sound) if isinstance(error.sound, ResolvedChoice) else None
                self._choices[cache_key] = sound, error.with_traceback(None)
        return self._choices[cache_key]

    def _info(self, data: ResolvedChoice, plain: Mapping[str, Any]) -> DataInfo:
        cache_key = json.dumps(plain, sort_keys=True)
        if cache_key not in self._infos:
            self._infos[cache_key] = self._inform(data)
        return self._infos[cache_key]


def _is_component(choice: ResolvedChoice, option: str | int) -> bool:
    """Return whether an option of a choice is itself a component, or a list of them."""
    return is_choice(slot(choice.slot).options(choice.component).model_fields[str(option)])


def _corrupted_in_key(data: Mapping[str, Any], info: DataInfo) -> Mapping[str, Any]:
    """Return the data of a key, where corrupting as many test images as there are, or more, is corrupting all."""
    count = (data.get("corrupted") or {}).get("images")
    if count is None or info.test_images is None or count < info.test_images:
        return data
    return {**data, "corrupted": {name: value for name, value in data["corrupted"].items() if name != "images"}}


def _other_split_below(data: Choice, identity: DataIdentity | None, role: str, source: ResolvedTrial) -> str | None:
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
