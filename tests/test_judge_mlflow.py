"""Tests of ``vitlab judge`` on experiments of MLflow, in a database, a folder and behind a server."""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
import math
import random
import re
import shlex
import shutil
import socket
import sqlite3
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import closing
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import url2pathname

import pandas as pd
import pytest
from click.testing import CliRunner, Result
from mlflow import MlflowClient
from scipy.stats import ttest_rel

import vitlab
from vitlab import cli
from vitlab.cli.report import judge_command as command
from vitlab.errors import UserError
from vitlab.judging.experiment import read_experiment
from vitlab.judging.files import Columns, Table
from vitlab.judging.judgement import judge
from vitlab.trackers import server, service

pytestmark = pytest.mark.usefixtures("no_figures")

METRIC = "val/accuracy"
VALUES = {"vit": [0.91, 0.92, 0.9, 0.93], "rope": [0.94, 0.95, 0.92, None], "none": [0.7, 0.72, 0.71, math.inf]}
"""Values by arm and seed; one training failed, and one diverged."""
VALIDATION = 288  #: validation images of the digits
MANY = 1100  #: more runs than MLflow returns in an answer
STUDY = """
study: tiny
base:
  data: {type: digits}
  model: {type: vit, patch_size: 4, dim: 8, depth: 1, heads: 2, position: learned}
  train: {steps: 4, batch_size: 16, evaluations: 2}
design: {one_at_a_time: {model.position: [none, sincos2d]}}
seeds: 3
run: {executor: inline}
"""


def client_of(uri: str) -> MlflowClient:
    return MlflowClient(tracking_uri=uri, registry_uri=uri)


def log_runs(client: MlflowClient, name: str) -> None:
    """Log an experiment as a user's scripts leave it."""
    experiment = client.create_experiment(name)
    clock = itertools.count(1_700_000_000_000, 1000)

    def log(run: str, status: str, values: list[float], parent: str = "", **names: Any) -> str:
        tags = {"mlflow.parentRunId": parent} if parent else {}
        identity = client.create_run(experiment, start_time=next(clock), run_name=run, tags=tags).info.run_id
        for key in names.keys() & {"model"}:
            client.log_param(identity, key, names[key])
        for key in names.keys() & {"seed"}:
            client.set_tag(identity, key, names[key])
        # The last step counts, not what was logged last.
        for step, value in sorted(enumerate(values), reverse=True):
            client.log_metric(identity, METRIC, value, timestamp=next(clock), step=step)
        if status != "RUNNING":
            client.set_terminated(identity, status)
        return str(identity)

    log("prepare the data", "FINISHED", [])
    sweep = log("sweep", "FINISHED", [0.1], model="vit", seed=0)
    log("rope 2, out of memory", "FAILED", [0.2], model="rope", seed=2)
    for arm, values in VALUES.items():
        for seed, value in enumerate(values):
            parent = sweep if arm == "vit" else ""
            status = "FAILED" if value is None else "FINISHED"
            log(f"{arm} {seed}", status, [0.5, 0.3 if value is None else value], parent, model=arm, seed=seed)
    log("vit 8", "RUNNING", [0.99], model="vit", seed=8)
    log("rope 8", "KILLED", [0.01], model="rope", seed=8)
    log("no seed", "FINISHED", [0.5], model="none")
    client.delete_run(log("vit 9", "FINISHED", [0.2], model="vit", seed=9))


