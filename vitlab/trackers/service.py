"""MLflow's client, opened with few log messages and retries, and never on a database under construction."""

from __future__ import annotations

import logging
import os
import sqlite3
import warnings
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

from vitlab.store.damage import set_aside
from vitlab.trackers import lock
from vitlab.trackers.address import Address

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Experiment, Run

log = logging.getLogger(__name__)

SETTINGS = {
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    "MLFLOW_DISABLE_AGENT_HINT": "true",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    # With MLflow's defaults, a call to an unreachable server fails after four minutes.  Failed deliveries are retried.
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
}
"""MLflow's settings as environment variables.  Values set by the user take precedence."""

SQLITE = {"MLFLOW_SQLALCHEMYSTORE_POOLCLASS": "NullPool"}
"""Setting for a database file: a connection pool would keep a deleted file open as long as the process lives."""

ACTIVE = 1  #: MLflow's ``ViewType.ACTIVE_ONLY``
PAGE = 100
"""Runs per request: a server needs seconds for a thousand, which would exceed the timeout."""

LIBRARIES = r"mlflow|alembic|sqlalchemy|pydantic|starlette|google"
"""Packages that MLflow imports or is, whose deprecation warnings concern no user of vitlab."""

# MLflow logs errors of databases, and missing credentials of Databricks, although it raises them as well.
LOGGERS = {
    "mlflow.store.db.utils": logging.CRITICAL,
    "mlflow.utils.databricks_utils": logging.ERROR,
    "mlflow": logging.WARNING,
    "alembic": logging.WARNING,
    "urllib3": logging.ERROR,
}


def configure(address: Address) -> None:
    """Set MLflow's settings for this process, until :func:`restore`.

    Call neither while another thread may copy the environment, as starting a worker does: a copy fails if the
    environment changes meanwhile.
    """
    for name, value in {**SETTINGS, **(SQLITE if address.database is not None else {})}.items():
        if name not in os.environ:
            os.environ[name] = value
            _configured[name] = value


def restore() -> None:
    """Unset MLflow's settings that :func:`configure` has set, for the user's own calls of MLflow in this process."""
    for name, value in _configured.items():
        if os.environ.get(name) == value:  # otherwise the user has set it since
            del os.environ[name]
    _configured.clear()


_configured: dict[str, str] = {}  # variables that the user had not set


@contextmanager
def quiet() -> Iterator[None]:
    """Mute MLflow's database messages, and from now on the deprecation warnings of its libraries.

    Deliveries run in a thread, and Python restores filters of warnings for all threads at once: a filter that comes and
    goes would bring back, or take away, what another thread has set meanwhile.  So these stay.
    """
    for category in (DeprecationWarning, FutureWarning):
        warnings.filterwarnings("ignore", category=category, module=LIBRARIES)
    import mlflow  # noqa: F401  # configures its loggers, so they can be muted only after the import

    levels = {name: logging.getLogger(name).level for name in LOGGERS}
    for name, level in LOGGERS.items():
        logging.getLogger(name).setLevel(level)
    try:
        yield
    finally:
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)


def open_client(address: Address) -> MlflowClient:
    """Return an ``MlflowClient`` for the address; a SQLite database is created if needed.  Call within `quiet`.

    Raises:
        ValueError: if the file that the user named is not an MLflow database.
    """
    from mlflow import MlflowClient

    if address.database is not None:
        if not address.embedded and (problem := foreign(address.database)):
            raise ValueError(
                f"{address.database} is not an MLflow database: {problem}; name another file, new ones are created"
            )
        initialise(address.database)
    return MlflowClient(tracking_uri=address.uri, registry_uri=address.uri)


