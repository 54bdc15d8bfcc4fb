"""Tables of results in files and frames, and their cells: texts, values of metrics, marks of lost trainings.

Tables are read as they are: names and cells keep their texts.
"""

from __future__ import annotations

import codecs
import csv
import io
import json
import re
import sys
from collections.abc import Callable, Iterable, Sequence, Sized
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from zipfile import is_zipfile

import click
import numpy as np

from vitlab.errors import Problem, UserError, first_sentence, format_count, list_some
from vitlab.spec.mistakes import value_in_words
from vitlab.statistics.replicates import Floats
from vitlab.store.result import Ending

if TYPE_CHECKING:
    import pandas as pd

DELIMITERS = (",", ";", "\t", "|")
RECORDS = 'a list of objects such as [{"arm": "a", "seed": 0, "acc": 0.9}], an object a line, or an object of columns'


@dataclass(frozen=True)
class Columns:
    """The columns of a table, or the parameters, tags and metrics of runs, that the caller names."""

    metric: str  #: empty if it is not named, which is a mistake
    arm: str | None = None  #: None if every column is an arm
    seed: str | None = None
    block: str | None = None  #: of data sets, or of other conditions under which every arm is trained
    baselines: str | None = None  #: of the arm that each is compared with


@dataclass(frozen=True)
class Table:
    """Results of trainings, one a row."""

    name: str  #: of the report
    source: str  #: where the rows are from, as messages say it
    rows: pd.DataFrame  #: cells as they are; the index counts rows, or lines of a text, from 0
    notes: tuple[str, ...] = ()
    runs: Sequence[str] = ()  #: names of the rows, where they are runs of MLflow
    unit: str = "row"
    index: Sequence[int] = range(sys.maxsize)  #: before the cells of each column became rows of their own

    def row_label(self, row: int) -> str:
        """Return how messages name a row."""
        return self.runs[row] if self.runs else f"{self.unit} {self.index[row % len(self.index)] + 1}"

    def row_labels(self, rows: Iterable[int]) -> str:
        """Return the names of the first of some rows, and the number of others."""
        return shortlist([self.row_label(row) for row in rows])

    def count(self, rows: Sized) -> str:
        """Return the number of some rows as ``2 rows``."""
        return format_count(len(rows), "run" if self.runs else "row")


def read_table(path: Path) -> Table:
    """Read a table from a file; the suffix is its format.  Damaged and empty ones raise UserError."""
    suffix = path.suffix.lower()
    if suffix not in READERS:
        actual = f"'{path.suffix}'" if suffix else "no suffix"
        raise UserError(
            f"{path}: a table is one of {', '.join(READERS)}; found {actual}. An experiment of MLflow is "
            "sqlite:///FILE#NAME or file:///FOLDER#NAME."
        )
    notes: list[str] = []
    try:
        rows = READERS[suffix](path, notes)
    except FileNotFoundError:
        raise UserError(f"{path} does not exist") from None
    except ImportError:
        raise UserError(f"{path}: reading it needs openpyxl; type pip install openpyxl, or save it as .csv") from None
    except RecursionError:
        raise UserError(f"{path} cannot be read as {suffix[1:]}: its brackets are nested too deeply") from None
    except Exception as error:  # pandas and the libraries below it raise errors of many kinds on damaged files
        raise UserError(f"{path} cannot be read as {suffix[1:]}: {first_sentence(error)}") from None
    if rows.empty:
        raise UserError(f"{path} has no rows")
    return Table(path.name, str(path), rows, tuple(notes), unit="line" if suffix in (".csv", ".tsv") else "row")


def frame_to_table(frame: pd.DataFrame) -> Table:
    """Return a frame as a table; an index other than row numbers becomes columns."""
    import pandas as pd

    if not isinstance(frame, pd.DataFrame):
        raise UserError(f"results: a frame, the path of a table or a URI is allowed; found {value_in_words(frame)}")
    if frame.columns.nlevels > 1:
        raise UserError("results: columns have several levels; give each one name")
    if frame.empty:
        raise UserError("results have no rows")
    return Table("results", "results", _index_to_columns(frame))


