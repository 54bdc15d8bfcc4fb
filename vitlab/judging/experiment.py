"""MLflow experiments of any program, read by MLflow's client; nothing is written to them.

A URI names the store and, after ``#``, the experiment: ``sqlite:///mlflow.db#NAME``, ``file:///FOLDER/mlruns#NAME``, or
the address of its page in the browser, ``http://HOST:5000/#/experiments/ID``.  Every store accepts both.
"""

from __future__ import annotations

import math
import re
import shlex
import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, unquote, urlsplit

import numpy as np

from vitlab.errors import MASK, UserError, first_sentence, format_count, nearest, public
from vitlab.judging.files import (
    UNSUCCESSFUL,
    Columns,
    Remarks,
    Table,
    infer_auxiliary_role,
    shortlist,
)
from vitlab.trackers import service
from vitlab.trackers.service import SERVERS, Address, parse_uri

if TYPE_CHECKING:
    import pandas as pd
    from mlflow import MlflowClient
    from mlflow.entities import Experiment, Run

SCHEMES = ("sqlite", "file", *SERVERS)
MAX_LISTED = 20  #: experiments that a message lists
UNENDED = {("RUNNING", "SCHEDULED"): "still running or never ended", ("KILLED",): "stopped before the end"}
"""Statuses of runs that are left out, and the reason."""
KINDS = ("params", "tags", "metrics")
STATUS = "mlflow.status"  #: column of the statuses of runs
_PAGE = re.compile(r"/experiments/([^/?]+).*")
REMEDIES = {
    "migrate-filestore": "this MLflow reads no folders: type mlflow migrate-filestore --source {folder} "
    "--target sqlite:///mlflow.db, and give sqlite:///mlflow.db#NAME",
    "revision identified": "a newer MLflow has written it: type pip install --upgrade mlflow",
}
"""A part of an error's message to what to do."""


def read_experiment(uri: str, columns: Columns) -> Table:
    """Read the runs of the experiment that a URI names, as a table of the columns that are named.

    They are parameters or tags, and the metric, whose last value counts.  Left out, with a note each, are runs that
    have not ended, or lack the arm or the seed, and runs with nested runs that have both.

    Raises:
        UserError: if the store cannot be read, the URI names none of its experiments, or no run has a column.
    """
    address, _, place = uri.partition("#")
    label = public(address).replace(f"{MASK}@", "").removesuffix("/")  # without user and password
    selection = parse_qs(place.partition("?")[2]).get("searchFilter", [""])[0]
    with _open_client(address, label) as client:
        entry = _find_experiment(client, place, label)
        runs = list(service.iterate_runs(client, entry.experiment_id, selection))
    notes = [f"Only runs that the filter of the address selects are judged: {selection}."] if selection else []
    return _runs_table(entry.name, f"{label}#{entry.name}", runs, notes, columns)


# -- stores -----------------------------------------------------------------------------------------------------------


@contextmanager
def _open_client(address: str, label: str) -> Iterator[MlflowClient]:
    """Open a client for the duration of the block; of a database file, on a copy."""
    with TemporaryDirectory() as folder:
        location = _require_reachable_address(address, label)
        if location.database is not None:
            location = _copy_database(location.database, Path(folder), label)
        service.set_mlflow_settings()
        try:
            with service.mute_mlflow():
                if location.database is not None:  # an older database is upgraded, which affects the copy alone
                    from mlflow.db import upgrade

                    upgrade.callback(location.uri)
                yield service.open_client(location)
        except UserError:
            raise
        except Exception as error:  # MLflow's client raises errors of several libraries
            raise UserError(f"{label} {_describe_read_failure(error, address)}") from None
        finally:
            service.unset_mlflow_settings()