def initialise(database: Path) -> None:
    """Create MLflow's tables in a SQLite file unless it has them; a file that is no database is set aside.

    Call within `quiet`.  MLflow does not guard against concurrent creation: two processes that start on one new file
    both fail and leave an unusable file.  So the database is created under a lock and a temporary name, then renamed.
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
        new = database.with_name(f".{database.name}.new")  # only the holder of the lock writes it
        _remove(new)  # of a process that was killed in this place
        new.touch()  # with the rights that the user gives to new files; SQLite would not let a group write
        try:
            migrate(new)
            _remove(database)  # SQLite would apply the files of an earlier database to the new one
            os.replace(new, database)
        finally:
            _remove(new)


def _remove(database: Path) -> None:
    """Delete a database and the files that SQLite keeps beside it."""
    for suffix in ("", "-journal", "-wal", "-shm"):
        database.with_name(database.name + suffix).unlink(missing_ok=True)


def migrate(database: Path) -> None:
    """Have MLflow create its tables and the default experiment, which takes seconds."""
    from mlflow import MlflowClient

    uri = f"sqlite:///{database}"
    MlflowClient(tracking_uri=uri, registry_uri=uri)


def intact(database: Path) -> bool:
    """Return True if a SQLite file has MLflow's tables."""
    return database.exists() and not foreign(database) and bool(_tables(database))


def foreign(database: Path) -> str:
    """Return why a file is not an MLflow database; empty if it is one, is empty, or does not exist."""
    if database.is_dir():
        return "it is a folder, not a file"
    try:
        tables = _tables(database)
    except sqlite3.DatabaseError as error:
        return str(error)
    return "" if not tables or "experiments" in tables else "it holds another program's tables"


def _tables(database: Path) -> set[str]:
    """Return the names of the tables of a SQLite file.

    Raises:
        sqlite3.DatabaseError: if the file is not a SQLite database.
    """
    if not database.exists():
        return set()
    try:
        with closing(sqlite3.connect(f"file:{quote(str(database))}?mode=ro", uri=True)) as connection:
            return {name for (name,) in connection.execute("select name from sqlite_master where type = 'table'")}
    except sqlite3.OperationalError:  # locked by a writer, or cannot be opened: MLflow reports the error
        return {"experiments"}


def experiment(client: MlflowClient, name: str, address: Address, folder: str, tags: Mapping[str, str]) -> Experiment:
    """Return the experiment called ``name``, which is restored if deleted and created if missing.

    Args:
        client: MLflow's client.
        name: name of the experiment.
        address: the destination.
        folder: folder of its artifacts, below the address's folder.
        tags: tags of a new experiment.
    """
    location = str(address.artifacts / folder) if address.artifacts else None
    existing = client.get_experiment_by_name(name)
    if existing is not None and existing.lifecycle_stage == "deleted":
        client.restore_experiment(existing.experiment_id)
    if existing is not None and address.embedded and existing.artifact_location != location:
        # The output folder has moved since, and MLflow stores only the old path of the artifacts.  The trials are
        # here, so they are delivered again.
        client.rename_experiment(existing.experiment_id, f"{name} (before it moved, {existing.experiment_id})")
        existing = None
    if existing is None:
        from mlflow.exceptions import MlflowException

        with suppress(MlflowException):  # another process has just created it, or the first response was lost
            client.create_experiment(name, artifact_location=location, tags=dict(tags))
        existing = client.get_experiment_by_name(name)
    return existing


def set_experiment_tag(client: MlflowClient, experiment: Experiment, name: str, value: str) -> bool:
    """Set a tag of an experiment that only the browser shows; return True if it had another value.

    A server whose tags are shorter, as before MLflow 3.13, goes without it.
    """
    from mlflow.exceptions import MlflowException

    if experiment.tags.get(name) == value:
        return False
    try:
        client.set_experiment_tag(experiment.experiment_id, name, value)
    except MlflowException as error:
        if error.error_code != "INVALID_PARAMETER_VALUE":
            raise
        return False
    return True


def runs(client: MlflowClient, experiment_id: str, selection: str = "") -> list[Run]:
    """Return all runs of an experiment that are not deleted, the oldest first.

    Args:
        client: MLflow's client.
        experiment_id: id of the experiment.
        selection: MLflow's filter.
    """
    order = ["attributes.start_time ASC"]
    results: list[Run] = []
    token = None
    while True:
        page = client.search_runs([experiment_id], selection, ACTIVE, PAGE, order, token)
        results += page
        token = page.token
        if not token:
            return results
