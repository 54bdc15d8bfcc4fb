"""Cells of a table: texts of arms and seeds, values of metrics and marks of trainings that have none."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from vitlab.errors import UserError
from vitlab.judging.words import DIVERGED, FAILED
from vitlab.store.result import Ending

if TYPE_CHECKING:
    import pandas as pd

MAX_LISTED = 5  #: rows, arms and mistakes that a message lists
LARGEST = 1e100  #: a value beyond this has diverged; MLflow's databases store infinities as the largest number
EXACT = 2**53  #: whole numbers from here on are not all floats

_THOUSANDS = r"[+-]?(?:[1-9][0-9]{0,2}(?:%s[0-9]{3})+|[0-9]+)(?:%s[0-9]*)?"
NOTATIONS = {
    "a decimal point": (r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:e[+-]?[0-9]+)?", "", "."),
    "commas between thousands": (_THOUSANDS % (",", r"\."), ",", "."),
    "a decimal comma": (r"[+-]?(?:[0-9]+,?[0-9]*|,[0-9]+)(?:e[+-]?[0-9]+)?", "", ","),
    "points between thousands": (_THOUSANDS % (r"\.", ","), ".", ","),
}
"""Ways to write numbers: the pattern, what stands between thousands, and before decimals.  A column has one of them."""
_NUMBER = re.compile("|".join(pattern for pattern, _, _ in NOTATIONS.values()))
_SPREAD = re.compile(r"[-+]?[0-9.,]+ ?%? *(?:\u00b1|\+/?-|\\pm|\(|\[).*")


class Remarks:
    """Notes on a table, and mistakes in it and in what is asked of it, which are reported together."""

    def __init__(self, source: str) -> None:
        self.source = source
        self.notes: list[str] = []
        self._of_options: list[str] = []
        self._of_table: list[str] = []

    def option(self, sentence: str) -> None:
        """Add a sentence on a mistake in an option, which does not keep a table from being read."""
        self._of_options.append(sentence)

    def mistake(self, *sentences: str) -> None:
        """Add sentences on mistakes of a kind in the table; of many, the first ones and the number of others."""
        self._of_table += sentences[:MAX_LISTED]
        if len(sentences) > MAX_LISTED:
            self._of_table.append(f"{len(sentences) - MAX_LISTED} more mistakes of this kind")

    @property
    def has_mistakes(self) -> bool:
        """True if there are mistakes in the table."""
        return bool(self._of_table)

    def error(self, *first: str) -> UserError:
        """Return an error with some sentences and all mistakes."""
        sentences = dict.fromkeys((*self._of_options, *self._of_table))
        return UserError("\n".join((*first, *(f"{self.source}: {sentence}" for sentence in sentences))))

    def check(self) -> None:
        """Raise a UserError if there are mistakes in the table."""
        if self.has_mistakes:
            raise self.error()

    def check_all(self) -> None:
        """Raise a UserError if there are any mistakes."""
        if self.has_mistakes or self._of_options:
            raise self.error()


@dataclass(frozen=True)
class Values:
    """The values of a column of a metric."""

    numbers: np.ndarray[Any, np.dtype[np.float64]]  #: NaN where there is none
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
        return _with_endings(cells.to_numpy("float64", na_value=np.nan), np.full(len(cells), Ending.FAILED, object))
    lower = texts(cells).str.casefold().str.replace("\N{MINUS SIGN}", "-")
    if lower.str.fullmatch(NOTATIONS["a decimal point"][0]).all():  # a million of them are parsed in half of the memory
        return _with_endings(lower.astype("float64").to_numpy(), np.full(len(cells), Ending.FAILED, object))
    codes, distinct = pd.factorize(lower)
    numbers = [text.removesuffix("%").rstrip() for text in distinct]
    endings = [Ending.DIVERGED if text in DIVERGED else Ending.FAILED for text in numbers]
    present = [place for place, text in enumerate(numbers) if text not in DIVERGED | FAILED]
    numerals = [numbers[place] for place in present]
    fitting = {
        how: (thousands, point)
        for how, (pattern, thousands, point) in NOTATIONS.items()
        if all(map(re.compile(pattern).fullmatch, numerals))
    }

    def where(code: int) -> str:
        row = int(np.argmax(codes == code))
        return f"'{str(cells.iloc[row]).strip()}' in {place(cells.index[row])}"

    wrong = [place for place in present if not _NUMBER.fullmatch(numbers[place])]
    remarks.mistake(*(f"{where(place)} {_fault(numbers[place])}" for place in wrong))
    is_ambiguous = "a decimal point" not in fitting and {"commas between thousands", "a decimal comma"} <= {*fitting}
    if is_ambiguous or not (fitting or wrong):
        cells_listed = " or ".join(where(place) for place in present[:2])
        remarks.mistake(f"{cells_listed}: commas may stand before decimals or between thousands; write decimal points")
    signs = [place for place in present if distinct[place].endswith("%")]
    if 0 < len(signs) < len(present):
        plain = next(place for place in present if place not in signs)
        remarks.mistake(
            f"{where(plain)} has no percent sign, and other cells have one; write it in all of them or in none"
        )
    parsed = np.full(len(distinct), np.nan)
    if fitting:
        thousands, point = next(iter(fitting.values()))
        parsed[present] = [float(text.replace(thousands, "").replace(point, ".")) for text in numerals]
    result = _with_endings(parsed, np.array(endings, object))
    return Values(result.numbers[codes], result.endings[codes], bool(signs))


def _with_endings(numbers: np.ndarray[Any, Any], lost: np.ndarray[Any, Any]) -> Values:
    """Return numbers with the endings of their trainings; ``lost`` holds those of trainings without a number."""
    has_diverged = np.abs(numbers) > LARGEST  # False of NaN
    endings = np.where(np.isnan(numbers), lost, Ending.DONE)
    return Values(np.where(has_diverged, np.nan, numbers), np.where(has_diverged, Ending.DIVERGED, endings))


def _fault(text: str) -> str:
    if _SPREAD.fullmatch(text):
        return "is a mean with its spread; write the value of each training into a row of its own, without the mean"
    return "is not a number, and no mark of a lost training, such as an empty cell, '-', 'nan' or 'failed'"
