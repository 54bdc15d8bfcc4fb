"""Tests of files that may come from other people: their Python is not imported, their programs not run, no link followed.

A project folder or a results folder that somebody else has packed is enough for each of these.
"""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner
from job_helpers import HERE, LIGHT, job

from vitlab.cli import cli
from vitlab.cli import run as cli_run
from vitlab.errors import TrialFailed, UserError
from vitlab.executors.worker import WorkerCommand, redirect_output_to_log
from vitlab.planning.study_folder import checked_out_commit
from vitlab.store.files import append_json, open_nofollow
from vitlab.store.locks import hold_lock
from vitlab.trackers import delivery, server

MODULES = ("queue", "random", "string", "click", "mlflow", "yaml", "vitlab")
"""Names of files in a folder that a command is called from: of the standard library, of libraries, and of vitlab."""


@pytest.fixture
def foreign(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Enter a folder whose modules leave a mark if they are imported, and return the file of the marks."""
    folder, marks = tmp_path / "foreign", tmp_path / "marks"
    text = f"open({str(marks)!r}, 'a').write(__name__ + '\\n')\nraise ImportError('a foreign file')\n"
    for name in MODULES:
        file = folder / name / "__init__.py" if name == "vitlab" else folder / f"{name}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    monkeypatch.chdir(folder)
    monkeypatch.delenv("PYTHONSAFEPATH", raising=False)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, (LIGHT, HERE, HERE.parent))))
    return marks


def test_python_imports_from_the_current_folder_unless_told_not_to(foreign: Path) -> None:
    """Show that the marks of the other tests would be made."""
    subprocess.run([sys.executable, "-c", "import queue"], capture_output=True, check=False)
    assert foreign.read_text() == "queue\n"


def test_workers_import_nothing_from_the_current_folder(foreign: Path, tmp_path: Path) -> None:
    script = """
        import sys
        from pathlib import Path
        from job_helpers import ends, job
        from vitlab.executors.local import Local
        from vitlab.spec import RunSpec
        executor = Local(RunSpec(device="cpu", workers=1))
        executor.submit(job(Path(sys.argv[1]), "finish"))
        print(ends(executor, 1)["finish"].ending)
    """
    # As of the script 'vitlab', the driver's path lacks the current folder; that of a new Python would have it.
    script = f"import sys; sys.path.remove('')\n{textwrap.dedent(script)}"
    line = [sys.executable, "-c", script, str(tmp_path / "out")]
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    assert done.stdout == "done\n", done.stderr
    assert not foreign.exists()


def test_worker_command_imports_nothing_from_the_current_folder(foreign: Path, tmp_path: Path) -> None:
    command = WorkerCommand(job(tmp_path / "out", "finish"))
    subprocess.run(command.words, check=True)
    assert command.end("").ending == "done" and not foreign.exists()


@pytest.mark.slow
def test_detached_driver_imports_nothing_from_the_current_folder(foreign: Path, tmp_path: Path) -> None:
    file = tmp_path / "tiny.yaml"
    file.write_text("study: tiny\nseeds: 1\nbase: {data: synthetic, model: {type: vit, patch_size: 4, dim: 8, depth: 1, heads: 2}, train: {steps: 1}}\n")  # fmt: skip
    out = tmp_path / "out"
    with pytest.raises(TrialFailed, match="no arm matches 'nothing'"):
        cli_run._start_detached(file, out, {}, (), ["--out", str(out), "--only", "nothing"])
    assert not foreign.exists()


def test_delivering_process_imports_nothing_from_the_current_folder(foreign: Path) -> None:
    deliverer = delivery.TrackerProcess()
    deliverer._pipe.close()
    assert deliverer._process.wait(60) == 0, "it ends with its pipe"
    assert not foreign.exists()


def test_server_imports_nothing_from_the_results(foreign: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """uvicorn puts the current folder on the path itself, so that the server needs another one."""
    real, origins = subprocess.Popen, "import sys; sys.path.insert(0, '.'); import queue, click"

    def popen(command: list[str], **options: Any) -> Any:
        assert command[1:4] == ["-m", "mlflow", "server"]
        return real([sys.executable, "-c", origins], **options)

    monkeypatch.setattr(subprocess, "Popen", popen)
    responses = iter([False, True])  # the port is free, then the server responds
    monkeypatch.setattr(server, "Address", lambda *_: SimpleNamespace(is_reachable=lambda: next(responses)))
    with server.running_server(Path.cwd(), port=45_931) as started:
        assert started.wait(60) == 0
    assert not foreign.exists()


def test_git_starts_no_program_that_a_repository_names(tmp_path: Path) -> None:
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    (tmp_path / "study.yaml").write_text("study: one\n")
    for words in (["init", "-q"], ["add", "study.yaml"], ["commit", "-qm", "one"]):
        subprocess.run([*git, *words], check=True)
    head = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
    marks, hooks = tmp_path / "marks", tmp_path / "hooks"
    hooks.mkdir()
    for name in ("post-index-change", "post-checkout", "reference-transaction"):
        (hooks / name).write_text(f"#!/bin/sh\necho hook >> {marks}\n")
        (hooks / name).chmod(0o755)
    (tmp_path / ".gitattributes").write_text("* filter=mine\n")
    config = tmp_path / ".git" / "config"
    config.write_text(
        f'{config.read_text()}[core]\nfsmonitor = "echo fsmonitor >> {marks}; false"\nhooksPath = {hooks}\n'
        f'pager = "echo pager >> {marks}"\n[filter "mine"]\nclean = "echo clean >> {marks}; cat"\n'
    )
    (tmp_path / "study.yaml").write_text("study: two\n")  # of equal size
    assert checked_out_commit(tmp_path) == head
    assert not marks.exists()
    subprocess.run([*git, "status"], capture_output=True, check=True)
    assert "fsmonitor" in marks.read_text()  # the programs of this repository would run


@pytest.mark.parametrize("name", ["events.jsonl", "log.txt", "lock", "driver.log"])
def test_file_written_in_place_is_no_link(name: str, tmp_path: Path) -> None:
    target, out = tmp_path / "authorized_keys", tmp_path / "out"
    target.write_text("mine\n")
    place = out / "studies" / "tiny" / name if name == "driver.log" else out / name
    place.parent.mkdir(parents=True)
    place.symlink_to(target)
    with pytest.raises(UserError, match=f"{name} is a link"):
        match name:
            case "events.jsonl":
                append_json(place, {})
            case "log.txt":
                redirect_output_to_log(out)
            case "lock":
                with hold_lock(place):
                    pass
            case "driver.log":
                file = tmp_path / "tiny.yaml"
                file.write_text("study: tiny\nseeds: 1\nbase: {data: synthetic, model: {type: vit, patch_size: 4, dim: 8, depth: 1, heads: 2}, train: {steps: 1}}\n")  # fmt: skip
                cli_run._start_detached(file, out, {}, (), [])
    assert target.read_text() == "mine\n"


def test_files_written_in_place_have_the_rights_of_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o002)
    try:
        append_json(tmp_path / "events.jsonl", {})
        os.close(open_nofollow(tmp_path / "log.txt"))
        with hold_lock(tmp_path / "lock"):
            pass
    finally:
        os.umask(before)
    assert {stat.S_IMODE(file.stat().st_mode) for file in tmp_path.iterdir()} == {0o664}


def test_gc_deletes_nothing_behind_links(tmp_path: Path) -> None:
    mine, out = tmp_path / "mine", tmp_path / "out"
    for path in (mine / "sub" / "deep" / "file", mine / "sub" / "a.damaged-1", mine / "versions" / "ab" / "file"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("mine")
    (out / "trials" / "aa" / "bb").mkdir(parents=True)
    (out / "trials" / "aa" / ".DS_Store").touch()
    (out / "trials" / ".DS_Store").touch()
    (out / "trials" / "00").symlink_to(mine)
    (out / "trials" / "aa" / "cc").symlink_to(mine / "sub")
    (out / "studies").mkdir()
    (out / "studies" / "one").symlink_to(mine)
    before = sorted(mine.rglob("*"))
    done = CliRunner().invoke(cli, ["gc", "--yes", "--out", str(out)])
    assert done.exit_code == 0, done.output
    assert sorted(mine.rglob("*")) == before
    assert not (out / "trials" / "aa" / "bb").exists() and (out / "trials" / "aa" / ".DS_Store").exists()
    for name in ("trials", "studies"):
        (out / name).rename(out / f"my-{name}")
        (out / name).symlink_to(mine)
        with pytest.raises(UserError, match=f"{name} is a link"):
            CliRunner().invoke(cli, ["gc", "--yes", "--out", str(out)], catch_exceptions=False, standalone_mode=False)
        (out / name).unlink()
    assert sorted(mine.rglob("*")) == before
