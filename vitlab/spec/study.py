"""Study: the whole file, with one question, one base trial, one design and the analysis."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import (
    BeforeValidator,
    Field,
    PositiveFloat,
    Tag,
    field_validator,
)

from vitlab.spec.choice import Amount, Fraction, Frozen, Goal, OneOrMore, OverBlocks
from vitlab.spec.design import Node, Zip
from vitlab.spec.run import RunSpec, Seeds, SeedsOrNumber
from vitlab.spec.tree import NewTree
from vitlab.spec.trial import TrialSpec

ErrorRate = Annotated[float, Field(gt=0, lt=0.5)]


class Rule(Frozen):
    """A condition on every arm that can be built, over its values: ``model.depth * model.dim <= 256``."""

    require: str
    """Condition on the values of an arm, such as ``model.dim % 2 == 0``."""
    otherwise: Literal["error", "skip"] = Field("skip", alias="else")
    """What happens to an arm that breaks it."""
    because: str
    """Reason, shown with the arms that break it."""


class Counterpart(Frozen):
    """A comparison of every arm with the arm that differs from it in these values alone."""

    to: NewTree = Field(min_length=1)
    """Dotted path to value; each arm is compared with its counterpart that has these."""


class Analysis(Frozen):
    """The analysis of the results, fixed before they are known."""

    metric: str = "val/accuracy"
    """Metric of the comparison, such as ``val/accuracy``; of a table, its column."""
    # The schema names no default, because the metric's own direction replaces this one while planning.
    goal: Annotated[Goal, Field(json_schema_extra=lambda schema: schema.pop("default"))] = "max"
    """Direction in which the metric is better; by default the one that it declares."""
    at: Literal["last", "best"] = "last"
    """Value of the metric: at the last evaluation, or at the best one."""
    # The tags are the forms that messages about a mistake here name.
    compare: (
        Annotated[Literal["baseline", "none"], Tag("<name>")]
        | Annotated[Counterpart, Tag("<{to: {PATH: value}} such as {to: {model.position: learned}}>")]
    ) = "baseline"
    """Arm that each arm is compared with, or ``{to: {PATH: value}}`` for its counterpart with these values."""
    margin: Annotated[Amount, Field(gt=0)] | None = None
    """Largest difference, in either direction, that counts as none; in units of the metric or such as ``2 points``."""
    correction: Literal["bonferroni", "none"] = "bonferroni"
    """Correction for several comparisons."""
    variance: Literal["shared", "own"] = "shared"
    """Spread that a comparison rests on: shared with comparisons of the same baseline and seeds, or its own alone."""
    alpha: ErrorRate = 0.05
    """Family-wise error rate."""
    over_blocks: OverBlocks | None = None
    """Number that is averaged over blocks: ``difference``, an arm's difference from its baseline, which is the default
    for shares of one; ``relative``, this difference divided by the baseline's error."""
    power_law: Literal["params", "macs", "images"] | None = None
    """Size over which the report fits a law of scaling to the error or the loss of arms that differ in numbers."""

    @property
    def direction(self) -> str:
        """``higher is better`` or ``lower is better``."""
        return "lower is better" if self.goal == "min" else "higher is better"


AboveOne = Annotated[float, Field(gt=1)]


class CostLimits(Frozen):
    """Largest costs of checked code, as multiples of the costs of the commit that the baseline was accepted at."""

    time: AboveOne | None = None
    """Seconds of a training image."""
    memory: AboveOne | None = None
    """Peak memory of a training."""


class Check(Frozen):
    """The regression gate.  A cell is an arm and a metric; all cells of a study are one family.

    A cell has regressed if the corrected one-sided test rejects and its mean is worse by ``min_abs`` or more; it passes
    if its mean is shown not to be worse by the margin; otherwise it is inconclusive.
    """

    metrics: dict[str, Goal] = Field(default_factory=dict)
    """Metrics beside the analysis' own, with their goals."""
    alpha: ErrorRate = 0.05
    """Family-wise error rate of the gate."""
    margin_sd: PositiveFloat = 2.0
    """Smallest relevant change for the worse, in pooled standard deviations of the baseline without outliers; at least
    two quanta and ``min_abs``."""
    margin: dict[str, Annotated[Amount, Field(gt=0)]] = Field(default_factory=dict)
    """Smallest relevant change for the worse in units of a metric, by metric."""
    min_abs: dict[str, Annotated[Amount, Field(ge=0)]] = Field(default_factory=dict)
    """Smallest change of a mean for the worse that counts as a regression, by metric; by default one pooled standard
    deviation of the baseline or two quanta of the metric, whichever is larger."""
    escalate_to: Annotated[int, Field(ge=3)] | None = None
    """Total number of seeds that inconclusive arms get for a second analysis; each analysis then has half of
    ``alpha``."""
    on_inconclusive: Literal["neutral", "fail"] = "neutral"
    """Exit code of an inconclusive check: ``neutral`` is 0, ``fail`` is 5."""
    cost: CostLimits | None = None
    """Limits of time and memory, which are measured in turns with the baseline's commit."""