def _require_reachable_address(address: str, label: str) -> Address:
    scheme = address.partition(":")[0].partition("+")[0]
    if scheme not in SCHEMES:
        raise UserError(
            f"{label} begins with '{scheme}'.{nearest(scheme, SCHEMES)} Allowed: {', '.join(SCHEMES)}; or a table. "
            "Another database is read through its MLflow server; give the server's address."
        )
    if scheme == "file":
        folder = address.removeprefix("file://")
        if not folder.startswith("/") or not Path(unquote(folder)).is_dir():
            raise UserError(f"{label} is no folder; write file:///FOLDER#NAME, with the whole path of MLflow's folder")
        return Address(address)
    location = parse_uri(address, Path.cwd())
    if not location.is_reachable():
        raise UserError(
            f"no answer from {label} within {service.PROBE_S:g} s; check the address, and that the server runs"
        )
    return location


def _copy_database(file: Path, folder: Path, label: str) -> Address:
    """Copy a SQLite file of MLflow to a folder, and return the address of the copy."""
    if not file.exists():
        raise UserError(f"{file} does not exist")
    if problem := service.why_not_mlflow_database(file) or ("" if service.has_tables(file) else "it is empty"):
        raise UserError(f"{file} is not an MLflow database: {problem}")
    copy = folder / "mlflow.db"
    try:
        with (
            service.open_to_read(file) as source,
            closing(sqlite3.connect(copy)) as target,
        ):
            source.backup(target)
    except sqlite3.Error as error:
        raise UserError(f"{label} cannot be read: {error}") from None
    return parse_uri(f"sqlite:///{copy}", folder)


def _describe_read_failure(error: Exception, address: str) -> str:
    """Return why a store cannot be read, without secrets, and what to do."""
    if service.describe_refusal(error, ""):
        return "refuses access; set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_TOKEN"
    text = str(error)
    for part, remedy in REMEDIES.items():
        if part in text:
            return f"cannot be read; {remedy.format(folder=shlex.quote(unquote(urlsplit(address).path)))}"
    access = "; set DATABRICKS_HOST and DATABRICKS_TOKEN, or name a profile of ~/.databrickscfg"
    return f"cannot be read: {public(first_sentence(error))}{access * address.startswith('databricks')}"


def _find_experiment(client: MlflowClient, place: str, label: str) -> Experiment:
    """Return the experiment that the part of a URI after ``#`` names."""
    from mlflow.exceptions import MlflowException

    page = _PAGE.fullmatch(place)
    wanted = place if page is None else page[1]
    experiment: Experiment | None = None
    with suppress(MlflowException):  # of an address without a name, or of an ID that does not exist
        experiment = (client.get_experiment_by_name if page is None else client.get_experiment)(wanted)
    if experiment is not None and experiment.lifecycle_stage != "deleted":
        return experiment
    present = client.search_experiments(max_results=MAX_LISTED, order_by=["experiment_id ASC"])
    names = [entry.name for entry in present]
    listing = f"Experiments: {'; '.join(names)}{' and more' if present.token else ''}." if names else "It has none."
    if not wanted:
        raise UserError(f"{label} is a store of experiments; name one, as in {label}#NAME. {listing}")
    if experiment is not None:
        raise UserError(f"{label}: experiment '{wanted}' is deleted; restore it in MLflow. {listing}")
    raise UserError(f"{label}: no experiment '{wanted}'.{nearest(wanted, names) if page is None else ''} {listing}")


# -- runs -------------------------------------------------------------------------------------------------------------