def _set_column_names(rows: pd.DataFrame, header: Iterable[Any]) -> pd.DataFrame:
    """Return rows with the names of their columns as texts."""
    names = [str(name).strip() or f"Unnamed: {place}" for place, name in enumerate(header)]  # as pandas calls them
    return rows.set_axis(names, axis=1)


def _index_to_columns(frame: pd.DataFrame) -> pd.DataFrame:
    import pandas as pd

    if not isinstance(frame.index, pd.RangeIndex) or frame.index.name is not None:
        frame = frame.reset_index(allow_duplicates=True)
    return _set_column_names(frame, frame)


def _read_text(path: Path, notes: list[str]) -> str:
    """Return the text of a file: UTF-8, UTF-16 with its mark, or else Windows-1252, which is said."""
    data = path.read_bytes()
    if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        text = data.decode("utf-16")
    else:
        try:
            text = data.decode("utf-8-sig")
        except UnicodeDecodeError:
            text = data.decode("cp1252", "replace")
            notes.append("The file is not UTF-8; its letters are read as Windows-1252 (Latin-1).")
    if "\0" in text:
        raise ValueError("it holds bytes that are no text; save it as UTF-8")
    return text


def _read_delimited(path: Path, notes: list[str]) -> pd.DataFrame:
    """Read a table of cells between commas, semicolons, tabs or bars, whichever gives the header most names.

    The index counts lines of the file from 0.
    """
    import pandas as pd

    whole = _read_text(path, notes)
    text = whole.lstrip("\r\n")
    first = re.match(r"sep=(.)\r?\n", text)  # as spreadsheets write it
    delimiters = (first[1],) if first else DELIMITERS
    text = text[first.end() if first else 0 :]
    text = re.sub(rf"\A(?:#(?![{re.escape(''.join(delimiters))}]).*\n|[ \r]*\n)+", "", text)
    before = whole.removesuffix(text).count("\n")
    if text.startswith("|"):
        raise ValueError("it seems to be a table in Markdown; write commas between its cells, and none around them")
    headers = {mark: next(csv.reader(io.StringIO(text), delimiter=mark), []) for mark in delimiters}
    if not any(headers.values()):
        raise ValueError("it is empty")
    delimiter, header = max(headers.items(), key=lambda item: len(item[1]))
    if re.fullmatch(r"\w+(?:[ :^~]+\w+)+", ",".join(header)):
        raise ValueError(
            "its header has one column; write commas, semicolons, tabs or bars, say sep=: in a first line, or "
            "delete a title above the header"
        )
    # A row may begin with '#', such as the row of an arm called '#1'; a comment has fewer cells.
    cells = rf"(?:[^{re.escape(delimiter)}\n]*{re.escape(delimiter)}){{{max(1, len(header) - 1)}}}"
    text, comments = re.subn(rf"(?m)^#(?!{cells}).*", "", text)
    if comments:
        notes.append(f"{format_count(comments, 'line')} beginning with '#' left out, as comments.")
    records = csv.reader(io.StringIO(text), delimiter=delimiter, skipinitialspace=True, strict=True)
    rows = dict[int, list[str]]()
    try:
        for record in records:
            if any(record[len(header) :]):
                raise csv.Error(
                    "more cells than the header; a cell that holds the delimiter, as in a decimal comma, needs quotes, "
                    "and the header is the first line: delete a title above it"
                )
            if any(record):
                rows[before + records.line_num - 1] = [*record, *[""] * len(header)][: len(header)]
    except csv.Error as error:
        raise ValueError(f"line {before + records.line_num}: {error}") from None
    return _set_column_names(pd.DataFrame.from_dict(rows, orient="index")[1:], header)


