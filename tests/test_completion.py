"""Tests of shell completion: what is offered for a line, without heavy imports, and in a real bash and fish."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from click.shell_completion import BashComplete
from click.testing import CliRunner

from vitlab.cli import COMMANDS, cli
from vitlab.cli.completion import VARIABLE
from vitlab.planning.packaged import packaged_studies
from vitlab.registry import SLOT_MODULES
from vitlab.store.files import write_json

HEAVY = ("torch", "torchvision", "mlflow", "pandas", "pyarrow", "ray", "matplotlib", "scipy", "sklearn")


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Change to a folder with two study files, and a plan whose arms are all that is read of it."""
    monkeypatch.chdir(tmp_path)
    Path("folder").mkdir()
    for file in ("mine.yaml", "folder/deep.yaml"):
        Path(file).write_text(yaml.safe_dump({"study": "stored"}))
    Path("notes.txt").write_text("")
    arms = [{"name": name} for name in ("baseline", "position=none", "position=sincos2d", "lr=0.1 (long)")]
    plan = Path("vitlab-runs", "studies", "stored", "plan.json")
    write_json(plan, {"arms": [*arms, {"name": "position=skipped", "skip": "does not fit"}]})


def offered(line: str, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the words that bash is given for a line with the cursor at its end."""
    words = line.split(" ")
    monkeypatch.setenv("COMP_WORDS", "\n".join(words))
    monkeypatch.setenv("COMP_CWORD", str(len(words) - 1))
    monkeypatch.setenv(VARIABLE, "bash_complete")
    items = BashComplete(cli, {}, "vitlab", VARIABLE).complete().splitlines()
    return [item.removeprefix("plain,") for item in items]


def test_commands_options_slots_and_components(monkeypatch: pytest.MonkeyPatch) -> None:
    assert offered("vitlab ", monkeypatch) == [*COMMANDS]
    assert offered("vitlab stat", monkeypatch) == ["status"]
    assert offered("vitlab run quickstart --retry", monkeypatch) == ["--retry-failed"]
    assert offered("vitlab report x --format ht", monkeypatch) == ["html"]
    assert offered("vitlab list ", monkeypatch) == [*SLOT_MODULES, "studies"]
    assert offered("vitlab show ", monkeypatch) == [*SLOT_MODULES, "study"]
    assert offered("vitlab show position si", monkeypatch) == ["sincos2d", "sinusoidal"]
    assert offered("vitlab show study qui", monkeypatch) == ["quickstart"]
    assert offered("vitlab run x --executor lo", monkeypatch) == ["local"]
    assert offered("vitlab new study --from quic", monkeypatch) == ["quickstart"]
    assert offered("vitlab new plugin acme --slot hea", monkeypatch) == ["head"]
    assert offered("vitlab show nonsense ", monkeypatch) == []


def test_studies(monkeypatch: pytest.MonkeyPatch) -> None:
    files = ["folder/deep.yaml", "mine.yaml"]
    for command in ("run", "plan", "check", "validate mine.yaml"):
        assert offered(f"vitlab {command} ", monkeypatch) == [*packaged_studies(), *files]
    assert offered("vitlab run folder/d", monkeypatch) == ["folder/deep.yaml"]
    assert offered("vitlab run ./mi", monkeypatch) in ([], ["./mine.yaml"])
    for command in ("report", "status", "compare mine.yaml", "explain", "logs", "ui"):
        assert offered(f"vitlab {command} ", monkeypatch) == ["stored", *files]
    assert offered("vitlab status --out elsewhere ", monkeypatch) == files


@pytest.mark.parametrize("study", ["stored", "mine.yaml", "stored@1234", "vitlab-runs/studies/stored"])
def test_arms(study: str, monkeypatch: pytest.MonkeyPatch) -> None:
    line = f"vitlab logs {study} --arm "
    assert offered(line, monkeypatch) == ["baseline", "position=none", "position=sincos2d", r"lr=0.1\ \(long\)"]
    assert offered(f"{line}position=s", monkeypatch) == ["position=sincos2d"]
    assert offered(f"vitlab run {study} --only b", monkeypatch) == ["baseline"]


@pytest.mark.parametrize("plan", ["{", "[]", '{"arms": [{}]}'])
def test_damaged_plan_offers_nothing(plan: str, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("vitlab-runs", "studies", "stored", "plan.json").write_text(plan)
    assert offered("vitlab logs stored --arm ", monkeypatch) == []


def test_bash_completes_without_heavy_imports(tmp_path: Path) -> None:
    """The command in this bash fails if a heavy module has been imported."""
    command = tmp_path / "bin" / "vitlab"
    command.parent.mkdir()
    check = f"assert not set({HEAVY}) & set(sys.modules)"
    command.write_text(
        f"#!{sys.executable}\nimport sys\nfrom vitlab.__main__ import main\n"
        f"try:\n    main()\nfinally:\n    {check}\n    print('plain,light')\n"
    )
    command.chmod(0o755)
    words = ["vitlab", "logs", "stored", "--arm", "position=s"]
    script = "\n".join(
        [
            CliRunner().invoke(cli, ["completion", "bash"]).stdout,
            f"COMP_WORDS=({shlex.join(words)})",
            f"COMP_CWORD={len(words) - 1}",
            f"_vitlab_completion {command}",
            'printf "%s\n" "${COMPREPLY[@]}"',
            'case "$COMP_WORDBREAKS" in *[=:]*) echo broken ;; esac',
        ]
    )
    done = subprocess.run(
        ["bash", "--norc", "-ic", script], capture_output=True, text=True, check=False, env={**os.environ}
    )
    assert done.stdout.splitlines() == ["position=sincos2d", "light"], done


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_scripts_of_other_shells(shell: str) -> None:
    script = CliRunner().invoke(cli, ["completion", shell]).stdout
    assert f"{VARIABLE}={shell}_complete" in script and "vitlab" in script
    unknown = CliRunner().invoke(cli, ["completion", "tcsh"])
    assert unknown.exit_code == 2 and "'bash', 'zsh', 'fish'" in unknown.stderr


def test_fish_completes_names_with_commas(tmp_path: Path) -> None:
    """The script splits a completion at its first comma only: arms of grids have commas in their names."""
    script = CliRunner().invoke(cli, ["completion", "fish"]).stdout
    assert 'string split -m 1 ","' in script and 'string split ","' not in script
    fish = shutil.which("fish")
    if fish is None:
        return
    arm = "position=none, dim=32"
    write_json(Path("vitlab-runs", "studies", "grid", "plan.json"), {"arms": [{"name": arm}]})
    command = tmp_path / "vitlab"
    command.write_text(f"#!{sys.executable}\nfrom vitlab.__main__ import main\nmain()\n")
    command.chmod(0o755)
    done = subprocess.run(
        [fish, "--no-config", "-c", f"{script}\ncomplete -C 'vitlab logs grid --arm pos'"],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "HOME": str(tmp_path)},
    )
    assert done.stdout.splitlines() == [arm], done
