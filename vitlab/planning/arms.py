"""Arms: the changes of a design to the base, resolved, with the names and the baselines of the arms.

In: a study, and the changes of its arms by :mod:`vitlab.spec.design`.  Out: a :class:`ResolvedArm` for each of them,
whose options :mod:`vitlab.planning.resolve` has completed; and the trials of an arm, with their keys.
"""

import ast
import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from os.path import commonpath
from typing import Any

from vitlab.errors import Fault, Path, Problem, is_about_key
from vitlab.geometry import DataInfo
from vitlab.identity.trial import Trial, hash_of
from vitlab.planning.resolve import Faults, ResolvedTrial, Resolver
from vitlab.planning.rules import RuleFault, is_met, parse_rule
from vitlab.registry import slot
from vitlab.spec import Document, Study
from vitlab.spec.choice import component_label
from vitlab.spec.design import Changes, apply_changes, arm_names, format_value
from vitlab.spec.run import REPORTING_SEEDS
from vitlab.spec.study import Counterpart
from vitlab.spec.tree import NewTree, Tree, Values, deep_copy, keys_of, set_value, value_at, without
from vitlab.spec.trial import SOURCES

CONTROL_SEEDS = 2 * REPORTING_SEEDS  #: seeds of controls are larger than those of arms and of tunings


@dataclass
class ResolvedArm:
    """An arm of the design, resolved; matching, rules and tuning complete it."""

    changes: Changes
    name: str
    trial: ResolvedTrial
    key: str  #: key of the trial without seeds, before matching and tuning; arms with equal keys are merged
    baseline: str | None = None  #: name of the arm that it is compared with
    aliases: list[str] = field(default_factory=list)
    is_repeated: bool = False  #: whether the design has it more than once under one name
    skip: str = ""  #: the reason why it is not trained; empty if it is
    solved: NewTree = field(default_factory=dict)  #: values chosen by matching and tuning
    cost_difference: float = 0.0  #: relative difference from the cost of its baseline
    note: str = ""
    pending: bool = False  #: whether its tuned values are still to be chosen
    twin: str = ""  #: name of the arm that a control equals; empty if it is none
    first_seed: int = 0  #: added to the seeds of the study; not 0 in controls

    @property
    def is_base(self) -> bool:
        """Whether it is the base, in its block."""
        return self.changes.values == self.changes.conditions and not self.twin

    @property
    def place(self) -> Path:
        """Place of its first change in the document."""
        return next(iter(self.changes.places.values()), ("design",))


@dataclass(frozen=True)
class ArmResolver:
    """Resolver of the arms of a study, which are its base with changes, and of their trials."""

    study: Study
    document: Document
    resolver: Resolver
    base: Tree  #: as written in the document
    resolved: ResolvedTrial | Faults  #: the base; with mistakes, as far as it is sound
    rules: Mapping[int, ast.expr]  #: the conditions of ``where`` by their indices
    prerequisites: dict[str, Trial] = field(default_factory=dict)
    """Trials that others start from, by key; :meth:`make_trial_and_needs` adds them."""

    @property
    def base_trial(self) -> ResolvedTrial:
        """The base of a study without mistakes, resolved."""
        assert isinstance(self.resolved, ResolvedTrial)
        return self.resolved

    def resolve_changed(self, values: Values) -> ResolvedTrial:
        """Return the base with ``values`` changed, resolved.

        Raises:
            Faults: with the mistakes that the base itself does not have; without any if they are all the base's.
        """
        try:
            return self.resolver.resolve_trial(self.changed_base(values))
        except Faults as error:
            known = self.resolved.faults if isinstance(self.resolved, Faults) else []
            missing = [(name,) for name in ("data", "model", "train") if name not in self.base]  # reported already
            faults = [fault for fault in error.faults if fault not in known and fault[0] not in missing]
            raise Faults(faults, error.plain, error.info) from None

    def changed_base(self, values: Values) -> NewTree:
        """Return the base with ``values`` changed, as it would be written in the document."""
        return apply_changes(self.base, values, self.resolved.plain)

    def apply_rules(self, arm: ResolvedArm) -> list[Problem]:
        """Apply the rules to an arm: skip it, or return a problem, for each rule that it breaks."""
        problems = []
        for index, condition in self.rules.items():
            rule = self.study.where[index]
            try:
                met = is_met(condition, arm.trial.plain)
            except RuleFault as error:
                problems.append(self.document.problem(("where", index, "require"), str(error)))
                continue
            if not met and rule.otherwise == "error":
                sentence = f"arm '{arm.name}' breaks this rule: {rule.because}"
                problems.append(self.document.problem(("where", index), sentence))
            elif not met and not arm.skip:
                arm.skip = rule.because
        return problems

    def make_trial_and_needs(self, resolved: ResolvedTrial, seed: int, splits: Mapping[str, int] = {}) -> Trial:
        """Return a trial with its seeds and its key, and add the trials that it needs to ``prerequisites``.

        Args:
            resolved: the trial without seeds.
            seed: seed of the replicate.
            splits: type of data set to the seed of its split, which replaces the study's, so that no trial from which
                another one takes weights, however indirectly, is trained on the other's validation images.
        """
        data = resolved.spec.data.type
        streams = self.study.seeds.stream_seeds(seed) | ({"split": splits[data]} if data in splits else {})
        splits = {data: streams["split"], **splits}
        needs: dict[str, str] = {}
        for role, prerequisite in resolved.needs.items():
            own = seed if prerequisite.seed == "same" else prerequisite.seed
            taught = {prerequisite.trial.spec.data.type: streams["split"]} if role == "teacher" else {}
            other = self.make_trial_and_needs(prerequisite.trial, own, {**taught, **splits})
            self.prerequisites[other.key] = other
            needs[role] = other.name
        return resolved.to_seeded_trial(streams, needs)


