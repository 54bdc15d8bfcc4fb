"""MLflow as a service: its address, and its client.

The address is a database under the output folder, a database file elsewhere, or a server.  The client is opened with
few log messages and retries, and never on a database under construction.
"""

from __future__ import annotations

import hashlib
import http.client
import json
import logging
import os
import shlex
import sqlite3
import ssl
import urllib.error
import urllib.request
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, unquote, urlsplit, urlunsplit

from vitlab.errors import MASK, UserError, nearest, public
from vitlab.store.files import set_aside
from vitlab.trackers import EMBEDDED, hold_lock_with_timeout

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Experiment, Run

log = logging.getLogger(__name__)

SERVERS = ("http", "https", "databricks")
UI = "http://127.0.0.1:5000"
"""Default address of ``vitlab ui`` for a database."""

REFUSALS = {
    401: "refuses this user; set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD to the name and "
    "password of an account there",
    403: "answers 403: this account lacks the permission MANAGE on the experiments {0} and {0}/arms, "
    "which their owner can give, or use one account for all; or --allowed-hosts of the server lacks this address",
}
"""Codes of HTTP by which a server refuses the user, and what to say of a study."""

ARTIFACTS = "mlartifacts"  #: folder of artifacts beside a database file
PROBE_S = 10.0  #: time within which a server says that it is there; a busy one needs seconds


@dataclass(frozen=True)
class Address:
    """One destination of deliveries."""

    uri: str  #: in the form that MLflow's client accepts
    database: Path | None = None  #: the file, where it is SQLite
    embedded: bool = False  #: True for the database under the output folder

    @property
    def name(self) -> str:
        """Key of this address in the study's delivery record; holds no password."""
        digest = hashlib.blake2b(public(self.uri).encode(), digest_size=8)
        return EMBEDDED if self.embedded else digest.hexdigest()

    @property
    def artifacts(self) -> Path | None:
        """Folder of artifacts; None if the server chooses it."""
        return self.database.parent / ARTIFACTS if self.database else None

    @property
    def links(self) -> str:
        """Prefix of links; of a database that ``vitlab ui`` does not serve, it begins with the command that does."""
        if self.database is None:
            return without_user(self.uri)
        return UI if self.embedded else f"mlflow server --backend-store-uri {shlex.quote(self.uri)}, then open {UI}"

    def is_reachable(self) -> bool:
        """Return True if the server answers within `PROBE_S` seconds; a database file is always reachable."""
        if not self.uri.startswith("http"):
            return True
        try:
            # Drop user and password, which only MLflow's client uses: urllib would read them as part of the host name.
            with urllib.request.urlopen(f"{without_user(self.uri)}/health", timeout=PROBE_S):
                return True
        except urllib.error.HTTPError as error:
            return error.code < 500  # a server that requires a password, or has no /health, is reachable
        except (OSError, http.client.HTTPException) as error:  # the latter where another protocol is spoken
            # MLflow may be configured to trust the certificate.
            return isinstance(getattr(error, "reason", error), ssl.SSLError)


def is_served(base: str, experiment: str, root: Path) -> bool:
    """Return True if the server at ``base`` shows an experiment of the database under an output folder."""
    address = f"{base}/api/2.0/mlflow/experiments/get-by-name?experiment_name={quote(experiment)}"
    with suppress(Exception), urllib.request.urlopen(address, timeout=PROBE_S) as answer:
        return Path(json.load(answer)["experiment"]["artifact_location"]).is_relative_to(root)
    return False  # another server may answer anything


def embedded_database(root: Path) -> Address:
    """Return the address of the database under an output folder."""
    file = root / "mlflow.db"
    return Address(f"sqlite:///{file}", file, embedded=True)


