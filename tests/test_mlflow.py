"""Tests that MLflow stores every point of every journal exactly once, and never blocks a trial.

Journals are read line by line as JSON, and MLflow by its own client or from its database, so that nothing of vitlab's
is asked what should be there.
"""

from __future__ import annotations

import base64
import functools
import html
import itertools
import json
import math
import os
import re
import shutil
import signal
import socket
import sqlite3
import stat
import statistics
import subprocess
import sys
import threading
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock
from urllib.parse import parse_qs, unquote

import mlflow.artifacts
import mlflow.store.db.utils
import numpy as np
import pandas as pd
import pytest
import torch
import warm
import yaml
from benchmarks import tracking
from click.testing import CliRunner
from job_helpers import run_trial
from matplotlib import colormaps
from mlflow import MlflowClient
from mlflow.store.entities import PagedList
from PIL import Image
from urllib3.connection import HTTPConnection

import vitlab
from vitlab import cli
from vitlab.errors import UserError
from vitlab.lab import plan_study
from vitlab.planning.values import Arm, Plan
from vitlab.registry import slot
from vitlab.runner.job import Settings
from vitlab.spec import RunSpec
from vitlab.store.folders import STATUSES, Store, TrialFolder
from vitlab.trackers import DELIVERED, dashboard, delivery, records, replay, service, trials
from vitlab.trackers.arms import COLUMNS, POINTS, Summary, deliver_summaries, format_answer_in_one_line, summarize_arms
from vitlab.trackers.delivery import Delivery, sync
from vitlab.trackers.server import study_links
from vitlab.trackers.service import Address, parse_uri

pytestmark = pytest.mark.usefixtures("no_figures")

Patch = pytest.MonkeyPatch
NOWHERE = "http://127.0.0.1:9"  #: a port without listener
ARMS, SEEDS = ("baseline", "position=none"), ("0", "1")
NAMES = [f"{arm}/s{seed}" for arm in ARMS for seed in SEEDS]
Points = Counter[tuple[str, str, int, int]]  #: name, value, time, step

SPY = """
import os, sys
class Spy:
    def find_spec(self, name, path=None, target=None):
        if name in ("torch", "mlflow"):
            with open(os.environ["IMPORTS"], "a") as log:
                log.write(f"{name} {os.getpid()}\\n")
sys.meta_path.insert(0, Spy())
"""
KILL = """
import os, sys
class Kill:
    def find_spec(self, name, path=None, target=None):
        if name == "mlflow":
            os.kill(os.getpid(), 9)
sys.meta_path.insert(0, Kill())
"""
PLAIN = """
import importlib.machinery, sys
class Plain(importlib.machinery.PathFinder):
    "Leave figures out of reports: they take most of the time of small studies."
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name == "vitlab.report.report":
            spec = super().find_spec(name, path, target)
            execute = spec.loader.exec_module
            def execute_without_figures(module):
                execute(module)
                module.Report.figures = {}
            spec.loader.exec_module = execute_without_figures
            return spec
sys.meta_path.insert(0, Plain)
"""
WAIT = """
import os, sys, time
class Wait:
    def find_spec(self, name, path=None, target=None):
        while name == "mlflow" and not os.path.exists(os.environ["GO"]):
            time.sleep(0.02)
sys.meta_path.insert(0, Wait())
"""


def study_file(folder: Path, name: str = "tiny", executor: str = "inline") -> Path:
    model = {"type": "vit", "patch_size": 4, "dim": 8, "depth": 1, "heads": 2, "position": "learned"}
    train = {"steps": 4, "batch_size": 16, "evaluations": 2}
    base = {"data": {"type": "digits"}, "model": model, "train": train}
    content = {"study": name, "base": base, "design": {"one_at_a_time": {"model.position": ["none"]}}, "seeds": 2}
    file = folder / f"{name}.yaml"
    file.write_text(yaml.safe_dump({**content, "run": {"executor": executor, "workers": 1}}))
    return file


class Runs:
    """An output folder with the study's four trained trials, and MLflow's database beside them."""

    def __init__(self, trained: Path, database: Path, folder: Path) -> None:
        self.out, self.file = folder / "out", study_file(folder)
        shutil.copytree(trained / "out", self.out)
        shutil.copy(database, self.out / "mlflow.db")
        self.plan = Plan.from_json(json.loads((self.out / "studies/tiny/plan.json").read_text()))

    @property
    def client(self) -> MlflowClient:
        uri = f"sqlite:///{self.out / 'mlflow.db'}"
        return MlflowClient(tracking_uri=uri, registry_uri=uri)

    @property
    def report(self) -> list[Path]:
        return sorted((self.out / "studies/tiny/report").glob("*"))

    def tracker(self, uri: str | None = None, **options: Any) -> Any:
        choice = {"type": "mlflow", "uri": uri, **options}
        return slot("tracker").build(choice, self.plan, Store(self.out), RunSpec())

    def runs(self, study: str = "tiny", kind: str = "trial") -> list[Any]:
        experiment = self.client.get_experiment_by_name(study)
        runs = self.client.search_runs([experiment.experiment_id], f"tags.`vitlab.kind` = '{kind}'")
        return sorted(runs, key=lambda run: run.info.run_name)

    def stored(self, run: Any) -> Points:
        """Return the whole history of every metric of a run, for which MLflow's client needs a request a metric."""
        query = "select key, value, is_nan, timestamp, step from metrics where run_uuid = ?"
        with closing(sqlite3.connect(self.out / "mlflow.db")) as database:
            rows = database.execute(query, [run.info.run_id]).fetchall()
        assert {name for name, *_ in rows} == {*run.data.metrics}
        return Counter((name, repr(math.nan if is_nan else value), t, step) for name, value, is_nan, t, step in rows)

    def folder(self, arm: str, seed: int) -> TrialFolder:
        trial = self.plan.find(arm, seed).trial
        return Store(self.out).trial(trial.key, trial.code)


def as_kept(value: float) -> str:
    """Return a value as stored: MLflow would store infinities as the largest number, which ruins charts."""
    return repr(float(value) if math.isfinite(value) else math.nan)


def journalled(journal: Path) -> Points:
    """Return the points of a journal."""
    points: Points = Counter()
    for event in map(json.loads, journal.read_text().splitlines()):
        if event["kind"] == "metrics":
            values = event["metrics"] | {"progress/epoch": event["epoch"], "progress/images": event["images"]}
            points.update((name, as_kept(value), event["t"], event["step"]) for name, value in values.items())
    return points


def holds_all_once(runs: Runs, study: str = "tiny") -> None:
    """Check that every line of every journal is stored once, final values once at step 0, and nothing else."""
    assert [run.info.run_name for run in runs.runs(study)] == NAMES
    for run in runs.runs(study):
        assert run.info.status == "FINISHED"
        folder = runs.folder(run.data.tags["arm"], int(run.data.tags["seed"])).path
        stored, expected = runs.stored(run), journalled(folder / "events.jsonl")
        assert len(expected) >= 2 * 4 and min(step for *_, step in expected) >= 1
        finals = Counter({point: count for point, count in stored.items() if point[3] == 0})
        assert stored == expected + finals
        outcome = json.loads((folder / "result.json").read_text())["outcome"]
        names = Counter(name for name, *_ in finals.elements())
        assert set(names.values()) == {1} and {name.partition("/")[0] for name in names} <= {"final", "best", "cost"}
        values = {name.partition("/")[2]: float(value) for name, value, *_ in finals if name.startswith("final/")}
        assert values == outcome["metrics"]


@pytest.fixture(scope="module", autouse=True)
def migrations_are_read_once() -> Iterator[None]:
    """Keep the latest revision of MLflow's schema: MLflow executes all migrations' files for it for every database."""
    with pytest.MonkeyPatch.context() as patch:
        latest = functools.cache(mlflow.store.db.utils._get_latest_schema_revision)
        patch.setattr(mlflow.store.db.utils, "_get_latest_schema_revision", latest)
        yield


@pytest.fixture(scope="session")
def database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return an empty MLflow database, created once because that takes seconds."""
    file = tmp_path_factory.mktemp("mlflow") / "mlflow.db"
    with service.mute_mlflow():
        service.initialise_database(file)
    return file


def path_with(folder: Path) -> str:
    """Return where processes look for modules: first in a folder."""
    return os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """Run the study by the command line and worker processes, with an unreachable server and recorded imports."""
    folder = tmp_path_factory.mktemp("trained")
    (folder / "sitecustomize.py").write_text(SPY)
    environment = {**os.environ, "PYTHONPATH": path_with(folder), "IMPORTS": str(folder / "imports")}
    environment |= {"MLFLOW_TRACKING_URI": NOWHERE, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "vitlab", "run", str(study_file(folder, executor="local"))]
    command += ["--out", str(folder / "out")]
    return folder, subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)


@pytest.fixture(scope="module")
def delivered(trained: tuple[Path, Any], database: Path, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Return trials trained without the server and delivered by one ``sync``, for reading only."""
    runs = Runs(trained[0], database, tmp_path_factory.mktemp("delivered"))
    [delivery] = sync(runs.out, tracker="mlflow")
    assert delivery.study == "tiny" and delivery.link is not None
    return runs


@pytest.fixture
def runs(trained: tuple[Path, Any], database: Path, tmp_path: Path) -> Runs:
    """Return undelivered trials, without predictions, whose pictures take time."""
    runs = Runs(trained[0], database, tmp_path)
    for file in runs.out.glob("trials/*/*/predictions.parquet"):
        file.unlink()
    return runs


