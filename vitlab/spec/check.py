"""Check: the criteria by which `vitlab check` detects a regression of a study's trials."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import Field, field_validator

from vitlab.spec.choice import Amount, Frozen

Goal = Literal["max", "min"]
Unit = Literal["share", "number"]


def not_a_metric(name: str) -> str:
    """Return the error message for a text that is not a metric of a split."""
    hint = f" Did you mean 'val/{name}'?" if re.fullmatch(r"\w+", name) else ""
    return f"a metric is train/NAME, val/NAME or test/NAME, such as val/accuracy; found '{name}'.{hint}"


class Check(Frozen):
    """The regression gate.  A cell is an arm and a metric; all cells of a study are one family.

    A cell has regressed if the corrected one-sided test rejects and the mean drop is at least ``min_abs``; it passes if
    a drop as large as the margin is ruled out; otherwise it is inconclusive.
    """

    metrics: dict[str, Goal] = Field(default_factory=dict)  #: metrics beside that of the analysis, with their goals
    alpha: Annotated[float, Field(gt=0, lt=0.5)] = 0.05  #: family-wise error rate of the gate
    margin_sd: Annotated[float, Field(gt=0)] = 2.0
    """Smallest relevant drop, in pooled standard deviations of the baseline; at least two quanta and ``min_abs``."""
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