def parse_uri(uri: str | None, root: Path) -> Address:
    """Parse a tracking URI, which defaults to ``MLFLOW_TRACKING_URI`` and then to the database under ``root``.

    Raises:
        UserError: if MLflow does not support the URI.
    """
    address = uri or os.environ.get("MLFLOW_TRACKING_URI") or None
    if address is None:
        return embedded_database(root)
    where = "tracking URI" if uri else "MLFLOW_TRACKING_URI"
    scheme = address.partition(":")[0] if ":" in address else ""
    try:
        parts = urlsplit(address)
        _ = parts.port
        if "\0" in unquote(address):  # no path can have it
            raise ValueError("NUL")
    except ValueError as error:
        why = "the port is not a number up to 65535" if "port" in str(error).lower() else "it is not a URI"
        raise UserError(f"{where} '{public(address)}' cannot be read: {why}; write it as http://HOST:PORT.") from None
    if scheme == "file" or ":" not in address:
        folder = Path(unquote(parts.path) if scheme == "file" else address).resolve()
        raise UserError(
            f"{where} '{address}': MLflow refuses to write plain files; a database or a server is allowed. "
            f"Write sqlite:///{folder / 'mlflow.db'}, or http://HOST:PORT."
        )
    if scheme in SERVERS:
        if scheme != "databricks" and not parts.hostname:
            raise UserError(f"{where} '{public(address)}' names no host; write it as http://HOST:PORT.")
        return Address(address)
    if scheme.partition("+")[0] != "sqlite":
        allowed = ["sqlite", *SERVERS]
        raise UserError(
            f"{where} '{public(address)}' begins with '{scheme}'.{nearest(scheme, allowed)} Allowed: "
            f"{', '.join(allowed)}. Deliver to another database through its MLflow server."
        )
    driver, _, rest = address.partition(":///")
    path, mark, options = rest.partition("?")
    if not path or path == ":memory:":
        raise UserError(f"{where} '{address}' names no file; write it as sqlite:///FILE.")
    file = Path(path).resolve()
    return Address(f"{driver}:///{file}{mark}{options}", file)


def reason_to_confirm(uri: str, root: Path) -> str:
    """Return why the user must confirm a tracking address that only a study file names; empty if not.

    A file may come from other people, and a server receives the results and perhaps the user's credentials, so the user
    must name it: on the command line or in MLFLOW_TRACKING_URI.  A database in the output folder needs no confirmation.

    Args:
        uri: the URI in the file.
        root: the output folder.
    """
    if public(os.environ.get("MLFLOW_TRACKING_URI", "")).rstrip("/") == uri.rstrip("/"):
        return ""
    give = "give it as --tracking-uri, or set MLFLOW_TRACKING_URI"
    if MASK in uri:
        return f"the password of {uri} is not stored; {give}"
    try:
        database = parse_uri(uri, root).database
    except UserError as error:
        return str(error)
    if database is None:
        return f"results are sent only to servers that you name yourself, and only a study file names this one; {give}"
    if not database.is_relative_to(root):
        return f"a study file may write only to the output folder, and {database} is not in it; {give}"
    return ""


def describe_refusal(error: Exception, study: str) -> str:
    """Return what an error says of a server that refuses the user; empty for any other error."""
    status = getattr(getattr(error, "response", None), "status_code", 0)  # of a file
    return REFUSALS.get(getattr(error, "get_http_status_code", lambda: status)(), "").format(study)


def without_user(uri: str) -> str:
    """Return the URI without user and password."""
    parts = urlsplit(uri)
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path.rstrip("/"), "", ""))


# -- the client --------------------------------------------------------------------------------------------------------

SETTINGS = {
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    "MLFLOW_DISABLE_AGENT_HINT": "true",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    # A server that is started again is back within the pauses of three retries, 0, 4 and 8 seconds.  MLflow's own seven
    # would take four minutes without one.  Failed deliveries are retried.
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "3",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "60",
    # A pool of connections to a database file would keep a deleted file open as long as the process lives.
    "MLFLOW_SQLALCHEMYSTORE_POOLCLASS": "NullPool",
}
"""MLflow's settings as environment variables.  Values set by the user take precedence."""

ACTIVE = 1  #: MLflow's ``ViewType.ACTIVE_ONLY``
PAGE = 100
"""Runs per request, and in memory: a server needs seconds for a thousand."""

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


def set_mlflow_settings() -> None:
    """Set MLflow's settings for this process, until :func:`unset_mlflow_settings`.

    Call neither while another thread may copy the environment, as starting a worker does: a copy fails if the
    environment changes meanwhile.
    """
    for name, value in SETTINGS.items():
        if name not in os.environ:
            os.environ[name] = value
            _configured.add(name)


def unset_mlflow_settings() -> None:
    """Unset MLflow's settings that :func:`set_mlflow_settings` has set, for the user's own calls of MLflow."""
    for name in _configured:
        if os.environ.get(name) == SETTINGS[name]:  # otherwise the user has set it since
            del os.environ[name]
    _configured.clear()


_configured = set[str]()  # variables that the user had not set


