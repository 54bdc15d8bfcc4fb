"""The verdict of a comparison: one enum for frames, files, sentences and pages."""

from __future__ import annotations

from enum import StrEnum


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
