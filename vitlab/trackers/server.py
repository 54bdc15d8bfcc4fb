"""MLflow's server on the database in an output folder, for ``vitlab ui``.

One worker and no job execution need two processes and 0.4 GB instead of ten and 1.8 GB, and avoid the delayed responses
of several workers.  The server and its children are one process group and are stopped together.
"""

import os
import signal
import socket
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from vitlab.errors import UserError, VitlabError
from vitlab.trackers import EMBEDDED, dashboard, read_deliveries
from vitlab.trackers.service import PROBE_S, Address, embedded_database, open_to_read

START_S = 120.0  #: time limit for the server's first response
STOP_S = 10.0  #: time between SIGTERM and SIGKILL

ENVIRONMENT = {
    "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "PYTHONSAFEPATH": "1",
}


@contextmanager
def running_server(root: Path, *, port: int, host: str = "127.0.0.1") -> Iterator[subprocess.Popen[bytes]]:
    """Run a server for the duration of the block, which begins when the server responds.

    Args:
        root: the output folder.
        port: of the server.
        host: interface to listen on.

    Raises:
        UserError: if the port is in use.
        VitlabError: if the server does not start.
    """
    own = host_for_url(host)
    # Any server occupies the port, whatever it speaks.
    with suppress(OSError), socket.create_connection((own.strip("[]"), port), PROBE_S):
        raise UserError(
            f"port {port} of {host} is used by another server. End it, or choose another port, such as "
            f"--port {port + 1}."
        )
    address, stored = Address(f"http://{own}:{port}"), embedded_database(root)
    command = [sys.executable, "-m", "mlflow", "server", "--host", host, "--port", str(port), "--workers", "1"]
    command += ["--backend-store-uri", stored.uri, "--artifacts-destination", str(stored.artifacts)]
    # Client variables of the environment concern the server that the user tracks to, not this one.
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MLFLOW_", "_MLFLOW_"))}
    # Python and uvicorn import from the current folder, and a results folder may come from other people.
    with tempfile.TemporaryFile() as log, tempfile.TemporaryDirectory(prefix="vitlab-ui-") as empty:
        server = subprocess.Popen(
            command,
            cwd=empty,
            env={**environment, **ENVIRONMENT},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C then reaches this process alone, which stops the group
        )
        try:
            until = time.monotonic() + START_S
            while not address.is_reachable():
                if server.poll() is not None or time.monotonic() > until:
                    log.seek(0)
                    last = log.read().decode(errors="replace").splitlines()[-15:]
                    raise VitlabError("\n".join(["MLflow's server did not start:", *last]))
                time.sleep(0.2)
            yield server
        finally:
            if os.name == "posix":
                with suppress(ProcessLookupError):
                    os.killpg(server.pid, signal.SIGTERM)
                    with suppress(subprocess.TimeoutExpired):
                        server.wait(STOP_S)
                    os.killpg(server.pid, signal.SIGKILL)  # children may outlive the server
            server.kill()
            server.wait()


def host_for_url(host: str) -> str:
    """Return the host by which this machine reaches the server, in the form used in an address."""
    if host in ("0.0.0.0", "::", ""):
        return "127.0.0.1"
    return f"[{host}]" if ":" in host else host


def study_links(root: Path) -> dict[str, str]:
    """Return where the studies under ``root`` are shown, the most recently planned first.

    A study in the database has two pages on its server: by its name, and by ``STUDY/arms`` the table of its arms.  Of
    another one, there is what its last delivery returned: an address that begins with ``http``, or a command.
    """
    ids: dict[str, str] = {}
    with suppress(sqlite3.Error), open_to_read(root / "mlflow.db") as database:  # else there are no pages
        ids |= database.execute("select name, experiment_id from experiments where lifecycle_stage = 'active'")
    links: dict[str, str] = {}
    for plan in sorted(root.glob("studies/*/plan.json"), key=lambda plan: plan.stat().st_mtime, reverse=True):
        name = plan.parent.name
        for page, view in ((name, dashboard.ARMS), (f"{name}/arms", dashboard.SUMMARY)):
            if page in ids:
                links[page] = dashboard.comparison_link(ids[page], view)
        for place, link in read_deliveries(plan.parent).items():
            if link and str(link).isprintable() and place != EMBEDDED and name not in ids:
                links[name] = str(link)
    return links