@pytest.fixture(scope="module")
def template(trained: tuple[Path, Any], database: Path, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Return trials of :func:`runs` that are delivered with their report, to be copied."""
    runs = Runs(trained[0], database, tmp_path_factory.mktemp("template"))
    for file in runs.out.glob("trials/*/*/predictions.parquet"):
        file.unlink()
    assert runs.tracker().close(runs.report)
    return runs


@pytest.fixture
def done(template: Runs, tmp_path: Path) -> Runs:
    """Return trials of :func:`runs` that are delivered with their report, as if that had happened in this folder."""
    done = Runs(template.out.parent, template.out / "mlflow.db", tmp_path)
    columns = {"experiments": "artifact_location", "runs": "artifact_uri", "tags": "value"}
    with closing(sqlite3.connect(done.out / "mlflow.db")) as database, database:
        for table, column in columns.items():
            paths = str(template.out), str(done.out)
            database.execute(f"update {table} set {column} = replace({column}, ?, ?)", paths)
    return done


@pytest.fixture(autouse=True)
def no_server(monkeypatch: Patch) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)


@pytest.mark.slow
def test_study_does_not_need_its_server(trained: tuple[Path, Any], delivered: Runs) -> None:
    """Exit code 0, and no process imports MLflow; then one ``sync`` delivers everything."""
    folder, done = trained
    assert done.returncode == 0, done.stderr
    assert "not up to date" in done.stdout and "Traceback" not in done.stderr
    imports = [line.split() for line in (folder / "imports").read_text().splitlines()]
    assert len({process for name, process in imports if name == "torch"}) > 1, "the spy saw no worker"
    assert not [process for name, process in imports if name == "mlflow"]
    holds_all_once(delivered)


@pytest.fixture
def deliverers(tmp_path: Path, monkeypatch: Patch) -> Iterator[list[delivery.TrackerProcess]]:
    """Have runs in this process start one that delivers, as commands do, with modules of ``tmp_path``; return them."""
    made: list[delivery.TrackerProcess] = []
    genuine = delivery.TrackerProcess

    def start() -> delivery.TrackerProcess:
        made.append(genuine())
        return made[-1]

    monkeypatch.setattr(delivery, "is_command", lambda: True)
    monkeypatch.setattr(delivery, "started", None)
    monkeypatch.setattr(delivery, "TrackerProcess", start)
    monkeypatch.setenv("PYTHONPATH", path_with(tmp_path))
    yield made
    for process in made:
        process._process.kill()
        process._process.wait()


@pytest.mark.slow
def test_driver_delivers_once_the_delivering_process_has_died(
    deliverers: list[delivery.TrackerProcess], runs: Runs, tmp_path: Path
) -> None:
    (tmp_path / "sitecustomize.py").write_text(KILL)
    shutil.rmtree(runs.folder("baseline", 0).path)
    assert vitlab.run(runs.file, out=runs.out).link
    [process] = deliverers
    assert process._process.wait(60) == -signal.SIGKILL
    holds_all_once(runs)


def children(pid: int) -> list[int]:
    return [int(text) for text in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def command_of(pid: int) -> bytes:
    """Return the command line of a process; empty if it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except FileNotFoundError:
        return b""


@pytest.mark.slow
@pytest.mark.parametrize("end", ["delivered", "interrupted", "killed"])
def test_answer_is_printed_before_a_process_beside_the_driver_delivers(end: str, runs: Runs, tmp_path: Path) -> None:
    """It imports MLflow only after the answer was read; what an ended driver leaves is delivered by the next run."""
    (tmp_path / "sitecustomize.py").write_text(PLAIN + SPY + WAIT)
    shutil.rmtree(runs.folder("baseline", 0).path)  # which has a process deliver beside the driver
    go, log, imports = tmp_path / "go", tmp_path / "stderr", tmp_path / "imports"
    environment = {**os.environ, "PYTHONPATH": path_with(tmp_path), "GO": str(go), "IMPORTS": str(imports)}
    environment["OMP_NUM_THREADS"] = "1"
    command = [sys.executable, "-m", "vitlab", "run", str(runs.file), "--out", str(runs.out)]
    with open(log, "w") as stderr:
        driver = subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=stderr, text=True, start_new_session=True
        )
    assert driver.stdout is not None
    answer = list(itertools.takewhile(lambda line: not line.startswith("Training "), driver.stdout))
    assert any("position=none" in line for line in answer) and driver.poll() is None
    deadline = time.monotonic() + 60
    while "delivering to MLflow; if this is interrupted, 'vitlab sync' delivers the rest\n" not in log.read_text():
        assert driver.poll() is None and time.monotonic() < deadline, log.read_text()
        time.sleep(0.05)
    assert not go.exists()
    [deliverer] = [pid for pid in children(driver.pid) if b"vitlab.trackers.delivery" in command_of(pid)]
    if end == "delivered":
        go.touch()
    else:
        os.kill(deliverer, signal.SIGSTOP)  # hangs, as with a dead file server
        os.killpg(driver.pid, signal.SIGINT) if end == "interrupted" else driver.kill()
    rest, _ = driver.communicate(timeout=60)
    assert driver.returncode == {"delivered": 0, "interrupted": 130, "killed": -signal.SIGKILL}[end], log.read_text()
    assert (" cached from earlier runs." in rest and "MLflow " in rest) == (end == "delivered")
    if end == "delivered":
        assert {*imports.read_text().splitlines()} == {f"torch {driver.pid}", f"mlflow {deliverer}"}
        assert "Traceback" not in log.read_text() and "Warning" not in log.read_text()
    if end == "interrupted":
        assert not command_of(deliverer), "it is ended with its driver"
        assert log.read_text().splitlines()[-1].startswith("interrupted; the report is written, and the same command")
    if end != "delivered":
        with pytest.raises(AttributeError):  # there is no experiment yet
            runs.runs()
        again = vitlab.run(runs.file, out=runs.out)
        assert (again.trained, again.cached) == (0, 4) and again.link
        assert not command_of(deliverer), "it is found by its lock"
    holds_all_once(runs)


COMPONENTS = """
from vitlab.data.datasets import dataset
from vitlab.data.datasets.digits import Digits
from vitlab.training.metrics import metric
from vitlab.training.metrics.predictions import Brier
@dataset.register("own_digits")
class OwnDigits(Digits):
    "Digits."
@metric.register("half_brier")
class HalfBrier(Brier):
    "Half of the Brier score."
    def rows(self, logits, target):
        return super().rows(logits, target) / 2
"""
TRACKER = """
import os
from vitlab.trackers import tracker
from vitlab.trackers.mlflow import MlflowTracker
@tracker.register("own_tracker")
class OwnTracker(MlflowTracker):
    "MLflow, with a record of the parents of processes that deliver."
    def deliver(self, **options):
        with open(os.environ["PARENTS"], "a") as record:
            record.write(f"{os.getppid()}\\n")
        return super().deliver(**options)
"""
ENTRY_POINTS = """
[vitlab.dataset]
own_digits = own_plugin:OwnDigits
[vitlab.metric]
half_brier = own_plugin:HalfBrier
[vitlab.tracker]
own_tracker = own_plugin:OwnTracker
"""


@pytest.mark.parametrize(
    ("tracker", "is_installed", "in_driver"),
    [
        pytest.param("mlflow", False, False, marks=pytest.mark.slow),
        pytest.param("own_tracker", True, False, marks=pytest.mark.slow),
        ("own_tracker", False, True),
    ],
)
def test_components_of_plugins_are_delivered(
    tracker: str,
    is_installed: bool,
    in_driver: bool,
    deliverers: list[delivery.TrackerProcess],
    database: Path,
    tmp_path: Path,
    monkeypatch: Patch,
) -> None:
    """A tracker of a file, which is registered after the delivering process has been forked, delivers in the driver."""
    plugin, text = tmp_path / "own_plugin.py", COMPONENTS + (TRACKER if tracker == "own_tracker" else "")
    if is_installed:
        text = re.sub(r"@.*register.*", "", text)
        (tmp_path / "own_plugin-1.0.dist-info").mkdir()
        (tmp_path / "own_plugin-1.0.dist-info/METADATA").write_text("Name: own-plugin\nVersion: 1.0\n")
        (tmp_path / "own_plugin-1.0.dist-info/entry_points.txt").write_text(ENTRY_POINTS)
    plugin.write_text(text)
    (tmp_path / "sitecustomize.py").write_text(PLAIN + SPY)
    for variable in ("imports", "parents"):
        monkeypatch.setenv(variable.upper(), str(tmp_path / variable))
    file, out = study_file(tmp_path), tmp_path / "out"
    content = yaml.safe_load(file.read_text())
    content["base"]["data"]["type"] = "own_digits"
    content["base"]["train"]["metrics"] = ["half_brier"]
    file.write_text(yaml.safe_dump(content | {"seeds": 1}))
    out.mkdir()
    shutil.copy(database, out / "mlflow.db")
    driver = os.getpid()
    if is_installed:
        command = [sys.executable, "-m", "vitlab", "run", str(file), "--out", str(out)]
        with subprocess.Popen(
            [*command, "--set", f"run.tracker.type={tracker}"], env={**os.environ, "OMP_NUM_THREADS": "1"}
        ) as process:
            driver = process.pid
        assert process.returncode == 0
    else:
        assert vitlab.run(file, out=out, plugins=[plugin], changes={"run.tracker.type": tracker}).link
    if tracker == "mlflow":
        [process] = deliverers
        assert (tmp_path / "imports").read_text() == f"mlflow {process._process.pid}\n"
    else:
        parents = (tmp_path / "parents").read_text().split()
        assert {*parents} == {str(os.getppid() if in_driver else driver)}
    uri = f"sqlite:///{out / 'mlflow.db'}"
    client = MlflowClient(tracking_uri=uri, registry_uri=uri)
    runs = client.search_runs([client.get_experiment_by_name("tiny").experiment_id], "tags.`vitlab.kind` = 'trial'")
    results = [json.loads(file.read_text()) for file in out.glob("trials/*/*/result.json")]
    final = sorted(result["outcome"]["metrics"]["val/half_brier"] for result in results)
    for name in ("val/half_brier", "final/val/half_brier"):
        assert sorted(run.data.metrics[name] for run in runs) == final
    assert len(final) == 2


def test_unreachable_server_is_probed_and_failing_one_asked_once(runs: Runs, monkeypatch: Patch) -> None:
    """By default MLflow would retry for four minutes, and again at every update."""
    calls: list[str] = []

    def refuse(self: HTTPConnection) -> None:
        calls.append(self.host)
        raise ConnectionRefusedError

    monkeypatch.setattr(HTTPConnection, "connect", refuse)
    tracker = runs.tracker(NOWHERE)
    tracker.update()
    assert tracker.close() is None and not calls
    monkeypatch.setattr(Address, "is_reachable", lambda self: True)
    for setting in ("FACTOR", "JITTER"):  # of the pauses
        monkeypatch.setenv(f"MLFLOW_HTTP_REQUEST_BACKOFF_{setting}", "0")
    tracker = runs.tracker(NOWHERE)
    for _ in range(3):
        tracker.update()
    assert len(calls) == 4, "once, and three times again"


@pytest.mark.slow
def test_second_run_and_second_study(runs: Runs) -> None:
    """Cached trials are delivered once to the experiment of each study that shows them."""
    for file in (runs.file, runs.file, study_file(runs.out.parent, "second")):
        answer = vitlab.run(file, out=runs.out)
        assert (answer.trained, answer.cached, answer.failed) == (0, 4, 0) and answer.link
    for study in ("tiny", "second"):
        holds_all_once(runs, study)
        assert {run.data.tags["vitlab.study"] for run in runs.runs(study)} == {study}
        assert len(runs.runs(study, kind="study")) == 1


class Killed(BaseException):
    """Exception that ends a process like SIGKILL: nothing catches it."""


BREAKS = [
    ("create_run", 2, True, Killed),
    ("log_batch", 1, False, Killed),
    ("log_batch", 2, True, Killed),
    ("log_batch", 3, True, ConnectionError),
    ("log_batch", 2, False, ConnectionError),
    ("set_terminated", 2, True, Killed),
    ("send_files", 1, False, ConnectionError),
]


@pytest.mark.slow
@pytest.mark.parametrize(("request_name", "number", "stored_first", "error"), BREAKS)
def test_interrupted_delivery_is_continued(
    request_name: str, number: int, stored_first: bool, error: type[BaseException], runs: Runs, monkeypatch: Patch
) -> None:
    """Interrupted at the n-th request, before it is stored or before its answer, by a kill or by the network."""
    owner: Any = trials if request_name == "send_files" else MlflowClient
    genuine: Callable[..., Any] = getattr(owner, request_name)
    calls = itertools.count(1)

    def breaks(self: MlflowClient, *arguments: Any, **options: Any) -> Any:
        interrupt, answer = next(calls) >= number, None
        if not interrupt or stored_first:
            answer = genuine(self, *arguments, **options)
        if interrupt:
            raise error("in the middle")
        return answer

    with monkeypatch.context() as patched:
        patched.setattr(owner, request_name, breaks)
        tracker = runs.tracker()
        if error is Killed:
            with pytest.raises(Killed):
                tracker.update()
        else:
            tracker.update()
            tracker.close()
    assert next(calls) > number
    assert runs.tracker().close()
    holds_all_once(runs)


@pytest.mark.slow
def test_lost_offsets_deliver_nothing_twice(runs: Runs) -> None:
    """This includes values that are not numbers."""
    strange = {"train/loss": math.inf, "val/loss": math.nan}
    runs.folder("baseline", 0).emit("metrics", step=5, epoch=1.0, images=80, metrics=strange)
    assert runs.tracker().close()
    offsets = runs.out / "studies/tiny/mlflow-offsets.json"
    before, message = {run.info.run_id for run in runs.runs()}, offsets.read_bytes()
    offsets.unlink()
    assert runs.tracker().close() and {run.info.run_id for run in runs.runs()} == before
    assert offsets.read_bytes() == message
    holds_all_once(runs)
    assert runs.tracker().close(runs.report)
    runs.plan = replace(runs.plan, arms=runs.plan.arms[::-1])  # a design whose arms stand in another order
    assert runs.tracker().close(runs.report)
    for kind, study in (("trial", "tiny"), ("arm", "tiny/arms")):
        runs_by_order = sorted(runs.runs(study, kind), key=lambda run: str(run.data.tags[dashboard.ORDER]))
        assert [run.data.tags["arm"] for run in runs_by_order][:2] == list(ARMS[::-1])


