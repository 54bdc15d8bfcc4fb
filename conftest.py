"""Fixtures of all tests, of vitlab and of its plugins: random draws do not depend on the tests that ran before."""

from __future__ import annotations

import compileall
import gc
import os
import shutil
import sqlite3
import sys
from collections.abc import Generator, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import hypothesis
import pytest

# Makes trials in this process round as trials in workers do.
os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")

# The same examples in every run.  To search for new ones: pytest --hypothesis-profile=default
hypothesis.settings.register_profile("same", derandomize=True, deadline=None, database=None)
hypothesis.settings.load_profile("same")


def pytest_configure(config: pytest.Config) -> None:
    """Compile vitlab once, which otherwise each of the many processes does where none of them writes bytecode."""
    if sys.dont_write_bytecode and not hasattr(config, "workerinput"):
        for folder in ("vitlab", "plugins"):
            compileall.compile_dir(Path(__file__).parent / folder, quiet=2)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect no garbage while tests are collected, and keep what exists then out of later garbage collections.

    Imports and the list of tests leave little garbage, and each collection would visit all of it, for up to a second.
    Modules of tests are stored as pytest compiles them, which takes each process 10 s.
    """
    gc.disable()
    writes_none, sys.dont_write_bytecode = sys.dont_write_bytecode, False
    try:
        return (yield)
    finally:
        sys.dont_write_bytecode = writes_none
        gc.freeze()
        gc.enable()


@pytest.fixture(autouse=True)
def _torch_draws_the_same() -> None:
    """Seed torch, so that a test that draws without a seed of its own is reproducible."""
    torch = sys.modules.get("torch")  # not imported for tests that do not need it
    if torch is not None:
        torch.default_generator.manual_seed(0)  # torch.manual_seed records the stack for every backend: 0.8 ms a test
        if torch.cuda.is_available():
            torch.cuda.manual_seed_all(0)


@pytest.fixture(autouse=True)
def _messages_have_long_lines() -> None:
    """Forget the width that a parent process has set: messages in a pipe would be broken at it."""
    os.environ.pop("COLUMNS", None)


def _restore_plugin_files() -> Iterator[None]:
    """Forget plugin files that are loaded meanwhile: they are part of the code of every later trial of the process."""
    before = _loaded_files()
    yield
    for module, file in _loaded_files().items():
        if module not in before:
            loader = sys.modules["vitlab.registry.file_loader"]
            loader.remove_origin(file.origin)
            del loader.plugins.files[module]


def _loaded_files() -> dict[str, Any]:
    module = sys.modules.get("vitlab.registry.plugins")  # not imported for tests that do not need it
    return {} if module is None else dict(module.files)


@pytest.fixture(autouse=True)
def _plugin_files_end_with_the_test() -> Iterator[None]:
    """Forget the plugin files of a test."""
    yield from _restore_plugin_files()


@pytest.fixture(autouse=True, scope="module")
def _plugin_files_end_with_the_module() -> Iterator[None]:
    """Forget the plugin files of fixtures of a module."""
    yield from _restore_plugin_files()


@pytest.fixture
def no_report(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip the reports of studies that a test runs, whose figures take longer than small trainings.

    Studies of module-scoped fixtures still write theirs.
    """
    monkeypatch.setattr("vitlab.report.write", lambda *_: [])


@pytest.fixture(scope="module")
def no_figures() -> Iterator[None]:
    """Leave figures out of the reports of a module's studies: they take most of the time of small studies.

    For modules whose tests use no figures: ``pytestmark = pytest.mark.usefixtures("no_figures")``.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("vitlab.report.Report.figures", {})
        yield


@pytest.fixture(scope="module")
def unreachable_tracker() -> Iterator[None]:
    """Name an MLflow server that does not answer, which a study file alone may not do."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
        yield


@pytest.fixture(scope="module")
def meta_models_draw_nothing() -> Iterator[None]:
    """Build each model of timm on the meta device once, without initial values: exports try every architecture there.

    For modules that import timm: ``pytestmark = pytest.mark.usefixtures("meta_models_draw_nothing")``.
    """
    import timm
    import torch
    from timm.layers import weight_init

    draw, create = weight_init._trunc_normal_, timm.create_model
    models: dict[str, Any] = {}

    def create_once(name: str, **options: Any) -> Any:
        if torch.get_default_device().type != "meta":
            return create(name, **options)
        key = f"{name} {options}"
        if key not in models:
            try:
                models[key] = create(name, **options)
            except Exception as error:
                models[key] = error
        if isinstance(models[key], Exception):
            raise models[key].with_traceback(None)
        return models[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(weight_init, "_trunc_normal_", lambda x, *bounds: x if x.is_meta else draw(x, *bounds))
        patch.setattr(timm, "create_model", create_once)
        yield


@pytest.fixture
def unpainted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Write the files of pictures without painting them, for tests of numbers and file names."""
    monkeypatch.setattr(
        "matplotlib.figure.Figure.savefig", lambda self, file, **_: Path(file).write_bytes(b"unpainted")
    )


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide the data sets of this machine."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("VITLAB_DATA", raising=False)
    (tmp_path / "cwd").mkdir()
    monkeypatch.chdir(tmp_path / "cwd")


@pytest.fixture(autouse=True, scope="session")
def _disk_is_not_waited_for() -> Iterator[None]:
    """Have files of this process reach the disk at leisure: only a power failure would tell, and waiting takes time."""
    connect = sqlite3.dbapi2.connect

    def connect_at_leisure(*arguments: Any, **options: Any) -> sqlite3.Connection:
        connection: sqlite3.Connection = connect(*arguments, **options)
        with suppress(sqlite3.Error):  # what is wrong with the file shows at its first use
            connection.execute("pragma synchronous = off")
        return connection

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda _: None)
        patch.setattr(sqlite3.dbapi2, "connect", connect_at_leisure)  # as SQLAlchemy calls it
        yield


@pytest.fixture(autouse=True, scope="session")
def _code_of_vitlab_stays() -> None:
    """Read the code of vitlab once, as fork servers do, and not for every plan: nobody edits it meanwhile."""
    from vitlab.identity.code import preload_vitlab_digests

    preload_vitlab_digests()


@pytest.fixture(autouse=True, scope="session")
def _databases_of_mlflow_are_copies(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Have MLflow migrate one database, which takes seconds, and copy it for every other one of this process."""
    from vitlab.trackers import service

    migrate, first = service.create_tables, tmp_path_factory.mktemp("migrated") / "mlflow.db"

    def copy(database: Path) -> None:
        if not first.exists():
            migrate(first)
        shutil.copyfile(first, database)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(service, "create_tables", copy)
        yield
