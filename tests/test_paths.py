"""Tests of paths that no file can have, and of names that are a folder: one sentence in every command."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from vitlab import cli as commands
from vitlab.cli import cli
from vitlab.cli.errors import print_error
from vitlab.errors import UserError

STUDY = "study: tiny\nseeds: 1\nbase: {data: synthetic, model: {type: vit, patch_size: 4, dim: 8, depth: 1, heads: 2}, train: {steps: 1}}\n"  # fmt: skip
LONG = "x" * 300
READERS = ("run", "plan", "status", "studies", "gc", "report", "logs", "sync", "ui", "check")


def call(*words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """Return the exit code of a command, and what it prints on stderr."""
    monkeypatch.setattr(sys, "argv", ["vitlab", *words])
    with pytest.raises(SystemExit) as exited:
        commands.main()
        sys.exit(0)
    return int(exited.value.code or 0), capsys.readouterr().err


@pytest.mark.parametrize("name", READERS)
@pytest.mark.parametrize("kind", ["too long", "loop", "below a file"])
def test_impossible_output_folder_is_one_sentence(
    name: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("s.yaml").write_text(STUDY)
    Path("loop").symlink_to("loop")
    out = {"too long": LONG, "loop": "loop/out", "below a file": "s.yaml/out"}[kind]
    study = {"run": "s.yaml", "plan": "s.yaml", "check": "s.yaml", "studies": "", "gc": "", "logs": "abc"}
    what = study.get(name, "tiny")
    words = [name, out] if name == "sync" else [name, *([what] if what else []), "--out", out]
    code, err = call(*words, monkeypatch=monkeypatch, capsys=capsys)
    assert "Traceback" not in err and "fault of vitlab" not in err, err
    assert code in (0, 2) and len([line for line in err.splitlines() if line]) <= 4
    assert sorted(os.listdir()) == ["loop", "s.yaml"]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["run", "conf"], "conf is a folder here, not a study file"),
        (["run", "quickstart"], "quickstart is a folder here, not a study file"),
        (["status", "conf"], "study 'conf' has not been run in out"),
        (["report", "conf"], "study 'conf' has not been run in out"),
    ],
)
def test_name_of_a_folder_is_said_to_be_one(
    words: list[str], sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("conf", "quickstart"):
        Path(name).mkdir()
    with pytest.raises(UserError, match=sentence):
        CliRunner().invoke(cli, [*words, "--out", "out"], catch_exceptions=False, standalone_mode=False)


@pytest.mark.parametrize(
    "words",
    [
        ["run", "s.yaml", "--tracking-uri", "nope"],
        ["run", "s.yaml", "--tracking-uri", "http://"],
        ["run", "s.yaml", "--set", "run.tracker.uri=nope"],
        ["plan", "s.yaml", "--set", "run.tracker.uri=nope"],
        ["run", "s.yaml", "--executor", "slurm"],
        ["run", "s.yaml", "--only", "nothing"],
        ["ui", "nothing"],
    ],
)
def test_refused_command_line_writes_nothing(words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", "/usr/bin:/bin")  # without srun
    Path("s.yaml").write_text(STUDY)
    Path("out").mkdir()
    with pytest.raises(UserError):
        CliRunner().invoke(cli, [*words, "--out", "out"], catch_exceptions=False, standalone_mode=False)
    assert [path for path in Path("out").rglob("*") if path.suffix != ".lock"] in (
        [],
        [Path("out/studies"), Path("out/studies/tiny")],
    )


@pytest.mark.parametrize("number", [errno.EEXIST, errno.ENOTDIR, errno.EISDIR])
def test_file_in_place_of_a_folder_is_one_sentence(number: int, capsys: pytest.CaptureFixture[str]) -> None:
    """A file or a loop of links is in the place of a folder that a command would make."""
    assert print_error(OSError(number, os.strerror(number), "a/loop")) == 2
    assert capsys.readouterr().err.startswith(f"a/loop: {os.strerror(number).lower()}. ")


def test_loop_of_links_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises((RuntimeError, OSError)) as error:
        (tmp_path / "loop").resolve(strict=True)
    assert print_error(error.value) == 2
    assert capsys.readouterr().err.partition(". ")[0].endswith("loop: too many levels of symbolic links")


def test_dead_fork_server_says_why(tmp_path: Path) -> None:
    """What the server prints is part of the failure."""
    (tmp_path / "broken.py").write_text("import sys; print('no space for torch', file=sys.stderr); sys.exit(3)\n")
    code = (
        "import os; from vitlab.runner import fork_server; fork_server.PRELOAD = 'broken'\n"
        "try:\n    fork_server.start_process(os.getpid, (), 'x')\nexcept fork_server.ServerDied as error:\n    print(error)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert done.stdout == "the fork server died before it could start a worker: no space for torch\n"