@pytest.mark.slow
def test_retrained_stopped_and_resumed_trials(done: Runs, monkeypatch: Patch) -> None:
    """Its old run leaves the view of the arms; its new one grows with the journal, a torn last line included."""
    old = done.runs()[-1]
    trial, folder = done.plan.find("position=none", 1).trial, done.folder("position=none", 1)
    shutil.rmtree(folder.path)
    counter = itertools.count()
    assert run_trial(trial, folder, Settings(), lambda: next(counter) >= 3) is None
    with (folder.path / "events.jsonl").open("a") as journal:
        journal.write('{"t": 1, "kind": "metr')

    tracker = done.tracker()
    tracker.update()
    assert done.runs()[-1].info.run_id == old.info.run_id, "a young training is not delivered yet"
    monkeypatch.setattr(replay, "LIVE_S", 0.0)
    tracker.update()
    new = done.runs()[-1]
    assert new.info.run_id != old.info.run_id and new.info.status == "RUNNING"
    assert [run.info.run_id for run in done.runs(kind="superseded")] == [old.info.run_id]
    tracker.close()
    stopped = done.runs()[-1]
    assert stopped.info.status == "KILLED"
    [study] = done.runs(kind="study")
    assert study.info.status == "SCHEDULED", "nothing is wrong: the same command trains the rest"
    assert "\n\n3 of 4 trials finished\n\n" in study.data.tags["mlflow.note.content"]
    partial = done.stored(stopped)

    answer = vitlab.run(done.file, out=done.out)
    assert (answer.trained, answer.cached) == (1, 3)
    holds_all_once(done)
    last = done.runs()[-1]
    assert last.info.run_id == new.info.run_id and last.data.tags["vitlab.attempts"] == "2"
    assert partial and partial < done.stored(last)
    assert [study.info.status for study in done.runs(kind="study")] == ["FINISHED"]


@pytest.mark.slow
def test_list_of_runs_tells_versions_apart(done: Runs) -> None:
    """Superseded runs say so by their names, and have them again when the study returns to their version."""
    first, studies = done.plan, [done.runs(kind="study")[0].info.run_id]
    files = artifacts(done, studies[0])
    done.client.update_run(done.runs()[-1].info.run_id, name="my best")
    done.plan = replace(first, version="second", trials=first.trials[:2], arms=first.arms[:1])
    assert done.tracker().close()
    note, of_arms = (
        html.unescape(done.client.get_experiment_by_name(page).tags["mlflow.note.content"])
        for page in ("tiny", "tiny/arms")  # without the answer of the first version
    )
    assert note.startswith("No report yet, 2 of 2 trials finished: tiny\n\n[curves of arms](#/")
    assert " \N{MIDDLE DOT} version second in " in note
    assert note.endswith(str(done.out)), "another folder's version may have one"
    place = study_links(done.out)["tiny"]
    assert of_arms == f"No report yet \N{MIDDLE DOT} [curves of arms]({place})"
    assert not done.runs("tiny/arms", kind="arm"), "verdicts of the first version"
    old = done.runs(kind="superseded")
    names = ["old: my best", "old: position=none/s0", "old: study tiny"]
    assert [run.info.run_name for run in old] == names
    assert {run.data.tags["mlflow.runColor"] for run in old} == {"#c4c4c4"}
    assert [run.info.run_name for run in done.runs()] == NAMES[:2]
    assert old[-1].info.run_id == studies[0] and artifacts(done, studies[0]) == files, "with its own report"
    [study] = done.runs(kind="study")
    assert study.info.run_name == "study tiny" and study.info.run_id != studies[0]
    done.plan = first
    for _ in range(2):
        assert done.tracker().close(done.report)
    assert [run.info.run_id for run in done.runs(kind="study")] == studies
    assert [run.info.run_name for run in done.runs(kind="superseded")] == ["old: study tiny"]
    page = done.client.get_experiment_by_name("tiny")
    [link] = re.findall(r"\[list of runs\]\(([^)]*)\)", page.tags["mlflow.note.content"])
    [view] = parse_qs(link.partition("?")[2])["viewStateShareKey"]
    state = json.loads(json.loads(page.tags[f"{dashboard.TAG}.{view}"])["state"])
    names = ("best/val/accuracy", "final/val/accuracy", "final/test/accuracy", "final/train/loss")
    assert state["selectedColumns"][:5] == ["attributes.`Description`", *(f"metrics.`{name}`" for name in names)]
    assert "compareRunsMode" not in link, "the page's default is a table"
    order = f"{state['orderByKey']} {'ASC' if state['orderByAsc'] else 'DESC'}"
    listed = done.client.search_runs([page.experiment_id], state["searchFilter"], order_by=[order])
    assert [run.info.run_name for run in listed] == [
        "study tiny",
        "baseline/s0",
        "position=none/s0",
        "baseline/s1",
        "my best",
        "old: study tiny",
    ], "the run of the later version is the newest one, and the last"
    *_, mine = sorted(done.runs(), key=lambda run: str(run.data.tags["vitlab.order"]))
    assert mine.info.run_name == "my best" and mine.data.tags["mlflow.runColor"] != "#c4c4c4"
    done.client.update_run(mine.info.run_id, name=NAMES[-1])
    holds_all_once(done)


def test_study_run_tells_that_a_version_is_in_training(done: Runs) -> None:
    """The run of an edited study is old from the first delivery on, and one of the same version is running."""
    [study] = done.runs(kind="study")
    assert study.data.tags["vitlab.order"] < min(run.data.tags["vitlab.order"] for run in done.runs())
    done.tracker().update()
    assert [run.info.status for run in done.runs(kind="study")] == ["RUNNING"]
    done.plan = replace(done.plan, version="second")
    done.tracker().update()
    assert [(run.info.run_name, run.info.status) for run in done.runs(kind="superseded")] == [
        ("old: study tiny", "KILLED")
    ]
    note = done.client.get_experiment_by_name("tiny").tags["mlflow.note.content"]
    assert note.startswith("No report yet, 4 of 4 trials finished: tiny\n\n[curves of arms](#/")


def test_description_without_report_counts_finished_trials(runs: Runs) -> None:
    folder = runs.folder("baseline", 1).path
    folder.rename(runs.out / "later")
    for count in (3, 4):
        if count == 4:
            (runs.out / "later").rename(folder)
        runs.tracker().update()
        note = runs.client.get_experiment_by_name("tiny").tags["mlflow.note.content"]
        assert note.startswith(f"No report yet, {count} of 4 trials finished: tiny\n\n")


def test_tag_with_the_arm_is_cut_to_what_mlflow_accepts(runs: Runs) -> None:
    planned = replace(runs.plan.trials[0], arm="a" * 6000)
    tags = records.trial_tags(runs.plan, planned, "trial")
    assert {len(tags["arm"]), len(tags["vitlab.arm"])} == {5000}


def test_description_of_a_run_says_how_it_ended_and_what_it_is(runs: Runs) -> None:
    file = runs.folder("baseline", 0).path / "result.json"
    result = json.loads(file.read_text()) | {"status": "diverged", "failure": "the *loss* is not finite"}
    file.write_text(json.dumps(result))
    (runs.folder("position=none", 1).path / "result.json").unlink()
    other = runs.folder("baseline", 1).path / "result.json"
    result = json.loads(other.read_text())
    del result["outcome"]["metrics"]["val/accuracy"]  # as of a pre-training
    other.write_text(json.dumps(result))
    assert runs.tracker().close()
    accuracy = json.loads((runs.folder("position=none", 0).path / "result.json").read_text())
    accuracy = accuracy["outcome"]["metrics"]["val/accuracy"]
    diverged, bare, done, stopped = (html.unescape(run.data.tags["mlflow.note.content"]) for run in runs.runs())
    assert diverged == "diverged: the *loss* is not finite · seed 0 of arm baseline; model.position: learned"
    assert "&#42;" in runs.runs()[0].data.tags["mlflow.note.content"]
    assert done == (f"done: val/accuracy {100 * accuracy:.1f} % · seed 0 of arm position=none; model.position: none")
    assert bare.startswith("done · seed 1 of arm baseline; ")
    assert stopped.startswith("stopped; the next vitlab run resumes it · seed 1 of arm position=none; ")


def shifted(folder: TrialFolder, by_ms: int) -> None:
    """Turn a trial's journal and result into those of a later training."""
    journal = folder.path / "events.jsonl"
    events = [json.loads(line) for line in journal.read_text().splitlines()]
    journal.write_text("".join(json.dumps({**event, "t": event["t"] + by_ms}) + "\n" for event in events))


@pytest.mark.slow
@pytest.mark.parametrize("same_folder", [True, False])
def test_waiting_trial_adopts_no_run_of_other_training(same_folder: bool, runs: Runs, tmp_path: Path) -> None:
    """The folder was deleted and filled again, or another folder delivers to the same server."""
    uri = f"sqlite:///{runs.out / 'mlflow.db'}"
    assert runs.tracker(uri).close()
    old = {run.info.run_id: runs.stored(run) for run in runs.runs()}
    aside = tmp_path / "aside"
    if same_folder:
        folders = {name: runs.folder(*name) for name in itertools.product(ARMS, (0, 1))}
        shutil.move(runs.out / "trials", aside)
        (runs.out / "studies/tiny/mlflow-offsets.json").unlink()
        tracker = runs.tracker(uri)
    else:
        other = tmp_path / "other"
        shutil.copytree(runs.out / "studies", other / "studies", ignore=shutil.ignore_patterns("mlflow*"))
        shutil.copytree(runs.out / "trials", aside)
        store = Store(other)
        folders = {
            (arm, seed): store.folder(runs.plan.find(arm, seed).trial) for arm, seed in itertools.product(ARMS, (0, 1))
        }
        tracker = slot("tracker").build({"type": "mlflow", "uri": uri}, runs.plan, store, RunSpec())
    tracker.update()  # nothing has begun yet
    shutil.copytree(aside, next(iter(folders.values())).path.parents[1], dirs_exist_ok=True)
    for folder in folders.values():
        shifted(folder, 10**7)
    tracker.update()
    assert tracker.close()
    assert {run: runs.stored(runs.client.get_run(run)) for run in old} == old, "they hold their own training alone"
    new = [run for run in runs.runs() if run.info.run_id not in old]
    assert [run.info.run_name for run in new] == NAMES
    assert len(runs.runs(kind="superseded")) == (4 if same_folder else 0)
    for run in new:
        folder = folders[run.data.tags["arm"], int(run.data.tags["seed"])]
        assert not journalled(folder.path / "events.jsonl") - runs.stored(run)


