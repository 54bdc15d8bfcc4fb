"""MLflow experiments of any program, read from a database file, a folder or a server, where nothing is written.

A URI names the store and, after ``#``, the experiment: ``sqlite:///mlflow.db#NAME``, ``file:///FOLDER/mlruns#NAME``, or
the address of its page in the browser, ``http://HOST:5000/#/experiments/ID``.  Every store accepts both.

Files are read without MLflow: its import takes more than a second, its client upgrades the tables of an older database
as soon as it opens it, and it refuses folders.
"""

from __future__ import annotations

import os
import re
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol
from urllib.parse import parse_qs, quote, unquote, urlsplit

import yaml

from vitlab.errors import UserError, nearest
from vitlab.spec.changes import public
from vitlab.trackers import service
from vitlab.trackers.address import PORTS, PROBE_S, SERVERS, Address, locate, without_user

SCHEMES = ("sqlite", "file", *SERVERS)
MAX_LISTED = 20  #: experiments that a message lists
STATUSES = ("RUNNING", "SCHEDULED", "FINISHED", "FAILED", "KILLED")
"""MLflow's statuses of runs; files store their places, counted from 1."""
_PAGE = re.compile(r"/experiments/([^/?]+)[^?]*(?:\?(.*))?")
ACCESS = "; set DATABRICKS_HOST and DATABRICKS_TOKEN, or name a profile of ~/.databrickscfg"
_REFUSALS = ("UNAUTHENTICATED", "PERMISSION_DENIED")


@dataclass(frozen=True)
class Run:
    """A run with the last value of each metric."""

    id: str
    name: str
    status: str  #: one of :data:`STATUSES`
    started: int  #: milliseconds since 1970
    is_deleted: bool
    params: Mapping[str, str]
    tags: Mapping[str, str]
    metrics: Mapping[str, float]


@dataclass(frozen=True)
class Experiment:
    """An experiment with all of its runs, deleted ones included, the oldest first."""

    name: str
    uri: str  #: without user and password
    runs: tuple[Run, ...]
    filter: str = ""  #: MLflow's filter that selected the runs, from the address of the page


class _Entry(NamedTuple):
    """An experiment in a store's list."""

    id: str
    name: str
    is_deleted: bool


class _Store(Protocol):
    """A store of experiments."""

    def experiments(self) -> list[_Entry]:
        """Return all experiments."""

    def runs(self, experiment: str, selection: str) -> list[Run]:
        """Return all runs of an experiment that MLflow's filter selects."""


def read_experiment(uri: str) -> Experiment:
    """Read the runs of the experiment that a URI names.

    Raises:
        UserError: if the store cannot be read, or the URI does not name one of its experiments.
    """
    address, _, place = uri.partition("#")
    shown = _shown(address)
    page = _PAGE.fullmatch(place)
    with _open(address, shown) as store:
        entry = _select(store.experiments(), place, page, shown)
        selection = parse_qs(page[2] or "").get("searchFilter", [""])[0] if page is not None else ""
        runs = store.runs(entry.id, selection)
    runs.sort(key=lambda run: (run.started, run.name, run.id))
    return Experiment(entry.name, f"{shown}#{entry.name}", tuple(runs), selection)


def _shown(address: str) -> str:
    """Return an address without user, password and query, or masked if it cannot be parsed."""
    try:
        return without_user(address) if urlsplit(address).scheme in ("http", "https") else public(address)
    except ValueError:
        return public(address)


def _select(entries: Sequence[_Entry], place: str, page: re.Match[str] | None, shown: str) -> _Entry:
    """Return the experiment that the part of a URI after ``#`` names.

    Raises:
        UserError: if it names none, several or a deleted one.
    """
    is_server = shown.startswith("http")
    if is_server and place.startswith("/") and page is None:
        raise UserError(
            f"{shown}#{place} is not the page of an experiment; open the experiment in the browser and copy its "
            f"address, such as {shown}/#/experiments/1"
        )
    present = [entry for entry in entries if not entry.is_deleted]
    key = "id" if page is not None else "name"
    wanted = page[1] if page is not None else place
    found = [entry for entry in present if getattr(entry, key) == wanted]
    if len(found) == 1:
        return found[0]
    example = f"{shown}/#/experiments/ID" if is_server else f"{shown}#NAME"
    label = (lambda entry: f"{entry.id} ({entry.name})") if is_server else (lambda entry: entry.name)
    names = "; ".join(map(label, present[:MAX_LISTED]))
    more = f" and {len(present) - MAX_LISTED} more" if len(present) > MAX_LISTED else ""
    listed = f"Experiments: {names}{more}." if present else "It has no experiments."
    if not wanted:
        raise UserError(f"{shown} is a store of experiments; name one, as in {example}. {listed}")
    if found:
        ids = ", ".join(f"{shown}#/experiments/{entry.id}" for entry in found)
        raise UserError(f"{shown}: several experiments are called '{wanted}'; name one by its number: {ids}")
    if any(getattr(entry, key) == wanted for entry in entries):
        raise UserError(f"{shown}: experiment '{wanted}' is deleted; restore it in MLflow. {listed}")
    close = "" if page is not None else nearest(wanted, [entry.name for entry in present])
    raise UserError(f"{shown}: no experiment '{wanted}'.{close} {listed}")


