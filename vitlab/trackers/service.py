"""MLflow's client, opened with few log messages and retries, and never on a database under construction."""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import sqlite3
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any
from urllib.parse import quote

from vitlab.store.damage import set_aside
from vitlab.store.files import temporary, user_cache
from vitlab.trackers.address import Address
from vitlab.trackers.base import lock

log = logging.getLogger(__name__)

SETTINGS = {
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    "MLFLOW_DISABLE_AGENT_HINT": "true",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    # With MLflow's defaults, a call to an unreachable server fails after four minutes.  Failed deliveries are retried.
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
}
"""MLflow's settings as environment variables.  Values set by the user take precedence."""

SQLITE = {"MLFLOW_SQLALCHEMYSTORE_POOLCLASS": "NullPool"}
"""Setting for a database file: a connection pool would keep a deleted file open as long as the process lives."""

EMPTY = ("experiments", "runs")  #: tables of a template that have no rows
REJECTED = "INVALID_PARAMETER_VALUE"  #: MLflow's code for values that it does not store, however often they are sent
ACTIVE = 1  #: MLflow's ``ViewType.ACTIVE_ONLY``
PAGE = 100
"""Runs per request: a server needs seconds for a thousand, which would exceed the timeout."""

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
    """Mute MLflow's database messages and the deprecation warnings of its libraries."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        warnings.simplefilter("ignore", FutureWarning)
        import mlflow  # noqa: F401  # configures its loggers, so they can be muted only after the import

        levels = {name: logging.getLogger(name).level for name in LOGGERS}
        for name, level in LOGGERS.items():
            logging.getLogger(name).setLevel(level)
        try:
            yield
        finally:
            for name, level in levels.items():
                logging.getLogger(name).setLevel(level)


def open_client(address: Address) -> Any:
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
        for suffix in ("-journal", "-wal", "-shm"):  # SQLite would apply the old database's files to the new one
            database.with_name(database.name + suffix).unlink(missing_ok=True)
        template = _template()
        with suppress(Exception):  # MLflow raises various errors if the template is of no use to it
            if template is not None and _is_whole(template):
                _create(database, template)
                return
        _create(database, new_template=template)


def _create(database: Path, template: Path | None = None, new_template: Path | None = None) -> None:
    """Create a database from a template, or by all migrations of MLflow's schema, which take seconds.

    A migrated database is copied to ``new_template`` before it has its name, so that nobody else has written to it.
    """
    new = temporary(database)  # a new name: MLflow assumes that a path it has opened before has tables
    try:
        if template is not None:
            shutil.copyfile(template, new)
        _open(new)
        if new_template is not None:
            with suppress(OSError, sqlite3.Error):  # a read-only cache: the next database is migrated, too
                _keep_template(new, new_template)
        os.replace(new, database)
    finally:
        for suffix in ("", "-journal", "-wal", "-shm"):
            new.with_name(new.name + suffix).unlink(missing_ok=True)


def _open(database: Path) -> None:
    """Open a database with MLflow, which creates its tables and the default experiment if they are missing."""
    from mlflow import MlflowClient

    uri = f"sqlite:///{database}"
    MlflowClient(tracking_uri=uri, registry_uri=uri)


def _template() -> Path | None:
    """Return the path of the template, which may not exist; None for a user without a home.

    Its name holds the versions of MLflow, of SQLAlchemy and of SQLite, and a digest of MLflow's migrations.
    """
    import mlflow

    migrations = Path(mlflow.__file__).parent / "store" / "db_migrations" / "versions"
    scripts = sorted((file.name, file.stat().st_size) for file in migrations.glob("*.py"))
    versions = [mlflow.__version__, version("sqlalchemy"), sqlite3.sqlite_version]
    digest = hashlib.sha256(repr((versions, scripts)).encode()).hexdigest()[:16]
    try:
        return user_cache() / f"mlflow-{mlflow.__version__}-{digest}.db"
    except RuntimeError:
        return None


def _is_whole(template: Path) -> bool:
    """Return True if the template exists, is undamaged, and has no experiments and runs."""
    try:
        if not intact(template):
            return False
        with closing(sqlite3.connect(f"file:{quote(str(template))}?mode=ro", uri=True)) as connection:
            (state,) = connection.execute("pragma quick_check").fetchone()
            counts = [connection.execute(f"select count(*) from {table}").fetchone()[0] for table in EMPTY]
    except sqlite3.Error:
        return False
    return bool(state == "ok" and not any(counts))


def _keep_template(database: Path, template: Path) -> None:
    """Store a new database as the template, without the default experiment, which holds a time and a path.

    Raises:
        OSError, sqlite3.Error: if the cache cannot be written.
    """
    template.parent.mkdir(parents=True, exist_ok=True)
    partial = temporary(template)
    try:
        with closing(sqlite3.connect(database)) as source, closing(sqlite3.connect(partial)) as copy:
            source.backup(copy)
            copy.execute("delete from experiments")
            copy.commit()
        os.replace(partial, template)
    finally:
        for suffix in ("", "-journal", "-wal", "-shm"):
            partial.with_name(partial.name + suffix).unlink(missing_ok=True)


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


def clear_artifact_cache() -> None:
    """Clear MLflow's cache of artifact repositories, which holds ten kilobytes for each of up to a thousand runs."""
    from mlflow.tracking._tracking_service import utils

    cache = getattr(utils, "_artifact_repos_cache", None)
    if cache is not None:
        cache.clear()