@pytest.mark.slow
def test_restored_database_is_filled_again(runs: Runs, tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.setattr(replay, "LIVE_S", 0.0)
    whole = tmp_path / "whole"
    shutil.copytree(runs.out / "trials", whole)
    for journal in runs.out.glob("trials/*/*/events.jsonl"):  # as it was in the middle of the training
        lines = journal.read_text().splitlines(keepends=True)
        journal.write_text("".join(lines[:2]))
        (journal.parent / "result.json").unlink()
    runs.tracker().update()
    backup = (runs.out / "mlflow.db").read_bytes()
    shutil.rmtree(runs.out / "trials")
    shutil.copytree(whole, runs.out / "trials")
    assert runs.tracker().close()
    holds_all_once(runs)
    (runs.out / "mlflow.db").write_bytes(backup)
    assert {run.info.status for run in runs.runs()} == {"RUNNING"}
    assert runs.tracker().close()
    holds_all_once(runs)


def test_deleted_points_and_artifacts_are_delivered_again(done: Runs) -> None:
    first = done.runs()[0].info.run_id
    before = artifacts(done, first)
    assert "spec.json" in before
    for file in done.out.glob("mlartifacts/**/spec.json"):
        file.unlink()
    with sqlite3.connect(done.out / "mlflow.db") as connection:
        connection.execute("delete from metrics where step = 2 and key = 'val/accuracy'")
    connection.close()
    assert done.tracker().sync()
    holds_all_once(done)
    for run in done.runs():
        assert "spec.json" in artifacts(done, run.info.run_id)


def test_run_contents_are_queried_only_by_sync(done: Runs, monkeypatch: Patch) -> None:
    requests: list[str] = []
    genuine = MlflowClient.get_metric_history

    def record(self: Any, run: str, name: str) -> Any:
        requests.append(run)
        return genuine(self, run, name)

    monkeypatch.setattr(MlflowClient, "get_metric_history", record)
    assert done.tracker().close() and requests == []
    assert done.tracker().sync() and len(requests) == 4


@pytest.mark.slow
def test_trial_costs_three_requests_and_the_first_ones_have_files(runs: Runs, monkeypatch: Patch) -> None:
    requests = Counter[str]()

    def counted(name: str, genuine: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            requests[name] += 1
            return genuine(*arguments, **options)

        return call

    monkeypatch.setattr(trials, "FILED", 2)
    for name, method in vars(MlflowClient).items():
        if callable(method) and not name.startswith("_"):
            monkeypatch.setattr(MlflowClient, name, counted(name, method))
    assert runs.tracker().close()
    of_trials = {name: requests.pop(name) for name in ("create_run", "log_batch", "set_terminated")}
    assert of_trials == {"create_run": 4 + 1, "log_batch": 4, "set_terminated": 4 + 1}, "one more is of the study"
    assert requests.pop("set_experiment_tag") == 6, "three views, the description as begun and as ended, the version"
    assert max(requests.values()) < 4, requests
    monkeypatch.undo()
    holds_all_once(runs)
    files = {run.data.tags["seed"]: artifacts(runs, run.info.run_id) for run in runs.runs()}
    assert files == {"0": ["spec.json"], "1": []}
    delivered = [sync(runs.out)[0].counts["trials"] for _ in range(2)]  # now seed 1 has files, too
    assert delivered == [2, 0] and all(artifacts(runs, run.info.run_id) == ["spec.json"] for run in runs.runs())


def test_files_of_another_user_are_replaced(done: Runs, monkeypatch: Patch) -> None:
    """Only the owner of a file may change its times and its rights."""
    (done.out / "studies/tiny/mlflow-offsets.json").unlink()
    before = {file: file.stat().st_ino for file in done.out.glob("mlartifacts/**/spec.json")}

    def refuse(path: object, *_: Any, **__: Any) -> None:
        if "mlartifacts" in str(path):
            raise PermissionError

    for name in ("chmod", "utime"):
        monkeypatch.setattr(os, name, refuse)
    assert done.tracker().close(done.report)
    assert len(before) == 4 and not [file for file, inode in before.items() if file.stat().st_ino == inode]


def test_artifacts_are_not_written_behind_links(tmp_path: Path) -> None:
    for name in ("new/explain", "outside", "artifacts"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "new/explain/a.json").touch()
    (tmp_path / "artifacts/explain").symlink_to(tmp_path / "outside")
    with pytest.raises(UserError, match="delete the link"):
        trials.send_files(None, "", str(tmp_path / "artifacts"), tmp_path / "new")  # type: ignore[arg-type]
    assert not list((tmp_path / "outside").iterdir())


def test_run_on_two_pages_is_listed_once() -> None:
    a, b, c = (SimpleNamespace(info=SimpleNamespace(run_id=name)) for name in "abc")
    pages = {None: PagedList([a, b], "2"), "2": PagedList([b, c], None)}
    client: Any = SimpleNamespace(search_runs=lambda *arguments: pages[arguments[-1]])
    assert list(service.iterate_runs(client, "1")) == [a, b, c]


def damage_restored(runs: Runs, how: str) -> dict[str, int]:
    """Damage what was delivered, and return what is then missing."""
    database = sqlite3.connect(runs.out / "mlflow.db")
    run = runs.runs()[0]
    with database:
        (points,) = database.execute("select count(*) from metrics where run_uuid = ?", [run.info.run_id]).fetchone()
        if how == "history":
            deleted = database.execute("delete from metrics where step = 2 and run_uuid = ?", [run.info.run_id])
            missing = {"points": deleted.rowcount}
        elif how == "metrics":
            for table in ("metrics", "latest_metrics"):
                database.execute(f"delete from {table} where run_uuid = ?", [run.info.run_id])
            missing = {"points": points}
        elif how == "status":
            database.execute("update runs set status = 'RUNNING' where run_uuid = ?", [run.info.run_id])
            missing = {}
        elif how == "tags":
            database.execute("delete from tags where key in ('arm', 'seed') and run_uuid = ?", [run.info.run_id])
            missing = {"tags": 2}
        elif how == "parameters":
            query = "delete from params where key in ('model.dim', 'model.depth', 'seed') and run_uuid = ?"
            database.execute(query, [run.info.run_id])
            missing = {"parameters": 3}
        elif how == "run":
            runs.client.delete_run(run.info.run_id)
            missing = {"runs": 1, "points": points}
        elif how == "file":
            file = Path(run.info.artifact_uri) / "spec.json"
            file.rename(file.with_name(".spec.json.1a2b"))  # a name that a killed process leaves
            missing = {"files": 1}
        else:
            files = [path for path in Path(run.info.artifact_uri).rglob("*") if path.is_file()]
            shutil.rmtree(run.info.artifact_uri)
            missing = {"files": len(files)}
    database.close()
    return missing


@pytest.mark.slow
def test_sync_says_what_it_restored(done: Runs) -> None:
    [healthy] = sync(done.out)
    assert healthy.sentence == "nothing was missing"
    for how in ("history", "metrics", "status", "tags", "parameters", "run", "files", "file"):
        missing = damage_restored(done, how)
        [restored] = sync(done.out)
        assert restored.sentence.startswith("delivered "), how
        assert restored.counts["trials"] == (how not in ("tags", "parameters")), how
        assert {kind: restored.counts[kind] for kind in missing} == missing, how
        holds_all_once(done)
        [again] = sync(done.out)
        assert again.sentence == "nothing was missing", how


@pytest.mark.parametrize("lost", ["after delivery", "in the middle", "before delivery"])
def test_trial_without_journal_is_delivered_from_its_result(lost: str, runs: Runs, monkeypatch: Patch) -> None:
    """Points that the journal has delivered stay as they are; those that are lost have the time of the end."""
    folder = runs.folder("baseline", 1).path
    journal, text = folder / "events.jsonl", (folder / "events.jsonl").read_text()
    result = (folder / "result.json").read_text()
    points = {(name, value, step) for name, value, _, step in journalled(journal)}
    monkeypatch.setattr(replay, "LIVE_S", 0.0)
    if lost == "in the middle":
        lines = text.splitlines(keepends=True)
        journal.write_text("".join(lines[:2]))
        (folder / "result.json").unlink()
        runs.tracker().update()
        (folder / "result.json").write_text(result)
    elif lost == "after delivery":
        assert runs.tracker().close()
    before = [runs.stored(run) for run in runs.runs()][1] if lost != "before delivery" else Counter()
    journal.unlink()
    assert runs.tracker().close(runs.report)
    [run] = [run for run in runs.runs() if run.info.run_name == "baseline/s1"]
    stored = runs.stored(run)
    assert run.info.status == "FINISHED" and not before - stored
    steps = Counter((name, step) for name, _, _, step in stored.elements())
    assert set(steps.values()) == {1}, "one value a step"
    outcome = json.loads(result)["outcome"]
    measured = {
        (name, as_kept(value), moment["step"])
        for moment in outcome["history"]
        for name, value in moment["metrics"].items()
    }
    assert measured <= {(name, value, step) for name, value, _, step in stored} and measured <= points
    assert {name for name, *_, step in stored if step == 0} >= {f"final/{name}" for name in outcome["metrics"]}
    assert [study.info.status for study in runs.runs(kind="study")] == ["FINISHED"]
    assert sync(runs.out)[0].sentence == "nothing was missing"


def test_final_values_are_delivered_once_after_a_damaged_result(done: Runs) -> None:
    (done.folder("baseline", 0).path / "result.json").write_text("{torn")
    answer = vitlab.run(done.file, out=done.out)
    assert (answer.trained, answer.cached) == (1, 3)
    assert json.loads((done.folder("baseline", 0).path / "result.json").read_text())["circumstances"]["attempts"] == 2
    holds_all_once(done)
    assert done.runs()[0].data.tags["vitlab.attempts"] == "2"


def test_superseded_run_is_not_left_running(runs: Runs, monkeypatch: Patch) -> None:
    monkeypatch.setattr(replay, "LIVE_S", 0.0)
    folder = runs.folder("baseline", 0)
    journal = folder.path / "events.jsonl"
    whole, result = journal.read_text(), (folder.path / "result.json").read_bytes()
    journal.write_text("".join(whole.splitlines(keepends=True)[:2]))
    (folder.path / "result.json").unlink()
    runs.tracker().update()
    assert runs.runs()[0].info.status == "RUNNING"
    journal.write_text(whole)
    (folder.path / "result.json").write_bytes(result)
    shifted(folder, 10**7)
    assert runs.tracker().close()
    assert [run.info.status for run in runs.runs(kind="superseded")] == ["KILLED"]


def test_damaged_and_linked_files_delay_neither_points_nor_files(runs: Runs, tmp_path: Path, caplog: Any) -> None:
    folder, mine = runs.folder("baseline", 0), tmp_path / "mine"
    picture = folder.path / "explain" / "test-3" / "rollout.png"
    picture.parent.mkdir(parents=True)
    picture.write_bytes(b"no picture")
    mine.write_text("mine")
    links = [folder.predictions, picture.with_name("mine.json"), runs.report[0].with_name("mine.html")]
    for link in links:
        link.symlink_to(mine)
    assert runs.tracker().close(runs.report)
    holds_all_once(runs)
    assert "spec.json" in artifacts(runs, runs.runs()[0].info.run_id)
    assert all(str(file) in caplog.text for file in (picture, *links))
    stored = [file.read_bytes() for file in (runs.out / "mlartifacts").rglob("*") if file.is_file()]
    assert b"no picture" in stored and b"mine" not in stored


def test_journal_with_damaged_first_line_has_run(runs: Runs) -> None:
    journal = runs.folder("baseline", 0).path / "events.jsonl"
    lines = journal.read_text().splitlines(keepends=True)
    journal.write_text("\0\0{torn\n" + "".join(lines[1:]))
    assert runs.tracker().close()
    assert [run.info.run_name for run in runs.runs()] == NAMES
    journal.write_text("".join(lines[1:]))
    assert not journalled(journal) - runs.stored(runs.runs()[0])


@pytest.mark.slow
def test_damaged_offsets_are_rebuilt(done: Runs) -> None:
    file = done.out / "studies/tiny/mlflow-offsets.json"
    for damage in ("folder", b"\xff\xfe", b"[1, 2]", b'{"embedded": {"experiment": 3, "runs": {"a": 1}}}'):
        file.unlink()
        if isinstance(damage, str):
            file.mkdir()
            (file / "x").touch()
        else:
            file.write_bytes(damage)
        assert done.tracker().close()
        assert len(json.loads(file.read_text())["embedded"]) == 4
    holds_all_once(done)


def lose(database: Path, how: str) -> None:
    database.unlink()
    if how == "folder":
        database.mkdir()
        (database / "x").touch()
    elif how == "emptied":
        database.touch()
    elif how == "foreign":
        with sqlite3.connect(database) as connection:
            connection.execute("create table songs (title)")
        connection.close()
    elif how == "garbage":
        database.write_bytes(b"no database" * 1000)


LOSSES = ["gone", "emptied", "folder", "foreign", "garbage"]


@pytest.mark.parametrize(
    ("size", "numbers", "names"), [(2, True, True), (10, True, True), (40, False, True), (60, False, False)]
)
def test_confusion_picture_has_colours_numbers_names_and_title(size: int, numbers: bool, names: bool) -> None:
    counts = np.random.default_rng(size).integers(1, 9, (size, size))
    counts[0] = 0  # a class without images
    shares = counts / counts.sum(1, keepdims=True).clip(1)

    def drawn(counts: Any, name: str = "class", trial: str = "baseline/s1") -> Any:
        table = pd.DataFrame(counts, index=[f"{name}{index}" for index in range(size)])
        return np.asarray(trials.draw_confusion(trial, "val", 3, table).image).astype(int)

    def field(picture: Any) -> Any:
        top = 2 * trials.TITLE
        left = int((picture[top] != 255).any(1).argmax())  # the lightest blue is not white
        return picture[top : top + trials.FIELD, left : left + trials.FIELD]

    picture, cell, colours = drawn(counts), trials.FIELD / size, colormaps["Blues"](shares)[..., :3] * 255
    drawn_field = field(picture)
    for row, column in itertools.product(range(size), repeat=2):
        y, x = (int((place + 0.1) * cell) + 1 for place in (row, column))
        assert np.abs(drawn_field[y, x] - colours[row, column]).max() <= 1, "beside the number"
    assert (len(np.unique(drawn_field.reshape(-1, 3), axis=0)) > size**2) == numbers, "ink of numbers"
    other = drawn(counts, "breed")
    assert np.array_equal(field(other), drawn_field) and np.array_equal(other, picture) != names
    title = drawn(counts, trial="position=none/s0")
    assert not np.array_equal(title[: trials.TITLE], picture[: trials.TITLE])
    assert np.array_equal(title[trials.TITLE :], picture[trials.TITLE :])


def test_confusion_has_names_of_classes(tmp_path: Path) -> None:
    frame = pd.DataFrame({"split": "val", "label": [0, 2, 2], "prediction": [0, 2, 0]})
    for named in (False, True):
        names = np.array(["bark", "stone", "grass"])
        if named:
            frame["label_name"], frame["prediction_name"] = names[frame["label"]], names[frame["prediction"]]
        frame.to_parquet(tmp_path / "predictions.parquet")
        table = records.load_confusion_matrices(tmp_path / "predictions.parquet")["val"]
        assert list(table.columns) == list(table.index) == (["bark", "grass"] if named else [0, 2])
        assert table.to_numpy().tolist() == [[1, 0], [1, 1]]


def test_database_follows_umask_and_killed_writers_leave_nothing(tmp_path: Path) -> None:
    """The creating process is killed in the middle, as MLflow migrates; the next one removes what it left."""
    killed = (
        "import os, sys; from pathlib import Path; from vitlab.trackers import service\n"
        "service.create_tables = lambda file: (file.write_bytes(b'half'), os.kill(os.getpid(), 9))\n"
        "service.initialise_database(Path(sys.argv[1]))"
    )
    file = tmp_path / "mlflow.db"
    done = subprocess.run([sys.executable, "-c", killed, str(file)], check=False)
    assert done.returncode == -signal.SIGKILL and (tmp_path / ".mlflow.db.new").exists()
    umask = os.umask(0o002)
    try:
        with service.mute_mlflow():
            service.initialise_database(file)
    finally:
        os.umask(umask)
    assert not list(tmp_path.glob(".mlflow.db.new*")) and stat.S_IMODE(file.stat().st_mode) == 0o664


@pytest.mark.slow
@pytest.mark.parametrize("how", LOSSES)
def test_lost_database_gives_one_warning_and_is_refilled(
    how: str, done: Runs, database: Path, monkeypatch: Patch, caplog: Any
) -> None:
    tracker = done.tracker()
    tracker.update()
    lose(done.out / "mlflow.db", how)
    done.folder("baseline", 0).emit("metrics", step=5, epoch=1.0, images=80, metrics={"train/loss": 1.0})
    tracker.update()
    assert tracker.close()
    holds_all_once(done)
    [record] = [record for record in caplog.records if record.levelname in ("WARNING", "ERROR", "CRITICAL")]
    assert "mlflow.db" in record.getMessage() and "filled" in record.getMessage() and record.exc_info is None
    assert bool(list(done.out.glob("mlflow.db.damaged-*"))) == (how in ("folder", "foreign", "garbage"))


def test_user_file_is_not_replaced(runs: Runs, tmp_path: Path, caplog: Any) -> None:
    file = tmp_path / "songs.db"
    file.touch()
    lose(file, "foreign")
    before = file.read_bytes()
    assert runs.tracker(f"sqlite:///{file}").close() is None
    assert "it holds another program's tables" in caplog.text and file.read_bytes() == before


def test_delivery_leaves_environment_unchanged(runs: Runs, monkeypatch: Patch) -> None:
    """Another thread copies the environment to start a worker, which fails if a variable changes meanwhile.

    Once nothing more is delivered, it is as before.
    """
    service.unset_mlflow_settings()  # left by unclosed trackers of other tests
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "33")
    monkeypatch.delenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", raising=False)
    before = dict(os.environ)
    tracker = runs.tracker()
    assert os.environ["MLFLOW_HTTP_REQUEST_MAX_RETRIES"] == "3" and os.environ["MLFLOW_HTTP_REQUEST_TIMEOUT"] == "33"
    touched: list[str] = []
    for name in ("__setitem__", "__delitem__"):
        genuine = getattr(os._Environ, name)

        def record(self: Any, key: str, *value: str, genuine: Any = genuine) -> None:
            touched.append(key)
            genuine(self, key, *value)

        monkeypatch.setattr(os._Environ, name, record)
    tracker.update()
    assert touched == []
    assert tracker.close() and dict(os.environ) == before


def test_moved_and_recreated_output_folder(done: Runs) -> None:
    """A notebook that empties its folder must not write to the deleted database."""
    here, there = done.out, done.out.with_name("moved")
    done.out = here.rename(there)
    assert done.tracker().close()
    holds_all_once(done)
    shutil.copytree(there, here, ignore=shutil.ignore_patterns("mlflow*", "mlartifacts"))
    done.out = here
    assert done.tracker().close()
    assert {run.info.experiment_id for run in done.runs()} == {"1"}
    holds_all_once(done)


def test_trials_are_flat_and_arms_have_intervals(delivered: Runs) -> None:
    runs = delivered.runs()
    assert {(run.data.tags["arm"], run.data.tags["seed"]) for run in runs} == {(a, s) for a in ARMS for s in SEEDS}
    assert not any("mlflow.parentRunId" in run.data.tags for run in runs)
    assert {run.data.tags["vitlab.trial"] for run in runs} == {item.trial.key for item in delivered.plan.trials}
    assert len({frozenset(run.data.params) for run in runs}) == 1, "runs are compared by parameters all of them have"
    assert {run.data.params["model.position"] for run in runs} == {"learned", "none"}
    assert {run.data.params["train.effective_batch_size"] for run in runs} == {"16"}
    arms = delivered.runs("tiny/arms", kind="arm")
    assert [arm.info.run_name for arm in arms] == list(ARMS)
    for arm in arms:
        seeds = [run.data.metrics["final/val/accuracy"] for run in runs if run.data.tags["arm"] == arm.info.run_name]
        mean, sd = statistics.mean(seeds), statistics.stdev(seeds)
        found = arm.data.metrics
        assert [found["mean"], found["sd"]] == pytest.approx([100 * mean, 100 * sd], abs=0.06), "in percent"
        assert found["n"] == len(SEEDS) and "low" not in found, "two seeds have no useful interval"
        arms_data = json.loads((delivered.out / "studies/tiny/report/report.json").read_text())["arms"]
        [row] = [row for row in arms_data if row["arm"] == arm.info.run_name]
        assert found["planned"] == row["planned"] and found.get("p adjusted") == (row["p_corrected"] and 0.5)
        assert row["difference"] is None or found["difference"] == round(100 * row["difference"], 1)
        row["p_adjusted"] = row["p_corrected"]
        assert set(found) == {name for name in POINTS if row[name.replace(" ", "_")] is not None}
        assert arm.data.tags["verdict"] == (row["verdict"] or "baseline")


def test_each_of_ten_arms_has_its_colour() -> None:
    """By the code of the installed page, which computes the colour of a group from the name of the group."""
    [page] = (Path(mlflow.__file__).parent / "server/js/build/static/js").glob("main.*.js")
    code = page.read_text()
    assert re.search(
        r"(\w)=\(\1\+\w\.charCodeAt\(\w\)\)%255,(\w)=\(\2\+\1\)%255;return \w\.T\[\(\1\|\2<<8\)%\w\.T", code
    )
    [palette] = [json.loads(text) for text in re.findall(r'T:\(\)=>\w\}\);const \w=(\["#[^\]]*\])', code)]
    arms = ["baseline", "position=none", *(f"depth={number}" for number in range(8))]
    colours = set[str]()
    for place, arm in enumerate(arms):
        tags = records.display_tags([Arm(name, {}) for name in arms], arm)
        label = tags["arm label"]
        letters = [ord(letter) for letter in f"tag.arm label.{label}"]
        low = sum(letters) % 255
        high = sum((len(letters) - place) * letter for place, letter in enumerate(letters)) % 255
        assert palette[(low | high << 8) % len(palette)] == tags["mlflow.runColor"]
        name, _, value = arm.partition("=")
        assert label.rstrip(" ") == (f"{value} ({name})" if value else name)
        colours.add(tags["mlflow.runColor"])
    assert len(colours) == 10


@pytest.mark.parametrize(
    ("arm", "label"),
    [
        ("patch_size=4, position=none", "4, none (patch_size, position)"),
        ("patch_size=4, learned", "4, learned (patch_size)"),
        ("position=rope2d(theta=50, mix=true)", "rope2d(theta=50, mix=true) (position)"),
        ("f=f(x=1, y=g(2), z=3), w=h(4)", "f(x=1, y=g(2), z=3), h(4) (f, w)"),
        ("my arm", "my arm"),
    ],
)
def test_label_of_a_group_begins_with_what_tells_arms_apart(arm: str, label: str) -> None:
    assert dashboard.group_label_padded_for_colour(arm, 3).rstrip(" ") == label


def report_row(arm: str, **values: Any) -> dict[str, Any]:
    """Return an arm's row of a report; what is not given is missing."""
    texts = dict.fromkeys(
        [*(name.replace(" ", "_") for name in POINTS), "verdict", "baseline", "exploratory", "awaited", "p_corrected"]
    )
    texts |= dict.fromkeys(["complete_verdict", "refused", "equal_low", "choice_sd", "sound_mean"])
    numbers = {
        **dict.fromkeys([*STATUSES, "collapsed", "collapsed_pairs", "lost"], 0),
        "n": 3,
        "pairs": 3,
        "planned": 2,
    }
    paired = {"test": "paired t", "looks": 1, "family": 1, "registered": True}
    return {**texts, **numbers, **paired, "arm": arm, **values}


def test_arms_have_the_units_digits_and_sentences_of_the_report(delivered: Runs) -> None:
    """The width of intervals decides about digits; a report has a verdict with what qualifies it."""
    first = report_row("baseline", mean=0.51234, low=0.49, high=0.53)
    compared = {"baseline": "baseline", "difference": 0.0543, "difference_low": -0.01, "difference_high": 0.12}
    other = report_row("position=none", verdict="cannot tell", p_corrected=0.123456, mean=0.56664, **compared)

    def summaries(*rows: dict[str, Any]) -> list[Summary]:
        plan = replace(delivered.plan, arms=tuple(Arm(row["arm"], {}) for row in rows))
        return list(summarize_arms(plan, rows, "here").values())

    def note(*rows: dict[str, Any]) -> str:
        return html.unescape(summaries(*rows)[-1].tags["mlflow.note.content"])

    assert note(first) == "baseline reaches 51.2 % val/accuracy (95 % interval 49.0 to 53.0, 3 seeds)."
    assert note(first, other) == (
        "cannot tell: position=none is 5.4 points above baseline (95 % interval \N{MINUS SIGN}1.0 to 12.0, p = 0.12)."
    )
    assert summaries(first)[0].tags["metric"] == "val accuracy (%)"
    points = summaries(first, other)[1].points
    shown = {"difference": 5.4, "difference low": -1, "difference high": 12, "mean": 56.7, "p adjusted": 0.1235}
    assert {name: points[name] for name in COLUMNS if name in points} == shown
    narrow = {**other, "difference": 0.05432, "difference_low": 0.0542, "difference_high": 0.05444}
    assert [summaries(first, narrow)[1].points[name] for name in COLUMNS[:3]] == [5.432, 5.42, 5.444]
    collapsed = summaries({**first, "collapsed": 1, "low": None, "high": None})[0].points
    assert collapsed["mean"] == 51.2 and not {"low", "high"} & set(collapsed), "no interval by t holds"
    later = [{**other, "verdict": verdict, "exploratory": "a margin"} for verdict in ("better", "cannot tell")]
    verdicts = [summaries(first, row)[1].tags["verdict"] for row in later]
    assert verdicts == ["better (exploratory)", "cannot tell (exploratory)"]
    assert [note(first, row).partition(" position=")[0] for row in later] == [
        "exploratory:",
        "cannot tell: exploratory:",
    ]
    refused = {**other, "verdict": "refused", "exploratory": "a margin"}
    assert summaries(first, refused)[1].tags["verdict"] == "refused"
    rows = [first, other, {**other, "arm": "c, d", "verdict": "better"}, {**other, "arm": "e", "verdict": "better"}]
    answer = format_answer_in_one_line({"arms": rows, "answers": ["one", "two"]})
    assert answer == "better: c, d; e \N{MIDDLE DOT} cannot tell: position=none"
    later = [{**row, "exploratory": "its margin was changed"} for row in rows[1:]]
    later[2] |= {"verdict": "cannot tell", "complete_verdict": "better", "lost": 1}
    answer = format_answer_in_one_line({"arms": later, "answers": []})
    assert answer == (
        "better (exploratory): c, d \N{MIDDLE DOT} cannot tell (exploratory): position=none \N{MIDDLE DOT} "
        "cannot tell (1 lost seed) (exploratory): e"
    )


@pytest.mark.slow
def test_saved_view_groups_by_arm_and_charts_existing_metrics(delivered: Runs) -> None:
    experiment = delivered.client.get_experiment_by_name("tiny")
    link = study_links(delivered.out)["tiny"]
    view = json.loads(experiment.tags[f"mlflow.sharedViewState.{link.partition('viewStateShareKey=')[2]}"])
    assert set(view) == {"name", "createdAt", "updatedAt", "state"}
    state = json.loads(view["state"])
    charts = {chart["metricKey"]: chart for chart in state["compareRunCharts"] if "metricKey" in chart}
    metrics = set().union(*(run.data.metrics for run in delivered.runs()))
    assert set(charts) == metrics, "the page draws what is missing at its end"
    assert [name for name, chart in charts.items() if chart["deleted"]] == ["final/train/lr"], "nobody compares it"
    assert {charts[name]["type"] for name in ("final/val/accuracy", "final/test/accuracy", "cost/params")} == {"BAR"}
    assert {charts[name]["type"] for name in ("val/accuracy", "train/loss")} == {"LINE"}
    sections = [section["uuid"] for section in state["compareRunSections"]]
    assert {chart["metricSectionId"] for chart in charts.values()} == set(sections)
    at_once = {"final/val/accuracy", "val/accuracy", "train/loss"}
    assert at_once <= {name for name, chart in charts.items() if chart["metricSectionId"] == sections[0]}
    assert state["compareRunSections"][0]["display"] is True and state["runsHiddenMode"] == "SHOW_ALL"

    [key] = state["groupBy"]["groupByKeys"]
    assert state["groupBy"]["aggregateFunction"] == "average"
    for run in delivered.runs():
        stored_tags = run.data.tags if key["mode"] == "tag" else run.data.params
        label = stored_tags[key["groupByData"]]
        assert label.rstrip() == {"baseline": "baseline", "position=none": "none (position)"}[run.data.tags["arm"]]
        assert state["groupsExpanded"][f"{key['mode']}.{key['groupByData']}.{label}"] is False
    assert state["columnOrder"] == ["attributes.`Run Name`", *state["selectedColumns"]]
    order = [f"{state['orderByKey']} {'ASC' if state['orderByAsc'] else 'DESC'}"]
    runs_shown = delivered.client.search_runs([experiment.experiment_id], state["searchFilter"], order_by=order)
    assert [run.info.run_name for run in runs_shown] == [f"{arm}/s{seed}" for seed in SEEDS for arm in ARMS]
    every = json.loads(json.loads(experiment.tags[f"{dashboard.TAG}.{dashboard.TRIALS}"])["state"])
    assert not every.get("groupBy") and every["searchFilter"] == state["searchFilter"]
    [axes] = [chart for chart in every["compareRunCharts"] if chart["type"] == "PARALLEL"]
    assert axes["selectedParams"] == ["model.position"], "the others are the same in all arms"
    assert axes["selectedMetrics"] == ["final/train/loss", "final/test/accuracy", "final/val/accuracy"]
    assert all(set(axes["selectedMetrics"]) <= set(run.data.metrics) for run in delivered.runs())
    assert not [chart for chart in state["compareRunCharts"] if chart["type"] == "PARALLEL"], "not with words, grouped"


def artifacts(runs: Runs, run: str, folder: str = "") -> list[str]:
    return sorted(item.path for item in runs.client.list_artifacts(run, folder or None))


@pytest.mark.slow
def test_images_are_stored_once_by_step(delivered: Runs) -> None:
    """Under the names that the page reads: key, step, time, and a suffix for pictures of one step."""
    first = delivered.runs()[0].info.run_id
    names = artifacts(delivered, first, "images")
    pictures = [name.removeprefix("images/").split("+") for name in names]
    assert {tuple(parts[:3]) for parts in pictures} == {("confusion~test", "step", "4"), ("confusion~val", "step", "4")}
    assert Counter(parts[-1].rpartition(".")[2] for parts in pictures) == {"png": 2, "webp": 2}
    assert delivered.runs()[0].data.tags["mlflow.loggedImages"] == "True"
    for name in names:
        with Image.open(delivered.client.download_artifacts(first, name)) as picture:
            assert max(picture.size) <= 256 or name.endswith(".png")
    every = delivered.client.get_experiment_by_name("tiny").tags[f"{dashboard.TAG}.{dashboard.TRIALS}"]
    charts = [chart for chart in json.loads(json.loads(every)["state"])["compareRunCharts"] if chart["type"] == "IMAGE"]
    assert [(chart["imageKeys"], chart["step"]) for chart in charts] == [
        (["confusion/test"], 4),
        (["confusion/val"], 4),
    ]
    (delivered.out / "studies/tiny/mlflow-offsets.json").unlink()
    assert sync(delivered.out)[0].link is not None
    assert artifacts(delivered, first, "images") == names


def test_description_has_report_and_links(delivered: Runs) -> None:
    experiment = delivered.client.get_experiment_by_name("tiny")
    note = experiment.tags["mlflow.note.content"]
    of_arms, [study] = delivered.client.get_experiment_by_name("tiny/arms"), delivered.runs(kind="study")
    report = (delivered.out / "studies/tiny/report/report.md").read_text()
    title, *lines = report.splitlines()
    pages = study_links(delivered.out)
    notes = note, of_arms.tags["mlflow.note.content"], study.data.tags["mlflow.note.content"]
    for text, name, page in ((note, "table of arms with intervals", "tiny/arms"), (notes[1], "curves of arms", "tiny")):
        first = f"cannot tell: position=none \N{MIDDLE DOT} [{name}]({pages[page]})"
        assert html.unescape(text.partition("\n")[0]) == first, (
            "the list of experiments shows the begin as it is written"
        )
    assert notes[2].startswith("cannot tell: position=none\n"), "the list of runs shows no link"
    assert "of val accuracy (%) over n seeds" in html.unescape(notes[1])
    assert all(html.unescape(text).count(f"version {delivered.plan.version[:8]} in ") == 1 for text in notes)
    assert all("report%2Fsmall%2Farms.png" in text for text in notes[:2]) and pages["tiny"] in notes[1]
    assert "\n\n4 of 4 trials finished\n\n" in notes[2] and "/artifacts/report/report.html" in notes[2]
    assert len(note) <= 20_000 and f"\n{title.removeprefix('# ')}\n" in note
    for line in lines:
        assert "\\" in line or line.startswith(("![", "|")) or line in note
    files = artifacts(delivered, study.info.run_id, "report")
    images = re.findall(r"!\[\w+\]\(get-artifact\?path=([^&]+)&run_uuid=(\w+)\)", note)
    assert images and {run for _, run in images} == {study.info.run_id}
    small = artifacts(delivered, study.info.run_id, "report/small")
    assert {unquote(path) for path, _ in images} == set(small) and "](arms.png)" not in note
    for path in small:
        with Image.open(delivered.client.download_artifacts(study.info.run_id, path)) as picture:
            assert picture.width <= 860, "the page would show a part of it"
    linked = set(re.findall(r"#/experiments/(\d+)/runs/(\w+)", note))
    assert linked == {(study.info.experiment_id, study.info.run_id)}
    views = set(re.findall(r"viewStateShareKey=([\w-]+)", note))
    there = experiment.tags | of_arms.tags
    assert views == {dashboard.ARMS, dashboard.TRIALS, dashboard.RUNS, dashboard.SUMMARY}
    assert all(f"{dashboard.TAG}.{view}" in there for view in views)
    assert {"report/report.html", "report/arms.png", "report/results.csv"} <= set(files)


def test_answer_of_a_partial_study_counts_the_arms_that_have_run(delivered: Runs) -> None:
    """An arm of which no trial has begun is open in the report, and has no verdict here."""
    rows = [
        report_row("baseline", mean=0.5),
        report_row("position=none", verdict="cannot tell", missing=2, n=0, baseline="baseline"),
    ]
    report = {"arms": rows, "answers": ["no result yet: position=none."]}
    assert format_answer_in_one_line(report) == "1 of 2 arms run so far: no result yet: position=none."
    tags = [summary.tags for summary in summarize_arms(delivered.plan, rows, "here").values()]
    assert [each["verdict"] for each in tags] == ["baseline", "no result yet"]
    notes = ["baseline reaches 50.0 % val/accuracy.", "no trial of position=none can be judged yet (2 missing)."]
    assert [each["mlflow.note.content"] for each in tags] == notes
    none = [report_row("baseline", missing=1, paused=1, n=0), rows[1]]
    report = {"arms": none, "answers": ["cannot tell: no trial", "cannot tell: no trial"]}
    assert format_answer_in_one_line(report) == "0 of 2 arms run so far; 0 of 4 trials finished"
    more = report_row("c", verdict="worse", mean=0.1, missing=1)
    report = {"arms": [*rows, more], "answers": ["worse: c is 40 points below", "no result yet: position=none."]}
    assert format_answer_in_one_line(report) == "2 of 3 arms run so far: worse: c"
    more["awaited"] = 1  # the report calls such a comparison preliminary
    assert format_answer_in_one_line(report) == "2 of 3 arms run so far: worse so far: c"
    rows[1] |= {"missing": 1, "paused": 1, "awaited": 2}
    assert format_answer_in_one_line(report) == "2 of 3 arms run so far: worse so far: c", "no trial of it has ended"
    assert format_answer_in_one_line({**report, "overview": "Of 2"}).endswith(": worse so far: c"), "it counts both"
    tags = [summary.tags for summary in summarize_arms(delivered.plan, rows, "here").values()]
    assert [each["verdict"] for each in tags] == ["baseline", "no result yet"]


def test_long_description_is_cut_at_line_and_names_are_escaped() -> None:
    short, long = (
        dashboard.describe_study("# a\n\n" + "a line of it\n" * number, "better: b", ["[x](#/y)"], "r")
        for number in (3, 3000)
    )
    assert short.startswith("better: b\n\na\n\n[x](#/y)"), "no heading, of which the closed page shows a half"
    rows = ["| arm | n | mean |", "|:---|---:|---:|", r"| \[a\] \| b | 3 | 8.3 |", "| c |  | 12.25 |"]
    table = dashboard.describe_study("# a\n\n" + "\n".join(rows) + "\n\nend\n", "better: b", [], "r")
    block = [line for line in table.splitlines() if line.startswith("    ")]
    assert [line.split() for line in block if "─" not in line] == [
        ["arm", "n", "mean"],
        ["[a]", "|", "b", "3", "8.3"],
        ["c", "12.25"],
    ]
    assert len({len(line) for line in block}) == 1, "numbers are aligned at the right"
    assert len(long) <= dashboard.LIMIT and long.endswith("a line of it" + dashboard.MORE)
    plain = "better: b (+2.4 points); worse: rope_2d/s0, ~3 - x=1e-3!"
    assert dashboard.escape_markdown(plain) == plain, "read as it is in the list of experiments"
    for name in ("<b>|[x](javascript:y)", "__a__ *b* `c`", "~~d~~ $e$ #f @g", "http://h", "&#58;"):
        escaped = dashboard.escape_markdown(name)
        assert html.unescape(escaped) == name and not re.search(r"[\\`*\[\]<>|$@]|~~|__|://|#(?!\d+;)", escaped)


@pytest.mark.slow
def test_model_of_every_arm_is_stored_and_loaded(runs: Runs, monkeypatch: Patch) -> None:
    """Loaded by MLflow's own download with bitwise equal predictions, and stored once for any number of syncs."""

    def models(kind: str = "model") -> dict[str, Any]:
        actual = runs.client.search_logged_models([runs.client.get_experiment_by_name("tiny").experiment_id])
        return {model.tags["arm"]: model for model in actual if model.tags["vitlab.kind"] == kind}

    weights = runs.folder("baseline", 0).weights_file
    mine = weights.rename(runs.out.parent / "mine")
    weights.symlink_to(mine)
    assert runs.tracker(models="arms").close(runs.report) and set(models()) == {"position=none"}
    mine.replace(weights)
    for _ in range(2):
        assert runs.tracker(models="arms").close(runs.report)
    holds_all_once(runs)
    stored = models()
    assert set(stored) == set(ARMS) and {str(model.status) for model in stored.values()} == {"READY"}
    note = runs.client.get_experiment_by_name("tiny").tags["mlflow.note.content"]
    images = torch.randint(256, (3, 1, 8, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    for arm, model in stored.items():
        assert f"/models/{model.model_id}?" in note
        [run] = [run for run in runs.runs() if run.info.run_name == f"{arm}/s0"]
        assert [output.model_id for output in run.outputs.model_outputs] == [model.model_id]
        assert {metric.key: metric.value for metric in model.metrics}["final/val/loss"] == run.data.metrics[
            "final/val/loss"
        ]
        with monkeypatch.context() as patched:
            patched.setenv("MLFLOW_TRACKING_URI", runs.client.tracking_uri)
            folder = mlflow.artifacts.download_artifacts(f"models:/{model.model_id}")
        assert {path.name for path in Path(folder).iterdir()} == {"spec.json", "weights.safetensors", "README.md"}
        actual, transform = vitlab.load(folder)
        own, _ = vitlab.load(runs.file, arm=arm, seed=0, out=runs.out)
        assert torch.equal(actual(transform(images)).logits, own(transform(images)).logits)
    assert runs.tracker(models="arms", model_seed=1).close()
    assert models("superseded").keys() == stored.keys()
    assert {model.tags["seed"] for model in models().values()} == {"1"}
    assert not [name for run in runs.runs() for name in artifacts(runs, run.info.run_id) if "weights" in name]

    twin, tagged = models()["baseline"], list[str]()
    runs.client.create_logged_model(twin.experiment_id, "of a lost response", None, dict(twin.tags))
    with monkeypatch.context() as patched:
        patched.setattr(MlflowClient, "set_logged_model_tags", lambda _, model, tags: tagged.append(model))
        assert runs.tracker(models="arms", model_seed=1).close()
    every = runs.client.search_logged_models([twin.experiment_id])
    assert Counter(model.tags["vitlab.kind"] for model in every) == {"model": 2, "superseded": 2}
    assert not tagged, "a tag is sent where it differs"


def test_summaries_are_replaced_one_by_one_and_deleted_last(runs: Runs) -> None:
    client, study = runs.client, runs.client.create_experiment("tiny/arms")
    old = {name: Summary({"arm": name, "vitlab.root": "here"}, {}, {"mean": 0.5}) for name in ARMS}
    assert deliver_summaries(client, study, "here", "val/accuracy", old) == 2
    before = {run.info.run_name: run.info.run_id for run in client.search_runs([study])}
    new = old | {"baseline": old["baseline"]._replace(points={"mean": 0.6})}
    with pytest.MonkeyPatch.context() as patched, pytest.raises(ConnectionError):
        patched.setattr(MlflowClient, "log_batch", Mock(side_effect=ConnectionError))
        deliver_summaries(client, study, "here", "val/accuracy", new)
    assert set(before.values()) <= {run.info.run_id for run in client.search_runs([study])}
    assert deliver_summaries(client, study, "here", "val/accuracy", new) == 1
    after = {run.info.run_id: run.data.metrics["mean"] for run in client.search_runs([study])}
    assert sorted(after.values()) == [0.5, 0.6] and after.keys() & before.values() == {before["position=none"]}
    assert deliver_summaries(client, study, "here", "val/accuracy", new) == 0
    views = [json.loads(client.get_experiment(study).tags[f"{dashboard.TAG}.{dashboard.SUMMARY}"])["state"]]
    there = {name: arm._replace(tags=arm.tags | {"vitlab.root": "there"}) for name, arm in old.items()}
    assert deliver_summaries(client, study, "there", "val/accuracy", there) == 2
    assert len(client.search_runs([study])) == 4, "each folder has its own"
    views.append(json.loads(client.get_experiment(study).tags[f"{dashboard.TAG}.{dashboard.SUMMARY}"])["state"])
    assert [dashboard.ROOT in json.loads(view)["selectedColumns"] for view in views] == [False, True]
    state = json.loads(views[0])
    assert state["selectedColumns"] == ["tags.`verdict`", *(f"metrics.`{name}`" for name in COLUMNS)]
    widths = [state["columnWidths"][name] for name in state["selectedColumns"]]
    assert sum(widths) <= 782, "a page of 1500 pixels without the assistant shows all columns"


def test_axes_are_what_differs_between_arms(tmp_path: Path) -> None:
    model = {"type": "vit", "dim": 8, "depth": 1, "heads": 2, "position": "learned"}
    design = {name: {"model": {**model, "patch_size": size}} for name, size in (("coarse", 8), ("fine", 4))}
    file = study_file(tmp_path)
    file.write_text(yaml.safe_dump(yaml.safe_load(file.read_text()) | {"design": {"arms": design}}))
    _, plan = plan_study(file, out=tmp_path / "out")
    tracker = slot("tracker").build({"type": "mlflow"}, plan, Store(tmp_path / "out"), RunSpec())
    assert tracker._varied_params() == ["model.patch_size"]


def test_unstored_models_are_refused(runs: Runs) -> None:
    with pytest.raises(UserError, match="model_seed: no trial has seed 7; allowed: 0, 1"):
        runs.tracker(models="arms", model_seed=7)
    with pytest.raises(UserError, match=r"run\.keep is none"):
        slot("tracker").build({"type": "mlflow", "models": "arms"}, runs.plan, Store(runs.out), RunSpec(keep="none"))


# -- isolation --------------------------------------------------------------------------------------------------------


def test_password_in_address_reaches_only_the_server(runs: Runs, caplog: Any, monkeypatch: Patch) -> None:
    for setting in ("FACTOR", "JITTER"):
        monkeypatch.setenv(f"MLFLOW_HTTP_REQUEST_BACKOFF_{setting}", "0")

    class Health(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path == "/health" else 500)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Health) as server:
        threading.Thread(target=server.serve_forever, args=[0.01], daemon=True).start()
        uri = f"http://me:hush@127.0.0.1:{server.server_port}"
        assert parse_uri(uri, runs.out).is_reachable(), "a name and a password are no part of the host"
        assert "hush" not in parse_uri(uri, runs.out).links
        tracker = runs.tracker(uri)
        tracker.warn(ConnectionError(f"API request to {uri}/api/2.0/mlflow/runs/search?token=hush failed"))
        tracker.update()
        server.shutdown()
    runs.tracker("http://me:hush@127.0.0.1:9/db").close()
    assert "not up to date" in caplog.text and "hush" not in caplog.text and "127.0.0.1:9" in caplog.text
    for bad in ("http://me:hush@", "http://me:hu/sh@host:port", "ftp://me:hush@host/x"):
        with pytest.raises(UserError) as error:
            parse_uri(bad, runs.out)
        assert "hush" not in str(error.value) and "hu/sh" not in str(error.value)

    file = runs.out / "studies/tiny/study.yaml"
    file.write_text(file.read_text() + f"# {uri}\n")
    assert runs.tracker().close()
    [study] = runs.runs(kind="study")
    output = Path(runs.client.download_artifacts(study.info.run_id, "study.yaml")).read_text()
    assert "hush" not in output and "http://***@127.0.0.1" in output and yaml.safe_load(output)["study"] == "tiny"


@pytest.mark.parametrize("address", ["file:///a%00b", "sqlite:///a%00b.db", "sqlite:///a\0b.db", "a\0b"])
def test_address_with_a_nul_is_refused(address: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="it is not a URI"):
        parse_uri(address, tmp_path)


def test_command_line_password_is_not_stored(runs: Runs, caplog: Any, monkeypatch: Patch) -> None:
    uri = "http://me:hush@127.0.0.1:9"
    for changes in ({"run.tracker.uri": uri}, {"run": {"executor": "inline", "workers": 1, "tracker": {"uri": uri}}}):
        answer = vitlab.run(runs.file, out=runs.out, changes=changes)
        assert (answer.trained, answer.cached, answer.link) == (0, 4, None)
        holding = [path for path in runs.out.rglob("*") if path.is_file() and b"hush" in path.read_bytes()]
        assert holding == [] and "hush" not in caplog.text
        caplog.clear()
        assert sync(runs.out) == [Delivery("tiny")]
        [record] = caplog.records
        assert "http://***@127.0.0.1:9: the password of" in record.getMessage()
        assert "is not stored; give it as --tracking-uri, or set MLFLOW_TRACKING_URI" in record.getMessage()
    requests: list[str] = []
    monkeypatch.setattr(Address, "is_reachable", lambda self: requests.append(self.uri))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    sync(runs.out)
    assert set(requests) == {uri}


def test_sync_ignores_server_known_only_from_stored_files(runs: Runs, caplog: Any, monkeypatch: Patch) -> None:
    """Foreign output folders may have such files."""
    requests: list[str] = []
    monkeypatch.setattr(Address, "is_reachable", lambda self: requests.append(self.uri))
    file = runs.out / "studies/tiny/study.yaml"
    content = yaml.safe_load(file.read_text())
    content["run"]["tracker"] = {"type": "mlflow", "uri": "https://elsewhere.example:5000"}
    file.write_text(yaml.safe_dump(content))
    assert sync(runs.out) == [Delivery("tiny")] and requests == []
    assert "results are sent only to servers that you name yourself" in caplog.text
    sync(runs.out, tracker={"type": "mlflow", "uri": "https://elsewhere.example:5000"})
    assert set(requests) == {"https://elsewhere.example:5000"}


def test_names_leaving_folder_are_refused(runs: Runs) -> None:
    """Foreign results may have such names."""
    trial = runs.plan.trials[0]
    for key in ("../../elsewhere", "..", "a/b"):
        for plan in (
            replace(runs.plan, study=key),
            replace(runs.plan, trials=(replace(trial, trial=replace(trial.trial, key=key)),)),
            replace(runs.plan, trials=(), prerequisites=(replace(trial.trial, code=key),)),
        ):
            runs.plan = plan
            with pytest.raises(UserError, match="is not the name of a folder"):
                runs.tracker()


def test_split_with_path_names_no_file(tmp_path: Path) -> None:
    frame = pd.DataFrame({"split": ["val", "../../out", "val"], "label": [0, 1, 1], "prediction": [0, 1, 0]})
    frame.to_parquet(tmp_path / "predictions.parquet")
    assert set(records.load_confusion_matrices(tmp_path / "predictions.parquet")) == {"val"}


@pytest.mark.parametrize("name", ["a/../b", "./a", "a//b", "../..", "a[0]=1", "x" * 300, ".", "train/loss"])
def test_any_name_becomes_valid_mlflow_name(name: str) -> None:
    from mlflow.utils.validation import _validate_metric_name

    _validate_metric_name(records.mlflow_name(name))


@pytest.mark.slow
def test_unreadable_journal_does_not_block_others(done: Runs) -> None:
    bad_journal = done.folder("baseline", 0).path / "events.jsonl"
    whole = bad_journal.read_text()
    bad_journal.write_text("{torn\n" + whole)
    with (done.folder("baseline", 1).path / "events.jsonl").open("a") as journal:
        journal.write('{"t": 5, "kind": "metrics", "step": 9, "epoch": 1, "images": 9, "metrics": {"val/loss": 0.5}}\n')
    assert done.tracker().close()
    [run] = [run for run in done.runs() if run.info.run_name == "baseline/s1"]
    assert ("val/loss", "0.5", 5, 9) in done.stored(run)
    bad_journal.write_text(whole)
    assert done.tracker().close()
    holds_all_once(done)


def test_refused_user_is_told_what_is_missing(runs: Runs, caplog: Any, monkeypatch: Patch) -> None:
    class Refuses(BaseHTTPRequestHandler):
        code = 401

        def do_GET(self) -> None:
            self.send_response(200 if self.path == "/health" else self.code)
            self.end_headers()
            self.wfile.write(b"You are not authenticated. Please see https://www.mlflow.org/docs")

        do_POST = do_GET

        def log_message(self, *_: Any) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Refuses) as server:
        threading.Thread(target=server.serve_forever, args=[0.01], daemon=True).start()
        uri = f"http://127.0.0.1:{server.server_port}"
        for Refuses.code in (401, 403):
            assert runs.tracker(uri).close() is None
        server.shutdown()
    account, permission = (record.getMessage() for record in caplog.records)
    assert (
        f"{uri} refuses this user; set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD to the name and password "
        "of an account there." in account
    )
    assert (
        f"{uri} answers 403: this account lacks the permission MANAGE on the experiments tiny and tiny/arms, which their "
        "owner can give, or use one account for all; or --allowed-hosts of the server lacks this address." in permission
    )


# -- many -------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_concurrent_workers_store_every_point_once(database: Path, tmp_path: Path, monkeypatch: Patch) -> None:
    """A short form of ``benchmarks/tracking.py``, with enough runs for several pages."""
    monkeypatch.setattr(tracking, "UPDATE_S", 0.2)
    monkeypatch.setattr(service, "PAGE", 3)
    out = tmp_path / "out"
    out.mkdir()
    shutil.copy(database, out / "mlflow.db")
    store, plan = tracking.log_trials(out, None, trials=10, workers=2, points=5, step_s=0.01)
    assert sum(tracking.expected(store, plan).values()) == 10 * (5 * 6 + 8)
    assert tracking.faults(store, plan, out / "mlflow.db") == []
    (store.study(plan.study) / "mlflow-offsets.json").unlink()
    assert slot("tracker").build("mlflow", plan, store, RunSpec()).close()
    assert tracking.faults(store, plan, out / "mlflow.db") == []
    with sqlite3.connect(out / "mlflow.db") as connection:
        connection.execute("delete from metrics where step = 3 and key = 'val/loss'")
    connection.close()
    assert "10 points missing" in tracking.faults(store, plan, out / "mlflow.db")[0]


def test_view_too_long_for_tag_is_compressed() -> None:
    charts = [dashboard.Section("metrics", [f"metric {number}" for number in range(500)])]
    view = dashboard.View("long", "trial", charts, [])
    value = dashboard.encode_view(view, 0)
    packed = json.loads(value)["state"]
    assert len(value) <= dashboard.LIMIT and packed.startswith("deflate;")
    assert json.loads(zlib.decompress(base64.b64decode(packed.removeprefix("deflate;")))) == dashboard.view_state(view)


@pytest.mark.parametrize("uri", ["file:///tmp/mlruns", "mlruns", "./mlruns", "postgre://host/db"])
def test_unsupported_address_is_refused(uri: str, runs: Runs, monkeypatch: Patch, capsys: Any) -> None:
    monkeypatch.setattr("signal.signal", lambda *_: None)  # the command line has its own handlers
    for words in (["sync", runs.out], ["run", runs.file, "--out", runs.out]):
        monkeypatch.setattr(sys, "argv", ["vitlab", *map(str, words), "--tracking-uri", uri])
        with pytest.raises(SystemExit) as exit_:
            cli.main()
        *earlier, last = capsys.readouterr().err.splitlines()
        assert exit_.value.code == 2 and uri in last and all(line.startswith("reading ") for line in earlier)
    assert runs.client.get_experiment_by_name("tiny") is None


@pytest.mark.slow
def test_following_imports_no_mlflow(delivered: Runs) -> None:
    looks = [["--help"], ["list"]]
    looks += [[name, str(delivered.file), "--out", str(delivered.out)] for name in ("status", "report", "plan")]
    code = "import sys, vitlab, vitlab.trackers\nfrom vitlab.cli import cli\n"
    code += "".join(f"cli.main({words!r}, standalone_mode=False)\n" for words in looks)
    code += "print('mlflow' in sys.modules)"
    done = warm.python(code, delivered.out, os.environ)
    assert done.returncode == 0 and done.stdout.splitlines()[-1] == "False", done.stderr


# -- vitlab ui --------------------------------------------------------------------------------------------------------


def test_ui_opens_latest_or_named_study(tmp_path: Path, monkeypatch: Patch) -> None:
    from vitlab.trackers import server

    runner, served = CliRunner(), list[Path]()
    refused = runner.invoke(cli.cli, ["ui", "--out", str(tmp_path)])
    assert (
        "has no MLflow database with a study. Studies to open: none. To deliver what has run, type: vitlab sync "
        in (str(refused.exception))
    )
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setenv("MLFLOW_TRACKING_URI", NOWHERE)
    assert f"MLFLOW_TRACKING_URI names {NOWHERE}, which has" in str(
        runner.invoke(cli.cli, ["ui", "--out", str(tmp_path)]).exception
    )
    for number, name in enumerate(["older", "newer", "undelivered"]):
        plan = tmp_path / "studies" / name / "plan.json"
        plan.parent.mkdir(parents=True)
        plan.write_text("{}")
        os.utime(plan, (1e9 + number, 1e9 + number))
    with closing(sqlite3.connect(tmp_path / "mlflow.db")) as database, database:
        database.execute("create table experiments (experiment_id, name, lifecycle_stage)")
        experiments = [(1, "older", "active"), (2, "newer", "active"), (3, "undelivered", "deleted")]
        experiments += [(7, "older/arms", "active"), (7, "newer/arms", "active"), (4, "mine", "active")]
        database.executemany("insert into experiments values (?, ?, ?)", experiments)

    class Stopped:
        def wait(self) -> int:
            raise KeyboardInterrupt

    @contextmanager
    def running(root: Path, **_: Any) -> Iterator[Stopped]:
        served.append(root)
        yield Stopped()

    monkeypatch.setattr(server, "running_server", running)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    for words, number in ((["ui"], 2), (["ui", "older"], 1), (["ui", "older/arms"], 1)):
        shown = runner.invoke(cli.cli, [*words, "--out", str(tmp_path)])
        *lines, others = map(str.split, shown.output.splitlines()[1:4])
        name, other = ("older", "newer") if number == 1 else ("newer", "older")
        assert [page for page, _ in lines] == [name, f"{name}/arms"] and others[-1] == f"{other}."
        assert f"/experiments/{number}/" in lines[0][1] and "/experiments/7/" in lines[1][1]
    monkeypatch.chdir(tmp_path)
    for uri in (f"sqlite:///{tmp_path.resolve() / 'mlflow.db'}", "sqlite:///mlflow.db", NOWHERE):
        monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
        shown = runner.invoke(cli.cli, ["ui", "--out", str(tmp_path)])
        assert ("open it there" in shown.output) == (uri == NOWHERE), "the very database is not elsewhere"
    wrong = runner.invoke(cli.cli, ["ui", "oldr", "--out", str(tmp_path)])
    assert re.search(r"has no MLflow database with study 'oldr'.* Did you mean 'older'\?", str(wrong.exception))
    assert served == [tmp_path.resolve()] * 6


def test_ui_opens_a_study_where_it_was_delivered(tmp_path: Path) -> None:
    records = {"served": {"ab": "http://server/#/experiments/4"}, "sent": {"offline:/sent": "wandb sync runs/*"}}
    for name, record in records.items():
        (tmp_path / "studies" / name).mkdir(parents=True)
        (tmp_path / "studies" / name / "plan.json").write_text("{}")
        (tmp_path / "studies" / name / "delivered.json").write_text(json.dumps(record))
    for words in (["ui"], ["ui", "served"]):
        shown = CliRunner().invoke(cli.cli, [*words, "--out", str(tmp_path)])
        assert shown.exit_code == 0 and "served   http://server/#/experiments/4\n" in shown.output
    sent = str(CliRunner().invoke(cli.cli, ["ui", "sent", "--out", str(tmp_path)]).exception)
    assert "its folder says how to go on there: wandb sync runs/*. Studies to open: served. " in sent
    assert sent.endswith(f"type: vitlab sync {tmp_path} --tracker mlflow")


def test_sync_records_where_a_study_is_and_names_each_that_is_not(runs: Runs, caplog: Any) -> None:
    twin = shutil.copytree(runs.out / "studies/tiny", runs.out / "studies/twin") / "plan.json"
    twin.write_text(json.dumps({**json.loads(twin.read_text()), "study": "twin"}))
    assert [item.link for item in sync(runs.out, tracker={"type": "mlflow", "uri": NOWHERE})] == [None, None]
    assert caplog.text.count(f"no answer from {NOWHERE}") == 2
    shutil.rmtree(twin.parent)
    other = runs.out.with_name("other.db")
    [item] = sync(runs.out, tracker={"type": "mlflow", "uri": f"sqlite:///{other}"})
    assert item.link and item.link.startswith(f"mlflow server --backend-store-uri sqlite:///{other}, then open http://")
    assert study_links(runs.out)["tiny"] == item.link


def test_sync_asks_for_the_server_that_only_the_environment_of_a_run_named(
    runs: Runs, caplog: Any, monkeypatch: Patch
) -> None:
    (runs.out / "studies/tiny" / DELIVERED).unlink(missing_ok=True)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", NOWHERE)
    assert runs.tracker().close() is None
    monkeypatch.delenv("MLFLOW_TRACKING_URI")
    assert sync(runs.out) == [Delivery("tiny")]
    assert "name it by --tracking-uri or MLFLOW_TRACKING_URI" in caplog.text
    [item] = sync(runs.out, tracker="mlflow")
    assert item.link
    # Earlier versions wrote one place.
    (runs.out / "studies/tiny" / DELIVERED).write_text(json.dumps({"place": "embedded", "link": item.link}))
    assert sync(runs.out)[0].link == item.link


def test_request_that_times_out_ends_a_delivery(runs: Runs, caplog: Any, monkeypatch: Patch) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "1")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    ended = threading.Event()

    class Hangs(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path != "/health":
                ended.wait(30)
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Hangs) as server:
        threading.Thread(target=server.serve_forever, args=[0.01], daemon=True).start()
        uri = f"http://127.0.0.1:{server.server_port}"
        assert runs.tracker(uri).close() is None
        ended.set()
        server.shutdown()
    assert f"{uri} no longer answers" in caplog.text