@contextmanager
def _open(address: str, shown: str) -> Iterator[_Store]:
    """Open a store for the duration of the block.

    Raises:
        UserError: if it cannot be opened or read.
    """
    try:
        parts = urlsplit(address)
    except ValueError:
        raise UserError(f"{shown} is not a URI; write sqlite:///FILE, file:///FOLDER or http://HOST:PORT") from None
    dialect = parts.scheme.partition("+")[0]
    if parts.scheme == "file":
        folder = Path(unquote(parts.path))
        if parts.netloc or not folder.is_dir():
            problem = f"is read as on the host '{parts.netloc}'" if parts.netloc else "is not a folder"
            raise UserError(f"{shown} {problem}; write file:///FOLDER#NAME, with the whole path of MLflow's folder")
        try:
            yield _Folder(folder)
        except (OSError, LookupError, TypeError, ValueError, yaml.YAMLError) as error:  # the files may hold anything
            raise UserError(f"{shown} cannot be read: {_first_sentence(error)}") from None
        return
    if dialect in PORTS:  # MLflow's client would upgrade the tables of a database that an older server uses
        raise UserError(f"{shown}: vitlab reads this database through its MLflow server; give the server's address")
    if dialect not in SCHEMES:
        raise UserError(
            f"{shown} begins with '{dialect}'.{nearest(dialect, SCHEMES)} Allowed: {', '.join(SCHEMES)}; or a table."
        )
    location = locate(address, Path.cwd())
    if location.database is not None:
        with _database(location.database, shown) as database:
            yield database
        return
    if not location.is_reachable():
        raise UserError(f"no answer from {shown} within {PROBE_S:g} s; check the address, and that the server runs")
    service.configure(location)
    try:
        with service.quiet():
            yield _Server(location)
    except UserError:
        raise
    except Exception as error:  # MLflow's client raises errors of several libraries
        if getattr(error, "error_code", "") in _REFUSALS:
            raise UserError(
                f"{shown} refuses access; set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or "
                "MLFLOW_TRACKING_TOKEN"
            ) from None
        access = ACCESS if dialect == "databricks" else ""
        raise UserError(f"{shown} cannot be read: {_first_sentence(error)}{access}") from None
    finally:
        service.restore()


def _first_sentence(error: Exception) -> str:
    """Return the first sentence of an error's message, without secrets."""
    line = (str(error).splitlines() or [type(error).__name__])[0]
    return public(line.partition(". ")[0])


# -- database ---------------------------------------------------------------------------------------------------------


@contextmanager
def _database(file: Path, shown: str) -> Iterator[_Store]:
    """Open a SQLite file of MLflow for reading.

    Raises:
        UserError: if it does not exist, is another program's, or cannot be read.
    """
    if not file.exists():
        raise UserError(f"{file} does not exist")
    if problem := service.foreign(file) or ("" if service.intact(file) else "it is empty"):
        raise UserError(f"{file} is not an MLflow database: {problem}")
    try:
        with closing(sqlite3.connect(f"file:{quote(str(file))}?mode=ro", uri=True)) as connection:
            yield _Database(connection)
    except sqlite3.Error as error:
        raise UserError(f"{shown} cannot be read: {error}") from None


