"""Study: the whole file, with one question, one base trial, one design and the analysis."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path as FilePath
from typing import Annotated, Any, Literal

from pydantic import (
    Discriminator,
    Field,
    GetJsonSchemaHandler,
    Tag,
    field_validator,
    model_validator,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from vitlab.errors import Path, Problem, SpecError, nearest
from vitlab.spec.choice import Amount, Frozen, Goal
from vitlab.spec.collect import collect, conflict, copied
from vitlab.spec.design import Node
from vitlab.spec.run import RunSpec
from vitlab.spec.sentences import faults
from vitlab.spec.trial import LENGTHS, STREAMS, TrialSpec
from vitlab.spec.yaml import Document, read_document

STAND_INS: Mapping[str, Any] = {"study": "study", "train": {"steps": 1}, "steps": 1}
"""Values that replace missing or wrong ones, so that the rest of a study can be validated."""

BASE: Mapping[str, Any] = {"data": "digits", "model": "vit", "train": {"steps": 1}}
"""The same for a base that lacks its data or its model."""

FORMER_KEYS: Mapping[Path, Path] = {("run", "tracking_uri"): ("run", "tracker", "uri")}
"""Former path of a value to its present one; both are accepted."""

REPORTING_SEEDS = 1_000_000  #: seeds of replicates are smaller; larger ones are for tuning
MAX_LOOKS = 20  #: at the results of a study whose seeds are added until it is decided


class Rule(Frozen):
    """A condition on every arm, as an expression over its values: ``model.dim % model.heads == 0``."""

    require: str  #: condition on the values of an arm, such as ``model.dim % 2 == 0``
    otherwise: Literal["error", "skip"] = Field("skip", alias="else")  #: what happens to an arm that breaks it
    because: str  #: reason, shown with the arms that break it


class Seeds(Frozen):
    """Replicates.  Each seed sets the streams in ``vary`` to itself; the other streams are 0 in every replicate."""

    values: tuple[int, ...] = (0, 1, 2)  #: seeds of every arm
    vary: tuple[str, ...] = tuple(stream for stream in STREAMS if stream != "split")
    """Random streams that depend on the seed; the others are equal in all trials."""
    escalate_to: int | None = None  #: total number of seeds of inconclusive arms, added at once
    until: Literal["decided"] | None = None
    """``decided``: inconclusive arms get ``every`` more seeds at a time, until they have ``at_most``."""
    at_most: int | None = None  #: total number of seeds of an arm, with ``until``
    every: int | None = None  #: seeds that are added at a time, with ``until``; by default as many as at first

    @model_validator(mode="before")
    @classmethod
    def _shorthand(cls, value: Any) -> Any:
        """Expand ``5``, ``[0, 1, 7]``, ``{count: 5, vary: [init]}`` and ``at_least`` to the form with ``values``."""
        if isinstance(value, int) and not isinstance(value, bool):
            value = {"count": value}
        if isinstance(value, Sequence) and not isinstance(value, str):
            value = {"values": list(value)}
        if isinstance(value, Mapping) and value.keys() & {"count", "at_least"}:
            name = "at_least" if "at_least" in value else "count"
            if name == "at_least" and "until" not in value:
                raise ValueError("at_least needs until: decided; otherwise give count")
            count, rest = value[name], {key: item for key, item in value.items() if key != name}
            if other := sorted(rest.keys() & {"count", "values"}):
                raise ValueError(f"found {name} and {other[0]}; give one of count, at_least and values")
            if not isinstance(count, int) or isinstance(count, bool) or count < 1:
                raise ValueError(f"the number of seeds is a whole number from 1; found {name}: {count!r}")
            if count > REPORTING_SEEDS:
                raise ValueError(f"found {count:,} seeds; at most {REPORTING_SEEDS:,} are allowed")
            return {"values": list(range(count)), **rest}
        return value

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        reference = handler(schema)
        definition = handler.resolve_ref_schema(reference)
        count = {"type": "integer", "minimum": 1, "maximum": REPORTING_SEEDS}
        values = {
            "type": "array",
            "items": {"type": "integer", "minimum": 0, "exclusiveMaximum": REPORTING_SEEDS},
            "minItems": 1,
            "uniqueItems": True,
        }
        vary = {"type": "array", "items": {"enum": list(STREAMS)}}
        most = {**count, "minimum": 2}
        by_count = {**count, "description": "Number of seeds; they are 0, 1, 2, ..."}
        properties = {"count": by_count, "values": values, "vary": vary, "escalate_to": most}
        properties |= {
            "until": {"enum": ["decided"]},
            "at_least": {**count, "minimum": 2, "description": "Number of seeds of every arm; they are 0, 1, 2, ..."},
            "at_most": most,
            "every": count,
        }
        long_form = {**definition, "properties": properties}
        definition.clear()
        definition["anyOf"] = [count, values, long_form]
        return reference

    @field_validator("values")
    @classmethod
    def _distinct(cls, values: tuple[int, ...]) -> tuple[int, ...]:
        if not values:
            raise ValueError("at least one seed is needed")
        if len(set(values)) < len(values):
            raise ValueError("a seed is listed twice; each seed is one replicate")
        if any(not 0 <= seed < REPORTING_SEEDS for seed in values):
            raise ValueError(f"seeds must be from 0 to {REPORTING_SEEDS - 1:,}")
        return values

    @field_validator("vary")
    @classmethod
    def _streams(cls, vary: tuple[str, ...]) -> tuple[str, ...]:
        for stream in vary:
            if stream not in STREAMS:
                raise ValueError(
                    f"no stream called '{stream}'.{nearest(stream, STREAMS)} Streams: {', '.join(STREAMS)}"
                )
        return vary

    @model_validator(mode="after")
    def _more(self) -> Seeds:
        if self.until is None:
            for name in ("at_most", "every"):
                if getattr(self, name) is not None:
                    raise conflict(f"{name} needs until: decided", name, "until")
        elif self.escalate_to is not None:
            raise conflict("escalate_to and until are two ways to add seeds; remove one", "escalate_to", "until")
        elif self.at_most is None or not len(self.values) < self.at_most <= REPORTING_SEEDS:
            raise conflict(
                f"until: decided needs at_most, the total number of seeds of an arm: more than the {len(self.values)} "
                f"of the first look and at most {REPORTING_SEEDS:,}; found {self.at_most or 'none'}",
                "at_most",
                "values",
                "until",
            )
        elif self.every is not None and self.every < 1:
            raise conflict(f"every is a whole number from 1; found {self.every}", "every")
        elif len(self._sizes) > MAX_LOOKS:
            raise conflict(
                f"a study has at most {MAX_LOOKS} looks at its results, and this one has {len(self._sizes):,}; "
                "raise every",
                "every",
                "at_most",
            )
        if len(self._sizes) > 1 and len(self.values) < 2:
            raise conflict("adding seeds needs at least 2 seeds at first, which have a spread", "values")
        if self.escalate_to is not None and not len(self.values) < self.escalate_to <= REPORTING_SEEDS:
            raise conflict(
                f"escalate_to is the total number of seeds: more than the {len(self.values)} of the first look "
                f"and at most {REPORTING_SEEDS:,}; found {self.escalate_to}",
                "escalate_to",
                "values",
            )
        return self

    def up_to(self, most: int) -> tuple[int, ...]:
        """Return these seeds and the smallest others, ``most`` in all."""
        existing = set(self.values)
        further = (seed for seed in itertools.count() if seed not in existing)
        return (*self.values, *itertools.islice(further, max(0, most - len(existing))))

    @property
    def all(self) -> tuple[int, ...]:
        """All seeds that may run, including those of later looks."""
        return self.up_to(self._most)

    @property
    def looks(self) -> tuple[tuple[int, ...], ...]:
        """Seeds of each look, of which the last has all."""
        return tuple(self.all[:size] for size in self._sizes)

    @property
    def _sizes(self) -> Sequence[int]:
        """Number of seeds at each look."""
        step = self._most if self.until is None else self.every or len(self.values)
        return [*range(len(self.values), self._most, step), self._most]

    @property
    def _most(self) -> int:
        """Largest number of seeds of an arm."""
        return max(self.escalate_to or 0, self.at_most or 0, len(self.values))

    def streams(self, seed: int) -> dict[str, int]:
        """Return stream to seed, for the replicate ``seed``."""
        return {stream: seed if stream in self.vary else 0 for stream in STREAMS}


def not_a_metric(name: str) -> str:
    """Return the error message for a text that is not a metric of a split."""
    hint = f" Did you mean 'val/{name}'?" if re.fullmatch(r"\w+", name) else ""
    return f"found '{name}'; allowed: train/NAME, val/NAME or test/NAME, such as val/accuracy.{hint}"


class To(Frozen):
    """A comparison of every arm with the arm that differs from it in these values alone."""

    to: dict[str, Any] = Field(min_length=1)
    """Dotted path to value; each arm is compared with its counterpart that has these."""


class Analysis(Frozen):
    """The analysis of the results, fixed before they are known."""

    metric: str = "val/accuracy"  #: metric of the comparison, such as ``val/accuracy``
    goal: Annotated[Goal, Field(json_schema_extra=lambda schema: schema.pop("default"))] = "max"
    """Direction in which the metric is better; by default the one that it declares."""
    at: Literal["last", "best"] = "last"  #: value of the metric: at the last evaluation, or at the best one
    compare: Annotated[
        Annotated[Literal["baseline", "none"], Tag("<name>")] | Annotated[To, Tag("<to>")],
        Discriminator(lambda compare: "<to>" if isinstance(compare, Mapping | To) else "<name>"),
    ] = "baseline"
    margin: Annotated[Amount, Field(gt=0)] | None = None
    """Largest difference, in either direction, that counts as none; in units of the metric or such as ``2 points``."""
    correction: Literal["holm", "bonferroni", "none"] = "holm"  #: correction for several comparisons
    variance: Literal["moderated", "own"] = "moderated"
    """Spread that a comparison rests on: shared with those of the same baseline and seeds, or its own alone."""
    alpha: Annotated[float, Field(gt=0, lt=0.5)] = 0.05  #: family-wise error rate

    @field_validator("metric")
    @classmethod
    def _group(cls, metric: str) -> str:
        if not re.fullmatch(r"(train|val|test)/\w+", metric):
            raise ValueError(not_a_metric(metric))
        return metric

    @property
    def direction(self) -> str:
        """``higher is better`` or ``lower is better``."""
        return "lower is better" if self.goal == "min" else "higher is better"


class Check(Frozen):
    """The regression gate.  A cell is an arm and a metric; all cells of a study are one family.

    A cell has regressed if the corrected one-sided test rejects and the mean drop is at least ``min_abs``; it passes if
    a drop as large as the margin is ruled out; otherwise it is inconclusive.
    """

    metrics: dict[str, Goal] = Field(default_factory=dict)  #: metrics beside that of the analysis, with their goals
    alpha: Annotated[float, Field(gt=0, lt=0.5)] = 0.05  #: family-wise error rate of the gate
    margin_sd: Annotated[float, Field(gt=0)] = 2.0
    """Smallest relevant drop, in pooled standard deviations of the baseline without outliers; at least two quanta and
    ``min_abs``."""
    margin: dict[str, Annotated[Amount, Field(gt=0)]] = Field(default_factory=dict)
    """The same in units of a metric, by metric."""
    min_abs: dict[str, Annotated[Amount, Field(ge=0)]] = Field(default_factory=dict)
    """Smallest mean drop that counts as a regression, by metric; by default one pooled standard deviation of the
    baseline or two quanta of the metric, whichever is larger."""
    escalate_to: Annotated[int, Field(ge=3)] | None = None
    """Total number of seeds of inconclusive arms; each of the two analyses then has half of ``alpha``."""
    on_inconclusive: Literal["neutral", "fail"] = "neutral"  #: exit code 0 or 5

    @field_validator("metrics", "margin", "min_abs")
    @classmethod
    def _metric_names(cls, value: dict[str, object]) -> dict[str, object]:
        for name in value:
            if not re.fullmatch(r"(train|val|test)/\w+", name):
                raise ValueError(not_a_metric(name))
        return value


class Match(Frozen):
    """Matching of arms in size or work: one knob of every arm is solved for, so that its cost equals its baseline's.

    ``train_macs`` is 3 (a forward pass, and a backward pass of twice its work) x MACs of one image x images seen; a
    teacher and pretraining are not counted.
    """

    quantity: Literal["params", "body_params", "macs", "train_macs"]
    """Quantity that is made equal to that of the baseline."""
    knob: str  #: a number of the model, such as ``model.dim``, or the length of the training, such as ``train.steps``
    tolerance: Annotated[float, Field(gt=0, lt=1)] = 0.01  #: largest relative difference from the baseline
    otherwise: Literal["error", "skip"] = Field("error", alias="else")  #: action for arms that cannot be matched
    spare: tuple[str, ...] = Field((), alias="except")  #: arms that are not matched, such as a reference


class Tune(Frozen):
    """A choice of knob values by full-length trainings with seeds of their own, before the reported trials."""

    knobs: Annotated[dict[str, Annotated[list[Any], Field(min_length=1)]], Field(min_length=1)]  #: path to its values
    per: Literal["arm", "study"] = "arm"  #: one choice per arm, or one for all arms, made at the base
    seeds: Annotated[int, Field(ge=1)] = 2  #: trainings of each combination of values, with seeds from 1,000,000 up
    select: str | None = None  #: metric to select by, with the goal of the analysis; by default its metric, on val

    @field_validator("knobs")
    @classmethod
    def _distinct(cls, knobs: dict[str, list[Any]]) -> dict[str, list[Any]]:
        for path, values in knobs.items():
            for index, value in enumerate(values):
                if value in values[:index]:
                    raise ValueError(f"'{path}' has the value {value!r} twice; each value is tried once")
        return knobs

    @field_validator("select")
    @classmethod
    def _never_by_test(cls, select: str | None) -> str | None:
        if select is not None and not re.fullmatch(r"(train|val)/\w+", select):
            because = "; the test split must not decide a choice" if select.startswith("test/") else ""
            raise ValueError(f"found '{select}'; allowed: val/NAME or train/NAME{because}")
        return select


class Plugins(Frozen):
    """Plugins that the study requires: distributions, or files named on the command line by ``--plugin``."""

    require: tuple[str, ...] = ()  #: requirements such as ``vitlab-timm>=0.1``


class Study(Frozen):
    """A study file."""

    study: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$")]  #: name of the study, and of its folder
    question: str = ""  #: question that the study answers, shown in its report
    base: TrialSpec  #: trial that all arms start from
    design: Node | None = None
    where: tuple[Rule, ...] = ()  #: conditions on every arm
    match: Match | None = None
    tune: Tune | None = None
    seeds: Seeds = Seeds()
    analysis: Analysis = Analysis()
    check: Check | None = None
    run: RunSpec = RunSpec()
    plugins: Plugins = Plugins()


def read_study(
    file: FilePath | str, changes: Mapping[str, Any] | None = None
) -> tuple[Study | None, Document, list[Problem]]:
    """Read a study file, see :func:`study_document`.

    Returns:
        The study, the document and the problems so far, to which the caller adds its own before raising all together.
        If there are problems, study and document contain the sound values, and defaults or stand-ins for the rest; the
        study is None if too few values are sound.
    """
    document = study_document(file, changes or {})
    collected = collect(Study, document.data, partial(faults, top=Study.model_fields), STAND_INS)
    problems = [document.problem(fault.path, fault.message) for fault in collected.faults]
    study = collected.value
    if problems and study is None:
        # The base is too incomplete to be validated; validate the rest of the study with another base.
        study = collect(
            Study, {**collected.tree, "base": BASE}, partial(faults, top=Study.model_fields), STAND_INS
        ).value
        if isinstance(base := document.data.get("base"), Mapping):
            collected.tree["base"] = collect(
                TrialSpec, base, partial(faults, top=TrialSpec.model_fields), STAND_INS
            ).tree
    return study, document.with_sound(collected.tree, collected.renamed) if problems else document, problems


def study_document(file: FilePath | str, changes: Mapping[str, Any] = {}) -> Document:
    """Read the document of a study file with ``changes`` (``--set path=value``) applied, under the present keys.

    Raises:
        SpecError: if the file is not a YAML mapping, or a change goes through a value that has no keys.
    """
    document = read_document(file)
    _rename_former_keys(document)
    for path, value in changes.items():
        _set(document.data, tuple(full_path(path).split(".")), copied(value))
    _rename_former_keys(document)  # a change may be a mapping
    return document


def full_path(path: str) -> str:
    """Return the full present path of a ``--set`` option: ``data.root`` is short for ``base.data.root``."""
    full = path if path.split(".")[0] in Study.model_fields else f"base.{path}"
    return ".".join(map(str, FORMER_KEYS.get(tuple(full.split(".")), (full,))))


def _rename_former_keys(document: Document) -> None:
    """Move values under former keys to their present ones in place, unless those are given, too."""
    for former, present in FORMER_KEYS.items():
        parent: Any = document.data
        for part in former[:-1]:
            parent = parent.get(part) if isinstance(parent, dict) else None
        if not isinstance(parent, dict) or former[-1] not in parent:
            continue
        value = parent.pop(former[-1])
        owner = parent.get(present[-2])
        if value is None or (isinstance(owner, dict) and present[-1] in owner) or isinstance(owner, list | int | float):
            continue
        _set(document.data, tuple(map(str, present)), value)
        for length in range(1, len(present) + 1):
            if former in document.places:
                document.places.setdefault(present[:length], document.places[former])


def _set(data: Any, path: tuple[str, ...], value: Any) -> None:
    """Set one value of the document in place.

    Shorthand names along the path become mappings; a length of the training replaces any other.
    """
    for part in path[:-1]:
        if isinstance(data.get(part), str):
            data[part] = {"type": data[part]}
        data = data.setdefault(part, {})
        if not isinstance(data, dict):
            raise SpecError([Problem("--set", 0, 0, f"'{'.'.join(path)}': '{part}' is not a mapping")])
    if len(path) > 1 and path[-2] == "train" and path[-1] in LENGTHS:
        for other in LENGTHS:
            data.pop(other, None)
    data[path[-1]] = value
