"""MLflow's server on an output folder, with economical settings, for ``vitlab ui``.

One worker and no job execution need two processes and 0.4 GB instead of ten and 1.8 GB, and avoid the delayed responses
of several workers.  The server and its children are one process group and are stopped together.
"""

from __future__ import annotations

import ipaddress
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from vitlab.errors import UserError, VitlabError, nearest
from vitlab.store.files import mapping, open_in_place, read_json
from vitlab.trackers import dashboard, service
from vitlab.trackers.address import artifact_folder, comparison_link, database_file, embedded

START_S = 120.0  #: time limit for the server's first response
STOP_S = 10.0  #: time between SIGTERM and SIGKILL

ENVIRONMENT = {
    "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "PYTHONSAFEPATH": "1",
}


def serve(
    root: Path,
    study: str | None = None,
    port: int = 5000,
    host: str = "127.0.0.1",
    show: Callable[[str], object] = lambda address: None,
) -> None:
    """Run the server on the results in ``root`` until Ctrl-C or SIGTERM, and show a study's page.

    Args:
        root: the output folder.
        study: the study whose page is shown; None for the one planned last.
        port: the port to listen on.
        host: the interface to listen on; the default is reachable from this machine only.
        show: called with the address of the study's page once the server answers.

    Raises:
        UserError: if the folder holds no results, the study has not been delivered, or the port is in use.
        VitlabError: if the server does not start.
    """
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.default_int_handler)
    base = f"http://{_client_host(host)}:{port}"
    pages = links(root, base)
    names = [name for name, _ in pages]
    if study is not None and study not in names:  # before a database is made
        hint = f"{nearest(study, names)} Studies there: {', '.join(sorted(names))}." if names else ""
        raise UserError(f"study '{study}' has not been delivered to MLflow in {root}.{hint}")
    with suppress(KeyboardInterrupt), running(root, port=port, host=host) as server:
        for name, link in sorted(pages, key=lambda page: page[0] != study):
            print(f"{name}   {link}", flush=True)
        if not pages:
            print(f"No study in {root} has been delivered to MLflow; 'vitlab sync' delivers them.", flush=True)
        if not _is_loopback(host):
            print("No authentication: anyone who can reach this port can read and delete results.", flush=True)
        print(f"MLflow runs at {base}; Ctrl-C stops it.", flush=True)
        if pages:
            show(dict(pages)[study if study is not None else names[0]])
        try:
            code = server.wait()
        except KeyboardInterrupt:
            print("stopping MLflow", file=sys.stderr, flush=True)
            raise
        raise VitlabError(f"MLflow's server ended by itself, with code {code}; see {_log(root)}")


@contextmanager
def running(root: Path, *, port: int, host: str = "127.0.0.1") -> Iterator[subprocess.Popen[bytes]]:
    """Run a server for the duration of the block, which begins when the server responds.

    Raises:
        UserError: see :func:`serve`.
        VitlabError: if the server does not start.
    """
    root = root.resolve()
    if not root.is_dir():
        raise UserError(f"no results in {root}: 'vitlab run' writes them, --out says where.")
    _require_free_port(port, host)
    database = database_file(root)
    service.configure(embedded(root))
    with service.quiet():
        service.initialise(database)
    command = [sys.executable, "-m", "mlflow", "server", "--host", host, "--port", str(port), "--workers", "1"]
    command += ["--backend-store-uri", f"sqlite:///{database}", "--artifacts-destination", str(artifact_folder(root))]
    # Client variables of the environment concern the server that the user tracks to, not this one.
    environment = {name: value for name, value in os.environ.items() if _is_server_variable(name)}
    # Python and uvicorn import from the current folder, and a results folder may come from other people.
    with tempfile.TemporaryDirectory(prefix="vitlab-ui-") as folder:
        with open(open_in_place(_log(root), os.O_WRONLY | os.O_TRUNC), "wb") as log:
            server = subprocess.Popen(
                command,
                cwd=folder,
                env={**environment, **ENVIRONMENT},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C then reaches this process alone, which stops the group
            )
        try:
            _wait_until_ready(server, f"http://{_client_host(host)}:{port}/health", _log(root))
            yield server
        finally:
            _stop(server)


def links(root: Path, base: str) -> list[tuple[str, str]]:
    """Return name and page of every study in the database under ``root``, the most recently planned first."""
    pages = []
    for file in sorted(root.glob("studies/*/mlflow-offsets.json"), key=_planned_at, reverse=True):
        delivered = (read_json(file, mapping) or {}).get("embedded", {})
        if experiment := _experiment(delivered):
            pages.append((file.parent.name, comparison_link(base, experiment, dashboard.ARMS)))
    return pages


def _experiment(delivered: Any) -> str:
    """Return the id of a study's experiment from the record of its deliveries; empty if there is none."""
    with suppress(AttributeError, TypeError, LookupError):
        if "experiment" in delivered:  # as earlier versions have written it
            return str(delivered["experiment"])
        return next((str(state["mark"]["experiment"]) for state in delivered.values()), "")
    return ""


def _planned_at(offsets: Path) -> float:
    """Return the time of the last plan of an offsets file's study, in seconds since 1970."""
    plan = offsets.with_name("plan.json")
    return plan.stat().st_mtime if plan.exists() else 0.0


def _is_server_variable(name: str) -> bool:
    return not name.startswith(("MLFLOW_", "_MLFLOW_")) or name.startswith("MLFLOW_SERVER_")


def _log(root: Path) -> Path:
    return root / "mlflow-server.log"


def _client_host(host: str) -> str:
    """Return the host by which this machine reaches the server, in the form used in an address."""
    if host in ("0.0.0.0", "::", ""):
        return "127.0.0.1"
    return f"[{host}]" if ":" in host else host


def _is_loopback(host: str) -> bool:
    """Return True if a host is reachable from this machine only."""
    with suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"


def _require_free_port(port: int, host: str) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # allows a port that was closed a moment ago
        try:
            probe.bind((host, port))
        except socket.gaierror:
            raise UserError(
                f"'{host}' is not an address of this machine; write 127.0.0.1, or 0.0.0.0 for all."
            ) from None
        except OSError as error:
            raise UserError(
                f"port {port} of {host} cannot be used ({error.strerror}): another server, perhaps MLflow's, is there; "
                f"end it, or choose another port, such as --port {port + 1}."
            ) from None


def _wait_until_ready(server: subprocess.Popen[bytes], address: str, log: Path) -> None:
    until = time.monotonic() + START_S
    while time.monotonic() < until:
        if server.poll() is not None:
            raise VitlabError(f"MLflow's server did not start:\n{_tail(log)}")
        with suppress(OSError), urllib.request.urlopen(address, timeout=2):
            return
        time.sleep(0.2)
    raise VitlabError(f"MLflow's server did not answer within {START_S:g} s:\n{_tail(log)}")


def _tail(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-15:])


def _stop(server: subprocess.Popen[bytes]) -> None:
    """Stop the whole process group, because children of MLflow's server may outlive it."""
    _signal(server, signal.SIGTERM)
    until = time.monotonic() + STOP_S
    while time.monotonic() < until and _signal(server, 0):
        server.poll()  # reaps the leader, so that the group can become empty
        time.sleep(0.05)
    _signal(server, signal.SIGKILL)
    server.wait()


def _signal(server: subprocess.Popen[bytes], number: int) -> bool:
    """Send a signal to the process group and return True if the group still has processes."""
    try:
        os.killpg(server.pid, number)
    except ProcessLookupError:
        return False
    return True