class _Database:
    """Store in a SQLite file, whose tables have these columns since MLflow 1.4."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection

    def experiments(self) -> list[_Entry]:
        rows = self._connection.execute(
            "select experiment_id, name, lifecycle_stage from experiments order by experiment_id"
        )
        return [_Entry(str(identity), name, stage == "deleted") for identity, name, stage in rows]

    def runs(self, experiment: str, selection: str) -> list[Run]:
        _refuse_filter(selection)
        values: dict[str, dict[str, dict[str, Any]]] = {}
        for table in ("params", "tags", "latest_metrics"):
            nan = "is_nan" if table == "latest_metrics" else "0"
            rows = self._connection.execute(
                f"select run_uuid, key, value, {nan} from {table} join runs using (run_uuid) where experiment_id = ?",
                (experiment,),
            )
            values[table] = {}
            for run, key, value, is_nan in rows:
                values[table].setdefault(run, {})[key] = float("nan") if is_nan else value
        runs = self._connection.execute(
            "select run_uuid, name, status, start_time, lifecycle_stage from runs where experiment_id = ?",
            (experiment,),
        )
        return [
            Run(
                run,
                values["tags"].get(run, {}).get("mlflow.runName") or name or run,
                status,
                started or 0,
                stage == "deleted",
                values["params"].get(run, {}),
                values["tags"].get(run, {}),
                values["latest_metrics"].get(run, {}),
            )
            for run, name, status, started, stage in runs
        ]


def _refuse_filter(selection: str) -> None:
    if selection:
        raise UserError(f"the filter {selection} is applied by servers alone; leave '?searchFilter=' out")


# -- folder -----------------------------------------------------------------------------------------------------------


class _Folder:
    """Store in a folder, ``mlruns``, in which every experiment, run, parameter, tag and metric has a file."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def experiments(self) -> list[_Entry]:
        entries = []
        for parent in (self._root, self._root / ".trash"):
            for file in sorted(parent.glob("*/meta.yaml")):
                facts = _yaml(file)
                if "experiment_id" in facts and "name" in facts:
                    is_deleted = parent != self._root or facts.get("lifecycle_stage") == "deleted"
                    entries.append(_Entry(file.parent.name, str(facts["name"]), is_deleted))
        return entries

    def runs(self, experiment: str, selection: str) -> list[Run]:
        _refuse_filter(selection)
        runs = []
        for file in (self._root / experiment).glob("*/meta.yaml"):
            facts = _yaml(file)
            if "run_id" not in facts and "run_uuid" not in facts:  # a logged model or a data set
                continue
            folder, tags = file.parent, _texts(file.parent / "tags")
            status = facts.get("status", 1)
            runs.append(
                Run(
                    folder.name,
                    tags.get("mlflow.runName") or str(facts.get("run_name") or folder.name),
                    status if status in STATUSES else STATUSES[int(status) - 1],
                    int(facts.get("start_time") or 0),
                    facts.get("lifecycle_stage") == "deleted",
                    _texts(folder / "params"),
                    tags,
                    {name: _last(text) for name, text in _texts(folder / "metrics").items()},
                )
            )
        return runs


def _yaml(file: Path) -> dict[str, Any]:
    """Return the mapping in a YAML file; empty if it is none."""
    facts = yaml.safe_load(file.read_bytes())
    return facts if isinstance(facts, dict) else {}


def _texts(folder: Path) -> dict[str, str]:
    """Return the contents of all files below a folder, by path."""
    texts = {}
    for place, _, files in os.walk(folder):
        for name in files:
            path = Path(place, name)
            texts[path.relative_to(folder).as_posix()] = path.read_text(encoding="utf-8")
    return texts


def _last(text: str) -> float:
    """Return the value of a metric's last step from lines of time, value, step and perhaps a data set."""
    points = []
    for line in filter(str.strip, text.splitlines()):
        time, value, *rest = line.split()
        points.append((int(rest[0]) if rest else 0, int(time), float(value)))
    return max(points)[2] if points else float("nan")


# -- server -----------------------------------------------------------------------------------------------------------


class _Server:
    """Store behind an MLflow server, read by MLflow's client."""

    def __init__(self, address: Address) -> None:
        self._client = service.open_client(address)

    def experiments(self) -> list[_Entry]:
        from mlflow.entities import ViewType

        entries: list[_Entry] = []
        token = None
        while True:
            page = self._client.search_experiments(view_type=ViewType.ALL, page_token=token)
            entries += [_Entry(one.experiment_id, one.name, one.lifecycle_stage == "deleted") for one in page]
            token = page.token
            if not token:
                return sorted(entries, key=lambda entry: (len(entry.id), entry.id))

    def runs(self, experiment: str, selection: str) -> list[Run]:
        from mlflow.entities import ViewType

        return [
            Run(
                run.info.run_id,
                run.info.run_name or run.info.run_id,
                run.info.status,
                run.info.start_time or 0,
                run.info.lifecycle_stage == "deleted",
                run.data.params,
                run.data.tags,
                run.data.metrics,
            )
            for run in service.runs(self._client, experiment, selection, ViewType.ALL)
        ]
