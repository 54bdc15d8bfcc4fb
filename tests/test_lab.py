"""Tests of the whole path on real data: second runs, other seeds, other code, kills and Ctrl-C."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
import threading
from collections.abc import Sequence
from contextlib import ExitStack
from html import escape, unescape
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pandas as pd
import pytest
import torch
import warm
import yaml
from job_helpers import PATIENCE_S, alive, until
from matplotlib.figure import Figure

import vitlab
from vitlab import lab, report
from vitlab.cli import cli
from vitlab.data.prepare import prepare
from vitlab.driver.planning import warm_up_tracker_and_executor
from vitlab.driver.session import Session, Watch
from vitlab.errors import Interrupted, SpecError, UserError
from vitlab.executors.inline import Inline
from vitlab.lab import Answer
from vitlab.planning import expand
from vitlab.planning.values import Plan, Planned
from vitlab.registry import slot
from vitlab.report.api import PREDICTIONS
from vitlab.report.frame import HISTORY
from vitlab.report.report import write
from vitlab.store.files import read_json, write_json
from vitlab.store.folders import Store, TrialFolder
from vitlab.store.locks import hold_lock
from vitlab.trackers.delivery import sync

pytestmark = pytest.mark.usefixtures("no_report", "unreachable_tracker")
NOWHERE = "http://127.0.0.1:9"
"""Nobody listens there: these tests are of the study, not of its copy in MLflow."""


def study(folder: Path, **changes: Any) -> Path:
    """Write a tiny study: two arms, two seeds, on the bundled digits."""
    content = {
        "study": "tiny",
        "question": "Does the position matter?",
        "base": {
            "data": {"type": "digits"},
            "model": {"type": "vit", "patch_size": 4, "dim": 8, "depth": 1, "heads": 2, "position": "sinusoidal"},
            "train": {"steps": 6, "batch_size": 16, "evaluations": 2},
        },
        "design": {"one_at_a_time": {"model.position": ["none"]}},
        "seeds": 2,
        "run": {"executor": "inline", "tracker": {"type": "mlflow", "uri": NOWHERE}},
        **changes,
    }
    file = folder / "tiny.yaml"
    file.write_text(yaml.safe_dump(content, sort_keys=False))
    return file


def trials(store: Path) -> dict[str, bytes]:
    """Return the content of every trial of a store, by its folder."""
    return {str(file.parent): file.read_bytes() for file in store.glob("trials/*/*/result.json")}


@pytest.fixture(scope="module")
def answered(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Answer]:
    """Return a study that was run: its file, its output folder and its answer."""
    folder = tmp_path_factory.mktemp("answered")
    file = study(folder)
    return file, folder / "out", vitlab.run(file, out=folder / "out")


# -- in Python --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_answer_shows_sentences_and_report_link(
    answered: tuple[Path, Path, Answer], monkeypatch: pytest.MonkeyPatch
) -> None:
    file, out, answer = answered
    assert answer.plan.study in repr(answer) and str(answer.report) in repr(answer) and len(repr(answer)) < 400
    assert (
        repr(answer.plan)
        == f"<Plan {answer.plan.study}: arms: {len(answer.plan.arms)}, trials: {len(answer.plan.trials)}>"
    )
    assert answer.answers == answer.compare().answers == vitlab.compare(file, out=out).answers
    assert type(answer.results()) is type(vitlab.results(file, out=out))
    for folder, absolute in ((out.parent, False), (file.parent / "elsewhere", True)):
        folder.mkdir(exist_ok=True)
        monkeypatch.chdir(folder)
        html = answer._repr_html_()
        assert all(escape(sentence) in html for sentence in answer.answers)
        (link,) = re.findall(r'href="([^"]+)"', html)
        assert link.startswith("file://") == absolute
        assert Path(unquote(urlsplit(link).path) if absolute else folder / unquote(link)) == answer.report
    assert answer.report.is_file()


def test_history_equals_trials(answered: tuple[Path, Path, Answer]) -> None:
    file, out, answer = answered
    curves = vitlab.history(file, out=out)
    assert {name: str(kind) for name, kind in curves.dtypes.items()} == {
        name: kind for name, (kind, _) in HISTORY.items()
    }
    pd.testing.assert_frame_equal(curves, answer.history())
    for planned in answer.plan.trials:
        stored = json.loads((Store(out).trial(planned.trial.key, planned.trial.code).path / "result.json").read_text())
        expected = {
            (moment["step"], metric): value
            for moment in stored["outcome"]["history"]
            for metric, value in moment["metrics"].items()
        }
        mine = curves[(curves["arm"] == planned.arm) & (curves["seed"] == planned.seed)]
        recorded = dict(zip(zip(mine["step"], mine["metric"], strict=True), mine["value"], strict=True))
        assert (
            recorded == {key: value for key, value in expected.items() if not key[1].startswith("system/")} and recorded
        )


def test_folder_with_the_name_of_a_study_hides_it_not(
    answered: tuple[Path, Path, Answer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, out, answer = answered
    monkeypatch.chdir(tmp_path)
    Path(answer.plan.study).mkdir()
    assert len(vitlab.results(answer.plan.study, out=out)) == len(answer.plan.trials)


def test_predictions_have_documented_columns(answered: tuple[Path, Path, Answer]) -> None:
    file, out, _ = answered
    table = vitlab.predictions(file, out=out)
    assert {name: str(kind) for name, kind in table.dtypes.items()} == {
        name: kind for name, (kind, _) in PREDICTIONS.items() if name != "pixel_accuracy"
    }
    shown = str(table.query("label != prediction")).splitlines()[0]
    assert shown.split() == ["arm", "seed", "split", "id", "label", "prediction", "loss"]
    assert table["label_name"].tolist() == table["label"].astype(str).tolist()
    assert table["prediction_name"].tolist() == table["prediction"].astype(str).tolist()


@pytest.mark.slow
def test_study_may_be_a_mapping(tmp_path: Path) -> None:
    """Its content is written to a file, which messages do not name: they have the path of a mistake."""
    content = {**yaml.safe_load(study(tmp_path).read_text()), "study": "given"}
    content["run"] = {"executor": "inline", "tracker": "none"}
    before = vitlab.plan(content, out=tmp_path)
    answer = vitlab.run(content, out=tmp_path)
    assert (answer.trained, answer.failed) == (len(before), 0) and not before["trained"].any()
    after = vitlab.plan(content, out=tmp_path)
    assert after["trained"].all() and list(after.columns)[:5] == ["arm", "seed", "trained", "params", "macs"]
    assert list(after.columns)[5:] == ["model.position"]
    assert after["model.position"].tolist() == answer.results()["model.position"].tolist()
    assert vitlab.compare(content, out=tmp_path).answers == answer.answers
    assert len(vitlab.results(content, out=tmp_path)) == len(before)
    for wrong, message in (
        (
            {"seeds": 9},
            r"^this version of study 'given' .* Changed since the latest run, .*: seeds .* -> 9\. vitlab\.run runs it; ",
        ),
        ({"study": "other"}, "^study 'other' has not been run in .* Studies there: given"),
        ({"study": None}, "^the mapping names no study"),
    ):
        with pytest.raises(UserError, match=message):
            vitlab.results({**content, **wrong}, out=tmp_path)
    (file,) = (tmp_path / "written").iterdir()
    assert yaml.safe_load(file.read_text()) == content and vitlab.run(file, out=tmp_path).cached == len(before)
    content["base"]["model"]["dpth"], content["sedes"], content["analysis"] = 1, 3, {"goal": "best"}
    mistakes = (
        r"(?s)^analysis\.goal: found [^|^]*\nbase\.model\.dpth: .*'dpth'.*Did you mean 'depth'[^|^]*"
        r"\nsedes: .*Did you mean 'seeds'[^|^]*$"
    )
    for function in (vitlab.plan, vitlab.run):
        with pytest.raises(vitlab.SpecError, match=mistakes):
            function(content, out=tmp_path)
    with pytest.raises(UserError, match="texts, numbers, lists and mappings alone"):
        vitlab.run({**content, "seeds": Path()}, out=tmp_path)


def test_plan_has_components_with_options_as_text(tmp_path: Path) -> None:
    content = yaml.safe_load(study(tmp_path).read_text())
    content["design"] = {"one_at_a_time": {"model.position": ["none", {"type": "rope2d", "theta": 50.0}]}}
    planned = vitlab.plan(content, out=tmp_path)
    assert {*planned.groupby("model.position").groups} == {"sinusoidal", "none", "rope2d(theta=50)"}
    assert planned["seed"].dtype == "int64" and planned["trained"].dtype == bool
    assert str(planned).splitlines()[0].split()[:5] == ["arm", "seed", "trained", "params", "macs"]
    assert "plan of tiny; columns: arm, seed, trained, params, macs, model.position" in str(planned)


@pytest.mark.slow
def test_figures_of_a_study_are_those_of_its_report(answered: tuple[Path, Path, Answer]) -> None:
    file, out, _ = answered
    figures = vitlab.compare(file, out=out).figures
    assert "arms" in figures and all(isinstance(figure, Figure) for figure in figures.values())
    for parts in (figures, vitlab.compare(file, out=out).tables):
        for kind in (UserError, KeyError):
            with pytest.raises(kind, match=r"no 'armss' here\..* Names: "):
                parts["armss"]


@pytest.mark.parametrize("name", ["results", "compare", "history", "predictions", "load"])
def test_study_may_be_a_path_or_a_mapping(name: str, tmp_path: Path) -> None:
    for value, found in ((["s"], "a list"), (object(), "an object of type object")):
        with pytest.raises(UserError, match=f"must be a text or a path or a mapping; found {found}"):
            getattr(vitlab, name)(value, out=tmp_path)
    with pytest.raises(UserError, match="has not been run in"):
        getattr(vitlab, name)({"study": "s"}, out=tmp_path)
    assert not list(tmp_path.iterdir())  # a file in it may be of a study that runs


def test_mistakes_in_arguments_are_answered_in_python(tmp_path: Path) -> None:
    """What to write in a study file, and the command that describes a key, are no help there."""
    for arguments, message in (
        ({"changes": "seeds=3"}, "changes must be a mapping; found 'seeds=3'"),
        ({"plugins": "own.py"}, "plugins must be a list; found 'own.py'"),
    ):
        with pytest.raises(UserError, match=rf"^vitlab\.run: {message}$"):
            vitlab.run(tmp_path / "s.yaml", **arguments)  # type: ignore[arg-type]
    with pytest.raises(UserError, match=r"is no path; the content of a file is a mapping"):
        vitlab.run("study: s\nbase: {}\n", out=tmp_path)


# -- nothing is computed twice ----------------------------------------------------------------------------------------


def test_planning_reads_no_result_if_data_is_present(
    answered: tuple[Path, Path, Answer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Thousands of trials would be thousands of files."""

    def count_read(folder: TrialFolder) -> bool:
        raise AssertionError(f"{folder.path} was looked up")

    monkeypatch.setattr(TrialFolder, "done", count_read)
    file, out, answer = answered
    assert lab.plan_study(file, out=out)[1].trials == answer.plan.trials