def log_many(client: MlflowClient, database: Path) -> None:
    """Write copies of a run at once, which MLflow's client would take minutes for."""
    first = client.create_run(client.create_experiment("many")).info.run_id
    client.set_terminated(first)
    runs = [f"{number:032d}" for number in range(MANY)]
    with closing(sqlite3.connect(database)) as connection, connection:
        names = [row[1] for row in connection.execute("pragma table_info(runs)")]
        copied = ", ".join({"run_uuid": ":run", "start_time": ":start"}.get(name, name) for name in names)
        connection.executemany(
            f"insert into runs select {copied} from runs where run_uuid = :first",
            [{"run": run, "start": number, "first": first} for number, run in enumerate(runs)],
        )
        connection.execute("delete from runs where run_uuid = ?", (first,))
        for table, key in (("params", "model"), ("tags", "seed")):
            rows = [("ab"[number % 2] if key == "model" else str(number // 2), run) for number, run in enumerate(runs)]
            connection.executemany(
                f"insert into {table} (key, value, run_uuid) values (?, ?, ?)", [(key, *row) for row in rows]
            )
        connection.executemany(
            "insert into latest_metrics (key, value, timestamp, step, is_nan, run_uuid) values ('acc', ?, 0, 0, 0, ?)",
            [(0.5 + number / 1e4, run) for number, run in enumerate(runs)],
        )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return an output folder with the database of a trained study and further experiments."""
    folder = tmp_path_factory.mktemp("judge") / "out"
    file = folder.with_name("tiny.yaml")
    file.write_text(STUDY)
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("MLFLOW_TRACKING_URI", raising=False)
        assert vitlab.run(file, out=folder).link
    with service.mute_mlflow():
        client = client_of(f"sqlite:///{folder / 'mlflow.db'}")
        log_runs(client, "positions")
        log_many(client, folder / "mlflow.db")
        client.delete_experiment(client.create_experiment("gone"))
        client.create_experiment("empty")
        twice = client.create_experiment("twice")
        for value in (0.5, 0.6):
            run = client.create_run(twice, run_name=f"of {value}", tags={"seed": "0"}).info.run_id
            client.log_param(run, "seed", "1")
            client.log_param(run, "model", "a")
            client.log_metric(run, "acc", value)
            client.set_terminated(run)
        sweep = client.create_experiment("sweep")
        for model, lr in itertools.product("ab", (0.1, 0.2)):
            run = client.create_run(sweep).info.run_id
            client.log_param(run, "model", model)
            client.log_param(run, "lr", lr)
            client.log_metric(run, "acc", lr)
            client.set_terminated(run)
    return folder


@pytest.fixture(scope="module")
def database(folder: Path) -> str:
    return f"sqlite:///{folder / 'mlflow.db'}"


@pytest.fixture(scope="module")
def address(folder: Path) -> Iterator[str]:
    """Run MLflow's server on the database."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with server.running_server(folder, port=port):
        yield f"http://127.0.0.1:{port}"


@pytest.fixture(params=["database", pytest.param("server", marks=pytest.mark.slow)])
def place(request: pytest.FixtureRequest, database: str) -> str:
    """Return what addresses of experiments begin with."""
    return database if request.param == "database" else request.getfixturevalue("address")


@pytest.fixture(scope="module")
def mlruns(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the URI of a folder that MLflow has written, which it refuses to do without its variable."""
    folder = tmp_path_factory.mktemp("files") / "ml runs"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
        log_runs(client_of(folder.as_uri()), "positions")
    return folder.as_uri()


def page(place: str, database: str, name: str) -> str:
    """Return the address of an experiment's page in the browser."""
    return f"{place}/#/experiments/{client_of(database).get_experiment_by_name(name).experiment_id}"


def table_of(uri: str, **options: Any) -> Table:
    return read_experiment(uri, Columns(**{"metric": METRIC, "arm": "model", "seed": "seed", **options}))


def call(uri: str, *options: str) -> Result:
    words = [uri, "--arm", "model", "--seed", "seed", "--metric", METRIC, *options]
    return CliRunner().invoke(command, words)


# -- stores -----------------------------------------------------------------------------------------------------------


def judged(uri: str, **options: Any) -> dict[str, Any]:
    return judge(uri, **{"metric": METRIC, "arm": "model", "seed": "seed", **options}).report.to_json()


@pytest.mark.slow
def test_table_has_the_runs_that_count(database: str) -> None:
    """Expected is what :func:`log_runs` logged: finished and failed runs that are not deleted, with arm and seed."""
    table = table_of(f"{database}#positions")
    rows = dict(zip(table.runs, table.rows.itertuples(index=False, name=None), strict=True))
    assert rows.keys() == {
        "rope 2, out of memory",
        *(f"{arm} {seed}" for arm, values in VALUES.items() for seed in range(len(values))),
    }
    for arm, values in VALUES.items():
        for seed, value in enumerate(values):
            logged, status = (0.3, "FAILED") if value is None else (value, "FINISHED")
            # MLflow's databases store infinity as the largest number.
            assert rows[f"{arm} {seed}"] == (arm, str(seed), min(logged, sys.float_info.max), status)


@pytest.mark.slow
def test_every_store_gives_the_same_runs(
    database: str, mlruns: str, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference = table_of(f"{database}#positions")
    link = page(place, database, "positions")
    pages = (link, f"{link}/runs?workflowType=machine_learning&viewStateShareKey=x", f"{place}#positions")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    for uri in (*pages, f"{mlruns}#positions"):
        table = table_of(uri)
        rows = table.rows.assign(**{METRIC: table.rows[METRIC].clip(upper=sys.float_info.max)})
        pd.testing.assert_frame_equal(rows, reference.rows)
        assert (table.name, table.runs, table.notes) == ("positions", reference.runs, reference.notes)


@pytest.mark.slow
def test_folder_that_mlflow_refuses_has_its_advice(mlruns: str, tmp_path: Path) -> None:
    folder = tmp_path / "ml runs"  # MLflow's client caches the stores that it has opened
    shutil.copytree(url2pathname(urlsplit(mlruns).path), folder)
    with pytest.raises(UserError) as error:
        table_of(f"{folder.as_uri()}#positions")
    text = str(error.value)
    [command_line] = re.findall(r"type (mlflow migrate-filestore .*), and give (sqlite:///\S+)#NAME", text)
    words = shlex.split(command_line[0].replace("sqlite:///mlflow.db", f"sqlite:///{tmp_path}/new.db"))
    assert words[0] == "mlflow"
    with service.mute_mlflow(), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        from mlflow.cli import cli as mlflow_command

        done = CliRunner().invoke(mlflow_command, words[1:])
    assert done.exit_code == 0, done.output
    assert judged(f"sqlite:///{tmp_path}/new.db#positions")["study"] == "positions"


@pytest.mark.slow
def test_more_runs_than_fit_a_page_are_read_to_the_end(database: str, place: str) -> None:
    rows = table_of(page(place, database, "many"), metric="acc").rows
    assert len(rows) == MANY and set(rows["model"]) == {"a", "b"}
    assert rows["acc"].tolist() == [0.5 + number / 1e4 for number in range(MANY)]


def test_filter_of_a_page_selects_its_runs_with_a_note(database: str, place: str) -> None:
    link = f"{page(place, database, 'positions')}/runs?searchFilter=params.model+%21%3D+%22none%22&orderByKey="
    table = table_of(link)
    assert set(table.rows["model"]) == {"vit", "rope"}
    assert 'Only runs that the filter of the address selects are judged: params.model != "none".' in table.notes


@pytest.mark.slow
def test_older_database_is_read_and_not_upgraded(tmp_path: Path) -> None:
    """The file has the tables of MLflow 2.4, which its client refuses, and has the same bytes afterwards."""
    file = tmp_path / "older.db"
    with service.mute_mlflow():
        from alembic import command as alembic
        from mlflow.store.db.utils import _get_alembic_config, create_sqlalchemy_engine
        from mlflow.store.tracking.dbmodels.initial_models import Base

        engine = create_sqlalchemy_engine(f"sqlite:///{file}")
        Base.metadata.create_all(engine)
        with engine.begin() as bound:
            config = _get_alembic_config(f"sqlite:///{file}")
            config.attributes["connection"] = bound
            alembic.upgrade(config, "97727af70f4d")
        engine.dispose()
    with closing(sqlite3.connect(file)) as connection, connection:
        connection.execute("insert into experiments (experiment_id, name, lifecycle_stage) values (1, 'old', 'active')")
        for run, (arm, seed) in enumerate(itertools.product("ab", range(3))):
            connection.execute(
                "insert into runs (run_uuid, name, experiment_id, status, lifecycle_stage, start_time, user_id) "
                "values (?, ?, 1, 'FINISHED', 'active', ?, 'me')",
                (f"{run:032d}", f"{arm} {seed}", run),
            )
            rows = [("model", arm), ("seed", str(seed))]
            connection.executemany(
                "insert into params (key, value, run_uuid) values (?, ?, ?)", [(*row, f"{run:032d}") for row in rows]
            )
            connection.execute(
                "insert into latest_metrics (key, value, timestamp, step, is_nan, run_uuid) "
                "values ('acc', ?, 0, 0, 0, ?)",
                (0.9 + 0.01 * seed, f"{run:032d}"),
            )
    before = hashlib.sha256(file.read_bytes()).hexdigest()
    file.chmod(0o444)
    assert len(table_of(f"sqlite:///{file}#old", metric="acc").rows) == 6
    assert hashlib.sha256(file.read_bytes()).hexdigest() == before
    assert [path.name for path in tmp_path.iterdir()] == ["older.db"]


def test_database_of_a_newer_mlflow_is_refused_with_sentence(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "newer.db"
    file.write_bytes((folder / "mlflow.db").read_bytes())
    with closing(sqlite3.connect(file)) as connection, connection:
        connection.execute("update alembic_version set version_num = 'fedcba987654'")
    with pytest.raises(UserError, match=r"a newer MLflow has written it: type pip install --upgrade mlflow"):
        table_of(f"sqlite:///{file}#positions")


# -- judgements -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_runs_are_judged_as_a_table_of_their_values(database: str, tmp_path: Path) -> None:
    rows = [
        {"model": arm, "seed": seed, METRIC: None if value is None else value}
        for arm, values in VALUES.items()
        for seed, value in enumerate(values)
    ]
    file = tmp_path / "results.csv"
    pd.DataFrame(rows).to_csv(file, index=False)
    expected = judged(str(file), baseline="vit")
    document = json.loads(call(f"{database}#positions", "--baseline", "vit", "--format", "json").stdout)
    assert document["study"] == "positions"
    ended = {"failed", "diverged"}  # a table does not say why a value is missing
    assert [{key: value for key, value in row.items() if key not in ended} for row in document["arms"]] == [
        {key: value for key, value in row.items() if key not in ended} for row in expected["arms"]
    ]
    assert document["answers"] == expected["answers"]
    counts = {row["arm"]: (row["done"], row["failed"], row["diverged"]) for row in document["arms"]}
    assert counts == {"vit": (4, 0, 0), "rope": (3, 1, 0), "none": (3, 0, 1)}


def test_runs_that_do_not_count_are_named(database: str) -> None:
    judgement = judge(f"{database}#positions", metric=METRIC, arm="model", seed="seed")
    assert judgement.notes[:7] == (
        "Warning: 1 run left out, still running or never ended: vit 8.",
        "Warning: 1 run left out, stopped before the end: rope 8.",
        "1 run left out, without 'model': prepare the data.",
        "1 run left out, without 'seed': no seed.",
        "1 run left out, in favour of nested runs: sweep.",
        "Values of trainings that failed do not count: rope 2, out of memory; rope 3.",
        "1 run left out, failed, and repeated with the same arm and seed: rope 2, out of memory.",
    )
    assert "Warning: 2 lost seeds, without a value: rope, seed 3; none, seed 3." in judgement.notes


def test_runs_without_seeds_are_judged_unpaired(database: str) -> None:
    table = table_of(f"{database}#sweep", metric="acc", seed=None)
    assert len(table.rows) == 4 and not any("'seed'" in note for note in table.notes)
    notes = judge(f"{database}#sweep", metric="acc", arm="model").notes
    assert any(note.startswith("Without seed the arms are not paired") for note in notes)
    assert not any("repeated" in note for note in notes)


@pytest.mark.slow
def test_every_reader_finds_the_same_columns_whatever_is_named(folder: Path, database: str, tmp_path: Path) -> None:
    """The runs are paired, so that p values are those of pairs of equal seeds, in whatever order the rows are."""
    draw = random.Random(0)
    rows = [
        {"arm": f"{data}: {model}", "model": model, "data": data, "of": "" if model == "vit" else "vit"}
        | {"random_seed": seed, "acc": round(80 + 5 * seed + shift + draw.random(), 3)}
        | {"loss": round(5 - seed + draw.random() / 9, 3)}
        for data in ("digits", "shapes")
        for model, shift in (("vit", 0.0), ("rope", 0.6))
        for seed in range(4)
    ]
    draw.shuffle(rows)
    frame = pd.DataFrame(rows)
    readers: list[Any] = [
        frame,
        *(tmp_path / f"r.{form}" for form in ["csv", "tsv", "json", "jsonl", "parquet", "xlsx"]),
    ]
    frame.to_csv(readers[1], index=False)
    frame.to_csv(readers[2], index=False, sep="\t")
    frame.to_json(readers[3], orient="records")
    frame.to_json(readers[4], orient="records", lines=True)
    frame.to_parquet(readers[5])
    frame.to_excel(readers[6], index=False)
    client = client_of(database)
    with service.mute_mlflow():
        experiment = client.create_experiment("readers")
        readers.append(f"{database}#readers")
        loggers = {"acc": client.log_metric, "loss": client.log_metric, "model": client.set_tag, "of": client.set_tag}
        for row in rows:
            run = client.create_run(experiment).info.run_id
            for key, value in row.items():
                loggers.get(key, client.log_param)(run, key, value)
            client.set_terminated(run)
    one_arm = [{}, {"arm": "arm"}]
    of_blocks = [{"arm": "model", "block": "data"}, {"arm": "model", "block": "data", "baselines": "of"}]
    seeds_and_metrics = [(None, "acc"), (None, "loss"), ("random_seed", "loss")]
    for named, (seed, metric) in itertools.product((*one_arm, *of_blocks), seeds_and_metrics):
        options: dict[str, Any] = {**named, "seed": seed, "metric": metric, "over_blocks": None}
        if "block" in named:
            options["over_blocks"] = "difference"
        if "baselines" not in named:
            options["baseline"] = "vit" if "block" in named else "digits: vit"
        expected = None
        for reader in readers:
            judged_arms = judge(reader, **options)
            found = {row["arm"]: row["p"] for row in judged_arms.report.arms if row["baseline"] is not None}
            pairs = {row["pairs"] for row in judged_arms.report.arms} - {None}
            assert pairs == {4} and found == pytest.approx(expected or found, rel=1e-9), (reader, options)
            expected = found
        values = frame.set_index(["arm", "random_seed"])[metric].unstack("arm")
        own = judge(frame.query("data == 'digits'"), metric=metric, baseline="digits: vit").report.arms
        [p] = [row["p"] for row in own if row["baseline"] is not None]
        assert p == pytest.approx(ttest_rel(values["digits: rope"], values["digits: vit"]).pvalue)


def test_of_several_columns_that_may_hold_seeds_one_is_asked_for(database: str) -> None:
    frame = pd.DataFrame({"arm": [*"aabb"], "seed": [0, 1, 0, 1], "random_state": 42, "acc": [0.1, 0.2, 0.3, 0.5]})
    with service.mute_mlflow():
        client = client_of(database)
        experiment = client.create_experiment("two seeds")
        for row in frame.to_dict("records"):
            run = client.create_run(experiment).info.run_id
            for key in ("arm", "seed", "random_state"):
                client.log_param(run, key, row[key])
            client.log_metric(run, "acc", row["acc"])
            client.set_terminated(run)
    for results in (frame, f"{database}#two seeds"):
        with pytest.raises(UserError, match="may hold the seeds: name one with seed"):
            judge(results, metric="acc")


def test_runs_with_arm_and_seed_need_no_option(database: str) -> None:
    own = table_of(f"{database}#tiny", arm=None, seed=None).rows
    assert len(own) and own.equals(table_of(f"{database}#tiny", arm="arm").rows)
    with pytest.raises(UserError, match="name the parameter or tag of the arm"):
        judge(f"{database}#positions", metric=METRIC)


@pytest.mark.slow
def test_own_study_is_judged_to_the_last_digit(folder: Path, database: str, place: str) -> None:
    own = json.loads((folder / "studies/tiny/report/report.json").read_text(encoding="utf-8"))
    needs_more = {"split_sd", "new_images_low", "new_images_high", "params", "macs", "wall_s", "images_per_s"} | {
        "registered",
        "at_chance",
    }
    compared = [name for name in own["arms"][0] if name not in needs_more and not name.startswith("test/")]
    uri = page(place, database, "tiny")
    for metric in (METRIC, f"final/{METRIC}"):
        table = table_of(uri, metric=metric, arm="arm")
        assert len(table.rows) == 9 and "1 run left out, no trial of an arm: study tiny." in table.notes
        document = judged(uri, metric=metric, arm="arm", images=VALIDATION)
        # Runs do not say what guesses reach.
        answers = [re.sub(r" Not shown to be better than chance: [^.]*\.$", "", answer) for answer in own["answers"]]
        assert document["answers"] == answers or metric != METRIC
        by_arm = {row["arm"]: row for row in document["arms"]}
        assert len(by_arm) == 3
        for row, name in itertools.product(own["arms"], compared):
            value = by_arm[row["arm"]][name]
            assert (pytest.approx(value, rel=1e-12) if isinstance(value, float) else value) == row[name], name


# -- mistakes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("place", "options", "message"),
    [
        ("", {}, "is a store of experiments; name one, as in sqlite:///{file}#NAME. Experiments: Default; "),
        ("#position", {}, "no experiment 'position'. Did you mean 'positions'? Experiments: Default; "),
        ("#/experiments/99", {}, "no experiment '99'. Experiments: Default; "),
        ("#gone", {}, "experiment 'gone' is deleted; restore it in MLflow. Experiments: "),
        ("#empty", {}, "#empty has no runs"),
        ("#positions", {"arm": None}, "with arm. Different between runs: model, seed."),
        ("#positions", {"arm": "modle"}, "no parameter or tag 'modle'. Did you mean 'model'? Different between runs: "),
        ("#positions", {"metric": None}, "metric is missing. Metrics: "),
        ("#positions", {"metric": "val/acuracy"}, "no metric 'val/acuracy'. Did you mean 'val/accuracy'? Metrics: "),
        ("#positions", {"baselines": "of"}, "no parameter or tag 'of'."),
        ("#twice", {"metric": "acc"}, "'seed' is a parameter and a tag, with different values; write params.seed or"),
        (
            "#twice",
            {"metric": "acc", "seed": "tags.seed"},
            "several values for 1 training: 2 runs of arm 'a' with seed 0 (of 0",
        ),
    ],
)
def test_mistake_is_refused_with_sentence(
    folder: Path, database: str, place: str, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError) as error:
        judged(f"{database}{place}", **options)
    text = str(error.value)
    assert message.format(file=folder / "mlflow.db") in text and text.startswith(database) and "\n" not in text


def test_params_that_differ_without_seeds_are_a_warning(database: str) -> None:
    [warning] = [note for note in judge(f"{database}#sweep", metric="acc", arm="model").notes if "differ" in note]
    assert warning.startswith("Warning: rows of an arm differ in lr, and count as its seeds.")


def test_mistakes_are_reported_together(database: str) -> None:
    with pytest.raises(UserError) as error:
        judged(f"{database}#positions", metric="val/acuracy", arm="modle", seed="sed", alpha=0.7)
    lines = str(error.value).split("\n")
    assert len(lines) == 4 and all(line.startswith(f"{database}#positions: ") for line in lines)
    for line, word in zip(lines, ("'modle'", "'sed'", "'val/acuracy'", "alpha 0.7"), strict=True):
        assert word in line


def test_store_that_cannot_be_read_is_refused_with_sentence(tmp_path: Path, folder: Path, mlruns: str) -> None:
    foreign, text = tmp_path / "foreign.db", tmp_path / "text.db"
    with closing(sqlite3.connect(foreign)) as connection:
        connection.execute("create table other (name)")
    text.write_text("no database")
    here = folder / "mlflow.db"
    for results, message in (
        (f"sqlite:///{tmp_path}/none.db#x", f"{tmp_path}/none.db does not exist"),
        (f"sqlite:///{foreign}#x", "is not an MLflow database: it holds another program's tables"),
        (f"sqlite:///{text}#x", "is not an MLflow database: file is not a database"),
        (f"file://{tmp_path}/none#x", f"file://{tmp_path}/none is no folder; write file:///FOLDER#NAME"),
        ("file://mlruns#x", "file://mlruns is no folder; write file:///FOLDER#NAME"),
        ("postgresql://me:hush@host/db#x", "postgresql://host/db begins with 'postgresql'."),
        ("ftp://host/db#x", "begins with 'ftp'. Allowed: sqlite, file, http, https, databricks; or a table."),
        ("htp://me:hush@host#x", "htp://host begins with 'htp'. Did you mean 'http'?"),
        ("s3://bucket/results.csv", "begins with 's3'"),
        ("://host#x", "begins with ''"),
        ("http://me:hush@[::1#x", "cannot be read: it is not a URI; write it as http://HOST:PORT"),
        (f"{here}#tiny", "An experiment of MLflow is sqlite:///FILE#NAME or file:///FOLDER#NAME."),
        (str(folder), "An experiment of MLflow is sqlite:///FILE#NAME or file:///FOLDER#NAME."),
    ):
        done = CliRunner().invoke(command, [results, "--metric", "acc", "--arm", "model"])
        assert isinstance(done.exception, UserError) and message in str(done.exception)
        assert "hush" not in str(done.exception)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["foreign.db", "text.db"]


def test_server_without_answer_is_one_sentence_without_password(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "PROBE_S", 0.2)
    with socket.socket() as silent:  # accepts connections and never answers
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        for port in (9, silent.getsockname()[1]):
            with pytest.raises(UserError) as error:
                table_of(f"http://me:hush@127.0.0.1:{port}/#/experiments/1")
            expected = (
                f"no answer from http://127.0.0.1:{port} within 0.2 s; check the address, and that the server runs"
            )
            assert str(error.value) == expected


@pytest.mark.parametrize(
    ("status", "body", "message"),
    [
        (401, "sign in", " refuses access; set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or"),
        (404, "not found", " cannot be read: API request to endpoint /api/2.0/mlflow/experiments/search failed"),
        (200, "<html>", " cannot be read: API request to endpoint was successful but the response body was not"),
    ],
)
def test_server_that_does_not_answer_as_mlflow_is_one_sentence(status: int, body: str, message: str) -> None:
    class Other(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body.encode())

        def do_POST(self) -> None:
            self.do_GET()

        def log_message(self, *_: Any) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Other) as other:
        threading.Thread(target=other.serve_forever, args=[0.01], daemon=True).start()
        address = f"http://127.0.0.1:{other.server_port}"
        with pytest.raises(UserError) as error:
            table_of(f"{address.replace('//', '//me:hush@')}/#/experiments/1")
        other.shutdown()
    text = str(error.value)
    assert text.startswith(f"{address}{message}") and "hush" not in text and "\n" not in text


@pytest.mark.slow
def test_databricks_without_credentials_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("DATABRICKS_CONFIG_FILE", str(tmp_path / "none"))
    monkeypatch.setattr(logging.getLogger("mlflow"), "propagate", True)  # to caplog
    with pytest.raises(UserError) as error:
        table_of("databricks://some#x")
    text = str(error.value)
    assert text.startswith("databricks://some cannot be read: ") and "\n" not in text and len(text) < 300
    assert text.endswith("; set DATABRICKS_HOST and DATABRICKS_TOKEN, or name a profile of ~/.databrickscfg")
    assert not caplog.records


@pytest.mark.slow
def test_server_names_its_experiments_like_every_store(address: str, database: str) -> None:
    with pytest.raises(UserError) as error:
        table_of(address)
    assert f"name one, as in {address}#NAME. Experiments: Default; tiny; " in str(error.value)
    assert table_of(f"{address}#tiny").source == f"{address}#tiny"
    with pytest.raises(UserError) as error:
        table_of(f"{address}/#/models")
    assert str(error.value).startswith(f"{address}: no experiment '/models'. Experiments: Default; ")


def test_command_prints_one_line_for_a_mistake(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    uri = f"sqlite:///{folder / 'mlflow.db'}#position"
    words = ["vitlab", "judge", uri, "--arm", "model", "--seed", "seed", "--metric", METRIC]
    monkeypatch.setattr(sys, "argv", words)
    monkeypatch.setattr("signal.signal", lambda *_: None)  # the command line has its own handlers
    with pytest.raises(SystemExit) as exit_:
        cli.main()
    printed = capsys.readouterr()
    assert exit_.value.code == 2 and not printed.out
    assert len(printed.err.splitlines()) == 1 and "Did you mean 'positions'?" in printed.err
