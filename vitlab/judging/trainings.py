"""The trainings of a table: arm, seed and value of each, from a row per training or from a column per arm."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from vitlab.errors import format_count, list_some, nearest
from vitlab.judging import files
from vitlab.judging.criterion import SPREADS, infer_goal, split_words
from vitlab.judging.files import (
    Columns,
    Remarks,
    Table,
    are_metric_values,
    column_to_texts,
    infer_auxiliary_role,
    shortlist,
    without_group,
)
from vitlab.store.result import Ending

if TYPE_CHECKING:
    import pandas as pd

FINALS = (
    "judge needs the final value of each training: export the table of runs in place of a chart, or keep the last row "
    "of each run"
)
ARM, ROW = "(arm)", "(row)"  #: columns of arms and seeds of a table with a column per arm
KNOWN_ENDINGS = files.ENDED | files.UNENDED | files.UNSUCCESSFUL
"""Words that a status column may have, in lower case."""
_NAME_WITH_SEED = re.compile(r"(.*?)(?:^|[\W_]+)(?:seed|rep|run|trial)[\W_]*[0-9]+", re.IGNORECASE)


@dataclass(frozen=True)
class Trainings:
    """The trainings of a table."""

    table: Table
    frame: pd.DataFrame
    """A row each: arm, seed (a number), name (the seed as written), value and status, indexed as in the table."""
    is_percent: bool  #: True if the cells say so
    is_paired: bool  #: False if nothing says which trainings of two arms have a seed in common
    blocks: Mapping[str, str]  #: arm to its block, with which its name begins; the block is empty without a column
    baselines: Mapping[str, str] | None = None  #: arm to the arm that it is compared with, if a column says so


def add_column_mistakes(table: Table, columns: Columns, remarks: Remarks) -> None:
    """Add a mistake for each named column that a table does not have once."""
    names, metric, roles = [*table.rows.columns], columns.metric, _infer_column_roles(table)
    options = (columns.arm, columns.seed, columns.block, columns.baselines)
    to_find = {name: names for name in options if name is not None}
    free = [name for name, role in roles.items() if role in (None, "name") and name not in (metric, *options)]
    texts = [name for name in free if not are_metric_values(table.rows[name])]
    numbers = [name for name in free if roles[name] is None and name not in texts]
    numbers.sort(key=lambda name: (not name.startswith(("val", "test")), infer_goal(name) is None))
    is_long = (
        columns.arm is not None
        or metric in names
        or any(  # a column without numbers is no arm
            roles[name] is None and not column_to_texts(table.rows[name]).str.match(files.POINT).any() for name in texts
        )
    )
    numbered = rf"(?i)({re.escape(metric)}[\W_]+)?(seed|rep|run|trial|fold|split|s)?[\W_]*[0-9]+"
    seeds = [name for name in numbers if metric not in names and re.fullmatch(numbered, name)]
    if not metric:
        remarks.add_mistakes(
            "--metric is missing: name its column, or, if every column is an arm, what these hold. Columns of numbers: "
            f"{shortlist(numbers) or 'none'}."
        )
    elif is_long and len(seeds) < 2:
        to_find[metric] = [*dict.fromkeys([*numbers, *names])]
    if not is_long:
        to_find |= dict.fromkeys(names, names)
    remarks.add_mistakes(
        *(_column_fault(name, names, allowed) for name, allowed in to_find.items() if names.count(name) != 1)
    )
    mappings = [name for name in free if column_to_texts(table.rows[name]).str.match(r"\{").all()]
    if mappings and remarks.of_table:
        remarks.add_mistakes(
            f"{shortlist(mappings)} hold mappings; pandas makes columns of them: "
            "pandas.json_normalize(frame.to_dict('records')); of texts, as in a file, first type "
            "frame['COLUMN'] = frame['COLUMN'].map(ast.literal_eval)"
        )
    if not is_long:
        return
    if len(seeds) > 1:
        remarks.add_mistakes(
            f"columns {shortlist(seeds)} may hold {metric or 'a metric'} of a seed each; pandas makes rows: frame.melt("
            f"{[name for name in names if name not in seeds]}, var_name='seed', value_name='{metric or 'acc'}')"
        )
    if columns.arm is None:
        # Of more arms than one, and more than one row each.
        found = [
            name for name in (*texts, *numbers) if 1 < column_to_texts(table.rows[name]).nunique() < len(table.rows)
        ]
        advice = f"name the column of the arms with --arm (found: {shortlist(found or names)}).{nearest('arm', found)}"
        remarks.add_mistakes(f"'{metric}' is a column: {advice}" if metric in names else advice)
    spreads = [name for name in free if set() < {*split_words(name)}.difference(split_words(metric)) <= SPREADS]
    if spreads and columns.seed is None and "seed" not in roles.values() and not table.runs:
        remarks.add_mistakes(
            f"{shortlist(spreads)} may be the spread of means: write the value of each training into a row of its own, "
            "with its seed, or, if a row is one training, name the column of the seeds with --seed"
        )


def read_trainings(table: Table, columns: Columns, remarks: Remarks) -> Trainings:
    """Return the trainings of a table; the column of the seeds is by default the one that is called so."""
    arm, seed = columns.arm, columns.seed
    roles = {
        name: role
        for name, role in _infer_column_roles(table).items()
        if name not in (arm, columns.metric, columns.block)
    }
    if seed is None:
        candidates = [name for name, role in roles.items() if role == "seed"]
        if len(candidates) > 1:
            remarks.add_mistakes(f"columns {shortlist(candidates)} may hold the seeds: name one with --seed")
        elif not candidates and arm is None:
            candidates = [
                name for name, role in roles.items() if role == "index" and column_to_texts(table.rows[name]).is_unique
            ]
        if len(candidates) == 1:
            [seed] = candidates
            remarks.notes.append(f"Seeds are those of column '{seed}'.")
    for label, role in roles.items():
        if role in ("seed", "index") or label == seed:
            table = _drop_statistics_rows(table, label, remarks)
    if arm is not None:  # an arm may be called 'mean', as a pooling is; its rows have seeds, or it has several
        no_seed = ~table.rows[arm].duplicated(keep=False) if seed is None else column_to_texts(table.rows[seed]) == ""
        table = _drop_statistics_rows(table, arm, remarks, no_seed)
    else:
        if seed is None:
            remarks.notes.append("No column numbers the seeds, so a row has one seed of every arm, and pairs them.")
        roles.pop(seed or "", None)
        table = _wide_to_long(table, roles, columns, seed, remarks)
        arm, seed = ARM, seed or ROW
    return _parse_trainings(table, replace(columns, arm=arm, seed=seed), arm, remarks)


def _infer_column_roles(table: Table) -> dict[str, str | None]:
    """Return the roles of columns, of those whose name no other has; fractions are no names and no numbers of rows."""
    columns = [*table.rows.columns]
    roles = {name: infer_auxiliary_role(name) for name in columns if columns.count(name) == 1}
    for name, role in roles.items():
        if (
            role in ("index", "name", "count")
            and column_to_texts(table.rows[name]).str.contains(r"^[-+]?[0-9]*[.,][0-9]").any()
        ):
            roles[name] = None
    return roles


def _column_fault(name: str, columns: Sequence[str], allowed: Sequence[str]) -> str:
    if name in columns:
        return f"several columns are called '{name}'; rename all but one"
    return (
        f"no column '{name}'.{nearest(name, allowed)} Columns: {shortlist(allowed)}."
        f"{' If the first row is a title, delete it.' * ('Unnamed: 1' in columns)}"
        f"{' Of a table with a row per metric, keep the rows of one.' * ('metric' in columns)}"
    )


def _wide_to_long(
    table: Table,
    roles: Mapping[str, str | None],
    columns: Columns,
    seed: str | None,
    remarks: Remarks,
) -> Table:
    """Return a table with a column per arm as one with a row per training."""
    rows = table.rows
    if steps := [name for name, role in roles.items() if role == "step"]:
        remarks.add_mistakes(
            f"column{'s' * (len(steps) > 1)} {shortlist(steps)}: rows are moments of trainings; {FINALS}"
        )
    arms = [name for name, role in roles.items() if role is None]
    if ignored := [name for name, role in roles.items() if role not in (None, "step")]:
        remarks.notes.append(f"Left out, as columns of these names are no arms: {shortlist(ignored)}.")
    if not arms:
        remarks.add_mistakes(f"no column of an arm; columns: {shortlist([*rows.columns])}")
    _refuse_seeds_in_names(arms, remarks)
    remarks.raise_if_table_has_mistakes()
    if seed is None:  # columns may be of different lengths
        rows = rows.assign(**{ROW: np.arange(len(rows))})
    long = rows.melt([*filter(None, (seed or ROW, columns.block))], arms, ARM, columns.metric)
    if seed is None:
        is_filled = column_to_texts(long[columns.metric]) != ""
        long = long[is_filled[::-1].groupby(long[ARM]).cummax()[::-1]]
    return replace(table, rows=long, index=rows.index.tolist())


def _parse_trainings(table: Table, columns: Columns, arm: str, remarks: Remarks) -> Trainings:
    """Return the trainings of a table with a row per training."""
    rows, metric, seed, block = table.rows, columns.metric, columns.seed, columns.block

    def place(row: int) -> str:
        return f"{table.row_label(row)} of column '{rows[ARM][row] if arm == ARM else metric}'"

    metric_values = files.parse_values(rows[metric], place, remarks)
    of_cells = len(remarks.of_table)
    frame = rows[[]].assign(
        arm=column_to_texts(rows[arm]),
        block="" if block is None else column_to_texts(rows[block]),
        name="" if seed is None else column_to_texts(rows[seed]),
        value=metric_values.numbers,
        status=metric_values.endings,
    )
    for name, column in ((arm, "arm"), (seed, "name"), (block, "block")):
        if name is not None and len(empty := rows.index[frame[column] == ""]):
            remarks.add_mistakes(
                f"no '{name}' in {table.row_labels(empty)}; fill it in, or leave the row out"
                + f", or repeat the one above, as of merged cells: frame['{name}'].ffill() in pandas" * (len(empty) > 1)
            )
    if block is not None:
        frame["arm"] = frame["block"] + ": " + frame["arm"]
    others = rows[
        [name for name in _infer_column_roles(table) if name not in (arm, seed, metric, block, columns.baselines)]
    ]
    for name in others.columns:
        if infer_auxiliary_role(name) == "status" or name.casefold() in files.UNSUCCESSFUL:
            frame = _drop_running_and_mask_failed(frame, others[name], table, remarks)
    if frame.empty:
        remarks.add_mistakes(" ".join(("no training remains.", *remarks.notes)))
    sizes = frame["arm"].value_counts(sort=False)
    if alike := sizes.index[sizes.index.str.casefold().str.replace(" ", "").duplicated(keep=False)].tolist():
        remarks.notes.append(f"Warning: arms that differ in case or blanks alone are different: {shortlist(alike)}.")
    _refuse_seeds_in_names([*sizes[sizes == 1].index], remarks)
    if len(remarks.of_table) > of_cells:  # then arms or seeds would be guessed
        remarks.raise_if_table_has_mistakes()
    if seed is not None:
        frame["seed"] = _number_seeds(frame["name"], remarks)
        frame = _drop_repetitions(frame, others, arm, table, remarks)
        if options := _find_options(frame, others, "seed"):
            remarks.notes.append(f"Other columns that differ between arms: {shortlist(options)}.")
    else:
        frame["seed"] = np.arange(len(frame))
        for name in others.columns:
            if (
                infer_auxiliary_role(name) == "step"
                and column_to_texts(others[name])[frame.index].groupby(frame["arm"]).nunique().gt(1).any()
            ):
                remarks.add_mistakes(
                    f"'{name}' differs between rows of an arm, as steps of trainings do; {FINALS}, and add --seed"
                )
        if options := _find_options(frame, others, "arm"):
            remarks.notes.append(
                f"Warning: rows of an arm differ in {shortlist(options)}, and count as its seeds. Write options into "
                "the column of the arms; name a column of seeds with --seed, one of data sets with --block."
            )
        shared = [
            f"'{name}'"
            for name in others.columns
            if infer_auxiliary_role(name) == "index"
            and not others.loc[frame.index, [name]].assign(arm=frame["arm"]).duplicated().any()
            and others.loc[frame.index, name].nunique() < len(frame)
        ]
        if sizes.max() > 1:  # else the test is over blocks
            remarks.notes.append(
                "Without --seed the arms are not paired, so that the test is Welch's t: name the column of the seeds"
                f"{f', which may be {list_some(shared)},' * bool(shared)} if they share some."
            )
    if arm == ARM and remarks.of_table:
        remarks.add_mistakes(
            "without --arm every column is an arm: name the column of the arms if a row is a training, or delete a "
            "title above the header"
        )
    compared = None
    if columns.baselines is not None:
        baselines = column_to_texts(rows[columns.baselines])
        if block is not None:
            baselines = baselines.where(baselines == "", column_to_texts(rows[block]) + ": " + baselines)
        compared = _parse_baselines(frame["arm"], baselines, columns.baselines, remarks)
    blocks = dict(zip(frame["arm"], frame["block"], strict=True))
    return Trainings(table, frame, metric_values.is_percent, seed is not None, blocks, compared)


def _find_options(frame: pd.DataFrame, others: pd.DataFrame, within: str) -> list[str]:
    """Return the columns that differ within an arm or a seed as options do: one has all values, which are repeated.

    Those of hyperparameters may be of a random search.
    """
    options = []
    for name in others.columns:
        if (
            name.casefold() not in files.UNSUCCESSFUL
            and infer_auxiliary_role(name) is None
            and infer_goal(without_group(name)) is None
        ):
            cells = column_to_texts(others[name])[frame.index].replace("", None)
            number = cells.groupby(frame[within]).nunique().max()
            is_searched = name.startswith("params_") or not files.HYPERPARAMETERS.isdisjoint(split_words(name))
            if number > 1 and (is_searched or number == cells.nunique() < len(cells)):
                options.append(name)
    return options


def _drop_statistics_rows(
    table: Table, label: str, remarks: Remarks, candidates: pd.Series[Any] | bool = True
) -> Table:
    """Return a table without the candidates that a column of seeds, row numbers or arms calls ``mean`` or the like."""
    names = column_to_texts(table.rows[label])
    out = names[names.str.casefold().str.rstrip(".").isin(files.STATISTICS) & candidates]
    if len(out):
        marks = ", ".join(f"'{name}'" for name in out.unique())
        remarks.notes.append(f"{table.count(out)} left out, no trainings by their '{label}': {marks}.")
    return replace(table, rows=table.rows.drop(index=out.index))


def _refuse_seeds_in_names(arms: Sequence[str], remarks: Remarks) -> None:
    """Refuse arms that differ by the number of a seed alone, such as ``vit_seed_0`` and ``vit_seed_1``."""
    stems: dict[str, list[str]] = {}
    for arm in arms:
        if match := _NAME_WITH_SEED.fullmatch(arm):
            stems.setdefault(match[1], []).append(arm)
    for stem, names in stems.items():
        if len(names) > 1:
            arm = f"arm '{stem}'" if stem else "the arm"
            remarks.add_mistakes(
                f"the names {shortlist(names)} hold seeds; write a row per training, with "
                f"{arm} in one column and its seed in another"
            )


def _number_seeds(names: pd.Series[Any], remarks: Remarks) -> pd.Series[Any]:
    """Return a number per seed: whole numbers as they are, others in the order of their first appearance."""
    import pandas as pd

    numbers = pd.to_numeric(names, errors="coerce").astype("float64")
    words = names[numbers.isna()]
    if 0 < len(words) < len(names):
        remarks.add_mistakes(
            f"seeds are numbers and {shortlist([*words.unique()])}: leave out rows that are no trainings, "
            "such as means, or give each seed a number"
        )
    if names.str.fullmatch(r"[-+]?[0-9]+(\.0*)?").all() and numbers.abs().lt(files.EXACT).all():
        return numbers.astype("int64")
    codes, distinct = pd.factorize(names)
    numbered = shortlist([f"{number} is {name}" for number, name in enumerate(distinct)])
    remarks.notes.append(f"Seeds are numbered in the order of the table: {numbered}.")
    return pd.Series(codes, names.index)


def _drop_running_and_mask_failed(
    frame: pd.DataFrame, column: pd.Series[Any], table: Table, remarks: Remarks
) -> pd.DataFrame:
    """Return the trainings that have ended by a column such as ``state``, without the values of those that failed."""
    # Optuna says pruned; a column of this name may be an option.
    cells = column_to_texts(column).str.casefold()[frame.index].replace("pruned", "failed")
    name = str(column.name).casefold()
    if name in files.UNSUCCESSFUL:
        cells = cells.replace(dict.fromkeys(files.YES, name) | dict.fromkeys(files.NO, "done"))
    is_known = cells.isin(KNOWN_ENDINGS)
    # A column such as 'failure' may hold sentences.
    if not (is_known.all() if name in files.UNSUCCESSFUL else is_known.any()):
        return frame
    remarks.add_mistakes(
        *(
            f"'{column[row]}' in {table.row_label(row)} of column '{column.name}' is no status; allowed are words such "
            "as finished, running, failed, crashed, diverged"
            for row in cells.index[~is_known]
        )
    )
    is_running, is_lost = cells.isin(files.UNENDED), cells.isin(files.UNSUCCESSFUL)
    if len(running := frame.index[is_running]):
        remarks.notes.append(
            f"Warning: {table.count(running)} left out, still running or never ended: {table.row_labels(running)}."
        )
    if len(valued := frame.index[is_lost & frame["value"].notna()]):
        remarks.notes.append(f"Values of trainings that failed do not count: {table.row_labels(valued)}.")
    endings = np.where(cells.isin(files.DIVERGED), Ending.DIVERGED, Ending.FAILED)
    frame = frame.assign(value=frame["value"].mask(is_lost), status=frame["status"].mask(is_lost, endings))
    return frame[~is_running]


def _drop_repetitions(
    frame: pd.DataFrame, others: pd.DataFrame, arm: str, table: Table, remarks: Remarks
) -> pd.DataFrame:
    """Return the trainings without repetitions: lost ones that another row repeats, and rows of the same value."""
    keys, has_value = ["arm", "seed"], frame["value"].notna()
    valued = frame[frame.duplicated(keys, keep=False) & has_value].groupby(keys, sort=False)
    if clashes := [rows for _, rows in valued if rows["value"].nunique() > 1]:
        varied = [
            name
            for name in others.columns
            if any(others.loc[rows.index, name].astype(str).nunique() > 1 for rows in clashes)
        ]
        is_history = any(infer_auxiliary_role(name) == "step" for name in varied)
        options = _find_options(frame, others, "arm")
        remedy = f"keep one of them, name a seed that differs, or compare within each {(options or ['data set'])[0]} by"
        remedy = FINALS if is_history else f"{remedy} --block"
        if options:
            remedy += (
                f"; if the arm includes {shortlist(options)}, type in pandas "
                f"frame['{arm}'] = frame[{[arm, *options]}].astype(str).agg(' '.join, axis=1)"
            )
        listed = [
            f"{table.count(rows)} of arm '{rows['arm'].iloc[0]}' with seed {rows['name'].iloc[0]} "
            f"({table.row_labels(rows.index)})"
            for rows in clashes
        ]
        remarks.add_mistakes(
            f"several values for {format_count(len(clashes), 'training')}: "
            f"{list_some(listed, 1 if is_history else files.MAX_LISTED, '; ')}"
            f"{f', which differ in {shortlist(varied)}' if varied else ''}; {remedy}"
        )
    is_retried = ~has_value & has_value.groupby([frame[key] for key in keys]).transform("any")
    if len(out := frame.index[is_retried]):
        remarks.notes.append(
            f"{table.count(out)} left out, failed, and repeated with the same arm and seed: {table.row_labels(out)}."
        )
    frame = frame[~is_retried]
    repeated = frame[frame.duplicated(keys)]
    if len(repeated):
        remarks.notes.append(f"Warning: {table.count(repeated)} left out, with the seed and the value of another one.")
    return frame.drop(index=repeated.index)


def _parse_baselines(arms: pd.Series[Any], cells: pd.Series[Any], column: str, remarks: Remarks) -> dict[str, str]:
    """Return arm to the arm that a column names as its baseline."""
    import pandas as pd

    pairs = pd.DataFrame({"arm": arms, "baseline": cells[arms.index]}).drop_duplicates()
    for arm, rows in pairs[pairs.duplicated("arm", keep=False)].groupby("arm", sort=False):
        names = ", ".join(f"'{name}'" for name in sorted(rows["baseline"]))
        remarks.add_mistakes(f"arm '{arm}' has several values of '{column}': {names}; an arm has one baseline")
    present, compared = {*arms}, {}
    for arm, name in zip(pairs["arm"], pairs["baseline"], strict=True):
        whole = name.removesuffix(".0")  # as pandas writes whole numbers beside empty cells
        if name and name != arm:
            compared[arm] = whole if name not in present and whole in present else name
    if not compared:
        remarks.add_mistakes(f"column '{column}' names no baseline; without --baselines, all arms have the same")
    return compared
