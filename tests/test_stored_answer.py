"""Tests of the stored answer: printed as it was, without heavy imports, and refused after every kind of change."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

import vitlab
from vitlab import report
from vitlab.data.datasets.cifar import CIFAR10
from vitlab.data.datasets.idx import FashionMNIST
from vitlab.driver import stored_answer
from vitlab.driver.stored_answer import Request, StoredAnswer
from vitlab.lab import Answer
from vitlab.plan.values import Plan
from vitlab.spec import Choice
from vitlab.store.files import hold
from vitlab.trackers import Untracked, tracker_of

pytestmark = pytest.mark.usefixtures("no_figures")

STUDY = """\
study: stored
base:
  data: {type: synthetic, image_size: 8, train_images: 64, test_images: 16, validation: 0.25}
  model: {type: vit, patch_size: 4, dim: 8, depth: 1, heads: 2, mlp: own}
  train: {steps: 1, batch_size: 16}
design: {one_at_a_time: {model.heads: [1]}}
seeds: 2
run: {executor: inline, tracker: none}
"""
PLUGIN = """\
from vitlab.components.mlp import GeluMLP, mlp

@mlp.register("own")
class Own(GeluMLP):
    \"\"\"A plugin's.\"\"\"
"""
HEAVY = ("torch", "mlflow", "pydantic", "yaml", "pandas", "matplotlib", "scipy", "numpy", "statsmodels", "ray")


@dataclass
class Finished:
    """A study that was run, and the paths that its answer depends on."""

    folder: Path
    file: Path
    plugin: Path
    site: Path
    answer: Answer

    def find(self, **changes: Any) -> StoredAnswer | None:
        """Return the stored answer to the request of the run, or to one with other ``--set``."""
        return stored_answer.find(Request.of(self.file, self.folder / "out", changes, [self.plugin]))

    @property
    def trial(self) -> Path:
        """Folder of one of its trials."""
        trial = self.answer.plan.trials[0].trial
        return self.answer.store.trial(trial.key, trial.code).path


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Finished]:
    folder = tmp_path_factory.mktemp("stored")
    file, plugin, site = folder / "stored.yaml", folder / "own_mlp.py", folder / "site-packages"
    file.write_text(STUDY)
    plugin.write_text(PLUGIN)
    (site / "torch-1.0.dist-info").mkdir(parents=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [*sys.path, str(site)])
        (folder / "vitlab.py").write_text("")
        patch.setattr(stored_answer, "_package", lambda: iter([folder / "vitlab.py"]))
        # Plugins of other tests, whose files are gone, are in this process.
        earlier, imported = set(sys.modules), stored_answer.imported_files
        patch.setattr(
            stored_answer,
            "imported_files",
            lambda: {name: file for name, file in imported().items() if name not in earlier},
        )
        yield Finished(folder, file, plugin, site, vitlab.run(file, out=folder / "out", plugins=[plugin]))


@contextmanager
def written(file: Path, data: bytes, *, same_time: bool = False) -> Iterator[None]:
    """Write a file in place, and restore content and times afterwards."""
    before, state = file.read_bytes(), file.stat()
    file.write_bytes(data)
    if same_time:
        os.utime(file, ns=(state.st_atime_ns, state.st_mtime_ns))
    try:
        yield
    finally:
        file.write_bytes(before)
        os.utime(file, ns=(state.st_atime_ns, state.st_mtime_ns))


@contextmanager
def renamed(file: Path, name: str) -> Iterator[None]:
    file.rename(file.with_name(name))
    try:
        yield
    finally:
        file.with_name(name).rename(file)


@contextmanager
def variable(name: str, value: str) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(name, value)
        yield


@contextmanager
def version(value: str) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stored_answer, "__version__", value)
        yield


def reached(data: bytes) -> bytes:
    """Return the JSON of a result with another value of the first metric, of the same length."""
    place = data.index(b"val/accuracy") + len(b'val/accuracy": 0')
    digit = next(i for i in range(place, len(data)) if chr(data[i]).isdigit())
    return data[:digit] + (b"1" if data[digit : digit + 1] != b"1" else b"2") + data[digit + 1 :]


CHANGES: dict[str, Callable[[Finished], Any]] = {
    "edited study": lambda it: written(it.file, f"{STUDY}# a comment\n".encode()),
    "edited plugin": lambda it: written(it.plugin, f"{PLUGIN}    x = 1\n".encode()),
    "edited vitlab": lambda it: written(it.folder / "vitlab.py", b"x = 1\n"),
    "changed result of equal size and time": lambda it: written(
        it.trial / "result.json", reached((it.trial / "result.json").read_bytes()), same_time=True
    ),
    "missing result": lambda it: renamed(it.trial / "result.json", "gone"),
    "missing trial": lambda it: renamed(it.trial, "gone"),
    "missing weights": lambda it: renamed(it.trial / "weights.safetensors", "gone"),
    "missing page": lambda it: renamed(it.answer.report, "gone"),
    "edited plan": lambda it: written(it.answer.folder / "plan.json", b"{}"),
    "another torch": lambda it: renamed(it.site / "torch-1.0.dist-info", "torch-1.1.dist-info"),
    "another vitlab": lambda it: version("0.0.1"),
    "another data folder": lambda it: variable("VITLAB_DATA", "/nowhere"),
    "another terminal": lambda it: variable("COLUMNS", "61"),
    "running driver": lambda it: hold(it.answer.store.driver("stored")),
    "damaged answer": lambda it: written(it.answer.folder / "answer.json", b'{"request": '),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_answer_is_refused_after_a_change(change: Callable[[Finished], Any], finished: Finished) -> None:
    assert finished.find() is not None
    with change(finished):
        assert finished.find() is None
    assert finished.find() is not None, "the test has not restored what it changed"


def test_answer_is_refused_for_another_request(finished: Finished, monkeypatch: pytest.MonkeyPatch) -> None:
    out, plugins = finished.folder / "out", [finished.plugin]
    assert finished.find(**{"train.steps": 2}) is None
    assert stored_answer.find(Request.of(finished.file, out)) is None, "without the plugin"
    assert stored_answer.find(Request.of(finished.file, finished.folder, {}, plugins)) is None, "another output folder"
    assert stored_answer.find(Request.of(finished.folder / "none.yaml", out, {}, plugins)) is None
    monkeypatch.chdir(finished.folder)
    assert finished.find() is None, "relative paths would lead elsewhere"


def test_changes_in_another_order_are_another_request(finished: Finished) -> None:
    """A later change of ``--set`` overrides an earlier one."""
    first, second = {"train.steps": 2, "train": {"steps": 3}}, {"train": {"steps": 3}, "train.steps": 2}
    requests = [Request.of(finished.file, finished.folder, changes) for changes in (first, second, dict(first))]
    assert requests[0].digest == requests[2].digest != requests[1].digest


def test_files_of_a_plugin_that_reads_others_are_not_trusted() -> None:
    class Cleaned(CIFAR10):
        def read(self, split: Any) -> Any:
            raise NotImplementedError

    class Listed(Cleaned):
        def identity_files(self) -> list[Path]:
            return [Path("list.txt")]

    assert stored_answer._lists_its_files(CIFAR10) and stored_answer._lists_its_files(Listed)
    assert not stored_answer._lists_its_files(Cleaned)


def test_new_file_that_would_be_imported_instead_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = tmp_path / "a", tmp_path / "b"
    for folder in (first, second):
        folder.mkdir()
    (second / "helper.py").write_text("x = 1\n")
    monkeypatch.setattr(sys, "path", [str(first), str(second), *sys.path])
    places = list(stored_answer._earlier_places("helper", second / "helper.py"))
    assert {first / "helper.py", first / "helper" / "__init__.py"} <= set(places)
    assert not any(place.is_relative_to(second) for place in places)
    spec = importlib.util.find_spec("helper")
    assert spec is not None and spec.origin == str(second / "helper.py")
    for place in places:
        if place.suffix == ".py":  # Python imports each of them instead
            place.parent.mkdir(exist_ok=True)
            place.write_text("x = 2\n")
            importlib.invalidate_caches()
            spec = importlib.util.find_spec("helper")
            assert spec is not None and spec.origin == str(place)
            place.unlink()


def test_unreadable_study_has_a_request(tmp_path: Path) -> None:
    for name in ("x" * 5000 + ".yaml", "folder.yaml", "none.yaml"):
        (tmp_path / "folder.yaml").mkdir(exist_ok=True)
        assert stored_answer.find(Request.of(tmp_path / name, tmp_path)) is None


def test_stored_answer_equals_the_report(finished: Finished) -> None:
    stored, answer = finished.find(), finished.answer
    assert stored is not None
    assert stored.text == report.render(answer.plan, answer.store, "terminal")
    assert stored.json == report.render(answer.plan, answer.store, "json")
    assert (stored.trained, stored.cached, stored.failed, stored.folder) == (0, 4, 0, answer.folder)
    assert stored.head == "stored: 2 arms, 4 trials; nothing to train, 4 trained already"


def test_nothing_is_stored_in_doubt(finished: Finished, monkeypatch: pytest.MonkeyPatch) -> None:
    request = Request.of(finished.file, finished.folder / "out", {}, [finished.plugin])
    file, answer = finished.answer.folder / "answer.json", finished.answer

    def is_kept(answer: Answer = answer, request: Request = request, tracker: Any = None) -> bool:
        stored_answer.keep(answer, request, tracker or Untracked())
        return file.exists()

    class Elsewhere(Untracked):
        def files(self) -> Any:
            return None

    assert is_kept()
    assert not is_kept(tracker=Elsewhere()), "nobody can tell whether a server still has the runs"
    assert not is_kept(Answer(answer.plan, answer.store, 0, 3, 1, "", None)), "a trial has failed"
    assert not is_kept(Answer(answer.plan, answer.store, 0, 4, 0, "MLflow", None)), "not delivered"
    early = replace(request, time_ns=finished.plugin.stat().st_ctime_ns)
    assert not is_kept(request=early), "a plugin was edited after the request"
    monkeypatch.setattr(stored_answer, "_data_files", lambda plan: None)
    assert not is_kept(), "a data set does not list its files"
    monkeypatch.undo()
    with renamed(finished.trial / "result.json", "gone"):
        assert not is_kept()
    assert is_kept()
    with written(finished.file, STUDY.encode()):  # edited while the study ran, and edited back
        assert not is_kept()
    assert not is_kept()
    assert is_kept(request=Request.of(finished.file, finished.folder / "out", {}, [finished.plugin]))


def test_finished_study_imports_nothing_heavy(finished: Finished) -> None:
    """The answer of this process is given the request of another one, which has other paths and variables."""
    file = finished.answer.folder / "answer.json"
    out, plugin = finished.folder / "out", finished.plugin
    code = f"""
