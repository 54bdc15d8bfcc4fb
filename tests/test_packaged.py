"""Tests of the studies that come with vitlab: names beside files, upgrades, and installations that are read only."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import warm
import yaml
from click.testing import CliRunner, Result

import vitlab
from vitlab.cli import cli
from vitlab.errors import UserError
from vitlab.planning import packaged

ROOT = Path(__file__).parents[1]
STUDY: dict[str, Any] = {
    "study": "demo-study",  # unlike the name of the file
    "question": "Does the position matter?",
    "base": {
        "data": {"type": "digits"},
        "model": {"type": "vit", "patch_size": 4, "dim": 8, "depth": 1, "heads": 2, "position": "sinusoidal"},
        "train": {"steps": 2, "batch_size": 16, "evaluations": 1},
    },
    "design": {"one_at_a_time": {"model.position": ["none"]}},
    "seeds": 2,
    "run": {"executor": "inline", "tracker": "none"},
}


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of packaged studies, which has ``demo``; the current folder is empty."""
    folder, here = tmp_path / "packaged", tmp_path / "here"
    for path in (folder, here):
        path.mkdir()
    monkeypatch.setattr(packaged, "FOLDER", folder)
    monkeypatch.chdir(here)
    package(folder)
    return folder


def package(folder: Path, **changes: Any) -> None:
    (folder / "demo.yaml").write_text("# Question   Does it?\n# Cost       Little.\n" + text(**changes))


def text(**changes: Any) -> str:
    return yaml.safe_dump({**STUDY, **changes}, sort_keys=False)


def vitlab_(*words: str) -> Result:
    result = CliRunner().invoke(cli, words, standalone_mode=False)
    if result.exception is not None and not isinstance(result.exception, UserError | SystemExit):
        raise result.exception
    return result


def test_every_study_of_the_repository_is_packaged() -> None:
    files = {file for file in (ROOT / "pipelines").rglob("*.yaml") if ".baseline" not in file.name}
    assert {file.resolve() for file in packaged.packaged_studies().values()} == files
    rows = json.loads(vitlab_("list", "studies", "--json").stdout)
    assert {row["name"] for row in rows} == {
        file.relative_to(ROOT / "pipelines").with_suffix("").as_posix() for file in files
    }
    for row in rows:
        assert row["question"].endswith("?") and row["cost"].endswith(".") and "arms x" in row["cost"], row
    assert [line for line in vitlab_("list").stdout.splitlines() if line.startswith("studies ")]


def test_show_prints_the_file(packages: Path) -> None:
    assert vitlab_("show", "study", "demo").stdout == (packages / "demo.yaml").read_text()
    error = vitlab_("show", "study", "demmo").exception
    assert isinstance(error, UserError) and "Did you mean 'demo'?" in str(error)


def test_unknown_name_is_refused_with_nearest(packages: Path) -> None:
    for command in ("run", "plan", "validate", "check"):
        error = vitlab_(command, "demmo").exception
        assert isinstance(error, UserError) and error.exit_code == 2
        assert "Did you mean 'demo'?" in str(error) and "vitlab list studies" in str(error)
    assert "named 'demo'" in str(vitlab_("plan", "demo.yaml").exception)
    assert "no study of this name" in str(vitlab_("plan", "x" * 5000).exception)
    assert list(Path().iterdir()) == []


def test_existing_path_precedes_packaged_study(packages: Path) -> None:
    Path("demo").write_text(text(seeds=5))
    result = vitlab_("validate", "demo")
    assert "2 arms, 10 trials" in result.stdout and "the file of this name is used" in result.stderr
    Path("demo").unlink()
    Path("demo").mkdir()
    result = vitlab_("plan", "demo")
    assert "demo is a folder here" in str(result.exception) and "comes with vitlab" in str(result.exception)
    Path("demo").rmdir()
    result = vitlab_("validate", "demo")
    assert "2 arms, 4 trials" in result.stdout and not result.stderr


@pytest.mark.usefixtures("no_report")
def test_upgrade_keeps_both_versions_of_a_packaged_study(packages: Path) -> None:
    """An upgrade of vitlab may bring another version of a study; the results of both are kept."""
    assert "4 trained" in vitlab_("run", "demo").stdout
    package(packages, seeds=3)
    result = vitlab_("run", "demo")
    assert "2 trained" in result.stdout
    assert "seeds 2 -> 3" in result.stderr and "Both are kept" in result.stderr
    assert json.loads(vitlab_("status", "demo", "--json").stdout)["arms"]["baseline"] == {"done": 3}
    assert {path.name for path in packages.iterdir()} == {"demo.yaml"}


