"""Cells of a table: texts of arms and seeds, values of metrics and marks of trainings that have none.

The words by which tables are read stand first: roles of columns, marks of lost trainings, goals of metrics.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from vitlab.errors import UserError
from vitlab.spec.choice import Goal
from vitlab.statistics.replicates import Floats
from vitlab.store.result import Ending

if TYPE_CHECKING:
    import pandas as pd


def _set(words_in_text: str) -> frozenset[str]:
    return frozenset(words_in_text.split())


ROLES = {
    "seed": "seed|random seed|rng seed|global seed|manual seed|random state",
    "index": "|index|idx|id|row|run|rep|replicate|repeat|repetition|trial",
    "step": "step|steps|global step|trainer global step|epoch|epochs|iteration|iterations|iter|iters",
    "status": "status|state",
    "count": "n|runs|n runs|seeds|n seeds|num seeds|trials|n trials",
    "name": "name|run name|run id|experiment|group|job type|user|tags|notes|host|hostname|commit|sweep",
    "time": "time|date|timestamp|created|created at|updated|runtime|duration|wall time|relative time process|"
    "start time|end time",
}
"""Role of a column to its names, in lower case, without punctuation and groups such as ``config.``."""
ROLE_OF = {name: role for role, names in ROLES.items() for name in names.split("|")}
ENDS_OF_CHARTS = ("__MIN", "__MAX")  #: ends of names of columns in exports of charts

LOST = _set("failed failure crashed killed aborted error oom timeout preempted cancelled canceled lost")
DIVERGED = _set("diverged inf +inf -inf infinity")
FAILED = LOST | _set("- -- --- \u2013 \u2014 ? n.a. n/a #n/a na nan null none <na> missing") | {""}
"""Cells of a metric that say that a training has no value, in lower case."""
ENDED = _set("done finished complete completed success succeeded successful ok")
UNENDED = _set("running pending queued scheduled missing")
"""Cells of a status, beside ``LOST`` and ``diverged``."""
FLAGS = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
"""Cells of a column that is called as one of ``LOST``, or diverged."""
STATISTICS = _set("mean avg average std stdev stddev sd sem se var variance median min max count sum total 25% 50% 75%")
"""Names of rows that sum up others."""

HIGHER = _set(
    "acc accuracy f1 auc auroc auprc iou miou dice precision prec recall sensitivity specificity psnr ssim bleu r2 mcc"
    " kappa throughput fps speedup"
)
LOWER = _set(
    "loss err error errors ece mce fid kid lpips wer cer nll perplexity ppl mse rmse brier latency time duration"
    " runtime flops macs params parameters memory"
)
"""Words that say by themselves in which direction a metric is better."""
QUALIFIERS: dict[str, Goal] = {**dict.fromkeys(("top1", "top3", "top5", "top10"), "max"), "mae": "min"}
"""Words that say so where no other word does; the last one counts: ``mae_top1`` is of a masked autoencoder."""
REVERSALS = _set(
    "drop gap degradation delta diff difference change gain std sd var variance per ratio rank neg negative inverse"
)
"""Words that may turn the direction of the others."""

ERRORS = _set("err error errors")
COUNTED = _set("acc accuracy top1 top3 top5 top10") | ERRORS
"""Words of metrics that count images."""
BELOW_1_PERCENT = ERRORS | _set("ece")
"""Words of shares that are below 1 % at times, so that their values do not tell shares from percents."""
SHARES = COUNTED | _set("f1 auc auroc auprc iou miou dice precision prec recall ece mce")
"""Words of metrics that are shares of one, or percent."""
PERCENT = _set("percent pct")


def words(name: str) -> list[str]:
    """Return the words of a name in lower case: ``valTop-1 Acc`` holds val, top1 and acc, ``lossless`` no loss."""
    text = re.sub(r"(?<=[a-zA-Z])[\W_]+(?=[0-9])", "", name)
    parts = re.findall(r"[^\W_]+", text)
    humps = re.findall(r"[A-Z]+(?![a-z])[0-9]*|[A-Z]?[a-z]+[0-9]*", text)
    lower = [part.casefold() for part in (*parts, *humps)]
    return list(dict.fromkeys([*lower, *(word.rstrip("0123456789") for word in lower)]))


def role_of(name: str) -> str | None:
    """Return the role that a column has by its name; None for arms, metrics and everything else."""
    if name.endswith(ENDS_OF_CHARTS):
        return "step"
    if name.startswith("Unnamed: "):  # by pandas, where a header has no name
        return "index"
    last = re.split(r"[./]", name)[-1]
    return ROLE_OF.get(" ".join(re.findall(r"[^\W_]+", re.sub(r"(?<=[a-z])(?=[A-Z])", " ", last).casefold())))


# -- cells -------------------------------------------------------------------------------------------------------------

MAX_LISTED = 5  #: rows, arms and mistakes that a message lists
LARGEST = 1e100  #: a value beyond this has diverged; MLflow's databases store infinities as the largest number
EXACT = 2**53  #: whole numbers from here on are not all floats

POINT = r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:e[+-]?[0-9]+)?"  #: a number with a decimal point
COMMA = POINT.replace(r"\.", ",")
THOUSANDS = r"[+-]?[1-9][0-9]{0,2},[0-9]{3}"  #: a comma in such a number may stand between thousands
_SPREAD = re.compile(r"[-+]?[0-9.,]+ ?%? *(?:\u00b1|\+/?-|\\pm|\(|\[).*")


class Remarks:
    """Notes on a table, and mistakes in it and in what is asked of it, which are reported together."""

    def __init__(self, source: str) -> None:
        self.source = source
        self.notes: list[str] = []
        self.of_options: list[str] = []  #: mistakes that do not keep a table from being read
        self.of_table: list[str] = []

    def mistake(self, *sentences: str) -> None:
        """Add sentences on mistakes of a kind in the table; of many, the first ones and the number of others."""
        self.of_table += sentences[:MAX_LISTED]
        if len(sentences) > MAX_LISTED:
            self.of_table.append(f"{len(sentences) - MAX_LISTED} more mistakes of this kind")

    def error(self, *first: str) -> UserError:
        """Return an error with some sentences and all mistakes."""
        sentences = dict.fromkeys((*self.of_options, *self.of_table))
        return UserError("\n".join((*first, *(f"{self.source}: {sentence}" for sentence in sentences))))

    def check(self) -> None:
        """Raise a UserError if there are mistakes in the table."""
        if self.of_table:
            raise self.error()


@dataclass(frozen=True)
class Values:
    """The values of a column of a metric."""

    numbers: Floats  #: NaN where there is none
    endings: np.ndarray[Any, np.dtype[np.object_]]  #: done, diverged or failed
    is_percent: bool = False  #: True if every value has a percent sign


def shortlist(names: Sequence[str]) -> str:
    """Return the first names, and the number of others."""
    more = f" and {len(names) - MAX_LISTED} more" if len(names) > MAX_LISTED else ""
    return f"{'; '.join(names[:MAX_LISTED])}{more}"


def names_of(frame: pd.DataFrame) -> list[str]:
    """Return the names of columns, of which several may be equal."""
    return [str(name) for name in frame]


def texts(cells: pd.Series[Any]) -> pd.Series[Any]:
    """Return cells as texts without spaces around them, empty where there is none; whole numbers have no point."""
    import pandas as pd

    if pd.api.types.is_float_dtype(cells) and ((cells % 1 == 0) & (cells.abs() < EXACT) | cells.isna()).all():
        cells = cells.astype("Int64")
    missing = cells.isna()
    as_text = cells.astype(str).str.strip()
    return as_text.mask(missing, "") if missing.any() else as_text


def values(cells: pd.Series[Any], place: Callable[[int], str], remarks: Remarks) -> Values:
    """Read a column of a metric; ``place`` names a cell by its index, as in ``row 2 of column 'acc'``."""
    import pandas as pd

    if pd.api.types.is_numeric_dtype(cells) and not pd.api.types.is_bool_dtype(cells):
        return _with_endings(cells.to_numpy("float64", na_value=np.nan))
    lower = texts(cells).str.casefold().str.replace("\N{MINUS SIGN}", "-")
    if lower.str.fullmatch(POINT).all():  # a million of them are parsed in half of the memory
        return _with_endings(np.asarray(lower.astype("float64"), np.float64))
    codes, distinct = pd.factorize(lower)
    bare = [text.removesuffix("%").rstrip() for text in distinct]
    numerals = {code: text for code, text in enumerate(bare) if text not in DIVERGED | FAILED}
    with_point, with_comma = (
        {code for code, text in numerals.items() if re.fullmatch(pattern, text)} for pattern in (POINT, COMMA)
    )

    def where(code: int) -> str:
        row = int(np.argmax(codes == code))
        return f"'{str(cells.iloc[row]).strip()}' in {place(cells.index[row])}"

    wrong = sorted(numerals.keys() - with_point - with_comma)
    remarks.mistake(*(f"{where(code)} {_fault(numerals[code])}" for code in wrong))
    commas = with_comma - with_point
    if commas and (with_point - with_comma or all(re.fullmatch(THOUSANDS, numerals[code]) for code in commas)):
        listed = " or ".join(where(code) for code in [*numerals][:2])
        remarks.mistake(f"{listed}: commas may stand before decimals or between thousands; write decimal points")
    signs = [code for code in numerals if distinct[code].endswith("%")]
    if 0 < len(signs) < len(numerals):
        plain = next(code for code in numerals if code not in signs)
        remarks.mistake(
            f"{where(plain)} has no percent sign, and other cells have one; write it in all of them or in none"
        )
    parsed = [
        float(numerals[code].replace(",", ".")) if code in with_point | with_comma else np.nan for code in numerals
    ]
    of_texts = np.full(len(distinct), np.nan)
    of_texts[[*numerals]] = parsed
    endings = np.array([Ending.DIVERGED if text in DIVERGED else Ending.FAILED for text in bare], object)
    return replace(_with_endings(of_texts[codes], endings[codes]), is_percent=bool(signs))


def _with_endings(numbers: Floats, lost: np.ndarray[Any, Any] | Ending = Ending.FAILED) -> Values:
    """Return numbers with the endings of their trainings; ``lost`` holds the endings of trainings without a number."""
    has_diverged = np.abs(numbers) > LARGEST  # False of NaN
    endings = np.where(has_diverged, Ending.DIVERGED, np.where(np.isnan(numbers), lost, Ending.DONE)).astype(object)
    return Values(np.where(has_diverged, np.nan, numbers), endings)


def _fault(text: str) -> str:
    if _SPREAD.fullmatch(text):
        return "is a mean with its spread; write the value of each training into a row of its own, without the mean"
    return "is not a number, and no mark of a lost training, such as an empty cell, '-', 'nan' or 'failed'"