import json, sys
from pathlib import Path
from vitlab.cli import cli
from vitlab.driver import stored_answer
file = Path({str(file)!r})
data = json.loads(file.read_text())
request = stored_answer.Request.of(Path({str(finished.file)!r}), Path({str(out)!r}), {{}}, [Path({str(plugin)!r})])
data |= {{"request": request.digest, "terminal": stored_answer._terminal()}}
data["state"] = stored_answer._state(request.root, file.parent, data["trials"], data["files"])
file.write_text(json.dumps(data))
options = ["--out", {str(out)!r}, "--plugin", {str(plugin)!r}]
cli.main(["run", {str(finished.file)!r}, *options], standalone_mode=False)
print("HEAVY", [name for name in {HEAVY!r} if name in sys.modules])
"""
    before = file.read_bytes()
    try:
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    finally:
        file.write_bytes(before)
    stored = finished.find()
    assert stored is not None
    assert done.stdout.startswith(stored.text) and "0 trained: nothing has changed since the last run" in done.stdout
    assert done.stdout.splitlines()[-1] == "HEAVY []"
    assert done.stderr == f"{stored.head}\n"


@pytest.mark.parametrize("component", [FashionMNIST, CIFAR10])
def test_published_data_lists_every_place_it_is_searched_in(component: Any, tmp_path: Path) -> None:
    dataset = component(root=str(tmp_path))
    listed = set(dataset.identity_files())
    for layout in (".", *component.layouts):
        folder = tmp_path / layout
        folder.mkdir(exist_ok=True, parents=True)
        files = [folder / f"{name}.gz" for name in component.published]
        for file in files:
            file.write_bytes(b"")
        found = dataset._find()
        assert found is not None and set(found.values()) == set(files) <= listed
        for file in files:
            file.unlink()


def test_mlflow_lists_its_database_but_not_a_server(finished: Finished) -> None:
    plan: Plan = finished.answer.plan
    run = finished_run(None)
    files = tracker_of(plan, finished.answer.store, run).files()
    assert files is not None and finished.answer.store.root / "mlflow.db" in files
    assert tracker_of(plan, finished.answer.store, finished_run("http://127.0.0.1:9")).files() is None


def finished_run(uri: str | None) -> Any:
    """Return run settings with MLflow as the tracker."""
    from vitlab.spec import RunSpec

    return RunSpec(tracker=Choice("mlflow", {"uri": uri} if uri else {}))