def test_baseline_of_packaged_study_is_in_the_current_folder(packages: Path) -> None:
    assert "--baseline demo.baseline.yaml" in vitlab_("check", "demo", "--workflow").stdout


def test_python_takes_names(packages: Path) -> None:
    with pytest.raises(UserError, match=r"no study of this name comes .*; a study that was run is given by its file"):
        vitlab.run("demmo")


@pytest.mark.slow
def test_installation_is_never_written_to(tmp_path: Path) -> None:
    """Copies the package as a wheel has it, with files in the place of the link, where nothing can be written."""
    site, here = tmp_path / "site", tmp_path / "here"
    here.mkdir()
    shutil.copytree(Path(vitlab.__file__).parent, site / "vitlab", symlinks=False)
    before = {path: path.lstat().st_mtime_ns for path in site.rglob("*")}
    for path in (*before, site):
        path.chmod(0o555 if path.is_dir() else 0o444)
    environment = {**os.environ, "PYTHONPATH": str(site), "PYTHONDONTWRITEBYTECODE": "1"}
    words = ["vitlab", "run", "quickstart", "--smoke", "--executor", "inline", "--set", "design=null"]
    code = f"import sys, vitlab; assert 'site' in vitlab.__file__; sys.argv = {words!r}\n"
    try:
        done = warm.python(code + "from vitlab.__main__ import main; main()", here, environment)
    finally:
        for path in (site, *before):
            path.chmod(0o755)
    assert done.returncode == 0 and "1 combination of components ran" in done.stdout, done.stderr
    assert {path: path.lstat().st_mtime_ns for path in site.rglob("*")} == before
    assert [path.name for path in here.iterdir()] == ["vitlab-runs"]


BUILD = """
import sys
out, sys.path[:0] = sys.argv[1], ["."]
import build_backend
assert build_backend.build_editable and build_backend.get_requires_for_build_wheel
build_backend.build_sdist(out)
sys.argv = ["build"]  # setuptools has changed it
build_backend.build_wheel(out)
"""


@pytest.mark.slow
def test_two_builds_have_the_same_bytes_and_every_study(tmp_path: Path) -> None:
    """The second build has other times, in another folder, under another umask."""
    pytest.importorskip("setuptools", minversion="77")
    names = ("pyproject.toml", "MANIFEST.in", "build_backend.py", "docs/package.md", "LICENSE")
    for build in ("first", "second"):
        source = tmp_path / build / "source"
        shutil.copytree(ROOT / "vitlab", source / "vitlab", symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copytree(ROOT / "pipelines", source / "pipelines")
        shutil.copytree(ROOT / "docs" / "pages", source / "docs" / "pages", ignore=shutil.ignore_patterns("gallery"))
        for name in names:
            shutil.copyfile(ROOT / name, source / name)
        (source / "vitlab" / "lab.py").touch()
        done = subprocess.run(
            [sys.executable, "-c", BUILD, str(tmp_path / build)],
            cwd=source,
            capture_output=True,
            text=True,
            umask=0o022 if build == "first" else 0o077,
            env={name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "SOURCE_DATE_EPOCH")},
        )
        assert done.returncode == 0, done.stderr
    first, second = (sorted(path for path in (tmp_path / build).glob("vitlab-*")) for build in ("first", "second"))
    assert [path.suffix for path in first] == [".whl", ".gz"] and [path.name for path in first] == [
        path.name for path in second
    ]
    assert [path.read_bytes() for path in first] == [path.read_bytes() for path in second]
    with zipfile.ZipFile(first[0]) as wheel:
        studies = {name: wheel.read(name) for name in wheel.namelist() if name.startswith("vitlab/pipelines/")}
        assert "vitlab/cli/templates/new_study.yaml.j2" in wheel.namelist()
        pages = {name for name in wheel.namelist() if name.startswith("vitlab/pages/")}
    names = {str(file.relative_to(ROOT / "docs" / "pages")) for file in (ROOT / "docs" / "pages").rglob("*.[mp][dn]*")}
    assert pages >= {f"vitlab/pages/{name}" for name in names if not name.startswith("gallery/")}
    files = [file for file in (ROOT / "pipelines").rglob("*.yaml") if ".baseline" not in file.name]
    assert studies == {f"vitlab/pipelines/{file.relative_to(ROOT / 'pipelines')}": file.read_bytes() for file in files}