def parse_rules(study: Study | None, document: Document, problems: list[Problem]) -> dict[int, ast.expr]:
    """Parse the rules of a study; add a problem for each that is not a valid expression."""
    rules: dict[int, ast.expr] = {}
    for index, rule in enumerate(study.where if study else ()):
        try:
            rules[index] = parse_rule(rule.require)
        except RuleFault as error:
            problems.append(document.problem(("where", index, "require"), str(error)))
    return rules


# -- the arms of a design ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ResolvedDesign:
    """The arms of a design, and what is known of those that have mistakes."""

    arms: list[ResolvedArm]
    names: list[str]  #: of all arms, also of those with mistakes
    trials: list[tuple[Tree, DataInfo | None]]  #: values and data of the trial of every arm, as far as they are sound
    faults: list[Path]  #: paths of mistakes in these trials


def resolve_arms(resolver: ArmResolver, design: Sequence[Changes], problems: list[Problem]) -> ResolvedDesign:
    """Resolve the arms of a design, equal ones merged, and add their mistakes to ``problems``."""
    trials: list[tuple[Changes, ResolvedTrial | Faults]] = []
    for changes in design:
        try:
            trials.append((changes, resolver.resolve_changed(changes.values)))
        except Faults as error:
            trials.append((changes, error))
    problems += _fault_problems(trials, resolver.document)
    names = arm_names(design, [trial.plain for _, trial in trials])
    arms = _merge_equal_arms(trials, names)
    controls = [each for arm in arms if arm.is_base for each in _make_controls(arm, resolver.study.controls)]
    blocks = list(dict.fromkeys(arm.changes.block for arm in arms))
    arms = sorted([*arms, *controls], key=lambda arm: blocks.index(arm.changes.block))
    problems += [resolver.document.problem(arm.place, sentence) for arm, sentence in _find_conflicting_arms(arms)]
    faults = [path for _, trial in trials if isinstance(trial, Faults) for path, _ in trial.faults]
    return ResolvedDesign(arms, names, [(trial.plain, trial.info) for _, trial in trials], faults)


def _merge_equal_arms(
    trials: Sequence[tuple[Changes, ResolvedTrial | Faults]], names: Sequence[str]
) -> list[ResolvedArm]:
    """Return an arm for each different trial without mistakes; further names of a trial become its aliases."""
    arms: dict[str, ResolvedArm] = {}
    for (changes, trial), name in zip(trials, names, strict=True):
        if isinstance(trial, ResolvedTrial):
            key = hash_of(trial.identity)
            arm = arms.setdefault(key, ResolvedArm(changes, name, trial, key, skip=trial.incompatibility))
            if name != arm.name:
                arm.aliases.append(name)
            elif changes.values and changes.places != arm.changes.places:
                arm.is_repeated = True
    return list(arms.values())


def _fault_problems(trials: Sequence[tuple[Changes, ResolvedTrial | Faults]], document: Document) -> Iterator[Problem]:
    """Yield a problem for each mistake; one that several values of a list share is reported once, at the list."""
    places_of: dict[Fault, list[Path]] = {}
    for changes, trial in trials:
        for path, sentence in trial.faults if isinstance(trial, Faults) else ():
            change, place = _places_of_change_and_fault(changes, path)
            values = change[:-1] if isinstance(change[-1], int) else change
            place = values if place == change and is_about_key(path, sentence) else place
            places_of.setdefault((values, sentence), []).append(place)
    for (values, sentence), places in places_of.items():
        yield document.problem(places[0] if len(set(places)) == 1 else values, sentence)


