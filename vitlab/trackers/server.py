"""``vitlab ui``: MLflow's server on an output folder, with its cheap settings.

One worker and no job execution: two processes and 0.4 GB instead of ten and 1.8 GB, and no delayed answers, which
several workers have.  The server and everything it starts are one process group, and end together.
"""

from __future__ import annotations

import ipaddress
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from vitlab.errors import UserError, VitlabError, nearest
from vitlab.trackers import dashboard, service
from vitlab.trackers.address import artifact_folder, comparison_link, database_file, embedded
from vitlab.trackers.cursor import Offsets

START_S = 120.0  #: how long a server may take until it answers
STOP_S = 10.0  #: between asking it to end and ending it

ENVIRONMENT = {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", "MLFLOW_DISABLE_TELEMETRY": "true"}


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
        study: the study whose page is shown; None for the one that was planned last.
        port: to listen on.
        host: the interface to listen on; the default is reachable from this machine only.
        show: called with the address of the study's page once the server answers.

    Raises:
        UserError: if there are no results there, no such study has been delivered, or the port is taken.
        VitlabError: if the server does not start.
    """
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.default_int_handler)
    with suppress(KeyboardInterrupt), running(root, port=port, host=host) as server:
        base = f"http://{_reachable(host)}:{port}"
        pages = links(root, base)
        names = [name for name, _ in pages]
        if study is not None and study not in names:
            known = f"{nearest(study, names)} Studies there: {', '.join(sorted(names))}." if names else ""
            raise UserError(f"study '{study}' has not been delivered to MLflow in {root}.{known}")
        for name, link in sorted(pages, key=lambda page: page[0] != study):
            print(f"{name}   {link}", flush=True)
        if not pages:
            print(f"No study in {root} has been delivered to MLflow; 'vitlab sync' delivers them.", flush=True)
        if not _only_here(host):
            print("No authentication: anyone who can reach this port can read and delete results.", flush=True)
        print(f"MLflow runs at {base}; Ctrl-C stops it.", flush=True)
        if pages:
            show(dict(pages)[study if study is not None else names[0]])
        code = server.wait()
        raise VitlabError(f"MLflow's server ended by itself, with code {code}; see {_log(root)}")


@contextmanager
def running(root: Path, *, port: int, host: str = "127.0.0.1") -> Iterator[subprocess.Popen[bytes]]:
    """A server that answers, for as long as the block lasts.

    Raises:
        UserError: as :func:`serve`.
        VitlabError: if it does not start.
    """
    root = root.resolve()
    if not root.is_dir():
        raise UserError(f"no results in {root}: 'vitlab run' writes them, --out says where.")
    _need_free(port, host)
    database = database_file(root)
    service.configure(embedded(root))
    with service.quiet():
        service.initialise(database)
    command = [sys.executable, "-m", "mlflow", "server", "--host", host, "--port", str(port), "--workers", "1"]
    command += ["--backend-store-uri", f"sqlite:///{database}", "--artifacts-destination", str(artifact_folder(root))]
    # What the environment says of a client is of the server the user tracks to, not of this one.
    around = {name: value for name, value in os.environ.items() if _is_of_servers(name)}
    with open(_log(root), "wb") as log:
        server = subprocess.Popen(
            command,
            cwd=root,
            env={**around, **ENVIRONMENT},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # a process group of its own: Ctrl-C reaches us alone, and we end all of it
        )
    try:
        _until_it_answers(server, f"http://{_reachable(host)}:{port}/health", _log(root))
        yield server
    finally:
        _end(server)


def links(root: Path, base: str) -> list[tuple[str, str]]:
    """Return name and page of every study that the database under ``root`` holds, the one planned last first."""
    pages = []
    for file in sorted(root.glob("studies/*/mlflow-offsets.json"), key=_planned, reverse=True):
        experiment = Offsets.read(file, "embedded").experiment
        if experiment:
            pages.append((file.parent.name, comparison_link(base, experiment, dashboard.ARMS)))
    return pages


def _planned(offsets: Path) -> float:
    """Return when the study of an offsets file was planned last, in seconds since 1970."""
    plan = offsets.with_name("plan.json")
    return plan.stat().st_mtime if plan.exists() else 0.0


# -- how it is done ---------------------------------------------------------------------------------------------------


def _is_of_servers(name: str) -> bool:
    return not name.startswith(("MLFLOW_", "_MLFLOW_")) or name.startswith("MLFLOW_SERVER_")


def _log(root: Path) -> Path:
    return root / "mlflow-server.log"


def _reachable(host: str) -> str:
    """A host that this machine reaches the server by, as it stands in an address."""
    if host in ("0.0.0.0", "::", ""):
        return "127.0.0.1"
    return f"[{host}]" if ":" in host else host


def _only_here(host: str) -> bool:
    """Whether a host can be reached from this machine alone."""
    with suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"


def _need_free(port: int, host: str) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a port that was only just left is free
        try:
            probe.bind((host, port))
        except socket.gaierror:
            raise UserError(f"'{host}' is no address of this machine; write 127.0.0.1, or 0.0.0.0 for all.") from None
        except OSError as error:
            raise UserError(
                f"port {port} of {host} cannot be used ({error.strerror}): another server, perhaps MLflow's, is there; "
                f"end it, or choose another port, such as --port {port + 1}."
            ) from None


def _until_it_answers(server: subprocess.Popen[bytes], address: str, log: Path) -> None:
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


def _end(server: subprocess.Popen[bytes]) -> None:
    """End the whole process group: children of MLflow's server may outlive it."""
    _signal(server, signal.SIGTERM)
    until = time.monotonic() + STOP_S
    while time.monotonic() < until and _signal(server, 0):
        server.poll()  # takes note of the leader's end, so that the group can become empty
        time.sleep(0.05)
    _signal(server, signal.SIGKILL)
    server.wait()


def _signal(server: subprocess.Popen[bytes], number: int) -> bool:
    """Whether there was somebody left in the group to take the signal."""
    try:
        os.killpg(server.pid, number)
    except ProcessLookupError:
        return False
    return True