def _runs_table(name: str, source: str, runs: Sequence[Run], notes: list[str], named: Columns) -> Table:
    """Return the table of an experiment's runs, see :func:`read_experiment`."""
    import pandas as pd

    if not runs:
        raise UserError(f"{source} has no runs")
    data = [
        {f"{kind}.{key}": value for kind in KINDS for key, value in getattr(run.data, kind).items()} for run in runs
    ]
    frame = pd.DataFrame(data, index=[run.info.run_id for run in runs])
    remarks = Remarks(source)
    keys = {key.partition(".")[2] for key in frame.columns if not key.startswith("metrics.")}
    if named.arm is None and "arm" in keys:
        named = replace(named, arm="arm")
    seeds = [key for key in keys if infer_auxiliary_role(key) == "seed"]
    if named.seed is None and len(seeds) == 1:
        named = replace(named, seed=seeds[0])
    columns = {
        name: _param_or_tag_column(frame, name, keys, remarks)
        for name in filter(None, (named.arm, named.seed, named.block, named.baselines))
    }
    if named.arm is None:
        remarks.add_mistakes(f"name the parameter or tag of the arm with --arm. {_describe_varied_params(frame)}")
    metric = named.metric
    values = frame.get(f"metrics.{metric}")
    if values is None:
        metrics = sorted(key.removeprefix("metrics.") for key in frame.columns if key.startswith("metrics."))
        listing = f"Metrics: {', '.join(metrics)}." if metrics else "Its runs have no metrics."
        fault = f"no metric '{metric}'.{nearest(metric, metrics)}" if metric else "--metric is missing."
        remarks.add_mistakes(f"{fault} {listing}")
    remarks.raise_if_table_has_mistakes()
    names = pd.Series([run.info.run_name or run.info.run_id for run in runs], frame.index)
    status = pd.Series([run.info.status for run in runs], frame.index)
    is_judged = pd.Series(True, frame.index)

    def leave_out(reason: str, is_out: pd.Series[Any], prefix: str = "") -> None:
        if len(out := names[is_judged & is_out]):
            notes.append(f"{prefix}{format_count(len(out), 'run')} left out, {reason}: {shortlist([*out])}.")
        is_judged[is_out] = False

    if "tags.vitlab.kind" in frame:
        leave_out("no trial of an arm", ~frame["tags.vitlab.kind"].isin(["trial", np.nan]))
    for statuses, reason in UNENDED.items():
        leave_out(reason, status.isin(statuses), "Warning: ")
    for column in filter(None, (named.arm, named.seed)):
        leave_out(f"without '{column}'", columns[column].isna())
    parents = frame[is_judged].get("tags.mlflow.parentRunId", ())
    leave_out("in favour of nested runs", names.index.to_series().isin(parents))
    if not is_judged.any():
        raise UserError(f"{source}: no run can be judged. {' '.join(notes)}")
    # A metric that is NaN has diverged; a run without it has failed.
    is_nan = pd.Series([math.isnan(run.data.metrics.get(metric, 0.0)) for run in runs], frame.index)
    taken = {each.rpartition(".")[2] for each in columns} | UNSUCCESSFUL  # the latter would be read as statuses
    params = {
        param: frame[key]
        for key in frame.columns
        if key.startswith("params.")
        and infer_auxiliary_role(key) in (None, "seed")
        and (param := key.removeprefix("params.")).casefold() not in taken
    }
    rows = pd.DataFrame({**params, **columns, metric: values, STATUS: status.mask(is_nan, "diverged")})[is_judged]
    return Table(name, source, rows.reset_index(drop=True), tuple(notes), [*names[is_judged]])


def _param_or_tag_column(frame: pd.DataFrame, name: str, names: Iterable[str], remarks: Remarks) -> pd.Series[Any]:
    """Return a parameter or tag of every run; ``params.`` or ``tags.`` before its name says which."""
    columns = [frame[key].mask(frame[key] == "") for key in (f"params.{name}", f"tags.{name}", name) if key in frame]
    if not columns:
        remarks.add_mistakes(f"no parameter or tag '{name}'.{nearest(name, names)} {_describe_varied_params(frame)}")
        return frame.index.to_series()
    first, last = columns[0], columns[-1]
    if (first.notna() & last.notna() & (first != last)).any():
        remarks.add_mistakes(
            f"'{name}' is a parameter and a tag, with different values; write params.{name} or tags.{name}"
        )
    return first.fillna(last)


def _describe_varied_params(frame: pd.DataFrame) -> str:
    """Return a sentence on the parameters and tags that differ between runs, without those that MLflow itself sets."""
    keys = [key for key in frame.columns if not key.startswith(("metrics.", "tags.mlflow."))]
    names = sorted({key.partition(".")[2] for key in keys if frame[key].nunique() > 1})
    return f"Different between runs: {', '.join(names)}." if names else "No parameter or tag differs between runs."