def experiment(
    client: Any, name: str, address: Address, folder: str, tags: Mapping[str, str], first: Mapping[str, str] = {}
) -> str:
    """Return the id of the experiment called ``name``, which is restored if deleted and created if missing.

    Args:
        client: MLflow's client.
        name: name of the experiment.
        address: the destination.
        folder: folder of its artifacts, below those of the address.
        tags: tags of the experiment; updated if it exists.
        first: further tags for a new experiment.
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

        try:
            return str(client.create_experiment(name, artifact_location=location, tags={**tags, **first}))
        except MlflowException:  # another process has just created it, or the first response was lost
            existing = client.get_experiment_by_name(name)
            if existing is None:
                raise
    for key, value in tags.items():
        if existing.tags.get(key) != value:
            client.set_experiment_tag(existing.experiment_id, key, value)
    return str(existing.experiment_id)


def log_values(
    client: Any, run: str, tags: Mapping[str, str], params: Mapping[str, str], metrics: Sequence[Any]
) -> dict[str, str]:
    """Send tags, parameters and metrics to a run, in one request unless there are too many.

    MLflow stores nothing of a request of which it rejects a part.  Metrics are then sent alone, and every tag and
    parameter by itself.

    Returns:
        The tags and parameters that MLflow rejects, as ``tag 'NAME'``, with its reason.
    """
    from mlflow.entities import Param, RunTag
    from mlflow.exceptions import MlflowException

    try:
        tag_list = [RunTag(name, value) for name, value in tags.items()]
        client.log_batch(run, metrics, [Param(name, value) for name, value in params.items()], tag_list)
        return {}
    except MlflowException as error:
        if error.error_code != REJECTED:
            raise
    if metrics:
        client.log_batch(run, metrics)
    rejected = {}
    for kind, values, send in (("tag", tags, client.set_tag), ("parameter", params, client.log_param)):
        for name, value in values.items():
            try:
                send(run, name, value)
            except MlflowException as error:
                if error.error_code != REJECTED:
                    raise
                rejected[f"{kind} '{name}'"] = (str(error).splitlines() or [""])[0]
    return rejected


def runs(client: Any, experiment_id: str, selection: str = "", view: int = ACTIVE) -> list[Any]:
    """Return all runs of an experiment, the oldest first.

    Args:
        client: MLflow's client.
        experiment_id: id of the experiment.
        selection: MLflow's filter.
        view: MLflow's ``ViewType``; by default that of runs that are not deleted.
    """
    order = ["attributes.start_time ASC"]
    results: list[Any] = []
    token = None
    while True:
        page = client.search_runs([experiment_id], selection, view, PAGE, order, token)
        results += page
        token = page.token
        if not token:
            return results