def _read_json(path: Path, notes: list[str]) -> pd.DataFrame:
    """Read a list of objects, an object a line, or an object of columns; nested objects become ``metrics.acc``."""
    import pandas as pd

    text = _read_text(path, notes)
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        if error.msg != "Extra data":
            raise
        value = []
        for number, line in enumerate(text.split("\n"), 1):
            try:
                value += [json.loads(line)] if line.strip() else []
            except json.JSONDecodeError as wrong:
                raise ValueError(f"line {number}: {wrong.msg}") from None
    if isinstance(value, dict) and all(isinstance(cells, dict | list) for cells in value.values()):
        try:
            return _index_to_columns(pd.DataFrame(value))
        except ValueError:  # such as columns of different lengths
            raise ValueError(f"a table is {RECORDS}") from None
    rows = [value] if isinstance(value, dict) else value
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise ValueError(f"a table is {RECORDS}")
    return _index_to_columns(pd.json_normalize(rows))


def _read_parquet(path: Path, _: list[str]) -> pd.DataFrame:
    import pandas as pd

    return _index_to_columns(pd.read_parquet(path))


def _read_sheet(path: Path, notes: list[str]) -> pd.DataFrame:
    import pandas as pd

    with path.open("rb") as file:
        if not is_zipfile(file):
            raise ValueError("it is no workbook of Excel; save it as .xlsx or as .csv")
        sheets = pd.read_excel(file, sheet_name=None, header=None, dtype=object, na_filter=False)
    [name, rows] = next(iter(sheets.items()))
    if len(sheets) > 1:
        notes.append(f"Of {len(sheets)} sheets, the first is read: {name}.")
    rows = rows[(rows != "").any(axis=1)]
    return _set_column_names(rows[1:], rows.iloc[0])


READERS: dict[str, Callable[[Path, list[str]], pd.DataFrame]] = {
    ".csv": _read_delimited,
    ".tsv": _read_delimited,
    ".json": _read_json,
    ".jsonl": _read_json,
    ".ndjson": _read_json,
    ".parquet": _read_parquet,
    ".xlsx": _read_sheet,
}
"""Suffix of a file to its reader, which adds notes."""


# -- words by which tables are read ------------------------------------------------------------------------------------


def word_set(words_in_text: str) -> frozenset[str]:
    """Return the words of a text."""
    return frozenset(words_in_text.split())


ROLE_OF = {
    name: role
    for role, names in {
        "seed": "seed|random seed|rng seed|global seed|manual seed|random state",
        "index": "|index|idx|id|row|run|rep|replicate|repeat|repetition|trial",
        "step": "step|steps|global step|trainer global step|epoch|epochs|iteration|iterations|iter|iters",
        "status": "status|state",
        "count": "n|runs|n runs|seeds|n seeds|num seeds|trials|n trials",
        "name": "name|run name|run id|experiment|group|job type|user|tags|notes|host|hostname|commit|sweep",
        "time": "time|date|timestamp|created|created at|updated|runtime|duration|wall time|relative time process|"
        "start time|end time",
    }.items()
    for name in names.split("|")
}
"""Name of a column, in lower case, without punctuation and groups such as ``config.``, to its role."""
ENDS_OF_CHARTS = ("__MIN", "__MAX")  #: ends of names of columns in exports of charts

LOST = word_set("failed fail failure crashed killed aborted error oom timeout preempted cancelled canceled lost")
DIVERGED = word_set("diverged inf +inf -inf infinity")
UNSUCCESSFUL = LOST | DIVERGED
FAILED = LOST | word_set("- -- --- \u2013 \u2014 ? n.a. n/a #n/a na nan null none <na> missing") | {""}
"""Cells of a metric that say that a training has no value, in lower case."""
ENDED = word_set("done finished complete completed success succeeded successful ok")
UNENDED = word_set("running pending queued scheduled waiting preempting paused missing")
"""Cells of a status, beside ``LOST`` and ``diverged``."""
HYPERPARAMETERS = word_set("lr learning wd decay dropout drop momentum warmup batch temperature beta smoothing mixup")
"""Words of a column of options, whose values may all be different, as those of a random search."""
YES = word_set("true 1 yes")
NO = word_set("false 0 no") | {""}
"""Cells of a column that is called as one of ``UNSUCCESSFUL``."""
STATISTICS = word_set(
    "mean avg average std stdev stddev sd sem se var variance median min max count sum total 25% 50% 75%"
)
"""Names of rows that sum up others."""


