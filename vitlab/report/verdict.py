"""The verdict of a comparison: one enum for frames, files, sentences and pages."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any

from vitlab.spec import Analysis

Row = Mapping[str, Any]


class Verdict(StrEnum):
    """The result of comparing an arm with its baseline."""

    BETTER = "better"
    WORSE = "worse"
    SAME = "same"
    EQUIVALENT = "equivalent"
    CANNOT_TELL = "cannot tell"
    REFUSED = "refused"


MEANINGS = {
    Verdict.BETTER: "the corrected p value is at most alpha, and the difference is in favour of the arm",
    Verdict.WORSE: "the corrected p value is at most alpha, and the difference is in favour of its baseline",
    Verdict.SAME: "both reached the same value at every seed",
    Verdict.EQUIVALENT: "the difference was shown to lie within the margin of the analysis",
    Verdict.CANNOT_TELL: "none of these: too few seeds, too much spread, trials still to come, or seeds that diverged "
    "or failed and could change the verdict",
    Verdict.REFUSED: "the comparison would be misleading and is not judged; column `refused` has the reason",
}
"""Meaning of each verdict."""


def decide(row: Row, analysis: Analysis) -> Verdict | None:
    """Return the verdict of one comparison, or None for an arm that is compared with nothing.

    If seeds diverged or failed, a verdict must hold twice: for the complete pairs, and with chance level in place of
    the missing values.

    Args:
        row: an arm's row of :func:`vitlab.report.comparison.summary`; missing values are None or NaN.
        analysis: of the study.
    """
    if row["baseline"] is None:
        return None
    if row["refused"] is not None:
        return Verdict.REFUSED
    verdict = of_complete_pairs(row, analysis)
    return verdict if not row["broken"] or _holds_with_chance(row, analysis, verdict) else Verdict.CANNOT_TELL


def of_complete_pairs(row: Row, analysis: Analysis) -> Verdict:
    """Return the verdict of the complete pairs alone, whatever diverged or failed."""
    if row["test"] == "sign flip" and row["difference"] == 0 and not row["collapsed_pairs"]:
        return Verdict.SAME
    if not _at_most(row["p_corrected"], analysis.alpha):
        return Verdict.EQUIVALENT if is_equivalent(row, analysis) else Verdict.CANNOT_TELL
    return Verdict.BETTER if (row["difference"] > 0) == (analysis.goal == "max") else Verdict.WORSE


def is_equivalent(row: Row, analysis: Analysis) -> bool:
    """Return whether the difference of the complete pairs was shown to lie within the margin of the analysis."""
    return analysis.margin is not None and _below(row["p_equal_corrected"], analysis.alpha)


def _holds_with_chance(row: Row, analysis: Analysis, verdict: Verdict) -> bool:
    if verdict is Verdict.EQUIVALENT:
        return _below(row["chance_p_equal"], analysis.alpha)
    if verdict not in (Verdict.BETTER, Verdict.WORSE) or not _at_most(row["chance_p"], analysis.alpha):
        return False
    return bool((row["chance_difference"] > 0) == (row["difference"] > 0))


def _at_most(p: float | None, alpha: float) -> bool:
    return p is not None and bool(p <= alpha)


def _below(p: float | None, alpha: float) -> bool:
    return p is not None and bool(p < alpha)