def set_baselines(resolver: ArmResolver, arms: Sequence[ResolvedArm]) -> Iterator[Fault]:
    """Give every arm the arm that it is compared with, as ``analysis.compare`` says.

    Yields:
        A place and a sentence, if an arm has no counterpart, or no arm a baseline.
    """
    study = resolver.study
    compare, place = study.analysis.compare, ("analysis", "compare")
    is_alone = study.design is None and all(arm.is_base for arm in arms)
    if compare == "none" or is_alone:
        return
    by_key, has_base = {arm.key: arm for arm in arms}, True
    for arm in arms:
        if arm.twin:
            arm.baseline = arm.twin
            continue
        against = {**arm.changes.values, **compare.to} if isinstance(compare, Counterpart) else arm.changes.against
        try:
            other = by_key.get(hash_of(resolver.resolve_changed(against).identity))
        except Faults as error:
            yield (*place, "to"), str(error)
            return
        if other is None and isinstance(compare, Counterpart):
            pairs = ", ".join(f"{path}={value}" for path, value in compare.to.items())
            yield place, f"arm '{arm.name}' has no counterpart with {pairs} in the design"
            return
        has_base &= other is not None
        arm.baseline = other.name if other is not None and other is not arm else None
    if any(arm.baseline for arm in arms):
        return
    paths = dict.fromkeys(path for arm in arms for path in arm.changes.values)
    own = (
        f"{path}: {format_value(component_label(value_at(resolver.resolved.plain, keys_of(path))))}" for path in paths
    )
    sentence = (
        "no arm of the design equals the base, so there is no baseline; add one with its values "
        f"({', '.join(own)}; under arms, baseline: {{}}), set analysis: {{compare: {{to: {{PATH: value}}}}}}"
    )
    if has_base:
        what = "has the values of analysis.compare" if isinstance(compare, Counterpart) else "equals the base"
        sentence = f"every arm of the design {what}, so nothing is compared; add an arm with other values"
    yield ("design",), f"{sentence}, or write analysis: {{compare: none}}"


def _places_of_change_and_fault(changes: Changes, path: Path) -> tuple[Path, Path]:
    """Return the place of the change that caused a fault of an arm, and the place of the fault inside it.

    The base does not have this fault, so one of the changes caused it.
    """
    dotted = ".".join(map(str, path))
    causes = [change for change in changes.values if f"{dotted}.".startswith(f"{change.removesuffix('.type')}.")]
    causes = causes or [change for change in changes.values if change.startswith(f"{dotted}.")]
    if not causes and changes.values:
        # A change can make another value wrong, as a width does the number of heads: take the closest in the tree.
        places = {change: change.replace(".", "/") for change in changes.values}
        causes = [max(places, key=lambda change: len(commonpath([places[change], dotted.replace(".", "/")])))]
    if causes:
        cause = max(causes, key=len)
        inner = path[cause.removesuffix(".type").count(".") + 1 :]
        return changes.places[cause], (*changes.places[cause], *inner)
    return ("base",), ("base", *path)


def _make_controls(arm: ResolvedArm, count: int) -> Iterator[ResolvedArm]:
    """Yield so many controls of an arm, which equal it but for their seeds."""
    for place in range(count):
        label = "control" if not place else f"control {place + 1}"
        name = f"{arm.changes.block}: {label}" if arm.changes.block else label
        first = CONTROL_SEEDS + place * REPORTING_SEEDS
        yield ResolvedArm(
            arm.changes, name, arm.trial, f"{arm.key} {label}", skip=arm.skip, twin=arm.name, first_seed=first
        )


def _find_conflicting_arms(arms: Collection[ResolvedArm]) -> Iterator[tuple[ResolvedArm, str]]:
    """Yield each arm that cannot be in a study with another one, with a sentence."""
    by_training: dict[str, ResolvedArm] = {}
    by_name: dict[str, ResolvedArm] = {}
    for arm in arms:
        other = arm if arm.twin else by_training.setdefault(hash_of(_identity_without_unread(arm.trial)), arm)
        if other is not arm:
            own, others = arm.changes.values, other.changes.values
            paths = [path for path in {**others, **own} if own.get(path) != others.get(path)]
            sentence = (
                f"arms '{other.name}' and '{arm.name}' train the same: they differ only in {' and '.join(paths)}, "
                "which their objective never reads; remove one of them"
            )
            yield arm, sentence
        if by_name.setdefault(arm.name, arm) is not arm:
            yield arm, f"two different arms are called '{arm.name}'; give them labels"
    for first, arm in itertools.pairwise(arms):
        if arm.trial.spec.train.stop_early != first.trial.spec.train.stop_early:
            yield arm, f"it stops early by another rule than '{first.name}'; write one train.stop_early, in base"
            return


def _identity_without_unread(trial: ResolvedTrial) -> Tree:
    """Return the identity of a trial without what its objective never reads, and the same of its prerequisites."""
    identity = trial.identity
    objective: Any = slot("objective").resolve_choice(trial.spec.train.objective).component
    for path in (tuple(dotted.split(".")) for dotted in objective.unread):
        identity = without(identity, path)
        if value_at(identity, path[:-1]) == {}:  # as if no option of the component had been set
            identity = without(identity, path[:-1])
    for role, other in trial.needs.items():
        identity = deep_copy(identity)
        set_value(identity, (*SOURCES[role], "trial"), _identity_without_unread(other.trial))
    return identity
