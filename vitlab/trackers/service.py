"""MLflow's client: opened once, quietly, with few retries, and never on a database that somebody else is making."""

from __future__ import annotations

import logging
import os
import sqlite3
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

from vitlab.store.folders import Busy, hold, set_aside, temporary
from vitlab.trackers.address import Address

log = logging.getLogger(__name__)

SETTINGS = {
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    "MLFLOW_DISABLE_AGENT_HINT": "true",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    # With MLflow's own, one call to a server that is away takes four minutes to fail.  What fails is delivered again.
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
}
"""MLflow's settings, which are variables of the environment.  Those that the user has set stay."""

SQLITE = {"MLFLOW_SQLALCHEMYSTORE_POOLCLASS": "NullPool"}
"""For a database file: a pool keeps it open as long as the process lives, even when it was deleted and made anew."""

PAGE = 100
"""Runs asked for at once: a server needs seconds for a thousand, and would be taken to be away."""

# MLflow prints a traceback of every error of a database, which also reaches us.
LOGGERS = {
    "mlflow.store.db.utils": logging.CRITICAL,
    "mlflow": logging.WARNING,
    "alembic": logging.WARNING,
    "urllib3": logging.ERROR,
}


def configure(address: Address) -> None:
    """Set MLflow's settings for this process.

    Call it where no other thread copies the environment, as starting a worker does, so not while trials are delivered
    beside a run: a copy of an environment that changes meanwhile fails.
    """
    for name, value in {**SETTINGS, **(SQLITE if address.database is not None else {})}.items():
        os.environ.setdefault(name, value)


@contextmanager
def quiet() -> Iterator[None]:
    """Mute MLflow's news of its database and the deprecations of its libraries."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        warnings.simplefilter("ignore", FutureWarning)
        import mlflow  # noqa: F401  # it configures its loggers, so that they can be muted only now

        levels = {name: logging.getLogger(name).level for name in LOGGERS}
        for name, level in LOGGERS.items():
            logging.getLogger(name).setLevel(level)
        try:
            yield
        finally:
            for name, level in levels.items():
                logging.getLogger(name).setLevel(level)


class Held(Exception):
    """Another process has the lock."""


@contextmanager
def lock(file: Path, *, wait_s: float) -> Iterator[None]:
    """Hold a file's lock.

    Raises:
        Held: if another process still holds it after ``wait_s``.
    """
    until = time.monotonic() + wait_s
    with ExitStack() as leases:
        while True:
            try:
                leases.enter_context(hold(file))
                break
            except Busy:
                if time.monotonic() >= until:
                    raise Held(f"{file} is held by another process") from None
                time.sleep(0.1)
        yield


def open_client(address: Address) -> Any:
    """Return an ``MlflowClient`` on the address, whose SQLite database is made first.  Call within `quiet`.

    Raises:
        ValueError: if the user has named a file that is another program's, or none of SQLite's.
    """
    from mlflow import MlflowClient

    if address.database is not None:
        if not address.embedded and (problem := foreign(address.database)):
            raise ValueError(f"{address.database} is no database of MLflow's: {problem}")
        initialise(address.database)
    return MlflowClient(tracking_uri=address.uri, registry_uri=address.uri)


def initialise(database: Path) -> None:
    """Make MLflow's tables in a SQLite file, unless it has them; what is no database is set aside.

    Call within `quiet`.  MLflow does not guard this itself: of two processes that begin on one new file both fail and
    leave a file that no third can use.  So one makes it, under a lock and another name, and it is there whole or not at
    all.
    """
    if intact(database):
        return
    with lock(database.with_name(f".{database.name}.lock"), wait_s=120):
        if intact(database):
            return
        if problem := foreign(database):
            log.warning(
                "%s cannot be used (%s); it is now %s, and a new database is filled from the trials.",
                database,
                problem,
                set_aside(database).name,
            )
        for suffix in ("-journal", "-wal", "-shm"):  # SQLite would apply those of the old database to the new one
            database.with_name(database.name + suffix).unlink(missing_ok=True)
        made = temporary(database)  # a name that no process has had: MLflow takes one that it has opened for made
        _make(made)
        os.replace(made, database)


def _make(database: Path) -> None:
    """Make a new database."""
    from mlflow import MlflowClient

    uri = f"sqlite:///{database}"
    MlflowClient(tracking_uri=uri, registry_uri=uri)


def intact(database: Path) -> bool:
    """Return whether a SQLite file has MLflow's tables."""
    return database.exists() and not foreign(database) and bool(_tables(database))


def foreign(database: Path) -> str:
    """Return why a file is no database of MLflow's; empty for one that is, or that is empty or not there."""
    if database.is_dir():
        return "it is a folder"
    try:
        tables = _tables(database)
    except sqlite3.DatabaseError as error:
        return str(error)
    return "" if not tables or "experiments" in tables else "it holds another program's tables"


def _tables(database: Path) -> set[str]:
    """Return the names of the tables of a SQLite file.

    Raises:
        sqlite3.DatabaseError: if it is none.
    """
    if not database.exists():
        return set()
    try:
        with closing(sqlite3.connect(f"file:{quote(str(database))}?mode=ro", uri=True)) as connection:
            return {name for (name,) in connection.execute("select name from sqlite_master where type = 'table'")}
    except sqlite3.OperationalError:  # another process writes to it, or it cannot be opened: MLflow says what is wrong
        return {"experiments"}


def forget() -> None:
    """Let go of what MLflow keeps of every run whose files it has stored: ten kilobytes each, of up to a thousand."""
    from mlflow.tracking._tracking_service import utils

    kept = getattr(utils, "_artifact_repos_cache", None)
    if kept is not None:
        kept.clear()


def experiment(
    client: Any, name: str, address: Address, folder: str, tags: Mapping[str, str], first: Mapping[str, str] = {}
) -> str:
    """The id of the experiment called ``name``: found, restored where it was deleted, or made.

    Args:
        client: MLflow's client.
        name: of the experiment.
        address: where.
        folder: of its artifacts, below those of the address.
        tags: of the experiment; brought up to date where it is there.
        first: further tags, for one that is made.
    """
    location = str(address.artifacts / folder) if address.artifacts else None
    found = client.get_experiment_by_name(name)
    if found is not None and found.lifecycle_stage == "deleted":
        client.restore_experiment(found.experiment_id)
    if found is not None and address.embedded and found.artifact_location != location:
        # The output folder has moved since, and MLflow knows the artifacts by their old path only.  The trials are
        # here, so they are delivered again.
        client.rename_experiment(found.experiment_id, f"{name} (before it moved, {found.experiment_id})")
        found = None
    if found is None:
        from mlflow.exceptions import MlflowException

        try:
            return str(client.create_experiment(name, artifact_location=location, tags={**tags, **first}))
        except MlflowException:  # somebody else has just made it, or our first answer was lost
            found = client.get_experiment_by_name(name)
            if found is None:
                raise
    for key, value in tags.items():
        if found.tags.get(key) != value:
            client.set_experiment_tag(found.experiment_id, key, value)
    return str(found.experiment_id)


def runs(client: Any, experiment_id: str) -> list[Any]:
    """All runs of an experiment that are not deleted, the oldest first."""
    found: list[Any] = []
    token = None
    while True:
        page = client.search_runs(
            [experiment_id], max_results=PAGE, order_by=["attributes.start_time ASC"], page_token=token
        )
        found += page
        token = page.token
        if not token:
            return found