def test_executor_starts_early_unless_nothing_is_left_to_train(
    answered: tuple[Path, Path, Answer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, out, answer = answered
    started: list[type] = []
    monkeypatch.setattr(Inline, "prepare", classmethod(started.append))

    def is_started(file: Path, store: Path, **changes: Any) -> bool:
        started.clear()
        warm_up_tracker_and_executor(file, changes, Store(store))
        return bool(started)

    assert not is_started(file, out)
    assert is_started(file, tmp_path), "it has not been run there"
    edited = tmp_path / "edited.yaml"
    edited.write_text(f"{file.read_text()}# edited\n")
    assert is_started(edited, out)
    trial = answer.plan.trials[0].trial
    result = answer.store.trial(trial.key, trial.code).path / "result.json"
    result.rename(result.with_name("gone"))
    assert is_started(file, out), "a result is missing"
    result.with_name("gone").rename(result)
    edited.write_text("study: tiny\nbase: 3\n")
    assert not is_started(edited, out) and not is_started(tmp_path / "none.yaml", out)


def test_study_trains_every_arm_with_every_seed(answered: tuple[Path, Path, Answer]) -> None:
    _, out, answer = answered
    assert (answer.trained, answer.cached, answer.failed) == (4, 0, 0)
    frame = vitlab.results(answer.folder)
    assert sorted(zip(frame["arm"], frame["seed"], strict=True)) == [
        ("baseline", 0),
        ("baseline", 1),
        ("position=none", 0),
        ("position=none", 1),
    ]
    assert (frame["status"] == "done").all() and frame["val/accuracy"].between(0, 1).all()
    assert len(trials(out)) == 4
    pd.testing.assert_frame_equal(frame, pd.read_parquet(answer.folder / "report" / "results.parquet"))


def test_second_run_trains_nothing_and_added_seed_trains_alone(
    answered: tuple[Path, Path, Answer], tmp_path: Path
) -> None:
    file, out, _ = answered
    before = trials(out)
    again = vitlab.run(file, out=out)
    assert (again.trained, again.cached) == (0, 4) and trials(out) == before

    more = vitlab.run(file, out=out, changes={"seeds": 3, "study": "more"})
    assert (more.trained, more.cached) == (2, 4)
    assert before.items() <= trials(out).items()
    assert set(more.results()["seed"]) == {0, 1, 2}


def test_arm_pattern_leaves_other_arms_for_later(tmp_path: Path) -> None:
    file = study(tmp_path)
    part = vitlab.run(file, out=tmp_path / "out", only="position=*")
    assert part.trained == 2 and set(part.results().dropna(subset="val/accuracy")["arm"]) == {"position=none"}
    rest = vitlab.run(file, out=tmp_path / "out")
    assert (rest.trained, rest.cached) == (2, 2)


def test_unknown_arm_name_is_refused(tmp_path: Path) -> None:
    file = study(tmp_path, design={"one_at_a_time": {"model.patch_size": [[2, 4]]}}, seeds=1)
    with pytest.raises(UserError, match=r"no arm matches 'baselin'. Did you mean 'baseline'"):
        vitlab.run(file, out=tmp_path / "out", only="baselin")
    assert not (tmp_path / "out").exists()
    assert vitlab.run(file, out=tmp_path / "out", only="patch_size=[2, 4]").trained == 1


@pytest.mark.slow
def test_changed_code_retrains_affected_trials_but_comments_do_not(
    answered: tuple[Path, Path, Answer], tmp_path: Path
) -> None:
    file, out, _ = answered
    shutil.copytree(Path(vitlab.__file__).parent, tmp_path / "vitlab")
    mlp = tmp_path / "vitlab" / "components" / "mlp.py"

    def cached_by_arm() -> dict[str, list[bool]]:
        """Return whether each arm's trials need no training with the copied code."""
        words = ["vitlab", "plan", str(file), "--out", str(out), "--json"]
        code = f"import sys; sys.argv = {words!r}; from vitlab.cli import main; main()"
        done = warm.python(code, tmp_path, {**os.environ, "PYTHONPATH": str(tmp_path)})
        assert done.returncode == 0, done.stderr
        cached: dict[str, list[bool]] = {}
        for trial in json.loads(done.stdout)["trials"]:
            cached.setdefault(trial["arm"], []).append(trial["cached"])
        return cached

    # The module of additive encodings has 'none' and 'sinusoidal'; the rotary one is not used here.
    positions = tmp_path / "vitlab" / "components" / "position"
    for module, line in ((mlp, "# A comment, and nothing else."), (positions / "rotary.py", "CHANGED = True")):
        with module.open("a") as stream:
            stream.write(f"\n{line}\n")
    assert cached_by_arm() == {"baseline": [True, True], "position=none": [True, True]}
    with (positions / "additive.py").open("a") as stream:
        stream.write("\nCHANGED = True\n")
    assert cached_by_arm() == {"baseline": [False, False], "position=none": [False, False]}
    assert len(trials(out)) >= 4, "results of earlier code stay"


# -- nothing is lost --------------------------------------------------------------------------------------------------


class Said(Watch):
    """A display that keeps what is said."""

    def __init__(self) -> None:
        self.sentences: list[str] = []

    def say(self, sentence: str) -> None:
        self.sentences.append(sentence)


@pytest.mark.parametrize(("only", "count"), [("*", "0 of 4"), ("position=none", "0 of 2")])
def test_interrupted_run_says_what_follows_and_counts_its_own_trials(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, only: str, count: str
) -> None:
    def stop(stage: Plan, missing: list[Planned], session: Session, **options: object) -> None:
        session.store.folder(missing[0].trial).checkpoint.mkdir(parents=True, exist_ok=True)
        raise Interrupted("interrupted")

    def stop_again(*arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(lab, "train_missing", stop)
    monkeypatch.setattr(report, "write", write)
    monkeypatch.setattr(report.Report, "figures", {})
    file, said = study(tmp_path, run={"executor": "inline", "tracker": "none"}), Said()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(Interrupted) as caught:
        lab.run(file, out=tmp_path / "out", only=only, watch=said)
    page = Path("out", "studies", "tiny", "report", "report.html")
    counts = f"interrupted; {count} trials ended, 1 with a checkpoint"
    assert str(caught.value) == f"{counts}; the report is {page}; the same command goes on" and page.is_file()
    assert said.sentences[-1] == "writing the report; Ctrl-C again ends this at once."
    page.unlink()
    monkeypatch.setattr(report, "write", stop_again)
    with pytest.raises(Interrupted, match=f"^{counts}; the same command goes on$"):
        lab.run(file, out=tmp_path / "out", only=only, watch=said)


def test_interrupted_delivery_gives_one_advice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    advice = "interrupted; the report is written, and 'vitlab sync' delivers the rest"

    def stop(*arguments: object, **options: object) -> None:
        raise Interrupted(advice)

    monkeypatch.setattr(lab._Run, "stages", lambda run: [])
    monkeypatch.setattr(lab, "_report_and_deliver", stop)
    with pytest.raises(Interrupted) as caught:
        lab.run(study(tmp_path), out=tmp_path / "out", watch=Said())
    assert str(caught.value) == advice


@pytest.mark.parametrize(
    ("tracker", "delivers"), [({"type": "mlflow", "uri": NOWHERE}, " and delivering what is trained"), ("none", "")]
)
def test_second_ctrl_c_is_followed_by_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tracker: object, delivers: str
) -> None:
    def stop(*arguments: object, **options: object) -> None:
        raise KeyboardInterrupt

    nothing: Any = None
    monkeypatch.setattr(lab, "train_missing", stop)
    for is_repeated in (False, True):
        said = Said()
        with monkeypatch.context() as patch:
            patch.setattr("vitlab.interrupts.is_repeated", lambda value=is_repeated: value)
            if is_repeated:
                assert lab._report_and_deliver(nothing, nothing, None) is None
            patch.setattr(lab, "_report_and_deliver", lambda *_: None)
            with pytest.raises(Interrupted):
                lab.run(study(tmp_path, run={"executor": "inline", "tracker": tracker}), out=tmp_path, watch=said)
        follows = f"writing the report{delivers}; Ctrl-C again ends this at once."
        assert (follows in said.sentences) != is_repeated


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:subprocess:ResourceWarning")  # it is meant to survive
def test_background_run_can_be_followed_and_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Stopped as by Ctrl-C: its trials write checkpoints."""
    base = {**yaml.safe_load(study(tmp_path).read_text())["base"]}
    base["train"] = {"steps": 100_000, "batch_size": 16, "evaluations": 2000}
    file = study(tmp_path, base=base)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    words = [str(file), "--out", str(tmp_path / "out")]

    def output_of(*words: str) -> str:
        cli.main(list(words), standalone_mode=False)
        return capsys.readouterr().out

    output = output_of("run", *words, "--detach")
    pid = int(re.search(r"as process (\d+)", output).group(1))  # type: ignore[union-attr]
    try:
        assert f"kill {pid}" in output and f"vitlab run {shlex.join(words)}" in output
        assert os.getsid(pid) == pid
        until(lambda: any('"metrics"' in file.read_text() for file in tmp_path.glob("out/trials/*/*/events.jsonl")))
        assert f"run by process {pid} on" in output_of("status", *words)
        running = f"tiny is already run by process {pid} on [^ ]*"
        with pytest.raises(UserError, match=f"{running}; '.*' follows until it ends, then trains what is missing"):
            output_of("run", *words, "--detach")
        with pytest.raises(UserError, match=f"{running}; '.* --set seeds=3' follows until it ends, then trains"):
            output_of("run", *words, "--set", "seeds=3", "--detach")
    finally:
        os.kill(pid, signal.SIGINT)
    until(lambda: not alive(pid))
    log = (tmp_path / "out" / "studies" / "tiny" / "driver.log").read_text()
    assert "tiny: 2 arms, 4 trials; 4 to train" in log and "the same command goes on" in log and "Traceback" not in log
    assert any(list(checkpoint.iterdir()) for checkpoint in tmp_path.glob("out/trials/*/*/checkpoint"))
    assert "run by" not in output_of("status", *words)


@pytest.mark.filterwarnings("ignore:subprocess:ResourceWarning")
def test_failing_background_run_reports_error(tmp_path: Path) -> None:
    file = study(tmp_path, seeds=0)
    with pytest.raises(SpecError, match="seeds"):
        cli.main(["run", str(file), "--out", str(tmp_path / "out"), "--detach"], standalone_mode=False)
    with pytest.raises(UserError, match="leave out --detach"):
        cli.main(["run", str(study(tmp_path)), "--smoke", "--detach"], standalone_mode=False)
    assert not (tmp_path / "out").exists()


class RecordingWatch(Watch):
    """Watch that records the messages of a run."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.planned = threading.Event()

    def on_plan(self, plan: Plan, todo: Sequence[Planned], store: Store) -> None:
        self.planned.set()

    def say(self, sentence: str) -> None:
        self.said.append(sentence)

    def on_end(self, planned: Planned, how: str, detail: str) -> None:
        self.said.append(f"{planned.arm} {how}")


@pytest.mark.slow
def test_second_driver_follows_and_takes_over(answered: tuple[Path, Path, Answer], tmp_path: Path) -> None:
    _, done, earlier = answered
    file, out, ear = study(tmp_path), tmp_path / "out", RecordingWatch()
    first_trial = earlier.plan.trials[0].trial
    one = Path("trials", first_trial.key, first_trial.code)
    first = ExitStack()
    first.enter_context(hold_lock(Store(out).driver_lock("tiny")))
    calls: list[int] = []

    def die() -> None:
        with first:  # left after an error as well: the run would follow this thread for ever
            assert ear.planned.wait(PATIENCE_S)  # otherwise the trial would count as trained before
            shutil.copytree(done / one, out / one)
            until(lambda: len(ear.said) > 1)
            calls.append(len(trials(out)))

    other = threading.Thread(target=die, daemon=True)
    other.start()
    answer = vitlab.run(file, out=out, watch=ear)
    other.join()
    assert (
        ear.said[0]
        == f"tiny is run by process {os.getpid()} on {socket.gethostname()}; this one follows until it ends, then trains "
        "what is missing."
    )
    assert ear.said[1].endswith(" done") and calls == [1], "nothing was trained while the other had the study"
    assert (answer.trained, answer.cached) == (3, 1)


@pytest.mark.slow
def test_failed_trial_is_skipped_until_requested(tmp_path: Path) -> None:
    plugin = tmp_path / "moody_optimizer.py"
    plugin.write_text(
        "import os\nfrom vitlab.training.optim import optimizer\nfrom vitlab.training.optim.torch_optimizers import AdamW\n"
        "@optimizer.register('moody')\nclass Moody(AdamW):\n    '''Raises while a file is there.'''\n"
        "    def build(self, groups):\n"
        f"        if os.path.exists({str(tmp_path / 'mood')!r}):\n            raise RuntimeError('not today')\n"
        "        return super().build(groups)\n"
    )
    (tmp_path / "mood").touch()
    file = study(tmp_path, design={"one_at_a_time": {"train.optimizer": ["moody"]}}, seeds=1)
    first = vitlab.run(file, out=tmp_path / "out", plugins=[plugin])
    assert (first.trained, first.cached, first.failed) == (1, 0, 1)
    provenance = json.loads(str(report.render(first.plan, first.store, "json")))["made"]
    assert (provenance["trained"], provenance["failed"]) == (1, 1), "as the answer has it"
    assert re.search(
        r"2 trainings, any for tuning or teachers included, 1 of them failed; their times add up to [\d.]+ m?s",
        str(report.render(first.plan, first.store, "md")),
    )
    frame = first.results().set_index("arm")
    assert frame.loc["optimizer=moody", "status"] == "failed" and "not today" in frame.loc["optimizer=moody", "failure"]
    again = vitlab.run(file, out=tmp_path / "out", plugins=[plugin])
    assert (again.trained, again.cached, again.failed) == (0, 1, 1)
    (failure_file,) = tmp_path.glob("out/trials/*/*/failure.json")
    failure = read_json(failure_file)
    write_json(
        failure_file, {name: failure[name] for name in failure if name != "has_failed_for_good"}
    )  # a driver died before it had decided
    orphaned = vitlab.run(file, out=tmp_path / "out", plugins=[plugin])
    assert (orphaned.trained, orphaned.cached, orphaned.failed) == (0, 1, 1) and read_json(failure_file)[
        "has_failed_for_good"
    ]
    (tmp_path / "mood").unlink()
    retried = vitlab.run(file, out=tmp_path / "out", plugins=[plugin], retry_failed=True)
    assert (retried.trained, retried.cached, retried.failed) == (1, 1, 0)


@pytest.mark.slow
def test_failed_prerequisite_is_skipped_until_requested(tmp_path: Path) -> None:
    plugin, tries = tmp_path / "never_optimizer.py", tmp_path / "tries"
    plugin.write_text(
        "from vitlab.training.optim import optimizer\nfrom vitlab.training.optim.torch_optimizers import AdamW\n"
        "@optimizer.register('never')\nclass Never(AdamW):\n    '''Raises.'''\n"
        "    def build(self, groups):\n"
        f"        with open({str(tries)!r}, 'a') as file:\n            file.write('.')\n"
        "        raise RuntimeError('never')\n"
    )
    base = yaml.safe_load(study(tmp_path).read_text())["base"]
    body = {**base, "train": {**base["train"], "optimizer": "never"}}
    file = study(tmp_path, design={"arms": {"fresh": {}, "from": {"init_from": {"trial": body}}}}, seeds=1)
    for _ in range(2):
        answer = vitlab.run(file, out=tmp_path / "out", plugins=[plugin])
        assert answer.failed == 2 and tries.read_text() == "."
    vitlab.run(file, out=tmp_path / "out", plugins=[plugin], retry_failed=True)
    assert tries.read_text() == ".."


def test_missing_weights_are_retrained_for_dependent_trial(tmp_path: Path) -> None:
    run = {"executor": "inline", "tracker": {"type": "mlflow", "uri": NOWHERE}}
    file = study(tmp_path, design=None, seeds=1, run={**run, "keep": "none"})
    assert vitlab.run(file, out=tmp_path / "out").trained == 1
    before = trials(tmp_path / "out")
    base = yaml.safe_load(file.read_text())["base"]
    file = study(
        tmp_path, study="tuned", design={"arms": {"fresh": {}, "from": {"init_from": {"trial": base}}}}, seeds=1
    )
    answer = vitlab.run(file, out=tmp_path / "out")
    assert answer.failed == 0 and set(answer.results()["status"]) == {"done"}
    after = trials(tmp_path / "out")
    assert len(after) == 2
    ((name, old),) = before.items()
    assert json.loads(after[name])["outcome"] == json.loads(old)["outcome"]


FASTER = {"arms": {"baseline": {}, "faster": {"train.optimizer": {"type": "adamw", "lr": 0.1}}}}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "plans", "trained"),
    [
        ({"seeds": 1}, 1, 2),
        ({"seeds": 1, "tune": {"knobs": {"train.optimizer.lr": [1e-3, 1e-2]}}}, 2, 10),
        ({"seeds": {"count": 2, "escalate_to": 3}, "design": FASTER, "analysis": {"alpha": 1e-6}}, 2, 6),
    ],
)
def test_run_makes_at_most_two_plans(
    changes: dict[str, Any], plans: int, trained: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once, and a second time after the choice of a tuning or after an interim analysis."""
    genuine, made = expand.make_plan, []

    def counted(*arguments: Any) -> Any:
        made.append(arguments)
        return genuine(*arguments)

    monkeypatch.setattr(expand, "make_plan", counted)
    file = study(tmp_path, run={"executor": "inline", "tracker": "none"}, **changes)
    answer = vitlab.run(file, out=tmp_path / "out")
    assert (len(made), answer.trained, answer.cached, answer.failed) == (plans, trained, 0, 0)
    made.clear()
    again = vitlab.run(file, out=tmp_path / "out")
    assert (len(made), again.trained, again.plan.trials) == (1, 0, answer.plan.trials)


def test_equal_seeds_are_trained_once(tmp_path: Path) -> None:
    answer = vitlab.run(study(tmp_path, seeds={"count": 3, "vary": []}), out=tmp_path / "out")
    assert answer.trained == 2 == len(trials(tmp_path / "out"))
    assert len(answer.results()) == 6


def test_file_without_name_is_refused_as_study(tmp_path: Path) -> None:
    (tmp_path / "nameless.yaml").write_text("question: Which?\n")
    with pytest.raises(UserError, match=r"nameless.yaml names no study"):
        vitlab.results(tmp_path / "nameless.yaml", out=tmp_path)


def test_command_line_changes_are_stored_with_study(tmp_path: Path) -> None:
    file = study(tmp_path, seeds=1, design=None, run={"executor": "inline"})
    changes = {"run.tracker.uri": NOWHERE, "model.dim": 4, "question": "Why not?"}
    answer = vitlab.run(file, out=tmp_path / "out", changes=changes)
    assert answer.plan.trials[0].trial.spec.plain()["model"]["dim"] == 4
    # Delivered only to the configured address, and to no other database.
    assert [delivery.link for delivery in sync(tmp_path / "out")] == [None] and not (
        tmp_path / "out" / "mlflow.db"
    ).exists()
    provenance = json.loads(str(report.render(answer.plan, answer.store, "json")))["made"]
    out = tmp_path / "out"
    out = out.relative_to(Path.cwd()) if out.is_relative_to(Path.cwd()) else out
    assert provenance["command"] == (
        f"vitlab run {out / 'studies' / 'tiny' / 'study.yaml'} --out {out} --set model.dim=4 --set 'question=Why not?'"
    )
    assert provenance["place"] == f"In {Path.cwd()}", "where it was run; the output folder is elsewhere"
    written, stored = yaml.safe_load(file.read_text()), yaml.safe_load(provenance["study"])
    assert stored.keys() == written.keys() - {"run"}, "without the addresses that run may have"
    assert stored["question"] == "Why not?" and stored["base"]["train"] == written["base"]["train"]
    assert stored["base"]["model"] == {**written["base"]["model"], "dim": 4}
    page, text = (str(report.render(answer.plan, answer.store, form)) for form in ("html", "md"))
    assert provenance["study"] in unescape(page) and textwrap.indent(provenance["study"], 6 * " ") in text


# -- access to results ------------------------------------------------------------------------------------------------


def test_loaded_model_reproduces_stored_predictions(answered: tuple[Path, Path, Answer]) -> None:
    _, _, answer = answered
    stored = vitlab.predictions(answer.folder).query("arm == 'position=none' and seed == 1 and split == 'test'")
    model, transform = vitlab.load(answer.folder, arm="position=none", seed=1)
    trial = answer.plan.find("position=none", 1).trial
    images = prepare(slot("dataset").resolve_choice(trial.spec.data), trial.seeds).test
    assert list(images.id_N) == list(stored["id"])
    with torch.no_grad():
        logits = model.logits_by_head(model(transform(images.x_NCHW)))[""]
    assert logits.argmax(1).tolist() == stored["prediction"].tolist()
    probability = logits.softmax(1).gather(1, torch.tensor(stored["prediction"].to_numpy())[:, None])[:, 0]
    torch.testing.assert_close(probability, torch.tensor(stored["probability"].to_numpy()), rtol=1e-5, atol=1e-6)
    with pytest.raises(UserError, match="position=none"):
        vitlab.load(answer.folder, arm="position=nine")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["status", "report"])
def test_reading_a_study_imports_nothing_heavy(name: str, answered: tuple[Path, Path, Answer]) -> None:
    file, out, _ = answered
    heavy = ("torch", "mlflow", "pandas", "ray", "scipy", "matplotlib", "jinja2")
    code = (
        f"from vitlab.cli import cli; cli.main([{name!r}, {str(file)!r}, '--out', {str(out)!r}], standalone_mode=False)\n"
        f"import sys; print('HEAVY', [m for m in {heavy!r} if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "HEAVY []"
    assert "position=none" in done.stdout or "tiny" in done.stdout


def test_report_is_complete(answered: tuple[Path, Path, Answer]) -> None:
    folder = answered[2].folder / "report"
    assert {"report.html", "report.md", "results.parquet"} <= {file.name for file in folder.iterdir()}
    assert Store(answered[1]).study("tiny") == answered[2].folder
    assert "Does the position matter?" in (folder / "report.html").read_text()
