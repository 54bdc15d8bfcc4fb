"""Where MLflow is: a database under the output folder, a database elsewhere, or a server."""

from __future__ import annotations

import hashlib
import netrc
import os
import re
import socket
import ssl
import urllib.error
import urllib.request
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit, urlunsplit

from vitlab.errors import UserError, nearest
from vitlab.trackers.dashboard import comparison_query

PORTS = {"postgresql": 5432, "mysql": 3306, "mssql": 1433}
DATABASES = ("sqlite", *PORTS)
SERVERS = ("http", "https", "databricks")
UI = "http://127.0.0.1:5000"
"""Where ``vitlab ui`` shows a database unless told otherwise."""

PROBE_S = 2.0
MASK = "***"  #: in place of what :func:`public` hides


@dataclass(frozen=True)
class Address:
    """One place to deliver to."""

    uri: str  #: as MLflow's client takes it
    name: str  #: under which the study remembers what it has delivered there; holds no password
    database: Path | None  #: the file, where it is SQLite
    artifacts: Path | None  #: folder of artifacts; None where a server decides
    links: str  #: what links begin with
    embedded: bool  #: under the output folder, for vitlab alone

    @property
    def said(self) -> str:
        """The URI as it may be said: without secrets."""
        return public(self.uri)

    def awake(self) -> bool:
        """Whether a server answers, or a database server listens; a file always does.  Takes two seconds at most."""
        parts = urlsplit(self.uri)
        port = PORTS.get(parts.scheme.partition("+")[0])
        if port is not None and parts.hostname:  # MLflow itself would try for minutes
            with suppress(OSError), socket.create_connection((parts.hostname, parts.port or port), PROBE_S):
                return True
            return False
        if parts.scheme not in ("http", "https"):
            return True
        try:
            # A name and a password in the address are for MLflow's client; urllib would take them for the host's name.
            with urllib.request.urlopen(f"{_without_user(self.uri)}/health", timeout=PROBE_S):
                return True
        except urllib.error.HTTPError as error:
            return error.code < 500  # whoever asks for a password, or knows no /health, is there
        except urllib.error.URLError as error:
            return isinstance(error.reason, ssl.SSLError)  # a certificate that MLflow may be told to trust
        except OSError:
            return False


def comparison_link(base: str, experiment: str, view: str) -> str:
    """The comparison page of an experiment, opened with a saved view."""
    return f"{base}/#/experiments/{experiment}/runs?{comparison_query(view)}"


def public(text: str) -> str:
    """Text without what must not be said: names, passwords and tokens of the addresses in it."""
    return re.sub(_SECRET, rf"\1{MASK}", re.sub(_USER, rf"\1{MASK}@", text))


_USER = re.compile(r"(\w://)[^\s'\"]*@")  # up to the last @, for a password may hold what should have been escaped
_SECRET = re.compile(r"([?&;](?:\w*(?:password|passwd|pwd|token|secret|key))=)[^&;#\s'\"]+", re.IGNORECASE)


def database_file(root: Path) -> Path:
    """The database under an output folder."""
    return root / "mlflow.db"


def artifact_folder(root: Path) -> Path:
    """The artifacts under an output folder."""
    return root / "mlartifacts"


def embedded(root: Path) -> Address:
    """Return the address of the database under an output folder."""
    file = database_file(root)
    return Address(f"sqlite:///{file}", "embedded", file, artifact_folder(root), UI, embedded=True)


