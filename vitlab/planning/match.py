"""Matching: find the value of one knob at which an arm costs as much as its baseline.

The caller supplies the function that counts costs.  The value is found by bisection over the values that the knob can
take: whole numbers, multiples of the batch size for ``train.images``, four significant digits for other numbers.

A training costs 3 x MACs x images: a forward pass, and a backward pass of twice its work.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from math import floor, log10
from typing import TYPE_CHECKING, Any

from vitlab.errors import Fault, Path, SpecError, VitlabError, nearest, one_line
from vitlab.geometry import DataInfo
from vitlab.identity.trial import hash_of
from vitlab.planning.arms import ArmResolver, ResolvedArm
from vitlab.planning.resolve import Faults, ResolvedTrial
from vitlab.spec import Choice, Match
from vitlab.spec import trial as trial_spec
from vitlab.spec.design import Changes, format_value
from vitlab.spec.tree import Tree, flatten, keys_of, value_at

if TYPE_CHECKING:
    from vitlab.models.cost import Cost

LENGTHS = tuple(f"train.{name}" for name in trial_spec.LENGTHS)
DOUBLINGS = 24  #: largest number of times that the base's value is doubled in the search
IMAGES = "images"
SPAN = 512  #: largest number of consecutive impossible values that the search skips


CountCost = Callable[["Choice | Tree", DataInfo], "Cost"]
"""Returns the cost of a model, given its resolved choice and its data; supplied by a caller that can build models."""


class Unmatched(Exception):
    """Failure to match an arm: no value of the knob comes close enough.  The message is one sentence."""


class Matcher:
    """Solver for one knob, with a cache of model costs."""

    def __init__(self, match: Match, count: CountCost) -> None:
        self.match = match
        self._count = count
        self._costs: dict[tuple[str, DataInfo], Cost] = {}

    def relative_difference(self, trial: ResolvedTrial, reference: ResolvedTrial) -> float:
        """Return the relative difference of a trial's cost from the reference's; negative if it costs less.

        Raises:
            Unmatched: if the two cannot be compared.
        """
        (amount, unit), (target, target_unit) = self._cost_and_unit(trial), self._cost_and_unit(reference)
        if unit != target_unit:
            raise Unmatched(
                f"its length is in {unit} and its baseline's in {target_unit}, and their ratio is not "
                "known before the data is read; give all lengths in steps or images"
            )
        if not target:
            raise Unmatched(f"the baseline has 0 {self.match.quantity}, so no arm can be matched to it")
        return amount / target - 1

    def solve_knob(
        self, arm: ResolvedArm, reference: ResolvedTrial, trial_at: Callable[[int | float], ResolvedTrial]
    ) -> None:
        """Give an arm the value of the knob at which its trial costs as much as the reference.

        Args:
            arm: the arm; its trial is replaced, and the value, the difference and a note are added.
            reference: the trial to match.
            trial_at: returns the trial with another value of the knob; raises Faults if it cannot take the value.

        Raises:
            Unmatched: if no value is within the tolerance, naming the nearest.
        """
        knob, trial = self.match.knob, arm.trial
        now = value_at(trial.plain, keys_of(knob))
        if not is_number(now):
            raise Unmatched(f"it has no number at {knob}")
        unit = _knob_spacing(trial, knob, now)

        @cache
        def candidate_at(k: int) -> tuple[ResolvedTrial, float] | None:
            """Return the trial at the k-th value and its relative difference; None if the arm cannot take it."""
            with suppress(Faults):
                other = trial_at(k * unit if isinstance(unit, int) else round(k * unit, 9))
                if not other.incompatibility:
                    return other, self.relative_difference(other, reference)
            return None

        def off(k: int) -> float | None:
            candidate = candidate_at(k)
            return candidate and candidate[1]

        places = _bracket_target(off, max(1, round(now / unit)))
        near = [(k, candidate) for k in places if (candidate := candidate_at(k)) is not None]
        if not near:
            raise Unmatched(
                f"no value of {knob} that was tried gives an arm that can be trained; choose another match.knob, or "
                "list the arm under match.except"
            )
        (_, best), *others = sorted(near, key=lambda item: (abs(item[1][1]), item[0]))
        solved, distance = best
        if abs(distance) > self.match.tolerance:
            beyond = f"; {self._format_candidate(others[0][1], reference)}" if others else ""
            raise Unmatched(
                f"the nearest that {knob} can reach is {self._format_candidate(best, reference)}{beyond}; the "
                f"tolerance is {100 * self.match.tolerance:g} %"
            )
        arm.trial, arm.cost_difference = solved, abs(distance)
        arm.note = f"matched by {self._format_candidate(best, reference)}"
        arm.solved[knob] = value_at(solved.plain, keys_of(knob))

    def _format_candidate(self, candidate: tuple[ResolvedTrial, float], reference: ResolvedTrial) -> str:
        """Format a candidate: ``model.dim 36: 12,345 params, 0.42 % above 12,293``."""
        (trial, off), quantity, knob = candidate, self.match.quantity, self.match.knob
        amounts = [self._cost_and_unit(one) for one in (trial, reference)]
        amount, target = (f"{value:,.0f}" if value < 1e7 else f"{value:.4g}" for value, _ in amounts)
        each = " for each image of the data" if amounts[0][1] not in ("", IMAGES) else ""
        percent = f"{float(f'{100 * abs(off):.2g}'):g} %"  # 110, not 1.1e+02
        apart = "exactly" if off == 0 else f"{percent} {'above' if off > 0 else 'below'} {target}"
        return f"{knob} {format_value(value_at(trial.plain, keys_of(knob)))}: {amount} {quantity}{each}, {apart}"

    def _cost_and_unit(self, trial: ResolvedTrial) -> tuple[float, str]:
        """Return the cost of a trial, and the unit of its length."""
        cache_key = str(trial.spec.model), trial.info
        if cache_key not in self._costs:
            try:
                self._costs[cache_key] = self._count(trial.spec.model.plain(), trial.info)
            except (VitlabError, NotImplementedError, RuntimeError) as error:
                raise Unmatched(f"its model cannot be counted: {one_line(error)}") from error
        counts = self._costs[cache_key]
        if self.match.quantity != "train_macs":
            return getattr(counts, self.match.quantity), ""
        length, unit = _training_length_and_unit(trial)
        return BACKWARD * counts.macs * length, unit


def match_arms(resolver: ArmResolver, matcher: Matcher, arms: Sequence[ResolvedArm]) -> list[str]:
    """Solve for the knob of every arm that is compared with another; return notes for the report."""
    options, document, base = matcher.match, resolver.document, resolver.base_trial
    by_name = {arm.name: arm for arm in arms}
    base_key, compared = hash_of(base.identity), {arm.baseline for arm in arms}
    unmatched: dict[str, str] = {}
    for arm in arms:
        reference = arm
        while reference.baseline is not None:
            reference = by_name[reference.baseline]
        alone = reference is arm
        is_baseline = alone and (arm.key == base_key or arm.name in compared)
        if arm.skip or reference.skip or is_baseline or arm.twin or arm.name in options.spare:
            continue

        def at(value: int | float, arm: ResolvedArm = arm) -> ResolvedTrial:
            return resolver.resolve_changed({**arm.changes.values, options.knob: value})

        try:
            matcher.solve_knob(arm, base if alone else reference.trial, at)
        except Unmatched as error:
            unmatched[arm.name] = f"it cannot be matched in {options.quantity}: {error}"
    problems = []
    for arm in arms:
        problems += resolver.apply_rules(arm)
        if arm.name in unmatched and not arm.skip:
            if options.otherwise == "skip":
                arm.skip = unmatched[arm.name]
            else:
                problems.append(document.problem(arm.place, f"arm '{arm.name}': {unmatched[arm.name]}"))
    if problems:
        raise SpecError(problems)
    solved = [arm for arm in arms if arm.note]
    if not solved:
        return []
    means = " (3 x MACs x images seen)" if options.quantity == "train_macs" else ""
    exempt = f"; not matched: {', '.join(options.spare)}" if options.spare else ""
    farthest = max(arm.cost_difference for arm in solved)
    return [
        f"Arms are matched with their baseline in {options.quantity}{means} by {options.knob}, within "
        f"{100 * options.tolerance:g} %; the farthest is {100 * farthest:.2g} % off{exempt}."
    ]


def find_mistakes(match: Match, plain: Tree, design: Sequence[Changes]) -> Iterator[Fault]:
    """Yield the mistakes in a ``match`` that show before any cost is counted, as places and sentences.

    Args:
        match: the ``match`` of the study.
        plain: the resolved base.
        design: the changes of every arm.
    """
    if not isinstance(plain.get("model"), Mapping):
        return  # the model's own mistakes are reported already
    knob, place = match.knob, ("match", "knob")
    if knob in LENGTHS and match.quantity != "train_macs":
        yield place, f"{knob} does not change {match.quantity}; match train_macs, or by a number of the model"
    elif not is_number(value_at(plain, keys_of(knob))) or not (knob in LENGTHS or knob.startswith("model.")):
        length = next(name for name in LENGTHS if value_at(plain, keys_of(name)) is not None)
        numbers = [path for path, value in flatten(plain["model"], "model").items() if is_number(value)] + [length]
        hint = nearest(knob, numbers)
        yield place, f"the base has no number '{knob}' to match by.{hint} Knobs: {', '.join(numbers)}."
    else:
        sentence = (
            f"the design sets {knob}, for which 'match' solves; match by another knob, or remove it from the design"
        )
        yield from ((where, sentence) for where in places_of_knob(knob, design))


def places_of_knob(knob: str, design: Sequence[Changes]) -> list[Path]:
    """Return the places at which a design sets a knob: the first of every path that sets it."""
    places: dict[str, Path] = {}
    for changes in design:
        for path, value in changes.values.items():
            if path not in places and _sets_knob(path, value, knob):
                places[path] = changes.places[path]
    return list(places.values())


def paths_overlap(first: str, second: str) -> bool:
    """Return whether two paths name the same value, or one names a part of the other."""
    if first in LENGTHS and second in LENGTHS:
        return True
    return f"{first}.".startswith(f"{second}.") or f"{second}.".startswith(f"{first}.")


def is_number(value: Any) -> bool:
    """Return whether a value is a number; booleans are not."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def _bracket_target(excess: Callable[[int], float | None], start: int) -> list[int]:
    """Return the largest possible k below the target and the smallest possible k at or above it, if they exist.

    Args:
        excess: difference from the target, increasing in k; None if k is impossible.
        start: the first k to try.
    """
    low, high, last = 0, _first_possible(excess, start, start + SPAN), None
    for _ in range(DOUBLINGS):
        if high is None:
            break
        here = excess(high)
        assert here is not None
        if here >= 0 or (last is not None and here <= last):
            break
        low, last = high, here
        high = _first_possible(excess, 2 * high, 2 * high + SPAN)
    if high is None:
        return [low] if low else []
    while True:
        middle = (low + high) // 2
        k = _first_possible(excess, max(middle, low + 1), high) or _first_possible(excess, middle - 1, low, -1)
        if k is None:
            return [k for k in (low, high) if k]
        if (excess(k) or 0.0) < 0:
            low = k
        else:
            high = k