class Match(Frozen):
    """Matching of arms in size or work: one knob of every arm is solved for, so that its cost equals its baseline's.

    ``train_macs`` is 3 (a forward pass, and a backward pass of twice its work) x MACs of one image x images seen; a
    teacher and pretraining are not counted.
    """

    quantity: Literal["params", "body_params", "macs", "train_macs"]
    """Quantity that is made equal to the baseline's."""
    knob: str
    """A number of the model, such as ``model.dim``, or the length of the training, such as ``train.steps``."""
    tolerance: Fraction = 0.01
    """Largest relative difference from the baseline."""
    otherwise: Literal["error", "skip"] = Field("error", alias="else")
    """Action for arms that cannot be matched."""
    # The name is part of the digest of what a registered arm trains.
    spare: tuple[str, ...] = Field((), alias="except")
    """Arms that are not matched, such as a reference."""


def _expand_log_range(value: Any) -> Any:
    """Return the values of ``{log: [LOW, HIGH], n: N}``; a list stays as it is."""
    match value:
        case {"log": [int() | float() as low, int() | float() as high], "n": int() as n, **more} if (
            0 < low < high and 2 <= n <= 100 and not more
        ):
            inner = [low * (high / low) ** (index / (n - 1)) for index in range(1, n - 1)]
            choices = ([low, *(float(f"{each:.{digits}g}") for each in inner), high] for digits in range(3, 18))
            return next((values for values in choices if values == sorted({*values})), [low, *inner, high])
        case Mapping():
            raise ValueError("allowed: a list of values, or {log: [LOW, HIGH], n: N}, 0 < LOW < HIGH, N from 2 to 100")
    return value


class Tune(Frozen):
    """A choice of knob values by full-length trainings with seeds of their own, before the reported trials."""

    knobs: Annotated[
        dict[
            str,
            Annotated[
                list[Any],
                Field(min_length=1),
                BeforeValidator(_expand_log_range, json_schema_input_type=list[Any] | dict[str, Any]),
            ],
        ],
        Field(min_length=1),
    ]
    """Path to its values, a list; or ``{log: [LOW, HIGH], n: N}``: N values from LOW to HIGH at equal ratios, those
    between them rounded to three digits, or to as many as tell them apart."""
    per: Literal["arm", "study"] = "arm"
    """One choice per arm, or one for all arms, made at the base."""
    seeds: OneOrMore = 2
    """Trainings of each combination of values, with seeds from 1,000,000 up."""
    select: str | None = None
    """Metric to select by, with the goal of the analysis; by default its metric, on val."""

    @field_validator("knobs")
    @classmethod
    def _check_distinct(cls, knobs: dict[str, list[Any]]) -> dict[str, list[Any]]:
        for path, values in knobs.items():
            for index, value in enumerate(values):
                if value in values[:index]:
                    raise ValueError(f"'{path}' has the value {value!r} twice; each value is tried once")
        return knobs

    @field_validator("select")
    @classmethod
    def _reject_test_metric(cls, select: str | None) -> str | None:
        if select is not None and not re.fullmatch(r"(train|val)/\w+", select):
            because = "; the test split must not decide a choice" if select.startswith("test/") else ""
            raise ValueError(f"found '{select}'; allowed: val/NAME or train/NAME{because}")
        return select


class Plugins(Frozen):
    """Plugins that the study requires: distributions, or files named on the command line by ``--plugin``."""

    require: tuple[str, ...] = ()
    """Requirements such as ``vitlab-timm>=0.1``."""


class Study(Frozen):
    """A study file."""

    study: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$")]
    """Name of the study, and of its folder."""
    question: str = ""
    """Question that the study answers, shown in its report."""
    base: TrialSpec
    """Trial that all arms start from."""
    design: Node | None = None
    """Arms of the study; without a design, the base alone."""
    blocks: Zip | None = None
    """Conditions such as data sets, in each of which every arm is trained: ``{PATH: [v, ...]}``, of several paths row
    by row, and names for the blocks under ``labels``."""
    controls: Annotated[int, Field(ge=0, le=9)] = 0
    """Arms that equal the base, trained by seeds of their own: they show how often arms that do not differ are told
    apart."""
    where: tuple[Rule, ...] = ()
    """Conditions on every arm."""
    match: Match | None = None
    """Matching of arms in size or work."""
    tune: Tune | None = None
    """Choice of knob values before the reported trials."""
    seeds: SeedsOrNumber = Seeds()
    """Replicates: their number, a list, or a mapping; by default 3, the seeds 0 to 2."""
    analysis: Analysis = Analysis()
    """Analysis of the results, fixed before they are known."""
    check: Check = Check()
    """Regression gate of ``vitlab check``."""
    run: RunSpec = RunSpec()
    """Execution of trials."""
    plugins: Plugins = Plugins()
    """Plugins that the study requires."""