def infer_auxiliary_role(name: str) -> str | None:
    """Return the role that a column has by its name; None for arms, metrics and everything else."""
    if name.endswith(ENDS_OF_CHARTS):
        return "step"
    if name.startswith("Unnamed: "):  # by pandas, where a header has no name
        return "index"
    words = re.findall(r"[^\W_]+", re.sub(r"(?<=[a-z])(?=[A-Z])", " ", without_group(name)).casefold())
    return ROLE_OF.get(" ".join(words))


def without_group(name: str) -> str:
    """Return the name of a column without groups, such as ``config.``, or ``params_`` of Optuna."""
    return re.split(r"[./]|^(?:params|user_attrs)_", name)[-1]


# -- cells -------------------------------------------------------------------------------------------------------------

MAX_LISTED = 5  #: rows, arms and mistakes that a message lists
LARGEST = 1e100  #: a value beyond this has diverged; MLflow's databases store infinities as the largest number
EXACT = 2**53  #: whole numbers from here on are not all floats

POINT = r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:e[+-]?[0-9]+)?"  #: a number with a decimal point
COMMA = POINT.replace(r"\.", ",")
THOUSANDS = r"[+-]?[1-9][0-9]{0,2},[0-9]{3}"  #: a comma in such a number may stand between thousands
_SPREAD = re.compile(r"[-+]?[0-9.,]+ ?%? *(?:\u00b1|\+/?-|\\pm|\(|\[).*")

SPREAD_FAULT = "is a mean with its spread; write the value of each training into a row of its own, without the mean"
NUMBER_FAULT = "is not a number, and no mark of a lost training, such as an empty cell, '-', 'nan' or 'failed'"


class Remarks:
    """Notes on a table, and mistakes in it and in what is asked of it, which are reported together."""

    def __init__(self, source: str) -> None:
        self.source = source
        self.notes: list[str] = []
        self.of_options: list[str] = []  #: mistakes that do not keep a table from being read
        self.of_table: list[str] = []

    def add_mistakes(self, *sentences: str) -> None:
        """Add sentences on mistakes of a kind in the table; of many, the first ones and the number of others."""
        self.of_table += sentences[:MAX_LISTED]
        if len(sentences) > MAX_LISTED:
            self.of_table.append(f"{len(sentences) - MAX_LISTED} more mistakes of this kind")

    def error(self, *first: str) -> UserError:
        """Return an error with some sentences and all mistakes."""
        sentences = dict.fromkeys(map(spell_options_for_caller, (*self.of_options, *self.of_table)))
        problems = [Problem(self.source, 0, 0, sentence) for sentence in sentences]
        return UserError(*(Problem("", 0, 0, sentence) for sentence in first), *problems)

    def raise_if_table_has_mistakes(self) -> None:
        """Raise a UserError if there are mistakes in the table."""
        if self.of_table:
            raise self.error()


def spell_options_for_caller(sentence: str) -> str:
    """Return a sentence with options as a command has them, such as ``--over-blocks``, or else Python: over_blocks."""
    if click.get_current_context(silent=True) is not None:
        return sentence
    return re.sub(r"(?<!\S)--([a-z-]+)", lambda match: match[1].replace("-", "_"), sentence)


@dataclass(frozen=True)
class Values:
    """The values of a column of a metric."""

    numbers: Floats  #: NaN where there is none
    endings: np.ndarray[Any, np.dtype[np.object_]]  #: done, diverged or failed
    is_percent: bool = False  #: True if every value has a percent sign