def test_port_of_server_that_speaks_no_http_is_refused(tmp_path: Path) -> None:
    from vitlab.trackers import server

    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with (
            pytest.raises(UserError, match=f"port {port} of 127.0.0.1 is used by another server"),
            server.running_server(tmp_path, port=port),
        ):
            pass
    with socket.create_server(("127.0.0.1", 0)) as other:

        def greet() -> None:
            connection, _ = other.accept()
            with connection:
                connection.sendall(b"SSH-2.0-OpenSSH_9.6\r\n")

        threading.Thread(target=greet).start()
        assert not parse_uri(f"http://127.0.0.1:{other.getsockname()[1]}", tmp_path).is_reachable()


@pytest.mark.slow
def test_server_answers_from_a_folder_of_its_own_and_is_ended(delivered: Runs, monkeypatch: Patch) -> None:
    from vitlab.trackers import server

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    before = sorted(delivered.out.iterdir())
    with server.running_server(delivered.out, port=port) as process:
        assert Path(f"/proc/{process.pid}/cwd").resolve() not in (Path.cwd(), delivered.out)
        client = MlflowClient(tracking_uri=f"http://127.0.0.1:{port}")
        assert client.get_experiment_by_name("tiny") is not None
        base = f"http://127.0.0.1:{port}"
        assert service.is_served(base, "tiny", delivered.out) and service.is_served(base, "tiny/arms", delivered.out)
        assert not service.is_served(base, "tiny", delivered.out / "studies") and not service.is_served(
            base, "other", delivered.out
        )
        with (
            pytest.raises(UserError, match=f"port {port} of 127.0.0.1 is used by another server"),
            server.running_server(delivered.out, port=port),
        ):
            pass
    assert process.poll() is not None and sorted(delivered.out.iterdir()) == before
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)