@contextmanager
def mute_mlflow() -> Iterator[None]:
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
    """Return an ``MlflowClient`` for the address; a SQLite database is created if needed.

    Call within :func:`mute_mlflow`.

    Raises:
        ValueError: if the file that the user named is not an MLflow database.
    """
    from mlflow import MlflowClient

    if address.database is not None:
        if not address.embedded and (problem := why_not_mlflow_database(address.database)):
            raise ValueError(
                f"{address.database} is not an MLflow database: {problem}; name another file, new ones are created"
            )
        initialise_database(address.database)
    return MlflowClient(tracking_uri=address.uri, registry_uri=address.uri)


def initialise_database(database: Path) -> None:
    """Create MLflow's tables in a SQLite file unless it has them; a file that is no database is set aside.

    Call within :func:`mute_mlflow`.  MLflow does not guard against concurrent creation: two processes that start on one
    new file both fail and leave an unusable file.  So the database is created under a lock and a temporary name, then
    renamed.
    """
    if has_tables(database):
        return
    with hold_lock_with_timeout(database.with_name(f".{database.name}.lock"), wait_s=120):
        if has_tables(database):
            return
        if problem := why_not_mlflow_database(database):
            log.warning(
                "%s cannot be used (%s); it is now %s, and a new database is filled from the trials.",
                database,
                problem,
                set_aside(database).name,
            )
        new = database.with_name(f".{database.name}.new")  # only the holder of the lock writes it
        _delete_database(new)  # of a process that was killed in this place
        new.touch()  # with the rights that the user gives to new files; SQLite would not let a group write
        try:
            create_tables(new)
            _delete_database(database)  # SQLite would apply the files of an earlier database to the new one
            os.replace(new, database)
        finally:
            _delete_database(new)


def _delete_database(database: Path) -> None:
    """Delete a database and the files that SQLite keeps beside it."""
    for suffix in ("", "-journal", "-wal", "-shm"):
        database.with_name(database.name + suffix).unlink(missing_ok=True)


def create_tables(database: Path) -> None:
    """Have MLflow create its tables and the default experiment, which takes seconds."""
    from mlflow import MlflowClient

    uri = f"sqlite:///{database}"
    MlflowClient(tracking_uri=uri, registry_uri=uri)


def has_tables(database: Path) -> bool:
    """Return True if a SQLite file has MLflow's tables."""
    return not why_not_mlflow_database(database) and bool(_table_names(database))


def why_not_mlflow_database(database: Path) -> str:
    """Return why a file is not an MLflow database; empty if it is one, is empty, or does not exist."""
    if database.is_dir():
        return "it is a folder, not a file"
    try:
        tables = _table_names(database)
    except sqlite3.DatabaseError as error:
        return str(error)
    return "" if not tables or "experiments" in tables else "it holds another program's tables"


def open_to_read(database: Path) -> closing[sqlite3.Connection]:
    """Open a SQLite file, which is not changed, for the duration of a block."""
    return closing(sqlite3.connect(f"file:{quote(str(database))}?mode=ro", uri=True))


def _table_names(database: Path) -> set[str]:
    """Return the names of the tables of a SQLite file.

    Raises:
        sqlite3.DatabaseError: if the file is not a SQLite database.
    """
    if not database.exists():
        return set()
    try:
        with open_to_read(database) as connection:
            return {name for (name,) in connection.execute("select name from sqlite_master where type = 'table'")}
    except sqlite3.OperationalError:  # locked by a writer, or cannot be opened: MLflow reports the error
        return {"experiments"}


def ensure_experiment(
    client: MlflowClient, name: str, address: Address, folder: str, tags: Mapping[str, str]
) -> Experiment:
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


def iterate_runs(client: MlflowClient, experiment_id: str, selection: str = "") -> Iterator[Run]:
    """Yield all runs of an experiment that are not deleted, each once, the oldest first.

    Delete none before the last one.

    Args:
        client: MLflow's client.
        experiment_id: id of the experiment.
        selection: MLflow's filter.
    """
    order = ["attributes.start_time ASC"]
    seen = set[str]()
    for run in iterate_pages(lambda token: client.search_runs([experiment_id], selection, ACTIVE, PAGE, order, token)):
        if run.info.run_id not in seen:  # pages move down with every run that another client creates meanwhile
            seen.add(run.info.run_id)
            yield run


def iterate_pages(search: Callable[[str | None], Any]) -> Iterator[Any]:
    """Yield the entries of all pages of a search, which is called with the token of each page; None for the first."""
    token = None
    while True:
        page = search(token)
        yield from page
        token = page.token
        if not token:
            return