def locate(uri: str | None, root: Path) -> Address:
    """Read a tracking URI; without one, ``MLFLOW_TRACKING_URI``; without that, the database under ``root``.

    Raises:
        UserError: for what MLflow cannot, or can no longer, deliver to.
    """
    found = uri or os.environ.get("MLFLOW_TRACKING_URI") or None
    if found is None:
        return embedded(root)
    where = "tracking URI" if uri else "MLFLOW_TRACKING_URI"
    scheme = found.partition(":")[0] if ":" in found else ""
    try:
        parts = urlsplit(found)
        _ = parts.port
    except ValueError as error:
        why = "the port is no number up to 65535" if "port" in str(error).lower() else "it is no URI"
        raise UserError(f"{where} '{public(found)}' cannot be read: {why}; write it as http://HOST:PORT.") from None
    if scheme == "file" or ":" not in found:
        folder = Path(unquote(parts.path) if scheme == "file" else found).resolve()
        raise UserError(
            f"{where} '{found}': MLflow has given up its stores of plain files and refuses to write them; "
            f"name a database, such as sqlite:///{folder / 'mlflow.db'}, or a server."
        )
    if scheme == "databricks":
        return Address(found, _name(found), None, None, found, embedded=False)
    if scheme in SERVERS:
        if not parts.hostname:
            raise UserError(f"{where} '{public(found)}' names no host; write it as http://HOST:PORT.")
        return Address(found, _name(found), None, None, _without_user(found), embedded=False)
    if scheme.partition("+")[0] not in DATABASES:
        known = [*DATABASES, *SERVERS]
        raise UserError(
            f"{where} '{public(found)}' begins with '{scheme}'.{nearest(scheme, known)} Allowed: {', '.join(known)}."
        )
    if scheme.partition("+")[0] == "sqlite":
        driver, _, rest = found.partition(":///")
        path, mark, options = rest.partition("?")
        if not path or path == ":memory:":
            raise UserError(f"{where} '{found}' names no file; write it as sqlite:///FILE.")
        file = Path(path).resolve()
        uri = f"{driver}:///{file}{mark}{options}"
        return Address(uri, _name(uri), file, artifact_folder(file.parent), UI, embedded=False)
    return Address(found, _name(found), None, artifact_folder(root), UI, embedded=False)


def unconfirmed(uri: str, root: Path) -> str:
    """Return why results are not delivered to an address that only a file names; empty where they are.

    A file may come from others.  So a server, which is sent the results and the user's credentials, is named by the
    user: on the command line or in MLFLOW_TRACKING_URI.  A database in the output folder needs no word of the user,
    nor a server on this machine while there are no credentials that MLflow would send to it.

    Args:
        uri: as the file names it.
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
    if database is not None:
        if database.is_relative_to(root):
            return ""
        return f"a study file writes nowhere but to the output folder, and {database} is not in it; {give}"
    if not _LOOPBACK.fullmatch(uri):
        return f"a study file has results sent to no server that you have not named yourself; {give}"
    if found := _credentials(urlsplit(uri).hostname or ""):
        return f"MLflow would send it what {found} holds, and only a study file names this server; {give}"
    return ""


_LOOPBACK = re.compile(r"https?://(localhost|127(\.\d{1,3}){3}|\[::1\])(:\d+)?(/[\w./-]*)?")

_CREDENTIALS = (
    *(f"MLFLOW_TRACKING_{name}" for name in ("USERNAME", "PASSWORD", "TOKEN", "AUTH", "AWS_SIGV4", "CLIENT_CERT_PATH")),
    *("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_PROFILE"),
)


def _credentials(host: str) -> str:
    """Return where MLflow would find credentials for a host: a variable or a file; empty for nowhere."""
    found = [name for name in _CREDENTIALS if os.environ.get(name)]
    found += [name for name in ("~/.mlflow/credentials",) if Path(name).expanduser().exists()]
    for name in (os.environ.get("NETRC") or "~/.netrc", "~/_netrc"):  # as requests reads them
        with suppress(OSError, netrc.NetrcParseError):
            if netrc.netrc(str(Path(name).expanduser())).authenticators(host):
                found.append(name)
    return found[0] if found else ""


def _name(uri: str) -> str:
    return hashlib.blake2b(public(uri).encode(), digest_size=8).hexdigest()


def _without_user(uri: str) -> str:
    """The URI without user and password."""
    parts = urlsplit(uri)
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path.rstrip("/"), "", ""))