def _first_possible(off: Callable[[int], float | None], first: int, stop: int, step: int = 1) -> int | None:
    """Return the first possible k in ``range(first, stop, step)``, or None."""
    return next((k for k in range(first, stop, step) if off(k) is not None), None)


def _knob_spacing(trial: ResolvedTrial, knob: str, now: int | float) -> int | float:
    """Return the spacing of a knob's values."""
    if knob == "train.images":
        return trial.spec.train.batch_size
    if isinstance(now, int):
        return 1
    return 10.0 ** (floor(log10(now)) - 3) if now > 0 else 0.001


def _training_length_and_unit(trial: ResolvedTrial) -> tuple[float, str]:
    """Return the number of images that a training sees, and the unit.

    The unit is epochs of the data set if the number of its images is not known yet.
    """
    train = trial.spec.train
    images = train.images_seen()
    if images is not None:
        return images, IMAGES
    assert train.epochs is not None
    data = trial.spec.data.plain()
    options = {name: value for name, value in data.items() if name not in _APPEARANCE and value is not None}
    return train.epochs, f"epochs of {format_value(options)}"


_APPEARANCE = ("size", "channels", "normalize", "augment")
"""Options of data sets that change the images' appearance, but not their number."""


def _sets_knob(path: str, value: Any, knob: str) -> bool:
    """Return whether a change of ``path`` to ``value`` sets the knob, or a part of it."""
    path = path.removesuffix(".type")
    if knob.startswith(f"{path}."):
        return value_at(value, keys_of(knob[len(path) + 1 :])) is not None
    return paths_overlap(path, knob)


BACKWARD = 3  #: work of a training step in forward passes: one forward, and a backward of twice its work
