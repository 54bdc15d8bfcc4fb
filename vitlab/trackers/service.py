"""MLflow's client: opened once, quietly, with few retries, and never on a database that somebody else is making."""

from __future__ import annotations

import logging
import os
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from vitlab.store import Busy, hold, temporary
from vitlab.trackers.address import Address

SETTINGS = {
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    "MLFLOW_DISABLE_AGENT_HINT": "true",
    "MLFLOW_DISABLE_TELEMETRY": "true",
}
"""MLflow's settings around our calls, and around no other.  What the user has set stays."""

PATIENT = {
    # With MLflow's own, one call to a server that is away takes four minutes to fail.
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
    "MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR": "1",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
}
HASTY = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0", "MLFLOW_HTTP_REQUEST_TIMEOUT": "3"}
"""While trials are running, and wait for whoever delivers: what fails is tried again later anyway."""

PAGE = 100
"""Runs asked for at once: a server needs seconds for a thousand, and HASTY would not wait for them."""

LOGGERS = {"mlflow": logging.WARNING, "alembic": logging.WARNING, "urllib3": logging.ERROR}


@contextmanager
def quiet(*, patient: bool = True) -> Iterator[None]:
    """MLflow as vitlab uses it: settings applied, news of its database and deprecations of its libraries muted."""
    with _environment({**SETTINGS, **(PATIENT if patient else HASTY)}), warnings.catch_warnings():
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


@contextmanager
def _environment(settings: Mapping[str, str]) -> Iterator[None]:
    """Environment variables for the block, but for those that the user has set."""
    added = [name for name in settings if name not in os.environ]
    os.environ.update({name: settings[name] for name in added})
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)


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
    """An ``MlflowClient`` on the address; a SQLite database that is not there is made first.  Call within `quiet`."""
    from mlflow import MlflowClient

    settings = {}
    if address.database is not None:
        initialise(address.database)
        # MLflow keeps a file open as long as the process lives; one that was deleted and made anew would be another.
        settings["MLFLOW_SQLALCHEMYSTORE_POOLCLASS"] = "NullPool"
    with _environment(settings):
        return MlflowClient(tracking_uri=address.uri, registry_uri=address.uri)


def initialise(database: Path) -> None:
    """Make MLflow's tables in a SQLite file that is not there yet.  Call within `quiet`.

    MLflow does not guard this itself: of two processes that begin on one new file both fail and leave a file that no
    third can use.  So one makes it, under a lock and another name, and it is there whole or not at all.
    """
    if database.exists():
        return
    with lock(database.with_name(f".{database.name}.lock"), wait_s=120):
        if database.exists():
            return
        from mlflow import MlflowClient

        # A name that no process has had before: MLflow takes one that it has opened for made.
        made = temporary(database)
        uri = f"sqlite:///{made}"
        MlflowClient(tracking_uri=uri, registry_uri=uri)
        os.replace(made, database)


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
