"""MLflow's address: a database under the output folder, a database elsewhere, or a server."""

from __future__ import annotations

import hashlib
import http.client
import os
import socket
import ssl
import urllib.error
import urllib.request
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit, urlunsplit

from vitlab.errors import UserError, nearest
from vitlab.spec.changes import MASK, public
from vitlab.store.files import mapping, read_json

PORTS = {"postgresql": 5432, "mysql": 3306, "mssql": 1433}
DATABASES = ("sqlite", *PORTS)
SERVERS = ("http", "https", "databricks")
UI = "http://127.0.0.1:5000"
"""Default address of ``vitlab ui`` for a database."""

PROBE_S = 2.0
PAGES = "mlflow-pages.json"
"""File in a study's folder with the ids of its experiments, by destination."""


@dataclass(frozen=True)
class Address:
    """One destination of deliveries."""

    uri: str  #: in the form that MLflow's client accepts
    name: str  #: key of this address in the study's delivery record; holds no password
    database: Path | None  #: the file, where it is SQLite
    artifacts: Path | None  #: folder of artifacts; None if the server chooses it
    links: str  #: prefix of links
    embedded: bool  #: True for the database under the output folder

    @property
    def public_uri(self) -> str:
        """The URI without secrets."""
        return public(self.uri)

    def is_reachable(self) -> bool:
        """Return True if the server answers within `PROBE_S` seconds; a database file is always reachable."""
        parts = urlsplit(self.uri)
        port = PORTS.get(parts.scheme.partition("+")[0])
        if port is not None and parts.hostname:  # MLflow itself would retry for minutes
            with suppress(OSError), socket.create_connection((parts.hostname, parts.port or port), PROBE_S):
                return True
            return False
        if parts.scheme not in ("http", "https"):
            return True
        try:
            # Drop user and password, which only MLflow's client uses: urllib would read them as part of the host name.
            with urllib.request.urlopen(f"{without_user(self.uri)}/health", timeout=PROBE_S):
                return True
        except urllib.error.HTTPError as error:
            return error.code < 500  # a server that requires a password, or has no /health, is reachable
        except urllib.error.URLError as error:
            return isinstance(error.reason, ssl.SSLError)  # MLflow may be configured to trust the certificate
        except (OSError, http.client.HTTPException):  # the latter where another protocol is spoken
            return False


def comparison_query(view: str) -> str:
    """Return the query string that opens the comparison page with a saved view."""
    return f"workflowType=machine_learning&compareRunsMode=CHART&viewStateShareKey={view}"


def comparison_link(base: str, experiment: str, view: str) -> str:
    """Return the address of an experiment's comparison page, opened with a saved view."""
    return f"{base}/#/experiments/{experiment}/runs?{comparison_query(view)}"


def pages(folder: Path, place: str) -> dict[str, str]:
    """Return the ids of a study's experiments at a destination: ``study``, and ``arms`` once there is a report.

    Args:
        folder: the study's folder.
        place: name of the destination.
    """
    ids = (read_json(folder / PAGES, mapping) or {}).get(place)
    return {str(name): str(experiment) for name, experiment in ids.items()} if isinstance(ids, dict) else {}


def database_file(root: Path) -> Path:
    """Return the path of the database under an output folder."""
    return root / "mlflow.db"


def artifact_folder(root: Path) -> Path:
    """Return the path of the artifacts under an output folder."""
    return root / "mlartifacts"


def embedded(root: Path) -> Address:
    """Return the address of the database under an output folder."""
    file = database_file(root)
    return Address(f"sqlite:///{file}", "embedded", file, artifact_folder(root), UI, embedded=True)


def locate(uri: str | None, root: Path) -> Address:
    """Parse a tracking URI, which defaults to ``MLFLOW_TRACKING_URI`` and then to the database under ``root``.

    Raises:
        UserError: if MLflow does not support the URI.
    """
    address = uri or os.environ.get("MLFLOW_TRACKING_URI") or None
    if address is None:
        return embedded(root)
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
    if scheme == "databricks":
        return Address(address, _name(address), None, None, address, embedded=False)
    if scheme in SERVERS:
        if not parts.hostname:
            raise UserError(f"{where} '{public(address)}' names no host; write it as http://HOST:PORT.")
        return Address(address, _name(address), None, None, without_user(address), embedded=False)
    if scheme.partition("+")[0] not in DATABASES:
        allowed = [*DATABASES, *SERVERS]
        raise UserError(
            f"{where} '{public(address)}' begins with '{scheme}'.{nearest(scheme, allowed)} "
            f"Allowed: {', '.join(allowed)}."
        )
    if scheme.partition("+")[0] == "sqlite":
        driver, _, rest = address.partition(":///")
        path, mark, options = rest.partition("?")
        if not path or path == ":memory:":
            raise UserError(f"{where} '{address}' names no file; write it as sqlite:///FILE.")
        file = Path(path).resolve()
        uri = f"{driver}:///{file}{mark}{options}"
        return Address(uri, _name(uri), file, artifact_folder(file.parent), UI, embedded=False)
    return Address(address, _name(address), None, artifact_folder(root), UI, embedded=False)


def unconfirmed(uri: str, root: Path) -> str:
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
        database = locate(uri, root).database
    except UserError as error:
        return str(error)
    if database is None:
        return f"results are sent only to servers that you name yourself, and only a study file names this one; {give}"
    if not database.is_relative_to(root):
        return f"a study file may write only to the output folder, and {database} is not in it; {give}"
    return ""


def _name(uri: str) -> str:
    return hashlib.blake2b(public(uri).encode(), digest_size=8).hexdigest()


def without_user(uri: str) -> str:
    """Return the URI without user and password."""
    parts = urlsplit(uri)
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path.rstrip("/"), "", ""))
