"""Tests of versions of a study: selection by file, name or folder, and no version is lost."""

from __future__ import annotations

import errno
import json
import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import warm
import yaml
from click.testing import CliRunner

import vitlab
from vitlab import lab, report
from vitlab.cli import cli
from vitlab.driver.session import Watch
from vitlab.errors import UserError
from vitlab.planning import study_folder
from vitlab.planning.study_folder import (
    archive_latest_unless_same,
    checked_out_commit,
    format_differences,
    read_versions,
    select_result_content,
    version_name,
)
from vitlab.report.api import open_study
from vitlab.store.files import read_json, write_json

pytestmark = pytest.mark.usefixtures("no_figures")
STUDY = {
    "study": "tiny",
    "question": "Does the position matter?",
    "base": {
        "data": {"type": "digits"},
        "model": {"type": "vit", "patch_size": 4, "dim": 8, "depth": 1, "heads": 2, "position": "sinusoidal"},
        "train": {"steps": 4, "batch_size": 16},
    },
    "design": {"one_at_a_time": {"model.position": ["none"]}},
    "seeds": 2,
    "run": {"executor": "inline", "tracker": "none"},
}


class RecordingWatch(Watch):
    """Watch that records messages."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def say(self, sentence: str) -> None:
        self.said.append(sentence)


def write(file: Path, steps: int = 4, **changes: Any) -> Path:
    base = {**STUDY["base"], "train": {"steps": steps, "batch_size": 16}}  # type: ignore[dict-item]
    file.write_text(yaml.safe_dump({**STUDY, "base": base, **changes}, sort_keys=False))
    return file


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with ``first.yaml`` and ``other.yaml`` of one study, run in this order, and the messages."""
    folder, ear = tmp_path_factory.mktemp("ran"), RecordingWatch()
    lab.run(write(folder / "first.yaml"), out=folder / "out", watch=ear)
    assert ear.said == []
    lab.run(write(folder / "other.yaml", steps=2, seeds=1), out=folder / "out", watch=ear)
    (folder / "said.txt").write_text("\n".join(ear.said))
    return folder


