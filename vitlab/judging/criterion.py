"""Goal, unit and margin of a metric, by the words of its name and by its values; what they do not tell is asked."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vitlab.judging.files import POINT, Remarks, shortlist, word_set
from vitlab.spec.choice import Bounds, Goal, Unit

if TYPE_CHECKING:
    import pandas as pd

HIGHER = word_set(
    "acc accuracy f1 auc auroc auprc map ap knn iou miou dice precision prec recall sensitivity specificity psnr ssim"
    " bleu r2 mcc kappa throughput fps speedup"
)
LOWER = word_set(
    "loss err error errors ece mce fid kid lpips wer cer nll perplexity ppl mse rmse brier latency time duration"
    " runtime flops macs params parameters memory"
)
"""Words that say by themselves in which direction a metric is better."""
TOP = word_set("top1 top3 top5 top10")
"""Words of accuracies, if no other word says that a metric is of errors."""
REVERSALS = word_set(
    "drop gap degradation delta diff difference change gain std sd var variance per ratio rank neg negative inverse"
)
"""Words that may turn the direction of the others."""
SPREADS = word_set("std stdev stddev sd sem stderr ci ci95")
"""Words of columns that stand beside means."""

ERRORS = word_set("err error errors")
COUNTED = word_set("acc accuracy") | TOP | ERRORS
"""Words of metrics that count images."""
BELOW_1_PERCENT = ERRORS | word_set("ece")
"""Words of shares that are below 1 % at times, so that their values do not tell shares from percents."""
SHARES = COUNTED | word_set("f1 auc auroc auprc iou miou dice precision prec recall ece mce map ap")
"""Words of metrics that are shares of one, or percent."""
PERCENT = word_set("percent pct")

MIXED = (20, 500)  #: ratios of values above 1 to others, between which they seem to be percents beside shares
ROUNDING = 1e-6  #: of shares in single precision


def split_words(name: str) -> list[str]:
    """Return the words of a name in lower case: ``valTop-1 Acc`` holds val, top1 and acc, ``lossless`` no loss."""
    text = re.sub(r"(?<=[a-zA-Z])[\W_]+(?=[0-9])", "", name)
    parts = re.findall(r"[^\W_]+", text)
    humps = re.findall(r"[A-Z]+(?![a-z])[0-9]*|[A-Z]?[a-z]+[0-9]*", text)
    lower = [part.casefold() for part in (*parts, *humps)]
    return list(dict.fromkeys([*lower, *(word.rstrip("0123456789") for word in lower)]))


@dataclass(frozen=True)
class ColumnUnit:
    """Unit of a metric, and the value that all of it has: 1 for shares, 100 for percents, None for other numbers."""

    unit: Unit
    whole: float | None = None

    @property
    def bounds(self) -> Bounds:
        """Smallest and largest value, where they are known."""
        return (None if self.whole is None else 0.0), self.whole


def infer_goal(metric: str) -> Goal | None:
    """Return the direction in which a metric is better; None if its name does not tell."""
    name_words = split_words(metric)
    higher, lower, top = (not names.isdisjoint(name_words) for names in (HIGHER, LOWER, TOP))
    if not REVERSALS.isdisjoint(name_words) or (higher and lower) or not (higher or lower or top):
        return None
    return "min" if lower else "max"


def infer_column_unit(metric: str, frame: pd.DataFrame, has_percent_signs: bool, remarks: Remarks) -> ColumnUnit:
    """Return the scale of a metric, which percent signs in cells and the name may say, or else the whole column."""
    name_words, finite = {*split_words(metric)}, frame["value"].dropna()
    is_share = not SHARES.isdisjoint(name_words)
    fits = finite.between(0, 100).all()
    is_small = fits and finite.max() <= 1 + ROUNDING
    if is_share and not fits:
        remarks.notes.append(
            f"Warning: '{metric}' has values from {finite.min():g} to {finite.max():g}, so it is no share: no bounds "
            "hold. If these mark lost trainings, leave their cells empty."
        )
    says_percent = "%" in metric or not PERCENT.isdisjoint(name_words)
    if has_percent_signs or says_percent:
        if is_share and is_small and says_percent and not has_percent_signs and BELOW_1_PERCENT.isdisjoint(name_words):
            remarks.add_mistakes(
                f"'{metric}' is in percent by its name, and no value exceeds 1; write percents, or rename the column"
            )
        return ColumnUnit("%", 100.0 if is_share and fits else None)
    if not is_share or not fits or finite.empty:
        return ColumnUnit("number")
    if is_small and not BELOW_1_PERCENT.isdisjoint(name_words):
        remarks.notes.append(
            f"'{metric}' may be a share or percent, as no value exceeds 1: values stand as they are in the table. A "
            "percent sign in the name of the column or in every cell says percent."
        )
        return ColumnUnit("number")
    if is_small:
        return ColumnUnit("share", 1.0)
    small, large = finite[finite <= 1], finite[finite > 1]
    if len(small) and MIXED[0] * small.median() < large.median() < MIXED[1] * small.median():
        arms = [shortlist(frame.loc[some.index, "arm"].unique().tolist()) for some in (small, large)]
        remarks.add_mistakes(
            f"'{metric}' seems to hold shares and percents: values to {small.max():g} of {arms[0]}, and to "
            f"{large.max():g} of {arms[1]}; write one unit, or '%' into the name of the column if all are percents"
        )
    return ColumnUnit("%", 100.0)


def parse_margin(margin: float | str | None, metric: str, whole: float | None, mistakes: list[str]) -> float | None:
    """Return a margin in units of the column, from a number or from a text such as ``0.5 points``.

    Args:
        margin: what was given.
        metric: name of the column.
        whole: the value that all of the metric has, see :class:`ColumnUnit`.
        mistakes: gets a sentence if the margin is not allowed.
    """
    if margin is None:
        return None
    match = re.fullmatch(rf"\s*({POINT})\s*(points?)?\s*", str(margin))
    amount = float(match[1]) if match else 0.0
    if match is None or not 0 < amount < math.inf:
        mistakes.append(f"--margin {margin}: a number above 0 in units of the column, or '0.5 points', is allowed")
    elif match[2] and whole is None:
        mistakes.append(f"--margin {margin}: '{metric}' is no share, so that it has no points; write a number")
    elif whole == 1 and not match[2] and amount >= 0.1:  # which may have been meant in points
        mistakes.append(
            f"--margin {margin}: write it in points, of which '{metric}' has 0 to 100, as '{match[1]} points'"
        )
    elif whole is not None:
        amount *= whole / 100 if match[2] else 1
        if amount >= whole:
            mistakes.append(f"--margin {margin}: '{metric}' is from 0 to {whole:g}; write less")
    return amount


MAX_IMAGES = 10**12
"""Largest number of images: the step of a larger set is below the precision of an accuracy."""


def quantum_in_units(images: int | None, metric: str, unit: ColumnUnit, remarks: Remarks) -> float:
    """Return the smallest step of a metric that counts images, in units of the column; 0 if it is not known."""
    if images is None or not 1 <= images <= MAX_IMAGES:
        return 0.0
    if unit.whole is None or COUNTED.isdisjoint(split_words(metric)):
        remarks.of_options.append(
            f"--images: the step of '{metric}' does not follow from the number of images; leave it out"
        )
        return 0.0
    return unit.whole / images
