"""Tables of results from elsewhere: of a file, or of the runs of an MLflow experiment."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitlab.errors import UserError, count, nearest

if TYPE_CHECKING:
    import pandas as pd

    from vitlab.trackers.experiment import Experiment, Run

MAX_LISTED = 5  #: names and rows that a message lists
UNENDED = {("RUNNING", "SCHEDULED"): "still running or never ended", ("KILLED",): "stopped before the end"}
"""Statuses of runs that are left out, and the reason."""
SQLITE = b"SQLite format 3\0"  #: first bytes of a SQLite file


@dataclass(frozen=True)
class Table:
    """Results of trainings, one a row, or one a cell of a table with a column per arm."""

    name: str  #: of the report
    source: str  #: where the rows are from, as messages say it
    rows: pd.DataFrame
    notes: tuple[str, ...] = ()
    failed: frozenset[int] = frozenset()  #: places of rows of trainings that ended without a result


def read_table(path: Path) -> Table:
    """Read a table in CSV (also .tsv), Parquet or JSON lines.

    Raises:
        UserError: if it cannot be read, or has no rows.
    """
    import pandas as pd

    readers: dict[str, Any] = {
        # As text, because pandas does not read every number to its last digit.
        ".csv": lambda: pd.read_csv(path, dtype=str),
        ".tsv": lambda: pd.read_csv(path, dtype=str, sep="\t"),
        ".parquet": lambda: pd.read_parquet(path),
        ".jsonl": lambda: _json_lines(path),
        ".ndjson": lambda: _json_lines(path),
    }
    if path.suffix.lower() not in readers:
        actual = f"'{path.suffix}'" if path.suffix else "no suffix"
        raise UserError(f"{path}: a table is one of {', '.join(readers)}; found {actual}.{_store_hint(path)}")
    try:
        table: pd.DataFrame = readers[path.suffix.lower()]()
    except FileNotFoundError:
        raise UserError(f"{path} does not exist") from None
    except (ValueError, OSError) as error:  # pandas' and pyarrow's errors of parsing are ValueErrors
        raise UserError(f"{path} cannot be read as {path.suffix[1:]}: {str(error).splitlines()[0]}") from None
    if table.empty:
        raise UserError(f"{path} has no rows")
    return Table(path.name, str(path), table.rename(columns=str))


def _store_hint(path: Path) -> str:
    """Return how to name an MLflow store whose path was given; empty for other paths."""
    place, _, name = str(path).partition("#")
    store = Path(place)
    if store.is_dir():
        return f" For an experiment in MLflow's folder, write file://{store.resolve()}#{name or 'NAME'}."
    if store.is_file():
        with store.open("rb") as file:
            if file.read(len(SQLITE)) == SQLITE:
                return f" For an experiment in MLflow's database, write sqlite:///{store.resolve()}#{name or 'NAME'}."
    return ""


def _json_lines(path: Path) -> pd.DataFrame:
    import pandas as pd

    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    if not all(isinstance(row, dict) for row in rows):
        raise ValueError('every line is an object such as {"arm": "a", "seed": 0, "acc": 0.9}')
    return pd.DataFrame(rows)


# -- MLflow -----------------------------------------------------------------------------------------------------------


def table_of_runs(
    experiment: Experiment, *, metric: str, arm: str | None, seed: str | None = None, baselines: str | None = None
) -> Table:
    """Return the table of an experiment's runs, whose columns are those that are named.

    A failed run has no value.  Left out, with a note each, are runs that are deleted, have not ended, or lack the arm
    or the seed, runs with nested runs that have both, and failed runs whose arm and seed another run has.

    Args:
        experiment: the experiment.
        metric: the metric, of which the last value counts.
        arm: the parameter or tag of the arm.
        seed: that of the seed.
        baselines: that of the arm that each is compared with.

    Raises:
        UserError: if no run has one of them, or runs contradict each other.
    """
    import pandas as pd

    source, present = experiment.uri, [run for run in experiment.runs if not run.is_deleted]
    if not present:
        raise UserError(f"{source} has no runs")
    if arm is None:
        raise UserError(f"{source}: name the parameter or tag of the arm with --arm. {_varied(present)}")
    columns = {name: _column(name, present, source) for name in filter(None, (arm, seed, baselines))}
    metrics = list(dict.fromkeys(name for run in present for name in run.metrics))
    if metric not in metrics:
        listed = f"Metrics: {', '.join(sorted(metrics))}." if metrics else "Its runs have no metrics."
        raise UserError(f"{source}: no metric '{metric}'.{nearest(metric, metrics)} {listed}")
    runs = _Selection(experiment.runs)
    if experiment.filter:
        runs.notes.append(f"Only runs that the filter of the address selects are judged: {experiment.filter}.")
    runs.leave_out("deleted in MLflow", [run for run in runs if run.is_deleted])
    runs.leave_out("no trial of an arm", [run for run in runs if run.tags.get("vitlab.kind", "trial") != "trial"])
    for statuses, reason in UNENDED.items():
        runs.leave_out(reason, [run for run in runs if run.status in statuses], "Warning: ")
    for name in filter(None, (arm, seed)):
        runs.leave_out(f"without '{name}'", [run for run in runs if run.id not in columns[name]])
    parents = _ancestors(runs, experiment.runs)
    runs.leave_out("in favour of nested runs", [run for run in runs if run.id in parents])
    if seed is not None:
        repeated = _repeated(runs, columns[arm], columns[seed], metric, source)
        runs.leave_out("failed, and repeated with the same arm and seed", repeated)
    if not runs.remaining:
        raise UserError(f"{source}: no run can be judged. {' '.join(runs.notes)}")
    failed = [run for run in runs if not _has_ended(run, metric)]
    if logged := [run for run in failed if metric in run.metrics]:
        runs.notes.append(f"The value of a failed run does not count: {_names(logged)}.")
    rows: dict[str, Any] = {name: [column.get(run.id) for run in runs] for name, column in columns.items()}
    rows[metric] = [_value(run.metrics[metric]) if _has_ended(run, metric) else math.nan for run in runs]
    places = frozenset(place for place, run in enumerate(runs) if not _has_ended(run, metric))
    return Table(experiment.name, source, pd.DataFrame(rows), tuple(runs.notes), places)


class _Selection:
    """Runs that are judged, with a note on each group that is not."""

    def __init__(self, runs: Iterable[Run]) -> None:
        self.remaining = list(runs)
        self.notes: list[str] = []

    def __iter__(self) -> Iterator[Run]:
        return iter(self.remaining)

    def leave_out(self, reason: str, runs: Sequence[Run], prefix: str = "") -> None:
        """Leave out some runs, with a note."""
        if runs:
            out = {run.id for run in runs}
            self.remaining = [run for run in self.remaining if run.id not in out]
            self.notes.append(f"{prefix}{count(len(runs), 'run')} left out, {reason}: {_names(runs)}.")


def _has_ended(run: Run, metric: str) -> bool:
    """Return True if a run has ended with a value of the metric."""
    return run.status == "FINISHED" and metric in run.metrics


def _names(runs: Sequence[Run]) -> str:
    """Return the names of the first runs, and the number of others."""
    more = f" and {len(runs) - MAX_LISTED} more" if len(runs) > MAX_LISTED else ""
    return f"{'; '.join(run.name for run in runs[:MAX_LISTED])}{more}"


def _column(name: str, runs: Sequence[Run], source: str) -> dict[str, str]:
    """Return the values of a parameter or tag by run, where there are any; ``params.`` or ``tags.`` says which.

    Raises:
        UserError: if no run has it, or if a parameter and a tag of the name differ.
    """
    kind, _, rest = name.partition(".")
    params = {run.id: run.params[name] for run in runs if run.params.get(name)}
    tags = {run.id: run.tags[name] for run in runs if run.tags.get(name)}
    if not params and not tags and kind in ("params", "tags"):
        values = {run.id: getattr(run, kind)[rest] for run in runs if getattr(run, kind).get(rest)}
        if values:
            return values
    if any(params[run] != tags[run] for run in params.keys() & tags.keys()):
        raise UserError(
            f"{source}: '{name}' is a parameter and a tag, with different values; write params.{name} or tags.{name}"
        )
    if not params and not tags:
        names = dict.fromkeys(name for run in runs for name in (*run.params, *run.tags))
        raise UserError(f"{source}: no parameter or tag '{name}'.{nearest(name, names)} {_varied(runs)}")
    return {**tags, **params}


def _varied(runs: Sequence[Run]) -> str:
    """Return a sentence on the parameters and tags that differ between runs, without those that MLflow itself sets."""
    values: dict[str, set[str]] = {}
    for run in runs:
        for name, value in {**run.tags, **run.params}.items():
            values.setdefault(name, set()).add(value)
    names = sorted(name for name, some in values.items() if len(some) > 1 and not name.startswith("mlflow."))
    return f"Different between runs: {', '.join(names)}." if names else "No parameter or tag differs between runs."


def _ancestors(runs: Iterable[Run], all_runs: Iterable[Run]) -> set[str]:
    """Return the ids of all runs in which some runs are nested."""
    parents = {run.id: run.tags.get("mlflow.parentRunId") for run in all_runs}
    ancestors: set[str] = set()
    for run in runs:
        parent = parents.get(run.id)
        while parent is not None and parent not in ancestors:
            ancestors.add(parent)
            parent = parents.get(parent)
    return ancestors


def _repeated(runs: Iterable[Run], arms: dict[str, str], seeds: dict[str, str], metric: str, source: str) -> list[Run]:
    """Return the runs without a value whose arm and seed another run has.

    Raises:
        UserError: if two runs of one arm and seed have different values.
    """
    groups: dict[tuple[str, str], list[Run]] = {}
    for run in runs:
        groups.setdefault((arms[run.id], seeds[run.id]), []).append(run)
    repeated = []
    for (arm, seed), group in groups.items():
        ended = [run for run in group if _has_ended(run, metric)]
        if len({repr(run.metrics[metric]) for run in ended}) > 1:
            raise UserError(
                f"{source}: {count(len(ended), 'run')} of arm '{arm}' with seed {seed}, with different values: "
                f"{_names(ended)}; delete all but one in MLflow, or name a seed that differs between them"
            )
        repeated += [run for run in group if run not in (ended or group[-1:])]
    return repeated


def _value(value: float) -> float:
    """Return a metric's value; MLflow's databases store infinities as the largest number."""
    return math.copysign(math.inf, value) if abs(value) == sys.float_info.max else value