@pytest.fixture
def here(ran: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a copy of it as the working directory."""
    shutil.copytree(ran, tmp_path / "here")
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "here"


def invoke(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(cli, [*arguments, "--out", "out"], standalone_mode=False)
    if isinstance(result.exception, UserError):
        return result.exception.exit_code, str(result.exception)
    assert result.exception is None, result.exception
    return 0, result.output


@pytest.mark.slow
def test_file_selects_its_own_version_despite_later_runs(here: Path) -> None:
    frames = {
        name: vitlab.results(name, out="out") for name in ("first.yaml", "other.yaml", "tiny", "out/studies/tiny")
    }
    assert {name: (len(frame), set(frame["steps"])) for name, frame in frames.items()} == {
        "first.yaml": (4, {4}),
        "other.yaml": (2, {2}),
        "tiny": (2, {2}),
        "out/studies/tiny": (2, {2}),
    }
    earlier = next(path.name for path in (here / "out/studies/tiny/versions").iterdir())
    for name in (f"tiny@{earlier}", f"tiny@{earlier[:4]}", f"out/studies/tiny/versions/{earlier}"):
        assert vitlab.results(name, out="out")["trial"].tolist() == frames["first.yaml"]["trial"].tolist()
    assert len(vitlab.predictions("first.yaml", out="out")["seed"].unique()) == 2
    assert vitlab.load("first.yaml", seed=1, out="out"), "a seed that the latest version has not"
    compared = vitlab.compare("first.yaml", "other.yaml", out="out")
    assert any("train.steps 4 -> 2" in note for note in compared.notes)


def test_file_never_run_is_refused_with_differences(here: Path) -> None:
    write(here / "first.yaml", steps=40, seeds=5)
    for command in ("report", "status"):
        code, output = invoke(command, "first.yaml")
        assert code == 2 and "first.yaml: this version of study 'tiny' has not been run" in output
        assert "): train.steps 2 -> 40; seeds 1 -> 5." in output
    with pytest.raises(UserError, match="the name 'tiny' in place of it stands for the latest run"):
        vitlab.compare("first.yaml", out="out")
    with pytest.raises(UserError, match=r"tiny@nope: study 'tiny' has no version of that name. Versions: \w{8}, \w{8}"):
        vitlab.results("tiny@nope", out="out")


def test_run_of_other_file_of_same_study_names_first(ran: Path) -> None:
    (line,) = (ran / "said.txt").read_text().splitlines()
    assert line.startswith(f"study 'tiny' was last run from {ran / 'first.yaml'}, in another version (")
    assert "): train.steps 4 -> 2; seeds 2 -> 1. Both are kept: 'vitlab report tiny@" in line


def test_command_line_changes_are_a_version_and_reported(here: Path) -> None:
    answer = lab.run("first.yaml", out="out", changes={"seeds": 1, "train.steps": 2, "run.workers": 1})
    assert read_versions(answer.folder)[0].name == version_name(
        select_result_content(yaml.safe_load(Path("other.yaml").read_text()))
    )
    code, output = invoke("report", "first.yaml", "--set", "seeds=1", "--set", "train.steps=2")
    assert code == 0 and "was run with --set seeds=1 --set train.steps=2." in " ".join(output.split())
    code, output = invoke("status", "first.yaml", "--set", "seeds=1", "--set", "train.steps=2", "--json")
    assert json.loads(output)["arms"]["baseline"] == {"done": 1}
    code, output = invoke("report", "first.yaml")
    assert (
        code == 0
        and f"the latest is {read_versions(here / 'out/studies/tiny')[0].name[:8]}" in " ".join(output.split())
        and "train.steps 4 -> 2" in " ".join(output.split())
    )


def test_report_says_how_to_print_the_one_that_it_replaced(here: Path) -> None:
    latest, before = read_versions(here / "out/studies/tiny")
    code, output = invoke("report", "tiny")
    sentence = (
        f"This is version {latest.name[:8]} of the study, run {latest.when}; the one before is {before.name[:8]}, run "
        f"{before.when} (changes since the earlier one: train.steps 4 -> 2; seeds 2 -> 1). 'vitlab report tiny@{before.name[:8]}' prints its report."
    )
    assert code == 0 and sentence in " ".join(output.split())
    assert "(2 seeds" not in output and (before.folder / "report" / "report.html").is_file()
    assert "the latest is" in invoke("report", f"tiny@{before.name[:8]}")[1].replace("\n", " ").replace("  ", " ")
    shutil.rmtree(before.folder)
    assert "version of the study" not in invoke("report", "tiny")[1], "the stored report is outdated"


def test_studies_lists_every_version(here: Path) -> None:
    code, output = invoke("studies", "--json")
    ((study,), latest, earlier) = (json.loads(output), *json.loads(output)[0]["versions"])
    assert (code, study["study"], study["question"]) == (0, "tiny", "Does the position matter?")
    assert [(row["done"], row["failed"], row["missing"]) for row in (latest, earlier)] == [
        (2, 0, 0),
        (4, 0, 0),
    ]
    for row, file in ((latest, "other.yaml"), (earlier, "first.yaml")):
        (verdict,) = vitlab.compare(file, out="out")["verdict"].dropna()
        assert row["answer"] == f"1 {verdict}"
    assert (latest["differs"], earlier["differs"]) == ("", "train.steps 4 -> 2; seeds 2 -> 1")
    assert [Path(row["file"]).name for row in (latest, earlier)] == ["other.yaml", "first.yaml"]
    code, output = invoke("studies")
    assert [line.split()[0] for line in output.splitlines()[1:3]] == [latest["version"][:8], earlier["version"][:8]]
    assert max(output.count(text) for text in ("first.yaml", "other.yaml")) == 1


def test_rerunning_earlier_version_makes_it_latest(here: Path) -> None:
    folder = here / "out/studies/tiny"
    before = [item.name for item in read_versions(folder)]
    answer = lab.run("first.yaml", out="out")
    assert answer.trained == 0 and answer.folder == folder
    assert [item.name for item in read_versions(folder)] == before[::-1]
    assert len(vitlab.results("tiny", out="out")) == 4 and len(vitlab.results("other.yaml", out="out")) == 2
    report = answer.report.read_bytes()
    assert lab.run("other.yaml", out="out").report.read_bytes() != report
    assert answer.report.read_bytes() == report, "an answer keeps its report"


@pytest.mark.slow
def test_run_killed_at_start_keeps_stored_version(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its plan is written by then, and the latest run is still the version before."""

    def killed(*_: Any) -> None:
        raise KeyboardInterrupt

    write(here / "third.yaml", steps=3)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(study_folder, "record_version_as_latest", killed)
        lab.run("third.yaml", out="out")
    for _ in range(2):
        for file, steps in (("first.yaml", {4}), ("other.yaml", {2})):
            assert set(vitlab.results(file, out="out")["steps"]) == steps
        lab.run("third.yaml", out="out")
    assert set(vitlab.results("third.yaml", out="out")["steps"]) == {3}


def test_version_that_cannot_be_copied_leaves_no_file(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    study = here / "out" / "studies" / "tiny"
    assert (study / "plan.json").exists(), list(study.parent.iterdir())
    before = set(study.rglob("*"))

    def refuse(source: str, target: str) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(target))

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(OSError, match="No space"):
        archive_latest_unless_same(study, "another")
    assert {path for path in study.rglob("*") if path.is_file()} == {path for path in before if path.is_file()}


@pytest.mark.parametrize("name", ["../../../escaped", "", 7, ["a"], None])
def test_damaged_version_name_reads_no_other_file(here: Path, name: Any) -> None:
    folder = here / "out/studies/tiny"
    for file in ("plan.json", "run.json"):
        write_json(folder / file, {**read_json(folder / file), "version": name})
    before = {path.name for path in here.iterdir()}
    archive_latest_unless_same(folder, "0123")
    assert {path.parent for path in here.glob("**/plan.json")} == {
        folder,
        *(folder / "versions" / item.name for item in read_versions(folder)),
    }
    assert {path.name for path in here.iterdir()} == before and not (here / "out/escaped").exists()


@pytest.mark.parametrize("damage", [{"plugins": [7]}, {"plugins": "x"}, {"folder": 7}, {"time": "now"}, {"file": []}])
def test_damaged_record_of_run_counts_as_absent(here: Path, damage: dict[str, Any]) -> None:
    file = here / "out/studies/tiny/run.json"
    write_json(file, {**read_json(file), **damage})
    version = read_versions(file.parent)[0]
    assert version.run == study_folder.RunRecord() and version.content is not None
    assert json.loads(str(report.render(*open_study("tiny", out="out"), "json")))["study"] == "tiny"


def test_gc_keeps_trials_of_every_version_and_names_deletions(here: Path) -> None:
    code, output = invoke("gc", "--yes")
    assert code == 0 and "trials" not in output and len(list(here.glob("out/trials/*/*/result.json"))) == 6
    latest, earlier = (item.name for item in read_versions(here / "out/studies/tiny"))
    shutil.rmtree(here / "out/studies/tiny/versions" / earlier)
    code, would = invoke("gc")
    assert sum("trials" in line for line in would.splitlines()) == 4
    assert len(list(here.glob("out/trials/*/*/result.json"))) == 6, "nothing goes without --yes"
    code, _ = invoke("gc", "--yes")
    assert code == 0 and len(list(here.glob("out/trials/*/*/result.json"))) == 2
    assert [item.name for item in read_versions(here / "out/studies/tiny")] == [latest]
    (one,) = here.glob(f"out/trials/{open_study('tiny', out='out')[0].trials[0].trial.key}/*")
    shutil.copytree(one, one.with_name("older"))
    code, output = invoke("gc")
    assert [line.partition("\t")[2] for line in output.splitlines() if "trials" in line] == [
        "study tiny, arm baseline, seed 0"
    ]


def test_run_settings_and_data_path_do_not_make_a_version() -> None:
    plain = {"base": {"data": "digits", "train": {"steps": 4}}, "seeds": 2}
    elsewhere = {**plain, "base": {**plain["base"], "data": {"type": "digits", "root": "/data"}}, "run": {"workers": 2}}  # type: ignore[dict-item]
    assert (
        version_name(select_result_content(plain))
        == version_name(select_result_content(elsewhere))
        != version_name(select_result_content({**plain, "seeds": 3}))
    )
    assert version_name(select_result_content(plain)) == version_name(
        select_result_content(dict(reversed(plain.items())))
    )
    assert (
        format_differences(select_result_content(plain), select_result_content({**plain, "question": "Why?"}))
        == "question (absent) -> Why?"
    )
    cut = {**plain, "base": {"data": {"type": "digits", "fraction": 0.5}}}
    assert (
        format_differences(select_result_content(plain), select_result_content(cut))
        == "train.steps 4 -> (absent); data.fraction (absent) -> 0.5"
    )
    for before, after in ((0.123456789, 0.1234567891), (None, "none"), ([1, None], [1, "none"])):
        first, second = format_differences({"a": before}, {"a": after}).removeprefix("a ").split(" -> ")
        assert first != second, "what differs is seen"
    assert (
        format_differences(select_result_content(cut), select_result_content(plain))
        == "data.fraction 0.5 -> (absent); train.steps (absent) -> 4"
    )


@pytest.mark.slow
def test_advice_of_report_reuses_every_stored_trial(here: Path) -> None:
    subprocess.run(["git", "init", "-q"], check=True)
    subprocess.run(["git", "add", "first.yaml"], check=True)
    who = ["-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run(["git", *who, "commit", "-qm", "x"], check=True)
    Path("lib/site-packages/studies").mkdir(parents=True)
    assert (
        re.fullmatch(r"[0-9a-f]{40}", checked_out_commit(here))
        and checked_out_commit(Path("lib/site-packages/studies")) == ""
    )
    lab.run("first.yaml", out="out", changes={"question": "Why not?"})
    lab.run("other.yaml", out="out")
    commands = []
    for name in ("first.yaml", "other.yaml"):
        changes = {"question": "Why not?"} if name == "first.yaml" else {}
        doc = json.loads(str(report.render(*open_study(name, out="out", changes=changes), "json")))
        assert doc["made"]["place"] == "In the folder that holds out"
        assert re.fullmatch(r"[0-9a-f]{40}", doc["made"]["commit"])
        commands.append(shlex.split(doc["made"]["command"]))
        assert commands[-1][:2] == ["vitlab", "run"]
    code = f"from vitlab.cli import cli\nfor words in {commands!r}: cli.main(words[1:], standalone_mode=False)"
    done = warm.python(code, here, os.environ)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("\n0 trained") == 2
    assert len(list(here.glob("**/result.json"))) == 6 and [item.name for item in here.glob("**/trials")] == ["trials"]


def test_paused_trial_is_distinguished_from_missing(here: Path) -> None:
    plan, store = open_study("tiny", out="out")
    trial = plan.trials[0].trial
    folder = store.trial(trial.key, trial.code)
    (folder.path / "result.json").unlink()
    folder.checkpoint.mkdir()
    code, output = invoke("status", "tiny", "--json")
    status = json.loads(output)
    assert code == 0 and status["arms"]["baseline"] == {"paused": 1}
    (line,) = status["progress"]
    assert line == "baseline: seed 0 paused, at step 0 of 2"
    code, output = invoke("status", "tiny")
    assert line in output
    assert "1 done, 1 paused" in invoke("studies")[1]