def shortlist(names: Sequence[str]) -> str:
    """Return the first names, and the number of others."""
    return list_some(names, MAX_LISTED, "; ")


def column_to_texts(cells: pd.Series[Any]) -> pd.Series[Any]:
    """Return cells as texts without spaces around them, empty where there is none; whole numbers have no point."""
    import pandas as pd

    if pd.api.types.is_float_dtype(cells) and ((cells % 1 == 0) & (cells.abs() < EXACT) | cells.isna()).all():
        cells = cells.astype("Int64")
    missing = cells.isna()
    as_text = cells.astype(str).str.strip()
    return as_text.mask(missing, "") if missing.any() else as_text


def parse_values(cells: pd.Series[Any], place: Callable[[int], str], remarks: Remarks) -> Values:
    """Read a column of a metric; ``place`` names a cell by its index, as in ``row 2 of column 'acc'``."""
    import pandas as pd

    if pd.api.types.is_numeric_dtype(cells) and not pd.api.types.is_bool_dtype(cells):
        return _infer_endings(cells.to_numpy("float64", na_value=np.nan))
    lower = column_to_texts(cells).str.casefold().str.replace("\N{MINUS SIGN}", "-")
    bare = lower.str.removesuffix("%").str.rstrip()
    numerals = bare[~bare.isin(DIVERGED | FAILED)]
    has_point, has_comma = (numerals.str.fullmatch(pattern) for pattern in (POINT, COMMA))

    def where(row: Any) -> str:
        return f"'{str(cells[row]).strip()}' in {place(row)}"

    def fewer(*groups: pd.Series[Any]) -> str:
        few, *many = sorted((group.index for group in groups if len(group)), key=len)
        return shortlist([*map(where, few)]) + "".join(f", unlike {where(rows[0])}" for rows in many)

    wrong = numerals[~has_point & ~has_comma]
    remarks.add_mistakes(
        *(f"{where(row)} {SPREAD_FAULT if _SPREAD.fullmatch(text) else NUMBER_FAULT}" for row, text in wrong.items())
    )
    points, commas = numerals[has_point & ~has_comma], numerals[has_comma & ~has_point]
    if len(commas) and (len(points) or commas.str.fullmatch(THOUSANDS).all()):
        remarks.add_mistakes(
            f"{fewer(commas, points)}: commas may stand before decimals or between thousands; write decimal points"
        )
    numerals = numerals[has_point | has_comma]
    has_sign = lower[numerals.index].str.endswith("%")
    if has_sign.any() and not has_sign.all():
        cells_of_few = fewer(numerals[~has_sign], numerals[has_sign])
        remarks.add_mistakes(f"{cells_of_few}: write the percent sign in all cells or in none")
    numbers = numerals.str.replace(",", ".").astype("float64").reindex(cells.index)
    endings = np.where(bare.isin(DIVERGED), Ending.DIVERGED, Ending.FAILED)
    values = _infer_endings(np.asarray(numbers, np.float64), endings)
    return replace(values, is_percent=bool(has_sign.any() and has_sign.all()))


def are_metric_values(cells: pd.Series[Any]) -> bool:
    """Return whether all cells of a column are values of a metric, or marks of lost trainings."""
    remarks = Remarks("")
    parse_values(cells, str, remarks)
    return not remarks.of_table


def _infer_endings(numbers: Floats, endings_of_missing: np.ndarray[Any, Any] | Ending = Ending.FAILED) -> Values:
    """Return numbers with the endings of their trainings, of which those without a number are given."""
    has_diverged = np.abs(numbers) > LARGEST  # False of NaN
    endings = np.where(
        has_diverged, Ending.DIVERGED, np.where(np.isnan(numbers), endings_of_missing, Ending.DONE)
    ).astype(object)
    return Values(np.where(has_diverged, np.nan, numbers), endings)
